"""A call of a layer as an operator of torch's dispatcher, and its gradients as another, for torch.compile.

Eager calls take a shorter way to the core (`core.py`).  An operator always has as many results as its schema says:
where there is no result, it returns an empty tensor.
"""

from __future__ import annotations

from typing import Any, Optional

import numpy as np
import torch
from torch import Tensor

from ..._core import layer_backward, layer_forward
from ..._layer.kept_weights import Kept, for_backward
from .._private import has_operators
from .._tensors import draw_seed_tensor, lengths, result_type, without_subclass
from .._weights.last import Last
from .attention import any_needs_grad
from .autograd import LayerSource, layer_gradients, save, saved
from .checks import checked_lengths
from .children import Parts
from .dropout import number, rate
from .formulas import split_heads
from .records import LayerCall, Parameters
from .scored import Scored

N_TAPE = 7  # projected q, k, v; context; row_max, row_sum; lengths
_LAYER = (
    "Tensor queries, Tensor keys, Tensor values, Tensor? valid_lens, Tensor? W_q, Tensor? W_k, Tensor? W_v, "
    "Tensor? W_o, Tensor? b_q, Tensor? b_k, Tensor? b_v, Tensor? b_o, Tensor? w_v, int num_heads, str empty_rows, "
    "float dropout, Tensor? seed"
)
SCHEMAS = {
    "layer": f"({_LAYER}) -> ({', '.join(['Tensor'] * (1 + N_TAPE))})",
    "layer_backward": f"(Tensor grad_out, {', '.join(f'Tensor t{i}' for i in range(N_TAPE))}, {_LAYER}, "
    f"bool[] needs) -> ({', '.join(['Tensor'] * 12)})",
}


def call(module: Any, parts: Parts, inputs: Any, valid_lens: Any, training: Any) -> Tensor:
    """The output of a call of a layer, in the type of queries."""
    dtype, p = result_type(inputs[0].dtype), float(rate(parts.dropout, training))
    (parameters, holder, _, _), (queries, keys, values) = parts.in_one_type(inputs)
    lens = None if valid_lens is None else checked_lengths(valid_lens, queries)
    options = module.num_heads, module.empty_rows, p, draw_seed_tensor() if p else None
    out, q, k, _, _, _, _, met = torch.ops.mha_c.layer(queries, keys, values, lens, *parameters, *options)
    done = LayerCall(None if lens is None else met, *options)
    used = [x.clone() if W is None else y for y, W, x in zip((q, k), parameters, (queries, keys))]
    q, k = (split_heads(x.detach(), module.num_heads) for x in used)
    w_v = None if parameters.w_v is None else parameters.w_v.detach().clone()
    records = torch.is_grad_enabled() and any_needs_grad((queries, keys, values), parameters)
    if module._last is not None:
        module.__dict__["_last"] = None
    source = LayerSource.of(queries, keys, parameters, done, True) if records else None
    holder["_last"] = Last(Scored(q, k, w_v, done.valid_lens, module.empty_rows), dtype, source)
    return out.to(dtype)


# --- The kernels --------------------------------------------------------------------------------------------


def _tensor(value: Any, like: Tensor, dtype: Optional[torch.dtype] = None) -> Tensor:
    return torch.from_numpy(value) if value is not None else like.new_empty(0, dtype=dtype or like.dtype)


def _layer(queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Any, *rest: Any) -> tuple[Tensor, ...]:
    *nine, num_heads, empty_rows, dropout, seed = rest
    queries, keys, values, *nine = map(without_subclass, (queries, keys, values, *nine))
    parameters = Parameters(*nine)
    out, tape = layer_forward(
        queries, keys, values, lengths(valid_lens), parameters, parameters.w_v, num_heads, empty_rows, dropout,
        number(seed), True,
    )  # fmt: skip
    kept = Kept._make(tape)
    q, k = None if parameters.W_q is None else kept.q, None if parameters.W_k is None else kept.k
    lens = kept.lengths
    if lens is None and valid_lens is not None:  # the core does not keep lengths that hide no key
        lens = np.full(tuple(valid_lens.shape), keys.shape[1])
    parts = q, k, kept.values, kept.context, kept.row_max, kept.row_sum
    return (out, *[_tensor(part, queries) for part in parts], _tensor(lens, keys, torch.int64))


