"""Modules and functions on another device than the CPU: what d2l's own give there, forward and backward.

The device is the tests' own (own_device.cpp), where tensors are plain ones that the core cannot reach, as a GPU's.
"""

import copy
import os
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

import children
import own_device
from features import weights_of
from mha_c import torch as ours
from mha_c.torch import functional, variants
from mha_c.torch._call import formulas
from own_device import close
from torch_modules import layers

SUPPORT = Path(own_device.__file__).parent
F64 = torch.float64
LENS = {"none": None, "1-D": [3, 6], "2-D": [[1, 2, 3, 9], [6, 4, 5, 1]], "empty": [[1, 0, 3, 9], [0, 4, 0, 1]],
        "floats": [2.5, 6.0]}  # fmt: skip


@pytest.fixture(params=own_device.devices(), ids=str)
def own(request):
    return request.param


def outcome(layer, device, lens, dtype=torch.float32):
    """Output, weights, and gradients of both for inputs and parameters."""
    rng = torch.Generator().manual_seed(1)
    shapes = ((2, n, 12) for n in (4, 6, 6))
    inputs = [torch.randn(*shape, generator=rng, dtype=dtype).to(device).requires_grad_() for shape in shapes]
    out = layer(*inputs, lens)
    assert out.device == inputs[0].device and out.dtype is dtype
    weights = weights_of(layer)
    loss = out.square().sum() + weights.square().sum()
    return [out, weights, *torch.autograd.grad(loss, [*inputs, *layer.parameters()])]


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("empty_rows", ["uniform", "zero"])
@pytest.mark.parametrize("lens", LENS)
@pytest.mark.parametrize("name", layers())
def test_layers_as_on_the_cpu(own, name, lens, empty_rows, dtype):
    layer = layers(empty_rows=empty_rows)[name].to(dtype)
    given = LENS[lens] if LENS[lens] is None else torch.tensor(LENS[lens])
    wanted = outcome(layer, "cpu", given, dtype)
    there = copy.deepcopy(layer).to(own)
    close(outcome(there, own, given, dtype), wanted, dtype)  # lengths on the CPU
    if given is not None:
        close(outcome(there, own, given.to(own), dtype), wanted, dtype)
        close(outcome(there, own, given.tolist(), dtype), wanted, dtype)


OPTIONS = {
    "lengths": dict(valid_lens=torch.tensor([3, 0])),
    "causal": dict(causal="top_left"),
    "bottom right": dict(causal="bottom_right"),
    "window": dict(window=(1, 0), causal="bottom_right"),
    "keep": dict(keep_mask=torch.arange(20).reshape(4, 5) % 3 > 0),
    "keep none": dict(keep_mask=torch.zeros(4, 5, dtype=torch.bool)),
    "bias": dict(bias=torch.linspace(-1, 1, 20).reshape(4, 5)),
    "scale": dict(scale=0.3),
    "softcap": dict(softcap=0.5),
    "softcap, none": dict(softcap=1e39),
    "sinks": dict(sinks=torch.tensor([0.1, 0.2, 0.3, 0.4])),
    "relative": dict(relative_bias=torch.linspace(-1, 1, 12).reshape(4, 3)),
    "uniform": dict(valid_lens=torch.tensor([[1, 0, 2, 5], [0, 0, 3, 1]]), empty_rows="uniform"),
    "weights": dict(return_weights=True, return_lse=True, valid_lens=torch.tensor([3, 0])),
}


def moved(value, device, dtype=None):
    if not isinstance(value, torch.Tensor):
        return value
    return value.to(device, dtype if value.is_floating_point() else None)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("n_key_heads", [4, 2])
@pytest.mark.parametrize("name", OPTIONS)
def test_functions_as_on_the_cpu(own, name, n_key_heads, dtype):
    rng = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(2, h, n, 6, generator=rng, dtype=dtype) for h, n in ((4, 4), (n_key_heads, 5),
                                                                                (n_key_heads, 5)))  # fmt: skip
    found = []
    for device in ("cpu", own):
        leaves = [x.to(device).requires_grad_() for x in (q, k, v)]
        options = {key: moved(x, device, dtype) for key, x in OPTIONS[name].items()}
        results = functional.dot_product_attention(*leaves, **options)
        results = results if isinstance(results, tuple) else (results,)
        loss = sum(torch.where(x.isfinite(), x, 0).square().sum() for x in results)
        found.append([torch.where(x.isfinite(), x, 0) for x in results] + [*torch.autograd.grad(loss, leaves)])
    close(found[1], found[0], dtype)


