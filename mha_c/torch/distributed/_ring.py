"""One pass of keys and values around the ring, forward, and one of keys, values and their gradients, backward.

Rounds: in round 0 a rank meets its own keys, in round t those that came t steps.  What arrived in round t is handed
on, and what comes in round t + 1 is awaited, while round t is computed.  Partial results are joined by their row
statistics, always in the order of the rounds, so that no bit depends on who was late.

Key heads (or, with one of them, items) go round in groups, one group after the other: the memory for what travels is
two messages, and a message is one group's keys and values of a piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Optional

import torch
import torch.distributed as dist
from torch import Tensor

from .._tensors import attention_backward, attention_forward
from ._group import Ranks, talking
from ._sequence import BACKWARD, FORWARD, Part, Plan, Travel

# A message of so many bytes hides its latency; groups are no smaller than that.
MESSAGE_BYTES = 1 << 20
MOST_GROUPS = 8
# One tag for each kind of message in each direction, so that two ranks who are neighbors on both sides never mix them.
_KEYS, _GRADS, _HOME = 1, 3, 5


class Call(NamedTuple):
    """What the core is told of every pair of parts."""

    plan: Plan
    ranks: Ranks
    scale: Optional[float]
    dropout: float
    seed: int
    name: str
    first_head: int = 0

    def options(self, queries: Part) -> tuple[Any, ...]:
        """valid_lens ... seed of _core.attention_forward, for these queries."""
        mask = self.plan.mask
        lens = mask.lens
        if lens is not None and lens.ndim == 2:
            lens = lens[:, queries.start : queries.stop]
        return lens, None, None, None, mask.left, mask.right, self.scale, self.dropout, self.seed, "zero"


class Group(NamedTuple):
    """Items and key heads that travel together, and the query heads that use them."""

    items: slice
    heads: slice
    query_heads: slice


def groups_of(call: Call, k: Tensor, v: Tensor, n_heads: int) -> list[Group]:
    """The same on all ranks, whose pieces may differ by a row or two."""
    batch, kv_heads = k.shape[:2]
    rows = max(sum(travel.part.size for travel in piece) for piece in call.plan.keys)
    item_bytes = k.element_size() * rows * (k.shape[-1] + v.shape[-1])
    along_heads = kv_heads > 1
    units = kv_heads if along_heads else batch
    total = item_bytes * batch * kv_heads
    n = max(1, min(units, MOST_GROUPS, total // MESSAGE_BYTES))
    borders = [units * i // n for i in range(n + 1)]
    cuts = [slice(a, b) for a, b in zip(borders, borders[1:])]
    share = n_heads // max(kv_heads, 1)
    if along_heads:
        return [Group(slice(0, batch), cut, slice(cut.start * share, cut.stop * share)) for cut in cuts]
    return [Group(cut, slice(0, kv_heads), slice(0, n_heads)) for cut in cuts]


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

    def __iter__(self) -> Iterator[tuple[Travel, Tensor, Tensor]]:
        items, heads, dim, value_dim = self._shape
        at = 0
        for travel in self.parts:
            middle = at + items * heads * travel.part.size * dim
            end = middle + items * heads * travel.part.size * value_dim
            yield (
                travel,
                self.flat[at:middle].view(items, heads, travel.part.size, dim),
                self.flat[middle:end].view(items, heads, travel.part.size, value_dim),
            )
            at = end

    def first(self, n: int) -> Cargo:
        return Cargo(self.parts[:n], self._shape, self.flat)

    def without_first(self, n: int) -> Cargo:
        return Cargo(self.parts[n:], self._shape, self.flat[self.numbers(self.parts[:n], self._shape) :])


class Post:
    """Sends and receives of one rank, not waited for until they must have happened."""

    def __init__(self, ranks: Ranks, name: str) -> None:
        self._ranks, self._name = ranks, name

    def send(self, cargo: Cargo, peer: int, tag: int) -> list[Any]:
        return self._start(dist.isend, cargo, peer, tag)

    def receive(self, cargo: Cargo, peer: int, tag: int) -> list[Any]:
        return self._start(dist.irecv, cargo, peer, tag)

    def _start(self, function: Any, cargo: Cargo, peer: int, tag: int) -> list[Any]:
        if not cargo.flat.numel():
            return []
        with talking(self._ranks, self._name, peer):
            number = dist.get_global_rank(self._ranks.group, peer)
            return [(function(cargo.flat, number, group=self._ranks.group, tag=tag), peer)]

    def wait(self, works: list[Any]) -> None:
        for work, peer in works:
            with talking(self._ranks, self._name, peer):
                work.wait()
        works.clear()


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


class Stream:
    """Keys and values that go round in one direction, for one group of heads."""

    def __init__(self, call: Call, direction: int, shape: tuple[int, int, int, int], post: Post, room: Room) -> None:
        plan, ranks = call.plan, call.ranks
        self._plan, self._ranks, self._post, self._shape = plan, ranks, post, shape
        self.direction, self._tag = direction, 0 if direction == FORWARD else 1
        most = max((Cargo.numbers(self.expected(hop), shape) for hop in range(1, plan.rounds + 1)), default=0)
        self._room, self._buffers = room, [room.take(("keys", direction, i), most) for i in range(2)]
        self._arriving: list[Any] = []
        self._leaving: list[Any] = []
        self.here: Optional[Cargo] = None

    def expected(self, hop: int) -> list[Travel]:
        """What comes here after so many steps."""
        owner = (self._ranks.rank - self.direction * hop) % self._ranks.size
        return self._plan.cargo(owner, self.direction, hop)

    def fill(self, k: Tensor, v: Tensor) -> None:
        """This rank's own parts, as round 0."""
        parts = self._plan.cargo(self._ranks.rank, self.direction, 1)
        own = Cargo(parts, self._shape, self._room.take(("own", self.direction, 0), Cargo.numbers(parts, self._shape)))
        for travel, keys, values in own:
            keys.copy_(k[:, :, travel.part.rows])
            values.copy_(v[:, :, travel.part.rows])
        self.here = own

    def begin(self, hop: int) -> None:
        """Starts the sending of what is here, where it is needed further on, and the receiving of what comes next."""
        assert self.here is not None
        onward = self.here.first(self.n_onward(hop))
        coming = self.expected(hop + 1)
        self._next = Cargo(coming, self._shape, self._buffers[hop % 2])
        self._arriving = self._post.receive(self._next, self._ranks.neighbor(-self.direction), _KEYS + self._tag)
        self._leaving = self._post.send(onward, self._ranks.neighbor(self.direction), _KEYS + self._tag)

    def n_onward(self, hop: int) -> int:
        """How many of the parts that are here go on."""
        assert self.here is not None
        return sum(travel.hops(self.direction) > hop for travel in self.here.parts)

    def end(self) -> None:
        """Waits for both."""
        self._post.wait(self._arriving)
        self._post.wait(self._leaving)
        self.here = self._next


