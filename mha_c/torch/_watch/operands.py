"""What determines the attention weights of a call, copied at the call: its operands, masks and options."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from ..._arguments.options import core_options
from ..._core import copy_operands
from ..._summary import Scores, WeightsArray
from .._tensors import FLOATS, HALVES, elsewhere
from ..summary import on_cpu


class Operands(NamedTuple):
    """q (B, H, Q, D) and k (B, Hkv, K, D) are copies, of Q + K rows; masks are the caller's, whose versions are noted.

    torch says of a tensor how often it was changed in place, but not of those of inference mode: such masks are copied.
    """

    q: Tensor
    k: Tensor
    w_v: Optional[Tensor]
    valid_lens: Any
    keep_mask: Optional[Tensor]
    bias: Optional[Tensor]
    options: dict[str, Any]
    versions: tuple[int, ...]

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, valid_lens: Any = None, keep_mask: Any = None, bias: Any = None, w_v: Any = None,
        **options: Any,
    ) -> Operands:  # fmt: skip
        """`options` are other keywords of mha_c.functional; None and False leave them out."""
        keep_mask, bias = _own_if_unversioned(keep_mask), _own_if_unversioned(bias)
        valid_lens = copied(torch.as_tensor(valid_lens)) if valid_lens is not None else None
        others = {
            name: copied(x) if isinstance(x, Tensor) else x
            for name, x in options.items()
            if x is not None and x is not False
        }
        w_v = None if w_v is None else copied(w_v)
        return cls(*_both_copied(q, k), w_v, valid_lens, keep_mask, bias, others, versions_of(keep_mask, bias))

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, Q, K)."""
        batch, heads, queries, _ = self.q.shape
        return batch, heads, queries, self.k.shape[2]

    def source(self) -> Scores:
        """For summaries and weights, which the core computes."""
        if self.versions != versions_of(self.keep_mask, self.bias):
            raise RuntimeError("the mask of this call was changed in place since: read its weights before")
        q, k, w_v, keep_mask, bias = map(on_cpu, self[:3] + self[4:6])
        options = {name: on_cpu(x) for name, x in self.options.items()}
        lens = on_cpu(self.valid_lens)
        return Scores.of(q, k, w_v, core_options(q, k, lens, keep_mask=keep_mask, bias=bias, **options))


class ModelWeights(NamedTuple):
    """Weights that the model has computed itself, (B, H, Q, K)."""

    weights: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """(B, H, Q, K)."""
        return tuple(self.weights.shape)

    def source(self) -> WeightsArray:
        """The same as of `Operands`."""
        return WeightsArray(on_cpu(self.weights))


def _both_copied(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    if q.dtype in FLOATS and not elsewhere(q):
        try:
            return copy_operands(q, k)
        except (BufferError, TypeError):  # no plain memory, or another class
            pass
    return copied(q), copied(k)


def copied(x: Tensor) -> Tensor:
    return x.detach().clone(memory_format=torch.contiguous_format)


def versions_of(*masks: Optional[Tensor]) -> tuple[int, ...]:
    return tuple(x._version for x in masks if x is not None and not x.is_inference())


def _own_if_unversioned(mask: Optional[Tensor]) -> Optional[Tensor]:
    if mask is None:
        return None
    mask = mask.float() if mask.dtype in HALVES else mask
    return copied(mask) if mask.is_inference() else mask.detach()
