"""What determines the attention weights of a call whose arrays the core did not keep: queries and keys as scored."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Optional

import torch
from torch import Tensor

from .._tensors import float32_if_half
from . import formulas

if TYPE_CHECKING:
    from ..._types import Corner


class Scored(NamedTuple):
    """What a call keeps for its attention weights; tensors of its own, on any device."""

    q: Tensor  # (B, H, Q, D)
    k: Tensor  # (B, Hkv, K, D)
    w_v: Optional[Tensor]
    valid_lens: Optional[Tensor]
    empty_rows: str
    causal: Optional[Corner] = None
    keep_mask: Optional[Tensor] = None
    bias: Optional[Tensor] = None
    # (row_max, row_sum) of a call that an operator computed: it computes the weights as well.
    rows: Optional[tuple[Tensor, Tensor]] = None

    @property
    def shape(self) -> tuple[int, ...]:
        """(B, H, Q, K)."""
        return (*self.q.shape[:3], self.k.shape[2])

    @property
    def device(self) -> torch.device:
        return self.q.device

    def is_ready(self) -> bool:
        return False

    def tensors(self) -> tuple[Optional[Tensor], ...]:
        return self.q, self.k, self.w_v, self.bias

    def detached(self) -> Scored:
        w_v, bias = (None if x is None else x.detach() for x in (self.w_v, self.bias))
        return self._replace(q=self.q.detach(), k=self.k.detach(), w_v=w_v, bias=bias)

    def weights(self, q: Tensor, k: Tensor, w_v: Optional[Tensor], bias: Optional[Tensor]) -> Tensor:
        """The weights (B, H, Q, K) of these, or of q, k, w_v, bias of the same shapes in a graph."""
        if self.rows is not None:
            given = self.valid_lens, *self.rows, self.keep_mask, self.empty_rows, self.causal or ""
            found: Tensor = torch.ops.mha_c.weights(q, k, w_v, bias, *given)
            return found
        visible = formulas.visible_keys(q, k, self.valid_lens, self.keep_mask, self.causal)
        k = formulas.for_each_head(q, k)
        with formulas.without_autocast(q):
            scores = formulas.scores_of(float32_if_half(q), float32_if_half(k), float32_if_half(w_v))
            scores = scores if bias is None else scores + formulas.with_head_axis(float32_if_half(bias))
            return formulas.softmax(scores, visible, self.empty_rows)[0].to(q.dtype)

    def computed(self) -> Tensor:
        return self.weights(*self.tensors())


class Computed(NamedTuple):
    """Weights (B, H, Q, K) that a call has computed on its way to the output, or that were read before a copy."""

    numbers: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.numbers.shape

    @property
    def device(self) -> torch.device:
        return self.numbers.device

    def is_ready(self) -> bool:
        return True

    def tensors(self) -> tuple[Tensor]:
        return (self.numbers,)

    def detached(self) -> Computed:
        return Computed(self.numbers.detach())

    def weights(self, numbers: Tensor) -> Tensor:
        return numbers

    def computed(self) -> Tensor:
        return self.numbers
