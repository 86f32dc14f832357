"""Whether what was read is as it was, asked at each call of a converted module: in C, where that can be."""

from __future__ import annotations

import gc
import struct
from collections import OrderedDict, deque
from collections.abc import Iterable
from types import CellType, FunctionType
from typing import Any, NamedTuple, Optional

from torch import Tensor

from ..._core import first_changed, what_is_asked
from .keeping import Numbers

MISSING: Any = type("Missing", (), {"__repr__": lambda self: "MISSING"})()
_STORES = (dict, OrderedDict)


class Fact(NamedTuple):
    """An attribute of a tensor, or of a class: "shape", "dtype", "requires_grad", "__mro__"; its value."""

    owner: Any
    name: str
    value: Any

    def still_holds(self) -> bool:
        return bool(getattr(self.owner, self.name) == self.value)


def checks_of(setting: Any) -> Optional[list[Any]]:
    """What `first_changed` checks of a setting, (owner, name, value, ...); None where it cannot."""
    owner, name, value = setting
    kind = type(owner)
    if kind is Numbers:
        return owner.checks(value)
    if name is not None:
        return [owner, name, value] if kind in _STORES and type(name) is str else None
    if kind in (tuple, frozenset):  # stays as it is
        return []
    if kind is FunctionType and value[2] is None:
        names = "__code__", "__defaults__", "__kwdefaults__"  # its cells cannot be replaced
        return [x for pair in zip(names, value) for x in (owner, *pair)]
    if kind is CellType or isinstance(owner, Tensor):
        return [owner, "cell_contents" if kind is CellType else "_version", value]
    if isinstance(owner, type):
        (names,) = gc.get_referents(vars(owner))  # the dict behind the view
        return [names, None, _addresses(value.items())] if type(names) is dict else None
    if kind is dict or (kind is OrderedDict and not value):
        return [owner, None, _addresses(value)]
    return [owner, None, value] if kind is list or (kind in (set, deque) and not value) else None


def _addresses(items: Iterable[tuple[Any, Any]]) -> bytes:
    """Those of keys and values, which the setting keeps alive."""
    addresses = [id(x) for pair in items for x in pair]
    return struct.pack(f"{len(addresses)}P", *addresses)


class Checks:
    """What is asked of settings and facts; before: the same of the first of them."""

    def __init__(self, settings: list[Any], facts: list[Any], before: Optional[Checks] = None) -> None:
        self.sizes: tuple[int, int] = (len(settings), len(facts))
        n, n_facts = (0, 0) if before is None else before.sizes
        checks: list[Any] = [] if before is None else [*before.checks]
        self.origins: list[Any] = [] if before is None else [*before.origins]  # the setting, or the fact, of each check
        self.others: list[Any] = [] if before is None else [*before.others]  # settings that C cannot check
        for setting in settings[n:]:
            found = checks_of(setting)
            if found is None:
                self.others.append(setting)
            else:
                checks += found
                self.origins += [setting] * (len(found) // 3)
        for fact in facts[n_facts:]:
            checks += fact
            self.origins.append(fact)
        self.checks: tuple[Any, ...] = tuple(checks)
        self.asked = what_is_asked(self.checks, MISSING)

    def hold(self) -> bool:
        at = first_changed(self.checks, self.asked, 0)
        while at >= 0:  # perhaps it is an equal number, or a tensor of which C sees nothing
            if not self.origins[at].still_holds():
                return False
            at = first_changed(self.checks, self.asked, at + 1)
        return not self.others or all([setting.still_holds() for setting in self.others])
