"""mha_c.torch.functional.weights_summary: the arrays' twin on tensors of every type and device."""

import numpy as np
import pytest
import torch

import mha_c.torch
from mha_c import functional


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_same_as_for_arrays(rng, dtype):
    q, k = (torch.tensor(rng.standard_normal((2, h, 9, 8))).to(dtype).requires_grad_() for h in (4, 2))
    mask, lens = torch.tensor(rng.random((9, 9)) < 0.8), torch.tensor([4, 9])
    found = mha_c.torch.functional.weights_summary(q, k, lens, keep_mask=mask, causal=True, top=3)
    kind = torch.float32 if dtype is torch.bfloat16 else dtype
    arrays = [x.detach().to(kind).numpy() for x in (q, k)]
    expected = functional.weights_summary(*arrays, [4, 9], keep_mask=mask.numpy(), causal=True, top=3)
    for a, b in zip(found, expected):
        assert not a.requires_grad
        np.testing.assert_array_equal(a.numpy(), b)


def test_a_bias_that_is_learned_and_refusals():
    q = torch.randn(1, 5, 4)
    bias = torch.randn(5, 5, requires_grad=True)
    found = mha_c.torch.functional.weights_summary(q, q, bias=bias)
    weights = torch.softmax(q @ q.mT / 2 + bias, -1)
    torch.testing.assert_close(found.received, weights.sum(1).detach(), atol=1e-5, rtol=0)  # sums of 5 float32 weights
    with pytest.raises(TypeError, match="q must be a torch tensor"):
        mha_c.torch.functional.weights_summary(q.numpy(), q)
    with pytest.raises(RuntimeError, match="transforms"):
        torch.func.vmap(lambda x: mha_c.torch.functional.weights_summary(x, x).received)(q[None])
