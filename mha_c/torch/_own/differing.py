"""Which line of a module makes other numbers than the core does: the first of a call whose inputs are known.

A call is traced; what its operations give is looked up among the numbers of the book's: queries, keys, values, scores,
weights, outputs.  The first operation on the way to the output that makes something unknown of what is known differs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ..._recognize import weights_of
from .._private import unflatten
from .compared import Compared, Unlike, isolated
from .dropping import drop_nothing
from .plan import Inputs, Plan, bias, inputs_of, projected, weight
from .probing import layouts_to_try, widths, with_more_heads
from .rotating import Rotary, rotaries, rotated, tables_for
from .traced import Step, Trace

ORDER = INPUTS, VALUES, KEYS, QUERIES, FEATURES, SCORES, WEIGHTS, OUTPUT = (
    "inputs", "values", "keys", "queries", "features of queries and keys", "scores", "attention weights", "output",
)  # fmt: skip
_MANY, _MORE, _FEW = 20, 130, 5  # keys: the more, the wider windows they show; tables may have room for few
_FEWEST = 8  # numbers that tell
HIDDEN = -1e3  # scores below this are those of hidden keys
_NEAR = 1e-4
_CUTTING = frozenset("__getitem__ chunk split unbind select narrow split_with_sizes tensor_split hsplit".split())
_JOINING = frozenset("stack cat concat concatenate".split())
_MOVING = _CUTTING.union(
    _JOINING,
    "reshape view transpose permute contiguous squeeze unsqueeze flatten unflatten expand expand_as broadcast_to tile "
    "repeat repeat_interleave T mT t swapaxes swapdims movedim moveaxis clone detach data to float double type type_as "
    "view_as reshape_as".split(),
)
_SHUFFLING = frozenset("flip fliplr flipud roll sort gather index_select rot90 scatter".split())


class Known(NamedTuple):
    """What a tensor of a call is.

    noun     one of the words above
    factor   it is so many times the book's
    causal   of scores: whether the future is hidden
    """

    noun: str
    factor: float = 1.0
    causal: bool = False


class _Numbers(NamedTuple):
    """A tensor of the book's, whatever the order of its numbers."""

    known: Known
    scales: bool  # whether a multiple of it is it, too
    ordered: Tensor
    size: int  # of all, with those that are hidden


