"""One call, operation by operation: what each made, of what, and in which line of the caller's own text.

Arrays are noted by a subclass of NumPy's; tensors, where torch is loaded already, by a mode of torch's functions.
"""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import _lru_cache_wrapper
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple, Optional

import numpy as np

from ..._arguments.arrays import is_tensor

_PACKAGE = str(Path(__file__).parents[2])
_ASKING = tuple(str(Path(__file__).parents[1] / folder) for folder in ("asking", "checks"))
# They read no number: these functions, and those whose names end so.
_OF_SHAPES = ("size", "shape", "dim", "ndim", "numel", "finfo", "iinfo", "type", "dtype", "is_floating_point")
_OF_SHAPES_END = ("_like", "_type")
_NAMED_BY_CALLER = ("axis", "dim", "dims", "axes")  # a helper with such an argument does what its caller says


class Place(NamedTuple):
    """A line of the caller's own text."""

    file: str
    number: int
    text: str
    function: str


class Operation(NamedTuple):
    """An operation: NumPy's or torch's name of it, what it made, the steps that it read (-1, -2, ...: inputs), its
    line, and the line of the outermost call that led to it; `inner`: where it stands, if its line is that of the call
    which says along which axis."""

    name: str
    value: Any
    sources: tuple[int, ...]
    place: Place
    outer: Place
    inner: Optional[Place] = None


class Trace:
    """The operations of a call, in their order; `owns` tells whose files are the caller's own."""

    def __init__(self, owns: Callable[[str], bool]) -> None:
        self.owns = owns
        self.steps: list[Operation] = []
        self.inputs: list[Any] = []
        self.paused = False
        self.end: Optional[int] = None  # the step that made the output, where a call gives several results
        self._alive: list[Any] = []
        self._at: dict[int, int] = {}
        self._lines: dict[tuple[Any, int], Place] = {}  # met already

    def input(self, x: Any) -> Any:
        """The same array or tensor, of which each use is noted."""
        self.inputs.append(_numbers(x))
        noted = x.view(Noted) if isinstance(x, np.ndarray) else x
        self._is(noted, -len(self.inputs))
        return noted

    def value(self, source: int) -> Any:
        """What a step made, or an input."""
        return self.inputs[-1 - source] if source < 0 else self.steps[source].value

    def source(self, x: Any) -> list[int]:
        """The step that an array or a tensor comes of, if one does."""
        at = getattr(x, "_source", None) if isinstance(x, Noted) else self._at.get(id(x))
        return [] if at is None else [at]

    def forget(self, tensors: Any) -> None:
        """Parameters that hold other numbers by now come of no step."""
        for x in tensors:
            self._at.pop(id(x), None)

    def add(self, name: str, made: Any, given: Any) -> None:
        """A step."""
        places = None if self.paused else self._places()
        if places is None:
            return
        self.paused = True  # what is read here is no step
        sources = tuple(at for x in _arrays(given) for at in self.source(x))
        for x in _arrays(made):
            self.steps.append(Operation(name, _numbers(x), sources, *places))
            self._is(x, len(self.steps) - 1)
        self.paused = False

    def named(self, x: Any, frame: Any, line: int, before: Any) -> None:
        """A step: a line of this frame gave an array a name, or wrote into it, or returned it; `before` are the arrays
        that had names then."""
        if self.paused:
            return
        self.paused = True
        place = self._line(frame, line)
        words = {*re.findall(r"\w+", place.text)}
        read = [at for name, (each, _) in before.items() if name in words for at in self.source(each)]
        sources = self.source(x)
        if not sources or _is_unnoted(x):  # nothing else tells what is written into it
            sources = [*dict.fromkeys([*sources, *read, *self._last_at(place)])]
        self.steps.append(Operation("named", _numbers(x), tuple(sources), place, place))
        if _is_unnoted(x) or (not isinstance(x, Noted) and id(x) not in self._at):
            self._is(x, len(self.steps) - 1)
        self.paused = False

    def _last_at(self, place: Place) -> Iterator[int]:
        """The last steps, as far as they are of this line: out[i] = a.dot(b) writes what has no name."""
        at = len(self.steps)
        while at and self.steps[at - 1].place == place:
            at -= 1
            yield at

    def _is(self, x: Any, at: int) -> None:
        if isinstance(x, Noted):
            x._trace, x._source = self, at
        else:
            self._alive.append(x)  # so that no other gets its id
            self._at[id(x)] = at

    def _places(self) -> Optional[tuple[Place, Place, Place]]:
        """The innermost line of the caller's own text, and the outermost; None of what check itself asks."""
        frame: Any = sys._getframe(2)
        while frame is not None and not self.owns(frame.f_code.co_filename):
            if frame.f_code.co_filename.startswith(_ASKING):
                return None
            frame = frame.f_back
        if frame is None:
            return None
        inner = frame
        while _is_told_where(frame) and self.owns(frame.f_back.f_code.co_filename):
            frame = frame.f_back
        outer = frame
        while outer.f_back is not None and self.owns(outer.f_back.f_code.co_filename):
            outer = outer.f_back
        frames = frame, outer, inner
        place, outermost, innermost = (self._line(each, each.f_lineno) for each in frames)
        return place, outermost, innermost

    def _line(self, frame: Any, number: int) -> Place:
        at = frame.f_code, number
        if at not in self._lines:
            self._lines[at] = _line_of(frame, number)
        return self._lines[at]


