"""Probes: inputs of few numbers for each kind, the smallest first, whose answers differ for each known mistake."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import numpy as np

from .masks import CannotSay

Inputs = dict[str, Any]  # by the names of the book's function, in its order


class Sizes(NamedTuple):
    """The sizes of a layer with parameters."""

    query_size: int
    key_size: int
    value_size: int
    num_hiddens: int
    num_heads: int = 1
    value_hiddens: int = 0  # where it is not num_hiddens: the outputs of W_v
    out: int = 0  # and those of W_o
    num_kv_heads: int = 0  # heads of keys and values, where groups of queries' heads share them


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
_ALONG_TIME = [(1, 2, 2), (1, 3, 3), (2, 3, 3), (2, 5, 5), (1, 2, 4), (2, 4, 4)]  # the last but one: two are cached
_GROUPED = [(1, 2, 1, 1, 2), (1, 4, 2, 2, 2), (2, 4, 2, 3, 3), (2, 6, 3, 2, 4), (3, 6, 2, 3, 3)]  # batch, heads, groups
_MULTI_HEAD = [(4, 4, 4, 4, 2), (4, 4, 4, 4, 2), (6, 6, 6, 6, 2), (4, 4, 4, 4, 2), (3, 2, 5, 6, 3), (6, 6, 6, 6, 3)]


def probes(kind: str, sizes: Optional[Sizes] = None, by_mask: bool = False) -> list[Inputs]:
    """The probes of a kind; with `sizes`, those that fit a layer whose sizes are given; `by_mask`: with a mask in the
    place of lengths."""
    made = _probes(kind, sizes)
    if not by_mask:
        return made
    return [_of_mask(i, each) for i, each in enumerate([*made, {**made[-1], "valid_lens": "causal"}])]


def _probes(kind: str, sizes: Optional[Sizes]) -> list[Inputs]:
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

    made: dict[Any, Inputs] = {}  # weights of one size are one array, so that a layer gets them once

    def weights(size: Sizes) -> Inputs:
        if size not in made:
            made[size] = _weights(numbers, size)
        return made[size]

    if kind == "masked_softmax":
        calls = [(batch, queries, keys, lens) for batch, queries, keys, lens in _CALLS]
        return [{"X": numbers(b, q, k), "valid_lens": None if n is None else np.array(n)} for b, q, k, n in calls]
    if kind == "dot_product":
        return [attention(call, (d, d, v)) for call, (d, v) in zip(_CALLS, _FEATURES)]
    if kind in ("causal", "window", "chunked"):
        calls = [(b, queries if kind == "causal" else keys, keys, None) for b, queries, keys in _ALONG_TIME]
        along = [attention(call, (d, d, v)) for call, (d, v) in zip(calls, _FEATURES)]
        return [_along_time(kind, i, each) for i, each in enumerate(along)]
    if kind == "grouped":
        by_groups = [_grouped(numbers, i, *call) for i, call in enumerate(_GROUPED)]
        shape = by_groups[-1]["mask"].shape  # the last once more, with one mask for all items, which is not causal
        seen = np.tri(shape[-2], shape[-1], dtype=bool)[::-1]
        return [*by_groups, {**by_groups[-1], "mask": np.broadcast_to(seen, shape)}]
    if kind == "causal_multi_head":
        given = [Sizes(h, h, h, h, heads) for h, heads in [(4, 2), (8, 2), (6, 3), (8, 2), (12, 3)]]
        sized = [sizes or each for each in given]
        return [_of_one_input(numbers, i, each, weights(each)) for i, each in enumerate(sized)]
    if kind == "additive":
        widths = _ADDITIVE if sizes is None else [sizes[:4]] * len(_CALLS)
        return [
            {**attention(call, (q, k, v)), **made.setdefault((q, k, h), _additive_weights(numbers, q, k, h))}
            for call, (q, k, v, h) in zip(_CALLS, widths)
        ]
    if kind == "multi_head":
        each = [Sizes(*one) for one in _MULTI_HEAD] if sizes is None else [sizes] * len(_CALLS)
        return [{**attention(call, size), **weights(size)} for call, size in zip(_CALLS, each)]
    return _of_one_array(kind, sizes, numbers)


def hiding(batch: int, queries: int, keys: int) -> Any:
    """A mask, True where a key is seen: another one for each item and query, none of them empty, not only prefixes."""
    item, row, column = np.ogrid[:batch, :queries, :keys]
    return (column == 0) | ((item + row + column) % 3 != 1)


def _of_mask(number: int, inputs: Inputs) -> Inputs:
    """A mask, True where a key is seen, in the place of lengths."""
    first, keys = ("X", inputs["X"].shape[2]) if "X" in inputs else ("queries", inputs["keys"].shape[1])
    batch, queries = inputs[first].shape[:2]
    lens: Any = inputs["valid_lens"]
    mask: Any = True
    if number == 6:  # one for all items, as a causal mask is
        mask = np.broadcast_to(np.tri(queries, keys, dtype=bool), (batch, queries, keys))
    elif number == 5:
        mask = hiding(batch, queries, keys)
    elif number == 4:  # one for all queries, as a mask of padding is
        mask = np.broadcast_to(hiding(batch, 1, keys), (batch, queries, keys))
    elif lens is not None:
        mask = np.broadcast_to(np.arange(keys) < lens[:, None, None], (batch, queries, keys))
    return {
        ("mask" if name == "valid_lens" else name): mask if name == "valid_lens" else x for name, x in inputs.items()
    }


def _along_time(kind: str, number: int, made: Inputs) -> Inputs:
    """What comes after queries, keys and values where positions count."""
    made.pop("valid_lens")
    (batch, queries, _), keys = made["queries"].shape, made["keys"].shape[1]
    more: Inputs = {"chunk_size": [1, 2, 2, 2, 3, 3][number]} if kind == "chunked" else {}
    if kind == "window":
        more = {"window": [1, 2, 2, 3, 2, 2][number]}
    more["mask"] = _late_mask(number, 6, batch, queries, keys)
    return {**made, **more, **({"offset": keys - queries} if kind == "causal" else {})}


def _late_mask(number: int, of: int, batch: int, queries: int, keys: int) -> Any:
    """The last probe hides other keys for each query, the last but two the same ones for all queries of an item."""
    if number == of - 1:
        return hiding(batch, queries, keys)
    return np.broadcast_to(hiding(batch, 1, keys), (batch, queries, keys)) if number == max(of - 3, 2) else True


def _grouped(numbers: Any, number: int, batch: int, heads: int, groups: int, queries: int, keys: int) -> Inputs:
    d = 4 if heads == 4 else 2
    made = {"queries": numbers(batch, heads, queries, d)}
    made.update(keys=numbers(batch, groups, keys, d), values=numbers(batch, groups, keys, d))
    mask = _late_mask(number, len(_GROUPED), batch, queries, keys)
    return {**made, "mask": mask if mask is True else mask[:, None]}


def _of_one_input(numbers: Any, number: int, size: Sizes, weights: Inputs) -> Inputs:
    batch, steps = [(1, 2), (1, 3), (2, 3), (2, 4), (2, 4)][number]
    made = {"X": numbers(batch, steps, size.query_size), **weights}
    return {**made, "mask": _late_mask(number, 5, batch, steps, steps)}


def _additive_weights(numbers: Any, q: int, k: int, h: int) -> Inputs:
    return {"W_q": numbers(q, h), "W_k": numbers(k, h), "w_v": numbers(h)}


def _weights(numbers: Any, size: Sizes) -> Inputs:
    """W_q ... W_o, and the number of heads; heads of keys and values that groups share are alike."""
    hiddens, heads = size.num_hiddens, size.num_heads
    wide = size.value_hiddens or hiddens
    made = {"W_q": numbers(size.query_size, hiddens)}
    for name, inputs, outputs in (("W_k", size.key_size, hiddens), ("W_v", size.value_size, wide)):
        made[name] = numbers(inputs, outputs)
        if 0 < size.num_kv_heads < heads:
            by_heads = made[name].reshape(inputs, heads, -1)[:, :: heads // size.num_kv_heads]
            made[name] = np.repeat(by_heads, heads // size.num_kv_heads, axis=1).reshape(inputs, -1)
    made.update(W_o=numbers(wide, size.out or hiddens), num_heads=heads)
    return {**made, "num_kv_heads": size.num_kv_heads} if 0 < size.num_kv_heads < heads else made


def _of_one_array(kind: str, sizes: Optional[Sizes], numbers: Any) -> list[Inputs]:
    """transpose_qkv and transpose_output, where each number is another one, and positional_encoding."""
    if kind == "rope":
        widths = [4, 4, 6, 4, 8] if sizes is None else [sizes.num_hiddens] * 5
        calls = [(1, 2, 0), (1, 3, 0), (2, 3, 0), (2, 2, 3), (3, 5, 2)]
        return [{"X": numbers(b, t, h), "offset": offset} for (b, t, offset), h in zip(calls, widths)]
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


def steps_of(inputs: Inputs) -> tuple[int, int, int]:
    """(batch, queries, keys)."""
    first = inputs.get("queries", inputs.get("X"))
    assert first is not None
    keys = inputs["keys"].shape[-2] if "keys" in inputs else first.shape[-2 if "W_q" in inputs else -1]
    return len(first), first.shape[-2], keys


def has_other_widths(inputs: Inputs) -> bool:
    """Whether an input is not as wide as what the projections make of it."""
    widths = {inputs[name].shape[-1] for name in ("queries", "keys", "values") if name in inputs}
    return "W_q" in inputs and widths != {inputs["W_q"].shape[1]}


def has_other_lengths(inputs: Inputs) -> bool:
    """Whether there are not as many queries as keys."""
    return "keys" in inputs and "queries" in inputs and inputs["queries"].shape[-2] != inputs["keys"].shape[-2]


def lens_of(inputs: Inputs) -> Any:
    """The lengths of a probe, or those that its mask stands for: of each item, or of each query."""
    mask = inputs.get("mask", True)
    if "valid_lens" in inputs or mask is True:
        return inputs.get("valid_lens")
    lens = mask.reshape(-1, *mask.shape[-2:]).sum(axis=-1)
    if not np.array_equal(mask, (np.arange(mask.shape[-1]) < lens[..., None]).reshape(mask.shape)):
        raise CannotSay
    return lens[:, 0] if (lens == lens[:, :1]).all() else lens
