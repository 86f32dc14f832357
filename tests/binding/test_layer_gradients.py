"""autograd_parts and layer_backward of `_core`: which tensors autograd is given, and their gradients in that order."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from binding_calls import B, assert_leaks_nothing, numbers
from core_calls import core as _core

F = 6  # features of everything
INPUTS = {1: (0, 0, 0), 2: (0, 1, 1), 3: (0, 1, 2)}  # places of queries, keys, values among n_inputs arrays
PLACES = {0: (), 3: (0, 1, 8), 4: (0, 1, 2, 3), 9: tuple(range(9))}


def parameters_of(n, dtype):
    """Nine, of which n are given to autograd; all nine without w_v, as a layer with biases has them."""
    shapes = [(F, F)] * 4 + [(F,)] * 4 + [(1, F)]
    given = PLACES[n] if n < 9 else range(8)
    return tuple(numbers(*shapes[i], dtype=dtype) if i in given else None for i in range(9))


def recorded_call(n_inputs, n_parameters, dtype=np.float32):
    """Arguments of layer_backward but for needs, and those of the same with all tensors in their places."""
    x = [numbers(B, 4, F, dtype=dtype) * np.dtype(dtype).type(1 + i) for i in range(n_inputs)]  # not one object
    inputs = [x[i] for i in INPUTS[n_inputs]]
    nine = parameters_of(n_parameters, dtype)
    options = (1 if n_parameters == 3 else 2, "uniform", 0.3, 5)
    w_v = None if nine[8] is None else nine[8][0]
    out, kept = _core.layer_forward(*inputs, [4, 2], nine, w_v, *options, True)
    grad_out = numbers(*out.shape, dtype=dtype)
    tensors = (*x, *(nine[i] for i in PLACES[n_parameters]))
    return (grad_out, kept, tensors, n_inputs, options), (grad_out, kept, (*inputs, *nine), 3, options)


KINDS = list(itertools.product(INPUTS, PLACES))


@pytest.mark.parametrize("n_inputs, n_parameters", KINDS)
def test_gradients_are_those_of_all_twelve_tensors(n_inputs, n_parameters, dtype, isa):
    call, in_places = recorded_call(n_inputs, n_parameters, dtype)
    inputs, nine = np.split(np.array(_core.layer_backward(*in_places, (True,) * 12), object), [3])
    found = _core.layer_backward(*call, (True,) * len(call[2]), True)
    assert len(found) == len(call[2])
    for i in range(n_inputs):
        expected = sum(inputs[j] for j, place in enumerate(INPUTS[n_inputs]) if place == i)
        np.testing.assert_allclose(found[i], expected, rtol=1e-4 if dtype == np.float32 else 1e-12, atol=1e-5)
    for tensor, grad, place in zip(call[2][n_inputs:], found[n_inputs:], PLACES[n_parameters]):
        if tensor is None:
            assert grad is None
        else:
            assert grad.shape == tensor.shape and grad.tobytes() == nine[place].tobytes()


@pytest.mark.parametrize("join", [False, True])
def test_inputs_that_are_one_object(join, dtype):
    """Each has a gradient of its own, or the first one has the sum."""
    (grad_out, kept, (queries, *_), _, options), _ = recorded_call(1, 4, dtype)
    W = parameters_of(4, dtype)[:4]
    found = _core.layer_backward(grad_out, kept, (queries, queries, queries, *W), 3, options, (True,) * 7, join)
    (alone, *_) = _core.layer_backward(grad_out, kept, (queries, *W), 1, options, (True,) * 5, join)
    if join:
        assert found[1] is found[2] is None and found[0].tobytes() == alone.tobytes()
    else:
        np.testing.assert_allclose(sum(found[:3]), alone, rtol=1e-4 if dtype == np.float32 else 1e-12, atol=1e-5)


@pytest.mark.parametrize("n_inputs, n_parameters", KINDS)
def test_what_is_not_needed_is_none(n_inputs, n_parameters):
    call, _ = recorded_call(n_inputs, n_parameters)
    everything = _core.layer_backward(*call, (True,) * len(call[2]), True)
    for left_out in range(len(call[2])):
        needs = tuple(i != left_out for i in range(len(call[2])))
        some = _core.layer_backward(*call, needs, True)
        for need, tensor, grad, full in zip(needs, call[2], some, everything):
            if need and tensor is not None:
                assert grad.tobytes() == full.tobytes()
            elif tensor is None or tensor.shape != (1, F):  # that of w_v comes with the others
                assert grad is None


GOOD, _ = recorded_call(2, 4)
NEEDS = (True,) * 6
BAD = {
    "tensors": (2, list(GOOD[2]), "tensors must be a tuple of n_inputs inputs"),
    "too few": (2, GOOD[2][:1], "tensors must be"),
    "one parameter": (2, GOOD[2][:3], "parameters must be none, three, four or nine"),
    "n_inputs": (3, 4, "tensors must be"),
    "no input": (3, 0, "n_inputs"),
    "options": (4, GOOD[4][:3], "options must be a tuple"),
    "kept": (1, None, "kept must be"),
    "needs": (5, NEEDS[:4], "needs must be a tuple of bools, one for each tensor"),
    "needs None": (5, None, "needs must be"),
    "gradient": (0, None, "grad_out must be"),
    "weight": (2, (*GOOD[2][:5], numbers(F, 5)), "W_o expects 5 features"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_refused(case):
    place, value, words = BAD[case]
    call = [*GOOD, NEEDS]
    call[place] = value
    with pytest.raises((TypeError, ValueError), match=words):
        _core.layer_backward(*call)


def tensor(requires_grad=False, version=0):
    return SimpleNamespace(requires_grad=requires_grad, _version=version)


@pytest.mark.parametrize("n_inputs, n_parameters", KINDS)
def test_parts_are_the_tensors_that_differ(n_inputs, n_parameters):
    x = [tensor(version=i) for i in range(n_inputs)]
    given = PLACES[n_parameters]
    nine = tuple(tensor(version=10 + i) if i in given else None for i in range(9))
    queries, keys, values = (x[i] for i in INPUTS[n_inputs])
    learns, tensors, n, versions = _core.autograd_parts(queries, keys, values, nine)
    assert not learns and n == n_inputs
    assert tensors == (*x, *(nine[i] for i in given))
    assert all(found is one for found, one in zip(tensors, (*x, *(nine[i] for i in given))))
    assert versions == (0, min(n_inputs, 2) - 1, *(10 + i if i in given else None for i in (0, 1, 4, 5, 8)))


def test_parts_of_unusual_layers_are_all_nine():
    x, nothing = tensor(), (None,) * 9
    for places in ((4,), (7,), (0, 1, 2, 8), (0, 1, 3, 8), (0, 1, 5, 8)):
        nine = tuple(x if i in places else None for i in range(9))
        assert _core.autograd_parts(x, x, x, nine)[1:3] == ((x, *nine), 1)
    for places in ((0,), (3,), (1, 2)):
        nine = tuple(x if i in places else None for i in range(9))
        assert _core.autograd_parts(x, x, x, nine)[1:3] == ((x, *nine[:4]), 1)
    assert _core.autograd_parts(x, x, x, (*nothing[:8], x))[1] == (x, None, None, x)
    assert _core.autograd_parts(x, tensor(), x, nothing)[2] == 3  # queries and values are one, keys another


def test_one_that_wants_a_gradient_is_enough():
    for wanted in range(12):
        tensors = [tensor(requires_grad=i == wanted) for i in range(12)]
        assert _core.autograd_parts(*tensors[:3], tuple(tensors[3:]))[0]


def test_parts_refuse_what_is_no_layer():
    x = tensor()
    for parameters in (None, [None] * 9, (None,) * 8):
        with pytest.raises(TypeError, match="parameters must be a tuple of nine"):
            _core.autograd_parts(x, x, x, parameters)
    with pytest.raises(AttributeError, match="requires_grad"):
        _core.autograd_parts(x, object(), x, (None,) * 9)
    assert _core.autograd_parts(SimpleNamespace(requires_grad=True), x, x, (None,) * 9)[3][0] is None


def test_leaks_nothing():
    x, nine = tensor(), (None,) * 9
    good = [recorded_call(*kind)[0] for kind in KINDS]
    bad = [[value if i == place else one for i, one in enumerate((*GOOD, NEEDS))] for place, value, _ in BAD.values()]
    calls = [lambda call=call: _core.layer_backward(*call, (True,) * len(call[2])) for call in good]
    calls += [lambda call=call: _core.layer_backward(*call) for call in bad]
    calls += [lambda: _core.autograd_parts(x, x, x, nine), lambda: _core.autograd_parts(x, object(), x, nine)]
    assert_leaks_nothing(calls)
