"""The options of a layer's call in `_core`: rows of a joint weight, turned rows, masks and their gradient; refusals."""

import numpy as np
import pytest

import mha_c
from mha_c import _core
from mha_c._layer.kept_weights import saved_weights

B, T, SIZE, HEADS, SHARED, D = 2, 5, 6, 4, 2, 4
SIZES = HEADS * D, SHARED * D, SHARED * D
RNG = np.random.default_rng(0)
X, GRAD = RNG.standard_normal((B, T, SIZE)), RNG.standard_normal((B, T, 3))
WHOLE, BIAS = RNG.standard_normal((sum(SIZES) + 1, SIZE)), RNG.standard_normal(sum(SIZES) + 1)
W_O = RNG.standard_normal((3, HEADS * D))
PLACES = np.split(RNG.permutation(len(WHOLE)), np.cumsum(SIZES))[:3]
STARTS = 1, 1 + SIZES[0], 1 + SIZES[0] + SIZES[1]  # row 0 is nobody's
NEEDS = (True,) * 13


def call(parameters, options=None, training=True, inputs=(X, X, X), lens=None):
    heads = HEADS, SHARED
    return _core.layer_forward(*inputs, lens, (*parameters, None), None, heads, "zero", 0.0, 0, training, options)


def back(parameters, kept, options=None, inputs=(X, X, X), needs=NEEDS, join=False):
    given = (*parameters, None), None, (HEADS, SHARED), "zero", 0.0, 0
    return _core.layer_backward(GRAD, kept, *inputs, kept[7], *given, needs, join, options)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize(
    "rows",
    [tuple(zip(STARTS, SIZES)), tuple(PLACES), ((0, 16), (3, 8), (3, 8)), (PLACES[0], (0, 8), PLACES[0][:8])],
    ids=["ranges", "any order", "used twice", "mixed"],
)
def test_rows_of_a_joint_weight_are_weights_of_their_own(rows, place, isa):
    """Bits of the call, and each row's gradient: the sum of those of its places."""
    numbers = [np.arange(r[0], r[0] + r[1]) if isinstance(r, tuple) else r for r in rows]
    apart = *(WHOLE[n] for n in numbers), W_O, *(BIAS[n] for n in numbers), None
    joint = [None] * 8
    joint[place], joint[place + 4], joint[3] = WHOLE, BIAS, W_O
    options = None, None, None, None, rows
    (out, kept), (expected, of_apart) = call(joint, options), call(apart)
    assert np.array_equal(out, expected)
    found, right = back(joint, kept, options), back(apart, of_apart)
    for i, whole in ((3, WHOLE), (7, BIAS)):
        summed = np.zeros_like(whole)
        for n, grad in zip(numbers, right[i : i + 3]):
            np.add.at(summed, n, grad)
        np.testing.assert_allclose(found[i + place], summed, rtol=0, atol=1e-13)  # two terms, in one order or the other
        assert [x is None for x in found[i : i + 3]] == [j != place for j in range(3)]
    for mine, theirs in zip((*found[:3], found[6]), (*right[:3], right[6])):
        assert np.array_equal(mine, theirs)


