"""check: what students write in other forms: what they return, how they are called, what they call their weights."""

import numpy as np
import pytest

import needs
from checks import softmax
from mha_c import teach
from mha_c.teach import book

# ---- what is returned ------------------------------------------------------------------------------------------------


def weights(queries, keys, valid_lens):
    return book.masked_softmax(queries @ keys.swapaxes(1, 2) / np.sqrt(queries.shape[-1]), valid_lens)


def test_more_than_an_output():
    def three(queries, keys, values, valid_lens=None):
        shares = weights(queries, keys, valid_lens)
        return shares @ values, shares, "more"

    def weights_first(queries, keys, values, valid_lens=None):
        shares = weights(queries, keys, valid_lens)
        return shares, shares @ values

    def weights_alone(queries, keys, values, valid_lens, W_q, W_k, w_v):
        features = np.tanh((queries @ W_q)[:, :, None] + (keys @ W_k)[:, None])
        return book.masked_softmax(features @ w_v, valid_lens)

    assert teach.check(three, "dot_product").ok
    answer = teach.check(weights_first, "dot_product")
    assert answer.mistakes == ["no_values"] and "the attention weights, alone or first" in str(answer)
    assert teach.check(weights_alone, "additive").mistakes == ["no_values"]


def test_no_output():
    def named(queries, keys, values, valid_lens=None):
        return {"output": book.dot_product(queries, keys, values, valid_lens).tolist()}

    answer = teach.check(named, "dot_product")
    assert answer.mistakes == ["raises"]
    assert str(answer).startswith("Your named gives no output for 6 of 6 probes.")
    assert "Here it gives a dict: return the output, or (output, weights)" in str(answer)


# ---- lengths in one form only ----------------------------------------------------------------------------------------


def test_lengths_of_one_form():
    def no_none(queries, keys, values, valid_lens):
        lens = valid_lens.reshape(len(queries), -1, 1)
        scores = queries @ keys.swapaxes(1, 2) / np.sqrt(queries.shape[-1])
        return book.softmax(np.where(np.arange(keys.shape[1]) < lens, scores, -1e6), -1) @ values

    def one_axis(queries, keys, values, valid_lens=None):
        scores = queries @ keys.swapaxes(1, 2) / np.sqrt(queries.shape[-1])
        if valid_lens is not None:
            scores = np.where(np.arange(keys.shape[1]) < valid_lens[:, None, None], scores, -1e6)
        return book.softmax(scores, -1) @ values

    answer = teach.check(no_none, "dot_product")
    assert answer.mistakes == ["raises"] and "This is so wherever valid_lens is None, and nowhere else." in str(answer)
    answer = teach.check(one_axis, "dot_product")  # those of queries get one more axis, which is no result
    assert answer.ok and "its valid_lens is one length for each item, (batch,)" in str(answer)
    assert "with a length for each query, (batch, queries), which the book's takes, too, it gives no" in str(answer)


# ---- likely slips ----------------------------------------------------------------------------------------------------


def slip(queries, keys, values, valid_lens, divisor, hidden):
    scores = queries @ keys.swapaxes(1, 2) / divisor
    if valid_lens is not None:
        scores = np.where(np.arange(keys.shape[1]) < valid_lens.reshape(len(keys), -1, 1), scores, hidden)
    return book.softmax(scores, -1) @ values


@pytest.mark.parametrize(
    ("id", "kind", "mine"),
    [
        ("mask_small", "dot_product", lambda q, k, v, lens=None: slip(q, k, v, lens, np.sqrt(q.shape[-1]), -1)),
        ("mask_zero", "dot_product", lambda q, k, v, lens=None: slip(q, k, v, lens, np.sqrt(q.shape[-1]), -1e-9)),
        ("scale_queries", "dot_product", lambda q, k, v, lens=None: slip(q, k, v, lens, np.sqrt(q.shape[1]), -1e9)),
        ("batch_for_steps", "positional_encoding", lambda x: np.array(
            [row + book.positional_encoding(np.zeros((1, len(x), x.shape[2])))[0][i] for i, row in enumerate(x)])),
        ("residual", "multi_head", lambda queries, keys, values, valid_lens, W_q, W_k, W_v, W_o, num_heads: queries
         + book.multi_head(queries, keys, values, valid_lens, W_q, W_k, W_v, W_o, num_heads)),
    ],
)  # fmt: skip
def test_likely_slips(id, kind, mine):
    assert teach.check(mine, kind).mistakes == [id]


def test_the_i_of_the_formula_counts_pairs():
    def by_columns(X):
        out = X.copy()
        for t, i in np.ndindex(*X.shape[1:]):
            out[:, t, i] += (np.cos if i % 2 else np.sin)(t / 10000 ** (2 * i / X.shape[2]))
        return out

    answer = teach.check(by_columns, "positional_encoding")
    assert answer.mistakes == ["wrong_exponent"] and "counts pairs of columns" in str(answer)


def test_only_the_line_that_is_wrong_is_marked():
    def by_hiddens(queries, keys, values, valid_lens, W_q, W_k, W_v, W_o, num_heads):
        queries = queries / np.sqrt(num_heads)
        return book.multi_head(queries, keys, values, valid_lens, W_q, W_k, W_v, W_o, num_heads)

    answer = teach.check(by_hiddens, "multi_head")
    assert answer.mistakes == ["scale_num_hiddens"]
    assert str(answer).count("in the book:") == 1 and "num_hiddens=1" not in str(answer)


