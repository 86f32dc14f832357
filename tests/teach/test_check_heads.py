"""check: heads: cut, joined, kept in lists, and sharing their keys."""

import numpy as np
import pytest

import needs
from checks import attended, softmax
from mha_c import teach
from mha_c.teach import book


def test_heads_laid_end_to_end_are_one_sentence():
    def mine(q, k, v, valid_lens, W_q, W_k, W_v, W_o, num_heads):
        def split(x):
            return np.concatenate(np.split(x, num_heads, axis=-1), axis=0)

        lens = None if valid_lens is None else np.repeat(valid_lens, num_heads, axis=0)
        out = book.dot_product(split(q @ W_q), split(k @ W_k), split(v @ W_v), lens)
        return np.concatenate(np.split(out, num_heads, axis=0), axis=-1) @ W_o

    answer = teach.check(mine, "multi_head")
    assert answer.mistakes == ["heads_joined_wrong"] and str(answer).count("h * batch + b") == 1


def heads_alone(swapped=False, scale=0.5):
    def multi_head_attention(Q, K, V, n_heads):
        cut = [
            [x[:, i::n_heads] if swapped else part for i, part in enumerate(np.split(x, n_heads, 1))] for x in (Q, K, V)
        ]
        return np.concatenate([softmax(q @ k.T / q.shape[1] ** scale) @ v for q, k, v in zip(*cut)], axis=1)

    return multi_head_attention


def test_heads_without_weights():
    answer = teach.check(heads_alone())
    assert answer.ok and "it takes no weights" in str(answer)
    assert teach.check(heads_alone(scale=1)).mistakes == ["scale_d"]
    assert not teach.check(heads_alone(swapped=True)).ok


def test_heads_in_lists_of_arrays():
    class Heads:
        def __init__(self, d_model, h):
            rng, self.d_k = np.random.default_rng(0), d_model // h
            self.W_Q, self.W_K, self.W_V = (
                [rng.standard_normal((d_model, self.d_k)) for _ in range(h)] for _ in range(3)
            )
            self.W_O = rng.standard_normal((d_model, d_model))

        def __call__(self, q, k, v):
            heads = zip(self.W_Q, self.W_K, self.W_V)
            return np.concatenate([attended(q @ a, k @ b, v @ c, True) for a, b, c in heads], axis=-1) @ self.W_O

    assert teach.check(Heads, "multi_head").ok
    assert teach.check(Heads, "multi_head", mask="hide").mistakes == ["no_mask"]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tiled", [(), ("k", "v"), ("v",)], ids=["right", "both", "values"])
