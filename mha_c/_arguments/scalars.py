"""Checks of arguments that are not arrays: sizes, probabilities, switches, random numbers.

The compiled core checks the arguments of each call.  This module checks what must be refused earlier, when a
layer is constructed, and what the core never sees.
"""

from __future__ import annotations

import math
import operator
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Optional, cast

import numpy as np

from .names import listed

if TYPE_CHECKING:
    from collections.abc import Callable

    from .._types import DType, EmptyRows, RngLike


FLOAT32, FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)
LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
LARGEST_SIZE = 2**63 - 1  # in bytes


def whole(value: Any, name: str, least: float = 1, most: float = LARGEST_SIZE) -> int:
    """A size as a Python int.  True, 4.0 and '4' are mistakes, not sizes."""
    try:
        number = None if isinstance(value, (bool, np.bool_, np.ndarray)) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        meant = isinstance(value, float) and value % 1 == 0 and least <= value <= min(most, 1e9)
        write = f": write {int(value)}" if meant else ""
        raise TypeError(f"{name} must be a whole number, got {value!r:.100} ({type(value).__name__}){write}")
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {value!r:.100}")
    if number > most:
        raise ValueError(f"{name} must be at most {most}, got {value!r:.100}")
    return number


def check_size(name: str, *shape: int) -> None:
    """ValueError if no array of float64 can have this shape."""
    if math.prod(shape) > LARGEST_SIZE // 8:
        raise ValueError(f"{name} of shape {shape} would be too large")


def real(value: Any, name: str, wanted: str = "a real number") -> float:
    """As a Python float.  float() takes some of what is no number, silently dropping what it means."""
    if type(value) is float:  # the usual case, at each call with a cap or a scale
        return value
    dropped = isinstance(value, (bool, np.bool_, str, bytes, np.complexfloating))
    try:
        number = None if dropped or (isinstance(value, np.ndarray) and value.ndim) else float(value)
    except TypeError:
        number = None
    except OverflowError:
        raise ValueError(f"{name} is too large for a float") from None
    if number is None:
        raise TypeError(f"{name} must be {wanted}, got {value!r:.100} ({type(value).__name__})")
    return number


def seed(value: Any, name: str = "rng") -> int:
    """A given seed: 64 bits without sign.  The binding (args.c) calls it by its own name."""
    number = whole(value, name, least=-math.inf, most=math.inf)
    if not 0 <= number < 2**64:
        raise ValueError(f"{name} must lie in 0 .. 2**64 - 1, got {value!r:.100}")
    return number


def probability(value: Any, name: str = "dropout") -> float:
    """A number in 0..1, kept as int or float: a layer prints it as it was given, as torch does."""
    number = real(value, name, "a real number between 0 and 1")
    if not 0 <= number <= 1:  # also refuses NaN
        raise ValueError(f"{name} must be between 0 and 1, got {value!r:.100}")
    return value if isinstance(value, (int, float)) else number


def scale(value: Any, single: bool) -> Optional[float]:
    """A factor for scores, or None; it must be finite in the type of the scores: float32 if `single`, else float64."""
    if value is None:
        return None
    number = real(value, "scale", "None or a real number")
    if not abs(number) <= (LARGEST_FLOAT32 if single else sys.float_info.max):  # also refuses NaN
        raise ValueError(f"scale must be finite in {'float32' if single else 'float64'}, not NaN or inf, got {value}")
    return number


def element(value: Any, dtype: Any, limits: Any) -> Any:
    """A number to be stored in an array of `dtype`; `limits` is the type's iinfo or finfo, None for bool."""
    value = value.item() if isinstance(value, np.generic) else value
    if not isinstance(value, (int, float)):  # bool is an int
        raise TypeError(f"value must be a real number, got {value!r} ({type(value).__name__})")
    if hasattr(limits, "eps"):  # floats may be rounded, but a finite number must stay finite
        fits = value != value or abs(value) == np.inf or abs(value) <= float(limits.max)
    else:
        least, most = (0, 1) if limits is None else (limits.min, limits.max)
        fits = value % 1 == 0 and least <= value <= most
    if not fits:
        raise ValueError(f"value must be a number that X of type {dtype} can hold, got {value!r}")
    return float(value) if hasattr(limits, "eps") else value


def positive(value: Any, name: str) -> float:
    """A finite number above 0."""
    number = real(value, name)
    if not 0 < number <= sys.float_info.max:  # also refuses NaN
        raise ValueError(f"{name} must be above 0 and finite, got {value!r:.100}")
    return number


def flag(value: Any, name: str) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, got {value!r} ({type(value).__name__})")
    return bool(value)


def switch(value: Any, name: str) -> bool:
    """A flag that d2l passes to torch, which also accepts 0 and 1."""
    return bool(value) if isinstance(value, int) and value in (0, 1) else flag(value, name)


def choice(value: Any, name: str, *allowed: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, got {value!r:.100} ({type(value).__name__})")
    if value not in allowed:
        raise ValueError(f"{name} must be {listed([*map(repr, allowed)], 'or')}, got {value!r:.100}")
    return value


def empty_rows(value: Any) -> EmptyRows:
    return cast("EmptyRows", choice(value, "empty_rows", "uniform", "zero"))


def float_type(value: Any) -> DType:
    """`value` as a dtype that the core computes in: float32 or float64."""
    with suppress(TypeError):  # of np.dtype
        for native in (FLOAT32, FLOAT64):
            if value is not None and np.dtype(value) == native:
                return native
    raise TypeError(f"dtype must be float32 or float64, got {value!r}")


def generator(rng: RngLike) -> np.random.Generator:
    """The stream of random numbers that `rng` (None, a whole number or a Generator) stands for."""
    if isinstance(rng, np.random.Generator):
        return rng
    if rng is None:
        return np.random.default_rng()
    if isinstance(rng, (int, np.integer)) and not isinstance(rng, bool):
        return np.random.default_rng(whole(rng, "rng", least=0, most=math.inf))
    raise TypeError(
        f"rng must be None, a whole number or a numpy.random.Generator (np.random.default_rng(...)), got {rng!r:.100}"
    )


class LateSeed:
    """The seed of one call: the core calls it when all checks are behind, so that a refused call draws no number."""

    __slots__ = ("_draw", "number")

    def __init__(self, draw: Callable[[], int]) -> None:
        self._draw, self.number = draw, 0

    def __call__(self) -> int:
        self.number = self._draw()
        return self.number


def draw_seed(rng: np.random.Generator) -> int:
    """One 64-bit seed for the dropout of one call."""
    return int(rng.integers(0, 2**64, dtype=np.uint64))


INPUTS = "queries keys values q k v x X".split()


def words(name: str) -> str:
    """The error for words in the place of numbers."""
    text = f"{name} must be an array of numbers, got words"
    if name not in INPUTS:
        return text
    return (
        f"{text}: attention takes a vector for each word, for example from an embedding; the words themselves go to "
        f"view(tokens=...)"
    )


def tokens(name: str, dtype: Any, shape: tuple[int, ...]) -> Optional[str]:
    """The error for numbers of tokens in the place of their vectors; None if whole numbers of this shape are none."""
    if name not in INPUTS or len(shape) != 2:
        return None
    return (
        f"{name} has shape {tuple(shape)} and dtype {dtype}, as numbers of tokens have: embed them first "
        f"(torch.nn.Embedding, or table[{name}]); attention takes a vector for each, (B, T, features)"
    )
