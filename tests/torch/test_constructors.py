"""Constructors of the torch modules: both generations' arguments, what they draw, where it lies, what editors show."""

import inspect
import pydoc
import re

import pytest
import torch
from torch import nn

import needs
from mha_c import torch as mt
from torch_modules import inputs


def test_both_generations_of_constructors():
    sized = mt.MultiHeadAttention(12, 10, 14, 20, 5, 0.5, use_bias=True)
    assert [tuple(p.shape) for p in (sized.W_q.weight, sized.W_k.weight, sized.W_v.weight)] == [
        (20, 10),
        (20, 12),
        (20, 14),
    ]
    lazy = mt.MultiHeadAttention(num_hiddens=20, num_heads=5, dropout=0.5)
    assert type(lazy.W_q) is nn.LazyLinear and lazy.training
    lazy(*inputs())
    for layer in (sized, lazy):
        assert [name for name, _ in layer.named_children()] == ["attention", "W_q", "W_k", "W_v", "W_o"]
        assert all(type(getattr(layer, name)) is nn.Linear for name in ("W_q", "W_k", "W_v", "W_o"))
    additive = mt.AdditiveAttention(8, 0.1)
    additive(*inputs())
    assert type(additive.w_v) is type(additive.W_q) is type(additive.W_k) is nn.Linear
    assert list(mt.AdditiveAttention(2, 20, 8, 0.1).state_dict()) == ["W_k.weight", "W_q.weight", "w_v.weight"]


@pytest.mark.parametrize(
    "make, error",
    [
        (lambda: mt.MultiHeadAttention(100, 7, 0.0), ValueError),
        (lambda: mt.MultiHeadAttention(100, 0, 0.0), ValueError),
        (lambda: mt.MultiHeadAttention(100.0, 5, 0.0), TypeError),
        (lambda: mt.MultiHeadAttention(100, 5), TypeError),
        (lambda: mt.MultiHeadAttention(100, 5, 1.5), ValueError),
        (lambda: mt.DotProductAttention(-0.1), ValueError),
        (lambda: mt.DotProductAttention(0.1, empty_rows="nan"), ValueError),
        (lambda: mt.AdditiveAttention(4, 4, 0.1), TypeError),
    ],
)
def test_constructor_errors(make, error):
    with pytest.raises(error):
        make()


def test_xavier_hooks_find_the_projections():
    layer = mt.MultiHeadAttention(8, 8, 8, 8, 2, 0.0)
    found = []
    layer.apply(lambda module: found.append(module) if type(module) is nn.Linear else None)
    assert found == [layer.W_q, layer.W_k, layer.W_v, layer.W_o]


def test_lazy_layer_draws_what_d2l_draws():
    d2l = needs.d2l("1.0.3")
    for name, arguments in (("MultiHeadAttention", (20, 5, 0.0, True)), ("AdditiveAttention", (20, 0.0))):
        states = []
        for layer in (getattr(mt, name)(*arguments), getattr(d2l, name)(*arguments)):
            tensors = inputs()
            torch.manual_seed(3)
            layer(*tensors, None)
            states.append(layer.state_dict())
        assert list(states[0]) == list(states[1])
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_constructors_show_their_arguments():
    shown = inspect.signature(mt.MultiHeadAttention)
    assert str(shown).startswith("(num_hiddens, num_heads, dropout, bias=False, *, ")
    assert list(shown.parameters)[4:] == ["empty_rows", "device", "dtype"]
    assert list(inspect.signature(mt.AdditiveAttention).parameters)[:2] == ["num_hiddens", "dropout"]
    page = re.sub(r"[\s|]", "", pydoc.render_doc(mt.MultiHeadAttention))  # from Python 3.13 on, an argument a line
    assert "MultiHeadAttention(num_hiddens,num_heads,dropout,bias=False" in page  # the second edition's, first
    assert "MultiHeadAttention(key_size,query_size,value_size,num_hiddens,num_heads,dropout,bias=False" in page

    class Own(mt.MultiHeadAttention):
        def __init__(self, width):
            super().__init__(width, 2, 0.0)

    assert list(inspect.signature(Own).parameters) == ["width"] and Own(8).num_heads == 2


@pytest.mark.parametrize("make", [
    lambda **place: mt.MultiHeadAttention(8, 8, 8, 8, 2, 0.0, True, **place),
    lambda **place: mt.MultiHeadAttention(8, 2, 0.0, **place),
    lambda **place: mt.AdditiveAttention(8, 8, 6, 0.0, **place),
    lambda **place: mt.AdditiveAttention(6, 0.0, **place),
])  # fmt: skip
def test_device_and_dtype_as_torchs_modules_have(make):
    layer, x = make(dtype=torch.float64), torch.randn(2, 3, 8, dtype=torch.float64)
    assert layer(x, x, x).dtype is torch.float64
    assert {p.dtype for p in layer.parameters()} == {torch.float64}
    assert {p.device.type for p in make(device="meta").parameters()} == {"meta"}
    assert {p.dtype for p in make().parameters()} == {torch.float32}


def test_reset_parameters_draws_as_a_new_layer_does():
    for make in (lambda: mt.MultiHeadAttention(8, 8, 8, 8, 2, 0.0, True), lambda: mt.AdditiveAttention(8, 8, 6, 0.0)):
        layer = make()
        before = [p.clone() for p in layer.parameters()]
        torch.manual_seed(3)
        layer.reset_parameters()
        torch.manual_seed(3)
        for own, fresh, old in zip(layer.parameters(), make().parameters(), before):
            assert torch.equal(own, fresh) and not torch.equal(own, old)
    mt.MultiHeadAttention(8, 2, 0.0).reset_parameters()  # lazy: drawn in the first call
    mt.DotProductAttention(0.0).reset_parameters()
