"""Habits from elsewhere: what a call that torch's or another library's users write is told to write here."""

import inspect

import numpy as np
import pytest

import mha_c
import needs
from constructor_forms import FORMS
from mha_c import functional as F


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


MASKS = "mask attn_mask attention_mask key_padding_mask src_key_padding_mask src_mask tgt_mask".split()


@books
@pytest.mark.parametrize("name", MASKS)
def test_a_mask_by_another_name_is_told_what_to_write(side, kind, name):
    padding = "padding" in name  # True = hide, (B, K)
    lens, keep = (f"(~{name}).sum(-1)", f"~{name}") if padding else (f"{name}.sum(-1)", name)
    layer, ones = built(side, kind)
    with pytest.raises(TypeError, match=f"{kind}.*unexpected keyword argument '{name}'.*causal=True") as caught:
        layer(ones((2, 3, 4)), ones((2, 5, 4)), ones((2, 5, 4)), **{name: ones((3, 5))})
    text, by_head = str(caught.value), kind == "MultiHeadAttention"
    assert f"keep_mask={keep}{'[:, None, None]' if by_head else '[:, None]'} of a mask (B, K)" in text
    rows = f"keep_mask={keep} of a mask (Q, K) or {'(B, H, Q, K)' if by_head else '(B, Q, K)'}"
    assert (rows in text) == (not padding)
    assert f"valid_lens={lens}{'' if padding else ' of a mask (B, K) or (B, Q, K)'} is faster" in text
    told = f"If True hides, as in torch.nn.MultiheadAttention, it is ~{name}; a mask of floats is bias={name}" in text
    assert told == (not padding and name != "attention_mask")


def test_what_is_said_of_a_mask_by_another_name_is_so(side):
    """Padding at the left: True, 1 or False where it hides, of items, and the same of all pairs."""
    layer, ones = built(side, "MultiHeadAttention")
    x = ones((2, 3, 4)) * (np.arange(1, 4)[:, None] if side[0] is mha_c else 1)
    mask = np.array([[False, True, True], [True, True, True]])
    mask = mask if side[0] is mha_c else needs.module("torch").from_numpy(mask)
    expected = np.asarray(layer(x, x, x, keep_mask=mask[:, None, None]).tolist())
    for keep in (~(~mask)[:, None, None], mask[:, None, None] * 1):
        np.testing.assert_allclose(np.asarray(layer(x, x, x, keep_mask=keep).tolist()), expected, rtol=1e-12)
    with pytest.raises(
        ValueError, match=r"keep_mask has shape \(2, 3\).*axis 0 is 2.*write keep_mask\[:, None, None\]"
    ):
        layer(x, x, x, keep_mask=mask)
    with pytest.raises(ValueError, match=r"keep_mask has dtype.*numbers other than 0 and 1"):
        layer(x, x, x, keep_mask=mask[:, None, None] * 2)


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
    assert all(form in str(caught.value) for form in FORMS)


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
    assert "keep_mask=mask" in str(caught.value)


@pytest.mark.parametrize(
    ("queries", "advice"), [([["a", "b"]], False), (np.array([[[1j]]]), False), (np.array([[[1]]]), True)]
)
def test_a_conversion_is_advised_to_numbers_alone(queries, advice):
    x = np.ones((2, 3, 4))
    with pytest.raises(TypeError, match=r"queries has dtype|queries must.*got words") as caught:
        mha_c.DotProductAttention(0.0)(queries, x, x)
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


@pytest.mark.parametrize("inputs", [(), (np.ones((2, 3, 4)),)], ids=["no inputs", "queries alone"])
def test_explain_without_the_call_names_itself(inputs):
    with pytest.raises(TypeError, match=r"explain\(layer, queries, keys, values\)"):
        mha_c.explain(mha_c.MultiHeadAttention(6, 2, 0.0), *inputs)


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
