"""mha_c.variants against the originals' formulas, written here with einsum and axis names as the originals do."""

import copy
import pickle

import numpy as np
import pytest

import mha_c
from checks import close, same
from mha_c import variants

LAYERS = {
    "labelled": lambda **named: variants.MultiHeadedSelfAttention(12, 3, **named),
    "ai summer": lambda **named: variants.SelfAttentionAISummer(12, **named),
    "ai summer, heads": lambda **named: variants.MultiHeadSelfAttentionAISummer(12, 4, **named),
    "ai summer, dim_head": lambda **named: variants.MultiHeadSelfAttentionAISummer(12, heads=2, dim_head=5, **named),
}


@pytest.fixture
def x(rng, dtype):
    return rng.standard_normal((2, 7, 12)).astype(dtype)


@pytest.fixture(params=list(LAYERS))
def make(request):
    return LAYERS[request.param]


def softmax(scores):
    """Over the last axis; a row of -inf becomes zeros."""
    largest = scores.max(-1, keepdims=True)
    e = np.exp(scores - np.where(np.isneginf(largest), 0, largest))
    total = e.sum(-1, keepdims=True)
    return e / np.where(total == 0, 1, total)


def ai_summer(layer, x, mask=None):
    """self-attention-cv: rearrange(to_qvk(x), 'b t (d k h) -> k b h t d', k=3), softmax, join, W_0."""
    state = layer.state_dict()
    heads = getattr(layer, "heads", 1)
    dim_head = getattr(layer, "dim_head", layer.dim)
    features = x.astype(np.float64) @ state["to_qvk.weight"].T
    q, k, v = features.reshape(*x.shape[:2], dim_head, 3, heads).transpose(3, 0, 4, 1, 2)
    scores = np.einsum("bhid,bhjd->bhij", q, k) * dim_head**-0.5
    if mask is not None:
        scores = np.where(mask, -np.inf, scores)
    out = np.einsum("bhij,bhjd->bhid", softmax(scores), v).transpose(0, 2, 1, 3).reshape(*x.shape[:2], -1)
    return out @ state["W_0.weight"].T if "W_0.weight" in state else out


# --- scaled_dot_product_attention ----------------------------------------------------------------


@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (2, 1, 3), (0,), (1, 2, 1, 2)])
def test_any_leading_axes(rng, dtype, leading):
    q, k, v = (rng.standard_normal((*leading, *s)).astype(dtype) for s in ((5, 4), (9, 4), (9, 6)))
    context, weights = variants.scaled_dot_product_attention(q, k, v)
    expected = softmax(q.astype(np.float64) @ np.swapaxes(k, -1, -2) / 2)
    close(weights, expected, dtype)
    close(context, expected @ v, dtype)


def test_leading_axes_broadcast(rng, dtype):
    q, k, v = (rng.standard_normal(s).astype(dtype) for s in ((2, 1, 5, 4), (3, 9, 4), (9, 6)))
    context, weights = variants.scaled_dot_product_attention(q, k, v)
    assert context.shape == (2, 3, 5, 6) and weights.shape == (2, 3, 5, 9)
    close(context, softmax(q.astype(np.float64) @ np.swapaxes(k, -1, -2) / 2) @ v, dtype)


def test_shapes_that_do_not_fit():
    call = variants.scaled_dot_product_attention
    with pytest.raises(mha_c.ShapeError, match=r"key must have shape \(..., rows, features\), got \(4,\)"):
        call(np.ones((5, 4)), np.ones(4), np.ones((9, 6)))
    with pytest.raises(mha_c.ShapeError, match=r"query \(2, 5, 4\), key \(3, 9, 4\) and value"):
        call(np.ones((2, 5, 4)), np.ones((3, 9, 4)), np.ones((9, 6)))
    with pytest.raises(mha_c.ShapeError):
        call(np.ones((5, 4)), np.ones((9, 3)), np.ones((9, 6)))


# --- The layers ----------------------------------------------------------------------------------


def test_multi_headed_self_attention(x, dtype, isa):
    layer = variants.MultiHeadedSelfAttention(d_model=12, num_heads=3, dtype=dtype, rng=1)
    book = mha_c.MultiHeadAttention(12, 3, 0.0, dtype=dtype)
    names = ("query_projection", "key_projection", "value_projection", "final_linear_layer")
    state = layer.state_dict()
    assert list(state) == [f"{name}.weight" for name in names]
    book.load_state_dict({f"{ours}.weight": state[f"{name}.weight"] for ours, name in zip(
        ("W_q", "W_k", "W_v", "W_o"), names)})  # fmt: skip
    same(layer(x), book(x, x, x))
    same(layer.attention_weights, book.attention_weights)
    assert layer.attention_weights.shape == (2, 3, 7, 7)
    layer.final_linear_layer.weight = np.zeros((12, 12))
    assert not layer(x).any()


