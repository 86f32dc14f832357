"""Ill-formed calls: a table of what can be wrong with an argument, crossed with every public function that takes it.

Each must raise ShapeError, TypeError or ValueError whose text names the argument, what it got and what was
expected.  Python-side arguments of constructors stand in test_layer_constructors.py.
"""

import collections
import re

import numpy as np
import pytest

import mha_c
import needs
from mha_c import functional as F
from mha_c import variants

SHAPE, TYPE, VALUE = mha_c.ShapeError, TypeError, ValueError


def floats(*shape):
    return np.random.default_rng(0).standard_normal(shape)


# --- Every call with good arguments; the tests replace one ------------------------------------------

Q, K, V = floats(2, 3, 4), floats(2, 5, 4), floats(2, 5, 6)
LENS = [3, 5]
Call = collections.namedtuple("Call", "function arguments")


def layer(build):
    """A layer as a function of keyword arguments, new at each call."""
    return lambda **named: build()(**named)


QKV = {"queries": Q, "keys": K, "values": V, "valid_lens": LENS}
SHORT = {"q": Q, "k": K, "v": V, "valid_lens": LENS}
CALLS = {
    "MultiHeadAttention": Call(layer(lambda: mha_c.MultiHeadAttention(12, 3, 0.1)), QKV),
    "MultiHeadAttention, sized": Call(layer(lambda: mha_c.MultiHeadAttention(4, 4, 6, 12, 3, 0.1)), QKV),
    "DotProductAttention": Call(layer(lambda: mha_c.DotProductAttention(0.1)), QKV),
    "AdditiveAttention": Call(layer(lambda: mha_c.AdditiveAttention(8, 0.1)), QKV),
    "dot_product_attention": Call(F.dot_product_attention, SHORT),
    "additive_attention": Call(
        F.additive_attention, {**SHORT, "w_v": floats(8), "W_q": floats(8, 4), "W_k": floats(8, 4)}
    ),
    "additive_attention, projected": Call(F.additive_attention, {**SHORT, "w_v": floats(4)}),
    "merge": Call(
        F.merge, {"out_a": floats(2, 3, 4), "lse_a": floats(2, 3), "out_b": floats(2, 3, 4), "lse_b": floats(2, 3)}
    ),
    "masked_softmax": Call(mha_c.masked_softmax, {"X": floats(2, 3, 5), "valid_lens": LENS}),
    "sequence_mask": Call(mha_c.sequence_mask, {"X": floats(2, 5), "valid_len": LENS}),
    "transpose_qkv": Call(mha_c.transpose_qkv, {"X": floats(2, 5, 12), "num_heads": 3}),
    "transpose_output": Call(mha_c.transpose_output, {"X": floats(6, 5, 4), "num_heads": 3}),
    "scaled_dot_product_attention": Call(variants.scaled_dot_product_attention, {"query": Q, "key": K, "value": V}),
    "MultiHeadedSelfAttention": Call(layer(lambda: variants.MultiHeadedSelfAttention(4, 2)), {"x": Q}),
    "SelfAttentionAISummer": Call(layer(lambda: variants.SelfAttentionAISummer(4)), {"x": Q}),
    "MultiHeadSelfAttentionAISummer": Call(layer(lambda: variants.MultiHeadSelfAttentionAISummer(4, 2)), {"x": Q}),
    "project_keys": Call(lambda **named: mha_c.AdditiveAttention(8, 0.1).project_keys(**named), {"keys": K}),
}
# Of these any type of number is welcome.
ANY_TYPE = {"sequence_mask", "transpose_qkv", "transpose_output"}
ANY_RANK = {"sequence_mask", "scaled_dot_product_attention"}


def arguments_where(fits):
    """Parametrizes over (call, argument) for all pairs that fit."""
    pairs = [(call, name) for call, (_, arguments) in CALLS.items() for name in arguments if fits(call, name)]
    return pytest.mark.parametrize(("call", "name"), pairs, ids=[f"{call}: {name}" for call, name in pairs])


def is_array(call, name):
    return isinstance(CALLS[call].arguments[name], np.ndarray)


arrays = arguments_where(is_array)
float_arrays = arguments_where(lambda call, name: is_array(call, name) and call not in ANY_TYPE)
lengths = arguments_where(lambda call, name: name in ("valid_lens", "valid_len"))


