"""Heads that stand in a list, each with projections of its own: together they are one attention."""

from __future__ import annotations

from typing import Any, Optional

from .ahead import Output
from .atoms import of_number
from .attention import Finder
from .found import Attention, Operand
from .graph import Node, Reading, Value, walked
from .products import Projected
from .sizes import formula_of


def of_listed_heads(reading: Reading, found: list[Any]) -> Optional[Attention]:
    """The one attention of which each of `found` is a head: they attend in the same way to the same inputs, and what
    they give stands side by side.  None where it is not so."""
    first = found[0]
    if not all(_is_head(reading, one) and _is_like(first, one) for one in found):
        return None
    joint = _joint([one.output for one in found])
    sides = [_joined([getattr(one, side) for one in found]) for side in ("queries", "keys", "values")]
    if joint is None or None in sides:
        return None
    finder = Finder(reading)
    letters: Any = [
        [(letter, finder.views.size(n))] if letter else [] for letter, n in zip(first.output_axes, first.output.shape)
    ]
    letters[-1] = [("h", of_number(len(found))), ("d", of_number(int(first.output.shape[-1])))]
    end = Output(finder, joint.results[0], letters, sides[2])
    queries, keys, values = sides
    return first._replace(
        queries=queries, keys=keys, values=values, weights=None, weights_axes=(), dropped=None,
        mixed=joint.results[0], output=end.value, output_axes=end.axes, projected_output=end.projected,
        output_dropout=end.dropout, nodes=frozenset((joint, *end.nodes)).union(*[one.nodes for one in found]),
    )  # fmt: skip


def _is_head(reading: Reading, one: Any) -> bool:
    """Whether it is one head, whose weights nobody else sees and whose output is as it was mixed."""
    if not isinstance(one, Attention) or one.kind != "dot" or one.values is None or one.output is None:
        return False
    seen = {id(x) for x in (*walked(reading.output), *(y for each in reading.effects for y in walked(each.value)))}
    hidden = [x for x in (one.weights, one.dropped) if x is not None]
    if any(id(x) in seen or len(x.users) != 1 for x in hidden) or not one.output_axes or one.output_axes[-1] != "d":
        return False
    plain = one.projected_output is None and one.softcap is None and one.sinks is None
    return plain and all(_is_side(x) for x in (one.queries, one.keys, one.values))


def _is_side(side: Operand) -> bool:
    return side.projected is not None and side.turn is None and bool(side.heads == 1)


def _is_like(first: Any, one: Any) -> bool:
    """Whether two heads attend in the same way to the same inputs."""
    if any(
        a.source is not b.source or a.source_axes != b.source_axes or a.axes != b.axes
        for a, b in ((first.queries, one.queries), (first.keys, one.keys), (first.values, one.values))
    ):
        return False
    if isinstance(first.scale, (tuple, Value)) or formula_of(first.scale) != formula_of(one.scale):
        return False
    masks, others = ([mask._replace(line=first.line) for mask in x.masks] for x in (first, one))
    same = masks == others and first.dropout == one.dropout and first.output_axes == one.output_axes
    return bool(same and int(first.output.shape[-1]) == int(one.output.shape[-1]))


def _joint(outputs: list[Value]) -> Optional[Node]:
    """The node that puts these side by side, along their features, and in this order; nobody else has them."""
    users = [user for value in outputs for user in value.users]
    node = users[0] if users else None
    if node is None or node.name != "cat" or len(users) != len(outputs) or any(user is not node for user in users):
        return None
    given, axis = node.args[0], node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    in_order = len(given) == len(outputs) and all(x is y for x, y in zip(given, outputs))
    return node if in_order and int(axis) % len(outputs[0].shape) == len(outputs[0].shape) - 1 else None


def _joined(sides: list[Operand]) -> Optional[Operand]:
    """Queries, keys or values of all heads: the rows of their weights one after the other."""
    parts: Any = [side.projected for side in sides]
    n_rows = {sum(len(rows.rows) for rows in part.weight) for part in parts}
    if len({bool(part.bias) for part in parts}) > 1 or len(n_rows) > 1:
        return None
    weight, bias, lines = (tuple(x for part in parts for x in part[i]) for i in range(3))
    nodes = tuple(dict.fromkeys(node for side in sides for node in side.nodes))
    return sides[0]._replace(projected=Projected(weight, bias, lines), heads=len(sides), nodes=nodes)
