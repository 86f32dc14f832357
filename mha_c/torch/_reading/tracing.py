"""Which lines of Python a call runs, what they read off what, which functions of C they call, and what they set.

Python itself tells of each line before it runs (`sys.settrace`) and of each function of C (`sys.setprofile`); what a
line reads stands in its bytecode.
"""

from __future__ import annotations

import builtins
import collections
import functools
import operator
import sys
import threading
from types import CodeType, FrameType, ModuleType
from typing import Any, Optional

import numpy as np
import torch
from torch import Tensor, nn

from .bytecode import Chain, Constant, LineFacts, Mixed, facts_of
from .functions import function_kind
from .graph import Line, ReasonAtFirst
from .holding import MISSING
from .natives import (
    CHANGE,
    HARMLESS,
    ITERATORS,
    KINDS,
    LAYERS,
    LIBRARIES,
    MODULE_FILE,
    PLAIN_TYPES,
    PURE,
    RECORDS,
    TAKE_SIZES,
    TORCH_ASKS,
    TORCH_FILES,
    TORCH_FUNCTIONS,
    VALUE_TYPES,
    WALKS,
    WHOLE,
    is_standard,
)
from .recording import TORCH, Recorder, is_ours, is_theirs
from .settings import UNSEEN, CannotKeep, Settings
from .sizes import Axis, Ratio, Size, formula_of


class Written:
    """An attribute that the call set."""

    __slots__ = ("before", "line", "name", "names", "owner", "read")

    def __init__(self, owner: Any, names: dict[str, Any], name: str, before: Any, line: Line, read: bool) -> None:
        self.owner, self.names, self.name, self.before, self.line, self.read = owner, names, name, before, line, read


