"""Attention in plain NumPy, as in the formulas: the reference of the tests and of `selftest`, and a text to learn from.

It is written from the definitions, independently of the C core.  Everything is computed in float64, with arrays of
all scores in memory and without care for speed.  Signatures are those of `mha_c.functional`, except for dropout: here
`kept` (bool, in the shape of the scores) says which weights stay, and `dropout` is the probability.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Optional

import numpy as np

if TYPE_CHECKING:
    from ._types import Array


def dot_product_attention(q: Any, k: Any, v: Any, valid_lens: Any = None, **options: Any) -> Any:
    """softmax(scale q k^T + bias) v.  q (B,[H,]Q,D), k (B,[Hkv,]K,D), v (B,[Hkv,]K,Dv) -> (B,[H,]Q,Dv), extras."""
    q4, k4, v4 = _with_heads(q, k, v)
    scale = options.pop("scale", None)
    if scale is None:
        scale = 1 / math.sqrt(q4.shape[-1]) if q4.shape[-1] else 1.0
    with np.errstate(invalid="ignore", over="ignore"):
        scores = scale * (q4 @ k4.swapaxes(-1, -2))
    return _attend(scores, v4, valid_lens, np.ndim(q), **options)


def additive_attention(
    q: Any, k: Any, v: Any, w_v: Any, W_q: Any = None, W_k: Any = None, valid_lens: Any = None, **options: Any
) -> Any:
    """softmax(scale w_v . tanh(W_q q + W_k k) + bias) v."""
    q4, k4, v4 = _with_heads(q, k, v)
    if W_q is not None:
        q4 = q4 @ np.asarray(W_q, np.float64).T
    if W_k is not None:
        k4 = k4 @ np.asarray(W_k, np.float64).T
    scale = options.pop("scale", None)
    features = np.tanh(q4[..., :, None, :] + k4[..., None, :, :])
    scores = (1.0 if scale is None else scale) * (features @ np.asarray(w_v, np.float64))
    return _attend(scores, v4, valid_lens, np.ndim(q), **options)


def multi_head_attention(
    queries: Any, keys: Any, values: Any, weights: Any, num_heads: int, valid_lens: Any = None
) -> tuple[Array, Array]:
    """(out (B,Q,hiddens), attention weights (B,H,Q,K)) of a layer whose state_dict is `weights`."""

    def project(x: Any, name: str) -> Array:
        weight, bias = weights[f"{name}.weight"], weights.get(f"{name}.bias", 0.0)
        return np.asarray(np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T + bias)

    def split(x: Array) -> Array:  # (B, T, H*d) -> (B, H, T, d)
        return np.swapaxes(x.reshape(*x.shape[:2], num_heads, x.shape[2] // num_heads), 1, 2)

    q, k, v = (split(project(x, name)) for x, name in ((queries, "W_q"), (keys, "W_k"), (values, "W_v")))
    heads, attention = dot_product_attention(q, k, v, valid_lens, empty_rows="uniform", return_weights=True)
    joined = heads.swapaxes(1, 2).reshape(q.shape[0], q.shape[2], num_heads * v.shape[3])
    return project(joined, "W_o"), attention


def visible_keys(
    shape: tuple[int, ...], valid_lens: Any = None, keep_mask: Any = None, causal: Any = None, window: Any = None
) -> Array:
    """Which scores (B, H, Q, K) count, as a bool array of that shape."""
    batch, _, _, n_keys = shape
    key = np.arange(n_keys)
    visible = np.ones(shape, dtype=bool)
    if valid_lens is not None:
        visible &= key < np.reshape(valid_lens, (batch, 1, -1, 1))  # (B,): for all queries, (B, Q): one for each
    place = _places(shape, causal)
    if causal:
        visible &= key <= place[:, None]
    if window is not None:
        left, right = window
        if left is not None:
            visible &= key >= place[:, None] - left
        if right is not None:
            visible &= key <= place[:, None] + right
    if keep_mask is not None:
        visible &= _with_head_axis(np.asarray(keep_mask))
    return visible


def _places(shape: tuple[int, ...], causal: Any) -> Array:
    """The position of each query among the keys, as `causal` defines it."""
    n_queries, n_keys = shape[-2:]
    return np.arange(n_queries) + (n_keys - n_queries if causal == "bottom_right" else 0)


def _attend(
    scores: Array,
    v: Array,
    valid_lens: Any,
    rank: int,
    keep_mask: Any = None,
    bias: Any = None,
    causal: Any = None,
    window: Any = None,
    softcap: Optional[float] = None,
    relative_bias: Any = None,
    sinks: Any = None,
    empty_rows: str = "zero",
    return_weights: bool = False,
    return_lse: bool = False,
    dropout: float = 0.0,
    kept: Optional[Array] = None,
) -> Any:
    """softmax(scores + bias) v, and weights and lse if asked for; without the head axis if q has none."""
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    if relative_bias is not None:
        reach = relative_bias.shape[1] // 2
        away = np.arange(scores.shape[-1]) - _places(scores.shape, causal)[:, None]
        scores = scores + np.asarray(relative_bias, np.float64)[:, np.clip(away, -reach, reach) + reach]
    if bias is not None:
        scores = scores + _with_head_axis(np.asarray(bias, np.float64))
    visible = visible_keys(scores.shape, valid_lens, keep_mask, causal, window)
    weights, lse = _softmax(scores, visible, empty_rows, sinks)
    used = weights
    if kept is not None:
        used = np.where(_with_head_axis(kept), weights / (1 - dropout), 0) if dropout < 1 else np.zeros_like(weights)
    # A key that a row may not see has no influence on it, whatever its value holds: 0 * NaN must not happen.
    counts = visible | (weights > 0)  # of an empty row all, if it is uniform
    if np.isfinite(v).all():
        out = used @ v
    else:
        with np.errstate(invalid="ignore"):
            out = np.where(counts[..., None], used[..., None] * v[..., None, :, :], 0).sum(-2)
    results = (out, *([weights] if return_weights else []), *([lse] if return_lse else []))
    if rank == 3:
        results = tuple(array[:, 0] for array in results)
    return results if len(results) > 1 else results[0]


def _softmax(scores: Array, visible: Array, empty_rows: str, sinks: Any) -> tuple[Array, Array]:
    """(weights, lse): softmax over the visible keys of each row (and a head's sink), and the log of its denominator."""
    n_keys = scores.shape[-1]
    sink = np.array(-np.inf) if sinks is None else np.asarray(sinks, np.float64)[:, None, None]
    seen = np.where(visible, scores, -np.inf)
    largest = np.maximum(seen.max(-1, keepdims=True, initial=-np.inf), sink)
    is_empty = np.isneginf(largest)
    with np.errstate(invalid="ignore", divide="ignore"):
        top = np.where(is_empty, 0.0, largest)
        numerators = np.where(np.isneginf(seen), 0.0, np.exp(seen - top))
        total = numerators.sum(-1, keepdims=True) + np.exp(sink - top)
        weights = numerators / np.where(is_empty, 1.0, total)
        lse = np.where(is_empty, -np.inf, largest + np.log(total))
    if empty_rows == "uniform" and n_keys and sinks is None:
        weights = np.where(is_empty, 1 / n_keys, weights)
    return weights, lse[..., 0]


def _with_heads(q: Any, k: Any, v: Any) -> tuple[Array, Array, Array]:
    """q, k, v in float64 with a head axis; key heads are repeated, so that query head h uses h // (H // Hkv)."""
    q4, k4, v4 = (_with_head_axis(np.asarray(x, np.float64)) for x in (q, k, v))
    repeats = q4.shape[1] // max(k4.shape[1], 1)
    return q4, k4.repeat(repeats, axis=1), v4.repeat(repeats, axis=1)


def _with_head_axis(x: Array) -> Array:
    """(B, rows, columns) -> (B, 1, rows, columns); rank 2 broadcasts, rank 4 stays."""
    return x[:, None] if x.ndim == 3 else x
