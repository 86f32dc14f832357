"""Changes of one place that lay numbers out otherwise: pairs that are turned, positions, heads, letters of einsum."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from typing import Any

from .places import SYMBOLS, WIDTH_OF_HEAD, Edit, Scope, bracketed, called, end_of, instead, number_in


def sides(node: Any, _: Scope) -> Iterator[Edit]:
    """Of a sum of two products, a factor of each in the other's place."""
    if isinstance(node, ast.BinOp) and isinstance(node.left, ast.BinOp) and isinstance(node.right, ast.BinOp):
        one, two, symbol = node.left, node.right, SYMBOLS.get(type(node.op))
        if symbol in ("+", "-") and isinstance(one.op, ast.Mult) and isinstance(two.op, ast.Mult):
            a, b, c, d = map(bracketed, (one.left, one.right, two.left, two.right))
            other = "-" if symbol == "+" else "+"
            for pair in ((c, b, a, d), (a, d, c, b), (c, d, a, b)):
                yield from (
                    instead(node, "{} * {} {} {} * {}".format(*pair[:2], each, *pair[2:])) for each in (symbol, other)
                )


def signs_of_both(node: Any, _: Scope) -> Iterator[Edit]:
    """Of two sums beside each other the sign of a term in each: a turn the other way round."""
    if isinstance(node, ast.Tuple) and len(node.elts) == 2 and all(isinstance(x, ast.BinOp) for x in node.elts):
        one, two = map(_other_sign, node.elts)
        if one and two:
            yield Edit(node.elts[0].col_offset, end_of(node.elts[1]), f"{one}, {two}")


def _other_sign(node: Any) -> str:
    """A sum, or a difference, as the other; "" of anything else."""
    text, symbol = ast.unparse(node), SYMBOLS.get(type(node.op))
    if symbol not in ("+", "-"):
        return ""
    if text.startswith("-"):
        return text[1:]
    return f"{ast.unparse(node.left)} {'-' if symbol == '+' else '+'} {ast.unparse(node.right)}"


def whole_pairs(node: Any, _: Scope) -> Iterator[Edit]:
    """A count of columns as one of pairs."""
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
        yield instead(node.value, f"{node.value.id} // 2")
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and number_in(node.left) == 2:
        yield instead(node, f"2 * ({ast.unparse(node.right)} // 2)")


def with_input(node: Any, names: Scope) -> Iterator[Edit]:
    """What is returned, added to the first argument."""
    if isinstance(node, ast.Return) and node.value is not None and names.variables:
        yield instead(node.value, f"{names.variables[0]} + {ast.unparse(node.value)}")


def neighbours(node: Any, names: Scope) -> Iterator[Edit]:
    """A slice of every n-th feature, as one of neighbours."""
    if isinstance(node, ast.Slice) and node.step is not None and node.lower is not None:
        start, gap = ast.unparse(node.lower), ":"
    elif isinstance(node, ast.Call) and called(node) == "slice" and len(node.args) == 3:
        start, gap = ast.unparse(node.args[0]), ", "
    else:
        yield from _of_each_head(node, names)
        return
    for d in (x for x in names.variables if WIDTH_OF_HEAD.fullmatch(x)):
        text = f"{start} * {d}{gap}({start} + 1) * {d}"
        yield instead(node, text if gap == ":" else f"slice({text})")


def _of_each_head(node: Any, names: Scope) -> Iterator[Edit]:
    """The features of the first head, as those of the one that a loop is at."""
    is_call = isinstance(node, ast.Call) and called(node) == "slice" and len(node.args) == 2
    if is_call:
        first, last = node.args
    elif isinstance(node, ast.Slice) and node.upper is not None and node.step is None:
        first, last = node.lower, node.upper
    else:
        return
    if (first is None or number_in(first) == 0) and isinstance(last, (ast.Name, ast.Attribute)):
        d = ast.unparse(last)
        for head in names.counters:
            ends = f"{head} * {d}", f"({head} + 1) * {d}"
            yield instead(node, f"slice({', '.join(ends)})" if is_call else ":".join(ends))


