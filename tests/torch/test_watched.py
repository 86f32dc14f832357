"""What sees the operations of a call, and what a call does while somebody looks: modes, hooks, autocast, counters."""

import contextlib
import copy

import numpy as np
import pytest
import torch
from torch import nn

import needs
from mha_c import torch as mt
from mha_c.torch import functional, variants
from seen_by_torch import Operations

X = torch.randn(2, 3, 8)
CALLS = {
    "multi-head": mt.MultiHeadAttention(8, 8, 8, 8, 2, 0.0),
    "additive": mt.AdditiveAttention(8, 8, 4, 0.0),
    "dot": mt.DotProductAttention(0.0),
    "nn.MultiheadAttention": mt.nn.MultiheadAttention(8, 2, batch_first=True),
    "function": functional.dot_product_attention,
    "variants": lambda q, k, v: variants.scaled_dot_product_attention(q, k, v)[0],
    "self-attention": (lambda layer: lambda q, k, v: layer(q))(variants.MultiHeadedSelfAttention(8, 2)),
    "ai summer": (lambda layer: lambda q, k, v: layer(q))(variants.MultiHeadSelfAttentionAISummer(8, 2)),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("grad", [False, True])
def test_a_mode_sees_the_attention(name, grad):
    needs.of_torch("torch._C._len_torch_dispatch_stack")  # modes as they are written today
    with torch.set_grad_enabled(grad):
        wanted = CALLS[name](X, X, X)
        with Operations() as seen:
            found = CALLS[name](X, X, X)
    found, wanted = (x[0] if isinstance(x, tuple) else x for x in (found, wanted))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    products = ("mm", "bmm", "attention", "tanh")
    assert sum(any(word in one for word in products) for one in seen.names) >= 1 + 2 * ("head" in name)
    assert any(word in one for word in ("softmax", "attention", "exp") for one in seen.names), seen.names


def test_a_counter_counts_the_attention_of_functions():
    needs.of_torch("torch.utils.flop_counter")
    batch, heads, rows, features = 2, 2, 16, 8
    q = torch.randn(batch, heads, rows, features)
    with torch.utils.flop_counter.FlopCounterMode(display=False) as found:
        functional.dot_product_attention(q, q, q)
    assert found.get_total_flops() == 2 * batch * heads * rows * rows * features * 2  # q k^T and weights v


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_functions_under_autocast_give_what_layers_give(dtype):
    needs.autocast(dtype)
    q, w_v = torch.randn(2, 3, 8), torch.randn(8)
    with torch.autocast("cpu", dtype):
        wanted = mt.DotProductAttention(0.0)(q, q, q)
        assert nn.functional.scaled_dot_product_attention(q, q, q).dtype is wanted.dtype is dtype
        out, weights, lse = functional.dot_product_attention(q, q, q, return_weights=True, return_lse=True)
        assert torch.equal(out, wanted) and weights.dtype is lse.dtype is dtype
        assert functional.additive_attention(q, q, q, w_v).dtype is dtype
        assert functional.dot_product_attention(*[q.double()] * 3).dtype is torch.float64


@pytest.mark.parametrize("name", ["multi-head", "additive", "dot"])
@pytest.mark.parametrize("way", ["core", "mode", "vjp"])
@pytest.mark.parametrize("lens", [[2, 4], [[1, 2, 2], [4, 4, 1]]], ids=["1-D", "2-D"])
def test_padding_has_no_influence_whoever_looks(name, way, lens):
    """Neither on the result nor on a gradient of a layer whose parts are all plain."""
    needs.of_torch("torch._C._len_torch_dispatch_stack", "torch.func")
    layer, found = CALLS[name], []
    for padding in (0.5, float("nan"), float("inf")):
        keys = torch.linspace(-1, 1, 80).reshape(2, 5, 8).clone()
        keys[0, 2:] = keys[1, 4:] = padding

        def call(queries, keys):
            return layer(queries, keys, keys, torch.tensor(lens))

        if way in ("core", "mode"):
            queries, keys = X.clone().requires_grad_(), keys.requires_grad_()
            with Operations() if way == "mode" else contextlib.nullcontext():
                out = call(queries, keys)
                learned = [queries, keys, *layer.parameters()]
                grads = torch.autograd.grad(out.square().sum(), learned, allow_unused=True)
        else:
            out, back = torch.func.vjp(call, X, keys)
            grads = back(out)
        found.append([out.detach(), *grads])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other) if a is not None)
    assert all(x is None or x.isfinite().all() for x in found[0])


@pytest.mark.parametrize("batch_first", [False, True])
def test_self_attention_of_torchs_class_is_one_product(batch_first):
    needs.of_torch("torch._C._len_torch_dispatch_stack")  # modes as they are written today
    layer = mt.nn.MultiheadAttention(8, 2, batch_first=batch_first)
    with Operations() as seen:
        layer(X, X, X)
    theirs = nn.MultiheadAttention(8, 2, batch_first=batch_first)
    theirs.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(X, X, X), theirs(X, X, X))
    inputs, outputs = 1, 1
    assert sum("mm" in name and "bmm" not in name for name in seen.names) == inputs + outputs


@pytest.mark.parametrize(
    "layer",
    [
        mt.KernelAttention(),
        mt.KernelAttention("constant"),
        *[CALLS[name] for name in ("multi-head", "additive", "dot", "nn.MultiheadAttention")],
    ],
)
def test_repr_without_numbers(layer):
    assert repr(copy.deepcopy(layer).to("meta")).startswith(type(layer).__name__)


@pytest.mark.parametrize("error", [None, KeyError, KeyboardInterrupt])
def test_frozen_tells_of_changed_weights_whatever_ends_it(error):
    layer, x = mt.MultiHeadAttention(8, 8, 8, 8, 2, 0.0), torch.randn(1, 3, 8)

    def use():
        with torch.no_grad(), mt.frozen(layer):
            layer(x, x, x)
            layer.W_k.weight.add_(1)
            if error is not None:
                raise error("mine")

    if error is None:
        with pytest.raises(RuntimeError, match=r"changed inside frozen\(\): W_k.weight"):
            use()
    else:
        with pytest.raises(error, match="mine"), pytest.warns(RuntimeWarning, match=r"frozen\(\): W_k.weight") as seen:
            use()
        assert seen[0].filename == __file__
    with torch.no_grad():
        assert torch.equal(layer(x, x, x), copy.deepcopy(layer)(x, x, x))


def test_parts_of_other_types_are_refused_as_in_numpy():
    a = functional.dot_product_attention(X, X, X, return_lse=True)
    b = [x.double() for x in a]
    from mha_c import functional as of_numpy

    for world, parts in ((functional, (*a, *b)), (of_numpy, [np.asarray(x) for x in (*a, *b)])):
        with pytest.raises(TypeError, match=r"out_b must be .*float32 like out_a, got .*float64"):
            world.merge(*parts)
