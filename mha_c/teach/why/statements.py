"""Changes of a student's line that look at more than one of its places: two names exchanged, a result that is thrown
away, a row that is not normalised, a condition that lacks another.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from typing import Any

from .places import Edit, Scope, bracketed, called, end_of, instead, number_in

_MIRRORED = {ast.Lt: ">", ast.LtE: ">=", ast.Gt: "<", ast.GtE: "<="}
_SAYS_MASK = re.compile("mask|pad|keep|hid|seen|visible|allow|future|blocked", re.IGNORECASE)
_FEW = 6  # names of a line, of which any two are exchanged


def thrown_away(node: Any, names: Scope) -> Iterator[Edit]:
    """A result that gets no name: that of what it was made of."""
    if isinstance(node, ast.Expr) and not isinstance(node.value, (ast.Constant, ast.Yield)):
        read = [x.id for x in ast.walk(node.value) if isinstance(x, ast.Name) and x.id in names.variables]
        yield from (instead(node, f"{name} = {ast.unparse(node)}") for name in dict.fromkeys(read))


def exchanged(node: Any, names: Scope) -> Iterator[Edit]:
    """Two variables, or two of what self keeps, each wherever the other stands."""
    if not isinstance(node, (ast.Assign, ast.Return)) or node.value is None:
        return
    read = [ast.unparse(x) for x in ast.walk(node.value) if _is_read(x, names)]
    for one, two in itertools.combinations(list(dict.fromkeys(read))[:_FEW], 2):
        if one.startswith("self.") == two.startswith("self."):
            either = rf"(?<![\w.]){re.escape(one)}\b|(?<![\w.]){re.escape(two)}\b"
            other = {one: two, two: one}
            parts = re.split(f"({either})", ast.unparse(node.value))
            yield instead(node.value, "".join(other.get(x, x) for x in parts))


def _is_read(node: Any, names: Scope) -> bool:
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
        return node.attr in names.attributes
    return isinstance(node, ast.Name) and node.id in names.variables


def over_rows(node: Any, _: Scope) -> Iterator[Edit]:
    """A sum, or a maximum, of all: of each row."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not node.args and not node.keywords:
        if node.func.attr in ("sum", "max", "mean"):
            yield instead(node, f"{ast.unparse(node.func)}(-1, keepdims=True)")


def of_numbers(node: Any, names: Scope) -> Iterator[Edit]:
    """A list that is returned: each of its numbers divided by their sum."""
    if isinstance(node, ast.Return) and isinstance(node.value, ast.Name) and node.value.id in names.variables:
        name = node.value.id
        yield instead(node.value, f"[x / sum({name}) for x in {name}]")


def exponentials(node: Any, names: Scope) -> Iterator[Edit]:
    """What is divided by its sum: its exponentials."""
    value = getattr(node, "value", None) if isinstance(node, (ast.Assign, ast.Return, ast.Expr)) else None
    text = ast.unparse(value) if value is not None else ""
    for name in names.variables if "sum" in text else ():
        new, n_changed = re.subn(rf"(?<![\w.])(?<!out=){re.escape(name)}(?!\w|=)", f"np.exp({name})", text)
        if n_changed == 2:
            yield instead(value, new)


def of_other_axes(node: Any, names: Scope) -> Iterator[Edit]:
    """An index for the second axis in the place of the first; a loop's variable for a number; no index at all."""
    if not isinstance(node, ast.Subscript):
        return
    if not isinstance(node.slice, ast.Tuple) and isinstance(node.slice, ast.Slice):
        yield instead(node.slice, f":, {ast.unparse(node.slice)}")
        yield Edit(end_of(node.value), end_of(node), "")
    places = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    for at in places:
        if number_in(at) is not None:
            yield from (instead(at, name) for name in names.counters if len(name) > 2)


