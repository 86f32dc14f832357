"""What `check` answers: sentences, the line of the book's function that is marked, an example."""

from __future__ import annotations

import html
import linecache
import traceback
from collections.abc import Sequence
from difflib import SequenceMatcher
from dis import opmap
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Optional
from unicodedata import east_asian_width

import numpy as np

from ..words.sentences import said, say
from .probes import Inputs

NEAR = 1e-4  # of 1 and of each number: float32 in any order of operations is nearer, and no known mistake is
_MARKED = "background: rgba(226, 110, 60, .28); font-weight: 600"  # seen on white and on black
_BOX = "font: 13px/1.45 ui-monospace, Menlo, Consolas, monospace; white-space: pre; overflow-x: auto; margin: 8px 0"
_WHO = "display: inline-block; width: 6ch; text-align: right"  # a Chinese character is not as wide as two others


SHOWN = 48  # numbers of an array that is written out


def columns(text: str) -> int:
    """How many columns a text takes: a Chinese character takes two."""
    return sum(1 + (east_asian_width(each) in "WF") for each in text)


def written(arrays: Inputs) -> str:
    """Arrays as text, each with its name; large ones by their shape."""
    lines = []
    for name, x in arrays.items():
        if isinstance(x, np.ndarray) and x.size <= SHOWN:
            start = f"{name} = "
            lines.append(start + np.array2string(x, precision=3, suppress_small=True, prefix=" " * columns(start)))
        else:
            large = isinstance(x, np.ndarray)
            lines.append(said("{name}: shape {shape}", name=name, shape=x.shape) if large else f"{name} = {x}")
    return "\n".join(lines)


class Lines(NamedTuple):
    """A function of the book, and the same with a mistake: the lines that differ are marked."""

    book: str
    wrong: str

    def marked(self) -> list[tuple[str, str]]:
        """(who writes so: "book", "yours" or "", the line)."""
        before, after = self.book.splitlines(), self.wrong.splitlines()
        shown = []
        for _, i, j, k, m in SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
            same = before[i:j] == after[k:m]
            yours = after[k:m] or [f"{' ' * 4}# {said('nothing')}"]
            shown += [("" if same else "book", line) for line in before[i:j]]
            shown += [] if same else [("yours", line) for line in yours]
        return shown

    def __str__(self) -> str:
        shown = ((f"{said(who)}>" if who else "", line) for who, line in self.marked())
        return "\n".join(f"{' ' * (8 - columns(who))}{who} {line}" for who, line in shown)

    def _repr_html_(self) -> str:
        shown = [
            f'<span style="{style}"><span style="{_WHO}">{said(who)}</span>  {html.escape(line)}</span>'
            for who, line in self.marked()
            for style in [_MARKED if who else ""]
        ]
        # Wrapped: on a phone the end of a line is often what differs.
        return f'<div style="{_BOX}; white-space: pre-wrap">' + "\n".join(shown) + "</div>"


class OwnLine(NamedTuple):
    """A line of the student's own text that is not as the book has it."""

    file: str  # as a reader calls it: "mine.py", "mine.ipynb, cell 3"
    number: int
    text: str
    should_be: str  # the line mended, where that was tried; else ""
    book: str  # the book's line

    def rows(self) -> list[tuple[str, str]]:
        """(what it is, the line)."""
        place = said("{file}, line {number}:", file=self.file, number=self.number)
        rows = [(place, self.text), (said("should be:"), self.should_be), (said("in the book:"), self.book)]
        return [(name, line) for name, line in rows if line]

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        return {
            "file": self.file,
            "line": self.number,
            "text": self.text,
            "should_be": self.should_be,
            "book": self.book,
        }

    def __str__(self) -> str:
        widest = max(columns(name) for name, _ in self.rows())
        return "\n".join(f"{name}{' ' * (widest - columns(name) + 2)}{line}" for name, line in self.rows())

    def _repr_html_(self) -> str:
        rows = [
            f'<tr style="background: none"><td style="text-align: left; padding: 2px 12px 2px 0; opacity: .8">'
            f'{html.escape(name)}</td><td style="text-align: left; padding: 2px 6px; white-space: pre-wrap; '
            f'{"" if i else _MARKED}">{html.escape(line)}</td></tr>'
            for i, (name, line) in enumerate(self.rows())
        ]
        return f'<table style="{_BOX}; border-collapse: collapse">{"".join(rows)}</table>'


