"""The book's small functions around masks and heads for tensors, with gradients; shapes that the core will not see.

masked_softmax, sequence_mask, transpose_qkv, transpose_output: none of them modifies its argument.  `check_layer`,
`check_attention`, `check_options` and `checked_lengths` hold calls that the core does not see (torch.func, exporters,
compilers, meta and fake tensors) to its rules, in its words: torch's operations would broadcast what does not belong
together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional

import numpy as np
import torch
from torch import Tensor, nn

from .. import _arguments
from .._arguments import refusals
from .._arguments.arrays import to_lengths
from ..errors import ShapeError
from ._private import tracing_state, without_tracing
from ._tensors import has_numbers

if TYPE_CHECKING:
    from .._types import EmptyRows


def masked_softmax(X: Tensor, valid_lens: Any = None, *, empty_rows: EmptyRows = "uniform") -> Tensor:
    """Softmax over the last axis of X, over the first `valid_lens` elements of it; the others become 0.

    Parameters
    ----------
    X : Tensor (B, Q, K)
        Scores; of any shape if valid_lens is None.
    valid_lens : numbers (B,) or (B, Q), optional
        How many elements count: integers, or floats, which are rounded up.
    empty_rows : {"uniform", "zero"}
        A row of length <= 0 becomes all 1/K ("uniform", d2l's answer) or all 0.

    Returns
    -------
    Tensor of X's shape and type
        The weights.

    Notes
    -----
    Unlike d2l's, it leaves X alone.  Source: d2l 11.3.1.

    Examples
    --------
    >>> import torch, mha_c.torch
    >>> mha_c.torch.masked_softmax(torch.zeros(1, 1, 4), torch.tensor([2]))
    tensor([[[0.5000, 0.5000, 0.0000, 0.0000]]])
    """
    _arguments.empty_rows(empty_rows)
    if valid_lens is None:
        return nn.functional.softmax(X, dim=-1)
    if X.dim() != 3:
        raise ShapeError(f"X must have shape (B, Q, K) where there are valid_lens, got {tuple(X.shape)}")
    lens = _lengths(valid_lens, "valid_lens", [(X.shape[0],), (X.shape[0], X.shape[1])]).to(X.device)
    lens = lens[:, None] if lens.dim() == 1 else lens
    keep = torch.arange(X.shape[2], device=X.device) < lens[..., None]
    empty = lens[..., None] <= 0
    # An empty row is uniform: softmax of equal scores.  No -inf throughout a row, whose gradient would be NaN.
    scores = torch.where(keep, X, torch.where(empty, 0.0, -torch.inf).to(X.dtype))
    weights = nn.functional.softmax(scores, dim=-1)
    return weights if empty_rows == "uniform" else torch.where(empty, torch.zeros((), dtype=X.dtype), weights)


def sequence_mask(X: Tensor, valid_len: Any, value: Any = 0) -> Tensor:
    """A copy of X in which everything at or beyond `valid_len` along axis 1 is `value`.

    Parameters
    ----------
    X : Tensor (B, T) or (B, T, ...)
        One sequence a row.
    valid_len : numbers (B,)
        How many steps count.
    value : number
        What takes the place of the others.

    Returns
    -------
    Tensor of X's shape and type
        The copy.

    Notes
    -----
    Unlike d2l's, it does not change X.  Source: d2l 9.7 and 10.7 (0.17), appendix (1.0).

    Examples
    --------
    >>> import torch, mha_c.torch
    >>> mha_c.torch.sequence_mask(torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([1, 2]))
    tensor([[1, 0, 0],
            [4, 5, 0]])
    """
    if X.dim() < 2:
        raise ShapeError(f"X must have shape (B, T) or (B, T, ...), got {tuple(X.shape)}")
    lens = _lengths(valid_len, "valid_len", [(X.shape[0],)]).to(X.device)
    if not isinstance(value, Tensor):
        number = X.is_floating_point() or X.is_complex()
        limits = torch.finfo(X.dtype) if number else None if X.dtype is torch.bool else torch.iinfo(X.dtype)
        value = _arguments.element(value, X.dtype, limits)
    drop = torch.arange(X.shape[1], device=X.device) >= lens[:, None]
    return X.masked_fill(drop.reshape(*drop.shape, *[1] * (X.dim() - 2)), value)


def transpose_qkv(X: Tensor, num_heads: int) -> Tensor:
    """Split the features of (B, T, H*d) into H heads: (B*H, T, d), where row b*H + h is head h of item b.

    Parameters
    ----------
    X : Tensor (B, T, H*d)
        Projected queries, keys or values.
    num_heads : int
        H, at least 1.

    Returns
    -------
    Tensor (B*H, T, d)
        The heads.

    Notes
    -----
    Source: d2l 11.5.2.

    Examples
    --------
    >>> import torch, mha_c.torch
    >>> mha_c.torch.transpose_qkv(torch.zeros(2, 4, 100), num_heads=5).shape
    torch.Size([10, 4, 20])
    """
    if X.dim() != 3:
        raise ShapeError(f"X must have shape (B, T, num_hiddens), got {tuple(X.shape)}")
    if X.shape[2] % num_heads:
        raise ShapeError(f"the last axis of X ({X.shape[2]}) must be divisible by num_heads ({num_heads})")
    return X.unflatten(2, (num_heads, -1)).transpose(1, 2).flatten(0, 1)


def transpose_output(X: Tensor, num_heads: int) -> Tensor:
    """The reverse of `transpose_qkv`: (B*H, T, d) becomes (B, T, H*d).

    Parameters
    ----------
    X : Tensor (B*H, T, d)
        The heads.
    num_heads : int
        H, at least 1.

    Returns
    -------
    Tensor (B, T, H*d)
        The features of all heads side by side.

    Notes
    -----
    Source: d2l 11.5.2.

    Examples
    --------
    >>> import torch, mha_c.torch
    >>> mha_c.torch.transpose_output(torch.zeros(10, 4, 20), num_heads=5).shape
    torch.Size([2, 4, 100])
    """
    if X.dim() != 3:
        raise ShapeError(f"X must have shape (B*num_heads, T, d), got {tuple(X.shape)}")
    if X.shape[0] % num_heads:
        raise ShapeError(f"the first axis of X ({X.shape[0]}) must be divisible by num_heads ({num_heads})")
    return X.unflatten(0, (-1, num_heads)).transpose(1, 2).flatten(2)


def check_layer(queries: Tensor, keys: Tensor, values: Tensor, weights: Any, num_heads: int) -> None:
    """ShapeError unless these go together with weights W_q, W_k, W_v, W_o, None where there is none."""
    queries, keys, values = map(_sized, (queries, keys, values))
    linears = tuple(None if W is None else tuple(_sized(W).shape) for W in weights)
    error = refusals.inputs(queries, keys, values)
    error = error or refusals.features(queries, keys, values, linears, None, num_heads)
    if error is not None:
        raise error


def check_options(empty_rows: Any, dropout: Any, keep_mask: Optional[Tensor] = None) -> None:
    """What the core says of the options of a call that it will not see; nobody else looks at them."""
    _arguments.empty_rows(empty_rows)
    _arguments.probability(dropout)
    if keep_mask is not None and keep_mask.dtype is not torch.bool:
        raise TypeError(
            f"keep_mask has dtype {keep_mask.dtype}, expected bool (True = may attend): use keep_mask.bool(), or pass "
            f"numbers to be added to the scores as bias"
        )


def check_attention(q: Tensor, k: Tensor, v: Tensor, w_v: Any, **masks: Any) -> None:
    """ShapeError unless q (B,[H,]Q,D), k, v and masks go together."""
    q, k, v = map(_sized, (q, k, v))
    error = refusals.attention(q, k, v, None if w_v is None else _sized(w_v))
    for name, mask in masks.items():
        if error is None and mask is not None:
            error = refusals.mask(_sized(mask), name, (*q.shape[:-1], k.shape[-2]))
    if error is not None:
        raise error


def checked_lengths(valid_lens: Any, queries: Tensor) -> Tensor:
    """valid_lens of a call with these queries (B, [H,] Q, .)."""
    queries = _sized(queries)
    return _lengths(valid_lens, "valid_lens", [(queries.shape[0],), (queries.shape[0], queries.shape[-2])])


def _lengths(value: Any, name: str, shapes: list[tuple[int, ...]]) -> Tensor:
    lens = value if isinstance(value, Tensor) else torch.as_tensor(value)
    if lens.dtype is torch.bool or lens.is_complex():
        raise TypeError(f"{name} must hold integers or floats, got {lens.dtype}")
    shape = tuple(_sized(lens).shape)
    if shape not in shapes:
        raise ShapeError(f"{name} must have shape {' or '.join(map(str, shapes))}, got {shape}")
    if lens.is_floating_point() and lens.is_cpu and has_numbers(lens):  # nobody waits for another device
        to_lengths(np.array(lens.tolist()))  # NaN and infinity are none; operations would give a transform's tensors
    return lens


def _sized(x: Tensor) -> Any:
    """A tracer's sizes are tensors: something of x's plain ones, which it does not see."""
    return x if tracing_state() is None else np.broadcast_to(0, without_tracing(x))
