"""What travels together in a call, as records with names."""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, NamedTuple, Optional

from torch import Tensor
from torch.nn.functional import linear

from ..._arguments.scalars import LateSeed
from .._tensors import optional_array

Drop = Callable[[Tensor], Tensor]
new_record: Any = tuple.__new__  # a third of the time of a record's own constructor


class Parameters(NamedTuple):
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

    def projections(self) -> list[Any]:
        """W_q, W_k, W_v, W_o as functions, None where there is none."""
        pairs = zip(self[:4], self[4:8])
        return [None if W is None else partial(linear, weight=W, bias=b) for W, b in pairs]

    def for_projected(self) -> Parameters:
        """Those of a call whose keys and values have been through W_k and W_v already."""
        return self._replace(W_k=None, W_v=None, b_k=None, b_v=None)


class LayerCall(NamedTuple):
    """The options of a call of a layer, in the order of _core.layer_forward."""

    valid_lens: Any = None
    num_heads: int = 1
    empty_rows: Any = "uniform"
    dropout: float = 0.0
    seed: Any = 0  # a number, a tensor of an operator, or None


class AttentionCall(NamedTuple):
    """The options of a call of attention, in the order of _core.attention_forward."""

    valid_lens: Any = None
    causal: Any = None
    window_left: int = -1
    window_right: int = -1
    scale: Optional[float] = None
    dropout: float = 0.0
    seed: Any = 0
    empty_rows: Any = "zero"
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
