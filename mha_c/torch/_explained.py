"""For mha_c.explain and mha_c.cost: the way that a call of a layer would take, according to `_call/ways.py`, and the
facts of this way."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from .. import _core
from .._arguments import scalars
from .._arguments.arrays import to_lengths
from .._decoder import caches
from ._call import by_torch, mathematics, ways
from ._call.autograd import LayerParameters
from ._call.checks import check_layer, checked_lengths
from ._call.children import checked_inputs, standard_parts
from ._decoder.decoding import check_cache, outer_weights
from ._decoder.projected import ProjectedKeyValues
from ._lazy_sizes import copied, materialize
from ._private import on_cpu
from ._tensors import check_devices, optional_array

Facts = dict[str, Any]


def explained(module: Any, inputs: Any, valid_lens: Any, training: Optional[bool], cache: Any) -> Facts:
    """The facts of a call of the module: those of every way, and those of the way that it takes."""
    training = None if training is None else scalars.flag(training, "training")
    if cache is not None:
        check_cache(module, cache, training)
    queries, keys, values = inputs
    is_projected, before = isinstance(keys, ProjectedKeyValues), 0 if cache is None else caches.most(cache._steps)
    name = "cache" if type(keys) is ProjectedKeyValues or cache is not None else None
    if isinstance(keys, ProjectedKeyValues):
        valid_lens = keys._valid_lens if valid_lens is None else valid_lens
        keys, values = map(torch.as_tensor, (keys._keys, keys._values if values is None else values))
    queries, keys, values = inputs = checked_inputs(queries, keys, values)
    if any(torch.nn.parameter.is_lazy(x) for x in module.parameters()):  # a call draws them; here a copy does
        module = copied(module)
        _draw(module, inputs)
    parts = standard_parts(module, *inputs)
    parameters: Any = None if parts is None else outer_weights(parts[0], None) if is_projected else parts[0]
    chosen = "children" if parts is None else ways.way(queries, (*inputs, *parameters), valid_lens)
    name = chosen if name is None or chosen != "core" else name
    counts = queries.shape[0], module.num_heads, queries.shape[1], before + keys.shape[1]
    facts: Facts = {
        "dtype": str(queries.dtype).rpartition(".")[2], "device": str(queries.device), "way": name,
        "why": ways.WHY[name], "attention": dict(zip(("batch", "heads", "queries", "keys"), counts)),
    }  # fmt: skip
    if parameters is None:
        return facts
    lens = None if valid_lens is None else checked_lengths(valid_lens, queries)
    check_devices(queries=queries, keys=keys, values=values, parameters=parameters, valid_lens=valid_lens)
    check_layer(queries, keys, values, parameters[:4], module.num_heads)
    if chosen == "core" and cache is None:
        return {**facts, **_of_core(module, inputs, parameters, lens, module._dropout_now(training))}
    return {**facts, **_of_torch(inputs, parameters, counts)} if chosen == "torch" else facts


def _draw(module: Any, inputs: Any) -> None:
    """Draw the open weights of a copy; the program's random numbers stay unused."""
    device = inputs[0].device
    place: Any = {"devices": []}
    if device.type not in ("cpu", "meta"):
        place = {"devices": [device], "device_type": device.type}
    with torch.random.fork_rng(**place):
        materialize(module, *inputs)


def _of_core(module: Any, inputs: Any, parameters: LayerParameters, lens: Any, dropout: float) -> Facts:
    tensors, _ = ways.in_one_type((*inputs, *parameters))
    weights, biases, w_v = (map(optional_array, x) for x in (tensors[3:7], tensors[7:11], tensors[11:]))
    projections = tuple(None if W is None else (W, b) for W, b in zip(weights, biases))
    learns = torch.is_grad_enabled() and ways.any_needs_grad(inputs, parameters)
    call: Any = (
        *tensors[:3], None if lens is None else to_lengths(lens), projections,
        *(None if x is None else x[0] for x in w_v), module.num_heads, module.empty_rows, dropout, 0, learns,
    )  # fmt: skip
    return _core.explain_layer(*call)


def _of_torch(inputs: Any, parameters: LayerParameters, counts: Any) -> Facts:
    """Facts of torch's own operations: what computes the attention, and bytes without those inside torch's kernels."""
    w_v, (batch, _, n_queries, n_keys) = parameters[8], counts
    q, k, v = (x.shape[2] if W is None else W.shape[0] for x, W in zip(inputs, parameters))
    numbers = batch * (n_queries * (q + v) + n_keys * (k + v))
    kept = batch * (n_queries * q + n_keys * k)
    by = "scaled_dot_product_attention"
    if w_v is not None or not by_torch.says(*inputs[:2]):
        kept = batch * counts[1] * n_queries * n_keys
        features = 0 if w_v is None else kept * w_v.shape[1]
        numbers += 2 * min(features, mathematics.FEATURES) + kept
        by = f"its operations, {mathematics.queries_at_a_time(features, n_queries)} of {n_queries} queries at a time"
    size = inputs[0].element_size()
    return {"by": by, "scratch_bytes": numbers * size, "kept_bytes": kept * size}


def to_measure(module: Any, sizes: Any, drawn: bool) -> tuple[Any, Any, Facts]:
    """The same as `_to_measure` of _cost.py, for a module; the function waits for the device."""
    module = copied(module).eval()
    place = next(module.parameters(), torch.empty(()))
    inputs: list[Tensor] = [torch.empty(size, dtype=place.dtype, device=place.device) for size in sizes]
    for x in inputs if drawn else ():
        x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(0)))
    _draw(module, inputs)

    def call() -> None:
        with torch.no_grad():
            out = module(*inputs)
        if not on_cpu(out):
            getattr(torch, out.device.type).synchronize()

    with torch.no_grad():
        facts = explained(module, inputs, None, None, None)
    share = facts["attention"].get("share")  # the core stays within torch's limit; torch's kernels use that limit
    return call, inputs, {**facts, "threads": torch.get_num_threads() if share is None else share["most_threads"]}
