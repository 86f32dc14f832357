"""How the core computes a call of a reader's own module: a `Plan`, and the call.

A plan is what comparing has shown.  A call of a form that was not compared is none of the plan's: the reader's own
lines compute it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor
from torch.nn.functional import linear

from ..._recognize import Part, Weights
from .. import functional
from .._call.attention import attend
from .._call.dropout import core_dropout
from .._call.formulas import for_each_head
from .._call.records import Attended, AttentionCall, AttentionTensors
from .._private import unflatten
from .._tensors import draw_seed
from .._weights.last import Last, last_of
from .rotating import Rotary, rotated, turns_of

LAST = "_last_of_mha_c"  # in a module's state: what its last call has left of its weights
NEEDED: Any = object()  # the default of a parameter that has none
MASKS = "mask", "mask 2", "mask 3", "mask 4"  # roles of parameters that are masks
AXES = "items", "queries", "keys"
UNREAD = "unread"  # the role of those that no line reads
ATTENTION = functional._attention  # `watch` puts another function there


class Mask(NamedTuple):
    """What a mask of some rank and type means."""

    sense: str  # "keep": True or not 0 may be seen; "hide": the opposite; "add": to the scores
    axes: tuple[Any, ...]  # how it gets the axes (B, H, Q, K): an index, such as (slice(None), None, None)
    sizes: frozenset[tuple[bool, ...]]  # of these axes, which were compared with their full sizes; the others with 1
    added: float = 0.0  # what is added to hidden scores, as in (1 - mask) * -1e9; 0: it takes their place


class Plan(NamedTuple):
    """What comparing has shown of a module.

    Attributes
    ----------
    kind : str
        "dot", "multi_head" or "additive".
    takes : tuple of (name, role, default)
        The parameters of its call, in their order.
    weights : Weights or None
        Where it keeps them.
    layouts : dict
        {(rank of queries, rank of keys): axes of both}: "BQC", "QBC" (time first), "QC" (no batch), "BC" (one query),
        "BHQC" (heads).
    features : int
        How many features of queries its scale is for; 0: it follows from the queries of each call.
    square : bool
        Whether it was compared with as many queries as keys only.
    more_than_one : frozenset of (layouts, str)
        Of which axes, of AXES, a length of 1 has its own lines run: squeeze() gives another shape then.
    by_place : int
        How many parameters may be given without a name.
    needs : frozenset of str
        Roles that may not be None.
    causal : bool
        Whether query i sees keys 0..i only.
    empty_rows : str
        What a query without keys gets: "uniform" or "zero".
    lens : frozenset of int
        Ranks of lengths.
    masks : dict
        {(role, whether keys were given, layouts, rank, "bool", "int" or "float"): Mask}.
    together : frozenset of frozenset of str
        Which masks, and lengths, may come in one call.
    given : frozenset of (bool, bool)
        Whether keys, and values, were given: (False, False) is self-attention.
    flags : dict
        {values of the parameters without a role: what it gives}: "out", "weights", None, or a tuple of them.
    dropout : tuple of str
        Paths of a Dropout, or of a number, of the weights: several where heads have their own; () where there is none.
    out_dropout : str
        The path of a Dropout of the output; "" where there is none.
    kept : tuple of (path of the owner, name, {layout of queries: form}, whether gradients flow back)
        Attributes that a call sets to the weights.
    most_keys : int
        How many keys its own tables of masks have room for.
    rotary : Rotary or None
        How heads are rotated before they attend.
    dropped_weights : bool
        Whether the weights that it gives or keeps are those after dropout.
    """

    kind: str
    takes: tuple[Any, ...]
    weights: Optional[Weights]
    layouts: dict[tuple[int, int], tuple[str, str]]
    by_place: int = 0
    needs: frozenset[str] = frozenset()
    features: int = 0
    square: bool = False
    more_than_one: frozenset[tuple[tuple[str, str], str]] = frozenset()
    causal: bool = False
    empty_rows: str = "uniform"
    lens: frozenset[int] = frozenset()
    masks: Mapping[tuple[str, bool, tuple[str, str], int, str], Mask] = MappingProxyType({})
    together: frozenset[frozenset[str]] = frozenset()
    given: frozenset[tuple[bool, bool]] = frozenset()
    flags: Mapping[Any, Any] = MappingProxyType({})
    dropout: tuple[str, ...] = ()
    out_dropout: str = ""
    kept: tuple[Any, ...] = ()
    most_keys: int = 1 << 62
    rotary: Optional[Rotary] = None
    dropped_weights: bool = False


class Inputs(NamedTuple):
    """The inputs of a call, in the core's order of axes."""

    queries: Tensor  # (B, Q, .) or (B, H, Q, .)
    keys: Tensor
    values: Tensor
    valid_lens: Any = None
    keep_mask: Optional[Tensor] = None  # these broadcast to (B, H, Q, K)
    bias: Optional[Tensor] = None
    layout: str = "BQC"
    turns: Any = None  # cosines and sines that are given


