"""The calls of a decoder on tensors: a cache of its own keys and values, and projected keys and values of an encoder.

The rules are those of mha_c's NumPy layers (`mha_c._decoder.caches`, which has the classes); `_module.py` calls this.
Each call reads the weights in place, and compares them, number by number, with those that projected earlier rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Optional

import numpy as np
import torch
from torch import Tensor

from ..._core import layer_parts, layer_step
from ..._decoder import caches
from .._call import by_torch
from .._call.autograd import LayerParameters
from .._call.children import Parts
from .._call.ways import any_needs_grad, call_core
from .._lazy_sizes import materialize
from .._private import on_cpu
from .._tensors import (
    FLOATS,
    OWN_TYPES,
    array,
    autocasting,
    check_devices,
    check_inputs,
    common_type,
    elsewhere,
    refuse_transforms,
    result_type,
    without_subclass,
)

if TYPE_CHECKING:
    from ..._types import Array
    from ..frozen import Packed

_FLOAT32, _FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)
NO_GRADIENT = (
    "{} leads no gradient back: call it under torch.no_grad() (or torch.inference_mode()), or give the "
    "layer the keys and values themselves; what is to lead gradients is projected where they are recorded"
)


class Held(NamedTuple):
    """The weights that projected some rows, compared by object, version and address: no number is read, so that nothing
    waits for another device.  Weights of a copy or from a pickle are other objects: their numbers are compared."""

    weights: tuple[Optional[Tensor], ...]
    states: Optional[tuple[Any, ...]]  # None in a copy

    @classmethod
    def of(cls, parameters: LayerParameters) -> Held:
        return cls.these(tuple(parameters[i] for i in (1, 5, 2, 6)))

    @classmethod
    def these(cls, weights: tuple[Optional[Tensor], ...]) -> Held:
        return cls(weights, tuple(map(_state, weights)))

    def same(self, now: Held) -> bool:
        if self.states is None:
            return len(self.weights) == len(now.weights) and all(map(_equal, self.weights, now.weights))
        return self.states == now.states and all(a is b for a, b in zip(self.weights, now.weights))

    def __reduce__(self) -> Any:
        changed = self.states is not None and self.states != tuple(map(_state, self.weights))
        return Held, (self.weights, self.states if changed else None)


def _state(weight: Optional[Tensor]) -> Any:
    """A state that differs after each change; `weight.data = other` changes only the address."""
    if weight is None:
        return None
    version = 0 if weight.is_inference() else weight._version
    return version, weight.data_ptr() if type(weight) in OWN_TYPES else 0


def _equal(a: Optional[Tensor], b: Optional[Tensor]) -> bool:
    if a is None or b is None:
        return a is b
    return a.device == b.device and a.dtype is b.dtype and torch.equal(a, b)


def same_weights(kept: Any, now: Any) -> bool:
    if isinstance(kept, Held) != isinstance(now, Held):
        return False
    if isinstance(kept, Held):
        return kept.same(now)
    return caches.same_numbers(kept, now)


class KeyValueCache(caches.KeyValueCache):
    """The projected keys and values of all steps so far: see mha_c.KeyValueCache.

    Parameters
    ----------
    batch : int
        How many items.
    max_len : int
        How many steps there is room for.

    Examples
    --------
    >>> import torch, mha_c.torch
    >>> mha, x = mha_c.torch.MultiHeadAttention(8, 8, 8, 8, 2, 0.0).eval(), torch.ones(1, 3, 8)
    >>> cache = mha.new_cache(batch=1, max_len=4)
    >>> with torch.no_grad():
    ...     out = mha(x, x, x, cache=cache)
    >>> cache.lengths
    tensor([3])
    """

    __slots__ = ()
    _same_numbers = staticmethod(same_weights)

    @property
    def lengths(self) -> Any:
        """How many steps each item has: whole numbers (B,) in a new tensor."""
        return torch.from_numpy(super().lengths)

    def clear(self) -> None:
        """Forget all steps; keep the memory on the CPU only: on other devices attention_weights may still need it."""
        super().clear()
        if isinstance(self._keys, Tensor):
            self._keys = self._values = None

    def _reorder(self, index: Any) -> None:
        rooms: Any = self._keys, self._values
        if not isinstance(rooms[0], Tensor):
            super()._reorder(index.cpu() if elsewhere(index) else index)
            return
        order = order_of_tensors(index, self.batch, isinstance(self._steps, int))
        if not isinstance(self._steps, int):
            self._steps = caches.one_count(self._steps[order.cpu().numpy()])
        self._batch, order = len(order), order.to(rooms[0].device, non_blocking=True)
        self._keys, self._values = (x.index_select(0, order) for x in rooms)

    def _write(self, keys: Tensor, values: Tensor, counts: Any) -> None:
        """Append the new steps of a call on another device than the CPU."""
        if self._keys is None or (self._weights is None and not isinstance(self._keys, Tensor)):
            self._keys, self._values = (x.new_zeros(self._batch, self._max_len, x.shape[2]) for x in (keys, values))
        rooms: Any = self._keys, self._values
        if isinstance(rooms[0], Tensor) and rooms[0].is_inference() and not torch.is_inference_mode_enabled():
            rooms = self._keys, self._values = rooms[0].clone(), rooms[1].clone()  # inference tensors are read-only
        there = getattr(rooms[0], "device", "cpu"), rooms[0].dtype
        if there != (keys.device, keys.dtype):
            raise TypeError(
                f"the cache holds {there[1]} on {there[0]}, but the new steps are {keys.dtype} on {keys.device}"
            )
        for room, rows in zip(rooms, (keys, values)):
            if isinstance(self._steps, int) and isinstance(counts, int):
                room[:, self._steps : self._steps + counts] = rows
            else:  # the CPU knows the places, so nothing waits for the device
                item, row = np.nonzero(np.arange(rows.shape[1]) < self._full(counts)[:, None])
                places = np.stack((item, row, self._full(self._steps)[item] + row))
                items, new, at = torch.from_numpy(places).to(room.device, non_blocking=True)
                room[items, at] = rows[items, new]


def order_of_tensors(index: Any, batch: int, unseen: bool) -> Tensor:
    """The `index` of a reorder as a tensor.

    unseen  only the device needs its numbers: an index on a device is not read, so that nothing waits for it
    """
    if unseen and elsewhere(index):
        return index
    order = caches.checked_index(index.cpu() if elsewhere(index) else index, batch)
    return torch.from_numpy(order)


def step(
    module: Any, cache: Any, queries: Tensor, keys: Tensor, values: Any, valid_lens: Any, training: Optional[bool]
) -> Tensor:
    """A call with cache=: appends the new steps and attends; see DecodingLayer.new_cache of the NumPy layers."""
    check_cache(module, cache, training)
    shape: Any = queries.shape if keys is queries and values is queries and type(queries) is Tensor else ()
    if len(shape) != 3 or shape[0] != cache._batch:
        shape = _checked_steps(cache.batch, queries, keys, values)
        queries, keys, values = without_subclass(queries), without_subclass(keys), without_subclass(values)
    parameters, holder, _, packed = check_module(module, "decoding with a cache", queries, keys, values)
    n_steps = shape[1]
    valid_lens = valid_lens.cpu() if elsewhere(valid_lens) else valid_lens
    counts = n_steps if valid_lens is None else caches.step_counts(valid_lens, shape[0], n_steps)
    if not on_cpu(queries):
        return _step_elsewhere(module, cache, (queries, keys, values), parameters, holder, counts)
    weights = known_weights(parameters, packed)
    after = cache._check(weights, counts)
    widths = 0, 0  # not needed once the cache has rows
    if cache._weights is None:
        _, W_k, W_v, *_ = parameters
        widths = (keys if W_k is None else W_k.T).shape[-1], (values if W_v is None else W_v.T).shape[-1]
    room = cache._room(widths, _FLOAT64 if queries.dtype is torch.float64 else _FLOAT32)
    lens = cache._visible_keys(after, n_steps)
    # An item without any step has no keys: it gets 0, not the mean of rows that do not count.
    options = lens, module.num_heads, "zero", 0.0, 0, *room, cache._steps, counts, caches.most(after)
    out, saved = run(layer_step, (queries, keys, values), parameters, packed and packed.ready, options)
    cache._keep(kept_weights(cache._weights, weights, packed), after)
    return finish(module, holder, queries, out, saved)


def check_cache(module: Any, cache: Any, training: Optional[bool]) -> None:
    if type(cache) is not KeyValueCache:
        raise TypeError(f"cache must be what new_cache made, got {type(cache).__name__}")
    if module.training if training is None else training:
        raise ValueError("a cache is for evaluation: call eval() first, or give the call training=False")


def finish(module: Any, holder: Any, queries: Tensor, out: Tensor, saved: Any) -> Tensor:
    """Store what a call has kept, and return its result in the type of queries (or autocast's)."""
    dtype = result_type(queries.dtype) if autocasting() else queries.dtype
    module._forget_assigned()
    holder["_last"] = saved, dtype, None
    return out if out.dtype is dtype else out.to(dtype)


def _step_elsewhere(
    module: Any, cache: KeyValueCache, inputs: Any, parameters: LayerParameters, holder: Any, counts: Any
) -> Tensor:
    """`step` on another device than the CPU."""
    check_devices(queries=inputs[0], keys=inputs[1], values=inputs[2], parameters=parameters)
    held: Any = Held.of(parameters)
    n_steps = inputs[0].shape[1]
    after = cache._check(held, counts)
    cache._write(rows_elsewhere(inputs[1], parameters, 1), rows_elsewhere(inputs[2], parameters, 2), counts)
    seen, n_rows = cache._visible_keys(after, n_steps), caches.most(after)
    lens = None if seen is None else torch.from_numpy(seen)
    cache._keep(held, after)
    kept: Any = cache._keys, cache._values
    keys, values = (x[:, :n_rows] for x in kept)
    options = lens, module.num_heads, "zero", 0.0
    return attend_elsewhere(module, (inputs[0], keys, values), parameters, holder, options)


def rows_elsewhere(x: Tensor, parameters: LayerParameters, slot: int) -> Tensor:
    """x projected by W_k or W_v, with torch's operations."""
    weight = parameters[slot]
    return x if weight is None else torch.nn.functional.linear(x, weight, parameters[slot + 4])


def attend_elsewhere(module: Any, inputs: Any, parameters: LayerParameters, holder: Any, options: Any) -> Tensor:
    out, saved, _ = by_torch.layer(inputs, outer_weights(parameters, None), options, stays=True)
    module._forget_assigned()
    holder["_last"] = saved, out.dtype, None
    return out


def _checked_steps(batch: int, queries: Tensor, keys: Tensor, values: Any) -> Any:
    """The shape of the queries, after checks of all inputs."""
    if values is None:
        raise TypeError("values are missing: with a cache, too, a layer takes queries, keys and values")
    check_inputs(queries=queries, keys=keys, values=values)
    caches.check_steps(batch, queries=queries.shape, keys=keys.shape, values=values.shape)
    if keys.dtype is not queries.dtype or values.dtype is not queries.dtype:
        raise TypeError(f"keys {keys.dtype} and values {values.dtype} must be {queries.dtype} as queries")
    return queries.shape


def run(function: Any, inputs: Any, parameters: LayerParameters, packed: Any, options: Any) -> tuple[Tensor, Any]:
    """(out in the type of the computation, what `saved_weights` needs) of layer_step or layer_forward.

    packed   packed weights to use instead of the parameters, or None
    options  lengths, num_heads, empty_rows, dropout, seed; for layer_step also the memory and counts of the cache
    """
    lens, *others = options
    try:
        return call_core(function, (*inputs, lens, packed or parameters, parameters[8], *others))
    except (BufferError, TypeError):  # 16-bit floats, or types that do not fit together
        named = {name: x for name, x in zip(("queries", "keys", "values"), inputs) if isinstance(x, Tensor)}
        check_inputs(**named)
        common = common_type(**named, parameters=parameters)
        if all(x is None or x.dtype is common for x in (*named.values(), *parameters)):
            raise
    inputs = [x.to(common) if isinstance(x, Tensor) else x for x in inputs]
    parameters = tuple(None if x is None else x.to(common) for x in parameters)
    return call_core(function, (*inputs, lens, parameters, parameters[8], *others))


# --- The module's parts -------------------------------------------------------------------------------


def check_module(module: Any, what: str, *inputs: Optional[Tensor]) -> Parts:
    """The result of `layer_parts`; RuntimeError where a call needs gradients, or more than the layer's own children."""
    refuse_transforms(what)
    parts = layer_parts(module, module._layout)
    if parts is None:
        materialize(module, *inputs)
        parts = layer_parts(module, module._layout)
    if parts is None:
        raise RuntimeError(
            f"{what} needs the layer's own projections, attention and dropout, without hooks, in one "
            f"process: this {type(module).__name__} has others"
        )
    if torch.is_grad_enabled() and any_needs_grad(inputs, parts[0]):
        raise RuntimeError(NO_GRADIENT.format(what))
    return parts


def known_weights(parameters: LayerParameters, packed: Optional[Packed]) -> Any:
    """W_k, W_v and their biases, to be compared bit by bit: the tensors themselves if the core can read them.

    Inside `frozen`, one copy of W_k and W_v, which all caches share: so weights are equal if they are the same object.
    """
    _, W_k, W_v, _, _, b_k, b_v, *_ = parameters
    if packed is not None:
        packed.copies[:] = packed.copies or [(_copy(W_k), None, _copy(W_v), None)]
        (shared,) = packed.copies
        return shared if b_k is b_v is None else (shared[0], b_k, shared[2], b_v)
    one = W_k if W_v is None else W_v
    if one is None or one.dtype in FLOATS:
        return W_k, b_k, W_v, b_v
    return tuple(None if x is None else x.detach().float() for x in (W_k, b_k, W_v, b_v))  # exact for 16-bit floats


def kept_weights(kept: Any, weights: Any, packed: Optional[Packed]) -> Any:
    """The weights to compare later weights with: `kept` if there are some, else copies of `weights`."""
    if kept is not None and (packed is None or (kept[0] is weights[0] and kept[2] is weights[2])):
        return kept
    is_copy = not any(isinstance(x, Tensor) for x in weights)
    return weights if is_copy else tuple(_copy(x) if isinstance(x, Tensor) else x for x in weights)


def _copy(x: Optional[Tensor]) -> Optional[Array]:
    return None if x is None else np.array(array(x))


def outer_weights(parameters: LayerParameters, packed: Optional[Packed]) -> Any:
    """The parameters for a call whose keys and values are projected already: without W_k and W_v."""
    if packed is not None:
        return packed.ready[0], None, None, packed.ready[3]
    W_q, _, _, W_o, b_q, _, _, b_o, w_v = parameters
    return W_q, None, None, W_o, b_q, None, None, b_o, w_v
