"""One call of a reader's module, operation by operation: what each made, of what, and in which line."""

from __future__ import annotations

import linecache
import math
import re
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

_NOT_THEIRS = "torch", "mha_c", "einops"  # whose lines no reader has written
_LONGEST = 96  # characters of a line that is quoted
_OF_SHAPES = ("_like", "size", "dim", "numel", "finfo")  # they read no number of their tensors


class Step(NamedTuple):
    """An operation.

    name     of torch's function: "matmul", "softmax", "__getitem__"
    args     its arguments; tensors that come of the inputs are copies
    values   copies of the tensors that it gave
    sources  (step, which of its values) of its arguments: -1, -2, ... are the inputs of the call
    plain    whether other tensors were among its arguments: parameters, tables
    line     the reader's line that it stands in; "" where there is no source
    """

    name: str
    args: tuple[Any, ...]
    values: tuple[Tensor, ...]
    sources: tuple[tuple[int, int], ...]
    plain: bool
    line: str


class Trace:
    """The steps of a call, in their order."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.inputs: list[Tensor] = []

    def input(self, x: Tensor) -> Tensor:
        """The same tensor, of which each use is noted."""
        self.inputs.append(x.detach().clone())
        return self._noted(x.detach().clone(), (-len(self.inputs), 0))

    def values(self, source: tuple[int, int]) -> Tensor:
        """What an input, or a step, has given."""
        step, which = source
        return self.inputs[-1 - step] if step < 0 else self.steps[step].values[which]

    def sources_of(self, result: Any) -> list[tuple[int, int]]:
        """Of the tensors of a result that come of the inputs."""
        return [x._source for x in _tensors(result) if isinstance(x, _Noted)]

    def call(self, function: Any, args: Any, kwargs: Any) -> Any:
        """The result of one of torch's functions, and a step for it."""
        name = _name_of(function)
        if name == "scaled_dot_product_attention":
            return _in_steps(*args, **kwargs)
        given = [*_tensors((args, kwargs))]
        noted = [x for x in given if isinstance(x, _Noted)]
        args, kwargs = _plain(args), _plain(kwargs)
        result = function(*args, **kwargs)
        made = [x for x in _tensors(result)]
        in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        changed = noted[:1] if in_place else []
        if not (made or changed) or name.endswith(_OF_SHAPES) or name.startswith("new_"):
            return result
        copies = tuple(x.detach().clone() for x in (made or [_plain(x) for x in changed]))
        everything = _copied((*args, *kwargs.values()))
        plain = len(noted) < len(given)
        self.steps.append(Step(name, everything, copies, tuple(x._source for x in noted), plain, _line()))
        for x in changed:
            x._source = len(self.steps) - 1, 0
        return changed[0] if changed and made else self._all_noted(result, iter(range(len(made))))

    def _noted(self, x: Tensor, source: tuple[int, int]) -> Any:
        noted: Any = x.as_subclass(_Noted)
        noted._trace, noted._source = self, source
        return noted

    def _all_noted(self, result: Any, numbers: Iterator[int]) -> Any:
        if isinstance(result, Tensor):
            return self._noted(result, (len(self.steps) - 1, next(numbers)))
        if isinstance(result, (tuple, list)):
            parts = [self._all_noted(x, numbers) for x in result]
            return type(result)(parts)  # also torch's own tuples, whose parts have names
        return result


class _Noted(Tensor):
    """A tensor that comes of the inputs of a call."""

    _trace: Trace
    _source: tuple[int, int]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = next(x for x in _tensors((args, kwargs or {})) if isinstance(x, _Noted))
        return first._trace.call(func, args, kwargs or {})


def _tensors(found: Any) -> Iterator[Any]:
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, (tuple, list, dict)):
        for x in found.values() if isinstance(found, dict) else found:
            yield from _tensors(x)


def _plain(found: Any) -> Any:
    """The same with tensors that nobody notes."""
    if isinstance(found, _Noted):
        return found.as_subclass(Tensor)
    if isinstance(found, dict):
        return {name: _plain(x) for name, x in found.items()}
    return type(found)(map(_plain, found)) if type(found) in (tuple, list) else found


def _copied(found: Any) -> Any:
    if isinstance(found, Tensor):
        return found.detach().clone()
    return type(found)(map(_copied, found)) if type(found) in (tuple, list) else found


def _name_of(function: Any) -> str:
    name = str(getattr(function, "__name__", ""))
    return str(getattr(getattr(function, "__self__", None), "__name__", name)) if name == "__get__" else name


def _in_steps(q: Any, k: Any, v: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
              scale: Any = None, enable_gqa: bool = False) -> Any:  # fmt: skip
    """What torch's function of all in one computes, without its dropout."""
    if enable_gqa:
        k, v = (x.repeat_interleave(q.shape[-3] // k.shape[-3], -3) for x in (k, v))
    scores = q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None:
        hides = attn_mask.dtype is torch.bool
        scores = scores.masked_fill(~attn_mask, -math.inf) if hides else scores + attn_mask
    return scores.softmax(-1) @ v


def _line() -> str:
    """The reader's line that called."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_THEIRS:
        frame = frame.f_back
    if frame is None:
        return ""
    line = " ".join(linecache.getline(frame.f_code.co_filename, frame.f_lineno, frame.f_globals).split())
    line = re.sub(r"^def [^:]*: (?=return )| #.*$", "", line).strip()
    return line if len(line) <= _LONGEST else line[: _LONGEST - 4].rstrip() + " ..."
