"""Training steps that the processes of a World do together: data parallel, sharded parameters, gradient checkpoints."""

from contextlib import nullcontext

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as saving
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import mha_c.torch

FEATURES, HEADS, ROWS = 12, 3, 5


class Block(nn.Module):
    """Attention of each of the book's kinds, one after the other; `unused` never takes part."""

    def __init__(self, lazy, recompute=False, unused=False):
        super().__init__()
        sizes = {} if lazy else {"key_size": FEATURES, "query_size": FEATURES}
        more = {} if lazy else {"value_size": FEATURES}
        self.heads = mha_c.torch.MultiHeadAttention(
            **sizes, **more, num_hiddens=FEATURES, num_heads=HEADS, dropout=0.0, bias=True
        )
        self.additive = mha_c.torch.AdditiveAttention(**sizes, num_hiddens=7, dropout=0.0)
        self.dots = mha_c.torch.DotProductAttention(dropout=0.0)
        self.unused = nn.Linear(FEATURES, FEATURES) if unused else None
        self.recompute = recompute

    def forward(self, x, lens):
        def attend(x):
            return x + self.heads(x, x, x, lens)

        x = checkpoint(attend, x, use_reentrant=False) if self.recompute else attend(x)
        x = x + self.additive(x, x, x, lens)
        return x + self.dots(x, x, x, lens)


def batches(steps, size, seed=1):
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        yield (
            torch.from_numpy(rng.standard_normal((size, ROWS, FEATURES))),
            torch.from_numpy(rng.integers(1, ROWS + 1, size)),
        )


def make(lazy, **options):
    torch.manual_seed(0)
    model = Block(lazy, **options).double()
    if lazy:
        x, lens = next(batches(1, 2))
        model(x, lens)
    return model


def steps(model, rank, n, count=3, accumulate=1, lr=0.05, optimizer=None, first=0):
    """The losses of some steps on the joined batch, of which this rank has its share."""
    optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=lr)
    losses = []
    for i, (x, lens) in enumerate(batches(first + count, 8)):
        if i < first:
            continue
        total = 0.0
        mine = list(zip(x[rank::n].chunk(accumulate), lens[rank::n].chunk(accumulate)))
        for j, (part, part_lens) in enumerate(mine):
            last = j == len(mine) - 1
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(last)
            with nullcontext() if last or not hasattr(model, "no_sync") else model.no_sync():
                loss = model(part, part_lens).square().mean() / accumulate
                loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        if n > 1:
            dist.all_reduce(total)
        losses.append(float(total) / n)
    return losses


def whole(tensor):
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return tensor.detach().numpy().copy()


def parameters(model):
    state = {name.removeprefix("module."): whole(x) for name, x in model.state_dict().items()}
    return {name: x for name, x in state.items() if not name.startswith("unused")}


def alone(rank, n, lazy=False, accumulate=1, count=3, unused=False):
    model = make(lazy, unused=unused)
    return steps(model, 0, 1, count, accumulate), parameters(model)


def data_parallel(rank, n, lazy=False, accumulate=1, recompute=False, unused=False):
    model = DistributedDataParallel(make(lazy, recompute=recompute, unused=unused), find_unused_parameters=unused)
    return steps(model, rank, n, accumulate=accumulate), parameters(model)


def gradients(rank, n):
    """Of one layer in float32 on the joined batch: by itself, and data parallel."""
    torch.manual_seed(0)
    model = mha_c.torch.MultiHeadAttention(8, 8, 8, 8, 2, 0.0, bias=True)
    x, lens = torch.randn(4, 5, 8), torch.tensor([3, 5, 1, 4])
    (model(x, x, x, lens).square().sum() / n).backward()  # DistributedDataParallel takes the mean over processes
    alone = [p.grad.numpy().copy() for p in model.parameters()]
    shared = DistributedDataParallel(model)
    for _ in range(2):
        model.zero_grad()
        shared(x[rank::n], x[rank::n], x[rank::n], lens[rank::n]).square().sum().backward()
    return alone, [p.grad.numpy() for p in model.parameters()]


def shard(model):
    for child in (model.heads, model.additive):
        fully_shard(child)
    return fully_shard(model)


def fully_sharded(rank, n, lazy=False, accumulate=1, recompute=False):
    model = shard(make(lazy, recompute=recompute))
    return steps(model, rank, n, accumulate=accumulate), parameters(model)


def saved_and_loaded(rank, n, folder, by):
    """Two steps by one wrapper, saved together, and one more step by the other, from what was saved."""
    wrap = {"ddp": DistributedDataParallel, "fsdp": shard}
    model = wrap[by](make(False))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    losses = steps(model, rank, n, 2, optimizer=optimizer)
    names = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
    saving.save(names, checkpoint_id=folder)
    torch.manual_seed(99)
    other = wrap["fsdp" if by == "ddp" else "ddp"](Block(False).double())
    optimizer = torch.optim.Adam(other.parameters(), lr=0.05)
    names = dict(zip(("model", "optimizer"), get_state_dict(other, optimizer)))
    saving.load(names, checkpoint_id=folder)
    set_state_dict(other, optimizer, model_state_dict=names["model"], optim_state_dict=names["optimizer"])
    return losses + steps(other, rank, n, 1, optimizer=optimizer, first=2), parameters(other)


def load_into(rank, n, file):
    """A plain torch.save of one process, taken by all."""
    model = Block(True).double()
    model.load_state_dict(torch.load(file, weights_only=True))
    model = DistributedDataParallel(model)
    return steps(model, rank, n), parameters(model)
