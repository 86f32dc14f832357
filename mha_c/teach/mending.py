"""A line of the student's own, changed in one place until all numbers are right: then it is known what it should be.

Each change is tried: the function runs with the changed line, and is compared with the book's on all probes.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any, NamedTuple, Optional

from .comparing import equal, output
from .mistakes import function
from .noting import Place
from .rounds import Run

_MOST = 160  # changes of one line that are tried
_COMPARED = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
_OTHER_WAY = {ast.Lt: ">=", ast.LtE: ">", ast.Gt: "<=", ast.GtE: "<", ast.Eq: "!=", ast.NotEq: "=="}
_SYMBOLS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.MatMult: "@"}
_NAMES = {"tril": "triu", "triu": "tril", "sin": "cos", "cos": "sin", "log_softmax": "softmax", "relu": "tanh",
          "sigmoid": "tanh", "softmin": "softmax", "mean": "sum", "argmax": "max", "tile": "repeat",
          "repeat": "repeat_interleave"}  # fmt: skip
_FILLS = (-1e9,)


class _Edit(NamedTuple):
    """Some columns of a line, and what stands there instead."""

    start: int
    end: int
    text: str


def mended(run: Run, form: str, place: Place) -> str:
    """The line as it should be; "" where no change of one place makes all numbers right."""
    found = _function_at(run, place)
    if found is None or (place.function == "__init__" and not run.student.is_class):
        return ""
    source, first = found[1], found[2]
    lines = source.splitlines()
    line = lines[place.number - first] if place.number - first < len(lines) else ""
    for edit in itertools.islice(_edits(source, place.number - first + 1, found[0]), _MOST):
        raw = line.encode()
        text = (raw[: edit.start] + edit.text.encode() + raw[edit.end :]).decode()
        changed = "\n".join([*lines[: place.number - first], text, *lines[place.number - first + 1 :]])
        code = _compiled(changed, found[0], place.file, first)
        if code is not None and _is_right_with(run, form, found[0], code):
            return text.strip()
    return ""


def _is_right_with(run: Run, form: str, theirs: FunctionType, code: CodeType) -> bool:
    made = function(form)
    with _instead(theirs, code):
        others = sorted(range(len(run.probes)), key=lambda i: equal(run.outcomes[i], run.right[i]))
        for i in others:
            if run.student.layers is not None and theirs.__name__ == "__init__":
                run.student.layers.remake(run.probes[i])
            if not equal(run.student(run.probes[i], run.way, run.asked), output(made, run.probes[i])):
                return False
    return True


@contextmanager
def _instead(theirs: FunctionType, code: CodeType) -> Iterator[None]:
    own = theirs.__code__
    theirs.__code__ = code
    try:
        yield
    finally:
        theirs.__code__ = own


# ---- the function that a line stands in ------------------------------------------------------------------------------


def _function_at(run: Run, place: Place) -> Optional[tuple[FunctionType, str, int]]:
    """(the outermost function around a line, its text, its first line)."""
    found = [each for each in _functions(run.student.mine) if each.__code__.co_filename == place.file]
    for each in sorted(found, key=lambda one: -one.__code__.co_firstlineno):
        try:
            lines, first = inspect.getsourcelines(each)
        except (OSError, TypeError):
            continue
        if first <= place.number < first + len(lines):
            indent = len(lines[0]) - len(lines[0].lstrip())
            return each, "".join(("if 1:\n" if indent else "", *lines)), first - bool(indent)
    return None


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


def _compiled(source: str, theirs: FunctionType, file: str, first: int) -> Optional[CodeType]:
    """The code of a changed text, which can take the place of the function's own."""
    free = theirs.__code__.co_freevars
    text = source.partition("\n")[2] if source.startswith("if 1:\n") else source
    inner = text.splitlines()
    indent = len(inner[0]) - len(inner[0].lstrip())
    body = [line[indent:] for line in inner]
    wrapped = ["def _around():", *(f"    {name} = None" for name in free), *(f"    {line}" for line in body)]
    try:
        waiting = [compile("\n".join(wrapped), file, "exec")]
    except (SyntaxError, ValueError):
        return None
    while waiting:
        code = waiting.pop()
        if code.co_name == theirs.__name__ and code.co_freevars == free:
            return code
        waiting += [x for x in code.co_consts if isinstance(x, CodeType)]
    return None


