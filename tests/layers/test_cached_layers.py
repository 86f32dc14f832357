"""Caches of the third generation's layers, NumPy's and torch's: what test_cached_steps.py does not draw."""

import copy
import pickle
from functools import partial

import numpy as np
import pytest

import mha_c
import needs
import stepwise
from mha_c import functional
from threads import in_threads

KINDS = ["numpy", "torch"]


def made(kind, name, *sizes, **options):
    """A layer, what turns arrays into its inputs and back, and its weights as arrays."""
    if kind == "numpy":
        layer = getattr(mha_c, name)(*sizes, dtype="float64", rng=3, **options)
        return layer, np.asarray, layer.state_dict()
    torch = needs.module("torch")
    from mha_c import torch as mt

    layer = getattr(mt, name)(*sizes, **options).double().eval().requires_grad_(False)
    state = {key: value.numpy() for key, value in layer.state_dict().items()}
    return layer, torch.from_numpy, state


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rope", [False, True])
@pytest.mark.parametrize("lens", [None, [3, 7]])
def test_projected_keys_of_an_encoder(kind, rope, lens, rng):
    layer, given, _ = made(kind, "GQAAttention", 16, 4, 2, True, rope, False)
    queries, encoded = (given(rng.standard_normal((2, n, 16))) for n in (5, 7))
    whole = layer(queries, encoded, encoded, lens)
    weights = np.asarray(layer.attention_weights)
    kv = layer.project(encoded, encoded, lens)
    assert kv.shape == (2, 7, 8)
    np.testing.assert_allclose(np.asarray(layer(queries, kv)), np.asarray(whole), atol=1e-13, rtol=1e-13)
    np.testing.assert_allclose(np.asarray(layer.attention_weights), weights, atol=1e-14)
    second = layer(queries[:1], encoded[1:], encoded[1:], None if lens is None else lens[1:])
    np.testing.assert_allclose(np.asarray(layer(queries[:1], kv.reorder([1]))), np.asarray(second), atol=1e-13)
    with pytest.raises(TypeError, match="values go into `project`"):
        layer(queries, kv, encoded)
    changed = layer.W_k.weight * 2
    if kind == "numpy":
        layer.W_k.weight = changed
    else:
        layer.W_k.weight.data = changed
    with pytest.raises(ValueError, match="call project again"):
        layer(queries, kv)


def test_projected_keys_in_training(rng):
    layer, x = mha_c.GQAAttention(16, 4, 2, causal=False, rng=0), rng.standard_normal((1, 3, 16))
    out = layer(x, layer.project(x, x), training=True)
    with pytest.raises(RuntimeError, match="no gradient reaches W_k"):
        layer.backward(out)
    torch = needs.module("torch")
    from mha_c import torch as mt

    layer, x = mt.GQAAttention(16, 4, 2, rope=True, causal=False), torch.randn(2, 3, 16)
    layer(x, layer.project(x, x)).square().sum().backward()
    through = layer.W_k.weight.grad.clone()
    layer.zero_grad()
    layer(x, x, x).square().sum().backward()
    torch.testing.assert_close(through, layer.W_k.weight.grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_refusals(kind, rng):
    layer, given, _ = made(kind, "GQAAttention", 16, 4, 2)
    x = given(rng.standard_normal((2, 3, 16)))
    for wrong, message in (
        ({"max_len": None}, "max_len=None needs a window"),
        ({"max_len": 4, "sinks": 2}, "sinks = 2 needs a window"),
        ({"max_len": 4, "window": -1}, "window"),
        ({"max_len": 4, "window": 2, "sinks": -1}, "sinks"),
        ({"max_len": 0}, "max_len"),
    ):
        with pytest.raises(ValueError, match=message):
            layer.new_cache(2, **wrong)
    with pytest.raises(TypeError, match="window"):
        layer.new_cache(2, 4, window=2.5)
    looks_ahead, *_ = made(kind, "GQAAttention", 16, 4, 2, causal=False)
    with pytest.raises(ValueError, match="a cache is for causal attention"):
        looks_ahead.new_cache(2, 4)
    cache = layer.new_cache(2, 4)
    with pytest.raises(ValueError, match="a cache is for causal attention"):
        layer(x, x, x, causal=False, cache=cache)
    word = ", or give the call training=False" if kind == "numpy" else ""  # torch's call has no such word
    with pytest.raises(ValueError, match=rf"a cache is for evaluation: call eval\(\) first{word}$"):
        layer.train()(x, x, x, cache=cache)
    layer.eval()
    with pytest.raises(mha_c.ShapeError, match="batch of 1, but the cache one of 2"):
        layer(x[:1], x[:1], x[:1], cache=cache)
    with pytest.raises(TypeError, match="what new_cache made"):
        layer(x, x, x, cache={})
    layer(x, x, x, cache=cache)
    with pytest.raises(ValueError, match="the cache is full: it has room for 4 steps"):
        layer(x, x, x, cache=cache)
    assert np.asarray(cache.lengths).tolist() == [3, 3]
    if kind == "numpy":
        with pytest.raises(TypeError, match="the cache holds float64, but the new steps are"):
            layer(*[x[:, :1].astype("f4")] * 3, cache=cache)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [("GQAAttention", 16, 4, 2), ("MultiHeadAttention", 16, 16, 16, 16, 4, 0.0)])
