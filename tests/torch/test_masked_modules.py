"""keep_mask= and bias= in the calls of modules, in all ways of computing them: those of the formulas, gradients too."""

import copy
import pickle
import re

import numpy as np
import pytest
import torch

import masked_layers as masked
import mha_c
import needs
import own_device
from masked_layers import KINDS, LIMITS
from mha_c import torch as mt
from ways import compiled, elsewhere, hooked

pytestmark = pytest.mark.usefixtures("float64")  # the angles of rope have torch's default type


def layer_of(name, dtype="float64"):
    kind = KINDS[name]
    layer = getattr(mt, kind.name)(*kind.arguments).to(getattr(torch, dtype))
    layer.load_state_dict(masked.state_of(kind))
    return layer


def tensors_of(options, dtype="float64"):
    """The keywords of a call as tensors; the bias wants a gradient."""
    found = {name: torch.from_numpy(x) if name in ("keep_mask", "bias") else x for name, x in options.items()}
    if "bias" in found:
        found["bias"] = found["bias"].to(getattr(torch, dtype)).requires_grad_()
    if found.get("valid_lens") is not None:
        found["valid_lens"] = torch.tensor(found["valid_lens"])
    return found


def inputs_of(kind, dtype="float64"):
    return [torch.from_numpy(x).to(getattr(torch, dtype)).requires_grad_() for x in masked.inputs_of(kind)]


def check(layer, call, kind, inputs, given, want, limit):
    """Output, weights and all gradients of a call; gradients are sums of some tens of terms around 1."""
    out = call(*inputs, **given)
    weights = layer.attention_weights
    bias = given.get("bias")
    leaves = [*inputs, *layer.parameters(), *([] if bias is None else [bias])]
    grads = torch.autograd.grad(out, leaves, torch.from_numpy(masked.gradient_of(kind)).to(out))
    wanted = [*want.grads, *(want.of_parameters[name] for name, _ in layer.named_parameters())]
    wanted += [] if bias is None else [want.of_bias]
    pairs = [(out, want.out, limit), (weights, want.weights, limit)]
    for found, expected, most in [*pairs, *((a, b, 30 * limit) for a, b in zip(grads, wanted))]:
        found = found.detach().cpu().numpy()
        assert found.shape == np.shape(expected)
        np.testing.assert_allclose(found, expected, rtol=0, atol=most)


@pytest.mark.by_day("name", "which", "shape", "other", "dtype")
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize(("name", "which", "shape", "other"), masked.calls())
def test_modules_are_the_formulas(name, which, shape, other, dtype):
    kind, layer, options = KINDS[name], layer_of(name, dtype), masked.options_of(name, which, shape, other)
    want = masked.expected(kind, masked.state_of(kind), masked.inputs_of(kind), **options)
    inputs, given = inputs_of(kind, dtype), tensors_of(options, dtype)
    assert mha_c.explain(layer, *inputs, **given).as_dict()["way"] == "core"
    check(layer, layer, kind, inputs, given, want, LIMITS[dtype])
    with torch.no_grad():
        np.testing.assert_allclose(layer(*inputs, **given).numpy(), want.out, rtol=0, atol=LIMITS[dtype])


WAYS = {"hooks": hooked, "compile": compiled, "another device": elsewhere}
# For each way a mask of pairs, one for each item, and one for each query beside lengths.
FEW = [("both", 0, "alone"), ("keep_mask", 4, "lengths of queries"), ("bias", -2, "lengths, causal")]


@pytest.mark.parametrize(("which", "shape", "other"), FEW)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", KINDS)
def test_other_ways_mean_the_same(name, way, which, shape, other):
    kind = KINDS[name]
    options = masked.options_of(name, which, masked.shapes_of(kind)[shape], "alone" if kind.is_self else other)
    want = masked.expected(kind, masked.state_of(kind), masked.inputs_of(kind), **options)
    layer, call = WAYS[way](layer_of(name))
    inputs, given = inputs_of(kind), tensors_of(options)
    if way == "another device":
        there = next(iter(layer.parameters()), own_device.load())
        device = there.device if isinstance(there, torch.Tensor) else there
        inputs = [x.detach().to(device).requires_grad_() for x in inputs]
        given = {name: x.detach().to(device) if name in ("keep_mask", "bias") else x for name, x in given.items()}
        if "bias" in given:
            given["bias"].requires_grad_()
    check(layer, call, kind, inputs, given, want, 1e-12)