def run(call, **changes):
    function, arguments = CALLS[call]
    return function(**{**arguments, **changes})


def says(message, text):
    """Whether the text stands there as words of its own: an argument's name may be a single letter."""
    before, behind = r"(?<!\w)" * text[:1].isalnum(), r"(?!\w)" * text[-1:].isalnum()
    return re.search(before + re.escape(text) + behind, message) is not None


def refused(call, error, *texts, **changes):
    with pytest.raises(error) as caught:
        run(call, **changes)
    for text in texts:
        assert says(str(caught.value), text), str(caught.value)


def test_a_letter_of_a_word_is_no_name():
    nonsense = "six quaint keys of value 23 have an invalid shape (2, 34)"
    for text in ("q", "k", "v", "x", "X", "3", "(2, 3)", "key", "lens", "valid"):
        assert not says(nonsense, text), text
    assert says("q: got (2, 3), x is 3", "q") and says("q: got (2, 3), x is 3", "(2, 3)") and says("x is 3", "3")


@pytest.mark.parametrize("call", CALLS)
def test_the_calls_are_good_as_they_stand(call):
    run(call)


# --- Arrays of the wrong kind -------------------------------------------------------------------------

WRONG_TYPES = ["float16", "int32", "uint8", "bool", "complex64", "longdouble", "object", "U5", "datetime64[s]"]


@float_arrays
@pytest.mark.parametrize("kind", WRONG_TYPES)
def test_element_types(call, name, kind):
    array = CALLS[call].arguments[name]
    wrong = np.zeros(array.shape, kind)
    with pytest.raises(TYPE) as caught:
        run(call, **{name: wrong})
    said = str(caught.value)
    assert says(said, name) and (says(said, str(wrong.dtype)) or (kind == "U5" and says(said, "got words"))), said


@arrays
def test_things_that_are_no_arrays(call, name):
    array = CALLS[call].arguments[name]
    if name not in ("W_q", "W_k"):  # those are optional
        left_out = name == "values"  # of a layer: its callers may well have forgotten them
        said = "missing or None: values" if left_out else f"{name} must be an array, got None"
        refused(call, TYPE, said, **{name: None})
    refused(call, TYPE, f"{name} must be an array, got object", **{name: object()})
    refused(call, TYPE, f"{name} must be an array of numbers, got words", **{name: "queries"})
    refused(call, TYPE, f"{name} is a masked array", **{name: np.ma.masked_array(array, mask=array > 0)})
    refused(call, (TYPE, VALUE), name, **{name: [[[1.0], [2.0, 3.0]]]})


@float_arrays
def test_structured_and_mixed_types(call, name):
    array = CALLS[call].arguments[name]
    refused(call, TYPE, name, **{name: np.zeros(array.shape, [("a", "f4"), ("b", "f4")])})
    others = [other for other in CALLS[call].arguments if other != name and is_array(call, other)]
    if others:  # a lone array may be of either type
        refused(call, TYPE, "float32", "float64", **{name: array.astype(np.float32)})


@arguments_where(
    lambda call, name: is_array(call, name) and call not in ("scaled_dot_product_attention", "sequence_mask")
)
def test_ranks(call, name):
    array = CALLS[call].arguments[name]
    for wrong in (array[None, None], array.reshape(-1)[0:1].reshape(()), array.reshape(-1)):
        if wrong.shape == array.shape:
            continue
        refused(call, SHAPE, name, str(wrong.shape), **{name: wrong})


# --- Sizes that clash -----------------------------------------------------------------------------------

LAYERS = ("MultiHeadAttention", "MultiHeadAttention, sized", "DotProductAttention", "AdditiveAttention")


@pytest.mark.parametrize("call", LAYERS)
def test_sizes_of_layer_inputs(call):
    refused(call, SHAPE, "keys", "batch size 3", "queries", "2", keys=floats(3, 5, 4))
    refused(call, SHAPE, "values", "batch size 1", "queries", values=floats(1, 5, 6))
    refused(call, SHAPE, "values", "6 keys", "keys", "5", "(2, 6, 6)", "(2, 5, 4)", values=floats(2, 6, 6))


