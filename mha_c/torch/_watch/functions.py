"""Calls of torch's own functions of attention: what is noted of them, and how the core computes them where it can.

A handler gets the function as torch has it and the arguments of the call, and gives what the function would give, up to
rounding: a query that sees no key gets what this torch gives it, NaN or 0.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Callable, Optional

import torch
from torch import Tensor
from torch.nn import functional as F

from ..._arguments import scalars
from .._call.attention import attend
from .._call.readable import readable
from .._call.records import AttentionCall, AttentionTensors
from .._private import FakeTensor, autocasting_anywhere, checkpointing, observed
from .._tensors import FLOATS
from .operands import Operands

Note = Callable[..., None]  # (kind, operands, causal, mask)
SDPA = getattr(F, "scaled_dot_product_attention", None)


def has_numbers(x: Any) -> bool:
    """Whether it is a dense tensor with numbers."""
    return isinstance(x, Tensor) and not (x.is_nested or x.is_meta or isinstance(x, FakeTensor))


def _may_go_to_core(x: Any) -> bool:
    """Whether it is a dense tensor that the core can read, of whatever type."""
    return x is not None and readable((x,)) and x.layout is torch.strided and not x.is_nested


def scaled_dot_product_attention(note: Note, by_core: bool, function: Any, *args: Any, **options: Any) -> Any:
    """F.scaled_dot_product_attention."""
    call = _ScaledCall(*args, **options)
    if not call.is_known():
        return function(*args, **options)
    q, k, v, mask = call.with_four_axes()
    keep, bias = (mask, None) if mask is not None and mask.dtype is torch.bool else (None, mask)
    if by_core and call.suits_core():
        out = attended(q, k, v, keep, bias, call.causal, call.scale)
        if call.q.dim() != 4:
            out = out.reshape(*call.q.shape[:-1], out.shape[-1])
    else:
        out = function(*args, **options)
    corner = "top_left" if call.causal else False
    operands = Operands.of(q, k, None, keep, bias, causal=corner, scale=call.scale)
    note("scaled_dot_product_attention", operands, call.causal, call.mask)
    return out


class _ScaledCall:
    """The arguments of a call of F.scaled_dot_product_attention."""

    def __init__(
        self, query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
        scale: Optional[float] = None, enable_gqa: bool = False, **unknown: Any,
    ) -> None:  # fmt: skip
        self.q, self.k, self.v, self.mask, self.causal, self.scale = query, key, value, attn_mask, is_causal, scale
        self.dropout, self.grouped, self.unknown = dropout_p, enable_gqa, unknown
        self.tensors = [query, key, value] if attn_mask is None else [query, key, value, attn_mask]
        self.for_core = all(map(_may_go_to_core, self.tensors))

    def is_known(self) -> bool:
        """Whether it is a call that torch does not refuse, of dense tensors."""
        if self.unknown or not (self.for_core or all(map(has_numbers, self.tensors))):
            return False
        q, k = self.q.shape, self.k.shape
        if not (len(q) == len(k) >= 2 and q[-1] == k[-1] and q[:-3] == k[:-3] and k[:-1] == self.v.shape[:-1]):
            return False
        heads = len(q) == 2 or q[-3] == k[-3] or bool(self.grouped and k[-3] and q[-3] % k[-3] == 0)
        return heads and (self.mask is None or self._mask_fits())

    def _mask_fits(self) -> bool:
        scores = (*self.q.shape[:-1], self.k.shape[-2])
        shape = (1,) * (len(scores) - self.mask.dim()) + tuple(self.mask.shape)
        return len(shape) == len(scores) and all(a in (1, b) for a, b in zip(shape, scores))

    def suits_core(self) -> bool:
        """Whether the core can take it, as torch would compute it."""
        dtype, mask = self.q.dtype, self.mask
        one_type = dtype in FLOATS and self.k.dtype is self.v.dtype is dtype
        if mask is not None:
            one_type = one_type and not self.causal and mask.dtype in (dtype, torch.bool)  # some torch refuses both
        return self.for_core and one_type and not self.dropout and _core_may_compute()

    def with_four_axes(self) -> tuple[Tensor, Tensor, Tensor, Optional[Tensor]]:
        """q, k, v and the mask as (B, H, rows, .): axes before that of heads become one."""
        rank = self.q.dim()
        q, k, v = (_with_four_axes(x) for x in (self.q, self.k, self.v))
        mask = self.mask
        if mask is not None and mask.dim() != 2:
            mask = mask[(None,) * (rank - mask.dim())]  # now of the rank of the scores
            if rank == 3:
                mask = mask[:, None]
            elif rank > 4:
                mask = mask.expand(*self.q.shape[:-3], *mask.shape[-3:]).flatten(0, -4)
        return q, k, v, mask


def _with_four_axes(x: Tensor) -> Tensor:
    if x.dim() == 4:
        return x
    if x.dim() < 4:
        return x[(None,) * (3 - x.dim())][:, None]
    return x.flatten(0, -4)


def attended(
    q: Tensor, k: Tensor, v: Tensor, keep: Optional[Tensor], bias: Optional[Tensor], causal: bool = False,
    scale: Optional[float] = None,
) -> Tensor:  # fmt: skip
    """Attention by the core; queries that see no key get what this torch gives them."""
    scale = scalars.scale(scale, q.dtype is torch.float32)
    marks_empty = not (keep is None and bias is None) and _of_empty_rows() != 0
    call = AttentionCall(causal="top_left" if causal else None, scale=scale, return_lse=marks_empty)
    found = attend(call, AttentionTensors(q, k, v, None, keep, bias))
    if not marks_empty:
        return found.out
    assert found.lse is not None
    return torch.where(torch.isneginf(found.lse)[..., None], _of_empty_rows(), found.out)


def _core_may_compute() -> bool:
    """Not where another mode wants to see torch's operations, and not in a part of a model that is computed again in
    the backward pass, which would then have to be under the same watch."""
    return not (autocasting_anywhere() or observed() or (torch.is_grad_enabled() and checkpointing()))


@functools.lru_cache(maxsize=1)
def _of_empty_rows() -> float:
    """What this torch gives a query that sees no key: 0, or NaN (before 2.5)."""
    if SDPA is None:
        return math.nan
    one = torch.ones(1, 1, 1, 1, device="cpu", dtype=torch.float32)
    return float(SDPA(one, one, one, torch.zeros(1, 1, dtype=torch.bool, device="cpu")))


# --- nn.MultiheadAttention ------------------------------------------------------------------------------

PARAMETERS = (
    "query", "key", "value", "embed_dim_to_check", "num_heads", "in_proj_weight", "in_proj_bias", "bias_k", "bias_v",
    "add_zero_attn", "dropout_p", "out_proj_weight", "out_proj_bias", "training", "key_padding_mask", "need_weights",
    "attn_mask",
)  # fmt: skip
DEFAULTS = {"training": True, "need_weights": True, "average_attn_weights": True}


def multi_head_attention_forward(note: Note, by_core: bool, function: Any, *args: Any, **options: Any) -> Any:
    """F.multi_head_attention_forward, which nn.MultiheadAttention and torch's Transformer layers call."""
    given = {**DEFAULTS, **dict(zip(PARAMETERS, args)), **options}
    if not _MultiheadCall.knows(given):
        return function(*args, **options)
    call = _MultiheadCall(given)
    if by_core and call.suits_core():
        found = call.computed()
    else:
        found = function(*args, **options)
        with torch.no_grad():
            call.project(values=False)
    operands = Operands.of(call.q, call.k, None, call.keep, call.bias)
    mask = given.get("attn_mask")
    mask = given.get("key_padding_mask") if mask is None else mask
    note("MultiheadAttention", operands, bool(given.get("is_causal")), mask)
    return found


