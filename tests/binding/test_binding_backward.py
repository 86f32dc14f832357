"""attention_backward and linear_backward of `_core`, called directly: gradients, shapes, errors, leaks."""

import numpy as np
import pytest

from binding_calls import DV, F32, F64, B, D, K, Q, assert_leaks_nothing, flat, numbers
from core_calls import core as _core

ShapeError = _core.ShapeError
NAMES = ("grad_q", "grad_k", "grad_v", "grad_w_v", "grad_bias")


def inputs(dtype=F64, heads=None, kv_heads=None):
    """q, k, v and the gradient of the output."""
    q, k, v = ((), (), ()) if heads is None else ((heads,), (kv_heads,), (kv_heads,))
    shapes = (B, *q, Q, D), (B, *k, K, D), (B, *v, K, DV), (B, *q, Q, DV)
    return [numbers(*shape, dtype=dtype) for shape in shapes]


def backward(q, k, v, grad_out, changes=None, **options):
    """Forward, then backward of the same call, with changes to what backward is given."""
    bias_grad = options.pop("bias_grad", "bias" in options)
    out, _, _, stats = _core.attention_forward(q, k, v, **options, return_stats=True)
    values = {"grad_out": grad_out, "out": out, "row_stats": stats, "q": q, "k": k, "v": v, "bias_grad": bias_grad}
    return _core.attention_backward(**{**values, **options, **(changes or {})})


def slope(loss, x, step=1e-4):
    """Central differences of loss() while x changes in place."""
    gradient = np.zeros_like(x)
    for i in np.ndindex(x.shape):
        middle = x[i]
        x[i] = middle + step
        above = loss()
        x[i] = middle - step
        gradient[i] = (above - loss()) / (2 * step)
        x[i] = middle
    return gradient


CASES = {
    "plain": {},
    "additive": {"w_v": numbers(D, dtype=F64)},
    "lengths": {"valid_lens": [5, 0], "empty_rows": "uniform"},
    "masks": {"keep_mask": np.arange(K) % 3 > 0, "causal": "bottom_right", "scale": 0.3},
    "bias": {"bias": numbers(Q, 1, dtype=F64), "window_left": 2},
    "full bias": {"bias": numbers(B, Q, K, dtype=F64)},
    "dropout": {"dropout": 0.3, "seed": 7, "bias": numbers(1, 1, K, dtype=F64)},
}
CASES["masks"]["keep_mask"] = CASES["masks"]["keep_mask"][None]


@pytest.mark.parametrize("heads", [None, (4, 2)])
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_finite_differences(case, heads, isa):
    options = {name: value.copy() if isinstance(value, np.ndarray) else value for name, value in CASES[case].items()}
    if heads and options.get("bias", np.zeros((1, 1))).ndim == 3:
        options["bias"] = options["bias"][:, None].copy()
    q, k, v, grad_out = (array.copy() for array in inputs(F64, *(heads or ())))

    def loss():
        return np.sum(_core.attention_forward(q, k, v, **options)[0] * grad_out)

    operands = q, k, v, options.get("w_v"), options.get("bias")
    for name, operand, gradient in zip(NAMES, operands, backward(q, k, v, grad_out, **options)):
        if operand is None:
            assert gradient is None
            continue
        assert gradient.shape == operand.shape and gradient.dtype == F64
        np.testing.assert_allclose(gradient, slope(loss, operand), atol=1e-7, err_msg=name)


