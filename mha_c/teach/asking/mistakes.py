"""The known mistakes, read from mistakes.txt: lines of the book's functions that read differently.

One table serves three: `check` runs the changed functions as wrong references, an answer marks the changed line, and
`puzzle` gives a changed function to mend.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import re
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from types import CodeType
from typing import Any, Callable, NamedTuple, Optional, Union

import numpy as np

from ..._arguments.calls import refuses_at_the_call
from .. import book
from ..words.sentences import said

_FOLDER = Path(__file__).parent
_TEXT = (_FOLDER.parent / "book.py").read_text(encoding="utf-8")
SOURCES = {  # the book's functions as they are written
    node.name: f"{ast.get_source_segment(_TEXT, node)}\n"
    for node in ast.parse(_TEXT).body
    if isinstance(node, ast.FunctionDef)
}


class BookForm(NamedTuple):
    """What a student may be: one of the book's functions, and those that it calls."""

    kind: str  # whose probes it is asked with
    functions: tuple[str, ...]  # of the book; the last is the one that is called
    hides: str = ""  # keys, by "lens", by a "mask", or "past": those of the future, too
    by_mask: bool = False  # a mask stands in the place of lengths
    halves: bool = False  # "rope" turns the features of two halves
    sees_all: bool = False  # "chunked" hides no future

    @property
    def called(self) -> str:
        """The name of the function that is called."""
        return self.functions[-1]

    @property
    def texts(self) -> dict[str, str]:
        """{a function's name: the book's function with its text}."""
        others = {"masked_softmax": self.by_mask, "rope": self.halves}
        other = {"masked_softmax": "masked_softmax_of_mask", "rope": "rope_halves"}
        return {name: other[name] if others.get(name) else name for name in self.functions}


def of_mask(form: BookForm) -> BookForm:
    """The same with a mask in the place of lengths, where it hides by lengths."""
    return form._replace(by_mask=form.hides == "lens")


_MASKED = ("softmax", "masked_softmax")
_HEADS = ("transpose_qkv", "transpose_output")
KINDS = {
    "masked_softmax": BookForm("masked_softmax", _MASKED, "lens"),
    "dot_product": BookForm("dot_product", (*_MASKED, "dot_product"), "lens"),
    "additive": BookForm("additive", (*_MASKED, "additive"), "lens"),
    "multi_head": BookForm("multi_head", (*_MASKED, "dot_product", *_HEADS, "multi_head"), "lens"),
    "transpose_qkv": BookForm("transpose_qkv", ("transpose_qkv",)),
    "transpose_output": BookForm("transpose_output", ("transpose_output",)),
    "positional_encoding": BookForm("positional_encoding", ("positional_encoding",)),
    "causal": BookForm("causal", ("softmax", "causal"), "past"),
    "window": BookForm("window", ("softmax", "window"), "past"),
    "rope": BookForm("rope", ("rope",)),
    "grouped": BookForm("grouped", ("softmax", "grouped"), "mask"),
    "causal_multi_head": BookForm("causal_multi_head", ("softmax", "causal", *_HEADS, "causal_multi_head"), "past"),
}
# Other functions that compute a kind.
CHUNKED = BookForm("chunked", ("chunked",), "past")
CHUNKED_ALL = BookForm("chunked", ("chunked",), sees_all=True)
ADDITIVE_WEIGHTS = BookForm("additive", (*_MASKED, "additive_weights"), "lens")
ROPE_HALVES = BookForm("rope", ("rope",), halves=True)
_ROTARY = ("softmax", "causal", *_HEADS, "rope", "causal_multi_head_rope")
ROTARY = (BookForm("causal_multi_head", _ROTARY, "past"), BookForm("causal_multi_head", _ROTARY, "past", halves=True))
_PAST = "np.tri(queries.shape[1], len(steps), dtype=bool)"
# How a function with lengths reads where a mask takes their place.
_OF_MASK = [("valid_lens=None", "mask=1"), ("valid_lens is not None", "np.ndim(mask) > 0"), ("valid_lens", "mask")]


