"""One call, read while it runs."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any, Optional

import torch
from torch import Tensor, nn

from .._private import tracing_state
from .._tensors import recorded_or_transformed
from .arguments import PLAIN, form_of, named
from .graph import Condition, Effect, Graph, Line, Reading, Reason, ReasonAtFirst, Value, walked
from .holding import MISSING
from .recording import Recorder, modes_now, nothing_collected
from .settings import CannotKeep, Settings
from .sizes import Axis, Ratio, Size, plain
from .tracing import Tracer, Written

Mode: Any = getattr(torch.overrides, "TorchFunctionMode", None)


class _OfThread(threading.local):
    reading = False  # whether a call is read


of_thread = _OfThread()

if Mode is not None:

    class _ReadingMode(Mode):
        sees_layers = True  # see `_private.in_mode`

        def __init__(self, recorder: Recorder, tracer: Optional[Tracer]) -> None:
            super().__init__()
            self.recorder, self.tracer = recorder, tracer

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            recorder = self.recorder
            if recorder.inside:
                return func(*args, **(kwargs or {}))
            tracer = self.tracer
            if tracer is not None:  # what torch and we do is not read: Python would tell of each line of ours
                sys.setprofile(None)
                sys.settrace(None)
            recorder.inside = True
            try:
                return recorder.call(func, args, kwargs or {})
            finally:
                recorder.inside = False
                if tracer is not None:
                    sys.settrace(tracer.trace)
                    sys.setprofile(tracer.profile)


def can_read() -> bool:
    """Whether this torch has the modes, and nothing else reads, traces, compiles or profiles here now."""
    return why_not() is None


def why_not() -> Optional[str]:
    """Why nothing can be read here now, in words; None where it can."""
    if Mode is None or not hasattr(Mode, "__enter__") or hasattr(torch.overrides, "push_torch_function_mode"):
        return f"torch {torch.__version__} has no modes of functions that can be entered twice"
    if of_thread.reading:
        return "another reading goes on"
    if sys.gettrace() is not None or sys.getprofile() is not None:
        return "a debugger, a profiler or a measurement of coverage traces this thread"
    if _replaced_methods():
        return "a method of torch.Tensor was replaced, which modes call twice"
    if recorded_or_transformed() or tracing_state() is not None:
        return "a compiler, a tracer or a transform records the call"
    return None


def _replaced_methods() -> bool:
    """Whether a function that is not torch's stands before one of torch's own."""
    global _methods
    if _methods is not None and _methods.still_holds():
        return False
    now, below = dict(vars(Tensor)), Tensor.__mro__[1]
    own = [(name, getattr(x, "__module__", "")) for name, x in now.items() if isinstance(x, FunctionType)]
    if any(hasattr(below, name) for name, home in own if str(home).partition(".")[0] != "torch"):
        return True
    _methods = Settings()
    _methods.kind(Tensor)
    return False


_methods: Optional[Settings] = None  # the class Tensor, when none was replaced


def read(called: Any, args: tuple[Any, ...] = (), kwargs: Any = None, python: bool = True) -> tuple[Any, Reading]:
    """Call `called(*args, **kwargs)`, a module or a function, once, and read it.

    The result, its errors, its random numbers and its effects are those of the plain call: nothing else is called, no
    input is made, nothing is changed.  An error of the call goes on to the caller.

    Parameters
    ----------
    python : bool
        Whether to read what Python reads and changes, too.  Without, `settings` and `effects` are empty, and the
        reading tells what was computed, not what another call will compute.

    Returns
    -------
    (result, Reading)
        `Reading.refused` says why it is not whole, if so.
    """
    kwargs = kwargs or {}
    one = _ReadCall(called, args, kwargs, python)
    of_thread.reading = True
    try:
        result = one.run()
    finally:
        of_thread.reading = False
        one.recorder.log.closed = True
        one.leave_plain_numbers()
    return _without_sizes(result), one.reading(result)


class _ReadCall:
    def __init__(self, called: Any, args: Any, kwargs: Any, python: bool) -> None:
        self.called, self.args, self.kwargs = called, args, kwargs
        self.form = form_of(args, kwargs)
        self.recorder, self.settings = Recorder(), Settings()
        self.tracer = Tracer(self.recorder, self.settings) if python else None
        self.inputs: dict[str, Value] = {}
        self.same: dict[str, str] = {}
        self.given: dict[int, tuple[str, Any]] = {}
        for name, x in named(called, args, kwargs):
            self._input(name, x)

    def _input(self, name: str, x: Any) -> None:
        if isinstance(x, Tensor):
            known = self.recorder._known.get(id(x))
            if known is not None:
                self.same[name] = known[1].name
            else:
                self.inputs[name] = self.recorder.input(name, x)
        elif isinstance(x, (list, dict)) or not isinstance(x, (*PLAIN, tuple)):
            self.given[id(x)] = name, x

    def run(self) -> Any:
        with nothing_collected(), _ReadingMode(self.recorder, self.tracer):
            if self.tracer is None:
                return self.called(*self.args, **self.kwargs)
            self.tracer.start()
            try:
                return self.called(*self.args, **self.kwargs)
            finally:
                self.tracer.stop()

    def leave_plain_numbers(self) -> None:
        """Plain numbers in the place of sizes, in what the call has kept or filled."""
        tracer = self.tracer
        if tracer is None:
            return
        for one in tracer.written.values():
            if one.name in one.names:
                one.names[one.name] = _without_sizes(one.names[one.name])
        for thing in (*self.settings._things.values(), *(owner for owner, _, _ in tracer.changed)):
            if isinstance(thing, (list, dict, set, deque)) and thing:
                _without_sizes(thing)

    def reading(self, result: Any) -> Reading:
        recorder, effects = self.recorder, []
        output = self._structure(result)
        if self.tracer is not None:
            try:
                effects = _Ending(self).effects()
            except CannotKeep as why:
                recorder.refuse(str(why), Line("", 0, ""))
        lines = recorder.lines
        conditions = [Condition(formula, outcome, lines.get(formula)) for formula, outcome in recorder.log.decided]
        if output is _UNKNOWN:
            recorder.refuse(f"it gives {type(result).__name__}, which is no structure of tensors", Line("", 0, ""))
        return Reading(
            name=_name_of(self.called),
            graph=Graph(recorder.nodes, self.inputs, recorder.leaves, self.same),
            output=output,
            form=self.form,
            conditions=conditions,
            pinned={axis: lines.get(axis) for axis in recorder.log.pinned},
            settings=self.settings,
            effects=effects,
            random=[node for node in recorder.nodes if node.name in ("dropout",) and _drops(node)],
            refused=recorder.refused,
            log=recorder.log,
        )

    def _structure(self, found: Any) -> Any:
        """The same with Values in the place of tensors; _UNKNOWN where it is no plain structure."""
        if isinstance(found, Tensor):
            value = self.recorder.known(found)
            return value if value is not None else _UNKNOWN
        if isinstance(found, PLAIN):
            return found
        if isinstance(found, (tuple, list)):
            parts = [self._structure(x) for x in found]
            if any(x is _UNKNOWN for x in parts):
                return _UNKNOWN
            return _like(found, parts)
        if isinstance(found, dict):
            values = {name: self._structure(x) for name, x in found.items()}
            return _UNKNOWN if any(x is _UNKNOWN for x in values.values()) else values
        return _UNKNOWN


_UNKNOWN: Any = object()


def _like(found: Any, parts: list[Any]) -> Any:
    if hasattr(found, "_fields"):
        return type(found)(*parts)
    return parts if isinstance(found, list) else tuple(parts)


def _drops(node: Any) -> bool:
    training = node.args[2] if len(node.args) > 2 else node.kwargs.get("training", True)
    p = node.args[1] if len(node.args) > 1 else node.kwargs.get("p", 0.5)
    return bool(training) and p > 0


def _name_of(called: Any) -> str:
    kind = type(called)
    return kind.__name__ if isinstance(called, nn.Module) else getattr(called, "__qualname__", kind.__name__)


class _Ending:
    """What is known only when the call is over: where leaves came from, what was left behind."""

    def __init__(self, call: _ReadCall) -> None:
        self.call, self.recorder, self.settings = call, call.recorder, call.settings
        assert call.tracer is not None
        self.tracer: Tracer = call.tracer
        owner = getattr(call.called, "__self__", call.called)  # of a module's own method
        self.root = owner if isinstance(owner, nn.Module) else None

    def effects(self) -> list[Effect]:
        for name, x in self.call.given.values():
            self.settings.meet(x, name)
        written = [(id(x.owner), x.name) for x in self.tracer.written.values()]
        for thing in self.tracer.wholes.values():
            self.settings.whole(thing, frozenset(name for owner, name in written if owner == id(thing)))
        self._follow_loose()
        self._name_leaves()
        recorder, found = self.recorder, [x for x in map(self._effect, self.tracer.written.values()) if x is not None]
        self._check_changes()
        self._check_functions()
        self._check_items()
        if modes_now() != self.recorder.modes:
            self.recorder.refuse("gradients, or autocast, are switched on or off", Line("", 0, ""))
        if recorder.reads_default_type:
            self.settings.default_type()
        self.settings.facts += recorder.facts()
        broken = None if self.recorder.refused is not None else self.settings.broken()
        if broken is not None:
            self.recorder.refuse(f"it reads and changes {_words(broken)}", Line("", 0, ""), ReasonAtFirst)
        return found

    def _follow_loose(self) -> None:
        """Attributes that were read off things that nobody saw: off anything that was met."""
        loose, done = self.tracer.loose, set()
        of_kinds: dict[Any, set[str]] = {}
        while loose:
            new = [x for key, x in list(self.settings.met.items()) if key not in done]
            if not new:
                return
            for thing in new:
                done.add(id(thing))
                kind = thing if isinstance(thing, type) else type(thing)
                if kind not in of_kinds:
                    of_kinds[kind] = {name for name in loose if any(name in vars(one) for one in kind.__mro__)}
                stores = _stores_of(thing)
                if not (of_kinds[kind] or self.tracer.looked) and all([loose.keys().isdisjoint(x) for x in stores]):
                    continue
                present = of_kinds[kind].union(*[loose.keys() & names.keys() for names in stores])
                for name in loose:
                    wanted = name in present or name in self.tracer.looked
                    if wanted and (id(thing), name) not in self.tracer.written:
                        self.settings.attribute(thing, name, only_present=name in present)

    def _name_leaves(self) -> None:
        unnamed = [x for x in self.recorder.leaves if x.kind != "input"]
        paths = dict(_tensors_of(self.root)) if unnamed and self.root is not None else {}
        for leaf in unnamed:
            tensor = leaf.tensor
            found = paths.get(id(tensor))
            if found is not None:
                leaf.kind, leaf.name = found[:2]
                self._keep_path(found)
            elif id(tensor) not in self.settings.tensors:
                user = leaf.users[0].line if leaf.users else None
                self.recorder.refuse("a tensor comes from where nobody saw it", user)
            else:
                leaf.name = ""

    def _keep_path(self, found: Any) -> None:
        """That the parameter, or buffer, is still the same object."""
        kind, path, owner, name = found
        self.settings.name(owner.__dict__["_parameters" if kind == "parameter" else "_buffers"], name)
        module = self.root
        for part in path.split(".")[:-1]:
            assert module is not None
            children = module._modules
            self.settings.name(children, part)
            module = children[part]

    def _effect(self, one: Written) -> Optional[Effect]:
        now = one.names.get(one.name, MISSING)
        if isinstance(one.owner, nn.Module):
            stores = [one.owner.__dict__, *(one.owner.__dict__[x] for x in ("_parameters", "_buffers", "_modules"))]
            now = next((x[one.name] for x in stores if one.name in x), MISSING)
        if id(one.owner) in self.tracer.fresh or (
            id(one.owner) not in self.settings.met and not self._is_of_root(one.owner)
        ):
            return None  # an object of the call's own
        if isinstance(now, (Size, Ratio)):
            one.names[one.name] = now = plain(now)
        if (now is one.before and not isinstance(now, (list, dict, set))) or (
            type(now) is type(one.before) and isinstance(now, PLAIN) and now == one.before
        ):
            self.settings.name(one.names, one.name)
            return None
        value = self.call._structure(now)
        if one.read:
            self.recorder.refuse(f"{one.name} is read and set", one.line, ReasonAtFirst)
        elif value is _UNKNOWN or not any(isinstance(x, Value) for x in walked(value)):
            self.recorder.refuse(f"{one.name} is set", one.line, ReasonAtFirst)
        return Effect(one.owner, self._path(one.owner), one.name, value, one.line)

    def _is_of_root(self, owner: Any) -> bool:
        return self.root is not None and (owner is self.root or any(x is owner for x in self.root.modules()))

    def _path(self, owner: Any) -> Optional[str]:
        if self.root is None:
            return None
        return next((name for name, module in self.root.named_modules() if module is owner), None)

    def _check_changes(self) -> None:
        kept = {*self.settings._things, *self.settings.dicts()}
        for owner, line, words in self.tracer.changed:
            if id(owner) in kept or id(owner) in self.settings.met or self._is_of_root(owner):
                self.recorder.refuse(f"{words} of something that stays", line, ReasonAtFirst)
        set_by_torch = {(n.line.file, n.line.number) for n in self.recorder.nodes if n.name == "__setitem__"}
        for place, line in self.tracer.unseen_items.items():
            if place not in set_by_torch:
                self.recorder.refuse("an item is set of something that was not seen", line)
        for line in self.tracer.unseen_stores.values():
            self.recorder.refuse("an attribute is set of something that was not seen", line)

    def _check_items(self) -> None:
        """A line that takes items of what nobody saw, but of fewer tensors: a size may have been the place."""
        taken: dict[tuple[str, int], int] = {}
        for node in self.recorder.nodes:
            if node.name == "__getitem__":
                taken[node.line.file, node.line.number] = taken.get((node.line.file, node.line.number), 0) + 1
        for line, n in self.tracer.indexed.items():
            if taken.get((line.file, line.number), 0) < n:
                for axis in (Axis(x.name, i) for x in self.call.inputs.values() for i in range(len(x.shape))):
                    self.recorder.log.pinned.setdefault(axis, None)
                    self.recorder.lines.setdefault(axis, line)

    def _check_functions(self) -> None:
        """Each function that ran must be one that was seen, or made by one that ran."""
        functions = [x for x in self.settings._things.values() if isinstance(x, FunctionType)]
        known = {id(x.__code__) for x in functions}
        codes = [*self.tracer.codes.values()]
        if isinstance(self.call.called, FunctionType):
            self.settings.function(self.call.called)
            known.add(id(self.call.called.__code__))
        for code in codes:
            known.update(id(x) for x in code.co_consts if isinstance(x, CodeType))
        for code in codes:
            if id(code) not in known and not self._in_a_class(code):
                line = Line(code.co_filename, code.co_firstlineno, code.co_name)
                self.recorder.refuse(f"where {code.co_name} comes from was not seen", line)

    def _in_a_class(self, code: Any) -> bool:
        """Whether it is a method of a class that is kept."""
        name = code.co_name
        for kind in [x for x in self.settings._things.values() if isinstance(x, type)]:
            for value in list(vars(kind).values()):
                inner = next((x for x in (getattr(value, each, None) for each in _WRAPPED) if x), value)
                if getattr(inner, "__code__", None) is code:
                    self.settings.meet(inner, name)
                    return True
        return False


_WRAPPED = "__func__", "fget", "func"


def _words(setting: Any) -> str:
    return str(setting.name) if setting.name is not None else f"a {type(setting.owner).__name__}"


def _tensors_of(root: nn.Module) -> Iterator[tuple[int, tuple[str, str, nn.Module, str]]]:
    for path, module in root.named_modules(remove_duplicate=False):
        for kind, store in (("parameter", module._parameters), ("buffer", module._buffers)):
            for name, x in store.items():
                if x is not None:
                    yield id(x), (kind, f"{path}.{name}" if path else name, module, name)


def _stores_of(thing: Any) -> list[Any]:
    """Where an object's own attributes stand by name."""
    own = getattr(thing, "__dict__", None)
    if own is None:
        return []
    inside = ("_parameters", "_buffers", "_modules") if isinstance(thing, nn.Module) else ()
    return [own, *(own[x] for x in inside if x in own)]


def _without_sizes(found: Any) -> Any:
    """What the plain call would give: plain numbers in the place of sizes."""
    kind = type(found)
    if kind is Size or kind is Ratio:
        return plain(found)
    if kind is tuple or kind is torch.Size:
        return kind([_without_sizes(x) for x in found]) if any(map(_has_sizes, found)) else found
    if isinstance(found, (list, deque, dict)):
        for place, x in [*(found.items() if isinstance(found, dict) else enumerate(found))]:
            if _has_sizes(x):
                found[place] = _without_sizes(x)
    elif isinstance(found, set):
        for x in [x for x in found if _has_sizes(x)]:
            found.remove(x)
            found.add(_without_sizes(x))
    return found


def _has_sizes(found: Any, depth: int = 4) -> bool:
    """Whether a size is in what is found, or in what that holds."""
    if isinstance(found, dict):
        found = tuple(found.values())
    if isinstance(found, (tuple, list, deque, set)):
        return depth > 0 and any(_has_sizes(x, depth - 1) for x in found)
    return type(found) in (Size, Ratio)


__all__ = ["Reason", "can_read", "form_of", "read", "why_not"]
