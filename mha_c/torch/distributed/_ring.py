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
from ._sequence import Part, Plan, Travel

_KEYS, _GRADS, _HOME = 1, 2, 3  # one tag for each kind of message


class Call(NamedTuple):
    """The arguments of the core for every pair of parts."""

    plan: Plan
    ranks: Ranks
    scale: Optional[float]
    dropout: float
    seed: int
    name: str
    empty_rows: str = "zero"

    def options(self, queries: Part, keys: Part, *asked: bool) -> tuple[Any, ...]:
        """Arguments of the core's functions from valid_lens on: the lengths of these queries, the flags `asked`, and
        the positions of both parts in the whole sequence, on which masks and dropout depend."""
        mask, lens = self.plan.mask, self.plan.mask.lens_of(queries)
        options = mask.left, mask.right, self.scale, self.dropout, self.seed, self.empty_rows
        return lens, None, None, None, *options, *asked, (0, 0, queries.start, keys.start)

    def own(self) -> tuple[Part, ...]:
        """The parts of this rank's queries."""
        return self.plan.queries[self.ranks.rank]


# --- Messages -------------------------------------------------------------------------------------------


class Met(NamedTuple):
    """A part of the sequence, with its keys and values or with their gradients."""

    travel: Travel
    k: Tensor
    v: Tensor
    message: Optional[Tensor] = None  # the memory of k and v, if they travel

    @property
    def rows(self) -> slice:
        """The rows of the part in the piece of its rank."""
        return self.travel.part.rows


class Lane:
    """What goes around the ring: which parts are where after each step, memory and messages.

    It waits for a message only when the message is needed.
    """

    def __init__(self, call: Call, k: Tensor, v: Tensor) -> None:
        self._call, self._ranks, self._like = call, call.ranks, k
        self._heads, self._dims = k.shape[:2], (k.shape[-1], v.shape[-1])
        self._leaving: list[Any] = []
        self._arriving: list[Any] = []
        self._rooms: dict[tuple[Any, ...], Tensor] = {}

    def room_for(self, hop: int, what: str = "") -> list[Met]:
        """Memory for the parts that are here after `hop` steps (0: this rank's own); reused two steps later."""
        owner = self._ranks.neighbor(-hop)
        found = []
        for i, travel in enumerate(self._call.plan.travelling(owner, max(hop, 1))):
            rows = math.prod(self._heads) * travel.part.size
            sizes, name = [rows * dim for dim in self._dims], (what, hop % 2, i)
            if name not in self._rooms or self._rooms[name].numel() < sum(sizes):
                self._rooms[name] = self._like.new_empty(sum(sizes))
            both = self._rooms[name][: sum(sizes)]
            k, v = both.split(sizes)
            shape = *self._heads, travel.part.size
            found.append(Met(travel, k.view(*shape, self._dims[0]), v.view(*shape, self._dims[1]), both))
        return found

    def start(self, function: Any, parts: Sequence[Met], steps: int, tag: int) -> list[Any]:
        """Start isend or irecv of these parts, to or from the rank that is `steps` further on."""
        peer = self._ranks.neighbor(steps)
        with talking(self._ranks, self._call.name, peer):
            number = dist.get_global_rank(self._ranks.group, peer)
            messages = [each.message for each in parts if each.k.numel() or each.v.numel()]
            return [(function(x, number, group=self._ranks.group, tag=tag), peer) for x in messages]

    def wait(self, works: list[Any]) -> None:
        for work, peer in works:
            with talking(self._ranks, self._call.name, peer):
                work.wait()
        works.clear()


class Stream(Lane):
    """Keys and values that travel around the ring."""

    def __init__(self, call: Call, k: Tensor, v: Tensor) -> None:
        super().__init__(call, k, v)
        self.here = self.room_for(0)
        for each in self.here:
            each.k.copy_(k[:, :, each.rows])
            each.v.copy_(v[:, :, each.rows])

    def begin(self, hop: int) -> None:
        """Start sending the parts that further ranks need, and receiving the parts of the next round."""
        self._next = self.room_for(hop + 1)
        self._arriving = self.start(dist.irecv, self._next, -1, _KEYS)
        self._leaving = self.start(dist.isend, [each for each in self.here if each.travel.hops > hop], 1, _KEYS)

    def end(self) -> None:
        """Wait for the sends and receives that `begin` started."""
        self.wait(self._arriving)
        self.wait(self._leaving)
        self.here = self._next


