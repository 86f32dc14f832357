"""What `convert` does with a model: known classes become ours at once, all others are read at their first calls."""

from __future__ import annotations

import functools
import weakref
from typing import Any

from torch import nn

from ..._layer.description import LOOKED
from .._tensors import recorded_or_transformed
from .candidates import first_to_read
from .known import become_ours
from .modules import is_read, prepare

_PREPARES = "_reads_at_first_call"


def converted(model: nn.Module) -> bool:
    """Convert what is known inside a model, and have the rest read; whether there is anything."""
    found = False
    for part in reversed([*model.modules()]):  # a MultiHeadAttention after the attention inside
        found = become_ours(part) or is_ours(part) or found
    for part in first_to_read(model):
        prepare(part)
        found = True
    return found


def is_ours(module: Any) -> bool:
    """Whether mha_c computes it: one of our classes (those that patch() has put into d2l have d2l's name)."""
    kind = type(module)
    return not is_read(module) and (kind.__module__.startswith("mha_c.") or hasattr(kind, "_explained"))


def is_cores(module: Any) -> bool:
    """Whether calls of it are the core's."""
    looked = LOOKED.get(module)
    return is_ours(module) or (looked is not None and looked.way == "core")


def read_at_first_call(kind: Any) -> Any:
    """Let the instances of a class be read at their first calls.  Returns the class."""
    if _PREPARES in vars(kind):
        return kind
    call, met = kind.__call__, weakref.WeakSet()  # type: Any, Any

    @functools.wraps(call)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if type(self) is kind and self not in met and not recorded_or_transformed():
            met.add(self)
            converted(self)
        return call(self, *args, **kwargs)

    kind.__call__ = __call__
    setattr(kind, _PREPARES, True)
    return kind
