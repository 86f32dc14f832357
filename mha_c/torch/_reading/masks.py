"""What a mask on the scores means: where it hides, adds, and what it was made of."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Optional

import torch

from .graph import Line, Node, Value
from .tables import INF, Affine, Band, Pick, Tables
from .views import CASTS, ONE, Mixes, Product, View, Views

AxisLetters = tuple[tuple[str, Product], ...]  # the letters along one axis, the outermost first, with their sizes


class Mask(NamedTuple):
    """What was done to the scores before the softmax, beside scaling.

    sense    "hide": where `value` is True (not 0), scores become `fill`; "keep": where it is False (0);
             "add": `value` is added;
             "lengths": keys from `value` + `offset` on are hidden;
             "causal": query i sees keys up to i + `offset`;
             "window": query i sees keys from i + `offset` on;
             "band": any other set of distances key - query is hidden: `spans`
    value    None of "causal", "window" and "band"; else a Value as the lines had it before views and comparisons with
             0:
             an input, a table (a leaf), or any result
    axes     for each axis of `value` the letters that go along it: "b", "h", "q", "k", "bh", or "" (size 1); a letter
             "b"
             may stand on several axes
    fill     the number that hidden scores become, or that is added to them where `added`
    added    whether the fill was added, not put in their place
    factor   what was multiplied by afterwards, as `fill` is already: of "add"
    offset   a number
    spans    of "band": pairs (first, last) of key - query, which are hidden
    """

    sense: str
    value: Optional[Value]
    axes: tuple[str, ...]
    fill: float
    added: bool
    factor: Any
    offset: Any
    spans: tuple[tuple[float, float], ...]
    line: Line


class Unclear(Exception):
    """What is none of a mask's forms, with the node."""

    def __init__(self, words: str, node: Optional[Node] = None) -> None:
        super().__init__(words)
        self.words, self.node = words, node


