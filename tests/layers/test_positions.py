"""PositionalEncoding against the real d2l, rotary positions against complex numbers, ALiBi and T5 as published."""

import copy
import math
import pickle

import numpy as np
import pytest

import mha_c
import needs
from mha_c import functional


def wanted_table(max_len, num_hiddens):
    table = np.zeros((max_len, num_hiddens))
    for i in range(max_len):
        for j in range(0, num_hiddens, 2):
            table[i, j], table[i, j + 1] = (f(i / 10000 ** (j / num_hiddens)) for f in (math.sin, math.cos))
    return table


def test_the_table(dtype):
    encoding = mha_c.PositionalEncoding(32, 0.5, max_len=60)
    X = np.full((2, 60, 32), 0.25, dtype)
    out = encoding(X)
    assert out.dtype == dtype and encoding.P.shape == (1, 60, 32) and not np.shares_memory(out, X)
    np.testing.assert_allclose(out[1], 0.25 + wanted_table(60, 32), atol=2 * np.finfo(dtype).eps)
    np.testing.assert_array_equal(encoding(X[:, :7], start=9), out[:, 9:16])
    ragged = encoding(X[:, :2], start=[3, 58])
    np.testing.assert_array_equal(ragged[0], out[0, 3:5])
    np.testing.assert_array_equal(ragged[1], out[1, 58:60])


def test_as_d2l(d2l):
    torch = needs.module("torch")
    import mha_c.torch as ours

    theirs = d2l.PositionalEncoding(20, 0.3).eval()
    twin = ours.PositionalEncoding(20, 0.3).eval()
    X = torch.randn(2, 1000, 20)
    # d2l's angles, up to 999, are float32 quotients of float32 powers: 999 * 1.5 eps off at worst.
    assert (theirs(X) - twin(X)).abs().max() < 1.5 * 999 * 2**-23
    assert twin.P.shape == theirs.P.shape and not twin.state_dict()
    near = twin(X[:, :8]) - theirs(X[:, :8])
    assert near.abs().max() < 4e-6
    np.testing.assert_array_equal(twin(X), mha_c.PositionalEncoding(20, 0.3)(X.numpy()))
    np.testing.assert_array_equal(
        twin(X[:, :3], start=torch.tensor([5, 7])), mha_c.PositionalEncoding(20, 0)(X[:, :3], start=[5, 7])
    )
    with pytest.raises(TypeError, match="start must be a whole number"):
        twin(X[:, :3], start=True)
    assert twin(X.double()).dtype is torch.float64
    meta = X.to("meta")
    assert theirs(meta).shape == twin(meta).shape == twin(meta.double()).shape == X.shape
    for moved in (twin.to("meta").to_empty(device="cpu"), twin.half().double()):
        np.testing.assert_array_equal(moved(X), mha_c.PositionalEncoding(20, 0.3)(X.numpy()))
        assert moved.P.dtype is torch.float32
    assert repr(twin) == repr(theirs) == repr(mha_c.PositionalEncoding(20, 0.3))


def test_a_table_of_ones_own(d2l):
    """The book's exercise: positions that are learned, or other numbers, put in the place of P."""
    torch = needs.module("torch")
    import mha_c.torch as ours

    X = torch.randn(2, 7, 6, dtype=torch.float64)
    found = []
    for kind in (d2l.PositionalEncoding, ours.PositionalEncoding):
        module = kind(6, 0.0, 9)
        module.P = torch.nn.Parameter(torch.linspace(-1, 1, 54).reshape(1, 9, 6))
        module = copy.deepcopy(module).double()
        out = module(X)
        (out * X).sum().backward()
        assert [name for name, _ in module.named_parameters()] == ["P"] == list(module.state_dict())
        assert torch.equal(module.P.grad[0, :7], X.sum(0)) and not module.P.grad[0, 7:].any()
        module = kind(6, 0.0, 9)
        module.P = torch.full((1, 9, 6), 0.5)
        found.append((out, module.double()(X), module.P.float()))
        module = kind(6, 0.0, 9)
        module.P[:, :, :4] = 0.1  # written into it, before the model is moved
        module.P[:, :, 4:].zero_()
        found[-1] += module(X), module(X.float()), module.to("cpu")(X), module(X.float())
    for theirs, own in zip(*found):
        assert torch.equal(theirs, own)
    module = ours.PositionalEncoding(6, 0.0, 9)
    for again in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module)), module.half().double()):
        np.testing.assert_array_equal(again(X), mha_c.PositionalEncoding(6, 0.0, 9)(X.numpy()))


