"""The weights of a CoreCall as the parameters of a call of the core: the reader's own, or rows and columns of them."""

from __future__ import annotations

from typing import Any, Callable

import numpy as np
import torch
from torch import Tensor

from ..._layer.description import BOOK_NAMES
from .._call.records import LayerParameters
from .._reading.graph import Value
from .._reading.products import Projected, Rows
from .layer import CoreCall
from .replaying import Replay

_AS_LINEAR = ((0,), (1,))


def parameters_of(layer: CoreCall) -> tuple[Any, Any]:
    """(which rows of a joint weight those of queries, keys and values are, or None; the LayerParameters, or a
    function that makes them where a weight is rows or columns of the reader's)."""
    given = dict(zip(BOOK_NAMES, layer.projections))
    rows = _joint(layer.projections[:3])
    if rows is not None:
        first: Any = layer.projections[0]
        W, bias = first.weight[0].value, ()  # type: Any, Any
        if first.bias:
            b = first.bias[0].value
            bias = (Rows(b, range(int(b.shape[0])), ins=()),)
        whole = Projected((Rows(W, range(int(W.shape[0]))),), bias, ())
        given.update(dict.fromkeys(BOOK_NAMES[:3], whole))
    plain = all(x is None or _is_whole(x) for x in given.values())
    plain = plain and (
        layer.w_v is None or (layer.w_v.node is None and len(layer.w_v.shape) == 2 and layer.w_v.shape[0] == 1)
    )

    names: dict[Any, list[str]] = {}  # one weight in three places is made once
    for name, x in given.items():
        names.setdefault(x, []).append(name[2:])
    parts = [(names[x], _joined(x.weight, 2), x.bias and _joined(x.bias, 1)) for x in names if x is not None]

    def made() -> LayerParameters:
        found: dict[str, Any] = {}  # a view of a weight is another one in each graph
        for places, weight, bias in parts:
            W, b = weight(), bias() if bias else None
            for place in places:
                found[f"W_{place}"], found[f"b_{place}"] = W, b
        if layer.w_v is not None:
            w_v = _tensor_of(layer.w_v)
            found["w_v"] = w_v if plain else w_v.reshape(1, -1)
        return LayerParameters(**found)

    if plain:
        return rows, made()
    every = [part for x in given.values() if x is not None for part in (x.weight, x.bias)]
    viewed = layer.w_v is None and all(len(x) <= 1 and all(_is_viewed(y) for y in x) for x in every)
    return rows, (_Viewed(made, [x[0].value.tensor for x in every if x]) if viewed else made)


class _Viewed:
    """Makes LayerParameters that are views of a reader's, and keeps them for calls without a graph."""

    def __init__(self, make: Any, tensors: list[Any]) -> None:
        self.make, self.tensors = make, tensors
        self.then: Any = None  # the tensors, as they were when the views were made
        self.found: Any = None

    def __call__(self) -> LayerParameters:
        if torch.is_grad_enabled():
            return self.make()
        then = self.then
        if then is None or not all([x.dtype is y.dtype and x.is_set_to(y) for x, y in zip(self.tensors, then)]):
            self.then, self.found = [x.detach() for x in self.tensors], self.make()
        return self.found


def _joint(projections: Any) -> Any:
    """((first, number) or numbers of rows, for W_q, W_k and W_v) of one weight and one bias; None if they are none."""
    if any(x is None or len(x.weight) != 1 or len(x.bias) > 1 for x in projections):
        return None
    first = projections[0]
    for each in projections:
        weight = each.weight[0]
        if weight[2:] != (*_AS_LINEAR, None) or weight.value is not first.weight[0].value:
            return None
        if [x.value for x in each.bias] != [x.value for x in first.bias]:
            return None
        if each.bias and [*each.bias[0].rows] != [*weight.rows]:
            return None
    if all(_is_all(each.weight[0]) for each in projections):  # the same weight thrice
        return None
    found = [each.weight[0].rows for each in projections]
    if all(isinstance(rows, range) and rows.step == 1 for rows in found):
        return tuple((rows.start, len(rows)) for rows in found)
    return tuple(np.array([*rows], np.int64) for rows in found)


def _is_whole(projected: Projected) -> bool:
    return all(len(rows) <= 1 and all(_is_all(x) for x in rows) for rows in (projected.weight, projected.bias))


def _is_all(rows: Rows) -> bool:
    """Whether it is a whole parameter, as a Linear has it."""
    value, as_bias = rows.value, (rows.outs, rows.ins) == ((0,), ())
    if value.node is not None or rows.cut or not (as_bias or rows[2:4] == _AS_LINEAR) or len(value.shape) > 2:
        return False
    return _has_all(rows.rows, int(value.shape[0]))


def _has_all(rows: Any, number: int) -> bool:
    return isinstance(rows, range) and (rows.start, rows.stop, rows.step) == (0, number, 1)


def _joined(parts: tuple[Rows, ...], rank: int) -> Callable[[], Tensor]:
    """What makes one tensor of parts."""
    makes = [_rows(part, rank) for part in parts]
    return makes[0] if len(makes) == 1 else lambda: torch.cat([make() for make in makes])


def _rows(part: Rows, rank: int) -> Callable[[], Tensor]:
    """What makes (outputs, inputs), or (outputs,)."""
    value, rows, outs, ins, cut = part
    total = 1
    for axis in outs:
        total *= int(value.shape[axis])
    order = (*outs, *ins, *(i for i in range(len(value.shape)) if i not in outs + ins))
    turned, shape = order != (*range(len(order)),), (total, -1)[:rank]
    picked = None if isinstance(rows, range) else torch.tensor(rows)
    every, fits = _has_all(rows, total), len(outs + ins) == rank == len(value.shape)

    def made() -> Tensor:
        x = _tensor_of(value)
        x = x.permute(order) if turned else x
        x = x if fits else x.reshape(shape)
        x = x if cut is None else x.narrow(1, *cut)
        if every:
            return x
        return x[rows.start : rows.stop : rows.step] if picked is None else x.index_select(0, picked)

    return made


def _tensor_of(value: Value) -> Any:
    return value.tensor if value.node is None else Replay({}).value(value)


def _is_viewed(part: Rows) -> bool:
    """Whether it is a view of a parameter's memory."""
    return isinstance(part.rows, range) and part.value.node is None and len(part.outs + part.ins) <= 2
