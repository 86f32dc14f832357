"""The mode that notes what torch is asked: nodes, values, lines; and sizes as formulas."""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable, Optional

import torch
from torch import Tensor, nn

from .._private import autocasting_anywhere
from .functions import DROPOUT, FunctionKind, function_kind
from .graph import Line, Node, Reason, Value, walked
from .holding import Fact
from .rules import shapes_of
from .sizes import Axis, Log, Ratio, Size, plain
from .sizing import product

# Whose lines no reader has written.
TORCH = str(Path(torch.__file__).parent) + "/"
OURS = str(Path(__file__).parents[2]) + "/"


class Files(dict):  # type: ignore[type-arg]
    """{file: what a function says of it}, each once: it is asked at each event."""

    def __init__(self, tell: Callable[[str], bool]) -> None:
        super().__init__()
        self.tell = tell

    def __missing__(self, file: str) -> bool:
        found = self[file] = self.tell(file)
        return found


def _is_theirs(file: str) -> bool:
    normal = file.replace("\\", "/")
    of_theirs = normal.startswith((TORCH.replace("\\", "/"), OURS.replace("\\", "/")))
    return of_theirs or file.startswith("<frozen importlib") or "/einops/" in normal


is_theirs: Callable[[str], bool] = Files(_is_theirs).__getitem__  # whether a file is torch's or ours
is_ours: Callable[[str], bool] = Files(lambda file: file.startswith(OURS)).__getitem__


