"""check: layers: what their constructors ask for and can choose, weights by any name, and where dropout acts."""

import re

import numpy as np
import pytest

import needs
from mha_c import teach

# ---- constructors ----------------------------------------------------------------------------------------------------


def test_a_class_without_a_constructor():
    torch = needs.module("torch")

    class CausalAttention(torch.nn.Module):
        def forward(self, q, k, v):
            future = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1 + k.shape[-2] - q.shape[-2])
            scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
            return scores.masked_fill(future, float("-inf")).softmax(-1) @ v

    assert teach.check(CausalAttention).ok


def test_what_cannot_be_asked_is_an_answer():
    class Grows:
        """The more features it is asked with, the more it has."""

        def __init__(self, num_heads, key_size, d_model):
            self.W_q, self.W_k, self.W_v = np.random.default_rng(0).normal(size=(3, d_model + 1, num_heads, key_size))
            self.W_o = np.ones((num_heads, key_size, d_model + 1))

        def __call__(self, queries, keys, values):
            return queries

    class Flavoured(Grows):
        def __init__(self, num_heads, flavour):
            super().__init__(num_heads, 2, 4)

    answers = [teach.check(mine, "multi_head") for mine in (Grows, Flavoured, Grows(2, 2, 4))]
    assert [answer.mistakes for answer in answers[:2]] == [["not_judged"]] * 2
    assert "how its sizes follow from num_heads, key_size, d_model: give it a layer" in str(answers[0])
    assert "check does not know the argument flavour: give it a layer" in str(answers[1])
    assert not answers[2].ok


def test_an_error_in_a_constructor_is_an_answer():
    torch = needs.module("torch")

    class MultiHeadAttention(torch.nn.Module):
        def __init__(self, num_hiddens, num_heads):
            super().__init__()
            self.W_q = torch.nn.Linear(num_hiddens, num_hiddenz)  # noqa: F821

        def forward(self, x):
            return x

    for kind in (None, "multi_head", "causal_multi_head"):
        answer = teach.check(MultiHeadAttention, kind)
        assert answer.mistakes == ["raises"] and "NameError: name 'num_hiddenz'" in str(answer)
        assert "num_hiddenz)" in str(answer) and teach.laws(MultiHeadAttention, kind).broken == ["made"]


# ---- what a constructor can choose -----------------------------------------------------------------------------------


def may_be_causal(torch, wrong=""):
    class Attention(torch.nn.Module):
        def __init__(self, d_model, num_heads, causal=False, bias=False):
            super().__init__()
            self.num_heads, self.causal = num_heads, causal
            self.wq, self.wk, self.wv, self.wo = (torch.nn.Linear(d_model, d_model, bias=bias) for _ in range(4))
            self.gain = torch.nn.Parameter(torch.ones(d_model)) if wrong == "gain" and bias else 1

        def forward(self, q, k, v, mask=None):
            heads = (f(x).view(*x.shape[:2], self.num_heads, -1) for f, x in ((self.wq, q), (self.wk, k), (self.wv, v)))
            q, k, v = (x.transpose(1, 2) for x in heads)
            scores = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5
            if mask is not None and not (wrong == "mask" and self.causal):
                scores = scores.masked_fill(~mask[:, None], -1e9)
            if self.causal and wrong != "ignored":
                past = torch.ones(scores.shape[2:]).tril(int(wrong == "next")) > 0
                scores = scores.masked_fill(~past, -1e9)
            return self.wo((scores.softmax(-1) @ v).transpose(1, 2).flatten(2) * self.gain)

    return Attention


@pytest.mark.parametrize(
    ("wrong", "id"),
    [("next", "mask_off_by_one"), ("ignored", "mask_ignored"), ("mask", "together"), ("gain", "extra_parameter")],
)
def test_flags_of_a_constructor_are_tried(wrong, id):
    torch = needs.module("torch")
    assert teach.check(may_be_causal(torch), "multi_head").ok
    answer = teach.check(may_be_causal(torch, wrong), "multi_head")
    assert answer.mistakes[0] == id and not answer.ok
    assert ("this is so with causal=True" in str(answer)) == (wrong in ("next", "ignored"))


