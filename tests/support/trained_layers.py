"""Layers that tests train in NumPy, and inputs that fit them."""

import numpy as np

from mha_c import (
    AdditiveAttention,
    DotProductAttention,
    MultiHeadAttention,
)

B, Q, K = 2, 5, 9


def inputs(rng, dtype=np.float64, queries=Q, keys=K):
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in ((B, queries, 6), (B, keys, 5), (B, keys, 8)))


def make(kind, dropout=0.0, rng=0, dtype=np.float64, empty_rows="uniform"):
    options = {"rng": rng, "dtype": dtype, "empty_rows": empty_rows}
    if kind == "dot":
        return DotProductAttention(dropout, **options)
    if kind == "additive":
        return AdditiveAttention(5, 6, 7, dropout, **options)
    layer = MultiHeadAttention(5, 6, 8, 12, 3, dropout, bias=kind == "with biases", **options)
    drawn = np.random.default_rng(rng)
    for p in layer.parameters():
        p.data = drawn.standard_normal(p.shape)  # biases that are not 0
    return layer


KINDS = ["multi-head", "with biases", "additive", "dot"]


def fitting(kind, arrays):
    """Dot products need keys as wide as the queries."""
    return (arrays[0][..., :5], *arrays[1:]) if kind == "dot" else arrays
