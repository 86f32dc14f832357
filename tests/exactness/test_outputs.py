"""What comes back, and what is left alone: types, ownership, inputs in every arrangement of memory, masked data."""

import array as array_module
import gc
import weakref

import numpy as np
import pytest

import mha_c
import needs
from checks import same
from layouts import LAYOUTS, read_only
from mha_c import functional as F
from mha_c import variants

SHAPES = (2, 4, 6), (2, 9, 6), (2, 9, 7)  # queries, keys, values
LENS = np.array([3, 7])


def fresh(build):
    """A function that builds the same layer at each call, so that no call sees what another left."""
    return lambda *inputs, **named: build()(*inputs, **named)


def with_heads(q, k, v, lens):
    """The function with a head axis of 1."""
    return F.dot_product_attention(*(x[:, None] for x in (q, k, v)), lens)[:, 0]


def additive(q, k, v, lens):
    """The function with fixed parameters, of the kind and type of q."""
    w_v, W_q, W_k = np.linspace(-1, 1, 8), np.linspace(-1, 1, 48).reshape(8, 6), np.linspace(1, -1, 48).reshape(8, 6)
    if isinstance(q, np.ndarray):
        parameters = [x.astype(q.dtype) for x in (w_v, W_q, W_k)]
    else:
        parameters = [q.new_tensor(x) for x in (w_v, W_q, W_k)]
    return F.additive_attention(q, k, v, *parameters, lens)


# Functions of (queries, keys, values, valid_lens) that give one array.
CALLS = {
    "multi-head": fresh(lambda: mha_c.MultiHeadAttention(12, 3, 0.1, bias=True, rng=0)),
    "multi-head, float64": fresh(lambda: mha_c.MultiHeadAttention(12, 3, 0.1, rng=0, dtype=np.float64)),
    "dot product": fresh(lambda: mha_c.DotProductAttention(0.1)),
    "additive": fresh(lambda: mha_c.AdditiveAttention(8, 0.1, rng=0)),
    "function": F.dot_product_attention,
    "function, heads": with_heads,
    "function, additive": additive,
    "variant": lambda q, k, v, lens: variants.scaled_dot_product_attention(q, k, v)[0],
    "masked_softmax": lambda q, k, v, lens: mha_c.masked_softmax(k, lens),
}


@pytest.fixture(params=list(CALLS))
def call(request):
    return CALLS[request.param]


@pytest.fixture(params=[name for name in CALLS if name != "masked_softmax"])
def attention(request):
    """Those that attend."""
    return CALLS[request.param]


@pytest.fixture(params=[name for name in CALLS if name not in ("masked_softmax", "variant")])
def masked_attention(request):
    """Those that attend and take lengths."""
    return CALLS[request.param]


@pytest.fixture
def inputs(rng, dtype):
    return [rng.standard_normal(shape).astype(dtype) for shape in SHAPES]


# --- Arrangements of memory -----------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_arrangement_gives_the_same_bits(call, inputs, layout):
    expected = call(*inputs, LENS)
    arranged = [LAYOUTS[layout](x) for x in inputs]
    for a, x in zip(arranged, inputs):
        assert np.array_equal(a, x)
    result = call(*arranged, LENS)
    assert type(result) is np.ndarray
    same(result, expected)


@pytest.mark.parametrize("layout", ["[::2]", ">i4", "list", "float", "read-only"])
def test_lengths_in_any_form(call, inputs, layout):
    forms = {
        "[::2]": np.array([3, 9, 7, 9])[::2],
        ">i4": LENS.astype(">i4"),
        "list": [3, 7],
        "float": np.array([2.2, 6.9]),
        "read-only": read_only(LENS),
    }
    same(call(*inputs, forms[layout]), call(*inputs, LENS))


def test_stride_0(call, rng, dtype):
    for axis in range(3):
        base = [rng.standard_normal([1 if i == axis else n for i, n in enumerate(s)]).astype(dtype) for s in SHAPES]
        views = [np.broadcast_to(x, shape) for x, shape in zip(base, SHAPES)]
        same(call(*views, LENS), call(*(np.array(view) for view in views), LENS))


def test_overlapping_inputs(call, rng, dtype):
    one = rng.standard_normal((2, 9, 6)).astype(dtype)
    same(call(one, one, one, LENS), call(one.copy(), one.copy(), one.copy(), LENS))
    packed = rng.standard_normal((2, 9, 18)).astype(dtype)
    q, k, v = packed[..., :6], packed[..., 6:12], packed[..., 12:]
    same(call(q, k, v, LENS), call(q.copy(), k.copy(), v.copy(), LENS))
    windows = np.lib.stride_tricks.sliding_window_view(rng.standard_normal((2, 14)).astype(dtype), 6, axis=1)
    same(call(windows, windows, windows, LENS), call(*(np.array(windows),) * 3, LENS))


