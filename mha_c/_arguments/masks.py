"""keep_mask and bias of a call, as the core takes them: bool, and an axis for the heads where the layer has none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional

import numpy as np

from . import core_refusals
from .arrays import ragged, to_array

if TYPE_CHECKING:
    from .._types import Array, Masks


def to_keep_mask(value: Any) -> Array:
    """A keep_mask as an array of bool: True, or 1, where a query may look."""
    if isinstance(value, (list, tuple)):
        try:
            array = np.asarray(value)
        except ValueError:
            raise ragged("keep_mask") from None
    else:
        array = to_array(value, "keep_mask")
    if array.dtype.kind in "iu":
        if not ((array == 0) | (array == 1)).all():
            raise other_numbers(array.dtype)
        return array != 0
    if array.dtype.kind != "b":
        core_refusals.mask_kind(array, "keep_mask")
    return array


def other_numbers(dtype: Any) -> ValueError:
    """The error for a mask of whole numbers that are not all 0 or 1."""
    return ValueError(
        f"keep_mask has dtype {dtype} and numbers other than 0 and 1: True, or 1, says that a query may see a key; "
        f"what is added to the scores is a bias, of the inputs' type"
    )


def by_heads(mask: Any, name: str, sizes: Any, n_heads: Optional[int]) -> Any:
    """The mask, array or tensor, with rank 2 or 4; ShapeError in the shapes of the caller where it does not broadcast.

    sizes    (B, Q, K) of the call
    n_heads  None: the layer's weights have no axis for heads
    """
    batch, n_queries, n_keys = sizes
    scores = (batch, n_queries, n_keys) if n_heads is None else (batch, n_heads, n_queries, n_keys)
    error: Optional[Exception] = core_refusals.mask(mask, name, scores)
    if error is not None:
        raise error
    return mask[:, None] if mask.ndim == 3 else mask


def sizes_of(queries: Any, keys: Any) -> Any:
    """(B, Q, K) of inputs (B, rows, .); None of others, which the core refuses in its own words."""
    if queries.ndim != 3 or keys.ndim != 3 or queries.shape[0] != keys.shape[0]:
        return None
    return (*queries.shape[:2], keys.shape[1])


def of_layer(keep_mask: Any, bias: Any, sizes: Optional[tuple[int, int, int]], n_heads: Optional[int]) -> Masks:
    """keep_mask and bias of a NumPy layer's call, None where there is none; the other arguments are those of
    `by_heads`, sizes None where they are not known."""
    keep = None if keep_mask is None else to_keep_mask(keep_mask)
    added = None if bias is None else to_array(bias, "bias")
    if sizes is None:
        return keep, added
    return tuple(
        mask if mask is None else by_heads(mask, name, sizes, n_heads)
        for mask, name in ((keep, "keep_mask"), (added, "bias"))
    )  # type: ignore[return-value]
