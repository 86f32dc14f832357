"""causal= in a module's call, in all ways of computing it: the core, an operator, torch's operations; gradients too."""

import copy
import inspect
import pickle

import numpy as np
import pytest
import torch

import needs
import own_device
from causal_cases import CASES, LENS, seen
from features import weights_of
from mha_c import torch as mt
from ways import compiled, hooked

LAYERS = {
    "MultiHeadAttention": lambda: mt.MultiHeadAttention(8, 8, 8, 8, 2, 0.0),
    "DotProductAttention": lambda: mt.DotProductAttention(0.0),
    "AdditiveAttention": lambda: mt.AdditiveAttention(8, 8, 6, 0.0),
}
ALL = {
    **LAYERS,
    "KernelAttention": lambda: mt.KernelAttention(width=2.0),
    "GQAAttention": lambda: mt.GQAAttention(8, 4, 2, rope=True, causal=False),
}


def drawn(n_queries, n_keys):
    rng = np.random.default_rng(1)
    return [torch.from_numpy(rng.standard_normal((2, n, 8))).requires_grad_() for n in (n_queries, n_keys, n_keys)]


def layer_of(name):
    torch.manual_seed(0)
    return ALL[name]().double()


def outcome(layer, call, inputs, **given):
    out = call(*inputs, **given)
    weights = weights_of(layer)
    loss = (out * torch.linspace(-1, 1, out.numel()).reshape(out.shape).to(out)).sum() + weights.square().sum()
    grads = torch.autograd.grad(loss, [*inputs, *layer.parameters()], allow_unused=True)
    return [out, weights, *grads]


WAYS = {"core": lambda layer: (layer, layer), "hooks": hooked, "compile": compiled}
CORNERS = [(True, 5, 5), ("bottom_right", 3, 7)]  # for a compiler, which takes a second and sees no sizes
CALLS = [(way, *case) for way in WAYS for case in (CORNERS if way == "compile" else CASES)]


@pytest.mark.by_day("name", "way", ("causal", "n_queries", "n_keys"))
@pytest.mark.parametrize(("way", "causal", "n_queries", "n_keys"), CALLS)
@pytest.mark.parametrize("name", ALL)
def test_causal_is_lengths_of_each_query(name, way, causal, n_queries, n_keys):
    inputs = drawn(n_queries, n_keys)
    few = [LENS["of items"]] if way == "compile" else LENS.values()
    for lens in few:
        layer = layer_of(name)
        expected = outcome(layer, layer, inputs, valid_lens=seen(causal, n_queries, n_keys, lens))
        layer, call = WAYS[way](layer)
        for given in (lens, None if lens is None else torch.tensor(lens)):
            found = outcome(layer, call, inputs, valid_lens=given, causal=causal)
            for one, other in zip(found, expected):  # some tens of terms around 1, in another order
                torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("causal", ["top_left", "bottom_right"])
def test_on_another_device(name, causal):
    device = own_device.load()
    for n_queries, n_keys, lens in ((3, 7, [2, 6]), (3, 7, None), (7, 3, None), (5, 5, None)):
        layer, inputs = layer_of(name), drawn(n_queries, n_keys)
        expected = outcome(layer, layer, inputs, valid_lens=lens, causal=causal)
        there = [x.detach().to(device).requires_grad_() for x in inputs]
        found = outcome(layer.to(device), layer, there, valid_lens=lens, causal=causal)
        for one, other in zip(found, expected):
            torch.testing.assert_close(one.cpu(), other, rtol=0, atol=1e-12)


def test_keys_that_the_corner_hides_may_hold_anything():
    """In all ways: NaN in them reaches no output and no gradient."""
    for way in ("core", "another device"):
        layer = layer_of("MultiHeadAttention")
        q, k, v = drawn(3, 7)
        clean = outcome(layer, layer, [q, k, v], causal="top_left")
        spoilt = [x.detach().clone() for x in (q, k, v)]
        for x in spoilt[1:]:
            x[:, 3:] = torch.nan
        if way != "core":
            layer, spoilt = layer.to(own_device.load()), [x.to(own_device.load()) for x in spoilt]
        found = outcome(layer, layer, [x.requires_grad_() for x in spoilt], causal="top_left")
        for one, other in zip(found, clean):
            torch.testing.assert_close(one.cpu(), other, rtol=0, atol=1e-12)