@pytest.mark.parametrize("call", ["dot_product_attention", "additive_attention", "additive_attention, projected"])
def test_sizes_of_function_inputs(call):
    refused(call, SHAPE, "k", "batch size 3", "q", k=floats(3, 5, 4))
    refused(call, SHAPE, "v", "6 keys", "k", "5", v=floats(2, 6, 6))
    refused(call, SHAPE, "k", "rank", q=floats(2, 1, 3, 4))
    four = {"q": floats(2, 6, 3, 4), "v": floats(2, 4, 5, 6)}
    refused(call, SHAPE, "heads", k=floats(2, 4, 5, 4), **four)
    refused(call, SHAPE, "heads", k=floats(2, 3, 5, 4), **four)


def test_features_that_clash():
    refused("DotProductAttention", SHAPE, "keys", "3 features", "queries", "4", keys=floats(2, 5, 3))
    refused("MultiHeadAttention, sized", SHAPE, "queries", "3 features", "W_q", "4", queries=floats(2, 3, 3))
    refused("dot_product_attention", SHAPE, "k", "3", "q", "4", k=floats(2, 5, 3))
    refused("scaled_dot_product_attention", SHAPE, "key has 3 features, but query has 4", key=floats(2, 5, 3))
    refused("scaled_dot_product_attention", SHAPE, "value has 4 rows, but key has 5", value=floats(2, 4, 6))
    refused("additive_attention, projected", SHAPE, "w_v", "(3,)", w_v=floats(3))
    refused("additive_attention", SHAPE, "W_q", "(8, 4)", "(8, 5)", W_q=floats(8, 5))
    refused("additive_attention", SHAPE, "W_k", "(8, 4)", "(7, 4)", W_k=floats(7, 4))
    refused("additive_attention", SHAPE, "w_v must have shape (h,), got (1, 8)", w_v=floats(1, 8))
    refused("transpose_qkv", SHAPE, "last axis of X (12)", "num_heads (5)", num_heads=5)
    refused("transpose_output", SHAPE, "first axis of X (6)", "num_heads (4)", num_heads=4)
    for name, wrong in (("out_b", floats(2, 3, 5)), ("lse_a", floats(2, 4)), ("lse_b", floats(2, 3, 1))):
        refused("merge", SHAPE, f"{name} must have shape", str(wrong.shape), **{name: wrong})


@pytest.mark.parametrize("call", ["transpose_qkv", "transpose_output"])
@pytest.mark.parametrize(("heads", "error"), [(0, VALUE), (-1, VALUE), (1.5, TYPE), (True, TYPE), (None, TYPE)])
def test_num_heads(call, heads, error):
    refused(call, error, "num_heads must be", num_heads=heads)


# --- Lengths -------------------------------------------------------------------------------------------


@lengths
@pytest.mark.parametrize(
    ("lens", "error", "text"),
    [
        ([np.nan, 1.0], VALUE, "finite"),
        ([np.inf, 1.0], VALUE, "finite"),
        ([-np.inf, 1.0], VALUE, "finite"),
        ([True, False], TYPE, "bool"),
        (np.array([True, False]), TYPE, "bool"),
        (np.array([1, 2], object), TYPE, "object"),
        ([1j, 2], TYPE, "complex128"),
        (["1", "2"], TYPE, "got words"),
        ("12", TYPE, ""),
        (np.ma.masked_array([1, 2], mask=[0, 1]), TYPE, "masked array"),
        (np.array(["2020-01-01"] * 2, "M8[D]"), TYPE, "datetime64"),
        (3, SHAPE, "()"),
        (3.0, SHAPE, "()"),
        (np.uint64(3), SHAPE, "()"),
        ([3], SHAPE, "(1,)"),
        ([1, 2, 3], SHAPE, "(3,)"),
        ([[1], [2]], SHAPE, "(2, 1)"),
        (np.ones((2, 5), int), SHAPE, "(2, 5)"),
        (np.ones((3, 2), int), SHAPE, "(3, 2)"),
        (np.ones((2, 3, 1), int), SHAPE, "(2, 3, 1)"),
        ([[1, 2], [3]], VALUE, ""),
    ],
)
def test_lengths(call, name, lens, error, text):
    refused(call, error, name, text, **{name: lens})


