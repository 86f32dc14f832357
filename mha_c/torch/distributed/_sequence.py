"""How a sequence is cut into pieces, one for each rank, which parts see which, and how far each part must travel.

This is plain arithmetic: every rank does it with the same result, and nothing here sends or computes attention.

A piece is what one rank holds: one part of the sequence (layout "contiguous"), or two ("zigzag": parts r and
2n - 1 - r of 2n).  Under a causal mask later queries see more keys, and two such parts make equal work for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._arguments import scalars
from ..._arguments.calls import refuses_at_the_call
from ...errors import ShapeError
from .._twins import twin

LAYOUTS = ("contiguous", "zigzag")


class Stretch(NamedTuple):
    """Positions start .. stop - 1 of the sequence; in their rank's piece they begin at row `offset`."""

    start: int
    stop: int
    offset: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def rows(self) -> slice:
        """The rows of the part in the piece."""
        return slice(self.offset, self.offset + self.size)


class VisibleKeys(NamedTuple):
    """Which keys a query sees: keys before the length of its item, at most left and right from its own position.

    left and right are -1 where there is no limit; causal is right = 0.  lens: None, (B,) or (B, N) int64.
    """

    left: int = -1
    right: int = -1
    lens: Any = None

    def lens_of(self, queries: Stretch) -> Any:
        """The lengths of these queries."""
        per_query = self.lens is not None and self.lens.ndim == 2
        return self.lens[:, queries.start : queries.stop] if per_query else self.lens

    def sees(self, queries: Stretch, keys: Stretch) -> bool:
        """Whether one of these queries sees one of these keys in some item."""
        lens = self.lens_of(queries)
        last = keys.stop if lens is None else min(keys.stop, int(lens.max(initial=0)))
        first_query = queries.start if self.right < 0 else max(queries.start, keys.start - self.right)
        last_query = queries.stop if self.left < 0 else min(queries.stop, last + self.left)
        return keys.start < last and first_query < last_query


def parts_of(length: int, rank: int, world_size: int, layout: str) -> tuple[Stretch, ...]:
    """The parts of a sequence that `rank` holds.  Of n parts the first length % n are longer by one."""
    n_parts = world_size if layout == "contiguous" else 2 * world_size
    numbers = (rank,) if layout == "contiguous" else (rank, n_parts - 1 - rank)
    size, longer = divmod(length, n_parts)
    parts, offset = [], 0
    for number in numbers:
        start = number * size + min(number, longer)
        stop = start + size + (number < longer)
        parts.append(Stretch(start, stop, offset))
        offset += stop - start
    return tuple(parts)


def piece_length(length: int, rank: int, world_size: int, layout: str) -> int:
    return sum(part.size for part in parts_of(length, rank, world_size, layout))


@refuses_at_the_call
def split_sequence(x: Tensor, rank: int, world_size: int, *, layout: str = "contiguous", dim: int = -2) -> Tensor:
    """The piece of a sequence that a rank works on.

    Gradients flow back.  If the parts cannot be equal, their lengths differ by one.

    Parameters
    ----------
    x : Tensor
        A tensor of any type, with the sequence along `dim`.
    rank, world_size : int
        The rank, 0 .. world_size - 1, and the number of ranks.
    layout : {"contiguous", "zigzag"}
        "contiguous": part `rank` of `world_size` parts.  "zigzag": parts `rank` and 2 world_size - 1 - `rank` of
        2 world_size parts, one after the other, which balances causal work.
    dim : int
        The axis of the sequence; the default fits (B, H, N, D) and (B, N, D).

    Returns
    -------
    Tensor
        The piece.

    Examples
    --------
    >>> import torch
    >>> from mha_c.torch.distributed import split_sequence
    >>> x = torch.arange(8)
    >>> split_sequence(x, 0, 2, dim=0), split_sequence(x, 0, 2, layout="zigzag", dim=0)
    (tensor([0, 1, 2, 3]), tensor([0, 1, 6, 7]))
    """
    scalars.choice(layout, "layout", *LAYOUTS)
    world_size = scalars.whole(world_size, "world_size")
    if scalars.whole(rank, "rank", least=0) >= world_size:
        raise ValueError(f"rank must be below world_size ({world_size}), got {rank}")
    dim = _axis(x, "x", dim)
    parts = parts_of(x.shape[dim], rank, world_size, layout)
    pieces = [x.narrow(dim, part.start, part.size) for part in parts]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


