"""Which modules of a model are attentions that a reader has written, and what becomes of them."""

from __future__ import annotations

import re
import warnings
import weakref
from typing import Any, Optional

import torch
from torch import Tensor, nn

from ... import teach
from ..._recognize import THREE_LINES, arguments, books_name, weights_of
from .._call.children import is_changed
from .._tensors import recorded_or_transformed
from ..nn import MultiheadAttention
from .book import become_ours, is_of_the_book
from .compared import Unlike, is_comparing, isolated
from .made import is_made, is_ours, make
from .plan import Plan
from .probing import fitted
from .telling import Told, what_differs

LEFT: Any = weakref.WeakKeyDictionary()  # {module: why it was left}
_KINDS = {"multi_head": "multi_head", "additive": "additive", "dot": "dot_product"}
OTHER = "computes something other than an attention of the book"


def kind_of(module: nn.Module) -> str:
    """ "multi_head", "additive" or "dot" by names and structure alone; "" where it is no attention."""
    kind = type(module)
    if kind.__module__.partition(".")[0] in ("torch", "mha_c") or kind.forward is nn.Module.forward:
        return ""
    try:
        names = arguments(module)
    except (TypeError, ValueError):
        return ""
    roles = {*names.values()}
    if "queries" not in roles:
        return ""
    by_name = {books_name(name, ["queries", "keys", "values"]) for name in names}
    if next(module.parameters(), None) is None:
        few = sum(1 for _ in module.modules()) <= 6
        return "dot" if few and {"queries", "keys"} <= by_name else ""
    if sum(1 for _ in module.parameters()) > 100:  # a model
        return ""
    found = weights_of(module)
    if not found:
        few = sum(1 for _ in module.parameters()) <= 4
        return "dot" if few and {"queries", "keys", "values"} <= by_name else ""
    others, own = found[0].unused(module), sum(map(len, found[0].parts.values()))
    if len(others) > (0 if holds_attention(module) else own):  # a block, with more in it
        return ""
    if "w_v" in found[0].parts:
        return "additive" if "keys" in roles else ""
    return "multi_head"


def says_so(module: nn.Module) -> bool:
    """Whether names say that it is an attention, so that somebody may wonder why it was left.  Three layers that end
    in one number may be an additive score, and a critic of states and actions as well."""
    by_name = {books_name(name, ["keys", "values"]) for name in arguments(module)} - {""}
    return bool(by_name) or "att" in type(module).__name__.lower() or kind_of(module) != "additive"


def converted(module: nn.Module) -> tuple[list[str], bool]:
    """Converts the attention modules inside a module; (which were left, and why; whether there are any)."""
    left, found, conversion, before = [], False, Conversion(), {}  # type: Any, bool, Conversion, dict[Any, Any]
    for name, part in reversed(list(module.named_modules())):  # a MultiHeadAttention after the attention inside
        if is_ours(part):
            found = True
            continue
        known = isinstance(part, nn.MultiheadAttention) or is_of_the_book(part)
        if not known and (not kind_of(part) or is_wrapper(part)):
            continue
        around = not known and holds_attention(part)
        if known:
            before[part] = type(part), dict(part.__dict__)
        reason = _of_torch_or_the_book(part, before) if known else conversion.take(part)
        told_of = known or reason is None or says_so(part)
        found = found or told_of
        if reason is not None and told_of and not around:  # else what is inside has been told
            kind = f"{type(part).__module__}.{type(part).__qualname__}"
            left.append(f"{name or 'the module itself'} ({kind}) {reason}")
    return left[::-1], found


def _of_torch_or_the_book(module: nn.Module, before: dict[Any, Any]) -> Optional[str]:
    """Convert a module of torch or d2l; None, or why it is left.

    before   {module: (its class, its state)} as they were: parts of one that is left are put back
    """
    if not isinstance(module, nn.MultiheadAttention):
        try:
            return become_ours(module)
        except RuntimeError as error:  # weights that take no other numbers, as quantized ones: torch's words
            for inside in before.keys() & set(module.modules()):
                inside.__class__, attributes = before[inside]
                inside.__dict__.clear()
                inside.__dict__.update(attributes)
            return f"has weights that convert cannot replace to compare it: convert before you quantize ({error})"
    if is_changed(module):
        return "has hooks or a forward of its own"
    if type(module) is not nn.MultiheadAttention:
        return "is a subclass"
    module.__class__ = MultiheadAttention
    return None


class Conversion:
    """One call of `convert`: modules of one class with the same parts are compared once."""

    def __init__(self) -> None:
        self._known: list[tuple[Any, Any]] = []
        self._told: dict[Any, str] = {}

    def take(self, module: nn.Module) -> Optional[str]:
        """Convert one module, of which `kind_of` says that it may be an attention; None, or why it is left."""
        if "forward" in module.__dict__:
            return "has a forward of its own"
        key = _key(module)
        found = next((one for known, one in self._known if _are_equal(known, key)), None)
        if found is None:
            found = self._compared(module)
            self._known.append((key, found))
        if isinstance(found, Plan):
            make(module, found)
            return None
        LEFT[module] = found
        return str(found)

    def _compared(self, module: nn.Module) -> Any:
        try:
            return fitted(module)
        except Unlike as error:
            return self._in_words(module, str(error))
        except Exception as error:  # a class of somebody else may raise anything
            return f"could not be compared: {type(error).__name__}: {error}".split("\n")[0]

    def _in_words(self, module: nn.Module, reason: str) -> str:
        kind = type(module), reason
        if kind not in self._told:
            self._told[kind] = told(module, reason)
        return self._told[kind]


