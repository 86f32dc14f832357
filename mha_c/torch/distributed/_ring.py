"""One pass of keys and values around the ring, forward, and one of keys, values and their gradients, backward.

Rounds: in round 0 a rank meets its own keys, in round t those that came t steps.  What arrived in round t is handed
on, and what comes in round t + 1 is awaited, while round t is computed.  Partial results are joined by their row
statistics, always in the order of the rounds, so that no bit depends on who was late.

Key heads go round in groups, one group after the other: the memory for what travels is two messages, and a message is
one group's keys and values of a piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Optional

import torch
import torch.distributed as dist
from torch import Tensor

from ..._core import attention_backward, attention_forward
from ._group import Ranks, talking
from ._sequence import BACKWARD, FORWARD, Part, Plan, Travel

# A message of so many bytes hides its latency; groups are no smaller than that.
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
    """What the core is told of every pair of parts."""

    plan: Plan
    ranks: Ranks
    scale: Optional[float]
    dropout: float
    seed: int
    name: str
    first_head: int = 0
    empty_rows: str = "zero"

    def options(self, queries: Part) -> tuple[Any, ...]:
        """valid_lens ... seed and empty_rows of _core.attention_forward, for these queries."""
        mask, lens = self.plan.mask, self.plan.mask.lens_of(queries)
        return lens, None, None, None, mask.left, mask.right, self.scale, self.dropout, self.seed, self.empty_rows

    def origin(self, group: Group, queries: Part, keys: Part) -> tuple[int, int, int, int]:
        """Where these stand in the whole call: masks and dropout count from there."""
        return 0, self.first_head + group.query_heads.start, queries.start, keys.start

    def own(self) -> tuple[Part, ...]:
        """The parts of this rank's queries."""
        return self.plan.queries[self.ranks.rank]


