"""One whole layer on tensors: by the core where that can be, by an operator for compilers, else by mathematics.

`_module.py` calls `run_layer` directly in the usual case; `attend` is for all others, 16-bit floats among them.
"""

from __future__ import annotations

from typing import Any, Optional

import numpy as np
import torch
from torch import Tensor
from torch.autograd import profiler as _profiler

from .._core import autograd_parts
from . import by_torch, mathematics, ops
from ._tensors import (
    FLOATS,
    HALVES,
    array,
    autocast_on,
    beyond_core,
    check_devices,
    check_inputs,
    draw_seed,
    draw_seed_tensor,
    exporting,
    is_compiling,
    layer_forward,
    lengths,
    optional_tensor,
    refuse_half_fake,
    refuse_types,
    result_type,
    traced,
)  # fmt: skip
from .autograd import Nine, WeightsSource, differentiable_layer
from .lazy import Assigned, Recipe, Shown, computed, split_heads
from .mapped import is_mapped_now, is_plain_batch, over_batch
from .masking import check_layer, check_options, checked_lengths

NO_PARAMETERS: Nine = (None,) * 9
Options = tuple[Any, int, Any, float]  # valid_lens, num_heads, empty_rows, dropout


def run_layer(
    inputs: Any, parameters: Nine, options: Options, seed: int, packed: Any = None
) -> tuple[Tensor, Any, Any]:  # fmt: skip
    """(out, what `saved_weights` needs, parts of a `WeightsSource` or None) of three inputs of the core's type.

    seed    of the dropout, drawn once a call, so that whatever way it ends up on drops the same weights
    packed  of `frozen`: projections for calls that record no gradient, in the place of the parameters as they lie
    BufferError or TypeError where the core cannot take the tensors; nothing has happened then.
    """
    queries, keys, values = inputs
    valid_lens, num_heads, empty_rows, dropout = options
    w_v = parameters[8]
    if torch.is_grad_enabled():
        learns, tensors, n_inputs, versions = autograd_parts(queries, keys, values, parameters)
        if learns:
            call = queries, keys, values, valid_lens, parameters, w_v, num_heads, empty_rows, dropout, seed
            out, saved, lens = differentiable_layer(call, tensors, n_inputs)
            return out, saved, (lens, num_heads, empty_rows, queries, keys, parameters, versions)
    weights = parameters if packed is None else packed.ready
    call = queries, keys, values, valid_lens, weights, w_v, num_heads, empty_rows, dropout, seed
    return *call_core(layer_forward, call), None


def call_core(function: Any, call: Any) -> tuple[Tensor, Any]:
    """(out, what `saved_weights` needs) of layer_forward or layer_step: a call that records no gradient."""
    found: tuple[Tensor, Any]
    if _profiler._is_profiler_enabled:  # with gradients, autograd's node has a name there by itself
        with _profiler.record_function("mha_c::layer_forward"):
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


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Any, parameters: Nine = NO_PARAMETERS,
    num_heads: int = 1, empty_rows: str = "uniform", dropout: float = 0.0, seed: Optional[int] = None,
) -> tuple[Tensor, Any]:  # fmt: skip
    """(out, what `weights_of` needs).

    parameters  W_q, W_k, W_v, W_o, their biases, w_v (1, h); None where none is
    seed        of the dropout where the call has drawn one already
    """
    check_inputs(queries=queries, keys=keys, values=values)
    check_devices(queries=queries, keys=keys, values=values, parameters=parameters, valid_lens=valid_lens)
    check_options(empty_rows, dropout)
    tensors: Any = queries, keys, values, *parameters
    options, inputs = (valid_lens, num_heads, empty_rows, dropout), (queries, keys, values, valid_lens)
    if not queries.is_cpu:
        return _on_its_device(tensors, options)
    one = next((x for x in parameters if x is not None), None)
    dtype, common = result_type(queries.dtype), common_type(tensors, queries, keys, values, one)
    if any(x is not None and x.dtype is not common for x in tensors):
        tensors = tuple(None if x is None else x.to(common) for x in tensors)
    if beyond_core():
        out, *kept = (_over_batch if is_plain_batch(dropout, inputs, parameters) else _by_mathematics)(tensors, options)
    elif exporting():
        out, *kept = _by_torch(tensors, options)
    elif traced(*tensors, valid_lens if isinstance(valid_lens, Tensor) else None):
        out, *kept = _by_operator(tensors, options, seed)
    else:
        seed = draw_seed() if dropout and seed is None else seed or 0
        try:
            out, *kept = run_layer(tensors[:3], tensors[3:], (lengths(valid_lens), *options[1:]), seed)
        except BufferError:  # a negated view, zeros that were never written, what a transform left behind
            out, *kept = _by_mathematics(tensors, options, mathematics.core_dropout(dropout, seed))
    saved, source = kept
    return (out if dtype is common else out.to(dtype)), (saved, dtype, source)


