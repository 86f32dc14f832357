"""Attention weights in pieces, and what `weights_summary` says of them: memory grows with Q + K, not with Q x K.

A piece has the weights of some queries of some heads.  The core computes it as a part of the whole call, which `origin`
places in it, so that its weights are those of the whole call.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

import numpy as np

from ._core import attention_forward, explain_attention

if TYPE_CHECKING:
    from ._arguments.options import CoreOptions
    from ._types import Array

# Weights in one piece.  With their logarithms and products a piece of float64 takes 48 MiB; smaller pieces of 20,000
# keys would have fewer than the 48 queries of a tile for each of two threads.
PIECE = 1 << 21

NOTHING_SEEN = (  # by `watch`
    "no call of attention was seen: call the model inside `with mha_c.torch.watch() as seen:`.  If it was called, "
    "it computes its own softmax, or is compiled, which watch does not see: mha_c.torch.convert(model) may know its "
    "classes, and mha_c.viz.view(weights) shows weights that it returns"
)


class WeightsSummary(NamedTuple):
    """What `weights_summary` returns.

    Parameters
    ----------
    received : array (B, [H,] K)
        The sum, over all queries, of the weights that each key gets.
    entropy : array (B, [H,] Q)
        The entropy of each query's weights in bits: 0 for one key, log2(n) for n equal weights, 0 for a row without
        keys.
    top_weights : array (B, [H,] Q, top)
        The largest weights of each query, the largest first; 0 if fewer keys have a weight.
    top_keys : array of int64 (B, [H,] Q, top)
        The keys that have them; -1 if fewer keys have a weight.

    Attributes
    ----------
    received, entropy, top_weights, top_keys : array
        As described above.

    Examples
    --------
    >>> import numpy as np
    >>> from mha_c import functional
    >>> functional.weights_summary(np.zeros((1, 2, 4)), np.zeros((1, 4, 4))).received
    array([[0.5, 0.5, 0.5, 0.5]])
    """

    received: Any
    entropy: Any
    top_weights: Any
    top_keys: Any


class Piece(NamedTuple):
    """The weights (items, heads, rows, keys) of a part of a call.  Keys behind `keys` have no weight there."""

    items: slice
    heads: slice
    rows: slice
    keys: slice
    weights: Array


class Scores(NamedTuple):
    """What determines the attention weights of a call: operands with an axis for heads, and the core's options."""

    q: Array  # (B, H, Q, D)
    k: Array  # (B, Hkv, K, D)
    w_v: Optional[Array]
    options: CoreOptions

    @classmethod
    def of(cls, q: Array, k: Array, w_v: Optional[Array], options: CoreOptions) -> Scores:
        """The same with operands (B, rows, D), too.  The core checks the whole call before it computes parts."""
        in_order, terms = options[:-1], options[-1]
        explain_attention(q, k, k[..., :0], w_v, *in_order, False, False, terms)
        if q.ndim == 4:
            return cls(q, k, w_v, options)
        lens, keep_mask, bias, *others = options
        keep_mask, bias = (x[:, None] if x is not None and x.ndim == 3 else x for x in (keep_mask, bias))
        return cls(q[:, None], k[:, None], w_v, (lens, keep_mask, bias, *others))

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, Q, K)."""
        return (*self.q.shape[:3], self.k.shape[2])

    def pieces(self, size: Optional[int] = None) -> Iterator[Piece]:
        """The weights of the call, in pieces of about `size` weights (PIECE); a piece has one query at least."""
        size = PIECE if size is None else size
        batch, n_heads, n_queries, n_keys = self.shape
        shared, at_once = self.k.shape[1], max(n_keys, 1)
        group = n_heads // max(shared, 1)
        rows = min(n_queries, max(1, size // (max(group, 1) * at_once)))
        kv_heads = min(shared, max(1, size // max(1, group * n_queries * at_once)))
        items = min(batch, max(1, size // max(1, n_heads * n_queries * at_once)))
        if 0 in (batch, n_heads, n_queries, n_keys):
            return
        for i in range(0, batch, items):
            for h in range(0, shared, kv_heads):
                for row in range(0, n_queries, rows):
                    yield self._piece(
                        slice(i, min(i + items, batch)),
                        slice(h, min(h + kv_heads, shared)),
                        slice(row, min(row + rows, n_queries)),
                    )

    def _piece(self, items: slice, kv_heads: slice, rows: slice) -> Piece:
        lens, keep_mask, bias, causal, left, right, scale, _, _, empty_rows, terms = self.options
        n_queries, n_keys = self.shape[2:]
        group = self.shape[1] // self.k.shape[1]
        heads = slice(kv_heads.start * group, kv_heads.stop * group)
        # The corner is the top left one of a call whose queries, or keys, begin so many places later.
        later = n_keys - n_queries if causal == "bottom_right" else 0
        origin = 0, 0, rows.start + max(later, 0), max(-later, 0)
        keys = slice(0, n_keys)
        if causal is not None and empty_rows == "zero":  # later keys get nothing
            keys = slice(0, min(max(rows.stop + later, 1), n_keys))
        if lens is not None:
            lens = lens[items] if lens.ndim == 1 else lens[items, rows]
            lens = np.where(lens > 0, lens + max(-later, 0), lens)
        if terms is not None:
            relative_bias, softcap, sinks = terms
            relative_bias, sinks = (None if x is None else x[heads] for x in (relative_bias, sinks))
            terms = relative_bias, softcap, sinks
        keep_mask, bias = (None if x is None else _part(x, items, heads, rows, keys) for x in (keep_mask, bias))
        k = self.k[items, kv_heads, keys]
        _, weights, _ = attention_forward(
            self.q[items, heads, rows], k, k[..., :0], self.w_v, lens, keep_mask, bias,
            None if causal is None else "top_left", left, right, scale, 0.0, 0, empty_rows, True, False, False, origin,
            terms,
        )  # fmt: skip
        return Piece(items, heads, rows, keys, weights)

    def weights(self) -> Array:
        """All weights, (B, H, Q, K)."""
        found = np.zeros(self.shape, self.q.dtype)
        for piece in self.pieces():
            found[piece.items, piece.heads, piece.rows, piece.keys] = piece.weights
        return found


class WeightsArray(NamedTuple):
    """Attention weights that exist already, (B, H, Q, K); has the methods of `Scores`."""

    array: Array

    @property
    def shape(self) -> tuple[int, ...]:
        """(B, H, Q, K)."""
        return self.array.shape

    def pieces(self) -> Iterator[Piece]:
        """One piece for each item."""
        batch, n_heads, n_queries, n_keys = self.array.shape
        for i in range(batch):
            item = slice(i, i + 1)
            yield Piece(item, slice(0, n_heads), slice(0, n_queries), slice(0, n_keys), self.array[item])

    def weights(self) -> Array:
        """The array."""
        return self.array


def summarize(source: Any, top: int = 0) -> WeightsSummary:
    """The summary of the weights of a `Scores` or `WeightsArray`, each array with an axis for heads."""
    batch, n_heads, n_queries, n_keys = source.shape
    received = np.zeros((batch, n_heads, n_keys))
    entropy = np.zeros((batch, n_heads, n_queries))
    largest = np.zeros((batch, n_heads, n_queries, top))
    where = np.full((batch, n_heads, n_queries, top), -1, dtype=np.int64)
    dtype = np.dtype(np.float64)
    for items, heads, rows, keys, weights in source.pieces():
        dtype = weights.dtype
        received[items, heads, keys] += weights.sum(axis=2, dtype=np.float64)
        entropy[items, heads, rows] = entropy_of(weights)
        if top:
            found = _largest(weights, top)
            largest[items, heads, rows], where[items, heads, rows] = found
    return WeightsSummary(received.astype(dtype), entropy.astype(dtype), largest.astype(dtype), where)


def entropy_of(weights: Array) -> Array:
    """The entropy in bits of each row (..., K)."""
    logs = np.maximum(weights, np.finfo(weights.dtype).tiny)  # 0 log 0 is 0, whatever finite number stands for log 0
    np.log2(logs, out=logs)
    logs *= weights
    entropy: Array = -logs.sum(axis=-1)
    return np.where(entropy == 0, entropy.dtype.type(0), entropy)  # no -0.0


def _largest(weights: Array, top: int) -> tuple[Array, Array]:
    """The `top` largest weights of each row, and their keys: of equal weights the first key comes first.

    One pass for each of them: a selection of all at once takes as long as thirty passes, and leaves the order of equal
    weights open.
    """
    left = weights.copy()
    n_found = min(top, weights.shape[-1])
    found, keys = np.zeros((*weights.shape[:-1], top), weights.dtype), np.full((*weights.shape[:-1], top), -1)
    for i in range(n_found):
        key = left.argmax(axis=-1)[..., None]
        weight = np.take_along_axis(left, key, axis=-1)
        np.put_along_axis(left, key, left.dtype.type(-1), axis=-1)
        found[..., i : i + 1] = weight
        keys[..., i : i + 1] = np.where(weight == 0, -1, key)
    return found, keys


def _part(mask: Array, items: slice, heads: slice, rows: slice, keys: slice) -> Array:
    """The part of a mask of rank 2 or 4, of which an axis may have length 1."""
    cuts = (items, heads, rows, keys)[-mask.ndim :]
    return mask[tuple(slice(None) if size == 1 else cut for size, cut in zip(mask.shape, cuts))]