@lengths
def test_lengths_that_are_fine(call, name):
    expected = run(call, **{name: [3, 5]})
    for lens in ((3, 5), np.array([3, 5], np.uint8), [2.5, 4.1], np.array([3.0, 5.0], ">f4"), [3, 2**62], (3.0, 1e30)):
        found = run(call, **{name: lens})
        if not call.startswith(("Multi", "Additive")):  # those draw new weights
            np.testing.assert_array_equal(found, expected)


def test_masks_that_are_fine():
    """Of 0 and 1, arrays and lists, of a function and of tensors."""
    x, keep = np.random.default_rng(0).standard_normal((2, 3, 4)), np.random.default_rng(1).random((2, 3, 3)) < 0.6
    expected = F.dot_product_attention(x, x, x, keep_mask=keep)
    for mask in (keep.astype(int), keep.astype(np.uint8), keep.tolist(), keep.astype(int).tolist()):
        np.testing.assert_array_equal(F.dot_product_attention(x, x, x, keep_mask=mask), expected)


# --- Options of the functions ---------------------------------------------------------------------------

functions = pytest.mark.parametrize("call", ["dot_product_attention", "additive_attention"])
SCORES = (2, 3, 5)


@functions
@pytest.mark.parametrize(
    ("option", "value", "error", "texts"),
    [
        ("keep_mask", np.ones((3, 5)), TYPE, ["bool", "float64"]),
        ("keep_mask", np.full((3, 5), 2, np.uint8), VALUE, ["uint8", "0 and 1"]),
        ("keep_mask", [[1, 0, -1, 1, 1]], VALUE, ["int64", "0 and 1"]),
        ("keep_mask", np.ones((2, 5), bool), SHAPE, ["(2, 5)", "(2, 3, 5)", "per key of each item", "[:, None]"]),
        ("keep_mask", np.ones((3, 4), bool), SHAPE, ["(3, 4)", "(2, 3, 5)"]),
        ("keep_mask", np.ones(5, bool), SHAPE, ["(5,)", "rank"]),
        ("keep_mask", np.ones((2, 1, 3, 5), bool), SHAPE, ["(2, 1, 3, 5)", "rank"]),
        ("keep_mask", np.ma.masked_array(np.ones((3, 5), bool), mask=True), TYPE, ["masked array"]),
        ("bias", np.ones((3, 5), bool), TYPE, ["keep_mask"]),
        ("bias", np.ones((3, 5), np.float32), TYPE, ["float32", "float64"]),
        ("bias", np.ones((3, 5), int), TYPE, ["int64"]),
        ("bias", np.ones((2, 5, 3)), SHAPE, ["(2, 5, 3)"]),
        ("bias", np.ones(()), SHAPE, ["rank"]),
        ("causal", "middle", VALUE, ["'top_left' or 'bottom_right'", "'middle'"]),
        ("causal", 1, TYPE, ["False, True, 'top_left' or 'bottom_right', got 1"]),
        ("causal", np.ones(2), TYPE, ["False, True, 'top_left' or 'bottom_right'"]),
        ("causal", True, VALUE, ["3 queries and 5 keys", "top_left", "bottom_right"]),
        ("window", 3, TYPE, ["(left, right)", "3"]),
        ("window", (1, 2, 3), TYPE, ["(left, right)"]),
        ("window", "ab", TYPE, ["(left, right)"]),
        ("window", (-1, 0), VALUE, ["at least 0", "-1"]),
        ("window", (0, 1.5), TYPE, ["whole number", "1.5"]),
        ("window", (True, 0), TYPE, ["whole number"]),
        ("scale", "1", TYPE, ["real number", "str"]),
        ("scale", True, TYPE, ["real number"]),
        ("scale", np.nan, VALUE, ["NaN"]),
        ("scale", np.inf, VALUE, ["finite", "inf"]),
        ("scale", -np.inf, VALUE, ["finite", "-inf"]),
        ("scale", 1j, TYPE, ["real number"]),
        ("scale", np.float32(np.inf), VALUE, ["finite", "inf"]),
        ("softcap", np.float32(np.inf), VALUE, ["finite", "inf"]),
        ("dropout", -0.1, VALUE, ["between 0 and 1", "-0.1"]),
        ("dropout", 1.1, VALUE, ["between 0 and 1", "1.1"]),
        ("dropout", np.nan, VALUE, ["NaN"]),
        ("dropout", "0.1", TYPE, ["real number"]),
        ("dropout", True, TYPE, ["real number"]),
        ("rng", -1, VALUE, ["0 .. 2**64 - 1", "-1"]),
        ("rng", 1.5, TYPE, ["numpy.random.Generator"]),
        ("rng", True, TYPE, ["True"]),
        ("rng", np.random.RandomState(0), TYPE, ["numpy.random.Generator"]),
        ("empty_rows", "nan", VALUE, ["'zero' or 'uniform'", "'nan'"]),
        ("empty_rows", None, TYPE, ["string"]),
    ],
)
def test_options(call, option, value, error, texts):
    refused(call, error, option, *texts, **{option: value})