def _line_of(frame: Any, number: int) -> Place:
    code = frame.f_code
    return Place(
        code.co_filename, number, linecache.getline(code.co_filename, number, frame.f_globals).strip(), code.co_name
    )


def _is_told_where(frame: Any) -> bool:
    """Whether a helper's line says what its caller gave it as an axis."""
    names = [name for name in _NAMED_BY_CALLER if name in frame.f_code.co_varnames[: frame.f_code.co_argcount]]
    if not names:
        return False
    text = linecache.getline(frame.f_code.co_filename, frame.f_lineno, frame.f_globals)
    return frame.f_back is not None and any(f"={name}" in text.replace(" ", "") for name in names)


def written_by_them(file: str) -> bool:
    """Whether a file of a traceback is the student's, and no library's."""
    return not file.startswith((_PACKAGE, "<__", "<frozen")) and "-packages" not in file


def written_as(mine: Any) -> Any:
    """The function, or the class, that something of a student's was written as."""
    call: Any = mine if isinstance(mine, (type, FunctionType)) else getattr(mine, "__func__", type(mine))
    while isinstance(getattr(call, "__wrapped__", None), FunctionType):  # a library's vmap, or a decorator
        call = call.__wrapped__
    return call


def room_of(mine: Any) -> dict[str, Any]:
    """The names of the file in which something of a student's was made."""
    call = written_as(mine)
    room: Optional[dict[str, Any]] = getattr(call, "__globals__", None)
    return room or vars(sys.modules.get(getattr(call, "__module__", ""), sys))


@contextmanager
def without_text_of_others(mine: Any) -> Iterator[None]:
    """While it is entered, what exec made of a string has no text: since Python 3.13 that of `python -c`, as which
    pytest-xdist begins its workers, is kept under the same name."""
    of_main = room_of(mine) is vars(sys.modules["__main__"])
    kept = None if of_main else linecache.cache.pop("<string>", None)
    try:
        yield
    finally:
        if kept is not None:
            linecache.cache["<string>"] = kept


def forget_results(mine: Any) -> None:
    """Empty what functions of a student's file keep by functools.cache: else their lines run once."""
    for held in room_of(mine).values():
        if isinstance(held, _lru_cache_wrapper) and written_by_them(held.__wrapped__.__code__.co_filename):
            held.cache_clear()


def error_place(error: Any) -> Optional[Place]:
    """The innermost line of a student's own text that an error came from."""
    found, trace = None, getattr(error, "__traceback__", None)
    while trace is not None:
        if written_by_them(trace.tb_frame.f_code.co_filename):
            found = _line_of(trace.tb_frame, trace.tb_lineno)
        trace = trace.tb_next
    return found


def _numbers(x: Any) -> Any:
    """A copy in NumPy."""
    x = x.detach().cpu().numpy() if is_tensor(x) else x
    return np.array(x, dtype=bool if x.dtype == bool else np.float64, subok=False)


def _arrays(found: Any) -> Iterator[Any]:
    if isinstance(found, np.ndarray) or is_tensor(found):
        yield found
    elif isinstance(found, (tuple, list)):
        for x in found:
            yield from _arrays(x)
    elif isinstance(found, dict):
        yield from _arrays(list(found.values()))


# ---- NumPy -----------------------------------------------------------------------------------------------------------


class Noted(np.ndarray):
    """An array that notes what is made of it."""

    _trace: Any = None
    _source: Any = None

    def __array_finalize__(self, other: Any) -> None:
        self._trace, self._source = getattr(other, "_trace", None), getattr(other, "_source", None)

    def __array_ufunc__(self, ufunc: Any, method: str, *given: Any, out: Any = None, **named: Any) -> Any:
        if out is not None:
            named["out"] = tuple(map(_plain, out))
        made = getattr(ufunc, method)(*map(_plain, given), **{name: _plain(x) for name, x in named.items()})
        if out is not None:
            for x in out:
                _note(x, ufunc.__name__, x, given)
            return out[0] if len(out) == 1 else out
        return _noted(ufunc.__name__ if method == "__call__" else f"{ufunc.__name__}.{method}", made, given)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        out = kwargs.get("out")
        made = function(*_plain(args), **_plain(kwargs))
        if isinstance(out, Noted):
            _note(out, function.__name__, out, (args, kwargs))
            return out
        for x in args[:1] if made is None else ():  # as np.copyto writes
            _note(x, function.__name__, x, (args, kwargs))
        return _noted(function.__name__, made, (args, kwargs))

    def __getitem__(self, at: Any) -> Any:
        return _noted("getitem", _plain(self)[_plain(at)], (self, at))

    def __setitem__(self, at: Any, x: Any) -> None:
        _plain(self)[_plain(at)] = _plain(x)
        _note(self, "setitem", self, (self, at, x))

    @property
    def T(self) -> Any:
        return _noted("transpose", _plain(self).T, (self,))


