"""What a decoder keeps between its steps: projected keys and values, of its own steps or of an encoder.

A `KeyValueCache` grows by the new steps of each call (`layer(x, x, x, cache=cache)`).  `ProjectedKeyValues` do not
change (`layer(queries, kv)`); `ProjectedKeyValues` may hold keys only, and then the call gives the values.
mha_c.torch has its own classes for tensors, with the same rules.
"""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any, Optional, TypeVar

import numpy as np

from .._arguments import scalars
from .._arguments.arrays import to_array, to_lengths
from .._arguments.calls import refuses_at_the_call
from .._core import linear
from .._layer.kept_weights import Placed
from ..errors import ShapeError
from .span import Span

if TYPE_CHECKING:
    from .._types import Array, Counts
    from ..linear import State

    Kept = TypeVar("Kept", bound="ProjectedKeyValues")

    Weights = tuple[Optional[Array], ...]  # W_k.weight, W_k.bias, W_v.weight, W_v.bias


LINE = 64  # bytes of a cache line


def same_weights(kept: Any, now: Any) -> bool:
    """Whether two tuples hold the same arrays: a layer's are replaced, never changed; those of a copy are equal."""
    return len(kept) == len(now) and all(
        a is b or (a is not None and b is not None and np.array_equal(a, b)) for a, b in zip(kept, now)
    )


