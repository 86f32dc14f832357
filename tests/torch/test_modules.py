"""Calls of the torch modules: modes and dropout, types, layouts, forms of lengths, and what is refused."""

import contextlib
import copy

import numpy as np
import pytest
import torch
from torch import nn

import mha_c
from mha_c import torch as mt
from torch_modules import inputs, sized_layers

# --- Modes, dropout -----------------------------------------------------------------------------


def test_dropout_follows_torchs_generator():
    layer, x = mt.MultiHeadAttention(16, 16, 16, 16, 4, 0.5), torch.randn(2, 8, 16)
    results = []
    for _ in range(2):
        torch.manual_seed(5)
        results.append(layer(x, x, x))
    assert torch.equal(*results) and not torch.equal(layer(x, x, x), results[0])
    state = torch.get_rng_state()
    layer(x, x, x, training=False)
    layer.eval()(x, x, x)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(layer(x, x, x, training=True), layer(x, x, x))
    plain = mt.MultiHeadAttention(16, 16, 16, 16, 4, 0.0)
    state = torch.get_rng_state()
    plain(x, x, x)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_dropout_modules_own_mode_decides():
    layer, x = mt.DotProductAttention(0.5).eval(), torch.randn(2, 8, 16)
    still = layer(x, x, x)
    layer.dropout.train()  # "Monte Carlo dropout"
    assert not torch.equal(layer(x, x, x), still)


def test_everything_dropped():
    layer, tensors = mt.MultiHeadAttention(12, 10, 14, 20, 5, 1.0), inputs(requires_grad=True)
    out = layer(*tensors)
    assert torch.equal(out, torch.zeros_like(out))
    out.sum().backward()
    assert all(torch.equal(x.grad, torch.zeros_like(x)) for x in tensors)


def test_changed_instruction_set(isa):
    layer, tensors = sized_layers()["multi-head with bias"], inputs()
    out = layer(*tensors)
    mha_c._core.set_isa("scalar")
    torch.testing.assert_close(layer(*tensors), out)
    with pytest.raises(RuntimeError) if isa != "scalar" else contextlib.nullcontext():
        mha_c._core.set_isa(isa)
        layer.attention_weights.sum()


# --- Types -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["multi-head", "multi-head with bias", "additive", "dot"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_floats(name, dtype):
    """Computed in float32, then rounded once: within one rounding of the float32 result."""
    if name == "dot":
        layer, tensors = mt.DotProductAttention(0.0), inputs(sizes=(12, 12, 14), requires_grad=True)
    else:
        layer, tensors = sized_layers()[name], inputs(requires_grad=True)
    layer.to(dtype)
    halves = [x.detach().to(dtype).requires_grad_() for x in tensors]
    singles = [x.detach().float().requires_grad_() for x in halves]
    out = layer(*halves, torch.tensor([3, 2]))
    wide = copy.deepcopy(layer).float()
    expected = wide(*singles, torch.tensor([3, 2]))
    assert out.dtype == dtype and layer.attention_weights.dtype == dtype
    assert torch.equal(out, expected.to(dtype))
    out.float().sum().backward()
    expected.to(dtype).float().sum().backward()
    for half, single in zip([*halves, *layer.parameters()], [*singles, *wide.parameters()]):
        assert half.grad.dtype == dtype and torch.equal(half.grad, single.grad.to(dtype))