def _method(name: str) -> Any:
    def method(self: Any, *args: Any, **named: Any) -> Any:
        made = getattr(_plain(self), name)(*_plain(args), **_plain(named))
        return _noted(name, made, (self, args, named))

    return method


for _name in ("reshape", "transpose", "swapaxes", "ravel", "flatten", "repeat", "squeeze", "take", "dot", "round",
              "clip", "argmax", "astype", "sum", "max", "min", "mean", "cumsum"):  # fmt: skip
    setattr(Noted, _name, _method(_name))


def _is_unnoted(x: Any) -> bool:
    """Whether it is an array that notes nothing, as np.empty makes it."""
    return isinstance(x, np.ndarray) and not isinstance(x, Noted)


def _plain(x: Any) -> Any:
    """The same with arrays that nobody notes."""
    if isinstance(x, Noted):
        return x.view(np.ndarray)
    if isinstance(x, dict):
        return {name: _plain(each) for name, each in x.items()}
    return type(x)(map(_plain, x)) if type(x) in (tuple, list) else x


def _noted(name: str, made: Any, given: Any) -> Any:
    """What an operation made, as arrays that are noted, too."""
    if type(made) in (tuple, list):
        return type(made)(_noted(name, x, given) for x in made)
    if not isinstance(made, np.ndarray):
        return made
    made = made.view(Noted)
    _note(made, name, made, given)
    return made


def _note(x: Any, name: str, made: Any, given: Any) -> None:
    first = next((each for each in _arrays((given, x)) if isinstance(each, Noted) and each._trace), None)
    if first is not None:
        first._trace.add(name, made, given)


# ---- torch -----------------------------------------------------------------------------------------------------------


def tensors_noted(trace: Trace) -> AbstractContextManager[Any]:
    """While it is entered, a trace notes torch's functions; nothing where torch is not loaded, or before 1.13."""
    torch: Any = sys.modules.get("torch")
    mode = getattr(getattr(torch, "overrides", None), "TorchFunctionMode", None)
    if mode is None or not hasattr(mode, "__enter__"):
        return nullcontext()
    return _in_mode(mode, trace)


@contextmanager
def _in_mode(mode: Any, trace: Trace) -> Iterator[None]:
    class Noting(mode):  # type: ignore[misc]
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = function(*args, **(kwargs or {}))
            name = _name_of(function)
            changed = args[0] if name == "__setitem__" else made
            if name not in _OF_SHAPES and not name.endswith(_OF_SHAPES_END):
                trace.add(name.strip("_"), changed, (args, kwargs or {}))
            return made

    with Noting():
        yield


def _name_of(function: Any) -> str:
    name = str(getattr(function, "__name__", ""))
    return str(getattr(getattr(function, "__self__", None), "__name__", name)) if name == "__get__" else name


# ---- lines -----------------------------------------------------------------------------------------------------------


@contextmanager
def traced(enter: Callable[..., Any]) -> Iterator[None]:
    """While it is entered, Python tells `enter` of each function that is called: see sys.settrace."""
    old = sys.gettrace()
    sys.settrace(enter)
    try:
        yield
    finally:
        sys.settrace(old)


def lines_noted(trace: Trace) -> AbstractContextManager[None]:
    """While it is entered, arrays that the caller's lines give a name are noted, too: a table, or a mask, is made of
    numbers alone, which no array notes."""
    before: dict[int, tuple[int, dict[str, Any]]] = {}  # by frame: the line that runs, and the arrays before it

    def held(frame: Any) -> dict[str, Any]:
        return {name: (x, _bytes(x)) for name, x in frame.f_locals.items() if _is_small(x)}

    def look(frame: Any, event: str, result: Any) -> Any:
        if event in ("line", "return"):
            line, old = before.get(id(frame), (0, {}))
            now = held(frame)
            for name in now if line else ():
                x, numbers = now[name]
                if x is not old.get(name, (None, 0))[0] or numbers != old[name][1]:
                    trace.named(x, frame, line, old)
            before[id(frame)] = frame.f_lineno, now
            if event == "return" and _is_small(result):
                trace.named(result, frame, frame.f_lineno, now)
        return look

    def enter(frame: Any, event: str, _: Any) -> Any:
        if not trace.owns(frame.f_code.co_filename):
            return None
        before[id(frame)] = 0, held(frame)
        return look

    return traced(enter)


def _is_small(x: Any) -> bool:
    """Whether an array, or a tensor, has numbers to look at."""
    if isinstance(x, np.ndarray):
        return x.size <= 4096 and x.dtype.kind in "fbiu"
    return is_tensor(x) and x.numel() <= 4096 and not x.is_complex()


def _bytes(x: Any) -> Any:
    return x.tobytes() if isinstance(x, np.ndarray) else x._version


@contextmanager
def functions_noted() -> Iterator[set[Any]]:
    """While it is entered, the codes of the functions that are called are put into a set."""
    called: set[Any] = set()

    def look(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            called.add(frame.f_code)

    old = sys.getprofile()
    sys.setprofile(look)
    try:
        yield called
    finally:
        sys.setprofile(old)
