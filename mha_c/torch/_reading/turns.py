"""Rotary positions, however readers write them: halves or neighbours, by cosines and sines or by complex numbers.

What makes queries or keys of what was projected is followed number by number: each feature that comes out is a sum of
features that went in, each times a place of a table.  Where these sums are pairs that turn, there is a Turn.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import numpy as np

from .graph import Line, Node, Value
from .shapes import _axis, _given
from .sizes import formula_of
from .sizing import same
from .views import CASTS, ONE, SAME, Views


class Column(NamedTuple):
    """Numbers of a table that was multiplied in: those of one column, one for each position.

    table    the Value, at the shape at which it was multiplied
    part     "", or "real" or "imag" of complex numbers
    column   among its features, counted through all their axes
    features how many axes of it, the last ones, are features
    long     the others that are longer than 1
    """

    table: Value
    part: str
    column: int
    features: int
    long: tuple[int, ...]


class Turn(NamedTuple):
    """Rotary positions on queries or keys.

    features   a, b of each pair, one after the other, as they lie in what was turned: a cos - b sin, b cos + a sin
    becomes    where these come out
    cosines    a Column for each pair by which a is multiplied, and one by which b is: they must say the same in each
               call; None of features that nothing turns
    sines      the same of b and of a
    axes       for each axis in front of the features its letters
    line       of the last step
    """

    features: tuple[int, ...]
    becomes: tuple[int, ...]
    cosines: tuple[Optional[tuple[Column, Column]], ...]
    sines: tuple[Optional[tuple[Column, Column]], ...]
    axes: tuple[str, ...]
    line: Line

    def is_like(self, other: Turn) -> bool:
        """Whether it turns in the same way, by tables that are the same in each call."""
        if (self.features, self.becomes) != (other.features, other.becomes):
            return False
        known: dict[Any, bool] = {}
        places, others = (
            [place for pair in (*x.cosines, *x.sines) for place in pair or (None,)] for x in (self, other)
        )
        return len(places) == len(others) and all(
            a is b if a is None or b is None else a[1:] == b[1:] and _is_equal(a.table, b.table, known)
            for a, b in zip(places, others)
        )

    def tables(self) -> list[Value]:
        pairs: Any = (*self.cosines, *self.sines)
        return [*dict.fromkeys(place.table for pair in pairs for place in pair or ())]


class _Other(Exception):
    """It is no turn, or one that is written in a way that is not known here."""


_MOST = 64  # steps of a turn
_RESHAPES = frozenset(("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as"))
_PIECES = frozenset(("chunk", "split", "unbind", "split_with_sizes"))
_OF_ONE = frozenset(("neg", "view_as_complex", "view_as_real", "__getitem__")) | _RESHAPES | _PIECES | SAME | CASTS
_SUMS = frozenset(("add", "sub"))


def turned(views: Views, source: Value, front: int) -> Optional[tuple[Turn, Value, list[Node]]]:
    """(the turn, the value that is turned, nodes) of a value that was turned; None of any other.

    front   how many axes of it are in front of its features
    """
    waits, nodes, by_table = {source}, dict[Node, list[Value]](), False
    while len(nodes) < _MOST:
        latest = max(waits, key=lambda value: -1 if value.node is None else value.node.number)
        if by_table and len(waits) == 1 and _is_as(views, latest, source, front):
            try:
                turn = _FeatureSums(views, latest, front, nodes).turn(source)
            except _Other:
                turn = None
            if turn is not None:
                return turn, latest, [*nodes]
        node = latest.node
        given = None if node is None else _followed(views, node)
        if node is None or given is None:
            return None
        by_table = by_table or node.name == "mul"
        nodes[node] = given
        waits = (waits - {latest}) | {*given}
    return None


def _is_equal(one: Any, other: Any, known: dict[Any, bool]) -> bool:
    """Whether two values are made of the same by the same functions."""
    if isinstance(one, Value) and isinstance(other, Value):
        if one is other:
            return True
        a, b = one.node, other.node
        if a is None or b is None or a.name != b.name or a.writes or b.writes or one.index != other.index:
            return False
        if (one, other) not in known:
            known[one, other] = _is_equal((a.args, a.kwargs), (b.args, b.kwargs), known)
        return known[one, other]
    if type(one) is not type(other):
        return False
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(_is_equal(x, y, known) for x, y in zip(one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_equal(one[key], other[key], known) for key in one)
    if isinstance(one, slice):
        return _is_equal((one.start, one.stop, one.step), (other.start, other.stop, other.step), known)
    return bool(formula_of(one) == formula_of(other))


def _is_as(views: Views, value: Value, other: Value, front: int) -> bool:
    """Whether a value has as many features, on one axis, behind the same axes."""
    if len(value.shape) != front + 1 or value.dtype != other.dtype:
        return False
    features = _numbers(views, other.shape[front:])
    same = features is not None and _numbers(views, value.shape[front:]) == (int(np.prod(features)),)
    return same and _same_sizes(views, value.shape[:front], other.shape[:front])


def _same_sizes(views: Views, one: Any, other: Any) -> bool:
    quickly = len(one) == len(other) and all(map(same, one, other))
    return quickly or [*map(views.size, one)] == [*map(views.size, other)]


def _numbers(views: Views, sizes: Any) -> Optional[tuple[int, ...]]:
    """Sizes as numbers; None where a call decides one."""
    found = [views.size(n) for n in sizes]
    return None if any(n.formulas for n in found) else tuple([n.number for n in found])


def _followed(views: Views, node: Node) -> Optional[list[Value]]:
    """The values of which a node makes something, and which may be turned; None of a function that no turn has."""
    given = node.values()
    if node.name in _OF_ONE:  # view_as has another, whose shape is all that counts
        return given[:1] if len(given) == 1 or node.name != "__getitem__" else None
    if node.name in _SUMS and len(given) == 2 and not node.kwargs:
        return given
    if node.name in ("cat", "stack"):
        return given
    if node.name == "mul" and len(given) == 2:
        moves = [value for value in given if "parameter" in views.behind(value)]
        return moves if len(moves) == 1 else None
    return None


class _FeatureSums:
    """The features of values as sums of those of one value.

    Each is an array of tuples of (sign, feature, Column or None); of complex numbers a pair of such arrays.

    followed   {a node: the values of which it makes something}
    """

    def __init__(self, views: Views, start: Value, front: int, followed: dict[Node, list[Value]]) -> None:
        self.views, self.front, self.followed = views, front, followed
        own = [((1, i, None),) for i in range(int(start.shape[-1]))]
        self.known: dict[Value, Any] = {start: (_array(own, (len(own),)),)}

    def turn(self, source: Value) -> Optional[Turn]:
        """_Other where it is none."""
        (found,) = self.of(source) if "complex" not in str(source.dtype) else (None,)
        if found is None or source.node is None:
            raise _Other
        return _turn_of([*found.ravel()], source.node.line)

    def of(self, value: Value) -> Any:
        if value not in self.known:
            assert value.node is not None
            self.known[value] = self._made(value.node, value)
        return self.known[value]

    def _made(self, node: Node, value: Value) -> Any:
        name, front = node.name, self.front
        given = [self.of(x) for x in self.followed[node]]
        shape = _numbers(self.views, value.shape[front:])
        if shape is None:
            raise _Other
        if name in ("cat", "stack"):
            return self._joined(node, value, given)
        if name != "mul" and not _same_sizes(self.views, value.shape[:front], node.values()[0].shape[:front]):
            raise _Other  # other axes in front
        if name in _SUMS:
            if any(x[0].shape != shape for x in given):
                raise _Other
            one, other = given if name == "add" else (given[0], _each(_minus, given[1]))
            return tuple(_PLUS(a, b) for a, b in zip(one, other))
        if name == "mul":
            return self._times(node, value, given[0], shape)
        (parts,) = given
        if name == "neg":
            return _each(_minus, parts)
        if name == "view_as_complex":
            return parts[0][..., 0], parts[0][..., 1]
        if name == "view_as_real":
            return (_stacked(parts, -1),)
        if name in _RESHAPES:
            return tuple(x.reshape(shape) for x in parts)
        if name in _PIECES:
            return self._piece(node, value, parts)
        if name == "__getitem__":
            return tuple(x[self._index(node, x.ndim)] for x in parts)
        if value.dtype != node.values()[0].dtype:
            raise _Other  # a cast
        return parts

    def _joined(self, node: Node, value: Value, given: Any) -> Any:
        axis = _axis(_given(node.args, node.kwargs, 1, "dim", 0), len(value.shape)) - self.front
        if axis < 0 or len(given) != len(node.values()) or len({len(x) for x in given}) != 1:
            raise _Other
        join = np.concatenate if node.name == "cat" else _stacked
        return tuple(join(each, axis) for each in zip(*given))

    def _times(self, node: Node, value: Value, parts: Any, shape: tuple[int, ...]) -> Any:
        (moves,), features = self.followed[node], len(shape)
        table = next(x for x in node.values() if x is not moves)
        if "random" in self.views.behind(table):
            raise _Other
        own = _numbers(self.views, table.shape[max(len(table.shape) - features, 0) :])
        if parts[0].shape != shape or own is None or not _same_sizes(self.views, value.shape, moves.shape):
            raise _Other
        columns = np.arange(int(np.prod(own))).reshape(own)
        columns = np.broadcast_to(columns, shape)
        long = self._long(table, features)
        if "complex" not in str(table.dtype):
            return tuple(_TIMES(x, _places(table, "", columns, long)) for x in parts)
        if len(parts) != 2:
            raise _Other
        cos, sin = (_places(table, part, columns, long) for part in ("real", "imag"))
        real, imag = parts
        return _PLUS(_TIMES(real, cos), _MINUS(_TIMES(imag, sin))), _PLUS(_TIMES(real, sin), _TIMES(imag, cos))

    def _long(self, table: Value, features: int) -> tuple[int, ...]:
        """The axes in front of its features that are longer than 1: those of 1 are so in each call."""
        front = table.shape[: max(len(table.shape) - features, 0)]
        for n in front:
            self.views.assume_one(self.views.size(n))
        return tuple(i for i, n in enumerate(front) if self.views.size(n) != ONE)

    def _piece(self, node: Node, value: Value, parts: Any) -> Any:
        rank = len(node.values()[0].shape)
        axis = _axis(_given(node.args, node.kwargs, 1 if node.name == "unbind" else 2, "dim", 0), rank) - self.front
        if axis < 0:
            raise _Other
        if node.name == "unbind":
            return tuple(x.take(value.index, axis) for x in parts)
        first = sum(int(x.shape[axis + self.front]) for x in node.results[: value.index])
        index = (slice(None),) * axis + (slice(first, first + int(value.shape[axis + self.front])),)
        return tuple(x[index] for x in parts)

    def _index(self, node: Node, features: int) -> Any:
        index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        if any(isinstance(x, (Value, list)) or x is None for x in index):
            raise _Other
        place = next((i for i, x in enumerate(index) if x is Ellipsis), len(index))
        missing = self.front + features - sum(x is not Ellipsis for x in index)
        index = (*index[:place], *[slice(None)] * missing, *index[place + 1 :])
        if any(x != slice(None) for x in index[: self.front]):
            raise _Other
        return index[self.front :]


def _array(elements: Any, shape: tuple[int, ...]) -> Any:
    found = np.empty(len(elements), object)
    found[:] = elements if len(elements) != 1 else [*elements]
    return found.reshape(shape)


def _stacked(arrays: Any, axis: int) -> Any:
    return np.stack([*arrays], axis)


def _minus(terms: Any) -> Any:
    return tuple([(-sign, feature, place) for sign, feature, place in terms])


def _times(terms: Any, place: Any) -> Any:
    if any(by is not None for _, _, by in terms):
        raise _Other
    return tuple([(sign, feature, place) for sign, feature, _ in terms])


_PLUS, _MINUS, _TIMES = (
    np.frompyfunc(lambda a, b: a + b, 2, 1),
    np.frompyfunc(_minus, 1, 1),
    np.frompyfunc(_times, 2, 1),
)


def _each(function: Any, parts: Any) -> Any:
    return tuple(np.frompyfunc(function, 1, 1)(x) for x in parts)


def _places(table: Value, part: str, columns: Any, long: tuple[int, ...]) -> Any:
    found = np.empty(columns.size, object)
    for i, column in enumerate(columns.ravel()):
        found[i] = Column(table, part, int(column), columns.ndim, long)
    return found.reshape(columns.shape)


def _turn_of(elements: list[Any], line: Line) -> Optional[Turn]:
    """The turn whose features come out as these sums; None where they are no pairs that turn."""
    plus = {frozenset((t[0][1], t[1][1])): i for i, t in enumerate(elements) if [x[0] for x in t] == [1, 1]}
    found: list[Any] = []
    for i, terms in enumerate(elements):
        if sorted(x[0] for x in terms) == [-1, 1]:
            (_, b, sin), (_, a, cos) = sorted(terms, key=lambda x: x[0])
            other = plus.pop(frozenset((a, b)), None)
            by = {} if other is None else {feature: place for _, feature, place in elements[other]}
            if other is None or a == b or None in (sin, cos, *by.values()):
                return None
            found.append(((a, b), (i, other), (cos, by[b]), (sin, by[a])))
    rest = [(i, terms[0][1]) for i, terms in enumerate(elements) if len(terms) == 1]
    if not found or any(elements[i] != ((1, feature, None),) for i, feature in rest):
        return None
    found += [((a, b), (i, j), None, None) for (i, a), (j, b) in zip(rest[::2], rest[1::2])]
    features, becomes = ([x for each in found for x in each[n]] for n in (0, 1))
    if not sorted(features) == sorted(becomes) == [*range(len(elements))]:
        return None
    found.sort(key=lambda each: each[0])
    orders = [tuple([x for each in found for x in each[n]]) for n in (0, 1)]
    return Turn(orders[0], orders[1], tuple(x[2] for x in found), tuple(x[3] for x in found), (), line)
