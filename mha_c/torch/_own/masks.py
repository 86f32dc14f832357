"""Which lengths and masks a reader's module takes, and what they mean."""

from __future__ import annotations

import dis
import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from . import forms
from .compared import Compared, Unlike, layouts_of
from .plan import MASKS, NEEDED, UNREAD, Mask, Plan, inputs_of

_ALL = slice(None)
_AXES = {  # of masks (Q, K), (B, K), (B, Q, K), (B, H or 1, Q or 1, K) and (1, ...)
    2: ((None, None), (_ALL, None, None)), 3: ((_ALL, None),), 4: ((),),
}  # fmt: skip


_SENSES = ("keep", 0.0), ("hide", 0.0), ("add", 0.0), ("keep", -1e9), ("hide", -1e9), ("keep", -1e4), ("hide", -1e4)
_INPUTS = "keys", "values"


def cases(compared: Compared, plan: Plan, seed: int = 0, many: int = 0) -> list[dict[str, Any]]:
    """Inputs for each layout of the plan, with and without those that may be left out."""
    return [
        compared.inputs(plan.weights, layouts, plan.square, seed, many, left_out(compared, are_given))
        for ranks, layouts in plan.layouts.items()
        for are_given in sorted(plan.given, reverse=True)
        if ranks[0] == ranks[1] or any(are_given)
    ]


def left_out(compared: Compared, are_given: tuple[bool, bool]) -> tuple[str, ...]:
    """The inputs that such a call does not give, though it may."""
    return tuple(role for role, is_given in zip(_INPUTS, are_given) if role in compared.roles and not is_given)


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
    """Masks of each parameter, rank and type: which keys they hide."""
    plan = _without_unread(compared, plan)
    roles = [role for role in MASKS if role in compared.roles]
    if not roles:
        return plan
    fitted = _Masks(compared, plan)
    for role, given in itertools.product(roles, cases(compared, plan)):
        shapes, alike = _shapes(compared, plan, given), 0
        for kind in ("bool", "float", "int"):
            if kind != "int" or alike:  # who takes integers takes one of the others, too
                alike += sum([fitted.fit(role, given, shape, kind) for shape in shapes])
    if not fitted.masks and (fitted.runs or plan.needs):  # where it refuses all of these, it takes other shapes
        raise Unlike("")
    return _with_pairs(compared, plan._replace(masks=fitted.masks, empty_rows=fitted.empty or plan.empty_rows))


class _Masks:
    """What the masks of a module mean, as far as they have been told.

    empty   what a query without keys gets; "" where it is not known yet
    runs    whether the module has taken any mask
    """

    def __init__(self, compared: Compared, plan: Plan) -> None:
        self.compared, self.plan, self.runs = compared, plan, False
        self.masks: dict[Any, Mask] = {}
        self.empty = plan.empty_rows if plan.lens else ""

    def fit(self, role: str, given: dict[str, Any], shape: tuple[int, ...], kind: str) -> bool:
        """Tell what a mask of this shape and type means, if the module takes it; whether it has been told."""
        key = role, "keys" in given, layouts_of(self.plan, given), len(shape), kind
        mask = _mask(shape, kind, "keep")
        try:
            result = self.compared.call({**given, role: mask})
        except Exception as error:
            self.compared.errors.append(error)
            return False
        self.runs = True
        if self._is_result(result, self.plan, given):  # it has no effect
            return False
        known = self.masks.get(key)
        for (sense, added), axes in itertools.product(_SENSES, _AXES[len(shape)]):
            same = known is None or (known.sense, known.axes, known.added) == (sense, axes, added)
            if not same or (sense == "add" and kind != "float"):
                continue
            meant = Mask(sense, axes, frozenset((tuple(size > 1 for size in mask[axes].shape),)), added)
            tried = self.plan._replace(masks={key: meant}, empty_rows=self.empty or "uniform")
            if self._is_result(result, tried, {**given, role: mask}) and self._agrees(tried, key, given, shape):
                self.masks[key] = meant._replace(sizes=meant.sizes | (known.sizes if known else frozenset()))
                return True
        return False

    def _is_result(self, result: Any, plan: Plan, given: dict[str, Any]) -> bool:
        try:
            found, key = self.compared.ours(plan, given), self.compared.key(plan, given)
        except Exception:
            return False
        return found is not None and forms.form_of(result, found.out, found.weights, key[0]) == plan.flags.get(key)

    def _agrees(self, tried: Plan, key: Any, given: dict[str, Any], shape: tuple[int, ...]) -> bool:
        role, kind, meant = key[0], key[-1], tried.masks[key]
        sense = meant.sense
        if not self.compared.agrees(tried, {**given, role: _mask(shape, kind, sense)}):
            return False
        if sense == "add":
            return True
        hiding = {**given, role: _mask(shape, kind, sense, True)}
        if meant.added:
            return self.compared.agrees(tried, hiding)
        found = _of_empty_rows(self.compared, tried, hiding, self.empty)
        self.empty = found or self.empty
        return bool(found)