@pytest.mark.parametrize("mask", ["none", "causal", "random", "a row drops all"])
@pytest.mark.parametrize("name", [name for name in LAYERS if "summer" in name])
def test_ai_summer(x, dtype, isa, rng, name, mask):
    layer = LAYERS[name](dtype=dtype, rng=2)
    drop = {
        "none": None,
        "causal": np.triu(np.ones((7, 7), bool), k=1),
        "random": rng.random((7, 7)) < 0.4,
        "a row drops all": np.arange(7)[:, None] + np.zeros(7) < 1,
    }[mask]
    out = layer(x, drop)
    close(out, ai_summer(layer, x, drop), dtype)
    if mask == "a row drops all":
        assert not out[:, 0].any()


def test_parameters_of_the_ai_summer_layers():
    single, multi = variants.SelfAttentionAISummer(12), variants.MultiHeadSelfAttentionAISummer(12, 2, 5)
    assert {n: a.shape for n, a in single.state_dict().items()} == {"to_qvk.weight": (36, 12)}
    assert {n: a.shape for n, a in multi.state_dict().items()} == {"to_qvk.weight": (30, 12), "W_0.weight": (12, 10)}
    default = variants.MultiHeadSelfAttentionAISummer(64)
    assert (default.heads, default.dim_head) == (8, 8)
    assert repr(multi) == (
        "MultiHeadSelfAttentionAISummer(\n"
        "  (to_qvk): Linear(in_features=12, out_features=30, bias=False)\n"
        "  (W_0): Linear(in_features=10, out_features=12, bias=False)\n"
        ")"
    )


def test_the_projection_alone_keeps_the_originals_order(x, dtype):
    layer = variants.MultiHeadSelfAttentionAISummer(12, 4, dtype=dtype, rng=0)
    layer(x)
    close(layer.to_qvk(x), x.astype(np.float64) @ layer.to_qvk.weight.T, dtype)


def test_new_weights_are_used(x, dtype, make):
    layer, other = make(dtype=dtype, rng=0), make(dtype=dtype, rng=1)
    before = layer(x)
    layer.load_state_dict(other.state_dict())
    same(layer(x), other(x))
    assert (layer(x) != before).any()
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        same(twin(x), layer(x))


def test_arguments(make, rng, dtype):
    layer = make()
    for wrong in (np.ones((7, 12), dtype), np.ones((2, 7, 11), dtype), np.ones((2, 2, 7, 12), dtype)):
        with pytest.raises(mha_c.ShapeError, match=r"x must have shape \(B, T, 12\), got"):
            layer(wrong)
    with pytest.raises(TypeError, match="x must be float32 or float64, got int64"):
        layer(np.ones((2, 7, 12), int))


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: variants.MultiHeadedSelfAttention(10, 3), ValueError, r"d_model \(10\) .* num_heads \(3\)"),
        (lambda: variants.MultiHeadedSelfAttention(0, 3), ValueError, "d_model must be at least 1"),
        (lambda: variants.MultiHeadedSelfAttention(12, 0), ValueError, "num_heads must be at least 1"),
        (lambda: variants.SelfAttentionAISummer(1.5), TypeError, "dim must be a whole number"),
        (
            lambda: variants.MultiHeadSelfAttentionAISummer(4),
            ValueError,
            r"dim \(4\) // heads \(8\) is 0",
        ),
        (lambda: variants.MultiHeadSelfAttentionAISummer(12, 2, 0), ValueError, "dim_head must be at least 1"),
        (lambda: variants.MultiHeadSelfAttentionAISummer(12, True), TypeError, "heads must be a whole number"),
    ],
)
def test_constructor_arguments(build, error, message):
    with pytest.raises(error, match=message):
        build()


def test_masks_that_do_not_fit():
    layer, x = variants.SelfAttentionAISummer(12), np.ones((2, 7, 12))
    with pytest.raises(TypeError, match="mask must be bool, True = drop, got float64"):
        layer(x, mask=np.zeros((7, 7)))
    with pytest.raises(mha_c.ShapeError, match=r"mask must have shape \(T, T\) = \(7, 7\), got \(2, 7, 7\)"):
        layer(x, mask=np.zeros((2, 7, 7), bool))


def test_the_other_editions_of_the_book(x, dtype):
    """mxnet: initialize() and use_bias; TensorFlow: sizes in the constructor and training= in the call."""
    mxnet = mha_c.MultiHeadAttention(12, 3, 0.5, use_bias=False)
    mxnet.initialize()
    assert mxnet(x, x, x, np.array([3, 2])).shape == (2, 7, 12)
    tensorflow = mha_c.MultiHeadAttention(12, 12, 12, 12, 3, 0.5)
    same(tensorflow(x, x, x, [3, 2], training=False), tensorflow(x, x, x, [3, 2]))
    assert (tensorflow(x, x, x, [3, 2], training=True) != tensorflow(x, x, x, [3, 2])).any()
