"""Tensors that have a shape and no numbers: on the meta device, and torch's fake ones."""

import contextlib
import copy
import warnings

import pytest
import torch

import needs
from mha_c import torch as mt


def test_device_meta_and_fake_tensors():
    needs.operators()
    from torch._subclasses import FakeTensorMode

    with torch.device("meta"):
        layers = [mt.MultiHeadAttention(8, 8, 8, 8, 2, 0.5, True), mt.AdditiveAttention(8, 8, 4, 0.5),
                  mt.MultiHeadAttention(8, 2, 0.1), mt.DotProductAttention(0.1)]  # fmt: skip
    x, lens = torch.randn(2, 3, 8), torch.tensor([1, 3])
    meta = x.to("meta")
    for layer in layers:
        out = layer(meta, meta, meta, lens)
        assert out.is_meta and out.shape == (2, 3, 8) and layer.attention_weights.is_meta
    assert mt.functional.dot_product_attention(meta, meta, meta, lens, dropout=0.5, rng=3).is_meta
    real = mt.MultiHeadAttention(8, 8, 8, 8, 2, 0.5, True)
    layers[0].load_state_dict(real.state_dict(), assign=True)
    assert torch.equal(layers[0].eval()(x, x, x, lens), real.eval()(x, x, x, lens))
    with FakeTensorMode():
        fake = mt.MultiHeadAttention(8, 8, 8, 8, 2, 0.5, True)
        y = torch.randn(2, 3, 8)
        assert fake(y, y, y, torch.tensor([1, 3])).shape == (2, 3, 8) and fake.attention_weights.shape == (2, 2, 3, 3)
        with torch.no_grad():
            fake(y, y, y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of any fake tensor
        assert copy.deepcopy(fake).attention_weights.shape == (2, 2, 3, 3)


@pytest.mark.parametrize("fake", ["inputs", "module", "keys", "lengths", "q", "bias", "W_q", "softcap"])
def test_fake_tensors_among_real_ones(fake):
    needs.operators()
    from torch._subclasses import FakeTensorMode

    def made(what, *shape):
        with FakeTensorMode() if fake in what.split() or fake == "inputs" else contextlib.nullcontext():
            return torch.ones(*shape)

    with FakeTensorMode() if fake == "module" else contextlib.nullcontext():
        layer = mt.MultiHeadAttention(8, 8, 8, 8, 2, 0.5)
    q, keys = made("q", 2, 3, 8), made("keys", 2, 3, 8)
    with pytest.raises(TypeError, match=r"fake tensors, which are without numbers|has no NumPy form"):
        if fake in ("inputs", "module", "keys", "lengths"):
            layer(q, keys, keys, made("lengths", 2).long() if fake != "lengths" else made("lengths", 2))
        elif fake == "W_q":
            mt.functional.additive_attention(q, keys, keys, torch.ones(4), made("W_q", 4, 8), torch.ones(4, 8))
        else:
            cap = 2.0 if fake == "softcap" else None
            mt.functional.dot_product_attention(q, keys, keys, bias=made("bias softcap", 3, 3), softcap=cap)
    with FakeTensorMode(allow_non_fake_inputs=True):
        y = torch.ones(2, 3, 8)
        assert layer(y, y, y).shape == y.shape and mt.functional.dot_product_attention(y, y, q).shape == y.shape