@pytest.mark.parametrize("layout", ["swapped bytes", "strided", "broadcast"])
@pytest.mark.parametrize("argument", ["grad_out", "out", "row_max", "q", "bias"])
def test_layout_changes_no_bit(argument, layout, dtype):
    q, k, v, grad_out = inputs(dtype)
    if layout == "broadcast":
        grad_out = np.broadcast_to(grad_out[:1, :1], grad_out.shape)  # what the gradient of a sum looks like
    options = {"bias": numbers(Q, K, dtype=dtype)}
    change = {
        "swapped bytes": lambda x: x.astype(x.dtype.newbyteorder()),
        "strided": lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
        "broadcast": lambda x: np.asfortranarray(x),
    }[layout]
    out, _, _, (row_max, row_sum) = _core.attention_forward(q, k, v, **options, return_stats=True)
    values = {"grad_out": grad_out.copy(), "out": out, "q": q, "k": k, "v": v, "bias_grad": True, **options}
    expected = _core.attention_backward(row_stats=(row_max, row_sum), **values)
    if argument == "row_max":
        row_max = change(row_max)
    elif argument == "grad_out" and layout == "broadcast":
        values["grad_out"] = grad_out
    else:
        values[argument] = change(values[argument])
    result = _core.attention_backward(row_stats=(row_max, row_sum), **values)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(flat(expected), flat(result)))


def test_row_statistics_give_the_log_sum():
    q, k, v, _ = inputs()
    result = _core.attention_forward(q, k, v, valid_lens=[3, 0], return_lse=True, return_stats=True)
    assert len(result) == 4 and len(_core.attention_forward(q, k, v)) == 3
    row_max, row_sum = result[3]
    assert row_max.shape == row_sum.shape == (B, Q)
    np.testing.assert_allclose(row_max[0] + np.log(row_sum[0]), result[2][0])
    assert np.all(row_max[1] == 0) and np.all(row_sum[1] == 0)


@pytest.mark.parametrize("zero", [*"bqkdvh", "bqkdvh", "kd"])
@pytest.mark.parametrize("extras", [False, True])
def test_zero_sizes(zero, dtype, extras):
    b, h, q, k, d, v = (0 if name in zero else size for name, size in zip("bhqkdv", (2, 2, 4, 6, 4, 3)))
    arrays = tuple(numbers(b, h, *rest, dtype=dtype) for rest in ((q, d), (k, d), (k, v), (q, v)))
    options = {"w_v": numbers(d, dtype=dtype), "bias": numbers(1, k, dtype=dtype)} if extras else {}
    result = backward(*arrays, **options)
    operands = (*arrays[:3], options.get("w_v"), options.get("bias"))
    for gradient, operand in zip(result, operands):
        assert (gradient is None) == (operand is None)
        assert gradient is None or (gradient.shape == operand.shape and np.all(np.isfinite(gradient)))
    if zero in "bqvh":  # nothing that the output could depend on
        assert all(np.all(gradient == 0) for gradient in result if gradient is not None)


def bad(**changes):
    return lambda: backward(*inputs(F32), changes)


