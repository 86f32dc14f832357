"""For mha_c.explain and mha_c.cost: the way that a call of a layer would take, according to `_call/choice.py`, and the
facts of this way."""

from __future__ import annotations

import inspect
from typing import Any, Optional

import numpy as np
import torch
from torch import Tensor

from .. import _core
from .._arguments import scalars
from .._arguments.arrays import to_lengths
from .._arguments.options import core_corner
from .._layer.description import describe
from .._layers_with_heads import n_positional
from ._call import formulas
from ._call.attention import any_needs_grad
from ._call.children import Parts, standard_parts
from ._call.choice import CORE, GENERAL, WHY, choose
from ._call.dropout import rate
from ._call.inputs import check_call, checked_inputs, children_of, copied, materialize
from ._call.readable import readable
from ._call.records import Asked, LayerInputs, LayerParameters, Options
from ._decoder.decoding import check_cache
from ._decoder.projected import ProjectedKeyValues
from ._private import observed, on_cpu
from ._tensors import FLOATS, check_inputs, optional_array

Facts = dict[str, Any]
COUNTS = "batch", "heads", "queries", "keys"


def explained(
    module: Any, queries: Any = None, keys: Any = None, values: Any = None, valid_lens: Any = None, *,
    causal: Any = False, keep_mask: Any = None, bias: Any = None, training: Optional[bool] = None, cache: Any = None,
) -> Facts:  # fmt: skip
    """The facts of a call of the module: those of every way, and those of the way that it takes."""
    training = None if training is None else scalars.flag(training, "training")
    if cache is not None:
        check_cache(module, cache, training)
    projected = isinstance(keys, ProjectedKeyValues)
    if projected:
        keys, values, valid_lens = keys._given_to(module, queries, values, valid_lens)
    queries, keys, values = inputs = checked_inputs(type(module).__name__, queries, keys, values, valid_lens)
    n_keys = _n_keys(cache, keys.shape[1])
    keep_mask, bias = module._checked_masks((keep_mask, bias), (*queries.shape[:2], n_keys))
    asked = Asked(valid_lens, keep_mask, bias, causal if cache is None else False, training)
    if any(torch.nn.parameter.is_lazy(x) for x in module.parameters()):  # a call draws them; here a copy does
        module = copied(module)
        _draw(module, inputs)
    parts = standard_parts(module)
    way = choose(parts, inputs, asked)
    counts = queries.shape[0], module.num_heads, queries.shape[1], n_keys
    facts: Facts = {**_told(queries, way, WHY[way]), "attention": dict(zip(COUNTS, counts))}
    lens = check_call(module, children_of(module, projected), inputs, asked)
    if parts is None or cache is not None:
        return facts
    parts = parts.for_projected() if projected else parts
    if way == CORE:
        return {**facts, **_of_core(module, inputs, parts, asked._replace(valid_lens=lens))}
    return {**facts, **_of_torch(inputs, parts.parameters, counts)} if way == GENERAL else facts


def _told(queries: Tensor, way: str, why: str) -> Facts:
    return {"dtype": str(queries.dtype).rpartition(".")[2], "device": str(queries.device), "way": way, "why": why}


def _n_keys(cache: Any, n_new: int) -> int:
    return n_new if cache is None else cache._n_keys(cache._steps + n_new, n_new)


def _draw(module: Any, inputs: Any) -> None:
    """Draw the lazy weights of a copy; the program's random numbers stay unused."""
    device = inputs[0].device
    place: Any = {"devices": []}
    if device.type not in ("cpu", "meta"):
        place = {"devices": [device], "device_type": device.type}
    with torch.random.fork_rng(**place):
        materialize(module, *inputs)


def _of_core(module: Any, inputs: LayerInputs, parts: Parts, asked: Asked) -> Facts:
    learns = torch.is_grad_enabled() and any_needs_grad(inputs, parts.parameters, [asked.bias])
    given = Options(core_corner(asked.causal, *inputs[:2]), *asked.masks)
    parts, tensors, given = parts.in_one_type(inputs, given)
    parameters, options = parts.parameters, module._options(given[:3], tensors, parts)
    options = None if options is None else options.for_core(True)
    arrays = LayerParameters(*map(optional_array, parameters))
    heads = module.num_heads if options is None else module._head_counts()
    lens = None if asked.valid_lens is None else to_lengths(asked.valid_lens)
    call: Any = (
        *tensors, lens, arrays, arrays.w_v, heads, module.empty_rows, rate(parts.dropout, asked.training), 0, learns,
        options,
    )  # fmt: skip
    return _core.explain_layer(*call)


