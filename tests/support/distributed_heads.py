"""Layers whose heads, or whose sequence, the processes of a World share."""

import copy
import pickle

import torch
import torch.distributed as dist
from torch import nn

import mha_c.torch
import mha_c.torch.distributed as D
from mha_c import heads

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


def number(x):
    return x.detach().numpy().copy()


def numbers(tensors):
    return [None if x is None else number(x) for x in tensors]


def whole_call(rank, n, dropout=0.0, bias=True):
    """One process's output, gradients of inputs and of all parameters."""
    module, x = layer(dropout, bias), inputs()
    torch.manual_seed(5)
    out = module(*x, LENS)
    out.square().sum().backward()
    gradients = {name: number(p.grad) for name, p in module.named_parameters()}
    return numbers([out, *(t.grad for t in x)]), gradients, number(module.attention_weights)


def sharded_call(rank, n, dropout=0.0, bias=True):
    """The same of sharded heads, the parameters' gradients as parts of the whole's, and the weights."""
    module, x = D.shard_heads(layer(dropout, bias)), inputs()
    torch.manual_seed(5)
    out = module(*x, LENS)
    out.square().sum().backward()
    own = {name.removeprefix("part."): number(p.grad) for name, p in module.named_parameters()}
    return numbers([out, *(t.grad for t in x)]), own, number(module.attention_weights)


def self_attention(rank, n):
    module, x = layer(), torch.randn(2, 4, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    square = mha_c.torch.MultiHeadAttention(9, 9, 9, HIDDEN, HEADS, 0.0).double()
    for p in square.parameters():
        with torch.no_grad():
            p.copy_(torch.linspace(-1, 1, p.numel(), dtype=torch.float64).sin().view_as(p))
    results = []
    for module in (square, D.shard_heads(square)):
        mine = x.clone().requires_grad_()
        out = module(mine, mine, mine)
        out.sum().backward()
        results += [number(out), number(mine.grad)]
    return results


def states(rank, n):
    """state_dict of the sharded layer, and a layer that loads another's."""
    module = layer()
    sharded = D.shard_heads(copy.deepcopy(module))
    saved = sharded.state_dict()
    equal = saved.keys() == module.state_dict().keys() and all(
        torch.equal(saved[name], x) for name, x in module.state_dict().items()
    )
    other = layer(seed=7)
    sharded.load_state_dict(other.state_dict())
    x = inputs()
    loaded = torch.allclose(sharded(*x, LENS), other(*x, LENS), rtol=1e-12)
    back = D.gather_heads(sharded)
    gathered = all(torch.equal(a, b) for a, b in zip(back.parameters(), other.parameters()))
    sizes = [tuple(p.shape) for p in sharded.parameters()]
    again = torch.equal(back(*x, LENS), other(*x, LENS))
    return equal, loaded, gathered and again and back.num_heads == HEADS, sizes


def in_a_model(rank, n):
    """Inside a model, trained for some steps beside the whole one."""
    torch.manual_seed(0)
    attention = mha_c.torch.MultiHeadAttention(9, 9, 9, HIDDEN, HEADS, 0.0, bias=True)
    model = nn.ModuleDict({"norm": nn.LayerNorm(9), "attention": attention, "again": attention}).double()
    other = D.shard_heads(copy.deepcopy(model))
    assert other["attention"] is other["again"]
    x = torch.randn(2, 5, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    losses = []
    for m in (model, other):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        for _ in range(4):
            y = m["norm"](x)
            loss = (m["attention"](y, y, y) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    state = D.gather_heads(other).state_dict()
    return losses, max(float((state[name] - x).abs().max()) for name, x in model.state_dict().items())


def importance(rank, n):
    module, x = layer(), inputs()

    def loss(model, batch):
        return (model(*batch) - 1).square().mean()

    batch = (*[t.detach() for t in x], torch.tensor([7, 3, 2]))
    found = [heads.importance(m, batch, "all", loss=loss).scores for m in (module, D.shard_heads(module))]
    try:
        heads.prune(D.shard_heads(module), [0])
    except TypeError as error:
        return *found, str(error)
    return None


def different_inputs(rank, n):
    module, x = D.shard_heads(layer()), inputs()
    try:
        module(x[0] + (rank == 1), x[1], x[2], LENS)
    except ValueError as error:
        return str(error)
    return None


def different_parameters(rank, n):
    try:
        D.shard_heads(layer(seed=rank == 1))
    except ValueError as error:
        return str(error)
    return None


def copies_and_pickles(rank, n):
    """Whether a copy computes what its module does, and what pickle says, of sharded heads and of a spread sequence."""
    found = []
    for share in (D.shard_heads, D.spread_sequence):
        module, x = share(layer()), [torch.ones(1, 2, size, dtype=torch.float64) for size in (9, 10, 11)]
        equal = torch.equal(copy.deepcopy(module)(*x), module(*x))
        try:
            pickle.dumps(module)
        except TypeError as error:
            found.append((equal, str(error)))
    return found


def refusals(rank, n):
    texts = []
    for module in (
        mha_c.torch.MultiHeadAttention(num_hiddens=6, num_heads=3, dropout=0.0),
        mha_c.torch.MultiHeadAttention(num_hiddens=8, num_heads=8, dropout=0.0),
        nn.Linear(2, 2),
    ):
        try:
            D.shard_heads(module)
        except ValueError as error:
            texts.append(str(error))
    return texts


def hooked_layers(rank, n):
    """What shard_heads, a call in training and spread_sequence say of layers that are hooked here and there; None where
    they say nothing."""

    def refusal(call):
        try:
            call()
        except TypeError as error:
            return str(error)

    found, x = [], torch.ones(1, 2, HIDDEN)
    for place in ("", "W_o", "W_q", "attention", "attention.dropout"):
        for kind in ("register_forward_hook", "register_forward_pre_hook"):
            module = mha_c.torch.MultiHeadAttention(HIDDEN, HIDDEN, HIDDEN, HIDDEN, HEADS, 0.5)
            torch.manual_seed(0)
            module.reset_parameters()
            getattr(module.get_submodule(place), kind)(lambda *_: None)
            part = [module]
            said = refusal(lambda: part.append(D.shard_heads(module)))  # noqa: B023  called here
            said = said or refusal(lambda: part[1](x, x, x))  # noqa: B023
            found.append((place, said, refusal(lambda: D.spread_sequence(module))))  # noqa: B023
            if said is None or place.startswith("attention"):
                part[1].eval()(x, x, x)  # in evaluation they are called
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
    module(mine.detach(), mine.detach(), mine.detach())  # sizes
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
    assert copy.deepcopy(module).num_heads == HEADS
    return number(out), number(mine.grad), {name: number(g) for name, g in grads.items()}, text


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
    return out, x.grad, {name: number(p.grad) for name, p in module.named_parameters()}
