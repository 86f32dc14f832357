"""A line of the student's own, changed in one place until all numbers are right: then it is known what it should be.

Each change is tried: the function runs with the changed line, and is compared with the book's on all probes.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any, Optional

from .comparing import equal, output
from .edits import Edit, Names, edits, is_of_number
from .mistakes import function
from .noting import Place, functions_noted
from .rounds import Run

_MOST = 160  # changes of one line that are tried
_MOST_OF_ALL = 700  # changes of all lines


def mended(run: Run, form: str, place: Place) -> str:
    """The line as it should be; "" where no change of one place makes all numbers right."""
    theirs = next(filter(lambda each: place.number in each.lines, _functions_of(run, place.file)), None)
    if theirs is None:
        return ""
    tried = itertools.islice(theirs.edits(place.number), _MOST)
    return next(_right_ones(run, form, theirs, place.number, tried), "")


def mended_anywhere(run: Run, form: str, places: Sequence[Place], id: str = "") -> Optional[tuple[Place, str]]:
    """A line that makes all numbers right once it is changed as a mistake of this id is mended, and the same changed.

    Numbers and texts that are written out are changed before names, whose values come from elsewhere.  `places` are
    the likeliest lines; then all others of the functions that ran.
    """
    lines, left = _lines_that_ran(run, places), _MOST_OF_ALL
    for of_numbers, (theirs, number) in itertools.product((True, False), lines):
        raw = theirs.line(number).encode()
        tried = [edit for edit in theirs.edits(number, id) if is_of_number(edit, raw) is of_numbers][: max(left, 0)]
        left -= len(tried)
        for text in _right_ones(run, form, theirs, number, tried):
            return Place(theirs.file, number, theirs.line(number).strip(), theirs.made.__name__), text
    return None


def _right_ones(run: Run, form: str, theirs: _Function, number: int, tried: Iterable[Edit]) -> Iterator[str]:
    """The line as each of these changes has it, if it makes all numbers right."""
    for edit in tried:
        code, text = theirs.changed(number, edit)
        if code is not None and _is_right_with(run, form, theirs.made, code):
            yield text.strip()


def _is_right_with(run: Run, form: str, theirs: FunctionType, code: CodeType) -> bool:
    made = function(form)
    layers = run.student.layers if theirs.__name__ == "__init__" else None
    order = sorted(range(len(run.probes)), key=lambda i: equal(run.outcomes[i], run.right[i]))
    met = []
    try:
        with _instead(theirs, code):
            for i in order:
                met.append(run.probes[i])
                if layers is not None:
                    layers.remake(run.probes[i])
                if not equal(run.student(run.probes[i], run.way, run.asked), output(made, run.probes[i])):
                    return False
    finally:
        for inputs in met:
            if layers is not None:
                layers.remake(inputs)
    return True


@contextmanager
def _instead(theirs: FunctionType, code: CodeType) -> Iterator[None]:
    own = theirs.__code__
    theirs.__code__ = code
    try:
        yield
    finally:
        theirs.__code__ = own


# ---- the functions that lines stand in -------------------------------------------------------------------------------


class _Function:
    """A function of the student's, and its text."""

    def __init__(self, made: FunctionType, attributes: Sequence[str]) -> None:
        lines, first = inspect.getsourcelines(made)
        self.made, self.file = made, made.__code__.co_filename
        self.lines = range(first, first + len(lines))
        # A method's text stands in no class here.
        self._text = ["if 1:\n", *lines] if lines[0][:1].isspace() else lines
        self._first = first - (self._text is not lines)
        self._names = Names([x for x in made.__code__.co_varnames if x != "self"], attributes)
        tree = ast.parse("".join(self._text))
        nodes: list[Any] = [x for x in ast.walk(tree) if isinstance(x, (ast.expr, ast.stmt, ast.slice))]
        self._nodes = [x for x in nodes if getattr(x, "lineno", 0) == getattr(x, "end_lineno", -1)]

    def line(self, number: int) -> str:
        return self._text[number - self._first].rstrip("\n")

    def edits(self, number: int, of: str = "") -> Iterator[Edit]:
        """Changes of one place of a line."""
        return edits([x for x in self._nodes if x.lineno == number - self._first + 1], self._names, of)

    def changed(self, number: int, edit: Edit) -> tuple[Optional[CodeType], str]:
        """The function's code with a change, None where it is no Python, and the line."""
        raw = self.line(number).encode()
        text = (raw[: edit.start] + edit.text.encode() + raw[edit.end :]).decode()
        at = number - self._first
        return _compiled([*self._text[:at], text + "\n", *self._text[at + 1 :]], self.made), text