def _of_torch(inputs: LayerInputs, parameters: LayerParameters, counts: Any) -> Facts:
    """Facts of torch's own operations: what computes the attention, and bytes without those inside torch's kernels."""
    w_v, (batch, _, n_queries, n_keys) = parameters.w_v, counts
    q, k, v = (x.shape[2] if W is None else W.shape[0] for x, W in zip(inputs, parameters))
    numbers = batch * (n_queries * (q + v) + n_keys * (k + v))
    kept = batch * (n_queries * q + n_keys * k)
    by = "scaled_dot_product_attention"
    if w_v is not None or not formulas.fits(*inputs[:2]):
        kept = batch * counts[1] * n_queries * n_keys
        features = 0 if w_v is None else kept * w_v.shape[1]
        numbers += 2 * min(features, formulas.FEATURES) + kept
        by = f"its operations, {formulas.queries_at_a_time(features, n_queries)} of {n_queries} queries at a time"
    size = inputs[0].element_size()
    return {"by": by, "scratch_bytes": numbers * size, "kept_bytes": kept * size}


def explained_heads(module: Any, *arguments: Any, **named: Any) -> Facts:
    """The facts of a call of a layer that projects by its children and gives the heads to one attention."""
    call = inspect.signature(type(module).forward).bind(module, *arguments, **named)
    given = [x for name, x in call.arguments.items() if name != "self"]
    queries, keys, values = given[:3] if all(isinstance(x, Tensor) for x in given[:3]) and given[2:] else given[:1] * 3
    check_inputs(queries=queries, keys=keys, values=values)
    (batch, n_queries, n_keys), heads = module._rows_of_call(queries, keys), describe(module)
    counts = dict(zip(COUNTS, (batch, heads.num_heads, n_queries, n_keys)))
    way = CORE if not observed() and readable((queries, keys, values)) and queries.dtype in FLOATS else GENERAL
    why = f"torch's operations for the projections; for the attention of the heads {WHY[way]}"
    facts = _told(queries, way, why)
    size, projected = queries.element_size(), batch * heads.num_kv_heads * n_keys * heads.head_dim
    q, k, v = batch * heads.num_heads * n_queries * heads.head_dim, projected, projected
    held = {"scratch_bytes": (2 * q + k + v) * size, "kept_bytes": (q + k) * size}
    if way == GENERAL:
        by = (
            "scaled_dot_product_attention" if formulas.fits(queries, keys) else "its operations, for all scores at once"
        )
        more = 0 if by.startswith("scaled") else 2 * batch * heads.num_heads * n_queries * n_keys * size
        held["scratch_bytes"] += more
        return {**facts, "attention": counts, "by": by, **held}
    kind = np.float64 if queries.dtype is torch.float64 else np.float32
    shapes = (heads.num_heads, n_queries), (heads.num_kv_heads, n_keys), (heads.num_kv_heads, n_keys)
    zeros = (np.broadcast_to(kind(0), (batch, *shape, heads.head_dim)) for shape in shapes)
    attention = _core.explain_attention(*zeros)
    held["scratch_bytes"] += attention["scratch_bytes"]
    return {**facts, "projections": {}, "attention": attention, **held, "kept": "queries and keys"}


def to_measure(module: Any, sizes: Any, drawn: bool) -> tuple[Any, Any, Facts]:
    """The same as `_to_measure` of _cost.py, for a module; the function waits for the device."""
    module = copied(module).eval()
    place = next(module.parameters(), torch.empty(()))
    sizes = sizes[: n_positional(type(module).forward)]
    inputs: list[Tensor] = [torch.empty(size, dtype=place.dtype, device=place.device) for size in sizes]
    for x in inputs if drawn else ():
        x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(0)))
    if any(torch.nn.parameter.is_lazy(x) for x in module.parameters()):
        _draw(module, inputs)

    def call() -> None:
        with torch.no_grad():
            module(*inputs)
        if not on_cpu(inputs[0]):
            getattr(torch, inputs[0].device.type).synchronize()

    with torch.no_grad():
        facts = module._explained(*inputs)
    share = facts["attention"].get("share")  # the core stays within torch's limit; torch's kernels use that limit
    return call, inputs, {**facts, "threads": torch.get_num_threads() if share is None else share["most_threads"]}