def test_additive_functions(own):
    q, k, v, w_v = torch.randn(2, 4, 6), torch.randn(2, 5, 6), torch.randn(2, 5, 3), torch.randn(8)
    W_q, W_k, lens = torch.randn(8, 6), torch.randn(8, 6), torch.tensor([2, 0])
    found = []
    for device in ("cpu", own):
        leaves = [x.detach().to(device).requires_grad_() for x in (q, k, v, w_v, W_q, W_k)]
        out = functional.additive_attention(*leaves, lens)
        found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    close(found[1], found[0])


def test_merge_and_rotary(own):
    x = torch.randn(2, 3, 4, 8)
    for positions in (range(4), torch.arange(4), [[0, 1, 2, 3], [2, 3, 4, 5]]):
        wanted = functional.rotary(x, positions)
        close([functional.rotary(x.to(own), positions)], [wanted])
        if isinstance(positions, torch.Tensor):
            close([functional.rotary(x.to(own), positions.to(own))], [wanted])
    parts = [functional.dot_product_attention(x, y, y, return_lse=True) for y in (x[:, :, :1], x[:, :, 1:])]
    wanted = functional.merge(*parts[0], *parts[1])
    close(functional.merge(*[z.to(own) for part in parts for z in part]), wanted)


def others():
    torch.manual_seed(3)
    x = torch.randn(2, 4, 12)
    yield "positions", ours.PositionalEncoding(12, 0.0), (x,)
    yield "kernel", ours.KernelAttention("gaussian", 0.7), (x, x.flip(1).clone(), x + 1, torch.tensor([3, 0]))
    yield "kernel of one", ours.KernelAttention("epanechnikov", 2.0), tuple(torch.randn(3, 5))
    yield "self-attention", variants.MultiHeadedSelfAttention(12, 3), (x,)
    yield "summer", variants.SelfAttentionAISummer(12), (x, torch.ones(4, 4, dtype=torch.bool).triu(1))
    yield "summer's heads", variants.MultiHeadSelfAttentionAISummer(12, 3), (x,)
    yield "torch's", ours.nn.MultiheadAttention(12, 3, batch_first=True), (x, x, x, torch.zeros(2, 4, dtype=torch.bool))
    yield "masked softmax", ours.masked_softmax, (x, torch.tensor([3, 0]))
    yield "sequence mask", ours.sequence_mask, (x, torch.tensor([3, 0]))
    yield "any axes", variants.scaled_dot_product_attention, (x, x, x)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("name", [name for name, *_ in others()])
def test_other_modules_and_functions(own, name, dtype):
    _, module, inputs = next(case for case in others() if case[0] == name)
    found = []
    for device in ("cpu", own):
        there = copy.deepcopy(module).to(device, dtype) if isinstance(module, nn.Module) else module
        first, *rest = (moved(x, device, dtype) for x in inputs)
        first = first.clone().requires_grad_()
        results = there(first, *rest)
        results = list(results) if isinstance(results, tuple) else [results]
        parameters = [*there.parameters()] if isinstance(module, nn.Module) else []
        if name == "kernel" and dtype is torch.float32:
            # The width's gradient, 24, is a sum of weight * (g v - g out) * distance^2 / width^3, whose sizes sum to
            # 5100: rounded once, which they are several times, that is 5100 * 2^-24 = 3e-4 already.
            parameters = []
        found.append([*results, *torch.autograd.grad(results[0].square().sum(), [first, *parameters])])
    close(found[1], found[0], dtype)


def test_the_device_may_be_late():
    """Behind backward calls of other tests."""
    script = (
        "import torch; torch.ones((), requires_grad=True).backward(); import own_device; "
        "x = torch.ones(3, device=own_device.load(), requires_grad=True); x.square().sum().backward(); "
        "assert x.grad.tolist() == [2, 2, 2]"
    )
    children.python("-c", script, PYTHONPATH=f"{SUPPORT}{os.pathsep}{os.environ['PYTHONPATH']}")


