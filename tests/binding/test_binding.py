"""Ill-formed arrays in calls of the compiled module `_core`: each gets the right exception and words, and no leak.

Options, packed weights, saved tuples and lengths: test_binding_values.py.
"""

import inspect
from pathlib import Path

import numpy as np
import pytest

import children
import needs
from binding_calls import (
    ARRAYS,
    DV,
    F32,
    F64,
    PROJECTIONS,
    SWAPPED,
    B,
    D,
    K,
    Q,
    assert_leaks_nothing,
    attention,
    layer,
    linear,
    numbers,
    ones,
    plain_layer,
    projection,
    softmax,
    with_heads,
)
from core_calls import STUB
from core_calls import core as _core
from mha_c import _core as extension

ShapeError = _core.ShapeError


# --- What there is, and how many arguments it takes -----------------------------------------------


def test_the_stub_lists_every_function():
    functions = {name for name in dir(extension) if inspect.isbuiltin(getattr(extension, name))}
    assert functions == set(STUB)


@pytest.mark.parametrize("name", STUB)
def test_positions_only_and_so_many(name):
    function, parameters = getattr(extension, name), STUB[name]
    least = sum(default is ... for _, default in parameters)
    for n in {least - 1, len(parameters) + 1} - {-1}:
        with pytest.raises(TypeError, match=rf"{name}\(\) takes .* arguments?.*{n}"):
            function(*[None] * n)
    with pytest.raises(TypeError, match=rf"{name}\(\) takes no keyword arguments"):
        function(*[None] * least, maske=1)


# --- Array arguments: type ------------------------------------------------------------------------

OTHER_TYPES = ["float16", "longdouble", "int8", "int64", "uint8", "bool", "complex64", "complex128", "object", "U3",
               "S3", "datetime64[s]", "timedelta64[s]", "f4,f4"]  # fmt: skip


@pytest.mark.parametrize("dtype", OTHER_TYPES)
@pytest.mark.parametrize("argument", ARRAYS)
def test_other_dtypes_are_type_errors_with_a_hint(argument, dtype):
    call, good = ARRAYS[argument]
    name = argument.split()[-1]
    hint = rf": convert it, for example np\.asarray\({name}, np\.float32\)"
    if np.dtype(dtype).kind not in "biuf":  # no conversion of these is what the caller means
        hint = "float32 or float64$"
    if (name, dtype) == ("bias", "bool"):
        hint = "keep_mask"
    said = f"{name} must be an array of numbers, got words" if dtype in ("U3", "S3") else rf"{name} has dtype .*{hint}"
    with pytest.raises(TypeError, match=f"^{said}"):
        call(np.zeros(good.shape, dtype))


@pytest.mark.parametrize("other", [[[1.0]], 1.0, "text", object(), memoryview(b"abcd"), F32(1)])
@pytest.mark.parametrize("argument", ARRAYS)
def test_what_is_no_array_is_a_type_error(argument, other):
    call, _ = ARRAYS[argument]
    with pytest.raises(TypeError, match=rf"^{argument.split()[-1]} must be a NumPy array, got {type(other).__name__}"):
        call(other)


@pytest.mark.parametrize("argument", ["k", "v", "w_v", "bias", "keys", "values", "layer's w_v", "copied k"])
def test_mixed_types_are_named_both(argument):
    call, good = ARRAYS[argument]
    first = "queries" if argument in ("keys", "values", "layer's w_v") else "q"
    with pytest.raises(TypeError, match=f"^{argument.split()[-1]} has dtype float64, but {first} has dtype float32"):
        call(good.astype(F64))


def test_weights_of_another_type_are_refused():
    with pytest.raises(TypeError, match="W_k has dtype float64, but queries has dtype float32"):
        layer(projections=(PROJECTIONS[0], projection(8, 5, dtype=F64), *PROJECTIONS[2:]))
    with pytest.raises(TypeError, match="W_q has dtype float64"):
        layer(projections=((PROJECTIONS[0][0], np.zeros(8), (8, 5)), *PROJECTIONS[1:]))


# --- Shapes ---------------------------------------------------------------------------------------------------

