"""Attention in torch's own operations, as in the formulas: differentiable as often and in all ways that torch offers.

Modules and functions use it for what the compiled core cannot do: derivatives of derivatives, forward-mode AD,
torch.func, attention weights in a loss, children that are replaced or hooked.  It is as slow as the book's own code,
and drops the same weights as a call of the core with the same seed.

q (B,H,Q,D), k (B,Hkv,K,D), v (B,Hkv,K,Dv), scores and weights (B,H,Q,K).
"""

from __future__ import annotations

from functools import reduce
from operator import and_
from typing import Any, Callable, NamedTuple, Optional, Union

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from ..._core import dropout_factors
from .._private import has_operators, unflatten
from .._tensors import float32_if_half, has_numbers, optional_array, seed_tensor

Drop = Callable[[Tensor], Tensor]
FEATURES = 1 << 24  # features of additive scores that exist at a time: 64 MiB of float32


class AttentionCall(NamedTuple):
    """The options of a call of attention, in the order of _core.attention_forward.  Its tensors are q, k, v, w_v,
    keep_mask, bias, relative_bias, sinks, in this order everywhere."""

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

    def score_terms(self, relative_bias: Optional[Tensor], sinks: Optional[Tensor]) -> Any:
        """The terms as the core takes them; None if there are none.  BufferError if one has no plain memory."""
        if not self.softcap and relative_bias is None and sinks is None:
            return None
        try:
            return optional_array(relative_bias), self.softcap, optional_array(sinks)
        except (TypeError, RuntimeError) as error:  # device meta; a negated view
            raise BufferError(str(error)) from error


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
        parts.append(_with_head_axis(keep_mask))
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


def with_score_terms(
    scores: Tensor, softcap: float, relative_bias: Optional[Tensor], causal: Any, n_queries: int, n_keys: int
) -> Tensor:
    """Scores (..., Q, K), capped, plus their biases by distance."""
    if softcap:
        least = torch.finfo(scores.dtype).tiny  # as in the core: the cap and its inverse must be normal numbers
        softcap = min(max(softcap, least), 1 / least)
        scores = softcap * torch.tanh(scores / softcap)
    if relative_bias is not None:
        reach = relative_bias.shape[1] // 2
        device = scores.device
        place = torch.arange(n_queries, device=device) + (n_keys - n_queries if causal == "bottom_right" else 0)
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


def seen(
    call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, keep_mask: Optional[Tensor], bias: Optional[Tensor]
) -> tuple[Tensor, Tensor, Tensor, Optional[Tensor], Optional[Tensor]]:
    """q, k, v and bias with an axis for heads, and `visible_keys`; keys and values that no query sees become 0."""
    q, k, v = (_with_head_axis(x) for x in (q, k, v))
    visible = visible_keys(q, k, call.valid_lens, keep_mask, call.causal, call.window_left, call.window_right)
    if bias is not None:
        bias = _with_head_axis(bias)
        visible = bias != -torch.inf if visible is None else visible & (bias != -torch.inf)
    if visible is not None:
        k, v = without_unseen(k, visible, None), without_unseen(v, visible, call.empty_rows)
    return q, k, v, bias, visible


