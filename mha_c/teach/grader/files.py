"""A student's file, judged: what it defines is given to `check`.  `python -m mha_c check` prints what this finds."""

from __future__ import annotations

import contextlib
import io
import linecache
import os
import re
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any, Callable, NamedTuple, Optional

from ..asking.answers import UNNAMED, Answer, readable
from ..asking.kinds import told, unknown_kind
from ..asking.making import CannotAsk, Unmade
from ..asking.mistakes import KINDS
from ..checks.checking import check
from ..checks.verdicts import exits
from ..words.sentences import said
from .choosing import Definitions, defined, layer_of, made_by_main
from .notebooks import is_part, parts


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

    @property
    def ok(self) -> Optional[bool]:
        return self.answer.ok if self.answer and not self.problem else None

    @property
    def text(self) -> str:
        """The answer, behind why it is no verdict."""
        return "\n\n".join(str(each) for each in (self.problem, self.answer) if each)

    def as_dict(self) -> dict[str, Any]:
        answer = self.answer
        return {
            "name": self.name,
            "kind": self.kind,
            "ok": self.ok,
            "mistakes": answer.mistakes if answer else [],
            "lines": [line.as_dict() for line in answer.lines] if answer else [],
            "mask": answer.mask if answer else None,
            "notes": answer.notes if answer else [],
            "text": self.text,
            "problem": self.problem.as_dict() if self.problem else None,
        }


class FileReport:
    """What came of a file: `ok` is None where nothing was found wrong, and something could not be judged, or nothing
    was; `left` are names that were left out, and why."""

    def __init__(
        self,
        file: str,
        judged: Sequence[Judged] = (),
        problem: Optional[Problem] = None,
        left: Sequence[Judged] = (),
    ) -> None:
        self.file, self.judged, self.problem, self.left = file, list(judged), problem, list(left)
        oks = [each.ok for each in self.judged]
        self.ok = False if False in oks else True if oks and all(oks) and not problem else None

    def as_dict(self) -> dict[str, Any]:
        problem = self.problem.as_dict() if self.problem else None
        checked = [each.as_dict() for each in self.judged]
        left = {each.name: each.problem.as_dict() for each in self.left if each.problem}
        return {"file": self.file, "ok": self.ok, "checked": checked, "left_out": left, "problem": problem}

    def __str__(self) -> str:
        left = [said("Left out: {name}: {why}", name=each.name, why=each.problem) for each in self.left]
        if self.problem:
            says = said("{file} cannot be judged: {problem}", file=self.file, problem=self.problem)
            return "\n\n".join([says, *left])
        verdicts = {True: "right", False: "wrong", None: "cannot be judged"}
        texts = []
        for each in self.judged:
            verdict = said(verdicts[each.ok])
            what = f"{self.file}:{each.name}{f' ({each.kind})' if each.kind else ''}"
            texts.append(f"{said('{what}: {verdict}', what=what, verdict=verdict)}\n\n{each.text}")
        return "\n\n".join([*texts, *left] or [self.file])


def judged(file: str, name: Optional[str] = None, kind: Optional[str] = None, **options: Any) -> FileReport:
    """The report on a file: on `name`, or on the attentions that the file defines.

    What another of these uses is judged as a part of it, a model or a block that holds one not at all.  What the file
    prints goes to stderr.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr), no_input():
            if kind is not None and kind not in KINDS:
                raise Problem("no_such_kind", str(unknown_kind(kind)))
            module = loaded(Path(file))
            if name:
                return FileReport(file, [_judged(module, name, kind, options)])
            return _all_judged(module, Path(file), kind, options)
    except Problem as problem:
        return FileReport(file, problem=problem)


@contextlib.contextmanager
def no_input() -> Iterator[None]:
    """Nobody is asked, and no grading loop's own input is read."""
    kept, sys.stdin = sys.stdin, io.StringIO()
    try:
        yield
    finally:
        sys.stdin = kept


def loaded(path: Path) -> ModuleType:
    """The file as a module, run as `python FILE` would run it, but its name is not __main__, and no input is read.

    A file of a package finds the package's other modules, as `python -m` would have it.
    """
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
    root, module.__package__ = _package(path.resolve())
    sys.path.insert(0, str(root))
    if module.__package__:  # last, since a package's logging.py is not Python's
        sys.path.append(str(path.resolve().parent))
    sys.argv = [str(path)]
    try:
        for name, text in parts(path):
            if isinstance(text, str):  # of a cell, which no traceback finds in a file
                linecache.cache[name] = len(text), None, text.splitlines(True), name
            exec(compile(text, name, "exec"), module.__dict__)
    except BaseException as error:
        raise _import_problem(path, readable(error)) from error
    return module


