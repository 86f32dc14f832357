"""Properties that hold for any shapes, layouts, types, lengths and masks; hypothesis looks for a counterexample.

`make nightly` asks twenty times as often, with new examples each time.
"""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

import mha_c
import needs
from layouts import LAYOUTS
from mha_c import functional as F

many = hypothesis.settings(max_examples=needs.draws(150, 4000))
SIZES = st.one_of(st.integers(0, 20), st.sampled_from([31, 32, 33, 63, 64, 65, 129]))


@st.composite
def calls(draw, additive=False):
    """Arguments of dot_product_attention or additive_attention: operands, and options of every kind."""
    dtype = np.dtype(draw(st.sampled_from(["f4", "f8"])))
    batch, groups, kv_heads = draw(st.integers(0, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    n_queries, n_keys = draw(SIZES), draw(SIZES)
    size, value_size = draw(SIZES), draw(SIZES)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    with_heads = draw(st.booleans())
    heads, kv = ((groups * kv_heads,), (kv_heads,)) if with_heads else ((), ())
    shapes = {"q": (*heads, n_queries, size), "k": (*kv, n_keys, size), "v": (*kv, n_keys, value_size)}
    arrays = {name: rng.standard_normal((batch, *shape)).astype(dtype) for name, shape in shapes.items()}
    if additive:
        arrays["w_v"] = rng.standard_normal(size).astype(dtype)
    options = {"empty_rows": draw(st.sampled_from(["zero", "uniform"]))}
    lens = draw(st.sampled_from(["none", "item", "query"]))
    if lens != "none":
        shape = (batch,) if lens == "item" else (batch, n_queries)
        options["valid_lens"] = rng.integers(-2, n_keys + 3, shape).astype(draw(st.sampled_from(["i1", "i8", "f4"])))
    options["causal"] = draw(st.sampled_from([False, "top_left", "bottom_right"]))
    if draw(st.booleans()):
        options["window"] = draw(st.tuples(*[st.none() | st.integers(0, 40)] * 2))
    scores = (batch, *heads, n_queries, n_keys)
    if draw(st.booleans()):
        options["keep_mask"] = rng.random([draw(st.sampled_from([1, n])) for n in scores]) < 0.7
    if draw(st.booleans()):
        options["bias"] = rng.standard_normal([draw(st.sampled_from([1, n])) for n in scores]).astype(dtype)
    return arrays, options


def attend(arrays, options, **more):
    function = F.additive_attention if "w_v" in arrays else F.dot_product_attention
    return function(**arrays, **options, **more)


def visible(arrays, options):
    """(B, [H,] Q, K) bool: who may see whom, by the words of the documentation."""
    q, k = arrays["q"], arrays["k"]
    shape = (*q.shape[:-1], k.shape[-2])
    i, j = np.arange(shape[-2])[:, None], np.arange(shape[-1])
    diagonal = i + (shape[-1] - shape[-2] if options["causal"] == "bottom_right" else 0)
    seen = np.ones(shape, bool)
    if "valid_lens" in options:
        lens = np.ceil(options["valid_lens"].astype(float))
        lens = lens[:, None] if lens.ndim == 1 else lens
        seen &= (j < lens[..., None]).reshape(shape[0], *[1] * (len(shape) - 3), lens.shape[1], shape[-1])
    if options["causal"]:
        seen &= j <= diagonal
    left, right = options.get("window", (None, None))
    if left is not None:
        seen &= j >= diagonal - left
    if right is not None:
        seen &= j <= diagonal + right
    return seen & options.get("keep_mask", True)


def unseen_keys(seen):
    """(B, [1,] K) bool: keys of an item that no head and query of it sees."""
    unseen = ~seen.any(axis=tuple(range(1, seen.ndim - 1)))
    return unseen.reshape(len(unseen), *[1] * (seen.ndim - 3), seen.shape[-1])


@pytest.mark.parametrize("additive", [False, True])
@many
@hypothesis.given(data=st.data())
def test_weights_are_weights(additive, data):
    """In 0..1, summing to 1, exactly 0 where a query may not look; the output is the values so weighted."""
    arrays, options = data.draw(calls(additive))
    out, weights, lse = attend(arrays, options, return_weights=True, return_lse=True)
    seen = visible(arrays, options)
    some = seen.any(-1)
    uniform = options["empty_rows"] == "uniform" and seen.shape[-1] > 0
    tolerance = 64 * np.finfo(out.dtype).eps  # sums of at most 129 weights, values of a few units
    assert np.all(weights >= 0) and np.all(weights <= 1 + tolerance)
    assert np.all(weights[~seen & some[..., None]] == 0)
    np.testing.assert_allclose(weights.sum(-1), np.where(some, 1, 1.0 if uniform else 0.0), atol=tolerance)
    assert np.array_equal(lse == -np.inf, ~some)
    v = arrays["v"]
    if v.ndim == 4:
        v = v.repeat(arrays["q"].shape[1] // v.shape[1], axis=1)
    np.testing.assert_allclose(out, weights.astype(float) @ v.astype(float), atol=16 * tolerance)


@pytest.mark.parametrize("additive", [False, True])
@many
@hypothesis.given(data=st.data())
def test_layout_and_what_is_hidden_change_no_bit(additive, data):
    """Any layout of any operand; NaN in keys and values that nobody sees; extras asked for or not."""
    arrays, options = data.draw(calls(additive))
    expected = attend(arrays, options).tobytes()
    layouts = {name: data.draw(st.sampled_from(sorted(LAYOUTS)), label=name) for name in arrays}
    changed = {name: LAYOUTS[layouts[name]](array) for name, array in arrays.items()}
    assert attend(changed, options, return_lse=True)[0].tobytes() == expected
    seen = visible(arrays, options)
    if options["empty_rows"] == "zero" or seen.any(-1).all():
        poisoned = {name: array.copy() for name, array in arrays.items()}
        unseen = unseen_keys(seen)
        for name in "k", "v":
            poisoned[name][np.broadcast_to(unseen, poisoned[name].shape[:-1])] = np.nan
        assert attend(poisoned, options).tobytes() == expected


@pytest.mark.parametrize("additive", [False, True])
@many
@hypothesis.given(data=st.data())
def test_a_row_knows_nothing_of_its_neighbours(additive, data):
    """One item alone, and some of its queries alone, have the bits they have in the batch."""
    arrays, options = data.draw(calls(additive))
    options = {name: value for name, value in options.items() if name in ("valid_lens", "empty_rows")}
    whole = attend(arrays, options)
    hypothesis.assume(whole.shape[0] > 0 and whole.shape[-2] > 0)
    item = data.draw(st.integers(0, whole.shape[0] - 1))
    first = data.draw(st.integers(0, whole.shape[-2] - 1))
    one = {name: array if name == "w_v" else array[item : item + 1] for name, array in arrays.items()}
    one["q"] = one["q"][..., first:, :]
    if "valid_lens" in options:
        lens = options["valid_lens"][item : item + 1]
        options["valid_lens"] = lens[:, first:] if lens.ndim == 2 else lens
    assert attend(one, options).tobytes() == whole[item : item + 1, ..., first:, :].tobytes()


@many
@hypothesis.given(data=st.data())
def test_gradients_are_finite_and_zero_where_hidden(data):
    additive = data.draw(st.booleans())
    arrays, options = data.draw(calls(additive))
    out = attend(arrays, options)
    backward = F.additive_attention_backward if additive else F.dot_product_attention_backward
    grads = backward(np.ones_like(out), **arrays, **options)
    assert all(np.isfinite(grad).all() for grad in grads)
    assert [grad.shape for grad in grads[:3]] == [arrays[name].shape for name in "qkv"]
    seen = visible(arrays, options)
    if options["empty_rows"] == "zero":
        unseen = unseen_keys(seen)
        for grad in grads[1:3]:
            assert not grad[np.broadcast_to(unseen, grad.shape[:-1])].any()
    assert not grads[0][~seen.any(-1)].any()


@many
@hypothesis.given(
    value=st.one_of(
        st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=5), st.binary(max_size=5),
        st.lists(st.one_of(st.integers(-5, 9), st.floats(), st.none(), st.text(max_size=2), st.booleans()), max_size=4),
        st.lists(st.lists(st.integers(-(2**65), 2**65), max_size=3), max_size=3), st.complex_numbers(),
        st.sampled_from([np.zeros(2, d) for d in ("?", "i1", "u8", "f2", "g", "c8", "O", "U2", "M8[s]", "V4", ">i4")]),
    ),
    name=st.sampled_from(
        "q k v valid_lens keep_mask bias causal window scale dropout rng empty_rows return_weights".split()
    ),
)  # fmt: skip
def test_any_argument_is_taken_or_refused(value, name):
    """TypeError or ValueError, nothing else; and the next good call is right."""
    x = np.ones((2, 3, 4), np.float32)
    call = {"q": x, "k": x, "v": x, name: value}
    try:
        F.dot_product_attention(**call)
    except (TypeError, ValueError):
        pass
    except MemoryError:
        assert name == "valid_lens"
    assert np.array_equal(F.dot_product_attention(x, x, x), x)


@many
@hypothesis.given(data=st.data())
def test_layers_take_any_sizes(data):
    hiddens, heads = data.draw(st.sampled_from([(1, 1), (6, 3), (8, 2), (65, 5), (64, 64)]))
    batch, n_queries, n_keys = (data.draw(SIZES) for _ in range(3))
    sizes = [data.draw(st.integers(1, 40)) for _ in range(3)]
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    rows = (n_queries, n_keys, n_keys)
    inputs = [rng.standard_normal((batch, n, size)).astype("f4") for n, size in zip(rows, sizes)]
    lens = rng.integers(0, n_keys + 2, (batch,))
    layer = mha_c.MultiHeadAttention(hiddens, heads, 0.0, bias=data.draw(st.booleans()), rng=1)
    out = layer(*inputs, lens)
    assert out.shape == (batch, n_queries, hiddens) and np.isfinite(out).all()
    assert layer.attention_weights.shape == (batch, heads, n_queries, n_keys)
    if batch:
        np.testing.assert_array_equal(layer(*(x[-1:] for x in inputs), lens[-1:]), out[-1:])
