"""Heads that a reader's lines rotate by their positions, 0, 1, ..., before they attend."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor, nn

from ..._recognize.roles import says
from .._private import on_cpu
from ..grouped import turned
from .watched import words_of

_SAYS = re.compile("cos|sin|polar|complex|rotat|rotary|rope|freqs", re.IGNORECASE)
_USUAL = 10000.0, 500000.0, 1000000.0


class Table(NamedTuple):
    """A table of angles, a row for each position, that a call is given."""

    kind: str  # "half": cosines and sines (T, D/2); "twice": (T, D), the same again; "each twice"; "complex": (T, D/2);
    #            "pairs": a cosine and a sine (T, D/2, 2)
    longer: bool  # whether it may have more rows than the call
    features: int  # of a head


class Rotary(NamedTuple):
    """Which features turn together, and by which angles."""

    pairs: bool  # 2i and 2i + 1; else i and i + D/2
    base: float
    table: Optional[Table] = None


def tables_for(roles: list[str], features: int) -> list[Optional[Table]]:
    """The tables that a call with these roles may take; [None] where it takes none."""
    kinds = ["complex", "pairs"] if "cis" in roles else ["half", "twice", "each twice"] if "cos" in roles else []
    return [Table(kind, longer, features) for kind in kinds for longer in (True, False)] or [None]


def given_for(table: Table, n: int) -> dict[str, Tensor]:
    """Such a table for n rows."""
    cos, sin = _turns(n + 3 * table.longer, table.features, _USUAL[0], torch.float32)
    if table.kind == "complex":
        return {"cis": torch.complex(cos, sin)}
    if table.kind == "pairs":
        return {"cis": torch.stack((cos, sin), -1)}
    if table.kind == "twice":
        cos, sin = (torch.cat((x, x), -1) for x in (cos, sin))
    elif table.kind == "each twice":
        cos, sin = (x.repeat_interleave(2, -1) for x in (cos, sin))
    return {"cos": cos, "sin": sin}


def turns_of(table: Table, given: dict[str, Any], n: int) -> Any:
    """(cosines, sines) (n, D/2) of the tables of a call; None where they are of another form."""
    if table.kind == "complex":
        found = given["cis"]
        if type(found) is not Tensor or found.dtype is not torch.complex64 or found.dim() != 2:
            return None
        pair = found.real, found.imag
    elif table.kind == "pairs":
        found = given["cis"]
        if type(found) is not Tensor or found.dim() != 3 or found.shape[-1] != 2:
            return None
        pair = found.unbind(-1)
    else:
        pair = given["cos"], given["sin"]
    width = table.features // 2 if table.kind in ("half", "complex", "pairs") else table.features
    for x in pair:
        if type(x) is not Tensor or x.dtype is not torch.float32 or x.requires_grad or not on_cpu(x):
            return None
        if x.dim() != 2 or x.shape[1] != width or x.shape[0] < n or (x.shape[0] > n and not table.longer):
            return None
    rows = [x[:n] for x in pair]
    if table.kind in ("twice", "each twice"):
        parts = [x.chunk(2, -1) if table.kind == "twice" else (x[:, 0::2], x[:, 1::2]) for x in rows]
        if not all(torch.equal(first, second) for first, second in parts):
            return None
        rows = [first for first, _ in parts]
    return tuple(rows)


def rotaries(module: nn.Module, table: Optional[Table] = None) -> Iterator[Rotary]:
    """Those that a module may have; none where its lines have no word for one."""
    if table is not None:
        yield Rotary(False, 0.0, table)
        yield Rotary(True, 0.0, table)
        return
    if not any(map(_SAYS.search, words_of(module)[1])):
        return
    told: Any = [getattr(part, name, None) for part in module.modules() for name in dir(part) if says("base", name)]
    bases = [float(x) for x in told if type(x) in (int, float) and x > 1]
    for base in dict.fromkeys([*bases, *_USUAL]):
        yield Rotary(False, base)
        yield Rotary(True, base)


def most_positions(module: nn.Module, width: int) -> int:
    """For how many positions tables of cosines in a module have room."""
    tables = (x for part in module.modules() for x in [*part._buffers.values(), *vars(part).values()])
    own = [x for x in tables if isinstance(x, Tensor) and x.dim() > 1 and x.shape[-1] in (width, width // 2)]
    return min((max(x.shape[:-1]) for x in own), default=1 << 62)


def rotated(how: Rotary, x: Tensor, given: Any) -> Tensor:
    """x (B, H, T, D), each row by the angles of its position, or by those that are given."""
    cos, sin = given or _turns(x.shape[-2], x.shape[-1], how.base, x.dtype)
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
