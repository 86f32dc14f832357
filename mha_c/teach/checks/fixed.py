"""What code fixes alone: a number of heads as a literal; a scale for one width that a layer, or a file, keeps; a number
of steps that each call has, not the most of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from inspect import getclosurevars
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

from ..._arguments.arrays import is_tensor
from ..asking.configuration import constructor_parameters, names_of
from ..asking.student import Student
from ..why.noting import written_by_them

_MOST = 4  # of numbers in a code that are tried
_WITH_SCALE = "dot_product", "causal", "window", "grouped"


def others(student: Student, mistakes: Sequence[str]) -> Iterator[Student]:
    """The same student, asked with each number of heads, or width, that its code or its attributes may mean, and where
    it fails, with layers for as many steps as a call has."""
    if student.heads > 1 or student.width:
        return
    fails = {"raises", "shape"} & {*mistakes}
    if (
        fails
        and student.is_class
        and "max_len" in names_of(student.mine, constructor_parameters(student.mine)).values()
    ):
        again = _with(student)
        assert again.layers is not None
        again.layers.of_probes_steps = True
        yield again
    if student.layers is not None and student.has_weights and student.kind != "additive" and student.has_one_head:
        for heads in _heads(student):
            yield _with(student, heads=heads)
    elif student.kind in _WITH_SCALE:
        for width in _widths(student.mine):
            yield _with(student, width=width)


def _with(student: Student, heads: int = 1, width: int = 0) -> Student:
    again = Student(student.mine, student.kind, student.weights, student.chosen, student.mask)
    again.heads, again.width = heads, width
    return again


def _heads(student: Student) -> list[int]:
    """The numbers in its code, and of its attributes, that may count its heads."""
    layer = student.layers.first if student.layers else None
    if layer is None:
        return []
    assert student.layers
    wide = student.layers.weights(layer)[0].sizes(layer)["W_q"][1]
    numbers = [*_numbers(type(layer)), *vars(layer).values()]
    found = [x for x in numbers if type(x) is int and 1 < x < wide and wide % x == 0]
    return list(dict.fromkeys(found))[:_MOST]


def _numbers(made_by: type) -> Iterator[Any]:
    """Those that stand in a class's functions, and those of the file that they read."""
    for function in vars(made_by).values():
        code = getattr(function, "__code__", None)
        if isinstance(code, CodeType):
            room = function.__globals__
            for const in code.co_consts:
                yield from const if isinstance(const, tuple) else (const,)
            yield from (room[name] for name in code.co_names if type(room.get(name)) is int)


def _widths(mine: Any) -> list[int]:
    """The d of which a number that is kept is sqrt(d), 1 / sqrt(d), or d itself; a literal in a call is not kept."""
    kept = [x for x in dict.fromkeys(_kept(mine, 4, set())) if x > 0]
    found = [x**power for x in kept for power in (-2.0, 2.0)] + [x for x in kept if x == round(x)]
    whole = [round(x) for x in found if 1 < x < 1024 and abs(x - round(x)) < 1e-6 * x and round(x) % 2 == 0]
    return list(dict.fromkeys(whole))[:_MOST]


def _kept(x: Any, depth: int, seen: set[int]) -> Iterator[float]:
    """The numbers that something keeps, or reads from where it was made: attributes, buffers, closures, globals."""
    if type(x) in (int, float):
        yield float(x)
    elif isinstance(x, (np.ndarray, np.generic)) or is_tensor(x):
        if math.prod(x.shape) == 1 and "complex" not in str(x.dtype):
            yield float(x)
    elif depth and id(x) not in seen and not isinstance(x, (ModuleType, str)):
        seen.add(id(x))
        for each in _parts(x):
            yield from _kept(each, depth - 1, seen)


def _parts(x: Any) -> list[Any]:
    if isinstance(x, dict):
        return [*x.values()]
    if isinstance(x, (tuple, list)):
        return [*x]
    if isinstance(x, partial):
        return [x.func, *x.args, *x.keywords.values()]
    if isinstance(x, MethodType):
        return [x.__self__]
    if isinstance(x, FunctionType):
        if not written_by_them(x.__code__.co_filename):
            return []
        read = [x.__globals__[name] for name in x.__code__.co_names if name in x.__globals__]
        return [*getclosurevars(x).nonlocals.values(), *(x.__defaults__ or ()), *read]
    if isinstance(x, type):
        return [*vars(x).values()] if not str(x.__module__).startswith("torch.") else []
    return [*getattr(x, "__dict__", {}).values(), type(x)]
