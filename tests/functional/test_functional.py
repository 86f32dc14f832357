"""mha_c.functional against plain NumPy: every option alone and together, on every instruction set."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mha_c
import needs
from checks import close, same
from mha_c import _reference
from mha_c import functional as F

EVERYTHING = {"return_weights": True, "return_lse": True}


def operands(rng, dtype, batch=2, heads=None, kv_heads=None, queries=7, keys=19, d=5, dv=6):
    """q, k, v, with a head axis if heads is given."""
    h, hkv = () if heads is None else (heads,), () if heads is None else (kv_heads or heads,)
    shapes = (batch, *h, queries, d), (batch, *hkv, keys, d), (batch, *hkv, keys, dv)
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in shapes)


def additive_operands(rng, dtype, **sizes):
    """q, k, v and the three parameters of an additive attention with 8 features."""
    q, k, v = operands(rng, dtype, **sizes)
    w_v, W_q, W_k = (rng.standard_normal(shape).astype(dtype) for shape in ((8,), (8, q.shape[-1]), (8, k.shape[-1])))
    return q, k, v, w_v, W_q, W_k


def check(found, expected, dtype, scale=1.0):
    for a, b in zip(found, expected):
        close(a, b, dtype, scale)


# --- All options --------------------------------------------------------------------------------


@st.composite
def cases(draw):
    heads, kv_heads = draw(st.sampled_from([(None, None), (1, 1), (3, 3), (4, 2), (4, 1)]))
    sizes = {
        "batch": draw(st.integers(1, 3)),
        "heads": heads,
        "kv_heads": kv_heads,
        "queries": draw(st.integers(1, 20)),
        "keys": draw(st.integers(1, 70)),
        "d": draw(st.integers(1, 40)),
        "dv": draw(st.integers(1, 40)),
    }
    options = {
        "lens": draw(st.sampled_from(["none", "1-D", "2-D"])),
        "keep_mask": draw(st.sampled_from([None, "(Q,K)", "full", "(Q,1)", "(1,K)", "per batch"])),
        "bias": draw(st.sampled_from([None, "(Q,K)", "full", "(1,1)", "-inf"])),
        "causal": draw(st.sampled_from([False, "top_left", "bottom_right"])),
        "window": draw(st.sampled_from([None, (0, 0), (3, None), (None, 2), (2, 5), [1, 1]])),
        "scale": draw(st.sampled_from([None, 0.25, 0.0, -1.0])),
        "empty_rows": draw(st.sampled_from(["zero", "uniform"])),
    }
    return sizes, options, draw(st.integers(0, 2**32 - 1))


def mask_shape(form, scores):
    batch, *_, queries, keys = scores
    middle = (1,) * (len(scores) - 3)
    return {
        "(Q,K)": (queries, keys),
        "full": scores,
        "(Q,1)": (queries, 1),
        "(1,K)": (1, keys),
        "(1,1)": (1, 1),
        "-inf": scores,
        "per batch": (batch, *middle, 1, keys),
    }[form]


def build(sizes, drawn, rng, dtype):
    """(valid_lens, keyword arguments) from what was drawn by name."""
    heads = () if sizes["heads"] is None else (sizes["heads"],)
    scores = (sizes["batch"], *heads, sizes["queries"], sizes["keys"])
    options = {name: drawn[name] for name in ("causal", "window", "scale", "empty_rows")}
    if drawn["keep_mask"]:
        options["keep_mask"] = rng.random(mask_shape(drawn["keep_mask"], scores)) < 0.7
    if drawn["bias"]:
        bias = rng.standard_normal(mask_shape(drawn["bias"], scores))
        if drawn["bias"] == "-inf":
            bias[rng.random(bias.shape) < 0.3] = -np.inf
            bias[0, ..., 0, :] = -np.inf  # an empty row
        options["bias"] = bias.astype(dtype)
    lens = None
    if drawn["lens"] != "none":
        shape = scores[:1] if drawn["lens"] == "1-D" else (scores[0], sizes["queries"])
        lens = rng.integers(-1, sizes["keys"] + 3, shape)
    return lens, options


@settings(max_examples=needs.draws(150))
@given(case=cases())
def test_dot_product_attention_with_all_options(isa, dtype, case):
    sizes, drawn, seed = case
    rng = np.random.default_rng(seed)
    q, k, v = operands(rng, dtype, **sizes)
    lens, options = build(sizes, drawn, rng, dtype)
    expected = _reference.dot_product_attention(q, k, v, lens, **options, **EVERYTHING)
    # Scores are sums of up to 40 products; scale -1 leaves them undivided.
    check(F.dot_product_attention(q, k, v, lens, **options, **EVERYTHING), expected, dtype, scale=40)
    same(F.dot_product_attention(q, k, v, lens, **options), F.dot_product_attention(
        q, k, v, lens, **options, **EVERYTHING)[0])  # fmt: skip


@settings(max_examples=needs.draws(100))
@given(case=cases())
def test_additive_attention_with_all_options(isa, dtype, case):
    sizes, drawn, seed = case
    sizes = {**sizes, "d": min(sizes["d"], 9)}
    rng = np.random.default_rng(seed)
    arguments = additive_operands(rng, dtype, **sizes)
    lens, options = build(sizes, drawn, rng, dtype)
    expected = _reference.additive_attention(*arguments, lens, **options, **EVERYTHING)
    check(F.additive_attention(*arguments, lens, **options, **EVERYTHING), expected, dtype, scale=40)


def test_a_row_that_a_bias_empties_has_the_mean_of_all_values(isa, dtype, rng):
    """Those behind the length too; the reference left them out as soon as one value was no number."""
    q, k, v = operands(rng, dtype, batch=1, queries=2, keys=4)
    v[0, 3] = np.inf
    bias = np.array([[-np.inf] * 4, [0] * 4], dtype)
    for empty_rows, wanted in (("uniform", np.inf), ("zero", 0)):
        for attention in (F.dot_product_attention, _reference.dot_product_attention):
            out = attention(q, k, v, [3], bias=bias, empty_rows=empty_rows)
            assert (out[0, 0] == wanted).all() and np.isfinite(out[0, 1]).all()


# --- Results ------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [None, 3])
def test_extras_follow_in_the_order_weights_lse(rng, dtype, heads):
    q, k, v = operands(rng, dtype, heads=heads)
    out, weights, lse = F.dot_product_attention(q, k, v, **EVERYTHING)
    head = () if heads is None else (heads,)
    assert out.shape == (2, *head, 7, 6) and weights.shape == (2, *head, 7, 19) and lse.shape == (2, *head, 7)
    same(F.dot_product_attention(q, k, v), out)
    for option, extra in (("return_weights", weights), ("return_lse", lse)):
        pair = F.dot_product_attention(q, k, v, **{option: True})
        assert isinstance(pair, tuple) and len(pair) == 2
        same(pair[0], out)
        same(pair[1], extra)
    assert all(array.flags.c_contiguous and array.flags.writeable for array in (out, weights, lse))


def test_projected_already(rng, dtype):
    q, k, v, w_v, W_q, W_k = additive_operands(rng, dtype)
    expected = F.additive_attention(q, k, v, w_v, W_q, W_k)
    for without_q, without_k in ((True, False), (False, True), (True, True)):
        q_in, W_q_in = (q @ W_q.T, None) if without_q else (q, W_q)
        k_in, W_k_in = (k @ W_k.T, None) if without_k else (k, W_k)
        close(F.additive_attention(q_in, k_in, v, w_v, W_q_in, W_k_in), expected, dtype)


def test_causal_true_needs_as_many_queries_as_keys(rng, dtype):
    q, k, v = operands(rng, dtype, queries=9, keys=9)
    both = [F.dot_product_attention(q, k, v, causal=corner) for corner in ("top_left", "bottom_right")]
    for causal in (True, np.True_):
        same(F.dot_product_attention(q, k, v, causal=causal), both[0])
    same(*both)
    for causal in (False, None, np.False_):
        same(F.dot_product_attention(q, k, v, causal=causal), F.dot_product_attention(q, k, v))
    with pytest.raises(ValueError, match=r"ambiguous for 8 queries and 9 keys: write 'top_left' .* or 'bottom_right'"):
        F.dot_product_attention(q[:, :8], k, v, causal=True)


def test_window_counted_along_the_diagonal():
    """ONNX's case: scores all equal, values 0..4, one to the left and two to the right."""
    v = np.arange(5.0).reshape(1, 5, 1)
    zeros = np.zeros((1, 5, 1))
    assert F.dot_product_attention(zeros, zeros, v, window=(1, 2)).ravel().tolist() == [1, 1.5, 2.5, 3, 3.5]
    last = F.dot_product_attention(zeros[:, :2], zeros, v, window=(0, 0), causal="bottom_right").ravel()
    assert last.tolist() == [3, 4]


