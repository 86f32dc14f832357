"""Inputs that are odd but have one right answer, and a few that are refused: what no other file tests.

The rows of any such list (types, byte orders, strides, shapes, lengths, masks, values, objects, state) are spread over
test_arguments.py and test_binding.py (what is refused, and in which words), test_outputs.py, test_properties.py and
test_binding_results.py (arrangements of memory, lengths of any type, empty and huge sizes), test_functional.py (masks),
test_layer_constructors.py, test_layers.py, test_layer_calls.py and test_loading.py (constructors, parameters, copies,
state), test_threads_chosen.py (threads), tests/c/test_values.c (NaN and infinity).
"""

import mmap
import multiprocessing.shared_memory
import pickle
import sys

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import mha_c
import needs
from checks import close, same
from mha_c import _reference
from mha_c import functional as F

B, Q, K, D = 2, 3, 5, 4


@pytest.fixture
def qkv(rng, dtype):
    return [rng.standard_normal((B, n, D)).astype(dtype) for n in (Q, K, K)]


# --- Types ----------------------------------------------------------------------------------------


class Number:
    """An element of an object array: whoever asks it for its value is noted."""

    def __init__(self):
        self.asked = 0

    def value(self, *others):
        self.asked += 1
        return 1.0

    __float__ = __mul__ = __rmul__ = __add__ = __radd__ = __lt__ = __gt__ = value


def test_elements_of_object_arrays_are_not_asked(qkv):
    element = Number()
    objects = np.full((B, K, D), element, object)
    for call in (F.dot_product_attention, mha_c.DotProductAttention(0), mha_c.MultiHeadAttention(4, 2, 0)):
        with pytest.raises(TypeError, match=r"dtype object|got object"):
            call(qkv[0], objects, qkv[2])
    with pytest.raises(TypeError, match="valid_lens has dtype object"):
        F.dot_product_attention(*qkv, np.full(B, element, object))
    assert element.asked == 0


def test_a_type_with_metadata_is_that_type(qkv, dtype):
    noted = np.dtype(dtype, metadata={"unit": "volt"})
    found = F.dot_product_attention(*(x.astype(noted) for x in qkv))
    assert found.dtype == dtype
    same(found, F.dot_product_attention(*qkv))


def test_bytes_in_another_order_are_the_same_type(qkv, dtype):
    (q, k, v), other = qkv, dtype.newbyteorder()
    w_v, W = np.ones(7, dtype), np.ones((7, D), dtype)
    layer = mha_c.MultiHeadAttention(D, D, D, 4, 2, 0, rng=0)
    a = F.dot_product_attention(q, k, v, return_lse=True)
    for call, given in (
        (lambda x: F.additive_attention(x, k, v, w_v, W, W), q),
        (lambda x: F.additive_attention(q, k, v, w_v, W, x), W),
        (lambda x: F.merge(a[0], a[1], x, a[1])[0], a[0]),
        (lambda x: layer(q, layer.project(k, x)), v),
        (lambda x: layer(q, q, x, cache=layer.new_cache(B, Q)), q),
        (lambda x: mha_c.KernelAttention()(q, k, x), v),
        (lambda x: mha_c.variants.scaled_dot_product_attention(q, x, v)[0], k),
    ):
        same(call(given.astype(other)), call(given))


def test_torchs_numbers_of_8_bits():
    torch = needs.module("torch")
    tensor = torch.zeros(B, K, D).to(torch.float8_e4m3fn)
    with pytest.raises(TypeError, match=r"queries.*float8_e4m3fn"):
        mha_c.DotProductAttention(0)(tensor, tensor, tensor)


# --- Memory of other kinds ------------------------------------------------------------------------


def test_arrays_over_other_memory(qkv, dtype, tmp_path):
    expected = F.dot_product_attention(*qkv)
    mapped, in_bytes = [], []
    for i, x in enumerate(qkv):
        x.tofile(tmp_path / str(i))
        mapped.append(np.memmap(tmp_path / str(i), dtype, "r", shape=x.shape))
        in_bytes.append(np.frombuffer(bytearray(x.tobytes()), dtype).reshape(x.shape))
    for arrays in mapped, in_bytes:
        found = F.dot_product_attention(*arrays)
        assert type(found) is np.ndarray
        same(found, expected)
    shared = multiprocessing.shared_memory.SharedMemory(create=True, size=qkv[1].nbytes)
    try:
        keys = np.ndarray(qkv[1].shape, dtype, shared.buf)
        keys[...] = qkv[1]
        same(F.dot_product_attention(qkv[0], keys, qkv[2]), expected)
        del keys
    finally:
        shared.close()
        shared.unlink()


