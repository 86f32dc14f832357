"""Calls that never reach the core keep its rules: torch.func, forward mode, exporters, tracers, meta and fake tensors.

torch's operations broadcast a batch of one, and a fused attention may read keys where there are none.
"""

import copy
import pickle

import numpy as np
import pytest
import torch
import torch.autograd.forward_ad as fwAD

import mha_c
import needs
from mha_c import torch as mt
from torch_modules import layers

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
FakeTensorMode = needs.name_of_torch("torch._subclasses.FakeTensorMode")
Q, K = (3, 4, 8), (3, 6, 8)
WRONG_LAYERS = {  # queries, keys, values
    "keys has batch size 3, but queries has 1": ((1, 4, 8), K, K),
    "values has batch size 1, but queries has 3": (Q, K, (1, 6, 8)),
    "values has 5 keys, but keys has 6": (Q, K, (3, 5, 8)),
    "values has 1 keys, but keys has 6": (Q, K, (3, 1, 8)),
    "queries has 7 features": ((3, 4, 7), K, K),
}


def dual(call, x, *others):
    with fwAD.dual_level():
        return call(fwAD.make_dual(x, x), *others)


def fake(call, *tensors):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return call(*[mode.from_tensor(x) for x in tensors])


def traced(call, *tensors):
    module = torch.nn.Module()
    module.forward = call
    return torch.jit.trace(module, tensors, check_trace=False)


def exported(call, *tensors):
    module = torch.nn.Module()
    module.forward = lambda x, y, z: call(x, y, z)
    return torch.export.export(module, tensors)


WAYS = {
    "grad": lambda call, *tensors: torch.func.grad(lambda x, *others: call(x, *others).sum())(*tensors),
    "forward mode": dual,
    "meta": lambda call, *tensors: call(*[x.to("meta") for x in tensors]),
    "fake": fake,
    "export": exported,
    "trace": traced,
}


@pytest.mark.parametrize("way", WAYS)
def test_wrong_shapes(way):
    if way == "export":
        needs.export()
    for layer in layers(8, 2, bias=False).values():
        module = layer.to("meta") if way == "meta" else layer
        for words, shapes in WRONG_LAYERS.items():
            if "features" in words and type(layer) is mt.DotProductAttention:
                words = "keys has 8 features, but queries has 7"
            with pytest.raises(mha_c.ShapeError, match=words):
                WAYS[way](lambda *x, module=module: module(*x), *map(torch.ones, shapes))
    function = mt.functional.dot_product_attention
    q, k = torch.ones(2, 4, 3, 5), torch.ones(2, 2, 6, 5)
    wrong = {
        "v has 5 keys, but k has 6": (function, q, k, k[:, :, :5]),
        "v has 1 heads, but k has 2": (function, q, k, k[:, :1]),
        "a divisor of the 3 heads": (function, q[:, :3], k, k),
        "k has batch size 1": (function, q, k[:1], k),
    }
    like = {"meta": "meta"}.get(way, "cpu")
    for mask in (torch.ones(2, 3, 6, device=like), torch.ones(3, 1, 1, 6, device=like)):
        words = "add an axis" if mask.dim() == 3 else "does not broadcast to the scores"
        for terms in ({}, {"sinks": torch.ones(4, device=like)}):
            wrong[words, len(terms)] = lambda *x, mask=mask, t=terms: function(*x, bias=mask, **t), q, k, k
    for words, (call, *tensors) in wrong.items():
        with pytest.raises(mha_c.ShapeError, match=words if isinstance(words, str) else words[0]):
            WAYS[way](lambda *x, call=call: call(*x), *tensors)


def test_lengths_without_a_meaning():
    half = torch.ones(1, dtype=torch.bfloat16)
    reads = lambda x: x.sum() * half.tolist()[0]  # noqa: E731
    needs.torch_does("Tensor.tolist inside torch.func", lambda: torch.func.grad(reads)(torch.ones(2)).all())
    lens = torch.tensor([1.0, np.nan, 2.0])
    for layer in layers(8, 2, bias=False).values():
        for way in ("grad", "forward mode"):
            with pytest.raises(ValueError, match="NaN or infinity at position 1"):
                WAYS[way](lambda *x, layer=layer: layer(*x, lens), *map(torch.ones, (Q, K, K)))
    with pytest.raises(ValueError, match="NaN"):
        mt.masked_softmax(torch.ones(3, 1, 2), lens)


