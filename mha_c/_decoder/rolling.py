"""Several new steps at once, in a cache with a window: by parts, each over the rows that it may see.

One new step is a step of the core (`steps.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Optional

import numpy as np

from .._arguments.options import core_options
from .._core import attention_forward, linear
from .._layer.kept_weights import Placed
from .._summary import Scores
from ..positions import turned_pairs
from .caches import most
from .span import mask_of_steps

if TYPE_CHECKING:
    from .._types import Array, Counts, Heads, LayerOptions, Masks, PackedLinear, Turn
    from .caches import KeyValueCache

LEAST, MOST = 64, 512  # queries of a part: its mask has so many times as many bytes as it has keys


class Chunk(NamedTuple):
    """Some new steps, and what they may see."""

    queries: slice
    new: Array  # numbers of the new rows among its keys, behind those of the cache
    visible: Array  # (1 or B, Q, K)
    steps: Array  # (1 or B, K): of the keys


def parts(cache: KeyValueCache, counts: Counts, n_new: int) -> Iterator[Chunk]:
    """The parts of n new steps, of which `counts` count, behind those in the cache."""
    span, had = cache._span, np.reshape(cache._steps, (-1, 1))
    size = min(max(span.rows, LEAST), MOST)
    there = span.steps_of_rows(cache._steps)[:, : cache._rows(cache._steps)]
    first_ones = min(max(span.sinks - int(had.min()), 0), n_new)  # of the new steps, some may be sinks
    for first in range(0, max(n_new, 1), size):
        last = min(first + size, n_new)
        new = np.r_[: min(first_ones, last), max(first - (span.window or 0), min(first_ones, last)) : last]
        steps = np.where(new < np.reshape(counts, (-1, 1)), had + new, -1)
        keys = side_by_side(there, steps)
        yield Chunk(slice(first, last), new, span.sees(had + np.arange(first, last), keys), keys)


def side_by_side(a: Array, b: Array) -> Array:
    """Two arrays (1 or B, .) as one."""
    items = max(len(a), len(b))
    return np.concatenate([np.broadcast_to(x, (items, x.shape[1])) for x in (a, b)], axis=1)


def places(cache: KeyValueCache, counts: Counts, n_new: int) -> tuple[Array, Array, Array]:
    """(items, new rows, rows of the cache): where those of n new steps go that are kept."""
    steps = np.broadcast_to(np.reshape(cache._steps, (-1, 1)) + np.arange(n_new), (cache.batch, n_new))
    kept = cache._span.kept(steps, cache._steps + counts)
    items, new = np.nonzero(kept)
    return items, new, cache._span.place(steps[items, new])


class RollingLayer(NamedTuple):
    """What the core has of a layer whose steps these are."""

    projections: tuple[Optional[PackedLinear], ...]  # of queries, keys, values, result
    w_v: Optional[Array]
    num_heads: Heads
    turn: Optional[Turn]  # cosines and sines of the new steps


def attend(
    cache: KeyValueCache, inputs: Sequence[Array], layer: RollingLayer, counts: Counts, masks: Optional[Masks] = None
) -> tuple[Array, Placed]:
    """(out, what its attention weights are computed from); the new rows go to their places in the cache.

    masks   keep_mask and bias, if there is one of them: a row for each new step, a column for each step
    """
    projections, w_v, num_heads, turn = layer
    heads, shared = num_heads if isinstance(num_heads, tuple) else (num_heads, num_heads)
    rows = [np.array(x) if W is None else np.asarray(linear(x, W)) for x, W in zip(inputs, projections)]
    q, k, v = (x.reshape(*x.shape[:2], n, x.shape[2] // n) for x, n in zip(rows, (heads, shared, shared)))
    if turn is not None:
        q, k = (turned_pairs(x, *(table[..., None, :] for table in turn)) for x in (q, k))
    rooms = cache._room((rows[1].shape[2], rows[2].shape[2]), q.dtype)
    there = [
        x[:, : cache._rows(cache._steps)].reshape(len(x), cache._rows(cache._steps), shared, y.shape[3])
        for x, y in zip(rooms, (k, v))
    ]
    found, pieces = [], []
    for part in parts(cache, counts, q.shape[1]):
        of_part = q[:, part.queries], *(np.concatenate((x, y[:, part.new]), 1) for x, y in zip(there, (k, v)))
        q_part, k_part, v_part = (x.transpose(0, 2, 1, 3) for x in of_part)
        keep, bias = (mask_of_steps(_rows(x, part.queries), part.steps) for x in masks or (None, None))
        visible = part.visible[:, None] if keep is None else part.visible[:, None] & keep
        options = core_options(q_part, k_part, None, keep_mask=visible, bias=bias)
        out = attention_forward(q_part, k_part, v_part, w_v, *options[:-1], False, False, False, None, None)[0]
        found.append(out.transpose(0, 2, 1, 3))
        pieces.append((Scores(q_part, k_part, w_v, options), part.steps))
    out = np.concatenate(found, axis=1)
    out = out.reshape(*out.shape[:2], heads * v.shape[3])
    out = out if projections[3] is None else np.asarray(linear(out, projections[3]))
    items, new, row = places(cache, counts, q.shape[1])
    for room, x in zip(rooms, (k, v)):
        room[items, row] = x[items, new].reshape(len(items), room.shape[2])
    return out, Placed(tuple(pieces), most(cache._steps + counts))


def options_of_rows(cache: KeyValueCache, after: Counts, masks: Masks) -> LayerOptions:
    """The core's options of a step, whose masks have a column for each step: see `_core.layer_step`."""
    steps = cache._span.steps_of_rows(after)[:, : cache._rows(after)] if cache._span.rolls else None
    return (None, *(mask_of_steps(mask, steps) for mask in masks))


def _rows(mask: Optional[Array], queries: slice) -> Optional[Array]:
    """The rows of some queries, which a mask may have in common."""
    return mask if mask is None or mask.shape[-2] == 1 else mask[..., queries, :]