_RANDOM = "it gives other numbers each time, also in evaluation"
_IN_TRAINING = "it computes something else in training"


def told(module: nn.Module, reason: str = "") -> str:
    """Why a module is left: the reason, or what `teach.check` says, and the line that differs."""
    try:
        line = what_differs(module, reason == _IN_TRAINING)
    except Exception:  # a class of somebody else may raise anything
        line = Told()
    if reason:
        more = line.words and (reason == _IN_TRAINING or "which the book's has not" in reason)
        return f"differs: {reason}{f': {line}' if more else ''}"
    said, mistakes = _said_by_check(module)
    if line.words and (not said or (line.known and ", and " in said)):  # two mistakes may explain by chance
        return f"differs: {line}"
    if not said:
        return OTHER
    hides = mistakes[:1] and re.match("(no_)?mask|lens", mistakes[0])
    if hides and {"mask", "valid_lens"} & {*arguments(module).values()}:  # the line is one of a call without them
        return f"differs: {said}" + (f"; and {line}" if line.words and not line.hides else "")
    where = f", {line.line}" if line.line and not line.product else ""
    return f"differs: {said}{where}{line.rest if line.known else ''}"


def _said_by_check(module: nn.Module) -> tuple[str, list[str]]:
    """(what `teach.check` says of a module that computes something else, the mistakes); of one with one input also as a
    causal one."""
    kind = _KINDS[kind_of(module)]
    one_input = kind == "multi_head" and "keys" not in arguments(module).values()
    for each in (kind, "causal_multi_head") if one_input else (kind,):
        try:
            with isolated():
                result = teach.check(module, each)
                first = str(result).split("\n")[0]
        except Exception:
            continue
        found = re.search(r"equals the book's(?: \w+)? if (.*?)\.?$", first)
        if result.mistakes == ["sees_future"]:  # then it is the kind that is not causal, and differs elsewhere
            continue
        if found is not None and (each == kind or ", and " not in found[1]):
            return found[1], result.mistakes
        if "gives other numbers each time" in first:
            return _RANDOM, []
    return "", []


def holds_attention(module: nn.Module) -> bool:
    """Whether a part of it, with parameters, is an attention that has been looked at already."""
    inside = (part for part in module.modules() if part is not module and next(part.parameters(), None) is not None)
    return any(is_ours(part) or part in LEFT for part in inside)


def left_as_they_were(left: list[str]) -> str:
    """The words of a warning."""
    return f"convert left as they were: {'; '.join(left)}.  {THREE_LINES}"


def is_wrapper(module: nn.Module) -> bool:
    """Whether one attention inside holds all its parameters: then it is around that one."""
    count = sum(1 for _ in module.parameters())
    inside = [part for part in module.modules() if part is not module]
    known = (part for part in inside if is_ours(part) or part in LEFT)
    return any(count == sum(1 for _ in part.parameters()) > 0 for part in known)


def _key(module: nn.Module) -> Any:
    """All that a module's lines may read but for the numbers of its parameters."""
    structure: list[Any] = []
    tables: list[Tensor] = []
    for path, part in module.named_modules():
        structure.append((path, type(part).__mro__[1] if is_made(part) else type(part)))
        structure += [
            (name, None if x is None else () if nn.parameter.is_lazy(x) else tuple(x.shape))
            for name, x in part._parameters.items()
        ]
        for name, value in {**part._buffers, **vars(part)}.items():
            if isinstance(value, Tensor):
                tables.append(value)
            elif isinstance(value, (int, float, str, bool, type(None))):
                structure.append((name, type(value), value))
    return structure, tables


def _are_equal(one: Any, other: Any) -> bool:
    if one[0] != other[0] or len(one[1]) != len(other[1]):
        return False
    return all(a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(one[1], other[1]))


def compare_at_first_call(kind: Any) -> Any:
    """Let the instances of a class be compared at their first call.  Returns the class."""
    if "_compares_at_first_call" in vars(kind):
        return kind
    call, left = kind.__call__, weakref.WeakSet()  # type: Any, Any

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if type(self) is kind and not (is_comparing() or recorded_or_transformed()) and self not in left:
            left.add(self)
            _first(self)
        return call(self, *args, **kwargs)

    kind.__call__ = __call__
    kind._compares_at_first_call = True
    return kind


def _first(module: nn.Module) -> None:
    left, found = converted(module)
    if left or not found:
        warnings.warn(left_as_they_were(left or [f"{type(module).__qualname__} {OTHER}"]), stacklevel=3)
