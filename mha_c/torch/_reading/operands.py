"""Where a side of a product came from: views, a scale, turns, the projection."""

from __future__ import annotations

from typing import Any, Optional

from .found import Operand
from .graph import Node, Value
from .masks import Unclear
from .products import Projected, Projection, composed, projection_of
from .sizes import Ratio, Size
from .turns import Turn, turned
from .views import CUTS, ONE, Atom, View

_A_PART = "a part of its queries, keys or values is left out"


def times(a: Any, b: Any) -> Any:
    """The product of numbers; a tuple of what is no number."""
    plain_a, plain_b = not isinstance(a, (tuple, Value)), not isinstance(b, (tuple, Value))
    if plain_a and plain_b:
        return a * b
    if plain_a and a == 1:
        return b
    if plain_b and b == 1:
        return a
    return ("*", a, b)


class Origin:
    """Back from a side of a product: views, a scale, turns, casts, the projection, views of its source."""

    def __init__(self, finder: Any, value: Value, letters: list[str], projection: Optional[Projection] = None) -> None:
        self.finder, self.views, self.value, self.letters = finder, finder.views, value, letters
        self.scale: Any = 1.0
        self.turn: Optional[Turn] = None
        self.turned_axes: list[Optional[int]] = []  # which axis of the side each axis of what is turned is
        self.nodes: list[Node] = []
        self.view = self.views.whole(value)
        self.projection = projection
        if projection is None:
            self._back()
        else:  # a side of a product that is repeated for the other side
            axes = tuple(atoms if letter else () for letter, atoms in zip(letters, self.view.axes))
            self.view, self.nodes = self.view._replace(axes=axes), [*projection.nodes]

    def _back(self) -> None:
        while True:
            inner = self.views.of(self.view.source)
            self._through(inner)
            source = self.view.source
            found = projection_of(self.views, source)
            if found is not None:
                self.projection = found
                self.nodes += found.nodes
            if found is not None or not (self._scaled(source) or self._turned(source)):
                break
        if not self.views.covers(self.view, () if self.projection is None else self.projection.result_features):
            raise Unclear(_A_PART, self._cutting())

    def _through(self, inner: View) -> None:
        self.nodes += inner.nodes
        self.view = composed(self.view, inner, self.value.node)

    def _go(self, to: Value, node: Node) -> None:
        """The same elements, made of another value of the same shape."""
        self.nodes.append(node)
        self.view = self.view._replace(source=to)

    def _scaled(self, source: Value) -> bool:
        node = source.node
        if node is None or node.name.rstrip("_") not in ("mul", "div") or len(node.args) != 2:
            return False
        a, b = node.args
        for x, by in ((a, b), (b, a))[: 2 if node.name.startswith("mul") else 1]:
            said = self.finder.tables.of(by)
            number = by if isinstance(by, (Size, Ratio)) else said
            if isinstance(number, (int, float)) and isinstance(x, Value) and x.shape == source.shape:
                self.scale = times(self.scale, number if node.name.startswith("mul") else 1 / number)
                self._go(x, node)
                return True
        return False

    def _turned(self, source: Value) -> bool:
        if self.turn is not None or self.letters.count("d") != 1:
            return False
        axes, own, d = self.view.axes, self.views.whole(source).axes, self.letters.index("d")
        front = len(own) - sum(1 for atoms in own if atoms and atoms[0] in axes[d])
        if self.view.offsets or not axes[d] or axes[d] != tuple(atom for atoms in own[front:] for atom in atoms):
            return False
        found = turned(self.views, source, front)
        if found is None:
            return False
        self.turn, before, nodes = found
        self.turned_axes = [axes.index(atoms) if atoms in axes and atoms else None for atoms in own[:front]]
        self.nodes += nodes
        features = self.views.whole(before).axes[front]
        self.view = self.view._replace(source=before, axes=(*axes[:d], features, *axes[d + 1 :]))
        return True

    def operand(self, rest: list[str]) -> tuple[Operand, list[list[Any]]]:
        source, d = self.view.source, self._d_axis()
        features = self.projection.result_features if self.projection is not None else () if d is None else (d,)
        places, kinds = self._letters_of(features, rest)
        axes = tuple("".join(letter for letter, _ in place) for place in places)
        heads = self._heads(places)
        if self.turn is not None:
            letters = ["" if i is None else self.letters[i] if self.letters[i] in ("q", "k") else axes[i] for i in
                       self.turned_axes]  # fmt: skip
            self.turn = self.turn._replace(axes=tuple(letters))
        projected, kept, source_axes = None, source, self._along(kinds, source)
        if self.projection is not None:
            projected = self._rows(places)
            kept, source_axes = self._source(self.projection, source_axes)
        found = Operand(self.value, axes, kept, source_axes, projected, self.turn, self.scale, heads, tuple(self.nodes))
        return found, places

    def _cutting(self) -> Node:
        """The node that takes a part."""
        cuts = [node for node in self.nodes if node.name in CUTS]
        return cuts[0] if cuts else self.value.node  # type: ignore[return-value]

    def _d_axis(self) -> Optional[int]:
        for letter, atoms in zip(self.letters, self.view.axes):
            if letter == "d" and atoms:
                return atoms[-1].axis
        return None

    def _letters_of(self, features: tuple[int, ...], rest: list[str]) -> Any:
        """The letters of each axis, with sizes; and {axis of the source: letters in their order}."""
        places: list[list[Any]] = []
        kinds: dict[int, list[tuple[int, str, Any]]] = {}
        seen_batch = False
        for letter, atoms in zip(self.letters, self.view.axes):
            place: list[Any] = []
            for atom in atoms:
                known = letter if letter in ("d", "q", "k") else ""
                if atom.axis is None:
                    name = known or "r"
                    name = "r" if known in ("d", "") else known
                elif known:
                    name = known
                elif atom.axis in features:
                    name = "h"
                elif self.projection is None and seen_batch and self._is_heads(letter, rest):
                    name = "h"
                else:
                    name, seen_batch = "b", True
                place.append((name, atom.size))
                if atom.axis is not None:
                    kinds.setdefault(atom.axis, []).append((_order(atom.stride), name, atom))
            places.append(place)
        return places, kinds

    def _is_heads(self, letter: str, rest: list[str]) -> bool:
        """Without a projection, the last of several axes in front of positions is that of heads."""
        return bool(rest) and letter == rest[-1] and len(rest) > 1

    def _heads(self, places: list[list[Any]]) -> Any:
        number = ONE
        for place in places:
            for letter, size in place:
                if letter == "h":
                    number = number.times(size)
        return number.number if not number.formulas else number

    def _along(self, kinds: Any, source: Value) -> tuple[str, ...]:
        return tuple(
            "".join(name for _, name, _ in sorted(kinds.get(i, []), key=lambda x: -x[0]))
            for i in range(len(source.shape))
        )

    def _rows(self, places: Any) -> Optional[Projected]:
        """Which rows of the weight the heads' features are, (h d)."""
        projection = self.projection
        assert projection is not None
        axes = projection.result_features
        if any(i not in axes for i in self.view.offsets):
            raise Unclear(_A_PART, self._cutting())
        sides: Any = [], []  # the atoms of heads, of features
        for letter, atoms in zip(self.letters, self.view.axes):
            sides[letter == "d"].extend(atom for atom in atoms if atom.axis in axes)
        if any(atom.size.formulas or atom.stride.formulas for side in sides for atom in side):
            raise Unclear("features are cut in a way that hangs on the call's sizes", self.value.node)
        picked = self._evenly(axes[0], sides[0] + sides[1]) if len(axes) == 1 and self.turn is None else None
        rows = projection.rows(self._picked(axes, sides) if picked is None else picked)
        if rows is None:
            raise Unclear("rows of a weight are picked in a way that is not read", projection.nodes[0])
        weight, bias = rows
        return Projected((weight,), bias, tuple(node.line for node in projection.nodes))

    def _evenly(self, axis: int, atoms: list[Atom]) -> Optional[range]:
        """The features of all heads where they follow each other along one axis, as they do almost always."""
        n, step = 1, 1
        for atom in reversed(atoms):
            if n == 1:
                step = atom.stride.number
            elif atom.stride.number != n * step:
                return None
            n *= atom.size.number
        start = self.view.offsets.get(axis, 0)
        return range(start, start + n * step, step) if step > 0 else None

    def _picked(self, axes: tuple[int, ...], sides: Any) -> Any:
        """The same in all other cases: the place of each on each axis."""
        heads = _spread([tuple(self.view.offsets.get(i, 0) for i in axes)], sides[0], axes)
        within = _spread([(0,) * len(axes)], sides[1], axes)
        if self.turn is not None:  # pairs that turn are neighbours in the core
            within = [within[i] for i in self.turn.features]
        return [tuple(map(sum, zip(one, other))) for one in heads for other in within]

    def _source(self, projection: Projection, axes: tuple[str, ...]) -> tuple[Value, tuple[str, ...]]:
        """What was projected, behind views, and the letters of its axes."""
        if len(projection.features) > 1:
            raise Unclear("features of several axes are projected", projection.nodes[0])
        rest = iter([x for i, x in enumerate(axes) if i not in projection.result_features])
        own = [
            "c" if i in projection.features else "" if i in projection.ones else next(rest)
            for i in range(len(projection.source.shape))
        ]
        view = self.views.of(projection.source)
        self.nodes += view.nodes
        found = [""] * len(view.source.shape)
        for letters, atoms in zip(own, view.axes):
            for atom in atoms:
                if atom.axis is None:
                    continue
                if found[atom.axis] and found[atom.axis] != letters:
                    return projection.source, tuple(own)
                found[atom.axis] = letters
        if view.offsets or any(len(atoms) > 1 for atoms in view.axes) or not self.views.covers(view):
            return projection.source, tuple(own)
        return view.source, tuple(found)


def _spread(places: Any, atoms: Any, axes: tuple[int, ...]) -> Any:
    """The places, each moved along the atoms, the last the quickest."""
    for atom in atoms:
        which, stride = axes.index(atom.axis), atom.stride.number
        places = [(*x[:which], x[which] + i * stride, *x[which + 1 :]) for x in places for i in range(atom.size.number)]
    return places


def _order(stride: Any) -> int:
    return stride.number * (1 << 40 if stride.formulas else 1)
