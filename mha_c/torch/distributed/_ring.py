"""The ring: in the forward pass keys and values go around it once, in the backward pass with their gradients.

Rounds: in round 0 a rank computes with its own keys, in round t with keys that have travelled t steps.  While a rank
computes round t, it sends these keys on and receives the keys of round t + 1.  Partial results are joined by their row
statistics, always in the order of the rounds, so that no bit depends on which rank was late.  The keys and values of a
part are one message.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Optional

import torch
import torch.distributed as dist
from torch import Tensor

from ..._core import attention_backward, attention_forward
from ._group import Ranks, talking
from ._sequence import Schedule, Stretch, Travel

NAME = "ring_attention"  # in errors
_KEYS, _GRADS, _HOME = 1, 2, 3  # one tag for each kind of message


class RingCall(NamedTuple):
    """The arguments of the core for every pair of parts."""

    schedule: Schedule
    ranks: Ranks
    scale: Optional[float]
    dropout: float
    seed: int

    def options(self, queries: Stretch, keys: Stretch, *asked: bool) -> tuple[Any, ...]:
        """Arguments of the core's functions from valid_lens on: the lengths of these queries, the flags `asked`, and
        the positions of both parts in the whole sequence, on which masks and dropout depend."""
        mask, lens = self.schedule.mask, self.schedule.mask.lens_of(queries)
        options = mask.left, mask.right, self.scale, self.dropout, self.seed, "zero"
        return lens, None, None, None, *options, *asked, (0, 0, queries.start, keys.start)

    def own(self) -> tuple[Stretch, ...]:
        """The parts of this rank's queries."""
        return self.schedule.queries[self.ranks.rank]


# --- Messages -------------------------------------------------------------------------------------------


class Met(NamedTuple):
    """A part of the sequence, with its keys and values or with their gradients."""

    travel: Travel
    k: Tensor
    v: Tensor
    message: Tensor  # the memory of both


class Ring:
    """The messages of one call, about keys and values like these; it waits for one only when that is needed."""

    def __init__(self, call: RingCall, k: Tensor, v: Tensor) -> None:
        self._schedule, self._ranks, self._k, self._v = call.schedule, call.ranks, k, v

    def parts(self, hop: int) -> list[Met]:
        """Zeros for each part that is here after `hop` steps (0: this rank's own)."""
        found = []
        for travel in self._schedule.travelling(self._ranks.neighbor(-hop), hop):
            shapes = [(*x.shape[:2], travel.part.size, x.shape[3]) for x in (self._k, self._v)]
            message = self._k.new_zeros(sum(map(math.prod, shapes)))
            k, v = (x.view(shape) for x, shape in zip(message.split([*map(math.prod, shapes)]), shapes))
            found.append(Met(travel, k, v, message))
        return found

    def rounds(self) -> Iterator[tuple[int, list[Met]]]:
        """Yields (round, the parts that this rank computes with) while these travel on and the next ones arrive."""
        met = self.parts(0)
        for each in met:
            each.k.copy_(self._k[:, :, each.travel.part.rows])
            each.v.copy_(self._v[:, :, each.travel.part.rows])
        for hop in range(self._schedule.rounds):
            coming = self.parts(hop + 1)
            works = self.start(dist.irecv, coming, -1, _KEYS)
            works += self.start(dist.isend, [each for each in met if each.travel.hops > hop], 1, _KEYS)
            yield hop, met
            self.wait(works)
            met = coming
        yield self._schedule.rounds, met

    def start(self, function: Any, parts: Sequence[Met], steps: int, tag: int) -> list[Any]:
        """Start isend or irecv of these parts, to or from the rank that is `steps` further on."""
        peer = self._ranks.neighbor(steps)
        with talking(self._ranks, NAME, peer):
            number = dist.get_global_rank(self._ranks.group, peer)
            messages = [each.message for each in parts if each.message.numel()]
            return [(function(x, number, group=self._ranks.group, tag=tag), peer) for x in messages]

    def wait(self, works: list[Any]) -> None:
        for work, peer in works:
            with talking(self._ranks, NAME, peer):
                work.wait()


# --- Forward ----------------------------------------------------------------------------------------------


