"""Layers and functions in operations that every torch and ONNX have: what torch.export, jit.trace and ONNX write down.

What is exported runs elsewhere, perhaps without Python, so none of our operators may be in it.  Attention is torch's
scaled_dot_product_attention, which needs no array of all scores where torch runs it, and is the operator Attention of
ONNX from opset 23 on; scores that it cannot say (additive, capped, with sinks) are those of `mathematics`.
`_layer.attend` and `functional` lead here where `_tensors.exporting` says so.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor
from torch.nn.functional import dropout as torch_dropout
from torch.nn.functional import scaled_dot_product_attention

from . import mathematics
from ._tensors import _tracing, exporting
from .autograd import WeightsSource
from .mathematics import Attend, Drop


def drop_of(p: float) -> Optional[Drop]:
    """torch's own dropout: a program that stands alone draws from its own generator."""
    return (lambda weights: torch_dropout(weights, p)) if p else None


def is_unknown(dtype: torch.dtype) -> bool:
    """Whether an exporter may not know scaled_dot_product_attention of this type: ONNX from TorchScript."""
    return _tracing() is not None and dtype is torch.float64


def fused(
    empty_rows: str, dropout: float, scale: Optional[float] = None, bias: Optional[Tensor] = None
) -> Attend:  # fmt: skip
    """softmax(scale q k^T + bias) v of q (B,H,Q,D), k, v; visible and bias broadcast to (B,H,Q,K)."""

    def attend(q: Tensor, k: Tensor, v: Tensor, visible: Optional[Tensor]) -> Tensor:
        if visible is None:
            return scaled_dot_product_attention(q, k, v, None, dropout, scale=scale)
        there = torch.zeros((), dtype=q.dtype) if bias is None else bias
        empty = ~visible.any(-1, keepdim=True)
        # Scores of 0 make an empty row uniform, and lead no gradient to the keys; its query has none either.
        q = torch.where(empty, 0.0, q)
        added = torch.where(visible, there, torch.where(empty, 0.0, -torch.inf).to(q.dtype))
        if _tracing() is None:  # a row for each query, as onnxruntime's Attention wants a mask
            added = added.expand(*added.shape[:-2], q.shape[-2], k.shape[-2])
        out = scaled_dot_product_attention(q, k, v, added, dropout, scale=scale)
        return out if empty_rows == "uniform" else torch.where(empty, 0.0, out)

    return attend


def layer(
    queries: Tensor, keys: Tensor, values: Tensor, weights: Any, biases: Any, w_v: Optional[Tensor], num_heads: int,
    valid_lens: Optional[Tensor], empty_rows: str, dropout: float,
) -> tuple[Tensor, Optional[Tensor]]:  # fmt: skip
    """(out, attention weights where they are there anyway); arguments as those of `mathematics.layer`."""
    attend = None if w_v is not None or is_unknown(queries.dtype) else fused(empty_rows, dropout)
    found: tuple[Tensor, Optional[Tensor]] = mathematics.layer(
        queries, keys, values, weights, biases, w_v, num_heads, valid_lens, empty_rows, drop_of(dropout), attend
    )
    return found


class Weights:
    """The attention weights of an exported call: computed in the program where the model reads them there.

    An object that torch.export does not look into: it takes tensors that a module gains meanwhile for a mistake.
    """

    def __init__(self, source: WeightsSource, weights: Optional[Tensor]) -> None:
        self._source, self._weights = source, weights

    def tensor(self) -> Tensor:
        """(B, H, Q, K); AttributeError when the program is written and its tensors were never real."""
        if not exporting() and type(self._source.queries) is not Tensor:
            raise AttributeError("the last call was written down by an exporter: its attention_weights have no numbers")
        if self._weights is None:
            self._weights = self._source.weights(*self._source.arguments())
        return self._weights
