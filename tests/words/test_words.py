"""What a user reads, or gets, where a call is nearly right: small mistakes, and habits that torch's users have."""

import copy
import inspect
import pickle
import pydoc

import numpy as np
import pytest

import children
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
    for other in (copy.copy(w), copy.deepcopy(w), pickle.loads(pickle.dumps(w))):
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


# --- Habits from elsewhere --------------------------------------------------------------------------------


@pytest.fixture(params=["numpy", "torch"])
def side(request):
    """The module with the layers, and what makes its inputs."""
    if request.param == "numpy":
        return mha_c, np.ones
    torch = needs.module("torch")
    return mha_c.torch, lambda shape: torch.ones(shape, dtype=torch.float64)


def built(side, kind, dropout=0.0):
    layers, ones = side
    sizes = {"MultiHeadAttention": (4, 4, 4, 6, 2), "AdditiveAttention": (4, 4, 6), "DotProductAttention": ()}[kind]
    layer = getattr(layers, kind)(*sizes, dropout)
    return (layer if layers is mha_c else layer.double()), ones


@pytest.mark.parametrize("name", ["dot_product_attention", "additive_attention", "dot_product_attention_backward"])
def test_the_keywords_of_functions_are_shown_and_held_to(name):
    function, x = getattr(F, name), np.ones((1, 2, 3))
    arguments = (x, x, x, np.ones(3)) if "additive" in name else (x,) * (4 if "backward" in name else 3)
    shown = inspect.signature(function).parameters
    assert [shown[key].default for key in ("causal", "scale", "dropout", "empty_rows")] == [False, None, 0.0, "zero"]
    assert all(one.kind is not one.VAR_KEYWORD for one in shown.values())
    with pytest.raises(TypeError, match=r"'is_causal': did you mean causal\? The options of attention are keep_mask,"):
        function(*arguments, is_causal=True)


books = pytest.mark.parametrize("kind", ["MultiHeadAttention", "DotProductAttention", "AdditiveAttention"])


@books
@pytest.mark.parametrize("name", ["mask", "attn_mask", "attention_mask", "key_padding_mask", "src_key_padding_mask"])
def test_a_mask_by_another_name_is_told_what_to_write(side, kind, name):
    padding = "padding" in name  # True = hide, (B, K)
    lens, keep = (f"(~{name}).sum(-1)", f"~{name}[:, None]") if padding else (f"{name}.sum(-1)", name)
    layer, ones = built(side, kind)
    with pytest.raises(TypeError, match=f"{kind}.*unexpected keyword argument '{name}'.*causal=True") as caught:
        layer(ones((2, 3, 4)), ones((2, 5, 4)), ones((2, 5, 4)), **{name: ones((3, 5))})
    function = "additive_attention" if kind == "AdditiveAttention" else "dot_product_attention"
    text = str(caught.value)
    items, rows = ("", "") if padding else (" of a mask (B, K) or (B, Q, K)", ", which is (Q, K) or (B, Q, K)")
    assert f"valid_lens={lens}{items};" in text
    assert f" call {side[0].__name__}.functional.{function}(..., keep_mask={keep}){rows}," in text
    told = f"If True hides, as in torch.nn.MultiheadAttention, it is ~{name}" in text
    assert told == (name in ("mask", "attn_mask"))


@books
@pytest.mark.parametrize("name", ["is_causal", "use_causal_mask"])
def test_causal_by_another_name(side, kind, name):
    layer, ones = built(side, kind)
    x = ones((2, 3, 4))
    with pytest.raises(TypeError, match=f"{kind}.*unexpected keyword argument '{name}': write causal=True$"):
        layer(x, x, x, **{name: True})


def test_what_is_said_of_lengths_of_a_mask_is_so(side):
    """Both sums, and causal=True."""
    layer, ones = built(side, "DotProductAttention")
    functional = side[0].functional
    x = ones((2, 3, 4)) * (np.arange(1, 4)[:, None] if side[0] is mha_c else 1)
    mask = np.array([[[True, True, False]], [[True, False, False]]]).repeat(3, 1)
    for keep, given in (
        (mask, {"valid_lens": mask[:, 0].sum(-1)}),
        (mask, {"valid_lens": mask.sum(-1)}),
        (np.tri(3, dtype=bool)[None].repeat(2, 0), {"causal": True}),
    ):
        kept = keep if side[0] is mha_c else needs.module("torch").from_numpy(keep)
        found, expected = layer(x, x, x, **given), functional.dot_product_attention(x, x, x, keep_mask=kept)
        np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=1e-12)


@books
def test_another_keyword_is_told_how_the_layer_is_called(side, kind):
    layer, ones = built(side, kind)
    x = ones((2, 3, 4))
    with pytest.raises(TypeError, match=rf"{kind}.*'need_weights'.*\(queries, keys, values, valid_lens=None"):
        layer(x, x, x, need_weights=False)


def test_four_sizes_are_shown_the_two_forms(side):
    """One size is missing for the first edition's form, and 0.5 would be the bias of the other."""
    with pytest.raises(TypeError, match="in one of these forms") as caught:
        side[0].MultiHeadAttention(100, 100, 5, 0.5)
    assert all(form in str(caught.value) for form in mha_c.MultiHeadAttention._forms)


