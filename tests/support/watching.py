"""What tests of `watch` have in common: what counts as close, which torch has which function, a step of a model."""

import pytest
from torch.nn import functional as F

# Softmax weights of scores around 1 in float32, some of them by other orders of sums: the issue's own limit.
CLOSE = {"atol": 1e-5, "rtol": 0}
# Versions of torch: without the function (1.12), without scale and shared key heads (before 2.5).
SDPA = getattr(F, "scaled_dot_product_attention", None)
has_function = pytest.mark.skipif(SDPA is None, reason="this torch has no scaled_dot_product_attention")
is_young = pytest.mark.skipif(
    "enable_gqa" not in (getattr(SDPA, "__doc__", None) or ""), reason="needs scaled_dot_product_attention of torch 2.5"
)


def step(model, x, watched=None):
    """(output, gradients) of one step; the same of a watched one."""
    model.zero_grad()
    out = model(x) if watched is None else watched()
    out.square().sum().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters())]