def test_shapes_on_meta():
    """Lengths and score terms, too: d2l's modules take lengths there."""
    q, x, lens = torch.ones(Q, device="meta"), torch.ones(K, device="meta"), torch.tensor([1, 2, 3])
    needs.torch_does("torch.where on device meta", lambda: torch.where(q > 0, q, 0.0).is_meta)
    for layer in layers(8, 2, bias=False).values():
        for given in (lens, lens.to("meta"), lens.to("meta").double()):
            out = layer.to("meta")(q, x, x, given)
            assert out.is_meta and out.shape == Q
        for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            shown = getattr(twin, "attention", twin).attention_weights
            assert shown.is_meta and shown.shape[1:] == (4, 6) and twin(q, x, x, lens).shape == Q
        with pytest.raises(TypeError, match="valid_lens on meta"):
            layer.to_empty(device="cpu")(torch.ones(Q), torch.ones(K), torch.ones(K), lens.to("meta"))
    options = {
        "softcap": 2.0, "relative_bias": torch.ones(1, 3), "sinks": torch.ones(1), "bias": torch.ones(4, 6),
        "keep_mask": torch.ones(4, 6, dtype=torch.bool), "valid_lens": lens,
    }  # fmt: skip
    dot, additive = mt.functional.dot_product_attention, mt.functional.additive_attention
    for function, scorer in ((dot, ()), (additive, (torch.ones(8),))):
        for name, value in options.items():
            there, meta = value if name == "softcap" else value.to("meta"), [x.to("meta") for x in scorer]
            out, weights = function(q, x, x, *meta, **{name: there}, return_weights=True)
            assert out.is_meta and out.shape == Q and weights.shape == (3, 4, 6)
            if name != "softcap":
                with pytest.raises(TypeError, match=rf"{name} on meta"):
                    function(torch.ones(Q), torch.ones(K), torch.ones(K), *scorer, **{name: there})


def test_a_traced_scale_is_of_the_inputs_type():
    module = torch.nn.Module()
    module.forward = lambda q, k, v: mt.functional.dot_product_attention(q, k, v, softcap=2.0)
    x = torch.linspace(-1, 1, 30, dtype=torch.float64).reshape(1, 6, 5)
    torch.testing.assert_close(torch.jit.trace(module, (x, x, x))(x, x, x), module(x, x, x), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lengths_of_16_bits_count_all_keys(dtype):
    """Key 259 is below 260 and rounds to it in bfloat16, as 4099 does to 4100 in float16."""
    length, n_keys = (260, 300) if dtype is torch.bfloat16 else (4100, 4200)
    whole, q, k = torch.tensor([length]), torch.randn(1, 2, 4), torch.randn(1, n_keys, 4)

    def grad(lens):
        return torch.func.grad(lambda x: mt.functional.dot_product_attention(x, k, k, lens).square().sum())(q)

    layer = mt.DotProductAttention(0.0)
    layer.dropout.register_forward_hook(lambda *_: None)  # children are called one by one
    calls = [grad, lambda lens: mt.masked_softmax(q @ k.transpose(1, 2), lens), lambda lens: layer(q, k, k, lens),
             lambda lens: mt.sequence_mask(k, lens),
             lambda lens: mt.masked_softmax(q @ k.transpose(1, 2), torch.stack([lens, lens], 1))]  # fmt: skip
    for call in calls:
        assert torch.equal(call(whole), call(whole.to(dtype)))


def test_masks_of_torchs_class_are_not_guessed():
    mha, x = mt.nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 3, 8)
    no = torch.zeros((), dtype=torch.bool)
    wrong = {
        r"key_padding_mask must have shape \(2, 3\), got \(3, 2\)": {"key_padding_mask": no.expand(3, 2)},
        r"key_padding_mask must have shape \(2, 3\), got \(6,\)": {"key_padding_mask": no.expand(6)},
        r"attn_mask must have shape \(3, 3\) or \(4, 3, 3\), got \(2, 6, 3\)": {"attn_mask": no.expand(2, 6, 3)},
        r"attn_mask must have shape \(3, 3\) or \(4, 3, 3\), got \(3,\)": {"attn_mask": no.expand(3)},
    }
    for words, options in wrong.items():
        with pytest.raises(ValueError, match=words):
            mha(x, x, x, **options)
    for name, shape in (("key_padding_mask", (2, 3)), ("attn_mask", (3, 3))):
        with pytest.raises(TypeError, match=f"{name} must be bool .True = drop. or float .*, got torch.int64"):
            mha(x, x, x, **{name: torch.ones(shape, dtype=torch.int64)})
    alone, padding = x[0], torch.tensor([False, False, True])
    torch.testing.assert_close(mha(alone, alone, alone, padding)[0], mha(alone, alone[:2], alone[:2])[0])


@pytest.mark.parametrize("empty_rows", ["zero", "uniform"])
def test_what_is_hidden_has_no_weight_beside_nan(empty_rows):
    q, k, v = torch.randn(2, 3, 4), torch.randn(2, 5, 4), torch.ones(2, 5, 1)
    k[0, 1, 0] = torch.nan
    lens = torch.tensor([[1, 2, 3], [0, 4, 9]])

    def weights(q):
        return mt.functional.dot_product_attention(q, k, v, lens, return_weights=True, empty_rows=empty_rows)[1]

    found, expected = torch.func.vmap(weights)(q[None])[0], weights(q)
    torch.testing.assert_close(found, expected, equal_nan=True)
    assert expected.isnan().sum() == 5 and (found[0, 1, 2:] == 0).all()