def test_torch_kernels_get_no_array_for_a_causal_mask():
    """On another device: scaled_dot_product_attention is told is_causal, as its fastest kernels take no mask."""
    layer, x = layer_of("MultiHeadAttention").to(own_device.load()), torch.randn(2, 5, 8).double()
    y = x.to(next(layer.parameters()).device)
    with torch.autograd.profiler.profile(record_shapes=True) as found:
        out = layer(y, y, y, causal=True)
    (shapes,) = [x.input_shapes for x in found.function_events if x.name == "aten::scaled_dot_product_attention"]
    assert len(shapes[0]) == 4 and shapes[3] == []  # queries; the mask, which is None
    torch.testing.assert_close(out.cpu(), layer.cpu()(x, x, x, causal=True), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ALL)
def test_under_transforms(name):
    needs.of_torch("torch.func")
    layer, (x, *_) = layer_of(name), drawn(5, 5)
    x = x.detach()
    expected = layer(x, x, x, causal=True)
    alone = torch.func.vmap(lambda one: layer(one[None], one[None], one[None], causal=True)[0])(x)
    torch.testing.assert_close(alone, expected, rtol=0, atol=1e-12)
    loss = lambda y, **given: layer(y, y, y, **given).square().sum()  # noqa: E731
    lens = torch.arange(1, 6).repeat(2, 1)
    found, wanted = torch.func.grad(lambda y: loss(y, causal=True))(x), torch.func.grad(loss)(x, valid_lens=lens)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ALL)
def test_exported(name):
    needs.export()
    layer, (x, *_) = layer_of(name), drawn(5, 5)
    x = x.detach()
    exported = torch.export.export(layer, (x, x, x), {"causal": True}).module()
    torch.testing.assert_close(exported(x, x, x, causal=True), layer(x, x, x, causal=True), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", LAYERS)
def test_a_leaf_of_fx_keeps_it(name):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = layer_of(name)

        def forward(self, x):
            return self.attention(x, x, x, causal=True)

    model, (x, *_) = Model(), drawn(5, 5)
    torch.testing.assert_close(torch.fx.symbolic_trace(model)(x), model(x), rtol=0, atol=0)


@pytest.mark.parametrize("name", LAYERS)
def test_a_cached_call_is_causal_already(name):
    layer, (x, *_) = layer_of(name).eval(), drawn(5, 5)
    with torch.no_grad():
        whole = layer(x, x, x, causal=True)
        for causal in (True, "bottom_right", False):
            cache = layer.new_cache(2, 5)
            steps = [layer(new, new, new, cache=cache, causal=causal) for new in x.split([3, 1, 1], 1)]
            torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=0, atol=1e-12)
        kv = layer.project(x, x)
        torch.testing.assert_close(layer(x, kv, causal=True), whole, rtol=0, atol=1e-12)
        with pytest.raises(ValueError, match=r"'top_left'.*is causal from its last key"):
            layer(x, x, x, cache=layer.new_cache(2, 5), causal="top_left")


@pytest.mark.parametrize("name", ALL)
def test_what_is_refused(name):
    layer, (q, k, v) = layer_of(name), drawn(3, 7)
    with pytest.raises(ValueError, match="causal=True is ambiguous for 3 queries and 7 keys: write 'top_left'"):
        layer(q, k, v, causal=True)
    with pytest.raises(ValueError, match="causal must be False, True, 'top_left' or 'bottom_right', got 'left'"):
        layer(q, k, v, causal="left")
    with pytest.raises(TypeError, match="causal must be False, True"):
        layer(q, k, v, causal=1)
    with pytest.raises(ValueError, match="valid_lens has shape"):
        layer(q, k, v, [1, 2, 3], causal="top_left")
    with pytest.raises(TypeError, match=r"by name|positional"):
        layer(q, k, v, None, True)


def test_weights_outlive_the_call_and_its_copies():
    layer, (x, *_) = layer_of("MultiHeadAttention"), drawn(5, 5)
    layer(x, x, x, [3, 5], causal=True)
    expected = layer.attention_weights.detach()
    for one in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        torch.testing.assert_close(one.attention_weights, expected, rtol=0, atol=0)


def test_what_exporters_read_of_a_call_has_the_arguments_that_are_ignored():
    """torch.export binds what it is given, X three times in the book's blocks, to the signature."""
    layer, x = mt.CausalAttention(8, 2), torch.ones(1, 3, 8)
    bound = inspect.signature(layer.forward).bind(x, x, x, None, causal=True)
    assert bound.arguments["others"] == (x, x, None)
    with pytest.raises(TypeError):
        inspect.signature(layer.forward).bind(x, mask=None)
