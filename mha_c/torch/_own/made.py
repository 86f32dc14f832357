"""The class that is made for a reader's module: the reader's own, but that the core computes its calls."""

from __future__ import annotations

import copy
import functools
from typing import Any, Optional

import torch
from torch import Tensor, nn

from ..._arguments.core_refusals import PackedForOthers
from ..._core import layer_parts
from ..._recognize import Part
from .. import functional
from .._call import core
from .._call.attention import any_needs_grad
from .._call.children import Layout
from .._call.inputs import without_graphs
from .._call.records import Parameters
from .._private import autocasting_anywhere, quickly_on_cpu, watched
from .._tensors import FLOATS, PLAIN, is_compiling
from .._weights.last import Last
from . import forms
from .plan import ATTENTION, LAST, Inputs, Plan, at, attended, bias, bound, inputs_of, weight
from .quick import Quick
from .watched import Watched

_BOOKKEEPING = (LAST, "_compared_tables")
_REFUSED = (BufferError, TypeError, ValueError, RuntimeError, IndexError, KeyError, PackedForOthers)
_OTHERWISE: Any = object()


class _Options:
    """What `core.call` reads of a module."""

    _last = None

    def __init__(self, plan: Plan) -> None:
        self.num_heads = 1 if plan.weights is None else plan.weights.num_heads
        self.empty_rows = plan.empty_rows


class _Rate:
    """A dropout that is a number."""

    def __init__(self, p: float, training: bool) -> None:
        self.p, self.training = p, training


class How:
    """How calls of one module are computed."""

    def __init__(self, plan: Plan, module: nn.Module) -> None:
        self.plan, self.own = plan, type(module)
        changes = [name for _, name, *_ in plan.kept] + [path.rpartition(".")[2] for path in plan.dropout]
        self.watched = Watched.of(module, changes)
        self.options = _Options(plan)
        self.layout = self._layout(module)
        self.is_whole_layer = self._is_whole_layer()
        self.flags = tuple(role or name for name, role, _ in plan.takes if not role)
        self.simple = not self.flags and plan.layouts.get((3, 3)) == ("BQC", "BQC")
        self.shown: dict[str, dict[str, dict[str, Any]]] = {}  # {layout: {path of the owner: {name: (form, requires)}}}
        for path, name, by_layout, requires in plan.kept:
            for layout, form in by_layout.items():
                self.shown.setdefault(layout, {}).setdefault(path, {})[name] = form, requires
        self.heads = self.options.num_heads
        self.quick = Quick.of(self)

    def _is_whole_layer(self) -> bool:
        """Whether one call of the core computes all of it: projections, attention and output."""
        plan = self.plan
        if plan.causal or plan.rotary or plan.dropped_weights:
            return False
        if plan.weights is None:
            return True
        parts = plan.weights.parts
        single = all(len(own) == 1 and own[0] == Part(own[0].weight, own[0].bias) for own in parts.values())
        complete = "w_v" in parts or "W_o" in parts
        return single and complete and plan.weights.num_heads == plan.weights.num_kv_heads

    def _layout(self, module: nn.Module) -> Optional[Layout]:
        """For csrc/python/torch/children.c, which reads the parts of a layer quickly; None where it cannot."""
        plan = self.plan
        if not self._is_whole_layer() or len(plan.dropout) != 1:
            return None
        path, _, name = plan.dropout[0].rpartition(".")
        if "." in path or not isinstance(at(module, plan.dropout[0]), nn.Dropout):
            return None
        slots = []
        for slot, ours in ((0, "W_q"), (1, "W_k"), (2, "W_v"), (3, "W_o"), (8, "w_v")):
            for part in plan.weights.parts.get(ours, ()) if plan.weights is not None else ():
                owner, _, last = part.weight.rpartition(".")
                if "." in owner or last != "weight" or type(at(module, owner)) not in (nn.Linear, nn.LazyLinear):
                    return None
                slots.append((slot, owner))
        whole = {path} | {name for _, name in slots} if path else {name} | {each for _, each in slots}
        if {*module._modules} != whole or any(True for _ in module.buffers()):
            return None
        inner = (path, type(at(module, path))) if path else None
        layout = Layout.of(slots, inner, self.watched.names)
        words = (*layout.words[:6], name, *layout.words[7:])
        return layout._replace(words=words)


def make(module: nn.Module, plan: Plan) -> None:
    """Give a module the class that is made for it."""
    module.__class__ = made_class(How(plan, module))


def made_class(how: How) -> Any:
    """A subclass of the reader's class, under its name."""
    own: Any = how.own
    body: dict[str, Any] = {
        "__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__,
        "forward": _forward(how), "__reduce_ex__": _reduced, "__deepcopy__": _deepcopied, "__copy__": _copied,
        "_how_of_mha_c": how, "_kept_names": tuple(name for path, name, *_ in how.plan.kept if not path),
        "_explained": _explained, "_of_the_same_sizes": _of_the_same_sizes,
    }  # fmt: skip
    body.update({name: _shown(name) for name in body["_kept_names"]})
    found = type(own)(own.__name__, (own,), body)
    how.made = found  # type: ignore[attr-defined]
    return found


