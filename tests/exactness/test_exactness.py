"""Answers that are known to the last bit, without any tolerance: they catch what random data cannot.

And laws that hold within rounding: other orders of the keys, keys doubled, a row cut in two and merged.
"""

import numpy as np
import pytest

import accuracy
from core_calls import core as _core
from mha_c import functional


def attend(q, k, v, *args, **options):
    return _core.attention_forward(q, k, v, *args, **options)[0]


def draw(rng, dtype, batch=2, heads=3, n_queries=7, n_keys=600, dim=24, value_dim=10):
    shapes = [(heads, n_queries, dim), (heads, n_keys, dim), (heads, n_keys, value_dim)]
    return [rng.standard_normal((batch, *shape)).astype(dtype) for shape in shapes]


def same_bits(a, b):
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


# --- Means and single keys -----------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2**i for i in range(15)])
@pytest.mark.parametrize("longer", [0, 37])
def test_equal_weights_give_the_mean(n, longer, isa, dtype, rng):
    """2^n equal weights and whole numbers: every sum is exact, in whatever order it is taken."""
    v = rng.integers(-1000, 1001, (2, n + longer, 5))
    q, k = np.zeros((2, 3, 8), dtype), rng.standard_normal((2, n + longer, 8)).astype(dtype)
    found = attend(q, k, v.astype(dtype), valid_lens=np.full(2, n))
    exact = np.broadcast_to((v[:, :n].sum(axis=1, keepdims=True) / n).astype(dtype), found.shape).copy()
    assert same_bits(found, exact)
    if not longer:  # rows without keys get the mean of all values, by the same sums
        assert same_bits(attend(q, k, v.astype(dtype), valid_lens=np.zeros(2, int), empty_rows="uniform"), exact)


def test_window_of_four(isa, dtype):
    """ONNX's own case: all scores 0, values 0 .. 4, one key back and two ahead."""
    q = np.zeros((1, 5, 1), dtype)
    v = np.arange(5, dtype=dtype)[None, :, None]
    found = attend(q, q, v, window_left=1, window_right=2)
    assert found[0, :, 0].tolist() == [1, 1.5, 2.5, 3, 3.5]