@twin(split_sequence)
@refuses_at_the_call
def join_sequence(pieces: Sequence[Tensor], *, layout: str = "contiguous", dim: int = -2) -> Tensor:
    """Join the pieces of all ranks into the whole sequence: the reverse of `split_sequence`.

    Parameters
    ----------
    pieces : list of Tensor
        In the order of the ranks.

    Returns
    -------
    Tensor
        The sequence.

    Examples
    --------
    >>> import torch
    >>> from mha_c.torch.distributed import join_sequence, split_sequence
    >>> x = torch.arange(11)
    >>> pieces = [split_sequence(x, rank, 3, layout="zigzag", dim=0) for rank in range(3)]
    >>> join_sequence(pieces, layout="zigzag", dim=0)
    tensor([ 0,  1,  2,  3,  4,  5,  6,  7,  8,  9, 10])
    """
    scalars.choice(layout, "layout", *LAYOUTS)
    if not pieces:
        raise ValueError("pieces: at least one is needed")
    dim = _axis(pieces[0], "pieces[0]", dim)
    length, found = sum(piece.shape[dim] for piece in pieces), []
    for rank, piece in enumerate(pieces):
        parts = parts_of(length, rank, len(pieces), layout)
        if piece.shape[dim] != sum(part.size for part in parts):
            raise ShapeError(
                f"pieces[{rank}] has {piece.shape[dim]} places along dim {dim}, but split_sequence gives rank {rank} "
                f"{sum(part.size for part in parts)} of {length} for {len(pieces)} ranks and layout={layout!r}"
            )
        found += [(part.start, piece.narrow(dim, part.offset, part.size)) for part in parts]
    return torch.cat([part for _, part in sorted(found, key=lambda pair: pair[0])], dim)


def _axis(x: Tensor, name: str, dim: int) -> int:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch tensor, got {type(x).__name__}")
    if not -x.dim() <= dim < x.dim():
        raise ShapeError(f"dim {dim} is none of {name}, which has shape {tuple(x.shape)}")
    return dim % x.dim()


# --- Who needs what --------------------------------------------------------------------------------------


class Travel(NamedTuple):
    """A part of the keys, and how many steps it travels around the ring."""

    part: Stretch
    hops: int


class Schedule:
    """All facts of a call that follow from sizes and masks: the parts of each rank and how far they travel."""

    def __init__(self, world_size: int, n_queries: int, n_keys: int, layout: str, mask: VisibleKeys) -> None:
        self.world_size, self.mask = world_size, mask
        ranks = range(world_size)
        self.queries = [parts_of(n_queries, rank, world_size, layout) for rank in ranks]
        self.keys = [
            [Travel(part, self._hops(owner, part)) for part in parts_of(n_keys, owner, world_size, layout)]
            for owner in ranks
        ]
        self.rounds = max((travel.hops for piece in self.keys for travel in piece), default=0)

    def _hops(self, owner: int, part: Stretch) -> int:
        """The steps to the last rank that needs the part."""
        others = range(1, self.world_size)
        sees = [any(self.mask.sees(queries, part) for queries in piece) for piece in self.queries]
        return max((d for d in others if sees[(owner + d) % self.world_size]), default=0)

    def travelling(self, owner: int, hops: int) -> list[Travel]:
        """The parts of `owner` that travel at least `hops` steps."""
        return [travel for travel in self.keys[owner] if travel.part.size and travel.hops >= hops]

    def sent(self, rank: int) -> int:
        """How many keys this rank sends in a forward call: its own and those that it passes on."""
        met = [self.travelling((rank - hop + 1) % self.world_size, hop) for hop in range(1, self.rounds + 1)]
        return sum(travel.part.size for parts in met for travel in parts)
