"""Rotary positions of heads, as the book computes them: angles in torch's default type, neighbours are a pair."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from .._tensors import FLOATS, elsewhere, recorded_or_transformed

if TYPE_CHECKING:
    from ..._types import Array, Counts, Turn

TABLE = 64  # positions of a table: a step of one position computes none of its own


def turn_for_core(first: Counts, n_steps: int, features: int, dtype: torch.dtype) -> Turn:
    """Cosines and sines of n steps from `first` on, a number or (B,), as the core takes them."""
    kind = torch.float64 if dtype is torch.float64 else torch.float32
    if isinstance(first, int):
        default, at = torch.get_default_dtype(), first % TABLE
        if first and at + n_steps <= TABLE:
            cos, sin = _table(first - at, TABLE, features, default, kind)
            return cos[at : at + n_steps], sin[at : at + n_steps]
        return _table(first, n_steps, features, default, kind)
    cos, sin = _turns(_places(first, n_steps), features)
    return cos.squeeze(1).to(kind).numpy(), sin.squeeze(1).to(kind).numpy()


@lru_cache(maxsize=16)  # all layers of a model ask for the same at each step
def _table(first: int, n_steps: int, features: int, default: torch.dtype, dtype: torch.dtype) -> Turn:
    cos, sin = _turns(torch.arange(first, first + n_steps, dtype=torch.float32, device="cpu"), features)
    return cos.to(dtype).numpy(), sin.to(dtype).numpy()


def turns(x: Tensor, first: Counts = 0) -> tuple[Tensor, Tensor]:
    """(cosines, sines) of the angles (T, D/2) of x (B, H, T, D), whose positions begin with `first`; (B, 1, T, D/2) if
    each item has its own."""
    if isinstance(first, int):
        at = torch.arange(first, first + x.shape[-2], dtype=torch.float32, device=x.device)
    else:
        at = _places(first, x.shape[-2]).to(x.device, non_blocking=True)
    return _turns(at, x.shape[-1])


def _places(first: Array, n_steps: int) -> Tensor:
    """(B, 1, T): the positions of n steps from `first` (B,) on."""
    return torch.from_numpy((first[:, None, None] + np.arange(n_steps)).astype(np.float32))


def _turns(at: Tensor, features: int) -> tuple[Tensor, Tensor]:
    rates = 10000.0 ** (-torch.arange(0, features, 2, device=at.device) / features)
    angles = at[..., None] * rates
    return angles.cos(), angles.sin()


def turned(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """x (B, H, T, D), the features 2i and 2i + 1 of which are turned by angle i.

    One product of complex numbers has the same bits as the book's six operations and takes a sixth of their time, or
    less.  Compilers, exporters and transforms follow those six.
    """
    cos, sin = (part[..., : x.shape[-2], :] for part in turn)
    if x.dtype in FLOATS and not (elsewhere(x) or recorded_or_transformed()):
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * torch.complex(cos, sin).to(pairs.dtype)).flatten(-2)
    first, second = x[..., 0::2], x[..., 1::2]
    found = torch.stack((first * cos - second * sin, first * sin + second * cos), -1).flatten(-2)
    return found.to(x.dtype)
