"""Gradients of mha_c.functional: against finite differences, against torch's autograd, and where they are exact."""

import numpy as np
import pytest

import needs
from checks import bits, same
from core_calls import core as _core
from layouts import LAYOUTS
from mha_c import ShapeError, set_num_threads
from mha_c import functional as F

SEED = 77
B, H, HKV, Q, K, D, DV = 2, 4, 2, 5, 13, 4, 3


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


def operands(rng, heads=True, additive=False, queries=Q, keys=K, d=D, dv=DV, dtype=np.float64):
    """q, k, v, w_v or None, and the gradient of the output."""
    h, hkv = ((H,), (HKV,)) if heads else ((), ())
    shapes = (B, *h, queries, d), (B, *hkv, keys, d), (B, *hkv, keys, dv), (d,), (B, *h, queries, dv)
    q, k, v, w_v, grad = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
    return q, k, v, w_v if additive else None, grad


def forward(q, k, v, w_v, **options):
    if w_v is None:
        return F.dot_product_attention(q, k, v, **options)
    return F.additive_attention(q, k, v, w_v, **options)


def backward(grad, q, k, v, w_v, **options):
    """(grad_q, grad_k, grad_v, grad_w_v or None, grad_bias or None)"""
    if w_v is None:
        found = [*F.dot_product_attention_backward(grad, q, k, v, **options)]
        found.insert(3, None)
    else:
        found = [*F.additive_attention_backward(grad, q, k, v, w_v, **options)]
    return found if "bias" in options else [*found, None]


def by_torch(grad, q, k, v, w_v, dtype=None, **options):
    """The same by autograd."""
    torch_math = needs.module("torch_math")
    leaves = [torch_math.leaf(x, dtype) for x in (q, k, v, w_v, options.pop("bias", None))]
    options["seed"] = options.pop("rng", 0)
    out = torch_math.attention(*leaves[:4], bias=leaves[4], **options)
    return torch_math.gradients(out, grad, leaves)


def assert_near(found, expected, tolerance):
    """Each within `tolerance` of its largest number; some are 0 but for rounding."""
    for name, a, b in zip(("q", "k", "v", "w_v", "bias"), found, expected):
        assert (a is None) == (b is None), name
        if a is not None:
            assert a.shape == b.shape and a.dtype == b.dtype, name
            np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(np.abs(b).max(), 1e-2), err_msg=name)


# --- Right numbers ----------------------------------------------------------------------------


@pytest.mark.parametrize("additive", [False, True], ids=["dot", "additive"])
@pytest.mark.parametrize("heads", [True, False], ids=["heads", "no heads"])
@pytest.mark.parametrize("case", CASES)
def test_autograd_agrees(rng, isa, case, heads, additive):
    options = case_options(case, rng, heads)
    arguments = operands(rng, heads, additive)
    *inputs, grad = arguments
    assert_near(backward(grad, *inputs, **options), by_torch(grad, *inputs, **options), 1e-12)


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


@pytest.mark.parametrize(("additive", "spread"), [(False, 1), (False, 8), (False, 32), (True, 1)])
def test_float32_is_as_good_as_torchs(rng, isa, additive, spread):
    """Root mean square errors against float64, at most twice those of torch's float32 autograd.

    The scalar kernels sum features one by one and without fused operations, torch does in vectors: additive
    scores, and what follows from them, may be three times as far off.
    """
    torch = needs.module("torch")
    ours, theirs = np.zeros((2, 4))
    for _ in range(4):
        *inputs, grad = operands(rng, True, additive, queries=60, keys=130, d=32, dv=16, dtype=np.float32)
        inputs[0] *= spread
        found = backward(grad, *inputs)
        other = by_torch(grad, *inputs, torch.float32)
        for i, exact in enumerate(by_torch(grad.astype(np.float64), *inputs, torch.float64)[:4]):
            if exact is not None:
                ours[i] += np.square(found[i] - exact).sum()
                theirs[i] += np.square(other[i] - exact).sum()
    limit = 3 if additive and isa == "scalar" else 2
    assert (ours <= limit**2 * theirs).all()