def _on_its_device(tensors: Any, options: Options) -> tuple[Tensor, Any]:
    """On a GPU or device meta 16-bit floats stay what they are, and autocast is torch's business."""
    queries, dtypes = tensors[0], {x.dtype for x in tensors if x is not None}
    if len(dtypes) > 1 and not autocast_on(queries):
        one = next((x for x in tensors[3:] if x is not None), None)
        common = common_type(tensors, queries, tensors[1], tensors[2], one)
        tensors = [None if x is None else x.to(common) for x in tensors]
    out, saved, source = _by_torch(tensors, options)
    dtype = out.dtype if autocast_on(queries) else result_type(queries.dtype) if queries.is_meta else queries.dtype
    return out.to(dtype), (saved, dtype, source)


def common_type(
    tensors: Any, queries: Tensor, keys: Optional[Tensor] = None, values: Optional[Tensor] = None,
    weight: Optional[Tensor] = None,
) -> torch.dtype:  # fmt: skip
    """What to compute in: the type of all, or float32 where 16-bit floats meet each other or float32."""
    types = {x.dtype for x in tensors if x is not None}
    if len(types) == 1 and queries.dtype in FLOATS:
        return queries.dtype
    if types <= {torch.float32, *HALVES} and types.intersection(HALVES):
        return torch.float32
    refuse_types(queries=queries, keys=keys, values=values, parameters=weight)


def _by_mathematics(tensors: Any, options: Options, drop: Any = None) -> tuple[Tensor, Any, Any]:
    queries, keys, values, *parameters, w_v = tensors
    valid_lens, num_heads, empty_rows, dropout = options
    if exporting() or not is_compiling():  # a compiler learns it when its program runs
        check_layer(queries, keys, values, parameters[:4], num_heads)
    lens = None if valid_lens is None else checked_lengths(valid_lens, queries)
    drop = mathematics.drawn_dropout(dropout) if drop is None else drop
    out, weights = mathematics.layer(
        queries, keys, values, parameters[:4], parameters[4:], w_v, num_heads, lens, empty_rows, drop
    )
    return out, ("tensor", weights), None


def _by_torch(tensors: Any, options: Options) -> tuple[Tensor, Any, Any]:
    queries, keys, values, *parameters, w_v = tensors
    valid_lens, num_heads, empty_rows, dropout = options
    check_layer(queries, keys, values, parameters[:4], num_heads)
    lens = None if valid_lens is None else checked_lengths(valid_lens, queries)
    out, scored = by_torch.layer(tensors[:3], parameters[:4], parameters[4:], w_v, num_heads, lens, empty_rows, dropout)
    return out, ("later", scored.weights), None


def _over_batch(tensors: Any, options: Options) -> tuple[Tensor, Any, Any]:
    queries, keys, values, *parameters = tensors
    valid_lens, num_heads, empty_rows, _ = options
    lens = None if valid_lens is None else checked_lengths(valid_lens, queries)
    distinct = queries, None if keys is queries else keys, None if values is keys else values, lens
    batch, left = queries.shape[0], [None]

    def call(queries: Tensor, keys: Any, values: Any, lens: Any) -> tuple[Tensor]:
        keys = queries if keys is None else keys
        values = keys if values is None else values
        out, left[0] = attend(queries, keys, values, lens, tuple(parameters), num_heads, empty_rows)
        return (out,)

    def again(*distinct: Any) -> tuple[Tensor]:
        call(*distinct)
        return (computed(weights_of(left[0], num_heads)),)

    def weights() -> Tensor:
        if any(is_mapped_now(x) for x in distinct if x is not None):
            return over_batch(again, distinct)[0]
        return weights_of(left[0], num_heads).unflatten(0, (-1, batch))

    return over_batch(call, distinct)[0], ("later", weights), None


def _by_operator(tensors: Any, options: Options, seed: Optional[int]) -> tuple[Tensor, Any, Any]:
    if not ops.available():
        raise RuntimeError(
            f"torch.compile and tracing of mha_c layers need torch 2.4 or later; this is {torch.__version__}"
        )
    queries, keys, values, *parameters, w_v = tensors
    valid_lens, num_heads, empty_rows, dropout = options
    if valid_lens is not None and not isinstance(valid_lens, Tensor):
        valid_lens = torch.as_tensor(valid_lens)
    one = next((x for x in (*parameters, w_v) if x is not None), None)
    refuse_half_fake(queries=queries, keys=keys, values=values, parameters=one, valid_lens=valid_lens)
    if not is_compiling():  # then the operator says what is wrong when it runs
        check_layer(queries, keys, values, parameters[:4], num_heads)
        valid_lens = None if valid_lens is None else checked_lengths(valid_lens, queries)
    options = valid_lens, num_heads, empty_rows, dropout
    return call_operator((queries, keys, values), (*parameters, w_v), options, seed)


