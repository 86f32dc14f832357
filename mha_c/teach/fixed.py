"""What a layer fixes in its code alone: a number of heads as a literal, a scale for one width."""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType
from typing import Any

from .student import Student

_MOST = 4  # of numbers in a code that are tried
_WITH_SCALE = "dot_product", "causal", "window", "grouped"


def others(student: Student) -> Iterator[Student]:
    """The same student, asked with each number of heads, or width, that its code or its attributes may mean."""
    if student.layers is None or student.heads > 1 or student.width:
        return
    if student.has_weights and student.kind != "additive" and student.has_one_head:
        for heads in _heads(student):
            again = Student(student.mine, student.kind, student.weights, student.chosen)
            again.heads = heads
            yield again
    elif student.kind in _WITH_SCALE and not student.is_class:
        for width in _widths(student.mine):
            again = Student(student.mine, student.kind, student.weights, student.chosen)
            again.width = width
            yield again


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


def _widths(layer: Any) -> list[int]:
    """The d of which a number that it keeps is sqrt(d), 1 / sqrt(d), or d itself."""
    kept = [x for x in getattr(layer, "__dict__", {}).values() if type(x) in (int, float) and x > 0]
    found = [x**power for x in kept for power in (-2.0, 2.0)] + [float(x) for x in kept if type(x) is int]
    whole = [round(x) for x in found if 1 < x < 1024 and abs(x - round(x)) < 1e-6 * x and round(x) % 2 == 0]
    return list(dict.fromkeys(whole))[:_MOST]
