"""Each keyword of a layer's call means the same in each way of computing it: whoever adds one gives it a value here,
and is told of the ways that forget it."""

import ast
import inspect
from pathlib import Path

import numpy as np
import pytest
import torch

import masked_layers as masked
import mha_c
import own_device
from masked_layers import KINDS
from mha_c import torch as mt
from mha_c.torch._call import records
from ways import compiled, elsewhere, hooked

pytestmark = pytest.mark.usefixtures("float64")  # the angles of rope have torch's default type
INPUTS = "queries", "keys", "values", "X", "others"


def values_of(kind):
    """{keyword: a value that changes the result}; a reason where the tests of another file try it."""
    shape = (*(1,) * (2 if kind.heads > 1 else 1), *masked.sizes_of(kind))
    if kind.is_self:
        lens = causal = "refused, as test_third_layers.py tries: it is causal, and has no lengths"
    else:
        lens, causal = np.array([3, 4]), False if kind.own else "bottom_right"
    return {
        "valid_lens": lens, "causal": causal, "keep_mask": masked.keep_of(shape, empty=False),
        "bias": masked.bias_of(shape), "training": "a way to compute", "cache": "a way to compute",
    }  # fmt: skip


def layers_of(kind):
    """(torch's, NumPy's)."""
    pair = getattr(mt, kind.name)(*kind.arguments).double(), getattr(mha_c, kind.name)(*kind.arguments, dtype="float64")
    for layer in pair:
        layer.load_state_dict(masked.state_of(kind))
    return pair


def words_of(call):
    return [name for name in inspect.signature(call).parameters if name not in INPUTS]


@pytest.mark.parametrize("name", KINDS)
def test_each_keyword_has_a_value(name):
    kind = KINDS[name]
    for layer in layers_of(kind):
        words = words_of(getattr(layer, "forward", layer))
        assert {*words} <= {*values_of(kind)}, "a keyword of layers without a value in this file"


def outcomes(call, layer, inputs, given):
    """[output, weights, the inputs' gradients of a loss of both]."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = call(*inputs, **given)
    weights = layer.attention_weights
    loss = out.square().sum() + weights.square().sum()
    return [x.detach().cpu() for x in (out, weights, *torch.autograd.grad(loss, inputs))]


def of_torch(x, place="cpu"):
    return torch.from_numpy(x).to(place) if isinstance(x, np.ndarray) else x


def place_of(layer):
    return next((x.device for x in layer.parameters()), own_device.load())


CASES = [(name, word) for name, kind in KINDS.items() for word, x in values_of(kind).items() if not isinstance(x, str)]


@pytest.mark.by_day("name", "word", "way")
@pytest.mark.parametrize("way", [hooked, compiled, elsewhere], ids=lambda way: way.__name__)
@pytest.mark.parametrize(("name", "word"), CASES)
def test_a_keyword_means_the_same_in_another_way(name, word, way):
    kind, value = KINDS[name], values_of(KINDS[name])[word]
    layer, _ = layers_of(kind)
    inputs = [torch.from_numpy(x) for x in masked.inputs_of(kind)]
    expected = outcomes(layer, layer, inputs, {word: of_torch(value)})
    without = outcomes(layer, layer, inputs, {})
    assert all((a - b).abs().max() > 1e-3 for a, b in zip(expected, without)), "the value changes nothing"
    other, call = way(layer)
    if way is elsewhere:
        place = place_of(other)
        inputs, value = [x.to(place) for x in inputs], of_torch(value, place)
    found = outcomes(call, other, inputs, {word: of_torch(value)})
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


@pytest.mark.parametrize(("name", "word"), CASES)
def test_a_keyword_means_the_same_in_numpy_and_without_gradients(name, word):
    kind, value = KINDS[name], values_of(KINDS[name])[word]
    layer, in_numpy = layers_of(kind)
    inputs, given = masked.inputs_of(kind), {word: of_torch(value)}
    tensors = [torch.from_numpy(x) for x in inputs]
    out = layer(*tensors, **given)
    weights = layer.attention_weights.detach().numpy()
    np.testing.assert_allclose(in_numpy(*inputs, **{word: value}), out.detach().numpy(), rtol=0, atol=1e-12)
    np.testing.assert_allclose(in_numpy.attention_weights, weights, rtol=0, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(layer(*tensors, **given), out.detach(), rtol=0, atol=1e-12)


# Beside a cache lengths and corners mean other things, which have tests of their own, and layers that see later steps
# have none.
OF_STEPS = [
    (name, word) for name, word in CASES
    if word not in ("valid_lens", "causal") and (KINDS[name].own or not name.startswith("grouped"))
]  # fmt: skip


@pytest.mark.parametrize(("name", "word"), OF_STEPS)
def test_a_keyword_means_the_same_with_a_cache(name, word):
    kind, value = KINDS[name], values_of(KINDS[name])[word]
    x, value = masked.inputs_of(kind)[0], value[..., : masked.Q]
    for layer, to in zip(layers_of(kind), (of_torch, np.asarray)):
        inputs = [to(x)] * (1 if kind.is_self else 3)
        layer.eval()
        with torch.no_grad():
            expected = layer(*inputs, **{word: to(value)}, **({} if kind.own else {"causal": True}))
            found = layer(*inputs, **{word: to(value)}, cache=layer.new_cache(masked.B, masked.Q))
        np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=0, atol=1e-12)


def test_records_that_are_made_without_their_constructor_have_all_fields():
    """`new_record` takes any number of them: one that is forgotten would be told where it is read, or nowhere."""
    found = []
    for path in Path(mt.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "new_record"):
                continue
            kind, fields = node.args
            if hasattr(records, kind.id) and isinstance(fields, ast.Tuple):
                if not any(isinstance(each, ast.Starred) for each in fields.elts):
                    found.append((path.name, kind.id, len(fields.elts)))
    assert len(found) > 2
    for name, kind, count in found:
        assert count == len(getattr(records, kind)._fields), f"{name} makes {kind} of {count}"