def served_by_operator(inputs: Any, parameters: Nine) -> bool:
    """Whether `call_operator` takes these as they are: of one type, with autocast off.  Asked by compilers alone."""
    dtype = inputs[0].dtype
    if not ops.available() or torch.is_autocast_enabled("cpu") or not dtype.is_floating_point or dtype.itemsize < 4:
        return False
    return all(
        x is None or (x.dtype is dtype and x.is_cpu and x.layout is torch.strided) for x in (*inputs, *parameters)
    ) and all(x.dim() == 3 for x in inputs)


def call_operator(
    inputs: Any, parameters: Nine, options: Options, drawn: Optional[int] = None
) -> tuple[Tensor, Any, Any]:  # fmt: skip
    """(out, what `saved_weights` needs, parts of a `WeightsSource` or None) of a graph that is one operator."""
    valid_lens, num_heads, empty_rows, dropout = options
    if valid_lens is not None and not isinstance(valid_lens, Tensor):
        valid_lens = torch.as_tensor(valid_lens)
    seed = None if not dropout else draw_seed_tensor() if drawn is None else torch.tensor(drawn)
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
    inputs: Any, parameters: Nine, options: Options, seed: Optional[Tensor], keep_weights: bool
) -> tuple[Tensor, Any, Any]:  # fmt: skip
    valid_lens, num_heads, empty_rows, dropout = options
    others = [valid_lens, *parameters[4:], seed]
    given = others if any(x is not None for x in others) else []
    call = *inputs, *parameters[:4], given, num_heads, empty_rows, float(dropout)
    if keep_weights:
        out, weights = torch.ops.mha_c.layer_keeping_weights(*call)
        return out, ("weights", weights), None
    out, q, k, w_v, row_max, row_sum, lens = torch.ops.mha_c.layer_keeping_projected(*call)
    scorer = None if parameters[8] is None else w_v
    return out, ("operator", q, k, scorer, row_max, row_sum, lens, num_heads, empty_rows), None


def weights_of(last: Any, heads: Optional[int]) -> Tensor:
    """The attention weights of the call that left `last`: (B, heads, Q, K), or (B*H, Q, K) for None."""
    shown = read(last)
    if shown is not None:
        return shown.weights(heads)
    kept, dtype, parts = last
    if kept[0] == "later":
        kept = "tensor", kept[1]()
    if kept[0] == "tensor":
        return split_heads(kept[1].to(dtype), heads)
    source: Any = None if parts is None else WeightsSource(*parts)
    wanted = source is not None and torch.is_grad_enabled() and source.needs_grad()
    if kept[0] == "weights" and isinstance(kept[1], Tensor):  # by an operator
        return split_heads(kept[1].clone().to(dtype), heads)
    if kept[0] == "operator":
        weights: Tensor = source.weights(*source.arguments()) if wanted else torch.ops.mha_c.weights(*kept[1:])
        return split_heads(weights.to(dtype), heads)
    return Recipe(kept, None if dtype in FLOATS else dtype).shown(heads, source if wanted else None)


def read(last: Any) -> Optional[Shown]:
    """The same for every reading from now on; None where no tensor can stay: in compilers, exporters and transforms."""
    kept, dtype, parts = last
    if kept[0] in ("later", "export") or beyond_core() or is_compiling() or exporting():
        return None
    if kept[0] == "tensor":
        with torch.enable_grad():
            return Shown(kept[1].to(dtype).contiguous(), dtype)
    if kept[0] in ("weights", "operator") and isinstance(kept[1], Tensor):  # by an operator
        if traced(*kept[1:3]):
            return None
        kept = ops.recompute(*kept[1:]) if kept[0] == "operator" else ("weights", array(kept[1]))
    source = None if parts is None else WeightsSource(*parts)
    wanted = source is not None and source.needs_grad()
    return Shown(Recipe(kept, None if dtype in FLOATS else dtype), dtype, source if wanted else None)


def without_graph(last: Any) -> Any:
    """What a call left, as something that can be copied and pickled: tensors, which torch.load takes from anyone."""
    if isinstance(last, (Shown, Assigned)):
        last = last.left()
    if last is None or last[0][0] == "assigned":
        return last
    kept, dtype, _ = last
    if kept[0] in ("tensor", "later"):
        try:
            weights = (kept[1]() if kept[0] == "later" else kept[1]).detach()
        except AttributeError:  # written down by an exporter
            return None
        if not weights.is_cpu:
            return ("tensor", weights), dtype, None
        kept = "weights", (weights.float() if dtype in HALVES else weights)
    return tuple(optional_tensor(x) if isinstance(x, np.ndarray) else x for x in kept), dtype, None


def restored(last: Any) -> Any:
    """The same behind the copy: arrays, as `saved_weights` has them, but for what an operator left, or meta tensors."""
    if last is None or last[0][0] in ("operator", "tensor"):
        return last
    if last[0][0] == "assigned":
        return Assigned(last[0][1])
    kept, dtype, _ = last
    return tuple(x.numpy() if isinstance(x, Tensor) else x for x in kept), dtype, None
