"""Attention in torch's own operations: differentiable as often and in all ways that torch offers, on every device.

It is torch's scaled_dot_product_attention where that fits, which needs no array of all scores where torch has a kernel
for it and is ONNX's operator Attention; else it is as in the formulas, as slow as the book's own code.

q (B,H,Q,D), k (B,Hkv,K,D), v (B,Hkv,K,Dv), scores and weights (B,H,Q,K).
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import reduce
from operator import and_
from typing import Any, Callable, Optional

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from .._private import fused_attention, in_transform, on_cpu, tracing_state, unflatten
from .._tensors import autocast_on, exporting, float32_if_half, has_numbers
from .records import Attended, AttentionCall, AttentionTensors, Drop

FEATURES = 1 << 24  # features of additive scores that exist at a time: 64 MiB of float32


# --- Scores and weights -----------------------------------------------------------------------------------


def visible_keys(
    q: Tensor, k: Tensor, valid_lens: Any = None, keep_mask: Optional[Tensor] = None, causal: Any = None,
    left: int = -1, right: int = -1,
) -> Optional[Tensor]:  # fmt: skip
    """Which keys each query may see, a bool tensor that broadcasts to (B, H, Q, K), or None: all.  q (..., Q, .), k."""
    if valid_lens is keep_mask is None and causal is None and left < 0 and right < 0:
        return None
    n_queries, n_keys, device = q.shape[-2], k.shape[-2], q.device
    key = torch.arange(n_keys, device=device)
    place = torch.arange(n_queries, device=device)[:, None] + (n_keys - n_queries if causal == "bottom_right" else 0)
    parts = []
    if valid_lens is not None:
        lens = valid_lens if isinstance(valid_lens, Tensor) else torch.as_tensor(valid_lens)
        lens = float32_if_half(lens).to(device, non_blocking=True)  # comparing in 16 bits would round key numbers too
        parts.append(key < (lens[:, None, None, None] if lens.dim() == 1 else lens[:, None, :, None]))
    if causal is not None:
        parts.append((key <= place)[None, None])
    if left >= 0:
        parts.append((key >= place - left)[None, None])
    if right >= 0:
        parts.append((key <= place + right)[None, None])
    if keep_mask is not None:
        parts.append(with_head_axis(keep_mask))
    return reduce(and_, parts)


def dot_product_scores(q: Tensor, k: Tensor, scale: Optional[float] = None) -> Tensor:
    if q.shape[-1] == 0:  # empty sums, which some ONNX runtimes get wrong
        return torch.zeros_like(q.sum(-1, keepdim=True) + k.sum(-1)[..., None, :])
    if scale is None:
        size: Any = q.shape[-1]  # a tensor inside a tracer; its powers would be float32
        scale = (size.to(q.dtype) if isinstance(size, Tensor) else size) ** -0.5
    return q @ k.transpose(-1, -2) * scale


def additive_scores(q: Tensor, k: Tensor, w_v: Tensor, scale: Optional[float] = None) -> Tensor:
    """Scores with w_v (h,) or (1, h).  The features (..., Q, K, h) never all exist: they are computed for one piece of
    the queries after another, and once more in the backward pass."""
    rows = queries_at_a_time(q.numel() * k.shape[-2], q.shape[-2]) if has_numbers(q) else q.shape[-2]
    if rows == q.shape[-2]:
        scores = _additive_scores(q, k, w_v)
    else:
        pieces = [
            checkpoint(_additive_scores, piece, k, w_v, use_reentrant=False, preserve_rng_state=False)
            for piece in q.split(rows, -2)
        ]
        scores = torch.cat(pieces, -2)
    return scores if scale is None else scores * scale


def queries_at_a_time(features: int, n_queries: int) -> int:
    """How many queries to compute at a time, in a call with so many features."""
    return n_queries if features <= FEATURES else max(1, n_queries * FEATURES // features)


def _additive_scores(q: Tensor, k: Tensor, w_v: Tensor) -> Tensor:
    return linear(torch.tanh(q.unsqueeze(-2) + k.unsqueeze(-3)), w_v.reshape(1, -1)).squeeze(-1)


def scores_of(q: Tensor, k: Tensor, w_v: Optional[Tensor], scale: Optional[float] = None) -> Tensor:
    return dot_product_scores(q, k, scale) if w_v is None else additive_scores(q, k, w_v, scale)


def _with_score_terms(scores: Tensor, call: AttentionCall, relative_bias: Optional[Tensor]) -> Tensor:
    """Scores (..., Q, K), capped, plus their biases by distance."""
    if call.softcap:
        least = torch.finfo(scores.dtype).tiny  # as in the core: the cap and its inverse must be normal numbers
        softcap = min(max(call.softcap, least), 1 / least)
        scores = softcap * torch.tanh(scores / softcap)
    if relative_bias is not None:
        reach = relative_bias.shape[1] // 2
        n_queries, n_keys, device = scores.shape[-2], scores.shape[-1], scores.device
        place = torch.arange(n_queries, device=device) + (n_keys - n_queries if call.causal == "bottom_right" else 0)
        away = (torch.arange(n_keys, device=device) - place[:, None]).clamp(-reach, reach) + reach
        scores = scores + relative_bias[:, away]
    return scores


def softmax(
    scores: Tensor, visible: Optional[Tensor], empty_rows: str, sinks: Optional[Tensor] = None
) -> tuple[Tensor, Tensor]:
    """(weights, lse) over the visible keys (and a sink for each head); rows without visible keys are constant.

    As in the core, a key with a score of -inf is not visible, and one with a score of NaN is.
    """
    seen = scores != -torch.inf if visible is None else visible & (scores != -torch.inf)
    if sinks is not None:
        column = sinks[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([torch.where(seen, scores, -torch.inf), column], -1)
        seen = scores != -torch.inf
    empty = ~seen.any(-1, keepdim=True)
    # An empty row gets equal scores here, or its gradient would be NaN.
    scores = torch.where(seen, scores, torch.where(empty, 0.0, -torch.inf).to(scores.dtype))
    shown = seen | empty if empty_rows == "uniform" and sinks is None else seen
    weights = torch.where(shown, torch.softmax(scores, -1), 0.0)  # hidden keys have 0, also in rows with NaN
    lse = torch.where(empty[..., 0], -torch.inf, torch.logsumexp(scores, -1))
    return weights if sinks is None else weights[..., :-1], lse


def without_unseen(x: Tensor, visible: Tensor, empty_rows: Optional[str]) -> Tensor:
    """x (B, H, K, features) with zeros in the rows that no query sees; uniform empty rows see all values."""
    seen = visible.any(-2)
    if empty_rows == "uniform":
        seen = seen | ~visible.any(-1).all(-1, keepdim=True)
    if seen.dim() > 2 and seen.shape[1] not in (1, x.shape[1]):  # query heads that share a key head
        seen = unflatten(seen, 1, (x.shape[1], -1)).any(2)
    return torch.where(seen.unsqueeze(-1), x, 0.0)


# --- Attention --------------------------------------------------------------------------------------------


def attention(
    call: AttentionCall, tensors: AttentionTensors, drop: Optional[Drop], fuses: bool, clean: bool
) -> Attended:
    """Attention in q's type, with q's axes; weights and lse are None where scaled_dot_product_attention computes.

    fuses   it may: only the output is wanted, and dropout is torch's own
    clean   keys and values that no query sees are finite: they have no influence, and are not replaced by zeros
    """
    q, k, v, w_v, keep_mask, bias, relative_bias, sinks = tensors
    dtype, rank, plain = q.dtype, q.dim(), w_v is relative_bias is sinks is None and not call.softcap
    fuses = fuses and plain and fits(q, k)
    if not fuses:
        q, k, v, w_v, bias, relative_bias, sinks = map(float32_if_half, (q, k, v, w_v, bias, relative_bias, sinks))
    q, k, v = (with_head_axis(x) for x in (q, k, v))
    causal_alone = call.causal is not None and call._replace(causal=None).hides() is False and keep_mask is bias is None
    if fuses and causal_alone and not exporting() and (call.causal == "top_left" or q.shape[-2] == k.shape[-2]):
        out = _fused(call, q, k, v, None, None, causal=True)
        return Attended(out if rank == 4 else out[:, 0])
    visible = visible_keys(q, k, call.valid_lens, keep_mask, call.causal, call.window_left, call.window_right)
    if bias is not None:
        bias = with_head_axis(bias)
        visible = bias != -torch.inf if visible is None else visible & (bias != -torch.inf)
    if visible is not None and not clean:
        k, v = without_unseen(k, visible, None), without_unseen(v, visible, call.empty_rows)
    if fuses:
        found = Attended(_fused(call, q, k, v, visible, bias))
    else:
        with without_autocast(q):
            found = _by_formulas(call, AttentionTensors(q, k, v, w_v, None, bias, relative_bias, sinks), visible, drop)
    return Attended(*[None if x is None else (x if rank == 4 else x[:, 0]).to(dtype) for x in found])


def _by_formulas(
    call: AttentionCall, tensors: AttentionTensors, visible: Optional[Tensor], drop: Optional[Drop]
) -> Attended:
    q, k, v, w_v, _, bias, relative_bias, sinks = tensors
    k, v = for_each_head(q, k), for_each_head(q, v)
    scores = _with_score_terms(scores_of(q, k, w_v, call.scale), call, relative_bias)
    weights, lse = softmax(scores if bias is None else scores + bias, visible, call.empty_rows, sinks)
    return Attended((weights if drop is None else drop(weights)).to(v.dtype) @ v, weights, lse)


def for_each_head(q: Tensor, x: Tensor) -> Tensor:
    """x (B, Hkv, K, .) as (B, H, K, .): the rows of the key head that each head of q (B, H, Q, D) uses."""
    group = q.shape[1] // max(x.shape[1], 1)
    return x if group == 1 else x.repeat_interleave(group, dim=1)


def _fused(
    call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, visible: Optional[Tensor], bias: Optional[Tensor],
    causal: bool = False,
) -> Tensor:  # fmt: skip
    """The output alone, by torch; visible and bias broadcast to (B, H, Q, K)."""
    options: dict[str, Any] = {"dropout_p": call.dropout, "scale": call.scale}
    if q.shape[1] != k.shape[1]:
        options["enable_gqa"] = True
    if visible is None:
        return fused_attention(q, k, v, bias, is_causal=causal, **options)
    there = torch.zeros((), dtype=q.dtype, device=q.device) if bias is None else bias
    empty = ~visible.any(-1, keepdim=True)
    # Equal scores of 0 make an empty row uniform; no gradient flows back to its query, nor from it to the keys.
    q = torch.where(empty, 0.0, q)
    added = torch.where(visible, there, torch.where(empty, 0.0, -torch.inf).to(q.dtype))
    if tracing_state() is None:  # a row for each query: onnxruntime's Attention needs such a mask
        added = added.expand(*added.shape[:-2], q.shape[-2], k.shape[-2])
    out: Tensor = fused_attention(q, k, v, added, **options)
    return out if call.empty_rows == "uniform" else torch.where(empty, 0.0, out)


def fits(q: Tensor, k: Tensor) -> bool:
    """Whether scaled_dot_product_attention can compute these here, including derivatives that a transform needs."""
    if fused_attention is None:
        return False
    if exporting():  # ONNX from TorchScript does not know it in float64
        return not (tracing_state() is not None and q.dtype is torch.float64)
    return not (on_cpu(q) or in_transform()) and k.shape[-2] > 0 and q.shape[-1] > 0


def with_head_axis(x: Tensor) -> Tensor:
    """(B, rows, columns) -> (B, 1, rows, columns); rank 2 broadcasts, rank 4 stays."""
    return x.unsqueeze(1) if x.dim() == 3 else x


def without_autocast(q: Tensor) -> Any:
    return torch.autocast(q.device.type, enabled=False) if autocast_on(q) else nullcontext()


# --- A whole layer ------------------------------------------------------------------------------------------


def composed(inputs: Any, projections: Any, num_heads: int, attention_of: Callable[..., Tensor]) -> Tensor:
    """The book's lines, W_o(attention_of(W_q(queries), W_k(keys), W_v(values))), of inputs (B, rows, .).

    projections   W_q, W_k, W_v, W_o: modules or functions; None where there is none
    attention_of  takes and gives heads (B, H, rows, d)
    """
    *into, W_o = projections
    heads = attention_of(*(split_heads(x if W is None else W(x), num_heads) for x, W in zip(inputs, into)))
    joined = join_heads(heads)
    return joined if W_o is None else W_o(joined)


def without_hidden(queries: Tensor, keys: Tensor, values: Tensor, call: AttentionCall, masks: Any) -> Any:
    """keys and values (B, K, .) with zeros in the rows that no query sees: these may hold NaN, of which 0 times is NaN
    in the gradients of W_k and W_v.

    masks   (keep_mask, bias)
    """
    (keep_mask, bias), causal = masks, call.causal
    if causal is not None and call.valid_lens is keep_mask is bias is None:
        # Asked of nothing else: an exporter keeps what sizes are compared.  The last query sees every key:
        sees_all = causal == "bottom_right" or queries.shape[1] == keys.shape[1]
        causal = None if sees_all else causal
    visible = visible_keys(queries, keys, call.valid_lens, keep_mask, causal)
    if bias is not None:
        finite = with_head_axis(bias) != -torch.inf
        visible = finite if visible is None else visible & finite
    if visible is None:
        return keys, values
    of_values = visible
    if visible.dim() > 2 and visible.shape[1] != 1:  # a row is seen by one head or another
        empty = ~visible.any(-1, keepdim=True) if call.empty_rows == "uniform" else False
        visible, of_values = (x.any(1, keepdim=True) for x in (visible, visible | empty))
    pairs = (keys, visible, None), (values, of_values, call.empty_rows)
    return tuple(without_unseen(x[:, None], seen, which)[:, 0] for x, seen, which in pairs)


def join_heads(x: Tensor) -> Tensor:
    """The reverse of `split_heads`."""
    return x.transpose(1, 2).flatten(2)


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """(B, rows, H*d) -> (B, H, rows, d)."""
    return unflatten(x, 2, (num_heads, -1)).transpose(1, 2)


def gradients(function: Callable[..., Any], tensors: Any, needed: Any, grads_out: Any) -> list[Optional[Tensor]]:
    """Gradients of function(*tensors), a tuple; they can be differentiated again, and are 0 for unused tensors.

    needed      for each tensor, whether its gradient is wanted
    grads_out   a gradient, or None, for each result
    """
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # A view of each tensor: so a tensor that was computed from another one is an independent variable here.
        views = [x.view_as(x) if need else x for x, need in zip(tensors, needed)]
        pairs = [
            (out, grad) for out, grad in zip(function(*views), grads_out) if grad is not None and out.requires_grad
        ]
        wanted = [view for view, need in zip(views, needed) if need]
        outs, grads_of_outs = zip(*pairs) if pairs else ((), ())
        found: Any = (None,) * len(wanted)
        if pairs:
            found = torch.autograd.grad(outs, wanted, grads_of_outs, create_graph=create_graph, allow_unused=True)
        grads = iter([torch.zeros_like(x) if grad is None else grad for x, grad in zip(wanted, found)])
    return [next(grads) if need else None for need in needed]
