"""What a user reads, or gets, where a call, a parameter or a state is nearly right."""

import copy
import pickle
import pydoc

import numpy as np
import pytest

import mha_c
import needs
from mha_c import functional as F
from mha_c import variants

LAYERS = {
    "MultiHeadAttention": lambda: mha_c.MultiHeadAttention(4, 4, 4, 6, 2, 0.0, bias=True, rng=0),
    "DotProductAttention": lambda: mha_c.DotProductAttention(0.0),
    "AdditiveAttention": lambda: mha_c.AdditiveAttention(4, 4, 6, 0.0, rng=0),
    "MultiHeadedSelfAttention": lambda: variants.MultiHeadedSelfAttention(4, 2, rng=0),
    "SelfAttentionAISummer": lambda: variants.SelfAttentionAISummer(4, rng=0),
    "MultiHeadSelfAttentionAISummer": lambda: variants.MultiHeadSelfAttentionAISummer(4, 2, rng=0),
}
kinds = pytest.mark.parametrize("kind", LAYERS)
X = np.random.default_rng(0).standard_normal((2, 3, 4))


@pytest.fixture
def mha():
    return LAYERS["MultiHeadAttention"]()


# --- Calls ----------------------------------------------------------------------------------------------


@kinds
def test_a_missing_argument_is_named(kind):
    layer = LAYERS[kind]()
    methods = [("__call__", layer)]
    if hasattr(layer, "backward"):
        methods.append(("backward", layer.backward))
    for name, method in [*methods, ("load_state_dict", layer.load_state_dict)]:
        python = rf"{name}\(\) missing \d required positional argument"
        with pytest.raises(
            TypeError, match=rf"{python}|{kind} is called with .*; missing or None: queries, keys, values"
        ):
            method()


@kinds
@pytest.mark.parametrize("name", ["to", "cuda", "double", "named_parameters_", "register_forward_hook"])
def test_what_a_torch_module_would_have_is_pointed_to(kind, name):
    layer = LAYERS[kind]()
    with pytest.raises(AttributeError) as caught:
        getattr(layer, name)
    there = "mha_c.torch." + ("variants." if kind in variants.__all__ else "") + kind
    assert (there in str(caught.value)) == (name != "named_parameters_")
    assert kind in str(caught.value) and name in str(caught.value)
    assert name not in dir(layer) and not hasattr(type(layer), name) and name not in dir(type(layer))
    assert f" |  {name}\n" not in pydoc.render_doc(type(layer), renderer=pydoc.plaintext)


@kinds
def test_such_a_name_belongs_to_who_takes_it(kind):
    class Behind:
        to = "behind"

        def cuda(self):
            return self

    class Own(type(LAYERS[kind]()), Behind):
        def forward(self):
            return self

    layer = LAYERS[kind]()
    layer.__class__ = Own
    layer.half = len
    assert layer.cuda() is layer.forward() is layer and layer.to == Own.to == "behind" and layer.half is len
    assert {"to", "cuda", "forward", "half"} <= {*dir(layer)} and "double" not in dir(layer)


@kinds
def test_reading_an_attribute_takes_no_detour(kind):
    """A class with a __getattr__ is asked for all that is read."""
    of = type(LAYERS[kind]())
    assert not hasattr(of, "__getattr__") and of.__getattribute__ is object.__getattribute__


def test_the_error_of_a_property_is_not_hidden(mha):
    with pytest.raises(AttributeError, match="call the layer first"):
        mha.attention_weights  # noqa: B018
    assert not hasattr(mha, "attention_weights")


@pytest.mark.parametrize("largest", [1e39, 1e308])
def test_a_scale_beyond_the_type(largest):
    """1e39 is a number in float64 and infinite in float32: NaN would come of it."""
    q = np.zeros((1, 2, 4))
    assert not F.dot_product_attention(q, q, q, scale=largest).any()
    for dtype in (np.float32, np.float64):  # the largest numbers themselves are fine
        assert not F.dot_product_attention(*[q.astype(dtype)] * 3, scale=float(np.finfo(dtype).max)).any()
    with pytest.raises(ValueError, match="scale must be finite in float32"):
        F.dot_product_attention(*[q.astype(np.float32)] * 3, scale=largest)
    torch = needs.module("torch")
    with pytest.raises(ValueError, match="scale must be finite in float32"):
        mha_c.torch.functional.dot_product_attention(*[torch.zeros(1, 2, 4)] * 3, scale=largest)


# --- sequence_mask --------------------------------------------------------------------------------------


@pytest.fixture(params=["numpy", "torch"])
def masked(request):
    """sequence_mask of ones of a type, lengths 1 and 2 of 3, in NumPy or torch."""
    if request.param == "numpy":
        return lambda dtype, value: mha_c.sequence_mask(np.ones((2, 3), dtype), [1, 2], value)
    torch = needs.module("torch")
    return lambda dtype, value: mha_c.torch.sequence_mask(
        torch.from_numpy(np.ones((2, 3), dtype)), torch.tensor([1, 2]), value
    ).numpy()  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("f4", 0), ("f4", -1e6), ("f4", np.nan), ("f4", -np.inf), ("f4", np.float64(0.1)), ("f4", 2**70), ("f8", 1e300),
        ("u1", 255), ("u1", 2.0), ("i8", -(2**63)), ("?", 0), ("?", True), ("f2", 1), ("c8", 3),
    ],
)  # fmt: skip
def test_values_that_fit(masked, dtype, value):
    found = masked(dtype, value)
    expected = np.ones((2, 3), dtype)
    expected[0, 1:] = expected[1, 2:] = value
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("dtype", "value", "error"),
    [
        ("f4", "a", TypeError), ("f4", None, TypeError), ("f4", [1, 2], TypeError), ("f4", 1j, TypeError),
        ("i4", "1", TypeError), ("u1", -1, ValueError), ("u1", 256, ValueError), ("i8", 2**63, ValueError),
        ("i4", 1.5, ValueError), ("i4", np.nan, ValueError), ("?", 2, ValueError), ("f4", 1e39, ValueError),
        ("f2", -1e6, ValueError),
    ],
)  # fmt: skip
def test_values_that_do_not(masked, dtype, value, error):
    with pytest.raises(error, match="value must be a"):
        masked(dtype, value)


