"""Packs weights into few bytes for a page, and describes heads in words.

A row of weights becomes bytes, sqrt(weight / largest weight of the row), plus that largest weight as a float32.  So a
row that spreads over 512 keys keeps its shape, where one scale for all rows would round it to nothing; and the root
keeps the many small weights beside a large one, which would otherwise be lost together with their sum.  The largest
error is 0.4 % of the row's largest weight.  Small matrices get 16 bits per weight without the root: an error of less
than 0.00001.  Only a weight of 0 becomes 0: one that is rounded to nothing becomes 1, which is shown as "< 0.00001".
"""

from __future__ import annotations

import base64
import zlib
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

import numpy as np

from .words import OF_PYTHON, said

if TYPE_CHECKING:
    from .._types import Array

KNOWN = OF_PYTHON["zh"]  # other words are the reader's own

SMALL = 1 << 16  # panels of at most so many weights have 16 bits per weight
POOL_ABOVE = 64  # an axis of at most this length is never made coarser
SHORTER = 0.9  # bytes are compressed only if that saves a tenth


def check(weights: Array) -> None:
    """Raise an error unless all weights are finite and not negative."""
    if not np.isfinite(weights).all():
        where = tuple(int(i) for i in np.argwhere(~np.isfinite(weights))[0])
        raise ValueError(f"weights must be finite, but are not at (head, query, key) {where}")
    if weights.size and weights.min() < 0:
        raise ValueError("weights must not be negative; look at scores with show_heatmaps or mha_c.teach.steps")


def encode(weights: Array) -> dict[str, Any]:
    """Weights (heads, queries, keys) as the page's fields: bits, z (deflated), w (weights), m (row maxima)."""
    bits = 16 if weights.size <= SMALL else 8
    top = weights.max(axis=-1, keepdims=True).astype(np.float32)
    scale = np.where(top > 0, top, 1).astype(np.float64)
    share = weights / scale
    levels = np.rint(share * 65534) if bits == 16 else np.rint(np.sqrt(share) * 254)
    levels = np.where(weights > 0, 1 + levels, 0)
    raw = levels.astype("<u2" if bits == 16 else "u1").tobytes()
    packed = zlib.compress(raw, 9)
    deflated = len(packed) < SHORTER * len(raw) and len(raw) > 4096
    return {
        "bits": bits,
        "z": deflated,
        "w": base64.b64encode(packed if deflated else raw).decode(),
        "m": base64.b64encode(top.astype("<f4").tobytes()).decode(),
    }


def pool(weights: Array, factor: int) -> tuple[Array, int, int]:
    """Join blocks of `factor` queries and keys: sums over keys, means over queries, so that rows still sum to 1."""
    if factor == 1:
        return weights, 1, 1
    q_step = factor if weights.shape[1] > POOL_ABOVE else 1
    k_step = factor if weights.shape[2] > POOL_ABOVE else 1
    q_starts = np.arange(0, weights.shape[1], q_step)
    sizes = np.diff(np.append(q_starts, weights.shape[1]))
    blocks = np.add.reduceat(weights, np.arange(0, weights.shape[2], k_step), axis=2)
    blocks = np.add.reduceat(blocks, q_starts, axis=1) / sizes[:, None].astype(weights.dtype)
    return blocks, q_step, k_step


class HeadStats(NamedTuple):
    """What a head does, in two numbers and a few words."""

    entropy: float  # bits, mean over the queries; 0: one key, log2(keys): equal weights
    confidence: float  # largest weight, mean over the queries
    words: str


def head_stats(weights: Array, key_tokens: Optional[list[str]], self_attention: bool) -> HeadStats:
    """Entropy, confidence and pattern of one head's (queries, keys)."""
    sums = weights.sum(axis=1, dtype=np.float64)
    rows = weights[sums > 0].astype(np.float64) / sums[sums > 0, None]  # without rows of zeros
    if not len(rows):
        return HeadStats(0.0, 0.0, said("no attention at all"))
    logs = np.log2(rows, out=np.zeros_like(rows), where=rows > 0)
    entropy = -(rows * logs).sum(axis=1)
    visible = np.maximum((rows > 0).sum(axis=1), 1)
    words = _pattern(weights, key_tokens, self_attention)
    largest, share = rows.max(axis=1).mean(), entropy.mean() / max(np.log2(visible).mean(), 1e-9)
    even = largest < max(0.4, 1.2 * (1 / visible).mean())  # with two or three keys an entropy says little
    if words is None or (share > 0.93 and even):
        words = said("spread evenly" if share > 0.93 and even else "spread widely" if share > 0.8 and even else "mixed")
    return HeadStats(float(entropy.mean()), float(largest), words)


def _pattern(weights: Array, key_tokens: Optional[list[str]], self_attention: bool) -> Optional[str]:
    """In words, the place that gets the most weight, if it gets at least a quarter of all weight."""
    num_queries, num_keys = weights.shape
    if num_keys == 1:
        return said("only one key to look at")
    found: list[tuple[float, str]] = []
    if num_queries > 1:
        here = "the token itself" if self_attention else "the same position"
        before, after = ("previous token", "next token") if self_attention else ("position before", "position after")
        for offset, words in ((0, here), (-1, f"the {before}"), (1, f"the {after}")):
            line = np.diagonal(weights, offset)
            if len(line):
                found.append((float(line.mean()), words))
    columns = weights.mean(axis=0)
    best = int(columns.argmax())
    names = {0: "the first token", num_keys - 1: "the last token"} if self_attention else {}
    label = f"“{key_tokens[best]}”" if key_tokens and best < len(key_tokens) else said("key {n}", n=best)
    found.append((float(columns[best]), names.get(best, label)))
    share, words = max(found)
    if share < 0.25:
        return None
    how = said("mostly" if share >= 0.4 else "partly")
    return said(
        "{how} {what}, {share} %", how=how, what=said(words) if words in KNOWN else words, share=f"{100 * share:.0f}"
    )
