"""Layers whose heads, or whose sequence, the processes of a World share."""

import copy
import pickle

import torch
import torch.distributed as dist

import mha_c.torch
import mha_c.torch.distributed as D

HIDDEN, HEADS = 24, 8


def layer(dropout=0.0, bias=True, dtype=torch.float64, seed=0, **more):
    torch.manual_seed(seed)
    return mha_c.torch.MultiHeadAttention(10, 9, 11, HIDDEN, HEADS, dropout, bias=bias, **more).to(dtype)


def inputs(dtype=torch.float64, same=False):
    torch.manual_seed(1)
    sizes = (9, 9, 9) if same else (9, 10, 11)
    x = [torch.randn(3, rows, size, dtype=dtype) for rows, size in zip((5, 7, 7), sizes)]
    return [t.requires_grad_() for t in x]


LENS = torch.tensor([7, 3, 0])


def copied(x):
    return x.detach().numpy().copy()


def copies(tensors):
    return [None if x is None else copied(x) for x in tensors]


def whole_call(rank, n, bias=True):
    """One process's output, gradients of inputs and of all parameters."""
    module, x = layer(bias=bias), inputs()
    out = module(*x, LENS)
    out.square().sum().backward()
    gradients = {name: copied(p.grad) for name, p in module.named_parameters()}
    return copies([out, *(t.grad for t in x)]), gradients, copied(module.attention_weights)


def parallel(module):
    """The recipe of docs/scale-out.md: torch's tensor parallel over the heads of a module."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {**{name: ColwiseParallel() for name in ("W_q", "W_k", "W_v")}, "W_o": RowwiseParallel()}
    module = parallelize_module(module, mesh, plan)
    module.num_heads //= mesh.size()
    return module


def parallel_call(rank, n, bias=True):
    """Output and gradients of the inputs, the parameters' gradients as a whole, the weights of this rank's heads."""
    module, x = parallel(layer(bias=bias)), inputs()
    out = module(*x, LENS)
    out.square().sum().backward()
    gradients = {name: copied(p.grad.full_tensor()) for name, p in module.named_parameters()}
    return copies([out, *(t.grad for t in x)]), gradients, copied(module.attention_weights)


def parallel_steps(rank, n):
    """Losses of some steps of training of a whole layer and of a parallel one, and what the state_dict then holds."""
    losses, states = [], []
    for change in (lambda module: module, parallel):
        module, x = change(layer()), [t.detach() for t in inputs()]
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(4):
            loss = (module(*x, LENS) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        states.append({name: getattr(x, "full_tensor", lambda x=x: x)() for name, x in module.state_dict().items()})
    return losses, max(float((states[1][name] - x).abs().max()) for name, x in states[0].items())


def core_calls(rank, n):
    """How many calls of the core, with heads of what shape, calls of a parallel layer without and with dropout make."""
    from mha_c.torch._call import attention, core

    found = []

    def of_layer(queries, *others):  # a layer without projections
        found.append(tuple(queries.shape))
        return layer_forward(queries, *others)

    def of_heads(call, tensors):
        found.append(tuple(tensors.q.shape))
        return run_attention(call, tensors)

    layer_forward, run_attention = core.layer_forward, attention.run_attention
    core.layer_forward, attention.run_attention = of_layer, of_heads
    try:
        for dropout in (0.0, 0.5):
            parallel(layer(dropout))(*inputs(), LENS)
    finally:
        core.layer_forward, attention.run_attention = layer_forward, run_attention
    return found


def copies_and_pickles(rank, n):
    """Whether a copy computes what its module does, and what pickle says, of a spread sequence."""
    module, x = D.spread_sequence(layer()), [torch.ones(1, 2, size, dtype=torch.float64) for size in (9, 10, 11)]
    equal = torch.equal(copy.deepcopy(module)(*x), module(*x))
    try:
        pickle.dumps(module)
    except TypeError as error:
        return equal, str(error)
    return None


def hooked_layers(rank, n):
    """What spread_sequence says of layers that are hooked here and there; None where it says nothing."""

    def refusal(call):
        try:
            call()
        except TypeError as error:
            return str(error)

    found = []
    for place in ("", "W_o", "W_q", "attention", "attention.dropout"):
        for kind in ("register_forward_hook", "register_forward_pre_hook"):
            module = mha_c.torch.MultiHeadAttention(HIDDEN, HIDDEN, HIDDEN, HIDDEN, HEADS, 0.5)
            getattr(module.get_submodule(place), kind)(lambda *_: None)
            found.append((place, refusal(lambda: D.spread_sequence(module))))  # noqa: B023  called here
    return found


# --- spread_sequence -------------------------------------------------------------


def sequence(rank, n, layout, dropout=0.0, lens=None, decoder=False, empty_rows="uniform"):
    """This rank's piece of the output and of the input's gradient; the parameters' gradients summed over the ranks."""
    group = dist.group.WORLD
    torch.manual_seed(0)
    module = mha_c.torch.MultiHeadAttention(HIDDEN, HEADS, dropout, bias=True, empty_rows=empty_rows).double()
    assert D.spread_sequence(module, group, layout=layout) is module
    torch.manual_seed(1)
    x = torch.randn(2, 19, 10, dtype=torch.float64)
    mine = D.split_sequence(x, rank, n, layout=layout).clone().requires_grad_()
    torch.manual_seed(2)
    module.eval()(mine.detach(), mine.detach(), mine.detach())  # sizes: dropout draws before W_o does
    module.train()
    torch.manual_seed(5)
    out = module(mine, mine, mine, lens)
    out.square().sum().backward()
    grads = {name: p.grad for name, p in module.named_parameters()}
    for grad in grads.values():
        dist.all_reduce(grad)
    try:
        text = str(module.attention_weights)
    except RuntimeError as error:
        text = str(error)
    try:
        text += str(module.attention.attention_weights)
    except RuntimeError as error:
        text += str(error)
    try:
        module(mine, mine, mine, causal=True)
    except ValueError as error:
        text += str(error)
    assert copy.deepcopy(module).num_heads == HEADS
    return copied(out), copied(mine.grad), {name: copied(g) for name, g in grads.items()}, text


def hooked_sequence(rank, n):
    """What calls say whose inner modules are hooked or replaced: they would not be called."""
    module = mha_c.torch.MultiHeadAttention(HIDDEN, HIDDEN, HIDDEN, HIDDEN, HEADS, 0.0)
    D.spread_sequence(torch.nn.Sequential(module))
    x, texts = torch.ones(1, 2, HIDDEN), []

    def call():
        try:
            texts.append(str(module(x, x, x).shape))
        except TypeError as error:
            texts.append(str(error))

    for child, register in ((module.attention.dropout, "register_forward_hook"),
                            (module.attention, "register_forward_pre_hook")):  # fmt: skip
        handle = getattr(child, register)(print)
        call()
        handle.remove()
        call()
    module.attention.dropout.forward = torch.relu
    call()
    return texts


def sequence_alone(layout, dropout=0.0, lens=None, empty_rows="uniform"):
    torch.manual_seed(0)
    module = mha_c.torch.MultiHeadAttention(HIDDEN, HEADS, dropout, bias=True, empty_rows=empty_rows).double()
    torch.manual_seed(1)
    x = torch.randn(2, 19, 10, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(2)
    module(x.detach(), x.detach(), x.detach())
    torch.manual_seed(5)
    out = module(x, x, x, lens)
    out.square().sum().backward()
    return out, x.grad, {name: copied(p.grad) for name, p in module.named_parameters()}
