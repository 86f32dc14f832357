"""Positions of tokens: the book's PositionalEncoding, rotary positions, and the tables of two relative biases.

`PositionalEncoding` adds sines and cosines to the inputs of a model, `rotary` rotates queries and keys, and
`alibi_slopes` and `t5_buckets` give biases of the scores.  Everything is computed in NumPy; tensors give tensors.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Optional, overload

import numpy as np

from ._arguments import scalars
from ._arguments.arrays import (
    MOST,
    check_features,
    floats,
    gradient_like,
    is_tensor,
    like_input,
    to_array,
    to_arrays,
    to_int64,
)
from ._arguments.calls import refuses_at_the_call
from ._layer.module import Dropout, Trained
from .errors import ShapeError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ._types import Array, Real, RngLike

__all__ = ["PositionalEncoding", "alibi_slopes", "rotary", "rotary_backward", "t5_buckets"]
__dir__ = __all__.copy  # what dir() and completion show


class PositionalEncoding(Trained):
    """Add sines and cosines of each step's position to X, then dropout, so that a model can tell the steps apart.

    >>> import numpy as np, mha_c
    >>> encoding = mha_c.PositionalEncoding(num_hiddens=4, dropout=0)
    >>> encoding(np.zeros((1, 3, 4))).round(3)[0]
    array([[ 0.   ,  1.   ,  0.   ,  1.   ],
           [ 0.841,  0.54 ,  0.01 ,  1.   ],
           [ 0.909, -0.416,  0.02 ,  1.   ]])

    Call: encoding(X, *, start=0, training=None)

    X  (B, T, num_hiddens), float32 or float64, as the result
    start  position of the first step, one or one an item (B,), such as a cache's lengths; start + T is at most max_len
    training  overrides the mode: in training elements are dropped, and then `backward` gives the gradient of X

    Parameters
    ----------
    num_hiddens : int
        Features of X, an even number.
    dropout : float
        Probability, from 0 to 1, with which an element of the sum is dropped, in training mode only.
    max_len : int
        How many positions there are.
    rng : None, int or numpy.random.Generator
        Random numbers for dropout.

    Attributes
    ----------
    P : ndarray (1, max_len, num_hiddens), float64
        P[0, i, 2j] = sin(i / 10000**(2j / num_hiddens)); P[0, i, 2j + 1] is the cosine of the same angle.
    num_hiddens : int
        Features of X.
    dropout : Dropout
        The layer's dropout: its probability `p` can be read and assigned.

    Raises
    ------
    ShapeError
        If X has the wrong shape.
    TypeError
        If X has the wrong type.
    ValueError
        If num_hiddens is odd, or if a step is beyond max_len.

    Notes
    -----
    Unlike d2l's: computed in float64 (d2l's float32 angles are off by up to 3e-5 at position 999), starts in eval mode,
    and has `start`: without it a model that decodes step by step would give every token position 0.
    Source: d2l 11.6.3; Vaswani et al. 2017, section 3.5.
    """

    # The shape of the last training call and its factors: 0 for dropped numbers, else 1/(1 - p); or one for all.
    _record: Optional[tuple[tuple[int, ...], Array]] = None

    @refuses_at_the_call
    def __init__(self, num_hiddens: int, dropout: float, max_len: int = 1000, *, rng: RngLike = None) -> None:
        self.num_hiddens = scalars.whole(num_hiddens, "num_hiddens", least=2)
        if num_hiddens % 2:
            raise ValueError(f"num_hiddens must be even, a sine and a cosine for each frequency, got {num_hiddens}")
        self.dropout = Dropout(dropout)
        shape = scalars.whole(max_len, "max_len"), self.num_hiddens
        scalars.check_size("P", 1, *shape)
        self.P = sinusoids(*shape)[None]
        self._rng = scalars.generator(rng)

    @overload
    def __call__(self, X: NDArray[Real], *, start: Any = 0, training: Optional[bool] = None) -> NDArray[Real]: ...
    @overload
    def __call__(self, X: Any, *, start: Any = 0, training: Optional[bool] = None) -> Any: ...
    @refuses_at_the_call
    def __call__(self, X: Any, *, start: Any = 0, training: Optional[bool] = None) -> Any:
        """Add the positions of the steps to X, then dropout; the help of the class lists what a call takes."""
        (array,), as_tensor = to_arrays((X, "X"))
        check_features(floats(array, "X"), "X", self.num_hiddens)
        out = array + self.P[0, steps(start, array.shape[0], array.shape[1], self.P.shape[1])].astype(array.dtype)
        if self.training if training is None else scalars.flag(training, "training"):
            p = self.dropout.p
            factors = (self._rng.random(array.shape) >= p) / (1 - p) if 0 < p < 1 else 1 - p
            self._record = array.shape, np.asarray(factors, array.dtype)
            out *= self._record[1]
        return like_input(out, as_tensor)

    @overload
    def backward(self, grad_output: NDArray[Real]) -> NDArray[Real]: ...
    @overload
    def backward(self, grad_output: Any) -> Any: ...
    @refuses_at_the_call
    def backward(self, grad_output: Any) -> Any:
        """The gradient with respect to X, from the gradient with respect to the result of the last training call.

        Parameters
        ----------
        grad_output : array of the result's shape and type
            The gradient of a loss with respect to the result.

        Returns
        -------
        array of the same shape
            The gradient with respect to X.
        """
        if self._record is None:
            raise RuntimeError("PositionalEncoding.backward: call backward once after each call in training mode")
        shape, factors = self._record
        grad = gradient_like(shape, factors.dtype, grad_output)
        self._record = None
        return like_input(grad * factors, is_tensor(grad_output))

    def __repr__(self) -> str:
        return f"PositionalEncoding(\n  (dropout): {self.dropout!r}\n)"


def sinusoids(max_len: int, num_hiddens: int) -> Array:
    """(max_len, num_hiddens): the table P of the book, in float64."""
    angles = np.arange(max_len)[:, None] / 10000 ** (np.arange(0, num_hiddens, 2) / num_hiddens)
    return np.stack([np.sin(angles), np.cos(angles)], axis=2).reshape(max_len, num_hiddens)


def steps(start: Any, batch: int, n_steps: int, max_len: int) -> Array:
    """The positions (1, T) or (B, T) of T steps from `start` on, all below max_len."""
    first = np.asarray(to_array(start, "start") if not isinstance(start, int) else start)
    if first.dtype.kind not in "iu":
        raise TypeError(f"start must be a whole number, or (B,) of them, got {first.dtype}")
    if first.shape not in ((), (batch,)):
        raise ShapeError(f"start must be one number or have shape (B,) = ({batch},), got {first.shape}")
    if first.size and (first.min() < 0 or int(first.max()) + n_steps > max_len):
        raise ValueError(
            f"positions must lie in 0..{max_len - 1}, got {n_steps} steps from {start}: raise max_len (now {max_len})"
        )
    return first.reshape(-1, 1).astype(np.int64) + np.arange(n_steps)


# --- Rotary positions ---------------------------------------------------------------------------------


@overload
def rotary(x: NDArray[Real], positions: Any, base: float = 10000.0, interleaved: bool = False) -> NDArray[Real]: ...
@overload
def rotary(x: Any, positions: Any, base: float = 10000.0, interleaved: bool = False) -> Any: ...
@refuses_at_the_call
def rotary(x: Any, positions: Any, base: float = 10000.0, interleaved: bool = False) -> Any:
    """Rotate queries or keys by their positions, so that a dot product of two depends on their distance only.

    >>> import numpy as np
    >>> from mha_c import functional
    >>> q, k = np.ones((2, 1, 1, 4))
    >>> def score(i, j):
    ...     return (functional.rotary(q, [i]) * functional.rotary(k, [j])).sum().round(6)
    >>> bool(score(3, 1) == score(12, 10))
    True

    Parameters
    ----------
    x : array_like (B, [H,] T, D), float32 or float64
        Queries or keys; D is even.
    positions : array_like (T,) or (B, T)
        Integers or floats; negative positions rotate backwards.
    base : float
        Pair i is rotated by the angle position * base**(-2i / D).
    interleaved : bool
        False: features i and i + D/2 are a pair (halves: GPT-NeoX, Llama); True: features 2i and 2i + 1 are a pair
        (neighbours: the paper, GPT-J).

    Returns
    -------
    array of x's shape and type
        The rotated queries or keys; angles are float64, whatever the type of x.

    Raises
    ------
    ShapeError
        If x or positions has the wrong shape.
    TypeError
        If x or positions has the wrong type.
    ValueError
        If base is not above 0 or a position is not finite.

    Notes
    -----
    Source: Su et al. 2021, RoFormer; ONNX RotaryEmbedding has the same meaning of `interleaved`.
    """
    return _turned(x, "x", positions, base, interleaved, 1)


@overload
def rotary_backward(
    grad_out: NDArray[Real], positions: Any, base: float = 10000.0, interleaved: bool = False
) -> NDArray[Real]: ...
@overload
def rotary_backward(grad_out: Any, positions: Any, base: float = 10000.0, interleaved: bool = False) -> Any: ...
@refuses_at_the_call
def rotary_backward(grad_out: Any, positions: Any, base: float = 10000.0, interleaved: bool = False) -> Any:
    """The gradient with respect to x of `rotary(x, positions, base, interleaved)`: the same rotation backwards.

    >>> import numpy as np
    >>> from mha_c import functional
    >>> x = np.ones((1, 2, 4))
    >>> np.allclose(functional.rotary_backward(functional.rotary(x, [5, 6]), [5, 6]), x)
    True

    Parameters
    ----------
    grad_out : array of x's shape and type
        The gradient of a loss with respect to the result of `rotary`.
    positions, base, interleaved : as in the call of `rotary`
        `rotary` also lists the errors.

    Returns
    -------
    array of the same shape and type
        The gradient with respect to x.
    """
    return _turned(grad_out, "grad_out", positions, base, interleaved, -1)


def rotary_angles(x: Any, name: str, positions: Any, base: Any) -> Array:
    """The angles for an array or tensor x, float64, in the shape (1 or B, [1,] T, D/2)."""
    shape: tuple[int, ...] = tuple(x.shape)
    if len(shape) not in (3, 4) or shape[-1] % 2 or not shape[-1]:
        raise ShapeError(f"{name} must have shape (B, [H,] T, D) with an even D above 0, got {shape}")
    batch, n_steps = shape[0], shape[-2]
    at = np.asarray(to_array(list(positions) if isinstance(positions, range) else positions, "positions"))
    if at.dtype.kind not in "iuf":
        raise TypeError(f"positions must hold integers or floats, got {at.dtype}")
    if at.shape not in ((n_steps,), (batch, n_steps)):
        raise ShapeError(
            f"positions must have shape (T,) = ({n_steps},) or (B, T) = ({batch}, {n_steps}), got {at.shape}"
        )
    if not np.isfinite(at).all():
        raise ValueError("positions must be finite, not NaN or infinite")
    angles = angles_at(np.atleast_2d(at), shape[-1], scalars.positive(base, "base"))
    return angles[:, None] if len(shape) == 4 else angles


def angles_at(positions: Array, features: int, base: float = 10000.0) -> Array:
    """The angles (..., D/2), float64, of positions (...)."""
    return positions.astype(np.float64)[..., None] * base ** (-np.arange(0, features, 2) / features)


def _turned(given: Any, name: str, positions: Any, base: Any, interleaved: Any, sign: int) -> Any:
    """`given`, rotated by the angles of `rotary`; with sign -1 rotated backwards."""
    (x,), as_tensor = to_arrays((given, name))
    angles = sign * rotary_angles(floats(x, name), name, positions, base)
    cos, sin = np.cos(angles).astype(x.dtype), np.sin(angles).astype(x.dtype)
    neighbours = scalars.flag(interleaved, "interleaved")
    if neighbours:
        return like_input(turned_pairs(x, cos, sin), as_tensor)
    first, second = np.split(x, 2, axis=-1)
    return like_input(np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1), as_tensor)


def turned_pairs(x: Array, cos: Array, sin: Array) -> Array:
    """x (..., D), whose features 2i and 2i + 1 are turned by the angle with cosine i and sine i of (..., D/2)."""
    first, second = x[..., 0::2], x[..., 1::2]
    return np.stack((first * cos - second * sin, second * cos + first * sin), axis=-1).reshape(x.shape)


def turn_of_steps(first: Any, n_steps: int, features: int, dtype: Any) -> tuple[Array, Array]:
    """(cosines, sines) of the angles of n steps from `first` on: (n, D/2), or (B, n, D/2) if each item has its own."""
    if isinstance(first, int):
        return _turn_of_all(first, n_steps, features, np.dtype(dtype))
    angles = angles_at(first[:, None] + np.arange(n_steps), features)
    return np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)


@lru_cache(maxsize=4)  # all layers of a model ask for the same at each step
def _turn_of_all(first: int, n_steps: int, features: int, dtype: Any) -> tuple[Array, Array]:
    angles = angles_at(np.arange(first, first + n_steps), features)
    return np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)


# --- Relative biases ----------------------------------------------------------------------------------


@refuses_at_the_call
def alibi_slopes(num_heads: int) -> Array:
    """The slopes (H,) of ALiBi: head h adds -slope[h] * |j - i| to the score of query i and key j.

    >>> from mha_c import functional
    >>> functional.alibi_slopes(4)
    array([0.25      , 0.0625    , 0.015625  , 0.00390625])

    If H is a power of 2, the slopes are 2**(-8/H), 2**(-16/H), ..., 2**-8.  Otherwise they are all slopes of the next
    smaller power, followed by every second slope of the next larger power.

    Parameters
    ----------
    num_heads : int
        H, at least 1.

    Returns
    -------
    ndarray (H,), float64
        For `relative_bias` (H, 2R + 1) use -slopes[:, None] * abs(arange(-R, R + 1)).

    Raises
    ------
    TypeError
        If num_heads is not a whole number.
    ValueError
        If num_heads is below 1.

    Notes
    -----
    Source: Press, Smith and Lewis 2021, "Train short, test long", and the slopes of its published code.
    """
    heads = scalars.whole(num_heads, "num_heads")
    power = 2 ** (heads.bit_length() - 1)
    slopes = 2.0 ** (-8.0 / power * np.arange(1, power + 1))
    further = 2.0 ** (-4.0 / power * np.arange(1, 2 * (heads - power), 2))
    return np.concatenate([slopes, further])


@refuses_at_the_call
def t5_buckets(distances: Any, num_buckets: int = 32, max_distance: int = 128, bidirectional: bool = True) -> Array:
    """T5's bucket of each distance j - i of a key j from a query i.

    >>> from mha_c import functional
    >>> functional.t5_buckets([-200, -20, -3, 0, 3, 20, 200])
    array([15, 10,  3,  0, 19, 26, 31])

    Each small distance has its own bucket.  Larger distances share buckets, in logarithmic steps up to max_distance;
    all distances from max_distance on share the last bucket.

    Parameters
    ----------
    distances : array_like of whole numbers
        May have any shape.
    num_buckets : int
        How many buckets there are.
    max_distance : int
        All distances from this one on share the last bucket.
    bidirectional : bool
        True: one half of the buckets for earlier keys, one for later keys; False: later keys share bucket 0.

    Returns
    -------
    ndarray of the same shape, int64
        Numbers in 0..num_buckets - 1.  With T5's learned table E (num_buckets, H), `relative_bias` (H, 2R + 1) is
        E[t5_buckets(arange(-R, R + 1))].T, which is exact for any length if R >= max_distance.

    Raises
    ------
    TypeError
        If distances, num_buckets or max_distance are not whole numbers.
    ValueError
        If num_buckets or max_distance is too small, or if num_buckets is odd and bidirectional is True.

    Notes
    -----
    Source: Raffel et al. 2020, T5, section 2.1, and its published code.
    """
    at = np.asarray(to_array(distances, "distances"))
    if at.dtype.kind not in "iu":
        raise TypeError(f"distances must hold integers, got {at.dtype}")
    two_sided = scalars.flag(bidirectional, "bidirectional")
    n_buckets = scalars.whole(num_buckets, "num_buckets", least=4 if two_sided else 2)
    if two_sided and n_buckets % 2:
        raise ValueError(f"num_buckets must be even if bidirectional, half for each side, got {num_buckets}")
    n_buckets //= 2 if two_sided else 1
    n_near = n_buckets // 2
    if scalars.whole(max_distance, "max_distance") <= n_near:
        raise ValueError(f"max_distance must be above {n_near}, the distances with a bucket of their own")
    at = np.maximum(to_int64(at), -MOST)  # the smallest int64 has no abs
    away = np.abs(at) if two_sided else np.maximum(-at, 0)
    # T5 computes logarithms in float32, and at a border the rounding decides the bucket: so float32 here as well.
    ratio = np.log(np.maximum(away, 1).astype(np.float32) / n_near) / np.float32(np.log(max_distance / n_near))
    far = n_near + (ratio * (n_buckets - n_near)).astype(np.int64)
    bucket = np.where(away < n_near, away, np.minimum(far, n_buckets - 1))
    return bucket + (n_buckets * (at > 0) if two_sided else 0)
