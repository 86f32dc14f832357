"""A student's file, judged: what it defines is given to `check`.  `python -m mha_c check` prints what this finds."""

from __future__ import annotations

import ast
import contextlib
import io
import linecache
import os
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any, Callable, NamedTuple, Optional

from .._recognize import parameters
from .answers import Answer
from .checking import check
from .kinds import told, unknown_kind
from .mistakes import KINDS
from .notebooks import is_part, parts
from .words import said


class Problem(Exception):
    """Why a file, or a name in it, could not be judged: `id` for programs, a text for readers, the file's line."""

    def __init__(self, id: str, text: str, line: Optional[int] = None) -> None:
        super().__init__(text)
        self.id, self.line = id, line

    def as_dict(self) -> dict[str, Any]:
        return {"id": self.id, "line": self.line, "text": str(self)}


class Judged(NamedTuple):
    """One name of the file: its kind, and an answer, or why there is none."""

    name: str
    kind: Optional[str]
    answer: Optional[Answer]
    problem: Optional[Problem] = None

    def as_dict(self) -> dict[str, Any]:
        answer = self.answer
        return {
            "name": self.name,
            "kind": self.kind,
            "ok": answer.ok if answer else None,
            "mistakes": answer.mistakes if answer else [],
            "mask": answer.mask if answer else None,
            "notes": answer.notes if answer else [],
            "text": str(answer) if answer else "",
            "problem": self.problem.as_dict() if self.problem else None,
        }


class Report:
    """What came of a file: `ok` is None where nothing was found wrong, and something could not be judged."""

    def __init__(self, file: str, judged: Sequence[Judged] = (), problem: Optional[Problem] = None) -> None:
        self.file, self.judged, self.problem = file, list(judged), problem
        oks = [each.answer.ok if each.answer else None for each in self.judged]
        self.ok = False if False in oks else None if problem or None in oks else True

    def as_dict(self) -> dict[str, Any]:
        problem = self.problem.as_dict() if self.problem else None
        return {"file": self.file, "ok": self.ok, "checked": [x.as_dict() for x in self.judged], "problem": problem}

    def __str__(self) -> str:
        if self.problem:
            return said("{file} cannot be judged: {problem}", file=self.file, problem=self.problem)
        verdicts = {True: "right", False: "wrong", None: "cannot be judged"}
        texts = []
        for each in self.judged:
            verdict = said(verdicts[each.answer.ok if each.answer else None])
            what = f"{self.file}:{each.name}{f' ({each.kind})' if each.kind else ''}"
            texts.append(f"{said('{what}: {verdict}', what=what, verdict=verdict)}\n\n{each.answer or each.problem}")
        return "\n\n".join(texts)


def judged(file: str, name: Optional[str] = None, kind: Optional[str] = None, **options: Any) -> Report:
    """The report on a file: on `name`, or on all that the file defines and whose kind can be told.

    What another of these uses is judged as a part of it.  What the file prints goes to stderr.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr), no_input():
            if kind is not None and kind not in KINDS:
                raise Problem("no_such_kind", str(unknown_kind(kind)))
            module = loaded(Path(file))
            chosen = [name] if name else _chosen(module, Path(file), kind)
            return Report(file, [_judged(module, each, kind, options) for each in chosen])
    except Problem as problem:
        return Report(file, problem=problem)


@contextlib.contextmanager
def no_input() -> Iterator[None]:
    """Nobody is asked, and no grading loop's own input is read."""
    kept, sys.stdin = sys.stdin, io.StringIO()
    try:
        yield
    finally:
        sys.stdin = kept