def test_heads_that_share_keys_in_a_layer(tiled, causal):
    torch = needs.module("torch")

    class Attention(torch.nn.Module):
        def __init__(self, d_model, n_heads, n_kv_heads):
            super().__init__()
            self.n_heads, self.n_kv_heads, self.d = n_heads, n_kv_heads, d_model // n_heads
            self.wq, self.wo = (torch.nn.Linear(d_model, d_model, bias=False) for _ in range(2))
            self.wk, self.wv = (torch.nn.Linear(d_model, n_kv_heads * self.d, bias=False) for _ in range(2))

        def forward(self, x):
            q, k, v = (f(x).view(*x.shape[:2], -1, self.d).transpose(1, 2) for f in (self.wq, self.wk, self.wv))
            share = self.n_heads // self.n_kv_heads
            k, v = (
                x.repeat(1, share, 1, 1) if name in tiled else x.repeat_interleave(share, 1)
                for name, x in (("k", k), ("v", v))
            )
            scores = q @ k.transpose(2, 3) / self.d**0.5
            if causal:
                scores = scores.masked_fill(torch.ones(scores.shape[2:]).triu(1) > 0, -1e9)
            return self.wo((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    for mine in (Attention, Attention(8, 4, 2)):
        answer = teach.check(mine, "causal_multi_head" if causal else "multi_head")
        assert [each for each in answer.mistakes if each != "no_mask"] == (["groups_tiled"] if tiled else []), answer


class Alike:
    """Heads whose features are cut wrongly, or joined so."""

    def __init__(self, d_model, num_heads, how):
        rng, self.how, self.num_heads = np.random.default_rng(0), how, num_heads
        self.W_q, self.W_k, self.W_v, self.W_o = (rng.standard_normal((d_model, d_model)) for _ in range(4))

    def __call__(self, q, k, v):
        def cut(x, name):
            first = name in self.how
            return [np.split(x, self.num_heads, -1)[0 if first else h] for h in range(self.num_heads)]

        heads = zip(cut(q @ self.W_q, "q"), cut(k @ self.W_k, "k"), cut(v @ self.W_v, "v"))
        heads = [attended(a, b, c) for a, b, c in heads]
        if self.how in ("mean", "sum"):
            heads = [getattr(np, self.how)(heads, axis=0)] * self.num_heads
        return np.concatenate(heads, axis=-1) @ self.W_o


@pytest.mark.parametrize(
    ("how", "id"),
    [("", None), ("qkv", "first_head"), ("k", "first_head"), ("mean", "mean_of_heads"), ("sum", "sum_of_heads")],
)
def test_all_heads_alike(how, id):
    assert teach.check(Alike(6, 3, how), "multi_head").mistakes == [id] * bool(id)


def test_heads_that_have_an_output_projection_each():
    """Their sum is what W_o makes of all heads beside each other: its rows are those of the heads."""
    torch = needs.module("torch")

    class Head(torch.nn.Module):
        def __init__(self, wide, size, scale):
            super().__init__()
            self.q, self.k, self.v = (torch.nn.Linear(wide, size) for _ in range(3))
            self.o, self.scale = torch.nn.Linear(size, wide), scale

        def forward(self, x):
            return self.o((self.q(x) @ self.k(x).mT * self.scale).softmax(-1) @ self.v(x))

    class MultiHeadAttention(torch.nn.Module):
        def __init__(self, d_model, n_heads):
            super().__init__()
            size = d_model // n_heads
            self.heads = torch.nn.ModuleList(Head(d_model, size, size**-0.5) for _ in range(n_heads))

        def forward(self, x):
            return sum(head(x) for head in self.heads)

    class Wrong(MultiHeadAttention):
        def __init__(self, d_model, n_heads):
            super().__init__(d_model, n_heads)
            for head in self.heads:
                head.scale = d_model**-0.5

    assert teach.check(MultiHeadAttention).ok and teach.check(MultiHeadAttention(12, 3)).ok
    assert teach.check(Wrong, "multi_head").mistakes == ["scale_num_hiddens"]


@pytest.mark.parametrize("turned", [False, True])
def test_one_projection_of_queries_beside_keys_of_another_width(turned):
    """Where the one ends and the other begins, the features say; halves fitted them the other way round."""
    torch = needs.module("torch")

    class AdditiveAttention(torch.nn.Module):
        def __init__(self, query_size, key_size, num_hiddens):
            super().__init__()
            self.attn = torch.nn.Linear(query_size + key_size, num_hiddens)
            self.v = torch.nn.Linear(num_hiddens, 1, bias=False)

        def forward(self, queries, keys, values):
            pair = [
                queries[:, :, None].expand(-1, -1, keys.shape[1], -1),
                keys[:, None].expand(-1, queries.shape[1], -1, -1),
            ]
            features = torch.tanh(self.attn(torch.cat(pair[::-1] if turned else pair, -1)))
            return self.v(features).squeeze(-1).softmax(-1) @ values

    assert teach.check(AdditiveAttention, "additive").ok


def test_additive_attention_of_one_width_is_asked_with_masks():
    """Of probes whose queries are as wide as their keys, one could say what a mask of (batch, keys) can: too few."""
    torch = needs.module("torch")

    class Attention(torch.nn.Module):
        def __init__(self, hidden_size):
            super().__init__()
            self.W1, self.W2 = (torch.nn.Linear(hidden_size, hidden_size) for _ in range(2))
            self.V = torch.nn.Linear(hidden_size, 1)

        def forward(self, states, outputs, mask=None):
            scores = self.V(torch.tanh(self.W1(states)[:, :, None] + self.W2(outputs)[:, None])).squeeze(-1)
            if mask is not None:
                scores = scores.masked_fill(~mask[:, None], -1e9)
            return scores.softmax(-1) @ outputs

    answer = teach.check(Attention, "additive")
    assert answer.ok and answer.mask == "attend"


@pytest.mark.parametrize("kind", ["dot_product", "causal", "window"])
@pytest.mark.parametrize("id", ["scale_num_heads", "softmax_axis"])
def test_heads_as_an_axis(kind, id):
    def mine(q, k, v, window=0):
        scores = q @ k.swapaxes(2, 3) / (q.shape[1 if id == "scale_num_heads" else 3] ** 0.5)
        distance = np.arange(q.shape[2])[:, None] - np.arange(k.shape[2])
        if kind != "dot_product":
            scores = np.where((distance >= 0) & ((kind == "causal") | (distance < window)), scores, -1e6)
        return book.softmax(scores, 1 if id == "softmax_axis" else -1) @ v

    assert teach.check(mine, kind, mask="none").mistakes[0] == id
