"""Parts whose weights are quantized, packed, or brought by hooks for the call: called as d2l's own class calls them."""

import pytest
import torch
from torch import nn

import needs
from mha_c import torch as mt
from notebook import GENERATIONS, multi_head, of_a_generation, same_under_patch
from quantized import Int8Linear, Packed4bit
from whole_layers import LENS, called, inputs, layers

pytestmark = pytest.mark.usefixtures("float64")  # so that rounding is far below what is looked for
d2l = pytest.fixture(of_a_generation, params=GENERATIONS)


def replaced(layer, make, *names):
    for name in names or ("W_q", "W_k", "W_v", "W_o", "w_v"):
        if hasattr(layer, name):
            setattr(layer, name, make(getattr(layer, name)))


@pytest.mark.parametrize("kind", [Int8Linear, Packed4bit])
@pytest.mark.parametrize("names", [(), ("W_k",), ("W_v", "W_o")])
@same_under_patch
def test_quantized_children(d2l, kind, names):
    found = []
    for layer in layers(d2l).values():
        layer(*inputs(), None)
        replaced(layer, kind, *names)
        for lens in LENS.values():
            found += called(layer, lens)
    return found


@pytest.mark.parametrize("away", ["meta", "float8", "int8"])
@same_under_patch
def test_weights_that_hooks_bring_for_the_call(d2l, away):
    """accelerate's offload keeps weights on meta, layer-wise casting in another type, until a child is called."""
    if away == "float8":
        needs.of_torch("torch.float8_e4m3fn")
    found = []
    for layer in layers(d2l).values():
        layer(*inputs(), None)
        layer.requires_grad_(False)
        for child in [one for one in layer.modules() if type(one) is nn.Linear]:
            whole = child.weight
            if away == "meta":
                there = nn.Parameter(whole.to("meta"), requires_grad=False)
            else:
                kind = torch.int8 if away == "int8" else torch.float8_e4m3fn
                there = nn.Parameter(whole.float().to(kind), requires_grad=False)
            child.weight = there
            child.register_forward_pre_hook(lambda module, args, whole=whole: setattr(module, "weight", whole))
            child.register_forward_hook(lambda module, args, out, there=there: setattr(module, "weight", there))
        for lens in LENS.values():
            found += called(layer, lens)
    return found


def test_convert_calls_the_parts_of_a_layer_that_is_quantized_already(d2l):
    torch.set_default_dtype(torch.float32)  # the fixture puts it back
    model = nn.Sequential(multi_head(d2l), multi_head(d2l), d2l.DotProductAttention(0.0))
    for layer in model[:2]:
        layer(*[x.float() for x in inputs()], None)
    replaced(model[0], Int8Linear)
    given = *[x.float() for x in inputs()], LENS["items"]
    with torch.no_grad():
        expected = model[0](*given)
    mt.convert(model)
    assert [type(x).__module__.startswith("mha_c") for x in model] == [True] * 3
    called = []
    for name, part in model[0].named_children():
        if name != "attention":
            assert isinstance(part, Int8Linear)
            part.register_forward_hook(lambda *_, name=name: called.append(name))
    for _ in range(3):
        with torch.no_grad():
            torch.testing.assert_close(model[0](*given), expected)
    assert called == ["W_q", "W_k", "W_v", "W_o"] * 3


@pytest.mark.parametrize("default", [torch.float32, torch.float64, torch.bfloat16])
def test_convert_whatever_the_default_type(d2l, default):
    """Classes are compared in float32; only weights and inputs that a program makes have its default type."""
    torch.set_default_dtype(default)  # the fixture puts it back
    model = nn.Sequential(multi_head(d2l), d2l.DotProductAttention(0.0), nn.MultiheadAttention(8, 2, batch_first=True))
    model[0](*[x.to(default) for x in inputs()], None)
    mt.convert(model)
    assert all(type(x).__module__.startswith("mha_c") for x in model)
