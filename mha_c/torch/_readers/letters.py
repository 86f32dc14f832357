"""The axes of a tensor by what they mean, told by the formulas of their sizes.

"b" items, "h" heads, "q" queries, "k" keys, "c" features, "1" an axis of one.  A tensor whose axes follow from the
inputs' axes in another way has no letters.
"""

from __future__ import annotations

from typing import Any, Optional

from .._reading.graph import Node, Value
from .._reading.shapes import PERMUTING, permutation
from .._reading.sizes import Axis, formula_of
from .._reading.views import CASTS

SAME_ORDER = frozenset(("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "squeeze_", "unsqueeze_"))
_AS_IT_IS = frozenset(("contiguous", "clone", "requires_grad_", "alias"))
TURNS = frozenset(("transpose", "permute", "swapaxes", "movedim", "mT", "T", "t", "swapdims"))


def axes_of_source(value: Value, letters: str) -> dict[Any, str]:
    """{formula: letter} of an operand's source: what sizes mean in this call.  A formula that means two is left out."""
    found: dict[Any, str] = {}
    for n, letter in zip(value.shape, letters):
        formula = formula_of(n)
        if isinstance(formula, Axis):
            found[formula] = letter if found.get(formula, letter) == letter else "?"
    return found


def letters_of(value: Value, meanings: dict[Any, str]) -> str:
    """The letters of a value's axes: "c" where the size is a plain number, "1" where that is 1, "?" where unknown."""
    found = ""
    for n in value.shape:
        formula = formula_of(n)
        if isinstance(formula, int):
            found += "1" if formula == 1 else "c"
        else:
            found += meanings.get(formula, "?")
    return found


def _without_ones(letters: str) -> str:
    return letters.replace("1", "")


def view_of(node: Node, meanings: dict[Any, str]) -> Optional[Value]:
    """What a node gives another shape to, its numbers in an order that the letters tell; None of any other node."""
    given = node.values()
    if len(given) != 1 or len(node.results) != 1 or node.writes is not None:
        return None
    (before,), (after,) = given, node.results
    if node.name in _AS_IT_IS or node.name in TURNS:
        return before
    if node.name in CASTS:  # .cpu() of a tensor that is there, .float() of float32
        return before if (before.dtype, before.device) == (after.dtype, after.device) else None
    if node.name in SAME_ORDER:
        one, other = (_without_ones(letters_of(x, meanings)) for x in (before, after))
        return before if one == other and "?" not in one else None
    if node.name == "__getitem__":  # x[None], x[:, None]: no index takes a part
        index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        whole = all(each is None or each is Ellipsis or each == slice(None) for each in index)
        return before if whole else None
    return None


def first_after(node: Node, ends: Any, meanings: dict[Any, str]) -> Node:
    """What is done first, on the way to a node, to one of the values whose ids these are."""
    found = one = node
    while one.values() and id(one.values()[0]) not in ends:
        before = one.values()[0].node
        if before is None:
            return node
        one = before
        found = found if view_of(one, meanings) is not None else one
    return found


def seen_through(letters: str, nodes: list[Node]) -> str:
    """The letters of what views make of a tensor of these letters; "?" where an axis could not be followed.

    Sizes do not tell queries from keys where both are of one input: the views themselves are followed.
    """
    for node in nodes:
        before, after = (
            ["1" if formula_of(n) == 1 else "" for n in x.shape] for x in (node.values()[0], node.results[0])
        )
        if node.name == "mean":
            letters = _without_heads(letters, node)
        elif node.name in TURNS:
            if node.name not in PERMUTING:
                return "?"
            letters = "".join(letters[i] for i in permutation(node.name, node.args, node.kwargs))
        elif before != after:
            rest = [letter for letter, one in zip(letters, before) if not one]
            if after.count("") != len(rest):
                return "?"
            letters = "".join(one or rest.pop(0) for one in after)
    return letters


def _without_heads(letters: str, node: Node) -> str:
    """The letters of the mean over the axis of heads; "?" of any other mean."""
    axis = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    keep = node.args[2] if len(node.args) > 2 else node.kwargs.get("keepdim", False)
    axis = axis[0] if isinstance(axis, (tuple, list)) and len(axis) == 1 else axis
    if not isinstance(axis, int) or "dtype" in node.kwargs or letters[axis : axis + 1 or None] != "h":
        return "?"
    axis %= len(letters)
    return letters[:axis] + "1" * bool(keep) + letters[axis + 1 :]
