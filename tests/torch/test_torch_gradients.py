"""Gradients of the torch modules and functions: gradcheck in float64, float32 against torch's own error."""

import itertools

import pytest
import torch

import needs
from mha_c import torch as mt
from mha_c.torch import functional, variants
from torch_modules import leaf, seeded

gradcheck, nn = torch.autograd.gradcheck, torch.nn

F64 = torch.float64


def check(function, *tensors):
    """Against finite differences; the same dropout in every evaluation."""
    # Along drawn directions at once, of inputs and of outputs; number by number, which takes ten times as long, in
    # nightly runs.
    return gradcheck(seeded(function), tensors, atol=1e-6, rtol=1e-5, fast_mode=not needs.NIGHTLY)


LENS = {
    "none": None,
    "1-D": [3, 1],
    "2-D": [[1, 2, 3], [4, 9, 2]],
    "with empty rows": [[1, 0, 3], [4, -1, 2]],
    "all empty": [0, 0],
}


@pytest.mark.parametrize("empty_rows", ["uniform", "zero"])
@pytest.mark.parametrize("lens", LENS)
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_layers(lens, dropout, empty_rows):
    q, k, v = leaf(2, 3, 3), leaf(2, 4, 2), leaf(2, 4, 5)
    for layer in (
        mt.MultiHeadAttention(2, 3, 5, 6, 2, dropout, bias=lens != "none", empty_rows=empty_rows),
        mt.AdditiveAttention(2, 3, 4, dropout, empty_rows=empty_rows),
    ):
        layer.double()
        assert check(lambda q, k, v, *_, layer=layer: layer(q, k, v, LENS[lens]), q, k, v, *layer.parameters())
    dot = mt.DotProductAttention(dropout, empty_rows=empty_rows)
    assert check(lambda q, k, v: dot(q, k, v, LENS[lens]), q, leaf(2, 4, 3), v)


@pytest.mark.parametrize("sharing", ["self", "keys are values", "queries are keys"])
def test_shared_inputs(sharing):
    layer, x, y = mt.MultiHeadAttention(4, 4, 4, 4, 2, 0.3).double(), leaf(2, 3, 4), leaf(2, 3, 4)
    call = {
        "self": lambda x, y, *_: layer(x, x, x, [2, 3]),
        "keys are values": lambda x, y, *_: layer(x, y, y, [2, 3]),
        "queries are keys": lambda x, y, *_: layer(x, x, y, [2, 3]),
    }[sharing]
    assert check(call, x, y, *layer.parameters())


def test_projected_keys_and_decoder():
    layer, q, k, v = mt.AdditiveAttention(2, 3, 4, 0.3).double(), leaf(2, 3, 3), leaf(2, 4, 2), leaf(2, 4, 5)

    def both_calls(q, k, v, *_):
        keys = layer.project_keys(k, [2, 3])
        return layer(q, keys, v), layer(2 * q, keys, v, [4, 1])

    assert check(both_calls, q, k, v, *layer.parameters())
    decoder = mt.Seq2SeqAttentionDecoder(7, 3, 4, 2).double()
    outputs, hidden, ids = leaf(5, 2, 4), leaf(2, 2, 4), torch.tensor([[1, 2, 3], [4, 5, 6]])

    def decode(outputs, hidden, *_):
        return decoder(ids, decoder.init_state((outputs, hidden), torch.tensor([3, 5])))[0]

    assert check(decode, outputs, hidden, *decoder.attention.parameters(), *decoder.dense.parameters())


@pytest.mark.parametrize("kind", ["dot", "additive"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": "top_left"},
        {"causal": "bottom_right", "window": (2, 1)},
        {"window": (1, None)},
        {"scale": -0.7},
        {"valid_lens": [2, 5], "dropout": 0.4, "rng": 7},
        {"valid_lens": [0, 4], "empty_rows": "uniform"},
        {"keep_mask": torch.arange(24).reshape(4, 6) % 5 > 1},
        {"keep_mask": torch.zeros(4, 6, dtype=torch.bool)},
    ],
    ids=lambda options: ",".join(options) or "plain",
)
def test_functional(kind, options):
    if kind == "dot":
        q, k, v = leaf(2, 4, 4, 3), leaf(2, 2, 6, 3), leaf(2, 2, 6, 5)  # two query heads for each key head
        assert check(lambda *x: functional.dot_product_attention(*x, **options), q, k, v)
    else:
        q, k, v, w_v, W_q, W_k = leaf(2, 4, 3), leaf(2, 6, 2), leaf(2, 6, 5), leaf(4), leaf(4, 3), leaf(4, 2)
        assert check(lambda *x: functional.additive_attention(*x, **options), q, k, v, w_v, W_q, W_k)
        plain = leaf(2, 4, 4), leaf(2, 6, 4), v, w_v
        assert check(lambda *x: functional.additive_attention(*x, **options), *plain)