def loaded(path: Path) -> ModuleType:
    """The file as a module, run as `python FILE` would run it, but its name is not __main__, and no input is read."""
    if path.is_dir():
        words = "{path} is a folder; it takes one file: {path}/NAME.py"
        raise Problem("no_such_file", said(words, path=path))
    if not path.is_file():
        raise Problem("no_such_file", said("there is no file {path}", path=path))
    module = ModuleType(f"file_{path.stem}")
    module.__file__ = str(path)
    for name in ("__loader__", "__spec__"):  # nothing has loaded it: of None here, Python 3.15 warns in tracebacks
        del module.__dict__[name]
    sys.modules[module.__name__] = module  # where dataclasses and pickle look for it
    sys.path.insert(0, str(path.resolve().parent))
    sys.argv = [str(path)]
    try:
        for name, text in parts(path):
            if isinstance(text, str):  # of a cell, which no traceback finds in a file
                linecache.cache[name] = len(text), None, text.splitlines(True), name
            exec(compile(text, name, "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        raise _import_problem(path, error) from error
    return module


def _import_problem(path: Path, error: BaseException) -> Problem:
    """In the words of the error, with the file's own line."""
    if isinstance(error, SyntaxError):  # its text says the line
        line, where = error.lineno, ""
    else:
        line, where, _ = _place(path, traceback.extract_tb(error.__traceback__))
    says = "".join(traceback.format_exception_only(type(error), error)).strip()
    if isinstance(error, SystemExit):
        says = said("it ends the program (SystemExit) while it is imported")
    words = f"{said('it does not import.')}{where}\n{says}"
    missing = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
    if missing:
        words += "\n" + said(
            "If {missing} is a package, install it where mha_c is ({prefix}); with uvx: `uvx --with {missing} ...`.  "
            "If it is a file of the student's, it must lie beside {name}.",
            missing=missing, prefix=sys.prefix, name=path.name,
        )  # fmt: skip
    if isinstance(error, (SystemExit, EOFError)):
        words += "\n" + said(
            'What only a program does (asks, trains, ends) belongs under `if __name__ == "__main__":`.'
        )
    return Problem("does_not_import", words, line)


def _place(path: Path, frames: Sequence[traceback.FrameSummary]) -> tuple[Optional[int], str, str]:
    """The innermost line of the file among these: its number, words that name it, and its text."""
    mine = [frame for frame in frames if is_part(path, frame.filename)]
    if not mine:
        return None, "", ""
    line, cell = mine[-1].lineno, mine[-1].filename[len(f"{path}, cell ") :]
    words = said("  Cell {cell}, line {line}:", cell=cell, line=line) if cell else said("  Line {line}:", line=line)
    return line, words, mine[-1].line or ""


@contextlib.contextmanager
def ended_after(seconds: float, file: str, show: Callable[[Report], int]) -> Iterator[None]:
    """Ends the process after so long, whatever the file does then; `show` gets the report, and gives the status."""
    watched = threading.get_ident()

    def end() -> None:
        frames = traceback.extract_stack(sys._current_frames()[watched])
        line, where, text = _place(Path(file), frames)
        words = said("it still runs after {seconds:g} seconds.", seconds=seconds) + f"{where}\n{text}"
        os._exit(show(Report(file, problem=Problem("takes_too_long", words.strip(), line))))

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _defined(module: ModuleType) -> dict[str, Any]:
    """Functions and classes that the file itself defines, those with an underscore left out."""
    mine = vars(module).items()
    return {x: f for x, f in mine if x[0] != "_" and callable(f) and getattr(f, "__module__", "") == module.__name__}


def _kind(mine: Any, kind: Optional[str]) -> Optional[str]:
    try:
        return told(mine, kind)
    except (TypeError, ValueError):
        return None


def _is_plain_softmax(mine: Any) -> bool:
    """A helper that takes scores alone, and maybe an axis: it is no exercise of the book, and needs no mask."""
    needed = [each for each in parameters(mine) if each.default is each.empty]
    name = str(getattr(mine, "__name__", ""))
    return "softmax" in name.lower() and "mask" not in name.lower() and len(needed) == 1


def _chosen(module: ModuleType, path: Path, kind: Optional[str]) -> list[str]:
    """What to judge of a file: what is of this kind, or of any, and is no part of another such."""
    defined = _defined(module)
    kinds = {name: None if _is_plain_softmax(mine) else _kind(mine, None) for name, mine in defined.items()}
    found = [name for name in defined if (kinds[name] == kind if kind else kinds[name])]
    found = found or (list(defined) if kind else [])
    uses = _uses(path, list(defined))
    used = {name: {other for other in found if name in uses[other] and other not in uses[name]} for name in found}
    chosen = [name for name in found if not used[name]]
    if not chosen or (kind and len(chosen) > 1):
        there = (
            said("it defines {names}", names=", ".join(defined))
            if defined
            else said("it defines no function and no class")
        )
        why = said("several could be the {kind}", kind=kind) if chosen else said("no name tells what it is")
        words = "{why}: {there}.  Write {file}:NAME, and --kind with one of {kinds}"
        raise Problem("nothing_to_judge", said(words, why=why, there=there, file=path.name, kinds=", ".join(KINDS)))
    return chosen


def _uses(path: Path, names: Sequence[str]) -> dict[str, set[str]]:
    """{name: those of the names that its text uses, and what these use, itself not counted}."""
    direct: dict[str, set[str]] = {name: set() for name in names}
    for node in [node for _, text in parts(path) for node in ast.parse(text).body]:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name in direct:
            words = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
            direct[node.name] |= words.intersection(names) - {node.name}
    uses = {}
    for name in names:
        reached: set[str] = set()
        waiting = [name]
        while waiting:
            new = direct[waiting.pop()] - reached
            reached |= new
            waiting += new
        uses[name] = reached - {name}
    return uses


def _judged(module: ModuleType, name: str, kind: Optional[str], options: dict[str, Any]) -> Judged:
    if not hasattr(module, name):
        defined = _defined(module)
        near = get_close_matches(name, defined, 1)
        there = said("it defines {names}", names=", ".join(defined)) if defined else said("it defines nothing")
        there = said("did you mean {name}?", name=near[0]) if near else there
        raise Problem("no_such_name", said("it has no {name!r}: {there}", name=name, there=there))
    mine = getattr(module, name)
    try:
        answer = check(mine, kind, **options)
        if answer.mistakes != ["not_judged"]:
            return Judged(name, _kind(mine, kind), answer)
        problem = Problem("not_judged", str(answer))
    except SystemExit as error:
        path = Path(str(module.__file__))
        words = said("it ends the program (SystemExit) when it is called")
        problem = Problem("exits", words, _place(path, traceback.extract_tb(error.__traceback__))[0])
    except (TypeError, ValueError) as error:
        problem = Problem("not_judged", str(error))
    return Judged(name, None, None, problem)