# ---- changes ---------------------------------------------------------------------------------------------------------


def _edits(source: str, number: int, theirs: FunctionType) -> Iterator[_Edit]:
    """Changes of one place in a line, the likeliest first."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return
    nodes = [x for x in ast.walk(tree) if isinstance(x, (ast.expr, ast.stmt)) and x.lineno == x.end_lineno == number]
    names = _names_of(theirs)
    for of in (_axes, _roots, _comparisons, _inversions, _fills, _calls, _without, _numbers_beside, _symbols, _orders):
        for node in nodes:
            yield from of(node)
    for node in nodes:
        yield from _other_names(node, names)
    for node in nodes:
        yield from _wrapped(node, theirs)


def _edit(node: Any, text: str) -> _Edit:
    return _Edit(node.col_offset, _end(node), text)


def _end(node: Any) -> int:
    return node.end_col_offset


def _number(node: Any) -> Any:
    """The whole number that is written there; None."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _number(node.operand)
        return None if inner is None else -inner
    return node.value if isinstance(node, ast.Constant) and type(node.value) is int else None


def _axes(node: Any) -> Iterator[_Edit]:
    if isinstance(node, ast.Call):
        named = [x.value for x in node.keywords if x.arg in ("axis", "dim")]
        told = [*named, *(x for x in node.args if _number(x) is not None)]
        yield from (_edit(x, "-1") for x in told if _number(x) != -1)
    elif isinstance(node, ast.Subscript) and _number(node.slice) not in (None, -1):
        yield _edit(node.slice, "-1")


def _roots(node: Any) -> Iterator[_Edit]:
    if isinstance(node, ast.BinOp):
        left, right = ast.unparse(node.left), ast.unparse(node.right)
        if isinstance(node.op, ast.Div):
            yield _edit(node.right, f"({right}) ** 0.5" if " " in right else f"{right} ** 0.5")
        elif isinstance(node.op, ast.Mult):
            yield _edit(node, f"{left} / ({right})" if " " in right else f"{left} / {right}")
        elif isinstance(node.op, ast.Pow):
            yield from (_edit(node.right, text) for text in ("0.5", "-0.5"))
    product = isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult)
    if product or (isinstance(node, ast.Call) and _called(node) in ("matmul", "bmm", "einsum")):
        arrays = [node.left] if product else [x for x in node.args if not isinstance(x, ast.Constant)]
        if arrays:
            yield _edit(node, f"{ast.unparse(node)} / {ast.unparse(arrays[0])}.shape[-1] ** 0.5")


def _called(node: Any) -> str:
    return str(getattr(node.func, "attr", getattr(node.func, "id", "")))


def _comparisons(node: Any) -> Iterator[_Edit]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        left, right = ast.unparse(node.left), ast.unparse(node.comparators[0])
        for table in (_COMPARED, _OTHER_WAY):
            if type(node.ops[0]) in table:
                yield _edit(node, f"{left} {table[type(node.ops[0])]} {right}")


def _inversions(node: Any) -> Iterator[_Edit]:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Invert, ast.USub)):
        yield _edit(node, ast.unparse(node.operand))
    if isinstance(node, ast.Call) and _called(node) in ("masked_fill", "masked_fill_", "where") and node.args:
        if len(node.args) == 3:
            one, two = node.args[1:]
            yield _Edit(one.col_offset, _end(two), f"{ast.unparse(two)}, {ast.unparse(one)}")
        if isinstance(node.args[0], ast.Name):
            yield _edit(node.args[0], f"~{node.args[0].id}")


def _fills(node: Any) -> Iterator[_Edit]:
    if isinstance(node, ast.Call) and _called(node) in ("masked_fill", "masked_fill_", "where", "full", "full_like"):
        yield from (_edit(x, "-1e9") for x in node.args[1:] if not isinstance(x, ast.Name))
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
        yield _edit(node.value, "-1e9")
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        yield _edit(node.right, "-1e9")


