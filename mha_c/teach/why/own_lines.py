"""What is said of a student's own line: where a mistake is, or where numbers begin to differ, what it should be, and
the book's line.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import dedent
from typing import Any, NamedTuple, Optional

import numpy as np

from ..asking.answers import OwnLine
from ..asking.mistakes import BookForm, Mistake, sources
from ..asking.probes import Inputs
from ..asking.rounds import Run
from ..asking.written import tree_of
from ..words.sentences import said, say
from .mending import Mended, mended
from .noting import Operation, Place, Trace
from .searching import Search
from .traces import book_trace, changed, in_one_call, student_trace, telling

_READ = 4  # ways to read weights that are looked at, where nothing explains any
_PRODUCTS = ("matmul", "bmm", "einsum", "baddbmm")


class WrongLine(NamedTuple):
    """The student's line, the book's and, of `stage`, up to where the numbers are right."""

    place: Optional[Place]
    book: str = ""
    stage: str = ""


def own_lines(run: Run, form: BookForm, mistakes: Sequence[Mistake]) -> list[OwnLine]:
    """The student's lines that these mistakes are in; those that can be told."""
    try:
        call = _noted_call(run, form)
        found = found_for(call, form, mistakes)
    except Exception:  # what a student's objects do while they are noted may be anything
        return []
    lines = [_line(each) for each in found if each.place is not None and each.place.text]
    if len(found) == 1:
        first = first_difference(run, call if form == run.form else None).place
        places = list(dict.fromkeys(each for each in (found[0].place, first) if each is not None and each.text))
        one = _mended(run, form, places, mistakes[0].id)
        if one is not None:
            return [_line(found[0]._replace(place=one.place))._replace(should_be=one.text)]
        lines = _of_table(run, lines, mistakes[0].id)
    return [x for i, x in enumerate(lines) if all(x[:2] != other[:2] for other in lines[:i])]


def _of_table(run: Run, lines: list[OwnLine], id: str) -> list[OwnLine]:
    """In the place of a line that only reads a table of positions, or writes into it, the one that makes its numbers:
    those of Python are not noted."""
    if id.startswith(("batch_", "offset_")):  # reading it is the mistake
        return lines
    makes = r"(\*\*|\bpow|\bexp\(" + ("" if id == "wrong_exponent" else r"|\bsin\(|\bcos\(|/|arange") + ")"
    if run.form.kind != "positional_encoding" or any(re.search(makes, x.text) for x in lines):
        return lines
    laid = line_of_class(run, r"=.*\bsin\(.*\bcos\(") if id == "sin_cos_halves" else []
    found = laid or line_of_class(run, rf"^\s*(return|[\w.]+\S*( \S+\]*)? =) .*{makes}")
    return [x._replace(book=old.book) for x, old in zip(found, lines)] or lines


def up_to(run: Run) -> list[Any]:
    """Of what no known mistake explains: up to which stage it is right, and the line where it begins to differ."""
    try:
        found = first_difference(run, inner=True)
    except Exception:
        return []
    words = [say("stage", stage=said(found.stage))] if found.stage else []
    if found.place is None or not found.place.text:
        return words
    return [*words, say("begins"), _line(found)]


def one_line(run: Run, error: Optional[Place], share: float) -> Optional[OwnLine]:
    """The line that makes all numbers right once it is changed in one place; `error`: the line that raises."""
    try:
        places = [first_difference(run).place, error]
    except Exception:
        places = [error]
    one = _mended(run, run.form, [each for each in places if each is not None and each.text], "", share)
    return None if one is None else _line(WrongLine(one.place))._replace(should_be=one.text)


def _mended(run: Run, form: BookForm, places: Sequence[Place], id: str, share: float = 1.0) -> Optional[Mended]:
    try:
        return mended(run, form, places, id, share)
    except Exception:  # as above
        return None


def random_lines(run: Run) -> list[Any]:
    """The line that gives other numbers in each call, and whether it drops: (words, line)."""
    for inputs in reversed(run.probes):  # not all of them may tell
        try:
            one, two = (student_trace(run, inputs) for _ in range(2))
        except Exception:
            return []
        if one is None or two is None:
            continue
        beyond = next((x for x in one.steps if _reads_beyond(one, x)), None)
        if beyond is not None:
            return [say("random_lengths"), _line(WrongLine(beyond.place))]
        for first, second in zip(one.steps, two.steps):
            if first.place == second.place and first.value.shape == second.value.shape:
                is_made = "__init__" in (first.place.function, first.outer.function) or first.name in ("empty", "named")
                if not is_made and not np.allclose(first.value, second.value, equal_nan=True):
                    made = first.name in ("linear", "matmul", "addmm", "bmm") and "drop" not in first.place.text.lower()
                    return [say("random_other" if made else "random_drops"), _line(WrongLine(first.place))]
    return []


