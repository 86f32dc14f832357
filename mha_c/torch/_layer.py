"""One whole layer on tensors, for calls without a plan: 16-bit floats, unusual projections, compilers.

`layers.py` has the short way for the usual call.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from .. import _core
from . import ops
from ._tensors import (
    FLOATS,
    HALVES,
    NO_MEMORY,
    array,
    check_inputs,
    draw_seed,
    draw_seed_tensor,
    follow_threads,
    layer_forward,
    lengths,
    optional_array,
    refuse_functorch,
    refuse_types,
    traced,
)  # fmt: skip
from .autograd import Parameters, apply_layer
from .lazy import Recipe, split_heads

Four = tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor], Optional[Tensor]]
NONE: Four = (None, None, None, None)


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Any, weights: Four = NONE, biases: Four = NONE,
    w_v: Optional[Tensor] = None, num_heads: int = 1, empty_rows: str = "uniform", dropout: float = 0.0,
) -> tuple[Tensor, Any]:  # fmt: skip
    """(out, what `weights_of` needs); w_v is (1, h), the others as in _core.layer_forward."""
    refuse_functorch()
    check_inputs(queries=queries, keys=keys, values=values)
    tensors: Any = queries, keys, values, *weights, *biases, w_v
    dtype, common = queries.dtype, _common_type(tensors, queries, keys, values, weights[0] if w_v is None else w_v)
    if any(x is not None and x.dtype is not common for x in tensors):
        tensors = tuple(None if x is None else x.to(common) for x in tensors)
    if traced(*tensors, valid_lens if isinstance(valid_lens, Tensor) else None):
        out, kept = _by_operator(tensors, valid_lens, num_heads, empty_rows, dropout)
    else:
        try:
            out, kept = _by_function(tensors, valid_lens, num_heads, empty_rows, dropout)
        except BufferError:
            raise TypeError(NO_MEMORY) from None
    return (out if dtype is common else out.to(dtype)), (kept, dtype)


def _common_type(tensors: Any, queries: Tensor, keys: Tensor, values: Tensor, weight: Optional[Tensor]) -> torch.dtype:
    """What to compute in: the type of all, or float32 where 16-bit floats meet each other or float32."""
    types = {x.dtype for x in tensors if x is not None}
    if len(types) == 1 and queries.dtype in FLOATS:
        return queries.dtype
    if types <= {torch.float32, *HALVES} and types.intersection(HALVES):
        return torch.float32
    refuse_types(queries=queries, keys=keys, values=values, parameters=weight)


def _by_function(tensors: Any, valid_lens: Any, num_heads: int, empty_rows: Any, dropout: float) -> tuple[Tensor, Any]:
    queries, keys, values, *weights_and_biases, w_v = tensors
    parameters = Parameters(w_v, weights_and_biases[:4], weights_and_biases[4:])
    projections = packed(parameters.arrays, weights_and_biases[4:])
    options: Any = (
        lengths(valid_lens), projections, None if w_v is None else array(w_v)[0], num_heads, empty_rows, dropout,
        draw_seed() if dropout else 0,
    )  # fmt: skip
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        keep: list[Any] = []
        distinct = queries, None if keys is queries else keys, None if values is keys else values
        out: Tensor = apply_layer((options, parameters, keep), *distinct, *parameters.tensors)
        return out, keep[0]
    follow_threads()
    out, saved = layer_forward(queries, keys, values, *options)
    return out, saved


def packed(weights: Any, biases: Any) -> Any:
    """The projections as the core takes them, from row-major weights and their biases."""
    return tuple(
        None if W is None else (_core.pack_linear(W), optional_array(b), W.shape) for W, b in zip(weights, biases)
    )


def _by_operator(tensors: Any, valid_lens: Any, num_heads: int, empty_rows: str, dropout: float) -> tuple[Tensor, Any]:
    if not ops.available():
        raise RuntimeError(
            f"torch.compile and tracing of mha_c layers need torch 2.4 or later; this is {torch.__version__}"
        )
    queries, keys, values, *parameters, w_v = tensors
    if valid_lens is not None and not isinstance(valid_lens, Tensor):
        valid_lens = torch.as_tensor(valid_lens)
    seed = draw_seed_tensor() if dropout else None
    out, q, k, _, _, row_max, row_sum, lens = torch.ops.mha_c.layer(
        queries, keys, values, valid_lens, *parameters, w_v, num_heads, empty_rows, float(dropout), seed
    )
    used = [(tensor if weight is not None else x.clone()).detach() for tensor, weight, x in (
        (q, parameters[0], queries), (k, parameters[1], keys),
    )]  # fmt: skip
    scorer = None if w_v is None else w_v.detach().clone()
    return out, ("operator", *used, scorer, row_max.detach(), row_sum.detach(), lens, num_heads, empty_rows)


def weights_of(last: Any, heads: Optional[int]) -> Tensor:
    """The attention weights of the call that left `last`: (B, heads, Q, K), or (B*H, Q, K) for None."""
    kept, dtype = last
    if kept[0] == "operator":
        if traced(*kept[1:3]):
            weights: Tensor = torch.ops.mha_c.weights(*kept[1:]).to(dtype)
            return split_heads(weights, heads)
        kept = ops.recompute(*kept[1:])
    return Recipe(kept, None if dtype in FLOATS else dtype).shown(heads)
