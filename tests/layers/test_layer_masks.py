"""Every layer with keep_mask and bias of every shape, beside lengths and causal masks: plain formulas in float64."""

import itertools
import pickle

import numpy as np
import pytest

import mha_c
from mha_c import _core
from mha_c._arguments.options import core_options
from mha_c._summary import Scores
from plain_layers import Plain, computed, seen

B, Q, K, HIDDENS = 2, 5, 7, 16
KINDS = "multi_head", "dot_product", "additive", "grouped", "grouped_rope", "causal", "causal_rope"


def made(kind, dtype=np.float64, bias=True):
    options = {"dtype": dtype, "rng": 3}
    if kind == "multi_head":
        layer = mha_c.MultiHeadAttention(*[HIDDENS] * 4, 4, 0.0, bias=bias, **options)
    elif kind == "dot_product":
        return mha_c.DotProductAttention(0.0, **options)
    elif kind == "additive":
        return mha_c.AdditiveAttention(6, 0.0, **options)
    elif kind.startswith("grouped"):
        rope = kind.endswith("rope")
        layer = mha_c.GQAAttention(HIDDENS, 4, 2, bias=bias, rope=rope, causal=False, **options)
    else:
        layer = mha_c.CausalAttention(HIDDENS, 4, bias=bias, rope=kind.endswith("rope"), **options)
    for name in layer._parameters.states if bias else ():
        linear = getattr(layer, name)
        linear.bias = np.random.default_rng(len(name)).standard_normal(linear.bias.shape)
    return layer


def plain(layer):
    """The same layer as formulas."""
    states = {name: (s.weight, s.bias) for name, s in layer._parameters.states.items()}
    if "W_qkv" in states:
        weight, bias = states["W_qkv"]
        parts = zip(np.split(weight, 3), [None] * 3 if bias is None else np.split(bias, 3))
        states.update(zip(("W_q", "W_k", "W_v"), parts))
    found = [states.get(name, (None, None)) for name in ("W_q", "W_k", "W_v", "W_o")]
    weights, biases = ([None if x is None else x.astype(np.float64) for x in xs] for xs in zip(*found))
    w_v = states["w_v"][0][0].astype(np.float64) if "w_v" in states else None
    heads = getattr(layer, "num_heads", 1)
    kv_heads = getattr(layer, "num_kv_heads", heads)
    empty = layer.empty_rows
    return Plain(weights, biases, heads, kv_heads, w_v, getattr(layer, "rope", False), empty)


def drawn(kind, rng, dtype):
    """Inputs of a call: three, or one."""
    n_keys = Q if kind.startswith("causal") else K
    x = rng.standard_normal((B, Q, HIDDENS)).astype(dtype)
    if kind.startswith("causal"):
        return (x,), (x, x, x)
    inputs = x, *(rng.standard_normal((B, n_keys, HIDDENS)).astype(dtype) for _ in range(2))
    return inputs, inputs


def shapes(heads, n_keys, with_heads):
    """All shapes that broadcast."""
    yield from itertools.product((Q, 1), (n_keys, 1))
    yield from itertools.product((B, 1), *[(heads, 1)] * with_heads, (Q, 1), (n_keys, 1))


LIMIT = {np.float32: 1e-5, np.float64: 1e-12}  # the issue's; sums of some 16 terms around 1: 16 eps is 2e-6 and 4e-15


def close(found, expected, dtype):
    np.testing.assert_allclose(found, expected, rtol=0, atol=LIMIT[dtype] * max(1, np.abs(expected).max(initial=0)))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_masks_of_all_shapes_equal_plain_formulas(kind, dtype, isa):
    rng = np.random.default_rng(1)
    layer = made(kind, dtype)
    given, inputs = drawn(kind, rng, dtype)
    layer(*given)  # fixes the sizes
    formula, n_keys, is_causal = plain(layer), inputs[1].shape[1], kind.startswith("causal")
    all_shapes = list(shapes(formula.heads, n_keys, layer._by_head))
    for i, shape in enumerate(all_shapes):
        other = all_shapes[(i * 7 + 3) % len(all_shapes)]
        keep = rng.random(shape) < 0.7 if i % 3 != 1 else None
        bias = rng.standard_normal(other if keep is not None else shape).astype(dtype) if i % 3 else None
        lens = rng.integers(0, n_keys + 2, (B, Q) if i % 2 else B) if i % 4 == 0 and not is_causal else None
        corner = "top_left" if is_causal else (None, "top_left", "bottom_right")[i % 3]
        options = {"keep_mask": keep, "bias": bias}
        if not is_causal:
            options.update(valid_lens=lens, causal=corner or False)
        full_keep, full_bias = (x if x is None or layer._by_head or x.ndim == 2 else x[:, None] for x in (keep, bias))
        visible = seen(B, Q, n_keys, lens, corner, full_keep)
        grad = rng.standard_normal((B, Q, layer(*given).shape[2])).astype(dtype)
        expected = computed(formula, inputs, visible, 0.0 if bias is None else full_bias, grad)
        close(layer(*given, **options), expected.out, dtype)
        weights = layer.attention_weights
        close(weights, expected.weights if layer._by_head else expected.weights[:, 0], dtype)
        layer.zero_grad()
        trained = layer(*given, training=True, **options)
        close(trained, expected.out, dtype)
        close(layer.attention_weights, weights, dtype)
        grads = layer.backward(grad)
        of_inputs = [sum(expected.inputs)] if is_causal else expected.inputs
        for found, right in zip([grads] if is_causal else grads, of_inputs):
            close(found, right, dtype)
        check_parameters(layer, expected, dtype)