def reads_beyond(run: Run) -> bool:
    """Whether it gives torch's attention keys of another length than values: whatever lies behind is read as such."""
    try:
        traces = [student_trace(run, x) for x, got in zip(run.probes, run.outcomes) if got.error is None]
    except Exception:
        return False
    return any(_reads_beyond(trace, x) for trace in traces if trace is not None for x in trace.steps)


def _reads_beyond(trace: Trace, step: Operation) -> bool:
    """Whether it is torch's attention, which does not look, with keys of another length than values."""
    if not step.name.startswith("scaled_dot_product"):
        return False
    return len({x.shape[-2] for x in map(trace.value, step.sources[1:3]) if x.ndim > 1}) > 1


def nan_line(run: Run) -> list[Any]:
    """The line where NaN appears first, and why it does."""
    try:
        chosen = [i for i, x in enumerate(run.outcomes) if x.output is not None and np.isnan(x.output).any()]
        trace = student_trace(run, next(in_one_call(run.probes[chosen[-1]], run.way.layout)))
    except Exception:
        return []
    for step in trace.steps if trace is not None else ():
        if np.isnan(step.value).any() and step.name != "empty":  # memory may hold anything
            values = [trace.value(x) for x in step.sources] if trace is not None else []
            words = "an operation has no number as its result here"
            grown = _grown(trace) if trace is not None and any(np.isposinf(x).any() for x in values) else None
            if grown is not None:
                return [say("nan_grown"), _line(WrongLine(grown.place))]
            if "mul" in step.name:
                words = "0 times infinity is NaN: hide with torch.where or masked_fill, not by a product"
            elif "softmax" in step.name or any((np.isneginf(x).all(axis=-1)).any() for x in values if x.ndim):
                words = "a row whose numbers are all -inf has no softmax"
            return [say("nan_first", why=said(words)), _line(WrongLine(step.place))]
    return []


def _grown(trace: Trace) -> Optional[Operation]:
    """The first exp whose result is infinite."""
    return next((x for x in trace.steps if x.name in ("exp", "exp_", "exp2") and np.isposinf(x.value).any()), None)


def line_of(run: Run, name: str, which: int = -1) -> list[OwnLine]:
    """The line of an operation whose name, or text, has these letters: the last, or which of them."""
    _, steps = _of_a_call(run)
    found = [x for x in steps if name in x.name] or [x for x in steps if name in x.place.text.lower()]
    return [_line(WrongLine(found[which].place))] if found else []


def line_that_multiplies(run: Run, is_meant: Callable[[Any], bool]) -> list[OwnLine]:
    """The line of the last product of an array that is meant."""
    trace, steps = _of_a_call(run)
    products = [x for x in steps if x.name in _PRODUCTS and x.value.ndim > 2 and x.sources]
    found = [x for x in products if trace is not None and any(map(is_meant, map(trace.value, x.sources)))]
    return [_line(WrongLine(found[-1].place))] if found else []


def _of_a_call(run: Run) -> tuple[Optional[Trace], list[Operation]]:
    """The operations of a call, and those of them behind the constructor; none where they cannot be noted."""
    try:
        trace = student_trace(run, run.probes[-1])
    except Exception:
        return None, []
    return trace, [x for x in trace.steps if x.place.function != "__init__"] if trace is not None else []


def line_of_second(run: Run) -> list[OwnLine]:
    """The line that gives the second of a returned pair its name; else the line that returns both."""
    mine = run.student.mine
    call = mine if inspect.isroutine(mine) else getattr(mine, "forward", mine)
    try:
        lines, first = inspect.getsourcelines(call)
        nodes = [*ast.walk(tree_of(dedent("".join(lines))))]
    except (OSError, TypeError, SyntaxError):
        return []
    returned = [x for x in nodes if isinstance(x, ast.Return)]
    pairs = [(x, x.value.elts) for x in returned if isinstance(x.value, ast.Tuple) and x.value.elts[1:]]
    if not pairs:
        return []
    last, (_, each, *_) = pairs[-1]
    second = ast.dump(each).replace("Load", "Store")
    named = [x for x in nodes if isinstance(x, ast.Assign) and second in map(ast.dump, x.targets)]
    at = [last, *named][-1].lineno - 1
    return [_line(WrongLine(Place(inspect.getsourcefile(call) or "", first + at, lines[at].strip(), "")))]


