"""torch.vmap over calls without dropout: the mapped axis is folded into the batch, and the core called once.

`_layer.py` and `functional.py` ask `is_plain_batch`; whatever else torch.func wants is computed by `mathematics`, as
are calls whose parameters are mapped too, of which each example has its own.
"""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch import Tensor
from torch.autograd import Function

_functorch: Any = getattr(torch._C, "_functorch", None)
_stack = getattr(_functorch, "get_interpreter_stack", lambda: None)


def is_plain_batch(dropout: float, inputs: Any, parameters: Any) -> bool:
    """Whether the innermost transform wants no more than this call for each of several inputs."""
    stack = _stack()
    if dropout or not stack:
        return False
    level = stack[-1].level()
    return any(_is_mapped(x, level) for x in inputs) and not any(_is_mapped(x, level) for x in parameters)


def _is_mapped(x: Any, level: int) -> bool:
    return isinstance(x, Tensor) and bool(_functorch.is_batchedtensor(x) and _functorch.maybe_get_level(x) == level)


def is_mapped_now(x: Tensor) -> bool:
    """False once the map is over."""
    return any(_is_mapped(x, transform.level()) for transform in _stack() or ())


class OverBatch(Function):
    """apply(call, n_leading, *tensors) -> the results of call(*tensors), a tuple of tensors (B, ...).

    The first n_leading tensors are (B, ...); the others broadcast to scores (B, [H,] Q, K), of rank 2 or of that rank.
    None where one is not given.
    """

    @staticmethod
    def forward(call: Any, n_leading: int, *tensors: Any) -> Any:
        raise AssertionError("one of the tensors is mapped, or is_plain_batch had said no")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Gradients are those of `call`."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, call: Callable[..., Any], n_leading: int, *tensors: Any) -> Any:
        n, dims = info.batch_size, in_dims[2:]
        first, axis = tensors[0], dims[0]
        batch, rank = first.shape[0 if axis != 0 else 1], first.dim() - (axis is not None)
        folded = []
        for i, (x, dim) in enumerate(zip(tensors, dims)):
            x = x if x is None or dim is None else x.movedim(dim, 0)
            if x is not None and i < n_leading:
                x = (x.expand(n, *x.shape) if dim is None else x).flatten(0, 1)
            elif x is not None:
                x = _fold_mask(x, dim is not None, n, batch, rank)
            folded.append(x)
        results = call(*folded)
        return tuple(x.unflatten(0, (n, batch)) for x in results), (0,) * len(results)


def _fold_mask(x: Tensor, mapped: bool, n: int, batch: int, rank: int) -> Tensor:
    """([n,] [B or 1, ...] Q, K) as (n * B, ...), or as it is where it is the same for all."""
    own_rank = x.dim() - mapped
    if not mapped:
        return x if own_rank == 2 or x.shape[0] == 1 else x.repeat(n, *[1] * (rank - 1))
    if own_rank == 2:
        x = x.reshape(n, *[1] * (rank - 2), *x.shape[1:])
    return x.expand(n, batch, *x.shape[2:]).flatten(0, 1)


def over_batch(call: Callable[..., Any], leading: Any, masks: Any = ()) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = OverBatch.apply(call, len(leading), *leading, *masks)
    return found
