"""The book's functions in NumPy, a thought a line: `check` compares with them, and the table of mistakes changes lines.

Each text must stay as it is read: mistakes.py finds lines by their words.  Weights are (inputs, outputs): X @ W.
"""
# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-incomplete-defs=False

import numpy as np

__all__ = [
    "additive", "additive_weights", "causal", "causal_multi_head", "causal_multi_head_rope", "chunked", "dot_product",
    "grouped", "masked_softmax", "masked_softmax_of_mask", "multi_head", "positional_encoding", "rope", "rope_halves",
    "softmax", "transpose_output", "transpose_qkv", "window",
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


def masked_softmax_of_mask(X, mask=1):
    X = np.where(mask, X, -1e6)
    return softmax(X, axis=-1)


def dot_product(queries, keys, values, valid_lens=None):
    d = queries.shape[-1]
    scores = queries @ keys.swapaxes(1, 2) / np.sqrt(d)
    attention_weights = masked_softmax(scores, valid_lens)
    return attention_weights @ values


def causal(queries, keys, values, mask=1, offset=0):
    d = queries.shape[-1]
    scores = queries @ keys.swapaxes(1, 2) / np.sqrt(d)
    seen = np.tri(queries.shape[1], keys.shape[1], offset, dtype=bool)
    scores = np.where(seen & mask, scores, -1e6)
    return softmax(scores, axis=-1) @ values


def window(queries, keys, values, window, mask=1):
    d = queries.shape[-1]
    scores = queries @ keys.swapaxes(1, 2) / np.sqrt(d)
    distance = np.arange(queries.shape[1])[:, None] - np.arange(keys.shape[1])
    seen = (distance >= 0) & (distance < window)
    scores = np.where(seen & mask, scores, -1e6)
    return softmax(scores, axis=-1) @ values


def chunked(queries, keys, values, chunk_size, mask=1):
    d = queries.shape[-1]
    steps = np.arange(keys.shape[1])
    seen = np.tri(queries.shape[1], len(steps), dtype=bool) & mask
    top, total, output = -np.inf, 0, 0
    for start in range(0, len(steps), chunk_size):
        chunk = steps[start : start + chunk_size]
        scores = queries @ keys[:, chunk].swapaxes(1, 2) / np.sqrt(d)
        scores = np.where(seen[..., chunk], scores, -1e6)
        new_top = np.maximum(top, scores.max(axis=-1, keepdims=True))
        rescale = np.exp(top - new_top)
        weights = np.exp(scores - new_top)
        total = total * rescale + weights.sum(axis=-1, keepdims=True)
        output = output * rescale + weights @ values[:, chunk]
        top = new_top
    return output / total


def grouped(queries, keys, values, mask=1):
    d = queries.shape[-1]
    share = queries.shape[1] // keys.shape[1]
    keys = np.repeat(keys, share, axis=1)
    values = np.repeat(values, share, axis=1)
    scores = queries @ keys.swapaxes(2, 3) / np.sqrt(d)
    scores = np.where(mask, scores, -1e6)
    return softmax(scores, axis=-1) @ values


def additive(queries, keys, values, valid_lens, W_q, W_k, w_v):
    queries, keys = queries @ W_q, keys @ W_k
    features = queries[:, :, None, :] + keys[:, None, :, :]
    features = np.tanh(features)
    scores = features @ w_v
    attention_weights = masked_softmax(scores, valid_lens)
    return attention_weights @ values


def additive_weights(queries, keys, valid_lens, W_q, W_k, w_v):
    queries, keys = queries @ W_q, keys @ W_k
    features = queries[:, :, None, :] + keys[:, None, :, :]
    features = np.tanh(features)
    scores = features @ w_v
    return masked_softmax(scores, valid_lens)


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


def causal_multi_head(X, W_q, W_k, W_v, W_o, num_heads, mask=1):
    queries = transpose_qkv(X @ W_q, num_heads)
    keys = transpose_qkv(X @ W_k, num_heads)
    values = transpose_qkv(X @ W_v, num_heads)
    if np.ndim(mask) > 0:
        mask = np.repeat(mask, num_heads, axis=0)
    output = causal(queries, keys, values, mask)
    output_concat = transpose_output(output, num_heads)
    return output_concat @ W_o


def causal_multi_head_rope(X, W_q, W_k, W_v, W_o, num_heads, mask=1):
    queries = transpose_qkv(X @ W_q, num_heads)
    keys = transpose_qkv(X @ W_k, num_heads)
    values = transpose_qkv(X @ W_v, num_heads)
    queries, keys = rope(queries), rope(keys)
    if np.ndim(mask) > 0:
        mask = np.repeat(mask, num_heads, axis=0)
    output = causal(queries, keys, values, mask)
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


def rope(X, offset=0):
    steps, d = X.shape[1:]
    position = np.arange(offset, offset + steps).reshape(-1, 1)
    angle = position / 10000 ** (np.arange(0, d, 2) / d)
    cos, sin = np.cos(angle), np.sin(angle)
    first, second = X[:, :, 0::2], X[:, :, 1::2]
    output = np.zeros(X.shape)
    output[:, :, 0::2] = first * cos - second * sin
    output[:, :, 1::2] = first * sin + second * cos
    return output


def rope_halves(X, offset=0):
    steps, d = X.shape[1:]
    position = np.arange(offset, offset + steps).reshape(-1, 1)
    angle = position / 10000 ** (np.arange(0, d, 2) / d)
    cos, sin = np.cos(angle), np.sin(angle)
    first, second = X[:, :, : d // 2], X[:, :, d // 2 :]
    return np.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)
