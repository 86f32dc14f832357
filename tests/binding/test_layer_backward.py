"""layer_forward in training and layer_backward of `_core`: what is kept, what fits, what is refused, leaks."""

import numpy as np
import pytest

from binding_calls import F32, F64, LAYER, PROJECTIONS, B, H, K, Q, assert_leaks_nothing, flat, numbers
from core_calls import core as _core
from mha_c import ShapeError

WEIGHTS = tuple(numbers(*p[2]) for p in PROJECTIONS)
NONE = (None,) * 4
# Places in what is kept.
WEIGHTS_KEPT, P_Q, P_K, ROW_MAX, ROW_SUM, LENS, P_V, CONTEXT = 1, 2, 3, 5, 6, 7, 10, 11


def arguments(**changes):
    """Those of a good layer_forward, with changes."""
    values = (numbers(B, Q, 5), numbers(B, K, 5), numbers(B, K, 3), [K, 4], PROJECTIONS, None, H, "uniform", 0.0, 0)
    return {**dict(zip(LAYER, values)), **changes}


def train(given):
    return _core.layer_forward(**given, training=True)


def backward_arguments(given, weights=WEIGHTS, grad_out=None, **changes):
    """Those of the `backward` that belongs to a forward call."""
    out, kept = train(given)
    values = {name: value for name, value in given.items() if name != "projections"}
    grad_out = np.ones_like(out) if grad_out is None else grad_out
    return {"grad_out": grad_out, "kept": kept, "weights": weights, **values, "valid_lens": kept[LENS], **changes}


def backward(
    grad_out, kept, weights, queries, keys, values, valid_lens, w_v, num_heads, empty_rows, dropout, seed,
    needs_inputs=(True,) * 3, needs_weights=(True,) * 4, needs_biases=(True,) * 4,
):  # fmt: skip
    """layer_backward by names: (of three inputs, of four weights, of four biases, of w_v)."""
    found = _core.layer_backward(
        grad_out, kept, queries, keys, values, valid_lens, (*weights, *NONE, w_v), w_v, num_heads, empty_rows, dropout,
        seed, (*needs_inputs, *needs_weights, *needs_biases, True),
    )  # fmt: skip
    return found[:3], found[3:7], found[7:11], found[11]


def packed(W, bias):
    """A projection, for the instruction set that is active now."""
    return _core.pack_linear(W), numbers(len(W), dtype=W.dtype) if bias else None, W.shape


def bits(result):
    return [x.tobytes() for x in flat(result)]


# --- What is kept --------------------------------------------------------------------------------


def variants(dtype):
    """Forward arguments and weights: all projections, some, none; few keys and many."""
    x = {n: numbers(B, n, 6, dtype=dtype) for n in (3, 40)}
    W = numbers(6, 6, dtype=dtype)
    square = packed(W, True), packed(W, False)
    for queries, keys in ((3, 3), (40, 40), (3, 40)):
        inputs = {"queries": x[queries], "keys": x[keys], "values": x[keys], "valid_lens": [keys, 2], "num_heads": 1}
        w_v = numbers(6, dtype=dtype)
        yield arguments(**inputs, projections=(*square, *square)), (W,) * 4
        yield arguments(**inputs, projections=(square[1], square[1], None, None), w_v=w_v), (W, W, None, None)
        yield arguments(**inputs, projections=(square[1], None, None, None), w_v=w_v), (W, None, None, None)
        yield arguments(**inputs, projections=NONE), NONE


@pytest.mark.parametrize("which", range(12))
def test_training_computes_the_same_and_keeps_the_weights(which, dtype, isa):
    given, _ = list(variants(dtype))[which]
    out, saved = _core.layer_forward(**given)
    trained, kept = train(given)
    assert out.tobytes() == trained.tobytes()
    assert bits(_core.saved_weights(saved)) == bits(_core.saved_weights(kept[:10]))
    assert len(saved) == 10 and len(kept) == 14
    W_q, W_k, W_v, W_o = given["projections"]
    assert (kept[P_V] is None) == (W_v is None)
    for place, p in ((P_Q, W_q), (P_K, W_k)):  # copies of inputs only for the weights
        assert kept[place] is not None if p is not None else (kept[place] is None) == (kept[WEIGHTS_KEPT] is not None)
    if W_o is None:
        assert kept[CONTEXT].tobytes() == out.tobytes() and kept[CONTEXT] is not trained


def test_training_keeps_what_the_weights_are_computed_from():
    _, kept = train(arguments())
    assert kept[WEIGHTS_KEPT] is None  # which few keys would make the smaller
    assert not kept[P_K][1, 4:].any() and not kept[P_V][1, 4:].any()  # never projected: no garbage in a pickle