class Joined:
    """The attention of one part of the queries over all keys met so far: views of the results, zeros at first."""

    def __init__(self, out: Tensor, row_max: Tensor, row_sum: Tensor) -> None:
        self.out, self.max, self.sum, self._met = out, row_max, row_sum, False

    def add(self, out: Tensor, row_max: Tensor, row_sum: Tensor) -> None:
        """Join the attention over further keys; rows that see none of these keys do not change, to the bit."""
        if not self._met:
            self._met = True
            for mine, found in ((self.out, out), (self.max, row_max), (self.sum, row_sum)):
                mine.copy_(found)
            return
        # A row without keys has the statistics (0, 0); its maximum 0 is not a score.
        old = self.max.masked_fill(self.sum == 0, -torch.inf)
        more = row_max.masked_fill(row_sum == 0, -torch.inf)
        largest = torch.maximum(old, more)
        largest = largest.masked_fill(largest == -torch.inf, 0.0)
        old, more = torch.exp(old - largest).mul_(self.sum), torch.exp(more - largest).mul_(row_sum)
        self.max.copy_(largest)
        self.sum.copy_(old + more)
        divisor = self.sum.masked_fill(self.sum == 0, 1.0)
        self.out.mul_((old / divisor)[..., None]).addcmul_(out, (more / divisor)[..., None])


def forward(call: RingCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(out, row_max, row_sum) of this rank's queries over the keys of all ranks."""
    results = q.new_zeros(*q.shape[:3], v.shape[-1]), q.new_zeros(q.shape[:3]), q.new_zeros(q.shape[:3])
    joined = {part: Joined(*[x[:, :, part.rows] for x in results]) for part in call.own()}
    for _, met in Ring(call, k, v).rounds():
        for (keys, _), part_k, part_v, _ in met:
            for part in joined:
                if call.schedule.mask.sees(part, keys):
                    found, _, _, statistics = attention_forward(
                        q[:, :, part.rows], part_k, part_v, None, *call.options(part, keys, False, False, True)
                    )
                    joined[part].add(found, *statistics)
    return results


# --- Backward ---------------------------------------------------------------------------------------------


def backward(
    call: RingCall, grad_out: Tensor, out: Tensor, row_max: Tensor, row_sum: Tensor, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of this rank's queries, keys and values.

    Gradients of keys and values follow their part, each rank adds its own, and the last one sends them to their owner.
    """
    grad_q, grad_k, grad_v = q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)

    def meet(met: Met) -> list[tuple[Tensor, Tensor]]:
        """Add to grad_q; returns the gradients of the keys and values, from each part of the queries that sees them."""
        found = []
        for part in call.own():
            if not call.schedule.mask.sees(part, met.travel.part):
                continue
            rows = part.rows
            statistics = row_max[:, :, rows].contiguous(), row_sum[:, :, rows].contiguous()
            of_q, of_k, of_v, _, _ = attention_backward(
                grad_out[:, :, rows], out[:, :, rows], statistics, q[:, :, rows], met.k, met.v, None,
                *call.options(part, met.travel.part, False),
            )  # fmt: skip
            grad_q[:, :, rows] += of_q
            found.append((of_k, of_v))
        return found

    ring = Ring(call, k, v)
    leaving: list[Any] = []
    own, home = ring.parts(0), ring.parts(0)
    awaited = [ring.start(dist.irecv, [each], each.travel.hops, _HOME) for each in home if each.travel.hops]
    for hop, met in ring.rounds():
        here = ring.parts(hop) if hop else own
        arriving = ring.start(dist.irecv, here if hop > 1 else [], -1, _GRADS)
        found = [meet(each) for each in met]
        ring.wait(arriving)
        for grads, pairs in zip(here, found):
            for of_k, of_v in pairs:
                grads.k.add_(of_k)
                grads.v.add_(of_v)
        if hop:
            ring.wait(leaving)
            onward = [each for each in here if each.travel.hops > hop]
            ending = [each for each in here if each.travel.hops <= hop]
            leaving = ring.start(dist.isend, onward, 1, _GRADS) + ring.start(dist.isend, ending, -hop, _HOME)
    for works in (*awaited, leaving):
        ring.wait(works)
    for mine, theirs in zip(own, home):
        grad_k[:, :, mine.travel.part.rows] = mine.k + theirs.k
        grad_v[:, :, mine.travel.part.rows] = mine.v + theirs.v
    return grad_q, grad_k, grad_v
