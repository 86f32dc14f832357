"""The book's functions in NumPy, a thought a line: `check` compares with them, and the table of mistakes changes lines.

Each text must stay as it is read: mistakes.py finds lines by their words.  Weights are (inputs, outputs): X @ W.
"""
# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-incomplete-defs=False

import numpy as np

__all__ = [
    "additive", "causal", "dot_product", "masked_softmax", "multi_head", "positional_encoding", "softmax",
    "transpose_output", "transpose_qkv",
]  # fmt: skip
__dir__ = __all__.copy


def softmax(X, axis):
    X = np.exp(X - X.max(axis=axis, keepdims=True))
    return X / X.sum(axis=axis, keepdims=True)


def masked_softmax(X, valid_lens=None):
    batch, queries, keys = X.shape
    mask = np.ones(X.shape, dtype=bool)
    if valid_lens is not None:
        if valid_lens.ndim == 1:
            valid_lens = np.repeat(valid_lens, queries)
        mask = np.arange(keys) < valid_lens.reshape(batch, queries, 1)
    X = np.where(mask, X, -1e6)
    return softmax(X, axis=-1)


def dot_product(queries, keys, values, valid_lens=None):
    d = queries.shape[-1]
    scores = queries @ keys.swapaxes(1, 2) / np.sqrt(d)
    attention_weights = masked_softmax(scores, valid_lens)
    return attention_weights @ values


def causal(queries, keys, values):
    d = queries.shape[-1]
    scores = queries @ keys.swapaxes(1, 2) / np.sqrt(d)
    mask = np.tri(queries.shape[1], keys.shape[1], dtype=bool)
    scores = np.where(mask, scores, -1e6)
    return softmax(scores, axis=-1) @ values


def additive(queries, keys, values, valid_lens, W_q, W_k, w_v):
    queries, keys = queries @ W_q, keys @ W_k
    features = queries[:, :, None, :] + keys[:, None, :, :]
    features = np.tanh(features)
    scores = features @ w_v
    attention_weights = masked_softmax(scores, valid_lens)
    return attention_weights @ values


def transpose_qkv(X, num_heads):
    X = X.reshape(X.shape[0], X.shape[1], num_heads, -1)
    X = X.transpose(0, 2, 1, 3)
    return X.reshape(-1, X.shape[2], X.shape[3])


def transpose_output(X, num_heads):
    X = X.reshape(-1, num_heads, X.shape[1], X.shape[2])
    X = X.transpose(0, 2, 1, 3)
    return X.reshape(X.shape[0], X.shape[1], -1)


def multi_head(queries, keys, values, valid_lens, W_q, W_k, W_v, W_o, num_heads):
    queries = transpose_qkv(queries @ W_q, num_heads)
    keys = transpose_qkv(keys @ W_k, num_heads)
    values = transpose_qkv(values @ W_v, num_heads)
    if valid_lens is not None:
        valid_lens = np.repeat(valid_lens, num_heads, axis=0)
    output = dot_product(queries, keys, values, valid_lens)
    output_concat = transpose_output(output, num_heads)
    return output_concat @ W_o


def positional_encoding(X):
    steps, num_hiddens = X.shape[1:]
    position = np.arange(steps).reshape(-1, 1)
    angle = position / 10000 ** (np.arange(0, num_hiddens, 2) / num_hiddens)
    P = np.zeros((steps, num_hiddens))
    P[:, 0::2] = np.sin(angle)
    P[:, 1::2] = np.cos(angle)
    return X + P
