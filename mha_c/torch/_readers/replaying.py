"""A graph computed again, with other sizes or without dropout: the functions that the reader asked torch for; and
compared with another."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .._reading.functions import function_kind
from .._reading.graph import Node, Reading, Value
from .._reading.sizes import UNKNOWN, axes_of, evaluated, formula_of, plain


class Replay:
    """Values of a reading's graph for inputs that are given.

    inputs      {name: Tensor}
    sizes       of the inputs' axes; None: those of the reading
    dropless    whether dropout is left out
    """

    def __init__(self, inputs: Mapping[str, Tensor], sizes: Any = None, dropless: bool = False) -> None:
        self.inputs, self.sizes, self.dropless = inputs, sizes, dropless
        self.known: dict[Value, Tensor] = {}

    def value(self, wanted: Value) -> Tensor:
        """The tensor of a value.  Nodes that write in place are computed on copies."""
        if wanted in self.known:
            return self.known[wanted]
        if wanted.node is None:
            found = self.inputs[wanted.name] if wanted.kind == "input" else wanted.tensor
            assert found is not None
            self.known[wanted] = found
            return found
        self._run(wanted.node)
        return self.known[wanted]

    def _run(self, node: Node) -> None:
        args, kwargs = self._given(node.args), self._given(node.kwargs)
        if self.dropless and node.name == "dropout":
            self.known[node.results[0]] = args[0]
            return
        if node.writes is not None:
            copy = self.value(node.writes).clone()
            args = tuple(copy if x is self.known[node.writes] else x for x in args)
        if len(args) == 2 and function_kind(node.function).reflected:  # 1 - x asks for x.__rsub__(1)
            args = args[::-1]
        found = node.function(*args, **kwargs)
        made = [x for x in _flat(found) if isinstance(x, Tensor)] or [args[0]]  # x[i] = y gives nothing
        self.known.update(zip(node.results, made))

    def _given(self, found: Any) -> Any:
        if isinstance(found, Value):
            return self.value(found)
        if isinstance(found, (tuple, list)):
            parts = [self._given(x) for x in found]
            return type(found)(*parts) if hasattr(found, "_fields") else type(found)(parts)
        if isinstance(found, dict):
            return {key: self._given(x) for key, x in found.items()}
        if isinstance(found, slice):
            return slice(*(self._given(x) for x in (found.start, found.stop, found.step)))
        formula = formula_of(found)
        if formula is found:
            return found
        return plain(found) if self.sizes is None else evaluated(formula, self.sizes)


def _flat(found: Any) -> list[Any]:
    return [y for x in found for y in _flat(x)] if isinstance(found, (tuple, list)) else [found]


def without_dropout(reading: Reading, inputs: Mapping[str, Tensor]) -> Any:
    """What the reading's call would have given without dropout, in the structure of its output."""
    replay = Replay(inputs, dropless=True)

    def again(found: Any) -> Any:
        if isinstance(found, Value):
            return replay.value(found)
        if isinstance(found, (tuple, list)):
            parts = [again(x) for x in found]
            return type(found)(*parts) if hasattr(found, "_fields") else type(found)(parts)
        return {key: again(x) for key, x in found.items()} if isinstance(found, dict) else found

    with torch.no_grad():
        return again(reading.output)


def graph_key(reading: Reading) -> Any:
    """The graph as what can be compared: functions, constants, formulas of sizes, leaves, results; None where a size's
    formula is not known."""
    places = {id(value): (node.number, i) for node in reading.graph.nodes for i, value in enumerate(node.results)}

    def described(found: Any) -> Any:
        if isinstance(found, Value):
            leaf = (found.kind, found.name, id(found.tensor) if found.kind != "input" else 0)
            return places.get(id(found), leaf)
        if isinstance(found, (tuple, list)):
            return tuple([described(x) for x in found])
        if isinstance(found, dict):
            return tuple([(key, described(x)) for key, x in found.items()])
        if isinstance(found, slice):
            return "slice", described((found.start, found.stop, found.step))
        return type(found), formula_of(found)

    sizes = {formula_of(n) for node in reading.graph.nodes for value in node.results for n in value.shape}
    if any(UNKNOWN in axes_of(formula) for formula in sizes):
        return None
    nodes = [(node.name, described(node.args), described(node.kwargs)) for node in reading.graph.nodes]
    return nodes, described(reading.output), [(each.path, each.name, described(each.value)) for each in reading.effects]


def near(ours: Tensor, own: Tensor) -> bool:
    """Equal up to rounding.  A query without keys is NaN in the reader's lines and 0 in ours."""
    farthest, largest = float((ours - own).abs().max()) if own.numel() else math.nan, math.nan
    if farthest == farthest:
        largest = float(own.abs().max())
    if largest < math.inf:
        return farthest <= _allowed(own, largest)
    known = own.isfinite()
    if not bool(known.any()) or not bool((ours == own)[own.isinf()].all()):
        return False  # nothing was compared, or the lines overflow where the core does not
    largest = float(own[known].abs().max())
    return bool(((ours - own).abs()[known] <= _allowed(own, largest)).all())


def _allowed(own: Tensor, largest: float) -> float:
    """Of sums of up to some thousand products in another order, whose terms may be ten times the result."""
    return (1e-10 if own.dtype is torch.float64 else 2e-4) * max(largest, 1e-3)