class Tracer:
    """Between `start()` and `stop()` all Python that this thread runs, outside torch, is read."""

    def __init__(self, recorder: Recorder, settings: Settings) -> None:
        self.recorder, self.settings = recorder, settings
        self.codes: dict[int, CodeType] = {}  # that ran
        self.written: dict[tuple[int, str], Written] = {}
        self.changed: list[tuple[Any, Line, str]] = []  # containers
        self.unseen_stores: dict[tuple[str, int], Line] = {}  # an owner was not seen
        self.unseen_items: dict[tuple[str, int], Line] = {}
        self.loose: dict[str, None] = {}
        self.looked: dict[str, None] = {}  # of these, those that may be missing
        self.thread = threading.get_ident()
        self.indexed: dict[Line, int] = {}  # how often it took an item, at a place and of a thing that were not seen
        self.wholes: dict[int, Any] = {}  # objects of which any attribute may have been read
        self.fresh: dict[int, Any] = {}  # objects that the call has made
        self._floats: list[tuple[int, bool]] = []
        self._plain_kinds: set[type] = set()  # whose objects hide nothing that they read
        self.trace, self.profile = self._trace, self._profile

    def start(self) -> None:
        sys.settrace(self.trace)
        sys.setprofile(self.profile)

    def stop(self) -> None:
        sys.setprofile(None)
        sys.settrace(None)

    def line_of(self, frame: Any) -> Line:
        """The nearest line outside Python's own library."""
        outer = frame
        while outer is not None and is_standard(outer.f_code.co_filename):
            outer = outer.f_back
        frame = frame if outer is None or is_theirs(outer.f_code.co_filename) else outer
        return Line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)

    # --- Events ---------------------------------------------------------------------------------------------

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        file = code.co_filename
        if self.recorder.inside or is_ours(file):
            return None
        if is_theirs(file):
            if file == MODULE_FILE:
                self._kept(self._of_module, frame, code.co_name)
            elif frame.f_back is not None and not is_theirs(frame.f_back.f_code.co_filename):
                self._of_torch(frame, file, code.co_name)
            if not file.startswith(LAYERS) or code.co_name not in ("forward", "_conv_forward"):
                return None
        elif is_standard(file) and self._is_of_torch(frame.f_back):
            return None
        elif file == "<string>" and frame.f_back is not None and frame.f_back.f_code.co_filename in RECORDS:
            return None
        self._kept(self._entered, frame, code)
        return self._local

    def _kept(self, told: Any, frame: FrameType, what: Any) -> None:
        """What is told of a frame, or why it cannot be kept."""
        try:
            told(frame, what)
        except CannotKeep as why:
            self.recorder.refuse(str(why), self.line_of(frame))

    def _is_of_torch(self, frame: Any) -> bool:
        """Whether torch has called what runs in this frame of Python's own library."""
        while frame is not None and is_standard(frame.f_code.co_filename):
            frame = frame.f_back
        return frame is None or is_theirs(frame.f_code.co_filename)

    def _local(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            facts = facts_of(frame.f_code).get(frame.f_lineno)
            if facts is not None:
                self._kept(self._line, frame, facts)
        elif event == "exception":
            of_tensor = issubclass(arg[0], AttributeError) and "Tensor' object has no" in str(arg[1])
            if of_tensor or not issubclass(arg[0], (StopIteration, GeneratorExit, AttributeError)):
                self.recorder.refuse(f"{arg[0].__name__} is raised", self.line_of(frame))
        return self._local

    def _entered(self, frame: FrameType, code: CodeType) -> None:
        self.codes[id(code)] = code
        if code.co_argcount:
            owner = frame.f_locals.get(code.co_varnames[0])
            if code.co_name == "__init__" and id(owner) not in self.settings.met:
                self.fresh[id(owner)] = owner
            if isinstance(owner, nn.Module):
                self._entered_module(owner, code)
            elif owner is not None and not isinstance(owner, Tensor) and hasattr(type(owner), code.co_name):
                self.settings.kind(type(owner))

    def _entered_module(self, module: nn.Module, code: CodeType) -> None:
        self.settings.meet(module)
        self.settings.attribute(module, code.co_name)
        if code.co_name == "forward":
            names = module.__dict__
            for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
                if hooks in names:
                    self.settings.name(names, hooks)

    def _of_module(self, frame: FrameType, name: str) -> None:
        """A function of torch's module.py that somebody calls."""
        if name == "__init__":
            owner = frame.f_locals["self"]
            if id(owner) not in self.settings.met:
                self.fresh[id(owner)] = owner
        elif name == "__setattr__":
            given = frame.f_locals
            self._sets(given["self"], given["name"], self._caller(frame))
        elif name not in HARMLESS and frame.f_back is not None and not is_theirs(frame.f_back.f_code.co_filename):
            if name in WALKS:
                self.settings.parts(*frame.f_locals["self"].modules())
            else:
                self.recorder.refuse(f"Module.{name} changes the module", self._caller(frame), ReasonAtFirst)

    def _of_torch(self, frame: FrameType, file: str, name: str) -> None:
        """A function of torch in Python that a reader's line calls."""
        place = file.replace("\\", "/")[len(TORCH) :] if file.replace("\\", "/").startswith(TORCH) else ""
        if place.startswith("nn/modules/") or place in TORCH_FILES or not place or name in TORCH_ASKS:
            return
        if not (is_standard(frame.f_back.f_code.co_filename) and self._is_of_torch(frame.f_back)):  # type: ignore[union-attr]
            self.recorder.refuse(f"what torch's {name}() reads and does is not known", self._caller(frame))

    def _caller(self, frame: Any) -> Line:
        while frame is not None and is_theirs(frame.f_code.co_filename):
            frame = frame.f_back
        return Line("", 0, "") if frame is None else self.line_of(frame)

    # --- What a line does -----------------------------------------------------------------------------------

    def _line(self, frame: FrameType, facts: LineFacts) -> None:
        local = frame.f_locals
        found: dict[Chain, Any] = {}
        for chain, owner in facts.reads.items():
            if owner is None:
                found[chain] = self._name(frame, local, chain)
            else:
                found[chain] = self._attribute_of(found.get(owner, UNSEEN), chain.attributes[-1], frame)
        self.loose.update(facts.loose)
        past = WHOLE.intersection(facts.loose)
        if past:
            self.recorder.refuse(f"{min(past)} reads past the names of attributes", self.line_of(frame))
        for pair in facts.same:
            self._compares(frame, [found.get(each, UNSEEN) if each else UNSEEN for each in pair])
        for module, name in facts.imported:
            self._imports(module, name)
        for owner, sought in facts.looked:
            self._looked(frame, found, owner, sought)
        for owner, name in facts.stores:
            self._stores(frame, found.get(owner) if owner else UNSEEN, name)
        for owner in facts.items:
            self._sets_item(frame, found.get(owner) if owner else UNSEEN)
        for callee, arguments in facts.calls:
            self._calls(frame, found, found.get(callee), arguments)
        for owner, index in facts.indexed:
            self._indexes(frame, found, found.get(owner, UNSEEN) if owner else UNSEEN, index)
        if facts.outside:
            self._changes_outside(frame, facts.outside)

    def _attribute_of(self, owner: Any, name: str, frame: FrameType) -> Any:
        if owner is UNSEEN or owner is MISSING:
            self.loose[name] = None
            return UNSEEN
        return self._attribute(owner, name, frame)

    def _name(self, frame: FrameType, local: Any, chain: Chain) -> Any:
        if chain.kind == "global":
            return self._global(frame, chain.name)
        value = local.get(chain.name, MISSING)
        if chain.kind == "cell" and chain.name in frame.f_code.co_freevars:
            self.settings.meet(value, chain.name)
        return value

    def _attribute(self, owner: Any, name: str, frame: FrameType) -> Any:
        if (id(owner), name) in self.written:
            return getattr(owner, "__dict__", {}).get(name, UNSEEN)
        kind = type(owner)
        if kind in VALUE_TYPES:
            return UNSEEN
        if name in WHOLE:
            return self._whole(owner, name, frame)
        found = self.settings.attribute(owner, name)
        self._check(found, name, frame)
        return found

    def _whole(self, owner: Any, name: str, frame: FrameType) -> Any:
        """An object's attributes are read past its names."""
        if name == "__dict__" and not isinstance(owner, (type, ModuleType, Tensor)):
            self.wholes[id(owner)] = owner
            return owner.__dict__
        self.recorder.refuse(f"{name} reads past the names of attributes", self.line_of(frame))
        return UNSEEN

    def _global(self, frame: FrameType, name: str) -> Any:
        names = frame.f_globals
        if name in names:
            found = self.settings.name(names, name)
            self._check(found, name, frame)
            return found
        found = frame.f_builtins.get(name, MISSING)
        self.settings.name(names, name)  # missing there
        if found is not MISSING and getattr(builtins, name, None) is not found:
            self.settings.name(frame.f_builtins, name)
        return found

    def _check(self, found: Any, name: str, frame: FrameType) -> None:
        """Refuse what hides what it reads."""
        kind = type(found)
        if kind in self._plain_kinds:
            return
        if found is operator.attrgetter or found is operator.methodcaller:
            self.recorder.refuse(f"{name} reads attributes that no line names", self.line_of(frame))
        elif isinstance(found, functools._lru_cache_wrapper):
            self.recorder.refuse(f"{name} keeps results of earlier calls", self.line_of(frame))
        elif isinstance(found, type) and found not in PLAIN_TYPES and not found.__flags__ & (1 << 9):
            if found.__module__ not in ("builtins", "torch", "numpy", "collections", "types", "torch._C"):
                self.recorder.refuse(f"{name} is a class of C that is not known", self.line_of(frame))
        elif kind.__module__ in ("_thread", "_io", "_random", "numpy.random.mtrand", "numpy.random._generator"):
            self.loose[name] = None
        elif not isinstance(found, type):
            self._plain_kinds.add(kind)

    def _looked(self, frame: FrameType, found: Any, owner: Any, name: Any) -> None:
        thing = found.get(owner, UNSEEN) if owner is not None else UNSEEN
        if name is not None:
            if thing is UNSEEN or thing is MISSING:  # a name that the same line sets
                self.loose[name.value] = self.looked[name.value] = None
            elif isinstance(thing, Tensor) and not hasattr(type(thing), name.value):
                self.recorder.refuse(f"{name.value} of a tensor is read, which is none of torch's", self.line_of(frame))
            elif type(thing) not in VALUE_TYPES and (id(thing), name.value) not in self.written:
                self.settings.attribute(thing, name.value)
        elif thing is UNSEEN or isinstance(thing, type):
            self.recorder.refuse("an attribute is looked up by a name that is made on the way", self.line_of(frame))
        elif not isinstance(thing, Tensor):
            self.wholes[id(thing)] = thing

    def _compares(self, frame: FrameType, pair: list[Any]) -> None:
        """Two things by `is`: which of a call's own tensors are the same is in its form, no other is."""
        if any(isinstance(x, Tensor) and id(x) in self.settings.tensors for x in pair):
            self.recorder.refuse("which tensor an argument is decides", self.line_of(frame))

    def _imports(self, module: str, name: Optional[str]) -> None:
        found = sys.modules.get(module)
        if found is None:
            raise CannotKeep(f"{module} is imported, and was not before")
        if name is None:
            self.settings.met[id(found)] = found
        else:
            self.settings.attribute(found, name)

    # --- What it changes ------------------------------------------------------------------------------------

    def _stores(self, frame: FrameType, owner: Any, name: str) -> None:
        line = self.line_of(frame)
        if owner is UNSEEN or owner is MISSING or owner is None:
            self.unseen_stores[line.file, line.number] = line
        elif isinstance(owner, Tensor):
            self.recorder.refuse(f"{name} of a tensor is set", line)
        elif isinstance(owner, nn.Module) and type(owner).__setattr__ is nn.Module.__setattr__:
            pass  # its own function tells
        else:
            self._sets(owner, name, line)

    def _sets(self, owner: Any, name: str, line: Line) -> None:
        """An attribute will be set: `before` is what it is until then."""
        self.unseen_stores.pop((line.file, line.number), None)
        key = id(owner), name
        if key in self.written:
            return
        names = getattr(owner, "__dict__", None)
        if names is None or isinstance(owner, type):
            self.recorder.refuse(f"{name} of {type(owner).__name__} is set", line)
            return
        stores = [names] + [names[x] for x in ("_parameters", "_buffers", "_modules") if isinstance(owner, nn.Module)]
        store = next((x for x in stores if name in x), names)
        read = any(self.settings.has_name(x, name) for x in stores)
        self.written[key] = Written(owner, store, name, store.get(name, MISSING), line, read)

    def _sets_item(self, frame: FrameType, owner: Any) -> None:
        line = self.line_of(frame)
        if owner is UNSEEN or owner is MISSING:
            self.unseen_items[line.file, line.number] = line
        elif not isinstance(owner, Tensor):
            self.changed.append((owner, line, "an item is set"))

    def _changes_outside(self, frame: FrameType, words: list[str]) -> None:
        for each in words:
            outer = each.startswith("a name of an outer function")
            inside = outer and any(frame.f_code in code.co_consts for code in self.codes.values())
            if not inside:
                self.recorder.refuse(each, self.line_of(frame))

    # --- Sizes that go unseen -------------------------------------------------------------------------------

    def _calls(self, frame: FrameType, found: Any, callee: Any, arguments: Any) -> None:
        try:
            takes = callee in TAKE_SIZES
        except TypeError:  # no hash
            return
        if takes or isinstance(callee, np.ufunc) or (str(getattr(callee, "__module__", "")).split(".")[0] == "numpy"):
            for each in arguments if arguments is not None else [UNSEEN]:
                self._pin(found, each)

    def _indexes(self, frame: FrameType, found: Any, owner: Any, index: Any) -> None:
        if owner is UNSEEN or owner is MISSING:
            if not isinstance(index, Constant):
                line = self.line_of(frame)
                self.indexed[line] = self.indexed.get(line, 0) + 1
        elif type(owner) in (list, tuple, str, bytes, range) and not isinstance(index, Constant):
            self._pin(found, index)

    def _pin(self, found: Any, given: Any) -> None:
        """A size may be in what is given."""
        if isinstance(given, Constant):
            return
        if isinstance(given, Mixed):
            for part in given.parts:
                self._pin(found, part)
            return
        value = found.get(given, UNSEEN) if isinstance(given, Chain) else UNSEEN
        if isinstance(value, (Size, Ratio)):
            self.recorder.log.pin(formula_of(value))
        elif value is UNSEEN or value is MISSING:  # a name of a line that also sets it
            self.pin_all()

    def pin_all(self) -> None:
        for leaf in self.recorder.leaves:
            if leaf.kind == "input":
                for i in range(len(leaf.shape)):
                    self.recorder.log.pin(Axis(leaf.name, i))

    # --- Functions of C -------------------------------------------------------------------------------------

    def _profile(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "call" or event == "return" or self.recorder.inside:
            return
        file = frame.f_code.co_filename
        if is_theirs(file) or (is_standard(file) and self._is_of_torch(frame)):
            return
        if event == "c_call":
            self._native(frame, arg)
        elif event == "c_return" and self._floats:
            floats, ratios = self._floats.pop()
            if ratios and floats == self.recorder.log.floats:
                self.pin_all()  # a Ratio may have gone in

    def _native(self, frame: FrameType, function: Any) -> None:
        name, owner = getattr(function, "__name__", ""), getattr(function, "__self__", None)
        self.recorder.reads_default_type |= function is torch.get_default_dtype
        if isinstance(owner, ModuleType):
            known = self._of_library(frame, owner.__name__, name, function)
        elif isinstance(owner, Tensor) or owner is TORCH_FUNCTIONS or getattr(owner, "__module__", "") == "torch._C":
            known = bool(function_kind(function).way) or name in TORCH_ASKS or not isinstance(owner, Tensor)
        elif isinstance(owner, type):
            known = owner.__module__ in ("builtins", "torch") and name != "__getattribute__"
        elif isinstance(owner, KINDS):
            known = True
            if name in CHANGE and not isinstance(owner, type):
                self.changed.append((owner, self.line_of(frame), f"{name}()"))
            elif isinstance(owner, torch.Size) and name == "numel":
                self.pin_all()
            elif name in ("__setattr__", "__delattr__", "mro", "__set__"):
                known = False
        elif owner is None:
            known = getattr(function, "__objclass__", None) in (object, type, dict, list, tuple, str)
        else:
            known = isinstance(owner, ITERATORS) or type(owner).__module__ in (
                "re",
                "itertools",
                "_operator",
                "functools",
            )
            known = known or (
                bool(type(owner).__flags__ & (1 << 9)) and name in ("__init__", "__init_subclass__", "__enter__")
            )
            if name in CHANGE:  # of a reader's subclass of list or dict
                self.changed.append((owner, self.line_of(frame), f"{name}()"))
                known = isinstance(owner, (dict, list, set, collections.deque))
        if not known:
            words = getattr(function, "__qualname__", name)
            self.recorder.refuse(f"what {words}() reads and does is not known", self.line_of(frame))

    def _of_library(self, frame: FrameType, library: str, name: str, function: Any) -> bool:
        if library == "math":
            self._floats.append((self.recorder.log.floats, self.recorder.log.ratios))
        if library == "builtins":
            return name in PURE
        if library.startswith("torch"):
            return bool(function_kind(function).way) or name in TORCH_ASKS
        return library in LIBRARIES or (library.startswith("numpy") and not library.startswith("numpy.random"))