class Change(NamedTuple):
    """In the function `where`, `line` reads `instead`."""

    where: str
    line: str
    instead: str


class Mistake(NamedTuple):
    """One way to be wrong."""

    id: str
    says: str  # ends the sentence "Yours differs from the book's in one thing: ..."
    changes: tuple[Change, ...]  # the first is the mistake, the others let it be written
    alone: bool = False  # only where the function itself is asked, not a part of another
    only: str = ""  # where the implementation has "heads", an axis of them, shared "groups", a "joint" weight, ...


MISTAKES: list[Mistake] = []


@refuses_at_the_call
def add_mistake(id: str, where: str, says: str, line: str, instead: str) -> None:
    """Teach `check` and `puzzle` one more mistake: a line of a function of the book that reads differently.

    Parameters
    ----------
    id : str
        What `result.mistakes` will hold.
    where : str
        The function with the line, such as "dot_product"; `mha_c.teach.book` has their texts.
    says : str
        Ends the sentence "Yours differs from the book's in one thing: ...".
    line, instead : str
        Text that occurs once in the book's function, and its replacement.

    Raises
    ------
    ValueError
        If there is no such function, or if `line` does not occur in it exactly once.

    Examples
    --------
    >>> from mha_c import teach
    >>> teach.add_mistake("scale_2", "dot_product", "scores are divided by 2", "np.sqrt(d)", "2")
    >>> def mine(queries, keys, values, valid_lens=None):
    ...     return teach.book.masked_softmax(queries @ keys.swapaxes(1, 2) / 2, valid_lens) @ values
    >>> teach.check(mine, "dot_product").mistakes
    ['scale_2']
    """
    _add(id, says, [Change(where, line, instead)])


def _add(id: str, says: str, changes: list[Change], alone: bool = False, only: str = "") -> None:
    for where, line, _ in changes:
        if where not in SOURCES:
            words = "where must be one of the book's functions {functions}, got {where!r}"
            raise ValueError(said(words, functions=", ".join(SOURCES), where=where))
        if SOURCES[where].count(line) != 1:
            words = "line must occur once in {where}; {line!r} occurs {count} times"
            raise ValueError(said(words, where=where, line=line, count=SOURCES[where].count(line)))
    MISTAKES.append(Mistake(id, says, tuple(changes), alone, only))


def _read() -> None:
    """Fills MISTAKES from mistakes.txt."""
    text = re.sub(r"^#.*\n", "", (_FOLDER / "mistakes.txt").read_text(encoding="utf-8"), flags=re.MULTILINE)
    for functions, rows in re.findall(r"^\[(.*)\]\n((?:[^\[\n].*\n)*)", text, re.MULTILINE):
        for id, only, says, lines in re.findall(r"^(\w+)(?: \((\w+)\))?: (.*)\n((?:[-+@].*\n)*)", rows, re.MULTILINE):
            for where in functions.split(", "):
                where, _, alone = where.partition(" ")
                try:
                    _add(id, says, list(_changes(where, lines)), bool(alone), only)
                except ValueError as error:
                    raise ValueError(f"mistakes.txt, {id}: {error}") from None


def _changes(where: str, lines: str) -> Any:
    for other, old, new in re.findall(r"(?:@ (\w+)\n)?((?:-.*\n)+)((?:\+.*\n)*)", lines):
        before, after = (re.sub("^.", "", part, flags=re.MULTILINE) for part in (old, new))
        yield Change(other or where, before, after)


_read()


# ---- as functions --------------------------------------------------------------------------------------------------


def signature(kind: str) -> list[str]:
    """The arguments of the book's function."""
    return list(inspect.signature(getattr(book, kind)).parameters)


