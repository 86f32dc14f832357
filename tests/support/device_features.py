"""What layers do on another device than the CPU, on d2l's of both generations and on ours: a table of the docs.

    python tests/support/device_features.py        prints it

Each feature is a function of (layer, x, lens) on the device that returns tensors; "equal" says that ours give what
d2l's give, forward and backward, in float32 (1e-5) and in float64 (1e-11).
"""

import copy
import sys
from pathlib import Path

if __name__ == "__main__":  # behind what is installed: the working tree, built in place
    sys.path.append(str(Path(__file__).resolve().parents[2]))

import torch

import needs
import own_device
from book_models import is_eager
from features import ON_DEVICES, saved, weights_of

OWN = own_device.load()
BEGIN, END = "<!-- made by `python tests/support/device_features.py` -->", "<!-- end of the table of devices -->"
TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-11}  # sums of some tens of terms around 1, in another order
feature = ON_DEVICES.feature


def with_gradients(layer, x, out, *others, through=True):
    loss = out.square().sum() + sum(other.square().sum() for other in others)
    return [out, *others, *torch.autograd.grad(loss, [x, *(layer.parameters() if through else ())])]


@feature("forward and backward, lengths of each item")
def _(layer, x, lens):
    return with_gradients(layer, x, layer(x, x, x, lens))


@feature("lengths of each query, none at all")
def _(layer, x, lens):
    of_queries = torch.tensor([[1, 2, 3], [3, 2, 1]], device=OWN)
    return with_gradients(layer, x, layer(x, x, x, of_queries), layer(x, 2 * x, x, None))


@feature("queries without keys")
def _(layer, x, lens):
    return with_gradients(layer, x, layer(x, x, x, lens * torch.tensor([1, 0], device=OWN)))


@feature("`attention_weights`, in a loss too")
def _(layer, x, lens):
    return with_gradients(layer, x, layer(x, x, x, lens), weights_of(layer))


@feature("dropout: `torch.manual_seed` repeats it")
def _(layer, x, lens):
    layer.train()
    getattr(layer, "attention", layer).dropout.p = 0.5
    found = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        found.append(layer(x, x, x, None))
    return [found[0] - found[1], (found[0] != found[2]).any().float()]


@feature("`torch.utils.checkpoint`")
def _(layer, x, lens):
    from torch.utils.checkpoint import checkpoint

    return with_gradients(layer, x, checkpoint(layer, x, x, x, lens, use_reentrant=False))


@feature("`copy.deepcopy`, `state_dict` there and back")
def _(layer, x, lens):
    state = saved(layer.cpu().state_dict())
    twin = copy.deepcopy(layer).to(OWN)
    twin.load_state_dict(state)
    return with_gradients(twin, x, twin(x, x, x, lens))


@feature("hooks on children")
def _(layer, x, lens):
    handles = [child.register_forward_hook(lambda module, inputs, out: 2 * out) for child in layer.children()]
    found = with_gradients(layer, x, layer(x, x, x, lens))
    return found if handles else None


@feature("a step of an optimizer")
def _(layer, x, lens):
    parameters = [*layer.parameters()]
    if not parameters:
        return None
    layer(x, x, x, lens).square().sum().backward()
    torch.optim.SGD(parameters, lr=0.1, momentum=0.9).step()
    return [layer(x, x, x, lens), *parameters]


@feature("`torch.func.grad`, `vmap`")
def _(layer, x, lens):
    grad = torch.func.grad(lambda x: layer(x, x, x, lens).square().sum())(x.detach())
    many = torch.stack([x.detach(), -x.detach()])
    return [grad, torch.func.vmap(lambda x: layer(x, x, x, None))(many)]


@feature("lengths on the CPU, as a tensor or a list")
def _(layer, x, lens):
    return with_gradients(layer, x, layer(x, x, x, lens.cpu()), layer(x, 2 * x, x, [2, 3]))


@feature("NaN behind a length: no influence, forward or backward")
def _(layer, x, lens):
    hidden = torch.arange(3, device=OWN)[:, None] >= lens[:, None, None]
    keys = torch.where(hidden, torch.nan, x)
    found = with_gradients(layer, x, layer(x, keys, keys, lens))
    if not all(bool(y.isfinite().all()) for y in found):
        raise ArithmeticError("NaN has spread")
    return found


