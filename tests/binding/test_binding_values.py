"""What `_core` is given beside arrays (options, packed weights, saved tuples, lengths): refused by name, no leak."""

import numpy as np
import pytest

from binding_calls import (
    F64,
    KEPT,
    PROJECTIONS,
    RECOMPUTE,
    B,
    K,
    Q,
    assert_leaks_nothing,
    attention,
    layer,
    linear,
    numbers,
    ones,
    saved,
    softmax,
)
from core_calls import core as _core
from mha_c._arguments.core_refusals import PackedForOthers

ShapeError = _core.ShapeError


# --- Other values -----------------------------------------------------------------------------------------------


class NoFloat:
    def __float__(self):
        raise ZeroDivisionError("passed on")


DROPOUT = {-0.1: "0 and 1", 1.1: "0 and 1", float("nan"): "NaN", float("inf"): "0 and 1", 10**400: "too large"}
VALUES = {
    **{f"dropout {p}": (lambda p=p: attention(dropout=p), ValueError, f"dropout .*{w}") for p, w in DROPOUT.items()},
    **{
        f"dropout {p!r}": (lambda p=p: layer(dropout=p), TypeError, "dropout must be a real number, got")
        for p in ("0.1", b"0", True, None, 0j, np.bool_(True), np.complex64(1), np.str_("0.1"), np.zeros(1), [0.1])
    },
    "dropout raises": (lambda: attention(dropout=NoFloat()), ZeroDivisionError, "passed on"),
    "scale nan": (lambda: attention(scale=float("nan")), ValueError, "scale must not be NaN"),
    "scale text": (lambda: attention(scale="1"), TypeError, r"scale must be a real number, got '1' \(str\)"),
    "scale bool": (lambda: attention(scale=False), TypeError, r"scale must be a real number, got False \(bool\)"),
    "seed -1": (lambda: attention(seed=-1), ValueError, r"seed must lie in 0 \.\. 2\*\*64 - 1, got -1"),
    "seed 2**64": (lambda: layer(seed=2**64), ValueError, "seed must lie in"),
    "seed float": (lambda: attention(seed=1.0), TypeError, r"seed must be a whole number, got 1.0 \(float\)"),
    "seed bool": (lambda: attention(seed=True), TypeError, r"seed must be a whole number, got True \(bool\)"),
    "causal": (lambda: attention(causal="left"), ValueError, "causal must be 'top_left' or 'bottom_right', got 'left'"),
    "causal True": (lambda: attention(causal=True), TypeError, r"causal must be a string, got True \(bool\)"),
    "empty_rows": (lambda: attention(empty_rows="nan"), ValueError, "must be 'zero' or 'uniform', got 'nan'"),
    "empty_rows None": (lambda: layer(empty_rows=None), TypeError, r"must be a string, got None \(NoneType\)"),
    "softmax empty_rows": (lambda: softmax(empty_rows="x"), ValueError, "empty_rows"),
    "window_left": (lambda: attention(window_left=-2), ValueError, "window_left must be at least -1, got -2"),
    "window_left far": (lambda: attention(window_left=-(2**70)), ValueError, "window_left must be at least -1"),
    "window_right": (lambda: attention(window_right=1.5), TypeError, r"window_right must be a whole number, got 1.5"),
    "num_heads 0": (lambda: layer(num_heads=0), ValueError, "num_heads must be at least 1, got 0"),
    "num_heads True": (lambda: layer(num_heads=True), TypeError, r"num_heads must be a whole number, got True"),
    "num_heads array": (lambda: layer(num_heads=np.array(2)), TypeError, "num_heads must be a whole number"),
    "num_heads 3": (lambda: layer(num_heads=3), ValueError, "num_heads = 3 does not divide the 8 .*queries and keys"),
    "num_heads 4": (lambda: layer(num_heads=4), ValueError, "num_heads = 4 does not divide the 6 .*values"),
    "num_heads huge": (lambda: layer(num_heads=2**80), ValueError, "num_heads = .* does not divide"),
    "keep_mask uint8": (
        lambda: attention(keep_mask=ones(Q, K, dtype=np.uint8)),
        TypeError,
        r"keep_mask has dtype uint8, expected bool, .*keep_mask != 0",
    ),
    "keep_mask float": (lambda: attention(keep_mask=numbers(Q, K)), TypeError, "keep_mask has dtype float32"),
    "keep_mask list": (lambda: attention(keep_mask=[[True]]), TypeError, "keep_mask must be an array of bool"),
    "bias bool": (lambda: attention(bias=ones(Q, K)), TypeError, "bias has dtype bool, .*as keep_mask"),
    "projections": (lambda: layer(projections=None), TypeError, "projections must be a tuple"),
    "3 projections": (lambda: layer(projections=PROJECTIONS[:3]), TypeError, "projections must be a tuple"),
    "projection list": (lambda: layer(projections=([], None, None, None)), TypeError, "W_q must be \\(weight"),
    "projection sizes": (lambda: linear(p=(PROJECTIONS[0][0], None, [8, 5])), TypeError, "projection must be"),
    "projection None": (lambda: _core.linear(numbers(2, 5), None), TypeError, "projection must be"),
    "projection size": (lambda: linear(p=(PROJECTIONS[0][0], None, (8.0, 5))), TypeError, "whole number, got 8.0"),
    "negative size": (lambda: linear(p=(PROJECTIONS[0][0], None, (8, -5))), ValueError, "at least 0, got -5"),
    "huge size": (lambda: linear(p=(PROJECTIONS[0][0], None, (2**62, 2**62))), ValueError, "too large"),
    "huger size": (lambda: linear(p=(PROJECTIONS[0][0], None, (2**70, 5))), ValueError, "too large|packed"),
    "packed list": (lambda: linear(p=([1.0], None, (8, 5))), TypeError, "projection must be a NumPy array, got list"),
    "packed too short": (
        lambda: linear(p=(PROJECTIONS[0][0][:-1], None, (8, 5))),
        ValueError,
        "projection: not a weight of 8 x 5 packed for the active instruction set",
    ),
    "packed rank": (lambda: linear(p=(PROJECTIONS[0][0][None], None, (8, 5))), ValueError, "not a weight of 8 x 5"),
    "packed for more": (lambda: linear(p=(PROJECTIONS[0][0], None, (800, 5))), ValueError, "not a weight of 800 x 5"),
    "set_isa": (lambda: _core.set_isa("mmx"), ValueError, "'mmx' is not available: this CPU offers scalar"),
    "set_isa type": (lambda: _core.set_isa(None), TypeError, "name must be a string, got NoneType"),
    **{
        f"threads {n!r}": (lambda n=n: _core.set_num_threads(n), ValueError, "the number of threads")
        for n in (0, -1, -(2**70), 2**70, "2", 2.0, float("nan"), None, True)
    },
}