def test_what_is_kept_has_its_own_lengths():
    lens = np.array([K, 4])
    given = arguments(valid_lens=lens)
    values = backward_arguments(given)
    expected = bits(backward(**values))
    lens[:] = 1
    assert bits(backward(**values)) == expected


# --- What is computed ------------------------------------------------------------------------------


@pytest.mark.parametrize("which", range(12))
def test_only_what_is_needed(which, dtype):
    given, weights = list(variants(dtype))[which]
    values = backward_arguments(given, weights)
    everything = backward(**values)
    inputs, of_weights, of_biases, of_w_v = everything
    assert [x.shape for x in inputs] == [given[name].shape for name in ("queries", "keys", "values")]
    for W, grad, bias in zip(weights, of_weights, of_biases):
        assert (grad is None) == (W is None) == (bias is None)
        assert W is None or (grad.shape == W.shape and bias.shape == W.shape[:1])
    assert (of_w_v is None) == (given["w_v"] is None)
    assert all(x.dtype == dtype for x in flat(everything))
    for needs in ((0, 0, 0), (1, 0, 1), (False, True, False)):
        some, *_ = backward(**values, needs_inputs=needs)
        for x, whole, need in zip(some, inputs, needs):
            assert (x is None) if not need else x.tobytes() == whole.tobytes()
    for needs in ((0, 1, 0, 1), (1, 0, 1, 0)):
        _, some, none, _ = backward(**values, needs_weights=needs, needs_biases=(False,) * 4)
        assert none == NONE
        for x, whole, need in zip(some, of_weights, needs):
            assert (x is None) if not need or whole is None else x.tobytes() == whole.tobytes()


def test_rows_gathered_or_not(dtype, isa):
    """Lengths that hide nothing change no bit, though rows are then copied side by side; wide ones for narrow heads."""
    W = *(numbers(4, 700, dtype=dtype),) * 3, numbers(9, 4, dtype=dtype)
    inputs = {"queries": numbers(5, 13, 700, dtype=dtype), "keys": numbers(5, 17, 700, dtype=dtype)}
    results = []
    for lens in (None, [17] * 5):
        given = arguments(
            **inputs, values=inputs["keys"], valid_lens=lens, projections=tuple(packed(w, True) for w in W), num_heads=2
        )
        results.append(bits(backward(**backward_arguments(given, W))))
    assert results[0] == results[1]


@pytest.mark.parametrize("zero", ["B", "Q", "K", "heads' features"])
def test_zero_sizes(zero, dtype):
    b, q, k, f = (0 if name == zero else n for name, n in (("B", 2), ("Q", 3), ("K", 4), ("heads' features", 6)))
    W = numbers(f, f, dtype=dtype)
    shapes = {"queries": (b, q, f), "keys": (b, k, f), "values": (b, k, f)}
    given = arguments(
        **{name: numbers(*shape, dtype=dtype) for name, shape in shapes.items()},
        projections=(packed(W, True),) * 4,
        valid_lens=None,
    )
    rubbish = [np.full(n, np.nan, dtype) for n in range(1, 90)]  # so that what is not written shows
    del rubbish
    inputs, weights, biases, _ = backward(**backward_arguments(given, (W,) * 4))
    assert [x.shape for x in inputs] == list(shapes.values())
    assert all(np.isfinite(x).all() for x in (*inputs, *weights, *biases))
    if zero != "heads' features" and zero != "K":
        assert not any(x.any() for x in (*weights, *biases))


def test_dropout_is_the_forwards(dtype):
    given, weights = next(variants(dtype))
    given = {**given, "dropout": 0.5, "seed": 3}
    values = backward_arguments(given, weights)
    expected = bits(backward(**values))
    assert bits(backward(**{**values, "seed": 4})) != expected
    assert bits(backward(**{**values, "dropout": 0.0})) != expected


# --- What does not fit -------------------------------------------------------------------------------


GOOD = backward_arguments(arguments(valid_lens=[K, 4]))


def kept_with(part, value):
    return {"kept": (*GOOD["kept"][:part], value, *GOOD["kept"][part + 1 :])}