def _calls(node: Any) -> Iterator[_Edit]:
    """Another function; and a call with one argument without the function."""
    if isinstance(node, ast.Call):
        other = _NAMES.get(_called(node))
        if other and isinstance(node.func, ast.Attribute):
            yield _Edit(_end(node.func) - len(node.func.attr), _end(node.func), other)
        if len(node.args) == 1 and isinstance(node.func, ast.Name):
            yield _edit(node, ast.unparse(node.args[0]))
        if _called(node) in ("view", "reshape") and len(node.args) > 3:
            order = [node.args[0], node.args[2], node.args[1], *node.args[3:]]
            yield _edit(node, f"{ast.unparse(node.func)}({', '.join(map(ast.unparse, order))}).swapaxes(1, 2)")
        if _called(node) in ("view", "reshape", "flatten") and isinstance(node.func, ast.Attribute):
            held = node.func.value
            inner = ", ".join(ast.unparse(x) for x in node.args)
            yield _edit(node, f"{ast.unparse(held)}.swapaxes(1, 2).reshape({inner})")


def _numbers_beside(node: Any) -> Iterator[_Edit]:
    n = _number(node)
    if n is not None and not isinstance(n, bool):
        yield from (_edit(node, str(n + step)) for step in (-1, 1))
        # 10000 is a base of angles: as the end of a slice it would be right, too, and say nothing.
        others = (10000,) if abs(n) >= 100 else (2, 0, 1)
        yield from (_edit(node, str(x)) for x in others if x not in (n, n - 1, n + 1))


def _symbols(node: Any) -> Iterator[_Edit]:
    if isinstance(node, ast.BinOp) and type(node.op) in _SYMBOLS:
        own, left, right = _SYMBOLS[type(node.op)], ast.unparse(node.left), ast.unparse(node.right)
        if isinstance(node.right, ast.BinOp):
            right = f"({right})"
        yield from (_edit(node, f"{left} {each} {right}") for each in "+-*/" if each != own)


def _without(node: Any) -> Iterator[_Edit]:
    """One side of an operation alone; a method's object alone; a slice without its end."""
    if isinstance(node, ast.Slice) and node.upper is not None and node.step is None:
        yield _edit(node, f"{ast.unparse(node.lower) if node.lower is not None else ''}:")
    if isinstance(node, ast.BinOp):
        yield from (_edit(node, ast.unparse(x)) for x in (node.left, node.right))
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute) and not isinstance(node.func.value, ast.Name):
            yield _edit(node, ast.unparse(node.func.value))
        if node.args:
            yield _edit(node, ast.unparse(node.args[0]))


def _orders(node: Any) -> Iterator[_Edit]:
    """Two values, or two targets, in the other order; axes in another one."""
    if isinstance(node, (ast.Tuple, ast.Call)):
        items = node.elts if isinstance(node, ast.Tuple) else node.args
        for i, j in itertools.combinations(range(len(items)), 2) if len(items) < 5 else ():
            new = [*items]
            new[i], new[j] = new[j], new[i]
            yield _Edit(items[0].col_offset, _end(items[-1]), ", ".join(map(ast.unparse, new)))


def _names_of(theirs: FunctionType) -> list[str]:
    return [x for x in theirs.__code__.co_varnames if x != "self"]


def _other_names(node: Any, names: list[str]) -> Iterator[_Edit]:
    if isinstance(node, ast.Name) and node.id in names and isinstance(node.ctx, ast.Load):
        yield from (_edit(node, name) for name in names if name != node.id)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
        own = node.attr
        tail = own[-1:]
        yield from (_edit(node, f"self.{own[: -len(tail)]}{x}") for x in "qkvoQKVO" if tail and x != tail)
        for one, two in itertools.permutations(("query", "key", "value", "queries", "keys", "values"), 2):
            if own == one:
                yield _edit(node, f"self.{two}")


def _wrapped(node: Any, theirs: FunctionType) -> Iterator[_Edit]:
    """What is returned, projected."""
    if isinstance(node, ast.Return) and node.value is not None:
        inner = ast.unparse(node.value)
        for name in ("W_o", "c_proj", "proj", "out_proj", "w_o", "Wo", "fc_out", "to_out", "out", "o_proj"):
            yield _edit(node.value, f"self.{name}({inner})")
        yield _edit(node.value, f"{inner} @ W_o")
