"""What a call gives, as one output: alone, or among the entries of a tuple, a dict, or an object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..._arguments.arrays import is_tensor
from ..words.sentences import said
from .making import plain
from .probes import Inputs

_DEPTH = 8  # axes of a result, and some more
MOST = 1e7  # numbers of a result: more than any probe has


class NoOutput(TypeError):
    """What a student gives is no output."""


class Memory(NamedTuple):
    """What a student was asked before: a probe costs a call, and ways to ask it share many."""

    probes: dict[Any, list[Inputs]]  # by round and layout
    outcomes: dict[Any, Any]  # by round, way and probe
    right: dict[Any, Any]  # what the book's function gives, by form and probe


def output_of(result: Any, keys: int, second: bool = False, of_layer: bool = False) -> tuple[Any, str]:
    """(the output, the name of its entry where it is not the first of a tuple).

    Of a tuple the first, or of a pair of queries and keys the second; of what has names, and of a layer's pair, the
    first that is not the attention weights, whose rows have as many numbers as there are keys, and sum to 1.
    """
    if result is None:
        raise NoOutput(said("it gives None: is a return missing?"))
    if _is_array(result):
        return _of_a_probe(result), ""
    held = {name: x for name, x in _entries(result).items() if _is_array(x)}
    if not held:
        if isinstance(result, dict):
            raise NoOutput(said("it gives a dict: return the output, or (output, weights)"))
        if _is_deeper(result, _DEPTH):
            raise NoOutput(said("it gives lists within lists that have no end, or more than any result has"))
        return result, ""
    if isinstance(result, (tuple, list)) and not (of_layer and len(held) == 2):
        return _of_a_probe([*held.values()][second and len(held) > 1]), ""
    name = next((name for name, x in held.items() if not _are_weights(x, keys)), next(iter(held)))
    return _of_a_probe(held[name]), "" if name == "[0]" else name


def _entries(result: Any) -> Mapping[str, Any]:
    if isinstance(result, Mapping):
        return {str(name): x for name, x in result.items()}
    if isinstance(result, (tuple, list)):
        return {f"[{i}]": x for i, x in enumerate(result)}
    return getattr(result, "__dict__", {})


def _is_array(x: Any) -> bool:
    return (isinstance(x, np.ndarray) and x.dtype != object) or is_tensor(x)


def _is_deeper(x: Any, depth: int) -> bool:
    """Whether lists lie in lists so deep, as where one holds itself: of that NumPy makes an array until memory ends."""
    if not isinstance(x, (list, tuple)):
        return False
    return depth == 0 or any(_is_deeper(each, depth - 1) for each in x)


def _are_weights(x: Any, keys: int) -> bool:
    if len(x.shape) < 2 or x.shape[-1] != keys:
        return False
    numbers = np.asarray(plain(x))
    return bool((numbers >= 0).all() and np.allclose(numbers.sum(axis=-1), 1, atol=1e-3))


def _of_a_probe(x: Any) -> Any:
    if np.prod(x.shape or 1, dtype=float) > MOST:
        words = "it gives an array of shape {shape}: these are more numbers than any probe has"
        raise NoOutput(said(words, shape=tuple(x.shape)))
    return x