BAD = {
    "kept None": ({"kept": None}, TypeError, "kept must be the tuple that layer_forward returned in training"),
    "kept list": ({"kept": list(GOOD["kept"])}, TypeError, "kept must be"),
    "kept in evaluation": ({"kept": GOOD["kept"][:10]}, TypeError, "kept must be"),
    "no projected queries": (kept_with(P_Q, None), TypeError, "the projected queries must be a NumPy array"),
    "projected keys": (kept_with(P_K, numbers(B, K, 7)), ShapeError, r"projected keys has shape \(2, 6, 7\), expected"),
    "projected keys rank": (kept_with(P_K, numbers(B * K, 8)), ShapeError, "the projected keys"),
    "projected values": (kept_with(P_V, numbers(B, 5, 6)), ShapeError, "the projected values"),
    "context": (kept_with(CONTEXT, numbers(B, Q, 6, dtype=F64)), TypeError, "the attended values has dtype float64"),
    "row_max": (kept_with(ROW_MAX, numbers(B, Q, H)), ShapeError, "the row statistics"),
    "row_sum": (kept_with(ROW_SUM, numbers(1, H, Q)), ShapeError, "the row statistics"),
    "integers": (kept_with(ROW_SUM, np.ones((B, H, Q), int)), TypeError, "the row statistics has dtype int64"),
    "lengths": ({"valid_lens": np.ones(3, int)}, ShapeError, "valid_lens has shape"),
    "grad_out shape": ({"grad_out": numbers(B, Q, 8)}, ShapeError, r"grad_out has shape \(2, 4, 8\), expected"),
    "grad_out type": ({"grad_out": numbers(B, Q, 7, dtype=F64)}, TypeError, "grad_out has dtype float64"),
    "grad_out None": ({"grad_out": None}, TypeError, "grad_out must be a NumPy array"),
    "weight rank": ({"weights": (numbers(40), *WEIGHTS[1:])}, ShapeError, r"W_q has shape \(40,\) \(rank 1\)"),
    "weight in": ({"weights": (numbers(8, 4), *WEIGHTS[1:])}, ShapeError, "queries has 5 features .* W_q expects 4"),
    "weight out": ({"weights": (numbers(6, 5), *WEIGHTS[1:])}, ShapeError, "W_k gives 8 features, but W_q gives 6"),
    "W_o": ({"weights": (*WEIGHTS[:3], numbers(7, 5))}, ShapeError, "W_o expects 5 features"),
    "weight type": ({"weights": (*WEIGHTS[:3], numbers(7, 6, dtype=F64))}, TypeError, "W_o has dtype float64"),
    "no weights": ({"weights": NONE}, ValueError, "num_heads = 2 does not divide the 5 projected features"),
    "keys": ({"keys": numbers(B, 5, 5)}, ShapeError, "values has 6 keys, but keys has 5"),
    "w_v": ({"w_v": numbers(3)}, ShapeError, r"w_v has shape \(3,\), expected \(4,\)"),
    "heads": ({"num_heads": 3}, ValueError, "num_heads = 3 does not divide"),
    "other heads": ({"num_heads": 1}, ShapeError, "the row statistics"),
    "dropout": ({"dropout": 2}, ValueError, "dropout must be between 0 and 1"),
    "seed": ({"seed": -1}, ValueError, "seed must lie in"),
    "needs_biases": ({"needs_biases": (np.ones(2),) * 4}, ValueError, "truth value"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_refused(case):
    change, error, words = BAD[case]
    with pytest.raises(error, match=words):
        backward(**{**GOOD, **change})


def test_without_an_output_projection_the_output_is_kept():
    given, weights = list(variants(F32))[3]
    values = backward_arguments(given, weights)
    for wrong, error in ((None, TypeError), (numbers(B, 3, 5), ShapeError)):
        with pytest.raises(error, match="the attended values"):
            backward(**{**values, "kept": (*values["kept"][:CONTEXT], wrong, 0, None)})


def test_wild_numbers_in_what_was_kept_are_only_computed_with():
    for part in (P_Q, P_K, ROW_MAX, ROW_SUM, P_V, CONTEXT):
        for number in (np.nan, np.inf, -np.inf, 0.0, 1e30):
            with np.errstate(all="ignore"):
                found = backward(**{**GOOD, **kept_with(part, np.full_like(GOOD["kept"][part], number))})
            assert [x.shape for x in flat(found)] == [x.shape for x in flat(backward(**GOOD))]
    for lens in ([-5, 2**62], np.full((B, Q), 99), None):
        backward(**{**GOOD, "valid_lens": lens})


def test_layout_of_everything_is_free():
    expected = bits(backward(**GOOD))
    odd = {name: np.asfortranarray(GOOD[name]) for name in ("queries", "keys", "values")}
    odd["grad_out"] = np.broadcast_to(F32(1), GOOD["grad_out"].shape)
    odd["weights"] = tuple(np.asfortranarray(W) for W in WEIGHTS)
    odd["kept"] = tuple(np.asfortranarray(x) if isinstance(x, np.ndarray) else x for x in GOOD["kept"])
    assert bits(backward(**{**GOOD, **odd})) == expected


def test_leaks_nothing():
    calls = [lambda: backward(**GOOD)]
    calls += [lambda change=change: backward(**{**GOOD, **change}) for change, _, _ in BAD.values()]
    calls += [lambda given=given: train(given) for given, _ in variants(np.dtype(F32))]
    calls += [lambda: train(arguments(num_heads=3))]
    assert_leaks_nothing(calls)
