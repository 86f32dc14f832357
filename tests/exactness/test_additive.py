"""Additive scores are sums over exponentials of rows and of keys, or, where numbers are large, over tanh
(csrc/kernels/additive.inc): decided for each query and key, so that no neighbour shows.
"""

import numpy as np
import pytest

from checks import bits
from core_calls import core as _core


def each_alone(q, k, v, w_v):
    """Output and gradients of each query alone, one after the other."""
    grad = np.ones((q.shape[0], 1, v.shape[-1]), q.dtype)
    for i in range(q.shape[1]):
        out, _, _, stats = _core.attention_forward(q[:, i : i + 1], k, v, w_v, return_stats=True)
        yield out, _core.attention_backward(grad, out, stats, q[:, i : i + 1], k, v, w_v)[0]


@pytest.mark.parametrize("n_queries", [2, 7, 30])
@pytest.mark.parametrize("depth", [1, 8, 24, 61])
def test_queries_alone(n_queries, depth, isa, dtype, rng):
    """Alone or beside others, by exponentials or, where numbers are large, by tanh."""
    q, k = (3 * rng.standard_normal((2, n, depth)).astype(dtype) for n in (n_queries, 23))
    q[:, 1, depth // 2], k[:, 5, depth - 1], k[:, 14, 0] = 11, -40, 1e30
    v, w_v = rng.standard_normal((2, 23, 6)).astype(dtype), rng.standard_normal(depth).astype(dtype)
    out, _, _, stats = _core.attention_forward(q, k, v, w_v, return_stats=True)
    grad_q = _core.attention_backward(np.ones_like(out), out, stats, q, k, v, w_v)[0]
    for i, (out_alone, grad_alone) in enumerate(each_alone(q, k, v, w_v)):
        assert bits([out[:, i : i + 1], grad_q[:, i : i + 1]]) == bits([out_alone, grad_alone]), i


@pytest.mark.parametrize("n_queries", [1, 4])
def test_keys_alone(n_queries, isa, dtype, rng):
    """A score of a key among others, some of which are large, is that of the key alone."""
    q, k = (rng.standard_normal((1, n, 33)).astype(dtype) for n in (n_queries, 11))
    k[:, 2, 9], k[:, 5, 0], w_v = 300, -11, rng.standard_normal(33).astype(dtype)
    for j in range(11):
        only = np.broadcast_to(np.arange(11) == j, (n_queries, 11))
        among = _core.attention_forward(q, k, k, w_v, keep_mask=only, return_stats=True)[3]
        alone = _core.attention_forward(q, k[:, j : j + 1], k[:, j : j + 1], w_v, return_stats=True)[3]
        assert bits(among) == bits(alone), j


def test_weights_of_any_size(isa, dtype, rng):
    """Sums of exponentials overflow before those of tanh do."""
    largest = np.finfo(dtype).max / 64
    q, k = (rng.standard_normal((1, n, 20)).astype(dtype) for n in (3, 5))
    w_v = np.full(20, largest, dtype)
    out, lse = _core.attention_forward(q, k, k, w_v, return_lse=True)[:3:2]
    known = (np.tanh(q[:, :, None] + k[:, None].astype(np.float64)) @ w_v.astype(np.float64)).max(axis=-1)
    # Of 20 terms up to `largest` each; of what is left after they cancel, no share is promised.
    np.testing.assert_allclose(lse / largest, known / largest, rtol=0, atol=20 * np.finfo(dtype).eps)
    assert np.isfinite(out).all()
