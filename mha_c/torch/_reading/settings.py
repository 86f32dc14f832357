"""What Python read during a call: by identity where a thing has one, by value where it is a number or a text.

Whatever can be kept neither way leaves the call unread.
"""

from __future__ import annotations

import functools
import operator
import os
from collections import deque
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, Optional

import numpy as np
from torch import Tensor, nn

from .holding import MISSING, Checks, Fact
from .keeping import DEFAULT_TYPE, LIKE_DICTS, DictKeys, Numbers, Slots, stays

_VALUES = (bool, int, float, str, bytes, complex, type(None))
_MOST = 20_000  # things in containers that are kept


class CannotKeep(Exception):
    """A thing that can be kept neither by identity nor by value."""


class Setting(NamedTuple):
    """Something that Python read.

    owner   a dict (of an object, of globals, or the reader's own), a list, tuple, set or deque, a type, a function, a
            cell
    name    the key in a dict; else None
    value   what it was: of a dict's key the value, or MISSING; of a container its items; of a type a copy of its names
    """

    owner: Any
    name: Any
    value: Any

    def still_holds(self) -> bool:
        owner, name, value = self
        if name is not None:
            return _same(owner.get(name, MISSING), value)
        kind = type(owner)
        if kind is CellType:
            return _same(_content(owner), value)
        if kind is FunctionType:
            return function_parts(owner) == value
        if isinstance(owner, type):
            return _same_names(owner, value)
        if isinstance(owner, Tensor):
            return bool(_version(owner) == value)
        if isinstance(owner, np.ndarray):
            return bool(owner.tobytes() == value)
        items = tuple(owner.items()) if isinstance(owner, dict) else tuple(owner)
        return len(items) == len(value) and all(map(_same, items, value))


def _same(a: Any, b: Any) -> bool:
    """Whether one thing may stand for the other."""
    if a is b:
        return True
    kind = type(a)
    if kind is not type(b):
        return False
    if kind is tuple:
        return len(a) == len(b) and all(map(_same, a, b))
    if kind in _VALUES or isinstance(a, np.generic):
        return bool(a == b) or (a != a and b != b)
    return False


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def function_parts(function: FunctionType) -> tuple[Any, ...]:
    """What a function runs with; its defaults are tuples, and one that was replaced is another."""
    code, keywords = function.__code__, function.__kwdefaults__
    return _FunctionIdentity((code, function.__defaults__, keywords and tuple(keywords.items()), function.__closure__))


class _FunctionIdentity(tuple):  # type: ignore[type-arg]
    """Compared by identity of code and cells."""

    def __eq__(self, other: Any) -> bool:
        return (
            self[0] is other[0] and _same(self[1], other[1]) and _same(self[2], other[2]) and _same(self[3], other[3])
        )

    __hash__ = None  # type: ignore[assignment]


def _same_names(kind: type, before: dict[str, Any]) -> bool:
    now = vars(kind)
    same = [*now] == [*before] and all(map(operator.is_, now.values(), before.values()))
    return same or (len(now) == len(before) and all(now.get(x, MISSING) is value for x, value in before.items()))


def _version(tensor: Tensor) -> int:
    try:
        return tensor._version
    except RuntimeError:
        return -1


