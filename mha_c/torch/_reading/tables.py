"""What a table says of its positions: a number for all, or one number for some distances of column and row, another
elsewhere.

A table is a value that hangs on no input's numbers: made of arange, ones, tril, comparisons; or a buffer, whose
contents are
read whole.  What is said holds for all sizes; where that cannot be shown there is no answer.
"""

from __future__ import annotations

import math
import operator
from typing import Any, Callable, NamedTuple, Optional, Union

import torch

from .graph import Node, Value
from .sizes import Ratio, Size
from .views import CASTS, Mixes, Views

INF = math.inf


class Band(NamedTuple):
    """The places whose column - row is in one of `spans`, pairs (first, last), which are sorted and do not touch."""

    row: int
    column: int
    spans: tuple[tuple[float, float], ...]

    def without(self) -> Band:
        found, at = [], -INF
        for first, last in self.spans:
            if at < first:
                found.append((at, first - 1))
            at = last + 1
        if at < INF:
            found.append((at, INF))
        return self._replace(spans=tuple(found))

    def union(self, other: Band) -> Band:
        found: list[tuple[float, float]] = []
        for first, last in sorted(self.spans + other.spans):
            if found and first <= found[-1][1] + 1:
                found[-1] = found[-1][0], max(found[-1][1], last)
            else:
                found.append((first, last))
        return self._replace(spans=tuple(found))


class Affine(NamedTuple):
    """sum of factors[axis] * index + number; `absolute`: without its sign."""

    factors: tuple[tuple[int, float], ...]
    number: float
    absolute: bool = False


class Pick(NamedTuple):
    """One number in a band, another elsewhere."""

    band: Band
    inside: Any
    outside: Any


Said = Union[float, bool, Affine, Pick]
_COMPARE: dict[str, Callable[..., Any]] = {
    "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge, "eq": operator.eq, "ne": operator.ne,
}  # fmt: skip
_NUMBERS: dict[str, Callable[..., Any]] = {
    **_COMPARE, "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv,
    "bitwise_and": operator.and_, "logical_and": lambda a, b: bool(a) and bool(b), "bitwise_or": operator.or_,
    "logical_or": lambda a, b: bool(a) or bool(b), "bitwise_xor": operator.xor, "logical_xor": lambda a,
    b: bool(a) != bool(b),
    "neg": operator.neg, "logical_not": operator.not_, "abs": abs,
    "bitwise_not": lambda a: not a if isinstance(a, bool) else ~a,
    "log": lambda a: math.log(a) if a > 0 else -INF, "exp": math.exp,
}  # fmt: skip


class Tables:
    """Asks each value once.  `read` gets the leaves whose contents were read."""

    def __init__(self, views: Views, read: dict[Value, None]) -> None:
        self.views, self.read = views, read
        self._constant: dict[Value, bool] = {}
        self._said: dict[Value, Optional[Said]] = {}

    def is_constant(self, value: Value) -> bool:
        """Whether it hangs on no input's numbers and on no parameter's."""
        return not self.views.behind(value) & {"input", "parameter", "random"}

    def of(self, value: Any) -> Optional[Said]:
        """What a table says; None where it cannot be told."""
        if isinstance(value, (bool, int, float)):
            return None if isinstance(value, (Size, Ratio)) else value
        if not isinstance(value, Value):
            return None
        if value not in self._said:
            self._said[value] = None
            if self.is_constant(value):
                self._said[value] = self._of(value)
        return self._said[value]

    def _of(self, value: Value) -> Optional[Said]:
        try:
            view = self.views.of(value, casts=True)
        except Mixes:
            return None
        source = self._of_source(view.source)
        if view.source is not value:
            source = self._seen(source, view)
        if value.dtype is torch.bool and source is not None and not isinstance(source, Affine):
            return _each(source, bool)
        return source

    def _seen(self, said: Optional[Said], view: Any) -> Optional[Said]:
        """What a view of a table says: of each axis of the source, the axis that goes along it."""
        along: dict[int, tuple[int, float]] = {}
        for i, atoms in enumerate(view.axes):
            for atom in atoms:
                if atom.axis is None:
                    continue
                if len([x for x in atoms if x.axis is not None]) > 1 or atom.stride.formulas or len(atoms) > 1:
                    return None
                along[atom.axis] = i, atom.stride.number
        starts = view.offsets
        if isinstance(said, Affine):
            factors, number = [], said.number
            for axis, factor in said.factors:
                number += factor * starts.get(axis, 0)
                if axis in along:
                    factors.append((along[axis][0], factor * along[axis][1]))
            return said._replace(factors=tuple(factors), number=number)
        if isinstance(said, Pick):
            band = said.band
            if band.row not in along or band.column not in along or {along[band.row][1], along[band.column][1]} != {1}:
                return None
            move = starts.get(band.column, 0) - starts.get(band.row, 0)
            spans = tuple((a - move, b - move) for a, b in band.spans)
            return said._replace(band=Band(along[band.row][0], along[band.column][0], spans))
        return said

    def _of_source(self, value: Value) -> Optional[Said]:
        if value.node is None:
            return self._of_leaf(value)
        node = value.node
        rule = _RULES.get(node.name.rstrip("_") if not node.name.endswith("__") else node.name)
        return rule(self, node, value) if rule is not None else None

    def _of_leaf(self, value: Value) -> Optional[Said]:
        """A buffer, or another tensor that was read: its contents, all of them."""
        tensor = value.tensor
        if tensor is None or value.kind not in ("buffer", "constant") or tensor.requires_grad or tensor.is_complex():
            return None
        self.read[value] = None
        with torch.no_grad():
            return said_by_contents(tensor.detach())


