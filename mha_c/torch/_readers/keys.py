"""What two calls of a module must have in common, told quickly: the key of a call, and the shapes of its tensors."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from .._private import autocasting_anywhere, layers_are_seen, observed, quickly_on_cpu
from .._tensors import PLAIN

_PLAIN = frozenset((int, float, bool, str, type(None), bytes))
_NESTED = frozenset((tuple, list, dict))


def nobody_looks() -> bool:
    """Whether no mode, compiler, transform, trace, autocast or `watch` sees each of torch's operations here."""
    return not (observed() or layers_are_seen() or autocasting_anywhere())


def key_of(module: Any, args: Any, kwargs: Any) -> Optional[tuple[Any, list[Tensor]]]:
    """(key, the tensors among the arguments); None of a call that is never the core's.

    Calls with one key have equal structures and constants, tensors of the same types and ranks, the same tensor in the
    same places, and are in the same modes.  Sizes are no part of a key.
    """
    tensors: list[Tensor] = []
    key: list[Any] = [module.__dict__.get("training"), torch.is_grad_enabled(), torch.is_inference_mode_enabled()]
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
