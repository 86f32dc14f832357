"""The arguments of a call: each with its name, and the form that they have together."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from .graph import Form
from .recording import modes_now

PLAIN = (int, float, str, bool, complex, bytes, type(None), torch.dtype, torch.device)


def named(called: Any, args: Any, kwargs: Any) -> Iterator[tuple[str, Any]]:
    """(name, thing) of the arguments, and of all in tuples, lists and dicts."""
    names = _parameters(called, len(args))
    for name, x in [*zip(names, args), *kwargs.items()]:
        yield from _inside(name, x)


def _inside(name: str, x: Any) -> Iterator[tuple[str, Any]]:
    yield name, x
    if isinstance(x, (tuple, list)):
        for i, part in enumerate(x):
            yield from _inside(f"{name}[{i}]", part)
    elif isinstance(x, dict):
        for key, part in x.items():
            yield from _inside(f"{name}[{key!r}]", part)


def _parameters(called: Any, n: int) -> list[str]:
    function = called.forward if isinstance(called, nn.Module) else called
    plain_one = getattr(function, "__func__", function)
    if type(plain_one) is FunctionType and not {"__wrapped__", "__signature__"} & vars(plain_one).keys():
        code = plain_one.__code__  # as inspect tells it, in a tenth of the time
        known, star = code.co_varnames, code.co_argcount + code.co_kwonlyargcount
        names = [*known[plain_one is not function : code.co_argcount]]
        return _numbered(names, known[star] if code.co_flags & inspect.CO_VARARGS else "args", n)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        parameters = ()  # type: ignore[assignment]
    names = [x.name for x in parameters if x.kind in (x.POSITIONAL_ONLY, x.POSITIONAL_OR_KEYWORD)]
    rest = next((x.name for x in parameters if x.kind is x.VAR_POSITIONAL), "args")
    return _numbered(names, rest, n)


def _numbered(names: list[str], rest: str, n: int) -> list[str]:
    return names[:n] + [f"{rest}[{i}]" for i in range(n - len(names))]


def form_of(args: tuple[Any, ...], kwargs: Any = None) -> Form:
    """The form of a call with these arguments, here and now."""
    seen: dict[int, int] = {}
    parts = tuple(_form(x, seen) for x in args)
    named = tuple((name, _form(x, seen)) for name, x in (kwargs or {}).items())
    return Form((parts, named, modes_now(), torch.get_default_dtype()))


def _form(x: Any, seen: dict[int, int]) -> Any:
    if isinstance(x, Tensor):
        first = seen.setdefault(id(x), len(seen))
        return type(x), x.dim(), x.dtype, x.device.type, x.requires_grad, first
    if isinstance(x, PLAIN):
        return type(x), x
    if isinstance(x, (tuple, list)):
        return (type(x), *(_form(part, seen) for part in x))
    if isinstance(x, dict):
        return (dict, *((name, _form(part, seen)) for name, part in x.items()))
    return type(x), id(x)
