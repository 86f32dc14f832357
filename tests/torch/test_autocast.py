"""Layers under autocast: the type that d2l's give there, the numbers of float32 rounded once."""

import copy

import pytest
import torch
from torch import nn

import needs
from mha_c import torch as mt
from torch_modules import inputs, sized_layers


def test_autocast():
    linear, layer = nn.Linear(16, 16), mt.MultiHeadAttention(16, 16, 16, 16, 4, 0.0)
    x = torch.randn(2, 5, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = linear(x)
        assert y.dtype == torch.bfloat16
        out = layer(y, y, y, torch.tensor([3, 5]))
        assert out.dtype == torch.bfloat16
        assert layer(x, x, x).dtype == layer(y, x, x).dtype == torch.bfloat16
    out.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in [*linear.parameters(), *layer.parameters()])
    z = y.detach().float()
    assert torch.equal(out, layer(z, z, z, torch.tensor([3, 5])).bfloat16())


@pytest.mark.by_day("name", "dtype", together=1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [*sized_layers(), "dot"])
def test_autocast_rounds_once(name, dtype):
    """What float32 gives, in autocast's type; gradients, weights, caches and compiled calls as well; not of float64."""
    needs.autocast(dtype)
    layer = mt.DotProductAttention(0.0) if name == "dot" else sized_layers()[name]
    x, lens = torch.randn(2, 3, 12), torch.tensor([3, 1])
    given = inputs(sizes=(12, 12, 14)) if name == "dot" else inputs()
    given = [y.requires_grad_() for y in given]
    leaves = [*given, *layer.parameters()]
    expected = layer(*given, torch.tensor([3, 2]))
    weights, grad = layer.attention_weights, torch.randn_like(expected).to(dtype)
    wanted = torch.autograd.grad(expected, leaves, grad.float())
    with torch.autocast("cpu", dtype=dtype):
        found = layer(*given, torch.tensor([3, 2]))
        assert torch.equal(found, expected.to(dtype)) and found.dtype == dtype
        assert torch.equal(layer.attention_weights, weights.to(dtype)) and layer.attention_weights.dtype == dtype
        with torch.no_grad(), mt.frozen(layer):
            assert torch.equal(layer(*given, torch.tensor([3, 2])), found)
            needs.fresh_compiler()
            compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)(*given, torch.tensor([3, 2]))
        with torch.autocast("cpu", enabled=False):
            assert layer(*given).dtype == torch.float32
        double = [y.detach().double() for y in given]
        assert copy.deepcopy(layer).double()(*double).dtype == torch.float64
    assert torch.equal(compiled, found)
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(found, leaves, grad), wanted))
    if name == "dot":
        with torch.no_grad(), torch.autocast("cpu", dtype=dtype):
            whole, kv = layer.eval()(x, x, x, lens), layer.project(x, x, lens)
            assert torch.equal(layer(x, kv), whole) and layer.attention_weights.dtype == dtype
            cache = layer.new_cache(2, 3)
            steps = [layer(new, new, new, cache=cache) for new in x.split(1, dim=1)]
            assert torch.equal(torch.cat(steps, 1), layer(x, x, x, torch.tensor([[1, 2, 3]] * 2)))
            assert steps[0].dtype == dtype == layer.attention_weights.dtype


@pytest.mark.parametrize("child", ["W_q", "W_k", "W_v", "W_o"])
def test_one_child_of_16_bits(child):
    """16-bit parameters mixed with float32 are computed in float32, whichever they are; gradients have their types."""
    layer, x = mt.MultiHeadAttention(16, 16, 16, 16, 4, 0.0), torch.randn(2, 5, 16)
    getattr(layer, child).bfloat16()
    found = layer(x, x, x, torch.tensor([3, 5]))
    found.sum().backward()
    expected = copy.deepcopy(layer).float()(x, x, x, torch.tensor([3, 5]))
    assert found.dtype == torch.float32 and torch.equal(found, expected)
    assert all(p.grad.dtype == p.dtype for p in layer.parameters())
