"""The core's checks, with its messages, for calls that it does not see (torch.func, exporters, compilers, meta and fake
tensors): torch's operations would broadcast shapes that do not fit together.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NamedTuple, Optional

import numpy as np
import torch
from torch import Tensor

from ..._arguments import core_refusals, scalars
from ..._arguments.arrays import to_lengths
from ..._arguments.options import core_corner
from ...errors import ShapeError
from .._private import on_cpu, tracing_state, without_tracing
from .._tensors import array, float32_if_half, has_numbers, is_compiling


def check_sizes(queries: Tensor, keys: Tensor, values: Tensor, linears: Any, num_heads: int) -> None:
    """ShapeError unless inputs and projections fit together.

    linears   (out_features, in_features) of W_q, W_k, W_v, W_o, None where the layer has none; None: nothing is known
    """
    queries, keys, values = map(_sized, (queries, keys, values))
    error = core_refusals.inputs(queries, keys, values)
    if error is None and linears is not None:
        error = core_refusals.features(queries, keys, values, tuple(linears), None, num_heads)
    if error is not None:
        raise error


def rank_of(name: str, x: Tensor) -> Exception:
    """The error for an input that is not (B, rows, features)."""
    error = core_refusals.rank(x, name, 3, f"(B, {'Q' if name == 'queries' else 'K'}, features)")
    assert error is not None
    return error


class Type(NamedTuple):
    dtype: torch.dtype


def check_options(empty_rows: Any, dropout: Any, keep_mask: Optional[Tensor] = None) -> None:
    """Check the options of a call as the core would, which does not see this call."""
    scalars.empty_rows(empty_rows)
    scalars.probability(dropout)
    check_mask(keep_mask)


def check_mask(keep_mask: Optional[Tensor]) -> None:
    if keep_mask is not None and keep_mask.dtype is not torch.bool:
        core_refusals.mask_kind(Type(keep_mask.dtype), "keep_mask")  # not the tensor, for compilers


def check_attention(q: Tensor, k: Tensor, v: Tensor, w_v: Any, **masks: Any) -> None:
    """ShapeError unless q (B,[H,]Q,D), k, v and masks fit together."""
    q, k, v = map(_sized, (q, k, v))
    error = core_refusals.attention(q, k, v, None if w_v is None else _sized(w_v))
    for name, mask in masks.items():
        if error is None and mask is not None:
            error = core_refusals.mask(_sized(mask), name, (*q.shape[:-1], k.shape[-2]))
    if error is not None:
        raise error


def check_terms(q: Tensor, relative_bias: Optional[Tensor], sinks: Optional[Tensor]) -> None:
    """ShapeError unless relative_bias has a row of odd length, and sinks a number, for each head of q."""
    heads = q.shape[1] if q.dim() == 4 else 1
    if relative_bias is not None:
        shape = tuple(relative_bias.shape)
        if len(shape) != 2 or shape[0] != heads or shape[1] % 2 == 0:
            raise core_refusals.relative_bias(relative_bias, heads)
    if sinks is not None and tuple(sinks.shape) != (heads,):
        raise core_refusals.shape(sinks, "sinks", (heads,))


def checked_lengths(valid_lens: Any, queries: Tensor, n_keys: int = 0) -> Tensor:
    """The valid_lens of a call with these queries (B, [H,] Q, .), checked, as a tensor.

    n_keys   for a warning of masks; 0: none
    """
    batch, n_queries = _sized(queries).shape[0], _sized(queries).shape[-2]
    lens = as_lengths(valid_lens, "valid_lens")
    if tuple(_sized(lens).shape) not in ((batch,), (batch, n_queries)):
        raise core_refusals.lengths(_sized(lens), batch, n_queries)
    numbers = _numbers(lens) if lens.dim() == 2 and core_refusals.warns_of_masks() else None
    if numbers is not None:
        core_refusals.warn_of_mask(numbers, n_keys)
    return _of_numbers(lens)


def lengths_of_causal(causal: Any, queries: Tensor, keys: Tensor, valid_lens: Any) -> Any:
    """`causal_lengths` for a call that the core does not see: a tensor."""
    corner = core_corner(causal, queries, keys)
    if corner is None:
        return valid_lens
    lens = None if valid_lens is None else checked_lengths(valid_lens, queries)
    n_queries, n_keys = queries.shape[1], keys.shape[1]
    first = 1 if corner == "top_left" else 1 + n_keys - n_queries
    seen = torch.arange(first, first + n_queries, device=queries.device).clamp(min=0).expand(queries.shape[0], -1)
    if lens is None:
        return seen
    lens = lens.to(queries.device, non_blocking=True)
    return torch.minimum(seen, lens[:, None] if lens.dim() == 1 else lens)


def lengths_of_shape(value: Any, name: str, wanted: tuple[int, ...]) -> Tensor:
    lens = as_lengths(value, name)
    shape = tuple(_sized(lens).shape)
    if shape != wanted:
        raise ShapeError(f"{name} must have shape {wanted}, got {shape}")
    return _of_numbers(lens)


def as_lengths(value: Any, name: str) -> Tensor:
    if value is None:
        raise TypeError(f"{name} must hold integers or floats, got None")
    if isinstance(value, Tensor):
        lens = value  # as it is: inside torch.func, as_tensor gives one whose numbers cannot be read
    else:
        lens = torch.as_tensor(value if is_compiling() else to_lengths(value, name))
    if lens.dtype is torch.bool or lens.is_complex():
        raise TypeError(f"{name} must hold integers or floats, got {lens.dtype}")
    return lens


def _of_numbers(lens: Tensor) -> Tensor:
    numbers = _numbers(lens) if lens.is_floating_point() else None
    if numbers is not None:
        to_lengths(numbers)  # refuses NaN and infinity; tensor operations might be transformed
    return float32_if_half(lens)


def _numbers(lens: Tensor) -> Any:
    """Lengths as an array; None where they cannot be read, or only by waiting for another device."""
    if on_cpu(lens) and has_numbers(lens):
        for read in array, Tensor.tolist:  # NumPy has no bfloat16; not every torch makes lists inside transforms
            with suppress(RuntimeError, TypeError):
                return np.array(read(lens))
    return None


def _sized(x: Tensor) -> Any:
    """x, or inside a tracer, where sizes are tensors, an array of the same shape, which the tracer does not record."""
    return x if tracing_state() is None else np.broadcast_to(0, without_tracing(x))
