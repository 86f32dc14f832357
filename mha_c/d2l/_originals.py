"""Lets d2l's own classes, and ours after `unpatch`, work and be pickled while their names mean other classes."""

from __future__ import annotations

import builtins
import copyreg
import pkgutil
import sys
from functools import update_wrapper
from types import FunctionType
from typing import Any


class _Namespace(dict[str, Any]):
    """The globals of a module, except that one name keeps the value that it had when the module was imported."""

    def __init__(self, module: dict[str, Any], name: str, value: Any) -> None:
        super().__init__({name: value, "__builtins__": builtins})
        self._module = module

    def __missing__(self, name: str) -> Any:
        return self._module[name]


class _Reference:
    """A class, pickled by its module and name even if that name means another class now."""

    def __init__(self, kind: type) -> None:
        self._kind = kind

    def __reduce__(self) -> Any:
        return pkgutil.resolve_name, (f"{self._kind.__module__}:{self._kind.__qualname__}",)

    def __deepcopy__(self, memo: Any) -> type:
        return self._kind


class _Blank:
    """object.__new__ that also accepts a _Reference, which copy.copy passes on; it is pickled as object.__new__."""

    def __call__(self, kind: Any) -> Any:
        return object.__new__(kind._kind if type(kind) is _Reference else kind)

    def __reduce__(self) -> Any:
        return getattr, (object, "__new__")


def construct_by_own_name(kind: type) -> None:
    """Let the __init__ of a class find the class itself when it looks up its name for super(), not our class."""
    init = kind.__dict__["__init__"]
    if not isinstance(init.__globals__, _Namespace):
        names = _Namespace(init.__globals__, kind.__name__, kind)
        own = FunctionType(init.__code__, names, init.__name__, init.__defaults__, init.__closure__)
        own.__kwdefaults__ = init.__kwdefaults__
        kind.__init__ = update_wrapper(own, init)  # type: ignore[misc]


def pickle_by_name(kind: type) -> None:
    """Pickle instances of the class by its name: loading uses the class that has the name at that moment."""
    copyreg.pickle(kind, _reduced)


def _reduced(module: Any) -> Any:
    kind = type(module)
    if _named(kind) is kind:
        return module.__reduce_ex__(2)
    state = module.__getstate__() if hasattr(module, "__getstate__") else module.__dict__
    return _Blank(), (_Reference(kind),), state


def _named(kind: type) -> Any:
    """What has the class's name in its module now."""
    found: Any = sys.modules.get(kind.__module__)
    for name in kind.__qualname__.split("."):
        found = getattr(found, name, None)
    return found
