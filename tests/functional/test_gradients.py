"""Gradients of mha_c.functional: against finite differences, against torch's autograd, and what is refused."""

import functools

import numpy as np
import pytest

import needs
from checks import same
from gradient_calls import SEED, B, D, H, K, Q, backward, by_torch, forward, operands
from mha_c import ShapeError
from mha_c import functional as F


def masks(rng, shape):
    """A bool mask that leaves each row at least one key, but for one row that it empties."""
    keep = rng.random(shape) < 0.6
    keep[..., 0] = True
    keep[..., -1, :] = False
    return keep


def case_options(name, rng, heads=True):
    """Keyword arguments of one case, masks and biases of the rank of the scores."""
    h, one = ((H,), (1,)) if heads else ((), ())
    bias = rng.standard_normal
    empty = bias((B, *h, Q, K))
    empty[..., 1, :], empty[..., 2, 3:] = -np.inf, -np.inf
    return {
        "plain": {},
        "lengths": {"valid_lens": [7, 0]},
        "lengths, uniform": {"valid_lens": [7, 0], "empty_rows": "uniform"},
        "lengths per query": {"valid_lens": np.array([[3, 0, 13, 20, -1], [1, 2, 3, 4, 5]]), "empty_rows": "uniform"},
        "top left": {"causal": "top_left"},
        "bottom right": {"causal": "bottom_right"},
        "window": {"window": (1, 4)},
        "window at the other corner": {"causal": "bottom_right", "window": (2, None)},
        "keep (Q,K)": {"keep_mask": masks(rng, (Q, K)), "empty_rows": "uniform"},
        "keep (Q,1)": {"keep_mask": np.array([[True], [False], [True], [True], [False]])},
        "keep": {"keep_mask": masks(rng, (B, *h, Q, K))},
        "bias (Q,K)": {"bias": bias((Q, K))},
        "bias (1,K)": {"bias": bias((1, K))},
        "bias (Q,1)": {"bias": bias((Q, 1))},
        "bias (1,1)": {"bias": bias((1, 1))},
        "bias": {"bias": bias((B, *h, Q, K))},
        "bias per batch": {"bias": bias((B, *one, 1, K))},
        "bias per head": {"bias": bias((1, *h, Q, K))},
        "bias -inf": {"bias": empty, "empty_rows": "uniform"},
        "scale": {"scale": -0.7},
        "dropout": {"dropout": 0.3, "rng": SEED},
        "dropout, uniform": {"dropout": 0.3, "rng": SEED, "valid_lens": [7, 0], "empty_rows": "uniform"},
        "everything": {
            "valid_lens": [13, 9], "keep_mask": masks(rng, (Q, K)), "bias": bias((1, *h, Q, 1)), "window": (None, 6),
            "causal": "bottom_right", "scale": 0.4, "dropout": 0.2, "rng": SEED, "empty_rows": "uniform",
        },
    }[name]  # fmt: skip


CASES = [
    "plain", "lengths", "lengths, uniform", "lengths per query", "top left", "bottom right", "window",
    "window at the other corner", "keep (Q,K)", "keep (Q,1)", "keep", "bias (Q,K)", "bias (1,K)", "bias (Q,1)",
    "bias (1,1)", "bias", "bias per batch", "bias per head", "bias -inf", "scale", "dropout", "dropout, uniform",
    "everything",
]  # fmt: skip


def assert_near(found, expected, tolerance):
    """Each within `tolerance` of its largest number; some are 0 but for rounding."""
    for name, a, b in zip(("q", "k", "v", "w_v", "bias"), found, expected):
        assert (a is None) == (b is None), name
        if a is not None:
            assert a.shape == b.shape and a.dtype == b.dtype, name
            np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(np.abs(b).max(), 1e-2), err_msg=name)


# --- Right numbers ----------------------------------------------------------------------------


@functools.cache
def by_autograd(case, heads, additive):
    """(the gradient of the output and the inputs, the options, the gradients): once for all instruction sets."""
    rng = np.random.default_rng([CASES.index(case), heads, additive])
    options = case_options(case, rng, heads)
    *inputs, grad = operands(rng, heads, additive)
    return (grad, *inputs), options, by_torch(grad, *inputs, **options)


@pytest.mark.parametrize("additive", [False, True], ids=["dot", "additive"])
@pytest.mark.parametrize("heads", [True, False], ids=["heads", "no heads"])
@pytest.mark.parametrize("case", CASES)
def test_autograd_agrees(isa, case, heads, additive):
    arguments, options, expected = by_autograd(case, heads, additive)
    assert_near(backward(*arguments, **options), expected, 1e-12)


