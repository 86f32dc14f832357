"""Decoding with a cache: step by step what the whole sequence gives at once, for ragged prompts and beams too."""

import copy
import pickle

import numpy as np
import pytest

import mha_c
from decoding_layers import KINDS, PROJECTING, THIRD, causal_lens, layer_of


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cuts", [(1,) * 70, (5, 1, 1, 30, 1, 32), (70,), (40, 0, 30)], ids=str)
def test_steps_are_the_whole_sequence(kind, cuts, dtype, isa, rng):
    """Bit by bit: a row's sums depend on its keys alone."""
    layer, x = layer_of(kind, dtype), rng.standard_normal((3, 70, 24)).astype(dtype)
    whole, cache, done, parts, weights = layer(x, x, x, causal_lens(3, 0, 70)), layer.new_cache(3, 70), 0, [], []
    whole_weights, heads = layer.attention_weights, getattr(layer, "num_heads", 1)
    for n in cuts:
        new = x[:, done : done + n]
        parts.append(layer(new, new, new, cache=cache))
        shown = layer.attention_weights.reshape(3, heads, n, done + n)
        weights.append(np.pad(shown, ((0, 0), (0, 0), (0, 0), (0, 70 - done - n))))
        done += n
    out = np.concatenate(parts, axis=1)
    assert out.dtype == dtype and cache.lengths.tolist() == [70] * 3
    np.testing.assert_array_equal(out, whole)
    np.testing.assert_array_equal(np.concatenate(weights, axis=2), whole_weights.reshape(3, heads, 70, 70))


@pytest.mark.parametrize("kind", KINDS)
def test_ragged_prompts(kind, dtype, rng):
    """Prompts of 5, 1 and 3 steps in one batch, then five steps more: each item as if it were alone."""
    layer, lens = layer_of(kind, dtype), np.array([5, 1, 3])
    prompt, more = rng.standard_normal((3, 5, 24)).astype(dtype), rng.standard_normal((3, 5, 24)).astype(dtype)
    behind = np.arange(5) >= lens[:, None]
    given = np.where(behind[..., None], dtype.type(np.nan), prompt)
    cache = layer.new_cache(3, 10)
    first = layer(given, given, given, lens, cache=cache)
    assert cache.lengths.tolist() == [5, 1, 3]
    later = [layer(new, new, new, cache=cache) for new in np.split(more, 5, axis=1)]
    assert cache.lengths.tolist() == [10, 6, 8]
    for i, n in enumerate(lens):
        alone = np.concatenate([prompt[i : i + 1, :n], more[i : i + 1]], axis=1)
        whole = layer(alone, alone, alone, causal_lens(1, 0, n + 5))
        np.testing.assert_array_equal(first[i, :n], whole[0, :n])
        np.testing.assert_array_equal(np.concatenate(later, axis=1)[i], whole[0, n:])


@pytest.mark.parametrize("kind", KINDS)
def test_some_items_wait(kind, rng):
    """valid_lens of 0: the item takes no step, and what it has stays; an item without any has no keys."""
    layer, x = layer_of(kind, np.float64), rng.standard_normal((2, 3, 24))
    cache = layer.new_cache(2, 3)
    out = layer(x[:, :1], x[:, :1], x[:, :1], [1, 0], cache=cache)
    assert np.isfinite(out).all() and cache.lengths.tolist() == [1, 0]
    layer(x[:, 1:], x[:, 1:], x[:, 1:], [0, 2], cache=cache)
    assert cache.lengths.tolist() == [1, 2]
    one = layer(x[:, :1], x[:, :1], x[:, :1], [0.5, 0.5], cache=cache)
    alone = np.concatenate([x[:1, :1], x[:1, :1]], axis=1)
    np.testing.assert_array_equal(one[0], layer(alone, alone, alone, [[1, 2]])[0, 1:])
    np.testing.assert_array_equal(out[0], layer(x[:1, :1], x[:1, :1], x[:1, :1])[0])


