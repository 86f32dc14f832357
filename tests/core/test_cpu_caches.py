"""No bit of a result depends on how large a machine's caches are, which tasks are cut for; C tests look at how they are
cut (tests/c/test_cpu_caches.c), test_system.py at what import finds out.
"""

import numpy as np
import pytest

import mha_c
from core_calls import core as _core

KIB = 1024
SIZES_OF_CACHES = [(32, 512), (48, 1024), (48, 2048), (4, 64), (128, 3072), (1024, 65536)]  # KiB, first and second


@pytest.fixture
def for_all_caches():
    """What a call gives with caches of each of these sizes."""
    before = _core.caches()

    def results(call):
        for first, second in SIZES_OF_CACHES:
            _core.set_caches(first * KIB, second * KIB)
            assert _core.caches() == (first * KIB, second * KIB)
            yield call()

    yield results
    _core.set_caches(*before)


def bits(arrays):
    return [array.tobytes() for array in arrays if array is not None]


def all_equal(results):
    first, *rest = results
    return rest and all(other == first for other in rest)


@pytest.mark.parametrize("n_rows, ins, outs", [(900, 128, 400), (400, 130, 790), (97, 700, 66), (7, 5, 3)])
def test_projections(n_rows, ins, outs, for_all_caches, isa, dtype, rng):
    """Rows of a gradient on both sides of 384 and 512, which tasks have at most."""
    shapes = (n_rows, ins), (outs, ins), (n_rows, outs)
    x, weight, grad = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
    packed = _core.pack_linear(weight), None, (outs, ins)

    def call():
        forward = _core.linear(x, (weight, None)), _core.linear(x, packed)
        return bits([*forward, *_core.linear_backward(grad, x, weight, True)])

    assert all_equal(for_all_caches(call))


@pytest.mark.parametrize("dropout", [0, 0.3])
@pytest.mark.parametrize("n_queries, n_keys", [(37, 130), (50, 700)])
def test_attention(n_queries, n_keys, dropout, for_all_caches, isa, dtype, rng):
    q, grad = (rng.standard_normal((2, 4, n_queries, 24)).astype(dtype) for _ in range(2))
    k, v = (rng.standard_normal((2, 2, n_keys, 24)).astype(dtype) for _ in range(2))
    options = {"dropout": dropout, "seed": 5}

    def call():
        out, _, _, stats = _core.attention_forward(q, k, v, return_stats=True, **options)
        grads = _core.attention_backward(grad, out, stats, q, k, v, **options)
        return bits([out, *stats, *grads])

    assert all_equal(for_all_caches(call))


def test_layers(for_all_caches, isa, dtype, rng):
    """A batch that is cut into slices; gradients of more rows than a task has."""
    x = rng.standard_normal((90, 10, 100)).astype(dtype)

    def call():
        layer = mha_c.MultiHeadAttention(100, 5, 0.2, dtype=dtype, rng=1)
        out = layer(x, x, x, valid_lens=np.arange(90) % 11)
        trained = layer(x, x, x, valid_lens=np.arange(90) % 11, training=True)
        grads = layer.backward(np.ones_like(out))
        return bits([out, trained, *grads, *(parameter.grad for parameter in layer.parameters())])

    assert all_equal(for_all_caches(call))
