"""The calls of a decoder on tensors: a cache of its own keys and values, and projected ones of an encoder.

The rules are those of mha_c's NumPy layers (`mha_c._cache`, which has the classes); `_module.py` leads here.
Weights are read where they lie at each call; what was projected by others is noticed, number by number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Optional

import numpy as np
import torch
from torch import Tensor

from .. import _cache
from .._arrays import to_lengths
from .._core import layer_parts
from ..errors import ShapeError
from ._layer import any_needs_grad, attend, run_layer_without_gradient
from ._tensors import FLOATS, array, check_inputs, linear, refuse_transforms, same_numbers
from .autograd import Nine

if TYPE_CHECKING:
    from .frozen import Packed

    Array = np.ndarray[Any, Any]

NO_GRADIENT = (
    "decoding with {} leads no gradient back: call it under torch.no_grad() (or torch.inference_mode()), or give the "
    "layer the keys and values themselves"
)


class KeyValueCache(_cache.KeyValueCache):
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

    __slots__ = ("_packed",)
    _same_numbers = staticmethod(same_numbers)
    _packed: Optional[Packed]  # the frozen weights that it was filled with last, whose numbers need no look

    @property
    def lengths(self) -> Any:
        """How many steps each item has: a tensor (B,) of whole numbers, a copy."""
        return torch.from_numpy(self._lengths.copy())


class ProjectedKeyValues(_cache.ProjectedKeyValues):
    """Keys and values that have been through W_k and W_v of one layer: see mha_c.ProjectedKeyValues.

    Not made by hand.
    """

    __slots__ = ("_packed",)
    _same_numbers = staticmethod(same_numbers)
    _packed: Optional[Packed]


def step(
    module: Any, cache: Any, queries: Tensor, keys: Tensor, values: Any, valid_lens: Any, training: Optional[bool]
) -> Tensor:
    """The call with cache=: new steps behind those that are there; see DecodingLayer.new_cache of the NumPy layers."""
    if type(cache) is not KeyValueCache:
        raise TypeError(f"cache must be what new_cache made, got {type(cache).__name__}")
    if values is None:
        raise TypeError("values are missing: with a cache, too, a layer takes queries, keys and values")
    check_inputs(queries=queries, keys=keys, values=values)
    if module.training if training is None else training:
        raise ValueError("a cache is for evaluation: call eval() first, or give the call training=False")
    shape = queries.shape
    _cache.check_steps(cache.batch, queries=shape, keys=keys.shape, values=values.shape)
    if keys.dtype is not queries.dtype or values.dtype is not queries.dtype:
        raise TypeError(f"keys {keys.dtype} and values {values.dtype} must be {queries.dtype} as queries")
    parameters = check_module(module, "a cache", queries, keys, values)
    counts = _cache.step_counts(valid_lens, shape[0], shape[1])
    packed = frozen_weights(module, parameters, queries)
    weights = known_weights(cache, packed, parameters)
    after = cache.check(weights, counts)
    rows = projected(parameters, 1, keys, packed), projected(parameters, 2, values, packed)
    all_rows = cache.put(rows[0], rows[1], counts)
    lens = cache.visible_keys(after, counts, shape[1])
    # An item without any step has no keys: zeros, not the mean of rows that do not count.
    out = attend_projected(module, parameters, queries, *all_rows, lens, "zero", packed)
    cache.keep(copies(weights) if cache._weights is None else cache._weights, after, counts)
    cache._packed = packed
    return out


def project(module: Any, keys: Tensor, values: Tensor, valid_lens: Any) -> ProjectedKeyValues:
    check_inputs(keys=keys, values=values)
    for name, x in (("keys", keys), ("values", values)):
        if x.dim() != 3 or x.shape[:2] != keys.shape[:2]:
            raise ShapeError(f"{name} must have shape (B, K, features), got {tuple(x.shape)}; keys {tuple(keys.shape)}")
    if values.dtype is not keys.dtype:
        raise TypeError(f"values must be {keys.dtype} as keys, got {values.dtype}")
    parameters = check_module(module, "projected keys and values", None, keys, values)
    lens = None if valid_lens is None else np.array(to_lengths(valid_lens))
    n_rows = keys.shape[1] if lens is None else _cache.longest(lens, keys.shape[1])
    rows = [projected(parameters, 1, keys[:, :n_rows]), projected(parameters, 2, values[:, :n_rows])]
    if n_rows < keys.shape[1]:
        rows = [np.pad(x, ((0, 0), (0, keys.shape[1] - n_rows), (0, 0))) for x in rows]
    rows = [x if parameters[i + 1] is not None else x.copy() for i, x in enumerate(rows)]  # not the caller's memory
    return ProjectedKeyValues(rows[0], rows[1], n_rows, lens, copies(key_value_weights(parameters)), True)


def call_projected(
    module: Any, queries: Tensor, kv: ProjectedKeyValues, values: Any, valid_lens: Any, training: Optional[bool]
) -> Tensor:
    if values is not None:
        raise TypeError("values go into `project` together with the keys: call layer(queries, kv)")
    check_inputs(queries=queries)
    if queries.dim() != 3:
        raise ShapeError(f"queries must have shape (B, Q, features), got {tuple(queries.shape)}")
    parameters = check_module(module, "projected keys and values", queries, None, None)
    if module._dropout_now(training):
        raise ValueError("projected keys and values are for evaluation: call eval() first, or give training=False")
    packed = frozen_weights(module, parameters, queries)
    lens = kv.check(known_weights(kv, packed, parameters), valid_lens)
    kv._packed = packed
    return attend_projected(module, parameters, queries, kv._keys, kv._values, lens, module.empty_rows, packed)


# --- The module's parts -------------------------------------------------------------------------------


def check_module(module: Any, what: str, *inputs: Optional[Tensor]) -> Nine:
    """The module's parameters; RuntimeError where the call cannot go by their numbers alone, without gradients."""
    refuse_transforms(f"decoding with {what}")
    parts = None if module._sequence else layer_parts(module, module._layout)
    if parts is None and not module._sequence:
        materialize_all(module, inputs)
        parts = layer_parts(module, module._layout)
    if parts is None:
        raise RuntimeError(
            f"decoding with {what} needs the layer's own projections, attention and dropout, without hooks, in one "
            f"process: this {type(module).__name__} has others"
        )
    if torch.is_grad_enabled() and any_needs_grad(inputs, parts[0]):
        raise RuntimeError(NO_GRADIENT.format(what))
    return parts[0]


