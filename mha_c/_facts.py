"""The facts of csrc/layer/explain.c under the names that they have in mha_explain.h, tuples of the core as dicts; and
numbers in words, for whoever prints such facts.
"""

from __future__ import annotations

from typing import Any

from . import _core

Facts = dict[str, Any]

BYTES = (2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B")
OPERATIONS = (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1, "")
SECONDS = (1, "s"), (1e-3, "ms"), (1e-6, "us")

KERNELS = "isa", "itemsize", "lanes", "tile_rows", "tile_columns"
SHARE = "n_tasks", "n_threads", "most_threads", "reason", "seconds", "least_seconds", "least_each"
LINEAR = "rows", "rows_needed", "in_features", "out_features", "task_rows", "share"
ATTENTION = (
    "kernels", "share", "batch", "heads", "kv_heads", "queries", "keys", "head_dim", "value_dim", "key_block",
    "most_blocks", "tile_queries", "task_queries", "task_heads", "n_splits", "n_tiles", "n_tiles_all", "by_columns",
    "weights_again", "scratch_bytes",
)  # fmt: skip
LAYER = "projections", "attention", "slice_items", "n_slices", "scratch_bytes", "kept", "kept_bytes"


def kernels() -> Facts:
    """ "float32" and "float64": what the active kernels look like; "share": when work is shared."""
    single, double, share = _core.explain_kernels()
    named = {"float32": single, "float64": double}
    return {**{name: dict(zip(KERNELS, facts)) for name, facts in named.items()}, "share": dict(zip(SHARE, share))}


def attention(*args: Any) -> Facts:
    """What _core.attention_forward would do with these arguments: those of _core.explain_attention."""
    return _attention(_core.explain_attention(*args))


def linear(x: Any, projection: Any) -> Facts:
    return _linear(_core.explain_linear(x, projection))


def layer(roles: tuple[str, ...], *args: Any) -> Facts:
    """What a layer's call would do: the arguments of _core.explain_layer; roles: the names of its projections."""
    facts = dict(zip(LAYER, _core.explain_layer(*args)))
    of_each = zip(roles, facts["projections"])
    projections = {role: _linear(one) for role, one in of_each if one is not None}
    attention = _attention(facts["attention"])
    return {**facts, "projections": projections, "attention": attention, "kept_bytes": int(facts["kept_bytes"])}


def _linear(facts: tuple[Any, ...]) -> Facts:
    named = dict(zip(LINEAR, facts))
    return {**named, "share": dict(zip(SHARE, named["share"]))}


def _attention(facts: tuple[Any, ...]) -> Facts:
    named = dict(zip(ATTENTION, facts))
    return {**named, "kernels": dict(zip(KERNELS, named["kernels"])), "share": dict(zip(SHARE, named["share"]))}


def in_words(number: float, units: tuple[tuple[float, str], ...] = BYTES) -> str:
    """The number in the largest of these units that it reaches: 17 MiB, 2.15 G, 45.3 us."""
    factor, unit = next((pair for pair in units if number >= pair[0]), units[-1])
    scaled = number / factor
    return f"{scaled:{'.0f' if scaled >= 1000 else '.3g'}} {unit}".rstrip()