@pytest.mark.parametrize("empty_rows", ["zero", "uniform"])
def test_no_keys_at_all(dtype, empty_rows):
    q, k, v = np.ones((2, 3, 4), dtype), np.ones((2, 0, 4), dtype), np.ones((2, 0, 5), dtype)
    out, weights, lse = F.dot_product_attention(q, k, v, empty_rows=empty_rows, **EVERYTHING)
    same(out, np.zeros((2, 3, 5), dtype))
    assert weights.shape == (2, 3, 0) and np.isneginf(lse).all()


@pytest.mark.parametrize("shape", ["batch", "queries", "d", "dv", "all"])
def test_zero_sizes(rng, dtype, shape):
    sizes = {name: 0 for name in ("batch", "queries", "d", "dv") if shape in (name, "all")}
    q, k, v = operands(rng, dtype, **sizes)
    expected = _reference.dot_product_attention(q, k, v, **EVERYTHING)
    found = F.dot_product_attention(q, k, v, **EVERYTHING)
    assert [a.shape for a in found] == [a.shape for a in expected]
    check(found, expected, dtype)


# --- Dropout ------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", ["dot", "additive"])
def test_an_int_as_rng_repeats_the_choice(rng, dtype, function):
    if function == "dot":
        arguments, call = operands(rng, dtype, heads=2), F.dot_product_attention
    else:
        arguments, call = additive_operands(rng, dtype), F.additive_attention
    first = call(*arguments, dropout=0.5, rng=3)
    same(call(*arguments, dropout=0.5, rng=np.int64(3)), first)
    assert (call(*arguments, dropout=0.5, rng=4) != first).any()
    assert (call(*arguments, dropout=0.5) != call(*arguments, dropout=0.5)).any()
    same(call(*arguments, dropout=0.0, rng=3), call(*arguments))
    out, weights = call(*arguments, dropout=0.5, rng=3, return_weights=True)
    same(out, first)
    same(weights, call(*arguments, return_weights=True)[1])  # before dropout
    assert not call(*arguments, dropout=1.0, rng=3).any()


