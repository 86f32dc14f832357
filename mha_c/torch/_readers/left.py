"""Why a call, or all calls of a module, stay with the reader's lines; the reader is told of it."""

from __future__ import annotations

import warnings
import weakref
from contextlib import suppress
from typing import Any, Optional

from .._reading.graph import Line, Reason


class Left(Exception):
    """Why a reading is no call of the core.

    reason    the words and the line
    instead   what to write, where the core has it
    attends   whether there is an attention in it
    """

    of_this_form = False  # whether calls of other forms may be the core's all the same

    def __init__(self, words: str, line: Optional[Line] = None, instead: str = "", attends: bool = True) -> None:
        super().__init__(words)
        self.reason, self.instead, self.attends = Reason(words, line), instead, attends


class LeftWithGraph(Left):
    """The same of calls with a graph: others may be the core's."""

    of_this_form = True


class LeftThisTime(Left):
    """A call that the reader's lines compute: another of its form may be the core's."""

    of_this_form = True


class LeftAtFirst(Left):
    """A call that changes what it reads: the next may find that done, as a table that the first call makes."""


def tell(kind: Any, reason: Reason) -> None:
    """Warn of an attention that is left, once for each class and reason."""
    told = _told.setdefault(kind, set())
    if str(reason) not in told:
        told.add(str(reason))
        words = f"convert left {kind.__module__}.{kind.__qualname__} as it is: {reason}"
        with suppress(UserWarning):  # where warnings are errors, it would be one of the reader's call
            warnings.warn(f"{words}.  mha_c.torch.report(model) says more", stacklevel=2)


_told: Any = weakref.WeakKeyDictionary()  # {class: reasons}
