"""What torch can be asked to do with a module, on d2l's and on ours: the table of docs/compatibility.md.

    python tests/support/torch_features.py        prints it

Each feature is a function of (layer, x, lens) that returns tensors.  On ours it is "equal" to what d2l's gives, or
refused in our words, which the table shows; anything else is a failure of `test_features.py`.
"""

import contextlib
import copy
import io
import itertools
import pickle
import sys
from pathlib import Path

if __name__ == "__main__":  # behind what is installed: the working tree, built in place
    sys.path.append(str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
import torch.autograd.forward_ad as fwAD
from torch import nn
from torch.autograd import functional as AF
from torch.nn.utils import prune

import needs
from features import OF_TORCH, saved, weights_of

feature = OF_TORCH.feature
BEGIN, END = "<!-- made by `python tests/support/torch_features.py` -->", "<!-- end -->"


def leaves(layer, x):
    return [x, *layer.parameters()]


def loss_of(layer, lens):
    return lambda x: torch.tanh(layer(x, x, x, lens)).sum()


@feature("forward and backward")
def _(layer, x, lens):
    out = layer(x, x, x, lens)
    return [out, *torch.autograd.grad(out.square().sum(), leaves(layer, x))]


@feature("`attention_weights`, also in a loss")
def _(layer, x, lens):
    out = layer(x, x, x, lens)
    weights = weights_of(layer)
    loss = out.sum() - 0.1 * (weights * (weights + 1e-9).log()).sum()
    return [weights, *torch.autograd.grad(loss, leaves(layer, x))]


@feature("gradient of the output for `attention_weights`")
def _(layer, x, lens):
    out = layer(x, x, x, lens)
    return torch.autograd.grad(out.square().sum(), weights_of(layer))


@feature("gradient of `attention_weights` for what lies behind a call whose output was not kept")
def _(layer, x, lens):
    behind = x * 1
    layer(behind, behind, behind, lens)
    del behind
    return torch.autograd.grad(weights_of(layer).square().sum(), x)


@feature("`backward(inputs=...)`, `grad(..., allow_unused=True)`")
def _(layer, x, lens):
    loss_of(layer, lens)(x).backward(inputs=[x])
    unused = torch.zeros(1, requires_grad=True)
    found, none = torch.autograd.grad(loss_of(layer, lens)(x), [x, unused], allow_unused=True)
    assert none is None
    return [x.grad, found]


@feature("gradient penalty (`create_graph=True`)")
def _(layer, x, lens):
    (grad,) = torch.autograd.grad(loss_of(layer, lens)(x), x, create_graph=True)
    grads = torch.autograd.grad(grad.square().sum(), leaves(layer, x), allow_unused=True)
    return [torch.zeros_like(y) if one is None else one for y, one in zip(leaves(layer, x), grads)]


@feature("`autograd.functional`: hessian, hvp, vhp, jvp, jacobian")
def _(layer, x, lens):
    loss, x = loss_of(layer, lens), x.detach()
    return [
        AF.hessian(loss, x), AF.hvp(loss, x, x)[1], AF.vhp(loss, x, x)[1],
        AF.jvp(lambda x: layer(x, x, x, lens), x, x)[1], AF.jacobian(loss, x),
    ]  # fmt: skip


@feature("`jacobian(vectorize=True)`, `is_grads_batched`")
def _(layer, x, lens):
    out = layer(x, x, x, lens)
    several = torch.stack([torch.ones_like(out), torch.linspace(0, 1, out.numel()).reshape(out.shape).to(out)])
    jacobian = AF.jacobian(lambda x: layer(x, x, x, lens), x.detach(), vectorize=True)
    return [jacobian, *torch.autograd.grad(out, x, several, is_grads_batched=True)]


@feature("`autograd.forward_ad`, `strategy='forward-mode'`")
def _(layer, x, lens):
    with fwAD.dual_level():
        dual = fwAD.make_dual(x.detach(), torch.ones_like(x))
        tangent = fwAD.unpack_dual(layer(dual, dual, dual, lens)).tangent
    call = lambda x: layer(x, x, x, lens)  # noqa: E731
    return [tangent, AF.jacobian(call, x.detach(), vectorize=True, strategy="forward-mode")]


@feature("`torch.func`: grad, vjp, jvp, jacrev")
def _(layer, x, lens):
    F, loss, x = torch.func, loss_of(layer, lens), x.detach()
    call = lambda x: layer(x, x, x, lens)  # noqa: E731
    return [F.grad(loss)(x), F.vjp(call, x)[1](x)[0], F.jvp(call, (x,), (x,))[1], F.jacrev(call)(x)]


@feature("`torch.func`: vmap, jacfwd, hessian (d2l's masks: not with lengths)")
def _(layer, x, lens):
    F, loss, x = torch.func, loss_of(layer, None), x.detach()
    call = lambda x: layer(x, x, x, None)  # noqa: E731
    return [F.vmap(call)(torch.stack([x, 2 * x])), F.jacfwd(call)(x), F.hessian(loss)(x)]


@feature("`torch.func.functional_call` inside `grad` and `vmap`")
def _(layer, x, lens):
    parameters = {name: p.detach() for name, p in layer.named_parameters()}
    x = x.detach()

    def loss(parameters, x):
        return torch.func.functional_call(layer, parameters, (x, x, x, None)).square().sum()

    if not parameters:
        return [loss(parameters, x)]
    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, torch.stack([x, 2 * x]))
    return [*torch.func.grad(loss)(parameters, x).values(), *each.values()]


