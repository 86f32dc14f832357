"""Layers that a decoder asks with a cache, NumPy's, and the lengths of a causal mask."""

import numpy as np

import mha_c

FIRST = ("multi-head", "multi-head with biases", "dot", "additive")  # of the first two generations
THIRD = ("grouped", "grouped with biases and rope", "causal", "causal with biases and rope")
KINDS = FIRST + THIRD
PROJECTING = FIRST + THIRD[:2]  # have `project`


def sizes_of(kind, features=24):
    """The arguments of the constructor, NumPy's and torch's."""
    biases = "biases" in kind
    if kind == "dot":
        return "DotProductAttention", (0.3,)
    if kind == "additive":
        return "AdditiveAttention", (features, features, 16, 0.3)
    if kind.startswith("grouped"):
        return "GQAAttention", (features, 4, 2, biases, biases)
    if kind.startswith("causal"):
        return "CausalAttention", (features, 4, biases, biases)
    return "MultiHeadAttention", (features, features, features, 24, 4, 0.3, biases)


def layer_of(kind, dtype, features=24):
    name, sizes = sizes_of(kind, features)
    layer = getattr(mha_c, name)(*sizes, dtype=dtype, **({} if kind == "dot" else {"rng": 1}))
    rng = np.random.default_rng(7)
    for name, p in () if kind == "dot" else layer.named_parameters():
        if name.endswith("bias"):
            p += rng.standard_normal(p.shape)
    return layer


def causal_lens(batch, first, n):
    return np.broadcast_to(np.arange(first + 1, first + n + 1), (batch, n))