class Example(NamedTuple):
    """Inputs, and two results beside each other; the numbers that differ are marked."""

    inputs: Inputs
    expected: Any
    got: Any
    names: tuple[str, str] = ("expected", "got")

    def differs(self) -> Any:
        """Which numbers differ, where both have one shape."""
        if self.expected.shape != self.got.shape:
            return np.zeros(self.got.shape, bool)
        return ~np.isclose(self.got, self.expected, NEAR, NEAR, equal_nan=True)

    def __str__(self) -> str:
        names = [said(name) for name in self.names]
        if self.expected.shape != self.got.shape and self.got.size > SHOWN:
            return written({**self.inputs, names[0]: self.expected, names[1]: self.got})
        if self.got.size > SHOWN:
            at = np.unravel_index(np.nanargmax(np.abs(self.got - self.expected)), self.got.shape)
            place = "[" + ", ".join(map(str, at)) + "]"
            differ = said(
                "{count} of {all} numbers differ; at {place} {one} {expected} and {two} {got}",
                count=self.differs().sum(), all=self.got.size, place=place,
                one=f"{self.expected[at]:.4g}", expected=names[0], two=f"{self.got[at]:.4g}", got=names[1],
            )  # fmt: skip
            return f"{written(self.inputs)}\n{differ}"
        marks = np.where(self.differs(), "*", " ")
        shown = np.array([f"{x:.4g}{mark}" for x, mark in zip(self.got.ravel(), marks.ravel())]).reshape(self.got.shape)
        widest = max(map(len, shown.ravel()), default=0)
        start = f"{names[1]} = "
        got = np.array2string(shown, prefix=" " * columns(start), formatter={"all": lambda text: f"{text:>{widest}}"})
        return "\n".join([written({**self.inputs, names[0]: self.expected}), f"{start}{got}"])

    def _repr_html_(self) -> str:
        marks = self.differs()
        if self.expected.shape != self.got.shape or self.got.ndim < 2 or self.got.size > SHOWN:
            return f'<div style="{_BOX}">{html.escape(str(self))}</div>'
        items = [i for i in np.ndindex(self.got.shape[:-2]) if marks[i].any()][:2]
        shown = [f'<div style="{_BOX}">{html.escape(written(self.inputs))}</div>'] if self.inputs else []
        for item in items:
            pair = zip(self.names, (self.expected[item], self.got[item]))
            where = said(", item {item}", item=", ".join(map(str, item))) if len(self.got) > 1 else ""
            cells = "".join(_table(f"{said(name)}{where}", matrix, marks[item]) for name, matrix in pair)
            shown.append(f'<div style="display: flex; flex-wrap: wrap; gap: 8px 28px; margin: 8px 0">{cells}</div>')
        return "".join(shown)


def _table(name: str, matrix: Any, marks: Any) -> str:
    rows = "".join(
        "<tr>" + "".join(f'<td style="text-align: right; padding: 2px 8px; {_MARKED if mark else ""}">{x:.4g}</td>'
                         for x, mark in zip(row, marked)) + "</tr>"
        for row, marked in zip(matrix, marks)
    )  # fmt: skip
    return (
        f'<table style="border-collapse: collapse; margin: 0; font-variant-numeric: tabular-nums">'
        f'<caption style="text-align: left; caption-side: top; opacity: .8">{html.escape(name)}</caption>{rows}</table>'
    )


UNJUDGED = {"untried", "not_judged", "exits", "internal"}  # mistakes that are none of the student's numbers
UNNAMED = {"unknown", "one_line", "raises", "shape"}  # no known mistake is said to be it


