"""`project` of the modules: keys and values of an encoder, projected once for the many calls of a decoder.

A call takes them in the place of keys and values, and W_k and W_v are left out.  Where gradients are recorded they are
part of autograd's graph.  The rules are those of the NumPy layers (`mha_c._decoder.caches`).
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Optional

import torch
from torch import Tensor

from ..._arguments import calls
from ..._core import linear
from ..._decoder import caches
from ...errors import ShapeError
from .._call.attention import any_needs_grad
from .._call.inputs import materialize
from .._call.readable import parts_for_core
from .._call.records import LayerParameters
from .._private import FakeTensor, observed
from .._tensors import FLOATS, check_devices, check_inputs, elsewhere, exporting
from .._twins import twin
from .decoding import NO_GRADIENT, Held, order_of_tensors

WHAT = "decoding with keys and values projected under torch.no_grad()"


class ProjectedKeyValues(caches.ProjectedKeyValues):
    """Keys and values that W_k and W_v of one layer have projected: see mha_c.ProjectedKeyValues.

    Not meant to be constructed directly.

    Examples
    --------
    >>> import torch, mha_c.torch
    >>> attention = mha_c.torch.AdditiveAttention(num_hiddens=8, dropout=0.1).eval()
    >>> with torch.no_grad():
    ...     attention.project_keys(torch.ones(2, 10, 16)).shape
    (2, 10, 8)
    """

    __slots__ = ("_recorded",)
    _keys: Tensor
    _values: Optional[Tensor]
    _recorded: bool
    _same = staticmethod(Held.same)

    def _given_to(self, module: Any, queries: Any, values: Any, valid_lens: Any) -> Any:
        """(keys, values, lengths) of module(queries, self), or module(queries, self, values) if it has keys only."""
        name = type(module).__name__
        if self._values is not None and values is not None:
            raise TypeError("values go into `project` together with the keys: call layer(queries, kv)")
        if self._values is None:
            if queries is None or values is None:
                raise calls.missing(name, queries=queries, values=values)
        if self._weights is not None and not _without_numbers():
            self._check(Held.by(module))
        if not self._recorded and torch.is_grad_enabled():
            check_inputs(queries=queries)
            if any_needs_grad((queries, values), module.parameters()):
                raise RuntimeError(NO_GRADIENT.format(WHAT))
        lens = self._valid_lens if valid_lens is None else valid_lens
        return self._keys, self._values if values is None else values, lens

    @twin(caches.ProjectedKeyValues.reorder)
    def reorder(self, index: Any) -> Any:
        """Copy the items index[0], index[1], ... into a new object, for beam search."""
        keys = self._keys
        order = order_of_tensors(index, keys.shape[0], elsewhere(keys))
        found = self._of(order.to(keys.device, non_blocking=elsewhere(keys)))
        found._recorded = self._recorded
        return found


def project(module: Any, keys: Tensor, values: Optional[Tensor], valid_lens: Any) -> ProjectedKeyValues:
    """The result of the module's `project`; without values, of its `project_keys`."""
    named = {"keys": keys} if values is None else {"keys": keys, "values": values}
    check_inputs(**named)
    for name, x in named.items():
        if x.dim() != 3 or x.shape[:2] != keys.shape[:2]:
            raise ShapeError(f"{name} must have shape (B, K, features), got {tuple(x.shape)}; keys {tuple(keys.shape)}")
        if x.dtype is not keys.dtype:
            raise TypeError(f"{name} must be {keys.dtype} like keys, got {x.dtype}")
    materialize(module, None, keys, values)
    rows: Any = _rows(module, keys, values)
    held: Any = None if _without_numbers(keys) else Held.by(module)  # versions of tensors have a meaning
    kv = ProjectedKeyValues(rows[0], rows[1], _copied(valid_lens, keys), held, True)
    kv._recorded = torch.is_grad_enabled()
    return kv


def _without_numbers(x: Optional[Tensor] = None) -> bool:
    return observed() or exporting() or isinstance(x, FakeTensor)


def _rows(module: Any, keys: Tensor, values: Optional[Tensor]) -> list[Optional[Tensor]]:
    """Projected by the core as a call of it would, to the bit, where no gradient is recorded; else by the children."""
    names, parts = dict(module._layout.slots), None
    if not torch.is_grad_enabled():
        parts = parts_for_core(module, keys, keys, keys if values is None else values)
    found: list[Optional[Tensor]] = []
    for slot, x in ((1, keys), (2, values)):
        rows = None
        if x is None or slot not in names:
            found.append(None if x is None else x.clone())  # the caller may change it
            continue
        if parts is not None:
            parameters, _, _, packed = parts
            with suppress(BufferError):  # no plain memory after all
                rows = _by_core(x, parameters, slot, packed)
        if rows is None:
            child = getattr(module, names[slot])
            check_devices(**{"keys" if slot == 1 else "values": x, "parameters": tuple(child.parameters())})
            rows = child(x)
        found.append(rows.clone() if rows is x else rows)
    return found


def _by_core(x: Tensor, parameters: LayerParameters, slot: int, packed: Any) -> Tensor:
    """x, projected in the type that the core computes in."""
    x = x if x.dtype in FLOATS else x.float()
    weight, bias = parameters[slot], parameters[slot + 4]
    assert weight is not None
    if packed is not None and weight.dtype is x.dtype:
        return linear(x, packed.ready[slot])
    if weight.dtype is not x.dtype:
        weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    return linear(x, (weight, bias))


def _copied(valid_lens: Any, keys: Tensor) -> Optional[Tensor]:
    """A copy on the keys' device.  A copy to the CPU waits, or the CPU could read numbers before they arrive."""
    if valid_lens is None:
        return None
    return torch.as_tensor(valid_lens).to(keys.device, non_blocking=elsewhere(keys), copy=True)
