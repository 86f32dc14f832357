"""weights_summary: what the whole array of weights gives, computed in float64, without that array."""

import itertools
import tracemalloc

import numpy as np
import pytest

import mha_c
from checks import same
from mha_c import _summary
from mha_c import functional as F
from mha_c._arguments.options import core_options

# Sums of up to 40 weights, and of products with their logarithms (at most log2(40) = 5.4 bits): some units in the last
# place of numbers up to 8.  The weights themselves have the error that checks.TOLERANCE allows.
TOLERANCE = {"float32": 2e-5, "float64": 4e-14}
CORNERS, WINDOWS = (False, "top_left", "bottom_right"), (None, (2, None), (3, 1))


def reference(weights, top):
    """The definition, in float64, of weights (..., Q, K)."""
    w = weights.astype(np.float64)
    logs = np.where(w > 0, np.log2(np.where(w > 0, w, 1)), 0)
    keys = np.argsort(-w, axis=-1, kind="stable")[..., :top]
    largest = np.take_along_axis(w, keys, -1)
    return w.sum(-2), -(w * logs).sum(-1), largest, np.where(largest > 0, keys, -1)


def drawn(rng, dtype, queries, keys, lens, everything, empty_rows):
    q = rng.standard_normal((2, 4, queries, 8)).astype(dtype)
    k = rng.standard_normal((2, 2, keys, 8)).astype(dtype)
    options = {"empty_rows": empty_rows}
    if lens:
        options["valid_lens"] = rng.integers(-1, keys + 2, (2,) if lens == 1 else (2, queries))
    if everything:
        options.update(
            relative_bias=rng.standard_normal((4, 7)).astype(dtype), softcap=2.0, scale=0.7,
            sinks=rng.standard_normal(4).astype(dtype), bias=rng.standard_normal((2, 1, 1, keys)).astype(dtype),
            keep_mask=rng.random((queries, keys)) < 0.8,
        )  # fmt: skip
    return q, k, options


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("empty_rows", ["zero", "uniform"])
@pytest.mark.parametrize("causal, window", list(itertools.product(CORNERS, WINDOWS)))
def test_pieces_have_the_bits_of_the_whole(rng, dtype, causal, window, empty_rows, everything):
    for queries, keys, lens, size in itertools.product((5, 9), (5, 7, 12), (0, 1, 2), (10, 40, 1 << 20)):
        q, k, options = drawn(rng, dtype, queries, keys, lens, everything, empty_rows)
        options.update(causal=causal, window=window)
        _, whole = F.dot_product_attention(q, k, k, return_weights=True, **options)
        pieces = list(_summary.Scores.of(q, k, None, core_options(q, k, **options)).pieces(size))
        found = np.zeros_like(whole)
        for piece in pieces:
            assert piece.weights.size <= size or piece.rows.stop - piece.rows.start == 1
            found[piece.items, piece.heads, piece.rows, piece.keys] = piece.weights
        same(found, whole)


@pytest.mark.parametrize("causal", CORNERS)
def test_the_definition(rng, dtype, isa, causal, monkeypatch):
    monkeypatch.setattr(_summary, "PIECE", 64)
    q, k, options = drawn(rng, dtype, 23, 40, 2, True, "zero")
    options["causal"] = causal
    whole = F.dot_product_attention(q, k, k, return_weights=True, **options)[1]
    found = F.weights_summary(q, k, top=5, **options)
    for array, expected, name in zip(found, reference(whole, 5), found._fields):
        assert array.dtype == (np.int64 if name == "top_keys" else dtype), name
        np.testing.assert_allclose(array, expected, rtol=0, atol=TOLERANCE[whole.dtype.name], err_msg=name)
    np.testing.assert_array_equal(found.top_keys, reference(whole, 5)[3])


def test_without_an_axis_for_heads(rng):
    q, k = rng.standard_normal((2, 3, 6, 4))[:, :, :, :], rng.standard_normal((2, 3, 5, 4))
    one = F.weights_summary(q[:, 0], k[:, 0], [3, 5], top=2)
    four = F.weights_summary(q[:, :1], k[:, :1], [3, 5], top=2)
    for a, b in zip(one, four):
        same(a, b[:, 0])
    assert [x.shape for x in one] == [(2, 5), (2, 6), (2, 6, 2), (2, 6, 2)]


def test_equal_weights_empty_rows_and_few_keys():
    q, k = np.zeros((1, 4, 2)), np.zeros((1, 4, 2))
    found = F.weights_summary(q, k, [[0, 1, 2, 4]], top=3)
    np.testing.assert_array_equal(found.top_keys[0], [[-1, -1, -1], [0, -1, -1], [0, 1, -1], [0, 1, 2]])
    np.testing.assert_array_equal(found.entropy[0], [0, 0, 1, 2])
    np.testing.assert_allclose(found.received[0], [1.75, 0.75, 0.25, 0.25], rtol=1e-15)
    uniform = F.weights_summary(q, k, [[0, 1, 2, 4]], top=1, empty_rows="uniform")
    np.testing.assert_allclose(uniform.received[0], [2, 1, 0.5, 0.5], rtol=1e-15)
    assert uniform.entropy[0, 0] == 2 and F.weights_summary(q, k, top=9).top_keys.shape == (1, 4, 9)


@pytest.mark.parametrize("shapes", [((0, 3, 2), (0, 4, 2)), ((1, 0, 2), (1, 4, 2)), ((1, 3, 2), (1, 0, 2))])
def test_nothing_to_sum(shapes):
    found = F.weights_summary(*map(np.zeros, shapes), top=2)
    assert not any(np.any(x) for x in found[:3]) and (found.top_keys == -1).all()


def test_types_and_refusals(rng):
    q = rng.standard_normal((1, 2, 6, 4))
    with pytest.raises(mha_c.ShapeError, match="valid_lens"):
        F.weights_summary(q, q, [1, 2])
    with pytest.raises(mha_c.ShapeError, match="keep_mask"):
        F.weights_summary(q, q, keep_mask=np.ones((5, 6), dtype=bool))
    with pytest.raises(TypeError, match="k must be float64 like q, got float32"):
        F.weights_summary(q, q.astype(np.float32))
    with pytest.raises(ValueError, match="top must be at least 0"):
        F.weights_summary(q, q, top=-1)
    with pytest.raises(mha_c.ShapeError, match="q"):
        F.weights_summary(q[0, 0], q[0, 0])
    lists = F.weights_summary(q.tolist(), q.tolist())
    same(lists.received, F.weights_summary(q, q).received)


def test_memory_grows_with_the_keys_and_not_with_their_square(rng):
    """8,000 tokens, whose weights would take 512 MB: less than 60 MiB are allocated by NumPy's allocator.  A piece of
    float32 takes 8 MiB; its logarithms, the copy that `top` eats from and the sums in float64 as much each."""
    q = rng.standard_normal((1, 2, 8000, 16)).astype(np.float32)
    tracemalloc.start()
    try:
        found = F.weights_summary(q, q, causal=True, top=1)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    np.testing.assert_allclose(found.received.sum(), 16000, rtol=1e-5)  # each row sums to 1 within some 1e-7
    assert most < 60 << 20
