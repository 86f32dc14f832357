"""check on what a fresh trial found: what cannot be asked is an answer, and kinds of layers that numbers tell."""

import numpy as np
import pytest

import needs
from mha_c import teach


def soft(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def test_what_cannot_be_asked_is_an_answer():
    class Grows:
        """The more features it is asked with, the more it has."""

        def __init__(self, num_heads, key_size, d_model):
            self.W_q, self.W_k, self.W_v = np.random.default_rng(0).normal(size=(3, d_model, num_heads, key_size))
            self.W_o = np.ones((num_heads, key_size, d_model))

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


def heads_alone(swapped=False, scale=0.5):
    def multi_head_attention(Q, K, V, n_heads):
        cut = [
            [x[:, i::n_heads] if swapped else part for i, part in enumerate(np.split(x, n_heads, 1))] for x in (Q, K, V)
        ]
        return np.concatenate([soft(q @ k.T / q.shape[1] ** scale) @ v for q, k, v in zip(*cut)], axis=1)

    return multi_head_attention


def test_heads_without_weights():
    answer = teach.check(heads_alone())
    assert answer.mistakes == ["no_mask"] and "it takes no weights" in str(answer)
    assert teach.check(heads_alone(scale=1)).mistakes == ["scale_d", "no_mask"]
    assert not teach.check(heads_alone(swapped=True)).ok


def masked_with(factor, times=1.0):
    def scaled_dot_product(q, k, v, mask=None):
        logits = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]) * times
        return soft(logits if mask is None else logits + mask * factor) @ v

    return scaled_dot_product


@pytest.mark.parametrize(("factor", "id"), [(-2.0, "mask_small"), (-1e-9, "mask_ignored"), (-1.0, "mask_inverted")])
def test_a_factor_tells_a_mask_of_ones_from_one_that_is_added(factor, id):
    """-1 times a mask may be either: an added one that is subtracted is likelier."""
    assert teach.check(masked_with(factor), "dot_product").mistakes == [id]
    assert "hides a key" in teach.check(masked_with(-1e9), "dot_product").mask.partition(",")[0]


def test_a_padding_mask_that_is_added_beside_a_triangle():
    def causal_attention(q, k, v, attention_mask=None, sign=1):
        s = q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1])
        s = np.where(np.tri(*s.shape[1:], dtype=bool), s, -np.inf)
        return soft(s if attention_mask is None else s + sign * attention_mask) @ v

    def subtracted(q, k, v, attention_mask=None):
        return causal_attention(q, k, v, attention_mask, -1)

    def right(q, k, v, attention_mask=None):
        return causal_attention(q, k, v, attention_mask)

    answer = teach.check(right, "causal")
    assert answer.ok and "is added" in answer.mask
    assert not teach.check(subtracted, "causal").ok


def test_a_class_without_a_constructor():
    torch = needs.module("torch")

    class CausalAttention(torch.nn.Module):
        def forward(self, q, k, v):
            future = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1 + k.shape[-2] - q.shape[-2])
            scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
            return scores.masked_fill(future, float("-inf")).softmax(-1) @ v

    assert teach.check(CausalAttention).ok


def heads_of_their_own(torch, above=0, rate=0.0, on_values=False):
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