class Found(NamedTuple):
    """What a call gives; weights are (B, H, Q, K)."""

    out: Tensor
    last: Optional[Last]
    weights: Optional[Tensor]


# --- The inputs of a call -----------------------------------------------------------------------------------


def bound(plan: Plan, args: Any, kwargs: Any) -> Optional[dict[str, Any]]:
    """{role, or a name without role: value}; None where they do not fit, which the module's own lines tell better."""
    takes = plan.takes
    if len(args) > plan.by_place:
        return None
    found = {role or name: value for (name, role, _), value in zip(takes, args)}
    used = 0
    for name, role, default in takes[len(args) :]:
        if name in kwargs:
            found[role or name], used = kwargs[name], used + 1
        elif default is NEEDED:
            return None
        else:
            found[role or name] = default
    return found if used == len(kwargs) else None


def inputs_of(plan: Plan, given: dict[str, Any]) -> Optional[Inputs]:
    """The inputs of a call, if it is of a form that has been compared."""
    queries, keys, values = given["queries"], given.get("keys"), given.get("values")
    has_keys = keys is not None
    if (has_keys, values is not None) not in plan.given or any(given[role] is None for role in plan.needs):
        return None
    keys = next(x for x in (keys, values, queries) if x is not None)
    values = keys if values is None else values
    layout = plan.layouts.get((queries.dim(), keys.dim()))
    if layout is None or values.dim() != keys.dim() or (plan.features and queries.shape[-1] != plan.features):
        return None
    if plan.rotary is not None and queries.dtype is not torch.float32:  # the angles are those of float32
        return None
    q, k, v = arranged(queries, layout[0]), arranged(keys, layout[1]), arranged(values, layout[1])
    v = k if values is keys else v
    k, v = (q, q) if keys is values is queries else (k, v)
    n_queries, n_keys = q.shape[-2], k.shape[-2]
    if (plan.square and n_queries != n_keys) or n_keys > plan.most_keys or not (n_queries and n_keys and q.shape[0]):
        return None
    if layout[0] == "B1C" and n_queries != 1:
        return None
    if any(n == 1 and (layout, axis) in plan.more_than_one for axis, n in zip(AXES, (q.shape[0], n_queries, n_keys))):
        return None
    lens = given.get("valid_lens")
    if lens is not None:
        rank = lens.dim() if isinstance(lens, Tensor) else -1
        shape = (q.shape[0],) if rank == 1 else (q.shape[0], n_queries)
        if rank not in plan.lens or tuple(lens.shape) != shape or lens.dtype is torch.bool:
            return None
    found = masked(plan, given, (has_keys, layout), (q.shape[0], _heads(plan, q), n_queries, n_keys))
    if found is None:
        return None
    turns = None
    if plan.rotary is not None and plan.rotary.table is not None:
        turns = turns_of(plan.rotary.table, given, n_keys)
        if turns is None:
            return None
    return Inputs(q, k, v, lens, *found, layout[0], turns)


def _heads(plan: Plan, q: Tensor) -> int:
    if plan.weights is not None:
        return plan.weights.num_heads
    return int(q.shape[1]) if q.dim() == 4 else 1


def kind_of_mask(mask: Tensor) -> str:
    if mask.dtype is torch.bool:
        return "bool"
    return "float" if mask.is_floating_point() else "int"