def test_projections_of_additive_attention(rng, isa):
    torch_math = needs.module("torch_math")
    q, k, v, w_v, grad = operands(rng, heads=False, additive=True)
    W_q, W_k = rng.standard_normal((2, D, D))
    k_with_nan = k.copy()
    k_with_nan[0, 7:] = np.nan
    lens = [7, 13]
    leaves = [torch_math.leaf(x) for x in (q, k, v, w_v, W_q, W_k)]
    tq, tk, tv, tw, tW_q, tW_k = leaves
    out = torch_math.attention(tq @ tW_q.T, tk @ tW_k.T, tv, tw, valid_lens=lens)
    expected = torch_math.gradients(out, grad, leaves)
    found = F.additive_attention_backward(grad, q, k_with_nan, v, w_v, W_q, W_k, lens)
    for a, b in zip(found, expected):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-12 * np.abs(b).max())
    one = F.additive_attention_backward(grad, q, k_with_nan @ W_k.T, v, w_v, W_q, None, lens)
    assert len(one) == 5
    np.testing.assert_allclose(one[4], found[4], rtol=0, atol=1e-12 * np.abs(found[4]).max())


# --- Exactly ---------------------------------------------------------------------------------------


hiding = pytest.mark.parametrize(
    "options",
    [{"valid_lens": [7, 4]}, {"causal": "top_left"}, {"window": (0, 3)}, {"keep_mask": np.arange(K)[None] % 3 > 0}],
    ids=["lengths", "causal", "window", "keep_mask"],
)


@pytest.mark.parametrize("additive", [False, True], ids=["dot", "additive"])
@hiding
def test_masked_keys_get_zero_and_have_no_influence(rng, isa, dtype, options, additive):
    q, k, v, w_v, grad = operands(rng, True, additive, dtype=dtype)
    full = {name: value for name, value in options.items() if name != "keep_mask"}
    seen = needs.module("torch_math")._reference.visible_keys((B, H, Q, K), **options)
    unseen = ~seen.any((1, 2))  # (B, K)
    clean = backward(grad, q, k, v, w_v, **options)
    for x in clean[1], clean[2]:
        assert not x.swapaxes(1, 2)[unseen].any()
        assert x.swapaxes(1, 2)[~unseen].any()
    for rubbish in (np.nan, np.inf):
        for x in k, v:
            x.swapaxes(1, 2)[unseen] = rubbish
        for a, b in zip(backward(grad, q, k, v, w_v, **options), clean):
            assert (a is None and b is None) or a.tobytes() == b.tobytes(), full


@hiding
def test_the_bias_of_hidden_keys_gets_zero(rng, dtype, options):
    q, k, v, _, grad = operands(rng, dtype=dtype)
    seen = needs.module("torch_math")._reference.visible_keys((B, H, Q, K), **options)
    grad_bias = backward(grad, q, k, v, None, bias=np.zeros((B, H, Q, K), dtype), **options)[4]
    seen = np.broadcast_to(seen, grad_bias.shape)
    assert not grad_bias[~seen].any() and grad_bias[seen].any()


@pytest.mark.parametrize("empty_rows", ["zero", "uniform"])
def test_empty_rows(rng, isa, dtype, empty_rows):
    q, k, v, _, grad = operands(rng, False, dtype=dtype)
    grad_q, grad_k, grad_v = F.dot_product_attention_backward(grad, q, k, v, [0, 13], empty_rows=empty_rows)
    assert not grad_q[0].any() and not grad_k[0].any()
    if empty_rows == "zero":
        assert not grad_v[0].any()
    else:
        expected = np.broadcast_to(grad[0].astype(np.float64).sum(0) / K, (K, DV))
        np.testing.assert_allclose(grad_v[0], expected, rtol=0, atol=8 * np.finfo(dtype).eps)


