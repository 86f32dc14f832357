"""Constructors of the layers: the book's two forms, what each argument may be, and sizes that no array can have."""

import inspect

import numpy as np
import pytest

import mha_c
from constructor_forms import FORMS, SIZED, fitting_inputs
from mha_c.layers import AdditiveAttention, DotProductAttention, MultiHeadAttention

inputs = pytest.fixture(fitting_inputs)


# --- Constructors --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (SIZED, {}),
        ((*SIZED, False), {}),
        (SIZED[:5], {"dropout": 0.1}),
        (SIZED[:3], {"num_hiddens": 12, "num_heads": 3, "dropout": 0.1, "bias": False}),
        ((), dict(zip(("key_size", "query_size", "value_size", "num_hiddens", "num_heads", "dropout"), SIZED))),
        ((), {"dropout": 0.1, "use_bias": False, "num_heads": np.int64(3), "num_hiddens": 12, **{
            "key_size": 5, "query_size": 6, "value_size": 7}}),
    ],
)  # fmt: skip
def test_the_sized_form(args, named):
    mha = MultiHeadAttention(*args, **named)
    shapes = {name: value.shape for name, value in mha.state_dict().items()}
    assert shapes == {"W_q.weight": (12, 6), "W_k.weight": (12, 5), "W_v.weight": (12, 7), "W_o.weight": (12, 12)}
    assert (mha.num_hiddens, mha.num_heads, mha.attention.dropout.p) == (12, 3, 0.1)


@pytest.mark.parametrize(
    ("args", "named", "bias"),
    [
        ((12, 3, 0.1), {}, False),
        ((12, 3, 0.1, True), {}, True),
        ((12, 3), {"dropout": 0.1, "use_bias": True}, True),
        ((), {"num_hiddens": 12, "num_heads": 3, "dropout": 0.1, "bias": np.True_}, True),
    ],
)
def test_the_lazy_form(args, named, bias, inputs):
    mha = MultiHeadAttention(*args, **named)
    assert repr(mha.W_o) == f"LazyLinear(in_features=0, out_features=12, bias={bias})"
    with pytest.raises(AttributeError, match=r"W_q is not initialised yet"):
        mha.W_q.weight  # noqa: B018
    with pytest.raises(ValueError, match=r"W_q, W_k, W_v, W_o; call the layer once"):
        mha.state_dict()
    assert not hasattr(mha.W_q, "weight") and not hasattr(mha, "attention_weights")
    mha(*inputs)
    assert repr(mha.W_v) == f"Linear(in_features=7, out_features=12, bias={bias})"
    assert [name for name in mha.state_dict() if "bias" in name] == [f"W_{x}.bias" for x in "qkvo" if bias]


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ((), {}),
        ((12,), {}),
        ((12, 3), {}),
        ((12, 3, 0.1, False, 1), {}),
        (SIZED[:5], {}),
        ((*SIZED, False, 1), {}),
        ((12, 3, 0.1), {"key_size": 5}),
        ((12, 3, 0.1), {"num_heads": 3}),
        (SIZED, {"num_hiddens": 12}),
        ((12, 3, 0.1), {"biass": True}),
        ((12, 3, 0.1, False), {"use_bias": False}),
        ((12,), {"dropout": 0.1, "key_size": 3, "query_size": 3, "value_size": 3, "num_heads": 2}),
    ],
)
def test_neither_form(args, named):
    with pytest.raises(TypeError) as error:
        MultiHeadAttention(*args, **named)
    for form in FORMS:  # the message shows both signatures
        assert f"MultiHeadAttention({form})" in str(error.value)


def test_constructors_show_their_arguments():
    shown = [str(inspect.signature(kind)) for kind in (MultiHeadAttention, AdditiveAttention)]
    assert shown[0].startswith("(num_hiddens, num_heads, dropout, bias=False, *, ")
    assert shown[1].startswith("(num_hiddens, dropout, *, ") and "**" not in "".join(shown)


def test_what_is_wrong_with_a_constructors_call():
    with pytest.raises(TypeError, match=r"got an unexpected keyword argument 'heads': did you mean num_heads\?"):
        MultiHeadAttention(12, 3, 0.1, heads=3)
    with pytest.raises(TypeError, match=r"MultiHeadAttention\(\) is missing dropout; call it in one of these forms"):
        MultiHeadAttention(12, 3)


def test_both_words_for_bias():
    with pytest.raises(TypeError, match="bias and use_bias mean the same"):
        MultiHeadAttention(12, 3, 0.1, bias=True, use_bias=True)


def test_additive_forms(inputs):
    sized, lazy = AdditiveAttention(5, 6, 8, 0.1, rng=3), AdditiveAttention(num_hiddens=8, dropout=0.1, rng=3)
    for layer in (sized, lazy):
        layer(*inputs)
        shapes = {name: value.shape for name, value in layer.state_dict().items()}
        assert list(shapes.items()) == [("W_k.weight", (8, 5)), ("W_q.weight", (8, 6)), ("w_v.weight", (1, 8))]
    with pytest.raises(TypeError, match=r"AdditiveAttention\(key_size, query_size, num_hiddens, dropout\)"):
        AdditiveAttention(5, 6, 8)