def test_a_cache_takes_no_projected_keys(kind, sizes, rng):
    """They would be projected twice; and a name that no call has is refused with those that this one has."""
    layer, given, _ = made(kind, *sizes)
    x, cache = given(rng.standard_normal((2, 3, 16))), layer.new_cache(2, 4)
    with pytest.raises(TypeError, match=r"call layer\(queries, kv\) without cache="):
        layer(x, layer.project(x, x), cache=cache)
    assert np.asarray(cache.lengths).tolist() == [0, 0]
    with pytest.raises(
        TypeError, match=r"'need_weights': .*It is called with \(queries, keys, values, valid_lens=None, \*"
    ):
        layer(x, x, x, need_weights=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["GQAAttention", "CausalAttention"])
def test_other_weights_are_refused(kind, name, rng):
    layer, given, _ = made(kind, name, 16, 4, *[2] * (name[0] == "G"))
    x, cache = given(rng.standard_normal((1, 2, 16))), layer.new_cache(1, None, window=3)
    layer(x, x, x, cache=cache)
    projection = layer.W_k if name[0] == "G" else layer.W_qkv
    if kind == "numpy":
        projection.weight = projection.weight * 2
    else:
        projection.weight.data = projection.weight * 2
    with pytest.raises(ValueError, match=r"another W_k or W_v than the layer has now: call cache.clear"):
        layer(x, x, x, cache=cache)
    cache.clear()
    layer(x, x, x, cache=cache)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("additive", [False, True])
def test_windows_of_the_single_head_layers(kind, additive, rng):
    """Beside functions of mha_c with a mask."""
    name, sizes = ("AdditiveAttention", (8, 8, 6, 0.3)) if additive else ("DotProductAttention", (0.3,))
    layer, given, state = (
        made(kind, name, *sizes) if additive or kind == "torch" else (mha_c.DotProductAttention(0.3), np.asarray, {})
    )
    x = rng.standard_normal((2, 40, 8))
    seen = stepwise.seen(40, 5, 2)
    if additive:
        expected = functional.additive_attention(
            x, x, x, state["w_v.weight"][0], state["W_q.weight"], state["W_k.weight"], keep_mask=seen
        )
    else:
        expected = functional.dot_product_attention(x, x, x, keep_mask=seen)
    cache, found = layer.new_cache(2, None, window=5, sinks=2), []
    for part in np.split(x, [1, 2, 20, 21, 33], axis=1):
        part = given(np.ascontiguousarray(part))
        found.append(np.asarray(layer(part, part, part, cache=cache)))
    np.testing.assert_allclose(np.concatenate(found, axis=1), expected, atol=1e-12)
    assert cache.nbytes == 2 * 7 * (6 + 8 if additive else 16) * 8