def mirrored(node: Any, _: Scope) -> Iterator[Edit]:
    """A comparison of the two the other way round."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _MIRRORED:
        left, right = ast.unparse(node.left), ast.unparse(node.comparators[0])
        yield instead(node, f"{left} {_MIRRORED[type(node.ops[0])]} {right}")


def bounded(node: Any, names: Scope) -> Iterator[Edit]:
    """A distance with both of a window's ends."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        left, whole = node.left, ast.unparse(node)
        if isinstance(left, ast.Call) and called(left) == "abs" and left.args:
            one = bracketed(left.args[0])
            yield instead(node, f"({one} >= 0) & ({one} < {ast.unparse(node.comparators[0])})")
        elif number_in(node.comparators[0]) is not None:
            yield from (instead(node, f"({whole}) & ({bracketed(left)} < {name})") for name in names.variables
                        if re.search("win|width|size|span|band|^w$", name.lower()))  # fmt: skip


def per_head(node: Any, names: Scope) -> Iterator[Edit]:
    """A width that is computed with, or returned, divided by the number of heads."""
    if not isinstance(node, (ast.Assign, ast.Return)) or node.value is None:
        return
    kept = [node.value, *getattr(node.value, "elts", [])] if isinstance(node, ast.Assign) else []
    heads = [x for x in (*(f"self.{x}" for x in names.attributes), *names.variables) if "head" in x or x == "h"]
    for each in ast.walk(node.value):
        if _is_read(each, names) and each not in kept:
            divided = [f"{ast.unparse(each)} // {x}" for x in heads]
            yield from (instead(each, x if each is node.value else f"({x})") for x in divided)


def unread(node: Any, names: Scope) -> Iterator[Edit]:
    """What is computed, with a variable, or a mask of self's, that nothing reads."""
    is_computed = isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Div, ast.Mult, ast.Add))
    if is_computed:
        yield from (instead(node, f"{bracketed(node)} {sign} {name}") for name in names.unread for sign in "+*")
    value = getattr(node, "value", None) if isinstance(node, (ast.Assign, ast.Return)) else None
    if value is not None:
        yield from (
            instead(value, f"{name}({ast.unparse(value)})") for name in names.unread if re.match("self.*mask", name)
        )


def complement(node: Any, _: Scope) -> Iterator[Edit]:
    """What a large negative number is multiplied with: where it is 0, not where it is 1."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and isinstance(node.right, ast.UnaryOp):
        yield instead(node.left, f"(1 - {ast.unparse(node.left)})")


def inverted(node: Any, _: Scope) -> Iterator[Edit]:
    """The mask that a call, a place, or a name gets: its opposite."""
    masks: list[Any] = []
    if isinstance(node, ast.Call) and called(node) in ("masked_fill", "masked_fill_", "where"):
        masks = node.args[:1]
    elif isinstance(node, ast.Call):
        masks = [x.value for x in node.keywords if x.arg == "attn_mask"]
    elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
        at = node.targets[0].slice
        masks = at.elts if isinstance(at, ast.Tuple) else [at]
    elif isinstance(node, ast.Assign) and _SAYS_MASK.search(ast.unparse(node.targets[0])):
        masks = [node.value]
    for x in masks:
        if isinstance(x, (ast.Name, ast.Subscript, ast.Attribute)):
            yield instead(x, f"~{ast.unparse(x)}")


def other_corner(node: Any, _: Scope) -> Iterator[Edit]:
    """The corner of a triangle on the other side, or all but the corner; all of a table of ones as a corner."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return
    name, is_method = called(node), ast.unparse(node.func.value) not in ("np", "torch")
    if name == "ones" and node.args:
        yield from (instead(node, f"{ast.unparse(node)}.{text}") for text in ("tril()", "triu(1)"))
    if name not in ("tril", "triu"):
        return
    given = [*node.args[not is_method :], *(x.value for x in node.keywords)]
    k = number_in(given[0]) if given else 0
    if k is not None and len(given) < 2:
        other, step = ("triu", 1) if name == "tril" else ("tril", -1)
        start = ast.unparse(node.func.value) if is_method else f"{ast.unparse(node.args[0])}, "
        for new in (k + step, -k):
            call = f"{start}.{other}({new})" if is_method else f"{ast.unparse(node.func.value)}.{other}({start}{new})"
            yield instead(node, re.sub(r", 0\)$|(?<=\()0\)$", ")", call))


