"""The texts of a student's own that lines stand in: functions, methods, and constants of classes and files; each with
another line in the place of one.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any, Optional, Union

from ..asking.rounds import Run
from ..asking.written import tree_of
from .edits import edits
from .noting import forget_results, functions_noted, room_of, written_as, written_by_them
from .places import Edit, Scope


class _Text:
    """Lines of a student's file, numbered as there."""

    _text: list[str]
    _first: int

    def line(self, number: int) -> str:
        return self._text[number - self._first].rstrip("\n")


class FunctionText(_Text):
    """A function of the student's, and its text."""

    def __init__(self, made: FunctionType, attributes: Sequence[str]) -> None:
        lines, first = inspect.getsourcelines(made)
        self.made, self.file, self.name = made, made.__code__.co_filename, made.__name__
        self.lines = range(first, first + len(lines))
        # A method's text stands in no class here.
        self._text = ["if 1:\n", *lines] if lines[0][:1].isspace() else lines
        self._first = first - (self._text is not lines)
        of_file = [x for x in made.__globals__ if x in ("np", "torch") or callable(made.__globals__[x])]
        tree = tree_of("".join(self._text))
        loops = [x.target for x in ast.walk(tree) if isinstance(x, (ast.For, ast.comprehension))]
        counters = [x.id for each in loops for x in ast.walk(each) if isinstance(x, ast.Name)]
        variables = [x for x in _variables(made.__code__) if x != "self"]
        texts = [x.value for x in ast.walk(tree) if isinstance(x, ast.Constant) and isinstance(x.value, str)]
        self._names = Scope(
            variables, attributes, of_file, counters, _unread(tree, variables, attributes),
            [x for x in dict.fromkeys(texts) if x.isidentifier() and len(x) < 8],
        )  # fmt: skip
        # Of `for`, too: a list that its own loop appends to, by another name, has no end.
        self.may_loop = any(isinstance(x, (ast.While, ast.For)) for x in ast.walk(tree))
        again = [x for x in of_file if _leads_to(made.__globals__[x], made)]
        self._again = re.compile(rf"\b({'|'.join(again)})\(") if again else None
        if any(_leads_to(x, made) for x in _named_in(made)):
            self.may_loop, self._again = True, None
        self._nodes = _of_one_line(tree)
        self.memory: dict[Any, Any] = {}  # what is known of its lines

    def edits(self, number: int, of: str = "") -> Iterator[Edit]:
        """Changes of one place of a line."""
        nodes = [x for x in self._nodes if x.lineno == number - self._first + 1]
        if self.line(number).lstrip().startswith("def "):  # of its defaults a rate may be wrong
            nodes = [x for x in nodes if isinstance(x, ast.Constant) and type(x.value) is float]
        found = edits(nodes, self._names, of)
        return found if self._again is None else (x for x in found if not self._again.search(x.text))

    def changed(self, number: int, text: str) -> Optional[tuple[CodeType, Any]]:
        """The function's code with another text of a line, and its defaults; None where it is no Python."""
        at = number - self._first
        text_of_all = [*self._text[:at], text + "\n", *self._text[at + 1 :]]
        code = _compiled(text_of_all, self.made)
        defaults = self.made.__defaults__
        if code is not None and defaults and self.line(number).lstrip().startswith("def "):
            defaults = _defaults(text_of_all, self.made)
        return None if code is None else (code, defaults)

    @contextmanager
    def instead(self, change: tuple[CodeType, Any]) -> Iterator[None]:
        """While it is entered, the function is a changed one."""
        own = self.made.__code__, self.made.__defaults__
        self.made.__code__, self.made.__defaults__ = change
        try:
            yield
        finally:
            self.made.__code__, self.made.__defaults__ = own