REFUSED = {
    "all of another type": (
        TypeError, r"float64.*\.to\(dtype\)", lambda layer, *qkv: layer(*[x.double() for x in qkv]),
    ),
    "one of another type": (TypeError, "float", lambda layer, q, k, v: layer(q, k.double(), v)),
    "an array": (TypeError, "torch tensor, got ndarray", lambda layer, q, k, v: layer(q.numpy(), k, v)),
    "whole numbers": (TypeError, "int64", lambda layer, q, k, v: layer(q.long(), k, v)),
    "features": (mha_c.ShapeError, "queries", lambda layer, q, k, v: layer(q[..., :3], k, v)),
    "items": (mha_c.ShapeError, "keys", lambda layer, q, k, v: layer(q, k[:1], v)),
    "three lengths": (ValueError, "valid_lens", lambda layer, q, k, v: layer(q, k, v, torch.tensor([1, 2, 3]))),
    "bools": (TypeError, "valid_lens", lambda layer, q, k, v: layer(q, k, v, torch.tensor([True, False]))),
    "NaN": (ValueError, "valid_lens", lambda layer, q, k, v: layer(q, k, v, torch.tensor([1.0, float("nan")]))),
    "no batch": (
        mha_c.ShapeError, r"\(B, Q, features\)", lambda _, q, k, v: mt.MultiHeadAttention(20, 5, 0.0)(q[0], k[0], v[0]),
    ),
    "queries on meta": (TypeError, r"queries on meta.*no numbers", lambda layer, q, k, v: layer(q.to("meta"), k, v)),
    "weights on meta": (
        TypeError, r"parameters on meta.*no numbers", lambda layer, q, k, v: copy.deepcopy(layer).to("meta")(q, k, v),
    ),
    "k of a function on meta": (
        TypeError, r"k on meta.*no numbers", lambda _, q, k, v: mt.functional.dot_product_attention(q, q.to("meta"), q),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_errors_of_a_call(what):
    error, words, call = REFUSED[what]
    with pytest.raises(error, match=words):
        call(sized_layers()["multi-head"], *inputs())


def test_what_is_missing_is_said():
    layer, (q, k, v) = sized_layers()["multi-head"], inputs()
    alike = r"keys, values\.  For self-attention write layer\(X, X, X\)"
    for arguments, missing in (
        ((q, k), "values"), ((None, k, v), "queries"), ((q, None, v), "keys"), ((q,), alike),
        ((), "queries, keys, values"),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=rf"^MultiHeadAttention is called .*: {missing}$"):
            layer(*arguments)
    with pytest.raises(TypeError, match=r"^k must be a torch tensor, got NoneType"):
        mt.functional.dot_product_attention(q, None, q)
    for error in (mha_c.ShapeError, RuntimeError):  # ours, and torch's
        with pytest.raises(error, match=r"size mismatch for W_q\.weight"):
            layer.load_state_dict({key: torch.zeros(3, 3) for key in layer.state_dict()})
    with pytest.raises(RuntimeError, match="Missing key"):
        layer.load_state_dict({})


LENGTHS = (
    *(None, [3, 2], np.array([3, 2]), torch.tensor([2.5, 1.5]), torch.tensor([3, 2]).int()),
    *(torch.tensor([3, 2]).bfloat16(), torch.tensor([3.0, 2.0], requires_grad=True)),
    torch.tensor([[3] * 4, [2] * 4]),
)


@pytest.mark.parametrize("lens", LENGTHS)
def test_forms_of_lengths(lens):
    layer, tensors = sized_layers()["multi-head"], inputs()
    expected = layer(*tensors, None if lens is None else torch.tensor([3, 2]))
    assert torch.equal(layer(*tensors, lens), expected)


def test_layouts_and_shared_inputs():
    layer = mt.MultiHeadAttention(12, 12, 12, 12, 3, 0.0)
    base = torch.randn(5, 2, 24)
    dense = base.permute(1, 0, 2)[..., ::2].contiguous()
    for x in (base.permute(1, 0, 2)[..., ::2], dense.flip(0).flip(0), dense.clone(), nn.Parameter(dense)):
        torch.testing.assert_close(layer(x, x, x), layer(dense, dense.clone(), dense.clone()))
    same = [x.clone().requires_grad_() for x in [dense] * 3]
    layer(same[0], same[0], same[0]).square().sum().backward()
    apart = [x.clone().requires_grad_() for x in [dense] * 3]
    layer(*apart).square().sum().backward()
    torch.testing.assert_close(same[0].grad, sum(x.grad for x in apart))
    pair = [x.clone().requires_grad_() for x in [dense] * 2]
    layer(pair[0], pair[1], pair[1]).square().sum().backward()
    torch.testing.assert_close(pair[1].grad, apart[1].grad + apart[2].grad)


def test_empty_sizes():
    layer = mt.MultiHeadAttention(12, 12, 12, 12, 3, 0.5)
    for batch, queries in ((0, 4), (2, 0)):
        x, y = torch.randn(batch, queries, 12, requires_grad=True), torch.randn(batch, 3, 12, requires_grad=True)
        out = layer(x, y, y)
        out.sum().backward()
        assert out.shape == (batch, queries, 12) and x.grad.shape == x.shape
        assert torch.equal(layer.W_k.weight.grad, torch.zeros(12, 12))
