"""A line of the student's own, changed in one place until all numbers are right: then it is known what it should be.

Each change is tried: the function runs with the changed line, and is compared with the book's on all probes.
"""

from __future__ import annotations

import ast
import inspect
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from difflib import SequenceMatcher
from functools import lru_cache
from time import process_time
from types import CodeType, FunctionType
from typing import Any, NamedTuple, Optional

import numpy as np

from ..asking.comparing import equal, output
from ..asking.mistakes import BookForm, function
from ..asking.rounds import Run
from .edits import Edit, Scope, edits, is_of_number
from .noting import Place, forget_results, functions_noted, room_of, traced, written_by_them

_MOST = 400  # changes that are tried for one answer: none of some 300 that were found was beyond the 340th
_MORE = 150  # and after the first that makes all right, for one that costs less
_PATIENCE = 1.5  # seconds of the processor that they may take, where a call is slow
_LINES = 20_000  # that run before a changed loop counts as endless: calls with probes run some hundred
_FAR, _LARGE = 5, 6  # lines and characters; what is farther, or larger, is tried as this is


_AS_IT_IS = ("mask_after_softmax", "no_rescale")  # another change of one line would only hide it
_IN_ORDER = re.compile(rb"\s*(\w*q\w*\s*,\s*)?\w*k\w*\s*,\s*\w*v\w*\s*=[^=]", re.IGNORECASE)  # their targets
_SAYS_NOTHING = re.compile(r"(?:transpose|swapaxes)\((-?\d), ?\1\)")  # a change that only hides the call
# What undoes itself, or adds nothing.
_UNDONE = re.compile(r"\.T\.T\b|(\.(?:transpose|swapaxes)\(-?\d, ?-?\d\))\1| [-+] 0(?= *(?:[\])},:;]|$))")
_MAXIMUM = re.compile(rb"(?<!soft)max(imum)?\(")
_LESS_MAXIMUM = re.compile(r"exp\([^()]* - ")
_PRODUCT = re.compile(rb"@|matmul|bmm|einsum|dot\(")
_OF_ROWS = re.compile(rb"\b\w*q\w*\s*[@,]\s*\w*k\w*\.", re.IGNORECASE)  # a row of scores is of a query


class Mended(NamedTuple):
    """A line, and the same as it should be."""

    place: Place
    text: str


class _Candidate(NamedTuple):
    """A change of a line; of those that make all right, the one with the least cost is told."""

    cost: tuple[int, ...]
    of: _Function
    number: int
    text: str  # the line as it has it


def mended(run: Run, form: BookForm, places: Sequence[Place], id: str = "", share: float = 1.0) -> Optional[Mended]:
    """The smallest change of one line that makes all numbers right: as a mistake of this id is mended, or any.

    The lines of `places` are tried first; then all others of the functions that ran.  Numbers and texts that are
    written out are changed before names, whose values come from elsewhere.  `share`: of what may be tried.
    """
    end = process_time() + share * _PATIENCE
    lines = _lines_that_ran(run)
    ending = _loops_end if any(each.may_loop for each in _functions_of(run)) else nullcontext
    right = [output(function(form), inputs) for inputs in run.probes]
    tried: set[Any] = set()
    for of in dict.fromkeys((id, id if id in _AS_IT_IS else "")):
        found: Optional[_Candidate] = None
        most = share * _MOST
        for change in _ordered(lines, places, of):
            if len(tried) >= most or process_time() > end:
                break
            if change[1:] in tried or (found is not None and change.cost >= found.cost):
                continue
            tried.add(change[1:])
            with ending():
                is_right = _is_right_with(run, right, change)
            if is_right:
                found, most = change, min(most, len(tried) + _MORE)
        if found is not None:
            line = found.of.line(found.number).strip()
            place = Place(found.of.file, found.number, line, found.of.made.__name__)
            return Mended(place, found.text.strip())
    return None


def _ordered(lines: Sequence[tuple[_Function, int]], places: Sequence[Place], id: str) -> list[_Candidate]:
    """All changes, the smallest and nearest first."""
    made: list[tuple[int, _Candidate]] = []
    for theirs, number in lines:
        near = (
            abs(number - each.number) for each in places if each.file == theirs.file and each.number in theirs.lines
        )
        distance = min(_FAR, *near, _FAR)
        made += [(distance + late, change) for late, change in theirs.changes(number, id)]
    return [change for _, change in sorted(made, key=lambda each: (each[0], each[1].cost))]