class KeyValueCache:
    """The projected keys and values of all steps so far, for one layer; made by `layer.new_cache(batch, max_len)`.

    A cache belongs to the W_k and W_v that filled it: a call with other weights is an error.  It can be copied and
    pickled.

    Parameters
    ----------
    batch : int
        How many items.
    max_len : int or None
        How many steps an item may have; None, with a window only: any number.
    window : int, optional
        Each step sees the last `window` steps, itself included, and the first `sinks`.  There is room for so many
        steps, and a new one takes the place of the oldest.  None: each step sees all steps before it.
    sinks : int
        How many of the first steps every later step sees.

    Examples
    --------
    >>> import numpy as np, mha_c
    >>> attention = mha_c.DotProductAttention(dropout=0.1)
    >>> cache, x = attention.new_cache(batch=2, max_len=8), np.ones((2, 3, 4))
    >>> _ = attention(x, x, x, cache=cache)
    >>> cache.reorder([1, 1, 0])
    >>> cache
    KeyValueCache(batch=3, max_len=8, lengths=[3, 3, 3])
    """

    __slots__ = ("_batch", "_keys", "_max_len", "_span", "_steps", "_values", "_weights")
    _same: Any = staticmethod(same_weights)

    @refuses_at_the_call
    def __init__(
        self, batch: int, max_len: Optional[int], *, window: Optional[int] = None, sinks: int = 0
    ) -> None:  # fmt: skip
        self._span = Span.of(max_len, window, sinks)
        self._max_len = max_len if max_len is None else scalars.whole(max_len, "max_len")
        self._batch = scalars.whole(batch, "batch")
        scalars.check_size("a cache", self._batch, self._span.rows)
        self._steps: Counts = 0  # that each item has: a number where all have as many
        self._keys: Optional[Array] = None  # (B, rows, features), from the first call on
        self._values: Optional[Array] = None
        self._weights: Optional[Weights] = None

    @property
    def batch(self) -> int:
        """How many items."""
        return self._batch

    @property
    def max_len(self) -> Optional[int]:
        """How many steps an item may have; None: any number."""
        return self._max_len

    @property
    def window(self) -> Optional[int]:
        """How many of the last steps each step sees, itself included; None: all."""
        return self._span.window

    @property
    def sinks(self) -> int:
        """How many of the first steps every step sees beside its window."""
        return self._span.sinks

    @property
    def lengths(self) -> Array:
        """How many steps each item has had: a new array (B,) of int64."""
        return self._full(self._steps)

    @property
    def nbytes(self) -> int:
        """Bytes of memory for keys and values, used or free; 0 before the first call."""
        return sum(array.nbytes for array in (self._keys, self._values) if array is not None)

    def clear(self) -> None:
        """Forget all steps, but keep the memory."""
        self._steps, self._weights = 0, None

    @refuses_at_the_call
    def reorder(self, index: Any) -> None:
        """Replace each item i by what item index[i] was, for beam search.

        Parameters
        ----------
        index : array_like of int
            Its length is the new batch size, which may be smaller or larger than before.
        """
        self._reorder(index)

    def _reorder(self, index: Any) -> None:
        order = checked_index(index, self.batch)
        longest = self._rows(self._steps)
        if self._keys is not None and self._values is not None:
            self._keys, self._values = (_reordered(x, order, longest) for x in (self._keys, self._values))
        self._batch = len(order)
        self._steps = self._steps if isinstance(self._steps, int) else one_count(self._steps[order])

    def __copy__(self) -> KeyValueCache:
        """A deep copy: the two caches will get different steps."""
        return copy.deepcopy(self)

    def __repr__(self) -> str:
        window = f", window={self.window}, sinks={self.sinks}" if self.window is not None else ""
        return f"KeyValueCache(batch={self.batch}, max_len={self._max_len}{window}, lengths={self.lengths.tolist()})"

    def _check(self, weights: Any, counts: Counts) -> Counts:
        """How many steps each item will have after `counts` more.  ValueError if there is no room, or if the
        cache was filled by other weights than these, the layer's W_k and W_v."""
        after = self._steps + counts
        if self._max_len is not None and most(after) > self._max_len:
            full, lengths = self._full(after), self._full(self._steps)
            item = int(full.argmax())
            raise ValueError(
                f"the cache is full: it has room for {self._max_len} steps (max_len), item {item} has {lengths[item]}, "
                f"and {full[item] - lengths[item]} more came: call new_cache with a larger max_len"
            )
        if not (self._weights is None or self._weights is weights or self._same(self._weights, weights)):
            raise ValueError("the cache was filled by another W_k or W_v than the layer has now: call cache.clear()")
        return after

    def _room(self, features: tuple[int, int], dtype: Any) -> tuple[Array, Array]:
        """Memory (B, rows, .) for projected keys and for values.  The core writes the rows of new steps; they count
        only after `_keep`."""
        if self._keys is None or self._values is None or self._weights is None:
            room = self._batch, self._span.rows
            self._keys = _kept_or_new(self._keys, (*room, features[0]), dtype)
            self._values = _kept_or_new(self._values, (*room, features[1]), dtype)
        if self._keys.dtype != dtype:
            raise TypeError(f"the cache holds {self._keys.dtype}, but the new steps are {dtype}")
        return self._keys, self._values

    def _places(self, after: Counts, counts: Counts) -> tuple[Counts, Counts, int]:
        """For a step of the core: the row of each item's first new step, how many new steps get a row, and how many
        rows the longest item has then."""
        if not self._span.rolls:
            return self._steps, counts, most(after)
        return self._span.place(self._steps), self._span.taken(self._steps, counts), self._rows(after)

    def _rows(self, after: Counts) -> int:
        """How many rows the longest item takes, once each has `after` steps."""
        return min(most(after), self._span.rows)

    def _n_keys(self, after: Counts, n_steps: int) -> int:
        """How many keys a call with n new steps attends to; each has `after` steps then."""
        several = self._span.rolls and n_steps > 1  # by parts: some of the rows are those of steps that must leave
        return self._rows(self._steps) + n_steps if several else self._rows(after)

    def _placed(self, kept: Any, after: Counts) -> Any:
        """What a call has kept for its attention weights, with the steps of its keys, whose rows are used again."""
        return Placed(((kept, self._span.steps_of_rows(after)[:, : self._rows(after)]),), most(after))

    def _keep(self, weights: Any, after: Counts) -> None:
        """Count the rows that the core has written; `weights` projected them, and `_check` returned `after`."""
        self._weights, self._steps = weights, after if isinstance(after, int) else one_count(after)

    def _visible_keys(self, after: Counts, n_steps: int) -> Optional[Array]:
        """How many keys each of n_steps new queries sees, (B,) or (B, n): its own step and all before it, but at most
        `after`, which `_check` returned.  None where every query sees all keys."""
        if n_steps == 1:
            there = after if isinstance(after, int) else one_count(np.minimum(after, self._span.rows))
            return None if isinstance(there, int) else there
        seen = self._full(self._steps)[:, None] + np.arange(1, n_steps + 1)
        return np.minimum(seen, self._full(after)[:, None])

    def _full(self, counts: Counts) -> Array:
        """One count for each item, in a new array."""
        return np.full(self._batch, counts, np.int64)


