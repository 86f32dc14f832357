"""The book's small functions around masks and heads: masked_softmax, sequence_mask, transpose_qkv, transpose_output.

No function modifies its argument, and each returns the type of its argument.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

import numpy as np

from ._arguments import scalars
from ._arguments.arrays import is_tensor, like_input, to_arrays, to_lengths
from ._arguments.calls import is_refusal, refuses_at_the_call
from ._core import masked_softmax as core_masked_softmax
from .errors import ShapeError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ._types import EmptyRows, Number, Real

__all__ = ["masked_softmax", "sequence_mask", "transpose_output", "transpose_qkv"]
__dir__ = __all__.copy  # what dir() and completion show


@overload
def masked_softmax(X: NDArray[Real], valid_lens: Any = None, *, empty_rows: EmptyRows = ...) -> NDArray[Real]: ...
@overload
def masked_softmax(X: Any, valid_lens: Any = None, *, empty_rows: EmptyRows = ...) -> Any: ...
def masked_softmax(X: Any, valid_lens: Any = None, *, empty_rows: EmptyRows = "uniform") -> Any:
    """Softmax over the first `valid_lens` elements of X's last axis; all other elements become 0.

    >>> import mha_c
    >>> mha_c.masked_softmax([[[0.0, 0.0, 9.0]], [[0.0, 0.0, 0.0]]], [2, 3]).round(3)
    array([[[0.5  , 0.5  , 0.   ]],
    <BLANKLINE>
           [[0.333, 0.333, 0.333]]])

    Parameters
    ----------
    X : array_like (B, Q, K), float32 or float64
        Scores; X may have any shape if valid_lens is None.
    valid_lens : None, or array_like (B,) or (B, Q)
        How many elements of a row count: integers, or floats, which are rounded up.
    empty_rows : {"uniform", "zero"}
        What a row becomes if its length is <= 0, or if all scores that count are -inf: 1/K in every element ("uniform",
        as in d2l for lengths <= 0) or 0 ("zero").

    Returns
    -------
    array of X's shape and type
        The weights.

    Raises
    ------
    ShapeError
        If valid_lens has the wrong shape.
    TypeError
        If X or valid_lens has the wrong type.
    ValueError
        If a length is NaN or infinite, or if `empty_rows` is neither of these.

    Notes
    -----
    Unlike d2l's, it does not change X and never reads masked elements.  Source: d2l 11.3.1.
    """
    try:
        (scores,), as_tensor = to_arrays((X, "X"))
        lens = to_lengths(valid_lens)
        shape = scores.shape
        if lens is None and scores.ndim != 3 and scores.ndim > 0:
            n_rows = int(np.prod(shape[:-1], dtype=np.int64))
            scores = scores.reshape(1, n_rows, shape[-1])
        weights = core_masked_softmax(scores, lens, empty_rows)
    except (TypeError, ValueError) as error:
        if is_refusal(error):
            raise error.with_traceback(None) from None
        raise
    return like_input(weights.reshape(shape), as_tensor)


@overload
def sequence_mask(X: NDArray[Number], valid_len: Any, value: Any = 0) -> NDArray[Number]: ...
@overload
def sequence_mask(X: Any, valid_len: Any, value: Any = 0) -> Any: ...
@refuses_at_the_call
def sequence_mask(X: Any, valid_len: Any, value: Any = 0) -> Any:
    """Return a copy of X in which the steps (axis 1) from `valid_len` on have the given `value`.

    >>> import mha_c
    >>> mha_c.sequence_mask([[1, 2, 3], [4, 5, 6]], [1, 2])
    array([[1, 0, 0],
           [4, 5, 0]])

    Parameters
    ----------
    X : array_like (B, T) or (B, T, ...), of any type
        One sequence in each row.
    valid_len : array_like (B,)
        How many steps of each sequence count: integers, or floats, which are rounded up.
    value : number
        A real number that X's type can hold.

    Returns
    -------
    array of X's shape and type
        The copy.

    Raises
    ------
    ShapeError
        If X or valid_len has the wrong shape.
    TypeError
        If a length or `value` is not a number.
    ValueError
        If X cannot hold `value` or a length is NaN or infinite.

    Notes
    -----
    Unlike d2l's function for torch, it does not change X.  Source: d2l 9.7 and 10.7 (0.17), appendix (1.0).
    """
    (array,), as_tensor = to_arrays((X, "X"))
    lens = np.asarray(to_lengths(valid_len, "valid_len"))
    if array.ndim < 2:
        raise ShapeError(f"X must have shape (B, T) or (B, T, ...), got {array.shape}")
    if valid_len is None:
        raise TypeError("valid_len must hold integers or floats, got None")
    if lens.shape != array.shape[:1]:
        raise ShapeError(f"valid_len must have shape (B,) = ({array.shape[0]},), got {lens.shape}")
    if is_tensor(value) and value.ndim == 0:
        value = value.item()
    if array.dtype.kind in "biufc":
        limits: Any = {"b": lambda _: None, "f": np.finfo, "c": np.finfo}.get(array.dtype.kind, np.iinfo)
        value = scalars.element(value, array.dtype, limits(array.dtype))
    out = array.copy()
    out[np.arange(array.shape[1]) >= lens[:, None]] = value
    return like_input(out, as_tensor)


@overload
def transpose_qkv(X: NDArray[Number], num_heads: int) -> NDArray[Number]: ...
@overload
def transpose_qkv(X: Any, num_heads: int) -> Any: ...
@refuses_at_the_call
def transpose_qkv(X: Any, num_heads: int) -> Any:
    """Split the features of (B, T, H*d) into H heads: (B*H, T, d), where row b*H + h is head h of item b.

    >>> import numpy as np, mha_c
    >>> mha_c.transpose_qkv(np.zeros((2, 4, 100)), num_heads=5).shape
    (10, 4, 20)

    Parameters
    ----------
    X : array_like (B, T, H*d)
        Projected queries, keys or values.
    num_heads : int
        H, at least 1.

    Returns
    -------
    array (B*H, T, d)
        The heads.  The layers of this package need no such copy: they read each head through strides.

    Raises
    ------
    ShapeError
        If X has the wrong rank, or if its last axis is not divisible by num_heads.
    TypeError, ValueError
        If num_heads is not a whole number >= 1.

    Notes
    -----
    Source: d2l 11.5.2.
    """
    (array,), as_tensor = to_arrays((X, "X"))
    batch, steps, features = check_heads(array.shape, 2, num_heads)
    split = array.reshape(batch, steps, num_heads, features // num_heads).transpose(0, 2, 1, 3).copy()
    return like_input(split.reshape(batch * num_heads, steps, features // num_heads), as_tensor)


@overload
def transpose_output(X: NDArray[Number], num_heads: int) -> NDArray[Number]: ...
@overload
def transpose_output(X: Any, num_heads: int) -> Any: ...
@refuses_at_the_call
def transpose_output(X: Any, num_heads: int) -> Any:
    """The reverse of `transpose_qkv`: (B*H, T, d) becomes (B, T, H*d).

    >>> import numpy as np, mha_c
    >>> mha_c.transpose_output(np.zeros((10, 4, 20)), num_heads=5).shape
    (2, 4, 100)

    Parameters
    ----------
    X : array_like (B*H, T, d)
        The heads.
    num_heads : int
        H, at least 1.

    Returns
    -------
    array (B, T, H*d)
        The features of all heads side by side.

    Raises
    ------
    ShapeError
        If X has the wrong rank, or if its first axis is not divisible by num_heads.
    TypeError, ValueError
        If num_heads is not a whole number >= 1.

    Notes
    -----
    Source: d2l 11.5.2.
    """
    (array,), as_tensor = to_arrays((X, "X"))
    rows, steps, features = check_heads(array.shape, 0, num_heads)
    joined = array.reshape(rows // num_heads, num_heads, steps, features).transpose(0, 2, 1, 3).copy()
    return like_input(joined.reshape(rows // num_heads, steps, num_heads * features), as_tensor)


class TransposesHeads:
    """Gives a MultiHeadAttention the book's methods transpose_qkv and transpose_output; its calls need neither."""

    num_heads: Any
    _masking: Any  # the module that has the two functions

    @overload
    def transpose_qkv(self, X: NDArray[Number]) -> NDArray[Number]: ...
    @overload
    def transpose_qkv(self, X: Any) -> Any: ...
    @refuses_at_the_call
    def transpose_qkv(self, X: Any) -> Any:
        """Split X into heads as d2l does: (B, T, num_hiddens) becomes (B*H, T, num_hiddens/H), row b*H + h."""
        return self._masking.transpose_qkv(X, self.num_heads)

    @overload
    def transpose_output(self, X: NDArray[Number]) -> NDArray[Number]: ...
    @overload
    def transpose_output(self, X: Any) -> Any: ...
    @refuses_at_the_call
    def transpose_output(self, X: Any) -> Any:
        """Join the heads of X (B*H, T, num_hiddens/H) again: the reverse of `transpose_qkv`."""
        return self._masking.transpose_output(X, self.num_heads)


def check_heads(shape: tuple[int, ...], axis: int, num_heads: int) -> tuple[int, ...]:
    """`shape`, checked: its last axis (axis=2) or its first axis (0) is divisible by num_heads."""
    wanted, place = ("(B, T, num_hiddens)", "last") if axis else ("(B*num_heads, T, d)", "first")
    if len(shape) != 3:
        raise ShapeError(f"X must have shape {wanted}, got {tuple(shape)}")
    if shape[axis] % scalars.whole(num_heads, "num_heads"):
        raise ShapeError(f"the {place} axis of X ({shape[axis]}) must be divisible by num_heads ({num_heads})")
    return shape
