"""A call of a layer, computed by the compiled core: plain CPU tensors, children that do what torch's own classes do."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from ..._arguments.arrays import to_lengths
from ..._core import layer_forward
from ..._layer.kept_weights import Kept
from .._private import autocasting_anywhere, profiler
from .._tensors import draw_seed, result_type
from .._weights.last import Last
from .attention import any_needs_grad
from .autograd import LayerSource, connect_layer
from .dropout import rate
from .records import LayerCall, LayerInputs, Options, new_record

_INT64 = torch.int64


def call(
    module: Any, parts: tuple[Any, ...], inputs: LayerInputs, valid_lens: Any, training: Optional[bool],
    steps: Any = None, dtype: Optional[torch.dtype] = None, options: Optional[Options] = None,
) -> Tensor:  # fmt: skip
    """The output.

    parts    Parts of the module, perhaps as a tuple
    steps    the `decoding.NewSteps` of a call with a cache
    dtype    type of the result; None: that of queries
    options  None: the call has none
    BufferError if a tensor has no plain memory, TypeError if types differ or are no FLOATS: nothing has been
    computed then, and no random number drawn.
    """
    parameters, holder, dropout, packed = parts
    queries, keys, values = inputs
    records = torch.is_grad_enabled() and (
        any_needs_grad(parameters, (queries,) if keys is values is queries else inputs)
        or (options is not None and options.bias is not None and options.bias.requires_grad)
    )
    weights = parameters if packed is None or records else packed.ready  # what is packed replaces the parameters
    source = None
    if steps is not None:
        out, kept = steps.by_core((queries, keys, values), parameters, weights)
    else:
        if valid_lens is not None and not (type(valid_lens) is Tensor and valid_lens.dtype is _INT64):
            valid_lens = to_lengths(valid_lens)
        p = rate(dropout, training)
        heads, empty_rows = module.num_heads, module.empty_rows
        seed: Any = draw_seed if p else 0  # drawn behind all checks: a refused call draws none
        given: Any = options
        if options is not None:
            heads, given = module._head_counts(), options.for_core(weights is parameters)
        run: Any = forward_for_profiler if profiler._is_profiler_enabled else layer_forward
        out, kept = run(
            queries, keys, values, valid_lens, weights, parameters[-1], heads, empty_rows, p, seed, records, given
        )
        if records:
            tape: Kept = new_record(Kept, kept)
            masks: tuple[Optional[Tensor], ...] = ()
            if options is not None:
                masks, options = options.masks, options.without_masks()
            done = new_record(LayerCall, (tape.lengths, heads, empty_rows, p, tape.seed, options))
            out = connect_layer(done, (out, tape), queries, keys, values, *parameters, *masks)
            source = LayerSource.of(queries, keys, parameters, masks, done)
            kept = tape.for_weights()
    computed = queries.dtype
    dtype = dtype or computed
    if autocasting_anywhere():
        dtype = result_type(dtype)
    if module._last is not None:
        module.__dict__["_last"] = None  # perhaps assigned
    holder["_last"] = Last(kept, dtype, source)
    return out if computed is dtype else out.to(dtype)


def forward_for_profiler(*given: Any) -> Any:
    """layer_forward, shown by torch's profiler."""
    with torch.autograd.profiler.record_function("mha_c::layer_forward"):
        return layer_forward(*given)
