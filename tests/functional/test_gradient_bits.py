"""Gradients of mha_c.functional where they are exact: hidden keys, empty rows, threads, batches, layouts."""

import numpy as np
import pytest

import needs
from checks import bits, same
from core_calls import core as _core
from gradient_calls import DV, B, H, K, Q, backward, operands
from layouts import LAYOUTS
from mha_c import functional as F
from mha_c import set_num_threads

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