def readable(error: BaseException) -> BaseException:
    """The error, or one of the same name where its text cannot be read."""
    try:
        str(error)
    except BaseException:
        made: BaseException = type(type(error).__name__, (Exception,), {})(said("(its text raises an error)"))
        return made.with_traceback(error.__traceback__)
    return error


def failed(error: BaseException) -> str:
    """That check itself has failed, with the place."""
    frame = (traceback.extract_tb(error.__traceback__) or [None])[-1]
    place = f"{frame.filename}, {frame.lineno}" if frame else "?"
    return say("internal", error=f"{type(error).__name__}: {readable(error)}", place=place)


def _is_own(trace: TracebackType) -> bool:
    """Whether a step of a traceback is in the student's own text."""
    name = trace.tb_frame.f_code.co_filename
    return not name.startswith((str(Path(__file__).parents[2]), "<__", "<frozen")) and "-packages" not in name


def own_line(error: BaseException) -> str:
    """Where in the student's own text an error arose, as "line 7: x = y"; else "the call"."""
    found, trace = said("the call"), error.__traceback__
    while trace is not None:
        if _is_own(trace):
            name, number = trace.tb_frame.f_code.co_filename, trace.tb_lineno
            found = said("line {number}: {text}", number=number, text=linecache.getline(name, number).strip())
            found = found.rstrip(": ：")
        trace = trace.tb_next
    return found


def is_own_raise(error: BaseException) -> bool:
    """Whether the student's own `raise` or `assert` is what ended it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or not _is_own(trace):
        return False
    return trace.tb_frame.f_code.co_code[trace.tb_lasti] == opmap["RAISE_VARARGS"]


class Answer:
    """The result of `check`: a text; in a notebook, the matrices beside each other.

    Not meant to be constructed directly.

    Attributes
    ----------
    ok : bool or None
        Whether the implementation computes what the book's does; None where that could not be judged: it ends the
        program, or has arguments or weights that check does not know.
    mistakes : list of str
        What is wrong, the likeliest first: ids of known mistakes, dropout_in_eval, dtype, changes_inputs, shape,
        raises, extra_parameter, many_keys, random, one_line (no known mistake, but one line of the student's, changed,
        makes all right), unknown; where it was not judged: untried, not_judged, exits, internal.
    notes : list of str
        Remarks that are worth reading, but are not mistakes.
    lines : list of OwnLine
        The student's own lines that differ, as far as they can be told: `.file`, `.number`, `.text`, `.should_be`
        (the line mended, where that was tried and is right) and `.book`, the book's line.
    mask : str or None
        What True means in its mask: "attend", "hide", or "add" where it is added; "none" where the task has no masks;
        None where it takes none.  The sentence is among the notes.
    error : Exception or None
        What the implementation raised, or what check itself failed with.

    Examples
    --------
    >>> from mha_c import teach
    >>> answer = teach.check(teach.book.dot_product, "dot_product")
    >>> answer.ok, answer.mistakes
    (True, [])
    """

    def __init__(
        self,
        mistakes: Sequence[str],
        parts: Sequence[Any],
        notes: Sequence[str] = (),
        mask: Optional[str] = None,
        *,
        error: Optional[BaseException] = None,
    ) -> None:
        self.error = error  # that ended it
        self.mask = mask
        self.mistakes = list(dict.fromkeys(mistakes))
        self.ok = None if self.mistakes and {*self.mistakes} <= UNJUDGED else not self.mistakes
        self.notes = list(notes)
        self.lines = [part for part in parts if isinstance(part, OwnLine)]
        self._parts = [*parts, *(said("Note: {note}", note=note) for note in notes)]

    def __repr__(self) -> str:
        return "\n\n".join(map(str, self._parts))

    def _repr_html_(self) -> str:
        text = "margin: 8px 0; white-space: pre-line"
        shown = [
            part._repr_html_() if hasattr(part, "_repr_html_") else f'<p style="{text}">{html.escape(part)}</p>'
            for part in self._parts
        ]
        return f'<div style="max-width: 76ch; line-height: 1.45">{"".join(shown)}</div>'