def materialize_all(module: Any, inputs: Any) -> None:
    from .layers import materialize, materialize_after

    children = {slot: module._modules[name] for slot, name in module._layout.slots}
    materialize(*[(children[i], x) for i, x in enumerate(inputs) if i in children and x is not None])
    for slot, before in ((3, 2), (8, 1)):
        if slot in children:
            materialize_after(children[slot], children[before])


def frozen_weights(module: Any, parameters: Nine, queries: Tensor) -> Optional[Packed]:
    """What `frozen` packed, where the call can go by it."""
    packed: Optional[Packed] = module._frozen
    if packed is None or queries.dtype not in FLOATS or packed.projections(parameters) is not packed.ready:
        return None
    return packed if all(x is None or x.dtype is queries.dtype for x in parameters) else None


def known_weights(kept: Any, packed: Optional[Packed], parameters: Nine) -> Any:
    """The weights to hold what is kept against: its own where they are frozen since it met them last."""
    frozen = packed is not None and getattr(kept, "_packed", None) is packed and kept._weights is not None
    return kept._weights if frozen else key_value_weights(parameters)


def key_value_weights(parameters: Nine) -> Any:
    """W_k, W_v and their biases, for the core to compare bit by bit: the tensors themselves where it can."""
    _, W_k, W_v, _, _, b_k, b_v, *_ = parameters
    one = W_k if W_v is None else W_v
    if one is None or one.dtype in FLOATS:
        return W_k, b_k, W_v, b_v
    return tuple(None if x is None else x.detach().float() for x in (W_k, b_k, W_v, b_v))  # exact, of 16-bit floats


def copies(weights: Any) -> Any:
    return tuple(None if x is None else np.array(array(x)) for x in weights)


def projected(parameters: Nine, slot: int, x: Tensor, packed: Optional[Packed] = None) -> Array:
    """x through a projection, in the type that the core computes in."""
    if x.dtype not in FLOATS:
        x = x.float()
    weight, bias = parameters[slot], parameters[slot + 4]
    if weight is None:
        return array(x)
    if packed is not None:
        ready, bias, sizes = packed.ready[slot]
        return array(linear(x, (ready, bias, sizes)))
    if weight.dtype is not x.dtype:
        weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    return array(linear(x, (weight, bias)))


class _OuterWeights(NamedTuple):
    """Packed W_q and W_o, in the place of all four."""

    packed: Packed

    def projections(self, _: Any) -> Any:
        W_q, _, _, W_o = self.packed.ready
        return W_q, None, None, W_o


def attend_projected(
    module: Any, parameters: Nine, queries: Tensor, keys: Array, values: Array, valid_lens: Any, empty_rows: Any,
    packed: Optional[Packed] = None,
) -> Tensor:  # fmt: skip
    """The call without W_k and W_v, whose work is done."""
    W_q, _, _, W_o, b_q, _, _, b_o, w_v = parameters
    outer = (W_q, None, None, W_o, b_q, None, None, b_o, w_v)
    weights = None if packed is None else _OuterWeights(packed)
    if queries.dtype in FLOATS:
        options = valid_lens, module.num_heads, empty_rows, 0.0
        try:
            out, saved = run_layer_without_gradient((queries, keys, values), outer, options, weights)
            module._inner().__dict__["_last"] = saved, queries.dtype, None
            return out
        except (BufferError, TypeError):  # types that do not go together, tensors without memory: said or solved below
            pass
    lens = None if valid_lens is None else torch.from_numpy(np.asarray(valid_lens))
    k, v = torch.from_numpy(keys), torch.from_numpy(values)
    out, module._inner().__dict__["_last"] = attend(queries, k, v, lens, outer, module.num_heads, empty_rows, 0.0)
    return out