class Book:
    """The numbers that a call of the book's has, with these weights, heads and rotations."""

    def __init__(self, compared: Compared, plan: Plan, inputs: Inputs) -> None:
        self.compared, self.plan = compared, plan
        self.has_more = any(True for _ in compared.own.parameters()) and bool(
            plan.weights is None or plan.weights.unused(compared.own)
        )
        self.numbers: list[_Numbers] = []
        q, k, v = inputs[:3]
        if plan.weights is not None:
            q, k, v = self._projections(inputs)
        own = plan.weights
        counts = (1, 1, 1) if own is None else (own.num_heads, own.num_kv_heads, own.num_kv_heads)
        q, k, v = (x if x.dim() == 4 else unflatten(x, 2, (n, -1)).transpose(1, 2) for x, n in zip((q, k, v), counts))
        if plan.rotary is not None:
            q, k = (rotated(plan.rotary, x, inputs.turns) for x in (q, k))
        self.q, self.k, self.v = q, k, v
        for noun, x in ((QUERIES, q), (KEYS, k), (VALUES, v)):
            self._add(noun, x, scales=True, axis=1)
        self.w_v = None
        wide_k, wide_v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        if plan.kind == "additive":
            assert own is not None
            summed = q.unsqueeze(3) + k.unsqueeze(2)
            self.w_v = weight(compared.own, own.parts["w_v"]).reshape(-1)
            self._add(FEATURES, summed)
            self._add(FEATURES, summed.tanh())
            self.scores, self.scale = summed.tanh() @ self.w_v, 1.0
        else:
            self.scores, self.scale = q @ wide_k.transpose(2, 3), q.shape[-1] ** -0.5
        self._attended(wide_v)

    def _projections(self, inputs: Inputs) -> list[Tensor]:
        """Queries, keys, values; what joint projections make is known, too, and all of it without biases."""
        own: Any = self.plan.weights
        made = projected(self.plan, self.compared.own, inputs)
        biases = [bias(self.compared.own, own.parts[name]) if name in own.parts else None for name in _NAMES]
        bare = [x if b is None else x - b for x, b in zip(made, biases)]
        for parts in (made, bare):
            same = len({x.shape[:-1] for x in parts}) == 1
            for letters in ((0, 1, 2), (1, 2), (0, 1)) if same else ((1, 2),):
                self._add(QUERIES, torch.cat([parts[i] for i in letters], -1))
            for noun, x in zip((QUERIES, KEYS, VALUES), parts):
                self._add(noun, x, scales=True)
        return made

    def _attended(self, values: Tensor) -> None:
        n_queries, n_keys = self.scores.shape[-2:]
        own: Any = self.plan.weights
        for causal in (False, True):
            seen = torch.ones(n_queries, n_keys, dtype=torch.bool).tril(0 if causal else n_keys)
            scaled = (self.scores * self.scale).masked_fill(~seen, -torch.inf)
            self._add(SCORES, scaled, scales=True, axis=1, causal=causal)
            largest, weights = scaled.amax(-1, keepdim=True), scaled.softmax(-1)
            less = scaled - largest  # the parts of a softmax
            self._add(SCORES, less, scales=True, axis=1, causal=causal)
            for part in (scaled.exp(), less.exp(), largest, scaled.exp().sum(-1), less.exp().sum(-1)):
                self._add(SCORES, part, axis=1, causal=causal)
            mixed = weights @ values
            self._add(WEIGHTS, weights, axis=1, causal=causal)
            self._add(OUTPUT, mixed, axis=1)
            if own is not None and "W_o" in own.parts:
                joined = mixed.transpose(1, 2).flatten(2)
                shift = bias(self.compared.own, own.parts["W_o"])
                out = linear(joined, weight(self.compared.own, own.parts["W_o"]), shift)
                self._add(OUTPUT, out)
                if shift is not None:
                    self._add(OUTPUT, out - shift)

    def _add(self, noun: str, x: Tensor, scales: bool = False, axis: int = 0, causal: bool = False) -> None:
        """Of tensors with an axis of heads, those of each head, too."""
        known = Known(noun, 1.0, causal)
        for one in (x, *(x.unbind(axis) if axis and 1 < x.shape[axis] <= 16 else ())):
            self.numbers.append(_Numbers(known, scales, _ordered(one), one.numel()))

    def find(self, x: Tensor) -> Optional[Known]:
        """What these numbers are, if they are any of the book's.  The same may be added to all scores of a query."""
        found = self._find(x)
        if found is None and x.is_floating_point() and x.dim() > 1 and x.shape[-1] == self.scores.shape[-1]:
            less = self._find(x - x.amax(-1, keepdim=True))
            found = less if less is not None and less.noun == SCORES else None
        return found

    def _find(self, x: Tensor) -> Optional[Known]:
        if not x.is_floating_point() or x.numel() < _FEWEST or bool(x.isnan().any()):
            return None
        ordered = _ordered(x)
        for known, scales, theirs, size in self.numbers:
            if x.numel() != size or ordered.numel() != theirs.numel() or not ordered.numel():
                continue
            factor = float(ordered.norm() / theirs.norm()) if scales else 1.0
            if factor > 0 and torch.allclose(ordered / factor, theirs, rtol=_NEAR, atol=_NEAR):
                return known._replace(factor=factor)
        return None


_NAMES = "W_q", "W_k", "W_v"


def _ordered(x: Tensor) -> Tensor:
    """Its numbers that are not those of hidden scores."""
    x = x.detach().float().flatten()
    return x[x > HIDDEN].sort().values