def test_inputs_are_never_modified(call, inputs):
    lens = np.array([0, 20, 3, 7])[2:]
    for layout in (np.array, LAYOUTS["rows strided"], LAYOUTS["features strided"]):
        arranged = [layout(x) for x in inputs]
        bases = [x if x.base is None else x.base for x in arranged]
        before = [base.tobytes() for base in bases]
        call(*arranged, lens)
        assert [base.tobytes() for base in bases] == before and lens.base.tolist() == [0, 20, 3, 7]


def test_results_are_new_arrays_of_their_own(call, inputs):
    out = call(*inputs, LENS)
    assert out.flags.writeable and out.dtype == inputs[0].dtype
    assert not any(np.shares_memory(out, x) for x in inputs)
    again = call(*inputs, LENS)
    out[...] = 0
    same(call(*inputs, LENS), again)


@pytest.mark.parametrize("shape", [(2, 4, 6), (2, 1, 6)])
@pytest.mark.parametrize("heads", [1, 2])
def test_heads_are_split_and_joined_in_memory_of_their_own(rng, heads, shape):
    x = rng.standard_normal(shape)
    split = mha_c.transpose_qkv(x, heads)
    same(mha_c.transpose_output(split, heads), x)
    assert not np.shares_memory(split, x) and not np.shares_memory(mha_c.transpose_output(split, heads), split)


# --- Masked data -------------------------------------------------------------------------------------------------


POISONS = [np.nan, np.inf, -np.inf, 1e30, 1e-310]


@pytest.mark.parametrize("poison", POISONS)
def test_masked_keys_and_values_have_no_influence(masked_attention, inputs, poison):
    expected = masked_attention(*inputs, LENS)
    for b, length in enumerate(LENS):
        inputs[1][b, length:], inputs[2][b, length:] = poison, poison
    same(masked_attention(*inputs, LENS), expected)


@pytest.mark.parametrize("poison", POISONS)
def test_masked_scores_have_no_influence(rng, dtype, poison):
    scores = rng.standard_normal((2, 4, 9)).astype(dtype)
    expected = mha_c.masked_softmax(scores, LENS)
    scores[0, :, 3:], scores[1, :, 7:] = poison, poison
    same(mha_c.masked_softmax(scores, LENS), expected)


def test_nan_in_a_query_stays_in_its_row(attention, inputs):
    expected = attention(*inputs, LENS)
    inputs[0][1, 2] = np.nan
    found = attention(*inputs, LENS)
    assert np.isnan(found[1, 2]).all()
    found[1, 2] = expected[1, 2]
    same(found, expected)


def test_rows_do_not_depend_on_their_neighbours(attention, inputs):
    """The same bits alone, in any batch, and with any part of the queries."""
    whole = attention(*inputs, LENS)
    q, k, v = inputs
    for b in range(2):
        same(attention(q[b : b + 1], k[b : b + 1], v[b : b + 1], LENS[b : b + 1])[0], whole[b])
    same(attention(q[:, 1:3], k, v, LENS), whole[:, 1:3])


def test_keys_beyond_the_lengths_may_as_well_not_be_there(masked_attention, inputs):
    q, k, v = inputs
    same(masked_attention(q, k[:, :7], v[:, :7], LENS), masked_attention(q, k, v, LENS))


# --- Types of the caller --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["multi-head", "dot product", "additive", "function", "variant", "masked_softmax"])
def test_nested_lists(inputs, name):
    exact = [x.astype(np.float64) for x in inputs]
    same(CALLS[name](*(x.tolist() for x in exact), LENS.tolist()), CALLS[name](*exact, LENS))


class Arraylike:
    def __init__(self, x):
        self.x, self.asked = x, 0

    def __array__(self, dtype=None, copy=None):
        self.asked += 1
        return self.x


class Dlpack:
    def __init__(self, x):
        self.x = x

    def __dlpack__(self, **kwargs):
        return self.x.__dlpack__()

    def __dlpack_device__(self):
        return self.x.__dlpack_device__()


def test_objects_that_give_arrays(inputs):
    layer = mha_c.MultiHeadAttention(12, 3, 0.0, rng=0)
    expected = layer(*inputs, LENS)
    wrapped = [Arraylike(x) for x in inputs]
    same(layer(*wrapped, Arraylike(LENS)), expected)
    assert [w.asked for w in wrapped] == [1, 1, 1]
    if hasattr(np, "from_dlpack"):  # NumPy 1.22
        same(layer(*map(Dlpack, inputs), LENS), expected)
    same(layer(*map(memoryview, inputs), memoryview(LENS)), expected)
    same(layer(*inputs, array_module.array("i", [3, 7])), expected)
    assert type(layer.attention_weights) is np.ndarray


