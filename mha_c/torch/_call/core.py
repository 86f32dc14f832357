"""A call of a layer, computed by the compiled core: plain CPU tensors, children that do what torch's own classes do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._core import layer_forward
from ..._layer.kept_weights import Kept
from .._private import profiler
from .attention import any_needs_grad
from .autograd import LayerSource, connect_layer
from .records import CallResult, LayerCall, Parameters

new_record: Any = tuple.__new__  # a third of the time of a record's own constructor


def layer(inputs: Any, parameters: Parameters, call: LayerCall, packed: Any = None) -> CallResult:
    """The call of a layer whose inputs and parameters the core can read; 16-bit floats are computed in float32.

    packed  weights packed by `frozen`, for calls that record no gradient; they replace the parameters
    """
    queries, keys, values = inputs
    lens, num_heads, empty_rows, dropout, seed = call
    records = torch.is_grad_enabled() and any_needs_grad(parameters, inputs)
    weights = parameters if packed is None or records else packed.ready
    given = queries, keys, values, lens, weights, parameters[-1], num_heads, empty_rows, dropout, seed, records
    out, kept = run(layer_forward, given) if profiler._is_profiler_enabled else layer_forward(*given)
    if not records:
        return new_record(CallResult, (out, kept, None))
    tape: Kept = new_record(Kept, kept)
    seed = seed.number if dropout else 0
    call = new_record(LayerCall, (tape.lengths, num_heads, empty_rows, dropout, seed))
    out = connect_layer(call, (out, tape), queries, keys, values, *parameters)
    return new_record(CallResult, (out, tape.for_weights(), LayerSource(queries, keys, parameters, call)))


def run(function: Any, call: Any) -> tuple[Tensor, Any]:
    """(out, what is kept) of layer_forward or layer_step."""
    found: tuple[Tensor, Any]
    if profiler._is_profiler_enabled:
        with torch.autograd.profiler.record_function("mha_c::layer_forward"):
            found = function(*call)
    else:
        found = function(*call)
    return found