def streams(call: Call, shape: tuple[int, int, int, int], k: Tensor, v: Tensor, post: Post, room: Room) -> list[Stream]:
    found = [Stream(call, direction, shape, post, room) for direction in (FORWARD, BACKWARD)]
    for stream in found:
        stream.fill(k, v)
    return found


# --- Forward ----------------------------------------------------------------------------------------------


class Joined:
    """The attention of one part of the queries over all keys met so far."""

    def __init__(self, out: Tensor) -> None:
        self.out, self.max, self.sum = out, None, None

    def add(self, out: Tensor, row_max: Tensor, row_sum: Tensor) -> None:
        """Joins the attention over further keys; rows that see none of them keep their bits."""
        if self.max is None:
            self.out.copy_(out)
            self.max, self.sum = row_max, row_sum
            return
        # A row without keys has the statistics (0, 0), and its 0 is no score.
        old = self.max.masked_fill(self.sum == 0, -torch.inf)
        more = row_max.masked_fill(row_sum == 0, -torch.inf)
        largest = torch.maximum(old, more)
        largest = largest.masked_fill(largest == -torch.inf, 0.0)
        old, more = torch.exp(old - largest).mul_(self.sum), torch.exp(more - largest).mul_(row_sum)
        self.max, self.sum = largest, old + more
        divisor = self.sum.masked_fill(self.sum == 0, 1.0)
        self.out.mul_((old / divisor)[..., None]).addcmul_(out, (more / divisor)[..., None])