class Constants(_Text):
    """What the lines of a class, or of a file, give a name, and are no functions: numbers, mostly."""

    may_loop = False

    def __init__(self, owner: Any, room: dict[str, Any]) -> None:
        lines, first = inspect.getsourcelines(owner)
        self.owner, self.file, self.name = owner, inspect.getsourcefile(owner) or "", getattr(owner, "__name__", "")
        self.room, self._first = room, max(first, 1)
        self.memory: dict[Any, Any] = {}
        self._text = lines
        tree = tree_of("".join(["if 1:\n", *lines] if lines[0][:1].isspace() else lines))
        shift = lines[0][:1].isspace()
        body: list[Any] = tree.body[0].body if shift else tree.body
        if isinstance(owner, type):
            body = body[0].body
        self._nodes: dict[int, list[Any]] = {}
        self.names: dict[int, str] = {}
        for node in body:
            target = node.targets[0] if isinstance(node, ast.Assign) else None
            if isinstance(target, ast.Name) and node.lineno == node.end_lineno and _is_plain(node.value):
                number = node.lineno - shift + self._first - 1
                self.names[number] = target.id
                self._nodes[number] = [x for x in ast.walk(node) if isinstance(x, (ast.expr, ast.stmt, ast.slice))]
        self.lines = range(min(self.names, default=0), max(self.names, default=-1) + 1)

    def edits(self, number: int, of: str = "") -> Iterator[Edit]:
        """Changes of one place of a line."""
        return edits(self._nodes.get(number, []), Scope([], [], []), of)

    def changed(self, number: int, text: str) -> Optional[tuple[str, Any]]:
        """The name, and its other value; None where there is none."""
        value = text.partition("=")[2].strip()
        code = _code(["def _value():\n", f"    return ({value})\n"])
        try:
            made = FunctionType(code.co_consts[0], self.room)() if code is not None else None
        except Exception:
            return None
        return None if made is None else (self.names[number], made)

    @contextmanager
    def instead(self, change: tuple[str, Any]) -> Iterator[None]:
        """While it is entered, the name has this value."""
        name, value = change
        own = getattr(self.owner, name)
        setattr(self.owner, name, value)
        try:
            yield
        finally:
            setattr(self.owner, name, own)


def _is_plain(node: Any) -> bool:
    """Whether an expression reads numbers, and names of a library, alone."""
    inner = [*ast.walk(node)]
    names = {x.id for x in inner if isinstance(x, ast.Name)}
    is_number = any(isinstance(x, (ast.Constant, ast.Attribute)) for x in inner)
    return is_number and names <= {"np", "math", "float", "torch"} and not any(isinstance(x, ast.Lambda) for x in inner)


def _of_one_line(tree: ast.AST) -> list[Any]:
    nodes: list[Any] = [x for x in ast.walk(tree) if isinstance(x, (ast.expr, ast.stmt, ast.slice))]
    return [x for x in nodes if getattr(x, "lineno", 0) == getattr(x, "end_lineno", -1)]


def _unread(tree: ast.AST, variables: Sequence[str], attributes: Sequence[str]) -> list[str]:
    """The variables, and what self keeps, that nothing in a function reads."""
    nodes = [*ast.walk(tree)]
    read = {x.id for x in nodes if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Load)}
    read |= {f"self.{x.attr}" for x in nodes if isinstance(x, ast.Attribute)}
    return [x for x in (*variables, *(f"self.{name}" for name in attributes)) if x not in read and x != "_"]


def _variables(code: CodeType) -> list[str]:
    """Those of a function, and of what stands in it."""
    inner = (x for x in code.co_consts if isinstance(x, CodeType))
    return list(
        dict.fromkeys([*code.co_varnames, *code.co_cellvars, *(name for each in inner for name in _variables(each))])
    )


def _leads_to(call: Any, made: FunctionType) -> bool:
    """Whether a call of something in a student's file may call this function of theirs again, or make its class."""
    waiting, met = [call], set()
    while waiting:
        each = waiting.pop()
        if each is made or (isinstance(each, type) and getattr(each, made.__name__, None) is made):
            return True
        if isinstance(each, FunctionType) and each not in met and written_by_them(each.__code__.co_filename):
            met.add(each)
            waiting += _named_in(each)
    return False


def _named_in(made: FunctionType) -> list[Any]:
    """What a function names of its file."""
    names = {name for code in _codes(made.__code__) for name in code.co_names}
    return [made.__globals__[name] for name in names if name in made.__globals__]


@lru_cache(maxsize=16)  # those of an answer, which may be tried for several ways to read weights
def _function(made: FunctionType, attributes: tuple[str, ...]) -> FunctionText:
    return FunctionText(made, attributes)