@feature("hooks on inner modules, of every kind")
def _(layer, x, lens):
    seen = []
    for module in layer.modules():
        module.register_forward_pre_hook(lambda m, args: seen.append(args[0].sum()))
        module.register_forward_hook(lambda m, args, out: out * 1.5)
        module.register_full_backward_hook(lambda m, of_in, of_out: seen.append(of_out[0].sum()))
        module.register_full_backward_pre_hook(lambda m, of_out: (2 * of_out[0],))
    out = layer(x, x, x, None)
    grads = torch.autograd.grad(out.sum(), leaves(layer, x))
    return [out, *grads, *sorted(float(value.detach()) for value in seen)]


@feature("global module hooks")
def _(layer, x, lens):
    names = []
    handle = nn.modules.module.register_module_forward_hook(lambda m, *_: names.append(type(m).__name__))
    try:
        return [layer(x, x, x, lens), len(names)]
    finally:
        handle.remove()


@feature("a replaced `forward` of `dropout`, `W_q`, `attention`")
def _(layer, x, lens):
    for name in ("dropout", "attention", "W_q"):
        child = getattr(layer, name, None)
        if child is not None:
            child.forward = lambda *args, old=child.forward: 3 * old(*args)
    return [layer(x, x, x, lens)]


@feature("parametrizations, weight_norm, spectral_norm, pruning")
def _(layer, x, lens):
    norms = nn.utils.parametrizations
    for name, wrap in (("W_q", norms.weight_norm), ("W_k", norms.spectral_norm)):
        if hasattr(layer, name):
            torch.manual_seed(0)
            wrap(getattr(layer, name))
    if hasattr(layer, "W_o"):
        prune.random_unstructured(layer.W_o, "weight", 0.3)
    out = layer(x, x, x, lens)
    return [out, torch.autograd.grad(out.sum(), x)[0]]


@feature("numbers changed through `.data`, `.numpy()`, masks")
def _(layer, x, lens):
    layer(x, x, x, lens)
    for p in layer.parameters():
        p.data[0, 0] = 3
        p.detach().numpy()[-1, -1] += 1
        p.data[p.data > 0.4] = 0
    return [layer(x, x, x, lens)]