def _changes(theirs: _Function, number: int, id: str) -> Iterator[tuple[int, _Candidate]]:
    """The changes of a line, each with how late it is tried."""
    raw = theirs.line(number).encode()
    if id.startswith("no_rescale") and re.search(rb"max|exp\(", raw):  # with no maximum at all none is to be rescaled
        return
    for edit in theirs.edits(number, id):
        # Of two as small: what is done to a name, not to a call, whose own line would do it.
        size, is_of_call = _size(edit, raw) + _is_new_sign(edit, raw), b"(" in raw[edit.start : edit.end]
        # What is missing at the end is missing in the call itself, not in a helper.
        helps = id.startswith("no_output") and theirs.made.__name__ not in ("forward", "__call__", "call")
        elsewhere = id.startswith("no_scale") and _PRODUCT.search(raw) is None
        cost = (elsewhere, _misnames(edit, raw), not is_of_number(edit, raw), size, is_of_call, helps, number)
        last = 2 * (_FAR + _LARGE) * ((edit.is_of_name and not id) + (cost[1] > 0))
        text = _UNDONE.sub("", (raw[: edit.start] + edit.text.encode() + raw[edit.end :]).decode())
        if _SAYS_NOTHING.search(text) or text == raw.decode() or _is_of_maximum(edit, raw, text, id):
            continue
        likely = 2 * is_of_number(edit, raw) + 2 * ("->" in edit.text)  # an axis, a sign; more so, letters of einsum
        likely += _LARGE * (id.startswith("no_softmax") and ".sum(-1" in edit.text)
        yield min(size, _LARGE) + last - likely, _Candidate(cost, theirs, number, text)


def _is_of_maximum(edit: Edit, line: bytes, text: str, id: str) -> bool:
    """Whether it changes the maximum that is subtracted before exp: any makes the same softmax, and none as well."""
    if not id and _LESS_MAXIMUM.search(line.decode()) and not _LESS_MAXIMUM.search(text):
        return True
    return _MAXIMUM.search(line) is not None and (edit.is_of_name or (not id and b"exp(" not in line))


def _size(edit: Edit, line: bytes) -> int:
    """How many characters it changes."""
    old, new = line[edit.start : edit.end].decode(), edit.text
    start = _begin_alike(old, new)
    old, new = old[start:], new[start:]
    end = _begin_alike(old[::-1], new[::-1])
    old, new = old[: len(old) - end], new[: len(new) - end]
    if not (old and new):  # SequenceMatcher takes as long as a call of the function does
        return len(old) + len(new)
    same = SequenceMatcher(None, old, new, autojunk=False)
    return len(old) + len(new) - 2 * sum(each.size for each in same.get_matching_blocks())


def _begin_alike(one: str, two: str) -> int:
    """The number of characters that both begin with."""
    return next((i for i, (a, b) in enumerate(zip(one, two)) if a != b), min(len(one), len(two)))


def _misnames(edit: Edit, line: bytes) -> int:
    """1: it gives queries, keys and values each other's names: what exchanges them stands elsewhere; -1: it gives them
    their own."""
    new = line[: edit.start] + edit.text.encode() + line[edit.end :]
    old_named, named = bool(_IN_ORDER.match(line)), bool(_IN_ORDER.match(new))
    if old_named == named:
        old_named, named = bool(_OF_ROWS.search(line)), bool(_OF_ROWS.search(new))
    return old_named - named


def _is_new_sign(edit: Edit, line: bytes) -> int:
    """What a minus costs more in a line that has none: a wrong sign is likelier in one that has."""
    return 2 * ("-" in edit.text and b"-" not in line)


def _is_right_with(run: Run, right: Sequence[Any], change: _Candidate) -> bool:
    """Whether all outcomes are right with it."""
    code = change.of.compiled(change.number, change.text)
    if code is None:
        return False
    layers, entry = run.student.layers if change.of.made.__name__ == "__init__" else None, run.student.entry
    order = sorted(_that_count(run), key=lambda i: equal(run.outcomes[i], run.right[i]))
    met = []
    try:
        with _instead(change.of.made, code):
            for i in order:
                forget_results(run.student.mine)
                met.append(run.probes[i])
                if layers is not None:
                    layers.remake(run.probes[i])
                if not equal(run.student(run.probes[i], run.way, run.asked), right[i]):
                    return False
    except Exception:  # what its class makes then may be no layer
        return False
    finally:
        forget_results(run.student.mine)
        run.student.entry = entry
        for inputs in met:
            if layers is not None:
                layers.remake(inputs)
    return True


def _that_count(run: Run) -> list[int]:
    """The probes that a changed line must make right: lengths for each query that it never takes say nothing of it."""
    lens: list[Any] = [each.get("valid_lens") for each in run.probes]
    takes = [i for i, x in enumerate(lens) if run.outcomes[i].error is None or np.ndim(x) < 2]
    return takes if any(not equal(run.outcomes[i], run.right[i]) for i in takes) else [*range(len(run.probes))]


@contextmanager
def _instead(theirs: FunctionType, code: CodeType) -> Iterator[None]:
    own = theirs.__code__
    theirs.__code__ = code
    try:
        yield
    finally:
        theirs.__code__ = own