def joined_masks(node: Any, _: Scope) -> Iterator[Edit]:
    """Both of two masks in the place of either; one position compared with the other, not with a number of them."""
    signs = {ast.BitOr: "&", ast.BitAnd: "|"}
    if isinstance(node, (ast.AugAssign, ast.BinOp)) and type(node.op) in signs:
        one, two = (node.target, node.value) if isinstance(node, ast.AugAssign) else (node.left, node.right)
        sign = signs[type(node.op)] + "=" * isinstance(node, ast.AugAssign)
        yield instead(node, f"{ast.unparse(one)} {sign} {ast.unparse(two)}")
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        row, column = "[None, :]", "[:, None]"
        left = ast.unparse(node.left)
        for mine, other in ((row, column), (column, row)):
            if mine in left:
                yield instead(node.comparators[0], left.replace(mine, other))


def given_more(node: Any, names: Scope) -> Iterator[Edit]:
    """A call that lacks a mask: with is_causal, or with what nothing reads; or that hides what it must not."""
    if not isinstance(node, ast.Call) or not node.args:
        return
    last = [*node.args, *(x.value for x in node.keywords)][-1]
    if called(node) == "scaled_dot_product_attention":
        yield Edit(end_of(last), end_of(last), ", is_causal=True")
        yield from (Edit(end_of(last), end_of(last), f", attn_mask={x}") for x in names.unread if x.isidentifier())
        if len(node.args) > 2:
            flags = [i for i, x in enumerate(node.keywords) if x.arg == "is_causal"]
            kept = [ast.unparse(x) for x in node.args] + [
                f"{x.arg}={ast.unparse(x.value)}" for i, x in enumerate(node.keywords) if i not in flags
            ]
            yield from (Edit(node.args[0].col_offset, end_of(last), ", ".join(kept)) for _ in flags[:1])
    elif called(node) in names.of_file or (isinstance(node.func, ast.Attribute) and "self." in ast.unparse(node.func)):
        for x in names.unread:
            if _SAYS_MASK.search(x) and x.isidentifier():
                yield from (Edit(end_of(last), end_of(last), f", {text}") for text in (x, f"mask={x}"))


def of_all(node: Any, names: Scope) -> Iterator[Edit]:
    """What is written for the first item alone: for all; what reads the first: what a loop is at, wherever it does."""
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
        at = node.targets[0].slice
        if isinstance(at, ast.Tuple) and number_in(at.elts[0]) is not None:
            yield instead(at.elts[0], ":")
    if isinstance(node, ast.Assign) and len(re.findall(r"\[0[,\]]", ast.unparse(node.value))) > 1:
        for name in names.counters:
            yield instead(node.value, re.sub(r"\[0(?=[,\]])", f"[{name}", ast.unparse(node.value)))


def around_all(node: Any, _: Scope) -> Iterator[Edit]:
    """A function of the whole of a sum, not of its first term alone."""
    if isinstance(node, ast.BinOp) and isinstance(node.left, ast.Call) and len(node.left.args) == 1:
        if isinstance(node.op, (ast.Add, ast.Sub)) and isinstance(node.left.func, (ast.Name, ast.Attribute)):
            sign = "+" if isinstance(node.op, ast.Add) else "-"
            inner = f"{ast.unparse(node.left.args[0])} {sign} {ast.unparse(node.right)}"
            yield instead(node, f"{ast.unparse(node.left.func)}({inner})")


def other_texts(node: Any, names: Scope) -> Iterator[Edit]:
    """Another of the short texts of a function: a key."""
    if isinstance(node, ast.Constant) and node.value in names.texts:
        yield from (instead(node, repr(text)) for text in names.texts if text != node.value)


def everywhere(change: Edit, line: bytes) -> Edit:
    """The same change wherever the line has this text; as it is, where it has it once."""
    old = line[change.start : change.end]
    if len(old) < 3 or old[:1].isalnum() or line.count(old) < 2:
        return change
    return Edit(0, len(line), line.replace(old, change.text.encode()).decode())
