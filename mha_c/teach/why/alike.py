"""Whether arrays hold the same numbers in any order of axes, and masks the same places: layouts differ."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ..asking.answers import NEAR
from ..asking.comparing import HUGE


class Known:
    """Numbers that are right, in any order of axes."""

    def __init__(self, values: Iterable[Any]) -> None:
        by_size: dict[int, list[Any]] = {}
        for x in values:
            by_size.setdefault(x.size, []).append(_in_order(x))
        self._sorted = {size: np.stack(each) for size, each in by_size.items()}

    def __contains__(self, x: Any) -> bool:
        ours = self._sorted.get(x.size)
        if ours is None:
            return False
        theirs = _in_order(x)
        return bool((np.abs(ours - theirs) <= NEAR + NEAR * np.abs(theirs)).all(axis=1).any())


class KnownNumbers:
    """Single numbers, whatever arrays have them."""

    def __init__(self, values: Iterable[Any]) -> None:
        self._sorted = np.unique(np.concatenate([_in_order(x) for x in values]))

    def __contains__(self, x: Any) -> bool:
        """Whether each number of an array is one of them."""
        x = _in_order(x)
        at = np.searchsorted(self._sorted, x).clip(1, len(self._sorted) - 1)
        near = np.minimum(np.abs(self._sorted[at] - x), np.abs(self._sorted[at - 1] - x))
        return bool((near <= NEAR * (1 + np.abs(x))).all())


def _in_order(x: Any) -> Any:
    x = np.nan_to_num(np.asarray(x, dtype=np.float64), nan=7e3, posinf=HUGE, neginf=-HUGE)
    return np.sort(np.clip(x, -HUGE, HUGE), axis=None)


def is_arranged(x: Any, heads: Any) -> bool:
    """Whether an array holds (batch, heads, steps, features) in another order of axes, or some of them as one."""
    x, heads = np.clip(x, -HUGE, HUGE), np.clip(heads, -HUGE, HUGE)  # of -inf and -1e6 each hides a key
    for axes in itertools.permutations(range(heads.ndim)):
        transposed = heads.transpose(axes)
        if _merges(transposed.shape, x.shape) and np.allclose(transposed.reshape(x.shape), x, NEAR, NEAR):
            return True
    return False


def is_mask(x: Any) -> bool:
    """Whether an array says only yes and no, for several keys."""
    return x.dtype == bool or (x.size > 1 and x.ndim > 1 and bool(((x == 0) | (x == 1)).all()))


def is_numbers(x: Any) -> bool:
    return x.size > 1 and not is_mask(x)


def same_mask(x: Any, mask: Any) -> bool:
    """Whether it is this mask, or its opposite, or a table of which the mask is the corner."""
    return equal_masks(x, mask) or equal_masks(x == 0, mask)


def equal_masks(x: Any, mask: Any) -> bool:
    x, mask = _reduced(x != 0), _reduced(mask)
    if x.ndim == mask.ndim == 2 and x.shape[0] == x.shape[1] > max(mask.shape):
        x = x[: mask.shape[0], : mask.shape[1]]
    return x.shape == mask.shape and bool((x == mask).all())


def _reduced(x: Any) -> Any:
    """A mask without the axes along which it is alike."""
    for axis in reversed(range(x.ndim)):
        first = np.take(x, [0], axis) if x.shape[axis] else x
        if x.shape[axis] and (x == first).all():
            x = np.take(x, 0, axis)
    return x


def cut(x: Any, steps: int) -> Any:
    """A table for many positions, as far as the call goes."""
    if x.ndim > 2 and len(x) > max(steps, 16) > x.shape[-2]:  # (positions, pairs, 2)
        return x[:steps]
    return x[..., :steps, :] if x.ndim > 1 and x.shape[-2] > max(steps, 16) else x


def counts(x: Any) -> bool:
    """Whether it counts from 0, as arange does."""
    return x.size > 1 and max(x.shape) == x.size and bool((x.ravel() == np.arange(x.size)).all())


def _merges(shape: Sequence[int], into: Sequence[int]) -> bool:
    """Whether some neighbouring axes put together give a shape."""
    shape, into = [n for n in shape if n != 1], [n for n in into if n != 1]
    i = 0
    for n in into:
        size = 1
        while size < n and i < len(shape):
            size *= shape[i]
            i += 1
        if size != n:
            return False
    return i == len(shape)