class ProjectedKeyValues:
    """Keys and values that W_k and W_v of one layer have projected, or keys only; made by `layer.project`.

    `AdditiveAttention.project_keys` makes one of keys only.  Not meant to be constructed directly.

    Examples
    --------
    >>> import numpy as np, mha_c
    >>> attention = mha_c.AdditiveAttention(num_hiddens=8, dropout=0.1)
    >>> keys = attention.project_keys(np.ones((2, 10, 16)))
    >>> keys.shape, keys.reorder([1]).shape
    ((2, 10, 8), (1, 10, 8))
    """

    __slots__ = ("_as_tensor", "_keys", "_valid_lens", "_values", "_weights")
    _same: Any = staticmethod(same_weights)

    def __init__(self, keys: Array, values: Optional[Array], valid_lens: Any, weights: Any, as_tensor: bool) -> None:
        self._keys, self._values = keys, values
        self._valid_lens, self._weights, self._as_tensor = valid_lens, weights, as_tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes (B, K, features of the projected keys)."""
        return tuple(self._keys.shape)

    @refuses_at_the_call
    def reorder(self: Kept, index: Any) -> Kept:
        """Copy the items index[0], index[1], ... into a new object, for beam search.

        Parameters
        ----------
        index : array_like of int
            Its length is the new batch size, which may be smaller or larger than before.

        Returns
        -------
        ProjectedKeyValues
            The new object.
        """
        return self._of(checked_index(index, self._keys.shape[0]))

    def _of(self: Kept, order: Any) -> Kept:
        keys, values, lens = (x if x is None else x[order] for x in (self._keys, self._values, self._valid_lens))
        return type(self)(keys, values, lens, self._weights, self._as_tensor)  # type: ignore[arg-type]

    @property
    def _projections(self) -> tuple[str, ...]:
        return ("W_k",) if self._values is None else ("W_k", "W_v")

    def __repr__(self) -> str:
        values = ", keys only" if self._values is None else ""
        return f"ProjectedKeyValues(shape={self.shape}, dtype={self._keys.dtype}{values})"

    def __array__(self, *options: Any, **named: Any) -> Array:
        raise TypeError("projected keys are not an array: give them to the layer that projected them, in place of keys")

    def _check(self, weights: Any) -> None:
        """ValueError if these, the layer's W_k and W_v, are not those that projected the keys and values."""
        what, made_by = ("keys", "project_keys") if self._values is None else ("keys and values", "project")
        if not (self._weights is weights or self._same(self._weights, weights)):
            by = " or ".join(self._projections)
            raise ValueError(f"{what} were projected by another {by} than the layer has now: call {made_by} again")


def project_rows(array: Array, state: Optional[State], dtype: Any) -> Array:
    """Project array (B, K, .); without a projection a copy."""
    return np.array(array, order="C") if state is None else linear(array, state.packed(dtype))


def weights_of(*states: Optional[State]) -> Weights:
    return tuple(array for state in states if state is not None for array in (state.weight, state.bias))


