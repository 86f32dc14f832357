"""Tensors and torch modules that many tests take."""

import needs

torch = needs.module("torch")

from mha_c import torch as mt  # noqa: E402  torch must be there


def inputs(batch=2, queries=4, keys=6, sizes=(10, 12, 14), dtype=torch.float32, requires_grad=False):
    torch.manual_seed(0)
    rows = queries, keys, keys
    return [torch.randn(batch, n, size, dtype=dtype, requires_grad=requires_grad) for n, size in zip(rows, sizes)]


def sized_layers():
    return {
        "multi-head": mt.MultiHeadAttention(12, 10, 14, 20, 5, 0.0),
        "multi-head with bias": mt.MultiHeadAttention(12, 10, 14, 20, 5, 0.0, True),
        "additive": mt.AdditiveAttention(12, 10, 16, 0.0),
    }