@pytest.mark.parametrize("shape", [(4, 6), (1, 1, 4, 6), (2, 1, 1, 6), (1, 3, 4, 1), (2, 3, 4, 6)])
def test_bias(shape):
    q, k, v, bias = leaf(2, 3, 4, 3), leaf(2, 3, 6, 3), leaf(2, 3, 6, 5), leaf(*shape)

    def call(q, k, v, bias):
        return functional.dot_product_attention(q, k, v, [6, 2], bias=bias, causal="bottom_right", dropout=0.2, rng=1)

    assert check(call, q, k, v, bias)


def test_extras():
    q, k, v = leaf(2, 4, 3), leaf(2, 6, 3), leaf(2, 6, 5)
    out, weights, lse = functional.dot_product_attention(q, k, v, return_weights=True, return_lse=True)
    torch.testing.assert_close(weights, torch.softmax(q @ k.mT / 3**0.5, -1))
    torch.testing.assert_close(lse, torch.logsumexp(q @ k.mT / 3**0.5, -1))
    torch.testing.assert_close(out, weights @ v)
    with torch.no_grad():
        found = functional.dot_product_attention(q, k, v, return_lse=True)
    assert torch.equal(found[0], out) and torch.equal(found[1], lse)


def test_merge():
    q, k, v = leaf(2, 4, 3), leaf(2, 6, 3), leaf(2, 6, 5)
    a = functional.dot_product_attention(q, k[:, :2], v[:, :2], [2, 0], return_lse=True)
    b = functional.dot_product_attention(q, k[:, 2:], v[:, 2:], [0, 3], return_lse=True)
    whole = functional.dot_product_attention(
        q,
        k,
        v,
        keep_mask=torch.tensor([[[1, 1, 0, 0, 0, 0]], [[0, 0, 1, 1, 1, 0]]], dtype=torch.bool).expand(2, 4, 6),
        return_lse=True,
    )
    for found, expected in zip(functional.merge(*a, *b), whole):
        torch.testing.assert_close(found, expected)
        grads = [torch.autograd.grad(x.square().sum(), (q, k, v), retain_graph=True) for x in (found, expected)]
        torch.testing.assert_close(*grads)  # through the statistics too


def test_merge_of_halves_is_rounded_once():
    for dtype in (torch.bfloat16, torch.float16):
        parts = [x.to(dtype) for x in (*torch.randn(2, 1, 2, 3, 4), *torch.randn(2, 1, 2, 3))]
        order = [parts[0], parts[2], parts[1], parts[3]]
        for found, exact in zip(functional.merge(*order), functional.merge(*[x.float() for x in order])):
            assert torch.equal(found, exact.to(dtype))


def test_merge_with_nan_where_a_side_is_empty():
    out, lse = leaf(1, 3, 2), leaf(1, 3)
    nothing = torch.full_like(out, torch.nan), torch.full_like(lse, -torch.inf)
    for merged in (functional.merge(out, lse, *nothing), functional.merge(*nothing, out, lse)):
        for x in torch.autograd.grad(merged[0].sum() + merged[1].sum(), (out, lse)):
            assert torch.equal(x, torch.ones_like(x))


def test_variants():
    x, drop = leaf(2, 3, 4), torch.ones(3, 3, dtype=torch.bool).triu(1)
    drop[2] = True
    for layer in (
        variants.MultiHeadedSelfAttention(4, 2),
        variants.SelfAttentionAISummer(4),
        variants.MultiHeadSelfAttentionAISummer(4, heads=2, dim_head=3),
    ):
        layer.double()
        masks = [()] if isinstance(layer, variants.MultiHeadedSelfAttention) else [(), (drop,)]
        for mask in masks:
            assert check(lambda x, *_, layer=layer, mask=mask: layer(x, *mask), x, *layer.parameters())
    q, k, v = leaf(3, 1, 4, 2), leaf(2, 5, 2), leaf(3, 2, 5, 3)
    assert check(lambda *x: variants.scaled_dot_product_attention(*x)[0], q, k, v)


def test_torchs_multi_head_attention():
    layer = mt.nn.MultiheadAttention(8, 2, kdim=5, vdim=3, dropout=0.3).double()
    q, k, v = leaf(4, 2, 8), leaf(6, 2, 5), leaf(6, 2, 3)
    padding, added = torch.arange(6)[None, :] >= torch.tensor([[6], [3]]), leaf(4, 6)

    def call(q, k, v, added, *_):
        return layer(q, k, v, key_padding_mask=padding, attn_mask=added)[0]

    assert check(call, q, k, v, added, *layer.parameters())