@pytest.mark.parametrize("index", [[1, 0, 1], [2], [0, 0, 1, 1, 2, 2]])
@pytest.mark.parametrize("kind", KINDS)
def test_beams(kind, index, rng):
    """After `reorder` every item has its parent's steps, also when the batch grows or shrinks."""
    layer, x = layer_of(kind, np.float64), rng.standard_normal((3, 4, 24))
    cache = layer.new_cache(3, 9)
    layer(x, x, x, [4, 2, 3], cache=cache)
    cache.reorder(index)
    assert cache.batch == len(index) and cache.lengths.tolist() == [[4, 2, 3][i] for i in index]
    new = rng.standard_normal((len(index), 1, 24))
    out = layer(new, new, new, cache=cache)
    for i, parent in enumerate(index):
        alone = np.concatenate([x[parent, : [4, 2, 3][parent]], new[i]])[None]
        n = alone.shape[1]
        np.testing.assert_array_equal(out[i], layer(alone, alone, alone, causal_lens(1, 0, n))[0, -1:])


@pytest.mark.parametrize("kind", PROJECTING)
@pytest.mark.parametrize("lens", [None, [2, 6, 4], [[1, 6], [2, 2], [0, 3]], [2, 0, 4], [[1, -1], [2, 2], [0, 3]]])
def test_projected_keys_and_values(kind, lens, dtype, isa, rng):
    layer = layer_of(kind, dtype)
    if kind in THIRD:
        layer.causal = False
    queries, encoded = rng.standard_normal((3, 2, 24)).astype(dtype), rng.standard_normal((3, 6, 24)).astype(dtype)
    kv = layer.project(encoded, encoded, lens)
    whole = layer(queries, encoded, encoded, lens)
    np.testing.assert_array_equal(layer(queries, kv), whole)
    np.testing.assert_array_equal(layer(queries[::-1], kv.reorder([2, 1, 0])), whole[::-1])
    np.testing.assert_array_equal(layer(queries, layer.project(encoded, encoded), valid_lens=lens), whole)
    assert kv.shape[:2] == (3, 6) and "ProjectedKeyValues(shape=(3, 6," in repr(kv)


@pytest.mark.parametrize("kind", KINDS)
def test_copies_of_a_cache_go_on_by_themselves(kind, rng):
    layer, x = layer_of(kind, np.float64), rng.standard_normal((2, 4, 24))
    cache = layer.new_cache(2, 8)
    layer(x, x, x, cache=cache)
    step, last = x[:, :1], x[:, 1:2]
    others = copy.copy(cache), copy.deepcopy(cache)
    for each, new in zip((cache, *others), (step, 2 * step, step)):
        layer(new, new, new, cache=each)
    results = [layer(last, last, last, cache=each) for each in (cache, *others)]
    np.testing.assert_array_equal(results[2], results[0])
    assert not np.allclose(results[1], results[0])


@pytest.mark.parametrize("kind", ["multi-head", *THIRD])
def test_a_cache_is_cleared_copied_and_pickled(kind, rng):
    layer, x = layer_of(kind, np.float64), rng.standard_normal((2, 4, 24))
    cache = layer.new_cache(2, 8)
    assert cache.nbytes == 0 and cache.max_len == 8
    layer(x, x, x, cache=cache)
    assert cache.nbytes == 2 * 2 * 8 * (12 if "grouped" in kind else 24) * 8
    others = copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))
    results = [layer(x, x, x, cache=each) for each in (cache, *others)]
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])
    cache.clear()
    assert cache.lengths.tolist() == [0, 0]
    np.testing.assert_array_equal(layer(x, x, x, cache=cache), layer(x, x, x, causal_lens(2, 0, 4)))
    lengths = cache.lengths
    lengths[:] = 99
    assert cache.lengths.tolist() == [4, 4]
    assert repr(cache) == "KeyValueCache(batch=2, max_len=8, lengths=[4, 4])"


