"""`project` of the modules: keys and values of an encoder, projected once for the many calls of a decoder.

Under no_grad the projected ones are numbers: the core takes a short way with them, and each call compares the weights.
Where gradients may be recorded they are part of autograd's graph, and calls with them are ordinary calls: in training,
in compilers, with hooks.  The rules are those of the NumPy layers (`mha_c._decoder.caches`).
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Optional

import numpy as np
import torch
from torch import Tensor

from ..._arguments import calls
from ..._arguments.scalars import LateSeed
from ..._core import layer_forward, linear
from ..._decoder import caches
from ...errors import ShapeError
from .._call.autograd import LayerParameters
from .._call.checks import checked_lengths, rank_of
from .._call.children import standard_parts
from .._lazy_sizes import materialize
from .._private import FakeTensor, in_transform, on_cpu
from .._tensors import (
    FLOATS,
    array,
    check_devices,
    check_inputs,
    draw_seed,
    elsewhere,
    exporting,
    is_compiling,
    without_subclass,
)
from .decoding import (
    Held,
    attend_elsewhere,
    check_module,
    finish,
    kept_weights,
    known_weights,
    order_of_tensors,
    outer_weights,
    run,
    same_weights,
)  # fmt: skip

if TYPE_CHECKING:
    from ..._types import Array
    from ..frozen import Packed

WHAT = "decoding with projected keys and values"


class ProjectedKeyValues(caches.ProjectedKeyValues):
    """Keys and values that W_k and W_v of one layer have projected: see mha_c.ProjectedKeyValues.

    Not made by hand.
    """

    __slots__ = ()
    _same_numbers = staticmethod(same_weights)

    def _order(self, index: Any) -> Any:
        keys: Any = self._keys
        if isinstance(keys, Tensor):
            order = order_of_tensors(index, keys.shape[0], not on_cpu(keys))
            return order.to(keys.device, non_blocking=not on_cpu(keys))
        return super()._order(index.cpu() if elsewhere(index) else index)


class _Recorded(ProjectedKeyValues):
    """Projected keys and values from which gradients flow back to keys, values, W_k and W_v."""

    __slots__ = ()


def project(module: Any, keys: Tensor, values: Optional[Tensor], valid_lens: Any) -> ProjectedKeyValues:
    """The result of the module's `project`; without values, of its `project_keys`."""
    named = {"keys": keys} if values is None else {"keys": keys, "values": values}
    check_inputs(**named)
    for name, x in named.items():
        if x.dim() != 3 or x.shape[:2] != keys.shape[:2]:
            raise ShapeError(f"{name} must have shape (B, K, features), got {tuple(x.shape)}; keys {tuple(keys.shape)}")
        if x.dtype is not keys.dtype:
            raise TypeError(f"{name} must be {keys.dtype} as keys, got {x.dtype}")
    materialize(module, None, keys, values)
    parts = standard_parts(module, *named.values())
    inputs: Any = keys, values
    kind: type[ProjectedKeyValues] = _Recorded
    held: Any = None
    if parts is not None and not torch.is_grad_enabled() and not _watched(keys):
        parameters, _, _, packed = parts
        inputs = tuple(None if x is None else without_subclass(x) for x in inputs)
        check_devices(keys=keys, values=values, parameters=parameters)
        if not on_cpu(keys):
            kind, held = ProjectedKeyValues, Held.of(parameters)
        else:
            with suppress(BufferError, RuntimeError):  # no plain memory: a negated view, zeros never written
                return _numbers(inputs, parameters, packed, valid_lens, module.empty_rows)
    rows: list[Any] = [None if x is None else _own(x, module._through(i, x)) for i, x in enumerate(inputs, 1)]
    return kind(rows[0], rows[1], (keys.shape[1],) * 2, _copied(valid_lens, keys), held or _held(module), True)


def _watched(x: Optional[Tensor] = None) -> bool:
    """Whether a compiler, an exporter or a transform is active, or x is a fake tensor: then there are no numbers."""
    return is_compiling() or exporting() or in_transform() or isinstance(x, FakeTensor)


def _held(module: Any) -> Any:
    """All parameters and buffers of the children W_k and W_v.  None where versions of tensors have no meaning."""
    if _watched():
        return None
    children = [module._modules[name] for slot, name in module._layout.slots if slot in (1, 2)]
    return Held.these(tuple(x for child in children for x in (*child.parameters(), *child.buffers())))


def _own(given: Tensor, rows: Tensor) -> Tensor:
    """`rows`, copied if they are the caller's own tensor."""
    return rows.clone() if rows is given else rows