def test_tensors_give_tensors(call, inputs):
    torch = needs.module("torch")
    tensors = [torch.from_numpy(x) for x in inputs]
    out = call(*tensors, torch.from_numpy(LENS))
    assert type(out) is torch.Tensor and out.dtype == tensors[0].dtype and not out.requires_grad
    same(out.numpy(), call(*inputs, LENS))
    same(call(*inputs, torch.tensor([3.0, 7.0], dtype=torch.bfloat16)), call(*inputs, LENS))
    strided = [tensor.transpose(0, 1).contiguous().transpose(0, 1) for tensor in tensors]
    same(call(*strided, LENS.tolist()).numpy(), out.numpy())
    with torch.no_grad():
        same(call(*tensors, LENS).numpy(), out.numpy())


def test_everything_else_of_tensors(inputs):
    torch = needs.module("torch")
    q, k, v = (torch.from_numpy(x) for x in inputs)
    mha = mha_c.MultiHeadAttention(12, 3, 0.0, rng=0)
    assert isinstance(mha(q, inputs[1], inputs[2]), torch.Tensor)  # one tensor is enough
    weights, inner = mha.attention_weights, mha.attention.attention_weights
    assert isinstance(weights, torch.Tensor) and isinstance(inner, torch.Tensor)
    same(weights.reshape(6, 4, 9).numpy(), inner.numpy())
    mha(*inputs)
    assert isinstance(mha.attention_weights, np.ndarray)
    additive = mha_c.AdditiveAttention(8, 0.0, rng=0)
    keys = additive.project_keys(k)
    assert isinstance(additive(q, keys, v), torch.Tensor) and isinstance(additive(*inputs), np.ndarray)
    extras = F.dot_product_attention(q, k, v, return_weights=True, return_lse=True)
    assert all(isinstance(extra, torch.Tensor) for extra in extras)
    merged = F.merge(extras[0], extras[2], extras[0], extras[2])
    assert all(isinstance(part, torch.Tensor) for part in merged)
    keep = torch.ones(4, 9, dtype=torch.bool)
    same(F.dot_product_attention(q, k, v, keep_mask=keep, bias=q.new_zeros(4, 9)).numpy(), extras[0].numpy())
    assert isinstance(mha_c.sequence_mask(q[..., 0], [1, 2]), torch.Tensor)
    assert isinstance(mha_c.transpose_output(mha_c.transpose_qkv(q, 3), 3), torch.Tensor)
    assert isinstance(mha.W_q(q), torch.Tensor)
    layer = variants.MultiHeadedSelfAttention(6, 2)
    assert isinstance(layer(q), torch.Tensor) and isinstance(layer.attention_weights, torch.Tensor)
    assert isinstance(variants.SelfAttentionAISummer(6)(q, torch.zeros(4, 4, dtype=torch.bool)), torch.Tensor)
    assert isinstance(variants.MultiHeadSelfAttentionAISummer(6, 2)(q), torch.Tensor)


def test_weights_from_torch_modules(inputs):
    torch = needs.module("torch")
    trained = torch.nn.Linear(6, 12, bias=False)
    mha = mha_c.MultiHeadAttention(12, 3, 0.0, rng=0)
    mha.W_q.weight = trained.weight  # a Parameter: it requires grad, and is copied all the same
    same(mha.W_q.weight, trained.weight.detach().numpy())
    with torch.no_grad():
        trained.weight.zero_()
    assert mha.W_q.weight.any()


# --- Ownership --------------------------------------------------------------------------------------------------------


def test_nothing_is_kept_alive(inputs):
    mha = mha_c.MultiHeadAttention(12, 3, 0.0, rng=0)
    q, k, v = (x.view(type("Traced", (np.ndarray,), {})) for x in inputs)
    mha(q, k, v, LENS)
    watched = [weakref.ref(x) for x in (q, k, v)]
    del q, k, v
    gc.collect()
    assert [ref() for ref in watched] == [None] * 3
    mha.attention_weights  # noqa: B018
    gone = weakref.ref(mha)
    gc.disable()
    try:
        del mha
        assert gone() is None  # at once: a layer is in no reference cycle
    finally:
        gc.enable()


@pytest.mark.parametrize("layer", ["dot", "multihead"])
def test_scores_that_overflow_to_minus_infinity_never_reach_hidden_values(layer):
    """Such a row has no weights; its mean is over the keys it sees, for the others were never read or projected."""
    queries, keys = np.full((1, 1, 4), 1e30, np.float32), np.full((1, 6, 4), -1e30, np.float32)
    values = np.ones((1, 6, 4), np.float32)
    values[:, 3:] = np.nan
    attention = mha_c.DotProductAttention(0) if layer == "dot" else mha_c.MultiHeadAttention(4, 1, 0)
    if layer == "multihead":
        attention.load_state_dict({f"W_{name}.weight": np.eye(4, dtype=np.float32) for name in "qkvo"})
    np.testing.assert_array_equal(attention(queries, keys, values, [3]), np.ones((1, 1, 4), np.float32))
    third = np.float32(1) / np.float32(3)
    np.testing.assert_array_equal(attention.attention_weights.ravel(), [third, third, third, 0, 0, 0])
