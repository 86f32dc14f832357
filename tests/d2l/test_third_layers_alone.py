"""GQAAttention and CausalAttention by themselves, without d2l: refusals, gradients, weights that are read."""

import copy
import pickle

import numpy as np
import pytest
import torch

import mha_c
import needs
from mha_c import torch as mt

needs.of_torch("torch.nn.functional.scaled_dot_product_attention(enable_gqa)")


@pytest.mark.parametrize(
    ("kind", "features"),
    [
        (mha_c.GQAAttention, r"keys has 4 features \(shape \(2, 5, 4\)\), but W_k expects 16"),
        (mt.GQAAttention, r"keys must have shape \(B, T, 16\), got \(2, 5, 4\)"),
    ],
)
def test_refusals(kind, features):
    with pytest.raises(ValueError, match=r"num_hiddens \(15\) must be divisible by num_heads \(4\)"):
        kind(15, 4, 2)
    with pytest.raises(ValueError, match=r"num_heads \(4\) must be divisible by num_kv_heads \(3\)"):
        kind(16, 4, 3)
    with pytest.raises(ValueError, match="must be even, got 3"):
        kind(12, 4, 2, rope=True)
    layer = kind(16, 4, 2)
    x = np.ones((2, 5, 16), np.float32)
    x = x if kind is mha_c.GQAAttention else torch.from_numpy(x)
    with pytest.raises(AttributeError, match="no attention_weights yet"):
        _ = layer.attention_weights
    with pytest.raises(mha_c.ShapeError, match=features):
        layer(x, x[..., :4], x)
    with pytest.raises(TypeError, match="the order is GQAAttention"):
        layer(x, x, [1, 2], x)
    with pytest.raises(mha_c.ShapeError, match="valid_lens"):
        layer(x, x, x, [1, 2, 3])


def test_refusals_of_causal_attention(rng):
    layer, x = mha_c.CausalAttention(16, 4, rope=True, rng=0), rng.standard_normal((2, 5, 16))
    with pytest.raises(ValueError, match=r"num_hiddens \(15\) must be divisible by num_heads \(4\)"):
        mha_c.CausalAttention(15, 4)
    with pytest.raises(ValueError, match="must be even, got 3"):
        mha_c.CausalAttention(12, 4, rope=True)
    with pytest.raises(AttributeError, match="CausalAttention has no attention_weights yet"):
        _ = layer.attention_weights
    with pytest.raises(mha_c.ShapeError, match=r"X must have shape \(B, T, 16\), got \(2, 5, 4\)"):
        layer(x[..., :4])
    with pytest.raises(TypeError, match="X must be float32 or float64, got int64"):
        layer(x.astype(int))
    with pytest.raises(TypeError, match="X must be float32 or float64, got int64"):
        layer(x.astype(int), cache=layer.new_cache(2, 8))
    with pytest.raises(mha_c.ShapeError, match=r"X must have shape \(B, T, 16\), got \(2, 5, 4\)"):
        layer(x[..., :4], cache=layer.new_cache(2, 8))
    with pytest.raises(RuntimeError, match="backward: call backward once after each call in training"):
        layer.backward(x)
    copied = pickle.loads(pickle.dumps(layer))
    np.testing.assert_array_equal(copied(x), layer(x))
    np.testing.assert_array_equal(copied.attention_weights, layer.attention_weights)


def test_backward_needs_a_call_and_allows_one(rng):
    layer, x = mha_c.GQAAttention(16, 4, 2, rng=0), rng.standard_normal((2, 5, 16))
    with pytest.raises(RuntimeError, match="once after each call in training mode"):
        layer.backward(x)
    layer.train()(x, x, x)
    layer.backward(x)
    with pytest.raises(RuntimeError, match="call backward once after each call"):
        layer.backward(x)
    layer.eval()(x, x, x)
    assert layer.W_q.weight_grad.shape == (16, 16)
    assert "GQAAttention" in repr(layer) and layer.num_kv_heads == 2 and layer.num_heads == 4


