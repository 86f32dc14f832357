"""Every layer with keep_mask and bias of every shape, beside lengths and causal masks: plain formulas in float64."""

import pickle

import numpy as np
import pytest

import masked_layers as masked
import mha_c
from mha_c import _core
from mha_c._arguments.options import core_options
from mha_c._summary import Scores

B, Q, K, FEATURES = masked.B, masked.Q, masked.K, masked.FEATURES
KINDS = masked.KINDS


def made(name, dtype="float64"):
    layer = getattr(mha_c, KINDS[name].name)(*KINDS[name].arguments, dtype=dtype, rng=3)
    layer.load_state_dict(masked.state_of(KINDS[name]))
    return layer


def inputs_of(name, dtype="float64"):
    return [x.astype(dtype) for x in masked.inputs_of(KINDS[name])]


def arrays_of(options, dtype="float64"):
    """The keywords of a call."""
    return {name: x.astype(dtype) if name == "bias" else x for name, x in options.items()}


def close(found, expected, limit):
    assert found.shape == np.shape(expected)
    np.testing.assert_allclose(found, expected, rtol=0, atol=limit)


@pytest.mark.by_day("name", "which", "shape", "other", "dtype")
@pytest.mark.parametrize("dtype", masked.LIMITS)
@pytest.mark.parametrize(("name", "which", "shape", "other"), masked.calls())
def test_layers_are_the_formulas(name, which, shape, other, dtype):
    """Gradients are sums of some tens of terms around 1, so 30 times the limit."""
    kind, layer, options = KINDS[name], made(name, dtype), masked.options_of(name, which, shape, other)
    want, limit = masked.expected(kind, masked.state_of(kind), masked.inputs_of(kind), **options), masked.LIMITS[dtype]
    inputs, given = inputs_of(name, dtype), arrays_of(options, dtype)
    close(layer(*inputs, **given), want.out, limit)
    weights = layer.attention_weights
    close(weights, want.weights, limit)
    close(layer(*inputs, training=True, **given), want.out, limit)
    close(layer.attention_weights, weights, limit)
    grads = layer.backward(masked.gradient_of(kind).astype(dtype))
    for found, expected in zip([grads] if kind.is_self else grads, want.grads):
        close(found, expected, 30 * limit)
    of_parameters = {parameter.name: parameter.grad for parameter in layer.parameters()}
    assert set(of_parameters) == set(want.of_parameters)
    for one, expected in want.of_parameters.items():
        close(of_parameters[one], expected, 30 * limit)


@pytest.mark.parametrize("kind", KINDS)
def test_keys_that_a_mask_hides_are_never_read(kind, isa):
    """NaN in them changes nothing: no result, no gradient; in blocks, in the middle, on the left."""
    rng = np.random.default_rng(2)
    layer, inputs = made(kind), inputs_of(kind)
    n_keys = inputs[-1].shape[1]
    hidden = np.zeros((B, n_keys), bool)
    hidden[0, :2], hidden[1, [1, 3]] = True, True
    keep = np.broadcast_to(~hidden[:, None], (B, Q, n_keys))
    keep = keep[:, None] if layer._by_head else keep
    if KINDS[kind].is_self:  # where X is the queries as well: those queries see nothing
        keep = keep & ~hidden[:, None, :, None]
    bad = [np.array(x) for x in inputs]
    for x in bad[-2:]:
        x[hidden] = np.nan
    if KINDS[kind].is_self:
        found, expected = layer(bad[0], keep_mask=keep), layer(inputs[0], keep_mask=keep)
        assert np.array_equal(found[~hidden], expected[~hidden])
        return
    grad = rng.standard_normal(layer(*inputs).shape)

    def run(inputs):
        layer.zero_grad()
        out = layer(*inputs, keep_mask=keep, training=True)
        grads = layer.backward(grad)
        return [out, layer.attention_weights, *grads, *(p.grad for p in layer.parameters())]

    for found, expected in zip(run(bad), run(inputs)):
        assert np.array_equal(found, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_masks_give_the_same_bits_for_threads_batches_and_slices(kind):
    rng, layer, batch, steps = np.random.default_rng(4), made(kind, "float32"), 260, 24
    x = rng.standard_normal((batch, steps, FEATURES)).astype(np.float32)
    given = [x] * len(inputs_of(kind))
    axes = (1,) if layer._by_head else ()
    keep = rng.random((batch, *axes, steps, steps)) < 0.8
    bias = rng.standard_normal((batch, *axes, 1, steps)).astype(np.float32)
    facts = mha_c.explain(layer, *given, keep_mask=keep, bias=bias).as_dict()
    assert facts["n_slices"] > 1 or kind in ("dot", "additive")  # which hand on too little between their steps
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
    x, one_input = rng.standard_normal((B, 6, FEATURES)), KINDS[kind].is_self
    if kind.startswith("grouped"):
        layer.causal = True  # or it has no cache
    call = (lambda y, **o: layer(y, **o)) if one_input else (lambda y, **o: layer(y, y, y, **o))
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
    layer, given = made(kind), inputs_of(kind)
    before = layer(*given)
    weights, n_keys = layer.attention_weights, given[-1].shape[1]
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
    rng, layer = np.random.default_rng(7), made("multi-head with biases")
    x = rng.standard_normal((B, 40, FEATURES))  # more keys than features: queries and keys are kept
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
    layer, given = made(kind), inputs_of(kind)
    keep = np.tri(Q, given[-1].shape[1], dtype=bool)
    from mha_c._layer import call

    seen_calls = []
    monkeypatch.setattr(call, "layer_forward", lambda *a: seen_calls.append(1) or _core.layer_forward(*a))
    layer(*given, keep_mask=keep)
    assert seen_calls == [1] and "the compiled core" in str(mha_c.explain(layer, *given, keep_mask=keep))


def test_grouped_layers_of_an_earlier_version_show_their_weights():
    """What their calls had kept: the heads, and the core's options."""
    layer, x = made("grouped"), np.random.default_rng(9).standard_normal((B, Q, FEATURES))
    layer(x, x, x)
    weights = layer.attention_weights
    q, k = (np.split(_core.linear(x, W), n, axis=2) for W, n in heads_of(layer))
    q, k = (np.stack(heads, axis=1) for heads in (q, k))
    state = {name: value for name, value in vars(layer).items() if name not in ("_dropout", "_empty_rows")}
    state["_last"] = Scores(q, k, None, core_options(q, k)), False
    old = type(layer).__new__(type(layer))
    old.__dict__.update(state, _shown={})
    np.testing.assert_array_equal(old.attention_weights, weights)
    np.testing.assert_array_equal(old(x, x, x), layer(x, x, x))


def heads_of(layer):
    states, (heads, shared) = layer._parameters.states, (layer.num_heads, layer.num_kv_heads)
    return (states["W_q"].packed(layer.dtype), heads), (states["W_k"].packed(layer.dtype), shared)
