"""KernelAttention against the book's own lines in float64, NumPy and torch."""

import numpy as np
import pytest

import mha_c
import needs
from checks import same

# The book's kernels (d2l 11.2), of signed differences.
BOOK = {
    "gaussian": lambda x: np.exp(-(x**2) / 2),
    "boxcar": lambda x: (np.abs(x) < 1.0).astype(float),
    "constant": lambda x: 1.0 + 0 * x,
    "epanechnikov": lambda x: np.maximum(1 - np.abs(x), 0),
}


def nadaraya_watson(x_train, y_train, x_val, kernel, width=1.0):
    """The book's function of that name: weights have keys in rows."""
    k = kernel((x_train.reshape(-1, 1) - x_val.reshape(1, -1)) / width)
    with np.errstate(invalid="ignore"):
        weights = k / k.sum(0)
    return y_train @ weights, weights


def books_data(rng, n=40):
    x_train = np.sort(rng.random(n) * 5)
    return x_train, 2 * np.sin(x_train) + x_train + rng.standard_normal(n), np.arange(0, 5, 0.1)


@pytest.mark.parametrize("width", [0.1, 0.2, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("kernel", BOOK)
def test_the_books_lines(kernel, width, dtype, isa, rng):
    x, y, queries = (a.astype(dtype) for a in books_data(rng))
    wanted, weights = nadaraya_watson(*(a.astype(np.float64) for a in (x, y, queries)), BOOK[kernel], width)
    attention = mha_c.KernelAttention(kernel, width)
    # Only where a kernel's border does not lie within rounding of a distance, and weights exist in float64.
    edge = np.abs(np.abs(queries[:, None].astype(float) - x) / width - 1).min(1) < 1e-4
    has_border = kernel in ("boxcar", "epanechnikov")
    clear = np.isfinite(wanted) & ~(edge & has_border)
    out = attention(queries, x, y)
    assert out.dtype == dtype and out.shape == queries.shape and attention.attention_weights.shape == (50, 40)
    # The score -(d / width)**2 / 2, at most 1250 (and log(1 - d / width), at most 10, whose 1 - d / width may be
    # 1e-4 or more), is rounded; a weight then errs by |score| eps relative, and a mean of values of at most 10 by 2x.
    scores = (np.abs(queries[:, None].astype(float) - x) / width).min(1) ** 2 / 2 if kernel == "gaussian" else 1e4
    limit = np.finfo(dtype).eps * (32 + 8 * np.broadcast_to(scores, queries.shape)) * 10
    assert clear.sum() > 20 and (np.abs(out - wanted) < limit)[clear].all()
    assert (np.abs(attention.attention_weights - weights.T) < limit[:, None])[clear].all()


def test_the_first_editions_lines(rng):
    """d2l 10.2 of 0.17: softmax of -((query - key) w)**2 / 2, w learned; width is 1/w.  And leave-one-out."""
    x, y, queries = books_data(rng, 50)
    w = 1.7
    scores = -(((queries[:, None] - x) * w) ** 2) / 2
    weights = np.exp(scores - scores.max(1, keepdims=True))
    weights /= weights.sum(1, keepdims=True)
    np.testing.assert_allclose(mha_c.KernelAttention("gaussian", 1 / w)(queries, x, y), weights @ y, rtol=1e-13)
    others = ~np.eye(50, dtype=bool)
    keys, values = np.tile(x, (50, 1))[others].reshape(50, 49, 1), np.tile(y, (50, 1))[others].reshape(50, 49, 1)
    left_out = mha_c.KernelAttention("gaussian", 1 / w)(x.reshape(50, 1, 1), keys, values)
    wanted = [
        nadaraya_watson(keys[i, :, 0], values[i, :, 0], x[i : i + 1], BOOK["gaussian"], 1 / w)[0][0] for i in range(50)
    ]
    np.testing.assert_allclose(left_out[:, 0, 0], wanted, rtol=1e-12)


def test_far_from_every_key():
    """The book's quotient is 0/0 there; the limit is the nearest key."""
    x, y = np.array([0.0, 1.0], np.float32), np.array([3.0, 5.0], np.float32)
    attention = mha_c.KernelAttention("gaussian", 0.01)
    np.testing.assert_array_equal(attention(np.array([1e4, -1e4], np.float32), x, y), [5, 3])
    for empty_rows, wanted in (("uniform", 4), ("zero", 0)):
        assert (
            mha_c.KernelAttention("boxcar", empty_rows=empty_rows)(np.array([9.0]), x.astype(float), y.astype(float))
            == wanted
        )


@pytest.mark.parametrize("kernel", BOOK)
def test_batches_lengths_and_what_lies_behind_them(kernel, rng, dtype):
    q, k, v = rng.standard_normal((3, 5, 4)), rng.standard_normal((3, 7, 4)), rng.standard_normal((3, 7, 2))
    lens = np.array([7, 4, 1])
    near = np.linalg.norm(q[:, :, None] - k[:, None], axis=-1) / 4.0
    weights = BOOK[kernel](near) * (np.arange(7) < lens[:, None, None])
    k, v = k.copy(), v.copy()
    k[1, 4:], v[1, 4:] = np.nan, np.nan
    attention = mha_c.KernelAttention(kernel, 4.0)
    out = attention(*(a.astype(dtype) for a in (q, k, v)), valid_lens=lens)
    total = weights.sum(-1, keepdims=True)
    seen = total[..., 0] > 1e-2  # a row without keys in reach is the mean of all values, of those behind the length too
    wanted = (weights / np.maximum(total, 1e-300)) @ np.nan_to_num(v)
    eps = np.finfo(dtype).eps
    assert seen.sum() > 7 and np.abs(out - wanted)[seen].max() < 300 * eps
    assert np.isfinite(out[[0, 2]]).all() and (attention.attention_weights[1, seen[1], 4:] == 0).all()


@pytest.mark.parametrize("kernel", BOOK)
def test_widths_that_the_type_cannot_hold(kernel, dtype):
    x, limits = np.array([0.0, 1.0, 3.0], dtype), np.finfo(dtype)
    for width in (1e-320, 1e-50, 1e300):
        attention = mha_c.KernelAttention(kernel, width)
        if limits.bits == 64 and width != 1e-320:
            assert np.isfinite(attention(x, x, x)).all()
        else:
            with pytest.raises(ValueError, match=f"width must lie in .* for {limits.dtype}, got 1e"):
                attention(x, x, x)


@pytest.mark.parametrize("kernel", BOOK)
def test_farther_than_the_type_can_say(kernel, dtype):
    """A distance whose square is no number any more counts as infinite: its weight is 0, its gradients too."""
    limits = np.finfo(dtype)
    for q, width in (([0.0], float(limits.tiny)), ([0.0, 0.0], 2.0)):
        queries = np.array([[q]], dtype)
        keys = np.stack([queries[0], queries[0] + limits.max / 2], axis=1)
        attention = mha_c.KernelAttention(kernel, width).train()
        out = attention(queries, keys, np.array([[[3.0], [5.0]]], dtype))
        assert out == (4 if kernel == "constant" else 3)
        for grad in attention.backward(np.ones_like(out))[:2]:
            assert not grad.any()
        assert attention.width_grad == 0


def test_near_points_far_from_zero(dtype):
    """|q|**2 - 2 q.k + |k|**2 would give nonsense here."""
    k = 1000 + np.array([[[0.0, 0.0], [0.125, 0.0], [0.25, 0.0]]], dtype)
    weights = np.exp(-((np.array([0.0, 0.125, 0.25]) / 0.125) ** 2) / 2)
    attention = mha_c.KernelAttention("gaussian", 0.125)
    attention(k[:, :1], k, k)
    np.testing.assert_allclose(attention.attention_weights[0, 0], weights / weights.sum(), rtol=8 * np.finfo(dtype).eps)


def test_a_kernel_of_ones_own(rng):
    x, y, queries = books_data(rng)
    own = mha_c.KernelAttention(lambda u: np.maximum(0, 1 - u**2), 2.0)
    k = np.maximum(0, 1 - ((queries[:, None] - x) / 2) ** 2)
    np.testing.assert_allclose(own(queries, x, y), (k / k.sum(1, keepdims=True)) @ y, rtol=1e-10)


def test_errors():
    x = np.ones(3)
    with pytest.raises(ValueError, match=r"kernel must be 'gaussian', .* or 'constant', got 'gauss'"):
        mha_c.KernelAttention("gauss")
    for width, kind in (
        (0, ValueError),
        (-1.0, ValueError),
        (np.inf, ValueError),
        (np.nan, ValueError),
        ("1", TypeError),
    ):
        with pytest.raises(kind, match="width"):
            mha_c.KernelAttention(width=width)
    attention = mha_c.KernelAttention()
    with pytest.raises(AttributeError, match="call the layer first"):
        _ = attention.attention_weights
    with pytest.raises(mha_c.ShapeError, match=r"values .*\(4,\)"):
        attention(x, x, np.ones(4))
    with pytest.raises(mha_c.ShapeError, match="queries"):
        attention(np.ones((1, 3, 2)), np.ones((1, 3, 3)), np.ones((1, 3, 2)))
    with pytest.raises(TypeError, match="keys must be float64"):
        attention(x, x.astype(np.float32), x)
    with pytest.raises(ValueError, match=">= 0"):
        mha_c.KernelAttention(lambda u: -u)(x, x + 1, x)
    with pytest.raises(mha_c.ShapeError, match=r"of the distances.* shape"):
        mha_c.KernelAttention(lambda u: u.sum())(x, x, x)
    assert repr(mha_c.KernelAttention("epanechikov", 2)) == "KernelAttention(kernel='epanechnikov', width=2.0)"


# --- Gradients ------------------------------------------------------------------------------------------


def test_backward_equals_torchs(dtype, rng, isa):
    """By the twin in float64, whose gradients gradcheck compares with differences (below)."""
    torch = needs.module("torch")
    import mha_c.torch as ours

    q, k, v = rng.standard_normal((2, 5, 3)), rng.standard_normal((2, 7, 3)), rng.standard_normal((2, 7, 2))
    k[0, 1] = q[0, 2]  # a query meets a key
    seed, lens = rng.standard_normal((2, 5, 2)), np.array([7, 4])
    for kernel, derivative, width in (
        ("gaussian", None, 1.5), ("boxcar", None, 4.0), ("constant", None, 1.0), ("epanechnikov", None, 6.0),
        (lambda u: 1 / (1 + u * u), lambda u: -2 * u / (1 + u * u) ** 2, 0.75),
    ):  # fmt: skip
        twin = ours.KernelAttention(kernel, width).double()
        inputs = [torch.from_numpy(x).requires_grad_() for x in (q, k, v)]
        twin(*inputs, torch.from_numpy(lens)).backward(torch.from_numpy(seed))
        attention = mha_c.KernelAttention(kernel, width, derivative=derivative).train()
        given = [x.astype(dtype) for x in (q, k, v)]
        given[1][1, 4:], given[2][1, 4:] = np.nan, np.inf  # never read
        attention(*given, lens)
        grads = attention.backward(seed.astype(dtype))
        # Sums of some ten products of numbers of at most 10, each rounded several times.
        limit = 3000 * np.finfo(dtype).eps
        for grad, x in zip(grads, inputs):
            assert grad.dtype == dtype
            wanted = torch.zeros_like(x) if x.grad is None else x.grad
            np.testing.assert_allclose(grad, wanted, rtol=limit, atol=limit)
        of_width = 0.0 if twin.width.grad is None else float(twin.width.grad)
        np.testing.assert_allclose(attention.width_grad, of_width, rtol=limit, atol=limit)
        assert (grads[1][1, 4:] == 0).all() and (grads[2][1, 4:] == 0).all()


def test_backward_of_numbers_learns_the_width(rng):
    """The book's regression: differences of the loss, in queries, keys, values and width; and a width that fits."""
    x, y, queries = books_data(rng)
    target = np.sin(queries)
    attention = mha_c.KernelAttention("gaussian", 2.0).train()

    def loss(width, *inputs):
        other = mha_c.KernelAttention("gaussian", width)
        return ((other(*inputs) - target) ** 2).sum()

    grads = attention.backward(2 * (attention(queries, x, y) - target))
    inputs, step = [queries, x, y], 1e-6
    of_width = (loss(2 + step, *inputs) - loss(2 - step, *inputs)) / (2 * step)
    assert abs(attention.width_grad - of_width) < 1e-6 * abs(of_width)
    for i, grad in enumerate(grads):
        there = [(np.arange(a.size) == 3) * (i == j) * step for j, a in enumerate(inputs)]
        more, less = ([a + sign * b for a, b in zip(inputs, there)] for sign in (1, -1))
        slope = (loss(2.0, *more) - loss(2.0, *less)) / (2 * step)
        assert grad.shape == inputs[i].shape and abs(grad[3] - slope) < 1e-5 * max(1, abs(slope))
    before = ((attention(queries, x, y) - target) ** 2).sum()
    for _ in range(20):
        attention.zero_grad()
        attention.backward(2 * (attention(queries, x, y, training=True) - target) / len(queries))
        attention.width -= 0.02 * attention.width_grad
    assert ((attention(queries, x, y) - target) ** 2).sum() < before


def test_backward_is_of_the_training_call(rng):
    x, y, queries = books_data(rng)
    attention, ones = mha_c.KernelAttention("gaussian", 0.5), np.ones(50)
    attention(queries, x, y)
    with pytest.raises(RuntimeError, match="once after each call in training mode"):
        attention.backward(ones)
    attention(queries, x, y, training=True)
    attention.width = 3.0  # and a call for evaluation: neither counts
    attention(queries, x, y)
    found = attention.backward(ones)
    wanted = mha_c.KernelAttention("gaussian", 0.5).train()
    wanted(queries, x, y)
    same(found, wanted.backward(ones))
    with pytest.raises(RuntimeError, match="once after each call"):
        attention.backward(ones)
    total = attention.width_grad
    attention.train()(queries, x, y)
    attention.backward(ones)
    assert attention.width_grad != total and attention.eval().training is False
    attention.train()(queries, x, y)
    with pytest.raises(mha_c.ShapeError, match=r"grad_output has shape \(49,\)"):
        attention.backward(ones[1:])
    with pytest.raises(TypeError, match="grad_output must be float64"):
        attention.backward(ones.astype(np.float32))
    own = mha_c.KernelAttention(lambda u: np.exp(-u)).train()
    own(queries, x, y)
    with pytest.raises(RuntimeError, match="derivative"):
        own.backward(ones)
    with pytest.raises(TypeError, match="derivative"):
        mha_c.KernelAttention("gaussian", derivative=np.exp)
    wrong = mha_c.KernelAttention(lambda u: np.exp(-u), derivative=np.sum).train()
    wrong(queries, x, y)
    with pytest.raises(mha_c.ShapeError, match="derivative must return"):
        wrong.backward(ones)


# --- torch ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", BOOK)
def test_torch_is_equal_and_has_gradients(kernel, rng):
    torch = needs.module("torch")
    import mha_c.torch as ours

    q, k, v = (torch.from_numpy(rng.standard_normal(s)).requires_grad_() for s in ((2, 4, 3), (2, 6, 3), (2, 6, 2)))
    attention = ours.KernelAttention(kernel, 2.5).double()
    plain = mha_c.KernelAttention(kernel, 2.5)
    out = attention(q, k, v, torch.tensor([6, 4]))
    np.testing.assert_allclose(out.detach(), plain(*(x.detach().numpy() for x in (q, k, v)), [6, 4]), rtol=1e-12)
    np.testing.assert_allclose(attention.attention_weights.detach(), plain.attention_weights, rtol=1e-12)

    def run(q, k, v, width):
        return torch.func.functional_call(attention, {"width": width}, (q, k, v, torch.tensor([6, 4])))

    assert torch.autograd.gradcheck(run, (q, k, v, attention.width))


def test_torch_padding_may_hold_nan(rng):
    torch = needs.module("torch")
    import mha_c.torch as ours

    q, k, v = (torch.from_numpy(rng.standard_normal(s)) for s in ((1, 4, 3), (1, 6, 3), (1, 6, 2)))
    for kernel in ("gaussian", "epanechnikov"):
        found = []
        for padding in (0.0, torch.nan):
            k[:, 4:] = padding
            attention, leaves = ours.KernelAttention(kernel, 9.0), [x.clone().requires_grad_() for x in (q, k, v)]
            attention(*leaves, torch.tensor([[4, 2, 3, 1]])).square().sum().backward()
            found.append([x.grad for x in (*leaves, attention.width)])
        for plain, padded in zip(*found):
            assert torch.equal(plain, padded)


def test_torch_where_points_meet(rng):
    torch = needs.module("torch")
    import mha_c.torch as ours

    x = torch.from_numpy(rng.standard_normal((1, 5, 3))).requires_grad_()
    for kernel in BOOK:
        (grad,) = torch.autograd.grad(ours.KernelAttention(kernel)(x, x, x).square().sum(), x)
        assert grad.isfinite().all()
    numbers = torch.linspace(0, 4, 9)
    assert ours.KernelAttention(lambda u: (1 - u).clamp(min=0))(numbers, numbers, numbers).shape == (9,)


def test_widths_that_a_parameter_cannot_hold():
    needs.module("torch")
    import mha_c.torch as ours

    for width in (1e-50, 1e300):
        with pytest.raises(ValueError, match=r"width must lie in .* for float32, got"):
            ours.KernelAttention(width=width)


def test_torch_learns_the_width():
    """As the book's NWKernelRegression does: the loss falls, and the width with it."""
    rng = np.random.default_rng(0)  # how far the loss falls is a question of the data
    torch = needs.module("torch")
    import mha_c.torch as ours

    x, y, _ = (torch.from_numpy(a) for a in books_data(rng, 50))
    others = ~torch.eye(50, dtype=torch.bool)
    keys, values = (a.repeat(50, 1)[others].reshape(50, 49, 1) for a in (x, y))
    attention = ours.KernelAttention("gaussian", 2.0).double()
    trainer, losses = torch.optim.SGD(attention.parameters(), lr=0.1), []
    for _ in range(20):
        loss = (attention(x.reshape(50, 1, 1), keys, values)[:, 0, 0] - y).square().mean()
        trainer.zero_grad()
        loss.backward()
        trainer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0] and 0 < attention.width.item() < 2