def said_by_contents(tensor: Any) -> Optional[Said]:
    long = [i for i, n in enumerate(tensor.shape) if n > 1]
    if tensor.numel() == 0 or len(long) > 2:
        return None
    table = tensor.reshape([tensor.shape[i] for i in long])
    if not long:
        return table.item()
    first = table[(0,) * len(long)].item()
    if bool((table == first).all()):
        return first
    if len(long) == 1:
        step = table[1].item() - first
        if table.dtype is not torch.bool and bool((table == torch.arange(len(table)) * step + first).all()):
            return Affine(((long[0], step),), first)
        return None
    array: Any = (table.float() if table.dtype is torch.bfloat16 else table).cpu().numpy()  # which takes less time
    if not (array[1:, 1:] == array[:-1, :-1]).all():
        return None
    numbers = array[::-1, 0].tolist() + array[0, 1:].tolist()  # by column - row, from 1 - rows on
    values = sorted(set(numbers))
    if len(values) != 2:
        return None
    spans: list[Any] = []
    low = 1 - table.shape[0]
    for i, number in enumerate(numbers):
        if number == values[1]:
            if spans and spans[-1][1] == low + i - 1:
                spans[-1] = spans[-1][0], low + i
            else:
                spans.append((low + i, low + i))
    if spans[0][0] == low:
        spans[0] = -INF, spans[0][1]
    if spans[-1][1] == table.shape[1] - 1:
        spans[-1] = spans[-1][0], INF
    return Pick(Band(long[0], long[1], tuple(spans)), values[1], values[0])


def _each(said: Any, function: Callable[..., Any]) -> Optional[Said]:
    try:
        if isinstance(said, Pick):
            return said._replace(inside=function(said.inside), outside=function(said.outside))
        return function(said)
    except (TypeError, ValueError, OverflowError, ZeroDivisionError):
        return None


def _both(a: Any, b: Any, function: Callable[..., Any]) -> Optional[Said]:
    """Of two tables that say numbers, or one number in a band."""
    if a is None or b is None or isinstance(a, Affine) or isinstance(b, Affine):
        return None
    if not isinstance(a, Pick):
        return _each(b, lambda x: function(a, x))
    if not isinstance(b, Pick):
        return _each(a, lambda x: function(x, b))
    if (a.band.row, a.band.column) != (b.band.row, b.band.column):
        turned = Band(b.band.column, b.band.row, tuple((-y, -x) for x, y in reversed(b.band.spans)))
        if (a.band.row, a.band.column) != (turned.row, turned.column):
            return None
        b = b._replace(band=turned)
    both = a.band.without().union(b.band.without()).without()
    results = (
        (both, function(a.inside, b.inside)), (a.band.without().union(b.band).without(), function(a.inside, b.outside)),
        (a.band.union(b.band.without()).without(), function(a.outside, b.inside)),
        (a.band.union(b.band).without(), function(a.outside, b.outside)),
    )  # fmt: skip
    values = list(dict.fromkeys(value for band, value in results if band.spans))
    if len(values) == 1:
        return values[0]
    if len(values) != 2:
        return None
    inside = Band(a.band.row, a.band.column, ())
    for band, value in results:
        if value == values[0]:
            inside = inside.union(band)
    return Pick(inside, values[0], values[1])


