"""A tensor's axes in another order: from the letters that they have to those that are wanted."""

from __future__ import annotations

from functools import cache
from typing import Any, Callable, Optional

from torch import Tensor

Arrange = Optional[Callable[[Tensor], Tensor]]


@cache  # equal letters have one function: a tensor that is given thrice is arranged once
def arrangement(have: str, want: str) -> Arrange:
    """What turns axes of letters `have` into `want`; None where nothing is to be done.

    An axis "1", and one that is wanted and not there, has length 1.  ValueError where letters do not fit.
    """
    own = [letter for letter in have if letter != "1"]
    wanted = [letter for letter in want if letter != "1"]
    missing = [letter for letter in wanted if letter not in own]
    if have == want:
        return None
    extra = [letter for letter in own if letter not in wanted]
    if len(set(own)) < len(own) or len(set(wanted)) < len(wanted):
        raise ValueError(f"axes {have!r} are not told apart")
    dropped = [i for i, letter in enumerate(have) if letter == "1" or letter in extra]
    order = [[letter for letter in own if letter not in extra].index(letter) for letter in wanted if letter in own]
    new = [i for i, letter in enumerate(want) if letter == "1" or letter in missing]
    if have == want[1:] and new == [0]:
        return lambda x: x.unsqueeze(0)
    if not dropped and not new and order == [1, 0, 2]:
        return lambda x: x.transpose(0, 1)
    if dropped == [0] and not new and order == [*range(len(order))]:
        return lambda x: x.squeeze(0)
    turned = order != sorted(order)
    if not turned and not extra:
        return _with_ones(have, "".join("1" if letter in missing else letter for letter in want))

    def arranged(x: Tensor) -> Tensor:
        for axis in reversed(dropped):
            if x.shape[axis] != 1:
                raise ValueError("an axis that is left out is longer than 1")
            x = x.squeeze(axis)
        x = x.permute(order) if turned else x
        for axis in new:
            x = x.unsqueeze(axis)
        return x

    return arranged


def _with_ones(have: str, want: str) -> Callable[[Tensor], Tensor]:
    """The same letters in the same order: only axes of length 1 are taken out, or put in."""
    ones = [axis for axis, letter in enumerate(have) if letter == "1"]
    steps, letters = [], [*have]  # (whether an axis is put in, which)
    for axis, letter in enumerate(want):
        while letter != "1" and letters[axis : axis + 1] == ["1"]:
            del letters[axis]
            steps.append((False, axis))
        if letter == "1" and letters[axis : axis + 1] != ["1"]:
            letters.insert(axis, "1")
            steps.append((True, axis))
    steps += [(False, len(want))] * (len(letters) - len(want))

    def arranged(x: Tensor) -> Tensor:
        for axis in ones:
            if x.shape[axis] != 1:
                raise ValueError("an axis of length 1 is longer")
        for puts, axis in steps:
            x = x.unsqueeze(axis) if puts else x.squeeze(axis)
        return x

    return arranged


def filled(structure: Any, of: Callable[[Any], Any], leaf: type) -> Any:
    """The structure with `of(x)` in the place of each x of type `leaf`."""
    if isinstance(structure, leaf):
        return of(structure)
    if isinstance(structure, (tuple, list)):
        parts = [filled(x, of, leaf) for x in structure]
        return type(structure)(*parts) if hasattr(structure, "_fields") else type(structure)(parts)
    if isinstance(structure, dict):
        return {key: filled(x, of, leaf) for key, x in structure.items()}
    return structure