@feature("an optimizer's steps")
def _(layer, x, lens):
    parameters = list(layer.parameters()) or [x]
    optimizer = torch.optim.Adam(parameters, lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(layer, lens)(x).backward()
        optimizer.step()
    return [layer(x, x, x, lens), *parameters]


@feature("checkpointing, both kinds")
def _(layer, x, lens):
    from torch.utils.checkpoint import checkpoint

    grads = []
    for use_reentrant in (False, True):
        x.grad = None
        torch.tanh(checkpoint(layer, x, x, x, lens, use_reentrant=use_reentrant)).sum().backward()
        grads.append(x.grad)
    return grads


@feature("autocast to bfloat16")
def _(layer, x, lens):
    found = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        layer, x = layer.to(dtype), x.detach().to(dtype).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = layer(x, x, x, lens)
        assert out.dtype is weights_of(layer).dtype is (dtype if dtype is torch.float64 else torch.bfloat16)
        found += [out, weights_of(layer), *torch.autograd.grad(out.sum(), leaves(layer, x))]
    return found


class Named(torch.Tensor):
    """A subclass as fastai's and torchvision's are: every operation gives one."""


@feature("tensors of a subclass")
def _(layer, x, lens):
    x = x.detach().as_subclass(Named).requires_grad_()
    out = layer(x, x, x, lens)
    grads = torch.autograd.grad(out.square().sum(), leaves(layer, x))
    assert type(out) is type(weights_of(layer)) is Named, (type(out), type(weights_of(layer)))
    return [y.as_subclass(torch.Tensor) for y in (out, weights_of(layer), *grads)]


@feature("deepcopy, pickle, `torch.save`")
def _(layer, x, lens):
    twins = copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), saved(layer, weights_only=False)
    return [twin(x, x, x, lens) for twin in twins]


def loaded(layer):
    """Saved whole and read back by a torch.load that runs nothing: d2l's classes are named one by one."""
    from mha_c import torch as mt

    named = mt.safe_globals() if isinstance(layer, tuple(mt.safe_globals())) else {type(m) for m in layer.modules()}
    with torch.serialization.safe_globals([*named]):
        return saved(layer, weights_only=True)


@feature("`torch.load(weights_only=True)` of a module saved whole, `safe_globals()` allowed")
def _(layer, x, lens):
    return [twin(x, x, x, lens) for twin in (loaded(layer), loaded(loaded(layer)))]


@feature("the same of a lazy module that was never called")
def _(layer, x, lens):
    for name, child in list(layer.named_children()):
        if isinstance(child, nn.Linear):
            setattr(layer, name, nn.LazyLinear(child.out_features, bias=False, dtype=child.weight.dtype))
    return None if next(layer.parameters(), None) is None else [loaded(layer)(x, x, x, lens)]


@feature("deepcopy after a training step")
def _(layer, x, lens):
    layer(x, x, x, lens).sum().backward()
    return [copy.deepcopy(layer)(x, x, x, lens)]


@feature("`torch.compile`, forward and backward")
def _(layer, x, lens):
    needs.fresh_compiler()
    out = torch.compile(layer, backend="aot_eager")(x, x, x, lens)
    return [out, *torch.autograd.grad(out.square().sum(), leaves(layer, x))]