def masked(plan: Plan, given: dict[str, Any], way: Any, shape: tuple[int, ...]) -> Optional[tuple[Any, Any]]:
    """(keep_mask, bias) of rank 4, of the masks of a call; None where one is of a form that was not compared.

    way    (whether keys are given, layouts)
    shape  (B, H, Q, K)
    """
    masks = {role: given[role] for role in MASKS if given.get(role) is not None}
    hiding = frozenset((*masks, *(["valid_lens"] if given.get("valid_lens") is not None else [])))
    if len(hiding) > 1 and hiding not in plan.together:
        return None
    keep = bias = None
    for role, mask in masks.items():
        if not isinstance(mask, Tensor):
            return None
        meant = plan.masks.get((role, *way, mask.dim(), kind_of_mask(mask)))
        if meant is None:
            return None
        wide = mask[meant.axes]
        if not any(_fits(wide.shape, shape, sizes) for sizes in meant.sizes):
            return None
        own_keep, own_bias = _meaning(meant, wide, given["queries"].dtype)
        keep = own_keep if keep is None else keep if own_keep is None else keep & own_keep
        bias = own_bias if bias is None else bias if own_bias is None else bias + own_bias
    return keep, bias


def _fits(own: Any, full: tuple[int, ...], sizes: tuple[bool, ...]) -> bool:
    return all(one == (size if is_full else 1) for one, size, is_full in zip(own, full, sizes))


def _meaning(meant: Mask, wide: Tensor, dtype: torch.dtype) -> tuple[Any, Any]:
    """(keep_mask, bias) of one mask."""
    if meant.sense == "add":
        return None, wide
    if meant.added:
        hidden = wide.to(dtype) if meant.sense == "hide" else 1.0 - wide.to(dtype)
        return None, hidden * meant.added
    keep = wide if wide.dtype is torch.bool else wide != 0
    return (~keep if meant.sense == "hide" else keep), None


def arranged(x: Tensor, layout: str) -> Tensor:
    """In the core's order of axes."""
    if layout in ("BQC", "BHQC", "B1C"):
        return x
    if layout in ("QBC", "KBC"):
        return x.transpose(0, 1)
    if layout == "BC":
        return x.unsqueeze(1)
    if layout == "1BC":
        return x.transpose(0, 1)
    return x.unsqueeze(0)  # "QC"


def put_back(x: Tensor, layout: str) -> Tensor:
    """An output (B, Q, .) in the axes of the queries."""
    if layout in ("QBC", "1BC"):
        return x.transpose(0, 1)
    if layout == "BC":
        return x.squeeze(1)
    return x.squeeze(0) if layout == "QC" else x


# --- The call -----------------------------------------------------------------------------------------------


def at(module: Any, path: str) -> Any:
    """The part, or the parameter, at a path."""
    for word in path.split(".") if path else ():
        own = module.__dict__
        found = own["_modules"].get(word)
        if found is None:
            found = own["_parameters"].get(word)
        module = getattr(module, word) if found is None else found
    return module


def weight(module: Any, parts: tuple[Part, ...]) -> Tensor:
    """(outputs, inputs)."""
    if len(parts) > 1:
        return torch.cat([weight(module, (part,)) for part in parts])
    (part,) = parts
    found = at(module, part.weight)
    if part.axes:
        outputs, inputs = part.axes
        found = found.permute(*outputs, *inputs).flatten(len(outputs)).flatten(0, len(outputs) - 1)
    else:
        found = found if part.turned else found.t()
    if part.rows is not None:
        own = part.rows
        found = found[own.start : own.stop] if isinstance(own, range) else found[list(own)]
    return found if part.columns is None else found[:, part.columns]


def bias(module: Any, parts: tuple[Part, ...]) -> Optional[Tensor]:
    """(outputs,), or None."""
    found = []
    for part in parts:
        if not part.bias or at(module, part.bias) is None:
            return None
        one = at(module, part.bias).reshape(-1)
        found.append(one if part.rows is None else one[part.rows_of(len(one))])
    return found[0] if len(found) == 1 else torch.cat(found)


