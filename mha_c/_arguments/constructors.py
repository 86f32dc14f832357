"""The constructors of the book's layers: both generations of their arguments, for NumPy's layers and torch's."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .names import INSTEAD, did_you_mean, listed
from .scalars import whole

MULTI_HEAD = (
    "num_hiddens, num_heads, dropout, bias=False",
    "key_size, query_size, value_size, num_hiddens, num_heads, dropout, bias=False",
)
ADDITIVE = "num_hiddens, dropout", "key_size, query_size, num_hiddens, dropout"


def multi_head(sizes: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of MultiHeadAttention by name, the sizes as whole numbers; `use_bias`, mxnet's word, is `bias`."""
    given = _whole_sizes(_bind("MultiHeadAttention", MULTI_HEAD, sizes, _as_bias(named)))
    divisible(given["num_hiddens"], "num_hiddens", given["num_heads"])
    return given


def _as_bias(named: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keywords with `bias` for `use_bias`."""
    if "use_bias" in named and "bias" in named:
        raise TypeError("bias and use_bias mean the same: give one of them")
    return {("bias" if name == "use_bias" else name): value for name, value in named.items()}


def divisible(features: Any, name: str, num_heads: Any) -> tuple[int, int]:
    """Both as whole numbers; ValueError unless the second divides the first."""
    features, heads = whole(features, name), whole(num_heads, "num_heads")
    if features % heads:
        hint = f"are they swapped? {name} comes first" if heads % features == 0 else _divisors(features, heads)
        raise ValueError(f"{name} ({features}) must be divisible by num_heads ({heads}): {hint}")
    return features, heads


def _divisors(features: int, heads: int) -> str:
    """What to write: the numbers of heads next to the one that was asked for."""
    fewer = next(n for n in range(min(heads, features), 0, -1) if features % n == 0)
    more = next((n for n in range(heads, min(features, 10_000) + 1) if features % n == 0), fewer)
    return f"take {fewer}{'' if more == fewer else f' or {more}'} heads"


def additive(sizes: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of AdditiveAttention by name, the sizes as whole numbers."""
    return _whole_sizes(_bind("AdditiveAttention", ADDITIVE, sizes, named))


def _whole_sizes(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value if name in ("dropout", "bias") else whole(value, name) for name, value in given.items()}


def _bind(owner: str, forms: Sequence[str], args: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Any]:
    """Bind a call to the first of several constructor signatures that fits.

    No call fits both generations of the book, because one form needs more arguments than the other takes.
    """
    signatures = [_signature(form) for form in forms]
    shown = "\n".join(f"  {owner}({form})" for form in forms)
    called = f"call it in one of these forms:\n{shown}"
    for signature in signatures:
        try:
            bound = signature.bind(*args, **named)
        except TypeError:
            continue
        bound.apply_defaults()
        if "bias" not in named and isinstance(bound.arguments.get("bias"), float):  # 100, 100, 5, 0.5: one is missing
            raise TypeError(f"{owner}() got {args!r:.200}, where the last one would be the bias; {called}")
        return bound.arguments
    unknown = [name for name in named if all(name not in signature.parameters for signature in signatures)]
    if unknown:
        guess = did_you_mean(unknown[0], {name: 0 for signature in signatures for name in signature.parameters})
        guess = f": {INSTEAD[unknown[0]]}" if unknown[0] in INSTEAD else guess
        text = f"{owner}() got an unexpected keyword argument {unknown[0]!r}{guess}"
        raise TypeError(f"{text}\nC{called[1:]}" if guess else f"{text}; {called}")
    left_out = _left_out(signatures, args, named)
    if left_out == ["dropout"] and args and isinstance(args[-1], float) and 0 <= args[-1] < 1:
        raise TypeError(f"{owner}() is missing a size: its last argument, {args[-1]!r}, looks like dropout; {called}")
    if left_out:
        raise TypeError(f"{owner}() is missing {listed(left_out)}; {called}")
    positional = f"{len(args)} positional argument{'' if len(args) == 1 else 's'}"
    keywords = f" and the keywords {', '.join(sorted(named))}" if named else ""
    raise TypeError(f"{owner}() got {positional}{keywords}; {called}")


def _left_out(signatures: Sequence[inspect.Signature], args: tuple[Any, ...], named: Mapping[str, Any]) -> list[str]:
    """The names that a call leaves out of the form that has all its names and the fewest others."""
    found = []
    for signature in signatures:
        try:
            given = signature.bind_partial(*args, **named).arguments
        except TypeError:
            continue
        required = [name for name, one in signature.parameters.items() if one.default is one.empty]
        found.append([name for name in required if name not in given])
    return min(filter(None, found), key=len, default=[])


class TwoForms(inspect.Signature):
    """The signature of one form, to which a call of the other form can be bound as well."""

    __slots__ = ()
    other = ""  # of the subclass that `shows` makes

    def bind(self, *args: Any, **named: Any) -> inspect.BoundArguments:
        named = dict(_as_bias(named)) if "bias" in self.parameters else named
        try:
            return super().bind(*args, **named)
        except TypeError:
            try:
                return self._of_other_form().bind(*args, **named)
            except TypeError:
                pass
            raise

    def _of_other_form(self) -> inspect.Signature:
        first = [one for one in self.parameters.values() if one.name == "self"]
        keywords = [one for one in self.parameters.values() if one.kind is inspect.Parameter.KEYWORD_ONLY]
        return inspect.Signature([*first, *_signature(self.other).parameters.values(), *keywords])


def shows(form: str, other: str) -> Callable[[Any], Any]:
    """Decorates a constructor (self, *sizes, keywords, **named): help() shows the names of this form, and tools that
    bind a call to its signature, such as mock's create_autospec, may use the other one."""
    kind = type("TwoForms", (TwoForms,), {"other": other, "__slots__": ()})

    def with_signature(init: Any) -> Any:
        own, *others = inspect.signature(init).parameters.values()
        keywords = [one for one in others if one.kind is inspect.Parameter.KEYWORD_ONLY]
        init.__signature__ = kind([own, *_signature(form).parameters.values(), *keywords])
        return init

    return with_signature


@functools.cache
def _signature(form: str) -> inspect.Signature:
    """The signature of a form as in a `def`, where False is the only possible default."""
    kind, empty = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
    parts = [part.partition("=") for part in form.split(", ")]
    return inspect.Signature([inspect.Parameter(name, kind, default=False if has else empty) for name, has, _ in parts])
