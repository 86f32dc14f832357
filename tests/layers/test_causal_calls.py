"""causal= in a layer's call: the same as lengths of 1, 2, 3 ... in all that a call leaves, with lengths beside it."""

import numpy as np
import pytest

import mha_c
from causal_cases import CASES, LENS, seen
from mha_c.errors import ShapeError

LAYERS = {
    "MultiHeadAttention": lambda: mha_c.MultiHeadAttention(8, 8, 8, 8, 2, 0.3, rng=0),
    "DotProductAttention": lambda: mha_c.DotProductAttention(0.3, rng=0),
    "AdditiveAttention": lambda: mha_c.AdditiveAttention(8, 8, 6, 0.3, rng=0),
}
ALL = {
    **LAYERS,
    "KernelAttention": lambda: mha_c.KernelAttention(width=2.0),
    "GQAAttention": lambda: mha_c.GQAAttention(8, 4, 2, rope=True, causal=False, rng=0),
}


def parameters_of(layer):
    return [layer.width_grad] if isinstance(layer, mha_c.KernelAttention) else [p.grad for p in layer.parameters()]


def drawn(n_queries, n_keys):
    rng = np.random.default_rng(1)
    return [rng.standard_normal((2, n, 8)) for n in (n_queries, n_keys, n_keys)]


@pytest.mark.parametrize("lens", LENS)
@pytest.mark.parametrize(("causal", "n_queries", "n_keys"), CASES)
@pytest.mark.parametrize("name", ALL)
def test_causal_is_lengths_of_each_query(name, causal, n_queries, n_keys, lens):
    """Output, weights and gradients, dropout included, to the bit; the second call is one as the caller would write."""
    inputs, found = drawn(n_queries, n_keys), []
    lens = LENS[lens]
    for given in ({"causal": causal, "valid_lens": lens}, {"valid_lens": seen(causal, n_queries, n_keys, lens)}):
        layer = ALL[name]()
        out = layer(*inputs, training=True, **given)
        weights = layer.attention_weights
        grads = layer.backward(np.linspace(-1, 1, out.size).reshape(out.shape))
        found.append([out, layer(*inputs, **given), weights, *grads, *parameters_of(layer)])
    for one, other in zip(*found):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", ALL)
def test_false_none_and_numpys_bool(name):
    layer, inputs = ALL[name](), drawn(4, 4)
    for no in (False, None, np.False_):
        np.testing.assert_array_equal(layer(*inputs, causal=no), layer(*inputs))
    np.testing.assert_array_equal(layer(*inputs, causal=np.True_), layer(*inputs, causal=True))
    assert not np.triu(layer.attention_weights, 1).any()


@pytest.mark.parametrize("name", LAYERS)
def test_a_cached_call_is_causal_already(name):
    layer, (x, _, _) = LAYERS[name](), drawn(5, 5)
    whole = layer(x, x, x, causal=True)
    for causal in (True, "bottom_right", False):
        cache = layer.new_cache(2, 5)
        steps = [layer(new, new, new, cache=cache, causal=causal) for new in np.split(x, [3, 4], axis=1)]
        np.testing.assert_allclose(np.concatenate(steps, 1), whole, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match=r"'top_left'.*is causal from its last key"):
        layer(x, x, x, cache=layer.new_cache(2, 5), causal="top_left")


@pytest.mark.parametrize("name", LAYERS)
def test_projected_keys(name):
    layer, (q, k, v) = LAYERS[name](), drawn(3, 7)
    kv = layer.project(k, v, valid_lens=[2, 7])
    np.testing.assert_array_equal(layer(q, kv, causal="bottom_right"), layer(q, k, v, [2, 7], causal="bottom_right"))


@pytest.mark.parametrize("name", ALL)
def test_what_is_refused(name):
    layer, (q, k, v) = ALL[name](), drawn(3, 7)
    with pytest.raises(ValueError, match="causal=True is ambiguous for 3 queries and 7 keys: write 'top_left'"):
        layer(q, k, v, causal=True)
    with pytest.raises(ValueError, match="causal must be False, True, 'top_left' or 'bottom_right', got 'left'"):
        layer(q, k, v, causal="left")
    with pytest.raises(TypeError, match="causal must be False, True"):
        layer(q, k, v, causal=1)
    with pytest.raises(ShapeError, match="valid_lens has shape"):
        layer(q, k, v, [1, 2, 3], causal="top_left")
    with pytest.raises(ShapeError, match="queries"):
        layer(q[0], k, v, causal="top_left")
    with pytest.raises(TypeError, match=r"missing.*values"):
        layer(q, k, causal=True)


def test_nothing_of_a_refused_call_is_kept():
    layer, (q, k, v) = mha_c.MultiHeadAttention(8, 2, 0.3, rng=0), drawn(3, 7)  # sizes open
    with pytest.raises(ValueError, match="ambiguous"):
        layer(q, k, v, causal=True)
    assert layer.W_q.in_features == 0
    assert layer(q, k, v, causal="top_left").shape == (2, 3, 8)


def test_rows_that_the_corner_leaves_empty():
    """With more queries than keys the first queries see none: the mean of all values, or 0."""
    q, k, v = drawn(5, 2)
    for empty_rows, expected in (("uniform", v.mean(1)), ("zero", 0 * v.mean(1))):
        layer = mha_c.DotProductAttention(0.0, empty_rows=empty_rows)
        out = layer(q, k, v, causal="bottom_right")
        for i in range(3):
            np.testing.assert_allclose(out[:, i], expected, rtol=0, atol=1e-15)


def test_a_calls_word_takes_the_place_of_the_constructors():
    x, _, _ = drawn(5, 5)
    causal, plain = (mha_c.GQAAttention(8, 4, 2, rope=True, causal=one, rng=0) for one in (True, False))
    np.testing.assert_array_equal(causal(x, x, x), plain(x, x, x, causal=True))
    np.testing.assert_array_equal(causal(x, x, x, causal=False), plain(x, x, x))
    np.testing.assert_array_equal(causal(x, x, x, [3, 5]), plain(x, x, x, [3, 5], causal="bottom_right"))


def test_causal_attention_is_causal_whatever_is_said():
    x, _, _ = drawn(5, 5)
    layer = mha_c.CausalAttention(8, 2, rng=0)
    for causal in (True, "top_left", "bottom_right", None):
        np.testing.assert_array_equal(layer(x, x, x, causal=causal), layer(x))
    with pytest.raises(ValueError, match=r"always causal: GQAAttention\(.*causal=False\)"):
        layer(x, causal=False)
    with pytest.raises(TypeError, match=r"'attn_mask': write keep_mask=attn_mask of .*It is causal without a mask"):
        layer(x, attn_mask=None)


def test_numbers_as_the_book_has_them():
    q, k, v = (np.arange(4.0) for _ in range(3))
    layer = mha_c.KernelAttention("constant")
    np.testing.assert_allclose(layer(q, k, v, causal=True), [0, 0.5, 1, 1.5], rtol=0, atol=1e-15)