# --- The functions ------------------------------------------------------------------------------------------


def _value_axes(tables: Tables, node: Node, value: Value, given: Any) -> Optional[Said]:
    """What an argument says at the result's axes, to which it is broadcast."""
    said = tables.of(given)
    if isinstance(given, Value) and isinstance(said, (Affine, Pick)):
        more = len(value.shape) - len(given.shape)
        if isinstance(said, Affine):
            return said._replace(factors=tuple((axis + more, x) for axis, x in said.factors))
        return said._replace(band=said.band._replace(row=said.band.row + more, column=said.band.column + more))
    return said


def _arithmetic(tables: Tables, node: Node, value: Value) -> Optional[Said]:
    name = node.name.rstrip("_")
    given = [_value_axes(tables, node, value, x) for x in node.args]
    if any(x is None for x in given) or node.kwargs:
        return None
    if len(given) == 1:
        (a,) = given
        if isinstance(a, Affine):
            return a._replace(absolute=True) if name == "abs" else _scaled(a, -1) if name == "neg" else None
        return _each(a, _NUMBERS[name])
    a, b = given
    if isinstance(a, Affine) or isinstance(b, Affine):
        return _linear(name, a, b)
    return _both(a, b, _NUMBERS[name])


def _scaled(a: Affine, by: float) -> Optional[Affine]:
    if a.absolute:
        return None
    return Affine(tuple((axis, x * by) for axis, x in a.factors), a.number * by)


def _sum(a: Affine, b: Affine) -> Optional[Affine]:
    if a.absolute or b.absolute:
        return None
    factors = dict(a.factors)
    for axis, x in b.factors:
        factors[axis] = factors.get(axis, 0) + x
    return Affine(tuple(sorted((axis, x) for axis, x in factors.items() if x)), a.number + b.number)


def _linear(name: str, a: Any, b: Any) -> Optional[Said]:
    if isinstance(a, Pick) or isinstance(b, Pick):
        return None
    one, other = (x if isinstance(x, Affine) else Affine((), float(x)) for x in (a, b))
    if name == "add":
        return _sum(one, other)
    if name == "sub":
        minus = _scaled(other, -1)
        return None if minus is None else _sum(one, minus)
    if name in ("mul", "div") and not isinstance(b, Affine):
        return _scaled(one, b if name == "mul" else 1 / b)
    if name == "mul" and not isinstance(a, Affine):
        return _scaled(other, a)
    return _compared(name, one, other) if name in _COMPARE else None


_TURNED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq", "ne": "ne"}


def _compared(name: str, a: Affine, b: Affine) -> Optional[Said]:
    """One against the other, where both are places of two axes: a band."""
    if b.absolute:
        a, b, name = b, a, _TURNED[name]
    if a.absolute:
        if b.factors or b.absolute:
            return None
        upper = _compared(name, a._replace(absolute=False), b)
        lower = _compared(name, _scaled(a._replace(absolute=False), -1) or a, b)
        if name in ("gt", "ge", "ne") or not (isinstance(upper, Pick) and isinstance(lower, Pick)):
            return _both(upper, lower, operator.or_) if name in ("gt", "ge") else None
        return _both(upper, lower, operator.and_) if name in ("lt", "le") else None
    minus = _scaled(b, -1)
    difference = None if minus is None else _sum(a, minus)
    if difference is None or sorted(abs(x) for _, x in difference.factors) != [1, 1]:
        return None
    (row, x), (column, y) = difference.factors
    if x + y != 0 or difference.number != int(difference.number):
        return None
    if y < 0:  # turn it: column - row + number
        name = _TURNED[name]
    at = -int(difference.number) * (1 if y > 0 else -1)  # column - row compared with this
    spans: dict[str, list[tuple[float, float]]] = {
        "lt": [(-INF, at - 1)],
        "le": [(-INF, at)],
        "gt": [(at + 1, INF)],
        "ge": [(at, INF)],
        "eq": [(at, at)],
    }
    if name == "ne":
        return Pick(Band(row, column, ((at, at),)), False, True)
    return Pick(Band(row, column, tuple(spans[name])), True, False)