@functions
def test_numbers_of_numpys_types_are_numbers(call):
    """Beside one of float32, NumPy takes Python's numbers for float32 too: the limits of float64 overflowed there."""
    for kind in (np.float16, np.float32, np.float64, np.longdouble, np.int8):
        for name in ("scale", "softcap"):
            np.testing.assert_array_equal(run(call, **{name: kind(2)}), run(call, **{name: 2.0}))


@functions
def test_a_seed_beyond_64_bits(call):
    refused(call, VALUE, "rng", dropout=0.5, rng=2**64)


def test_empty_rows_of_masked_softmax():
    refused("masked_softmax", VALUE, "empty_rows", "'nan'", empty_rows="nan")


@pytest.mark.parametrize("call", CALLS)
def test_python_checks_the_rest(call):
    refused(call, TYPE, "colour", colour=1)
    function, arguments = CALLS[call]
    with pytest.raises(TypeError):
        function(**dict(list(arguments.items())[1:]))


# --- Objects of other libraries ---------------------------------------------------------------------------


class Raises:
    def __array__(self, dtype=None, copy=None):
        raise KeyError("mine")


def test_an_error_of_the_object_itself_passes_through():
    with pytest.raises(KeyError, match="mine"):
        run("dot_product_attention", q=Raises())


class OnAnotherDevice:
    def __dlpack__(self, **kwargs):
        raise BufferError("only on the accelerator")

    def __dlpack_device__(self):
        return (2, 0)


def test_dlpack_of_another_device():
    reads = hasattr(np, "from_dlpack")
    said = (
        "(OnAnotherDevice) is not readable by the CPU"
        if reads
        else "is a DLPack object, which needs NumPy 1.22 or later"
    )
    refused("DotProductAttention", TYPE, f"queries {said}", queries=OnAnotherDevice())


@arrays
def test_tensors_that_are_refused(call, name):
    torch = needs.module("torch")
    tensor = torch.from_numpy(CALLS[call].arguments[name])
    refused(call, TYPE, name, "requires grad", "mha_c.torch", f"{name}.detach()", **{
        name: tensor.clone().requires_grad_()})  # fmt: skip
    refused(call, TYPE, name, "on device meta", **{name: tensor.to("meta")})
    for wrong in (tensor.bfloat16(), tensor.to_sparse()):
        refused(call, TYPE, name, str(wrong.dtype), **{name: wrong})
    if call not in ANY_TYPE:
        refused(call, TYPE, name, "float16", **{name: tensor.half()})


def test_a_list_of_tensors_that_require_grad():
    torch = needs.module("torch")
    rows = [torch.ones(4, requires_grad=True)] * 2
    refused("MultiHeadedSelfAttention", TYPE, "x is a list that makes no array", x=rows)


@pytest.mark.parametrize("layout", ["conjugated", "nested", "quantised"])
@pytest.mark.filterwarnings("ignore")  # torch calls nested and quantised tensors experimental
def test_tensors_without_a_numpy_form(layout):
    torch = needs.module("torch")
    tensor = {
        "conjugated": lambda: torch.ones(2, 3, 4, dtype=torch.complex64).conj(),
        "nested": lambda: torch.nested.nested_tensor([torch.ones(3, 4), torch.ones(2, 4)]),
        "quantised": lambda: torch.quantize_per_tensor(torch.ones(2, 3, 4), 0.1, 0, torch.qint8),
    }[layout]()
    refused("DotProductAttention", TYPE, "queries", queries=tensor)
