"""Which implementation computes a call of a layer, or of a function: this module makes all these decisions.

    way         when                                                        who
    core        CPU tensors of float32 or float64; 16-bit as float32        `run_layer`, autograd.py
    cache       the call has a cache, keys projected under no_grad, or      decoding.py, projected.py,
                repeats its keys                                            repeated_keys.py
    operator    a compiler looks (torch.compile), or tensors of a class     `call_operator`, ops.py
                that is not torch's own, fake ones among them
    torch       another device; a program is exported or traced;            by_torch.py, mathematics.py
                torch.func or forward-mode AD; memory the core cannot take
    children    a child has hooks or is another one than d2l's; a mode or   `_by_children` of the layers
                a class of tensors wants to see torch's operations
    ring        the child is one that spreads the sequence over processes   distributed/

`_module.py` handles cache and children (the ring is one of these), and calls `run_layer` directly in the usual case,
because a call of a small layer takes only ten microseconds; `attend` chooses between core, operator and torch.
mha_c.explain and mha_c.cost print the way in the words of `WHY`.
"""

from __future__ import annotations

from typing import Any, Optional, Union

import torch
from torch import Tensor

from ..._arguments.scalars import LateSeed
from ..._core import layer_forward
from .._private import has_operators, in_mode, in_transform, on_cpu, profiler
from .._tensors import (
    autocast_on,
    check_devices,
    common_type,
    draw_seed,
    draw_seed_tensor,
    exporting,
    is_compiling,
    lengths,
    refuse_half_fake,
    result_type,
    traced,
)
from . import by_torch, ops
from .autograd import LayerParameters, differentiable_layer
from .checks import check_layer, check_options, checked_lengths

NO_PARAMETERS: LayerParameters = (None,) * 9
WHY = {
    "core": "the compiled core",
    "cache": "the compiled core, on what a decoder keeps",
    "operator": "the compiled core, as an operator for compilers and classes of tensors",
    "torch": "torch's own operations",
    "children": "children one by one: one is not d2l's, or somebody looks on (hooks, modes, classes of tensors)",
}
Options = tuple[Any, int, Any, float]  # valid_lens, num_heads, empty_rows, dropout


def run_layer(
    inputs: Any, parameters: LayerParameters, options: Options, seed: Union[int, LateSeed], packed: Any = None
) -> tuple[Tensor, Any, Any]:  # fmt: skip
    """(out, what `saved_weights` needs, parts of a `WeightsSource` or None) for three inputs of the core's type.

    seed    of the dropout; 0 without dropout
    packed  weights packed by `frozen`, for calls that record no gradient; they replace the parameters
    BufferError or TypeError where the core cannot take the tensors; then nothing has changed.
    """
    queries, keys, values = inputs
    if torch.is_grad_enabled() and any_needs_grad(parameters, inputs):
        return differentiable_layer(queries, keys, values, parameters, (*options, seed))
    valid_lens, num_heads, empty_rows, dropout = options
    weights = parameters if packed is None else packed.ready
    call = queries, keys, values, valid_lens, weights, parameters[8], num_heads, empty_rows, dropout, seed
    return *call_core(layer_forward, call), None


def call_core(function: Any, call: Any) -> tuple[Tensor, Any]:
    """(out, what `saved_weights` needs) of layer_forward or layer_step: a call that records no gradient."""
    found: tuple[Tensor, Any]
    if profiler._is_profiler_enabled:  # with gradients, autograd's node has a name already
        with torch.autograd.profiler.record_function("mha_c::layer_forward"):
            found = function(*call)
    else:
        found = function(*call)
    return found


