"""The calls of a decoder on tensors: a cache of its own keys and values, and projected ones of an encoder.

The rules are those of mha_c's NumPy layers (`mha_c._cache`, which has the classes); `_module.py` leads here.
Weights are read where they lie at each call; what was projected by others is noticed, number by number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional, cast

import numpy as np
import torch
from torch import Tensor

from .. import _cache, _core
from .._arrays import to_lengths
from ..errors import ShapeError
from ._layer import NONE, attend
from ._tensors import FLOATS, array, check_inputs, follow_threads, layer_forward, optional_array

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

NO_GRADIENT = (
    "decoding with {} leads no gradient back: call it under torch.no_grad() (or torch.inference_mode()), or give the "
    "layer the keys and values themselves"
)
WIDE = {4: np.int32, 8: np.int64}


class KeyValueCache(_cache.KeyValueCache):
    """The projected keys and values of all steps so far: see mha_c.KeyValueCache; `lengths` is a tensor here."""

    __slots__ = ()

    @property
    def lengths(self) -> Any:
        return torch.from_numpy(self._lengths.copy())


class ProjectedKeyValues(_cache.ProjectedKeyValues):
    """Keys and values that have been through W_k and W_v of one layer: see mha_c.ProjectedKeyValues."""

    __slots__ = ()


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
    _cache.check_steps(cache.batch, queries=queries.shape, keys=keys.shape, values=values.shape)
    if keys.dtype is not queries.dtype or values.dtype is not queries.dtype:
        raise TypeError(f"keys {keys.dtype} and values {values.dtype} must be {queries.dtype} as queries")
    check_module(module, "a cache", queries, keys, values)
    counts = _cache.step_counts(valid_lens, cache.batch, queries.shape[1])
    weights = key_value_weights(module)
    before, after = cache._lengths, cache.check(weights, counts)
    rows = [projected(module, role, x) for role, x in zip(module._roles[1:3], (keys, values))]
    all_rows = cache.put(rows[0], rows[1], counts)
    lens = _cache.visible_keys(before, after, queries.shape[1])
    # An item without any step has no keys: zeros, not the mean of rows that do not count.
    out = attend_projected(module, queries, *all_rows, lens, "zero")
    cache.keep(copies(weights) if cache._weights is None else cache._weights, after)
    return out


def project(module: Any, keys: Tensor, values: Tensor, valid_lens: Any) -> ProjectedKeyValues:
    check_inputs(keys=keys, values=values)
    for name, x in (("keys", keys), ("values", values)):
        if x.dim() != 3 or x.shape[:2] != keys.shape[:2]:
            raise ShapeError(f"{name} must have shape (B, K, features), got {tuple(x.shape)}; keys {tuple(keys.shape)}")
    if values.dtype is not keys.dtype:
        raise TypeError(f"values must be {keys.dtype} as keys, got {values.dtype}")
    check_module(module, "projected keys and values", None, keys, values)
    lens = None if valid_lens is None else np.array(to_lengths(valid_lens))
    n_rows = keys.shape[1] if lens is None else _cache.longest(lens, keys.shape[1])
    rows = [projected(module, role, x[:, :n_rows]) for role, x in zip(module._roles[1:3], (keys, values))]
    if n_rows < keys.shape[1]:
        rows = [np.pad(x, ((0, 0), (0, keys.shape[1] - n_rows), (0, 0))) for x in rows]
    rows = [x if x.base is None else x.copy() for x in rows]  # an input that nothing projects: not the caller's memory
    return ProjectedKeyValues(rows[0], rows[1], n_rows, lens, copies(key_value_weights(module)), True)


def call_projected(
    module: Any, queries: Tensor, kv: ProjectedKeyValues, values: Any, valid_lens: Any, training: Optional[bool]
) -> Tensor:
    if values is not None:
        raise TypeError("values go into `project` together with the keys: call layer(queries, kv)")
    check_inputs(queries=queries)
    if queries.dim() != 3:
        raise ShapeError(f"queries must have shape (B, Q, features), got {tuple(queries.shape)}")
    check_module(module, "projected keys and values", queries, None, None)
    if module._dropout_now(training):
        raise ValueError("projected keys and values are for evaluation: call eval() first, or give training=False")
    lens = kv.check(key_value_weights(module), valid_lens)
    return attend_projected(module, queries, kv._keys, kv._values, lens, module.empty_rows)


# --- The module's parts -------------------------------------------------------------------------------


def check_module(module: Any, what: str, *inputs: Optional[Tensor]) -> None:
    """RuntimeError where the call cannot go by the numbers of the module's own projections, without gradients."""
    from ._module import is_standard
    from .layers import materialize, materialize_after

    linears = [None if role is None else module._modules[role] for role in module._roles]
    materialize(*[(linear, x) for linear, x in zip(linears, inputs) if linear is not None and x is not None])
    if linears[3] is not None and linears[2] is not None:
        materialize_after(linears[3], linears[2])
    if module._scorer is not None and linears[1] is not None:
        materialize_after(module._modules[module._scorer], linears[1])
    if module._sequence is not None or not is_standard(module):
        raise RuntimeError(
            f"decoding with {what} needs the layer's own projections, attention and dropout, without hooks, in one "
            f"process: this {type(module).__name__} has others"
        )
    if torch.is_grad_enabled() and any(x.requires_grad for x in (*inputs, *parameters(module)) if x is not None):
        raise RuntimeError(NO_GRADIENT.format(what))