@pytest.mark.parametrize(
    "build",
    [
        lambda **named: MultiHeadAttention(12, 3, 0.1, **named),
        lambda **named: AdditiveAttention(8, 0.1, **named),
        lambda **named: DotProductAttention(0.1, **named),
    ],
)
def test_keyword_only_arguments_of_every_layer(build):
    layer = build(dtype="float64", rng=1, empty_rows="zero")
    assert layer.dtype == np.float64 and layer.empty_rows == "zero" and layer.training is False
    for wrong in (np.float16, "int32", None, object(), "floaty"):
        with pytest.raises(TypeError, match="dtype must be float32 or float64"):
            build(dtype=wrong)
    with pytest.raises(ValueError, match="empty_rows must be 'uniform' or 'zero', got 'nan'"):
        build(empty_rows="nan")
    for wrong in (1.5, True, "0", np.random.RandomState(0)):
        with pytest.raises(TypeError, match="rng must be"):
            build(rng=wrong)
    with pytest.raises(ValueError, match="rng must be at least 0"):
        build(rng=-1)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"num_hiddens": 10}, ValueError, r"num_hiddens \(10\) must be divisible by num_heads \(3\)"),
        ({"num_hiddens": 0}, ValueError, "num_hiddens must be at least 1, got 0"),
        ({"num_hiddens": 12.0}, TypeError, r"num_hiddens must be a whole number, got 12.0 \(float\): write 12$"),
        ({"num_heads": 0.0}, TypeError, r"num_heads must be a whole number, got 0.0 \(float\)$"),
        ({"num_heads": 0}, ValueError, "num_heads must be at least 1, got 0"),
        ({"num_heads": -2}, ValueError, "num_heads must be at least 1, got -2"),
        ({"num_heads": 1.5}, TypeError, "num_heads must be a whole number"),
        ({"num_heads": True}, TypeError, "num_heads must be a whole number, got True"),
        ({"num_heads": None}, TypeError, "num_heads must be a whole number"),
        ({"num_heads": "4"}, TypeError, "num_heads must be a whole number, got '4'"),
        ({"num_heads": np.array(3)}, TypeError, "num_heads must be a whole number"),
        ({"key_size": 0, "query_size": 6, "value_size": 7}, ValueError, "key_size must be at least 1"),
        ({"key_size": 5, "query_size": "6", "value_size": 7}, TypeError, "query_size must be a whole number"),
        ({"dropout": -0.1}, ValueError, "dropout must be between 0 and 1, got -0.1"),
        ({"dropout": 1.1}, ValueError, "dropout must be between 0 and 1"),
        ({"dropout": np.nan}, ValueError, "dropout must be between 0 and 1, got nan"),
        ({"dropout": "0.1"}, TypeError, "dropout must be a real number between 0 and 1, got '0.1'"),
        ({"dropout": True}, TypeError, "dropout must be a real number"),
        ({"bias": 1}, TypeError, "bias must be True or False, got 1"),
        ({"bias": None}, TypeError, "bias must be True or False"),
    ],
)
def test_values_of_constructor_arguments(change, error, message):
    with pytest.raises(error, match=message):
        MultiHeadAttention(**{"num_hiddens": 12, "num_heads": 3, "dropout": 0.1, **change})


@pytest.mark.parametrize("n", [2**70, 2**62])
def test_sizes_that_no_array_can_have(n):
    refused, x = "must be at most|would be too large", np.ones((1, 2, 4))
    for build in (
        lambda: MultiHeadAttention(4, 4, 4, n, 1, 0),
        lambda: MultiHeadAttention(n, 4, 4, 4, 1, 0),
        lambda: MultiHeadAttention(n, n, 0)(x, x, x),
        lambda: AdditiveAttention(4, 4, n, 0),
        lambda: AdditiveAttention(n, 0)(x, x, x),
        lambda: mha_c.PositionalEncoding(n, 0),
        lambda: mha_c.PositionalEncoding(4, 0, max_len=n),
        lambda: mha_c.KeyValueCache(n, 3),
        lambda: mha_c.variants.MultiHeadedSelfAttention(n, 1),
        lambda: mha_c.variants.SelfAttentionAISummer(n),
        lambda: mha_c.variants.MultiHeadSelfAttentionAISummer(4, n, 1),
    ):
        with pytest.raises(ValueError, match=refused):
            build()
    if n > 2**63:  # other whole numbers are no sizes
        assert mha_c.functional.dot_product_attention(x, x, x, window=(n, 0)).shape == x.shape
        assert DotProductAttention(0.1, rng=n).dropout.p == 0.1