def known(form: BookForm, having: Collection[str] = ()) -> list[Mistake]:
    """The mistakes that can be made in a kind, or in a form of it; `having`: also those of what only some
    implementations have, "heads", "groups", "joint", ..."""
    texts = form.texts
    return [
        each
        for each in MISTAKES
        if all(change.where in texts.values() for change in each.changes)
        and (not each.alone or each.changes[0].where == texts[form.called])
        and (not each.only or each.only in having)
    ]


_SMALL = "masked scores become {number}, not -1e6: exp({number}) is {still}, so these keys still get weight"
_ADDED = (
    "{number} is added to masked scores, which should become -1e6: exp({number}) is {still}, "
    "so these keys still get weight"
)


def hiding_with(form: BookForm, number: Union[float, str]) -> Iterator[Mistake]:
    """Masks that hide with another number than -1e6, or a name: in place of the scores, or added to them."""
    shown, still, written = number, "", number
    if not isinstance(number, str):
        shown, still, written = f"{number:.3g}", f"{np.exp(number):.2g}", f"{number:.6g}"
    for change in _fills(form):
        instead = change._replace(instead=change.line.replace("-1e6", str(written)))
        yield Mistake("mask_small", said(_SMALL, number=shown, still=still), (instead,))
        added = change._replace(instead=change.instead.replace("-1e6", f"({written})"))
        yield Mistake("mask_small", said(_ADDED, number=shown, still=still), (added,))


def subtracting(form: BookForm, number: float, past: bool) -> list[Mistake]:
    """The mistake that subtracts a number from masked scores; `past`: from those of the future, too, which a function
    may hide itself; [] where no function of the form masks."""
    found = []
    for each in _fills(form):
        instead = each.instead.replace("-1e6", f"({-number})")
        if "seen & mask" in instead and not past:
            instead = f"np.where(seen, {instead.replace('seen & mask', 'mask')}, -1e6)"
        found.append(Mistake("", "", (each._replace(instead=instead),)))
    return found


def _fills(form: BookForm) -> Iterator[Change]:
    """The line of a form that masks, and the same with -1e6 added to the scores."""
    for where in form.texts.values():
        for line, scores in re.findall(r"(np\.where\(.*, (\w+), -1e6\))", SOURCES[where]):
            yield Change(where, line, line.replace("-1e6", f"{scores} + -1e6"))


def sources(form: BookForm, mistakes: Sequence[Mistake] = ()) -> Optional[dict[str, str]]:
    """The text of each function with these mistakes; None where one of them has taken the line of another."""
    changes = [change for each in mistakes for change in each.changes]
    texts = {}
    for name, where in form.texts.items():
        text = _text(form, name, where, tuple(each for each in changes if each.where == where))
        if text is None:
            return None
        texts[name] = text
    return texts


@lru_cache(maxsize=8192)  # the candidates of an answer are some thousands of pairs, each of a few functions
def _text(form: BookForm, name: str, where: str, changes: tuple[Change, ...]) -> Optional[str]:
    """A function of a form with these changes, under its name there; None where one has taken the line of another."""
    text = SOURCES[where]
    for _, line, instead in changes:
        if text.count(line) != 1:
            return None
        text = text.replace(line, instead)
    if form.sees_all:
        text = text.replace(_PAST, "np.ones((queries.shape[1], len(steps)), dtype=bool)")
    for one, other in _OF_MASK if form.by_mask else ():
        text = text.replace(one, other)
    return text.replace(f"def {where}(", f"def {name}(")


def function(form: BookForm, mistakes: Sequence[Mistake] = (), fill: str = "-1e6") -> Optional[Callable[..., Any]]:
    """The form's function with these mistakes, and another `fill` of masks; None where they exclude each other."""
    texts = sources(form, mistakes)
    if texts is None:
        return None
    room: dict[str, Any] = {"np": np, "__builtins__": builtins}
    for text in texts.values():
        exec(_compiled(text, fill), room)
    return room[form.called]


@lru_cache(maxsize=4096)
def _compiled(text: str, fill: str) -> CodeType:
    return compile(text.replace("-1e6", fill), "the book, changed", "exec")