def attend(
    q: Tensor, k: Tensor, v: Tensor, w_v: Optional[Tensor] = None, *, visible: Optional[Tensor] = None,
    bias: Optional[Tensor] = None, causal: Any = None, scale: Optional[float] = None, empty_rows: str = "zero",
    drop: Optional[Drop] = None, relative_bias: Optional[Tensor] = None, softcap: float = 0.0,
    sinks: Optional[Tensor] = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(out, weights before dropout, lse) from the results of `seen`."""
    group = q.shape[1] // max(k.shape[1], 1)
    k, v = (x if group == 1 else x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = scores_of(q, k, w_v, scale)
    scores = with_score_terms(scores, softcap, relative_bias, causal, q.shape[-2], k.shape[-2])
    weights, lse = softmax(scores if bias is None else scores + bias, visible, empty_rows, sinks)
    return (weights if drop is None else drop(weights)).to(v.dtype) @ v, weights, lse


def attention(call: AttentionCall, drop: Optional[Drop], *tensors: Any) -> tuple[Tensor, ...]:
    """(out, weights before dropout, lse) from the tensors of a call; shapes as in `functional`, with q's axes."""
    q, k, v, w_v, keep_mask, bias, relative_bias, sinks = tensors
    rank = q.dim()
    q, k, v, bias, visible = seen(call, q, k, v, keep_mask, bias)
    found = attend(
        q, k, v, w_v, visible=visible, bias=bias, causal=call.causal, scale=call.scale, empty_rows=call.empty_rows,
        drop=drop, relative_bias=relative_bias, softcap=call.softcap, sinks=sinks,
    )  # fmt: skip
    return found if rank == 4 else tuple(x[:, 0] for x in found)


def heads_of(
    queries: Tensor, keys: Tensor, values: Optional[Tensor], weights: Any, biases: Any, num_heads: int,
    valid_lens: Any = None, empty_rows: str = "uniform", finite: bool = False,
) -> tuple[Tensor, Tensor, Any, Optional[Tensor]]:  # fmt: skip
    """q, k, v (B, H, rows, d) of inputs (B, rows, .), projected by W_q, W_k, W_v, and `visible_keys`; v may be None.

    finite  keys and values that no query sees are finite: they have no influence and are not replaced by zeros
    """
    visible = visible_keys(queries, keys, valid_lens)
    if visible is not None and not finite:
        keys = without_unseen(keys[:, None], visible, None)[:, 0]
        values = None if values is None else without_unseen(values[:, None], visible, empty_rows)[:, 0]

    def split(x: Tensor, i: int) -> Tensor:
        projected = x if weights[i] is None else linear(x, weights[i], biases[i])
        return unflatten(projected, 2, (num_heads, -1)).transpose(1, 2)

    return split(queries, 0), split(keys, 1), None if values is None else split(values, 2), visible


def joined(context: Tensor, weight: Optional[Tensor], bias: Optional[Tensor]) -> Tensor:
    """The output (B, Q, .): heads (B, H, Q, d), joined and projected by W_o."""
    heads = context.transpose(1, 2).flatten(2)
    return heads if weight is None else linear(heads, weight, bias)


def layer(
    queries: Tensor, keys: Tensor, values: Tensor, weights: Any, biases: Any, w_v: Optional[Tensor],
    num_heads: int, valid_lens: Any = None, empty_rows: str = "uniform", drop: Optional[Drop] = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out (B,Q,.), attention weights (B,H,Q,K)) of inputs (B,rows,.); weights and biases of W_q, W_k, W_v, W_o."""
    q, k, v, visible = heads_of(queries, keys, values, weights, biases, num_heads, valid_lens, empty_rows)
    context, attention_weights, _ = attend(q, k, v, w_v, visible=visible, empty_rows=empty_rows, drop=drop)
    return joined(context, weights[3], biases[3]), attention_weights


def layer_weights(
    queries: Tensor, keys: Tensor, weights: Any, biases: Any, w_v: Optional[Tensor], num_heads: int,
    valid_lens: Any = None, empty_rows: str = "uniform",
) -> Tensor:  # fmt: skip
    """Only the attention weights of `layer`."""
    q, k, _, visible = heads_of(queries, keys, None, weights, biases, num_heads, valid_lens, empty_rows)
    return softmax(scores_of(q, k, w_v), visible, empty_rows)[0]


def core_dropout(p: float, seed: Union[int, Tensor, None]) -> Optional[Drop]:
    """The dropout of weights (B, H, Q, K) that the core does with this seed."""
    if not p or seed is None:
        return None
    number: Any = seed_tensor(seed) if has_operators and not isinstance(seed, Tensor) else seed
    factors_of: Any = torch.ops.mha_c.dropout_factors if has_operators else _factors

    def drop(weights: Tensor) -> Tensor:
        factors: Tensor = factors_of(weights.detach(), p, number)
        return weights * factors

    return drop


def _factors(weights: Tensor, p: float, seed: int) -> Tensor:
    """The same without an operator: constants, which also a transform can take, as only the shape is asked for."""
    if weights.is_meta:
        return weights
    like = np.empty(tuple(weights.shape), np.float64 if weights.dtype is torch.float64 else np.float32)
    return torch.from_numpy(dropout_factors(like, p, seed))


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


def _with_head_axis(x: Tensor) -> Tensor:
    """(B, rows, columns) -> (B, 1, rows, columns); rank 2 broadcasts, rank 4 stays."""
    return x.unsqueeze(1) if x.dim() == 3 else x


def without_unseen(x: Tensor, visible: Tensor, empty_rows: Optional[str]) -> Tensor:
    """x (B, H, K, features) with zeros in the rows that no query sees; uniform empty rows see all values."""
    seen = visible.any(-2)
    if empty_rows == "uniform":
        seen = seen | ~visible.any(-1).all(-1, keepdim=True)
    if seen.dim() > 2 and seen.shape[1] not in (1, x.shape[1]):  # query heads that share a key head
        seen = unflatten(seen, 1, (x.shape[1], -1)).any(2)
    return torch.where(seen.unsqueeze(-1), x, 0.0)


def without_padding(queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Any, empty_rows: str) -> Any:
    """keys and values (B, K, .) with zeros in the rows that no query sees: NaN there, times a weight of 0, is NaN."""
    visible: Any = visible_keys(queries, keys, valid_lens)
    seen = without_unseen(keys[:, None], visible, None)[:, 0]
    return seen, without_unseen(values[:, None], visible, empty_rows)[:, 0]


def without_spoilt(keys: Tensor, values: Tensor, valid_lens: Tensor, empty_rows: str) -> tuple[Tensor, ...]:
    """keys and values (B, K, .) with 0 for numbers that are not finite; and for each of them a tensor (B, 1, Q, 1) to
    add to results: NaN for queries that see a row with such numbers, 0 for all other queries.  valid_lens (B, Q)."""
    lens, n_keys = float32_if_half(valid_lens).to(keys.device, non_blocking=True), keys.shape[1]
    found = []
    for x in (keys, values):
        finite = x.isfinite()
        first = torch.where(finite.all(-1), n_keys, torch.arange(n_keys, device=x.device)).amin(-1, keepdim=True)
        sees = first < lens
        if x is values and empty_rows == "uniform":
            sees = sees | (lens <= 0)
        sees = sees & (first < n_keys)  # if all rows are finite, also for lengths above n_keys
        found.append((torch.where(finite, x, 0.0), torch.where(sees, torch.nan, 0.0).to(x.dtype)[:, None, :, None]))
    (keys, of_keys), (values, of_values) = found
    return keys, values, of_keys, of_values
