"""Tensors and torch modules that many tests take."""

import torch

from mha_c import torch as mt

# Ways to hook a module, of which older versions of torch have three.
HOOKS = [
    name
    for name in (
        "register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook",
        "register_full_backward_pre_hook",
    )
    if hasattr(torch.nn.Module, name)
]  # fmt: skip


def inputs(batch=2, queries=4, keys=6, sizes=(10, 12, 14), dtype=torch.float32, requires_grad=False):
    torch.manual_seed(0)
    rows = queries, keys, keys
    return [torch.randn(batch, n, size, dtype=dtype, requires_grad=requires_grad) for n, size in zip(rows, sizes)]


def leaf(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def leaves(*shapes, dtype=torch.float32):
    torch.manual_seed(3)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def entropy(weights):
    return -(weights * (weights + 1e-9).log()).sum()


def seeded(function):
    """The same dropout in every evaluation."""

    def call(*arguments):
        torch.manual_seed(3)
        return function(*arguments)

    return call


def layers(size=12, heads=3, bias=True, **options):
    """One of each kind, for inputs of one size."""
    torch.manual_seed(0)
    return {
        "multi-head": mt.MultiHeadAttention(size, size, size, size, heads, 0.0, bias=bias, **options),
        "additive": mt.AdditiveAttention(size, size, 8, 0.0, **options),
        "dot": mt.DotProductAttention(0.0, **options),
    }


def sized_layers():
    return {
        "multi-head": mt.MultiHeadAttention(12, 10, 14, 20, 5, 0.0),
        "multi-head with bias": mt.MultiHeadAttention(12, 10, 14, 20, 5, 0.0, True),
        "additive": mt.AdditiveAttention(12, 10, 16, 0.0),
    }