@pytest.mark.parametrize("value", [np.inf, np.nan])
@pytest.mark.parametrize("additive", [False, True], ids=["dot", "additive"])
def test_a_loss_that_is_not_finite_is_seen_in_an_empty_row(rng, isa, dtype, additive, value):
    # Whatever emptied the row: under "uniform" it is the mean of all values, and so are its gradients.
    q, k, v, w_v, grad = operands(rng, True, additive, dtype=dtype)
    grad[:, :, 1] = value
    lens = np.full((B, Q), K)
    lens[:, 1] = 0
    keep = np.ones((Q, K), bool)
    keep[1] = False
    by_lengths = backward(grad, q, k, v, w_v, valid_lens=lens, empty_rows="uniform")[2]
    by_mask = backward(grad, q, k, v, w_v, keep_mask=keep, empty_rows="uniform")[2]
    assert not np.isfinite(by_lengths).any()
    np.testing.assert_array_equal(by_mask, by_lengths)


@pytest.mark.parametrize("additive", [False, True], ids=["dot", "additive"])
def test_threads_change_no_bit(rng, dtype, isa, additive):
    # Few heads and many keys: the work of one head is split, too.
    q, k, v, w_v, grad = operands(rng, False, additive, queries=30, keys=600, d=16, dv=24, dtype=dtype)
    options = {"valid_lens": [600, 401], "dropout": 0.1, "rng": 3, "bias": np.zeros((1, 600), dtype)}
    results = []
    for n in range(1, 9):
        set_num_threads(n)
        results.append(backward(grad, q, k, v, w_v, **options))
    for result in results[1:]:
        assert bits(result) == bits(results[0])


def test_a_batch_gives_each_item_the_bits_it_has_alone(rng, dtype):
    q, k, v, _, grad = operands(rng, True, queries=40, keys=70, dtype=dtype)
    whole = backward(grad, q, k, v, None, causal="bottom_right")[:3]
    for b in range(B):
        alone = backward(*(x[b : b + 1] for x in (grad, q, k, v)), None, causal="bottom_right")[:3]
        for a, x in zip(alone, whole):
            assert a.tobytes() == x[b : b + 1].tobytes()


def test_layout_of_the_gradient_changes_no_bit(rng, dtype):
    *inputs, grad = operands(rng, dtype=dtype)
    expected = backward(grad, *inputs)
    for name, arranged in LAYOUTS.items():
        for a, b in zip(backward(arranged(grad), *inputs), expected):
            assert (a is None and b is None) or a.tobytes() == b.tobytes(), name
    ones = np.broadcast_to(dtype.type(1), grad.shape)  # what `out.sum()` passes back: stride 0 on every axis
    rows = np.broadcast_to(grad[..., :1, :], grad.shape)
    for other in (ones, rows):
        assert bits(backward(other, *inputs)) == bits(backward(other.copy(), *inputs))


def test_inputs_are_left_alone(rng):
    arguments = operands(rng)
    copies = [None if x is None else x.copy() for x in arguments]
    *inputs, grad = arguments
    for x in (*inputs, grad):
        if x is not None:
            x.flags.writeable = False
    backward(grad, *inputs, bias=np.zeros((Q, K)))
    assert bits(arguments) == bits(copies)


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


def test_both_sides_agree_on_what_the_core_keeps(rng, isa, dtype):
    """Forward and backward of the core, called as a layer calls them, are the functions."""
    q, k, v, _, grad = operands(rng, dtype=dtype)
    out, _, _, stats = _core.attention_forward(q, k, v, valid_lens=[5, 13], return_stats=True)
    expected = _core.attention_backward(grad, out, stats, q, k, v, valid_lens=[5, 13])[:3]
    same(F.dot_product_attention_backward(grad, q, k, v, [5, 13]), expected)


@pytest.mark.parametrize("sizes", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)], ids=str)
def test_a_bias_without_numbers_gets_a_gradient_without_numbers(sizes):
    """NumPy's strides of such an array are 0; make sanitize sees what is written behind it."""
    batch, heads, n_queries, n_keys = sizes
    q, k = np.ones((batch, heads, n_queries, 5), np.float32), np.ones((batch, heads, n_keys, 5), np.float32)
    grad_q, _, _, grad_bias = F.dot_product_attention_backward(q, q, k, k, bias=np.ones(sizes, np.float32))
    assert grad_bias.shape == sizes and not grad_q.any()