def _filled(number: Any) -> Any:
    return lambda tables, node, value: number


def _full(tables: Tables, node: Node, value: Value) -> Optional[Said]:
    place = 2 if node.name == "new_full" else 1
    return tables.of(node.args[place] if len(node.args) > place else node.kwargs.get("fill_value"))


def _arange(tables: Tables, node: Node, value: Value) -> Optional[Said]:
    numbers = [x for x in node.args if isinstance(x, (int, float))]
    start = node.kwargs.get("start", numbers[0] if len(numbers) > 1 else 0)
    step = node.kwargs.get("step", numbers[2] if len(numbers) > 2 else 1)
    if isinstance(start, (Size, Ratio)) or isinstance(step, (Size, Ratio)):
        return None
    return Affine(((0, step),), start)


def _triangle(tables: Tables, node: Node, value: Value) -> Optional[Said]:
    said = tables.of(node.args[0])
    diagonal = node.args[1] if len(node.args) > 1 else node.kwargs.get("diagonal", 0)
    if isinstance(diagonal, Size) or said is None or isinstance(said, Affine):
        return None
    rank, lower = len(value.shape), node.name.startswith("tril")
    span = (-INF, diagonal) if lower else (diagonal, INF)
    kept = Pick(Band(rank - 2, rank - 1, (span,)), True, False)
    return _both(kept, said, lambda keep, x: x if keep else type(x)(0))


def _eye(tables: Tables, node: Node, value: Value) -> Optional[Said]:
    return Pick(Band(0, 1, ((0, 0),)), 1.0, 0.0)


def _where(tables: Tables, node: Node, value: Value) -> Optional[Said]:
    if len(node.args) != 3:
        return None
    keep, a, b = (_value_axes(tables, node, value, x) for x in node.args)
    if not isinstance(a, (int, float)) or not isinstance(b, (int, float)):
        return None
    return None if keep is None or isinstance(keep, Affine) else _each(keep, lambda x: a if x else b)


def _masked(tables: Tables, node: Node, value: Value) -> Optional[Said]:
    fill = node.args[2] if len(node.args) > 2 else node.kwargs.get("value")
    before, mask = (_value_axes(tables, node, value, x) for x in node.args[:2])
    said = tables.of(fill)
    if said is None or isinstance(said, (Affine, Pick)) or isinstance(mask, Affine):
        return None
    return _both(mask, before, lambda hide, x: said if hide else x)


def _tensor(tables: Tables, node: Node, value: Value) -> Optional[Said]:
    given = node.args[0] if node.args else None
    if isinstance(given, (list, tuple)):
        given = given[0] if len(given) == 1 else None
    return tables.of(given)


def _cast(tables: Tables, node: Node, value: Value) -> Optional[Said]:
    said = tables.of(node.args[0])
    if said is None or isinstance(said, Affine):
        return None
    return _each(said, lambda x: torch.tensor(x).to(value.dtype).item())


def _root(tables: Tables, node: Node, value: Value) -> Optional[Said]:
    said = tables.of(node.args[0])
    function = math.sqrt if node.name == "sqrt" else lambda x: x**-0.5
    return None if isinstance(said, Affine) or said is None else _each(said, function)


_RULES: dict[str, Callable[..., Optional[Said]]] = {
    **dict.fromkeys(_NUMBERS, _arithmetic), "arange": _arange, "ones": _filled(1.0), "zeros": _filled(0.0),
    "ones_like": _filled(1.0), "zeros_like": _filled(0.0), "new_ones": _filled(1.0), "new_zeros": _filled(0.0),
    "full": _full, "full_like": _full, "new_full": _full, "tril": _triangle, "triu": _triangle, "eye": _eye,
    "where": _where, "masked_fill": _masked, "tensor": _tensor, "as_tensor": _tensor, "scalar_tensor": _tensor,
    "sqrt": _root, "rsqrt": _root, "new_tensor": lambda tables, node, value: tables.of(node.args[1]),
    **dict.fromkeys(CASTS, _cast),
}  # fmt: skip
