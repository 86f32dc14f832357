"""The ranks of a group: that they make the same call, and what went wrong on which of them.

Every call of a collective function here begins with one small all-gather.  Each rank says what it was asked to do, or
that it refuses; whoever differs is named on all ranks, and nobody waits for messages that will never come.  After a
broken call the group is not used again, for a late message of that call could be taken for one of the next.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

import torch
import torch.distributed as dist

from ...errors import ShapeError

if TYPE_CHECKING:
    from collections.abc import Iterator

_WORDS = 40  # of 64 bits, for a rank's own error message
_calls: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_broken: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


class Ranks(NamedTuple):
    """This process in a group."""

    group: Any
    rank: int
    size: int

    def neighbor(self, step: int) -> int:
        return (self.rank + step) % self.size


class Field(NamedTuple):
    """One number that all ranks must agree on, and how a difference is reported."""

    name: str
    value: int
    error: type[Exception] = ValueError
    shown: Any = None  # value -> text


def ranks_of(group: Any, caller: str) -> Ranks:
    """The group (None: all processes) as this process sees it."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            f"{caller} needs a process group: call torch.distributed.init_process_group('gloo') first, under torchrun"
        )
    group = dist.group.WORLD if group is None else group
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(f"{caller}: this process is no member of the group")
    if group in _broken:
        raise RuntimeError(f"{caller}: this group cannot be used any more, for {_broken[group]}")
    return Ranks(group, rank, dist.get_world_size(group))


@contextmanager
def talking(ranks: Ranks, caller: str, peer: Optional[int] = None) -> Iterator[None]:
    """Around what waits for others: its errors name who, and end the use of the group."""
    try:
        yield
    except RuntimeError as error:
        whom = "the other ranks" if peer is None else f"rank {peer}"
        _broken[ranks.group] = f"rank {ranks.rank} lost {whom} in an earlier call of {caller}"
        raise RuntimeError(
            f"{caller}: rank {ranks.rank} of {ranks.size} waited for {whom} and got no answer within the group's "
            f"timeout, or the connection was closed: that process has died, hangs, or is not making this call.  "
            f"torch.distributed says: {_first_line(error)}"
        ) from error


def agree(ranks: Ranks, caller: str, fields: Sequence[Field], own: Sequence[int], refusal: str = "") -> list[list[int]]:
    """All ranks' `own` numbers, once it is certain that all of them make the same call with the same `fields`.

    refusal is what this rank has to complain of; the others then raise an error that names it.  Ranks whose fields
    or number of calls differ are named on all ranks.
    """
    count = _calls[ranks.group] = _calls.get(ranks.group, 0) + 1
    everything = [
        Field("its number of collective calls of mha_c", count, RuntimeError),
        Field("world size", ranks.size),
        *fields,
    ]
    # The same length whatever the call: a rank in another function must be understood too.
    said = [_code(caller), len(everything), *(field.value for field in everything), len(own), *own]
    header = torch.zeros(_WORDS * 2, dtype=torch.int64)
    header[: len(said)] = torch.tensor(said)
    text = refusal.encode()[: _WORDS * 8 - 8]
    header[_WORDS:].view(torch.uint8)[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else 0
    found = [torch.empty_like(header) for _ in range(ranks.size)]
    with talking(ranks, caller):
        dist.all_gather(found, header, group=ranks.group)
    _refused(found, caller)
    _differ(found, caller, everything)
    at = 2 + len(everything)
    return [[int(x) for x in other[at + 1 : at + 1 + len(own)]] for other in found]


def _code(caller: str) -> int:
    return int.from_bytes(caller.encode()[:7].ljust(7), "little")


def _refused(found: Sequence[Any], caller: str) -> None:
    for rank, header in enumerate(found):
        text = bytes(header[_WORDS:].view(torch.uint8).tolist()).rstrip(b"\0").decode(errors="replace")
        if text:
            raise ValueError(f"{caller}: rank {rank} refused its arguments: {text}")


def _differ(found: Sequence[Any], caller: str, fields: Sequence[Field]) -> None:
    if any(int(header[0]) != _code(caller) or int(header[1]) != len(fields) for header in found):
        names = [int(header[0]).to_bytes(7, "little").decode(errors="replace").strip() for header in found]
        raise RuntimeError(
            f"{caller}: the ranks are in different functions: "
            + ", ".join(f"rank {rank} in {name}..." for rank, name in enumerate(names))
        )
    for i, field in enumerate(fields):
        values = [int(header[2 + i]) for header in found]
        if len(set(values)) > 1:
            by_value: dict[int, list[int]] = {}
            for rank, value in enumerate(values):
                by_value.setdefault(value, []).append(rank)
            shown = field.shown or str
            listed = ", ".join(f"{shown(value)} on {_ranks(ranks)}" for value, ranks in by_value.items())
            raise field.error(f"{caller}: the ranks differ in {field.name}: {listed}")


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:300]


def shape_fields(**sizes: int) -> list[Field]:
    return [Field(name, value, ShapeError) for name, value in sizes.items()]