class Look(NamedTuple):
    """A traced call beside the book's.

    hides    whether a mask, or lengths, hid keys in it
    known    {(step, which of its values): what it is}
    results  the sources of what the call gives
    """

    book: Book
    trace: Trace
    known: dict[tuple[int, int], Known]
    results: list[tuple[int, int]]
    hides: bool = False

    @classmethod
    def at(cls, book: Book, trace: Trace, results: list[tuple[int, int]], hides: bool = False) -> Look:
        known = {(-1 - i, 0): Known(INPUTS) for i in range(len(trace.inputs))}
        for i, step in enumerate(trace.steps):
            follows = all(source in known for source in step.sources)
            moved = step.name in _MOVING and not step.plain and follows
            shuffled = step.name in _SHUFFLING or (step.name in _MOVING - _CUTTING - _JOINING and not follows)
            for which, x in enumerate(step.values):
                found = None if shuffled else book.find(x)
                if found is None and moved and step.sources:
                    found = max((known[source] for source in step.sources), key=lambda one: ORDER.index(one.noun))
                if found is not None:
                    known[i, which] = found
        return cls(book, trace, known, results, hides)

    def reach(self) -> tuple[int, int]:
        """How far the call goes as the book's does, and how much of it."""
        nouns = {one.noun for one in self.known.values()}
        return max(map(ORDER.index, nouns)), len(nouns) * 1000 + len(self.known)

    def first(self) -> Optional[int]:
        """The first step, of those that the results come of, that makes something unknown of what is known; None where
        one result is the output."""
        if any(self.known[source].noun == OUTPUT for source in self.results if source in self.known):
            return None
        todo = [source for source in self.results if source not in self.known]
        seen: set[int] = set()
        while todo:
            step, _ = todo.pop()
            if step not in seen:
                seen.add(step)
                todo += [source for source in self.trace.steps[step].sources if source not in self.known]
        steps = (i for i in sorted(seen) if all(source in self.known for source in self.trace.steps[i].sources))
        return next(steps, None)

    def given_to(self, step: Step) -> Known:
        """The last, in the book's order, of what a step is given."""
        return max((self.known[source] for source in step.sources), key=lambda one: ORDER.index(one.noun))


class Call(NamedTuple):
    """The form of a call.

    layouts  of queries and keys
    square   whether there are as many queries as keys
    filled   which of the lengths or masks that hide nothing it is given
    many     how many keys
    hides    whether a mask hides some
    """

    layouts: tuple[str, str]
    square: bool
    filled: int
    many: int
    hides: bool = False


def looks(module: nn.Module, training: bool = False) -> Iterator[Look]:
    """The best look at a call, and one at a smaller call with other inputs; none where it takes none of ours."""
    with isolated(), torch.no_grad():
        try:
            compared = Compared(module)
        except Unlike:
            return
        compared.own.train(training)
        drop_nothing(compared.own)
        look, plan, called = max(_all_looks(compared), key=lambda one: one[0].reach(), default=(None, None, None))
        if look is None or plan is None or called is None:
            return
        if look.first() is None:
            called = called._replace(many=_MORE)
            look = _looked(compared, plan, called)
        if look is None or look.first() is None:
            hiding = _looked(compared, plan, called._replace(hides=True, many=_MANY))
            yield from () if hiding is None else (hiding,)
            return
        yield look
        fewer = called._replace(many=min(called.many, compared.most_keys) - 2)
        if plan.weights is None and not widths(compared.own):
            compared.width += 1  # a scale may follow from the features
        # ... or from the numbers of items and queries; of both there are fewer, where it takes so few.
        for compared.fewer, again in ((True, fewer), (False, fewer), (False, called)):
            other = _looked(compared, plan, again, seed=1)
            if other is not None:
                yield other
                return


def _looked(compared: Compared, plan: Plan, called: Call, seed: int = 0) -> Optional[Look]:
    found = _traced(compared, plan, called, seed)
    if found is None:
        return None
    return Look.at(Book(compared, plan, _inputs(compared, plan, called, seed)[1]), *found, called.hides)


