"""keep_mask and bias of a call on tensors: the rules are those of `mha_c._arguments.masks`."""

from __future__ import annotations

from typing import Any, Optional

import numpy as np
import torch
from torch import Tensor

from ..._arguments import core_refusals
from ..._arguments.masks import by_heads, other_numbers
from ..._arguments.masks import to_keep_mask as of_arrays
from .._tensors import check_inputs, has_numbers
from .checks import Type

Masks = tuple[Optional[Tensor], Optional[Tensor]]  # keep_mask, bias


def to_keep_mask(value: Any) -> Tensor:
    """A keep_mask as a tensor of bool: True, or 1, where a query may look.

    Whole numbers are looked at, which waits for another device; without numbers (in compilers, exporters and
    transforms) they are refused.
    """
    mask = value if isinstance(value, Tensor) else torch.from_numpy(np.ascontiguousarray(of_arrays(value)))
    if mask.dtype is torch.bool:
        return mask
    if not (mask.dtype.is_floating_point or mask.dtype.is_complex) and has_numbers(mask):
        if not bool(((mask == 0) | (mask == 1)).all()):
            raise other_numbers(mask.dtype)
        return mask != 0
    core_refusals.mask_kind(Type(mask.dtype), "keep_mask")  # not the tensor, for compilers


def masks_of(keep_mask: Any, bias: Any, sizes: Any, n_heads: Optional[int]) -> Masks:
    """keep_mask and bias of a layer's call, of rank 2 or 4; sizes and n_heads as in `by_heads`."""
    if keep_mask is not None:
        keep_mask = by_heads(to_keep_mask(keep_mask), "keep_mask", sizes, n_heads)
    if bias is not None:
        check_inputs(bias=bias)
        bias = by_heads(bias, "bias", sizes, n_heads)
    return keep_mask, bias