def _functions_of(run: Run, file: str = "") -> list[_Function]:
    """The functions of a student's, the innermost first; `file`: those of this file alone."""
    layer = run.student.layers.first if run.student.layers is not None else None
    kept = {**getattr(layer, "__dict__", {}), **getattr(layer, "_modules", {})}
    attributes = [name for name, x in kept.items() if name[:1] != "_" and (callable(x) or type(x) in (int, float))]
    found: dict[CodeType, _Function] = {}
    for each in _functions(run.student.mine):
        if file not in ("", each.__code__.co_filename) or each.__code__ in found:
            continue
        if each.__name__ != "__init__" or run.student.is_class:
            try:
                found[each.__code__] = _Function(each, attributes)
            except (OSError, TypeError, SyntaxError):
                continue
    return sorted(found.values(), key=lambda one: -one.lines.start)


def _lines_that_ran(run: Run, places: Sequence[Place]) -> list[tuple[_Function, int]]:
    """The lines of the functions that ran for a probe that differs, those of these places first."""
    inputs = next(x for x, got, right in zip(run.probes, run.outcomes, run.right) if not equal(got, right))
    with functions_noted() as ran:
        if run.student.layers is not None:
            run.student.layers.remake(inputs)
        run.student(inputs, run.way, run.asked)
    theirs = [each for each in _functions_of(run) if each.made.__code__ in ran]
    found = [(each, place.number) for place in places for each in theirs
             if each.file == place.file and place.number in each.lines]  # fmt: skip
    theirs.sort(key=lambda each: each.lines.start)
    return list(dict.fromkeys([*found, *((each, number) for each in theirs for number in each.lines)]))


def _functions(mine: Any) -> Iterator[FunctionType]:
    """The functions of a student's module, and the methods of its classes."""
    call = mine if isinstance(mine, (type, FunctionType)) else getattr(mine, "__func__", type(mine))
    if isinstance(call, FunctionType):
        yield call
    module = sys.modules.get(getattr(call, "__module__", ""))
    room = getattr(call, "__globals__", None) or vars(module or sys)
    for held in [call, *room.values()]:
        if isinstance(held, FunctionType):
            yield held
        elif isinstance(held, type):
            yield from (x for x in vars(held).values() if isinstance(x, FunctionType))


def _compiled(source: list[str], theirs: FunctionType) -> Optional[CodeType]:
    """The code of a changed text, which can take the place of the function's own."""
    free = theirs.__code__.co_freevars
    inner = source[1:] if source[0] == "if 1:\n" else source
    indent = len(inner[0]) - len(inner[0].lstrip())
    wrapped = ["def _around():\n", *(f"    {name} = None\n" for name in free)]
    wrapped += [f"    {line[indent:]}" for line in inner]
    try:
        waiting = [compile("".join(wrapped), theirs.__code__.co_filename, "exec")]
    except (SyntaxError, ValueError):
        return None
    while waiting:
        code = waiting.pop()
        if code.co_name == theirs.__name__ and code.co_freevars == free:
            return code
        waiting += [x for x in code.co_consts if isinstance(x, CodeType)]
    return None