def _package(path: Path) -> tuple[Path, str]:
    """The folder from which a file is imported, and the name of its package; "" where it is in none."""
    root, names = path.parent, list[str]()
    while (root / "__init__.py").is_file() and root.name:
        names.insert(0, root.name)
        root = root.parent
    return root, ".".join(names)


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
def ended_after(seconds: float, file: str, show: Callable[[FileReport], Any]) -> Iterator[None]:
    """Ends the process after so long, whatever the file does then; `show` gets the report."""
    watched = threading.get_ident()

    def end() -> None:
        frames = traceback.extract_stack(sys._current_frames()[watched])
        line, where, text = _place(Path(file), frames)
        words = said("it still runs after {seconds:g} seconds.", seconds=seconds) + f"{where}\n{text}"
        show(FileReport(file, problem=Problem("takes_too_long", words.strip(), line)))
        os._exit(2)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def no_answer(status: Optional[int], seconds: float) -> tuple[str, str]:
    """The problem's id and words where the process that judged ended with this status, or still runs (None)."""
    if status is None:
        return "takes_too_long", said("it still runs after {seconds:g} seconds.", seconds=seconds)
    how = said("signal {number}", number=-status) if status < 0 else said("exit status {status}", status=status)
    return "ended", said(
        "it ended its process ({how}) before there was an answer: os._exit(), a crash in C, or no memory left.", how=how
    )


# What a right attention has, too, that is another than the book's.
_OF_OTHERS = UNNAMED | {"extra_parameter"}


def _all_judged(module: ModuleType, path: Path, kind: Optional[str], options: dict[str, Any]) -> FileReport:
    """The report on what a file defines: what is of this kind, or of any, and is no part of another such."""
    definitions = Definitions(module, path)
    found = [name for name in definitions.attentions if kind in (None, definitions.all[name].kind)]
    chosen = definitions.outermost(found or (list(definitions.all) if kind else []))
    left = [Judged(x, None, None, Problem("unmade", why)) for x, why in definitions.left.items()]
    if not chosen or (kind and len(chosen) > 1):
        why = said("several could be the {kind}", kind=kind) if chosen else said("no name tells what it is")
        words = "{why}: {there}.  Write {file}:NAME, and --kind with one of {kinds}"
        there = _there([*definitions.all])
        text = said(words, why=why, there=there, file=path.name, kinds=", ".join(KINDS))
        return FileReport(str(path), problem=Problem("nothing_to_judge", text), left=left)
    judged: list[Judged] = []
    while chosen:
        name = chosen.pop(0)
        each = _judged(module, name, kind, options)
        mistakes = each.answer.mistakes if each.answer else []
        if each.ok is None or {*mistakes[:1]} & (UNNAMED - {"one_line"}):  # of a part it may be known what is wrong
            covered = set().union(*(definitions.all[other].uses for other in (*chosen, *(x.name for x in judged))))
            chosen += [part for part in definitions.parts_of(name) if part not in covered and not kind]
        definition, vague = definitions.all[name], bool(mistakes) and {*mistakes} <= _OF_OTHERS
        known = {"kind": definition.kind, "file": path.name, "name": name}
        if each.ok or kind or (definition.is_sure() and not (vague and definition.may_be_another())):
            judged.append(each)
        elif definition.is_sure():
            words = "it may be another attention than the book's {kind}: write {file}:{name} to compare it with that"
            judged.append(each._replace(problem=Problem("not_sure", said(words, **known))))
        else:
            words = "its name alone says that it may be of the kind {kind}: write {file}:{name} to judge it"
            left.append(Judged(name, None, None, Problem("not_sure", said(words, **known))))
    return FileReport(str(path), judged, left=left)


def _kind(mine: Any, kind: Optional[str]) -> Optional[str]:
    try:
        return told(mine, kind)
    except (TypeError, ValueError, Unmade):
        return None


def _there(names: Sequence[str]) -> str:
    return said("it defines {names}", names=", ".join(names)) if names else said("it defines no function and no class")


def _judged(module: ModuleType, name: str, kind: Optional[str], options: dict[str, Any]) -> Judged:
    if not hasattr(module, name):
        names = defined(module)
        near = get_close_matches(name, names, 1)
        there = said("it defines {names}", names=", ".join(names)) if names else said("it defines nothing")
        there = said("did you mean {name}?", name=near[0]) if near else there
        raise Problem("no_such_name", said("it has no {name!r}: {there}", name=name, there=there))
    mine = getattr(module, name)
    try:
        answer = check(mine, kind, **options)
        if isinstance(answer.error, (CannotAsk, Unmade)):  # check made none, and the file may have made one
            layer = layer_of(module, mine)
            answer = answer if layer is None else check(layer, kind, **options)
    except (TypeError, ValueError) as error:
        return Judged(name, None, None, Problem("not_judged", str(readable(error))))
    except KeyboardInterrupt as error:  # of the file: nobody is at this keyboard
        answer = exits(mine, error, [])
    missing = _only_in_main(module, answer.error)
    if missing:
        words = (
            '{name} has a value only under `if __name__ == "__main__":`, which is not run: give it one above that line'
        )
        return Judged(name, None, None, Problem("only_in_main", said(words, name=missing)))
    ended = [id for id in ("exits", "internal", "not_judged") if answer.mistakes == [id]]
    if not ended:
        return Judged(name, _kind(mine, kind), answer)
    path, raised = Path(str(module.__file__)), answer.error
    line = _place(path, traceback.extract_tb(raised.__traceback__))[0] if raised else None
    return Judged(name, None, None, Problem(ended[0], str(answer), line))


def _only_in_main(module: ModuleType, error: Optional[BaseException]) -> str:
    """The name that is missing, if the file has a value for it where only a program runs."""
    cause = error.__cause__ if isinstance(error, Unmade) else error
    found = re.match(r"name\s'(.+)'", str(readable(cause))) if isinstance(cause, NameError) else None
    return found[1] if found and found[1] in made_by_main(Path(str(module.__file__))) else ""