def _layer_fake(queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Any, *rest: Any) -> tuple[Tensor, ...]:
    (W_q, W_k, W_v, W_o, *_), num_heads = rest[:8], rest[9]
    (batch, n_queries, _), n_keys = queries.shape, keys.shape[1]
    q, k, v = (
        queries.new_empty(0 if W is None else (batch, rows, W.shape[0]))
        for W, rows in ((W_q, n_queries), (W_k, n_keys), (W_v, n_keys))
    )
    context = queries.new_empty(batch, n_queries, values.shape[2] if W_v is None else W_v.shape[0])
    row_max, row_sum = (queries.new_empty(batch, num_heads, n_queries) for _ in range(2))
    lens = queries.new_empty((0,) if valid_lens is None else valid_lens.shape, dtype=torch.int64)
    out = queries.new_empty(batch, n_queries, context.shape[2] if W_o is None else W_o.shape[0])
    return out, q, k, v, context, row_max, row_sum, lens


def _layer_grads(grad_out: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    tape, layer, needs = rest[:N_TAPE], rest[N_TAPE:-1], rest[-1]
    queries, keys, values, valid_lens, *nine, num_heads, empty_rows, dropout, seed = layer
    *projected, context, row_max, row_sum, lens = (x.detach().numpy() for x in tape)
    q, k, v = (None if W is None else x for x, W in zip(projected, nine))
    lens = None if valid_lens is None else lens
    kept = for_backward(q, k, row_max, row_sum, lens, v, context)
    grad_out, queries, keys, values, *nine = map(without_subclass, (grad_out, queries, keys, values, *nine))
    parameters = Parameters(*nine)
    grads = layer_backward(
        grad_out, kept, queries, keys, values, lens, parameters, parameters.w_v, num_heads, empty_rows, dropout,
        number(seed), tuple(needs[:12]),
    )  # fmt: skip
    return tuple(queries.new_empty(0) if grad is None else grad for grad in grads)


def _layer_grads_fake(grad_out: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    queries, keys, values, _, *nine = rest[N_TAPE : N_TAPE + 13]
    wanted = (*rest[-1][:11], Parameters(*nine).w_v is not None)
    results = zip((queries, keys, values, *nine), wanted)
    return tuple(queries.new_empty(x.shape if want and x is not None else (0,)) for x, want in results)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    tensors = (*inputs[:13], inputs[16])
    ctx.options, ctx.absent = inputs[13:16], save(ctx, (*tensors, *output[1:]))
    ctx.needs = [x is not None and x.requires_grad for x in (*inputs[:3], *inputs[4:13])]


def _autograd(ctx: Any, grad_out: Tensor, *_: Any) -> Any:
    tensors = saved(ctx, ctx.absent)
    (*inputs, seed), tape = tensors[:14], tensors[14:]
    if torch.is_grad_enabled():  # create_graph
        call = LayerCall._make((inputs[3], *ctx.options, seed))
        grads = layer_gradients([*inputs[:3], *inputs[4:]], call, ctx.needs, grad_out)
    else:
        grads = torch.ops.mha_c.layer_backward(grad_out, *tape, *inputs, *ctx.options, seed, ctx.needs)
    found = [grad if need else None for grad, need in zip(grads, ctx.needs)]
    return (*found[:3], None, *found[3:12], None, None, None, None)


if has_operators:
    for name, (kernel, fake) in {
        "layer": (_layer, _layer_fake), "layer_backward": (_layer_grads, _layer_grads_fake),
    }.items():  # fmt: skip
        torch.library.define(f"mha_c::{name}", SCHEMAS[name])
        torch.library.impl(f"mha_c::{name}", "cpu", kernel)
        torch.library.register_fake(f"mha_c::{name}", fake)
    torch.library.register_autograd("mha_c::layer", _autograd, setup_context=_setup)