def constructor_line(run: Run) -> list[OwnLine]:
    """The line of a class that makes torch's MultiheadAttention, and the same with batch_first=True."""
    found = line_of_class(run, r"MultiheadAttention\(.*\)\s*$")
    return [each._replace(should_be=_with_batch_first(each.text)) for each in found]


def _with_batch_first(line: str) -> str:
    line, n_changed = re.subn(r"batch_first\s*=\s*False", "batch_first=True", line)
    return line if n_changed else re.sub(r"\)\s*$", ", batch_first=True)", line)


def line_of_class(run: Run, pattern: str) -> list[OwnLine]:
    """The first line of a student's class that a pattern fits."""
    made_by = run.student.mine if isinstance(run.student.mine, type) else type(run.student.mine)
    try:
        lines, first = inspect.getsourcelines(made_by)
    except (OSError, TypeError):
        return []
    for number, text in enumerate(lines, first):
        if re.search(pattern, text):
            return [_line(WrongLine(Place(inspect.getsourcefile(made_by) or "", number, text.strip(), "__init__")))]
    return []


def _line(found: WrongLine) -> OwnLine:
    assert found.place is not None
    return OwnLine(_called(found.place.file), found.place.number, found.place.text, "", found.book)


def _called(file: str) -> str:
    """What a reader calls a file, or a cell."""
    if file.startswith("<ipython") or "ipykernel_" in file:
        return said("this cell")
    return Path(file).name


def _noted_call(run: Run, form: BookForm) -> tuple[Optional[Inputs], Optional[Trace]]:
    """A probe whose result differs from the book's, and the operations of its call; None where there is none."""
    inputs = telling(run, form)
    return inputs, student_trace(run, inputs) if inputs is not None else None


def found_for(
    call: tuple[Optional[Inputs], Optional[Trace]], form: BookForm, mistakes: Sequence[Mistake]
) -> list[WrongLine]:
    """For each mistake the student's line, as far as it can be told."""
    inputs, trace = call
    if trace is None or inputs is None:
        return [WrongLine(None, _books_line(form, mistakes, i)) for i in range(len(mistakes))]
    wrong = book_trace(form, mistakes, inputs)
    made = []
    for number in range(len(mistakes)):
        others = [x for i, x in enumerate(mistakes) if i != number]
        right = [book_trace(form, [], inputs), *([book_trace(form, others, inputs)] if others else [])]
        lines = changed(form, mistakes, number)
        place = Search(trace, right, inputs).of_mistake(mistakes[number].id, wrong, right[0], lines)
        made.append(WrongLine(place, _books_line(form, mistakes, number)))
    return made


def _books_line(form: BookForm, mistakes: Sequence[Mistake], number: int) -> str:
    line = next((each.book for each in changed(form, mistakes, number)), "")
    if mistakes[number].id.startswith("scale_") and "sqrt" not in line:  # what is called with other queries
        texts = (sources(form) or {}).values()
        scaled = (x.strip() for text in texts for x in text.splitlines() if "scores = " in x and "sqrt" in x)
        return next(scaled, line)
    return line


def likeliest(tried: list[Run]) -> list[Run]:
    """The runs; where weights may be read in several ways, that with the most steps as the book has them is first."""
    if len({run.way.weights for run in tried}) < 2:
        return tried
    return sorted(tried[:_READ], key=_unlike) + tried[_READ:]


def _unlike(run: Run) -> int:
    """The less, the more of its steps are as the book has them."""
    try:
        inputs, trace = _noted_call(run, run.form)
        assert trace is not None and inputs is not None
        return -len(Search(trace, [book_trace(run.form, [], inputs)], inputs).good)
    except Exception:  # as above
        return 0


def first_difference(
    run: Run, call: Optional[tuple[Optional[Inputs], Optional[Trace]]] = None, inner: bool = False
) -> WrongLine:
    """Of what no known mistake explains: the line where numbers begin to differ, and the stage that is right."""
    inputs, trace = call or _noted_call(run, run.form)
    if trace is None or inputs is None:
        return WrongLine(None)
    rights = [book_trace(form, [], inputs) for form in run.asked.forms]
    searches = [Search(trace, [right], inputs) for right in rights]
    most = max(range(len(rights)), key=lambda i: len(searches[i].good))  # the function that it is most like
    place = searches[most].first(inner, new=not call)
    return WrongLine(place, "", searches[most].stage(rights[most]))
