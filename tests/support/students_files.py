"""Right files of students, in which a test makes a mistake."""

NUMPY = """
import numpy as np


def softmax(x, axis=-1):
    e = np.exp(x - np.max(x, axis=axis, keepdims=True))
    return e / np.sum(e, axis=axis, keepdims=True)


def make_mask(lens, keys):
    lens = np.asarray(lens)
    if lens.ndim == 1:
        lens = lens[:, None]
    return np.arange(keys)[None, None, :] < lens[:, :, None]


def scaled_dot_product(Q, K, V, valid_lens=None):
    scores = np.einsum("bqd,bkd->bqk", Q, K)
    scores = scores / K.shape[-1] ** 0.5
    if valid_lens is not None:
        scores = np.where(make_mask(valid_lens, K.shape[1]), scores, -np.inf)
    weights = softmax(scores, axis=-1)
    return np.einsum("bqk,bkd->bqd", weights, V)
"""
TORCH = """
import math
import torch
from torch import nn


class MultiHeadAttention(nn.Module):
    def __init__(self, num_hiddens, num_heads, dropout=0.0, bias=False):
        super().__init__()
        self.num_heads = num_heads
        self.W_q = nn.Linear(num_hiddens, num_hiddens, bias=bias)
        self.W_k = nn.Linear(num_hiddens, num_hiddens, bias=bias)
        self.W_v = nn.Linear(num_hiddens, num_hiddens, bias=bias)
        self.W_o = nn.Linear(num_hiddens, num_hiddens, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def split(self, x):
        b, t, d = x.shape
        return x.view(b, t, self.num_heads, d // self.num_heads).transpose(1, 2)

    def forward(self, queries, keys, values, mask=None):
        q = self.split(self.W_q(queries))
        k = self.split(self.W_k(keys))
        v = self.split(self.W_v(values))
        scores = q @ k.transpose(-2, -1)
        scores = scores / math.sqrt(q.shape[-1])
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, float("-inf"))
        weights = self.dropout(torch.softmax(scores, dim=-1))
        out = weights @ v
        b, h, t, d = out.shape
        out = out.transpose(1, 2).reshape(b, t, h * d)
        return self.W_o(out)
"""
CLASS = """
import numpy as np


def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


class MultiHeadAttention:
    def __init__(self, d_model, num_heads):
        self.num_heads = num_heads
        self.W_q, self.W_k, self.W_v, self.W_o = (np.zeros((d_model, d_model)) for _ in range(4))

    def split(self, x):
        b, t, d = x.shape
        return x.reshape(b, t, self.num_heads, d // self.num_heads).transpose(0, 2, 1, 3)

    def __call__(self, queries, keys, values, mask=None):
        q, k, v = self.split(queries @ self.W_q), self.split(keys @ self.W_k), self.split(values @ self.W_v)
# a remark at the left edge, and a line with nothing

        scores = np.einsum("bhqd,bhkd->bhqk", q, k)
        scale = 1 / np.sqrt(q.shape[-1])
        scores = scores * scale
        if mask is not None:
            scores = np.where(mask[:, None], scores, -1e9)
        weights = softmax(scores)
        heads = [weights[:, h] @ v[:, h] for h in range(self.num_heads)]
        return np.concatenate(heads, axis=-1) @ self.W_o
"""