def line_of(frame: Any) -> Line:
    """The nearest line outside torch and mha_c."""
    while frame is not None and is_theirs(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return Line("", 0, "")
    return Line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


class Recorder:
    """What is noted of one call.  `call` is what stands in the place of each of torch's functions."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.leaves: list[Value] = []
        self.refused: Optional[Reason] = None
        self.lines: dict[Any, Line] = {}  # of what sizes decided
        self.log = Log(self._told)
        self.grad_enabled = torch.is_grad_enabled()
        self.modes = modes_now()
        self.reads_requires_grad = self.reads_default_type = False
        self._known: dict[int, tuple[Any, Value, int]] = {}  # id of a tensor: (weak reference, its Value, its version)
        self._own_memory: set[int] = set()  # of inputs and leaves: nobody may write there
        self.inside = False

    def refuse(self, words: str, line: Optional[Line] = None, kind: type[Reason] = Reason) -> None:
        """The first reason stays."""
        if self.refused is None:
            self.refused = kind(words, line if line is not None else line_of(sys._getframe(1)))

    def _told(self, what: Any) -> None:
        self.lines.setdefault(what, line_of(sys._getframe(2)))

    # --- Values -------------------------------------------------------------------------------------------

    def input(self, name: str, tensor: Tensor) -> Value:
        """The Value of an argument."""
        return self._leaf(tensor, "input", name, [Size(n, Axis(name, i), self.log) for i, n in enumerate(tensor.shape)])

    def _leaf(self, tensor: Tensor, kind: str, name: str, shape: Any) -> Value:
        value = self._valued(tensor, kind, shape)
        value.name = name
        self.leaves.append(value)
        memory = memory_of(tensor)
        if memory:
            self._own_memory.add(memory)
        return value

    def _valued(self, tensor: Tensor, kind: str, shape: Any, node: Optional[Node] = None, index: int = 0) -> Value:
        value = Value()
        value.node, value.index, value.kind, value.name = node, index, kind, ""
        value.shape, value.dtype, value.device = tuple(shape), tensor.dtype, tensor.device
        value.requires_grad, value.users = tensor.requires_grad, []
        value.ref = weakref.ref(tensor)
        self._known[id(tensor)] = value.ref, value, version_of(tensor)
        return value

    def value_of(self, tensor: Tensor) -> Value:
        """The Value that a tensor is now."""
        known = self._known.get(id(tensor))
        if known is None or known[0]() is not tensor:
            return self._leaf(tensor, "constant", "", tensor.shape)
        _, value, version = known
        return value if version_of(tensor) == version else self._written_elsewhere(tensor, value)

    def known(self, tensor: Tensor) -> Optional[Value]:
        """The same, or None of a tensor that the call has not met."""
        found = self._known.get(id(tensor))
        return self.value_of(tensor) if found is not None and found[0]() is tensor else None

    def _written_elsewhere(self, tensor: Tensor, before: Value) -> Value:
        """It was written through a view of it, or it is a view of what was written: by which, the walk must find."""
        memory = memory_of(tensor)
        nodes = [n for n in reversed(self.nodes) if n.writes is not None and n.memory == memory]
        if not nodes:
            self.refuse("a tensor was changed in a way that no function of torch shows")
            node = self._node("__aliased__", None, (before,), {}, line_of(sys._getframe(3)), [before])
        else:
            given = [before, nodes[0].results[0]]
            node = self._node("__aliased__", None, tuple(given), {}, nodes[0].line, given)
        value = self._valued(tensor, "result", before.shape, node)
        node.results = (value,)
        return value

    def _node(self, name: str, function: Any, args: Any, kwargs: Any, line: Line, given: list[Value]) -> Node:
        node = Node()
        node.name, node.function, node.args, node.kwargs, node.line = name, function, args, kwargs, line
        node.writes, node.results, node.number, node.memory = None, (), len(self.nodes), 0
        node.given = given
        self.nodes.append(node)
        for value in given:
            value.users.append(node)
        return node

    # --- Calls --------------------------------------------------------------------------------------------

    def call(self, function: Any, args: Any, kwargs: Any) -> Any:
        """The result of one of torch's functions, which is noted."""
        how = function_kind(function)
        name, way = how.name, how.way
        if way == "fact":
            return self._fact(name, function, args, kwargs)
        if way == "silent":
            return function(*args, **kwargs)
        line = line_of(sys._getframe(2))
        given: list[Value] = []
        noted_args = tuple([x if type(x) in _AS_THEY_ARE else self._noted(x, given) for x in args])
        noted_kwargs = self._noted(kwargs, given) if kwargs else {}
        if kwargs and len(noted_args) == 1 and "other" in noted_kwargs:
            noted_args = (*noted_args, noted_kwargs.pop("other"))
        if how.reflected and len(noted_args) == 2:
            noted_args = noted_args[::-1]
            given = [x for x in walked(noted_args) if isinstance(x, Value)]
        before = self._check(how, args, kwargs, line)
        plain_args = [x if type(x) in _OF_NO_SIZE else _stripped(x) for x in args]
        made = function(*plain_args, **_stripped(kwargs)) if kwargs else function(*plain_args)
        node = self._node(name, function, noted_args, noted_kwargs, line, given)
        tensors = [made] if type(made) is Tensor else _tensors_in(made)
        if not given and tensors and tensors[0].is_floating_point() and kwargs.get("dtype") is None:
            self.reads_default_type = True
        if before is not None:
            node.writes, tensors = self._known[id(args[0])][1], [args[0]]
            node.memory = memory_of(args[0])
        shapes: Any = [x.shape for x in tensors]
        if way == "pure":
            shapes = shapes_of(name, noted_args, noted_kwargs, shapes, self.log)
        node.results = tuple([self._valued(x, "result", shapes[i], node, i) for i, x in enumerate(tensors)])
        return made

    def _check(self, how: FunctionKind, args: Any, kwargs: Any, line: Line) -> Any:
        """Refuse what no reading can hold; the tensor that is written in place, or None."""
        if modes_now() != self.modes:
            self.refuse("gradients, or autocast, are switched on or off on the way", line)
        name = how.name
        if how.way == "pure" and not how.writes and not kwargs and name not in ("type", "dropout"):
            return None
        if how.way == "data" or (name == "type" and len(args) < 2 and not kwargs):
            self.refuse("the numbers of a tensor decide, or leave torch", line)
        elif how.way != "pure":
            self.refuse(f"torch's {name or function_words(args)} is none of the functions that can be read", line)
        elif kwargs.get("out") is not None:
            self.refuse("out= writes into another tensor", line)
        elif name in DROPOUT and name.endswith("_"):
            self.refuse("dropout_ is not read", line)
        in_place = how.writes or (bool(kwargs.get("inplace")) and name != "dropout") or (
            name == "dropout" and bool(kwargs.get("inplace") or (len(args) > 3 and args[3])))  # fmt: skip
        if not in_place or not args or not isinstance(args[0], Tensor):
            return None
        if memory_of(args[0]) in self._own_memory:
            self.refuse("an input, a parameter or a table is written in place", line)
        return args[0]

    def _fact(self, name: str, function: Any, args: Any, kwargs: Any) -> Any:
        found = function(*_stripped(args), **_stripped(kwargs))
        tensor = args[0] if args else kwargs.get("self", kwargs.get("input"))
        if not isinstance(tensor, Tensor) or name in ("__hash__", "__class__", "__dir__"):
            return found
        shape = self.value_of(tensor).shape  # also of one that nothing is computed from
        if name == "requires_grad":
            self.reads_requires_grad = True
        elif name in ("shape", "size"):
            axis = args[1] if len(args) > 1 else kwargs.get("dim")
            return shape[axis] if axis is not None else torch.Size(shape)
        elif name in ("numel", "nelement"):
            return product(shape)
        elif name == "__len__" and isinstance(shape[0], Size):  # Python wants a plain number
            self.log.pin(shape[0].formula)
        return found

    def facts(self) -> list[Fact]:
        """What lines may have asked of tensors that are no inputs: `.data` gives a tensor another shape, or type."""
        found: list[Fact] = []
        for leaf in self.leaves:
            tensor = leaf.tensor
            if leaf.kind != "input" and tensor is not None:
                found += [Fact(tensor, "shape", leaf.shape), Fact(tensor, "dtype", leaf.dtype)]
                if self.reads_requires_grad:
                    found.append(Fact(tensor, "requires_grad", leaf.requires_grad))
        return found

    def _noted(self, found: Any, values: list[Value]) -> Any:
        """The arguments with Values in the place of tensors, which are added to `values`, too."""
        if isinstance(found, Tensor):
            value = self.value_of(found)
            values.append(value)
            return value
        kind = type(found)
        if kind is tuple or kind is list or kind is torch.Size:
            parts = [self._noted(x, values) for x in found]
            return parts if kind is list else tuple(parts)
        if kind is dict:
            return {name: self._noted(x, values) for name, x in found.items()} if found else {}
        if kind is slice:
            return slice(*[self._noted(x, values) for x in (found.start, found.stop, found.step)])
        if isinstance(found, (tuple, list)):
            return tuple([self._noted(x, values) for x in found])
        return found


def function_words(args: Any) -> str:
    return "function without a name"


def modes_now() -> tuple[Any, ...]:
    """What changes the meaning of each function."""
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), bool(autocasting_anywhere())


