"""Probes: inputs of few numbers for each kind, the smallest first, whose answers differ for each known mistake."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import numpy as np

Inputs = dict[str, Any]  # by the names of the book's function, in its order


class Sizes(NamedTuple):
    """The sizes of a layer with parameters."""

    query_size: int
    key_size: int
    value_size: int
    num_hiddens: int
    num_heads: int = 1


# batch, queries, keys, lengths
_CALLS: list[tuple[int, int, int, Any]] = [
    (1, 1, 2, None),
    (1, 2, 2, None),
    (1, 2, 3, [2]),
    (2, 2, 3, [1, 3]),
    (3, 2, 4, [2, 1, 3]),
    (2, 3, 3, [[1, 2, 3], [2, 1, 3]]),
]
_FEATURES = [(4, 2), (2, 2), (4, 4), (4, 3), (2, 3), (3, 3)]  # of queries and keys, of values
_ADDITIVE = [(2, 2, 2, 2), (3, 3, 3, 4), (2, 3, 3, 2), (3, 2, 2, 4), (2, 3, 4, 3), (3, 3, 3, 3)]
_MULTI_HEAD = [(4, 4, 4, 4, 2), (4, 4, 4, 4, 2), (6, 6, 6, 6, 2), (4, 4, 4, 4, 2), (3, 2, 5, 6, 3), (6, 6, 6, 6, 3)]


def probes(kind: str, sizes: Optional[Sizes] = None) -> list[Inputs]:
    """The probes of a kind; with `sizes`, those that fit a layer whose sizes are given."""
    rng = np.random.default_rng(20)

    def numbers(*shape: int) -> Any:
        wide = max(1.0, shape[-2] / 6) if len(shape) == 2 else 1.0  # sums of a large layer's weights stay of order 1
        return (rng.standard_normal(shape) / wide).round(1 if wide == 1 else 3) + 0.0  # no -0

    def attention(call: Any, features: Any) -> Inputs:
        (batch, queries, keys, lens), (q, k, v, *_) = call, features
        lens = None if lens is None else np.array(lens)
        return {
            "queries": numbers(batch, queries, q),
            "keys": numbers(batch, keys, k),
            "values": numbers(batch, keys, v),
            "valid_lens": lens,
        }

    if kind == "masked_softmax":
        calls = [(batch, queries, keys, lens) for batch, queries, keys, lens in _CALLS]
        return [{"X": numbers(b, q, k), "valid_lens": None if n is None else np.array(n)} for b, q, k, n in calls]
    if kind == "dot_product":
        return [attention(call, (d, d, v)) for call, (d, v) in zip(_CALLS, _FEATURES)]
    if kind == "causal":
        calls = [(1, 2, 2, None), (1, 3, 3, None), (2, 3, 3, None), (2, 4, 4, None)]
        made = [attention(call, (d, d, v)) for call, (d, v) in zip(calls, _FEATURES)]
        return [{name: x for name, x in each.items() if name != "valid_lens"} for each in made]
    if kind == "additive":
        given = [(q, k, v, h, 1) for q, k, v, h in _ADDITIVE] if sizes is None else [sizes] * len(_CALLS)
    elif kind == "multi_head":
        given = _MULTI_HEAD if sizes is None else [sizes] * len(_CALLS)
    else:
        return _of_one_array(kind, sizes, numbers)
    made = []
    for call, (q, k, v, h, heads) in zip(_CALLS, given):
        made.append({**attention(call, (q, k, v)), "W_q": numbers(q, h), "W_k": numbers(k, h)})
        more = {"w_v": numbers(h)} if kind == "additive" else {"W_v": numbers(v, h), "W_o": numbers(h, h)}
        made[-1].update(more if kind == "additive" else {**more, "num_heads": heads})
    return made


def _of_one_array(kind: str, sizes: Optional[Sizes], numbers: Any) -> list[Inputs]:
    """transpose_qkv and transpose_output, where each number is another one, and positional_encoding."""
    if kind == "positional_encoding":
        widths = [4, 4, 6] if sizes is None else [sizes.num_hiddens] * 3
        return [{"X": numbers(b, t, h)} for (b, t), h in zip([(1, 2), (1, 3), (2, 5)], widths)]
    heads = [2, 2, 3, 2] if sizes is None else [sizes.num_heads] * 4
    shapes = [(1, 2, 2), (2, 3, 2), (2, 2, 2), (3, 4, 3)]  # batch, steps, features of a head
    folded = kind == "transpose_output"
    counted = [np.arange(1.0, b * t * d * h + 1) for (b, t, d), h in zip(shapes, heads)]
    return [
        {"X": x.reshape((b * h, t, d) if folded else (b, t, h * d)), "num_heads": h}
        for x, (b, t, d), h in zip(counted, shapes, heads)
    ]
