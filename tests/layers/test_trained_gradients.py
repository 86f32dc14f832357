"""`backward` of layers in NumPy: by autograd, by finite differences, and what changes no bit of it."""

import copy
import functools

import numpy as np
import pytest

import needs
from checks import same
from mha_c import (
    MultiHeadAttention,
    set_num_threads,
)
from trained_layers import KINDS, B, Q, fitting, inputs, make

LENS = {"all": None, "per item": [4, 0], "per query": np.array([[1, 2, 3, 4, 9], [9, 0, 2, 9, 1]])}
ROLES = "W_q", "W_k", "W_v", "W_o"


def by_torch(layer, arrays, grad, **options):
    """(gradients of queries, keys, values; gradients of the parameters by name) from autograd."""
    torch_math = needs.module("torch_math")
    parameters = {name: torch_math.leaf_of(array) for name, array in layer.state_dict().items()}
    x = [torch_math.leaf_of(array) for array in arrays]
    w_v = parameters.get("w_v.weight")
    weights, biases = ([parameters.get(f"{name}.{part}") for name in ROLES] for part in ("weight", "bias"))
    heads = getattr(layer, "num_heads", 1)
    out = torch_math.layer(x, weights, biases, None if w_v is None else w_v[0], heads, **options)
    found = torch_math.gradients(out, grad, [*x, *parameters.values()])
    return found[:3], dict(zip(parameters, found[3:]))


def near(found, expected, tolerance=1e-12):
    """The gradient of W_k's bias, which softmax does not see, is 0 but for the rounding of terms above 1."""
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * max(np.abs(expected).max(), 1))


def next_seed(stream):
    """The seed that a layer with this stream draws for its next call, by a copy of the stream."""
    return int(copy.deepcopy(stream).integers(0, 2**64, dtype=np.uint64))


# --- Right numbers -------------------------------------------------------------------------------


@functools.cache
def by_autograd(kind, lens, empty_rows, dropout):
    """(inputs, the gradient of the output, gradients of both kinds), of a layer with the stream of random numbers that
    starts from 5: once for all instruction sets."""
    rng, stream = np.random.default_rng(6), np.random.default_rng(5)
    layer = make(kind, dropout, stream, empty_rows=empty_rows)
    arrays = fitting(kind, inputs(rng))
    grad = rng.standard_normal((B, Q, layer.num_hiddens if hasattr(layer, "W_o") else 8))
    options = {"valid_lens": LENS[lens], "empty_rows": empty_rows, "dropout": dropout, "seed": next_seed(stream)}
    return arrays, grad, *by_torch(layer, arrays, grad, **options)