def groups_of(call: Call, k: Tensor, v: Tensor, n_heads: int) -> list[Group]:
    """The same on all ranks, whose pieces may differ by a row or two."""
    batch, kv_heads = k.shape[:2]
    rows = max(sum(travel.part.size for travel in piece) for piece in call.plan.keys)
    total = k.element_size() * rows * (k.shape[-1] + v.shape[-1]) * batch * kv_heads
    n = max(1, min(kv_heads, MOST_GROUPS, total // MESSAGE_BYTES))
    borders, share = [kv_heads * i // n for i in range(n + 1)], n_heads // max(kv_heads, 1)
    return [Group(slice(a, b), slice(a * share, b * share)) for a, b in zip(borders, borders[1:])]


# --- Messages -------------------------------------------------------------------------------------------


class Cargo:
    """Some parts of two tensors (keys and values, or their gradients) side by side in one flat buffer."""

    def __init__(self, parts: Sequence[Travel], shape: tuple[int, int, int, int], buffer: Tensor) -> None:
        self.parts, self._shape = parts, shape
        self.flat = buffer[: self.numbers(parts, shape)]

    @staticmethod
    def numbers(parts: Sequence[Travel], shape: tuple[int, int, int, int]) -> int:
        items, heads, dim, value_dim = shape
        return items * heads * (dim + value_dim) * sum(travel.part.size for travel in parts)

    def __iter__(self) -> Iterator[tuple[Part, Tensor, Tensor]]:
        items, heads, dim, value_dim = self._shape
        at = 0
        for part in (travel.part for travel in self.parts):
            middle = at + items * heads * part.size * dim
            end = middle + items * heads * part.size * value_dim
            yield (
                part,
                self.flat[at:middle].view(items, heads, part.size, dim),
                self.flat[middle:end].view(items, heads, part.size, value_dim),
            )
            at = end

    def split(self, n: int) -> tuple[Cargo, Cargo]:
        """The first n parts, and the others."""
        first = Cargo(self.parts[:n], self._shape, self.flat)
        return first, Cargo(self.parts[n:], self._shape, self.flat[first.flat.numel() :])


class Room:
    """Memory for what travels, used again by one group of heads after the other: fresh pages cost more than a copy."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._taken: dict[tuple[str, int, int], Tensor] = {}

    def take(self, name: tuple[str, int, int], numbers: int) -> Tensor:
        found = self._taken.get(name)
        if found is None or found.numel() < numbers:
            found = self._taken[name] = self._like.new_empty(numbers)
        return found[:numbers]


class Lane:
    """One direction of the ring for one group of heads: what is where after each step, its memory, sends and receives.

    Nothing is waited for until it must have happened.
    """

    def __init__(self, call: Call, direction: int, k: Tensor, v: Tensor, room: Room) -> None:
        self._direction, self._call, self._ranks, self._room = direction, call, call.ranks, room
        self._shape = (*k.shape[:2], k.shape[-1], v.shape[-1])
        self._leaving: list[Any] = []
        self._arriving: list[Any] = []

    def cargo(self, what: str, hop: int) -> Cargo:
        """Room for what is here after so many steps, 0 for this rank's own; it is used again two steps later."""
        owner = self._ranks.neighbor(-self._direction * hop)
        parts = self._call.plan.cargo(owner, self._direction, max(hop, 1))
        buffer = self._room.take((what, self._direction, hop % 2), Cargo.numbers(parts, self._shape))
        return Cargo(parts, self._shape, buffer)

    def onward(self, cargo: Cargo, hop: int) -> tuple[Cargo, Cargo]:
        """What goes on after so many steps, and what does not."""
        return cargo.split(sum(travel.hops(self._direction) > hop for travel in cargo.parts))

    def send(self, cargo: Cargo, steps: int, tag: int) -> list[Any]:
        return self._start(dist.isend, cargo, steps, tag)

    def receive(self, cargo: Cargo, steps: int, tag: int) -> list[Any]:
        return self._start(dist.irecv, cargo, steps, tag)

    def _start(self, function: Any, cargo: Cargo, steps: int, tag: int) -> list[Any]:
        """With the rank so many steps along this direction."""
        if not cargo.flat.numel():
            return []
        peer = self._ranks.neighbor(self._direction * steps)
        with talking(self._ranks, self._call.name, peer):
            number, tag = dist.get_global_rank(self._ranks.group, peer), tag + (self._direction == BACKWARD)
            return [(function(cargo.flat, number, group=self._ranks.group, tag=tag), peer)]

    def wait(self, works: list[Any]) -> None:
        for work, peer in works:
            with talking(self._ranks, self._call.name, peer):
                work.wait()
        works.clear()


class Stream(Lane):
    """Keys and values that go round in one direction."""

    def __init__(self, call: Call, direction: int, k: Tensor, v: Tensor, room: Room) -> None:
        super().__init__(call, direction, k, v, room)
        self.here = self.cargo("keys", 0)
        for part, keys, values in self.here:
            keys.copy_(k[:, :, part.rows])
            values.copy_(v[:, :, part.rows])

    def begin(self, hop: int) -> None:
        """Starts the sending of what is here, where it is needed further on, and the receiving of what comes next."""
        self._next = self.cargo("keys", hop + 1)
        self._arriving = self.receive(self._next, -1, _KEYS)
        self._leaving = self.send(self.onward(self.here, hop)[0], 1, _KEYS)

    def end(self) -> None:
        """Waits for both."""
        self.wait(self._arriving)
        self.wait(self._leaving)
        self.here = self._next


def rounds(call: Call, k: Tensor, v: Tensor, room: Room) -> Iterator[tuple[int, list[Any]]]:
    """(round, the parts that this rank meets in it, by direction), while the next ones are on their way.

    In round 0 that is one list, of its own parts; each is (part, keys, values).
    """
    both = [Stream(call, direction, k, v, room) for direction in (FORWARD, BACKWARD)]
    own = [travel.part for travel in call.plan.keys[call.ranks.rank]]
    for hop in range(call.plan.rounds + 1):
        travelling = both if hop < call.plan.rounds else []
        for stream in travelling:
            stream.begin(hop)
        met: list[Any] = [stream.here for stream in both]
        yield hop, met if hop else [[(part, k[:, :, part.rows], v[:, :, part.rows]) for part in own]]
        for stream in travelling:
            stream.end()


# --- Forward ----------------------------------------------------------------------------------------------


class Joined:
    """The attention of one part of the queries over all keys met so far: views of the results, zeros at first."""

    def __init__(self, out: Tensor, row_max: Tensor, row_sum: Tensor) -> None:
        self.out, self.max, self.sum, self._met = out, row_max, row_sum, False

    def add(self, out: Tensor, row_max: Tensor, row_sum: Tensor) -> None:
        """Joins the attention over further keys; rows that see none of them keep their bits."""
        if not self._met:
            self._met = True
            for mine, found in ((self.out, out), (self.max, row_max), (self.sum, row_sum)):
                mine.copy_(found)
            return
        # A row without keys has the statistics (0, 0), and its 0 is no score.
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
        for keys, part_k, part_v in (each for parts in met for each in parts):
            for part in joined:
                if call.plan.mask.sees(part, keys):
                    found, _, _, statistics = attention_forward(
                        q[:, :, part.rows], part_k, part_v, None, *call.options(part), False, False, True,
                        call.origin(group, part, keys),
                    )  # fmt: skip
                    joined[part].add(found, *statistics)


# --- Backward ---------------------------------------------------------------------------------------------


class Returns(Lane):
    """Gradients of keys and values on their way: they follow their part, and from its last rank go home."""

    def __init__(self, call: Call, direction: int, k: Tensor, v: Tensor, room: Room) -> None:
        super().__init__(call, direction, k, v, room)
        self._awaited: list[Any] = []
        self._home = rest = self.cargo("home", 0)
        while rest.parts:  # the farthest stand first
            hops = rest.parts[0].hops(direction)
            back, rest = rest.split(sum(travel.hops(direction) == hops for travel in rest.parts))
            self._awaited += self.receive(back, hops, _HOME)

    def begin(self, hop: int) -> None:
        """Awaits the gradients of what is here, as far as the ranks before this one have added to them."""
        self._cargo = self.cargo("grads", hop)
        self._arriving = self.receive(self._cargo, -1, _GRADS) if hop > 1 else []
        if hop == 1:
            self._cargo.flat.zero_()

    def end(self, hop: int, found: Sequence[Optional[tuple[Tensor, Tensor]]]) -> None:
        """Adds this rank's share of each part and sends all on."""
        self.wait(self._arriving)
        for (_, of_k, of_v), own in zip(self._cargo, found):
            if own is not None:
                of_k.add_(own[0])
                of_v.add_(own[1])
        self.wait(self._leaving)  # of the round before: its buffer is the next one's
        onward, ending = self.onward(self._cargo, hop)
        self._leaving = self.send(onward, 1, _GRADS) + self.send(ending, -hop, _HOME)

    def finish(self, grad_k: Tensor, grad_v: Tensor) -> None:
        """Adds what the other ranks have found for this rank's own keys and values."""
        self.wait(self._awaited)
        for part, of_k, of_v in self._home:
            grad_k[:, :, part.rows] += of_k
            grad_v[:, :, part.rows] += of_v
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

    def meet(keys: Part, part_k: Tensor, part_v: Tensor) -> Optional[tuple[Tensor, Tensor]]:
        """Adds to grad_q; the gradients of the keys and values, if one of this rank's queries sees them."""
        total: Optional[tuple[Tensor, Tensor]] = None
        for part in call.own():
            if not call.plan.mask.sees(part, keys):
                continue
            rows = part.rows
            statistics = row_max[:, :, rows].contiguous(), row_sum[:, :, rows].contiguous()
            of_q, of_k, of_v, _, _ = attention_backward(
                grad_out[:, :, rows], out[:, :, rows], statistics, q[:, :, rows], part_k, part_v, None,
                *call.options(part), False, call.origin(group, part, keys),
            )  # fmt: skip
            grad_q[:, :, rows] += of_q
            total = (of_k, of_v) if total is None else (total[0].add_(of_k), total[1].add_(of_v))
        return total

    returns = [Returns(call, direction, k, v, room) for direction in (FORWARD, BACKWARD)]
    for hop, met in rounds(call, k, v, room):
        for back in returns if hop else ():
            back.begin(hop)
        found = [[meet(*each) for each in parts] for parts in met]
        for back, of_parts in zip(returns, found) if hop else ():
            back.end(hop, of_parts)
        for (part, _, _), own in zip(met[0], found[0]) if not hop else ():
            if own is not None:
                grad_k[:, :, part.rows] += own[0]
                grad_v[:, :, part.rows] += own[1]
    for back in returns:
        back.finish(grad_k, grad_v)