@pytest.mark.parametrize("kind", ["multi-head", "grouped", "grouped with biases and rope"])
def test_what_was_projected_by_other_weights_is_refused(kind, rng):
    layer, x = layer_of(kind, np.float64), rng.standard_normal((1, 2, 24))
    for change in ("W_k", "W_v"):
        cache, kv = layer.new_cache(1, 8), layer.project(x, x)
        before = layer(x, x, x, cache=cache)
        linear = getattr(layer, change)
        linear.weight = linear.weight.copy()  # the same numbers
        layer(x, x, x, cache=cache)
        np.testing.assert_array_equal(layer(x, kv), layer(x, x, x))
        changed = linear.weight.copy()
        changed[3, 5] += 1e-3
        linear.weight = changed
        with pytest.raises(ValueError, match=r"another W_k or W_v.*clear\(\)"):
            layer(x, x, x, cache=cache)
        with pytest.raises(ValueError, match=r"another W_k or W_v.*project again"):
            layer(x, kv)
        cache.clear()
        assert not np.array_equal(layer(x, x, x, cache=cache), before)
    layer.W_q.weight = layer.W_q.weight * 2  # no matter: queries are projected at each call
    layer(x, x, x, cache=cache)


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_cache(kind, rng):
    layer, x = layer_of(kind, np.float64), rng.standard_normal((2, 3, 24))
    cache = layer.new_cache(2, 4)
    layer(x, x, x, [3, 1], cache=cache)
    message = r"full: it has room for 4 steps \(max_len\), item 0 has 3, and 2 more came"
    with pytest.raises(ValueError, match=message):
        layer(x[:, :2], x[:, :2], x[:, :2], cache=cache)
    assert cache.lengths.tolist() == [3, 1]
    expected = layer(x[:, :1], x[:, :1], x[:, :1], cache=copy.deepcopy(cache))
    np.testing.assert_array_equal(layer(x[:, :1], x[:, :1], x[:, :1], cache=cache), expected)


def test_open_sizes_are_fixed_by_the_first_step(rng):
    x = rng.standard_normal((1, 3, 10)).astype(np.float32)
    layer, other = (mha_c.MultiHeadAttention(8, 2, 0.1, rng=5) for _ in range(2))
    out = layer(x, x, x, cache=layer.new_cache(1, 3))
    np.testing.assert_array_equal(out, other(x, x, x, causal_lens(1, 0, 3)))
    lazy = mha_c.MultiHeadAttention(8, 2, 0.1, rng=5)
    kv = lazy.project(x, x)
    assert lazy(rng.standard_normal((1, 2, 7)).astype(np.float32), kv).shape == (1, 2, 8)
    assert lazy.W_q.weight.shape == (8, 7) and lazy.W_k.weight.shape == (8, 10)


def test_errors(rng):
    layer, x = layer_of("multi-head", np.float64), rng.standard_normal((2, 3, 24))
    cache = layer.new_cache(2, 9)
    kv = layer.project(x, x, [1, 2])
    for lens in ([1, 2, 3], 2, [[[1], [2]]]):  # which `reorder` could make lengths of the batch
        with pytest.raises(mha_c.ShapeError, match=r"valid_lens must have shape \(B,\) or \(B, Q\) with B = 2"):
            layer.project(x, x, lens)
    for args, options, kind, message in (
        ((x, x, x), {"cache": 3}, TypeError, "new_cache"),
        ((x[:1], x[:1], x[:1]), {}, mha_c.ShapeError, "batch of 1, but the cache one of 2"),
        ((x[:, :1], x, x), {}, mha_c.ShapeError, "same new steps"),
        ((x, x, x[0]), {}, mha_c.ShapeError, r"values must have shape \(B, n, features\)"),
        ((x, x.astype(np.float32), x), {}, TypeError, "keys must be float64"),
        ((x, x, x, [[1, 2, 3]] * 2), {}, mha_c.ShapeError, "how many of the 3 new steps"),
        ((x, x, x, [1, np.nan]), {}, ValueError, "finite"),
        ((x, x, x, [True, False]), {}, TypeError, "valid_lens"),
        ((x, x, x), {"training": True}, ValueError, "evaluation"),
        ((x[..., :5], x[..., :5], x[..., :5]), {}, ValueError, "features|in_features|24"),
    ):
        with pytest.raises(kind, match=message):
            layer(*args, **{"cache": cache, **options})
        assert cache.lengths.tolist() == [0, 0]
    for index, kind in (
        ([2], ValueError),
        ([-1], ValueError),
        ([0.0], TypeError),
        ([], TypeError),
        ([[0]], ValueError),
    ):
        with pytest.raises(kind, match="index"):
            cache.reorder(index)
    with pytest.raises(TypeError, match="together with the keys"):
        layer(x, kv, x)
    with pytest.raises(TypeError, match="missing or None: values"):
        layer(x, x)
    with pytest.raises(ValueError, match="batch must be at least 1"):
        layer.new_cache(0, 3)
    layer(x, x, x, cache=cache)
    with pytest.raises(TypeError, match="cache holds float64"):
        layer(*[x.astype(np.float32)] * 3, cache=cache)
    out = layer(x, kv, training=True)
    with pytest.raises(RuntimeError, match="projected"):
        layer.backward(out)
