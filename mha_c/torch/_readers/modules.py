"""The class of a module that is read: the reader's own, but that its calls are read, and may be the core's.

A module gets a class of its own, a subclass of the reader's under its name, which holds its CallState; one that is
left gets the reader's class back.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor, nn

from ..._arguments.calls import is_refusal
from ..._layer.description import LOOKED
from .._call.inputs import without_graphs
from .._private import CHECKPOINT, GLOBAL_HOOKS, is_checkpointed
from .._reading.graph import Reading, Reason
from .._reading.reading import can_read, read
from .._reading.recording import nothing_collected
from .._tensors import is_compiling
from .candidates import next_to_read
from .keys import CallKey, Recent, facts_of, is_like, key_of, nobody_looks
from .layer import ResultTensor, constructor_of, layer_of
from .left import Left, LeftAtFirst, LeftThisTime, tell
from .plans import CoreResult, ReadingPlan

MOST_IN_A_ROW = 6  # readings without a call of the core between them: then calls go on being of new forms
MOST_READINGS = 64  # of one module
MOST_OF_A_KEY = 5
REFUSALS = (BufferError, MemoryError, Left, LeftThisTime)  # of a call, beside those that a check of ours raises
STATE = "_state_of_mha_c"
OTHERWISE: Any = object()


class Looked:
    """What became of a module.

    way      "core"; "waits" for its first call; "left"
    reason   why it was left, or calls of some forms were: the last, if there are several
    instead  what to write where the core has it
    attends  whether there is an attention in it
    """

    def __init__(self, way: str, reason: Optional[Reason] = None, instead: str = "", attends: bool = True) -> None:
        self.way, self.reason, self.instead, self.attends = way, reason, instead, attends


class CallState:
    """What is known of one module's calls.

    own        the reader's class
    plans      {key: its Plans}
    recent     the plan of the last call of the core, or None
    left       {key: why calls of the key are the reader's, where no plan holds}
    odd        keys whose last reading was left for its one call
    readings   how many there were; `in_a_row`, since the last call of the core
    shown      {attribute: what it shows of the last call}
    """

    def __init__(self, module: nn.Module) -> None:
        self.own: Any = type(module)
        self.module = weakref.ref(module)
        self.plans: dict[CallKey, list[ReadingPlan]] = {}
        self.recent: Optional[Recent] = None
        self.left: dict[CallKey, Left] = {}
        self.odd: set[CallKey] = set()
        self.readings = self.in_a_row = 0
        self.shown: dict[str, tuple[ResultTensor, CoreResult, ReadingPlan]] = {}


def prepare(module: nn.Module) -> None:
    """From now on calls of the module are read."""
    if STATE not in vars(type(module)):
        module.__class__ = _made_class(CallState(module))
        LOOKED[module] = Looked("waits")


def is_read(module: Any) -> bool:
    """Whether its calls are read, or the core's."""
    return STATE in vars(type(module))


def state_of(module: Any) -> Optional[CallState]:
    """The CallState of a module that is read; None of any other, and of one that was made of its class."""
    state = vars(type(module)).get(STATE)
    return state if state is not None and state.module() is module else None


def own_kind(module: Any) -> Any:
    """The reader's class of a module."""
    state = vars(type(module)).get(STATE)
    return type(module) if state is None else state.own


class InnerKind(NamedTuple):
    """The class of a module inside another, as a Fact of it; name: none."""

    owner: nn.Module
    name: None
    value: Any

    def still_holds(self) -> bool:
        return own_kind(self.owner) is self.value


def leave(module: Any, why: Optional[Left] = None) -> None:
    """Give a module the reader's class back; what waits inside is read from now on."""
    state = state_of(module)
    if state is None:
        return
    _write_down(module, state)
    module.__class__ = state.own
    LOOKED.pop(module, None)
    inside = next_to_read(module)
    if why is not None:
        LOOKED[module] = Looked("left", why.reason, why.instead, why.attends)
        if why.attends and not inside:
            tell(state.own, why.reason)
    for each in inside:
        prepare(each)


def _made_class(state: CallState) -> Any:
    """A subclass of the reader's class, under its name.  It is made without telling the reader's class of it, which may
    want arguments for a subclass, or list them."""
    own = state.own
    body: dict[str, Any] = {
        "__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__,
        "forward": _forward(state), "__reduce_ex__": _reduced, "__deepcopy__": _deepcopied, "__copy__": _copied,
        STATE: state, "_explained": _explained, "_of_the_same_sizes": _of_the_same_sizes,
    }  # fmt: skip
    made: Any = type.__new__(type(own), own.__name__, (nn.Module,), body)
    made.__bases__ = (own,)
    return made


# --- A call ---------------------------------------------------------------------------------------------------


def _forward(state: CallState) -> Any:
    own_forward = state.own.forward

    @functools.wraps(own_forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():  # compilers see the module's own lines
            return own_forward(self, *args, **kwargs)
        found = computed(state, self, args, kwargs)
        return state.own.forward(self, *args, **kwargs) if found is OTHERWISE else found

    return forward


def computed(state: CallState, module: Any, args: Any, kwargs: Any) -> Any:
    """The result of a call, by the core, or by the reader's lines while they are read; OTHERWISE of any other call."""
    if state.module() is not module or not nobody_looks():
        return OTHERWISE
    recent = state.recent
    if recent is not None and not kwargs and is_like(recent.facts, module, args) and _holds_now(recent.plan):
        return _result(state, module, recent, args, kwargs, args)
    told = key_of(module, args, kwargs)
    if told is None or not told[1]:
        return OTHERWISE
    key, tensors = told
    for plan in state.plans.get(key, ()):
        if plan.suits(tensors) and _holds_now(plan):
            recent = Recent(None if kwargs else facts_of(module, args), key, plan)
            state.recent = recent if recent.facts is not None else None
            return _result(state, module, recent, args, kwargs, tensors)
    if key in state.left:
        return OTHERWISE
    return _read(state, module, args, kwargs, key, tensors)


def _drop(state: CallState, module: Any, key: CallKey, plan: ReadingPlan, error: Exception) -> None:
    """No longer use a plan that failed: calls of its key are the reader's from now on."""
    words = f"the core failed, so its own lines ran ({type(error).__name__}: {error}): please report it".split("\n")[0]
    why = Left(words, plan.layer.line)
    state.plans.pop(key, None)
    state.recent = None
    state.left[key] = why
    if state.plans:
        _is_cores(state, module)
        tell(state.own, why.reason)
    else:
        leave(module, why)


def _holds_now(plan: ReadingPlan) -> bool:
    """Whether all that was read is as it was, and no hook sees all modules."""
    return not any(GLOBAL_HOOKS) and plan.reading.settings.still_holds()


def _result(state: CallState, module: Any, recent: Recent, args: Any, kwargs: Any, tensors: Any) -> Any:
    """The result of a call by the core; OTHERWISE where the core refuses it."""
    plan = recent.plan
    if plan.viewed and not all([tensors[i].is_contiguous() for i in plan.viewed]):
        return OTHERWISE  # its `view` may refuse how a tensor lies in memory
    try:
        found = plan.computed(tensors)
        state.in_a_row = 0
        for path, name, given in plan.layer.kept:
            owner = module.get_submodule(path) if path else module
            _show(owner, name, given, found, plan)
        return plan.result(found)
    except Exception as error:  # the module's own lines refuse it in their own words, or compute it
        if type(error) in REFUSALS or is_refusal(error):
            return OTHERWISE
        if type(error).__module__ == CHECKPOINT:  # which has all that it wanted
            raise
        result = state.own.forward(module, *args, **kwargs)
        _drop(state, module, recent.key, plan, error)  # they compute it: a bug of ours
        return result


def _read(state: CallState, module: Any, args: Any, kwargs: Any, key: CallKey, tensors: list[Tensor]) -> Any:
    """The call by the reader's lines, read; OTHERWISE where it cannot be."""
    nothing = any(map(nn.parameter.is_lazy, module.parameters())) or not all(map(Tensor.numel, tensors))  # to read
    if nothing or is_checkpointed() or state.readings >= MOST_READINGS or not can_read():
        return OTHERWISE
    if state.in_a_row >= MOST_IN_A_ROW:
        leave(module, Left(f"its calls go on being of new forms: {state.readings} were read"))
        return OTHERWISE
    state.readings += 1
    with nothing_collected():
        with _as_the_readers(module):
            result, reading = read(MethodType(state.own.forward, module), args, kwargs)
        state.in_a_row += 1  # not of a call that its lines refuse
        if state_of(module) is state:  # else its lines gave it another class
            _try_to_learn(state, module, key, reading, tensors, result)
    return result


def _try_to_learn(
    state: CallState, module: Any, key: CallKey, reading: Reading, tensors: list[Tensor], result: Any
) -> None:
    """Let the core compute calls of the key, or the reader's lines for ever."""
    try:
        _learn(state, key, reading, tensors, result)
    except Left as why:
        again = isinstance(why, (LeftThisTime, LeftAtFirst)) and key not in state.odd
        if again:  # the second time it is left for ever
            state.odd.add(key)
        else:
            state.left[key] = why
        if not state.plans and (again or why.of_this_form):
            LOOKED[module] = Looked("waits", why.reason, why.instead)
        elif not state.plans:
            leave(module, why)
    if state.plans:
        _is_cores(state, module)


def _is_cores(state: CallState, module: Any) -> None:
    """Note that calls of a module are the core's, and why those of other forms are not."""
    why = next(reversed([*state.left.values()]), None)
    LOOKED[module] = Looked("core") if why is None else Looked("core", why.reason, why.instead)


@contextmanager
def _as_the_readers(module: Any) -> Iterator[None]:
    """While a module is read, it and those inside have the reader's classes, and the weights of the call before."""
    made = [(each, type(each)) for each in module.modules() if is_read(each)]
    try:
        for each, kind in made:
            _write_down(each, vars(kind)[STATE])
            each.__class__ = vars(kind)[STATE].own
        yield
    finally:
        for each, kind in made:
            if type(each) is vars(kind)[STATE].own:
                each.__class__ = kind


def _learn(state: CallState, key: CallKey, reading: Reading, tensors: list[Tensor], result: Any) -> None:
    """Keep a plan for later calls of the key, beside those of other sizes; Left where there is none."""
    known = [plan for plan in state.plans.get(key, ()) if plan.reading.settings.still_holds()]
    if any(plan.agrees(reading, tensors, result) for plan in known):
        return
    try:
        layer = layer_of(reading)
        inside = [*state.module().modules()][1:]  # type: ignore[union-attr]
        reading.settings.facts += [InnerKind(each, None, own_kind(each)) for each in inside]
        plan = ReadingPlan(layer, reading, tensors)
        plan.check(tensors, result)
    except Left:
        raise
    except Exception as error:  # the call was the reader's: nothing of ours may end it
        raise Left(f"its graph has what is not known here ({type(error).__name__}: {error})") from error
    state.plans[key] = [plan, *state.plans.get(key, ())][:MOST_OF_A_KEY]
    state.odd.discard(key)
    state.recent = None


# --- Weights --------------------------------------------------------------------------------------------------


def _show(owner: Any, name: str, given: ResultTensor, found: CoreResult, plan: ReadingPlan) -> None:
    """Let an attribute show the weights of a call, which are computed when somebody reads them."""
    state = vars(type(owner)).get(STATE)
    if state is None:
        prepare(owner)
        state = vars(type(owner))[STATE]
        state.left = _Every()
    kind = type(owner)
    if name not in vars(kind):
        setattr(kind, name, _shown(name))
    state.shown[name] = given, found, plan
    owner.__dict__.pop(name, None)


class _Every(dict):  # type: ignore[type-arg]
    """Why no call is read, of a module that only shows weights."""

    def __contains__(self, key: Any) -> bool:
        return True


def _shown(name: str) -> property:
    """The attribute under which a reader's module keeps its weights."""

    def read_it(self: Any) -> Any:
        state = vars(type(self))[STATE]
        shown = state.shown.get(name)
        if shown is not None and state.module() is self:
            given, found, plan = shown
            return plan.shown(given, found, later=True)
        if name in self.__dict__:
            return self.__dict__[name]
        for kind in state.own.__mro__:
            if name in vars(kind):
                found = vars(kind)[name]
                return found.__get__(self, type(self)) if hasattr(found, "__get__") else found
        return state.own.__getattr__(self, name)

    def write(self: Any, value: Any) -> None:
        if state_of(self) is not None:  # a module that was made of its class has its own
            vars(type(self))[STATE].shown.pop(name, None)
        self.__dict__[name] = value

    def remove(self: Any) -> None:
        if state_of(self) is None or vars(type(self))[STATE].shown.pop(name, None) is None:
            del self.__dict__[name]

    return property(read_it, write, remove)


def _write_down(module: Any, state: CallState, with_graph: bool = True) -> None:
    """Put what is shown into the module's own state, as its own lines would have left it."""
    for name in [*state.shown]:
        value = getattr(module, name)
        state.shown.pop(name)
        if isinstance(value, Tensor):
            with torch.set_grad_enabled(with_graph):
                value = (value if with_graph else value.detach()) + 0
        module.__dict__[name] = value


# --- Copies and files -----------------------------------------------------------------------------------------


def _as_own(self: Any, function: Any) -> Any:
    """What a function gives of the module while it has the reader's class."""
    made, state = type(self), state_of(self)
    if state is None:
        return function()
    _write_down(self, state, with_graph=False)  # a tensor with a graph has no copy
    self.__class__ = state.own
    try:
        return function()
    finally:
        self.__class__ = made


_NEW_OBJECT = getattr(copyreg, "__newobj__")  # noqa: B009 - which typeshed has not


def _reduced(self: Any, protocol: Any) -> Any:
    """A pickle holds the reader's own class."""
    found = _as_own(self, lambda: self.__reduce_ex__(protocol))
    if isinstance(found, tuple) and found[0] is _NEW_OBJECT:  # which wants the class that the module has now
        return (object.__new__, *found[1:])
    return found


def _deepcopied(self: Any, memo: dict[int, Any]) -> Any:
    """A copy is the reader's, and is read at its own first call."""
    memo.update(without_graphs(self))
    twin = _as_own(self, lambda: _copy_of(self, copy.deepcopy, memo))
    memo[id(self)] = twin
    return twin


def _copied(self: Any) -> Any:
    return _as_own(self, lambda: _copy_of(self, copy.copy))


def _copy_of(module: Any, copier: Any, *memo: Any) -> Any:
    twin = copier(module, *memo)
    prepare(twin)
    return twin


# --- For mha_c.explain ----------------------------------------------------------------------------------------


def _explained(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The facts of a call."""
    state, plan, reason = state_of(self), None, ""
    told = key_of(self, args, kwargs) if nobody_looks() else None
    if state is None or told is None:
        reason = "a call like this is never read"
    else:
        suiting = [each for each in state.plans.get(told[0], ()) if each.suits(told[1])]
        plan = next((each for each in suiting if _holds_now(each)), None)
        why = state.left.get(told[0])
        reason = "" if why is None else str(why.reason)
        reason = reason or ("something that it read has changed" if suiting else "no call of this form was read")
    first = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
    facts: dict[str, Any] = {
        "dtype": str(first.dtype).rpartition(".")[2], "device": str(first.device),
        "way": "general" if plan is None else "core",
        "why": f"its own lines: {reason}" if plan is None else "the compiled core, in the place of its own lines",
    }  # fmt: skip
    if plan is not None and told is not None:
        facts["attention"] = plan.counts(told[1])
    return facts


def _of_the_same_sizes(self: Any) -> str:
    """How to write a layer of ours that computes as much, for mha_c.cost."""
    state = state_of(self)
    plans = [each for found in (state.plans.values() if state else ()) for each in found]
    if not plans:
        return "MultiHeadAttention(...)"
    return constructor_of(plans[-1].layer)
