"""The twin of torch.nn.MultiheadAttention, whose attention the core computes; `convert` replaces torch's by it."""

from __future__ import annotations

from functools import reduce
from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from .._arguments.calls import checks_names
from .._layer.lacks import lacks
from .._layer.viewable import Viewable
from ..errors import ShapeError
from ._call.records import Attended, AttentionCall, AttentionTensors
from ._explained import explained_heads, to_measure
from ._module import ShowsWeights
from ._private import unflatten
from ._tensors import check_tensors
from ._weights.last import last_of
from .functional import dot_product_attention

__all__ = ["MultiheadAttention"]
__dir__ = __all__.copy  # what dir() and completion show


@lacks(
    new_cache="its call is torch's, which has no place for one; mha_c.torch.MultiHeadAttention has",
    project="its call is torch's, which has no place for it; mha_c.torch.MultiHeadAttention has",
    causal="its call is torch's: attn_mask=mask, is_causal=True",
    prune="its heads must fill embed_dim; those of mha_c.torch.MultiHeadAttention need not",
    steps="the players read W_q, W_k and W_v, and its projections are one; mha_c.torch.MultiHeadAttention has them",
)
class MultiheadAttention(nn.MultiheadAttention, ShowsWeights, Viewable):
    """A subclass of torch's nn.MultiheadAttention with the same parameters; the core computes the attention.

    >>> import torch, mha_c.torch
    >>> mha = mha_c.torch.nn.MultiheadAttention(8, 2, batch_first=True)
    >>> x = torch.randn(3, 5, 8)
    >>> out, weights = mha(x, x, x)
    >>> out.shape, weights.shape
    (torch.Size([3, 5, 8]), torch.Size([3, 5, 5]))

    Parameters
    ----------
    embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype : Any
        As in nn.MultiheadAttention.

    Notes
    -----
    Call: mha(query, key, value, key_padding_mask=None, need_weights=True, attn_mask=None, average_attn_weights=True,
    is_causal=False) returns (output, weights or None), as torch documents.  A bool mask is True where a query must not
    see a key; a float mask is added to the scores; is_causal is a hint that attn_mask is the causal mask.

    After a call `attention_weights` is (batch, num_heads, queries, keys), computed when it is read, whatever
    need_weights was.

    Differences: a query that may see no key gets 0 before the output projection (torch: NaN, or 0, depending on
    its path); returned weights are those before dropout.  torch itself computes calls with add_bias_kv, add_zero_attn
    or nested tensors.  State dicts of torch load, and isinstance(mha, nn.MultiheadAttention) holds.
    """

    @checks_names
    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Optional[Tensor] = None,
        need_weights: bool = True, attn_mask: Optional[Tensor] = None, average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Optional[Tensor]]:  # fmt: skip
        """The call: see the class."""
        check_tensors(query=query, key=key, value=value)
        if self.bias_k is not None or self.add_zero_attn or query.is_nested:
            self.__dict__["_last"] = None
            hint = {"is_causal": True} if is_causal else {}  # which a torch may not know
            return super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, **hint
            )
        if is_causal and attn_mask is None:
            raise RuntimeError("is_causal=True needs attn_mask as well, as in torch")
        is_one = query is key is value
        batched, of_batch = query.dim() == 3, 0 if self.batch_first else 1
        q, k, v = (x if batched else x.unsqueeze(of_batch) for x in (query, key, value))
        if not self.batch_first:
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        heads = [unflatten(x, 2, (self.num_heads, -1)).transpose(1, 2) for x in self._projected(q, k, v, is_one)]
        if key_padding_mask is not None and not batched:
            key_padding_mask = key_padding_mask.unsqueeze(0)
        keep, bias = self._masks(key_padding_mask, attn_mask, q, k.shape[1], heads[0].dtype)
        found: Any = dot_product_attention(
            heads[0], heads[1], heads[2], keep_mask=keep, bias=bias, dropout=self.dropout if self.training else 0.0,
            return_weights=need_weights,
        )  # fmt: skip
        out, weights = found if need_weights else (found, None)
        own = None if bias is None else bias.clone()  # it may be the caller's, who may change it
        tensors = AttentionTensors(heads[0], heads[1], heads[2], keep_mask=keep, bias=own)
        self.__dict__["_last"] = last_of(AttentionCall(), tensors, Attended(out, weights), (False, False))
        out = self.out_proj(out.transpose(1, 2).flatten(2)).transpose(0, of_batch)
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not batched:
            out, weights = out.squeeze(of_batch), None if weights is None else weights.squeeze(0)
        return out, weights

    @property
    def attention_weights(self) -> Tensor:
        """Weights of the last call, (batch, num_heads, queries, keys), before dropout.

        Raises
        ------
        AttributeError
            Before the first call, and after a call that torch itself has computed.
        """
        return self._shown(self.num_heads)

    _explained, _to_measure = explained_heads, to_measure  # for mha_c.explain and mha_c.cost

    def _rows_of_call(self, queries: Tensor, keys: Tensor) -> tuple[int, int, int]:
        of_rows = 0 if queries.dim() == 2 else int(self.batch_first)
        batch = 1 if queries.dim() == 2 else queries.shape[1 - of_rows]
        return batch, queries.shape[of_rows], keys.shape[of_rows]

    def _projected(self, q: Tensor, k: Tensor, v: Tensor, is_one: bool) -> list[Tensor]:
        if self.in_proj_weight is not None:
            weights: Any = self.in_proj_weight.chunk(3)
        else:
            weights = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        biases: Any = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        if is_one and self.in_proj_weight is not None:
            return list(linear(q, self.in_proj_weight, self.in_proj_bias).chunk(3, dim=-1))
        return [linear(x, W, b) for x, W, b in zip((q, k, v), weights, biases)]

    def _masks(
        self, padding: Optional[Tensor], mask: Optional[Tensor], q: Tensor, n_keys: int, dtype: torch.dtype
    ) -> tuple[Optional[Tensor], Optional[Tensor]]:
        """(keep_mask, bias): bool masks, True = drop in torch, are inverted; float masks are added to one bias."""
        batch, n_queries = q.shape[0], q.shape[1]
        masks = []
        if padding is not None:
            _check_mask(padding, "key_padding_mask", (batch, n_keys))
            masks.append(padding[:, None, None, :])
        if mask is not None:
            _check_mask(mask, "attn_mask", (n_queries, n_keys), (batch * self.num_heads, n_queries, n_keys))
            masks.append(mask[None, None] if mask.dim() == 2 else unflatten(mask, 0, (batch, self.num_heads)))
        keep = [~x for x in masks if x.dtype is torch.bool]
        added = [x.to(dtype) for x in masks if x.dtype is not torch.bool]
        return reduce(torch.logical_and, keep) if keep else None, reduce(torch.add, added) if added else None


def _check_mask(mask: Tensor, name: str, *shapes: tuple[int, ...]) -> None:
    check_tensors(**{name: mask})
    if not (mask.dtype is torch.bool or mask.is_floating_point()):
        raise TypeError(f"{name} must be bool (True = drop) or float (added to the scores), got {mask.dtype}")
    if tuple(mask.shape) not in shapes:
        raise ShapeError(f"{name} must have shape {' or '.join(map(str, shapes))}, got {tuple(mask.shape)}")
