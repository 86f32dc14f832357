"""The weights of a CoreCall as the parameters of a call of the core: the reader's own, or rows and columns of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..._layer.description import BOOK_NAMES
from .._call.records import Parameters
from .._reading.products import Projected, Rows
from .layer import CoreCall


def parameters_of(layer: CoreCall) -> tuple[Any, Any]:
    """(which rows of a joint weight those of queries, keys and values are, or None; the Parameters of a layer, or a
    function that makes them where a weight is rows or columns of the reader's)."""
    given = dict(zip(BOOK_NAMES, layer.projections))
    rows = _joint(layer.projections[:3])
    if rows is not None:
        W, b = (parts[0].value if parts else None for parts in layer.projections[0][:2])  # type: ignore[index]
        whole = Projected((Rows(W, range(int(W.shape[0]))),), (Rows(b, range(int(b.shape[0]))),) if b else (), ())  # type: ignore[union-attr,arg-type]
        given.update(dict.fromkeys(BOOK_NAMES[:3], whole))
    plain = all(x is None or _is_whole(x) for x in given.values())
    plain = plain and (layer.w_v is None or (len(layer.w_v.shape) == 2 and layer.w_v.shape[0] == 1))

    def made() -> Parameters:
        found: dict[str, Any] = {}  # a view of a weight is another one in each graph
        for name, projected in given.items():
            if projected is not None:
                found[name] = _joined(projected.weight, 2)
                found[f"b_{name[2:]}"] = _joined(projected.bias, 1) if projected.bias else None
        if layer.w_v is not None:
            w_v = layer.w_v.tensor
            found["w_v"] = w_v if plain else w_v.reshape(1, -1)  # type: ignore[union-attr]
        return Parameters(**found)

    if plain:
        return rows, made()
    parts = [part for x in given.values() if x is not None for part in (x.weight, x.bias)]
    viewed = layer.w_v is None and all(len(x) <= 1 and all(isinstance(y.rows, range) for y in x) for x in parts)
    return rows, (_Viewed(made, [x[0].value.tensor for x in parts if x]) if viewed else made)


class _Viewed:
    """Makes Parameters that are views of a reader's, and keeps them for calls without a graph."""

    def __init__(self, make: Any, tensors: list[Any]) -> None:
        self.make, self.tensors = make, tensors
        self.then: Any = None  # the tensors, as they were when the views were made
        self.found: Any = None

    def __call__(self) -> Parameters:
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
        if weight.columns or len(weight.value.shape) != 2 or weight.value is not first.weight[0].value:
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
    own = rows.value.shape[1 if rows.columns else 0]
    everything = isinstance(rows.rows, range) and (rows.rows.start, rows.rows.stop, rows.rows.step) == (0, int(own), 1)
    return everything and not rows.columns and len(rows.value.shape) <= 2


def _joined(parts: tuple[Rows, ...], rank: int) -> Tensor:
    found = [_rows(part, rank) for part in parts]
    return found[0] if len(found) == 1 else torch.cat(found)


def _rows(part: Rows, rank: int) -> Tensor:
    """(outputs, inputs), or (outputs,)."""
    x: Any = part.value.tensor
    if part.columns:
        x = x.t()
    if rank == 2 and x.dim() > 2:  # a convolution of one step
        x = x.flatten(1)
    if _is_all(part._replace(columns=False)) and not part.columns:
        return x
    if isinstance(part.rows, range) and part.rows.step == 1:
        return x[part.rows.start : part.rows.stop]
    if isinstance(part.rows, range):
        return x[part.rows.start : part.rows.stop : part.rows.step]
    return x[list(part.rows)]
