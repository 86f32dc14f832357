"""What the compiled module `_core` returns: any layout and type in, the right shapes, types and bits out."""

import gc
import pickle

import numpy as np
import pytest

from binding_calls import (
    ARRAYS,
    DV,
    F32,
    KEPT,
    RECOMPUTE,
    B,
    D,
    H,
    K,
    Q,
    attention,
    flat,
    layer,
    linear,
    numbers,
    plain_layer,
    projection,
    saved,
    softmax,
)
from checks import MANY, close, same
from core_calls import core as _core
from layouts import LAYOUTS
from mha_c import _reference
from threads import in_threads

# --- Array arguments: layout ----------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("argument", ARRAYS)
def test_layout_changes_no_bit(argument, layout):
    call, good = ARRAYS[argument]
    base = [call(good)]
    good = good.astype(F32)
    strange = LAYOUTS[layout](good)
    assert np.array_equal(strange, good)
    strange.flags.writeable = False
    before = strange.tobytes()
    changed = [call(strange)]
    assert strange.tobytes() == before
    for a, b in zip(flat(base), flat(changed)):
        assert type(b) is np.ndarray and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def test_broadcast_inputs():
    q, k, v = (np.broadcast_to(numbers(1, n, D), (5, n, D)) for n in (Q, K, K))
    out = _core.attention_forward(q, k, v)[0]
    assert all(np.array_equal(out[0], item) for item in out)
    assert np.array_equal(out, _core.attention_forward(q.copy(), k.copy(), v.copy())[0])


@pytest.mark.parametrize("rows", [(), (3,), (2, 3), (2, 1, 3), (0, 3), (2, 3, 4, 2, 2)])
def test_linear_takes_any_leading_axes(rows, dtype):
    weight, x = numbers(8, 5, dtype=dtype), numbers(*rows, 5, dtype=dtype)
    packed, bias = _core.pack_linear(weight), numbers(8, dtype=dtype)
    y = _core.linear(x, (packed, bias, (8, 5)))
    assert y.shape == (*rows, 8) and y.dtype == dtype
    close(y, x @ weight.T + bias, dtype, scale=4)  # sums of five terms, some above 1
    assert np.array_equal(y, _core.linear(np.asfortranarray(x), (packed, bias, (8, 5))))


def test_packed_weights_are_aligned_and_read_only(dtype):
    for shape in (1, 1), (8, 5), (0, 3), (3, 0), (33, 65):
        packed = _core.pack_linear(numbers(*shape, dtype=dtype))
        assert packed.ndim == 2 and packed.dtype == dtype and packed.ctypes.data % 64 == 0
        assert not packed.flags.writeable


@pytest.mark.parametrize("shape", [(64, 5), (128, 3), (3, 0), (48, 48), (1, 1)])
def test_weights_packed_for_another_instruction_set(shape, dtype):
    """Of as many numbers, as a rule: refused where panels are of another width, the same where they are not."""
    isas = [name for name, available in _core.isas() if available]
    weight, x = numbers(*shape, dtype=dtype), numbers(4, shape[1], dtype=dtype)
    packed = {}
    for isa in isas:
        _core.set_isa(isa)
        packed[isa] = _core.pack_linear(weight)
    for isa in isas:
        _core.set_isa(isa)
        own = _core.linear(x, (packed[isa], None, shape))
        for other in packed.values():
            if other.shape[1] == packed[isa].shape[1]:
                same(_core.linear(x, (other, None, shape)), own)
            else:
                with pytest.raises(ValueError, match=f"packed for the active instruction set .{isa}"):
                    _core.linear(x, (other, None, shape))


# --- Sizes at the edges --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero", [*"bqkdvh", "bqkdvh", "kd"])
def test_zero_sizes(zero, dtype):
    b, h, q, k, d, v = (0 if name in zero else size for name, size in zip("bhqkdv", (2, 2, 4, 6, 4, 3)))
    arrays = (numbers(b, h, *rest, dtype=dtype) for rest in ((q, d), (k, d), (k, v)))
    out, weights, lse = _core.attention_forward(*arrays, return_weights=True, return_lse=True)
    assert (out.shape, weights.shape, lse.shape) == ((b, h, q, v), (b, h, q, k), (b, h, q))
    assert np.all(lse == -np.inf) if k == 0 else np.all(np.isfinite(lse))
    assert np.all(weights == 1 / 6) or d or not k
    assert np.all(out == 0) or k