class MaskReader:
    """Reads the masks of one reading."""

    def __init__(self, views: Views, tables: Tables) -> None:
        self.views, self.tables = views, tables

    def hiding(
        self, cond: Value, truth: bool, places: tuple[AxisLetters, ...], fill: float, added: bool, node: Node
    ) -> list[Mask]:
        """Scores are hidden where `cond` is `truth`; `places` are the letters along the axes of the scores."""
        places = places[len(places) - len(cond.shape) :]
        found = self._condition(cond, truth, self._own_places(cond, places), node)
        return [mask._replace(fill=fill, added=added, line=node.line) for mask in found]

    def adding(self, value: Value, places: tuple[AxisLetters, ...], factor: Any, node: Node) -> list[Mask]:
        """The value is added to the scores, and then multiplied by `factor`."""
        places = self._own_places(value, places[len(places) - len(value.shape) :])
        said = self.tables.of(value)
        if isinstance(said, (int, float)):
            return []  # the same for all
        if isinstance(said, Pick) and 0 in (said.inside, said.outside):
            hides = said.inside if said.outside == 0 else said.outside
            spans = said.band.spans if said.outside == 0 else said.band.without().spans
            if hides < -1e3 or hides == -INF:
                band = said.band._replace(spans=spans)
                return [
                    m._replace(fill=hides * factor, added=True, line=node.line)
                    for m in self._banded(band, places, node)
                ]
        found = self._added_condition(value, places, factor, node)
        if found is not None:
            return found
        root, axes = self._root(value, places)
        return [Mask("add", root, axes, 0.0, True, factor, 0, (), node.line)]

    def _added_condition(self, value: Value, places: Any, factor: Any, node: Node) -> Optional[list[Mask]]:
        """(1 - keep) * -1e9, zeros.masked_fill(hide, -inf), where(keep, 0, -inf)."""
        view = self._view(value)
        if view is None:
            return None
        one, inner = view.source, self._through(view, places)
        made = one.node
        if made is None or inner is None:
            return None
        if made.name in ("masked_fill", "masked_fill_") and self.tables.of(made.args[0]) == 0:
            fill = self.tables.of(made.args[2] if len(made.args) > 2 else made.kwargs.get("value"))
            if isinstance(fill, (int, float)):
                return self._filled(made.args[1], True, inner, fill * factor, node)
        if made.name == "where" and len(made.args) == 3:
            a, b = self.tables.of(made.args[1]), self.tables.of(made.args[2])
            if isinstance(a, (int, float)) and isinstance(b, (int, float)) and 0 in (a, b):
                return self._filled(made.args[0], b == 0, inner, (a if b == 0 else b) * factor, node)
        if made.name == "mul":
            for x, y in (made.args, made.args[::-1]):
                by = self.tables.of(y)
                if isinstance(x, Value) and isinstance(by, (int, float)):
                    return self._multiplied(x, by * factor, inner, node)
        return None

    def _multiplied(self, x: Value, by: float, places: Any, node: Node) -> Optional[list[Mask]]:
        """x * -1e9, where x is 0 or 1: a condition as numbers, or 1 - one.  Other numbers hide in part."""
        made = x.node
        if made is None or by >= -1e3:
            return None
        if made.name == "sub" and len(made.args) == 2 and self.tables.of(made.args[0]) == 1:
            inner = made.args[1]
            if isinstance(inner, Value) and self._is_condition(inner):
                return self._filled(inner, False, places, by, node)
        return self._filled(x, True, places, by, node) if self._is_condition(x) else None

    def _is_condition(self, value: Value) -> bool:
        """Whether its numbers are those of True and False."""
        view = self._view(value)
        return view is not None and torch.bool in (view.source.dtype, *(node.results[0].dtype for node in view.nodes))

    def _filled(self, cond: Any, truth: bool, places: Any, fill: float, node: Node) -> Optional[list[Mask]]:
        if not isinstance(cond, Value):
            return None
        places = self._own_places(cond, places[len(places) - len(cond.shape) :])
        found = self._condition(cond, truth, places, node)
        return [mask._replace(fill=fill, added=True, line=node.line) for mask in found]

    # --- Conditions -----------------------------------------------------------------------------------------

    def _condition(self, cond: Value, truth: bool, places: Any, node: Node) -> list[Mask]:
        """The masks that hide where `cond` is `truth`."""
        said = self.tables.of(cond)
        if isinstance(said, (bool, int, float)):
            if bool(said) is truth:
                raise Unclear("everything is hidden", node)
            return []
        if isinstance(said, Pick) and bool(said.inside) != bool(said.outside):
            band = said.band if bool(said.inside) is truth else said.band.without()
            return self._banded(band, places, node)
        view = self._view(cond)
        inner = None if view is None else self._through(view, places)
        if view is not None and inner is not None and view.source.node is not None:
            found = self._made(view.source, truth, inner, node)
            if found is not None:
                return found
        root, axes = self._root(cond, places)
        return [Mask("hide" if truth else "keep", root, axes, 0.0, False, 1, 0, (), node.line)]

    def _made(self, cond: Value, truth: bool, places: Any, node: Node) -> Optional[list[Mask]]:
        made = cond.node
        assert made is not None
        name, args = made.name.rstrip("_"), made.args
        if name in ("logical_not", "bitwise_not"):
            return self._condition(args[0], not truth, places, node)
        if name in CASTS and cond.dtype is torch.bool:
            return self._condition(args[0], truth, places, node)
        if (
            name in ("eq", "ne")
            and len(args) == 2
            and isinstance(args[0], Value)
            and not self.tables.is_constant(args[0])
        ):
            number = self.tables.of(args[1])
            if number == 0 or (number == 1 and args[0].dtype is torch.bool):
                same = (name == "eq") is truth
                return self._condition(args[0], same if number else not same, places, node)
        joins = ("bitwise_or", "logical_or") if truth else ("bitwise_and", "logical_and", "mul")
        if name in joins and len(made.values()) == 2:
            parts = [self._condition(x, truth, self.places_of(x, places), node) for x in made.values()]
            return [mask for part in parts for mask in part]
        if name in ("lt", "le", "gt", "ge") and len(args) == 2:
            return self._lengths(made, truth, places)
        return None

    def places_of(self, x: Value, places: Any) -> tuple[AxisLetters, ...]:
        """The letters along the axes of what is broadcast to the scores."""
        return self._own_places(x, places[len(places) - len(x.shape) :])

    def _lengths(self, made: Node, truth: bool, places: Any) -> Optional[list[Mask]]:
        """arange(keys) >= lengths, and its like."""
        name, (a, b) = made.name.rstrip("_"), made.args
        place, lens = a, b
        if not isinstance(self.tables.of(a), Affine):
            place, lens, name = b, a, {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}[name]
        said = self.tables.of(place)
        if not isinstance(said, Affine) or not isinstance(lens, Value) or said.absolute or len(said.factors) != 1:
            return None
        if lens.dtype.is_floating_point or lens.dtype is torch.bool:
            return None  # how many keys a fraction hides hangs on the comparison
        hides = name if truth else {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt"}[name]
        if hides not in ("gt", "ge") or said.factors[0][1] != 1 or said.number != int(said.number):
            return None
        (axis, _), rank = said.factors[0], len(made.results[0].shape)
        along = places[axis + rank - len(place.shape)]
        if tuple(letter for letter, _ in along) != ("k",):
            return None
        own = self.places_of(lens, places)
        root, axes = self._root(lens, own)
        if any("k" in letters for letters in axes):
            return None
        offset = (1 if hides == "gt" else 0) - int(said.number)
        return [Mask("lengths", root, axes, 0.0, False, 1, offset, (), made.line)]

    def _banded(self, band: Band, places: Any, node: Node) -> list[Mask]:
        """Hidden distances, where one axis goes along the queries and the other along the keys."""
        letters = [tuple(letter for letter, _ in place) for place in places]
        sides = letters[band.row], letters[band.column]
        spans = band.spans
        if sides == (("k",), ("q",)):
            spans = tuple((-b, -a) for a, b in reversed(spans))
        elif sides != (("q",), ("k",)):
            raise Unclear("a mask of positions does not go along queries and keys", node)
        plain = Mask("band", None, (), 0.0, False, 1, 0, spans, node.line)
        found = []
        for first, last in spans:
            if first == -INF and last == INF:
                raise Unclear("everything is hidden", node)
            if last == INF:
                found.append(plain._replace(sense="causal", offset=int(first) - 1))
            elif first == -INF:
                found.append(plain._replace(sense="window", offset=int(last) + 1))
            else:
                return [plain]
        return found

    # --- Where a mask came from -----------------------------------------------------------------------------

    def _own_places(self, value: Value, places: Any) -> tuple[AxisLetters, ...]:
        """The letters along a value's own axes: none where it is broadcast."""
        return tuple(() if self._is_one(n, place) else place for n, place in zip(value.shape, places))

    def _is_one(self, n: Any, place: Any) -> bool:
        size, whole = self.views.size(n), ONE
        for _, each in place:
            whole = whole.times(each)
        if size not in (ONE, self.views.now(whole)):
            self.views.assume_one(size)
        return self.views.now(size) == ONE

    def _view(self, value: Value) -> Optional[View]:
        try:
            return self.views.of(value, casts=True)
        except Mixes:
            return None

    def _root(self, value: Value, places: Any) -> tuple[Value, tuple[str, ...]]:
        """What a mask is a view of, and its letters; itself, where the view is no plain one."""
        view = self._view(value)
        inner = None if view is None or view.offsets else self._through(view, places)
        if (
            view is not None
            and inner is not None
            and self.views.covers(view)
            and self._same_numbers(value, view.source)
        ):
            return view.source, _letters(inner)
        return value, _letters(places)

    def _same_numbers(self, value: Value, source: Value) -> bool:
        """Whether a cast between them changes nothing that matters."""
        return (
            value.dtype == source.dtype
            or value.dtype is torch.bool
            or source.dtype is torch.bool
            or (not source.dtype.is_floating_point and value.dtype.is_floating_point)
        )

    def _through(self, view: View, places: Any) -> Optional[tuple[AxisLetters, ...]]:
        """The letters along the axes of the source of a view."""
        found: list[list[Any]] = [[] for _ in view.source.shape]
        for atoms, place in zip(view.axes, places):
            pieces = self._aligned(list(atoms), list(place), view)
            if pieces is None:
                return None
            for atom, letters in pieces:
                if atom.axis is not None:
                    if found[atom.axis]:
                        return None
                    found[atom.axis] = letters
        return tuple(tuple(x) for x in found)

    def _aligned(self, atoms: list[Any], place: list[Any], view: View) -> Optional[list[tuple[Any, list[Any]]]]:
        """The letters along each atom of an axis."""
        if len(atoms) == 1:
            self._same(atoms[0].size, place, view)
            return [(atoms[0], place)]
        found = []
        for atom in atoms:
            rest, letters = atom.size, []
            while rest != ONE:
                if not place:
                    return None
                letter, size = place.pop(0)
                rest, size = self.views.now(rest), self.views.now(size)
                below, above = rest.over(size), size.over(rest)
                if below is None and above is None:
                    self.views.assume(rest, size, view.nodes[0])
                    place.insert(0, (letter, size))
                    continue
                if below is not None:
                    letters.append((letter, size))
                    rest = below
                else:
                    letters.append((letter, rest))
                    place.insert(0, (letter, above))
                    rest = ONE
            found.append((atom, letters))
        return found if not place else None

    def _same(self, size: Product, place: list[Any], view: View) -> None:
        """A mask's axis is as long as the scores' axis that it lies on."""
        whole = ONE
        for _, each in place:
            whole = whole.times(each)
        whole, size = self.views.now(whole), self.views.now(size)
        if whole != size and view.nodes:
            self.views.assume(size, whole, view.nodes[0])


def _letters(places: Any) -> tuple[str, ...]:
    return tuple("".join(letter for letter, _ in place) for place in places)


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)