# More than one block of keys, tile of queries, part of a task; sizes that no vector divides.
@pytest.mark.parametrize("additive", [False, True], ids=["dot", "additive"])
@pytest.mark.parametrize(("queries", "keys", "d", "dv"), [(70, 311, 5, 9), (3, 1300, 17, 33), (150, 20, 64, 1)])
def test_autograd_agrees_across_tiles(rng, isa, queries, keys, d, dv, additive):
    *inputs, grad = operands(rng, True, additive, queries, keys, d, dv)
    options = {
        "valid_lens": [keys - 1, keys // 2 + 1], "causal": "bottom_right", "empty_rows": "uniform",
        "bias": rng.standard_normal((queries, 1)), "dropout": 0.1, "rng": SEED,
    }  # fmt: skip
    if additive:
        inputs = [x[:1] if x.ndim > 1 else x for x in inputs]
        grad, options["valid_lens"] = grad[:1], options["valid_lens"][:1]
    # Sums of up to 1300 terms of both signs: 1e-12 of the largest is some 4000 roundings.
    assert_near(backward(grad, *inputs, **options), by_torch(grad, *inputs, **options), 1e-12)


@pytest.mark.parametrize("additive", [False, True], ids=["dot", "additive"])
@pytest.mark.parametrize("case", CASES)
def test_finite_differences_agree(rng, case, additive):
    options = case_options(case, rng)
    *inputs, grad = operands(rng, True, additive)
    found = backward(grad, *inputs, **options)
    operand = [*inputs, options.get("bias")]
    step = 1e-4
    for i, x in enumerate(operand):
        if x is None:
            continue
        for place in np.random.default_rng(i).integers(0, x.size, 12):
            at = np.unravel_index(place, x.shape)
            middle, outs = x[at], []
            for move in (-2, -1, 1, 2):
                x[at] = middle + move * step
                outs.append((forward(*inputs, **options) * grad).sum())
            x[at] = middle
            # Central differences of both steps, joined so that the error of each cancels.
            slope = (8 * (outs[2] - outs[1]) - (outs[3] - outs[0])) / (12 * step)
            assert abs(slope - found[i][at]) < 1e-8


def test_directional_derivative_of_a_large_call(rng):
    """The change along random directions, where every number of a large gradient counts."""
    q, k, v, _, grad = operands(rng, queries=200, keys=300, d=32, dv=16)
    gradients = backward(grad, q, k, v, None, causal="bottom_right")[:3]
    step = 1e-5
    for _ in range(8):
        ways = [rng.standard_normal(x.shape) for x in (q, k, v)]
        ends = [
            (forward(*(x + s * way for x, way in zip((q, k, v), ways)), None, causal="bottom_right") * grad).sum()
            for s in (step, -step)
        ]
        slope = sum((g * way).sum() for g, way in zip(gradients, ways))
        # The third derivative times step**2, on a slope of some hundreds.
        assert abs((ends[0] - ends[1]) / (2 * step) - slope) < 1e-5 * max(1, abs(slope))


@functools.cache
def in_both_types(additive, spread):
    """Four calls in float32, with torch's gradients in float32 and in float64: once for all instruction sets."""
    torch = needs.module("torch")
    rng, found = np.random.default_rng([additive, spread]), []
    for _ in range(4):
        *inputs, grad = operands(rng, True, additive, queries=60, keys=130, d=32, dv=16, dtype=np.float32)
        inputs[0] *= spread
        theirs = by_torch(grad, *inputs, torch.float32)
        exact = by_torch(grad.astype(np.float64), *inputs, torch.float64)
        found.append(((grad, *inputs), theirs, exact[:4]))
    return found


@pytest.mark.parametrize(("additive", "spread"), [(False, 1), (False, 8), (False, 32), (True, 1)])
def test_float32_is_as_good_as_torchs(isa, additive, spread):
    """Root mean square errors against float64, at most twice those of torch's float32 autograd.

    The scalar kernels sum features one by one and without fused operations, torch does in vectors: additive
    scores, and what follows from them, may be three times as far off.
    """
    ours, theirs = np.zeros((2, 4))
    for arguments, of_torch, exact in in_both_types(additive, spread):
        found = backward(*arguments)
        for i, right in enumerate(exact):
            if right is not None:
                ours[i] += np.square(found[i] - right).sum()
                theirs[i] += np.square(of_torch[i] - right).sum()
    limit = 3 if additive and isa == "scalar" else 2
    assert (ours <= limit**2 * theirs).all()


def test_projections_of_additive_attention(rng, isa):
    torch_math = needs.module("torch_math")
    q, k, v, w_v, grad = operands(rng, heads=False, additive=True)
    W_q, W_k = rng.standard_normal((2, D, D))
    k_with_nan = k.copy()
    k_with_nan[0, 7:] = np.nan
    lens = [7, 13]
    leaves = [torch_math.leaf_of(x) for x in (q, k, v, w_v, W_q, W_k)]
    tq, tk, tv, tw, tW_q, tW_k = leaves
    out = torch_math.attention(tq @ tW_q.T, tk @ tW_k.T, tv, tw, valid_lens=lens)
    expected = torch_math.gradients(out, grad, leaves)
    found = F.additive_attention_backward(grad, q, k_with_nan, v, w_v, W_q, W_k, lens)
    for a, b in zip(found, expected):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-12 * np.abs(b).max())
    one = F.additive_attention_backward(grad, q, k_with_nan @ W_k.T, v, w_v, W_q, None, lens)
    assert len(one) == 5
    np.testing.assert_allclose(one[4], found[4], rtol=0, atol=1e-12 * np.abs(found[4]).max())