def test_a_generator_is_asked_for_one_number(rng, dtype):
    arguments = operands(rng, dtype)
    one, other = np.random.default_rng(5), np.random.default_rng(5)
    seed = int(other.integers(0, 2**64, dtype=np.uint64))
    same(F.dot_product_attention(*arguments, dropout=0.5, rng=one), F.dot_product_attention(
        *arguments, dropout=0.5, rng=seed))  # fmt: skip
    F.dot_product_attention(*arguments, rng=one)  # nothing to drop: nothing is drawn
    assert one.bit_generator.state == other.bit_generator.state


def test_dropped_weights_are_the_others_divided_by_the_rest(rng, dtype):
    q, k, _ = operands(rng, dtype, heads=2)
    unit = np.broadcast_to(np.eye(19, dtype=dtype), (2, 2, 19, 19))
    used, weights = F.dot_product_attention(q, k, unit, dropout=0.25, rng=1, return_weights=True)
    kept = used != 0
    close(used[kept], weights[kept] / 0.75, dtype)
    v = rng.standard_normal((2, 2, 19, 6)).astype(dtype)
    expected = _reference.dot_product_attention(q, k, v, dropout=0.25, kept=kept)
    close(F.dot_product_attention(q, k, v, dropout=0.25, rng=1), expected, dtype)


# --- merge --------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [None, 2])
@pytest.mark.parametrize("lens", [None, [19, 3]])
def test_merge_joins_disjoint_keys(rng, dtype, heads, lens):
    q, k, v = operands(rng, dtype, heads=heads)
    q *= 8  # so that the two parts weigh differently
    whole = F.dot_product_attention(q, k, v, lens, return_lse=True)
    cut = 6
    a = F.dot_product_attention(q, k[..., :cut, :], v[..., :cut, :], lens, return_lse=True)
    rest = None if lens is None else np.array(lens) - cut
    b = F.dot_product_attention(q, k[..., cut:, :], v[..., cut:, :], rest, return_lse=True)
    check(mha_c.functional.merge(*a, *b), whole, dtype, scale=40)
    check(mha_c.functional.merge(*b, *a), whole, dtype, scale=40)


def test_merge_is_exact_where_a_side_is_empty(rng, dtype):
    out, lse = rng.standard_normal((2, 3, 4)).astype(dtype), rng.standard_normal((2, 3)).astype(dtype)
    out[0, 0] = -0.0
    nothing, empty = np.full_like(out, np.nan), np.full_like(lse, -np.inf)
    for merged in (F.merge(out, lse, nothing, empty), F.merge(nothing, empty, out, lse)):
        assert merged[0].tobytes() == out.tobytes() and merged[1].tobytes() == lse.tobytes()
    both = F.merge(nothing, empty, nothing, empty)
    same(both[0], np.zeros_like(out))
    same(both[1], empty)


def test_merge_at_the_ends_of_the_number_range(dtype):
    out = np.array([[[1.0], [2.0]]], dtype)
    huge = np.array([[1e30, -1e30]], dtype)
    merged, lse = F.merge(out, huge, -out, -huge)
    same(merged, np.array([[[1.0], [-2.0]]], dtype))
    same(lse, np.array([[1e30, 1e30]], dtype))
    halves, lse = F.merge(out, np.zeros((1, 2), dtype), -out, np.zeros((1, 2), dtype))
    same(halves, np.zeros((1, 2, 1), dtype))
    close(lse, np.full((1, 2), np.log(2)), dtype)
    assert np.isnan(F.merge(out, np.full((1, 2), np.nan, dtype), out, huge)[0]).all()
