"""What travels together in a call, as records with names."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Callable, NamedTuple, Optional

import torch
from torch import Tensor
from torch.nn.functional import linear

from ..._arguments.scalars import LateSeed
from .._tensors import mask_for_core, optional_array

if TYPE_CHECKING:
    from ..._types import Causal, Corner, EmptyRows, Heads, Rows
LayerInputs = tuple[Tensor, Tensor, Tensor]  # queries, keys and values, checked


class Asked(NamedTuple):
    """What a call of a layer is given beside its inputs."""

    valid_lens: Any = None
    keep_mask: Optional[Tensor] = None  # with an axis for the heads, or of rank 2
    bias: Optional[Tensor] = None
    causal: Causal = False
    training: Optional[bool] = None

    @property
    def masks(self) -> tuple[Optional[Tensor], Optional[Tensor]]:
        return self[1:3]


Drop = Callable[[Tensor], Tensor]
new_record: Any = tuple.__new__  # a third of the time of a record's own constructor


class LayerParameters(NamedTuple):
    """The parameters of a layer, None where it has none; the core reads them by position (csrc/python/layer_call.h)."""

    W_q: Optional[Tensor] = None
    W_k: Optional[Tensor] = None
    W_v: Optional[Tensor] = None
    W_o: Optional[Tensor] = None
    b_q: Optional[Tensor] = None
    b_k: Optional[Tensor] = None
    b_v: Optional[Tensor] = None
    b_o: Optional[Tensor] = None
    w_v: Optional[Tensor] = None  # (1, h): the scores are additive

    def weights(self) -> tuple[Optional[Tensor], ...]:
        return self[:4]

    def projections(self, rows: Optional[Sequence[Rows]] = None) -> list[Optional[Drop]]:
        """W_q, W_k, W_v, W_o as functions, None where there is none; rows: those of the first three in a joint one."""
        found: list[Optional[Drop]] = []
        for W, b, some in zip(self[:4], self[4:8], (*(rows or (None,) * 3), None)):
            W, b = (x if x is None or some is None else _taken(x, some) for x in (W, b))
            found.append(None if W is None else partial(linear, weight=W, bias=b))
        return found

    def apart(self, rows: Sequence[Rows]) -> LayerParameters:
        """With W_q, W_k and W_v by themselves, which have these rows of a joint weight."""
        found = [x if x is None else _taken(x, some) for x, some in zip((*self[:3], *self[4:7]), (*rows, *rows))]
        return LayerParameters(*(*found[:3], self.W_o, *found[3:], self.b_o, self.w_v))

    def for_projected(self) -> LayerParameters:
        """Those of a call whose keys and values have been through W_k and W_v already."""
        return self._replace(W_k=None, W_v=None, b_k=None, b_v=None)


def _taken(x: Tensor, rows: Rows) -> Tensor:
    """These rows of x: (first, number), or their numbers."""
    return x.narrow(0, *rows) if type(rows) is tuple else x[torch.as_tensor(rows)]


class Options(NamedTuple):
    """What a call of a layer may have beside lengths, in the order of the core (mha_c/_core.pyi)."""

    causal: Optional[Corner] = None
    keep_mask: Optional[Tensor] = None
    bias: Optional[Tensor] = None
    turn: Any = None  # cosines and sines, as arrays; kept of a compiled call: the features of a head, 0 for none
    rows: Optional[tuple[Rows, ...]] = None  # which W_q, W_k and W_v have of a joint weight

    def for_core(self, in_rows: bool) -> Options:
        """As the core takes them; in_rows: weights are the parameters, not packed, each of W_q, W_k, W_v by itself."""
        causal, keep_mask, bias, turn, rows = self
        return new_record(Options, (causal, mask_for_core(keep_mask), bias, turn, rows if in_rows else None))

    @property
    def masks(self) -> tuple[Optional[Tensor], ...]:
        """keep_mask and bias; nothing if there is neither."""
        return () if self.keep_mask is self.bias is None else self[1:3]

    def without_masks(self) -> Options:
        return self if self.keep_mask is self.bias is None else self._replace(keep_mask=None, bias=None)


PLAIN_OPTIONS = Options()


def pair(num_heads: Heads) -> tuple[int, int]:
    """(of queries, of keys and values) of a layer's number of heads, or of both."""
    return num_heads if isinstance(num_heads, tuple) else (num_heads, num_heads)


class LayerCall(NamedTuple):
    """The arguments of a call of a layer behind its inputs, in the order of _core.layer_forward."""

    valid_lens: Any = None
    num_heads: Heads = 1
    empty_rows: EmptyRows = "uniform"
    dropout: float = 0.0
    seed: Any = 0  # a number, a tensor of an operator, or None
    options: Optional[Options] = None  # without masks: these may need a gradient

    def masked(self, masks: tuple[Optional[Tensor], ...]) -> Optional[Options]:
        """The options with the call's masks, (keep_mask, bias) or nothing."""
        if not masks:
            return self.options
        return (self.options or PLAIN_OPTIONS)._replace(keep_mask=mask_for_core(masks[0]), bias=masks[1])

    @property
    def heads(self) -> tuple[int, int]:
        """(of queries, of keys and values)."""
        return pair(self.num_heads)

    def of_attention(self) -> AttentionCall:
        """The same of a call of attention, without dropout."""
        causal = None if self.options is None else self.options.causal
        return AttentionCall(self.valid_lens, causal, empty_rows=self.empty_rows)


class AttentionCall(NamedTuple):
    """The options of a call of attention, in the order of _core.attention_forward."""

    valid_lens: Any = None
    causal: Optional[Corner] = None
    window_left: int = -1
    window_right: int = -1
    scale: Optional[float] = None
    dropout: float = 0.0
    seed: Any = 0
    empty_rows: EmptyRows = "zero"
    return_weights: bool = False
    return_lse: bool = False
    softcap: float = 0.0

    def drawn(self) -> AttentionCall:
        return self._replace(seed=self.seed.number) if isinstance(self.seed, LateSeed) else self

    def hides(self) -> bool:
        """Whether there may be keys that a query does not see, but for masks."""
        return not (self.valid_lens is self.causal is None and self.window_left < 0 and self.window_right < 0)


class AttentionTensors(NamedTuple):
    """The tensors of a call of attention: q (B, [H,] Q, D), k (B, [Hkv,] K, D), v (B, [Hkv,] K, Dv); masks, terms."""

    q: Tensor
    k: Tensor
    v: Tensor
    w_v: Optional[Tensor] = None
    keep_mask: Optional[Tensor] = None
    bias: Optional[Tensor] = None
    relative_bias: Optional[Tensor] = None
    sinks: Optional[Tensor] = None

    def terms(self, softcap: float) -> Any:
        """The terms of scores as the core takes them, None if there are none.  BufferError without plain memory."""
        if not softcap and self.relative_bias is None and self.sinks is None:
            return None
        try:
            return optional_array(self.relative_bias), softcap, optional_array(self.sinks)
        except (TypeError, RuntimeError) as error:  # device meta; a negated view
            raise BufferError(str(error)) from error


class Attended(NamedTuple):
    """The result of a call of attention; weights (before dropout) and lse may be None unless wanted."""

    out: Tensor
    weights: Optional[Tensor] = None
    lse: Optional[Tensor] = None