def _copied(valid_lens: Any, keys: Tensor) -> Optional[Tensor]:
    """A copy on the keys' device.  A copy to the CPU waits, or the CPU could read numbers before they arrive."""
    if valid_lens is None:
        return None
    return torch.as_tensor(valid_lens).to(keys.device, non_blocking=not on_cpu(keys), copy=True)


def _numbers(
    inputs: Any, parameters: LayerParameters, packed: Optional[Packed], valid_lens: Any, empty_rows: str
) -> ProjectedKeyValues:
    """Project in the core's type; rows that no call will read are 0."""
    n_keys = inputs[0].shape[1]
    lens = caches.lengths_of(valid_lens, inputs[0].shape[0])
    n_read = caches.rows_read(lens, n_keys, empty_rows)
    n_read = n_read if inputs[1] is not None else (n_read[0], n_keys)  # without values here, a call gives them
    rows: list[Any] = []
    for slot, (x, n) in enumerate(zip(inputs, n_read), 1):
        found = None if x is None else _through(parameters, slot, x[:, :n], packed)
        if found is not None and n < n_keys:
            found = np.pad(found, ((0, 0), (0, n_keys - n), (0, 0)))
        elif found is not None and parameters[slot] is None:
            found = found.copy()  # the caller may change its memory
        rows.append(found)
    weights = kept_weights(None, known_weights(parameters, packed), packed)
    return ProjectedKeyValues(rows[0], rows[1], n_read, lens, weights, True)


def _through(parameters: LayerParameters, slot: int, x: Tensor, packed: Optional[Packed]) -> Array:
    """x, projected in the type that the core computes in."""
    if x.dtype not in FLOATS:
        x = x.float()
    weight, bias = parameters[slot], parameters[slot + 4]
    if weight is None:
        return array(x)
    if packed is not None and weight.dtype is x.dtype:
        return array(linear(x, packed.ready[slot]))
    if weight.dtype is not x.dtype:
        weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    return array(linear(x, (weight, bias)))


# --- Calls ---------------------------------------------------------------------------------------------


def call_projected(
    module: Any, queries: Tensor, kv: ProjectedKeyValues, values: Any, valid_lens: Any, training: Optional[bool]
) -> Tensor:
    """module(queries, kv), or module(queries, kv, values) if kv has keys only."""
    name = type(module).__name__
    if kv._values is not None and values is not None:
        raise TypeError("values go into `project` together with the keys: call layer(queries, kv)")
    if kv._values is None:
        if queries is None or values is None:
            raise calls.missing(name, queries=queries, values=values)
        calls.check_order(name, values, valid_lens)
    values = kv._values if values is None else values
    if isinstance(kv, _Recorded):
        held = _held(module)
        if held is not None and kv._weights is not None:
            kv._check(held, None, module.empty_rows)
        lens = kv._valid_lens if valid_lens is None else valid_lens
        return module._slowly(queries, kv._keys, values, lens, training, projected=True)
    if type(queries) is not Tensor:
        check_inputs(queries=queries)
        queries = without_subclass(queries)
    if queries.dim() != 3:
        raise rank_of("queries", queries)
    given = None if values is kv._values else values
    if given is not None:
        check_inputs(values=given)
        values = given = without_subclass(given)
    parameters, holder, _, packed = check_module(module, WHAT, queries, None, given)
    dropout = module._dropout_now(training)
    if isinstance(kv._keys, Tensor) or elsewhere(queries):
        keys, values = torch.as_tensor(kv._keys), torch.as_tensor(values)
        check_devices(queries=queries, keys=keys, values=values, parameters=parameters)
        now: Any = Held.of(parameters)
        kv._check(now, None, module.empty_rows)
        lens = kv._valid_lens if valid_lens is None else valid_lens
        lens = None if lens is None else checked_lengths(lens, queries)
        there = lens, module.num_heads, module.empty_rows, dropout
        return attend_elsewhere(module, (queries, kv._keys, values), parameters, holder, there)
    weights = known_weights(parameters, packed)
    lens = kv._check(weights, valid_lens, module.empty_rows)
    kv._weights = kept_weights(kv._weights, weights, packed)
    options = lens, module.num_heads, module.empty_rows, dropout, LateSeed(draw_seed) if dropout else 0
    outer, ready = outer_weights(parameters, None), packed and outer_weights(parameters, packed)
    out, saved = run(layer_forward, (queries, kv._keys, values), outer, ready, options)
    return finish(module, holder, queries, out, saved)