# --- What autograd may ask for ---------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [*itertools.combinations(range(7), 1), (0, 2), (3, 6), (1, 4, 5)])
@pytest.mark.parametrize("bias", [False, True])
def test_only_what_is_needed(asked, bias):
    layer = mt.MultiHeadAttention(2, 3, 5, 6, 2, 0.0, bias=bias).double()
    tensors = [leaf(2, 3, 3), leaf(2, 4, 2), leaf(2, 4, 5)]
    everything = [*tensors, *[getattr(layer, name).weight for name in ("W_q", "W_k", "W_v", "W_o")]]
    full = torch.autograd.grad(layer(*tensors, [3, 2]).square().sum(), everything)
    for i, tensor in enumerate(everything):
        tensor.requires_grad_(i in asked)
    for module in layer.children():
        if bias and isinstance(module, nn.Linear):
            module.bias.requires_grad_(False)
    layer(*tensors, [3, 2]).square().sum().backward()
    for i, (tensor, expected) in enumerate(zip(everything, full)):
        assert torch.equal(tensor.grad, expected) if i in asked else tensor.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("kind", ["stride 0", "strided", "transposed", "reversed"])
@pytest.mark.parametrize("size", [3, 200])  # the tape kept as arrays; as saved tensors
def test_layouts_of_incoming_gradients(kind, size, dtype):
    layer = mt.MultiHeadAttention(4, 4, 4, 8, 2, 0.0).to(dtype)
    x = torch.randn(20, size, 4, dtype=dtype, requires_grad=True)
    grad = {
        "stride 0": torch.ones((), dtype=dtype).expand(20, size, 8),
        "strided": torch.randn(20, size, 16, dtype=dtype)[..., ::2],
        "transposed": torch.randn(8, size, 20, dtype=dtype).transpose(0, 2),
        "reversed": torch.randn(20, size, 8, dtype=dtype).flip(1),
    }[kind]
    leaves = [x, *layer.parameters()]
    found = torch.autograd.grad(layer(x, x, x), leaves, grad)
    expected = torch.autograd.grad(layer(x, x, x), leaves, grad.clone(memory_format=torch.contiguous_format))
    assert all(torch.equal(a, b) for a, b in zip(found, expected))
    q = torch.randn(2, 2, size, 4, dtype=dtype, requires_grad=True)
    g = torch.randn(2, size, 2, 4, dtype=dtype).transpose(1, 2)
    (found,) = torch.autograd.grad(functional.dot_product_attention(q, q, q), q, g)
    (expected,) = torch.autograd.grad(functional.dot_product_attention(q, q, q), q, g.contiguous())
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("size", [3, 200])
def test_graph_is_kept_or_freed_as_asked(size):
    layer, x = mt.MultiHeadAttention(4, 4, 4, 8, 2, 0.5), torch.randn(20, size, 4, requires_grad=True)
    out = layer(x, x, x).sum()
    out.backward(retain_graph=True)
    first = x.grad.clone()
    out.backward()
    torch.testing.assert_close(x.grad, 2 * first)
    with pytest.raises(RuntimeError, match="second time"):
        out.backward()


@pytest.mark.parametrize("size", [3, 200])
def test_changes_in_place_are_noticed(size):
    layer = mt.MultiHeadAttention(4, 4, 4, 8, 2, 0.0)
    x = torch.randn(20, size, 4)
    out = layer(x, x, x).sum()
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()
    out = layer(x, x, x).sum()
    with torch.no_grad():
        layer.W_o.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()
    # The result itself may be changed, as with d2l's layers.
    for attention in (layer, mt.DotProductAttention(0.0)):
        y = torch.randn(20, size, 4, requires_grad=True)
        gradients = []
        for change in (False, True):
            out = attention(y, y, y)
            out = out.mul_(3) if change else out * 3
            gradients.append(torch.autograd.grad(out.square().sum(), y)[0])
        assert torch.equal(*gradients)


def test_lengths_may_change_before_the_backward_call():
    lens, x = torch.tensor([2, 3]), torch.randn(2, 4, 8, requires_grad=True)
    layer = mt.MultiHeadAttention(8, 8, 8, 8, 2, 0.0)
    for call in (lambda: layer(x, x, x, lens), lambda: functional.dot_product_attention(x, x, x, lens)):
        lens.copy_(torch.tensor([2, 3]))
        (expected,) = torch.autograd.grad(call().square().sum(), x)
        out = call().square().sum()
        lens.zero_()
        assert torch.equal(torch.autograd.grad(out, x)[0], expected)