@pytest.mark.parametrize("empty_rows", ["uniform", "zero"])
@pytest.mark.parametrize("lens", LENS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_autograd_agrees(isa, kind, lens, empty_rows, dropout):
    arrays, grad, of_inputs, of_parameters = by_autograd(kind, lens, empty_rows, dropout)
    layer = make(kind, dropout, np.random.default_rng(5), empty_rows=empty_rows).train()
    layer(*arrays, LENS[lens])
    for a, b in zip(layer.backward(grad), of_inputs):
        near(a, b)
    assert [name for name, _ in layer.named_parameters()] == list(of_parameters)
    for name, p in layer.named_parameters():
        near(p.grad, of_parameters[name])


def test_autograd_agrees_on_a_larger_layer(rng, isa):
    layer = MultiHeadAttention(48, 4, 0.1, bias=True, rng=(stream := np.random.default_rng(1)), dtype=np.float64)
    x = rng.standard_normal((3, 150, 30))
    layer(x, x, x)
    seed = next_seed(stream)
    lens = [150, 71, 3]
    out = layer(x, x, x, lens, training=True)
    grad = rng.standard_normal(out.shape)
    of_inputs, of_parameters = by_torch(layer, (x, x, x), grad, valid_lens=lens, dropout=0.1, seed=seed)
    for a, b in zip(layer.backward(grad), of_inputs):
        near(a, b)
    for name, p in layer.named_parameters():
        near(p.grad, of_parameters[name])


@pytest.mark.parametrize("kind", KINDS)
def test_finite_differences_agree(rng, kind):
    layer, arrays, lens = make(kind), fitting(kind, inputs(rng)), [4, 0]
    out = layer(*arrays, lens, training=True)
    grad = rng.standard_normal(out.shape) / 4
    of_inputs = layer.backward(grad)

    def loss():
        return (layer(*arrays, lens) * grad).sum()

    step = 1e-4
    for x, gradient in zip(arrays, of_inputs):
        for _ in range(8):
            at = tuple(rng.integers(0, n) for n in x.shape)
            middle, ends = x[at], []
            for move in (-2, -1, 1, 2):
                x[at] = middle + move * step
                ends.append(loss())
            x[at] = middle
            assert abs((8 * (ends[2] - ends[1]) - (ends[3] - ends[0])) / (12 * step) - gradient[at]) < 1e-8
    for p in layer.parameters():
        way, before = rng.standard_normal(p.shape), p.data.copy()
        ends = []
        for move in (-2, -1, 1, 2):
            p.data = before + move * step * way
            ends.append(loss())
        p.data = before
        # The way has a length of some units, and the third derivative goes with its cube.
        assert abs((8 * (ends[2] - ends[1]) - (ends[3] - ends[0])) / (12 * step) - (p.grad * way).sum()) < 1e-7


@pytest.mark.parametrize("kind", KINDS)
def test_padding_has_no_influence(rng, dtype, isa, kind):
    arrays, lens = fitting(kind, inputs(rng, dtype)), [4, 7]
    results = []
    for rubbish in (0.0, np.nan, np.inf):
        queries, keys, values = (x.copy() for x in arrays)
        for b, n in enumerate(lens):
            keys[b, n:] = values[b, n:] = rubbish
        layer = make(kind, 0.3, dtype=dtype)
        out = layer(queries, keys, values, lens, training=True)
        _, grad_keys, grad_values = found = layer.backward(np.ones_like(out))
        for b, n in enumerate(lens):
            assert not grad_keys[b, n:].any() and not grad_values[b, n:].any()
        results.append([x.tobytes() for x in (*found, *(p.grad for p in layer.parameters()))])
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("kind", KINDS)
def test_other_type_than_the_layers(rng, kind):
    """A float32 layer computes in float64 where it is asked to, and keeps gradients in its own type."""
    narrow, wide = make(kind, dtype=np.float32), make(kind)
    wide.load_state_dict(narrow.state_dict())
    arrays = fitting(kind, inputs(rng))
    same(*(layer.backward(np.ones_like(layer(*arrays, training=True))) for layer in (narrow, wide)))
    for a, b in zip(narrow.parameters(), wide.parameters()):
        same(a.grad, b.grad.astype(np.float32))


@pytest.mark.parametrize("kind", KINDS)
def test_neither_threads_nor_layout_change_a_bit(rng, dtype, isa, kind):
    arrays = fitting(kind, inputs(rng, dtype, 70, 90))
    results = []
    for n in range(1, 9):
        set_num_threads(n)
        layer = make(kind, 0.2, dtype=dtype)
        out = layer(*arrays, [90, 41], training=True)
        grad = np.random.default_rng(0).standard_normal(out.shape).astype(dtype)
        grad = np.asfortranarray(grad) if n % 2 else np.repeat(grad, 2, axis=1)[:, ::2]
        found = layer.backward(grad)
        results.append([x.tobytes() for x in (*found, *(p.grad for p in layer.parameters()))])
    assert all(result == results[0] for result in results)


def test_the_gradient_of_a_sum(rng, dtype):
    """Stride 0 on every axis, as autograd hands it on."""
    arrays = inputs(rng, dtype)
    first, second = make("multi-head", dtype=dtype), make("multi-head", dtype=dtype)
    shape = first(*arrays, training=True).shape
    second(*arrays, training=True)
    same(first.backward(np.broadcast_to(dtype.type(1), shape)), second.backward(np.ones(shape, dtype)))