def test_a_causal_layer_that_need_not_be():
    class OfOneInput(may_be_causal(needs.module("torch"))):
        def forward(self, x):
            return super().forward(x, x, x)

    assert teach.check(OfOneInput, "causal_multi_head").ok and teach.check(OfOneInput, "multi_head").ok


def test_what_a_constructor_hides_in_an_unknown_way_is_not_tried():
    class Window(may_be_causal(needs.module("torch"))):
        def __init__(self, d_model, num_heads, window_size=None):
            super().__init__(d_model, num_heads)

    answer = teach.check(Window, "multi_head")
    assert answer.mistakes == ["untried"] and "constructor's argument window_size does was not tried." in str(answer)
    assert teach.check(Window(8, 2), "multi_head").ok


# ---- one input -------------------------------------------------------------------------------------------------------


def heads_of_their_own(torch, above=0):
    nn = torch.nn

    class MultiHeadAttention(nn.Module):
        def __init__(self, n_embd, n_head):
            super().__init__()
            self.query, self.key, self.value = (
                nn.ModuleList(nn.Linear(n_embd, n_embd // n_head, bias=False) for _ in range(n_head)) for _ in range(3)
            )
            self.proj = nn.Linear(n_embd, n_embd)

        def forward(self, x):
            heads = []
            for query, key, value in zip(self.query, self.key, self.value):
                scores = query(x) @ key(x).transpose(1, 2) / query.out_features**0.5
                seen = torch.ones(scores.shape[1:], dtype=torch.bool).tril(above)
                heads.append(scores.masked_fill(~seen, float("-inf")).softmax(-1) @ value(x))
            return self.proj(torch.cat(heads, dim=-1))

    return MultiHeadAttention


def test_one_input_may_be_causal_where_a_mistake_shows_the_future():
    torch = needs.module("torch")
    assert teach.check(heads_of_their_own(torch)).ok
    assert teach.check(heads_of_their_own(torch, 1)).mistakes == ["mask_off_by_one"]


def test_what_attends_to_itself_may_take_its_input_three_times():
    torch = needs.module("torch")

    def always(wrong=""):
        class Always(may_be_causal(torch, wrong)):
            def __init__(self, d_model, num_heads):
                super().__init__(d_model, num_heads, causal=True)

        return Always

    class Mixed(always()):
        def forward(self, q, k, v):
            return super().forward(q, (k + v) / 2, v)

    right = teach.check(may_be_causal(torch), "causal_multi_head")
    assert right.ok and "which of them a line reads was not tried" in str(right)
    assert teach.check(may_be_causal(torch, "next"), "causal_multi_head").mistakes == ["mask_off_by_one"]
    assert teach.check(always("next")).mistakes == ["mask_off_by_one"]  # whose kind nothing tells but its numbers
    assert teach.check(Mixed).mistakes == ["unknown"]  # with one input its numbers would be right


def test_laws_change_no_values_that_are_the_keys():
    torch = needs.module("torch")

    class CrossAttention(torch.nn.Module):
        def __init__(self, dim, num_heads):
            super().__init__()
            self.num_heads = num_heads
            self.to_q, self.to_k, self.to_v, self.to_out = (torch.nn.Linear(dim, dim) for _ in range(4))

        def forward(self, x, context, context_mask=None):
            pairs = (self.to_q, x), (self.to_k, context), (self.to_v, context)
            q, k, v = (f(y).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for f, y in pairs)
            scores = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5
            if context_mask is not None:
                scores = scores.masked_fill(~context_mask[:, None, None], -1e9)
            return self.to_out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    assert teach.check(CrossAttention, "multi_head").ok and teach.laws(CrossAttention, "multi_head").ok


# ---- weights by any name ---------------------------------------------------------------------------------------------


def layer(**children):
    torch = needs.module("torch")

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.num_heads, self.names = 2, list(children)
            for name, bias in children.items():
                setattr(self, name, torch.nn.Linear(8, 8, bias=bias))

        def forward(self, x):
            q, k, v, last = (getattr(self, name) for name in self.names)
            q, k, v = (f(x).reshape(*x.shape[:2], 2, 4).transpose(1, 2) for f in (q, k, v))
            out = (q @ k.transpose(-1, -2) / 2).softmax(-1) @ v
            return last(out.transpose(1, 2).reshape(x.shape))

    return Layer


def test_weights_by_names_that_say_nothing():
    mine = layer(alpha=True, beta=False, gamma=True, delta=False)
    names = {"W_q": "alpha", "W_k": "beta", "W_v": "gamma", "W_o": "delta"}
    assert teach.check(mine, "multi_head", weights=names).ok and teach.check(mine(), "multi_head", weights=names).ok
    says = r"does not find them in alpha, beta, delta, gamma; say which they are: .*weights=\{\"W_q\": \"alpha\""
    answer = teach.check(mine(), "multi_head")
    assert answer.mistakes == ["not_judged"] and re.search(says, str(answer))


def test_weights_tell_more_than_a_name():
    Attention = layer(W_q=True, W_k=True, W_v=True, W_o=True)
    answer = teach.check(Attention())
    assert answer.ok and "it was taken for multi_head, because of its weights" in str(answer)


# ---- dropout ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "id"), [("weights", ""), ("scores", "dropout_on_scores"), ("values", "dropout_elsewhere")]
)
def test_where_dropout_acts(where, id):
    """Of a layer, too, in evaluation mode as it was, and with torch's random numbers as they were."""
    torch = needs.module("torch")

    class DotProductAttention(torch.nn.Module):
        def __init__(self, dropout):
            super().__init__()
            self.dropout = torch.nn.Dropout(dropout)

        def at(self, here, x):
            return self.dropout(x) if here == where else x

        def forward(self, queries, keys, values, valid_lens=None):
            scores = self.at("scores", queries @ keys.transpose(1, 2) / queries.shape[-1] ** 0.5)
            if valid_lens is not None:
                lens = valid_lens.reshape(len(queries), -1, 1)
                scores = scores.masked_fill(torch.arange(keys.shape[1]) >= lens, -1e6)
            return self.at("weights", scores.softmax(-1)) @ self.at("values", values)

    for mine in (DotProductAttention, DotProductAttention(0.3)):
        torch.manual_seed(1)
        expected = torch.rand(3)
        torch.manual_seed(1)
        answer = teach.check(mine)
        assert answer.mistakes == ([id] if id else []), answer
        assert torch.equal(torch.rand(3), expected)


def test_a_width_by_an_unknown_name_is_told_by_its_words():
    """It was taken for the number of heads, which was left: a table of width 1, which broadcasts, was always right."""
    torch = needs.module("torch")

    class PositionalEncoding(torch.nn.Module):
        def __init__(self, d_hid, base=10_000):
            super().__init__()
            angle = torch.arange(64.0)[:, None] / base ** (torch.arange(d_hid) // 2 * 2 / d_hid)
            self.register_buffer("table", torch.where(torch.arange(d_hid) % 2 == 0, angle.sin(), angle.cos()))

        def forward(self, x):
            return x + self.table[: x.shape[1]]

    class Wrong(PositionalEncoding):
        def __init__(self, d_hid):
            super().__init__(d_hid, 1000)

    class MultiHeadAttention(torch.nn.Module):
        def __init__(self, emb_width, num_heads):
            super().__init__()
            self.num_heads = num_heads
            self.W_q, self.W_k, self.W_v, self.W_o = (torch.nn.Linear(emb_width, emb_width) for _ in range(4))

        def forward(self, x):
            q, k, v = (w(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for w in (self.W_q, self.W_k, self.W_v))
            return self.W_o(((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v).transpose(1, 2).flatten(2))

    assert teach.check(PositionalEncoding).ok
    assert teach.check(Wrong, "positional_encoding").mistakes == ["wrong_exponent"]
    assert teach.check(MultiHeadAttention).ok


def test_what_adds_positions_to_the_scores_is_of_no_kind():
    """ALiBi, T5 and Shaw are right; the book has no such function, and the line that adds them is no mistake."""
    torch = needs.module("torch")

    class Attention(torch.nn.Module):
        def __init__(self, d_model, num_heads, use_alibi=False):
            super().__init__()
            self.num_heads, self.use_alibi = num_heads, use_alibi
            self.W_q, self.W_k, self.W_v, self.W_o = (torch.nn.Linear(d_model, d_model) for _ in range(4))

        def forward(self, x):
            q, k, v = (w(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for w in (self.W_q, self.W_k, self.W_v))
            scores = q @ k.mT / q.shape[-1] ** 0.5
            if self.use_alibi:
                steps = torch.arange(x.shape[1])
                scores = (
                    scores - (steps[:, None] - steps).abs() / 2 ** torch.arange(1, self.num_heads + 1)[:, None, None]
                )
            return self.W_o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    answer = teach.check(Attention(8, 2, use_alibi=True), "multi_head")
    assert answer.ok is None and answer.mistakes == ["not_judged"] and "alibi" in str(answer)
    assert teach.check(Attention(8, 2), "multi_head").ok
    assert teach.check(Attention, "multi_head").mistakes == ["untried"]


def test_a_flag_of_relative_positions_chooses_no_biases():
    """has_relative_attention_bias=True of T5 was asked for biases of W_q, and its table was a parameter too many."""
    torch = needs.module("torch")

    class SelfAttention(torch.nn.Module):
        def __init__(self, d_model, num_heads, has_relative_attention_bias=False):
            super().__init__()
            self.num_heads = num_heads
            self.W_q, self.W_k, self.W_v, self.W_o = (torch.nn.Linear(d_model, d_model, bias=False) for _ in range(4))
            self.table = torch.nn.Embedding(9, num_heads) if has_relative_attention_bias else None

        def forward(self, x):
            q, k, v = (w(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for w in (self.W_q, self.W_k, self.W_v))
            scores = q @ k.mT / q.shape[-1] ** 0.5
            if self.table is not None:
                steps = torch.arange(x.shape[1])
                scores = scores + self.table((steps - steps[:, None]).clamp(-4, 4) + 4).permute(2, 0, 1)
            return self.W_o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    assert teach.check(SelfAttention, "multi_head").mistakes == ["untried"]


OF_ITS_STEPS = """
class Mine(nn.Module):
    def __init__(self, num_heads, sequence_length, hidden_size):
        super().__init__()
        self.shape, self.d = (sequence_length, num_heads, hidden_size // num_heads), hidden_size
        self.q, self.k, self.v, self.out = (nn.Linear(hidden_size, hidden_size) for _ in range(4))

    def forward(self, x):
        q, k, v = (each(x).reshape(len(x), *self.shape).transpose(1, 2) for each in (self.q, self.k, self.v))
        weights = (q @ k.transpose(2, 3) / self.shape[2] ** 0.5).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(len(x), self.shape[0], self.d))


class PositionEncoder(nn.Module):
    def __init__(self, seq_len, hidden_size):
        super().__init__()
        angles = torch.arange(seq_len)[:, None] / 10000 ** (torch.arange(0, hidden_size, 2) / hidden_size)
        self.table = torch.stack([angles.sin(), angles.cos()], -1).flatten(1)

    def forward(self, x):
        return x + self.table[None]
"""


def test_a_layer_for_so_many_steps_takes_so_many():
    """As a transformer for pictures has them: its number of patches is that of each call."""
    torch = needs.module("torch")
    room = {"torch": torch, "nn": torch.nn}
    exec(OF_ITS_STEPS, room)
    assert teach.check(room["Mine"]).ok and teach.check(room["PositionEncoder"]).ok
    exec(OF_ITS_STEPS.replace("self.shape[2] ** 0.5", "self.d ** 0.5"), room)
    assert teach.check(room["Mine"]).mistakes == ["scale_num_hiddens"]