def turned(x, cos, sin):
    """x (B, T, features): heads of D features."""
    pairs = x.reshape(B, T, -1, D // 2, 2)
    cos, sin = (np.broadcast_to(t, (B, *t.shape[-2:]))[:, :T, None] for t in (cos, sin))
    a, b = pairs[..., 0], pairs[..., 1]
    return np.stack((a * cos - b * sin, b * cos + a * sin), -1).reshape(x.shape)


@pytest.mark.parametrize("shape", [(T, D // 2), (T + 3, D // 2), (B, T, D // 2)])
def test_projected_queries_and_keys_are_turned(shape, isa):
    angles = np.random.default_rng(1).standard_normal(shape)
    turn = np.cos(angles), np.sin(angles)
    W = *np.split(WHOLE[:-1], np.cumsum(SIZES)[:2]), W_O
    _, kept = call((*W, *[None] * 4), (None, None, None, turn))
    np.testing.assert_allclose(kept[2], turned(X @ W[0].T, *turn), atol=1e-13)  # sums of six terms around 1
    np.testing.assert_allclose(kept[3], turned(X @ W[1].T, *turn), atol=1e-13)
    projected = X, kept[3], kept[10]  # keys that come turned are as they are
    only_q = (W[0], None, None, W_O, *[None] * 4)
    out, again = call(only_q, (None, None, None, turn), inputs=projected, training=False)
    expected, _ = call((*W, *[None] * 4), (None, None, None, turn))
    assert np.array_equal(out, expected) and saved_weights(again).shape == (B, HEADS, T, T)


@pytest.mark.parametrize("shape", [(T, T), (1, T), (B, 1, T, 1), (1, HEADS, T, T), (B, HEADS, T, T)])
def test_the_gradient_of_a_bias_has_its_shape(shape, isa):
    """Central differences of the call itself: h**2 and rounding / h are both some 1e-11."""
    rng = np.random.default_rng(2)
    bias, direction, h = rng.standard_normal(shape), rng.standard_normal(shape), 1e-5
    W = *np.split(WHOLE[:-1], np.cumsum(SIZES)[:2]), W_O, *[None] * 4
    options = "top_left", rng.random((T, T)) < 0.8, bias
    _, kept = call(W, options)
    grad = back(W, kept, options)[12]
    ends = [(call(W, (*options[:2], bias + s * h * direction))[0] * GRAD).sum() for s in (1, -1)]
    assert grad.shape == shape
    np.testing.assert_allclose((grad * direction).sum(), (ends[0] - ends[1]) / (2 * h), rtol=1e-7, atol=1e-8)
    assert len(back(W, kept, options, needs=NEEDS[:12])) == 12
    assert back(W, kept, options, needs=(*NEEDS[:12], False))[12] is None


@pytest.mark.parametrize(
    "options, kind, message",
    [
        ("top_left", TypeError, "options must be None or a tuple"),
        ((None,) * 10, TypeError, "options must be None or a tuple"),
        (("left",), ValueError, "causal"),
        ((None, np.ones((T, T + 1), bool)), mha_c.ShapeError, "keep_mask"),
        ((None, None, np.ones((T, T), np.float32)), TypeError, "bias"),
        ((None, None, None, 1), TypeError, "turn must be"),
        ((None, None, None, (np.ones((T - 1, 2)),) * 2), mha_c.ShapeError, "cosines"),
        ((None, None, None, (np.ones((T, 2)), np.ones((T, 3)))), mha_c.ShapeError, "sines"),
        ((None, None, None, None, 1), TypeError, "rows must be a tuple"),
        ((None, None, None, None, ((0, 16), (0, 8), (30, 8))), ValueError, "33 rows"),
        ((None, None, None, None, ((0, 16), (0, 8), np.arange(26, 34))), ValueError, "33 rows"),
        ((None, None, None, None, ((0, 16), (0, 8), np.arange(-1, 7))), ValueError, "33 rows"),
        ((None, None, None, None, ((0, 16), (0, 8), np.arange(8.0))), TypeError, "rows must be"),
        ((None, None, None, None, ((0, 16), (0, 8), (0, 7))), mha_c.ShapeError, "7"),
    ],
)
def test_bad_options_are_refused(options, kind, message):
    joint = WHOLE, None, None, W_O, *[None] * 4
    if len(options) < 5 or options == (None,) * 10:
        joint = *np.split(WHOLE[:-1], np.cumsum(SIZES)[:2]), W_O, *[None] * 4
    with pytest.raises(kind, match=message):
        call(joint, options)


def test_weights_are_kept_with_what_they_depend_on(isa):
    x = np.random.default_rng(3).standard_normal((B, 40, SIZE))
    W = *np.split(WHOLE[:-1], np.cumsum(SIZES)[:2]), W_O, *[None] * 4
    keep, bias = np.tri(40, dtype=bool) & (np.arange(40) % 3 > 0), np.linspace(-1, 1, 40)[None]
    options = "top_left", keep, bias
    _, kept = call(W, options, training=False, inputs=(x, x, x))
    assert len(kept) == 14 and kept[13][1].shape == (1, 1, 40, 40) and kept[13][2].shape == (1, 1, 1, 40)
    q, k = (y.reshape(B, 40, n, D).transpose(0, 2, 1, 3) for y, n in ((kept[2], HEADS), (kept[3], SHARED)))
    expected = _core.attention_forward(q, k, k, None, None, keep, bias, "top_left", -1, -1, None, 0.0, 0, "zero", True)
    assert np.array_equal(saved_weights(kept), expected[1])
