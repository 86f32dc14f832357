"""What two calls of a module must have in common, told quickly: the key of a call, and the shapes of its tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Optional

import torch
from torch import Tensor, is_grad_enabled, is_inference_mode_enabled

from .._private import autocasting_anywhere, layers_are_seen, observed_at_once, quickly_on_cpu, quickly_seen
from .._reading.reading import of_thread
from .._tensors import PLAIN

if TYPE_CHECKING:
    from .plans import ReadingPlan

CallKey = tuple[Any, ...]
Facts = tuple[Any, ...]  # what `is_like` compares
_PLAIN = frozenset((int, float, bool, str, type(None), bytes))
_NESTED = frozenset((tuple, list, dict))


def nobody_looks() -> bool:
    """Whether no reading, mode, transform, trace, autocast or `watch` sees each of torch's operations here; who asks
    has asked whether a compiler does."""
    return not (of_thread.reading or observed_at_once() or layers_are_seen() or autocasting_anywhere())


def key_of(module: Any, args: Any, kwargs: Any) -> Optional[tuple[CallKey, list[Tensor]]]:
    """(key, the tensors among the arguments); None of a call that is never the core's.

    Calls with one key have equal structures and constants, tensors of the same types and ranks, the same tensor in the
    same places, and are in the same modes.  Sizes are no part of a key.
    """
    tensors: list[Tensor] = []
    key: list[Any] = [module.__dict__.get("training"), is_grad_enabled(), is_inference_mode_enabled()]
    for x in args:
        if type(x) is Tensor and quickly_on_cpu(x):
            key.append((x.dtype, x.dim(), x.requires_grad))
            tensors.append(x)
        elif not _add(x, key, tensors):
            return None
    if kwargs:
        key.append(tuple(kwargs))
        for x in kwargs.values():
            if not _add(x, key, tensors):
                return None
    n = len(tensors)
    if n == 2:
        key.append(tensors[0] is tensors[1])
    elif n == 3:
        a, b, c = tensors
        key.append((a is b, b is c, a is c))
    elif n > 3:
        places = {id(x): i for i, x in reversed([*enumerate(tensors)])}
        key.append(tuple([places[id(x)] for x in tensors]))
    return tuple(key), tensors


def _add(x: Any, key: list[Any], tensors: list[Tensor]) -> bool:
    """Add an argument; False of one whose value no key can hold."""
    kind = type(x)
    if kind in PLAIN:
        if not quickly_on_cpu(x) or x.layout is not torch.strided:
            return False
        key.append((kind, x.dtype, x.dim(), x.requires_grad))
        tensors.append(x)
        return True
    if kind in _PLAIN:
        key.append((kind, x))
        return x == x  # a NaN is never equal to itself
    if kind in _NESTED:
        key.append((kind, tuple(x) if kind is dict else len(x)))
        return all([_add(each, key, tensors) for each in (x.values() if kind is dict else x)])
    return False


class Recent(NamedTuple):
    """Of a call by the core, for the next one: what `is_like` compares, or None; its key; its ReadingPlan."""

    facts: Any
    key: CallKey
    plan: ReadingPlan


def facts_of(module: Any, args: Any) -> Optional[Facts]:
    """What `is_like` compares of a call that `key_of` has told; None where an argument is no plain tensor."""
    if not args or any(type(x) is not Tensor for x in args):
        return None
    places: dict[int, int] = {}
    firsts = [places.setdefault(id(x), i) for i, x in enumerate(args)]
    each = [(None, quickly_seen(x)) if first == i else (first, None) for i, (first, x) in enumerate(zip(firsts, args))]
    return module.__dict__.get("training"), is_grad_enabled(), is_inference_mode_enabled(), tuple(each), len(places)


def is_like(facts: Facts, module: Any, args: Any) -> bool:
    """Whether a call has the key and the shapes of another, whose facts these are, told quicker."""
    training, grad, inference, each, n_tensors = facts
    if len(args) != len(each) or module.__dict__.get("training") is not training:
        return False
    if is_grad_enabled() is not grad or is_inference_mode_enabled() is not inference:
        return False
    for x, (first, seen) in zip(args, each):
        if x is not args[first] if seen is None else type(x) is not Tensor or quickly_seen(x) != seen:
            return False
    return n_tensors == 1 or len({*map(id, args)}) == n_tensors
