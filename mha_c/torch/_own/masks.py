"""Which lengths and masks a reader's module takes, and what they mean."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from .compared import Compared, Unlike
from .plan import Mask, Plan, inputs_of

_ALL = slice(None)
_AXES = {  # of masks (Q, K), (B, K), (B, Q, K), (B, H or 1, Q or 1, K) and (1, ...)
    2: ((None, None), (_ALL, None, None)), 3: ((_ALL, None),), 4: ((),),
}  # fmt: skip


def cases(compared: Compared, plan: Plan, seed: int = 0) -> list[dict[str, Any]]:
    """Inputs for each layout of the plan; with a mask that hides nothing where there must be one."""
    return [compared.inputs(plan.weights, layouts, plan.square, seed) for layouts in plan.layouts.values()]


def with_lengths(compared: Compared, plan: Plan) -> Plan:
    """Lengths of each rank, and what a query without keys gets."""
    if "valid_lens" not in compared.roles:
        return plan
    ranks, empty = set(), ""
    for given, rank in itertools.product(cases(compared, plan)[:1], (1, 2)):
        inputs = inputs_of(plan._replace(needs=frozenset()), given)
        assert inputs is not None
        shape, n_keys = (inputs.queries.shape[0], inputs.queries.shape[-2])[:rank], inputs.keys.shape[-2]
        some = (torch.arange(shape[0] * shape[-1]).reshape(-1)[: _count(shape)] % n_keys + 1).reshape(shape)
        tried = plan._replace(lens=frozenset((rank,)))
        if compared.agrees(tried, {**given, "valid_lens": some}):
            found = _of_empty_rows(compared, tried, {**given, "valid_lens": some - 1}, empty)
            if found:
                ranks.add(rank)
                empty = found
    if not ranks:
        raise Unlike("")
    return plan._replace(lens=frozenset(ranks), empty_rows=empty or plan.empty_rows)


def _count(shape: Any) -> int:
    return int(torch.Size(shape).numel())


def _of_empty_rows(compared: Compared, plan: Plan, given: dict[str, Any], known: str = "") -> str:
    """What a query without keys gets in this call: "uniform", "zero", or "" where it is neither.  NaN counts as 0."""
    for empty in [known] if known else ["uniform", "zero"]:
        if compared.agrees(plan._replace(empty_rows=empty), given):
            return empty
    if known != "uniform" and compared.agrees(plan._replace(empty_rows="zero"), given, lenient=True):
        return "zero"
    return ""


def with_masks(compared: Compared, plan: Plan) -> Plan:
    """Masks of each rank and type: which keys they hide."""
    if "mask" not in compared.roles:
        return plan
    masks: dict[Any, Mask] = {}
    empty = plan.empty_rows if plan.lens else ""
    every = [(given, *each) for given in cases(compared, plan)
             for each in itertools.product(_shapes(compared, plan, given), ("bool", "int", "float"))]  # fmt: skip
    compared.runs = False
    for given, shape, kind in every:
        key = given["queries"].dim(), len(shape), kind
        for sense, axes in itertools.product(("keep", "hide", "add"), _AXES[len(shape)]):
            known = masks.get(key)
            if (sense == "add" and kind != "float") or (known is not None and known[:2] != (sense, axes)):
                continue
            mask = _mask(shape, kind, sense)
            meant = Mask(sense, axes, frozenset((_sizes(compared, plan, given, mask, axes),)))
            tried = plan._replace(masks={key: meant}, empty_rows=empty or "uniform")
            if not compared.agrees(tried, {**given, "mask": mask}):
                continue
            rows = empty
            if sense != "add":
                rows = _of_empty_rows(compared, tried, {**given, "mask": _mask(shape, kind, sense, True)}, empty)
            if rows or sense == "add":
                empty = rows or empty
                masks[key] = meant._replace(sizes=meant.sizes | (known.sizes if known else frozenset()))
            break
    if not masks and (compared.runs or plan.needs):  # where it refuses all of these, it takes masks of other shapes
        raise Unlike("")
    return plan._replace(masks=masks, empty_rows=empty or plan.empty_rows)


def _sizes(compared: Compared, plan: Plan, given: dict[str, Any], mask: Tensor, axes: Any) -> tuple[bool, ...]:
    """Which of the axes (B, H, Q, K) of a mask are more than 1."""
    return tuple(size > 1 for size in mask[axes].shape)


def _shapes(compared: Compared, plan: Plan, given: dict[str, Any]) -> list[tuple[int, ...]]:
    """The shapes that a mask may have in this call."""
    inputs = inputs_of(plan._replace(needs=frozenset()), given)
    assert inputs is not None
    batch, n_queries, n_keys = inputs.queries.shape[0], inputs.queries.shape[-2], inputs.keys.shape[-2]
    heads = inputs.queries.shape[1] if inputs.queries.dim() == 4 else plan.weights.num_heads if plan.weights else 1
    return [
        (batch, n_keys), (n_queries, n_keys), (batch, n_queries, n_keys), (batch, 1, n_keys), (1, n_queries, n_keys),
        (batch, 1, n_queries, n_keys), (batch, 1, 1, n_keys), (1, 1, n_queries, n_keys),
        *([(batch, heads, n_queries, n_keys)] if heads > 1 else []),
    ]  # fmt: skip


def _mask(shape: tuple[int, ...], kind: str, sense: str, empty: bool = False) -> Tensor:
    """A mask that hides some keys of each query, but not all; with `empty`, all of the first row."""
    keep = torch.rand(shape, generator=torch.Generator().manual_seed(len(shape))) < 0.6
    keep[..., -1] = True
    keep[..., 0] = False
    if empty:
        keep.reshape(-1, shape[-1])[0] = False
    if sense == "add":
        return torch.where(keep, torch.randn(shape), torch.tensor(-torch.inf))
    shown = keep if sense == "keep" else ~keep
    if kind == "bool":
        return shown
    found = shown.float() + (shown & (torch.arange(shape[-1]) % 2 == 1)).float()  # 0, 1 and 2
    return found if kind == "float" else found.long()


def all_cases(compared: Compared, plan: Plan) -> list[dict[str, Any]]:
    """A call of each layout, of lengths and of masks."""
    found = [] if plan.needs else [*cases(compared, plan, 1), _many(compared, plan)]
    every = cases(compared, plan, 2)
    given = every[0]
    inputs = inputs_of(plan._replace(needs=frozenset()), given)
    assert inputs is not None
    for rank in plan.lens:
        shape = (inputs.queries.shape[0], inputs.queries.shape[-2])[:rank]
        found.append({**given, "valid_lens": torch.arange(_count(shape)).reshape(shape) % inputs.keys.shape[-2] + 1})
    for given in every:
        for shape, kind in itertools.product(_shapes(compared, plan, given), ("bool", "int", "float")):
            meant = plan.masks.get((given["queries"].dim(), len(shape), kind))
            if meant is not None and len(found) < 5:
                case = {**given, "mask": _mask(shape, kind, meant.sense)}
                if inputs_of(plan, case) is not None:
                    found.append(case)
    if not found:
        raise Unlike("its mask could not be told")
    return found


def _many(compared: Compared, plan: Plan) -> dict[str, Any]:
    """A call with many keys, which shows windows."""
    layouts = next(iter(plan.layouts.values()))
    return compared.inputs(plan.weights, layouts, plan.square, 4, min(130, compared.most_keys))
