"""mha_c.torch.watch: the attention of models that nobody edits; the models compute what they computed before."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import needs
from mha_c import torch as mt
from small_gpt import formula, gpt
from watching import CLOSE, has_function, is_young, step

pytestmark = pytest.mark.filterwarnings(  # of older versions
    "ignore:Support for mismatched key_padding_mask",
    "ignore:Converting mask without torch.bool",
    "ignore:There is a performance drop",
)
COMPUTE = pytest.mark.parametrize("compute", ["core", "torch"])
KEY_HEADS = pytest.mark.parametrize("key_heads", [4, pytest.param(1, marks=is_young)])


# --- scaled_dot_product_attention -------------------------------------------------------------------------


@has_function
@COMPUTE
@KEY_HEADS
def test_a_model_of_the_readers_own(key_heads, compute):
    model, x = gpt(key_heads=key_heads), torch.randint(11, (2, 9))
    expected, plain = step(model, x), {}
    for i in range(2):
        model[1][i].qkv.register_forward_hook(lambda module, args, out, i=i: plain.__setitem__(i, out))
    with mt.watch(model, compute=compute) as seen:
        found = step(model, x)
    torch.testing.assert_close(expected, found, atol=1e-4, rtol=1e-4)  # gradients of sums over 18 tokens of 32 features
    assert [call.name for call in seen.calls] == ["1.0", "1.1"]
    for i, call in enumerate(seen.calls):
        q, k, _ = (
            x.unflatten(2, (-1, 8)).transpose(1, 2) for x in plain[i].split([32, 8 * key_heads, 8 * key_heads], -1)
        )
        sees = torch.ones(9, 9, dtype=torch.bool).tril()
        torch.testing.assert_close(call.weights, formula(q, k, sees), **CLOSE)
        assert (call.batch, call.heads, call.key_heads, call.queries, call.keys) == (2, 4, key_heads, 9, 9)
        assert call.causal is True and call.mask is None and call.kind == "scaled_dot_product_attention"


MASKS = {
    "none": lambda: {},
    "causal": lambda: {"is_causal": True},
    "bool": lambda: {"attn_mask": torch.rand(5, 7) < 0.6},
    "an empty row": lambda: {"attn_mask": torch.arange(7) < torch.arange(5)[:, None]},
    "per item": lambda: {"attn_mask": torch.arange(7) < torch.tensor([3, 7])[:, None, None, None]},
    "per head": lambda: {"attn_mask": torch.randn(4, 5, 7)},
    "numbers": lambda: {"attn_mask": torch.randn(2, 4, 5, 7)},
    "scale": lambda: {"scale": 0.3},
    "dropout": lambda: {"dropout_p": 0.5},
    "causal and bool": lambda: {"attn_mask": torch.arange(7) < torch.arange(1, 6)[:, None] * 2 - 1, "is_causal": True},
}


YOUNG = "scale", "causal and bool", "an empty row"  # 2.0 has NaN in all gradients there


@has_function
@COMPUTE
@KEY_HEADS
@pytest.mark.parametrize("name", [pytest.param(x, marks=is_young if x in YOUNG else []) for x in MASKS])
def test_masks_and_options(name, key_heads, compute):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, n, 8, requires_grad=True) for h, n in ((4, 5), (key_heads, 7), (key_heads, 7)))
    options = MASKS[name]()
    grouped = {"enable_gqa": True} if key_heads == 1 else {}

    def run():
        torch.manual_seed(1)
        out = F.scaled_dot_product_attention(q, k, v, **options, **grouped)
        return out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v))

    try:
        expected = run()
    except RuntimeError as error:  # of causal and a mask: 2.14
        pytest.skip(f"this torch refuses it: {error}")
    with mt.watch(compute=compute) as seen:
        found = run()
    torch.testing.assert_close(expected, found, **CLOSE, equal_nan=True)
    mask = options.get("attn_mask")
    if options.get("is_causal"):
        future = torch.ones(5, 7, dtype=torch.bool).tril()
        mask = future if mask is None else mask & future
    keep, bias = (mask, None) if mask is not None and mask.dtype is torch.bool else (None, mask)
    weights = formula(q, k, keep, bias, options.get("scale"))
    (call,) = seen.calls
    torch.testing.assert_close(call.weights, weights, **CLOSE)
    torch.testing.assert_close(call.received(), weights.sum(2), **CLOSE)
    logs = torch.log2(weights.clamp_min(1e-30))
    torch.testing.assert_close(call.entropy(), -(weights * logs).sum(-1), **CLOSE)
    largest, keys = call.top(2)
    torch.testing.assert_close(largest, weights.topk(2).values, **CLOSE)
    picked = torch.take_along_dim(weights, keys.clamp_min(0), -1)
    torch.testing.assert_close(torch.where(keys < 0, 0, picked), largest, **CLOSE)
    assert call.mask is options.get("attn_mask") and call.name == ""


@has_function
@pytest.mark.parametrize("shape", [(5, 8), (3, 5, 8), (2, 3, 5, 8), (2, 2, 3, 5, 8)])
def test_axes_before_the_rows(shape):
    q, k, v = torch.randn(3, *shape)
    mask = torch.rand(*shape[:-2], 5, 5) < 0.7
    mask[..., 0] = True
    with mt.watch() as seen:
        out = F.scaled_dot_product_attention(q, k, v, mask)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, mask), **CLOSE)
    weights = torch.softmax((q @ k.mT / 8**0.5).masked_fill(~mask, -torch.inf), -1)
    torch.testing.assert_close(seen.calls[0].weights.reshape(weights.shape), weights, **CLOSE)


@has_function
@pytest.mark.parametrize("transposed", [False, True])
def test_the_result_lies_in_memory_as_torchs(transposed):
    """Models call `view` on what they get."""
    x = torch.randn(2, 5, 3, 4)
    q = x.transpose(1, 2) if transposed else x
    with mt.watch():
        assert F.scaled_dot_product_attention(q, q, q).stride() == q.stride()


@is_young
def test_what_torch_refuses_is_refused_in_its_words():
    q = torch.randn(1, 2, 5, 8)
    calls = [
        lambda: F.scaled_dot_product_attention(q, q[..., :4], q),
        lambda: F.scaled_dot_product_attention(q, q, q, torch.ones(4, 4, dtype=torch.bool)),
        lambda: F.scaled_dot_product_attention(q, q, q, wrong=1),
        lambda: F.scaled_dot_product_attention(q, None, q),
    ]
    for call in calls:
        with pytest.raises((RuntimeError, TypeError, ValueError)) as plain:
            call()
        with mt.watch() as seen, pytest.raises(plain.type) as watched:
            call()
        assert str(watched.value) == str(plain.value) and not seen.calls


# --- torch's modules ----------------------------------------------------------------------------------------

PADDING = torch.tensor([[False, False, False, True, True], [False] * 5])
FUTURE = torch.ones(5, 5, dtype=torch.bool).triu(1)
OF_MULTIHEAD = {
    "none": {},
    "bool": {"attn_mask": FUTURE},
    "numbers": {"attn_mask": torch.linspace(-1, 1, 25).reshape(5, 5)},
    "per head": {"attn_mask": torch.linspace(-1, 1, 100).reshape(4, 5, 5)},
    "padding": {"key_padding_mask": PADDING},
    "both": {"key_padding_mask": PADDING, "attn_mask": FUTURE},
    "causal": {"attn_mask": FUTURE, "is_causal": True},
}


@COMPUTE
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("name", [pytest.param(x, marks=is_young if x == "causal" else []) for x in OF_MULTIHEAD])
def test_multihead_attention_in_both_modes(name, need_weights, compute):
    module, x, options = nn.MultiheadAttention(16, 2, batch_first=True), torch.randn(2, 5, 16), OF_MULTIHEAD[name]
    if "is_causal" in options:
        needs.of_torch("torch.nn.MultiheadAttention.forward(is_causal)")
    x.requires_grad_()
    for average in (False, True):

        def run(average=average):
            found = module(x, x, x, need_weights=need_weights, average_attn_weights=average, **options)
            wanted = torch.autograd.grad(found[0].square().sum(), (x, *module.parameters()))
            return [one for one in (*found, *wanted) if one is not None]

        expected = run()
        weights = module(x, x, x, average_attn_weights=False, **options)[1].detach()
        with mt.watch(module, compute=compute) as seen:
            found = run()
        assert len(found) == len(expected)
        torch.testing.assert_close(expected, found, **CLOSE)
        (call,) = seen.calls
        assert call.name == "" and call.kind == "MultiheadAttention"
        torch.testing.assert_close(call.weights, weights, **CLOSE)


@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}, {"kdim": 6, "vdim": 7}])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_multihead_attention_of_every_form(options, dropout):
    torch.manual_seed(0)
    module = nn.MultiheadAttention(16, 2, dropout=dropout, **options)
    x, y, z = torch.randn(5, 2, 16), torch.randn(7, 2, module.kdim), torch.randn(7, 2, module.vdim)
    for inputs in ((x, y, z), (x[:, 0], y[:, 0], z[:, 0])):
        for training in (False, True):
            module.train(training)
            torch.manual_seed(1)
            expected = module(*inputs)
            torch.manual_seed(1)
            with mt.watch() as seen:
                found = module(*inputs)
            torch.testing.assert_close(expected, found, **CLOSE)
            weights = module.eval()(*inputs, average_attn_weights=False)[1].detach()
            torch.testing.assert_close(seen.calls[0].weights, weights.reshape(-1, 2, *weights.shape[-2:]), **CLOSE)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
def test_the_fast_path_of_the_encoder_layer(padded, norm_first):
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=norm_first).eval()
    model, x = nn.Sequential(layer, nn.Linear(16, 3)), torch.randn(2, 5, 16)
    options = {"src_key_padding_mask": PADDING} if padded else {}
    with torch.no_grad():
        expected = layer(x, **options)
        with mt.watch(layer) as seen:
            found = layer(x, **options)
        y = layer.norm1(x) if norm_first else x
        weights = layer.self_attn(y, y, y, average_attn_weights=False, key_padding_mask=PADDING if padded else None)[1]
        torch.testing.assert_close(expected, found, **CLOSE)
        torch.testing.assert_close(seen.calls[0].weights, weights, **CLOSE)
        with mt.watch() as seen:
            model(x)
    assert [call.name for call in seen.calls] == ["0.self_attn"]


def test_rows_that_see_nothing_are_what_torch_makes_of_them():
    module, x = nn.MultiheadAttention(16, 2, batch_first=True), torch.randn(1, 5, 16)
    mask = torch.zeros(5, 5, dtype=torch.bool)
    mask[2] = True
    for need_weights in (False, True):
        expected = module(x, x, x, attn_mask=mask, need_weights=need_weights)
        with mt.watch():
            found = module(x, x, x, attn_mask=mask, need_weights=need_weights)
        torch.testing.assert_close(expected, found, **CLOSE, equal_nan=True)