STATS = numbers(B, Q), numbers(B, Q)
BAD = {
    "grad_out shape": (
        bad(grad_out=numbers(B, Q, 5)),
        ShapeError,
        r"grad_out has shape \(2, 4, 5\), expected \(2, 4, 3\)",
    ),
    "grad_out rank": (bad(grad_out=numbers(Q, DV)), ShapeError, r"grad_out has shape \(4, 3\), expected \(2, 4, 3\)"),
    "grad_out 0-d": (bad(grad_out=np.array(1, F32)), ShapeError, r"grad_out has shape \(\), expected \(2, 4, 3\)"),
    "grad_out type": (bad(grad_out=numbers(B, Q, DV, dtype=F64)), TypeError, "grad_out has dtype float64, but q has"),
    "out shape": (bad(out=numbers(B, K, DV)), ShapeError, r"out has shape \(2, 6, 3\), expected \(2, 4, 3\)"),
    "out list": (bad(out=[1.0]), TypeError, "out must be a NumPy array, got list"),
    "stats None": (bad(row_stats=None), TypeError, r"row_stats must be \(row_max, row_sum\), got NoneType"),
    "one statistic": (bad(row_stats=STATS[:1]), TypeError, "row_stats must be"),
    "row_max": (bad(row_stats=(numbers(B, K), STATS[1])), ShapeError, r"row_max has shape \(2, 6\), expected \(2, 4\)"),
    "row_sum": (bad(row_stats=(STATS[0], numbers(B, Q, 1))), ShapeError, "row_sum has shape"),
    "row_sum type": (bad(row_stats=(STATS[0], STATS[1].astype(int))), TypeError, "row_sum has dtype int64"),
    "k": (bad(k=numbers(3, K, D)), ShapeError, "k has batch size 3, but q has 2"),
    "bias": (bad(bias=numbers(K)), ShapeError, "bias has shape"),
    "bias type": (bad(bias=numbers(Q, K, dtype=F64)), TypeError, "bias has dtype float64, but q has dtype float32"),
    "lens": (bad(valid_lens=[True, False]), TypeError, "bool, like a mask"),
    "dropout": (bad(dropout=2), ValueError, "dropout must be between 0 and 1"),
    "linear grad_y": (
        lambda: _core.linear_backward(numbers(3, 8), numbers(2, 5), numbers(8, 5), True),
        ShapeError,
        r"grad_y has shape \(3, 8\), expected the leading axes of x, which has shape \(2, 5\)",
    ),
    "linear grad_y rank": (
        lambda: _core.linear_backward(numbers(2, 1, 8), numbers(2, 5), numbers(8, 5), True),
        ShapeError,
        r"grad_y has shape \(2, 1, 8\)",
    ),
    "linear weight": (
        lambda: _core.linear_backward(numbers(2, 8), numbers(2, 5), numbers(5, 8), True),
        ShapeError,
        r"weight has shape \(5, 8\), expected \(8, 5\)",
    ),
    "linear weight rank": (
        lambda: _core.linear_backward(numbers(2, 8), numbers(2, 5), numbers(8), True),
        ShapeError,
        r"weight has shape \(8,\) \(rank 1\), expected rank 2: \(out_features, in_features\)",
    ),
    "linear type": (
        lambda: _core.linear_backward(numbers(2, 8, dtype=F64), numbers(2, 5), numbers(8, 5), True),
        TypeError,
        "grad_y has dtype float64, but x has dtype float32",
    ),
    "linear scalar": (
        lambda: _core.linear_backward(np.array(1, F32), numbers(2, 5), numbers(8, 5), False),
        ShapeError,
        "grad_y has rank 0, expected",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_refused_by_name(case):
    call, kind, words = BAD[case]
    with pytest.raises(kind, match=words) as caught:
        call()
    assert caught.type is kind


@pytest.mark.parametrize("rows", [(), (3,), (2, 3), (0, 3), (2, 3, 1, 2)])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_backward(rows, bias, dtype, isa):
    x, weight, grad_y = (numbers(*shape, dtype=dtype) for shape in ((*rows, 5), (8, 5), (*rows, 8)))
    flat_x, flat_grad = x.reshape(-1, 5), grad_y.reshape(-1, 8)
    tolerance = 1e-5 if dtype == F32 else 1e-12
    for arrays in (grad_y, x, weight), (np.asfortranarray(grad_y), np.asfortranarray(x), np.asfortranarray(weight)):
        grad_x, grad_weight, grad_bias = _core.linear_backward(*arrays, bias)
        np.testing.assert_allclose(grad_x, grad_y @ weight, rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(grad_weight, flat_grad.T @ flat_x, rtol=tolerance, atol=tolerance)
        assert (grad_bias is not None) == bias
        if bias:
            np.testing.assert_allclose(grad_bias, flat_grad.sum(0), rtol=tolerance, atol=tolerance)
        assert all(gradient.dtype == dtype for gradient in (grad_x, grad_weight))


GOOD = [
    lambda: backward(*inputs(F32)),
    lambda: backward(*inputs(F32, 4, 2), valid_lens=[3, 2], bias=numbers(Q, K), dropout=0.5),
    lambda: backward(*inputs(F32), w_v=numbers(D), keep_mask=np.ones((Q, 1), bool)),
    lambda: _core.linear_backward(numbers(2, 3, 8), numbers(2, 3, 5), numbers(8, 5), True),
    lambda: _core.linear_backward(numbers(2, 3, 8)[:, ::2], numbers(2, 2, 5), numbers(8, 5), False),
]


@pytest.mark.parametrize("calls", [GOOD, [call for call, _, _ in BAD.values()]], ids=["good", "bad"])
def test_no_references_are_lost(calls):
    assert_leaks_nothing(calls, good=calls is GOOD)
