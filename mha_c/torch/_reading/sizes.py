"""Sizes that know where they come from: ints and floats of a call, as formulas of the axes of its inputs.

A `Size` is an int that torch takes as any other.  What is computed of it is again a Size (or, where Python gives a
float,
a `Ratio`); a comparison gives Python's bool and is noted in the call's `Log`.  Where a number leaves as a plain one, by
float(), as a key of a dict, in a text, the axes that it hangs on are pinned: the reading is for their sizes alone.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Callable, NamedTuple


class Axis(NamedTuple):
    """An axis of an input of the call: its name among the inputs, as in `Graph.inputs`, and the axis from the front."""

    name: str
    axis: int


class Formula(NamedTuple):
    """A function of other formulas, such as Formula("//", (Axis("x", 2), 4)).  A leaf is an Axis or a number."""

    name: str
    parts: tuple[Any, ...]


# The functions that a formula may have, by Python's names.
FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "+": operator.add, "-": operator.sub, "*": lambda *numbers: math.prod(numbers), "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod, "**": operator.pow, "neg": operator.neg, "abs": abs,
    "<": operator.lt, "<=": operator.le, "==": operator.eq, "!=": operator.ne, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
UNKNOWN = Axis("", -1)  # what follows from sizes in a way that nobody has noted


def evaluated(formula: Any, sizes: Mapping[Axis, int]) -> Any:
    """The number of a formula where the axes of the inputs have these sizes.  KeyError: an axis is not among them."""
    if isinstance(formula, Axis):
        return sizes[formula]
    if isinstance(formula, Formula):
        return FUNCTIONS[formula.name](*[evaluated(part, sizes) for part in formula.parts])
    return formula


def axes_of(formula: Any) -> Iterator[Axis]:
    """The axes in a formula."""
    if isinstance(formula, Axis):
        yield formula
    elif isinstance(formula, Formula):
        for part in formula.parts:
            yield from axes_of(part)


def formula_of(number: Any) -> Any:
    """Of a Size or Ratio its formula; any other number is its own."""
    kind = type(number)
    return number.formula if kind is Size or kind is Ratio else number


def plain(number: Any) -> Any:
    """The number without its formula."""
    kind = type(number)
    if kind is Size:
        return int.__add__(number, 0)
    return float.__add__(number, 0.0) if kind is Ratio else number


class Log:
    """What sizes have decided in one call; once `closed`, its sizes are plain numbers.

    decided   [(formula, outcome)], each once
    pinned    {axis: None}: their numbers were used in a way that was not seen
    ratios    whether a Ratio was made
    floats    how often a Size was made a plain float
    tell      called with a formula at the first time that something decides or is pinned: it notes the line
    """

    def __init__(self, tell: Callable[[Any], None]) -> None:
        self.decided: dict[tuple[Any, bool], None] = {}
        self.pinned: dict[Axis, None] = {}
        self.ratios = self.closed = False
        self.floats = 0
        self.tell = tell

    def decide(self, formula: Any, outcome: bool) -> None:
        if self.closed or (formula, outcome) in self.decided:
            return
        if UNKNOWN in axes_of(formula):
            self.pin(formula)
        else:
            self.decided[formula, outcome] = None
            self.tell(formula)

    def pin(self, formula: Any) -> None:
        for axis in axes_of(formula):
            if axis not in self.pinned and not self.closed:
                self.pinned[axis] = None
                self.tell(axis)

    @contextmanager
    def reopened(self) -> Iterator[None]:
        """Sizes are formulas again, and what they decide is noted: while the graph is read."""
        self.closed, tell = False, self.tell
        self.tell = lambda formula: None  # no line of the reader's decides
        try:
            yield
        finally:
            self.closed, self.tell = True, tell

    def number(self, value: Any, formula: Any) -> Any:
        """The value as a Size or Ratio."""
        if self.closed or not isinstance(formula, (Axis, Formula)):
            return value
        if type(value) is int:
            found = int.__new__(Size, value)
            found.formula, found.log = formula, self
            return found
        if type(value) is float:
            self.ratios = True
            return Ratio(value, formula, self)
        self.pin(formula)  # a complex number, a fraction
        return value


_formula = functools.partial(tuple.__new__, Formula)  # the same as Formula(...), with no line of Python


def _binary(name: str, to_plain: Any, reflected: bool = False) -> Any:
    function = FUNCTIONS[name]

    def method(self: Any, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            self.log.pin(self.formula)
            return NotImplemented
        mine, given, formula = to_plain(self), other, other
        if type(other) in _SIZED:
            given, formula = plain(other), formula_of(other)
        if reflected:
            return self.log.number(function(given, mine), _formula((name, (formula, self.formula))))
        return self.log.number(function(mine, given), _formula((name, (self.formula, formula))))

    return method


def _compared(name: str, to_plain: Any) -> Any:
    function = FUNCTIONS[name]

    def method(self: Any, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        given, formula = (plain(other), formula_of(other)) if type(other) in _SIZED else (other, other)
        outcome = function(to_plain(self), given)
        if formula != self.formula:
            self.log.decide(_formula((name, (self.formula, formula))), outcome)
        return outcome

    return method


def _pinning(name: str, kind: type) -> Any:
    function = getattr(kind, name)

    def method(self: Any, *args: Any) -> Any:
        self.log.pin(self.formula)
        return function(plain(self), *args)

    return method


def _give_methods(kind: Any, base: type, to_plain: Any) -> None:
    names = {"+": "add", "-": "sub", "*": "mul", "/": "truediv", "//": "floordiv", "%": "mod", "**": "pow"}
    for sign, word in names.items():
        setattr(kind, f"__{word}__", _binary(sign, to_plain))
        setattr(kind, f"__r{word}__", _binary(sign, to_plain, reflected=True))
    for sign, word in {"<": "lt", "<=": "le", "==": "eq", "!=": "ne", ">": "gt", ">=": "ge"}.items():
        setattr(kind, f"__{word}__", _compared(sign, to_plain))
    words = "int float index hash str repr format trunc floor ceil round divmod rdivmod and rand or ror xor rxor "
    words += "lshift rshift rlshift rrshift invert"
    for word in words.split():
        if hasattr(base, f"__{word}__"):
            setattr(kind, f"__{word}__", _pinning(f"__{word}__", base))


class Size(int):
    """An int that knows its formula."""

    formula: Any
    log: Log

    def __new__(cls, value: int, formula: Any, log: Log) -> Any:
        self = int.__new__(cls, value)
        self.formula, self.log = formula, log
        return self

    def __bool__(self) -> bool:
        outcome = int.__bool__(self)
        self.log.decide(Formula("!=", (self.formula, 0)), outcome)
        return outcome

    def __neg__(self) -> Any:
        return self.log.number(-plain(self), Formula("neg", (self.formula,)))

    def __abs__(self) -> Any:
        return self.log.number(abs(plain(self)), Formula("abs", (self.formula,)))

    def __reduce__(self) -> Any:
        return int, (plain(self),)


class Ratio(float):
    """A float that knows its formula."""

    formula: Any
    log: Log

    def __new__(cls, value: float, formula: Any, log: Log) -> Any:
        self = float.__new__(cls, value)
        self.formula, self.log = formula, log
        return self

    def __bool__(self) -> bool:
        outcome = float.__bool__(self)
        self.log.decide(Formula("!=", (self.formula, 0)), outcome)
        return outcome

    __neg__ = Size.__neg__
    __abs__ = Size.__abs__

    def __reduce__(self) -> Any:
        return float, (plain(self),)


_SIZED = frozenset((Size, Ratio))
_give_methods(Size, int, int.__index__)
_give_methods(Ratio, float, float.__float__)


def _as_float(self: Size) -> float:
    self.log.floats += 1
    self.log.pin(self.formula)
    return float(plain(self))


Size.__float__ = _as_float  # type: ignore[method-assign, assignment]
