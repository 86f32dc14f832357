"""Rotary positions, as readers write them: x * cos + rotate_half(x) * sin."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

from .graph import Line, Node, Value
from .views import ONE, Mixes, Product


class Turn(NamedTuple):
    """Rotary positions on queries or keys.

    pairs     "halves": feature i turns with i + D/2
    cos, sin  the Values of the tables that were multiplied in, at the shape at which they were
    features  how many features turn: all
    """

    pairs: str
    cos: Value
    sin: Value
    features: int
    line: Line


def turned(views: Any, tables: Any, source: Value) -> Optional[tuple[Turn, Value, list[Node]]]:
    """(the turn, the value that is turned, nodes) of a value that was turned; None of any other.

    Other ways (pairs of neighbours, complex numbers) have no Turn: the value that they give is the source then.
    """
    node = source.node
    if node is None or node.name != "add" or len(node.args) != 2 or node.kwargs or len(node.values()) != 2:
        return None
    products = [value.node for value in node.values()]
    if any(one is None or one.name != "mul" or len(one.values()) != 2 for one in products):
        return None
    for by_cos, by_sin in (products, products[::-1]):
        found = _halves(views, node, by_cos, by_sin)
        if found is not None:
            return found
    return None


def _halves(views: Any, node: Node, by_cos: Any, by_sin: Any) -> Optional[tuple[Turn, Value, list[Node]]]:
    for x, cos in (by_cos.values(), by_cos.values()[::-1]):
        for half, sin in (by_sin.values(), by_sin.values()[::-1]):
            nodes = _rotated_half(views, half, x)
            if nodes is not None and x.shape == node.results[0].shape:
                turn = Turn("halves", cos, sin, int(x.shape[-1]), node.line)
                return turn, x, [node, by_cos, by_sin, *nodes]
    return None


def _rotated_half(views: Any, half: Value, x: Value) -> Optional[list[Node]]:
    """The nodes of cat((-x2, x1), -1), where x1 and x2 are the halves of x."""
    made = half.node
    if made is None or made.name != "cat" or len(made.values()) != 2:
        return None
    axis = made.args[1] if len(made.args) > 1 else made.kwargs.get("dim", 0)
    last = len(x.shape) - 1
    negative, first = made.values()
    minus = negative.node
    if axis not in (-1, last) or minus is None or minus.name != "neg":
        return None
    size = views.size(x.shape[-1])
    if size.formulas or size.number % 2:
        return None
    width, nodes = size.number // 2, [made, minus]
    for part, start in ((first, 0), (minus.values()[0], width)):
        try:
            view = views.of(part, stop=(x,))
        except Mixes:
            return None
        atoms = view.axes[-1]
        whole = views.whole(x).axes[:-1] == view.axes[:-1]
        own = ((last, Product(width), ONE),) if width > 1 else ()
        if view.source is not x or not whole or atoms != own:
            return None
        if dict(view.offsets) != ({last: start} if start else {}):
            return None
        nodes += view.nodes
    return nodes