@pytest.mark.parametrize("case", VALUES)
def test_other_values_are_refused_by_name(case):
    call, kind, words = VALUES[case]
    with pytest.raises(kind, match=words) as caught:
        call()
    assert caught.type is (PackedForOthers if "a weight of" in words else kind)


@pytest.mark.parametrize("good", [0, 1, 0.5, np.float32(0.5), np.float64(1), np.int64(0), np.array(0.25)])
def test_real_numbers_of_any_kind(good):
    for name in ("dropout", "scale"):
        assert attention(**{name: good})[0].tobytes() == attention(**{name: float(good)})[0].tobytes()


def test_infinite_scale_and_wide_windows_are_numbers():
    attention(scale=float("inf"))
    plain = attention()[0]
    assert np.array_equal(plain, attention(window_left=2**63 - 1, window_right=2**80)[0])


# --- saved_weights ----------------------------------------------------------------------------------------------------

CORRUPT = {
    "empty": lambda: _core.saved_weights(()),
    "no isa": lambda: saved(0, None),
    "too short": lambda: _core.saved_weights(RECOMPUTE[:-1]),
    "weights too long": lambda: _core.saved_weights((*KEPT, None)),
    "weights None": lambda: _core.saved_weights((KEPT[0], None, *KEPT[2:])),
    "weights of another type": lambda: _core.saved_weights((KEPT[0], KEPT[1].astype(int), *KEPT[2:])),
    "weights of another rank": lambda: _core.saved_weights((KEPT[0], KEPT[1][0], *KEPT[2:])),
    "isa": lambda: saved(0, 7),
    "q": lambda: saved(2, None),
    "q rank": lambda: saved(2, RECOMPUTE[2][0]),
    "q type": lambda: saved(2, RECOMPUTE[2].astype(F64)),
    "q rows": lambda: saved(2, RECOMPUTE[2][:, 1:]),
    "q batch": lambda: saved(2, RECOMPUTE[2][1:]),
    "k features": lambda: saved(3, RECOMPUTE[3][:, :, 1:]),
    "k batch": lambda: saved(3, RECOMPUTE[3][1:]),
    "w_v": lambda: saved(4, numbers(3)),
    "w_v rank": lambda: saved(4, numbers(4, 1)),
    "row_max": lambda: saved(5, RECOMPUTE[5][:, :, 1:]),
    "row_sum": lambda: saved(6, RECOMPUTE[6].ravel()),
    "lengths list": lambda: saved(7, [3, 4]),
    "lengths shape": lambda: saved(7, np.array([3, 4, 5])),
    "lengths type": lambda: saved(7, np.array([True, False])),
    "num_heads": lambda: saved(8, 3),
    "num_heads 0": lambda: saved(8, 0),
    "num_heads huge": lambda: saved(8, 2**80),
    "num_heads type": lambda: saved(8, "2"),
    "empty_rows": lambda: saved(9, "none"),
}