def _without_unread(compared: Compared, plan: Plan) -> Plan:
    """The plan, where masks that no line reads have no role but this."""
    for index, (name, role, default) in enumerate(plan.takes):
        if role in MASKS and default is not NEEDED and _is_unread(compared, plan, name, role):
            compared.takes = (*compared.takes[:index], (name, UNREAD, default), *compared.takes[index + 1 :])
            compared.roles[index] = UNREAD
            plan = plan._replace(takes=compared.takes)
    return plan


class _Unreadable(Tensor):
    """A tensor that raises when anything is done with it."""

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("it is read")


def _is_unread(compared: Compared, plan: Plan, name: str, role: str) -> bool:
    """Whether the lines of its forward never name the parameter, and calls bear one that cannot be read."""
    forward: Any = inspect.unwrap(type(compared.own).forward)
    loaded = (each.argval for each in dis.get_instructions(forward) if "STORE" not in each.opname)
    if any(name == each or (isinstance(each, tuple) and name in each) for each in loaded):
        return False
    unreadable = torch.zeros(1).as_subclass(_Unreadable)
    return all(compared.agrees(plan, {**given, role: unreadable}, ignores=role) for given in cases(compared, plan))


def _with_pairs(compared: Compared, plan: Plan) -> Plan:
    """Which two masks, or lengths and mask, may come in one call: those that hide what either of them hides."""
    together = set()
    for pair in itertools.combinations([role for role in ("valid_lens", *MASKS) if role in compared.roles], 2):
        tried, found = plan._replace(together=frozenset((frozenset(pair),))), []
        for given in cases(compared, plan):
            some = [next(_known_cases(compared, plan, given, role, bool(i)), None) for i, role in enumerate(pair)]
            if all(x is not None for x in some):
                found.append(compared.agrees(tried, {**given, **dict(zip(pair, some))}))
        if found and all(found):
            together.add(frozenset(pair))
    return plan._replace(together=frozenset(together))


def without_switches(compared: Compared, plan: Plan) -> Plan:
    """The plan without the positions of switches in which lengths or masks hide something else."""
    names, flags = [name for name, role, _ in plan.takes if not role], dict(plan.flags)
    for case in all_cases(compared, plan):
        usual = compared.key(plan, case)
        for key in [*flags] if {*case} & {"valid_lens", *MASKS} else []:
            switched = {**case, **dict(zip(names, key[1]))}
            if key != usual and compared.key(plan, switched) == key and not compared.agrees(plan, switched):
                del flags[key]
    return plan._replace(flags=flags)


def _known_cases(
    compared: Compared, plan: Plan, given: dict[str, Any], role: str, other: bool = False
) -> Iterator[Tensor]:
    """Lengths, or masks of a parameter, that the plan takes in this call; `other` masks hide other keys."""
    if role == "valid_lens":
        inputs = inputs_of(plan._replace(needs=frozenset()), given)
        assert inputs is not None
        for rank in plan.lens:
            yield torch.full((inputs.queries.shape[0], inputs.queries.shape[-2])[:rank], inputs.keys.shape[-2] - 1)
        return
    for shape, kind in itertools.product(_shapes(compared, plan, given), ("bool", "int", "float")):
        meant = plan.masks.get((role, "keys" in given, layouts_of(plan, given), len(shape), kind))
        if meant is not None:
            mask = _mask(shape, kind, meant.sense, other=other)
            if inputs_of(plan._replace(needs=frozenset()), {**given, role: mask}) is not None:
                yield mask


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


def _mask(shape: tuple[int, ...], kind: str, sense: str, empty: bool = False, other: bool = False) -> Tensor:
    """A mask that hides some keys of each query, but not the last; with `empty`, all of the first row.  One and the
    `other` each hide a key that the other does not, the first and the second."""
    keep = torch.rand(shape, generator=torch.Generator().manual_seed(len(shape) + other)) < 0.6
    keep[..., -1] = True
    keep[..., 1:2] &= not other
    keep[..., 0] = other
    if empty:
        keep.reshape(-1, shape[-1])[0] = False
    if sense == "add":
        return torch.where(keep, torch.randn(shape, dtype=torch.float32), -torch.inf)
    shown = keep if sense == "keep" else ~keep
    if kind == "bool":
        return shown
    places = torch.arange(shape[-1])
    found = shown.long() + (shown & (places % 2 == 1)).long()  # 0, 1 and 2
    return found.float().masked_fill(shown & (places % 3 == 1), 0.25) if kind == "float" else found


def all_cases(compared: Compared, plan: Plan) -> list[dict[str, Any]]:
    """A call of each layout, of lengths and of masks."""
    many = min(130, compared.most_keys)  # which shows windows
    found = [] if plan.needs else [*cases(compared, plan, 1), *cases(compared, plan, 4, many)[: len(plan.given)]]
    every = cases(compared, plan, 2)
    given = every[0]
    inputs = inputs_of(plan._replace(needs=frozenset()), given)
    assert inputs is not None
    for rank in plan.lens:
        shape = (inputs.queries.shape[0], inputs.queries.shape[-2])[:rank]
        found.append({**given, "valid_lens": torch.arange(_count(shape)).reshape(shape) % inputs.keys.shape[-2] + 1})
    for given, role in itertools.product(every, MASKS):
        found += ({**given, role: mask} for mask in itertools.islice(_known_cases(compared, plan, given, role), 1))
    if not found:
        raise Unlike("its mask could not be told")
    return found
