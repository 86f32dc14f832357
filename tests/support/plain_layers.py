"""Layers as plain formulas in float64, forward and back: projections, turned rows, shared heads, any mask."""

from typing import Any, NamedTuple, Optional

import numpy as np


class Plain(NamedTuple):
    """A layer: what its call does with queries, keys and values (B, rows, features)."""

    weights: Any  # of W_q, W_k, W_v, W_o, each (out, in) or None
    biases: Any  # of the four, each (out,) or None
    heads: int = 1
    kv_heads: int = 1
    w_v: Any = None  # (h,): additive scores
    turns: bool = False
    empty: str = "uniform"


class Done(NamedTuple):
    out: Any
    weights: Any  # (B, H, Q, K)
    inputs: Any  # gradients: of queries, keys, values
    parameters: Any  # of the four weights, the four biases and w_v
    bias: Any  # of the bias over the scores, (B, H, Q, K)


def angles(rows, features):
    """(rows, features / 2): position times 10000 ** (-2i / features)."""
    return np.arange(rows)[:, None] * 10000.0 ** (-np.arange(0, features, 2) / features)


def turned(x, sign=1):
    """x (B, H, T, D): features 2i and 2i + 1 are turned by their angle."""
    a, b, angle = x[..., 0::2], x[..., 1::2], sign * angles(*x.shape[2:])
    out = np.empty_like(x)
    out[..., 0::2], out[..., 1::2] = a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)
    return out


def split(x, heads):
    return x.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)


def join(x):
    return x.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1)


def seen(batch, n_queries, n_keys, lens=None, causal=None, keep_mask=None):
    """(B, 1 or H, Q, K): which keys each query may see."""
    key, query = np.arange(n_keys), np.arange(n_queries)[:, None]
    visible = np.ones((batch, 1, n_queries, n_keys), bool)
    if lens is not None:
        lens = np.asarray(lens)
        visible &= key < (lens[:, None, None, None] if lens.ndim == 1 else lens[:, None, :, None])
    if causal is not None:
        visible &= key <= query + (n_keys - n_queries if causal == "bottom_right" else 0)
    return visible if keep_mask is None else visible & keep_mask


def computed(layer: Plain, inputs, visible, bias=0.0, grad: Optional[Any] = None) -> Done:
    """grad: of the output; None: no gradients."""
    x = [np.asarray(one, np.float64) for one in inputs]
    rows = [a if W is None else a @ W.T + (0 if b is None else b) for a, W, b in zip(x, layer.weights, layer.biases)]
    q, k, v = (split(a, n) for a, n in zip(rows, (layer.heads, layer.kv_heads, layer.kv_heads)))
    if layer.turns:
        q, k = turned(q), turned(k)
    group = layer.heads // layer.kv_heads
    k, v = (np.repeat(a, group, axis=1) for a in (k, v))
    if layer.w_v is None:
        scores = q @ k.swapaxes(2, 3) / np.sqrt(q.shape[-1])
    else:
        features = np.tanh(q[:, :, :, None] + k[:, :, None])
        scores = features @ layer.w_v
    scores = np.where(visible, scores + bias, -np.inf)
    largest = scores.max(-1, keepdims=True, initial=-np.inf)
    e = np.exp(scores - np.where(np.isfinite(largest), largest, 0))
    total = e.sum(-1, keepdims=True)
    is_empty = total == 0
    weights = e / np.where(is_empty, 1, total)
    if layer.empty == "uniform":
        weights = np.where(is_empty, 1 / max(k.shape[2], 1), weights)
    context = join(weights @ v)
    W_o, b_o = layer.weights[3], layer.biases[3]
    out = context if W_o is None else context @ W_o.T + (0 if b_o is None else b_o)
    if grad is None:
        return Done(out, weights, None, None, None)
    g = np.asarray(grad, np.float64)
    flat = [a.reshape(-1, a.shape[2]) for a in (g, context)]
    of_W_o, of_b_o = (None, None) if W_o is None else (flat[0].T @ flat[1], flat[0].sum(0))
    g = split(g if W_o is None else g @ W_o, layer.heads)
    of_v = weights.swapaxes(2, 3) @ g
    of_weights = g @ v.swapaxes(2, 3)
    of_scores = np.where(is_empty, 0, weights * (of_weights - (of_weights * weights).sum(-1, keepdims=True)))
    of_w_v = None
    if layer.w_v is None:
        of_q, of_k = of_scores @ k / np.sqrt(q.shape[-1]), of_scores.swapaxes(2, 3) @ q / np.sqrt(q.shape[-1])
    else:
        of_w_v = (of_scores[..., None] * features).sum((0, 1, 2, 3))
        slopes = of_scores[..., None] * layer.w_v * (1 - features**2)
        of_q, of_k = slopes.sum(3), slopes.sum(2)
    of_k, of_v = (a.reshape(len(a), layer.kv_heads, group, *a.shape[2:]).sum(2) for a in (of_k, of_v))
    if layer.turns:
        of_q, of_k = turned(of_q, -1), turned(of_k, -1)
    of_rows = [join(a) for a in (of_q, of_k, of_v)]
    of_inputs = [a if W is None else a @ W for a, W in zip(of_rows, layer.weights)]
    of_W = [None if W is None else np.einsum("bto,bti->oi", a, y) for a, W, y in zip(of_rows, layer.weights, x)]
    of_b = [None if b is None else a.sum((0, 1)) for a, b in zip(of_rows, layer.biases)]
    return Done(out, weights, of_inputs, (*of_W, of_W_o, *of_b, None if b_o is None else of_b_o, of_w_v), of_scores)


def reduced(grad, shape):
    """The gradient of what was broadcast from `shape` to (B, H, Q, K)."""
    full = (1,) * (4 - len(shape)) + tuple(shape)
    axes = tuple(i for i, n in enumerate(full) if n == 1)
    return grad.sum(axis=axes, keepdims=True).reshape(shape)