def _all_looks(compared: Compared) -> Iterator[tuple[Look, Plan, Call]]:
    """One for each way in which axes, weights, heads and rotations may be meant, until one gets as far as scores; of
    additive scores, which grow by broadcasting, all."""
    ways: list[Any] = with_more_heads(compared, weights_of(compared.own))[:24]
    kind = "dot" if not ways else "additive" if "w_v" in ways[0].parts else "multi_head"
    width = 0 if not ways else ways[0].sizes(compared.own)["W_q"][1] // ways[0].num_heads
    for table, features in itertools.product(tables_for(compared.roles, width), _features(compared, kind)):
        compared.table, compared.width = table, features
        turns: list[Optional[Rotary]] = [None, *(rotaries(compared.own, table) if kind == "multi_head" else ())]
        plans = [Plan(kind, compared.takes, way, {}, rotary=turn) for way in ways or [None] for turn in turns]
        for _, choices in layouts_to_try(compared, kind):
            for layouts in choices:
                found = [*_looks_with(compared, plans, layouts)]
                yield from found
                if kind != "additive" and any(look.reach()[0] >= ORDER.index(SCORES) for look, _, _ in found):
                    return


def _features(compared: Compared, kind: str) -> list[int]:
    """How many to try of inputs that are not projected: those that its scale may be for, and others."""
    if kind != "dot":
        return [0]
    fixed, linears = widths(compared.own), {x.in_features for x in compared.own.modules() if type(x) is nn.Linear}
    return [*(n for n in fixed if n**0.5 != round(n**0.5)), 6, *fixed, *linears]


def _looks_with(compared: Compared, plans: list[Plan], layouts: tuple[str, str]) -> Iterator[tuple[Look, Plan, Call]]:
    """The look of each plan at calls with these axes."""
    calls: dict[Any, Any] = {}
    for plan in plans:
        own = compared.features(plan.weights), compared.sizes(plan.weights)
        if own not in calls:
            calls[own] = [*_calls(compared, plan, layouts)]
        for called, trace, results in calls[own]:
            try:
                inputs = _inputs(compared, plan, called)[1]
                look = Look.at(Book(compared, plan, inputs), trace, results)
            except Exception:  # weights that do not fit together in this way
                continue
            yield look, plan, called


def _calls(compared: Compared, plan: Plan, layouts: tuple[str, str]) -> Iterator[tuple[Call, Trace, Any]]:
    """The calls with these axes that run; with lengths, or a mask, only where one without does not."""
    squares = (False, True) if "keys" in compared.roles else (False,)
    for many, square in itertools.product((_MANY, _FEW), squares):
        given = compared.inputs(plan.weights, layouts, square, many=min(many, compared.most_keys))
        runs = False
        for filled in range(len([*compared.filled(given, layouts)])):
            called = Call(layouts, square, filled, many)
            found = _traced(compared, plan, called)
            if found is not None:
                runs = True
                yield (called, *found)
                if not filled:
                    return
        if runs:
            return


def _inputs(compared: Compared, plan: Plan, called: Call, seed: int = 0) -> tuple[dict[str, Any], Inputs]:
    """{role: input} of a call, and the same in our order."""
    n_keys = min(called.many, compared.most_keys)
    given = compared.inputs(plan.weights, called.layouts, called.square, seed, n_keys)
    ranks = given["queries"].dim(), given.get("keys", given["queries"]).dim()
    flags = frozenset((("keys" in given, "values" in given),))
    found = inputs_of(plan._replace(layouts={ranks: called.layouts}, given=flags, needs=frozenset()), given)
    if found is None:
        raise Unlike("")
    return given, found


def _traced(compared: Compared, plan: Plan, called: Call, seed: int = 0) -> Optional[tuple[Trace, Any]]:
    """(trace, sources of the results) of a call; None where it raises."""
    try:
        given, _ = _inputs(compared, plan._replace(rotary=None), called, seed)
    except Unlike:
        return None
    ways = [*compared.filled(given, called.layouts)]
    if called.hides:
        ways = [{role: _some(x) for role, x in one.items()} for one in ways if one]
    for more in ways if called.hides else ways[called.filled :][:1]:  # what it needs, lengths or a mask
        trace = Trace()
        noted = {role: trace.input(x) if role in ("queries", "keys", "values") else x for role, x in given.items()}
        try:
            return trace, trace.sources_of(compared.call({**noted, **more}))
        except Exception:
            continue
    return None


def _some(x: Tensor) -> Tensor:
    """A mask that hides some keys, or other lengths."""
    if x.dtype is not torch.bool:
        return x - torch.arange(len(x)) % 3 - 1
    some = torch.rand(x.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    some[..., 0], some[..., 1] = True, False
    return some