# --- The functions' own answers --------------------------------------------------------------------


def test_results_and_their_order(rng, dtype):
    q, k, v, w_v, grad = operands(rng, False, True, dtype=dtype)
    bias, W = np.zeros((Q, K), dtype), np.eye(D, dtype=dtype)
    shapes = {"q": q.shape, "k": k.shape, "v": v.shape, "w_v": (D,), "W_q": W.shape, "W_k": W.shape, "bias": (Q, K)}

    def check(found, names):
        assert [x.shape for x in found] == [shapes[name] for name in names.split()]
        assert all(x.dtype == dtype for x in found)

    check(F.dot_product_attention_backward(grad, q, k, v), "q k v")
    check(F.dot_product_attention_backward(grad, q, k, v, bias=bias), "q k v bias")
    check(F.additive_attention_backward(grad, q, k, v, w_v), "q k v w_v")
    check(F.additive_attention_backward(grad, q, k, v, w_v, W_k=W), "q k v w_v W_k")
    check(F.additive_attention_backward(grad, q, k, v, w_v, W, W, bias=bias), "q k v w_v W_q W_k bias")
    lists = F.dot_product_attention_backward(*(x.tolist() for x in (grad, q, k, v)))
    assert all(x.dtype == np.float64 for x in lists)


def test_tensors_give_tensors(rng):
    torch = needs.module("torch")
    q, k, v, _, grad = operands(rng, False)
    found = F.dot_product_attention_backward(*(torch.from_numpy(x) for x in (grad, q, k, v)))
    for a, b in zip(found, F.dot_product_attention_backward(grad, q, k, v)):
        assert isinstance(a, torch.Tensor)
        same(a.numpy(), b)
    with pytest.raises(TypeError, match=r"grad_out is a tensor that requires grad.*mha_c.torch"):
        F.dot_product_attention_backward(torch.from_numpy(grad).requires_grad_(), q, k, v)


def test_dropout_backwards_needs_the_forwards_number(rng):
    q, k, v, w_v, grad = operands(rng, False, True)
    for call in (
        lambda **o: F.dot_product_attention_backward(grad, q, k, v, **o),
        lambda **o: F.additive_attention_backward(grad, q, k, v, w_v, **o),
    ):
        for stream in (None, np.random.default_rng(0)):  # which would give another number than forward
            with pytest.raises(ValueError, match="rng must be the whole number that the forward call was given"):
                call(dropout=0.5, rng=stream)
        for a, b in zip(call(dropout=1.0, rng=1), call(dropout=0.0)):
            assert not a.any() and a.shape == b.shape


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"grad_out": np.ones((2, 5, 4))}, ShapeError, r"grad_out has shape \(2, 5, 4\), expected \(2, 5, 3\)"),
        ({"grad_out": np.ones((2, 5, 3), np.float32)}, TypeError, "grad_out has dtype float32, but q has"),
        ({"grad_out": None}, TypeError, "grad_out must be an array, got None"),
        ({"k": np.ones((2, 13, 5))}, ShapeError, "k has 5 features, but q has 4"),
        ({"bias": np.ones(13)}, ShapeError, r"bias has shape \(13,\)"),
        ({"dropout": 1.5, "rng": 1}, ValueError, "dropout must be between 0 and 1"),
        ({"dropout": 0.5, "rng": -1}, ValueError, r"rng must lie in 0 \.\. 2\*\*64 - 1, got -1"),
        ({"causal": True}, ValueError, "causal=True is ambiguous"),
        ({"window": 3}, TypeError, "window must be None or a pair"),
        ({"empty_rows": "mean"}, ValueError, "empty_rows must be"),
        ({"valid_lens": [1]}, ShapeError, "valid_lens has shape"),
    ],
)
def test_what_does_not_fit_is_refused(rng, change, error, words):
    q, k, v, w_v, grad = operands(rng, False, True)
    named = {"grad_out": grad, "q": q, "k": k, "v": v, **change}
    for call in (F.dot_product_attention_backward, lambda **o: F.additive_attention_backward(w_v=w_v, **o)):
        with pytest.raises(error, match=words):
            call(**named)
