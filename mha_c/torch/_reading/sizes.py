"""Sizes that know where they come from: ints and floats of a call, as formulas of the axes of its inputs."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, Callable, NamedTuple


class Axis(NamedTuple):
    """An axis of an input of the call: its name among the inputs, as in `Graph.inputs`, and the axis from the front."""

    name: str
    axis: int


class Formula(NamedTuple):
    """A function of other formulas, such as Formula("//", (Axis("x", 2), 4)).  A leaf is an Axis or a number."""

    name: str
    parts: tuple[Any, ...]


# The functions that a formula may have.  "min" and "max" come of broadcasting; the others are Python's.
FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "//": operator.floordiv,
    "%": operator.mod, "**": operator.pow, "neg": operator.neg, "abs": abs, "max": max, "min": min,
    "<": operator.lt, "<=": operator.le, "==": operator.eq, "!=": operator.ne, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip


def evaluated(formula: Any, sizes: Mapping[Axis, int]) -> Any:
    """The number of a formula where the axes of the inputs have these sizes.  KeyError: an axis is not among them."""
    if isinstance(formula, Axis):
        return sizes[formula]
    if isinstance(formula, Formula):
        return FUNCTIONS[formula.name](*[evaluated(part, sizes) for part in formula.parts])
    return formula


def formula_of(number: Any) -> Any:
    """Of a Size its formula; any other number is its own."""
    return getattr(number, "formula", number)