SHAPES = {
    "copied k rank 3": (
        lambda: _core.copy_operands(numbers(B, 2, Q, D), numbers(B, K, D)),
        r"k has shape \(2, 6, 4\) \(rank 3\), expected rank 4: \(B, H, rows, D\)",
    ),
    "q rank 2": (lambda: attention(q=numbers(Q, D)), r"q has shape \(4, 4\) \(rank 2\), expected rank 3: \(B, Q, D\)"),
    "q rank 0": (lambda: attention(q=ones(dtype=F32)), r"q has shape \(\) \(rank 0\)"),
    "q rank 5": (lambda: attention(q=numbers(1, 1, 1, 1, 1)), r"q has shape \(1, 1, 1, 1, 1\) \(rank 5\)"),
    "k rank": (lambda: attention(k=numbers(B, 1, K, D)), r"k has .*\(rank 4\), expected rank 3: \(B, K, D\)"),
    "v rank": (lambda: with_heads(v=numbers(B, K, DV)), r"v has .*\(rank 3\), expected rank 4: \(B, H, K, Dv\)"),
    "k batch": (
        lambda: attention(k=numbers(3, K, D)),
        r"k has batch size 3, but q has 2: k\.shape = \(3, 6, 4\), q\.shape = \(2, 4, 4\)",
    ),
    "v batch": (lambda: attention(v=numbers(1, K, D)), r"v has batch size 1, but q has 2"),
    "features": (lambda: attention(k=numbers(B, K, 5)), r"k has 5 features, but q has 4"),
    "v keys": (lambda: attention(v=numbers(B, 7, DV)), r"v has 7 keys, but k has 6"),
    "heads": (lambda: with_heads(q=numbers(B, 3, Q, D)), r"k has 2 heads, expected a divisor of the 3 heads of q"),
    "no heads": (
        lambda: with_heads(k=numbers(B, 0, K, D), v=numbers(B, 0, K, DV)),
        r"k has 0 heads, expected a divisor of the 4 heads of q",
    ),
    "v heads": (lambda: with_heads(v=numbers(B, 4, K, DV)), r"v has 4 heads, but k has 2"),
    "w_v rank": (lambda: attention(w_v=numbers(1, D)), r"w_v has shape \(1, 4\) \(rank 2\), expected rank 1"),
    "w_v size": (lambda: attention(w_v=numbers(3)), r"w_v has 3 features, but q has 4"),
    "queries rank": (lambda: layer(queries=numbers(Q, 5)), r"queries has .*\(B, Q, features\)"),
    "keys rank": (lambda: layer(keys=numbers(B, K, 5, 1)), r"keys has .*\(B, K, features\)"),
    "values rank": (lambda: layer(values=numbers(K)), r"values has .*\(B, K, features\)"),
    "keys batch": (
        lambda: layer(keys=numbers(3, K, 5)),
        r"keys has batch size 3, but queries has 2: keys\.shape = \(3, 6, 5\), queries\.shape = \(2, 4, 5\)",
    ),
    "values batch": (lambda: layer(values=numbers(1, K, 3)), r"values has batch size 1, but queries has 2"),
    "values keys": (lambda: layer(values=numbers(B, 5, 3)), r"values has 5 keys, but keys has 6"),
    "W_q": (
        lambda: layer(queries=numbers(B, Q, 3)),
        r"queries has 3 features \(shape \(2, 4, 3\)\), but W_q expects 5",
    ),
    "W_k": (lambda: layer(keys=numbers(B, K, 1)), r"keys has 1 features .*but W_k expects 5"),
    "W_v": (lambda: layer(values=numbers(B, K, 1)), r"values has 1 features .*but W_v expects 3"),
    "W_o": (
        lambda: layer(projections=(*PROJECTIONS[:3], projection(7, 5))),
        r"W_o expects 5 features, but the attended values have 6",
    ),
    "q against k": (lambda: plain_layer(keys=numbers(B, K, 4)), r"keys has 4 features, but queries has 5"),
    "W_q against W_k": (
        lambda: layer(projections=(PROJECTIONS[0], projection(6, 5), *PROJECTIONS[2:])),
        r"W_k gives 6 features, but W_q gives 8",
    ),
    "queries against W_k": (
        lambda: layer(projections=(None, *PROJECTIONS[1:])),
        r"W_k gives 8 features, but queries has 5",
    ),
    "layer w_v size": (lambda: plain_layer(w_v=numbers(4)), r"w_v has shape \(4,\), expected \(5,\)"),
    "layer w_v rank": (lambda: plain_layer(w_v=numbers(5, 1)), r"w_v has shape \(5, 1\) \(rank 2\)"),
    "bias": (
        lambda: layer(projections=((PROJECTIONS[0][0], numbers(5), (8, 5)), *PROJECTIONS[1:])),
        r"W_q\.bias has shape \(5,\), expected \(8,\)",
    ),
    "weight rank": (lambda: _core.pack_linear(numbers(5)), r"weight has shape \(5,\) \(rank 1\), expected rank 2"),
    "linear x": (lambda: linear(numbers(B, 4)), r"x has 4 features, but the projection expects 5"),
    "linear scalar": (lambda: linear(ones(dtype=F32)), r"x has rank 0, expected \(\.\.\., features\)"),
    "X rank": (lambda: softmax(numbers(Q, K)), r"X has shape \(4, 6\) \(rank 2\), expected rank 3: \(B, Q, K\)"),
    "mask rank 1": (
        lambda: attention(bias=numbers(K)),
        r"bias has shape \(6,\) \(rank 1\), expected rank 2 \(Q, K\) or rank 3, .*\(2, 4, 6\).*bias\[None",
    ),
    "mask rank 3 of 4": (
        lambda: with_heads(bias=numbers(B, Q, K)),
        r"rank 4, that of the scores \(B, H, Q, K\) = \(2, 4, 4, 6\): add an axis: bias\[:, None\] .* bias\[None\]",
    ),
    "mask rank 4 of 3": (lambda: attention(keep_mask=ones(B, 1, Q, K)), r"drop it, keep_mask\[:, 0\]"),
    "mask rank 0": (lambda: attention(keep_mask=ones()), r"keep_mask has shape \(\) \(rank 0\)"),
    "mask rank 5": (lambda: with_heads(bias=numbers(1, 1, 1, Q, K)), r"\(rank 5\).*no other rank"),
    "mask axis": (
        lambda: attention(keep_mask=ones(Q, 5)),
        r"keep_mask has shape \(4, 5\), .*\(B, Q, K\) = \(2, 4, 6\): axis 1 is 5, expected 6 or 1",
    ),
    "mask batch": (lambda: attention(bias=numbers(3, Q, K)), r"axis 0 is 3, expected 2 or 1"),
}


