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
