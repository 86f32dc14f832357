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

from .. import functional as ours
from .._private import FakeTensor, checkpointing, in_mode, in_transform
from .._tensors import FLOATS, PLAIN, autocasting, exporting, is_compiling
from .operands import Operands

Note = Callable[..., None]  # (kind, operands, causal, mask)
SDPA = getattr(F, "scaled_dot_product_attention", None)


def has_numbers(x: Any) -> bool:
    """Whether it is a dense tensor with numbers."""
    return isinstance(x, Tensor) and not (x.is_nested or x.is_meta or isinstance(x, FakeTensor))


def scaled_dot_product_attention(note: Note, by_core: bool, function: Any, *args: Any, **options: Any) -> Any:
    """F.scaled_dot_product_attention."""
    if in_transform() or exporting() or is_compiling():
        return function(*args, **options)
    call = _ScaledCall(*args, **options)
    if not call.is_known():
        return function(*args, **options)
    q, k, v, mask = call.with_four_axes()
    keep, bias = (mask, None) if mask is not None and mask.dtype is torch.bool else (None, mask)
    if by_core and call.suits_core():
        out = call.in_layout_of_q(attended(q, k, v, keep, bias, call.causal, call.scale, _of_empty_rows()))
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

    def is_known(self) -> bool:
        """Whether it is a call that torch does not refuse, of dense tensors."""
        tensors = [x for x in (self.q, self.k, self.v, self.mask) if x is not None]
        if self.unknown or not all(map(has_numbers, tensors)):
            return False
        q, k, v = self.q.shape, self.k.shape, self.v.shape
        if not (len(q) == len(k) == len(v) >= 2 and q[-1] == k[-1] and k[-2] == v[-2]):
            return False
        leading = q[:-3] == k[:-3] == v[:-3] and k[:-2] == v[:-2]
        heads = len(q) == 2 or q[-3] == k[-3] or bool(self.grouped and k[-3] and q[-3] % k[-3] == 0)
        return bool(leading and heads) and (self.mask is None or self._mask_fits())

    def _mask_fits(self) -> bool:
        scores = (*self.q.shape[:-1], self.k.shape[-2])
        shape = (1,) * (len(scores) - self.mask.dim()) + tuple(self.mask.shape)
        return len(shape) == len(scores) and all(a in (1, b) for a, b in zip(shape, scores))

    def suits_core(self) -> bool:
        """Whether the core can take it, as torch would compute it."""
        numbers = [x for x in (self.q, self.k, self.v, self.mask) if x is not None]
        plain = all(type(x) in PLAIN and x.layout is torch.strided and x.device.type == "cpu" for x in numbers)
        one_type = all(x.dtype is self.q.dtype or (x is self.mask and x.dtype is torch.bool) for x in numbers)
        of_both = self.causal and self.mask is not None  # some versions of torch refuse this
        usual = self.q.dtype in FLOATS and not (self.dropout or of_both)
        return plain and one_type and usual and _core_may_compute()

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

    def in_layout_of_q(self, out: Tensor) -> Tensor:
        """The result as torch gives it: its axes lie in memory as those of q, so that a model's `view` works."""
        q = self.q
        if q.dim() == 4 and q.stride(1) < q.stride(2):
            out = out.transpose(1, 2).contiguous().transpose(1, 2)
        return out if out.dim() == q.dim() else out.reshape(*q.shape[:-1], out.shape[-1])


def _with_four_axes(x: Tensor) -> Tensor:
    if x.dim() == 4:
        return x
    if x.dim() < 4:
        return x[(None,) * (3 - x.dim())][:, None]
    return x.flatten(0, -4)


def attended(
    q: Tensor, k: Tensor, v: Tensor, keep: Optional[Tensor], bias: Optional[Tensor], causal: bool,
    scale: Optional[float], of_empty_rows: float,
) -> Tensor:  # fmt: skip
    """Attention by the core; queries that see no key get `of_empty_rows`."""
    options: Any = {"keep_mask": keep, "bias": bias, "causal": "top_left" if causal else False, "scale": scale}
    if of_empty_rows == 0 or (keep is None and bias is None):
        return ours.dot_product_attention(q, k, v, **options)
    out, lse = ours.dot_product_attention(q, k, v, return_lse=True, **options)
    return torch.where(torch.isneginf(lse)[..., None], of_empty_rows, out)


def _core_may_compute() -> bool:
    """Not where another mode wants to see torch's operations, and not in a part of a model that is computed again in
    the backward pass, which would then have to be under the same watch."""
    return not (autocasting() or in_mode() or (torch.is_grad_enabled() and checkpointing()))


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
    if in_transform() or exporting() or is_compiling() or not _MultiheadCall.knows(given):
        return function(*args, **options)
    call = _MultiheadCall(given)
    if by_core and call.suits_core():
        found = call.computed()
    else:
        found = function(*args, **options)
        with torch.no_grad():
            call.project(values=False)
    operands = Operands.of(call.q, call.k, None, call.keep, call.bias)
    note("MultiheadAttention", operands, bool(given.get("is_causal")), given.get("attn_mask"))
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
        plain = all(type(x) in PLAIN and x.device.type == "cpu" and x.dtype is dtype for x in numbers)
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
            out, weights = ours.dot_product_attention(
                self.q, self.k, self.v, keep_mask=self.keep, bias=self.bias, return_weights=True
            )
            if self.keep is not None or self.bias is not None:
                empty = ~(weights > 0).any(-1, keepdim=True) & ~weights.isnan().any(-1, keepdim=True)
                out, weights = (torch.where(empty, math.nan, x) for x in (out, weights))
            if given["average_attn_weights"]:
                weights = weights.mean(1)
        else:
            out = attended(self.q, self.k, self.v, self.keep, self.bias, False, None, _of_empty_rows())
        out = out.permute(2, 0, 1, 3).flatten(2)
        out = F.linear(out, given["out_proj_weight"], given["out_proj_bias"])
        if self.batched:
            return out, weights
        return out.squeeze(1), None if weights is None else weights.squeeze(0)