# --- Parameters read, changed in place, taken for arrays ----------------------------------------------


def change(w):
    w[0] = 1


def change_part(w):
    w[0] -= 1


def change_turned(w):
    w.T[0] -= 1


def change_whole(w):
    w -= 1


def allow(w):
    w.flags.writeable = True


def change_by_a_function(w):
    np.subtract(w, 1, out=w)  # a name for `w` would keep showing the numbers from before


@pytest.mark.parametrize("change", [change, change_part, change_turned, change_whole, change_by_a_function, allow])
def test_parts_are_read_only(mha, change):
    before = mha.state_dict()
    with pytest.raises(ValueError, match=r"read-only|WRITEABLE"):
        change(mha.W_q.weight)
    assert all((mha.state_dict()[name] == array).all() for name, array in before.items())


def test_what_is_computed_from_a_reading_is_a_plain_array(mha):
    w = mha.W_q.weight
    for result in (w + 1, 1 - w, w @ w.T, w.sum(0), np.exp(w), np.linalg.svd(w)[0], np.asarray(w), np.stack([w, w])):
        assert type(result) is np.ndarray
    own = w.copy()
    own[0] = 0
    own -= 1
    assert (own[0] == -1).all() and (mha.W_q.weight == w).all()
    assert repr(w) == repr(np.array(w)) and not w.flags.writeable
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(w)), w)  # NumPy's stays read-only from Python 3.14 on
    for other in (copy.copy(w), copy.deepcopy(w)):
        np.testing.assert_array_equal(other, w)
        other -= 1  # nobody's parameter
    assert (mha.W_q.weight == w).all()


def test_parameters_are_numbers_wherever_arrays_are_asked_for(mha):
    for p in mha.parameters():
        assert np.asarray(p).dtype == np.float32 and np.asarray(p).shape == p.shape
        assert np.asarray(p, np.float64).dtype == np.float64
        np.testing.assert_array_equal(np.array(p), p.data)
    other = LAYERS["MultiHeadAttention"]()
    other.W_q.weight = mha.parameters()[0]
    assert (other.W_q.weight == mha.W_q.weight).all()
    for thing, text in (
        (mha.W_q, "its arrays are W_q.weight"),
        (mha_c.AdditiveAttention(4, 4, 6, 0.0).project_keys(X), "in place of keys"),
    ):
        with pytest.raises(TypeError, match=text):
            np.asarray(thing)


# --- load_state_dict ------------------------------------------------------------------------------------


def test_a_wrong_shape_is_a_shape_error(mha):
    good = mha.state_dict()
    with pytest.raises(mha_c.ShapeError, match=r"W_q\.weight must have shape \(6, 4\), got \(4, 6\)"):
        mha.load_state_dict({**good, "W_q.weight": good["W_q.weight"].T})
    with pytest.raises(ValueError) as caught:  # a missing name is no shape
        mha.load_state_dict({})
    assert type(caught.value) is ValueError


def test_strict(mha):
    """strict=False as in torch: missing and unexpected names are told, shapes and types still have to fit."""
    before = mha.state_dict()
    given = {"W_q.weight": np.ones((6, 4)), "W_x.weight": np.ones(3), "W_o.bias": np.arange(6.0)}
    with pytest.raises(ValueError, match=r"W_x\.weight is unexpected"):
        mha.load_state_dict(given)
    keys = mha.load_state_dict(given, strict=False)
    assert keys.unexpected_keys == ["W_x.weight"] == keys[1]
    assert keys.missing_keys == [name for name in before if name not in given]
    for name, array in mha.state_dict().items():
        np.testing.assert_array_equal(array, given.get(name, before[name]))
    for wrong, error in (({"W_q.weight": np.ones((4, 6))}, mha_c.ShapeError), ({"W_q.bias": [1j] * 6}, TypeError)):
        changed = mha.state_dict()
        with pytest.raises(error, match="loaded nothing"):
            mha.load_state_dict({"W_o.bias": np.zeros(6), **wrong}, strict=False)
        assert all((mha.state_dict()[name] == array).all() for name, array in changed.items())
    assert repr(mha.load_state_dict(mha.state_dict())) == "<All keys matched successfully>"
    with pytest.raises(TypeError, match="strict must be True or False"):
        mha.load_state_dict(before, strict="no")


def test_strict_and_open_sizes():
    mha = mha_c.MultiHeadAttention(6, 2, 0.0, bias=True)
    assert mha.load_state_dict({"W_q.weight": np.ones((6, 5))}, strict=False).missing_keys[0] == "W_q.bias"
    assert (mha.W_q.weight == 1).all() and not mha.W_q.bias.any() and not hasattr(mha.W_k, "weight")
    with pytest.raises(ValueError, match=r"W_k\.weight is not initialised yet"):
        mha.load_state_dict({"W_k.bias": np.ones(6)}, strict=False)


@pytest.mark.parametrize("wrong", [None, 3, "W_q", [("W_q.weight", 1)], mha_c.DotProductAttention(0.0)])
def test_a_state_dict_that_is_none(mha, wrong):
    with pytest.raises(TypeError, match="state_dict must map names to arrays"):
        mha.load_state_dict(wrong)