def test_dropout_and_its_gradient():
    encoding = mha_c.PositionalEncoding(8, 0.25, rng=3).train()
    X = np.ones((4, 50, 8))
    out, whole = encoding(X), encoding.eval()(X)
    kept = out != 0
    np.testing.assert_allclose(out[kept], whole[kept] / 0.75)
    assert abs(kept.mean() - 0.75) < 4 * math.sqrt(0.25 * 0.75 / kept.size)
    with pytest.raises(TypeError, match="grad_output must be float"):
        encoding.backward(X.astype(np.float32))
    np.testing.assert_allclose(encoding.backward(np.full_like(X, 3.0)), kept * 4.0)
    with pytest.raises(RuntimeError, match="training mode"):
        encoding.backward(X)
    assert not encoding(X, training=False).all() == 0
    assert not mha_c.PositionalEncoding(8, 1)(X, training=True).any()


def test_errors_of_the_encoding():
    with pytest.raises(ValueError, match="even"):
        mha_c.PositionalEncoding(5, 0)
    encoding = mha_c.PositionalEncoding(4, 0, max_len=10)
    with pytest.raises(mha_c.ShapeError, match=r"\(B, T, 4\)"):
        encoding(np.ones((1, 2, 6)))
    for start in (9, -1, [0, 9]):
        with pytest.raises(ValueError, match=r"0\.\.9"):
            encoding(np.ones((2, 2, 4)), start=start)
    with pytest.raises(mha_c.ShapeError, match="start"):
        encoding(np.ones((2, 2, 4)), start=[1, 2, 3])
    for start in (1.5, True):
        with pytest.raises(TypeError, match="start"):
            encoding(np.ones((2, 2, 4)), start=start)


# --- Rotary -----------------------------------------------------------------------------------------------