def of_groups(node: Any, names: Scope) -> Iterator[Edit]:
    """The group of a head: by a division, where the rest of one is taken."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
        yield from (instead(node, f"{ast.unparse(node.left)} // {x}") for x in names.variables)


def ranges(node: Any, names: Scope) -> Iterator[Edit]:
    """arange(1, n + 1), arange(n // 2) as arange(n), arange(0, n, 2); with an offset."""
    if not (isinstance(node, ast.Call) and called(node) in ("arange", "range") and node.args):
        return
    name_of_call, first, last = ast.unparse(node.func), node.args[0], node.args[-1]
    if len(node.args) > 1 and isinstance(node.args[1], ast.BinOp) and number_in(first) is not None:
        yield Edit(first.col_offset, end_of(node.args[1]), ast.unparse(node.args[1].left))
    if isinstance(last, ast.BinOp) and isinstance(last.op, ast.FloorDiv):
        yield Edit(first.col_offset, end_of(last), f"0, {ast.unparse(last.left)}, 2")
    if len(node.args) == 1:
        yield instead(first, f"0, {ast.unparse(first)}, 2")
        for name in names.variables:
            if re.search("off|start|pos", name) and name_of_call != "range":
                yield instead(node, f"({ast.unparse(node)} + {name})")


def interleaved(node: Any, _: Scope) -> Iterator[Edit]:
    """(head_dim, heads), transposed, as (heads, head_dim)."""
    yield from _cut_again(node)
    if not (isinstance(node, ast.Call) and called(node) in ("transpose", "permute")):
        return
    made: Any = getattr(node.func, "value", None)
    if not isinstance(made, ast.Call):
        return
    if called(made) in ("view", "reshape") and len(made.args) == 4:
        one, two, three, four = map(ast.unparse, made.args)
        start = f"{ast.unparse(made.func)}({one}, {two}, {four}, {three})"
    elif called(made) == "unflatten" and isinstance(made.args[-1], ast.Tuple) and len(made.args[-1].elts) == 2:
        three, four = map(ast.unparse, made.args[-1].elts)
        start = f"{ast.unparse(made.func)}({ast.unparse(made.args[0])}, ({four}, {three}))"
    else:
        return
    yield instead(node, f"{start}.swapaxes(1, 2)")
    if {*map(number_in, node.args)} in ({2, 3}, {-1, -2}):  # back to (heads, head_dim): no axis is left to move
        yield instead(node, start)


def _cut_again(node: Any) -> Iterator[Edit]:
    """Of a view whose axes a permute orders: the last two of its sizes, and their axes, exchanged."""
    made: Any = getattr(getattr(node, "func", None), "value", None)
    if not (isinstance(made, ast.Call) and called(node) == "permute" and called(made) in ("view", "reshape")):
        return
    sizes, last = [*map(ast.unparse, made.args)], len(made.args) - 1
    axes = [number_in(x) for x in node.args]
    counts_parts = {2, 3} & {*map(number_in, made.args[-2:])}  # queries, keys and values, not heads
    if len(sizes) > 4 and sorted(axes, key=str) == list(range(len(sizes))) and not counts_parts:
        sizes[-2:] = sizes[:-3:-1]
        order = (str({last: last - 1, last - 1: last}.get(x, x)) for x in axes)
        yield instead(node, f"{ast.unparse(made.func)}({', '.join(sizes)}).permute({', '.join(order)})")


def signs(node: Any, _: Scope) -> Iterator[Edit]:
    """Two halves with other signs, or in another order."""
    if isinstance(node, (ast.List, ast.Tuple)) and len(node.elts) == 2:
        one, two = (ast.unparse(x.operand if isinstance(x, ast.UnaryOp) else x) for x in node.elts)
        for pair in ((f"-{two}", one), (f"-{one}", two), (one, f"-{two}"), (two, one), (one, two)):
            yield Edit(node.elts[0].col_offset, end_of(node.elts[1]), ", ".join(pair))


def halves(node: Any, _: Scope) -> Iterator[Edit]:
    """Each number twice, or all of them once more."""
    if isinstance(node, ast.Call) and called(node) in ("repeat", "repeat_interleave", "tile") and node.args:
        of = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
        if of == "np":
            yield instead(node, f"np.concatenate([{ast.unparse(node.args[0])}] * 2, axis=-1)")
            yield instead(node, f"np.repeat({', '.join(map(ast.unparse, node.args[:2]))}, axis=1)")
            yield instead(node, f"np.tile({', '.join(map(ast.unparse, node.args[:2]))})")
        elif len(node.args) == 4:
            yield instead(node, f"{of}.repeat_interleave({ast.unparse(node.args[1])}, dim=1)")
            yield instead(node, f"{of}.repeat_interleave({ast.unparse(node.args[2])}, dim=2)")
    if isinstance(node, ast.Call) and called(node) in ("concatenate", "cat", "concat") and node.args:
        parts = node.args[0]
        if isinstance(parts, (ast.List, ast.Tuple)) and len({ast.unparse(x) for x in parts.elts}) == 1:
            one, np_or_torch = ast.unparse(parts.elts[0]), ast.unparse(node.func).rpartition(".")[0]
            yield instead(node, f"np.repeat({one}, 2, axis=-1)" if np_or_torch == "np" else
                        f"{one}.repeat_interleave(2, dim=-1)")  # fmt: skip


def letters(node: Any, _: Scope) -> Iterator[Edit]:
    """The letters of einsum, or the names of rearrange: two of the result, or of an operand, in the other order."""
    if not (isinstance(node, ast.Constant) and isinstance(node.value, str) and "->" in node.value):
        return
    sides = re.split(r"(->|,)", node.value)
    for at in range(0, len(sides), 2):
        parts = re.findall(r"\([^)]*\)|\w+", sides[at]) if " " in sides[at].strip() else list(sides[at])
        gap = " " if " " in sides[at].strip() else ""
        for i, j in itertools.combinations(range(len(parts)), 2):
            new = [*parts]
            new[i], new[j] = new[j], new[i]
            side = f"{gap}{gap.join(new)}{gap}"
            yield instead(node, repr("".join([*sides[:at], side, *sides[at + 1 :]]).strip()))
        for part in parts:
            inner = re.fullmatch(r"\((\w+) (\w+)\)", part)
            if inner:
                yield instead(node, repr(node.value.replace(part, f"({inner[2]} {inner[1]})")))