def forward(call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(out, row_max, row_sum) of this rank's queries over the keys of all ranks."""
    out = q.new_zeros(*q.shape[:3], v.shape[-1])
    row_max, row_sum = q.new_zeros(q.shape[:3]), q.new_zeros(q.shape[:3])
    room = Room(k)
    for group in groups_of(call, k, v, q.shape[1]):
        _forward_group(call, group, (q, k, v), (out, row_max, row_sum), room)
    return out, row_max, row_sum


def _forward_group(call: Call, group: Group, operands: Any, results: Any, room: Room) -> None:
    rank, rounds = call.ranks.rank, call.plan.rounds
    mine, theirs = (group.items, group.query_heads), (group.items, group.heads)
    q, k, v = (x[place] for x, place in zip(operands, (mine, theirs, theirs)))
    out, row_max, row_sum = (x[mine] for x in results)
    parts = call.plan.queries[rank]
    joined = {part: Joined(out[:, :, part.rows]) for part in parts}

    def meet(keys: Part, part_k: Tensor, part_v: Tensor) -> None:
        for part in parts:
            if call.plan.mask.sees(part, keys):
                lens, *rest = call.options(part)
                found, _, _, statistics = attention_forward(
                    q[:, :, part.rows], part_k, part_v, None, _items(lens, group), *rest, False, False, True,
                    (group.items.start, call.first_head + group.query_heads.start, part.start, keys.start),
                )  # fmt: skip
                joined[part].add(found, *statistics)

    shape = (k.shape[0], k.shape[1], k.shape[-1], v.shape[-1])
    both = streams(call, shape, k, v, Post(call.ranks, call.name), room)
    for hop in range(rounds + 1):
        for stream in both if hop < rounds else ():
            stream.begin(hop)
        if hop == 0:
            for travel in call.plan.keys[rank]:
                meet(travel.part, k[:, :, travel.part.rows], v[:, :, travel.part.rows])
        else:
            for stream in both:
                for travel, part_k, part_v in _cargo(stream):
                    meet(travel.part, part_k, part_v)
        for stream in both if hop < rounds else ():
            stream.end()
    for part in parts:
        if joined[part].max is not None:
            row_max[:, :, part.rows] = joined[part].max
            row_sum[:, :, part.rows] = joined[part].sum


def _items(lens: Any, group: Group) -> Any:
    return None if lens is None else lens[group.items]


# --- Backward ---------------------------------------------------------------------------------------------


class Returns:
    """Gradients of keys and values on their way: they follow their part, and from its last rank go home."""

    def __init__(self, call: Call, stream: Stream, shape: tuple[int, int, int, int], post: Post, room: Room) -> None:
        self._ranks, self._stream, self._post, self._shape = call.ranks, stream, post, shape
        self._tag = 0 if stream.direction == FORWARD else 1
        assert stream.here is not None
        most = max((Cargo.numbers(stream.expected(hop), shape) for hop in range(1, call.plan.rounds + 1)), default=0)
        self._buffers = [room.take(("grads", stream.direction, i), most) for i in range(2)]
        self._arriving: list[Any] = []
        self._leaving: list[Any] = []
        own = stream.here.parts
        home = Cargo(own, shape, room.take(("home", stream.direction, 0), Cargo.numbers(own, shape)))
        self._home, self._awaited = home, []
        for hops in sorted({travel.hops(stream.direction) for travel in own}):
            before = sum(travel.hops(stream.direction) > hops for travel in own)
            count = sum(travel.hops(stream.direction) == hops for travel in own)
            part = home.without_first(before).first(count)
            self._awaited += post.receive(part, self._ranks.neighbor(stream.direction * hops), _HOME + self._tag)

    def begin(self, hop: int) -> None:
        """Awaits the gradients of what is here, as far as the ranks before this one have added to them."""
        assert self._stream.here is not None
        self._cargo = Cargo(self._stream.here.parts, self._shape, self._buffers[hop % 2])
        if hop > 1:
            peer = self._ranks.neighbor(-self._stream.direction)
            self._arriving = self._post.receive(self._cargo, peer, _GRADS + self._tag)
        else:
            self._cargo.flat.zero_()

    def end(self, hop: int, found: dict[Part, tuple[Tensor, Tensor]]) -> None:
        """Adds this rank's share and sends all on."""
        stream = self._stream
        self._post.wait(self._arriving)
        for travel, of_k, of_v in self._cargo:
            if travel.part in found:
                own_k, own_v = found[travel.part]
                of_k.add_(own_k)
                of_v.add_(own_v)
        self._post.wait(self._leaving)  # of the round before: its buffer is the next one's
        n = stream.n_onward(hop)
        owner = self._ranks.neighbor(-stream.direction * hop)
        onward = self._post.send(self._cargo.first(n), self._ranks.neighbor(stream.direction), _GRADS + self._tag)
        self._leaving = onward + self._post.send(self._cargo.without_first(n), owner, _HOME + self._tag)

    def finish(self, grad_k: Tensor, grad_v: Tensor) -> None:
        """Adds what the other ranks have found for this rank's own keys and values."""
        self._post.wait(self._awaited)
        for travel, of_k, of_v in self._home:
            grad_k[:, :, travel.part.rows] += of_k
            grad_v[:, :, travel.part.rows] += of_v
        self._post.wait(self._leaving)


def backward(
    call: Call, grad_out: Tensor, out: Tensor, row_max: Tensor, row_sum: Tensor, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of this rank's queries, keys and values."""
    grads = q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    room = Room(k)
    for group in groups_of(call, k, v, q.shape[1]):
        _backward_group(call, group, (grad_out, out, row_max, row_sum, q), (k, v), grads, room)
    return grads


def _backward_group(call: Call, group: Group, of_queries: Any, of_keys: Any, grads: Any, room: Room) -> None:
    rank, rounds = call.ranks.rank, call.plan.rounds
    mine, theirs = (group.items, group.query_heads), (group.items, group.heads)
    grad_out, out, row_max, row_sum, q = (x[mine] for x in of_queries)
    k, v = (x[theirs] for x in of_keys)
    grad_q, grad_k, grad_v = grads[0][mine], grads[1][theirs], grads[2][theirs]

    def meet(keys: Part, part_k: Tensor, part_v: Tensor) -> Optional[tuple[Tensor, Tensor]]:
        """Adds to grad_q; the gradients of the keys and values, if one of this rank's queries sees them."""
        total: Optional[tuple[Tensor, Tensor]] = None
        for part in call.plan.queries[rank]:
            if not call.plan.mask.sees(part, keys):
                continue
            rows, (lens, *rest) = part.rows, call.options(part)
            statistics = row_max[:, :, rows].contiguous(), row_sum[:, :, rows].contiguous()
            of_q, of_k, of_v, _, _ = attention_backward(
                grad_out[:, :, rows], out[:, :, rows], statistics, q[:, :, rows], part_k, part_v, None,
                _items(lens, group), *rest, False,
                (group.items.start, call.first_head + group.query_heads.start, part.start, keys.start),
            )  # fmt: skip
            grad_q[:, :, rows] += of_q
            total = (of_k, of_v) if total is None else (total[0].add_(of_k), total[1].add_(of_v))
        return total

    shape, post = (k.shape[0], k.shape[1], k.shape[-1], v.shape[-1]), Post(call.ranks, call.name)
    both = streams(call, shape, k, v, post, room)
    returns = [Returns(call, stream, shape, post, room) for stream in both]
    for hop in range(rounds + 1):
        for back in returns if hop else ():
            back.begin(hop)
        for stream in both if hop < rounds else ():
            stream.begin(hop)
        if hop == 0:
            for travel in call.plan.keys[rank]:
                found = meet(travel.part, k[:, :, travel.part.rows], v[:, :, travel.part.rows])
                if found is not None:
                    grad_k[:, :, travel.part.rows] += found[0]
                    grad_v[:, :, travel.part.rows] += found[1]
        else:
            for stream, back in zip(both, returns):
                contributions = {}
                for travel, part_k, part_v in _cargo(stream):
                    found = meet(travel.part, part_k, part_v)
                    if found is not None:
                        contributions[travel.part] = found
                back.end(hop, contributions)
        for stream in both if hop < rounds else ():
            stream.end()
    for back in returns:
        back.finish(grad_k, grad_v)


def _cargo(stream: Stream) -> Cargo:
    assert stream.here is not None
    return stream.here
