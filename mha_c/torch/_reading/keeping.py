"""What is kept of things that have no names of their own: the numbers of a table, the names of an object, its slots;
whose objects can be kept at all; and what of a setting is checked in C."""

from __future__ import annotations

import datetime
import decimal
import functools
import operator
import re
import types
from types import FunctionType, GenericAlias, SimpleNamespace
from typing import Any, Optional

import numpy as np
import torch
from torch import Tensor

from .._private import has_own_memory


class DictKeys:
    """The names of a dict as the one value of another."""

    def __init__(self, names: dict[str, Any], but: frozenset[str]) -> None:
        self.of, self.but = names, but

    def get(self, name: str, default: Any) -> Any:
        return tuple(sorted(map(str, {*self.of} - self.but)))


class DefaultType:
    """The type of numbers that torch makes where none is named."""

    def get(self, name: str = "", default: Any = None) -> Any:
        return torch.get_default_dtype()


DEFAULT_TYPE: Any = DefaultType()


class Numbers:
    """The numbers of a table as the one value of a dict: all, or of a large one the first and some others, as a look at
    each would take longer than a small call."""

    def __init__(self, tensor: Tensor) -> None:
        self.of = tensor
        self.then: Any = (-1, ())

    def get(self, name: str, default: Any) -> Any:
        at, parts = self.then
        if self.of.data_ptr() != at:  # `.data` is another, or this is the first time
            parts = _parts_of(self.of)
            self.then = self.of.data_ptr(), parts
        return tuple([part.tobytes() for part in parts])

    def checks(self, value: Any) -> Optional[list[Any]]:
        """The same as what `first_changed` checks, (tensor, step, bytes, ...); None where it cannot."""
        of, parts = self.of, self.then[1]
        if not of.is_contiguous() or not parts:
            return None
        found = [of, "shape", of.shape]
        for part, numbers in zip(parts, value):
            found += [of, part.strides[0] // part.itemsize if len(parts) > 1 else 1, numbers]
        return found


def _parts_of(tensor: Tensor) -> Any:
    """Arrays over the memory of a tensor."""
    if tensor.device.type != "cpu":
        return ()
    bits = tensor.detach()
    whole = (bits.view(torch.int16) if bits.dtype is torch.bfloat16 else bits).numpy()
    if whole.nbytes <= _ALL_OF or not has_own_memory(tensor):  # NumPy changes its numbers without a new version
        return (whole,)
    flat = whole.reshape(-1) if whole.flags.c_contiguous else whole[..., 0].reshape(-1)
    return flat[:_FIRST], flat[:: flat.size // _SOME + 1]


_ALL_OF = 1 << 12  # bytes
_FIRST, _SOME = 512, 64  # numbers


class Slots:
    """The slots of an object as a dict."""

    def __init__(self, owner: Any, kind: type) -> None:
        self.of = owner

    def get(self, name: str, default: Any) -> Any:
        return getattr(self.of, name, default)


LIKE_DICTS = frozenset((DictKeys, Numbers, Slots))


def _is_of_python(kind: type) -> bool:
    """Whether a class statement made it: what its objects hold stands in their attributes."""
    return bool(kind.__flags__ & (1 << 9)) and not kind.__flags__ & (1 << 8)  # of the heap, and can be changed


# Classes of C whose objects never change, or hold what they hold as attributes.
STAY = frozenset((
    object, int, float, complex, str, bytes, tuple, range, slice, type(Ellipsis), type(NotImplemented), SimpleNamespace,
    type(object.__init__), type(str.join), type(dict.__dict__["fromkeys"]), type("".join), property, staticmethod,
    classmethod, type(type.__dict__["__mro__"]), type(FunctionType.__code__), GenericAlias, re.Pattern,
    operator.itemgetter, decimal.Decimal, datetime.date, datetime.timedelta,
    datetime.datetime, np.dtype, np.ufunc, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.finfo,
    torch.iinfo, BaseException, Exception, type(np.mean), type(functools.lru_cache(len)),
    getattr(types, "UnionType", object),
))  # fmt: skip


def stays(kind: type) -> bool:
    """Whether all that its objects hold stands in their attributes."""
    return all(one in STAY or _is_of_python(one) for one in kind.__mro__)