def test_strides_beyond_32_bits_on_axes_of_one(qkv):
    q, k, v = (x[:1] for x in qkv)
    far = [as_strided(x, strides=(2**40, *x.strides[1:])) for x in (q, k, v)]
    same(F.dot_product_attention(*far, [2]), F.dot_product_attention(q, k, v, [2]))
    one = [as_strided(x[:, :1], strides=(2**40, -(2**50), x.strides[2])) for x in (q, k, v)]
    same(F.dot_product_attention(*one), F.dot_product_attention(*(x[:, :1] for x in (q, k, v))))


@pytest.mark.skipif(sys.platform == "win32", reason="memory without pages is got otherwise there")
def test_rows_more_than_32_bits_of_numbers_apart(rng):
    """Batch items, then rows, 2**31 + 64 numbers apart, in memory of which hardly a page exists."""
    step = 2**31 + 64
    try:
        memory = np.frombuffer(mmap.mmap(-1, 4 * step + 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    except (OSError, ValueError, MemoryError):
        pytest.skip("needs 8 GiB of addresses")
    wide = as_strided(memory[:4].view("f4"), (2, 1, 64), (4 * step, 4, 4), writeable=True)
    wide[...] = rng.standard_normal((2, 1, 64))
    assert wide[1, 0, 0] == memory[4 * step : 4 * step + 4].view("f4")[0]
    near = wide.copy()
    same(F.dot_product_attention(wide, wide, wide), F.dot_product_attention(near, near, near))
    rows = wide.swapaxes(0, 1)
    same(F.dot_product_attention(rows, rows, rows), F.dot_product_attention(*(rows.copy(),) * 3))
    layer = mha_c.MultiHeadAttention(64, 2, 0, rng=0)
    same(layer(rows, rows, rows), layer(*(rows.copy(),) * 3))


@pytest.mark.skipif(not needs.NIGHTLY, reason="8 GiB of addresses: make nightly")
@pytest.mark.parametrize("which", ["queries", "keys"])
def test_arrays_of_more_than_32_bits_of_numbers(which, rng):
    """Real arrays, not strides: 2**31 zeros and some numbers behind them.  Zeros that nobody wrote take no memory."""
    many, features = 2**25 + 3, 64
    assert many * features > 2**31
    large, few = np.zeros((1, many, features), np.float32), rng.standard_normal((1, 5, features)).astype("f4")
    large[0, -3:] = rng.standard_normal((3, features))
    end = large[:, -3:].copy()
    if which == "queries":
        v = rng.standard_normal((1, 5, 1)).astype("f4")
        out = F.dot_product_attention(large, few, v)
        same(out[:, -3:], F.dot_product_attention(end, few, v))
        same(out[:, :9], F.dot_product_attention(large[:, :9].copy(), few, v))
    else:
        v = np.zeros((1, many, 1), np.float32)
        v[0, -3:, 0] = 1, 2, 4
        out = F.dot_product_attention(few, large, v, causal="bottom_right", window=(0, 0))
        last, of_last = large[:, -5:].copy(), v[:, -5:].copy()
        same(out, F.dot_product_attention(few, last, of_last, causal=True, window=(0, 0)))


def test_broadcast_keys_of_every_count(rng, isa):
    """Stride 0 along the batch, and along the keys, for every count of them up to 130."""
    q = rng.standard_normal((3, 2, 8)).astype("f4")
    for keys in range(1, 131):
        one = rng.standard_normal((1, keys, 8)).astype("f4")
        for k in (np.broadcast_to(one, (3, keys, 8)), np.broadcast_to(one[:, :1], (3, keys, 8))):
            same(F.dot_product_attention(q, k, k), F.dot_product_attention(q, k.copy(), k.copy()))


# --- Sizes ----------------------------------------------------------------------------------------

LONG = (65535, 65536, 65537) if needs.NIGHTLY else ()


# A score is a sum of terms divided by the root of their number, an output an average: neither rounds worse than in
# small calls, for which `close` is made.
@pytest.mark.parametrize("keys", [255, 256, 257, 383, 384, 385, 511, 512, 513, 1023, 1024, 1025, *LONG])
def test_keys_around_the_sizes_of_blocks(rng, isa, dtype, keys):
    q, k, v = (rng.standard_normal((1, n, 8)).astype(dtype) for n in (3, keys, keys))
    lens = [keys - 1]
    close(F.dot_product_attention(q, k, v, lens), _reference.dot_product_attention(q, k, v, lens), dtype)


@pytest.mark.parametrize("size", [192, 255, 256, 257, 1000])
def test_long_vectors(rng, isa, dtype, size):
    q, k, v = (rng.standard_normal((1, n, size)).astype(dtype) for n in (3, 7, 7))
    close(F.dot_product_attention(q, k, v), _reference.dot_product_attention(q, k, v), dtype)


# --- Masks ----------------------------------------------------------------------------------------


def test_a_bias_hides_only_at_minus_infinity(qkv, dtype):
    """A row of the lowest finite number is a row of equal scores; a row of -inf is empty."""
    q, k, v = qkv
    for lowest in (np.finfo(dtype).min, dtype.type(-1e30)):
        out, weights = F.dot_product_attention(q, k, v, bias=np.full((Q, K), lowest), return_weights=True)
        # A score of a few units is less than the last digit of such a bias.
        assert np.all(weights == dtype.type(1) / dtype.type(K))
        close(out, np.broadcast_to(v.mean(1, keepdims=True), out.shape), dtype)
    empty, weights, lse = F.dot_product_attention(
        q, k, v, bias=np.full((Q, K), -np.inf, dtype), return_weights=True, return_lse=True
    )
    assert not empty.any() and not weights.any() and np.isneginf(lse).all()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_makes_a_row_nan_stays_in_that_row(qkv, dtype, value):
    bias = np.zeros((Q, K), dtype)
    expected, weights = F.dot_product_attention(*qkv, bias=bias, return_weights=True)
    bias[1, 2] = value
    found, found_weights = F.dot_product_attention(*qkv, bias=bias, return_weights=True)
    assert np.isnan(found[:, 1]).all() and np.isnan(found_weights[:, 1]).any()
    same(np.delete(found, 1, 1), np.delete(expected, 1, 1))
    same(np.delete(found_weights, 1, 1), np.delete(weights, 1, 1))


def test_every_mask_binds_on_its_own(rng, isa):
    """Lengths, causal corner, window, keep_mask and bias at once: each hides a key that nothing else hides."""
    n = 12
    q, k, v = (rng.standard_normal((1, n, D)) for _ in range(3))
    keep, bias = np.ones((n, n), bool), np.zeros((n, n))
    keep[9, 6], bias[9, 7] = False, -np.inf
    options = {"valid_lens": [9], "causal": "top_left", "window": (4, None), "keep_mask": keep, "bias": bias}
    _, weights = F.dot_product_attention(q, k, v, return_weights=True, **options)
    # Row 9: the window begins at 5; 6 by keep_mask, 7 by bias; 9 by the length.  Row 3: 4 and more by causal.
    assert np.nonzero(weights[0, 9])[0].tolist() == [5, 8]
    assert np.nonzero(weights[0, 3])[0].tolist() == [0, 1, 2, 3]
    without = {"valid_lens": (9, 9), "causal": (3, 4), "window": (9, 4), "keep_mask": (9, 6), "bias": (9, 7)}
    for name, (row, key) in without.items():
        fewer = {option: value for option, value in options.items() if option != name}
        _, seen = F.dot_product_attention(q, k, v, return_weights=True, **fewer)
        assert seen[0, row, key] > 0, name


# --- Scale ----------------------------------------------------------------------------------------


def test_odd_scales(qkv, dtype):
    q, k, v = qkv
    _, weights = F.dot_product_attention(q, k, v, scale=0, return_weights=True)
    assert np.all(weights == dtype.type(1) / dtype.type(K))
    same(F.dot_product_attention(q, k, v, scale=-0.5), F.dot_product_attention(-q, k, v, scale=0.5))
    tiny = F.dot_product_attention(q, k, v, scale=1e-320)  # subnormal, or 0 in float32
    close(tiny, np.broadcast_to(v.mean(1, keepdims=True), tiny.shape), dtype)
    with pytest.raises(ValueError, match="scale must be finite"):
        F.dot_product_attention(q, k, v, scale=np.inf)


# --- Objects --------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
def test_matrices_have_two_axes_for_ever():
    matrix = np.matrix(np.ones((K, D)))
    with pytest.raises(mha_c.ShapeError, match=r"queries .*\(5, 4\)"):
        mha_c.DotProductAttention(0)(matrix, matrix, matrix)
    with pytest.raises(mha_c.ShapeError, match=r"valid_lens has shape \(1, 2\)"):
        F.dot_product_attention(*(np.ones((B, n, D)) for n in (Q, K, K)), np.matrix([1, 2]))


class Watching(np.ndarray):
    """A subclass with hooks of its own: none may run while others wait for the core, nor decide what comes back."""

    hooks = 0

    def __array_ufunc__(self, *args, **kwargs):
        Watching.hooks += 1
        raise AssertionError("__array_ufunc__")

    def __array_function__(self, *args, **kwargs):
        Watching.hooks += 1
        raise AssertionError("__array_function__")


def test_subclasses_are_base_arrays(qkv):
    expected = F.dot_product_attention(*qkv, [2, 4])
    found = F.dot_product_attention(*(x.view(Watching) for x in qkv), np.array([2, 4]).view(Watching))
    assert type(found) is np.ndarray and Watching.hooks == 0
    same(found, expected)


class Arraylike:
    """What __array__ does is up to the test."""

    def __init__(self, answers):
        self.answers = iter(answers)

    def __array__(self, dtype=None, copy=None):
        return next(self.answers)()


def test_what_array_likes_may_do(qkv):
    q, k, v = qkv
    expected = F.dot_product_attention(q, k, v)
    with pytest.raises((TypeError, ValueError)):
        F.dot_product_attention(Arraylike([lambda: "no array"]), k, v)
    # Another shape the second time: there is no second time.
    same(F.dot_product_attention(Arraylike([lambda: q, lambda: q[:1]]), k, v), expected)
    # A call from inside a call, with the same layer.
    layer = mha_c.DotProductAttention(0)
    inner = []

    def calls_again():
        inner.append(layer(q, k, v))
        return q

    same(layer(Arraylike([calls_again]), k, v), expected)
    same(inner[0], expected)


# --- State ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [mha_c.MultiHeadAttention, mha_c.AdditiveAttention, mha_c.DotProductAttention])
@pytest.mark.parametrize("state", [None, 1, "x", {}, {"_linears": 3}, {"training": "maybe"}, (None, {"a": 1}), [1, 2]])
def test_a_corrupted_pickle_raises_and_nothing_worse(kind, state, qkv):
    """Twice, and every use afterwards: an exception or an answer, never a crash."""
    layer = kind.__new__(kind)
    for _ in range(2):
        try:
            layer.__setstate__(state) if hasattr(layer, "__setstate__") else layer.__dict__.update(state)
        except Exception as error:
            assert isinstance(error, (TypeError, ValueError, AttributeError, LookupError))
    for use in (repr, lambda x: x(*qkv), lambda x: x.state_dict(), lambda x: x.attention_weights, pickle.dumps):
        try:
            use(layer)
        except (TypeError, ValueError, AttributeError, KeyError):
            pass
    same(mha_c.DotProductAttention(0)(*qkv), F.dot_product_attention(*qkv, empty_rows="uniform"))


def test_a_refused_call_leaves_everything_as_it_was(qkv):
    """Inputs, weights, the weights of the last call, random numbers: for every kind of refusal."""
    q, k, v = qkv
    layer, untouched = (mha_c.MultiHeadAttention(4, 2, 0.5, rng=3).train() for _ in range(2))
    same(layer(q, k, v), untouched(q, k, v))
    state, seen, bits = layer.state_dict(), layer.attention_weights, [x.tobytes() for x in qkv]
    for bad in (
        lambda: layer(q, k[:1], v), lambda: layer(q, k, v[:, :2]), lambda: layer(q.astype(int), k, v),
        lambda: layer(q, k, v, [1, 2, 3]), lambda: layer(q, k, v, [np.nan, 1]), lambda: layer(q, k, v, [True, False]),
        lambda: layer(None, k, v), lambda: layer(q, k[..., :2], v), lambda: layer(q, k, v, colour=1),
    ):  # fmt: skip
        with pytest.raises((TypeError, ValueError)):
            bad()
        same(layer.attention_weights, seen)
        assert [x.tobytes() for x in qkv] == bits
    assert all(np.array_equal(value, state[name]) for name, value in layer.state_dict().items())
    same(layer(q, k, v), untouched(q, k, v))
