"""Rows of the table of torch_features.py: what a notebook does around d2l's classes and ours, and what differs."""

import contextlib
import io

import torch
from torch import nn

import needs
from features import OF_TORCH, weights_of
from seen_by_torch import Names, Operations, Tripled

feature = OF_TORCH.feature


@contextlib.contextmanager
def book(layer, version="0.17.6"):
    """A d2l.torch, with ours in it where the layer is ours."""
    import mha_c.d2l
    from mha_c import torch as mt

    ours = isinstance(layer, (mt.MultiHeadAttention, mt.AdditiveAttention, mt.DotProductAttention))
    with contextlib.redirect_stdout(io.StringIO()):
        with mha_c.d2l.patch(needs.d2l(version)) if ours else contextlib.nullcontext():
            yield needs.d2l(version)


@contextlib.contextmanager
def put(owner, name, value):
    """Another thing under a name."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield before
    finally:
        setattr(owner, name, before)


@feature("`attention_weights` assigned by a `forward` of a subclass, a class, an object; deleted")
def _(layer, x, lens):
    found = []
    with book(layer) as d2l:

        def forward(self, queries, keys, values, valid_lens=None):
            self.attention_weights = d2l.masked_softmax(queries @ keys.transpose(1, 2), valid_lens)
            return self.dropout(self.attention_weights) @ values

        kind = d2l.DotProductAttention
        for where in ("subclass", "class", "object"):
            mine = type("Mine", (kind,), {"forward": forward}) if where == "subclass" else kind
            with put(kind, "forward", forward) if where == "class" else contextlib.nullcontext():
                module = mine(0.0)
                if where == "object":
                    module.forward = forward.__get__(module)
                found += [module(x, x, x, lens), module.attention_weights]
            del module.attention_weights
            assert not hasattr(module, "attention_weights")
    return found


@feature("`attention_weights` read twice, edited in place, through `.data`, `.numpy()`, under `no_grad`")
def _(layer, x, lens):
    layer(x, x, x, lens)
    weights, inner = weights_of(layer), getattr(layer, "attention", layer)
    weights.data.mul_(2)
    weights.detach().numpy()[0] += 1
    with torch.no_grad():
        weights[0, 0] = 7
    assert weights is inner.attention_weights
    return [inner.attention_weights]


@feature("`d2l.DotProductAttention` replaced after `patch()`")
def _(layer, x, lens):
    class Mine(nn.Module):
        def __init__(self, dropout):
            super().__init__()

        def forward(self, queries, keys, values, valid_lens=None):
            return torch.relu(queries @ keys.transpose(1, 2)) @ values

    with book(layer) as d2l, put(d2l, "DotProductAttention", Mine):
        mha = d2l.MultiHeadAttention(4, 4, 4, 4, 2, 0.0).double()
    return [mha(x, x, x, lens)]


@feature("`d2l.masked_softmax`, `d2l.transpose_qkv`, `d2l.transpose_output` replaced")
def _(layer, x, lens):
    found = []
    with book(layer) as d2l:
        mha = d2l.MultiHeadAttention(4, 4, 4, 4, 2, 0.0).double()
        for name in ("masked_softmax", "transpose_qkv", "transpose_output"):
            before = getattr(d2l, name)
            with put(d2l, name, lambda X, other, before=before: before(X, other).square()):
                found.append(mha(x, x, x, lens))
    return found


@feature("d2l 1.0: a `d2l.Module`, `save_hyperparameters`, `configure_optimizers`; `bias` as a number")
def _(layer, x, lens):
    with book(layer, "1.0.3") as d2l:

        class Mine(d2l.MultiHeadAttention):
            def __init__(self, num_hiddens, num_heads, dropout, bias, lr):
                super().__init__(num_hiddens, num_heads, dropout, bias)
                self.save_hyperparameters()

        mha = Mine(4, 2, 0.0, 1, lr=0.5).double()
        assert isinstance(mha, d2l.Module) and mha.hparams["lr"] == mha.lr == 0.5
        mha(x, x, x, lens).square().sum().backward()
        mha.configure_optimizers().step()
    return [mha(x, x, x, lens), *mha.parameters()]


@feature("what a `TorchDispatchMode` and a `TorchFunctionMode` see")
def _(layer, x, lens):
    with Names() as functions, Operations() as operations:
        out = layer(x, x, x, lens)
        torch.autograd.grad(out.sum(), x)
    names = "linear", "bmm", "softmax", "dropout", "aten.mm.default", "aten.bmm.default", "aten._softmax.default"
    return [out, *(name in functions.names + operations.names for name in names)]


@feature("inputs and weights of a class with a `__torch_function__` of its own, as quantized ones")
def _(layer, x, lens):
    found, x = [layer(x.as_subclass(Tripled), x, x, lens)], x.detach()
    for linear in [child for child in layer.modules() if isinstance(child, nn.Linear)]:
        linear.weight = nn.Parameter(linear.weight.detach().as_subclass(Tripled), requires_grad=False)
    return [*found, layer(x, x, x, lens)]


@feature("`call_for_per_sample_grads` (d2l's additive attention: not)")
def _(layer, x, lens):
    from torch.nn.utils._per_sample_grad import call_for_per_sample_grads

    if not hasattr(layer, "W_o"):
        return None
    call_for_per_sample_grads(layer)(x, x, x, None).square().sum().backward()
    return [p.grad_sample for p in layer.parameters()]


@feature("`F.linear`, `F.softmax`, `F.dropout`, `torch.bmm`, `torch.tanh` replaced")
def _(layer, x, lens):
    found = []
    for owner, name in (
        *[(nn.functional, name) for name in ("linear", "softmax", "dropout")], (torch, "bmm"), (torch, "tanh"),
    ):  # fmt: skip
        before = getattr(owner, name)
        with put(owner, name, lambda *args, before=before, **named: 0.5 * before(*args, **named)):
            found.append(layer(x, x, x, lens))
    return found


@feature("`dropout.inplace=True`: weights show what is dropped")
def _(layer, x, lens):
    dropout = getattr(layer, "attention", layer).dropout
    dropout.inplace, dropout.p = True, 0.5
    with torch.no_grad():
        return [layer(x, x, x, lens), weights_of(layer)]


@feature("DTensors (d2l's masks: not with lengths)")
def _(layer, x, lens):
    dist = needs.module("torch.distributed")
    from torch.distributed import tensor as dt

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dt.init_device_mesh("cpu", (1,))
        layer, x = dt.distribute_module(layer, mesh), dt.distribute_tensor(x.detach(), mesh, [dt.Replicate()])
        return [layer(x, x, x, None).to_local()]
    finally:
        dist.destroy_process_group()


@feature("lengths of shape (B, Q, 1)")
def _(layer, x, lens):
    return [layer(x, x, x, torch.tensor([[[3], [1], [2]], [[1], [2], [3]]]))]


@feature(
    "keys and values of a single attention changed through `.data` before `backward()`",
    differs="numbers of before and after meet in both gradients, but not in the same places",
)
def _(layer, x, lens):
    if hasattr(layer, "W_o"):
        return None
    inputs = [x.detach().clone().requires_grad_() for _ in range(3)]
    out = layer(*inputs, lens)
    inputs[1].data.mul_(-2)
    inputs[2].data.mul_(-2)
    return torch.autograd.grad(out.square().sum(), inputs)


@feature(
    "d2l 1.0: draws of `W_o` in a first call in training mode, with dropout",
    differs="all sizes are known, and all weights drawn, before dropout draws; d2l's draws W_o last",
)
def _(layer, x, lens):
    with book(layer, "1.0.3") as d2l:
        mha = d2l.MultiHeadAttention(4, 2, 0.5).double()
    mha(x, x, x, lens)
    return [mha.W_o.weight]