def _loops_end() -> AbstractContextManager[None]:
    """While it is entered, a loop without end, which a changed line may make of `while`, ends with an error."""
    left = _LINES

    def count(frame: Any, event: str, _: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise TimeoutError
        return count

    def enter(frame: Any, event: str, _: Any) -> Any:
        return count if written_by_them(frame.f_code.co_filename) else None

    return traced(enter)


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
        of_file = [x for x in made.__globals__ if x in ("np", "torch") or callable(made.__globals__[x])]
        self._names = Scope([x for x in _variables(made.__code__) if x != "self"], attributes, of_file)
        tree = ast.parse("".join(self._text))
        self.may_loop = any(isinstance(x, ast.While) for x in ast.walk(tree))
        nodes: list[Any] = [x for x in ast.walk(tree) if isinstance(x, (ast.expr, ast.stmt, ast.slice))]
        self._nodes = [x for x in nodes if getattr(x, "lineno", 0) == getattr(x, "end_lineno", -1)]
        self._changes: dict[tuple[int, str], list[tuple[int, _Candidate]]] = {}

    def line(self, number: int) -> str:
        return self._text[number - self._first].rstrip("\n")

    def edits(self, number: int, of: str = "") -> Iterator[Edit]:
        """Changes of one place of a line."""
        return edits([x for x in self._nodes if x.lineno == number - self._first + 1], self._names, of)

    def changes(self, number: int, id: str) -> list[tuple[int, _Candidate]]:
        """The changes of a line, each with how late it is tried."""
        if (number, id) not in self._changes:
            self._changes[number, id] = list(_changes(self, number, id))
        return self._changes[number, id]

    def compiled(self, number: int, text: str) -> Optional[CodeType]:
        """The function's code with another text of a line; None where it is no Python."""
        at = number - self._first
        return _compiled([*self._text[:at], text + "\n", *self._text[at + 1 :]], self.made)


def _variables(code: CodeType) -> list[str]:
    """Those of a function, and of what stands in it."""
    inner = (x for x in code.co_consts if isinstance(x, CodeType))
    return list(
        dict.fromkeys([*code.co_varnames, *code.co_cellvars, *(name for each in inner for name in _variables(each))])
    )


@lru_cache(maxsize=16)  # those of an answer, which may be tried for several ways to read weights
def _function(made: FunctionType, attributes: tuple[str, ...]) -> _Function:
    return _Function(made, attributes)


def _attributes(layer: Any) -> tuple[str, ...]:
    """The names under which it keeps layers, numbers and matrices."""
    kept = {**getattr(layer, "__dict__", {}), **getattr(layer, "_modules", {})}
    return tuple(name for name, x in kept.items() if name[:1] != "_" and (callable(x) or type(x) in (int, float)
                 or getattr(x, "ndim", 0) == 2))  # fmt: skip


def _functions_of(run: Run) -> list[_Function]:
    """The functions of a student's, the innermost first."""
    layer: Any = run.student.layers.first if run.student.layers is not None else None
    inner = [*layer.modules()] if hasattr(layer, "modules") else [layer]
    attributes = {type(each).__name__: _attributes(each) for each in reversed(inner)}
    found: dict[CodeType, _Function] = {}
    for each in _functions(run.student.mine):
        if each.__code__ in found or not written_by_them(each.__code__.co_filename):
            continue
        if each.__name__ != "__init__" or run.student.is_class:
            try:
                of_class = each.__qualname__.rpartition(".")[0].rpartition(".")[2]
                found[each.__code__] = _function(each, attributes.get(of_class, attributes[type(layer).__name__]))
            except (OSError, TypeError, SyntaxError):
                continue
    return sorted(found.values(), key=lambda one: -one.lines.start)


def _lines_that_ran(run: Run) -> list[tuple[_Function, int]]:
    """The lines of the functions that ran for a probe that differs."""
    inputs = next(x for x, got, right in zip(run.probes, run.outcomes, run.right) if not equal(got, right))
    forget_results(run.student.mine)
    with functions_noted() as ran:
        if run.student.layers is not None:
            run.student.layers.remake(inputs)
        run.student(inputs, run.way, run.asked)
    theirs = [each for each in _functions_of(run) if each.made.__code__ in ran]
    return [(each, number) for each in theirs for number in each.lines]


def _functions(mine: Any) -> Iterator[FunctionType]:
    """The functions of a student's module, and the methods of its classes."""
    call = mine if isinstance(mine, (type, FunctionType)) else getattr(mine, "__func__", type(mine))
    if isinstance(call, FunctionType):
        yield call
    for held in [call, *room_of(mine).values()]:
        held = getattr(held, "__wrapped__", held)
        if isinstance(held, FunctionType):
            yield held
        elif isinstance(held, type):
            yield from (x for x in vars(held).values() if isinstance(x, FunctionType))


def _compiled(source: list[str], theirs: FunctionType) -> Optional[CodeType]:
    """The code of a changed text, which can take the place of the function's own."""
    free = theirs.__code__.co_freevars
    if source[0] == "if 1:\n":  # what stands in something else may read its variables
        indent = source[1][: len(source[1]) - len(source[1].lstrip())]
        source = ["def _around():\n", *(f"{indent}{name} = None\n" for name in free), *source[1:]]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            waiting = [compile("".join(source), theirs.__code__.co_filename, "exec")]
    except (SyntaxError, ValueError):
        return None
    while waiting:
        code = waiting.pop()
        if code.co_name == theirs.__name__ and code.co_freevars == free:
            return code
        waiting += [x for x in code.co_consts if isinstance(x, CodeType)]
    return None