def any_needs_grad(*groups: Any) -> bool:
    for group in groups:
        for tensor in group:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def way(queries: Tensor, tensors: Any, valid_lens: Any) -> str:
    """ "torch", "operator" or "core": the way of a call with these tensors."""
    if not on_cpu(queries) or exporting() or in_transform() or (not is_compiling() and in_mode()):
        return "torch"
    if traced(*tensors, valid_lens if isinstance(valid_lens, Tensor) else None):
        return "operator" if has_operators else "torch"
    return "core"


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Any, parameters: LayerParameters = NO_PARAMETERS,
    num_heads: int = 1, empty_rows: str = "uniform", dropout: float = 0.0,
) -> tuple[Tensor, Any]:  # fmt: skip
    """(out, the arguments of `Kept`).

    parameters  W_q, W_k, W_v, W_o, their biases, w_v (1, h); None where the layer has none
    """
    check_devices(queries=queries, keys=keys, values=values, parameters=parameters, valid_lens=valid_lens)
    check_options(empty_rows, dropout)
    tensors, dtype = in_one_type((queries, keys, values, *parameters))
    options, chosen = (valid_lens, num_heads, empty_rows, dropout), way(queries, tensors, valid_lens)
    if chosen == "core":
        seed = LateSeed(draw_seed) if dropout else 0
        try:
            out, saved, source = run_layer(tensors[:3], tensors[3:], (lengths(valid_lens), *options[1:]), seed)
        except BufferError:  # no plain memory: a negated view, zeros never written, left by a transform
            chosen = "torch"
    if chosen != "core":
        if exporting() or not is_compiling():  # a compiler's program raises errors when it runs
            check_layer(tensors[0], tensors[1], tensors[2], tensors[3:7], num_heads)
        if valid_lens is not None:
            options = checked_lengths(valid_lens, queries), *options[1:]
        compute = call_operator if chosen == "operator" else by_torch.layer
        out, saved, source = compute(tensors[:3], tensors[3:], options)
    dtype = dtype or out.dtype
    return (out if out.dtype is dtype else out.to(dtype)), (saved, dtype, source)


def in_one_type(tensors: Any) -> tuple[Any, Optional[torch.dtype]]:
    """The tensors of a call in the type of the computation, and the type of the results: None if autocast decides.

    On the CPU 16-bit floats are computed in float32, on other devices in their own type.
    """
    queries, kinds = tensors[0], {x.dtype for x in tensors if x is not None}
    dtype: Any = queries.dtype
    if on_cpu(queries) or queries.is_meta:
        dtype = result_type(dtype)
    elif autocast_on(queries):
        return tensors, None
    if on_cpu(queries) or len(kinds) > 1:
        common = common_type(queries=queries, keys=tensors[1], values=tensors[2], parameters=tensors[3:])
        if kinds != {common}:
            tensors = tuple(None if x is None else x.to(common) for x in tensors)
    return tensors, dtype


def call_operator(
    inputs: Any, parameters: LayerParameters, options: Options
) -> tuple[Tensor, Any, Any]:  # fmt: skip
    """(out, what `saved_weights` needs, parts of a `WeightsSource` or None), computed by one operator."""
    valid_lens, num_heads, empty_rows, dropout = options
    one = next((x for x in parameters if x is not None), None)
    refuse_half_fake(queries=inputs[0], keys=inputs[1], values=inputs[2], parameters=one, valid_lens=valid_lens)
    seed = draw_seed_tensor() if dropout else None
    if not (torch.is_grad_enabled() and any_needs_grad(inputs, parameters)):
        keeps = ops.keeps_weights(inputs, parameters, num_heads)
        if keeps is not None:
            return _inference(inputs, parameters, (valid_lens, num_heads, empty_rows, dropout), seed, keeps)
    out, q, k, _, _, row_max, row_sum, lens = torch.ops.mha_c.layer(
        *inputs, valid_lens, *parameters, num_heads, empty_rows, float(dropout), seed
    )
    queries, keys, _ = inputs
    W_q, W_k, *_, w_v = parameters
    used = [x.clone().detach() if W is None else y.detach() for y, W, x in ((q, W_q, queries), (k, W_k, keys))]
    met = None if valid_lens is None else lens
    source = met, num_heads, empty_rows, queries, keys, parameters, None
    scorer = None if w_v is None else w_v.detach().clone()
    return out, ("operator", *used, scorer, row_max.detach(), row_sum.detach(), lens, num_heads, empty_rows), source


def _inference(
    inputs: Any, parameters: LayerParameters, options: Options, seed: Optional[Tensor], keeps: bool
) -> tuple[Tensor, Any, Any]:  # fmt: skip
    valid_lens, num_heads, empty_rows, dropout = options
    others = [valid_lens, *parameters[4:], seed]
    given = others if any(x is not None for x in others) else []
    call = *inputs, *parameters[:4], given, num_heads, empty_rows, float(dropout), keeps
    out, *kept = torch.ops.mha_c.layer_inference(*call)
    if keeps:
        return out, ("tensor", *kept), None
    q, k, w_v, *statistics = kept
    scorer = None if parameters[8] is None else w_v
    return out, ("operator", q, k, scorer, *statistics, num_heads, empty_rows), None