def parameters(module: Any) -> list[Optional[Tensor]]:
    """Those of the projections and of the scorer: all that a standard module has."""
    linears = [module._modules[role] for role in (*module._roles, module._scorer) if role is not None]
    return [x for linear in linears for x in (linear._parameters["weight"], linear._parameters["bias"])]


def key_value_weights(module: Any) -> Any:
    """The numbers of W_k and W_v as integers, which compare quickly, and NaN equal to itself."""
    linears = [module._modules[role]._parameters for role in module._roles[1:3] if role is not None]
    return tuple(None if x is None else bits(x) for own in linears for x in (own["weight"], own["bias"]))


def bits(tensor: Tensor) -> Array:
    if tensor.dtype in FLOATS and tensor.is_contiguous():
        flat = array(tensor).reshape(-1)
    else:
        flat = tensor.detach().float().contiguous().numpy().reshape(-1)  # exact: 16-bit floats are float32 too
    return flat.view(np.int64 if flat.nbytes % 8 == 0 else WIDE[flat.itemsize])


def copies(weights: Any) -> Any:
    return tuple(None if x is None else x.copy() for x in weights)


def projected(module: Any, role: Optional[str], x: Tensor) -> Array:
    """x through the projection of that name, in the type that the core computes in."""
    if x.dtype not in FLOATS:
        x = x.float()
    if role is None:
        return array(x)
    linear = module._modules[role]
    weight, bias = (None if p is None else p.to(x.dtype) for p in (linear.weight, linear.bias))
    return _core.linear(array(x), (array(weight), optional_array(bias)))


def attend_projected(
    module: Any, queries: Tensor, keys: Array, values: Array, valid_lens: Any, empty_rows: Any
) -> Tensor:
    W_q, _, _, W_o = (None if role is None else module._modules[role] for role in module._roles)
    scorer = None if module._scorer is None else module._modules[module._scorer].weight
    if queries.dtype in FLOATS and all(x is None or x.dtype is queries.dtype for x in parameters(module)):
        q, o = (
            None if linear is None else (array(linear.weight), optional_array(linear.bias)) for linear in (W_q, W_o)
        )
        w_v = None if scorer is None else array(scorer)[0]
        follow_threads()
        out, saved = layer_forward(
            queries, torch.from_numpy(keys), torch.from_numpy(values), valid_lens, (q, None, None, o), w_v,
            module.num_heads, empty_rows, 0.0, 0,
        )  # fmt: skip
        module._inner().__dict__["_last"] = saved, queries.dtype
        return out
    k, v = torch.from_numpy(keys), torch.from_numpy(values)
    weights, biases = (  # 16-bit floats, and what autocast mixes with them
        tuple(None if linear is None else getattr(linear, name) for linear in (W_q, None, None, W_o))
        for name in ("weight", "bias")
    )
    four: Any = weights if any(x is not None for x in weights) else NONE
    lens = None if valid_lens is None else torch.from_numpy(np.asarray(valid_lens))
    out, last = attend(
        queries, k, v, lens, four, cast(Any, biases), scorer, module.num_heads, empty_rows, 0.0,
    )  # fmt: skip
    module._inner().__dict__["_last"] = last
    return out