class Settings:
    """All that was read.  `still_holds()` says whether another call would read the same."""

    def __init__(self) -> None:
        self.all: list[Setting] = []
        self.tensors: dict[int, tuple[Tensor, str]] = {}  # that were met on the way, by id, and their words
        self.facts: list[Any] = []  # Facts, and others like them that who reads adds
        self._names: dict[tuple[int, Any], Setting] = {}
        self._things: dict[int, Any] = {}  # containers, types, functions, cells that are kept
        self.met: dict[int, Any] = {}  # objects whose attributes may be read
        self._kinds: dict[int, type] = {}  # of which all classes are kept
        self._n = 0
        self._checks: Optional[Checks] = None
        self._plain_kinds: set[type] = set()  # whose objects are met as `_meet_object` says
        self._stored: set[int] = set()  # the modules' names whose places of parameters and others are kept

    def still_holds(self) -> bool:
        """Whether another call would read the same: quickly, where all is the same object."""
        checks = self._checks
        if checks is None or checks.sizes != (len(self.all), len(self.facts)):
            checks = self._checks = Checks(self.all, self.facts, checks)  # at once: another thread may be here, too
        return checks.hold()

    def keep_facts(self, facts: list[Any]) -> None:
        """Of all facts only these: another asks the others."""
        self.facts, self._checks = facts, None

    def broken(self) -> Optional[Setting]:
        """The first that does not hold."""
        return None if self.still_holds() else next((x for x in self.all if not x.still_holds()), None)

    # --- Keeping --------------------------------------------------------------------------------------------

    def name(self, names: dict[str, Any], name: Any, words: str = "") -> Any:
        """The value of a name in a dict, which is kept; MISSING where there is none."""
        key = id(names), name
        known = self._names.get(key)
        if known is not None:
            return names.get(name, MISSING)
        value = names.get(name, MISSING)
        self._names[key] = setting = Setting(names, name, value)
        self.all.append(setting)
        self.meet(value, words or str(name))
        return value

    def _keep_object(self, names: dict[str, Any], name: str) -> None:
        """That a name is of the same object, whatever that holds."""
        if (id(names), name) not in self._names:
            self._names[id(names), name] = setting = Setting(names, name, names.get(name, MISSING))
            self.all.append(setting)

    def places(self) -> set[tuple[int, Any]]:
        """Where all that was read stands: the ids of owners, and names."""
        return {
            (id(getattr(each.owner, "of", each.owner) if type(each.owner) in LIKE_DICTS else each.owner), each.name)
            for each in self.all
        }

    def dicts(self) -> set[int]:
        """The ids of all dicts of which a name is kept."""
        return {owner for owner, _ in self._names}

    def has_name(self, names: dict[str, Any], name: Any) -> bool:
        return (id(names), name) in self._names

    def forget(self, names: dict[str, Any], name: Any) -> None:
        """The call itself sets it before it is read."""
        setting = self._names.pop((id(names), name), None)
        if setting is not None:
            self.all = [x for x in self.all if x is not setting]

    def _keep(self, thing: Any, value: Any) -> bool:
        """Whether it is new."""
        if id(thing) in self._things:
            return False
        self._things[id(thing)] = thing
        self._n += 1 + (len(value) if isinstance(value, (tuple, dict)) else 0)
        if self._n > _MOST:
            raise CannotKeep("more was read than can be kept")
        self.all.append(Setting(thing, None, value))
        return True

    def kind(self, kind: type) -> None:
        """A class, with all names of its own classes and the reader's among its bases."""
        for one in kind.__mro__ if id(kind) not in self._kinds else ():
            if one.__flags__ & (1 << 9) and id(one) not in self._things:  # a heap type: names can be set
                self._keep(one, dict(vars(one)))
        if id(kind) not in self._kinds and kind.__module__.split(".")[0] not in _KNOWN:
            self.facts.append(Fact(kind, "__mro__", kind.__mro__))  # other bases
        self._kinds[id(kind)] = kind

    def function(self, function: FunctionType) -> None:
        parts = function_parts(function)
        if self._keep(function, parts):
            self.met[id(function)] = function  # it may have attributes
            for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
                self.meet(value, function.__name__)
            for cell in function.__closure__ or ():
                self.cell(cell, function.__name__)

    def cell(self, cell: CellType, words: str = "") -> None:
        value = _content(cell)
        if self._keep(cell, value):
            self.meet(value, words)

    def tensor(self, tensor: Tensor, words: str = "") -> None:
        """A table whose numbers the graph stands on."""
        self.tensors.setdefault(id(tensor), (tensor, words))

    def numbers(self, tensor: Tensor) -> None:
        """From now on its numbers count, as `.data` and NumPy change them without a new version; where there are too
        many, its version, too."""
        if id(tensor) in self._things:
            return
        numbers: Any = Numbers(tensor)
        value = numbers.get("", None)
        if len(value) == 1:
            self._things[id(tensor)] = tensor
        else:
            self._keep(tensor, _version(tensor))
        self.all.append(Setting(numbers, "", value))
        self._things[id(numbers)] = numbers

    def default_type(self) -> None:
        """The type of numbers that torch makes where none is named."""
        self._things[id(DEFAULT_TYPE)] = DEFAULT_TYPE
        self.all.append(Setting(DEFAULT_TYPE, "", DEFAULT_TYPE.get()))

    def meet(self, value: Any, words: str = "") -> None:
        """Keep what hangs on a value that was read: the items of containers, at any depth."""
        kind = type(value)
        if kind in _VALUES or value is MISSING or id(value) in self.met:
            return
        if kind in self._plain_kinds:
            self._meet_object(value, None)
            self._meet_parts(value, words)
        elif isinstance(value, Tensor):
            self.tensor(value, words)
        elif isinstance(value, dict):
            if self._keep(value, tuple(value.items())):
                self._meet_object(value, dict)
                for x in list(value.values()):
                    self.meet(x, words)
        elif isinstance(value, (list, tuple, set, frozenset, deque)):
            if self._keep(value, tuple(value)):
                self._meet_object(value, None)
                for x in list(value):
                    self.meet(x, words)
        elif hasattr(kind, "__next__"):
            raise CannotKeep(f"{words} goes on where an earlier call stopped")
        elif isinstance(value, FunctionType):
            self.function(value)
        elif isinstance(value, BuiltinFunctionType) and not isinstance(value.__self__, (type, ModuleType, type(None))):
            self.meet(value.__self__, words)
        elif isinstance(value, MethodType):
            self.meet(value.__func__, words)
            self.meet(value.__self__, words)
        elif isinstance(value, functools.partial):
            for x in (value.func, value.args, value.keywords):
                self.meet(x, words)
        elif isinstance(value, CellType):
            self.cell(value, words)
        elif isinstance(value, np.ndarray):
            if value.nbytes > 1 << 16 or value.dtype.hasobject:
                raise CannotKeep(f"{words} is an array of NumPy")
            self._keep(value, value.tobytes())
        elif isinstance(value, type):
            if value.__module__.split(".")[0] not in _KNOWN:
                self.kind(value)
        elif isinstance(value, type(os.environ)):
            self.meet(value._data, words)  # type: ignore[attr-defined]
        elif not isinstance(value, (ModuleType, BuiltinFunctionType, np.generic, CodeType)):
            if not stays(kind):
                raise CannotKeep(f"{words} is {kind.__module__}.{kind.__name__}, whose state is not seen")
            self._plain_kinds.add(kind)
            self._meet_object(value, None)
            self._meet_parts(value, words)

    def _meet_object(self, value: Any, _: Any) -> None:
        if getattr(value, "__dict__", None) is not None or hasattr(type(value), "__slots__"):
            self.met[id(value)] = value

    def _meet_parts(self, value: Any, words: str) -> None:
        """The children of torch's own containers, which its lines walk."""
        if isinstance(value, _CONTAINERS):
            self.kind(type(value))
            for store in ("_modules", "_parameters"):
                self.meet(value.__dict__[store], words)

    # --- Reading --------------------------------------------------------------------------------------------

    def attribute(self, owner: Any, name: str, only_present: bool = False) -> Any:
        """The value of an attribute, found without running anything; UNSEEN where only running tells; MISSING.

        only_present   keep nothing where the object has no such attribute
        """
        if isinstance(owner, Tensor):
            self.kind(type(owner))
            if name in (getattr(owner, "__dict__", None) or ()):
                raise CannotKeep(f"{name} of a tensor is read, which is none of torch's")
            return UNSEEN
        if isinstance(owner, ModuleType):
            found = self.name(owner.__dict__, name) if name in owner.__dict__ or not only_present else MISSING
            return UNSEEN if found is MISSING and "__getattr__" in owner.__dict__ else found
        if isinstance(owner, type):
            return self._of_type(owner, name, only_present)
        if type(owner) is MethodType and _in_classes(MethodType, name) is MISSING:
            owner = owner.__func__
        return self._of_object(owner, name, only_present)

    def _of_type(self, owner: type, name: str, only_present: bool) -> Any:
        found, above = _in_classes(owner, name), type(owner)
        if found is MISSING:
            found = _in_classes(above, name)
        if found is MISSING and only_present:
            return MISSING
        self.kind(owner)
        if above is not type:
            self.kind(above)
            if isinstance(found, property):
                return self._descriptor(owner, found, name)
        if isinstance(found, (staticmethod, classmethod)):
            self.meet(found.__func__, name)
            return found.__func__ if isinstance(found, staticmethod) else UNSEEN
        if isinstance(found, FunctionType):
            self.function(found)
            return found
        if found is MISSING or hasattr(type(found), "__get__"):
            return UNSEEN
        self.meet(found, name)
        return found

    def _of_object(self, owner: Any, name: str, only_present: bool) -> Any:
        kind = type(owner)
        in_class = _in_classes(kind, name)
        own: Optional[dict[str, Any]] = getattr(owner, "__dict__", None) if kind.__dictoffset__ else None
        stores: tuple[Any, ...] = ()
        if in_class is MISSING and own is not None and isinstance(owner, nn.Module):  # what Module.__getattr__ asks
            stores = tuple(own[x] for x in ("_parameters", "_buffers", "_modules") if x in own)
        if only_present and in_class is MISSING and not any(name in x for x in (own or {}, *stores)):
            return MISSING
        self.kind(kind)
        if in_class is not MISSING and hasattr(type(in_class), "__set__"):
            return self._descriptor(owner, in_class, name)
        if own is not None and (self.name(own, name) is not MISSING):
            return own[name]
        if own is not None and stores and id(own) not in self._stored:
            self._stored.add(id(own))
            for place in ("_parameters", "_buffers", "_modules"):
                self._keep_object(own, place)
        for store in stores:
            if self.name(store, name) is not MISSING:
                return store[name]
        return self._from_class(owner, in_class, name)

    def _descriptor(self, owner: Any, found: Any, name: str) -> Any:
        if isinstance(found, property):
            for function in (found.fget, found.fset):
                self.meet(function, name)
        elif type(found).__name__ == "member_descriptor":  # a slot
            value = found.__get__(owner)
            self.meet(value, name)
            if self._keep_slot(owner, found, value):
                return value
        return UNSEEN

    def _keep_slot(self, owner: Any, slot: Any, value: Any) -> bool:
        names: Any = Slots(owner, type(owner))
        key = id(owner), slot.__name__
        if key not in self._names:
            self._names[key] = setting = Setting(names, slot.__name__, value)
            self.all.append(setting)
        return True

    def _from_class(self, owner: Any, found: Any, name: str) -> Any:
        if found is MISSING:
            own_getattr = _in_classes(type(owner), "__getattr__")
            return MISSING if own_getattr is MISSING or own_getattr is nn.Module.__getattr__ else UNSEEN
        if isinstance(found, FunctionType):
            self.function(found)
            return MethodType(found, owner)
        if isinstance(found, (staticmethod, classmethod)):
            self.meet(found.__func__, name)
            return found.__func__ if isinstance(found, staticmethod) else UNSEEN
        if hasattr(type(found), "__get__"):
            wrapped = getattr(found, "func", None) or getattr(found, "__wrapped__", None)
            self.meet(wrapped, name)
            return UNSEEN
        self.meet(found, name)
        return found

    def whole(self, owner: Any, but: frozenset[str]) -> None:
        """All attributes of an object, where the name that was read is not known; but not those that the call sets."""
        self.kind(type(owner))
        own = getattr(owner, "__dict__", None)
        if own is None:
            raise CannotKeep(f"an attribute of {type(owner).__name__} is looked up by a name that is made on the way")
        names: Any = DictKeys(own, but)
        self.all.append(Setting(names, "", names.get("", None)))
        self._things[id(names)] = names
        for name in list(own):
            if name not in but:
                self.name(own, name)
        if isinstance(owner, nn.Module):
            self.parts(owner)

    def parts(self, *modules: nn.Module) -> None:
        for module in modules:
            for store in ("_parameters", "_buffers", "_modules"):
                self.meet(module.__dict__[store], store)


_KNOWN = ("torch", "builtins", "numpy", "collections", "typing", "enum", "abc")
UNSEEN: Any = type("Unseen", (), {"__repr__": lambda self: "UNSEEN"})()
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.ParameterList, nn.ParameterDict)


def _in_classes(kind: type, name: str) -> Any:
    for one in kind.__mro__:
        found = one.__dict__.get(name, MISSING)
        if found is not MISSING:
            return found
    return MISSING