@feature("to the CPU and back")
def _(layer, x, lens):
    layer(x, x, x, lens)
    layer.cpu()(x.cpu(), x.cpu(), x.cpu(), lens.cpu())
    layer.to(OWN)
    return with_gradients(layer, x, layer(x, x, x, lens))


@feature("`project`: keys and values once, for many calls")
def _(layer, x, lens):
    kv = layer.project(x, 2 * x, lens) if hasattr(layer, "project") else None
    calls = [layer(q, x, 2 * x, lens) if kv is None else layer(q, kv) for q in (x, -x)]
    return with_gradients(layer, x, *calls)


@feature("`new_cache`, inside `frozen`: decoding step by step")
def _(layer, x, lens):
    layer.eval()
    with torch.no_grad():
        if not hasattr(layer, "new_cache"):
            return [y for i in range(3) for y in (layer(x[:, i : i + 1], x[:, : i + 1], x[:, : i + 1], None),
                                                  weights_of(layer))]  # fmt: skip
        from mha_c import torch as mt

        with mt.frozen(layer):
            cache, found = layer.new_cache(2, 4), []
            for step in x.split(1, 1):
                found += [layer(step, step, step, cache=cache), weights_of(layer)]
            return found


def beside(layer, name):
    """What has this name where the layer's class comes from; None where nothing has."""
    from mha_c import torch as mt

    is_ours = type(layer).__module__.startswith("mha_c.")
    return getattr(mt, name) if is_ours else type(layer).forward.__globals__.get(name)


@feature("`masked_softmax`")
def _(layer, x, lens):
    softmax = beside(layer, "masked_softmax")
    return with_gradients(layer, x, softmax(1 * x, lens), softmax(1 * x, None), through=False)  # d2l's writes into x


@feature("`sequence_mask`")
def _(layer, x, lens):
    mask = beside(layer, "sequence_mask")
    return None if mask is None else with_gradients(layer, x, mask(1 * x[:, 0], lens), through=False)


@feature("`PositionalEncoding`")
def _(layer, x, lens):
    if x.dtype is torch.float64:  # d2l's table is of float32
        return None
    return with_gradients(layer, x, beside(layer, "PositionalEncoding")(4, 0.0).to(OWN)(x), through=False)


def pairs(dtype):
    """(ours, d2l's) on the device with the same weights, of both generations."""
    from mha_c import torch as mt

    for version in needs.real_d2l.VERSIONS:
        d2l, x = needs.d2l(version), torch.zeros(1, 1, 4)
        forms = {"MultiHeadAttention": ((4, 4, 4, 4, 2, 0.0), (4, 2, 0.0)), "DotProductAttention": ((0.0,), (0.0,)),
                 "AdditiveAttention": ((4, 4, 3, 0.0), (3, 0.0))}  # fmt: skip
        for name, arguments in forms.items():
            torch.manual_seed(0)
            made = [getattr(of, name)(*arguments[0 if is_eager(d2l) else 1]) for of in (mt, d2l)]
            for layer in made:
                layer(x, x, x, torch.tensor([1]))
            made[1].load_state_dict(made[0].state_dict())
            yield [layer.to(OWN, dtype) for layer in made]


def outcome(name):
    """ "equal", or "works; d2l's does not"; anything else is an error."""
    words = set()
    for dtype, tolerance in TOLERANCES.items():
        for ours, theirs in pairs(dtype):
            results = []
            for layer in (theirs, ours):
                x = torch.linspace(-1, 1, 24, dtype=dtype).reshape(2, 3, 4).to(OWN).requires_grad_()
                try:
                    results.append(ON_DEVICES[name](layer, x, torch.tensor([3, 1], device=OWN)))
                except Exception:
                    if layer is ours:
                        raise
                    results.append("fails")
            if results[0] == "fails":
                words.add("works; d2l's does not")
            elif results[0] is not None:
                words.add("equal")
                for a, b in zip(*results, strict=True):
                    scale = max(1.0, float(a.detach().abs().max()))
                    torch.testing.assert_close(b.cpu(), a.cpu(), rtol=0, atol=tolerance * scale)
    return "works; d2l's does not" if len(words) > 1 else words.pop()


if __name__ == "__main__":
    print(ON_DEVICES.table(outcome))