# ---- how it is called, and what its weights are called ---------------------------------------------------------------


class SelfAttention:
    """Arrays as weights by short names, `forward` in place of a call, one input."""

    def __init__(self, dim, heads):
        self.heads = heads
        self.Wq, self.Wk, self.Wv, self.Wo = np.random.default_rng(0).standard_normal((4, dim, dim))

    def forward(self, x):
        return book.multi_head(x, x, x, None, self.Wq, self.Wk, self.Wv, self.Wo, self.heads)


class Unscaled(SelfAttention):
    def forward(self, x):
        return super().forward(x * 2**0.25) / 2**0.25  # heads of 2 features


def test_self_attention():
    answer = teach.check(SelfAttention(6, 3), "multi_head")
    assert answer.ok and any("self-attention" in note for note in answer.notes)
    assert teach.check(SelfAttention, "multi_head").ok and teach.laws(SelfAttention(6, 3), "multi_head").ok
    assert teach.check(Unscaled(6, 3), "multi_head").mistakes == ["no_scale"]
    assert teach.check(lambda x: book.causal(x, x, x), "causal").ok


def of_a_sentence(q, k, v, seen):
    """Its products are those of a batch, too; what it sees, of len(q) queries and len(k) keys, is not."""
    return softmax(np.where(seen, q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5, -1e9)) @ v


def causal_attention(q, k, v):
    return of_a_sentence(q, k, v, np.tri(len(q), len(k), dtype=bool))


def window_attention(q, k, v, window):
    i, j = np.ogrid[: len(q), : len(k)]
    return of_a_sentence(q, k, v, (j <= i) & (j > i - window))


def dot_product_attention(q, k, v, valid_lens=None):
    every = np.full(len(q), len(k)) if valid_lens is None else np.asarray(valid_lens)
    return of_a_sentence(q, k, v, np.arange(len(k)) < every.reshape(-1, 1))


@pytest.mark.parametrize("mine", [causal_attention, window_attention, dot_product_attention])
def test_a_sentence_that_goes_through_as_a_batch_of_one(mine):
    answer = teach.check(mine)
    assert answer.ok and "it was given one item, without a batch axis" in str(answer)


def test_a_last_projection_that_was_forgotten():
    def no_last(queries, keys, values, valid_lens, W_q, W_k, W_v, num_heads):
        one = np.eye(W_q.shape[1])
        return book.multi_head(queries, keys, values, valid_lens, W_q, W_k, W_v, one, num_heads)

    def summed(queries, keys, values, valid_lens, W_q, W_k):
        return book.additive(queries, keys, values, valid_lens, W_q, W_k, np.ones(W_q.shape[1]))

    def by_another_name(queries, keys, values, valid_lens, W_q, W_k, num_heads, *, last):
        return values

    assert teach.check(no_last, "multi_head").mistakes == ["no_output_projection"]
    assert teach.check(summed, "additive").mistakes == ["no_w_v"]
    answer = teach.check(by_another_name, "multi_head")
    assert answer.mistakes == ["not_judged"] and "W_v is missing" in str(answer)


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")  # torch before 2.1
def test_torchs_layers_by_other_names():
    torch = needs.module("torch")

    class Heads(torch.nn.Module):
        def __init__(self, d_model, n_heads, last="out_proj"):
            super().__init__()
            self.n_heads = n_heads
            for name in ("q_proj", "k_proj", "v_proj", *([last] if last else [])):
                setattr(self, name, torch.nn.Linear(d_model, d_model))
            self.last = [last]

        def forward(self, q, k, v, valid_lens=None):
            q, k, v = (project(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
                       for project, x in ((self.q_proj, q), (self.k_proj, k), (self.v_proj, v)))  # fmt: skip
            scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
            if valid_lens is not None:
                hidden = torch.arange(k.shape[2]) >= valid_lens.reshape(len(q), 1, -1, 1)
                scores = scores.masked_fill(hidden, float("-inf"))
            out = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
            return getattr(self, self.last[0])(out) if self.last[0] else out

    assert teach.check(Heads(8, 2), "multi_head").ok and teach.check(Heads, "multi_head").ok
    assert teach.check(Heads(8, 2, ""), "multi_head").mistakes == ["no_output_projection"]
    assert teach.check(Heads(8, 2, "finally"), "multi_head").ok  # the only one that is left


def test_torchs_layer_over_the_batch_with_a_mask_of_padding():
    torch = needs.module("torch")

    class Wrapped(torch.nn.Module):
        def __init__(self, embed_dim, num_heads):
            super().__init__()
            self.mha = torch.nn.MultiheadAttention(embed_dim, num_heads)

        def forward(self, queries, keys, values, key_padding_mask=None):
            return self.mha(queries, keys, values, key_padding_mask=key_padding_mask)[0]

    class OfItself(Wrapped):
        def forward(self, x, key_padding_mask=None):
            return super().forward(x, x, x, key_padding_mask)

    # One item, or as many items as steps, is taken; that is no batch.
    for each in (Wrapped, OfItself):
        assert teach.check(each).mistakes == ["batch_for_steps"]


def test_a_logarithm_for_a_root():
    def mine(q, k, v, valid_lens=None):
        return book.masked_softmax(q @ k.swapaxes(1, 2) / np.log(q.shape[-1]), valid_lens) @ v

    assert teach.check(mine, "dot_product").mistakes == ["scale_log"]