def _attributes(layer: Any) -> tuple[str, ...]:
    """The names under which it keeps layers, numbers and matrices."""
    kept = {**getattr(layer, "__dict__", {}), **getattr(layer, "_modules", {})}
    return tuple(name for name, x in kept.items() if name[:1] != "_" and (callable(x) or type(x) in (int, float)
                 or getattr(x, "ndim", 0) == 2))  # fmt: skip


def functions_of(run: Run) -> list[FunctionText]:
    """The functions of a student's, the innermost first."""
    layer: Any = run.student.layers.first if run.student.layers is not None else None
    inner = [*layer.modules()] if hasattr(layer, "modules") else [layer]
    attributes = {type(each).__name__: _attributes(each) for each in reversed(inner)}
    found: dict[CodeType, FunctionText] = {}
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


def lines_that_ran(run: Run, inputs: Any) -> list[tuple[Union[FunctionText, Constants], int]]:
    """The lines of the functions that ran for these inputs, and of the constants that they read."""
    forget_results(run.student.mine)
    with functions_noted() as ran:
        if run.student.layers is not None:
            run.student.layers.remake(inputs)
        run.student(inputs, run.way, run.asked)
    theirs = [each for each in functions_of(run) if each.made.__code__ in ran]
    read = {name for each in theirs for code in _codes(each.made.__code__) for name in code.co_names}
    found: list[tuple[Union[FunctionText, Constants], int]] = [(each, n) for each in theirs for n in each.lines]
    for constants in _constants(run.student.mine):
        found += [(constants, number) for number, name in constants.names.items() if name in read]
    return found


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _codes(each)


def _functions(mine: Any) -> Iterator[FunctionType]:
    """The functions of a student's module, and the methods of its classes."""
    call = written_as(mine)
    if isinstance(call, FunctionType):
        yield call
    for held in [call, *room_of(mine).values()]:
        for each in vars(held).values() if isinstance(held, type) else [held]:
            # What decorators, properties, partial and np.vectorize hold.
            for name in ("__wrapped__", "__func__", "fget", "func", "pyfunc"):
                each = each if isinstance(each, (type, FunctionType)) else getattr(each, name, each)
            each = getattr(each, "__wrapped__", each)
            if isinstance(each, FunctionType):
                yield each


def _constants(mine: Any) -> Iterator[Constants]:
    """Those of a student's file and of its classes."""
    room = room_of(mine)
    owners: list[Any] = [x for x in {id(x): x for x in [mine, *room.values()]}.values() if isinstance(x, type)]
    module = sys.modules.get(str(room.get("__name__")))
    for owner in [*owners, *([module] if module is not None and vars(module) is room else [])]:
        try:
            if written_by_them(inspect.getsourcefile(owner) or "<__"):
                yield Constants(owner, room)
        except (OSError, TypeError, SyntaxError, AttributeError, IndexError):
            continue


def _compiled(source: list[str], theirs: FunctionType) -> Optional[CodeType]:
    """The code of a changed text, which can take the place of the function's own."""
    free = theirs.__code__.co_freevars
    if source[0] == "if 1:\n":  # what stands in something else may read its variables
        indent = source[1][: len(source[1]) - len(source[1].lstrip())]
        source = ["def _around():\n", *(f"{indent}{name} = None\n" for name in free), *source[1:]]
    made = _code(source, theirs.__code__.co_filename)
    waiting = [] if made is None else [made]
    while waiting:
        code = waiting.pop()
        if code.co_name == theirs.__name__ and code.co_freevars == free:
            return code
        waiting += [x for x in code.co_consts if isinstance(x, CodeType)]
    return None


def _code(source: list[str], file: str = "<a value>") -> Optional[CodeType]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return compile("".join(source), file, "exec")
    except (SyntaxError, ValueError):
        return None


def _defaults(source: list[str], theirs: FunctionType) -> Any:
    """The defaults of a function's changed text, as far as they are numbers; else its own."""
    made = next(x for x in ast.walk(tree_of("".join(source))) if isinstance(x, ast.FunctionDef))
    own = theirs.__defaults__ or ()
    new = made.args.defaults
    if len(new) != len(own):
        return own
    return tuple(x.value if isinstance(x, ast.Constant) else old for x, old in zip(new, own))
