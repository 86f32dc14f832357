"""The book's small functions around masks and heads for tensors, with gradients: the twins of mha_c/masking.py.

masked_softmax, sequence_mask, transpose_qkv, transpose_output: none of them modifies its argument.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .. import masking as of_numpy
from .._arguments import scalars
from .._arguments.calls import refuses_at_the_call
from ..errors import ShapeError
from ._call.checks import checked_lengths, lengths_of_shape
from ._private import unflatten
from ._tensors import check_inputs, check_tensors
from ._twins import twin

if TYPE_CHECKING:
    from .._types import EmptyRows


@twin(of_numpy.masked_softmax)
@refuses_at_the_call
def masked_softmax(X: Tensor, valid_lens: Any = None, *, empty_rows: EmptyRows = "uniform") -> Tensor:
    """Softmax over the first `valid_lens` elements of X's last axis; all other elements become 0.

    A row in which a NaN counts is NaN throughout, as in d2l; a NaN that does not count has no influence.

    Examples
    --------
    >>> import torch, mha_c.torch
    >>> mha_c.torch.masked_softmax(torch.zeros(1, 1, 4), torch.tensor([2]))
    tensor([[[0.5000, 0.5000, 0.0000, 0.0000]]])
    """
    scalars.empty_rows(empty_rows)
    check_inputs(X=X)
    least = torch.finfo(X.dtype).min
    scores = X.clamp(min=least)  # a row of -inf throughout would have a gradient of NaN; of equal scores it is uniform
    if valid_lens is not None:
        if X.dim() != 3:
            raise ShapeError(f"X must have shape (B, Q, K) with valid_lens, got {tuple(X.shape)}")
        lens = checked_lengths(valid_lens, X, X.shape[2]).to(X.device)
        lens = lens[:, None] if lens.dim() == 1 else lens
        scores = scores.masked_fill(torch.arange(X.shape[2], device=X.device) >= lens[..., None], least)
    weights = nn.functional.softmax(scores, dim=-1)
    return weights if empty_rows == "uniform" else weights.masked_fill((scores == least).all(-1, keepdim=True), 0)


def empty_rows_of(masked_softmax: Any) -> str:
    """What the book's function gives a row without keys, "uniform" or "zero": the third generation differs here."""
    if masked_softmax is None:
        return "uniform"
    scores, none = torch.zeros(1, 1, 2, device="cpu"), torch.zeros(1, dtype=torch.int64, device="cpu")
    weights: Tensor = masked_softmax(scores, none)
    return "uniform" if weights.any() else "zero"


@twin(of_numpy.sequence_mask)
@refuses_at_the_call
def sequence_mask(X: Tensor, valid_len: Any, value: Any = 0) -> Tensor:
    """Return a copy of X in which the steps (axis 1) from `valid_len` on have the given `value`.

    Examples
    --------
    >>> import torch, mha_c.torch
    >>> mha_c.torch.sequence_mask(torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([1, 2]))
    tensor([[1, 0, 0],
            [4, 5, 0]])
    """
    check_tensors(X=X)
    if X.dim() < 2:
        raise ShapeError(f"X must have shape (B, T) or (B, T, ...), got {tuple(X.shape)}")
    lens = lengths_of_shape(valid_len, "valid_len", (X.shape[0],)).to(X.device)
    if not isinstance(value, Tensor):
        number = X.is_floating_point() or X.is_complex()
        limits = torch.finfo(X.dtype) if number else None if X.dtype is torch.bool else torch.iinfo(X.dtype)
        value = scalars.element(value, X.dtype, limits)
    drop = torch.arange(X.shape[1], device=X.device) >= lens[:, None]
    return X.masked_fill(drop.reshape(*drop.shape, *[1] * (X.dim() - 2)), value)


@twin(of_numpy.transpose_qkv)
@refuses_at_the_call
def transpose_qkv(X: Tensor, num_heads: int) -> Tensor:
    """Split the features of (B, T, H*d) into H heads: (B*H, T, d), where row b*H + h is head h of item b.

    Examples
    --------
    >>> import torch, mha_c.torch
    >>> mha_c.torch.transpose_qkv(torch.zeros(2, 4, 100), num_heads=5).shape
    torch.Size([10, 4, 20])
    """
    check_tensors(X=X)
    of_numpy.check_heads(X.shape, 2, num_heads)
    return unflatten(X, 2, (num_heads, -1)).transpose(1, 2).flatten(0, 1)


@twin(of_numpy.transpose_output)
@refuses_at_the_call
def transpose_output(X: Tensor, num_heads: int) -> Tensor:
    """The reverse of `transpose_qkv`: (B*H, T, d) becomes (B, T, H*d).

    Examples
    --------
    >>> import torch, mha_c.torch
    >>> mha_c.torch.transpose_output(torch.zeros(10, 4, 20), num_heads=5).shape
    torch.Size([2, 4, 100])
    """
    check_tensors(X=X)
    of_numpy.check_heads(X.shape, 0, num_heads)
    return unflatten(X, 0, (-1, num_heads)).transpose(1, 2).flatten(2)