def test_tensors_on_two_devices(own):
    layer, x = layers()["multi-head"], torch.randn(2, 4, 12)
    y, lens = x.to(own), torch.tensor([3, 0])
    cases = [
        (lambda: layer(y, y, y), "queries, keys, values on own:0; parameters on cpu"),
        (lambda: layer(x, y, y), "queries, parameters on cpu; keys, values on own:0"),
        (lambda: layer(x, x, x, lens.to(own)), "valid_lens on own:0"),
        (lambda: layer(x, x, x, lens.float().to(own)), "valid_lens on own:0"),
        (lambda: copy.deepcopy(layer).to(own)(x, x, x), "parameters on own:0"),
        (lambda: layer(y, x.to("meta"), x), "keys on meta"),
        (lambda: functional.dot_product_attention(x, y, y), "q on cpu; k, v on own:0"),
        (lambda: functional.dot_product_attention(y, y, y, keep_mask=torch.ones(4, 4) > 0), "keep_mask on cpu"),
        (lambda: functional.dot_product_attention(y, y, y, bias=torch.ones(4, 4)), "bias on cpu"),
    ]
    for call, words in cases:
        with pytest.raises(TypeError, match="different devices") as caught:
            call()
        assert words in str(caught.value)


def test_padding_may_hold_nan(own):
    for name, layer in layers().items():
        layer, found = layer.to(own), []
        for fill in (0.0, float("nan")):
            torch.manual_seed(4)
            q, k, v = (torch.randn(2, n, 12) for n in (4, 6, 6))
            k[0, 3:], v[0, 3:], k[1], lens = fill, fill, fill, torch.tensor([3, 0])
            leaves = [x.to(own).requires_grad_() for x in (q, k, v)]
            out = layer(*leaves, lens)
            loss = out.square().sum() + weights_of(layer).square().sum()
            found.append([out, weights_of(layer), *torch.autograd.grad(loss, [*leaves, *layer.parameters()])])
        assert all(bool(x.isfinite().all()) for x in found[1]), name
        close(found[1], found[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", layers())
def test_16_bit_floats(own, name, dtype):
    """Natively; scores that float16 cannot hold still have a softmax."""
    layer, lens = layers()[name].to(own), torch.tensor([3, 0])
    rng = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(2, n, 12, generator=rng).to(own) for n in (4, 6, 6))
    wanted = layer(q, k, v, lens), weights_of(layer)
    with torch.autocast("own", dtype=dtype):
        under = layer(q, k, v, lens)
        assert under.dtype is weights_of(layer).dtype is (dtype if name == "multi-head" else weights_of(layer).dtype)
    half = copy.deepcopy(layer).to(dtype)
    out = half(q.to(dtype), k.to(dtype), v.to(dtype), lens)
    assert out.dtype is weights_of(half).dtype is dtype
    for found in ((under, weights_of(layer)), (out, weights_of(half))):
        for a, b in zip(found, wanted):
            # 8 bits of bfloat16, in numbers around 1, thrice behind one another
            torch.testing.assert_close(a.float().cpu(), b.cpu(), rtol=0, atol=0.05)
    large = functional.dot_product_attention(*[x.to(dtype) * 200 for x in (q, k)], v.to(dtype), return_weights=True)
    assert all(bool(x.isfinite().all()) for x in large)


def test_dropout_is_the_devices(own):
    for name, layer in layers().items():
        layer.to(own).train()
        getattr(layer, "attention", layer).dropout.p = 0.5
        x = torch.randn(2, 4, 12, device=own)
        found = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            found.append(layer(x, x, x))
        assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2]), name
        weights = weights_of(layer)
        close([weights.sum(-1)], [torch.ones(weights.shape[:-1])])
    q = torch.randn(1, 2, 4, 6, device=own)
    a, b, c = (functional.dot_product_attention(q, q, q, dropout=0.5, rng=rng) for rng in (3, 3, 4))
    assert torch.equal(a, b) and not torch.equal(a, c)


def test_modules_move_and_keep_their_numbers(own):
    layer = layers()["multi-head"]
    x = torch.randn(2, 4, 12)
    wanted = layer(x, x, x)
    layer.to(own)
    close([layer(*[x.to(own)] * 3)], [wanted])
    twin = copy.deepcopy(layer)
    close([weights_of(twin)], [weights_of(layer)])
    again = pickle.loads(pickle.dumps(layer.to("cpu")))
    assert torch.equal(again(x, x, x), wanted) and torch.equal(layer(x, x, x), wanted)
    other = layers()["multi-head"].to(own)
    other.load_state_dict(layer.state_dict())
    close([other(*[x.to(own)] * 3)], [wanted])
    with own:  # torch itself moves parameters without numbers to a GPU, but not to a device of this kind
        lazy = ours.MultiHeadAttention(12, 3, 0.0)
    assert lazy(*[x.to(own)] * 3).device == own and lazy.W_q.weight.device == own


