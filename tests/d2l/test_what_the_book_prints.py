"""What the book's own lines print of its scoring functions and layers."""

import numpy as np
import pytest
import torch

import mha_c
from book_models import is_eager, multi_head
from d2l_judge import tensor


def book_layers(d2l, h=8):
    """The layers of the book's scoring-function example: (ours, theirs, queries) twice."""
    sizes = (2, 20) if is_eager(d2l) else ()
    additive = d2l.AdditiveAttention(*sizes, h, 0.1).eval()
    return [
        (mha_c.AdditiveAttention(*sizes, h, 0.1), additive, np.ones((2, 1, 20), np.float32)),
        (mha_c.DotProductAttention(0.5), d2l.DotProductAttention(0.5).eval(), np.ones((2, 1, 2), np.float32)),
    ]


def test_printed_result_of_the_scoring_functions(d2l, isa):
    keys = np.ones((2, 10, 2), np.float32)
    values = np.tile(np.arange(40, dtype=np.float32).reshape(1, 10, 4), (2, 1, 1))
    for ours, theirs, queries in book_layers(d2l):
        out = ours(queries, keys, values, [2, 6])
        # Equal weights of 1/2 and of 1/6: halves are exact, and sixths of small whole numbers come out to a few
        # units of 13 * 2**-24, the rounding of the largest term.
        np.testing.assert_array_equal(out[0], [[2, 3, 4, 5]])
        np.testing.assert_allclose(out[1], [[10, 11, 12, 13]], rtol=4 * 2**-24)
        np.testing.assert_array_equal(np.round(out, 4), [[[2, 3, 4, 5]], [[10, 11, 12, 13]]])
        with torch.no_grad():
            printed = theirs(*map(tensor, (queries, keys, values)), torch.tensor([2, 6])).numpy()
        np.testing.assert_array_equal(np.round(out, 4), np.round(printed, 4))
        weights = ours.attention_weights
        np.testing.assert_array_equal(np.round(weights, 4), np.round(theirs.attention_weights.numpy(), 4))
        np.testing.assert_array_equal(weights[0, 0], [0.5] * 2 + [0] * 8)


def test_printed_result_of_sequence_mask():
    x = np.array([[1, 2, 3], [4, 5, 6]])
    assert mha_c.sequence_mask(x, [1, 2]).tolist() == [[1, 0, 0], [4, 5, 0]]
    ones = mha_c.sequence_mask(np.ones((2, 3, 4), np.float32), [1, 2], value=-1)
    assert ones[:, :, 0].tolist() == [[1, -1, -1], [1, 1, -1]]


def test_printed_shape_of_the_multi_head_toy():
    attention = mha_c.MultiHeadAttention(100, 5, 0.5)
    x, y = np.ones((2, 4, 100), np.float32), np.ones((2, 6, 100), np.float32)
    assert attention(x, y, y, [3, 2]).shape == (2, 4, 100)
    assert attention.attention_weights.shape == (2, 5, 4, 6)
    assert attention.attention.attention_weights.shape == (10, 4, 6)


@pytest.mark.parametrize("dropout", [0, 0.0, 0.1, 0.5, 1, 1e-7])
def test_repr(d2l, dropout):
    q, k, v = (np.ones((1, 2, n), np.float32) for n in (6, 7, 5))
    for bias in (False, True):
        ours, theirs = multi_head(mha_c, d2l, dropout, bias), multi_head(d2l, d2l, dropout, bias).eval()
        assert repr(ours) == repr(theirs)
        ours(q, k, v)
        theirs(*map(tensor, (q, k, v)), None)
        assert repr(ours) == repr(theirs)
    assert repr(mha_c.DotProductAttention(dropout)) == repr(d2l.DotProductAttention(dropout))
    sizes = (7, 6) if is_eager(d2l) else ()
    ours, theirs = (make.AdditiveAttention(*sizes, 8, dropout) for make in (mha_c, d2l))
    assert repr(ours) == repr(theirs)
    ours(q, k, v)
    theirs(*map(tensor, (q, k, v)), None)
    assert repr(ours) == repr(theirs)