@pytest.mark.parametrize("zero", ["", *"bhqkd", "bhqkd"])
def test_copies_of_operands(zero, dtype):
    b, h, q, k, d = (0 if name in zero else size for name, size in zip("bhqkd", (2, 3, 4, 6, 5)))
    given = numbers(b, q, h, d, dtype=dtype).swapaxes(1, 2), numbers(b, 1, k, d, dtype=dtype)
    for copy, x in zip(_core.copy_operands(*given), given):
        assert np.array_equal(copy, x) and copy.dtype == x.dtype and copy.flags.c_contiguous
        assert not np.shares_memory(copy, x)


@pytest.mark.parametrize("zero", ["b", "q", "k", "d", "v", "bqkdv"])
def test_zero_sizes_of_layers(zero, dtype):
    b, q, k, d, v = (0 if name in zero else size for name, size in zip("bqkdv", (2, 30, 40, 4, 3)))
    arrays = (numbers(b, *rest, dtype=dtype) for rest in ((q, d), (k, d), (k, v)))
    out, kept = _core.layer_forward(*arrays, None, (None,) * 4, None, 1, "uniform", 0.0, 0)
    assert out.shape == (b, q, v)
    assert _core.saved_weights(kept).shape == (b, 1, q, k)


def huge(*shape):
    return np.broadcast_to(np.zeros(1, F32), shape)


def empty(*shape):
    return np.zeros(shape, F32)


@pytest.mark.parametrize(
    "call",
    [
        lambda: _core.attention_forward(huge(2**42, 1, 64), huge(2**42, 1, 64), huge(2**42, 1, 64)),
        lambda: attention(q=huge(1, 2**50, 1), k=huge(1, 2**50, 1), v=huge(1, 2**50, 1), return_weights=True),
        lambda: attention(q=huge(2**30, 2**30, 1), k=huge(2**30, 2**30, 1), v=huge(2**30, 2**30, 1)),
        lambda: plain_layer(queries=huge(1, 2**50, 2), keys=huge(1, 2**50, 2), values=huge(1, 2**50, 2)),
        lambda: _core.copy_operands(huge(2**20, 2**20, 2**20, 4), huge(1, 1, 1, 4)),
        lambda: linear(huge(2**55, 5), projection(8, 5)),
        lambda: softmax(huge(2**20, 2**20, 2**10)),
    ],
)
def test_huge_shapes_fail_fast(call):
    """More than addresses can name: some systems promise any memory, and end who takes it (NumPy 2.5 on 3.15t)."""
    with pytest.raises((MemoryError, ValueError)):
        call()


@pytest.mark.parametrize(
    ("shape", "call"),
    [
        ((MANY, 1, 0), lambda n: _core.attention_forward(empty(n, 1, 0), empty(n, 0, 0), empty(n, 0, 0))),
        ((1, MANY, 0), lambda n: _core.attention_forward(empty(1, n, 0), empty(1, 1, 0), empty(1, 1, 0))),
        ((MANY, 0, 3), lambda n: _core.attention_forward(empty(n, 0, 3), empty(n, 0, 3), empty(n, 0, 3))),
        ((1, MANY, 0, 3), lambda n: _core.copy_operands(empty(1, n, 0, 3), empty(1, 1, 0, 3))),
        ((1, 2, MANY, 0), lambda n: _core.copy_operands(empty(1, 2, n, 0), empty(1, 2, n, 0))),
        ((MANY, 0, 4), lambda n: softmax(empty(n, 0, 4))),
        ((MANY, 4, 0), lambda n: softmax(empty(n, 4, 0))),
        ((MANY, 0), lambda n: linear(empty(n, 0), (_core.pack_linear(empty(0, 0)), None, (0, 0)))),
    ],
)
def test_any_count_of_rows_without_numbers(shape, call):
    """No memory stands behind such an array, so its rows are not even counted."""
    result = call(MANY)
    assert (result[0] if isinstance(result, tuple) else result).shape == shape


def test_any_count_of_rows_without_numbers_backward():
    q, k = empty(MANY, 0, 0), empty(MANY, 1, 0)
    grads = _core.attention_backward(q, q, (empty(MANY, 0), empty(MANY, 0)), q, k, k)
    assert [grad.shape for grad in grads[:3]] == [q.shape, k.shape, k.shape]


def test_saved_numbers_are_not_trusted_for_memory():
    assert np.array_equal(saved(7, np.array([2**62, -(2**62)])), saved(7, np.array([40, 0])))
    assert saved(3, RECOMPUTE[3][:, ::2]).shape == (B, H, 30, 20)
    assert np.array_equal(saved(2, np.asfortranarray(RECOMPUTE[2])), _core.saved_weights(RECOMPUTE))


def test_weights_of_another_isa_are_a_runtime_error():
    with pytest.raises(RuntimeError, match="computed with 'pentium' cannot be rebuilt to the bit"):
        saved(0, "pentium")


def last_axis_sums_to_one(weights):
    return np.allclose(weights.sum(-1), 1, atol=1e-5)


