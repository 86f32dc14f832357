"""The known mistakes, read from mistakes.txt: lines of the book's functions that read differently.

One table serves three: `check` runs the changed functions as wrong references, an answer marks the changed line, and
`puzzle` gives a changed function to mend.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from types import CodeType
from typing import Any, Callable, NamedTuple, Optional

import numpy as np

from .._arguments.calls import refuses_at_the_call

_FOLDER = Path(__file__).parent
_TEXT = (_FOLDER / "book.py").read_text(encoding="utf-8")
SOURCES = {  # the book's functions as they are written
    node.name: f"{ast.get_source_segment(_TEXT, node)}\n"
    for node in ast.parse(_TEXT).body
    if isinstance(node, ast.FunctionDef)
}
_MASKED = ("softmax", "masked_softmax")
KINDS = {  # each kind, and the functions that it is made of
    "masked_softmax": _MASKED,
    "dot_product": (*_MASKED, "dot_product"),
    "additive": (*_MASKED, "additive"),
    "multi_head": (*_MASKED, "dot_product", "transpose_qkv", "transpose_output", "multi_head"),
    "transpose_qkv": ("transpose_qkv",),
    "transpose_output": ("transpose_output",),
    "positional_encoding": ("positional_encoding",),
    "causal": ("softmax", "causal"),
}


class Change(NamedTuple):
    """In the function `where`, `line` reads `instead`."""

    where: str
    line: str
    instead: str


class Mistake(NamedTuple):
    """One way to be wrong."""

    id: str
    says: str  # ends the sentence "it equals the book's if ..."
    changes: tuple[Change, ...]  # the first is the mistake, the others let it be written


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
        Ends the sentence "it equals the book's if ...".
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


def _add(id: str, says: str, changes: list[Change]) -> None:
    for where, line, _ in changes:
        if where not in SOURCES:
            raise ValueError(f"where must be one of the book's functions {', '.join(SOURCES)}, got {where!r}")
        if SOURCES[where].count(line) != 1:
            raise ValueError(f"line must occur once in {where}; {line!r} occurs {SOURCES[where].count(line)} times")
    MISTAKES.append(Mistake(id, says, tuple(changes)))


def _read() -> None:
    """Fills MISTAKES from mistakes.txt."""
    text = re.sub(r"^#.*\n", "", (_FOLDER / "mistakes.txt").read_text(encoding="utf-8"), flags=re.MULTILINE)
    for functions, rows in re.findall(r"^\[(.*)\]\n((?:[^\[\n].*\n)*)", text, re.MULTILINE):
        for id, says, lines in re.findall(r"^(\w+): (.*)\n((?:[-+@].*\n)*)", rows, re.MULTILINE):
            for where in functions.split(", "):
                _add(id, says, list(_changes(where, lines)))


def _changes(where: str, lines: str) -> Any:
    for other, old, new in re.findall(r"(?:@ (\w+)\n)?((?:-.*\n)+)((?:\+.*\n)*)", lines):
        before, after = (re.sub("^.", "", part, flags=re.MULTILINE) for part in (old, new))
        yield Change(other or where, before, after)


_read()


# ---- as functions --------------------------------------------------------------------------------------------------


def known(kind: str) -> list[Mistake]:
    """The mistakes that can be made in a kind."""
    return [each for each in MISTAKES if all(change.where in KINDS[kind] for change in each.changes)]


def sources(kind: str, mistakes: Sequence[Mistake] = ()) -> Optional[dict[str, str]]:
    """The text of each function with these mistakes; None where one of them has taken the line of another."""
    texts = {name: SOURCES[name] for name in KINDS[kind]}
    for where, line, instead in (change for each in mistakes for change in each.changes):
        if texts[where].count(line) != 1:
            return None
        texts[where] = texts[where].replace(line, instead)
    return texts


def function(kind: str, mistakes: Sequence[Mistake] = (), fill: str = "-1e6") -> Optional[Callable[..., Any]]:
    """The kind's function with these mistakes, and another `fill` of masks; None where they exclude each other."""
    texts = sources(kind, mistakes)
    if texts is None:
        return None
    room: dict[str, Any] = {"np": np, "__builtins__": builtins}
    for text in texts.values():
        exec(_compiled(text.replace("-1e6", fill)), room)
    return room[kind]


@lru_cache(maxsize=1024)
def _compiled(text: str) -> CodeType:
    return compile(text, "the book, changed", "exec")
