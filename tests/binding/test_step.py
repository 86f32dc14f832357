"""layer_step of `_core`, one call of a decoder: what it writes and gives, and what it refuses."""

import numpy as np
import pytest

import mha_c
from binding_calls import LAYER, PROJECTIONS, B, assert_leaks_nothing, attempt, numbers
from checks import same
from core_calls import core as _core


def step(**changes):
    """A good call of layer_step, with changes: two new rows for each of two items, which have one and three."""
    layer = numbers(B, 2, 5), numbers(B, 2, 5), numbers(B, 2, 3), None, PROJECTIONS, None, 2, "zero", 0.0, 0
    values = {
        **dict(zip(LAYER, layer)),
        "cached_keys": np.zeros((B, 5, 8), "f4"), "cached_values": np.zeros((B, 5, 6), "f4"),
        "before": np.array([1, 3]), "counts": 2, "longest": 5, "turn": None, **changes,
    }  # fmt: skip
    return _core.layer_step(*values.values())


@pytest.mark.parametrize("before", [1, np.array([1, 1]), np.array([0, 3])], ids=str)
@pytest.mark.parametrize("counts", [2, np.array([2, 0])], ids=str)
@pytest.mark.parametrize("batch, rows", [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_step_is_forward_on_projected_rows(batch, rows, before, counts, rng):
    keys, values = rng.standard_normal((batch, 5, 8)).astype("f4"), rng.standard_normal((batch, 5, 6)).astype("f4")
    x, y = rng.standard_normal((batch, 4, 5)).astype("f4")[:, 1 : 1 + rows], numbers(B, 2, 3)[:batch, :rows]
    n_before, n_new = (np.full(batch, n[:batch] if isinstance(n, np.ndarray) else n) for n in (before, counts))
    n_new = np.minimum(n_new, rows)
    before = n_before if isinstance(before, np.ndarray) else before
    counts = n_new if isinstance(counts, np.ndarray) else int(n_new[0])
    after = n_before + n_new
    expected = [keys.copy(), values.copy()]
    for b in range(batch):
        for cached, new, p in zip(expected, (x, y), PROJECTIONS[1:]):
            cached[b, n_before[b] : after[b]] = _core.linear(new[b, : n_new[b]], p)
    projections, longest = (PROJECTIONS[0], None, None, PROJECTIONS[3]), int(after.max())
    part = [cached[:, :longest] for cached in expected]
    out, saved = _core.layer_forward(x, *part, after, projections, None, 2, "zero", 0.0, 0)
    found = step(queries=x, keys=x, values=y, valid_lens=after, cached_keys=keys, cached_values=values, before=before,
                 counts=counts, longest=longest)  # fmt: skip
    same((out, saved[1], *expected), (found[0], found[1][1], keys, values))


@pytest.mark.parametrize("by_item", [False, True])
@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (2, 1)])
def test_rows_are_turned_where_they_lie(heads, by_item, rng, dtype, isa):
    """Queries and new keys, by the angles of their steps; old rows stay as they are."""
    many, shared, d = *heads, 6
    x, cached = rng.standard_normal((B, 3, 5)).astype(dtype), rng.standard_normal((2, B, 7, shared * d)).astype(dtype)
    weights = [rng.standard_normal((n * d, 5)).astype(dtype) for n in (many, shared, shared)]
    W_o = rng.standard_normal((4, many * d)).astype(dtype)
    angles = rng.standard_normal((B, 3, d // 2) if by_item else (3, d // 2))
    turn = tuple(f(angles).astype(dtype) for f in (np.cos, np.sin))
    keys, values = cached.copy()
    out, _ = _core.layer_step(
        x, x, x, np.array([[2, 3, 4], [4, 5, 6]]), (*weights, W_o, *[None] * 5), None, heads, "zero", 0.0, 0,
        keys, values, np.array([1, 3]), 3, 6, turn,
    )  # fmt: skip

    def by_angles(rows, n):
        a, b = (rows.reshape(B, 3, n, d)[..., i::2] for i in (0, 1))
        cos, sin = (np.broadcast_to(t, (B, 3, d // 2))[:, :, None] for t in turn)
        return np.stack((a * cos - b * sin, b * cos + a * sin), -1).reshape(rows.shape)

    for b, n in enumerate((1, 3)):
        cached[0, b, n : n + 3] = by_angles(x @ weights[1].T, shared)[b]
        cached[1, b, n : n + 3] = (x @ weights[2].T)[b]
    limit = 2e-5 if dtype == np.float32 else 1e-13  # sums of five products around 1, and of some 24 behind W_o
    np.testing.assert_allclose(keys, cached[0], atol=limit)
    np.testing.assert_allclose(values, cached[1], atol=limit)
    q = by_angles(x @ weights[0].T, many).reshape(B, 3, many, d).transpose(0, 2, 1, 3)
    k, v = (y.reshape(B, 7, shared, d).transpose(0, 2, 1, 3).repeat(many // shared, 1) for y in cached)
    seen = np.arange(7) < np.array([[2, 3, 4], [4, 5, 6]])[:, None, :, None]
    weights = np.exp(np.where(seen, q @ k.swapaxes(2, 3) / np.sqrt(d), -np.inf))
    found = (weights / weights.sum(-1, keepdims=True) @ v).transpose(0, 2, 1, 3).reshape(B, 3, -1) @ W_o.T
    np.testing.assert_allclose(out, found, atol=20 * limit)


@pytest.mark.parametrize(
    "changes, kind, message",
    [
        ({"before": 4}, ValueError, "room for 5 rows"),
        ({"before": np.array([-1, 1])}, ValueError, "room for 5 rows"),
        ({"before": np.array([2**62, 1])}, ValueError, "room for 5 rows"),
        ({"counts": 3}, ValueError, "3 more"),
        ({"counts": np.array([0, -1])}, ValueError, "room for 5 rows"),
        ({"longest": 4}, ValueError, "have 4"),
        ({"longest": 6}, ValueError, "have 6"),
        ({"before": np.array([1, 3, 1])}, mha_c.ShapeError, "2"),
        ({"before": None}, TypeError, "before must be a whole number or an array of int64"),
        ({"counts": 2.0}, TypeError, "int64"),
        ({"counts": -1}, ValueError, "counts"),
        ({"cached_keys": numbers(B, 5, 8)}, TypeError, "the cache of keys must be a dense array that can be written"),
        ({"cached_values": np.zeros((B, 5, 12), "f4")[..., ::2]}, TypeError, "the cache of values must be a dense"),
        ({"cached_keys": [1.0]}, TypeError, "dense array"),
        ({"cached_keys": np.zeros((B, 5, 8))}, TypeError, "float64"),
        ({"cached_keys": np.zeros((B, 5, 7), "f4")}, ValueError, "8"),
        ({"cached_keys": np.zeros((1, 5, 8), "f4")}, ValueError, "8"),
        ({"cached_keys": np.zeros((B, 8), "f4")}, ValueError, "8"),
        ({"cached_values": np.zeros((B, 4, 6), "f4")}, ValueError, "room for 5"),
        ({"turn": numbers(2, 2)}, TypeError, r"turn must be None or \(cosines, sines\)"),
        ({"turn": (numbers(2, 2),)}, TypeError, r"turn must be None or \(cosines, sines\)"),
        ({"turn": (numbers(2, 2), numbers(B, 2, 2))}, ValueError, "sines has shape"),
        ({"turn": (numbers(B, 2, 2), numbers(2, 2))}, ValueError, "sines has shape"),
        ({"turn": (numbers(1, 2), numbers(1, 2))}, ValueError, "cosines has shape"),
        ({"turn": (numbers(2, 4), numbers(2, 4))}, ValueError, "cosines has shape"),
        ({"turn": (np.zeros((2, 2)), np.zeros((2, 2)))}, TypeError, "cosines"),
        (
            {"turn": (numbers(2, 2), numbers(2, 2)), "queries": numbers(B, 1, 5)},
            TypeError,
            "as many queries as new rows",
        ),
        ({"num_heads": (2, 3)}, ValueError, "2 heads of queries and 3 of keys and values"),
        ({"num_heads": (2, 0)}, ValueError, "num_kv_heads"),
        ({"num_heads": (2, 1)}, ValueError, "2 heads of queries and 1 of keys and values do not fit"),
    ],
)
def test_step_refuses(changes, kind, message):
    """And writes nothing."""
    caches = {name: np.zeros((B, 5, n), "f4") for name, n in (("cached_keys", 8), ("cached_values", 6))}
    given = {**caches, **changes}
    with pytest.raises(kind, match=message):
        step(**given)
    assert not any(np.any(given[name]) for name in caches if name not in changes)
    assert_leaks_nothing([lambda: attempt(lambda: step(**given)), step])
