"""Decoding step by step, beside the book's formulas in float64 over all steps at once."""

import numpy as np


def rotated(x, base=10000.0):
    """x (B, H, T, D) at positions 0, 1, ..., features 2i and 2i + 1 together."""
    angles = np.arange(x.shape[2])[:, None] * base ** (-np.arange(0, x.shape[3], 2) / x.shape[3])
    a, b = x[..., 0::2], x[..., 1::2]
    return np.stack((a * np.cos(angles) - b * np.sin(angles), a * np.sin(angles) + b * np.cos(angles)), -1).reshape(
        x.shape
    )


def seen(n, window=None, sinks=0):
    """(T, T): whether step i sees step j."""
    i, j = np.arange(n)[:, None], np.arange(n)
    near = True if window is None else (j < sinks) | (j > i - window)
    return (j <= i) & near


def attended(x, state, heads, kv_heads, rope=None, window=None, sinks=0):
    """(outputs (B, T, F), weights (B, H, T, T)) of x (B, T, F) as one uncached call, in float64.

    rope    what rotates (B, H, T, D), such as `rotated`, or None
    state   {name: array}: W_q, W_k, W_v, or W_qkv, and W_o, with or without biases
    """
    x, state = np.asarray(x, "f8"), {name: np.asarray(array, "f8") for name, array in state.items()}
    if "W_qkv.weight" in state:
        for name, array in list(state.items()):
            if name.startswith("W_qkv."):
                state.update(zip([f"W_{r}.{name[6:]}" for r in "qkv"], np.split(array, 3)))

    def projected(x, name):
        return x @ state[f"{name}.weight"].T + state.get(f"{name}.bias", 0)

    q, k, v = (projected(x, name).reshape(*x.shape[:2], n, len(state[f"{name}.weight"]) // n).transpose(0, 2, 1, 3)
               for name, n in (("W_q", heads), ("W_k", kv_heads), ("W_v", kv_heads)))  # fmt: skip
    if rope is not None:
        q, k = rope(q), rope(k)
    k, v = (y.repeat(heads // kv_heads, axis=1) for y in (k, v))
    scores = np.where(seen(x.shape[1], window, sinks), q @ k.swapaxes(2, 3) / np.sqrt(q.shape[3]), -np.inf)
    exps = np.exp(scores - np.maximum(scores.max(-1, initial=-np.inf, keepdims=True), -1e300))
    weights = exps / np.maximum(exps.sum(-1, keepdims=True), 1e-300)
    out = (weights @ v).transpose(0, 2, 1, 3).reshape(x.shape)
    return projected(out, "W_o"), weights
