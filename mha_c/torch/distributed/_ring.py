"""The ring: in the forward pass keys and values go around it once, in the backward pass with their gradients.

Rounds: in round 0 a rank computes with its own keys, in round t with keys that have travelled t steps.  While a rank
computes round t, it sends these keys on and receives the keys of round t + 1.  Partial results are joined by their row
statistics, always in the order of the rounds, so that no bit depends on which rank was late.

Key heads travel in groups, one group after the other: travelling keys and values need memory for one group of heads
and two pieces.  The keys and values of a part are one message.
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
from ._sequence import BACKWARD, FORWARD, Part, Plan, Travel

# With so many bytes the latency of a message does not matter; groups of heads are not smaller than that.
MESSAGE_BYTES = 1 << 20
MOST_GROUPS = 8
# One tag for each kind of message in each direction, so that two ranks who are neighbors on both sides never mix them.
_KEYS, _GRADS, _HOME = 1, 3, 5


class Group(NamedTuple):
    """Key heads that travel together, and the query heads that use them."""

    heads: slice
    query_heads: slice

    def of_queries(self, x: Tensor) -> Tensor:
        return x[:, self.query_heads]

    def of_keys(self, x: Tensor) -> Tensor:
        return x[:, self.heads]


class Call(NamedTuple):
    """The arguments of the core for every pair of parts."""

    plan: Plan
    ranks: Ranks
    scale: Optional[float]
    dropout: float
    seed: int
    name: str
    first_head: int = 0
    empty_rows: str = "zero"

    def options(self, group: Group, queries: Part, keys: Part, *asked: bool) -> tuple[Any, ...]:
        """Arguments of the core's functions from valid_lens on: the lengths of these queries, the flags `asked`, and
        the positions of both parts in the whole sequence, on which masks and dropout depend."""
        mask, lens = self.plan.mask, self.plan.mask.lens_of(queries)
        origin = 0, self.first_head + group.query_heads.start, queries.start, keys.start
        options = mask.left, mask.right, self.scale, self.dropout, self.seed, self.empty_rows
        return lens, None, None, None, *options, *asked, origin

    def own(self) -> tuple[Part, ...]:
        """The parts of this rank's queries."""
        return self.plan.queries[self.ranks.rank]


