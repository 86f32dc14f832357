"""Masks as arguments: what True means in one, its axes, its type; how the book's mask is given, and said in words."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple, Optional

import numpy as np

from ..words.sentences import said

MEANS = ("attend", "hide", "add")
_TYPES = {"attend": ("bool", "0/1"), "hide": ("bool", "0/1"), "add": ("numbers",)}
AXES = {  # of a mask, by the layout of the inputs ("batch" for others): the likeliest, and those that say most, first
    "batch": ("bqk", "b1qk", "qk", "bk", "b1k", "b11k", "nqk", "1qk"),
    "item": ("qk", "k"),
    "one group": ("qk", "1qk", "k", "hqk"),
    "time first": ("bqk", "b1qk", "qk", "bk", "b1k", "b11k", "nqk", "1qk", "qkb"),
    "heads": ("b1qk", "bqk", "qk", "b11k", "bk", "bhqk"),
    "grouped": ("b1qk", "bqk", "qk", "b11k", "bk", "bhqk"),
}
_SAYS = {
    "attend": "{one} lets a key be seen, as in scaled_dot_product_attention, Keras and CS336; nn.MultiheadAttention "
    "means the opposite",
    "hide": "{one} hides a key, as in nn.MultiheadAttention; scaled_dot_product_attention, Keras and CS336 mean the "
    "opposite",
    "add": "the mask is added to the scores: 0 lets a key be seen, a large negative number hides it",
}
_AXES_SAY = {"b": "batch", "h": "heads", "q": "queries", "k": "keys", "1": "1", "n": "batch * heads"}


class MaskWay(NamedTuple):
    """One way to give a mask."""

    means: str  # "attend": True is seen; "hide": True is hidden; "add": a number for each score
    type: str  # "bool", "0/1", "numbers"
    axes: str
    past: bool = False  # it hides the future, too: the caller makes the causal mask
    size: float = 1e30  # what is subtracted from the scores of hidden keys; so large that nothing of them is left

    def given(self, mask: Any, shape: tuple[int, int, int, int]) -> Any:
        """The book's mask (batch, queries, keys) in this way, float32 or bool; None if it cannot be said this way.

        `shape` is (batch, heads, queries, keys); a mask that is True hides nothing.
        """
        batch, heads, queries, keys = shape
        if self.past:
            past = np.tri(queries, keys, keys - queries, dtype=bool)
            mask = np.broadcast_to(past if mask is True else past & mask, (batch, queries, keys))
        if mask is True:
            return None
        mask = mask.reshape(batch, queries, keys)
        if "b" not in self.axes and "n" not in self.axes:
            if (mask != mask[:1]).any():
                raise CannotSay
            mask = mask[:1]
        if "q" not in self.axes:
            if (mask != mask[:, :1]).any():
                raise CannotSay
            mask = mask[:, :1]
        if self.axes == "nqk":
            return self._typed(np.repeat(mask, heads, axis=0))
        wide = np.broadcast_to(mask[:, None], (len(mask), heads if "h" in self.axes else 1, *mask.shape[1:]))
        sizes = dict(zip("1bhqk", (1, *wide.shape)))
        kept = ["bhqk".index(one) for one in self.axes if one != "1"]
        wide = wide.transpose(*kept, *({0, 1, 2, 3} - {*kept}))  # the others have one number
        return self._typed(wide.reshape([sizes[one] for one in self.axes]))

    def _typed(self, mask: Any) -> Any:
        if self.means == "add":
            return np.where(mask, 0.0, -self.size)
        mask = mask if self.means == "attend" else ~mask
        return mask.copy() if self.type == "bool" else mask.astype(np.int64)

    @property
    def says(self) -> str:
        """What True means, for a reader."""
        words = said(_SAYS[self.means], one="True" if self.type == "bool" else "1")
        shape = ", ".join(said(_AXES_SAY[one]) for one in self.axes)
        return said("{words}.  Its shape: ({shape})", words=words, shape=shape + "," * (len(self.axes) == 1))


class CannotSay(ValueError):
    """A mask of fewer axes cannot hold this one."""


def ways(layout: str, means: Optional[str], past: bool) -> Iterator[MaskWay]:
    """The ways to give a mask, the likeliest first."""
    wanted = MEANS if means is None else (means,)
    for axes, meaning in itertools.product(AXES.get(layout, AXES["batch"]), wanted):
        for type in _TYPES[meaning]:
            yield from (MaskWay(meaning, type, axes, each) for each in ((False, True) if past else (False,)))
