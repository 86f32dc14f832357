"""Lines outside of plain functions: constants of classes, defaults, properties, static methods."""

import pytest

CLASSES = """
import numpy as np


class Mask:
    fill = -1e9

    def __call__(self, scores):
        allowed = np.tri(*scores.shape[-2:], dtype=bool)
        return np.where(allowed, scores, self.fill)


class Softmax:
    axis = -1

    def __call__(self, x):
        e = np.exp(x - x.max(axis=self.axis, keepdims=True))
        return e / e.sum(axis=self.axis, keepdims=True)


def attention(q, k, v):
    scores = q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1])
    return Softmax()(Mask()(scores)) @ v
"""

LAYER = """
import numpy as np


class Attention:
    def __init__(self, num_hiddens, num_heads):
        made = np.random.default_rng(1).normal(size=(4, num_hiddens, num_hiddens))
        self.W_q, self.W_k, self.W_v, self.W_o = made
        self.num_hiddens, self.num_heads = num_hiddens, num_heads

    @property
    def head_dim(self):
        return self.num_hiddens // self.num_heads

    @staticmethod
    def normalised(z):
        z = np.exp(z - z.max(axis=-1, keepdims=True))
        return z / z.sum(axis=-1, keepdims=True)

    def split(self, x):
        return np.stack(np.split(x, self.num_heads, axis=-1), axis=1)

    def __call__(self, x):
        q, k, v = (self.split(x @ w) for w in (self.W_q, self.W_k, self.W_v))
        w = self.normalised(np.einsum("bhqd,bhkd->bhqk", q, k) * self.head_dim**-0.5)
        return np.concatenate(list(np.moveaxis(w @ v, 1, 0)), axis=-1) @ self.W_o
"""

ROPE = """
import numpy as np


def turns(d, n, start=0, theta=10000.0):
    freqs = 1.0 / theta ** (np.arange(0, d, 2) / d)
    return np.exp(1j * np.outer(np.arange(start, start + n), freqs))


def rope(x, offset=0):
    z = (x[..., 0::2] + 1j * x[..., 1::2]) * turns(x.shape[-1], x.shape[-2], offset)
    return np.stack([z.real, z.imag], axis=-1).reshape(x.shape)
"""


@pytest.mark.parametrize(
    ("text", "called", "kind", "right", "wrong"),
    [
        (CLASSES, "attention", "causal", "    fill = -1e9", "    fill = 1e9"),
        (CLASSES, "attention", "causal", "    axis = -1", "    axis = 1"),
        (LAYER, "Attention", "multi_head", "return z / z.sum(axis=-1, keepdims=True)", "return z"),
        (ROPE, "rope", "rope", "theta=10000.0", "theta=1000.0"),
    ],
)
def test_where_a_line_stands(judged, text, called, kind, right, wrong):
    assert text.count(right) == 1
    assert judged(text, called, kind=kind).judged[0].answer.ok
    answer = judged(text.replace(right, wrong), called, kind=kind).judged[0].answer
    assert answer.ok is False
    assert [line.number for line in answer.lines] == [text[: text.index(right)].count("\n") + 1]