@books
@pytest.mark.parametrize("as_array", [False, True])
def test_lengths_before_values_are_told_the_order(side, kind, as_array):
    layer, ones = built(side, kind)
    lens = np.array([3, 2]) if as_array else [3, 2]
    if as_array and side[0] is not mha_c:
        lens = needs.module("torch").from_numpy(lens)
    with pytest.raises(TypeError, match=rf"{kind}\(queries, keys, values, valid_lens\)"):
        layer(ones((2, 4, 4)), ones((2, 6, 4)), lens, ones((2, 6, 4)))


@books
def test_values_left_out_are_called_missing(side, kind):
    layer, ones = built(side, kind)
    with pytest.raises(TypeError, match=f"{kind} is called with queries, keys and values; missing or None: values"):
        layer(ones((2, 4, 4)), ones((2, 6, 4)))


@books
def test_a_mask_as_lengths_is_told_the_sum_and_the_place_for_masks(side, kind):
    layer, ones = built(side, kind)
    x = ones((2, 3, 4))
    with pytest.raises(TypeError, match=r"mask\.sum\(-1\).*keep_mask") as caught:
        layer(x, x, x, np.ones((2, 3), bool))
    assert f"{side[0].__name__}.functional" in str(caught.value)


@pytest.mark.parametrize(
    ("queries", "advice"), [([["a", "b"]], False), (np.array([[[1j]]]), False), (np.array([[[1]]]), True)]
)
def test_a_conversion_is_advised_to_numbers_alone(queries, advice):
    with pytest.raises(TypeError, match=r"queries has dtype|queries must.*got words") as caught:
        mha_c.DotProductAttention(0.0)(queries, X, X)
    assert ("np.asarray" in str(caught.value)) == advice


@books
def test_inputs_without_a_batch_axis_are_told_where_it_goes(side, kind):
    layer, ones = built(side, kind)
    x = ones((3, 4))
    with pytest.raises(mha_c.ShapeError, match=r"queries\[None\]"):
        layer(x, x, x)
    assert layer(x[None], x[None], x[None]).shape[:2] == (1, 3)


def test_too_many_positions_say_what_to_raise(side):
    encoding = side[0].PositionalEncoding(4, 0.0, max_len=3)
    with pytest.raises(ValueError, match=r"raise max_len \(now 3\)"):
        encoding(side[1]((1, 4, 4)))


def test_explain_without_the_call_names_itself(mha):
    with pytest.raises(TypeError, match=r"explain\(layer, queries, keys, values\)"):
        mha_c.explain(mha)
    with pytest.raises(TypeError, match=r"explain\(layer, queries, keys, values\)"):
        mha_c.explain(mha, X)


@books
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", ["strided", "jagged"])
def test_nested_tensors_are_told_of_padding_and_lengths(side, kind, layout):
    torch = needs.module("torch")
    layer, _ = built(side, kind)
    x = torch.ones(2, 3, 4, dtype=torch.float64)
    nested = torch.nested.nested_tensor([x[0], x[1, :2]], layout=getattr(torch, layout))
    for inputs in ((nested,) * 3, (x, nested, nested)):
        with pytest.raises(TypeError, match=r"is a nested tensor.*to_padded_tensor.*valid_lens"):
            layer(*inputs)
    padded = torch.nested.to_padded_tensor(nested, 0)
    assert layer(padded, padded, padded, [3, 2]).shape[:2] == (2, 3)


def test_fewer_tokens_than_keys_that_have_weights(side):
    """Behind the tokens there may be padding, and nothing else."""
    layer, ones = built(side, "MultiHeadAttention")
    queries, keys = ones((1, 4, 4)), ones((1, 6, 4))
    layer(queries, keys, keys)
    with pytest.raises(
        ValueError, match="tokens has 2 tokens for 6 keys, and the keys after them have weights, too: give 6"
    ):
        layer.view(tokens="a b")
    layer(queries, keys, keys, [2])
    assert "2 queries x 2 keys" in layer.view(tokens="a b").text


# --- Without torch, matplotlib or dask; a reader that goes ------------------------------------------------

ABSENT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "matplotlib", "dask"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
import mha_c
"""


def without_extras(code):
    done = children.python("-W", "error", "-c", ABSENT + code, status=None)
    return done.stdout.strip() if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


def test_help_and_inspect_work_without_torch():
    assert without_extras("print(hasattr(mha_c, 'torch'), hasattr(mha_c, 'functional'))") == "False True"
    text = without_extras("import inspect, pydoc; print(len(inspect.getmembers(mha_c)), pydoc.render_doc(mha_c))")
    number, _, page = text.partition(" ")
    assert int(number) == len(inspect.getmembers(mha_c)) - hasattr(mha_c, "torch")
    assert "MultiHeadAttention" in page and "MultiHeadAttention" in pydoc.render_doc(mha_c)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import mha_c.torch", "ModuleNotFoundError: mha_c.torch needs torch: pip install torch"),
        ("from mha_c import torch", "ModuleNotFoundError: mha_c.torch needs torch: pip install torch"),
        ("mha_c.torch.MultiHeadAttention", "AttributeError: mha_c.torch needs torch: pip install torch"),
        ("import mha_c.dask", 'ModuleNotFoundError: mha_c.dask needs dask: pip install "mha_c[dask]"'),
        ("mha_c.show_heatmaps([[[[1.0]]]], 'k', 'q')", 'show_heatmaps needs matplotlib: pip install "mha_c[viz]"'),
    ],
)
def test_what_is_missing_is_said_with_the_line_that_installs_it(code, words):
    """An extra in brackets is quoted: some shells take brackets for a pattern."""
    assert without_extras(code).endswith(words)