def check_parameters(layer, expected, dtype):
    W, b, w_v = expected.parameters[:4], expected.parameters[4:8], expected.parameters[8]
    names = dict(zip(("W_q", "W_k", "W_v", "W_o"), zip(W, b)))
    if hasattr(layer, "W_qkv"):
        parts = [names.pop(name) for name in ("W_q", "W_k", "W_v")]
        names["W_qkv"] = [None if x[0] is None else np.concatenate(x) for x in zip(*parts)]
    grads = {parameter.name: parameter.grad for _, parameter in layer.named_parameters()}
    for name, pair in names.items():
        for suffix, right in zip(("weight", "bias"), pair):
            assert (f"{name}.{suffix}" in grads) == (right is not None)
            if right is not None:
                close(grads[f"{name}.{suffix}"], right, dtype)
    if w_v is not None:
        close(grads["w_v.weight"][0], w_v, dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_keys_that_a_mask_hides_are_never_read(kind, isa):
    """NaN in them changes nothing: no result, no gradient; in blocks, in the middle, on the left."""
    rng = np.random.default_rng(2)
    layer, (given, inputs) = made(kind), drawn(kind, rng, np.float64)
    layer(*given)
    n_keys = inputs[1].shape[1]
    hidden = np.zeros((B, n_keys), bool)
    hidden[0, :2], hidden[1, [1, 3]] = True, True
    keep = np.broadcast_to(~hidden[:, None], (B, Q, n_keys))
    keep = keep[:, None] if layer._by_head else keep
    if kind.startswith("causal"):  # where X is the queries as well: those queries see nothing
        keep = keep & ~hidden[:, None, :, None]
    bad = [np.array(x) for x in inputs]
    for i in (1, 2):
        bad[i][hidden] = np.nan
    if kind.startswith("causal"):
        found, expected = layer(bad[1], keep_mask=keep), layer(given[0], keep_mask=keep)
        assert np.array_equal(found[~hidden], expected[~hidden])
        return
    grad = rng.standard_normal(layer(*given).shape)

    def run(inputs):
        layer.zero_grad()
        out = layer(*inputs, keep_mask=keep, training=True)
        grads = layer.backward(grad)
        return [out, layer.attention_weights, *grads, *(p.grad for p in layer.parameters())]

    for found, expected in zip(run(bad), run(inputs)):
        assert np.array_equal(found, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_masks_give_the_same_bits_for_threads_batches_and_slices(kind):
    rng, layer, batch, steps = np.random.default_rng(4), made(kind, np.float32), 260, 24
    x = rng.standard_normal((batch, steps, HIDDENS)).astype(np.float32)
    given = (x,) if kind.startswith("causal") else (x, x, x)
    axes = (1,) if layer._by_head else ()
    keep = rng.random((batch, *axes, steps, steps)) < 0.8
    bias = rng.standard_normal((batch, *axes, 1, steps)).astype(np.float32)
    layer(*given)
    facts = mha_c.explain(layer, *given, keep_mask=keep, bias=bias).as_dict()
    assert facts["n_slices"] > 1 or kind in ("dot_product", "additive")  # which hand on too little between their steps
    results = []
    before = mha_c.get_num_threads()
    for threads in (1, 2):
        mha_c.set_num_threads(threads)
        results.append((layer(*given, keep_mask=keep, bias=bias), layer.attention_weights))
    mha_c.set_num_threads(before)
    alone = [
        (
            layer(*(a[i : i + 1] for a in given), keep_mask=keep[i : i + 1], bias=bias[i : i + 1]),
            layer.attention_weights,
        )
        for i in range(batch)
    ]
    for one in (results[1], [np.concatenate(parts) for parts in zip(*alone)]):
        for found, expected in zip(one, results[0]):
            assert np.array_equal(found, expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [None, 3])
def test_steps_with_a_cache_take_masks_over_all_steps(kind, window):
    rng, layer = np.random.default_rng(5), made(kind)
    x = rng.standard_normal((B, 6, HIDDENS))
    one_input = kind.startswith("causal")
    if kind.startswith("grouped"):
        layer = mha_c.GQAAttention(HIDDENS, 4, 2, rope=kind.endswith("rope"), dtype=np.float64, rng=3)
    call = (lambda y, **o: layer(y, **o)) if one_input else (lambda y, **o: layer(y, y, y, **o))
    call(x)
    axes = (layer._num_heads,) if layer._by_head else ()
    keep = rng.random((B, *axes, 6, 6)) < 0.6
    keep |= np.eye(6, dtype=bool)  # a step sees itself: an empty row of a step is 0 in every layer
    bias = rng.standard_normal((B, *axes, 6, 6))
    step = np.arange(6)
    near = (step[:, None] - step < window) if window else np.ones((6, 6), bool)
    full = call(x, keep_mask=keep & near, bias=bias, **({} if one_input else {"causal": True}))
    weights = layer.attention_weights
    cache, found, shown = layer.new_cache(B, 6, window=window), [], []
    for first, last in ((0, 2), (2, 3), (3, 6)):
        masks = {"keep_mask": keep[..., first:last, :last], "bias": bias[..., first:last, :last]}
        found.append(call(x[:, first:last], cache=cache, **masks))
        part = layer.attention_weights
        shown.append(np.pad(part, [(0, 0)] * (part.ndim - 1) + [(0, 6 - part.shape[-1])]))
    np.testing.assert_allclose(np.concatenate(found, 1), full, atol=1e-12)
    np.testing.assert_allclose(np.concatenate(shown, -2), weights, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_masks_are_refused_and_change_nothing(kind):
    rng, layer = np.random.default_rng(6), made(kind)
    given, inputs = drawn(kind, rng, np.float64)
    before = layer(*given)
    weights, n_keys = layer.attention_weights, inputs[1].shape[1]
    rank = 4 if layer._by_head else 3
    wrong = [
        ({"keep_mask": np.ones((Q + 1, n_keys), bool)}, mha_c.ShapeError, rf"keep_mask.*{Q + 1}"),
        ({"bias": np.zeros((Q, n_keys + 1))}, mha_c.ShapeError, rf"bias.*{n_keys + 1}"),
        ({"keep_mask": np.ones((1,) * (rank + 1) + (Q, n_keys), bool)}, mha_c.ShapeError, "keep_mask"),
        ({"keep_mask": np.ones(n_keys, bool)}, mha_c.ShapeError, "keep_mask"),
        ({"keep_mask": np.full((Q, n_keys), 2)}, ValueError, "numbers other than 0 and 1"),
        ({"keep_mask": np.ones((Q, n_keys))}, TypeError, "keep_mask"),
        ({"bias": np.ones((Q, n_keys), bool)}, TypeError, "bias.*keep_mask"),
        ({"bias": np.ones((Q, n_keys), np.float32)}, TypeError, "bias"),
    ]
    for options, error, message in wrong:
        with pytest.raises(error, match=message):
            layer(*given, **options)
        with pytest.raises(error, match=message):
            layer(*given, training=True, **options)
        assert layer.attention_weights is weights
    ones = layer(*given, keep_mask=np.ones((Q, n_keys), int))
    assert np.array_equal(ones, before)


def test_weights_are_those_of_the_call_whatever_becomes_of_the_mask():
    rng, layer = np.random.default_rng(7), made("multi_head")
    x = rng.standard_normal((B, 40, HIDDENS))  # more keys than features: queries and keys are kept
    keep, bias = rng.random((40, 40)) < 0.5, rng.standard_normal((40, 40))
    layer(x, x, x, keep_mask=keep, bias=bias)
    copies = [layer, pickle.loads(pickle.dumps(layer))]
    keep[:], bias[:] = True, 0
    first, second = (one.attention_weights for one in copies)
    assert np.array_equal(first, second) and not np.array_equal(first, weights_without(layer, x))


def weights_without(layer, x):
    layer(x, x, x)
    return layer.attention_weights


@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_is_one_call_of_the_core(kind, monkeypatch):
    layer, (given, inputs) = made(kind), drawn(kind, np.random.default_rng(8), np.float64)
    layer(*given)
    keep = np.tri(Q, inputs[1].shape[1], dtype=bool)
    from mha_c._layer import call

    seen_calls = []
    monkeypatch.setattr(call, "layer_forward", lambda *a: seen_calls.append(1) or _core.layer_forward(*a))
    layer(*given, keep_mask=keep)
    assert seen_calls == [1] and "the compiled core" in str(mha_c.explain(layer, *given, keep_mask=keep))


def test_grouped_layers_of_an_earlier_version_show_their_weights():
    """What their calls had kept: the heads, and the core's options."""
    layer, x = made("grouped"), np.random.default_rng(9).standard_normal((B, Q, HIDDENS))
    layer(x, x, x)
    weights = layer.attention_weights
    q, k = (np.split(_core.linear(x, W), n, axis=2) for W, n in heads_of(layer))
    q, k = (np.stack(heads, axis=1) for heads in (q, k))
    state = {name: value for name, value in vars(layer).items() if name not in ("_dropout", "_empty_rows", "_plan")}
    state["_last"] = Scores(q, k, None, core_options(q, k)), False
    old = type(layer).__new__(type(layer))
    old.__dict__.update(state, _shown={})
    np.testing.assert_array_equal(old.attention_weights, weights)
    np.testing.assert_array_equal(old(x, x, x), layer(x, x, x))


def heads_of(layer):
    states, (heads, shared) = layer._parameters.states, (layer.num_heads, layer.num_kv_heads)
    return (states["W_q"].packed(layer.dtype), heads), (states["W_k"].packed(layer.dtype), shared)
