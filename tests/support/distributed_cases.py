"""What the processes of a World do: each function is called with (rank, n, ...) in every one of them."""

import random
import time

import torch
import torch.distributed as dist

import mha_c.torch.distributed as D
from mha_c.torch.distributed import _ring


def pieces(arrays, rank, n, layout, requires_grad):
    cut = [D.split_sequence(torch.from_numpy(x), rank, n, layout=layout).clone() for x in arrays]
    return [x.requires_grad_(requires_grad) for x in cut]


def ring(rank, n, arrays, grad=None, layout="contiguous", options=None, jitter=None):
    """ring_attention of this rank's pieces of (q, k, v): out, and with grad the gradients of the pieces."""
    before = _ring.attention_forward, _ring.attention_backward
    try:
        if jitter is not None:
            _delay(random.Random(1000 * jitter + rank))
        mine = pieces(arrays, rank, n, layout, grad is not None)
        out = D.ring_attention(*mine, layout=layout, **(options or {}))
        if grad is None:
            return [out.numpy()]
        out.backward(pieces([grad], rank, n, layout, False)[0])
        return [out.detach().numpy(), *(x.grad.numpy() for x in mine)]
    finally:
        _ring.attention_forward, _ring.attention_backward = before


def _delay(rng):
    """Every computation of this rank takes a while that nobody foresees."""
    for name in ("attention_forward", "attention_backward"):
        setattr(_ring, name, _late(getattr(_ring, name), rng))


def _late(function, rng):
    def call(*args):
        time.sleep(rng.random() * 0.01)
        return function(*args)

    return call


def ring_traffic(rank, n, arrays, grad, layout, options):
    """What this rank does in a call forward and in one backward: numbers sent, pairs of parts computed."""
    sent, pairs = [0, 0], [0, 0]
    send, forward, backward = dist.isend, _ring.attention_forward, _ring.attention_backward
    way = 0

    def counted_send(flat, *args, **named):
        sent[way] += flat.numel()
        return send(flat, *args, **named)

    def counted(function):
        def call(*args):
            pairs[way] += 1
            return function(*args)

        return call

    dist.isend, _ring.attention_forward, _ring.attention_backward = counted_send, counted(forward), counted(backward)
    try:
        mine = pieces(arrays, rank, n, layout, True)
        out = D.ring_attention(*mine, layout=layout, **options)
        way = 1
        out.backward(pieces([grad], rank, n, layout, False)[0])
    finally:
        dist.isend, _ring.attention_forward, _ring.attention_backward = send, forward, backward
    return sent, pairs


def ring_mismatch(rank, n, change, culprit):
    """A call in which one rank says something else; its message, of whatever type."""
    arguments = {
        **{name: torch.zeros(1, 2, 4, 8) for name in "qkv"},
        "dropout": 0.5,
        "rng": 3,
    }
    if rank == culprit:
        for name, value in change.items():
            arguments[name] = torch.zeros(value) if isinstance(value, tuple) and name in "qkv" else value
            if isinstance(value, str) and value.startswith("dtype "):
                dtype = getattr(torch, value[6:])
                arguments.update({name: arguments[name].to(dtype) for name in "qkv"})
                del arguments[name]
    try:
        D.ring_attention(**arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        return type(error).__name__, str(error)
    return None


def unseeded_dropout(rank, n, seeds):
    torch.manual_seed(seeds[rank])
    x = torch.ones(1, 1, 4, 2)
    try:
        return D.ring_attention(x, x, x, dropout=0.5).numpy()
    except ValueError as error:
        return str(error)


def double_backward(rank, n):
    x = torch.ones(1, 1, 4, 2, requires_grad=True)
    out = D.ring_attention(x, x, x)
    try:
        torch.autograd.grad(out.sum(), x, create_graph=True)
    except RuntimeError as error:
        return str(error)
    return None


def subgroup(rank, n, arrays):
    """The same call in a group of the last two ranks; the others are refused."""
    group = dist.new_group([n - 2, n - 1])
    if rank < n - 2:
        try:
            D.ring_attention(*map(torch.from_numpy, arrays), group=group)
        except ValueError as error:
            return str(error)
    return D.ring_attention(*pieces(arrays, rank - n + 2, 2, "contiguous", False), group=group).numpy()


def bfloat16(rank, n, arrays):
    mine = [x.to(torch.bfloat16) for x in pieces(arrays, rank, n, "contiguous", False)]
    out = D.ring_attention(*mine)
    assert out.dtype is torch.bfloat16
    return out.float().numpy()