def groups_of(call: Call, k: Tensor, v: Tensor, n_heads: int) -> list[Group]:
    """The groups of heads: equal on all ranks, even where pieces differ by a row or two."""
    batch, kv_heads = k.shape[:2]
    rows = max(sum(travel.part.size for travel in piece) for piece in call.plan.keys)
    total = k.element_size() * rows * (k.shape[-1] + v.shape[-1]) * batch * kv_heads
    n = max(1, min(kv_heads, MOST_GROUPS, total // MESSAGE_BYTES))
    borders, share = [kv_heads * i // n for i in range(n + 1)], n_heads // max(kv_heads, 1)
    return [Group(slice(a, b), slice(a * share, b * share)) for a, b in zip(borders, borders[1:])]


# --- Messages -------------------------------------------------------------------------------------------


class Room:
    """Memory for travelling tensors.  All groups of heads use it in turn, because fresh pages cost more than a copy."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._taken: dict[tuple[Any, ...], Tensor] = {}

    def take(self, name: tuple[Any, ...], numbers: int) -> Tensor:
        found = self._taken.get(name)
        if found is None or found.numel() < numbers:
            found = self._taken[name] = self._like.new_empty(numbers)
        return found[:numbers]


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
    """One direction of the ring for one group of heads: which parts are where after each step, memory and messages.

    It waits for a message only when the message is needed.
    """

    def __init__(self, call: Call, direction: int, k: Tensor, v: Tensor, room: Room) -> None:
        self._direction, self._call, self._ranks, self._room = direction, call, call.ranks, room
        self._heads, self._dims = k.shape[:2], (k.shape[-1], v.shape[-1])
        self._leaving: list[Any] = []
        self._arriving: list[Any] = []

    def room_for(self, what: str, hop: int) -> list[Met]:
        """Memory for the parts that are here after `hop` steps (0: this rank's own); reused two steps later."""
        owner = self._ranks.neighbor(-self._direction * hop)
        found = []
        for i, travel in enumerate(self._call.plan.travelling(owner, self._direction, max(hop, 1))):
            rows = math.prod(self._heads) * travel.part.size
            both = self._room.take((what, self._direction, hop % 2, i), rows * sum(self._dims))
            k, v = both.split([rows * dim for dim in self._dims])
            shape = *self._heads, travel.part.size
            found.append(Met(travel, k.view(*shape, self._dims[0]), v.view(*shape, self._dims[1]), both))
        return found

    def goes_on(self, each: Met, hop: int) -> bool:
        return each.travel.hops(self._direction) > hop

    def start(self, function: Any, parts: Sequence[Met], steps: int, tag: int) -> list[Any]:
        """Start isend or irecv of these parts, to or from the rank that is `steps` further in this direction."""
        peer = self._ranks.neighbor(self._direction * steps)
        with talking(self._ranks, self._call.name, peer):
            number, tag = dist.get_global_rank(self._ranks.group, peer), tag + (self._direction == BACKWARD)
            messages = [each.message for each in parts if each.k.numel() or each.v.numel()]
            return [(function(x, number, group=self._ranks.group, tag=tag), peer) for x in messages]

    def wait(self, works: list[Any]) -> None:
        for work, peer in works:
            with talking(self._ranks, self._call.name, peer):
                work.wait()
        works.clear()


class Stream(Lane):
    """Keys and values that travel around the ring in one direction."""

    def __init__(self, call: Call, direction: int, k: Tensor, v: Tensor, room: Room) -> None:
        super().__init__(call, direction, k, v, room)
        self.here = self.room_for("keys", 0)
        for each in self.here:
            each.k.copy_(k[:, :, each.rows])
            each.v.copy_(v[:, :, each.rows])

    def begin(self, hop: int) -> None:
        """Start sending the parts that further ranks need, and receiving the parts of the next round."""
        self._next = self.room_for("keys", hop + 1)
        self._arriving = self.start(dist.irecv, self._next, -1, _KEYS)
        self._leaving = self.start(dist.isend, [each for each in self.here if self.goes_on(each, hop)], 1, _KEYS)

    def end(self) -> None:
        """Wait for the sends and receives that `begin` started."""
        self.wait(self._arriving)
        self.wait(self._leaving)
        self.here = self._next


def rounds(call: Call, k: Tensor, v: Tensor, room: Room) -> Iterator[tuple[int, list[list[Met]]]]:
    """Yields (round, lists of the parts that this rank computes with, by direction) while the next parts travel.

    In round 0 there is one list, of this rank's own parts.
    """
    both = [Stream(call, direction, k, v, room) for direction in (FORWARD, BACKWARD)]
    own = [Met(t, k[:, :, t.part.rows], v[:, :, t.part.rows]) for t in call.plan.keys[call.ranks.rank]]
    for hop in range(call.plan.rounds + 1):
        travelling = both if hop < call.plan.rounds else []
        for stream in travelling:
            stream.begin(hop)
        yield hop, [stream.here for stream in both] if hop else [own]
        for stream in travelling:
            stream.end()


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
    out = q.new_zeros(*q.shape[:3], v.shape[-1])
    row_max, row_sum = q.new_zeros(q.shape[:3]), q.new_zeros(q.shape[:3])
    room = Room(k)
    for group in groups_of(call, k, v, q.shape[1]):
        _forward_group(call, group, (q, out, row_max, row_sum), (k, v), room)
    return out, row_max, row_sum


def _forward_group(call: Call, group: Group, of_queries: Any, of_keys: Any, room: Room) -> None:
    q, *results = map(group.of_queries, of_queries)
    k, v = map(group.of_keys, of_keys)
    joined = {part: Joined(*[x[:, :, part.rows] for x in results]) for part in call.own()}
    for _, met in rounds(call, k, v, room):
        for (keys, *_), part_k, part_v, _ in (each for parts in met for each in parts):
            for part in joined:
                if call.plan.mask.sees(part, keys):
                    found, _, _, statistics = attention_forward(
                        q[:, :, part.rows], part_k, part_v, None, *call.options(group, part, keys, False, False, True)
                    )
                    joined[part].add(found, *statistics)


# --- Backward ---------------------------------------------------------------------------------------------


class Returns(Lane):
    """Travelling gradients of keys and values: they follow their part, and its last rank sends them to its owner."""

    def __init__(self, call: Call, direction: int, k: Tensor, v: Tensor, room: Room) -> None:
        super().__init__(call, direction, k, v, room)
        self._home = self.room_for("home", 0)
        starts = [self.start(dist.irecv, [each], each.travel.hops(direction), _HOME) for each in self._home]
        self._awaited = [work for works in starts for work in works]

    def begin(self, hop: int) -> None:
        """Start receiving the gradients of the parts that are here: the sums over the ranks before this one."""
        self._here = self.room_for("grads", hop)
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
        onward = [each for each in self._here if self.goes_on(each, hop)]
        ending = [each for each in self._here if not self.goes_on(each, hop)]
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
    room = Room(k)
    for group in groups_of(call, k, v, q.shape[1]):
        _backward_group(call, group, (grad_out, out, row_max, row_sum, q, grad_q), (k, v, grad_k, grad_v), room)
    return grad_q, grad_k, grad_v


def _backward_group(call: Call, group: Group, of_queries: Any, of_keys: Any, room: Room) -> None:
    grad_out, out, row_max, row_sum, q, grad_q = map(group.of_queries, of_queries)
    k, v, grad_k, grad_v = map(group.of_keys, of_keys)

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
                *call.options(group, part, keys, False),
            )  # fmt: skip
            grad_q[:, :, rows] += of_q
            total = (of_k, of_v) if total is None else (total[0].add_(of_k), total[1].add_(of_v))
        return total

    returns = [Returns(call, direction, k, v, room) for direction in (FORWARD, BACKWARD)]
    for hop, met in rounds(call, k, v, room):
        for back in returns if hop else ():
            back.begin(hop)
        found = [[meet(each) for each in parts] for parts in met]
        for back, of_parts in zip(returns, found) if hop else ():
            back.end(hop, of_parts)
        for each, own in zip(met[0], found[0]) if not hop else ():
            if own is not None:
                grad_k[:, :, each.rows] += own[0]
                grad_v[:, :, each.rows] += own[1]
    for back in returns:
        back.finish(grad_k, grad_v)