@contextlib.contextmanager
def nothing_collected() -> Iterator[None]:
    """Python's garbage collector waits: what it runs, callbacks and `__del__` of others, is no line of the call."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def version_of(tensor: Tensor) -> int:
    try:
        return tensor._version
    except RuntimeError:  # of inference mode
        return -1


def memory_of(tensor: Tensor) -> int:
    """The address of its storage; 0 where it has none."""
    try:
        storage: Any = getattr(tensor, "untyped_storage", tensor.storage)()
        return int(storage.data_ptr())
    except (RuntimeError, NotImplementedError):
        return 0


def _tensors_in(found: Any) -> list[Tensor]:
    if isinstance(found, Tensor):
        return [found]
    if isinstance(found, (tuple, list)):
        return [x for part in found for x in _tensors_in(part)]
    return []


def _stripped(found: Any) -> Any:
    """The arguments with plain numbers in the place of sizes."""
    kind = type(found)
    if kind in _OF_NO_SIZE:
        return found
    if kind is Size or kind is Ratio:
        return plain(found)
    if kind is tuple or kind is torch.Size:
        return kind([_stripped(x) for x in found])
    if kind is list:
        return [_stripped(x) for x in found]
    if kind is dict:
        return {name: _stripped(x) for name, x in found.items()}
    if kind is slice:
        return slice(_stripped(found.start), _stripped(found.stop), _stripped(found.step))
    return found


_PLAIN = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device))
_OF_NO_SIZE = _PLAIN | {Tensor, nn.Parameter}
_AS_THEY_ARE = _PLAIN | {Size, Ratio}  # arguments that are noted as themselves
