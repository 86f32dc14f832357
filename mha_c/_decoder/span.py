"""Which steps a cache keeps, and in which rows of its memory: all of them, or the first ones and a window of the last.

With a window a row is used again: step i lies in row i if it is among the `sinks`, else in row
sinks + (i - sinks) % window.  Attention does not ask for the order of its keys, so that one new step needs nothing
else: it takes the row of the step that leaves its window, and sees all rows.  Of several new steps each sees other
rows, some of which the last of them replace: `sees` says which.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Optional

import numpy as np

from .._arguments import scalars

if TYPE_CHECKING:
    from .._types import Array, Counts


class Span(NamedTuple):
    """The rows of a cache."""

    rows: int  # there is room for
    window: Optional[int]  # the last steps, which a step sees; None: all
    sinks: int  # the first steps, which every step sees
    rolls: bool  # rows are used again

    @classmethod
    def of(cls, max_len: Any, window: Any, sinks: Any) -> Span:
        most = None if max_len is None else scalars.whole(max_len, "max_len")
        sinks = scalars.whole(sinks, "sinks", least=0)
        if window is None:
            if sinks:
                raise ValueError(f"sinks = {sinks} needs a window: without one every step sees all steps before it")
            if most is None:
                raise ValueError("max_len=None needs a window: without one a cache has room for max_len steps")
            return cls(most, None, 0, False)
        window = scalars.whole(window, "window", least=0)
        rolls = most is None or most > sinks + window
        return cls(sinks + window if most is None or rolls else most, window, sinks, rolls)

    def place(self, steps: Any) -> Any:
        """The rows of these steps, a number or an array."""
        if not self.rolls:
            return steps
        if not self.window:
            return np.minimum(steps, self.sinks) if isinstance(steps, np.ndarray) else min(steps, self.sinks)
        later = self.sinks + (steps - self.sinks) % self.window
        return (
            np.where(steps < self.sinks, steps, later)
            if isinstance(steps, np.ndarray)
            else (steps if steps < self.sinks else later)
        )

    def taken(self, steps: Any, counts: Any) -> Any:
        """How many of `counts` new steps behind `steps` take a row: in a window of no steps, only sinks."""
        if self.window != 0 or not self.rolls:
            return counts
        few = np.clip(self.sinks - steps, 0, counts)
        return few if isinstance(few, np.ndarray) and few.ndim else int(few)

    def steps_of_rows(self, n_steps: Counts) -> Array:
        """The steps that lie in the rows after n_steps, a number or (B,): (1 or B, rows) of int64, -1 where none is."""
        row, n = np.arange(self.rows), np.reshape(n_steps, (-1, 1))
        if not self.rolls or not self.window:
            return np.where(row < n, row, -1)
        last = n - 1 - self.sinks  # this and the next count from the last sink on
        later = last - (last - (row - self.sinks)) % self.window
        first = row < self.sinks
        return np.where(np.where(first, row < n, later >= 0), np.where(first, row, self.sinks + later), -1)

    def kept(self, steps: Array, after: Counts) -> Array:
        """Whether these steps (1 or B, n) are still in the cache after so many."""
        n = np.reshape(after, (-1, 1))
        there = (steps >= 0) & (steps < n)
        return there if not self.rolls else there & ((steps < self.sinks) | (steps >= n - (self.window or 0)))

    def sees(self, queries: Array, keys: Array) -> Array:
        """Whether queries at steps (1 or B, Q) see keys at steps (1 or B, K), of which -1 is none: (1 or B, Q, K)."""
        query, key = queries[:, :, None], keys[:, None]
        near = key >= 0 if self.window is None else (key < self.sinks) | (key > query - self.window)
        return near & (key >= 0) & (key <= query)


def mask_of_steps(mask: Optional[Array], steps: Optional[Array]) -> Optional[Array]:
    """A mask of new steps and all steps, (n, steps) or (B or 1, H or 1, n, steps), with the columns of the keys at
    `steps`, (1 or B, K), -1 where there is none; None: all, in order."""
    if mask is None or steps is None or mask.shape[-1] == 1:
        return mask
    index = np.maximum(steps, 0)[:, None, None]
    mask = mask if mask.ndim == 4 else mask[None, None]
    leading = (max(len(mask), len(index)), *mask.shape[1:3])
    index = np.broadcast_to(index, (*leading, index.shape[3]))
    return np.take_along_axis(np.broadcast_to(mask, (*leading, mask.shape[3])), index, 3)