@pytest.mark.parametrize("n_keys", [1, 2, 129, 513, 1100])
def test_one_key_far_above_the_others(n_keys, isa, dtype, rng):
    """A gap at which every other weight is 0: the output is that key's value, bit by bit."""
    gap = 110 if dtype == np.float32 else 800
    for winner in {0, n_keys // 2, n_keys - 1}:
        q, k = np.ones((1, 4, 1), dtype), np.zeros((1, n_keys, 1), dtype)
        k[0, winner] = gap
        v = rng.standard_normal((1, n_keys, 9)).astype(dtype)
        found = attend(q, k, v, scale=1.0)
        assert same_bits(found, np.repeat(v[:, winner : winner + 1], 4, axis=1))


def test_constant_values(isa, dtype, rng):
    """Weights that sum to 1 within rounding.

    The sum that divides and the 64-term sums of weights times values are rounded apart from each other: 6 units in
    the last place in 800 rows, 8 without fused multiply-add.
    """
    q, k, v = draw(rng, dtype)
    v[...] = 3.7
    found = attend(q, k, v)
    assert np.abs(found - v[0, 0, 0, 0]).max() <= (10 if isa == "scalar" else 8) * np.spacing(v[0, 0, 0, 0])


def test_outputs_lie_between_the_values(isa, dtype, rng):
    q, k, v = draw(rng, dtype)
    found = attend(4 * q, k, v)
    slack = 8 * np.finfo(dtype).eps
    low, high = v.min(axis=2, keepdims=True), v.max(axis=2, keepdims=True)
    assert (found >= low - slack * np.abs(low)).all() and (found <= high + slack * np.abs(high)).all()


# --- Powers of two, order, cuts: the same bits ------------------------------------------------------------


@pytest.mark.parametrize("power", [-7, 1, 12])
def test_powers_of_two(power, isa, dtype, rng):
    q, k, v = draw(rng, dtype)
    factor = dtype.type(2.0**power)
    expected = attend(q, k, v)
    assert same_bits(attend(q, k, factor * v), factor * expected)
    assert same_bits(attend(q, k, -v), -expected)
    scale = 1 / np.sqrt(24)
    assert same_bits(attend(factor * q, k, v, scale=scale / 2.0**power), expected)
    assert same_bits(attend(q, factor * k, v, scale=scale / 2.0**power), expected)


def test_order_of_batch_and_heads(isa, dtype, rng):
    q, k, v = draw(rng, dtype, batch=5)
    expected = attend(q, k, v, valid_lens=np.array([600, 3, 0, 512, 77]))
    order, heads = rng.permutation(5), rng.permutation(3)
    arrays = [np.ascontiguousarray(x[order][:, heads]) for x in (q, k, v)]
    found = attend(*arrays, valid_lens=np.array([600, 3, 0, 512, 77])[order])
    assert same_bits(found, np.ascontiguousarray(expected[order][:, heads]))


def test_order_of_queries(isa, dtype, rng):
    q, k, v = draw(rng, dtype, n_queries=70)
    order = rng.permutation(70)
    assert same_bits(attend(q[:, :, order], k, v), np.ascontiguousarray(attend(q, k, v)[:, :, order]))


def test_shared_key_heads_are_copies(isa, dtype, rng):
    q, k, v = draw(rng, dtype, heads=4)
    shared = attend(q, k[:, :2], v[:, :2])
    assert same_bits(shared, attend(q, k[:, [0, 0, 1, 1]], v[:, [0, 0, 1, 1]]))


def test_no_dropout_is_dropout_of_nothing(isa, dtype, rng):
    q, k, v = draw(rng, dtype)
    assert same_bits(attend(q, k, v, dropout=0.0, seed=9), attend(q, k, v))
    assert not attend(q, k, v, dropout=1.0, seed=9).any()


@pytest.mark.parametrize("value", [0.0, -0.0])
def test_a_bias_of_zero_changes_nothing(value, isa, dtype, rng):
    q, k, v = draw(rng, dtype)
    plain = attend(q, k, v)
    assert same_bits(attend(q, k, v, bias=np.full((7, 600), value, dtype)), plain)
    assert same_bits(attend(q, k, v, keep_mask=np.ones((7, 600), bool)), plain)
    assert same_bits(attend(q, k, v, valid_lens=np.full(2, 10**6)), plain)
    assert same_bits(attend(q, k, v, window_left=600, window_right=600), plain)


# --- Laws within rounding -----------------------------------------------------------------------------------


def allowed(q, k, v):
    """Four times what rounding may do (accuracy.py): two calls with two errors each, and room."""
    problem = accuracy.Problem(q, k, v)
    return 8 * accuracy.UNIT[q.dtype.name] * accuracy.exact(problem).rounding


@pytest.fixture
def operands(dtype, rng):
    return [x[0] for x in draw(rng, dtype)]  # (heads, ., .): rank 3


def test_order_of_keys(operands, isa, rng):
    q, k, v = operands
    order = rng.permutation(600)
    assert (np.abs(attend(q, k[:, order], v[:, order]) - attend(q, k, v)) <= allowed(q, k, v)).all()


def test_keys_twice(operands, isa):
    q, k, v = operands
    twice = attend(q, np.concatenate([k, k], axis=1), np.concatenate([v, v], axis=1))
    assert (np.abs(twice - attend(q, k, v)) <= allowed(q, k, v)).all()


def test_a_constant_added_to_all_keys(operands, isa, dtype):
    q, k, v = operands
    moved = k + dtype.type(0.5)  # rounds k anew, by a unit of |k| + 0.5
    distance = np.abs(attend(q, moved, v) - attend(q, k, v))
    assert (distance <= allowed(q, np.abs(k) + 1, v)).all()


@pytest.mark.parametrize("cut", [1, 128, 300, 599])
def test_halves_merged(cut, operands, isa):
    q, k, v = operands
    parts = [
        functional.dot_product_attention(q, k[:, keys], v[:, keys], return_lse=True)
        for keys in (slice(None, cut), slice(cut, None))
    ]
    merged, lse = functional.merge(*parts[0], *parts[1])
    whole, known = functional.dot_product_attention(q, k, v, return_lse=True)
    # lse is one rounded number: 2^-24 of up to 8 goes into both weights.
    assert (np.abs(merged - whole) <= 4 * allowed(q, k, v)).all()
    assert np.abs(lse - known).max() <= 16 * np.finfo(q.dtype).eps
