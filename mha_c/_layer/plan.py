"""What a call needs of its layer, collected once: the `Plan`, and the layers that have one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Optional

import numpy as np

from .._arguments.core_refusals import PackedForOthers
from .._core import isa
from .description import BOOK_NAMES
from .module import Layer

if TYPE_CHECKING:
    from .._types import Array, DType
    from ..linear import States

NO_WAY_BACK = (
    "the last call in training mode was given projected keys, through which no gradient reaches W_k: give it the keys "
    "themselves"
)


class Plan:
    """What a call needs of its layer, collected once; used until a parameter, the inputs' type or the instruction set
    changes."""

    # Read faster than a NamedTuple's.
    __slots__ = ("child", "dtype", "in_core", "isa", "of_cache", "states", "turns")

    def __init__(
        self,
        dtype: DType,
        states: States,
        isa: str,
        in_core: tuple[Any, Any, Any, Any],
        turns: bool,
        child: Optional[Any],
    ) -> None:
        self.dtype, self.states, self.isa = dtype, states, isa  # the plan is valid for these
        self.in_core = in_core  # the projections of queries, keys, values, result; w_v; number of heads; empty_rows
        self.turns = turns  # the layer's `_turns`
        self.child = child  # the inner layer, which shows the attention weights too
        self.of_cache: Optional[tuple[Any, ...]] = None  # the numbers that project its rows, once a cache has asked

    def without(self, projections: Sequence[str]) -> Plan:
        """The plan of a call whose keys or values have been through W_k or W_v already."""
        packed = zip(BOOK_NAMES, self.in_core[0])
        left = tuple(None if name in projections else projection for name, projection in packed)
        return Plan(self.dtype, self.states, self.isa, (left, *self.in_core[1:]), self.turns, self.child)


class Planned(Layer):
    """A layer whose calls follow a plan, which `_make_plan` makes; the last call's is kept with the parameters."""

    _roles: tuple[str, ...] = BOOK_NAMES  # names of the four projections

    def _make_plan(self, queries: Array, states: States) -> Plan:
        raise NotImplementedError

    def _current_plan(self, queries: Array) -> Optional[Plan]:
        """The plan for inputs of this type; None while a size is not known."""
        parameters = self._parameters
        plan, states = parameters.plan, parameters.states
        if plan is None or plan.dtype is not queries.dtype or plan.states is not states or plan.isa != isa():
            if parameters.is_open():
                return None
            plan = parameters.plan = self._make_plan(queries, states)
        return plan

    def _with_plan(self, inputs: tuple[Array, ...], check: Callable[[Plan], Any], run: Callable[[Plan], Any]) -> Any:
        """run(plan).  While a size is not known, check(plan) comes first, with weights of 0: a call that it refuses
        sets no size, and draws no numbers from a stream that others may draw from, too."""
        parameters = self._parameters
        plan = self._current_plan(inputs[0])
        if plan is not None:
            parameters.plan, out = self._run_packed(plan, inputs[0], run)
            return out
        with parameters.lock:
            states = parameters.states
            if parameters.is_open():  # else another thread has just set the sizes
                self._run_packed(self._plan_of_zeros(inputs), inputs[0], check)
                states = self._drawn(states, self._features(inputs))
            plan, out = self._run_packed(self._make_plan(inputs[0], states), inputs[0], run)
            parameters.states, parameters.plan = states, plan
        return out

    def _run_packed(self, plan: Plan, queries: Array, run: Callable[[Plan], Any]) -> tuple[Plan, Any]:
        """(plan, run(plan)); where another thread has selected another instruction set, with weights packed again."""
        while True:
            try:
                return plan, run(plan)
            except PackedForOthers:
                for state in plan.states.values():
                    state.forget_packed()
                plan = self._make_plan(queries, plan.states)

    def _features(self, inputs: Sequence[Array]) -> dict[str, int]:
        return dict(zip(self._roles, (array.shape[-1] if array.ndim else 0 for array in inputs)))

    def _plan_of_zeros(self, inputs: Sequence[Array]) -> Plan:
        """The plan of a call that would set sizes, with weights of 0 where none are drawn yet."""
        states = self._drawn(self._parameters.states, self._features(inputs), lambda low, high, shape: np.zeros(shape))
        return self._make_plan(inputs[0], states)
