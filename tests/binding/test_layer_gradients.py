"""layer_backward of `_core` for all kinds of layers: inputs that are one object, what is not needed, or is refused."""

import itertools

import numpy as np
import pytest

from binding_calls import PROJECTIONS, B, assert_leaks_nothing, numbers
from core_calls import core as _core

F = 6  # features of everything
INPUTS = ((0, 0, 0), (0, 1, 1), (0, 1, 2), (0, 1, 0))  # which of three arrays queries, keys and values are
GIVEN = ((), (0,), (0, 1, 8), (0, 1, 2, 3), range(8))  # parameters that a layer has
KINDS = list(itertools.product(INPUTS, GIVEN))
NEEDS = (True,) * 12


def recorded_call(which, given, dtype=np.float32):
    """Arguments of layer_backward but for needs."""
    x = [numbers(B, 4, F, dtype=dtype) * np.dtype(dtype).type(1 + i) for i in range(3)]  # not one object
    shapes = [(F, F)] * 4 + [(F,)] * 4 + [(1, F)]
    nine = tuple(numbers(*shapes[i], dtype=dtype) if i in given else None for i in range(9))
    call = *(x[i] for i in which), [4, 2], nine, nine[8], 1 if 8 in given else 2, "uniform", 0.3, 5
    out, kept = _core.layer_forward(*call, True)
    return numbers(*out.shape, dtype=dtype), kept, *call


@pytest.mark.parametrize("which, given", KINDS)
def test_inputs_that_are_one_object(which, given, dtype, isa):
    """The first one has the sum of the gradients that each has by itself; all others are the same."""
    call = recorded_call(which, given, dtype)
    alone, joined = _core.layer_backward(*call, NEEDS), _core.layer_backward(*call, NEEDS, True)
    assert all(x is None or one.shape == x.shape for one, x in zip(alone, (*call[2:5], *call[6])))
    for i in range(3):
        if which.index(which[i]) != i:
            assert joined[i] is None
            continue
        expected = sum(alone[j] for j in range(3) if which[j] == which[i])
        np.testing.assert_allclose(joined[i], expected, rtol=1e-4 if dtype == np.float32 else 1e-12, atol=1e-5)
    for i, (one, other) in enumerate(zip(alone[3:], joined[3:])):
        weight_is_given = i - 4 in given if 4 <= i < 8 else i in given
        assert one.tobytes() == other.tobytes() if weight_is_given else one is other is None


@pytest.mark.parametrize("which, given", KINDS)
def test_what_is_not_needed_is_none(which, given):
    call = recorded_call(which, given)
    everything = _core.layer_backward(*call, NEEDS)
    for left_out in range(12):
        some = _core.layer_backward(*call, tuple(i != left_out for i in range(12)))
        for i, (grad, full) in enumerate(zip(some, everything)):
            if i == left_out and i < 11:  # that of w_v comes with the others
                assert grad is None
            else:
                assert grad is full is None or grad.tobytes() == full.tobytes()


GOOD = (*recorded_call(INPUTS[1], GIVEN[3]), NEEDS)
BAD = {
    "parameters": (6, GOOD[6][:8], "projections must be a tuple"),
    "packed": (6, PROJECTIONS, "projections must be weights in rows"),
    "kept": (1, None, "kept must be"),
    "needs": (12, NEEDS[:4], "needs must be a tuple of twelve"),
    "needs None": (12, None, "needs must be"),
    "gradient": (0, None, "grad_out must be"),
    "weight": (6, (*GOOD[6][:3], numbers(F, 5), *GOOD[6][4:]), "W_o expects 5 features"),
    "bias": (6, (*GOOD[6][:4], numbers(5), *GOOD[6][5:]), r"W_q.bias has shape \(5,\)"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_refused(case):
    place, value, words = BAD[case]
    call = [*GOOD]
    call[place] = value
    if case == "packed":  # of the sizes that these have
        call[2:5] = numbers(B, 4, 5), numbers(B, 4, 5), numbers(B, 4, 3)
    with pytest.raises((TypeError, ValueError), match=words):
        _core.layer_backward(*call)


def test_leaks_nothing():
    good = [recorded_call(*kind) for kind in KINDS]
    bad = [[value if i == place else one for i, one in enumerate(GOOD)] for place, value, _ in BAD.values()]
    calls = [lambda call=call: _core.layer_backward(*call, NEEDS) for call in good]
    calls += [lambda call=call: _core.layer_backward(*call) for call in bad]
    assert_leaks_nothing(calls)
