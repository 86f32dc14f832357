"""Dropout of the attention weights: exactly the published generator, whatever computes it.

`unit_call` has unit vectors as values, so that the output is the weights after dropout.
"""

import copy

import numpy as np
import pytest

import mha_c
import philox
from checks import close, same
from core_calls import core as _core
from mha_c import (
    AdditiveAttention,
    DotProductAttention,
    MultiHeadAttention,
    ShapeError,
    get_num_threads,
    set_num_threads,
)
from mha_c import functional as F

SEED = 0x0123456789ABCDEF


def unit_call(rng, dtype, batch=2, heads=3, queries=5, keys=300):
    q, k = (rng.standard_normal((batch, heads, n, 4)).astype(dtype) for n in (queries, keys))
    return q, k, np.broadcast_to(np.eye(keys, dtype=dtype), (batch, heads, keys, keys))


# --- The generator -------------------------------------------------------------------------------


# Known answers of Random123, the authors' own library (tests/kat_vectors, "philox4x32 7").
@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "5f6fb709 0d893f64 4f121f81 4f730a48"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "5207ddc2 45165e59 4d8ee751 8c52f662"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "4dfccaba 190a87f0 c47362ba b6b5242a"),
    ],
)
def test_the_reference_is_philox(counter, key, answer):
    counter, key, answer = ([int(word, 16) for word in text.split()] for text in (counter, key, answer))
    assert philox.block(counter, key) == tuple(answer)


@pytest.mark.parametrize("p", [0.1, 0.5, 1 / 65536, 0.99999])
@pytest.mark.parametrize("seed", [0, 1, SEED, 2**64 - 1])
def test_the_weights_that_stay_are_those_of_the_reference(rng, dtype, isa, p, seed):
    q, k, unit = unit_call(rng, dtype, queries=3)
    used, weights = F.dot_product_attention(q, k, unit, dropout=p, rng=seed, return_weights=True)
    stays = philox.kept(seed, p, weights.shape)
    np.testing.assert_array_equal(used != 0, stays)
    # The 300 terms of the divisor are summed in another order than for the weights: sqrt(300) roundings.
    np.testing.assert_allclose(used[stays], weights[stays] / (1 - p), rtol=18 * np.finfo(dtype).eps)


@pytest.mark.parametrize("shape", [(2, 3, 4, 19), (1, 1, 3, 8), (2, 2, 0, 3), (1, 2, 3, 0), (1, 1, 20, 200)], ids=str)
@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_the_factors_as_an_array(dtype, isa, shape, p):
    found = _core.dropout_factors(np.empty(shape, dtype), p, SEED)
    same(found, philox.factors(SEED, p, shape).astype(dtype))
    with pytest.raises(ShapeError, match=r"\(B, H, Q, K\)"):
        _core.dropout_factors(np.empty((2, 3), dtype), p, SEED)
    with pytest.raises(ValueError, match="dropout"):
        _core.dropout_factors(np.empty(shape, dtype), 1.5, SEED)