def lengths_of(valid_lens: Any, batch: int) -> Optional[Array]:
    """A copy of the lengths (B,) or (B, Q), for later calls."""
    lens = None if valid_lens is None else np.array(to_lengths(valid_lens))
    if lens is not None and (lens.ndim not in (1, 2) or lens.shape[0] != batch):
        raise ShapeError(f"valid_lens must have shape (B,) or (B, Q) with B = {batch}, got {lens.shape}")
    return lens


def step_counts(valid_lens: Any, batch: int, n_steps: int) -> Counts:
    """How many of the n new steps of each item count: n, or (B,) int64."""
    if valid_lens is None:
        return n_steps
    lens = to_lengths(valid_lens)
    if lens.shape != (batch,):
        raise ShapeError(
            f"with a cache valid_lens says how many of the {n_steps} new steps of each item count: its shape must be "
            f"(B,) = ({batch},), got {lens.shape}"
        )
    return np.clip(lens, 0, n_steps)


def most(counts: Counts) -> int:
    return counts if isinstance(counts, int) else int(counts.max())


def one_count(counts: Array) -> Counts:
    """One number where all counts are equal, else the array."""
    return int(counts[0]) if (counts == counts[0]).all() else counts


def check_not_projected(keys: Any) -> None:
    """TypeError for keys that `project` made, in a call with a cache."""
    if isinstance(keys, ProjectedKeyValues):
        raise TypeError(
            "a cache keeps the keys and values of a decoder's own steps, and `project` gave those of an encoder: call "
            "layer(queries, kv) without cache="
        )


def by_name(queries: Any, keys: Any, values: Any) -> dict[str, Any]:
    """New steps by their names; one object that is all three goes by the first, so that it is checked once."""
    return {"queries": queries} if queries is keys is values else {"queries": queries, "keys": keys, "values": values}


def check_steps(batch: int, steps: dict[str, Any]) -> None:
    """ShapeError unless queries, keys and values are of the same new steps, and the cache has this batch size."""
    n_steps = None
    for name, x in steps.items():
        shape = x.shape
        if len(shape) != 3:
            raise ShapeError(f"{name} must have shape (B, n, features), got {shape}")
        if shape[0] != batch:
            raise ShapeError(f"{name} has a batch of {shape[0]}, but the cache one of {batch}: {name} {shape}")
        if n_steps is None:  # of queries, the first
            n_steps = shape[1]
        elif shape[1] != n_steps:
            raise ShapeError(
                f"with a cache queries, keys and values belong to the same new steps: {name} {shape}, queries "
                f"{steps['queries'].shape}"
            )


def checked_index(index: Any, batch: int) -> Array:
    order = np.asarray(to_array(index, "index"))
    if order.dtype.kind not in "iu":
        raise TypeError(f"index must hold whole numbers, got {order.dtype}")
    if order.ndim != 1 or order.size == 0:
        raise ShapeError(f"index must have shape (n,) with n above 0, got {order.shape}")
    if order.min() < 0 or order.max() >= batch:
        raise ValueError(f"index must lie in 0..{batch - 1}, a place in the batch, got {order.tolist()}")
    return order.astype(np.int64)


def _kept_or_new(old: Optional[Array], shape: tuple[int, ...], dtype: Any) -> Array:
    return old if old is not None and old.shape == shape and old.dtype == dtype else _zeros(shape, np.dtype(dtype))


def _zeros(shape: tuple[int, ...], dtype: Any) -> Array:
    """Zeros that begin on a cache line: a head of 64 features is then 4 lines in each row, not 5."""
    n_bytes = math.prod(shape) * dtype.itemsize
    memory = np.zeros(n_bytes + LINE, np.uint8)
    first = -memory.ctypes.data % LINE
    return memory[first : first + n_bytes].view(dtype).reshape(shape)


def _reordered(array: Array, order: Array, n_rows: int) -> Array:
    rows = array[order, :n_rows]
    found = array if len(order) == len(array) else _zeros((len(order), *array.shape[1:]), array.dtype)
    found[:, :n_rows] = rows
    return found