class Around(nn.Module):
    """A model of one layer."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, q, k, v, lens=None):
        return self.layer(q, k, v, lens)


@feature("`torch.jit.trace`")
def _(layer, x, lens):
    traced = torch.jit.trace(Around(layer), (x, x + 1, x + 2), check_trace=False)
    return [traced(2 * x, x, x)]


@feature("`torch.jit.script`")
def _(layer, x, lens):
    return [torch.jit.script(layer)(x, x, x, None)]


@feature("`torch.export`")
def _(layer, x, lens):
    x = x.detach()
    exported = torch.export.export(layer.eval(), (x, x + 1, x + 2, None)).module()
    return [exported(2 * x, x, x, None)]


@feature("`torch.onnx.export`, both exporters, in onnxruntime")
def _(layer, x, lens):
    onnxruntime, x = needs.module("onnxruntime"), x.detach()
    found = []
    for dynamo in (True, False):
        file = io.BytesIO()
        with contextlib.redirect_stdout(io.StringIO()):
            torch.onnx.export(layer.eval(), (x, x + 1, x + 2, lens), file, dynamo=dynamo)
        session = onnxruntime.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])
        given = [np.ascontiguousarray(value) for value in (2 * x, x, x, lens)]
        found += session.run(None, {slot.name: value for slot, value in zip(session.get_inputs(), given)})
    return [torch.from_numpy(out) for out in found]


@feature("`FlopCounterMode`")
def _(layer, x, lens):
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        layer(x, x, x, None).sum().backward()
    return [counter.get_total_flops()]


@feature("`torch.fx.symbolic_trace` of a model around it")
def _(layer, x, lens):
    return [torch.fx.symbolic_trace(Around(layer))(x, 2 * x, x, lens)]


@feature("device `meta`")
def _(layer, x, lens):
    layer, x = copy.deepcopy(layer).to("meta"), x.detach().to("meta")
    return [*layer(x, x, x, None).shape, layer(x, x, x, lens.to("meta")).is_meta]


import notebook_features  # noqa: E402, F401  their rows come behind these


def pairs(bias=False):
    """(ours, d2l's) with the same weights."""
    from mha_c import torch as mt

    d2l = needs.d2l("0.17.6")
    torch.manual_seed(0)
    for ours, theirs in (
        (mt.MultiHeadAttention(4, 4, 4, 4, 2, 0.0, bias), d2l.MultiHeadAttention(4, 4, 4, 4, 2, 0.0, bias)),
        (mt.AdditiveAttention(4, 4, 3, 0.0), d2l.AdditiveAttention(4, 4, 3, 0.0)),
        (mt.DotProductAttention(0.0), d2l.DotProductAttention(0.0)),
    ):
        theirs.load_state_dict(ours.state_dict())
        yield ours.double(), theirs.double()


def run(function, layer):
    torch.manual_seed(1)
    x = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(2, 3, 4).requires_grad_()
    return function(layer, x, torch.tensor([3, 1]))


def outcome(name, layers=None):
    """ "equal", our words of refusal, or an AssertionError; of so many of the layers, the multi-head one first."""
    words = set()
    for ours, theirs in itertools.islice(pairs(), layers):
        expected = error = None
        try:
            expected = run(OF_TORCH[name], theirs)
        except Exception as problem:
            error = problem
        try:
            found = run(OF_TORCH[name], ours)
        except Exception as problem:
            words.add(refusal(name, problem, error))
            continue
        if error is not None:
            words.add("works; d2l's does not")
            continue
        if expected is found is None:  # has no such parts
            continue
        if name in OF_TORCH.differences:
            assert any((a - b).abs().max() > 1e-3 for a, b in zip(found, expected)), name
            words.add(f"differs: {OF_TORCH.differences[name]}")
            continue
        assert len(found) == len(expected), name
        for a, b in zip(found, expected):
            # float64, except where autocast rounds every step to 8 bits, and ours only the result.
            rtol, atol = (2e-2, 2e-2) if "bfloat16" in name else (1e-7, 1e-9)
            torch.testing.assert_close(a, b, rtol=rtol, atol=atol)
        words.add("equal")
    words = words - {"equal"} if len(words) > 1 and "works; d2l's does not" in words else words
    assert len(words) == 1, (name, words)
    return words.pop()


def refusal(name, problem, theirs):
    if theirs is not None:
        return "neither works"
    text = str(problem).split("; ")[0].split(": ")[0]
    ours = any(word in str(problem) for word in ("mha_c", "attention_weights", "valid_lens has"))
    assert ours, (name, repr(problem))
    return f"refused: {text}"


if __name__ == "__main__":
    print(OF_TORCH.table(outcome))