@pytest.mark.parametrize("case", CORRUPT)
def test_a_corrupt_saved_tuple_is_a_value_error(case):
    with pytest.raises(ValueError, match="saved is not what layer_forward returned"):
        CORRUPT[case]()


# --- valid_lens ---------------------------------------------------------------------------------------

EXPECTED = r"expected \(B,\) = \(2,\) or \(B, Q\) = \(2, 4\)"
LENGTHS = {
    "bool": ([True, False], TypeError, "dtype bool, like a mask, but takes lengths: .*keep_mask"),
    "bool array": (ones(B, Q), TypeError, "bool, like a mask"),
    "one bool": (True, TypeError, "bool, like a mask"),
    "object": (np.array([3, 2], object), TypeError, "valid_lens has dtype object, expected integers or floats"),
    "text": (["3", "2"], TypeError, "valid_lens must be an array of numbers, got words"),
    "complex": ([3j, 2], TypeError, "valid_lens has dtype complex128"),
    "timedelta": (np.zeros(2, "m8[s]"), TypeError, "valid_lens has dtype timedelta64"),
    "None inside": ([3, None], TypeError, "valid_lens has dtype object"),
    "NaN": ([3.0, float("nan")], ValueError, "valid_lens must be finite, but has a NaN or infinity at position 1"),
    "inf": ([float("inf"), 3], ValueError, "finite.*position 0"),
    "-inf": (np.array([3, float("-inf")], "f2"), ValueError, "finite.*position 1"),
    "int": (3, ShapeError, rf"valid_lens has shape \(\), {EXPECTED}"),
    "0-d": (np.array(3), ShapeError, rf"shape \(\), {EXPECTED}"),
    "three": ([3, 2, 1], ShapeError, rf"valid_lens has shape \(3,\), {EXPECTED}"),
    "one": ([3], ShapeError, r"shape \(1,\)"),
    "none": ([], ShapeError, r"shape \(0,\)"),
    "(Q, B)": (np.ones((Q, B), int), ShapeError, r"shape \(4, 2\)"),
    "(B, 1)": ([[3], [2]], ShapeError, r"shape \(2, 1\)"),
    "(B, Q, 1)": (np.ones((B, Q, 1)), ShapeError, r"shape \(2, 4, 1\)"),
    "(B, K)": (np.ones((B, K), "u1"), ShapeError, r"shape \(2, 6\)"),
    "ragged": ([[3, 2], [1]], ValueError, "valid_lens is a ragged list"),
}


@pytest.mark.parametrize("call", [attention, layer, softmax])
@pytest.mark.parametrize("case", LENGTHS)
def test_lengths_are_checked_by_type_then_shape(case, call):
    lens, kind, words = LENGTHS[case]
    with pytest.raises(kind, match=words) as caught:
        call(valid_lens=lens)
    assert caught.type is kind


def test_an_exception_of_the_lengths_object_passes_through():
    class Lengths:
        calls = 0

        def __array__(self, *args, **kwargs):
            self.calls += 1
            raise ZeroDivisionError

    lens = Lengths()
    with pytest.raises(ZeroDivisionError):
        attention(valid_lens=lens)
    assert lens.calls == 1


# --- Leaks -------------------------------------------------------------------------------------------------

BAD = [
    *(call for call, _, _ in VALUES.values()),
    *CORRUPT.values(),
    *(lambda lens=lens: attention(valid_lens=lens) for lens, _, _ in LENGTHS.values()),
    *(lambda lens=lens: layer(valid_lens=lens) for lens, _, _ in LENGTHS.values()),
    lambda: _core.set_isa(),
]
GOOD = [
    lambda: attention(valid_lens=[3, 2], return_weights=True, return_lse=True, seed=2**63, dropout=0.5),
    lambda: attention(keep_mask=ones(Q, K), bias=numbers(1, Q, 1), causal="top_left", window_left=2, scale=0.5),
    lambda: layer(valid_lens=np.array([[1, 2, 3, 4]] * 2, "u1")),
    lambda: layer(valid_lens=(1.5, 2.5)),
    lambda: _core.saved_weights(RECOMPUTE),
    lambda: _core.saved_weights(KEPT),
    lambda: softmax(valid_lens=[3, 2], empty_rows="uniform"),
    _core.isas,
    _core.isa,
    lambda: _core.set_isa(_core.isa()),
    lambda: _core.set_num_threads(_core.get_num_threads()),
]


@pytest.mark.parametrize("calls", [GOOD, BAD], ids=["good", "bad"])
def test_no_references_to_other_values_are_lost(calls):
    assert_leaks_nothing(calls, good=calls is GOOD)
