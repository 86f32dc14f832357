"""For mha_c.explain and mha_c.cost: the way that a call of a layer would take, according to `_call/choice.py`, and the
facts of this way."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from .. import _core
from .._arguments import scalars
from .._arguments.arrays import to_lengths
from .._decoder import caches
from ._call import formulas
from ._call.attention import any_needs_grad
from ._call.children import Parts
from ._call.choice import CORE, GENERAL, WHY, choose
from ._call.dropout import rate
from ._call.inputs import check_call, checked_inputs, children_of, copied, materialize
from ._call.records import Parameters
from ._decoder.decoding import check_cache
from ._decoder.projected import ProjectedKeyValues
from ._private import on_cpu
from ._tensors import optional_array

Facts = dict[str, Any]


def explained(
    module: Any, queries: Any = None, keys: Any = None, values: Any = None, valid_lens: Any = None, *,
    training: Optional[bool] = None, cache: Any = None,
) -> Facts:  # fmt: skip
    """The facts of a call of the module: those of every way, and those of the way that it takes."""
    training = None if training is None else scalars.flag(training, "training")
    if cache is not None:
        check_cache(module, cache, training)
    projected, before = isinstance(keys, ProjectedKeyValues), 0 if cache is None else caches.most(cache._steps)
    if projected:
        keys, values, valid_lens = keys._given_to(module, queries, values, valid_lens)
    queries, keys, values = inputs = checked_inputs(type(module).__name__, queries, keys, values, valid_lens)
    if any(torch.nn.parameter.is_lazy(x) for x in module.parameters()):  # a call draws them; here a copy does
        module = copied(module)
        _draw(module, inputs)
    way, parts = choose(module, queries, keys, values, valid_lens)
    counts = queries.shape[0], module.num_heads, queries.shape[1], before + keys.shape[1]
    facts: Facts = {
        "dtype": str(queries.dtype).rpartition(".")[2], "device": str(queries.device), "way": way, "why": WHY[way],
        "attention": dict(zip(("batch", "heads", "queries", "keys"), counts)),
    }  # fmt: skip
    lens = check_call(module, children_of(module, projected), queries, keys, values, valid_lens)
    if parts is None or cache is not None:
        return facts
    parts = parts.for_projected() if projected else parts
    if way == CORE:
        return {**facts, **_of_core(module, inputs, parts, lens, rate(parts.dropout, training))}
    return {**facts, **_of_torch(inputs, parts.parameters, counts)} if way == GENERAL else facts


def _draw(module: Any, inputs: Any) -> None:
    """Draw the lazy weights of a copy; the program's random numbers stay unused."""
    device = inputs[0].device
    place: Any = {"devices": []}
    if device.type not in ("cpu", "meta"):
        place = {"devices": [device], "device_type": device.type}
    with torch.random.fork_rng(**place):
        materialize(module, *inputs)


def _of_core(module: Any, inputs: Any, parts: Parts, lens: Any, dropout: float) -> Facts:
    learns = torch.is_grad_enabled() and any_needs_grad(inputs, parts.parameters)
    (parameters, *_), tensors = parts.in_one_type(inputs)
    pairs = zip(map(optional_array, parameters[:4]), map(optional_array, parameters[4:8]))
    projections, w_v = tuple(None if W is None else (W, b) for W, b in pairs), optional_array(parameters.w_v)
    call: Any = (
        *tensors, None if lens is None else to_lengths(lens), projections, None if w_v is None else w_v[0],
        module.num_heads, module.empty_rows, dropout, 0, learns,
    )  # fmt: skip
    return _core.explain_layer(*call)


def _of_torch(inputs: Any, parameters: Parameters, counts: Any) -> Facts:
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
        facts = explained(module, *inputs)
    share = facts["attention"].get("share")  # the core stays within torch's limit; torch's kernels use that limit
    return call, inputs, {**facts, "threads": torch.get_num_threads() if share is None else share["most_threads"]}