def test_no_grad_inference_mode_and_detached_inputs():
    layer, x = mt.MultiHeadAttention(4, 4, 4, 8, 2, 0.0), torch.randn(2, 3, 4, requires_grad=True)
    expected = layer(x, x, x)
    assert expected.requires_grad
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out = layer(x, x, x)
        assert not out.requires_grad and torch.equal(out, expected)
    with torch.inference_mode():
        inside = mt.MultiHeadAttention(4, 4, 4, 8, 2, 0.0)
        inside.load_state_dict(layer.state_dict())
        assert torch.equal(inside(x, x, x), expected)
        assert inside.attention_weights.shape == (2, 2, 3, 3)
        keys = torch.randn(8, 300, 4)
    layer.eval()
    for _ in range(3):  # autograd's own words, from the calls that might go on from the first one too
        with pytest.raises(RuntimeError, match="cannot be saved for backward"):
            layer(torch.randn(8, 1, 4), keys, keys)


# --- Accuracy --------------------------------------------------------------------------------------------


def gradients(layer, tensors, lens, grad):
    leaves = [*[x for i, x in enumerate(tensors) if all(x is not y for y in tensors[:i])], *layer.parameters()]
    out = layer(*tensors, lens)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


@pytest.mark.parametrize(
    "shape", [(2, 4, 6, 100, 5), (2, 100, 100, 24, 8), (64, 10, 10, 32, 4), (8, 37, 37, 128, 8)], ids=str
)
@pytest.mark.parametrize("kind", ["multi-head", "additive"])
def test_float32_is_as_exact_as_torchs(kind, shape):
    """Root mean square errors against float64, over 5 draws, at most twice those of d2l's own layer."""
    d2l = needs.d2l("1.0.3")
    batch, queries, keys, hiddens, heads = shape
    ours, theirs = [], []
    for seed in range(5):
        torch.manual_seed(seed)
        arguments = (hiddens, heads, 0.0, True) if kind == "multi-head" else (hiddens, 0.0)
        name = "MultiHeadAttention" if kind == "multi-head" else "AdditiveAttention"
        reference, layer = getattr(d2l, name)(*arguments), getattr(mt, name)(*arguments)
        x, y = torch.randn(batch, queries, hiddens), torch.randn(batch, keys, hiddens)
        # Not of length 1, where the gradients of the scores are 0 and d2l's formula happens to give exactly that.
        lens, grad = torch.randint(2, keys + 1, (batch,)), torch.randn(batch, queries, hiddens)
        reference(x, y, y, lens)
        layer(x, y, y, lens)
        layer.load_state_dict(reference.state_dict())
        x, y = x.requires_grad_(), y.requires_grad_()
        single = gradients(layer, (x, y, y), lens, grad), gradients(reference, (x, y, y), lens, grad)
        x, y = x.detach().double().requires_grad_(), y.detach().double().requires_grad_()
        exact = gradients(reference.double(), (x, y, y), lens, grad)
        for found, errors in zip(single, (ours, theirs)):
            errors.append([((a - b) / b.abs().max()).square().mean() for a, b in zip(found, exact)])
    ours, theirs = (torch.tensor(errors).mean(0).sqrt() for errors in (ours, theirs))
    assert (ours <= 2 * theirs + 1e-9).all(), list(zip(ours.tolist(), theirs.tolist()))


def test_masked_rows_may_hold_nan():
    multi_head, additive = mt.MultiHeadAttention(4, 4, 4, 4, 2, 0.0), mt.AdditiveAttention(4, 4, 6, 0.0)
    for layer in (multi_head, additive, mt.DotProductAttention(0.0)):
        q, y = torch.randn(2, 3, 4, requires_grad=True), torch.randn(2, 5, 4)
        lens, results = torch.tensor([2, 4]), []
        for filler in (0.0, float("nan")):
            y[0, 2:], y[1, 4:] = filler, filler
            k = y.clone().requires_grad_()
            out = layer(q, k, k, lens)
            results.append([out, *torch.autograd.grad(out.square().sum(), [q, k, *layer.parameters()])])
        for a, b in zip(*results):
            assert torch.equal(a, b)
        assert not results[1][2][0, 2:].any() and not results[1][2][1, 4:].any()


@pytest.mark.parametrize("sizes", [(2, 0, 3, 4), (2, 3, 0, 4), (0, 2, 3, 4), (2, 2, 3, 0)])
def test_functions_of_empty_sizes(sizes):
    batch, queries, keys, features = sizes
    q, k, v = (torch.randn(batch, n, features, requires_grad=True) for n in (queries, keys, keys))
    w_v = torch.randn(features, requires_grad=True)
    for out in (functional.dot_product_attention(q, k, v), functional.additive_attention(q, k, v, w_v)):
        grads = torch.autograd.grad(out.sum(), (q, k, v, w_v), allow_unused=True)
        for x, grad in zip((q, k, v, w_v), grads):
            assert grad is None or torch.equal(grad, torch.zeros_like(x))
