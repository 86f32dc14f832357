"""Projections whose weights the core reads as they lie, at the call: the bits of packed ones, and nothing kept."""

import sys
from functools import partial

import numpy as np
import pytest

from binding_calls import F32, F64, B, K, Q, attempt, layer, linear, numbers
from mha_c import ShapeError, _core, get_num_threads, set_num_threads
from mha_c._layer.kept_weights import saved_weights

# (rows, out, in): register tiles and panels, one chunk of depth (256) and several, one task of rows and several,
# and so many (600) that a layer packs.
SIZES = [(1, 1, 1), (1, 40, 300), (2, 33, 5), (3, 97, 31), (5, 64, 256), (8, 100, 100), (12, 130, 513),
         (13, 17, 1024), (96, 48, 70), (192, 20, 24), (193, 20, 24), (400, 65, 130), (600, 65, 130), (0, 8, 5),
         (7, 0, 5), (7, 8, 0), (300, 8, 0)]  # fmt: skip


def weights(rng, shapes, dtype, spare=0):
    """Rows of numbers of these shapes, `spare` numbers of NaN behind each row."""
    made = [rng.standard_normal((out, size + spare)).astype(dtype) for out, size in shapes]
    for weight, (_, size) in zip(made, shapes):
        weight[:, size:] = np.nan
    return [weight[:, :size] for weight, (_, size) in zip(made, shapes)]


def packed(weight, bias):
    return _core.pack_linear(weight), bias, weight.shape


@pytest.mark.parametrize("spare", [0, 3])
def test_linear_has_the_bits_of_packed_weights(isa, dtype, rng, spare):
    for n, out, size in SIZES:
        x, bias = rng.standard_normal((n, size)).astype(dtype), rng.standard_normal(out).astype(dtype)
        (weight,) = weights(rng, [(out, size)], dtype, spare)
        for b in (None, bias):
            expected = _core.linear(x, packed(weight, b))
            assert expected.tobytes() == _core.linear(x, (weight, b)).tobytes(), (n, out, size)
    many, few = _core.linear(x[:1].repeat(700, 0), (weight, bias)), _core.linear(x[:1], (weight, bias))
    assert np.array_equal(many, few.repeat(700, 0))


# The last but one goes in slices.
LAYERS = [(2, 4, 6, 10), (4, 1, 9, 64), (1, 1, 300, 20), (1, 300, 2, 20), (96, 8, 16, 128), (1, 700, 3, 20)]


@pytest.mark.parametrize("threads", [1, 2])
def test_layers_have_the_bits_of_packed_weights(isa, dtype, rng, threads):
    get_num_threads()
    set_num_threads(threads)
    for batch, n_queries, n_keys, size in LAYERS:
        x, y = (rng.standard_normal((batch, n, size)).astype(dtype) for n in (n_queries, n_keys))
        Ws = weights(rng, [(24, size), (24, size), (16, size), (size, 16)], dtype, spare=batch % 2)
        lens = rng.integers(0, n_keys + 1, batch)
        rest = lens, None, 2, "uniform", 0.25, 7
        for training in (False, True):
            results = [_core.layer_forward(x, y, y, rest[0], tuple(p), *rest[1:], training)
                       for p in ([packed(W, None) for W in Ws], [(W, None) for W in Ws],
                                 [packed(Ws[0], None), (Ws[1], None), None, None])]  # fmt: skip
            assert results[0][0].tobytes() == results[1][0].tobytes(), (batch, n_queries, n_keys)
            kept = [saved_weights(result[1][:10]) for result in results]
            assert kept[0].tobytes() == kept[1].tobytes() == kept[2].tobytes()


def test_the_numbers_of_the_call_count(rng):
    for n in (1, 8, 500, 700):
        x, (weight,) = rng.standard_normal((n, 40)).astype(F32), weights(rng, [(50, 40)], F32)
        projection = (weight, None)
        before = _core.linear(x, projection)
        weight[7, 3] += 1
        after = _core.linear(x, projection)
        changed = before != after
        assert changed[:, 7].all() and changed.sum() == n


REFUSED = {
    "list": (([[1.0] * 5] * 8, None), TypeError, "W_q must be a NumPy array, got list"),
    "type": ((np.zeros((8, 5)), None), TypeError, "W_q has dtype float64, but queries has dtype float32"),
    "integers": ((np.zeros((8, 5), int), None), TypeError, "W_q has dtype int64"),
    "rank": ((np.zeros(5, F32), None), ShapeError, r"W_q has shape \(5,\) \(rank 1\), expected rank 2"),
    "columns": ((np.zeros((8, 6), F32), None), ShapeError, "queries .*W_q .*6"),
    "bias": ((np.zeros((8, 5), F32), np.zeros(5, F32)), ShapeError, r"W_q.bias has shape \(5,\), expected \(8,\)"),
    "bias type": ((np.zeros((8, 5), F32), np.zeros(8)), TypeError, "W_q has dtype float64"),
    "parts": ((np.zeros((8, 5), F32),), TypeError, "W_q must be"),
    "no weight": ((None, None), TypeError, "W_q must be a NumPy array, got NoneType"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what):
    projection, error, message = REFUSED[what]
    with pytest.raises(error, match=message):
        layer(projections=(projection, None, None, None))


def test_any_layout(dtype):
    weight, x = numbers(8, 5, dtype=dtype), numbers(2, 3, 5, dtype=dtype)
    expected = linear(x, (weight, None))
    for same in (np.asfortranarray(weight), weight.astype(dtype.newbyteorder()), weight[::-1].copy()[::-1],
                 np.repeat(weight, 2, 1)[:, ::2]):  # fmt: skip
        assert np.array_equal(linear(x, (same, None)), expected)
    one_row = np.broadcast_to(weight[0], (8, 5))  # rows no distance apart
    assert np.array_equal(linear(x, (one_row, None)), linear(x, (one_row.copy(), None)))


def test_references_come_back():
    weight, bias = np.ones((8, 5), F32), np.ones(8, F32)
    good = ((weight, bias), (weight, None), None, None)
    bad = [(weight, bias, 3), (weight, weight), (weight.T, bias), (weight.astype(F64), bias)]
    before = [sys.getrefcount(x) for x in (weight, bias, good)]
    for _ in range(50):
        layer(projections=good, num_heads=1)
        for projection in bad:
            attempt(partial(layer, projections=(good[0], projection, None, None), num_heads=1))
    assert [sys.getrefcount(x) for x in (weight, bias, good)] == before


def test_explained(rng):
    def facts(projections, n):
        x = np.ones((B, n, 40), F32)
        return _core.explain_layer(x, x, x, None, projections, None, 2, "zero", 0.0, 0)

    Ws = weights(rng, [(40, 40)] * 4, F32)
    in_rows, before = tuple((W, None) for W in Ws), tuple(packed(W, None) for W in Ws)
    for n in (Q, K, 500):  # few rows need a panel beside what packed weights need, many rows all panels
        more = facts(in_rows, n)["scratch_bytes"] - facts(before, n)["scratch_bytes"]
        assert 0 < more <= 2**16 if n < 500 else more >= sum(W.nbytes for W in Ws)
