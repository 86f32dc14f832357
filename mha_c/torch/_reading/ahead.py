"""From attention weights forward: what they meet, and what becomes of it."""

from __future__ import annotations

from typing import Any, Optional

from .found import Operand
from .graph import Node, Value
from .masks import Unclear, _letters
from .products import Contraction, Projected, contraction_of, projection_of
from .views import Mixes, View


class Ahead:
    """From the weights to what they meet."""

    def __init__(self, finder: Any, weights: Value, places: Any) -> None:
        self.finder, self.weights, self.places = finder, weights, places
        self.mixed_letters: Any = None

    def values(self) -> tuple[Optional[Operand], Optional[Value], Optional[Node], list[Node]]:
        """(values, what was mixed, the dropout, nodes on the way); Nones where weights meet no values."""
        value, view = self.weights, self.finder.views.whole(self.weights)
        drop: Any = None
        path: list[Node] = []
        letters = [list(place) for place in self.places]
        stack = [(value, view, drop, path)]
        changed: Optional[Node] = None
        while stack:
            value, view, drop, path = stack.pop(0)
            for node in value.users:
                found = None
                for one in [node, *(node.results[0].users if node.name == "mul" else ())]:
                    found = contraction_of(one)
                    if found is not None and not (found.a is value or found.b is value):
                        found = None  # of what was made of it
                    made = None if found is None else self._met(found, value, view, letters)
                    if made is not None:
                        return made, one.results[0], drop, [*path, *dict.fromkeys((node, one))]
                nexts = self._next(node, value, view, drop, path)
                if nexts is not None:
                    stack.append(nexts)
                elif found is None and node.name in (
                    "mul",
                    "masked_fill",
                    "masked_fill_",
                    "__setitem__",
                    "div",
                    "add",
                    "where",
                ):
                    if not _sums(node):
                        changed = changed or node
        if changed is not None:
            raise Unclear(f"attention weights go through {changed.name} before they meet the values", changed)
        return None, None, drop, []

    def _next(self, node: Node, value: Value, view: View, drop: Any, path: list[Node]) -> Any:
        views = self.finder.views
        if not node.values() or node.values()[0] is not value:
            return None
        if node.name == "dropout":
            if drop is not None:
                raise Unclear("weights are dropped twice", node)
            return node.results[0], view, node, [*path, node]
        if views._is_view(node, True) and len(node.results) == 1:
            try:
                return node.results[0], views._step(view, node, node.results[0]), drop, [*path, node]
            except Mixes:
                return None
        return None

    def _met(self, found: Contraction, value: Value, view: View, letters: Any) -> Optional[Operand]:
        of_w, of_v, v = (found.of_a, found.of_b, found.b) if found.a is value else (found.of_b, found.of_a, found.a)
        places = self.finder._places(view, letters)
        own = {x: place for x, place in zip(of_w, places) if x != "."}
        summed = [x for x in of_w if x in of_v and x not in found.out + "."]
        keys = [x for x, place in own.items() if [letter for letter, _ in place] == ["k"]]
        if not keys or summed != keys:
            return None
        names, rest = [], []
        for x in of_v:
            if x == keys[0]:
                names.append("k")
            elif x == "." or x == "":
                names.append("")
            elif x in of_w:
                names.append(x)
                rest.append(x)
            else:
                names.append("d")
        made, v_places = self.finder.operand(v, names, rest)
        self.mixed_letters = []
        for x in found.out:
            place = own.get(x) or (v_places[of_v.index(x)] if x in of_v else [])
            self.mixed_letters.append([(a, b) for a, b in place])
        return made


def _sums(node: Node) -> bool:
    """An entropy, a mean of weights for a loss."""
    return all(user.name in ("sum", "mean") for result in node.results for user in result.users) and bool(
        node.results and node.results[0].users
    )


class Output:
    """From what was mixed to the end: joined heads, the output projection, its dropout."""

    def __init__(self, finder: Any, mixed: Value, letters: Any, values: Any) -> None:
        self.finder = finder
        self.nodes: list[Node] = []
        self.projected: Optional[Projected] = None
        self.dropout: Optional[Node] = None
        self.value, self.view = mixed, finder.views.whole(mixed)
        self.letters = [list(place) for place in letters]
        self._joined()
        self.axes = self._axes()
        self._projected()

    def _axes(self) -> tuple[str, ...]:
        try:
            return _letters(self.finder._places(self.view, self.letters))
        except (Unclear, Mixes):
            return ()

    def _joined(self) -> None:
        views = self.finder.views
        while len(self.value.users) == 1:
            node = self.value.users[0]
            if not views._is_view(node, False) or len(node.results) != 1 or node.values()[0] is not self.value:
                return
            try:
                view = views._step(self.view, node, node.results[0])
            except Mixes:
                return
            if not views.covers(view):
                return
            self.view, self.value = view, node.results[0]
            self.nodes.append(node)

    def _projected(self) -> None:
        if len(self.value.users) != 1:
            return
        node = self.value.users[0]
        result = node.results[0] if node.results else None
        if result is None:
            return
        follower = result.users[0] if len(result.users) == 1 else None
        if (
            follower is not None
            and follower.name == "add"
            and projection_of(self.finder.views, follower.results[0]) is not None
        ):
            result, node = follower.results[0], follower
        found = projection_of(self.finder.views, result)
        if found is None or found.source is not self.value or max(found.features) >= len(self.axes):
            return
        letters = [self.axes[i] for i in found.features]
        if letters == ["d", "h"]:
            found, letters = found._replace(ins=found.ins[::-1]), ["h", "d"]
        if letters not in (["hd"], ["d"], ["h", "d"]) or len(found.result_features) != 1 or found.ones:
            return
        rows = found.rows(range(int(result.shape[found.result_features[0]])))
        if rows is None:
            return
        weight, bias = rows
        self.projected = Projected((weight,), bias, tuple(x.line for x in found.nodes))
        axes = [x for i, x in enumerate(self.axes) if i not in found.features]
        axes.insert(found.result_features[0], "c")
        self.axes, self.value = tuple(axes), result
        self.nodes += found.nodes
        if len(result.users) == 1 and result.users[0].name == "dropout":
            self.dropout = result.users[0]
            self.value = self.dropout.results[0]
            self.nodes.append(self.dropout)
