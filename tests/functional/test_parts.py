"""Parts of a call: attention over some queries and some keys, which `origin` places in the whole.

Every part sees and drops what the whole call would; joined by their statistics the parts give its results and, with
the joined statistics, its gradients.
"""

import sys

import numpy as np
import pytest

from checks import same
from core_calls import core as _core

SEED = 0xFEDCBA9876543210
LAST = min(2**32 - 1, sys.maxsize // 4)  # MHA_LAST_PLACE
BATCH, HEADS, KV_HEADS, QUERIES, KEYS = 3, 4, 2, 45, 70
# Items, heads, queries and keys are cut here: sides of a tile, of a block of 8 decisions of dropout, and none.
QUERY_CUTS, KEY_CUTS = (0, 13, 45), (0, 8, 37, 70)
CALLS = {
    "plain": {},
    "causal": {"causal": "top_left"},
    "window": {"window_left": 9, "window_right": 3},
    "causal window": {"causal": "top_left", "window_left": 5},
    "lengths": {"valid_lens": np.array([70, 20, 0])},
    "lengths of queries": {"valid_lens": np.arange(BATCH * QUERIES).reshape(BATCH, QUERIES) % 75 - 2},
    "dropout": {"dropout": 0.3, "seed": SEED},
    "all": {"causal": "top_left", "window_left": 20, "valid_lens": np.array([70, 30, 1]), "dropout": 0.5, "seed": SEED},
}


def operands(rng, dtype):
    q = rng.standard_normal((BATCH, HEADS, QUERIES, 8))
    k, v = (rng.standard_normal((BATCH, KV_HEADS, KEYS, n)) for n in (8, 5))
    return [x.astype(dtype) for x in (q, k, v, rng.standard_normal((BATCH, HEADS, QUERIES, 5)))]


def part_options(options, items, rows):
    lens = options.get("valid_lens")
    if lens is None:
        return options
    return {**options, "valid_lens": lens[items] if lens.ndim == 1 else np.ascontiguousarray(lens[items, rows])}


def parts():
    """Slices of items, key heads, queries and keys that make up the whole."""
    for items in (slice(0, 1), slice(1, BATCH)):
        for kv_heads in (slice(0, 1), slice(1, KV_HEADS)):
            for rows in map(slice, QUERY_CUTS, QUERY_CUTS[1:]):
                yield items, kv_heads, rows, [slice(*keys) for keys in zip(KEY_CUTS, KEY_CUTS[1:])]


def heads_of(kv_heads):
    group = HEADS // KV_HEADS
    return slice(kv_heads.start * group, kv_heads.stop * group)


@pytest.mark.parametrize("name", CALLS)
def test_parts_make_up_the_whole(rng, dtype, isa, name):
    q, k, v, grad = operands(rng, dtype)
    options = CALLS[name]
    out, _, _, stats = _core.attention_forward(q, k, v, **options, return_stats=True)
    grads = _core.attention_backward(grad, out, stats, q, k, v, **options)[:3]
    joined, sums = np.zeros_like(out), [np.zeros_like(x) for x in (q, k, v)]
    for items, kv_heads, rows, keys in parts():
        heads = heads_of(kv_heads)
        mine = items, heads, rows
        for cut in keys:
            theirs = items, kv_heads, cut
            origin = items.start, heads.start, rows.start, cut.start
            own = part_options(options, items, rows)
            piece = [np.ascontiguousarray(x) for x in (q[mine], k[theirs], v[theirs])]
            found, _, _, (m, s) = _core.attention_forward(*piece, **own, return_stats=True, origin=origin)
            share = np.exp(m - stats[0][mine]) * s / np.where(stats[1][mine] > 0, stats[1][mine], 1)
            joined[mine] += found * np.where(s > 0, share, 0)[..., None]
            given = grad[mine], out[mine], tuple(np.ascontiguousarray(x[mine]) for x in stats)
            of_part = _core.attention_backward(*given, *piece, **own, origin=origin)
            for total, place, part in zip(sums, (mine, theirs, theirs), of_part):
                total[place] += part
    # Sums over at most 70 keys or 45 * 2 queries in another order: some ten roundings of numbers below 20.
    limit = 64 * np.finfo(dtype).eps
    np.testing.assert_allclose(joined, out, rtol=0, atol=limit)
    for found, expected in zip(sums, grads):
        np.testing.assert_allclose(found, expected, rtol=0, atol=8 * limit)


def test_an_origin_of_nothing_changes_nothing(rng, dtype):
    q, k, v, grad = operands(rng, dtype)
    options = CALLS["all"]
    out, _, _, stats = _core.attention_forward(q, k, v, **options, return_stats=True)
    for origin in (None, (0, 0, 0, 0)):
        same(_core.attention_forward(q, k, v, **options, origin=origin)[0], out)
        plain = _core.attention_backward(grad, out, stats, q, k, v, **options)
        same(_core.attention_backward(grad, out, stats, q, k, v, **options, origin=origin)[:3], plain[:3])


@pytest.mark.parametrize(
    ("origin", "error", "words"),
    [
        ((0, 0, 0), TypeError, "origin must be None or a tuple"),
        ([0, 0, 0, 0], TypeError, "origin must be None or a tuple"),
        ((0, 0, 0, 1.5), TypeError, "origin"),
        ((0, -1, 0, 0), ValueError, "origin must be at least 0"),
        ((0, 0, 0, LAST + 1), ValueError, f"origin must be at most {LAST}, the last place that dropout counts"),
        ((2**70, 0, 0, 0), ValueError, f"origin must be at most {LAST}"),
    ],
)
def test_ill_formed_origins(rng, dtype, origin, error, words):
    q, k, v, _ = operands(rng, dtype)
    with pytest.raises(error, match=words):
        _core.attention_forward(q, k, v, origin=origin)


def test_the_last_places(rng, dtype):
    """What the binding takes, the core takes, where addresses have 32 bits too."""
    q, k, v, _ = operands(rng, dtype)
    for i in range(4):
        origin = tuple(LAST if i == j else 0 for j in range(4))
        out, *_ = _core.attention_forward(q, k, v, origin=origin, dropout=0.5, seed=1)
        assert np.isfinite(out).all()


def test_a_part_has_no_bottom_right_corner(rng, dtype):
    q, k, v, _ = operands(rng, dtype)
    with pytest.raises(ValueError, match="bottom_right"):
        _core.attention_forward(q, k, v, causal="bottom_right", origin=(0, 0, 1, 0))
