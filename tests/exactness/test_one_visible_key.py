"""A query that sees one key: its weight is 1 whatever the scores are, so their gradients are exactly 0, as in d2l."""

import numpy as np
import pytest

import mha_c
from mha_c import functional

ONE_KEY = {
    "lengths": {"valid_lens": [1, 1]},
    "causal": {"causal": True},  # the first query alone
    "window": {"window": (0, 0), "causal": True},
    "keep_mask": {"keep_mask": np.eye(9, dtype=bool)},
}


@pytest.mark.parametrize("name", ONE_KEY)
@pytest.mark.parametrize("kind", ["dot", "additive"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("features", [3, 16, 40])
def test_functions(isa, dtype, name, kind, dropout, features, rng):
    q, k, v, grad = (rng.standard_normal((2, 9, features)).astype(dtype) for _ in range(4))
    options = {**ONE_KEY[name], "dropout": dropout, "rng": 3}
    w_v = rng.standard_normal(features).astype(dtype)
    attention = functional.dot_product_attention if kind == "dot" else functional.additive_attention
    backward = getattr(functional, f"{attention.__name__}_backward")
    given = (q, k, v) if kind == "dot" else (q, k, v, w_v)
    of_q, of_k, of_v, *rest = backward(grad, *given, **options)
    rows = slice(0, 1) if name == "causal" else slice(None)
    assert not of_q[:, rows].any() and of_v.any()
    if name != "causal":
        assert not of_k.any() and not any(np.any(x) for x in rest)
    else:
        assert of_q[:, 1:].any()


@pytest.mark.parametrize("n_keys", [5, 70, 700])  # columns, one block, two blocks
def test_beside_rows_that_see_more(isa, dtype, n_keys, rng):
    q = rng.standard_normal((2, 6, 8)).astype(dtype)
    k, v = (rng.standard_normal((2, n_keys, 8)).astype(dtype) for _ in range(2))
    lens = np.array([[1, n_keys, 1, 2, 1, 1], [n_keys, 1, 3, 1, 2, 1]])
    of_q, _, _ = functional.dot_product_attention_backward(np.ones_like(q), q, k, v, lens)
    np.testing.assert_array_equal(of_q.any(-1), lens != 1)


def test_a_nan_in_the_gradient_of_the_output_stays(dtype, rng):
    q, k, v, grad = (rng.standard_normal((1, 2, 3)).astype(dtype) for _ in range(4))
    grad[0, 0, 0] = np.nan
    of_q, _, _ = functional.dot_product_attention_backward(grad, q, k, v, [1])
    assert np.isnan(of_q[0, 0]).all() and not of_q[0, 1].any()


@pytest.mark.parametrize("kind", ["multi-head", "additive"])
def test_layers(isa, kind, rng):
    queries, keys = (rng.standard_normal((2, n, 8)).astype(np.float32) for n in (4, 5))
    layer = mha_c.AdditiveAttention(8, 8, 6, 0.5, rng=1)
    if kind == "multi-head":
        layer = mha_c.MultiHeadAttention(8, 8, 8, 8, 2, 0.5, bias=True, rng=1)
    out = layer.train()(queries, keys, keys + 1, [1, 1])
    of_queries, of_keys, of_values = layer.backward(np.ones_like(out))
    assert not of_queries.any() and not of_keys.any() and of_values.any()
    grads = {name: one.grad for name, one in layer.named_parameters()}
    of_scores = {"W_q.weight", "W_k.weight", "W_q.bias", "W_k.bias", "w_v.weight"}
    assert {name for name, grad in grads.items() if not grad.any()} == of_scores & grads.keys()