@pytest.mark.parametrize("kind", KINDS)
def test_keys_are_kept_by_their_heads(kind):
    sizes = {}
    for shared in (8, 4, 2, 1):
        layer, given, _ = made(kind, "GQAAttention", 64, 8, shared)
        cache, x = layer.new_cache(3, 10), given(np.ones((3, 1, 64)))
        layer(x, x, x, cache=cache)
        sizes[shared] = cache.nbytes
    assert sizes == {shared: 3 * 10 * 2 * shared * 8 * 8 for shared in sizes}


@pytest.mark.parametrize("kind", KINDS)
def test_a_window_of_many_steps_keeps_its_memory(kind, rng):
    layer, given, state = made(kind, "GQAAttention", 8, 2, 1, False, False)
    cache, x = layer.new_cache(1, None, window=3, sinks=1), rng.standard_normal((1, 500, 8))
    out, room = None, None
    for i in range(500):
        step = given(np.ascontiguousarray(x[:, i : i + 1]))
        out = layer(step, step, step, cache=cache)
        room = room if room is not None else cache._keys
        assert cache._keys is room and cache.nbytes == 2 * 4 * 4 * 8
    expected, _ = stepwise.attended(x, state, 2, 1, None, 3, 1)
    np.testing.assert_allclose(np.asarray(out)[:, 0], expected[:, -1], atol=1e-12)


def test_copies_pickles_and_threads(rng):
    layer, x = mha_c.CausalAttention(16, 4, rope=True, dtype="float64", rng=0), rng.standard_normal((4, 1, 12, 16))
    layer.new_cache(1, 12)
    first = layer.new_cache(1, 12, window=4, sinks=1)
    layer(x[0, :, :3], cache=first)
    layer_again, cache_again = pickle.loads(pickle.dumps((layer, copy.deepcopy(first))))
    assert repr(cache_again) == repr(first) == "KeyValueCache(batch=1, max_len=12, window=4, sinks=1, lengths=[3])"
    np.testing.assert_array_equal(layer_again(x[0, :, 3:], cache=cache_again), layer(x[0, :, 3:], cache=first))
    np.testing.assert_array_equal(layer_again.attention_weights, layer.attention_weights)
    found = {}

    def decode(i):
        cache = layer.new_cache(1, 12)
        found[i] = np.concatenate([layer(step, cache=cache) for step in np.split(x[i], 12, axis=1)], axis=1)

    in_threads(*[partial(decode, i) for i in range(4)])
    for i in range(4):
        np.testing.assert_allclose(found[i], layer(x[i]), atol=1e-13)


def test_weights_of_a_call_stay_those_of_the_call(rng):
    """Also where later steps take the places of its keys, or the cache forgets them."""
    layer, x = mha_c.GQAAttention(16, 4, 2, rope=True, rng=0), rng.standard_normal((1, 12, 16))
    cache = layer.new_cache(1, None, window=3, sinks=1)
    layer(*[x[:, :6]] * 3, cache=cache)
    layer(*[x[:, 6:7]] * 3, cache=cache)
    kept = copy.copy(layer)
    layer(*[x[:, 7:]] * 3, cache=cache)
    cache.clear()
    _, expected = stepwise.attended(x[:, :7], layer.state_dict(), 4, 2, stepwise.rotated, 3, 1)
    np.testing.assert_allclose(kept.attention_weights, expected[:, :, 6:], atol=1e-6)
    mha = mha_c.GQAAttention(16, 4, 2, rope=True, rng=0)
    whole = mha.new_cache(1, 12)
    mha(*[x] * 3, cache=whole)
    whole.clear()
    mha2 = copy.copy(mha)
    mha(*[x[:, ::-1]] * 3, cache=whole)
    _, expected = stepwise.attended(x, mha.state_dict(), 4, 2, stepwise.rotated)
    np.testing.assert_allclose(mha2.attention_weights, expected, atol=1e-6)