def test_places_beyond_32_bits(dtype, isa):
    """Of 2**33 weights, which nobody makes, each query sees three, one by one in other places of the last rows."""
    n_queries, n_keys, p = 2**13, 2**20, 0.4
    q, k = np.zeros((1, n_queries, 1), dtype), np.zeros((1, n_keys, 1), dtype)
    v = np.eye(4, dtype=dtype)[np.arange(n_keys) % 4][None]  # three keys in a row are told apart
    out = F.dot_product_attention(q, k, v, causal="bottom_right", window=(2, 0), dropout=p, rng=SEED)
    for query in (0, 1, 2**12 - 1, 2**12, *range(n_queries - 64, n_queries)):
        last = n_keys - n_queries + query
        expected = np.zeros(4, dtype)
        for key in range(last - 2, last + 1):
            word = philox.block((key // 8, query, 0, 0), (SEED & philox.WORD, SEED >> 32))[key % 8 // 2]
            stays = (word >> 16 * (key % 2) & 0xFFFF) >= int(p * 65536 + 0.5)
            expected[key % 4] = stays / (3 * (1 - p))
        close(out[0, query], expected, dtype)


def test_every_function_and_layer_drops_the_same(rng, dtype):
    q, k, unit = unit_call(rng, dtype, heads=1, keys=20)
    stays = philox.kept(SEED, 0.3, (2, 1, 5, 20))
    out = F.additive_attention(q, k, unit, np.ones(4, dtype), dropout=0.3, rng=SEED)
    np.testing.assert_array_equal(out != 0, stays)
    projections = (None,) * 4
    for w_v in (None, np.ones(4, dtype)):
        for training in (False, True):
            call = q[:, 0], k[:, 0], unit[:, 0], None, projections, w_v, 1, "zero", 0.3, SEED, training
            out, _ = _core.layer_forward(*call)
            np.testing.assert_array_equal(out != 0, stays[:, 0])


# --- What it may not depend on -------------------------------------------------------------------


def test_neither_threads_nor_instruction_set_nor_tiles_decide(rng, dtype):
    q, k, unit = unit_call(rng, dtype, queries=70, keys=400)
    stays = F.dot_product_attention(q, k, unit, dropout=0.4, rng=SEED) != 0
    for name, offered in _core.isas():
        for n in (1, 2, 5, 8):
            set_num_threads(n)
            if offered:
                _core.set_isa(name)
            used = F.dot_product_attention(q, k, unit, dropout=0.4, rng=SEED)
            np.testing.assert_array_equal(used != 0, stays)
    for cut in (1, 33):  # the first queries alone: other tiles, the same rows
        same(F.dot_product_attention(q[:, :, :cut], k, unit, dropout=0.4, rng=SEED) != 0, stays[:, :, :cut])


def test_masks_and_neighbours_do_not_decide(rng, dtype):
    q, k, unit = unit_call(rng, dtype, keys=40)
    stays = philox.kept(SEED, 0.5, (2, 3, 5, 40))
    keep = rng.random((5, 40)) < 0.7
    keep[:, 0] = True
    for options, visible in (
        ({"valid_lens": [17, 40]}, np.arange(40) < np.array([17, 40])[:, None, None, None]),
        ({"keep_mask": keep}, keep),
        ({"causal": "bottom_right", "window": (9, 0)}, None),
        ({"bias": rng.standard_normal((5, 40)).astype(dtype)}, True),
    ):
        used, weights = F.dot_product_attention(q, k, unit, dropout=0.5, rng=SEED, return_weights=True, **options)
        np.testing.assert_array_equal(used != 0, stays & (weights != 0 if visible is None else visible))
    first = F.dot_product_attention(q[:1], k[:1], unit[:1], dropout=0.5, rng=SEED)
    same(first, F.dot_product_attention(q, k, unit, dropout=0.5, rng=SEED)[:1])


def test_rows_that_see_few_keys(rng, isa):
    """One query and its last 1, 2, ... keys, wherever in the generator's blocks of 8 these begin and end."""
    for keys in range(1, 36):
        q, k, unit = unit_call(rng, np.dtype("f4"), heads=1, queries=1, keys=keys)
        stays = philox.kept(SEED, 0.5, (2, 1, 1, keys))
        for left in (0, 1, 7, 8, 16):
            used = F.dot_product_attention(q, k, unit, causal="bottom_right", window=(left, 0), dropout=0.5, rng=SEED)
            np.testing.assert_array_equal(used != 0, stays & (np.arange(keys) >= keys - 1 - left))


def test_grouped_heads_have_decisions_of_their_own(rng, dtype):
    q, k, unit = unit_call(rng, dtype, heads=4, keys=40)
    used = F.dot_product_attention(q, k[:, :2], unit[:, :2], dropout=0.5, rng=SEED)
    np.testing.assert_array_equal(used != 0, philox.kept(SEED, 0.5, (2, 4, 5, 40)))


@pytest.mark.parametrize("empty_rows", ["zero", "uniform"])
def test_empty_rows(rng, dtype, empty_rows):
    """A uniform row is the mean of the values, so its equal weights are dropped as any others (as in d2l)."""
    q, k, unit = unit_call(rng, dtype, keys=40)
    used = F.dot_product_attention(q, k, unit, [0, 40], dropout=0.5, rng=SEED, empty_rows=empty_rows)
    stays = philox.kept(SEED, 0.5, (2, 3, 5, 40))
    expected = stays[0] / 20 if empty_rows == "uniform" else np.zeros(stays[0].shape)
    np.testing.assert_allclose(used[0], expected, rtol=8 * np.finfo(dtype).eps)
    np.testing.assert_array_equal(used[1] != 0, stays[1])


# --- Its ends and its statistics -----------------------------------------------------------------


def test_nothing_and_everything(rng, dtype, isa):
    q, k, unit = unit_call(rng, dtype)
    plain = F.dot_product_attention(q, k, unit)
    same(F.dot_product_attention(q, k, unit, dropout=0.0, rng=SEED), plain)
    nothing = F.dot_product_attention(q, k, unit, dropout=1.0, rng=SEED)
    assert nothing.tobytes() == np.zeros_like(plain).tobytes()
    for make in (lambda p: MultiHeadAttention(8, 2, p, rng=0), lambda p: AdditiveAttention(8, p, rng=0),
                 lambda p: DotProductAttention(p, rng=0)):  # fmt: skip
        x = q[:, 0]
        same(make(0.0)(x, x, x, training=True), make(0.9)(x, x, x))
        assert not make(1.0)(x, x, x, training=True).any()


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_share_that_stays(rng, p):
    q, k, unit = unit_call(rng, np.float32, batch=4, heads=4, queries=20, keys=500)
    stays = F.dot_product_attention(q, k, unit, dropout=p, rng=SEED) != 0
    # Four standard deviations of n independent decisions; along each axis for itself as well.
    assert abs(stays.mean() - (1 - p)) < 4 * np.sqrt(p * (1 - p) / stays.size)
    for axis in range(4):
        others = tuple(a for a in range(4) if a != axis)
        n = stays.size // stays.shape[axis]
        # 5.5 of them: the largest of 500 means is above 4 too often.
        assert np.abs(stays.mean(axis=others) - (1 - p)).max() < 5.5 * np.sqrt(p * (1 - p) / n)


def test_neighbouring_decisions_are_independent():
    stays = np.array([philox.kept(seed, 0.5, (2, 2, 16, 64)) for seed in range(8)]) - 0.5
    for axis in range(stays.ndim):
        a, b = (np.delete(stays, end, axis=axis) for end in (0, -1))
        # The mean of n products of +-1/2, four standard deviations.
        assert abs((a * b).mean()) < 4 * 0.25 / np.sqrt(a.size)


def test_the_expectation_is_the_output_without_dropout(rng):
    q, k, v = (rng.standard_normal((1, 1, n, 8)) for n in (6, 12, 12))
    n = 2000
    outs = np.array([F.dot_product_attention(q, k, v, dropout=0.3, rng=seed) for seed in range(n)])
    error = np.abs(outs.mean(0) - F.dot_product_attention(q, k, v)) / (outs.std(0) / np.sqrt(n))
    assert error.max() < 4.5  # of 48 numbers: above 4.5 once in 3000 draws


# --- Layers ---------------------------------------------------------------------------------------


def test_attention_weights_are_those_before_dropout(rng, dtype):
    x = rng.standard_normal((2, 30, 8)).astype(dtype)
    for make in (lambda p: MultiHeadAttention(8, 2, p, rng=0), lambda p: AdditiveAttention(4, p, rng=0),
                 lambda p: DotProductAttention(p, rng=0)):  # fmt: skip
        quiet, dropping = make(0.0), make(0.5).train()
        quiet(x, x, x, [30, 11])
        outs = [dropping(x, x, x, [30, 11]) for _ in range(2)]
        assert (outs[0] != outs[1]).any()
        same(dropping.attention_weights, quiet.attention_weights)


@pytest.mark.parametrize("threads", [1, 2])
def test_items_keep_their_numbers_in_slices(rng, threads):
    """A large batch goes through the layer in slices; what is dropped depends on the item's place in the batch."""
    get_num_threads()
    stream = np.random.default_rng(3)
    layer = mha_c.MultiHeadAttention(64, 2, 0.4, rng=stream)
    x = rng.standard_normal((40, 70, 64)).astype(np.float32)
    layer(x[:1], x[:1], x[:1])  # fixes the open sizes
    set_num_threads(threads)
    assert mha_c.explain(layer, x, x, x, training=True).as_dict()["n_slices"] > 1
    seed = int(copy.deepcopy(stream).integers(0, 2**64, dtype=np.uint64))  # what the layer draws for its next call
    out = layer(x, x, x, training=True)
    q, k, v = (mha_c.transpose_qkv(W(x), 2).reshape(40, 2, 70, 32) for W in (layer.W_q, layer.W_k, layer.W_v))
    attended = F.dot_product_attention(q, k, v, dropout=0.4, rng=seed)
    assert np.array_equal(out, layer.W_o(mha_c.transpose_output(attended.reshape(80, 70, 32), 2)))


def test_the_stream_of_a_layer_decides(rng):
    x = rng.standard_normal((2, 6, 8))
    a, b, c = (DotProductAttention(0.5, rng=n).train()(x, x, x) for n in (3, 3, 4))
    same(a, b)
    assert (a != c).any()
