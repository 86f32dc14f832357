"""What the layers share that project by their own children and give the heads to one attention: those of other courses
(`variants.py`) and of the book's third generation (`grouped.py`)."""

from __future__ import annotations

from typing import Any, Optional

from torch import Tensor

from .._layer.viewable import Viewable
from ._call.attention import attend
from ._call.records import AttentionCall, AttentionTensors
from ._module import TakesArrays
from ._weights.last import Last, last_of, restored


class AttendsHeads(TakesArrays, Viewable):
    """Attention of projected heads, and its weights when they are read."""

    num_heads: int
    _last: Optional[Last] = None

    def _attended(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(B, H, Q, Dv), of q (B, H, Q, D), k (B, Hkv, K, D) and v (B, Hkv, K, Dv), which are the layer's own."""
        tensors = AttentionTensors(q, k, v)
        found = attend(call, tensors)
        self.__dict__["_last"] = last_of(call, tensors, found, (False, False))
        return found.out

    @property
    def attention_weights(self) -> Tensor:
        """Weights of the last call, (B, num_heads, Q, K): rows sum to 1.

        Raises
        ------
        AttributeError
            Before the first call.
        """
        if self._last is None:
            raise AttributeError("there are no attention_weights yet: call the layer first, then read them")
        return self._last.weights(self.num_heads)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_last": None if self._last is None else self._last.detached()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "_last": restored(state.get("_last"))})