def turned(x, at, base, interleaved):
    """Pairs as complex numbers times exp(i angle)."""
    D = x.shape[-1]
    x = x.astype(np.float64)
    pairs = x[..., 0::2] + 1j * x[..., 1::2] if interleaved else x[..., : D // 2] + 1j * x[..., D // 2 :]
    angles = np.atleast_2d(at)[..., None] * base ** (-np.arange(0, D, 2) / D)
    pairs = pairs * np.exp(1j * (angles[:, None] if x.ndim == 4 else angles))
    parts = [pairs.real, pairs.imag]
    return np.stack(parts, -1).reshape(x.shape) if interleaved else np.concatenate(parts, -1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shape", [(2, 5, 6), (2, 3, 5, 8), (1, 1, 2), (0, 4, 2), (2, 3, 0, 4)])
@pytest.mark.parametrize("per_item", [False, True])
def test_rotary(shape, interleaved, per_item, dtype, rng):
    x = rng.standard_normal(shape).astype(dtype)
    at = rng.integers(-5, 100000, (shape[0], shape[-2]) if per_item else shape[-2])
    out = functional.rotary(x, at, 500.0, interleaved)
    assert out.dtype == dtype and out.shape == shape
    # Two products and a sum, of a cosine and a sine rounded to half an ulp each.
    np.testing.assert_allclose(out, turned(x, at, 500.0, interleaved), atol=12 * np.finfo(dtype).eps)
    back = functional.rotary_backward(out, at, 500.0, interleaved)
    np.testing.assert_allclose(back, x, atol=24 * np.finfo(dtype).eps)


def test_scores_depend_on_the_distance(rng):
    q, k = rng.standard_normal((2, 1, 6, 16))
    score = [
        functional.rotary(q, np.arange(6) + s) @ functional.rotary(k, np.arange(6) + s).swapaxes(1, 2) for s in (0, 31)
    ]
    np.testing.assert_allclose(*score, atol=1e-12)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_in_torch(interleaved, rng):
    torch = needs.module("torch")
    from mha_c.torch import functional as ours

    x = torch.from_numpy(rng.standard_normal((2, 3, 4, 6))).requires_grad_()
    at = torch.tensor([[0, 1, 2, 3], [7, 8, 9, 10]])
    out = ours.rotary(x, at, interleaved=interleaved)
    np.testing.assert_allclose(
        out.detach(), functional.rotary(x.detach(), at, interleaved=interleaved), rtol=0, atol=1e-15
    )
    (grad,) = torch.autograd.grad(out, x, torch.ones_like(out))
    wanted = functional.rotary_backward(torch.ones_like(out), at, interleaved=interleaved)
    np.testing.assert_allclose(grad, wanted, atol=1e-14)
    assert torch.autograd.gradcheck(lambda x: ours.rotary(x, at, interleaved=interleaved), x)
    half = x.detach().bfloat16()
    once = ours.rotary(half.float(), at, interleaved=interleaved).bfloat16()
    assert torch.equal(ours.rotary(half, at, interleaved=interleaved), once)
    assert ours.rotary(x.to("meta"), at, interleaved=interleaved).is_meta


def test_errors_of_rotary():
    x = np.ones((2, 3, 4))
    with pytest.raises(mha_c.ShapeError, match="even"):
        functional.rotary(np.ones((2, 3, 5)), range(3))
    with pytest.raises(mha_c.ShapeError, match=r"positions must have shape \(T,\) = \(3,\)"):
        functional.rotary(x, range(4))
    with pytest.raises(TypeError, match="positions"):
        functional.rotary(x, [True, False, True])
    with pytest.raises(ValueError, match="base"):
        functional.rotary(x, range(3), base=0)
    with pytest.raises(ValueError, match="finite"):
        functional.rotary(x, [0, np.inf, 1])
    with pytest.raises(TypeError, match="interleaved"):
        functional.rotary(x, range(3), interleaved=1)
    with pytest.raises(TypeError, match="base"):
        functional.rotary(x, range(3), 10.0 + 1j)


# --- Tables -----------------------------------------------------------------------------------------------


def test_alibi_as_published():
    def power_of_2(n):  # the published code's recursion
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]

    for heads in range(1, 70):
        near = 2 ** math.floor(math.log2(heads))
        wanted = power_of_2(near) + power_of_2(2 * near)[0::2][: heads - near]
        np.testing.assert_allclose(functional.alibi_slopes(heads), wanted, rtol=1e-13)
    with pytest.raises(ValueError, match="num_heads"):
        functional.alibi_slopes(0)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("n_buckets, farthest", [(32, 128), (16, 64), (8, 20), (64, 1000)])
def test_t5_as_published(bidirectional, n_buckets, farthest):
    def bucket(distance):  # the formula, a number at a time, in double precision
        n = n_buckets // 2 if bidirectional else n_buckets
        first = n if bidirectional and distance > 0 else 0
        away = abs(distance) if bidirectional else max(-distance, 0)
        if away < n // 2:
            return {first + away}
        exact = n // 2 + math.log(away / (n // 2)) / math.log(farthest / (n // 2)) * (n - n // 2)
        # T5's own logarithms are float32: a border may fall to either side.
        return {first + min(int(exact * (1 + e)), n - 1) for e in (-1e-6, 1e-6)}

    distances = np.arange(-1500, 1501)
    found = functional.t5_buckets(distances, n_buckets, farthest, bidirectional)
    assert all(b in bucket(int(d)) for d, b in zip(distances, found)) and found.dtype == np.int64
    assert functional.t5_buckets([[0, 1], [-1, 0]]).shape == (2, 2)


def test_t5_of_the_farthest_distances():
    first, last = functional.t5_buckets([-1000, 1000])
    assert functional.t5_buckets([-(2**63), 2**63 - 1]).tolist() == [first, last]  # the first has no abs in int64
    assert functional.t5_buckets(np.array([2**63, 2**64 - 1], np.uint64)).tolist() == [last, last]
    assert functional.t5_buckets([-(2**63)], bidirectional=False).tolist() == [31]


def test_errors_of_t5():
    with pytest.raises(ValueError, match="even"):
        functional.t5_buckets([1], 33)
    with pytest.raises(ValueError, match="max_distance"):
        functional.t5_buckets([1], 32, 8)
    with pytest.raises(TypeError, match="integers"):
        functional.t5_buckets([1.0])
