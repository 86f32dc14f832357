"""Layers that a decoder asks with a cache, NumPy's, and the lengths of a causal mask."""

import numpy as np

import mha_c

KINDS = ("multi-head", "multi-head with biases", "dot", "additive")


def layer_of(kind, dtype, features=24):
    if kind == "dot":
        return mha_c.DotProductAttention(0.3, dtype=dtype)
    if kind == "additive":
        return mha_c.AdditiveAttention(features, features, 16, 0.3, dtype=dtype, rng=1)
    layer = mha_c.MultiHeadAttention(features, features, features, 24, 4, 0.3, "biases" in kind, dtype=dtype, rng=1)
    if "biases" in kind:
        rng = np.random.default_rng(7)
        for name, p in layer.named_parameters():
            if name.endswith("bias"):
                p += rng.standard_normal(p.shape)
    return layer


def causal_lens(batch, first, n):
    return np.broadcast_to(np.arange(first + 1, first + n + 1), (batch, n))
