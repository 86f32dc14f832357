"""Heads that a reader's lines rotate by their positions, 0, 1, ..., before they attend."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..grouped import turned
from .watched import words_of

_SAYS = re.compile("cos|sin|polar|complex|rotat|rotary|rope|freqs", re.IGNORECASE)
_BASES = "base theta rope_theta freq_base rope_base rotary_base rope_freq_base".split()
_USUAL = 10000.0, 500000.0, 1000000.0


class Rotary(NamedTuple):
    """Which features turn together, and by which angles."""

    pairs: bool  # 2i and 2i + 1; else i and i + D/2
    base: float


def rotaries(module: nn.Module) -> Iterator[Rotary]:
    """Those that a module may have; none where its lines have no word for one."""
    if not any(map(_SAYS.search, words_of(module)[1])):
        return
    told: Any = [getattr(part, name, None) for part in module.modules() for name in _BASES]
    bases = [float(x) for x in told if type(x) in (int, float) and x > 1]
    for base in dict.fromkeys([*bases, *_USUAL]):
        yield Rotary(False, base)
        yield Rotary(True, base)


def most_positions(module: nn.Module, width: int) -> int:
    """For how many positions tables of cosines in a module have room."""
    tables = (x for part in module.modules() for x in [*part._buffers.values(), *vars(part).values()])
    own = [x for x in tables if isinstance(x, Tensor) and x.dim() > 1 and x.shape[-1] in (width, width // 2)]
    return min((max(x.shape[:-1]) for x in own), default=1 << 62)


def rotated(how: Rotary, x: Tensor) -> Tensor:
    """x (B, H, T, D), each row by the angles of its position."""
    cos, sin = _turns(x.shape[-2], x.shape[-1], how.base, x.dtype)
    if how.pairs:
        return turned(x, (cos, sin))
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


@lru_cache(maxsize=8)
def _turns(n: int, features: int, base: float, dtype: torch.dtype) -> Any:
    """(cosines, sines) (T, D/2)."""
    # In the order of operations that most people write: with many rows the last bit of a rate shows.
    rates = 1.0 / base ** (torch.arange(0, features, 2, dtype=torch.float32, device="cpu") / features)
    angles = torch.arange(n, dtype=torch.float32, device="cpu")[:, None] * rates
    return angles.cos().to(dtype), angles.sin().to(dtype)