@pytest.mark.parametrize("sizes", [(4, 6), (30, 40)])
@pytest.mark.parametrize("lens", ["none", "per item", "per query"])
@pytest.mark.parametrize("projected", ["q and k", "q", "k", "neither"])
@pytest.mark.parametrize("scores", ["dot", "additive"])
def test_saved_weights_to_the_bit(isa, sizes, lens, projected, scores):
    """Weights rebuilt later are those that attention itself gives for the same projected q and k."""
    q, k = sizes
    queries, keys, values = numbers(B, q, 8), numbers(B, k, 8).copy(), numbers(B, k, 4)
    lens = {"none": None, "per item": [k - 3, 0], "per query": np.arange(B * q).reshape(B, q) % (k - 3)}[lens]
    if lens is not None:
        keys[:, k - 2 :] = np.nan  # beyond all lengths: never read, so not kept either
    weight = _core.pack_linear(numbers(8, 8)), numbers(8), (8, 8)
    W_q, W_k = (weight if side in projected.split(" and ") else None for side in "qk")
    heads, w_v = (2, None) if scores == "dot" else (1, numbers(8))

    out, kept = _core.layer_forward(queries, keys, values, lens, (W_q, W_k, None, None), w_v, heads, "zero", 0.0, 0)
    kept = pickle.loads(pickle.dumps(kept))
    assert (kept[1] is not None) == (heads * q * k <= 8 * (q + k))

    def split(x):
        return x.reshape(B, -1, heads, x.shape[-1] // heads).transpose(0, 2, 1, 3)

    q_used = queries if W_q is None else _core.linear(queries, W_q)
    k_used = keys if W_k is None else _core.linear(keys, W_k)
    expected, weights, _ = _core.attention_forward(
        split(q_used), split(k_used), split(values), w_v, lens, return_weights=True
    )
    assert np.array_equal(_core.saved_weights(kept), weights)
    assert np.array_equal(split(out), expected)


def test_saved_weights_are_those_of_the_call():
    """Whatever happens to the inputs afterwards, and to what was read before."""
    queries, keys, values, w_v = (numbers(*shape).copy() for shape in ((B, 30, 5), (B, 40, 5), (B, 40, 5), (5,)))
    _, kept = plain_layer(queries=queries, keys=keys, values=values, w_v=w_v)
    first = _core.saved_weights(kept)
    for array in queries, keys, values, w_v:
        array[...] = 0
    second = _core.saved_weights(kept)
    assert np.array_equal(first, second) and first is not second
    first[...] = 0
    assert np.array_equal(_core.saved_weights(kept), second)
    _core.saved_weights(KEPT)[...] = 0
    assert last_axis_sums_to_one(_core.saved_weights(KEPT))


# --- valid_lens: one meaning, many types -------------------------------------------------------------------------

SAME_LENGTHS = {
    "tuple": (3, 2),
    "floats": [3.0, 2.0],
    "rounded up": [2.5, 1.001],
    "numpy ints": [np.int64(3), np.uint8(2)],
    "strided": np.array([3, 9, 2, 9])[::2],
    "swapped": np.array([3, 2], ">i8"),
    "unaligned": LAYOUTS["unaligned"](np.array([3, 2])),
    "read-only": np.broadcast_to(np.array([3, 2]), (2,)),
    "fortran": np.asfortranarray([[3] * Q, [2] * Q]),
    "array-like": memoryview(np.array([3, 2], "i2")),
    **{code: np.array([3, 2], code) for code in "i1 i2 i4 i8 u1 u2 u4 u8 q Q f2 f4 g".split()},
}


@pytest.mark.parametrize("case", SAME_LENGTHS)
def test_lengths_of_any_type(case):
    expected = attention(valid_lens=[3, 2])[0]
    assert np.array_equal(attention(valid_lens=SAME_LENGTHS[case])[0], expected)


@pytest.mark.parametrize(
    "beyond",
    [
        [K, K], [K + 1, 2**31], [2**63 - 1, 2**63], [2**64, 10**40], np.array([2**64 - 1, 2**63], "u8"),
        [[2**70, 10**40] * (Q // 2)] * B,
        [1e30, 5.5], [1e300, 2.0**63], np.array([2**31, 2**32 - 1], "u4"), [[10**9] * Q] * B,
    ],
)  # fmt: skip
def test_lengths_beyond_the_keys_hide_nothing(beyond):
    assert np.array_equal(attention(valid_lens=beyond)[0], attention()[0])


@pytest.mark.parametrize("below", [[0, 0], [-1, -(2**31)], [-(2**63), -(10**40)], [-1e300, -0.5], [-(2.0**63), -0.0]])
@pytest.mark.parametrize("empty_rows", ["zero", "uniform"])
def test_lengths_of_zero_or_less_are_empty_rows(below, empty_rows):
    out, weights, lse = attention(valid_lens=below, empty_rows=empty_rows, return_weights=True, return_lse=True)
    assert np.all(weights == (F32(1 / K) if empty_rows == "uniform" else 0))
    assert np.all(lse == -np.inf)
    assert np.allclose(out, numbers(B, K, DV).mean(1, keepdims=True) if empty_rows == "uniform" else 0, atol=1e-6)


def test_lengths_of_no_items():
    assert _core.masked_softmax(numbers(0, Q, K), [], "zero").shape == (0, Q, K)
    assert attention(q=numbers(B, 0, D), valid_lens=np.zeros((B, 0)))[0].shape == (B, 0, DV)


# --- Masks and options against the textbook --------------------------------------------------------------------------

MASKS = [(Q, K), (1, K), (Q, 1), (1, 1), (B, 1, 1, K), (1, 4, Q, K), (B, 4, Q, 1), (B, 4, Q, K)]


@pytest.mark.parametrize("shape", MASKS)
@pytest.mark.parametrize("kind", ["keep_mask", "bias"])
def test_masks_broadcast_as_numpy_does(shape, kind, dtype, rng):
    q, k, v = (numbers(B, *rest, dtype=dtype) for rest in ((4, Q, D), (2, K, D), (2, K, DV)))
    mask = rng.random(shape) < 0.6 if kind == "keep_mask" else rng.standard_normal(shape).astype(dtype)
    full = np.ascontiguousarray(np.broadcast_to(mask, (B, 4, Q, K)))
    expected = _core.attention_forward(q, k, v, **{kind: full}, return_weights=True)
    for laid in mask, np.asfortranarray(mask), np.broadcast_to(mask, (B, 4, Q, K)), LAYOUTS["all reversed"](mask):
        result = _core.attention_forward(q, k, v, **{kind: laid}, return_weights=True)
        assert np.array_equal(result[0], expected[0]) and np.array_equal(result[1], expected[1])
    exact = _reference.dot_product_attention(q, k, v, **{kind: mask})
    close(expected[0], exact, dtype, scale=2)


def test_a_rank_three_mask_is_per_batch_item():
    keep = np.zeros((B, Q, K), bool)
    keep[1] = True
    out = attention(keep_mask=keep)[0]
    assert np.all(out[0] == 0) and np.array_equal(out[1], attention()[0][1])


OPTIONS = [
    {"w_v": numbers(D)},
    {"causal": "top_left"},
    {"causal": "bottom_right", "window_left": 1, "window_right": 0},
    {"window_left": 0, "window_right": 2, "valid_lens": [5, 0], "empty_rows": "uniform"},
    {"scale": -0.25, "bias": numbers(Q, K)},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_options_reach_the_core(options):
    options = dict(options)
    found = attention(**options, return_weights=True, return_lse=True)
    left, right, w_v = (
        options.pop(name, default) for name, default in (("window_left", -1), ("window_right", -1), ("w_v", None))
    )
    options["window"] = tuple(None if side < 0 else side for side in (left, right))
    operands = numbers(B, Q, D), numbers(B, K, D), numbers(B, K, DV)
    function = _reference.dot_product_attention if w_v is None else _reference.additive_attention
    exact = function(*operands, *([] if w_v is None else [w_v]), **options, return_weights=True, return_lse=True)
    for a, b in zip(found, exact):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    assert not np.array_equal(found[0], attention()[0])


def test_seed_and_dropout_reach_the_core():
    draws = [attention(dropout=0.5, seed=seed)[0] for seed in (0, 1, 2**64 - 1, 0)]
    assert np.array_equal(draws[0], draws[3])
    assert not np.array_equal(draws[0], draws[1]) and not np.array_equal(draws[0], draws[2])
    assert np.all(attention(dropout=1)[0] == 0)


def test_one_layer_in_many_threads():
    """The same call from eight threads at once gives the bits of a call alone."""
    expected, kept = layer()
    wrong = []

    def work():
        for _ in range(200):
            out, mine = layer()
            if not np.array_equal(out, expected) or not np.array_equal(_core.saved_weights(mine), kept[1]):
                wrong.append(out)

    in_threads(*[work] * 8)
    assert not wrong


def test_a_packed_weight_lives_as_long_as_it_is_used():
    packed = _core.pack_linear(numbers(64, 64))
    before = packed.copy()
    rest = [_core.pack_linear(numbers(64, 64) + i) for i in range(50)]
    del rest
    gc.collect()
    assert np.array_equal(packed, before)


def test_isas_say_what_is():
    names = [name for name, _ in _core.isas()]
    assert names[0] == "scalar" and _core.isa() in names
