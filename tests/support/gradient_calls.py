"""Calls of the functions of mha_c.functional, their gradients, and the same by autograd."""

import numpy as np

import needs
from mha_c import functional as F

SEED = 77
B, H, HKV, Q, K, D, DV = 2, 4, 2, 5, 13, 4, 3


def operands(rng, heads=True, additive=False, queries=Q, keys=K, d=D, dv=DV, dtype=np.float64):
    """q, k, v, w_v or None, and the gradient of the output."""
    h, hkv = ((H,), (HKV,)) if heads else ((), ())
    shapes = (B, *h, queries, d), (B, *hkv, keys, d), (B, *hkv, keys, dv), (d,), (B, *h, queries, dv)
    q, k, v, w_v, grad = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
    return q, k, v, w_v if additive else None, grad


def forward(q, k, v, w_v, **options):
    if w_v is None:
        return F.dot_product_attention(q, k, v, **options)
    return F.additive_attention(q, k, v, w_v, **options)


def backward(grad, q, k, v, w_v, **options):
    """(grad_q, grad_k, grad_v, grad_w_v or None, grad_bias or None)"""
    if w_v is None:
        found = [*F.dot_product_attention_backward(grad, q, k, v, **options)]
        found.insert(3, None)
    else:
        found = [*F.additive_attention_backward(grad, q, k, v, w_v, **options)]
    return found if "bias" in options else [*found, None]


def by_torch(grad, q, k, v, w_v, dtype=None, **options):
    """The same by autograd."""
    torch_math = needs.module("torch_math")
    leaves = [torch_math.leaf_of(x, dtype) for x in (q, k, v, w_v, options.pop("bias", None))]
    options["seed"] = options.pop("rng", 0)
    out = torch_math.attention(*leaves[:4], bias=leaves[4], **options)
    return torch_math.gradients(out, grad, leaves)