def projected(plan: Plan, module: Any, given: Inputs) -> list[Tensor]:
    """Queries, keys and values by the weights of the module."""
    assert plan.weights is not None
    parts = [plan.weights.parts.get(name) for name in ("W_q", "W_k", "W_v")]
    inputs = given[:3]
    joint = parts[0] and len(parts[0]) == 1 and parts[0][0].rows is not None and inputs[0] is inputs[1] is inputs[2]
    if joint and all(own and own[0][:2] == parts[0][0][:2] for own in parts):  # type: ignore[index]
        whole = parts[0][0]._replace(rows=None)  # type: ignore[index]
        made = linear(inputs[0], weight(module, (whole,)), bias(module, (whole,)))
        return [_outputs(made, own[0].rows) for own in parts]  # type: ignore[index]
    return [
        x if own is None else linear(x, weight(module, _for_features(own, x)), bias(module, own))
        for x, own in zip(inputs, parts)
    ]


def _for_features(parts: tuple[Part, ...], x: Tensor) -> tuple[Part, ...]:
    """Of a projection of [query; key]: the columns for this one of both."""
    if parts[0].columns is None:
        return parts
    n = x.shape[-1]
    return (parts[0]._replace(columns=slice(0, n) if not parts[0].columns.start else slice(-n, None)),)


def _outputs(x: Tensor, rows: Any) -> Tensor:
    return x[..., rows.start : rows.stop] if isinstance(rows, range) else x[..., list(rows)]


def attended(plan: Plan, module: Any, given: Inputs, p: float, keeps: str, drop: Any = None) -> Found:
    """The call, by the core's attention.

    p      the dropout of the weights
    keeps  "": nobody sees the weights; "later": they may be read; "now": they are results of the call
    drop   of a comparison: what stands in the place of dropout
    """
    q, k, v = given[:3]
    w_v, own = None, plan.weights
    if own is not None:
        q, k, v = projected(plan, module, given)
        if plan.kind == "additive":
            w_v = weight(module, own.parts["w_v"]).reshape(-1)
    counts = (1, 1, 1) if own is None else (own.num_heads, own.num_kv_heads, own.num_kv_heads)
    q, k, v = (x if x.dim() == 4 else unflatten(x, 2, (n, -1)).transpose(1, 2) for x, n in zip((q, k, v), counts))
    if plan.rotary is not None:
        q, k = (rotated(plan.rotary, x, given.turns) for x in (q, k))
    call = AttentionCall(given.valid_lens, "top_left" if plan.causal else None, dropout=p, empty_rows=plan.empty_rows)
    tensors = AttentionTensors(q, k, v, w_v, given.keep_mask, given.bias)
    if functional._attention is not ATTENTION and drop is None and keeps != "now":
        found, last = Attended(_seen(call, tensors)), None
    else:
        found, last = _attended(plan, call, tensors, keeps, drop)
    out = found.out
    if given.queries.dim() == 3:
        out = out.transpose(1, 2).flatten(2)
    if own is not None and "W_o" in own.parts:
        out = linear(out, weight(module, own.parts["W_o"]), bias(module, own.parts["W_o"]))
    return Found(out, last, found.weights)


def _attended(plan: Plan, call: AttentionCall, tensors: AttentionTensors, keeps: str, drop: Any) -> tuple[Any, Any]:
    """(Attended with its weights as they are shown, the Last of the call or None)."""
    seed = draw_seed() if call.dropout and plan.dropped_weights and keeps else None
    masked = tensors.keep_mask is not None or tensors.bias is not None
    wanted = drop is not None or keeps == "now" or (keeps == "later" and (masked or seed is not None))
    call = call._replace(return_weights=wanted)
    found = attend(call, tensors, seed)
    if drop is not None or seed is not None:
        acting: Any = drop or core_dropout(call.dropout, seed)
        dropped = acting(found.weights)
        if drop is not None:
            found = found._replace(out=dropped @ for_each_head(tensors.q, tensors.v))
        found = found._replace(weights=dropped if plan.dropped_weights else found.weights)
    own = plan.weights is None
    return found, last_of(call, tensors, found, (own, own)) if keeps == "later" else None


def _seen(call: AttentionCall, tensors: AttentionTensors) -> Tensor:
    """The output under `watch`, which sees calls of the functions."""
    q, k, v, w_v, keep_mask, bias, *_ = tensors
    out: Tensor = functional._attention(
        q, k, v, w_v, call.valid_lens, False, False, keep_mask=keep_mask, bias=bias, causal=call.causal or False,
        dropout=call.dropout, empty_rows=call.empty_rows,
    )  # fmt: skip
    return out