@pytest.mark.parametrize("case", SHAPES)
def test_shape_errors_say_what_clashes(case):
    call, words = SHAPES[case]
    with pytest.raises(ShapeError, match=rf"^[^\n]*{words}") as caught:
        call()
    assert isinstance(caught.value, ValueError)


# --- Leaks -------------------------------------------------------------------------------------------------

TYPE_ERRORS = {
    f"{argument}: {other}": (lambda call=call, other=other: call(other))
    for argument, (call, _) in ARRAYS.items()
    for other in ("text", None, ones(Q, K, dtype=np.int64), numbers(Q, K, dtype=F64), numbers(B, Q, K, dtype=F64))
}
BAD = [
    *TYPE_ERRORS.values(),
    *(call for call, _ in SHAPES.values()),
    lambda: attention(nonsense=1),
    lambda: _core.attention_forward(numbers(B, Q, D)),
]
GOOD = [
    *(lambda call=call, good=good: call(good) for call, good in ARRAYS.values()),
    lambda: attention(k=SWAPPED, valid_lens=[3, 2], return_weights=True, return_lse=True, seed=2**63, dropout=0.5),
    lambda: attention(keep_mask=ones(Q, K), bias=numbers(1, Q, 1), causal="top_left", window_left=2, scale=0.5),
    lambda: attention(v=numbers(B, 2 * K, DV)[:, ::2]),
    lambda: plain_layer(queries=numbers(B, 30, 5), keys=numbers(B, 40, 5), values=numbers(B, 40, 5), w_v=numbers(5)),
    lambda: linear(numbers(3, 2, 5).transpose(1, 0, 2)),
]


@pytest.mark.parametrize("calls", [GOOD, BAD], ids=["good", "bad"])
def test_no_references_are_lost(calls):
    assert_leaks_nothing(calls, good=calls is GOOD)


def test_every_allocation_of_python_may_fail():
    """In a process of its own, whose other threads cannot take a failure that was meant for the call."""
    needs.module("_testcapi")
    children.python(Path(__file__).parents[1] / "isolated" / "failing_python.py")
