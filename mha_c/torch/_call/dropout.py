"""The random numbers of a call: its seed, and its dropout in torch's operations.

In the core a seed decides what is dropped.  Torch's operations drop the same on the CPU, by the factors that the core
computes from the seed; on other devices, and in exported programs, dropout is torch's own.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Optional, Union

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import dropout as torch_dropout

from ..._arguments import scalars
from ..._arguments.scalars import LateSeed
from ..._core import dropout_factors
from .._private import has_operators, in_functorch, on_cpu
from .._tensors import draw_seed, draw_seed_tensor, exporting, seed_tensor
from .records import Drop

Rng = Union[None, int, torch.Generator]
WHOLE = {getattr(torch, f"{kind}{bits}", None) for kind in ("int", "uint") for bits in (8, 16, 32, 64)}


def rate(dropout: Any, training: Optional[bool]) -> Any:
    """What a call drops with this nn.Dropout, or None; training: what the call says, None: as the module stands."""
    if dropout is None:
        return 0.0
    return dropout.p if (dropout.training if training is None else training) else 0.0


def number(seed: Optional[Tensor]) -> int:
    """A seed that an operator gets as a tensor of int64: 64 bits without sign."""
    return 0 if seed is None else int(seed.item()) % 2**64


def late_seed(dropout: float, rng: Rng = None) -> Any:
    """The seed of a call of the core, which draws it behind its checks: a refused call draws none."""
    if rng is None or isinstance(rng, torch.Generator):
        return LateSeed(partial(draw_seed, rng)) if dropout else 0
    return _given(rng)


def seed_now(dropout: float, rng: Rng = None) -> int:
    """The same, drawn at once."""
    seed = late_seed(dropout, rng)
    return int(seed() if isinstance(seed, LateSeed) else seed)


def drop_in_torch(dropout: float, rng: Rng, q: Tensor) -> Optional[Drop]:
    """The dropout of a call by torch's operations with these queries; None without dropout."""
    if exporting() and dropout and rng is not None:
        raise RuntimeError("mha_c: an exported program drops by torch's own generator: leave rng out")
    if exporting() or not on_cpu(q) or (rng is None and in_functorch() and not has_operators):
        return _torchs_own(dropout, rng)
    if not dropout:
        return core_dropout(0.0, late_seed(0.0, rng))  # for its checks
    return core_dropout(dropout, _seed_for_torch(rng))


def core_dropout(p: float, seed: Any) -> Optional[Drop]:
    """The dropout of weights (B, H, Q, K) that the core does with this seed."""
    if not p or seed is None:
        return None
    given: Any = seed_tensor(seed) if has_operators and not isinstance(seed, Tensor) else seed
    factors_of: Any = torch.ops.mha_c.dropout_factors if has_operators else _factors

    def drop(weights: Tensor) -> Tensor:
        factors: Tensor = factors_of(weights.detach(), p, given)
        return weights * factors

    return drop


def _torchs_own(p: float, rng: Rng) -> Optional[Drop]:
    """torch's own dropout; `rng`, a generator or a seed, decides what is dropped if it is given."""
    if not p:
        return None

    def drop(weights: Tensor) -> Tensor:
        if rng is None:
            return torch_dropout(weights, p)
        if p == 1 or weights.is_meta:
            return weights * 0
        generator = rng if isinstance(rng, torch.Generator) else torch.Generator(weights.device).manual_seed(rng)
        return weights * (torch.empty_like(weights).bernoulli_(1 - p, generator=generator) / (1 - p))

    return drop


def _given(rng: Any) -> int:
    if isinstance(rng, (bool, np.bool_)) or not isinstance(rng, (int, np.integer)):
        raise TypeError(f"rng must be None, a whole number or a torch.Generator, got {rng!r}")
    return scalars.seed(rng)


def _seed_for_torch(rng: Rng) -> Any:
    """The seed of a call: a tensor where an operator takes it, inside transforms too."""
    if rng is None or isinstance(rng, torch.Generator):
        return draw_seed_tensor(rng) if has_operators else draw_seed(rng)
    if has_operators and not isinstance(rng, (int, Tensor)) and hasattr(rng, "dtype"):  # NumPy's number, in a compiler
        given = torch.as_tensor(rng)
        if given.dim() or given.dtype not in WHOLE:
            raise TypeError(f"rng must be None, a whole number or a torch.Generator, got an array of {given.dtype}")
        return given.view(torch.int64) if given.element_size() == 8 else given.to(torch.int64)
    return _given(rng)


# --- An operator for the factors --------------------------------------------------------------------------


def _factors(weights: Tensor, p: float, seed: int) -> Tensor:
    """Without an operator: constants, which also a transform can take, as only the shape is asked for."""
    if weights.is_meta:
        return weights
    like = np.empty(tuple(weights.shape), np.float64 if weights.dtype is torch.float64 else np.float32)
    return torch.from_numpy(dropout_factors(like, p, seed))


def _dropout(weights: Tensor, dropout: float, seed: Tensor) -> Tensor:
    return dropout_factors(weights.detach(), dropout, number(seed))


def _dropout_vmap(info: Any, in_dims: Any, weights: Tensor, dropout: float, seed: Tensor) -> tuple[Tensor, Any]:
    """Inside vmap: one array of factors for all examples, or one for each seed."""
    of_weights, _, of_seeds = in_dims
    one = weights if of_weights is None else weights.select(of_weights, 0)
    seeds = [seed] if of_seeds is None else seed.unbind(of_seeds)
    factors = [torch.ops.mha_c.dropout_factors(one, dropout, each) for each in seeds]
    return (factors[0], None) if of_seeds is None else (torch.stack(factors), 0)


if has_operators:
    torch.library.define("mha_c::dropout_factors", "(Tensor weights, float dropout, Tensor seed) -> Tensor")
    torch.library.impl("mha_c::dropout_factors", "cpu", _dropout)
    torch.library.register_fake("mha_c::dropout_factors", lambda weights, dropout, seed: torch.empty_like(weights))
    torch.library.register_vmap("mha_c::dropout_factors", _dropout_vmap)
