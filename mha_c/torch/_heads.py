"""What the layers share that project by their own children and give the heads to one attention: those of other courses
(`variants.py`)."""

from __future__ import annotations

from torch import Tensor

from .._arguments.arrays import check_features
from .._layer.viewable import Viewable
from ._call.attention import attend
from ._call.records import AttentionCall, AttentionTensors
from ._explained import explained_heads, to_measure
from ._module import ShowsWeights
from ._weights.last import last_of


class AttendsHeads(ShowsWeights, Viewable):
    """Attention of projected heads, and its weights when they are read.

    Attributes
    ----------
    num_heads : int
        How many heads.
    """

    num_heads: int

    def _attended(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(B, H, Q, Dv), of q (B, H, Q, D), k (B, Hkv, K, D) and v (B, Hkv, K, Dv), which are the layer's own."""
        tensors = AttentionTensors(q, k, v)
        found = attend(call, tensors)
        self.__dict__["_last"] = last_of(call, tensors, found, (False, False))
        return found.out

    _explained, _to_measure = explained_heads, to_measure  # for mha_c.explain and mha_c.cost

    def _rows_of_call(self, queries: Tensor, keys: Tensor) -> tuple[int, int, int]:
        """(B, Q, K)."""
        check_features(queries, "queries", queries.shape[-1])
        check_features(keys, "keys", keys.shape[-1])
        return queries.shape[0], queries.shape[1], keys.shape[1]

    @property
    def attention_weights(self) -> Tensor:
        """Weights of the last call, (B, num_heads, Q, K): rows sum to 1.

        Raises
        ------
        AttributeError
            Before the first call.
        """
        return self._shown(self.num_heads)
