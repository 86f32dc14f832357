"""Processes of a World that die, or stand still, in the middle of a call."""

import os
import time

import torch

import mha_c.torch.distributed as D
from mha_c.torch.distributed import _ring


def outcome(function):
    """What came of it: the result, or the error's text, and the seconds until then."""
    start = time.monotonic()
    try:
        found = function()
    except RuntimeError as error:
        found = "RuntimeError: " + str(error)
    return found, time.monotonic() - start


def ring_with_a_death(rank, n, victim, way):
    """`victim` dies in its second computation on the way there ("forward") or back ("backward")."""
    count = 0

    def mortal(function, mine):
        def call(*args):
            nonlocal count
            count += mine
            if count == 2 and rank == victim:
                os._exit(1)
            return function(*args)

        return call

    _ring.attention_forward = mortal(_ring.attention_forward, way == "forward")
    _ring.attention_backward = mortal(_ring.attention_backward, way == "backward")

    def work():
        q = torch.randn(1, 2, 64, 8, requires_grad=True)
        D.ring_attention(q, q, q).sum().backward()
        return "finished"

    first = outcome(work)
    return first, outcome(lambda: D.ring_attention(*[torch.zeros(1, 1, 2, 2)] * 3) is None)


def ring_slowly(rank, n, victim, seconds):
    """Several calls, in the second of which `victim` takes its time; the sums of what came of each, or its error."""
    compute = _ring.attention_forward

    def late(*args):
        if rank == victim and slow:
            time.sleep(seconds)
        return compute(*args)

    results = []
    _ring.attention_forward = late
    try:
        for i in range(4):
            slow = i == 1
            torch.manual_seed(i)
            x = D.split_sequence(torch.randn(1, 2, 16, 8), rank, n)
            results.append(outcome(lambda x=x: D.ring_attention(x, x, x).sum().item()))
    finally:
        _ring.attention_forward = compute
    return results
