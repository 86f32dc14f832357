"""The ranks of a group: checks that all make the same call, and reports which rank failed and why.

Every call of a collective function here begins with one small all-gather.  Each rank sends its arguments, or that it
refuses them.  All ranks then raise an error that names a rank that differs, and no rank waits for a message that will
never come.  After a broken call the group is not used again: the next call could receive a late message of that call.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Iterator

_ROOM = 4096  # bytes of a rank's message, the same for every call
_LONGEST = 300  # characters of a rank's own error, each at most twelve bytes
_broken: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


class Ranks(NamedTuple):
    """A process group and this process's rank in it; copies of a layer share it."""

    group: Any
    rank: int
    size: int

    def neighbor(self, step: int) -> int:
        return (self.rank + step) % self.size

    def __deepcopy__(self, memo: Any) -> Ranks:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a layer that processes share cannot be pickled, because its process group belongs to this process: save "
            "its state_dict(), build the layer again and share that"
        )


class Field(NamedTuple):
    """An argument that must be equal on all ranks; it is compared and reported as text."""

    name: str
    value: Any
    error: type[Exception] = ValueError


def ranks_of(group: Any, caller: str) -> Ranks:
    """The group (None: all processes) and this process's rank in it."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            f"{caller} needs a process group: call torch.distributed.init_process_group('gloo') first, under torchrun"
        )
    group = dist.group.WORLD if group is None else group
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(f"{caller}: this process is not a member of the group")
    if group in _broken:
        raise RuntimeError(f"{caller}: this group cannot be used any more: {_broken[group]}")
    return Ranks(group, rank, dist.get_world_size(group))


@contextmanager
def talking(ranks: Ranks, caller: str, peer: Optional[int] = None) -> Iterator[None]:
    """A context for code that waits for other ranks: its errors name the rank, and the group is not used again."""
    try:
        yield
    except RuntimeError as error:
        whom, said = "the other ranks" if peer is None else f"rank {peer}", str(error).strip().partition("\n")[0]
        _broken[ranks.group] = f"rank {ranks.rank} lost {whom} in an earlier call of {caller}"
        raise RuntimeError(
            f"{caller}: rank {ranks.rank} of {ranks.size} waited for {whom} and got no answer within the group's "
            f"timeout, or the connection was closed: that process has died, hangs, or is not making this call.  "
            f"torch.distributed says: {said[:300]}"
        ) from error


def agree(
    ranks: Ranks, caller: str, fields: Sequence[Field], own: Sequence[int] = (), refusal: Optional[Exception] = None
) -> list[list[int]]:
    """Check that all ranks make the same call with the same `fields`; returns the `own` numbers of all ranks.

    If `refusal` is an error, this rank raises it, and all other ranks raise an error that names this rank.  If fields
    differ, all ranks raise an error that names the ranks.
    """
    complaint = (str(refusal) or type(refusal).__name__)[:_LONGEST] if refusal else ""
    said = json.dumps([complaint, [str(field.value) for field in fields], own]).encode()
    mine = torch.frombuffer(bytearray(said.ljust(_ROOM)), dtype=torch.uint8)
    found = [torch.empty_like(mine) for _ in range(ranks.size)]
    with talking(ranks, caller):
        dist.all_gather(found, mine, group=ranks.group)
    if refusal:
        raise refusal
    complaints, values, numbers = zip(*(json.loads(bytes(heard.numpy())) for heard in found))
    for rank, complaint in enumerate(complaints):
        if complaint:
            raise ValueError(f"{caller}: rank {rank} refused its arguments: {complaint}")
    for field, of_ranks in zip(fields, zip(*values)):
        if len(set(of_ranks)) > 1:
            where = {value: [str(rank) for rank, other in enumerate(of_ranks) if other == value] for value in of_ranks}
            listed = ", ".join(
                f"{value} on {'rank' if len(at) == 1 else 'ranks'} {', '.join(at)}" for value, at in where.items()
            )
            raise field.error(f"{caller}: the ranks differ in {field.name}: {listed}")
    return list(numbers)