@pytest.mark.parametrize("kind", ["grouped", "causal"])
def test_gradients_are_those_of_differences(rng, kind):
    """Central differences in float64 with a step of 1e-6: errors of some 1e-16 / 1e-6 + 1e-12, times a loss of 30."""
    inputs, others = [rng.standard_normal((2, n, 8)) for n in (3, 4, 4)], ([2, 4],)
    layer = mha_c.GQAAttention(8, 4, 2, True, True, dtype="float64", rng=0)
    if kind == "causal":
        layer, inputs, others = mha_c.CausalAttention(8, 2, True, True, dtype="float64", rng=0), inputs[:1], ()
    direction = rng.standard_normal((2, 3, 8))

    def loss():
        return float((layer(*inputs, *others) * direction).sum())

    layer(*inputs, *others, training=True)
    gradients = layer.backward(direction)
    gradients = gradients if kind == "grouped" else [gradients]
    for x, gradient in zip(inputs, gradients):
        for place in [(0, 1, 2), (1, 2, 5), (0, 3, 1) if x.shape[1] > 3 else (0, 0, 0)]:
            kept, found = x[place], []
            for step in (1e-6, -1e-6):
                x[place] = kept + step
                found.append(loss())
            x[place] = kept
            np.testing.assert_allclose(gradient[place], (found[0] - found[1]) / 2e-6, atol=1e-7)


def test_padding_may_hold_nan(rng):
    layer, x = mha_c.GQAAttention(16, 4, 2, causal=False, rng=0), rng.standard_normal((1, 5, 16))
    spoilt = x.copy()
    spoilt[:, 3:] = np.nan
    clean, found = (layer(x, keys, keys, [3], training=True) for keys in (x, spoilt))
    np.testing.assert_array_equal(clean, found)
    layer.backward(np.ones_like(found))
    assert all(np.isfinite(p.grad).all() for p in layer.parameters())


def test_under_a_compiler(rng):
    layer, x = mt.GQAAttention(16, 4, 2, rope=True).eval(), torch.randn(2, 5, 16)
    compiled = torch.compile(layer, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, x, x), layer(x, x, x), atol=1e-6, rtol=1e-6)


def test_one_array_of_weights_until_the_next_call(rng):
    layer, x = mha_c.GQAAttention(16, 4, 2, rng=0), rng.standard_normal((2, 5, 16))
    layer(x, x, x)
    weights = layer.attention_weights
    assert layer.attention_weights is weights
    layer(x, x, x)
    assert layer.attention_weights is not weights


def kinds_of_heads():
    gqa, causal = mt.GQAAttention(16, 4, 2, rope=True), mt.CausalAttention(16, 4)
    of_course = mt.variants.MultiHeadedSelfAttention(16, 4)
    return {"gqa": (gqa, 3), "causal": (causal, 1), "of a course": (of_course, 1)}


@pytest.mark.parametrize("name", ["gqa", "causal", "of a course"])
def test_weights_are_one_tensor_with_a_gradient_and_are_pickled(name, rng):
    """As those of the book's layers are, of shared key heads and causal masks too."""
    layer, n_inputs = kinds_of_heads()[name]
    x = torch.from_numpy(rng.standard_normal((2, 5, 16))).float()
    out = layer(*[x] * n_inputs)
    weights = layer.attention_weights
    assert layer.attention_weights is weights and weights.shape == (2, 4, 5, 5)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 5))
    if name != "of a course":
        assert not weights.detach().triu(1).any()
    weights.square().sum().backward()
    first = next(layer.parameters())
    assert first.grad.abs().sum() > 0 and out.requires_grad
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other.attention_weights, weights) and not other.attention_weights.requires_grad


def test_lengths_may_change_after_the_call():
    layer, x, lens = mt.GQAAttention(16, 4, 2, causal=False), torch.randn(2, 5, 16), torch.tensor([3, 5])
    layer(x, x, x, lens)
    lens.fill_(1)
    assert (layer.attention_weights[0, :, :, :3] > 0).all() and not layer.attention_weights[0, :, :, 3:].any()