class _MultiheadCall:
    """The arguments of a call of F.multi_head_attention_forward, and its heads when they are projected."""

    q: Tensor
    k: Tensor
    v: Optional[Tensor] = None
    keep: Optional[Tensor] = None
    bias: Optional[Tensor] = None

    def __init__(self, given: dict[str, Any]) -> None:
        self.given, self.batched = given, given["query"].dim() == 3

    @staticmethod
    def knows(given: dict[str, Any]) -> bool:
        """Whether it is a call that torch does not refuse, of dense tensors, and without static_k and static_v."""
        tensors = [given[name] for name in ("query", "key", "value")]
        if not all(map(has_numbers, tensors)):
            return False
        q, k, v = tensors
        masked = given.get("attn_mask"), given.get("key_padding_mask")
        return (
            given.get("static_k") is None
            and given.get("static_v") is None
            and q.dim() == k.dim() == v.dim()
            and q.dim() in (2, 3)
            and k.shape[:-1] == v.shape[:-1]
            and q.shape[1:-1] == k.shape[1:-1]
            and q.shape[-1] == given["embed_dim_to_check"]
            and q.shape[-1] % given["num_heads"] == 0
            and all(x is None or x.dtype is torch.bool or x.is_floating_point() for x in masked)
            and not (given.get("is_causal") and masked[0] is None)
        )

    def suits_core(self) -> bool:
        given = self.given
        names = ("query", "key", "value", "in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
        numbers = [given[name] for name in names if given.get(name) is not None]
        dtype = numbers[0].dtype
        plain = all(_may_go_to_core(x) and x.dtype is dtype for x in numbers)
        extended = given["bias_k"] is not None or given["add_zero_attn"]
        dropped = given["training"] and given["dropout_p"] > 0
        return plain and dtype in FLOATS and not (extended or dropped) and _core_may_compute()

    def project(self, values: bool = True) -> None:
        """Set q, k, v (B, H, rows, D) and the masks; without `values` v stays None."""
        given = self.given
        inputs = [given[name] if self.batched else given[name].unsqueeze(1) for name in ("query", "key", "value")]
        if given.get("use_separate_proj_weight"):
            weights = [given[name] for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight")]
        else:
            weights = list(given["in_proj_weight"].chunk(3))
        in_bias = given["in_proj_bias"]
        biases = (None,) * 3 if in_bias is None else in_bias.chunk(3)
        same = given["query"] is given["key"] is given["value"] and values and not given.get("use_separate_proj_weight")
        if same:
            projected = list(F.linear(inputs[0], given["in_proj_weight"], in_bias).chunk(3, dim=-1))
        else:
            projected = [F.linear(*triple) for triple in zip(inputs, weights, biases)][: 3 if values else 2]
        for i, name in enumerate(("bias_k", "bias_v")[: len(projected) - 1]):
            rows = projected[i + 1]
            if given[name] is not None:
                rows = torch.cat([rows, given[name].expand(1, rows.shape[1], -1)])
            if given["add_zero_attn"]:
                rows = torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])
            projected[i + 1] = rows
        heads = given["num_heads"]
        found = [x.reshape(*x.shape[:2], heads, -1).permute(1, 2, 0, 3) for x in projected]
        self.q, self.k = found[:2]
        self.v = found[2] if values else None
        self._set_masks()

    def _set_masks(self) -> None:
        """keep and bias of the masks, True = drop in torch.  They are not joined, which would take Q x K for each item.

        nn.MultiheadAttention gives both as floats: a padding mask of 0 and -inf is one of bools again."""
        batch, heads, n_keys = self.q.shape[0], self.q.shape[1], self.k.shape[2]
        padding, mask = self.given.get("key_padding_mask"), self.given.get("attn_mask")
        masks = []
        if padding is not None:
            padding = (padding if self.batched else padding[None])[:, None, None, :]
            if padding.dtype is not torch.bool and bool(((padding == 0) | torch.isneginf(padding)).all()):
                padding = torch.isneginf(padding)
            masks.append(padding)
        if mask is not None:
            masks.append(mask if mask.dim() == 2 else mask.reshape(batch, heads, *mask.shape[1:]))
        more = [n_keys - x.shape[-1] for x in masks]  # keys that bias_k and add_zero_attn have added
        masks = [x if not n else F.pad(x, (0, n)) for x, n in zip(masks, more)]
        for x in masks:
            if x.dtype is torch.bool:
                self.keep = ~x if self.keep is None else self.keep & ~x
            else:
                x = x.to(self.q.dtype)
                self.bias = x if self.bias is None else self.bias + x

    def computed(self) -> tuple[Tensor, Optional[Tensor]]:
        """(output, weights or None), as torch gives them: with weights an empty row is NaN."""
        given = self.given
        self.project()
        assert self.v is not None
        weights = None
        if given["need_weights"]:
            tensors = AttentionTensors(self.q, self.k, self.v, None, self.keep, self.bias)
            out, weights, _ = attend(AttentionCall(return_weights=True), tensors)
            assert weights is not None
            if self.keep is not None or self.bias is not None:
                empty = ~(weights > 0).any(-1, keepdim=True) & ~weights.isnan().any(-1, keepdim=True)
                out, weights = (torch.where(empty, math.nan, x) for x in (out, weights))
            if given["average_attn_weights"]:
                weights = weights.mean(1)
        else:
            out = attended(self.q, self.k, self.v, self.keep, self.bias)
        out = out.permute(2, 0, 1, 3).flatten(2)
        out = F.linear(out, given["out_proj_weight"], given["out_proj_bias"])
        if self.batched:
            return out, weights
        return out.squeeze(1), None if weights is None else weights.squeeze(0)
