"""Errors of calls whose arguments have a wrong name or order, or are missing; and where a traceback shows a refusal."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from opcode import opmap
from typing import Any, TypeVar, cast

from ..errors import ShapeError
from .names import CAUSAL, INSTEAD, MASKS, meant

Function = TypeVar("Function", bound=Callable[..., Any])

_RAISE = opmap["RAISE_VARARGS"]

INPUTS = "queries", "keys", "values"


def shows_names(function: Any) -> Any:
    """Decorates a call (queries=None, keys=None, ..., **misnamed), which refuses other names and missing inputs in our
    words: help() and editors show the names alone, and queries and keys without a default."""
    signature = inspect.signature(function)
    named = [x for x in signature.parameters.values() if x.kind is not x.VAR_KEYWORD and x.name != "defaults"]
    shown = [one.replace(default=one.empty) if one.name in ("queries", "keys") else one for one in named]
    function.__signature__ = signature.replace(parameters=shown)
    return function


def checks_names(function: Function) -> Function:
    """Like `refuses_at_the_call`, for the call of a layer: names that it does not have are refused in our words."""
    known = frozenset(inspect.signature(function).parameters)

    @functools.wraps(function)
    def checked(layer: Any, *arguments: Any, **named: Any) -> Any:
        try:
            if named and not known.issuperset(named):
                raise misnamed(layer, function.__name__, [name for name in named if name not in known])
            return function(layer, *arguments, **named)
        except Exception as error:
            if is_refusal(error):
                raise error.with_traceback(None) from None
            raise

    return cast("Function", checked)


def misnamed(layer: Any, call: str, named: Iterable[str]) -> TypeError:
    """The error for keywords that `call`, a method of the layer, does not have."""
    name = next(iter(named))
    signature = inspect.signature(getattr(type(layer), call))
    shown = [one.replace(annotation=one.empty) for one in signature.parameters.values()][1:]
    shown = [one.replace(default=one.empty) if one.name in INPUTS else one for one in shown]
    known = [one.name for one in shown if one.kind is not one.VAR_POSITIONAL]
    if name in getattr(type(layer), "_lacks", {}):
        hint = layer._lacks[name]
    elif name in CAUSAL and "causal" in known:
        hint = "write causal=True"
    elif name in MASKS and not {"keep_mask", "valid_lens"}.isdisjoint(known):
        hint = _instead_of(name, layer, known)
    else:
        hint = f"it is called with {signature.replace(parameters=shown, return_annotation=signature.empty)}"
        found = meant(name, known)
        first = f"{INSTEAD[name]}." if name in INSTEAD else found and f"did you mean {found}?"
        hint = f"{first} {hint[0].upper()}{hint[1:]}" if first else hint
    return TypeError(f"{type(layer).__name__}.{call}() got an unexpected keyword argument {name!r}: {hint}")


def _instead_of(mask: str, layer: Any, known: Collection[str]) -> str:
    """What to write instead of a mask."""
    hides, causal = MASKS[mask], "For a causal mask write causal=True"
    keep = f"~{mask}" if hides else mask
    of_items = "" if "padding" in mask else " of a mask (B, K) or (B, Q, K)"  # (B, K): one row for all queries
    lens = f"valid_lens={f'({keep})' if hides else keep}.sum(-1){of_items}"
    if "keep_mask" not in known:  # of kernels, which are no scores
        return f"it takes valid_lens, how many keys each item or each query may see, here {lens}.  {causal}"
    axes, full = ("[:, None, None]", "(B, H, Q, K)") if layer._by_head else ("[:, None]", "(B, Q, K)")
    of_rows = "" if hides else f"keep_mask={keep} of a mask (Q, K) or {full}, "
    text = f"write {of_rows}keep_mask={keep}{axes} of a mask (B, K), where True = may attend"
    if hides is None:
        text += f".  If True hides, as in torch.nn.MultiheadAttention, it is ~{mask}; a mask of floats is bias={mask}"
    if "queries" not in known:  # its queries and keys are of one sequence
        return f"{text}.  It is causal without a mask"
    return f"{text}.  {causal}; if the keys that count come first, {lens} is faster"


def check_rest(layer: Any, defaults: Any, named: Mapping[str, Any]) -> None:
    """TypeError for other names, and for more by position than queries, keys, values, valid_lens and defaults."""
    if named:
        raise misnamed(layer, "forward", named)
    if not all(x is None or (getattr(x, "ndim", 0) == 0 and not x) for x in defaults):  # a tracer's False is a tensor
        raise TypeError(f"{type(layer).__name__} takes causal, training, cache and masks by name, after valid_lens")


def check_order(owner: str, keys: Any, values: Any, valid_lens: Any) -> None:
    """TypeError if keys or values look like lengths, and lengths like values: arrays, tensors, or a list of lengths."""
    for name, given in ("keys", keys), ("values", values):
        if getattr(given, "ndim", 1) <= 2 and getattr(valid_lens, "ndim", 0) == 3:
            called = f"{owner}(queries, keys, values, valid_lens)"
            raise TypeError(f"{name} looks like lengths and valid_lens like values: the order is {called}")


def missing(owner: str, **inputs: Any) -> TypeError:
    """The error for a call in which an input is missing or None."""
    none = [name for name, value in inputs.items() if value is None]
    alike = ".  For self-attention write layer(X, X, X)" if none == ["keys", "values"] else ""
    return TypeError(f"{owner} is called with queries, keys and values; missing or None: {', '.join(none)}{alike}")


def is_of_a_library(error: Exception) -> bool:
    """Whether the error has passed through nothing but mha_c and torch since it was raised: no program's own part."""
    entry = error.__traceback__
    while entry is not None:
        if entry.tb_frame.f_globals.get("__name__", "").partition(".")[0] not in ("mha_c", "torch"):
            return False
        entry = entry.tb_next
    return True


def is_refusal(error: Exception) -> bool:
    """Whether a check of ours made this error with a `raise`, so that the caller's line is all its traceback needs.

    An error that an operation raised, NumPy's or one of ours with a bug, is none: its traceback says where.  Nor is one
    that passed through a program that was given to us, such as a model or a student's function.
    """
    last = entry = error.__traceback__
    while entry is not None:
        last, entry = entry, entry.tb_next
    if not is_of_a_library(error):
        return False
    if last is None or isinstance(error, ShapeError):
        return True
    ours = last.tb_frame.f_globals.get("__name__", "").startswith("mha_c")
    return ours and last.tb_frame.f_code.co_code[last.tb_lasti] == _RAISE


def refuses_at_the_call(function: Function) -> Function:
    """Decorates what users call: before an error that a check of ours raises stands the caller's line, and then one
    frame of the package.  The calls that take a few microseconds write these lines themselves."""

    @functools.wraps(function)
    def checked(*arguments: Any, **named: Any) -> Any:
        try:
            return function(*arguments, **named)
        except Exception as error:
            if is_refusal(error):
                raise error.with_traceback(None) from None
            raise

    return cast("Function", checked)