def test_data_parallel_needs_a_group_that_has_the_device(own):
    """As for torch's own modules; what is exchanged is theirs."""
    import torch.distributed as dist

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        for module in (nn.Linear(2, 2), layers()["multi-head"]):
            with pytest.raises(RuntimeError, match="own"):
                nn.parallel.DistributedDataParallel(module.to(own))
    finally:
        dist.destroy_process_group()


def test_nobody_waits_for_the_device(own):
    """Ordinary calls, forward and backward, with lengths on either side."""
    lengths = None, torch.tensor([3, 0]), torch.tensor([3, 0], device=own), torch.tensor([2.5, 1], device=own)
    for name, layer in layers().items():
        layer.to(own)
        x = torch.randn(2, 5, 12, device=own, requires_grad=True)
        before = own_device.reads()
        for lens in lengths:
            layer(x, x, x, lens).sum().backward()
            weights_of(layer)
        q = x[:, None]
        functional.dot_product_attention(q, q, q, lengths[2], causal=True).sum().backward()
        assert own_device.reads() == before, name


def test_additive_features_come_in_pieces(own, monkeypatch):
    layer, x = layers()["additive"].to(own), torch.randn(2, 40, 12, device=own, requires_grad=True)
    lens, found, peaks = torch.tensor([30, 0]), [], []

    def call():
        out = layer(x, x, x, lens)
        found.append([out, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])])

    for pieces in (1 << 24, 2000):
        monkeypatch.setattr(formulas, "FEATURES", pieces)
        peaks.append(own_device.peak_bytes(call))
    close(found[1], found[0])
    assert peaks[1] < peaks[0] / 2


def test_weights_are_computed_when_they_are_looked_at(own):
    layer, x = layers()["multi-head"].to(own), torch.randn(1, 64, 12, device=own)
    with torch.no_grad():
        layer(x, x, x)
        shown = layer.attention_weights
        assert shown.shape == (1, 3, 64, 64) and shown.device == own
        assert own_device.peak_bytes(lambda: layer.attention_weights) == 0
        wanted = shown.clone()
        layer.W_q.weight.mul_(2)
        x.mul_(2)
        assert layer.attention_weights is shown and torch.equal(shown + 0, wanted)


def test_what_torch_asks_beside_numbers(own):
    """Derivatives of derivatives of what torch's mathematics computes, torch.func, checkpointing."""
    from torch.utils.checkpoint import checkpoint

    layer, x = layers()["multi-head"].double().to(own), torch.randn(3, 2, 4, 12, dtype=F64, device=own)
    lens = torch.tensor([3, 2])
    wanted = torch.stack([layer(y, y, y, lens) for y in x])
    close([torch.func.vmap(lambda y: layer(y, y, y, lens))(x)], [wanted], F64)
    y = x[0].clone().requires_grad_()
    found = [torch.func.grad(lambda z: layer(z, z, z, lens).square().sum())(x[0])]
    found.append(torch.autograd.grad(layer(y, y, y, lens).square().sum(), y)[0])
    found.append(torch.autograd.grad(checkpoint(layer, y, y, y, lens, use_reentrant=False).square().sum(), y)[0])
    close(found[1:], [found[0]] * 2, F64)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        (first,) = torch.autograd.grad(layer(y, y, y, lens).square().sum(), y, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), y)
    cpu, z = copy.deepcopy(layer).cpu(), x[0].cpu().requires_grad_()
    (first,) = torch.autograd.grad(cpu(z, z, z, lens).square().sum(), z, create_graph=True)
    close([second], torch.autograd.grad(first.square().sum(), z), F64)


def test_ring_attention_refuses(own):
    import torch.distributed as dist

    from mha_c.torch.distributed import ring_attention

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        x = torch.randn(1, 2, 4, 6, device=own)
        with pytest.raises(TypeError, match="q is on device own:0, but ring attention computes on the CPU"):
            ring_attention(x, x, x)
    finally:
        dist.destroy_process_group()