def rounds(call: Call, k: Tensor, v: Tensor) -> Iterator[tuple[int, list[Met]]]:
    """Yields (round, the parts that this rank computes with) while the next parts travel; in round 0 its own parts."""
    stream = Stream(call, k, v)
    met = [Met(t, k[:, :, t.part.rows], v[:, :, t.part.rows]) for t in call.plan.keys[call.ranks.rank]]
    for hop in range(call.plan.rounds + 1):
        if hop < call.plan.rounds:
            stream.begin(hop)
        yield hop, met
        if hop < call.plan.rounds:
            stream.end()
            met = stream.here


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


def forward(call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(out, row_max, row_sum) of this rank's queries over the keys of all ranks."""
    results = q.new_zeros(*q.shape[:3], v.shape[-1]), q.new_zeros(q.shape[:3]), q.new_zeros(q.shape[:3])
    joined = {part: Joined(*[x[:, :, part.rows] for x in results]) for part in call.own()}
    for _, met in rounds(call, k, v):
        for (keys, _), part_k, part_v, _ in met:
            for part in joined:
                if call.plan.mask.sees(part, keys):
                    found, _, _, statistics = attention_forward(
                        q[:, :, part.rows], part_k, part_v, None, *call.options(part, keys, False, False, True)
                    )
                    joined[part].add(found, *statistics)
    return results


# --- Backward ---------------------------------------------------------------------------------------------


class Returns(Lane):
    """Travelling gradients of keys and values: they follow their part, and its last rank sends them to its owner."""

    def __init__(self, call: Call, k: Tensor, v: Tensor) -> None:
        super().__init__(call, k, v)
        self._home = self.room_for(0, "home")
        starts = [self.start(dist.irecv, [each], each.travel.hops, _HOME) for each in self._home]
        self._awaited = [work for works in starts for work in works]

    def begin(self, hop: int) -> None:
        """Start receiving the gradients of the parts that are here: the sums over the ranks before this one."""
        self._here = self.room_for(hop)
        self._arriving = self.start(dist.irecv, self._here, -1, _GRADS) if hop > 1 else []
        for each in self._here if hop == 1 else ():
            each.k.zero_()
            each.v.zero_()

    def end(self, hop: int, found: Sequence[Optional[tuple[Tensor, Tensor]]]) -> None:
        """Add this rank's gradients of each part and send all gradients on."""
        self.wait(self._arriving)
        for each, own in zip(self._here, found):
            if own is not None:
                each.k.add_(own[0])
                each.v.add_(own[1])
        self.wait(self._leaving)  # sends of the last round, whose memory the next round uses
        onward = [each for each in self._here if each.travel.hops > hop]
        ending = [each for each in self._here if each.travel.hops <= hop]
        self._leaving = self.start(dist.isend, onward, 1, _GRADS) + self.start(dist.isend, ending, -hop, _HOME)

    def finish(self, grad_k: Tensor, grad_v: Tensor) -> None:
        """Add the gradients that the other ranks have computed for this rank's own keys and values."""
        self.wait(self._awaited)
        for each in self._home:
            grad_k[:, :, each.rows] += each.k
            grad_v[:, :, each.rows] += each.v
        self.wait(self._leaving)


def backward(
    call: Call, grad_out: Tensor, out: Tensor, row_max: Tensor, row_sum: Tensor, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of this rank's queries, keys and values."""
    grad_q, grad_k, grad_v = q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)

    def meet(met: Met) -> Optional[tuple[Tensor, Tensor]]:
        """Add to grad_q; returns the gradients of the keys and values, None if no query of this rank sees them."""
        keys, total = met.travel.part, None
        for part in call.own():
            if not call.plan.mask.sees(part, keys):
                continue
            rows = part.rows
            statistics = row_max[:, :, rows].contiguous(), row_sum[:, :, rows].contiguous()
            of_q, of_k, of_v, _, _ = attention_backward(
                grad_out[:, :, rows], out[:, :, rows], statistics, q[:, :, rows], met.k, met.v, None,
                *call.options(part, keys, False),
            )  # fmt: skip
            grad_q[:, :, rows] += of_q
            total = (of_k, of_v) if total is None else (total[0].add_(of_k), total[1].add_(of_v))
        return total

    returns = Returns(call, k, v)
    for hop, met in rounds(call, k, v):
        if hop:
            returns.begin(hop)
        found = [meet(each) for each in met]
        if hop:
            returns.end(hop, found)
            continue
        for each, own in zip(met, found):
            if own is not None:
                grad_k[:, :, each.rows] += own[0]
                grad_v[:, :, each.rows] += own[1]
    returns.finish(grad_k, grad_v)
    return grad_q, grad_k, grad_v