def is_made(module: Any) -> bool:
    """Whether it has a class that is made for it."""
    return "_how_of_mha_c" in vars(type(module))


def is_ours(module: Any) -> bool:
    """Whether mha_c computes it: one of our classes (those that patch() has put into d2l have d2l's name), or one that
    `convert` has made."""
    return type(module).__module__.startswith("mha_c.") or hasattr(type(module), "_explained")


# --- A call ---------------------------------------------------------------------------------------------------


def _forward(how: How) -> Any:
    own_forward, quick = how.own.forward, how.quick

    @functools.wraps(own_forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():  # compilers see the module's own lines
            return own_forward(self, *args, **kwargs)
        found = None
        if quick is not None and not kwargs and type(self) is how.made:  # type: ignore[attr-defined]
            try:
                found = quick.call(self, args)
            except _REFUSED:
                pass
        if found is None:
            found = _computed(how, self, args, kwargs)
        return own_forward(self, *args, **kwargs) if found is _OTHERWISE else found

    return forward


def _computed(how: How, module: Any, args: Any, kwargs: Any) -> Any:
    """The result by the core; _OTHERWISE where the module's own lines must compute it."""
    plan = how.plan
    given = bound(plan, args, kwargs)
    if given is None or not _is_plain(given) or type(module) is not how.made:  # type: ignore[attr-defined]
        return _OTHERWISE
    try:
        inputs = inputs_of(plan, given)
        form = None if inputs is None else _form(how, given, inputs)
        if form is None or inputs is None:
            return _OTHERWISE
        return _by_core(how, module, inputs, form)
    except _REFUSED:  # the module's own lines refuse it in their own words, or compute it
        return _OTHERWISE


def _form(how: How, given: dict[str, Any], inputs: Inputs) -> Any:
    """What a call with these switches gives; None where that was not compared."""
    return how.plan.flags.get((inputs.layout, tuple([given[name] for name in how.flags])))


def _is_plain(given: dict[str, Any]) -> bool:
    """Whether the core may read these: plain tensors on the CPU of one type, and nobody watches."""
    queries = given["queries"]
    if type(queries) not in PLAIN or queries.dtype not in FLOATS or not quickly_on_cpu(queries):
        return False
    for role in ("keys", "values"):
        x = given.get(role)
        if x is not None and (type(x) not in PLAIN or x.dtype is not queries.dtype):
            return False
    return not (watched() or autocasting_anywhere())


def _by_core(how: How, module: Any, inputs: Inputs, form: Any) -> Any:
    plan, parts = how.plan, None
    whole = how.is_whole_layer and inputs.keep_mask is inputs.bias is None and inputs.queries.dim() == 3
    keeps = "later" if plan.kept else ""
    if "out" not in str(form) or forms.is_several(form):
        recorded = torch.is_grad_enabled() and (inputs.queries.requires_grad or any_needs_grad(module.parameters()))
        keeps = "now" if plan.kept == () and recorded else "later"
        whole = whole and not recorded
    whole = whole and functional._attention is ATTENTION
    if whole and how.layout is not None and how.watched._is_tree(module, how.watched.tree):
        parts = layer_parts(module, how.layout)
    if parts is None and not (how.watched.is_whole(module) and how.watched.has_tables(module)):
        return _OTHERWISE
    if whole:
        found = _whole_layer(how, module, inputs, parts)
        out, last, weights = found
    else:
        out, last, weights = attended(plan, module, inputs, _rate(plan, module), keeps)
    if plan.out_dropout:
        out = at(module, plan.out_dropout)(out)
    heads = how.heads if inputs.queries.dim() == 3 else int(inputs.queries.shape[1])
    if plan.kept:
        shown = how.shown[inputs.layout]
        for path, names in shown.items():
            (at(module, path) if path else module).__dict__[LAST] = (last, weights, names, heads)
    if form == "out":
        return out if how.simple else forms.given(form, out, None, inputs.layout)
    return forms.given(form, out, lambda each: _in_form(last, weights, each, heads), inputs.layout)


def _rate(plan: Plan, module: Any) -> float:
    """What a call drops; ValueError if heads drop differently."""
    rates = {_rate_of(module, path) for path in plan.dropout}
    if len(rates) > 1:
        raise ValueError(f"heads drop differently: {rates}")
    return rates.pop() if rates else 0.0


def _rate_of(module: Any, path: str) -> float:
    found: Any = at(module, path)
    if isinstance(found, nn.Module):
        return float(found.p) if found.training else 0.0
    owner = path.rpartition(".")[0]
    part = at(module, owner)
    part = part if isinstance(part, nn.Module) else at(module, owner.rpartition(".")[0])  # self.config.p
    return float(found) if part.training else 0.0


def _whole_layer(how: How, module: Any, inputs: Inputs, parts: Any) -> tuple[Tensor, Any, None]:
    plan, box = how.plan, {}  # type: tuple[Plan, dict[str, Any]]
    if parts is None:
        parameters, dropout = _parameters(plan, module), _Rate(_rate(plan, module), True)
    else:
        parameters, _, dropout, _ = parts
    queries, keys, values, lens, *_ = inputs
    out = core.call(how.options, (parameters, box, dropout, None), (queries, keys, values), lens, None)
    return out, box["_last"], None


def _parameters(plan: Plan, module: Any) -> Parameters:
    own = {} if plan.weights is None else plan.weights.parts
    found = {name: weight(module, parts) for name, parts in own.items()}
    biases = {f"b_{name[2:]}": bias(module, parts) for name, parts in own.items() if name != "w_v"}
    if "w_v" in found:
        found["w_v"] = found["w_v"].reshape(1, -1)
    return Parameters(**found, **biases)


# --- Weights --------------------------------------------------------------------------------------------------


def _in_form(last: Optional[Last], weights: Any, form: str, heads: int) -> Any:
    """The weights of a call in a form; those of a Last are computed when somebody reads their numbers."""
    if weights is None and last is not None:
        if form in ("heads", "folded"):
            return last.weights(heads if form == "heads" else None)
        weights = last.weights(heads) + 0
    return forms.shaped(weights, form)


def _shown(name: str) -> property:
    """The attribute under which a reader's module keeps its weights."""

    def read(self: Any) -> Any:
        found = self.__dict__.get(LAST)
        if found is None or name not in found[2]:
            if name in self.__dict__:
                return self.__dict__[name]
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        last, weights, names, heads = found
        form, requires = names[name]
        shown = _in_form(last, weights, form, heads)
        return shown if requires else shown.detach()

    def write(self: Any, value: Any) -> None:
        self.__dict__.pop(LAST, None)
        self.__dict__[name] = value

    def remove(self: Any) -> None:
        if self.__dict__.pop(LAST, None) is None:
            del self.__dict__[name]

    return property(read, write, remove)


# --- Copies and files -----------------------------------------------------------------------------------------


def _state(module: Any) -> dict[str, Any]:
    """The state of a module as its own class has it: weights as a tensor under their name."""
    state = {name: value for name, value in module.__dict__.items() if name not in _BOOKKEEPING}
    if LAST in module.__dict__:
        for name in type(module)._kept_names:
            value = getattr(module, name)
            state[name] = (value.detach() + 0) if isinstance(value, Tensor) else value
    return state


def _reduced(self: Any, protocol: Any) -> Any:
    """A pickle holds the reader's own class."""
    return object.__new__, (type(self)._how_of_mha_c.own,), _state(self)


def _deepcopied(self: Any, memo: dict[int, Any]) -> Any:
    """A copy has the class that was made, too."""
    memo.update(without_graphs(self))
    return _with_state(self, lambda state: copy.deepcopy(state, memo), memo)


def _copied(self: Any) -> Any:
    return _with_state(self, dict, {})


def _with_state(module: Any, of: Any, memo: dict[int, Any]) -> Any:
    twin = module.__class__.__new__(module.__class__)
    memo[id(module)] = twin
    state = of(_state(module))
    twin.__dict__.update(state)
    return twin


# --- For mha_c.explain ----------------------------------------------------------------------------------------


def _explained(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The facts of a call."""
    how = type(self)._how_of_mha_c
    given = bound(how.plan, args, kwargs)
    inputs = None if given is None or not _is_plain(given) else inputs_of(how.plan, given)
    whole = how.watched.is_whole(self) and how.watched.has_tables(self)
    reason = ""
    if any(map(nn.parameter.is_lazy, self.parameters())):
        reason = "the first call sets sizes"
    elif not whole:
        reason = "a part was replaced, or has hooks, since convert has compared them"
    elif given is None or inputs is None or _form(how, given, inputs) is None:
        reason = "a call of this form was not compared"
    first = args[0] if args else next(iter(kwargs.values()))
    facts: dict[str, Any] = {
        "dtype": str(first.dtype).rpartition(".")[2], "device": str(first.device),
        "way": "general" if reason else "core",
        "why": f"its own lines: {reason}" if reason else "the compiled core, in the place of its own lines",
    }  # fmt: skip
    if inputs is not None:
        heads = 1 if how.plan.weights is None else how.plan.weights.num_heads
        counts = inputs.queries.shape[0], heads, inputs.queries.shape[-2], inputs.keys.shape[-2]
        facts["attention"] = dict(zip(("batch", "heads", "queries", "keys"), counts))
    return facts


def _of_the_same_sizes(self: Any) -> str:
    """How to write a layer of ours that computes as much, for mha_c.cost."""
    plan: Plan = type(self)._how_of_mha_c.plan
    if plan.weights is None:
        return "DotProductAttention(dropout=0)"
    hiddens, heads, shared = plan.weights.sizes(self)["W_q"][1], *plan.weights[1:]
    if plan.kind == "additive":
        return f"AdditiveAttention(num_hiddens={hiddens}, dropout=0)"
    if heads != shared:
        return f"GQAAttention(num_hiddens={hiddens}, num_heads={heads}, num_kv_heads={shared})"
    return f"MultiHeadAttention(num_hiddens={hiddens}, num_heads={heads}, dropout=0)"