@pytest.mark.parametrize("way", ["core", "another device"])
@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if not kind.is_self])
def test_what_a_mask_hides_is_never_read(name, way):
    kind, layer = KINDS[name], layer_of(name)
    place = torch.device("cpu") if way == "core" else own_device.load()
    layer, keep = layer.to(place), torch.ones(masked.Q, masked.K, dtype=torch.bool)
    keep[:, [0, 2, -1]] = False
    results = []
    for spoilt in (False, True):
        inputs = [x.detach().clone() for x in inputs_of(kind)]
        for x in inputs[1:] if spoilt else ():
            x[:, ~keep[0]] = torch.nan
        inputs = [x.to(place).requires_grad_() for x in inputs]
        out = layer(*inputs, keep_mask=keep.to(place))
        grads = torch.autograd.grad(out.square().sum(), [*inputs, *layer.parameters()])
        results.append([x.detach().cpu() for x in (out, layer.attention_weights, *grads)])
    for clean, found in zip(*results):
        torch.testing.assert_close(found, clean, rtol=0, atol=0 if way == "core" else 1e-12)


@pytest.mark.parametrize("name", KINDS)
def test_weights_are_of_that_call_have_gradients_and_are_copied(name):
    kind, layer = KINDS[name], layer_of(name)
    options = masked.options_of(name, "both", masked.shapes_of(kind)[4], "alone")
    want = masked.expected(kind, masked.state_of(kind), masked.inputs_of(kind), **options).weights
    inputs, given = inputs_of(kind), tensors_of(options)
    out = layer(*inputs, **given)
    torch.testing.assert_close(layer.attention_weights.detach(), torch.from_numpy(want), rtol=0, atol=1e-12)
    loss = layer.attention_weights.square().sum()
    found = torch.autograd.grad(loss, [inputs[0], given["bias"]])
    expected = torch.from_numpy(want)
    assert found[1].shape == given["bias"].shape and found[0].abs().sum() > 0
    assert out.requires_grad
    with torch.no_grad():
        layer(*inputs, **given)
        given["keep_mask"].fill_(True)
        given["bias"].fill_(0.0)
    for one in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        torch.testing.assert_close(one.attention_weights, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", KINDS)
def test_projected_keys_and_cached_steps(name):
    kind, layer = KINDS[name], layer_of(name).eval()
    x = torch.randn(masked.B, 6, masked.FEATURES)
    given = [x] * (1 if kind.is_self else 3)
    if kind.name == "GQAAttention":
        layer.causal = True  # or it has no cache
    heads = (kind.heads,) if kind.heads > 1 else ()
    keep = torch.from_numpy(masked.keep_of((masked.B, *heads, 6, 6), empty=False))
    bias = torch.from_numpy(masked.bias_of((1, *heads, 6, 6)))
    corner = {} if kind.is_self else {"causal": True}
    with torch.no_grad():
        whole = layer(*given, keep_mask=keep, bias=bias, **corner)
        weights = layer.attention_weights
        for way in (layer, hooked(layer)[0], elsewhere(copy.deepcopy(layer))[0]):
            place = next(way.parameters(), x).device
            cache, first = way.new_cache(masked.B, 6), 0
            for n in (3, 1, 2):
                steps = [y[:, first : first + n].to(place) for y in given]
                rows = np.s_[..., first : first + n, : first + n]
                out = way(*steps, cache=cache, keep_mask=keep[rows].to(place), bias=bias[rows].to(place))
                torch.testing.assert_close(out.cpu(), whole[:, first : first + n], rtol=0, atol=1e-12)
                torch.testing.assert_close(way.attention_weights.cpu(), weights[rows], rtol=0, atol=1e-12)
                first += n
        if hasattr(layer, "project"):
            rows = np.s_[..., :4, :]
            out = layer(x[:, :4], layer.project(x, x), keep_mask=keep[rows], bias=bias[rows], causal="top_left")
            torch.testing.assert_close(out, whole[:, :4], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", KINDS if needs.NIGHTLY else {kind.name: name for name, kind in KINDS.items()}.values())
def test_exported(name):
    needs.export()
    kind, layer = KINDS[name], layer_of(name)
    options = masked.options_of(name, "both", masked.shapes_of(kind)[0], "alone")
    inputs, given = [x.detach() for x in inputs_of(kind)], tensors_of(options)
    given["bias"] = given["bias"].detach()
    exported = torch.export.export(layer, tuple(inputs), given).module()
    torch.testing.assert_close(exported(*inputs, **given), layer(*inputs, **given), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", KINDS)
def test_masks_that_are_refused_by_their_name(name):
    """And nothing of the call is left: the weights are those of the call before."""
    kind, layer = KINDS[name], layer_of(name)
    inputs, (n_queries, n_keys) = inputs_of(kind), masked.sizes_of(kind)
    scores = (masked.B, kind.heads, n_queries, n_keys) if kind.heads > 1 else (masked.B, n_queries, n_keys)
    layer(*inputs)
    weights = layer.attention_weights
    keep, bias = torch.ones(n_queries, n_keys, dtype=torch.bool), torch.ones(n_queries, n_keys)
    wrong = [
        (
            {"keep_mask": keep[:, 1:]},
            ValueError,
            rf"keep_mask has shape \(5, {n_keys - 1}\), .* = {re.escape(str(scores))}",
        ),
        ({"bias": bias[1:]}, ValueError, rf"bias has shape \(4, {n_keys}\), .* = {re.escape(str(scores))}"),
        ({"keep_mask": keep * 2}, ValueError, "keep_mask has dtype torch.int64 and numbers other than 0 and 1"),
        ({"keep_mask": bias}, TypeError, "keep_mask has dtype torch.float64, expected bool"),
        ({"keep_mask": "causal"}, TypeError, "keep_mask must be an array"),
        ({"bias": keep}, TypeError, "bias has dtype bool, .* as keep_mask"),
        ({"bias": bias.float()}, TypeError, "different types: .*bias torch.float32"),
        ({"bias": bias.tolist()}, TypeError, "bias must be a torch tensor"),
        ({"keep_mask": keep.to("meta")}, TypeError, "on different devices: .* keep_mask on meta"),
        ({"bias": bias.to("meta")}, TypeError, "on different devices: .* bias on meta"),
    ]
    for given, error, words in wrong:
        with pytest.raises(error, match=words):
            layer(*inputs, **given)
    assert layer.attention_weights is weights


@pytest.mark.parametrize("name", KINDS)
def test_the_same_bits_for_threads_batches_and_slices(name):
    """Of results, weights and the gradients of an item; those of parameters, sums over all items, for threads."""
    kind, layer, batch, steps = KINDS[name], layer_of(name, "float32"), 260, 24
    numbers = torch.Generator().manual_seed(4)
    x = torch.randn(batch, steps, masked.FEATURES, generator=numbers, dtype=torch.float32)
    heads = (kind.heads,) if kind.heads > 1 else ()
    keep = torch.rand(batch, *heads, steps, steps, generator=numbers) < 0.8
    bias = torch.randn(batch, *heads, 1, steps, generator=numbers, dtype=torch.float32)
    grad = torch.randn(batch, steps, masked.FEATURES, generator=numbers, dtype=torch.float32)
    facts = mha_c.explain(layer, *[x] * len(inputs_of(kind)), keep_mask=keep, bias=bias).as_dict()
    assert facts["n_slices"] > 1 or name in ("dot", "additive")  # which hand on too little between their steps

    def run(items, threads):
        torch.set_num_threads(threads)
        inputs = [x[items].clone().requires_grad_() for _ in inputs_of(kind)]
        added = bias[items].clone().requires_grad_()
        out = layer(*inputs, keep_mask=keep[items], bias=added)
        weights = layer.attention_weights.detach()
        of_items = torch.autograd.grad(out, [*inputs, added, *layer.parameters()], grad[items])
        n = len(inputs) + 1
        return [out.detach(), weights, *of_items[:n]], of_items[n:]

    before = torch.get_num_threads()
    try:
        (first, of_parameters), (second, again) = run(np.s_[:], 1), run(np.s_[:], 2)
        parts = [run(np.s_[i : i + 13], 1)[0] for i in range(0, batch, 13)]
        one = run(np.s_[17:18], 1)[0]
    finally:
        torch.set_num_threads(before)
    some = [torch.cat(found) for found in zip(*parts)]
    for results in second, some:
        assert all(torch.equal(found, expected) for found, expected in zip(results, first))
    assert all(torch.equal(found, expected[17:18]) for found, expected in zip(one, first))
    assert all(torch.equal(found, expected) for found, expected in zip(again, of_parameters))
