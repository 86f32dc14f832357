"""Layers and attention by torch's own operations: on all devices other than the CPU, and in exported programs.

An exported program (torch.export, torch.jit.trace, ONNX) runs without mha_c, perhaps without Python, so it must not
contain our operators; and the core cannot read a GPU's memory.  Attention is torch's scaled_dot_product_attention: it
needs no array of all scores where torch has a kernel for that, and it is the operator Attention of ONNX since opset 23.
`mathematics` does what it cannot do (additive scores, caps, sinks, weights as a result, further derivatives).
Dropout is torch's own, with the generator of the device.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Optional

import torch
from torch import Tensor
from torch.nn.functional import dropout as torch_dropout

from .._private import fused_attention, has_operators, in_functorch, in_transform, on_cpu, tracing_state
from .._tensors import HALVES, autocast_on, draw_seed_for_torch, exporting, float32_if_half
from . import mathematics
from .mathematics import AttentionCall, Drop


def dropout_of(p: float, rng: Any = None) -> Optional[Drop]:
    """torch's own dropout; `rng`, a generator or a seed, decides what is dropped if it is given."""
    if not p:
        return None

    def drop(weights: Tensor) -> Tensor:
        if rng is None:
            return torch_dropout(weights, p)
        if p == 1 or weights.is_meta:
            return weights * 0
        generator = rng if isinstance(rng, torch.Generator) else torch.Generator(weights.device).manual_seed(rng)
        return weights * (torch.empty_like(weights).bernoulli_(1 - p, generator=generator) / (1 - p))

    return drop


def drops_as_core(x: Tensor) -> bool:
    """Whether a call drops what the core would drop.  In torch.func it takes an operator to draw for each example."""
    return on_cpu(x) and not exporting() and (has_operators or not in_functorch())


def says(q: Tensor, k: Tensor) -> bool:
    """Whether scaled_dot_product_attention can compute these here, including derivatives that a transform needs."""
    if fused_attention is None:
        return False
    if exporting():  # ONNX from TorchScript does not know it in float64
        return not (tracing_state() is not None and q.dtype is torch.float64)
    return not (on_cpu(q) or in_transform()) and k.shape[-2] > 0 and q.shape[-1] > 0


def fused(
    q: Tensor, k: Tensor, v: Tensor, visible: Optional[Tensor], empty_rows: str, dropout: float,
    scale: Optional[float] = None, bias: Optional[Tensor] = None, causal: bool = False,
) -> Tensor:  # fmt: skip
    """softmax(scale q k^T + bias) v of q (B,H,Q,D), k, v (B,Hkv,K,.); visible and bias broadcast to (B,H,Q,K).

    causal  query i sees keys 0..i; only without `visible` and bias
    """
    grouped = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
    if visible is None:
        return fused_attention(q, k, v, bias, dropout, causal, scale=scale, **grouped)
    there = torch.zeros((), dtype=q.dtype, device=q.device) if bias is None else bias
    empty = ~visible.any(-1, keepdim=True)
    # Equal scores of 0 make an empty row uniform; no gradient flows back to its query, nor from it to the keys.
    q = torch.where(empty, 0.0, q)
    added = torch.where(visible, there, torch.where(empty, 0.0, -torch.inf).to(q.dtype))
    if tracing_state() is None:  # a row for each query: onnxruntime's Attention needs such a mask
        added = added.expand(*added.shape[:-2], q.shape[-2], k.shape[-2])
    out = fused_attention(q, k, v, added, dropout, scale=scale, **grouped)
    return out if empty_rows == "uniform" else torch.where(empty, 0.0, out)


def layer(
    inputs: Any, parameters: Any, options: Any, stays: bool = False
) -> tuple[Tensor, Any, None]:  # fmt: skip
    """(out, the attention weights or what they are computed from, None), as in `ways.call_operator`.

    stays   keys and values are a decoder's projected ones, which nobody changes and which are finite
    """
    (queries, keys, values), (*parameters, w_v) = inputs, parameters
    valid_lens, num_heads, empty_rows, dropout = options
    weights, biases = parameters[:4], parameters[4:]
    of_keys: Optional[Tensor] = None  # for this and of_values see `mathematics.without_spoilt`
    if valid_lens is not None and valid_lens.dim() == 2 and keys.shape[1] and not (stays or exporting()):
        keys, values, of_keys, of_values = mathematics.without_spoilt(keys, values, valid_lens, empty_rows)
    q, k, v, visible = mathematics.heads_of(
        queries, keys, values, weights, biases, num_heads, valid_lens, empty_rows, stays
    )
    saved: Any
    if w_v is None and says(q, k):
        context = fused(q, k, v, visible, empty_rows, dropout)
        if not (stays or exporting()):  # copy what belongs to the caller, who may change it
            q, k = (x.clone() if W is None else x for x, W in zip((q, k), weights))
            valid_lens = None if valid_lens is None else valid_lens.clone()
        saved = "scored", Scored(q, k, valid_lens, empty_rows, of_keys)
    else:
        if not drops_as_core(queries):
            drop = dropout_of(dropout)
        else:  # drop what the core would drop
            drop = mathematics.core_dropout(dropout, draw_seed_for_torch() if dropout else None)
        context, found, _ = in_float32(q, k, v, w_v, visible=visible, empty_rows=empty_rows, drop=drop)
        saved = "tensor", found if of_keys is None else found + torch.where(visible, of_keys, 0.0)
    out = mathematics.joined(context, weights[3], biases[3])
    return (out if of_keys is None else out + (of_keys + of_values)[:, 0]), saved, None


def without_autocast(q: Tensor) -> Any:
    return torch.autocast(q.device.type, enabled=False) if autocast_on(q) else nullcontext()


def in_float32(q: Tensor, k: Tensor, v: Tensor, w_v: Optional[Tensor], **options: Any) -> tuple[Tensor, ...]:
    """`mathematics.attend`, which computes 16-bit floats in float32 here, also under autocast."""
    dtype = q.dtype
    if w_v is None:
        k, v = float32_if_half(k), float32_if_half(v)  # else unchanged: their sums with q have the wider type
    with without_autocast(q):
        found = mathematics.attend(float32_if_half(q), k, v, float32_if_half(w_v), **options)
    return tuple(x.to(dtype) for x in found) if dtype in HALVES else found


class Scored:
    """What determines the attention weights of a fused call, like `autograd.WeightsSource` for a call of the core.

    torch.export does not look into this object; it would report tensors that a module gets during a call as an error.
    """

    __slots__ = ("empty_rows", "k", "of_keys", "q", "valid_lens")
    versions = ()  # no tensor here can be changed by others

    def __init__(
        self, q: Tensor, k: Tensor, valid_lens: Optional[Tensor], empty_rows: str, of_keys: Optional[Tensor]
    ) -> None:
        self.q, self.k, self.valid_lens, self.empty_rows, self.of_keys = q, k, valid_lens, empty_rows, of_keys

    @property
    def shape(self) -> tuple[int, ...]:
        """(B, H, Q, K)."""
        return (*self.q.shape[:3], self.k.shape[2])

    def needs_grad(self) -> bool:
        return bool(self.q.requires_grad or self.k.requires_grad)

    def arguments(self) -> tuple[Tensor, Tensor]:
        return self.q, self.k

    def has_changed(self) -> bool:
        return False

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        """The weights (B, H, Q, K), computed from `arguments`."""
        visible = mathematics.visible_keys(q, k, self.valid_lens)
        with without_autocast(q):
            scores = mathematics.dot_product_scores(float32_if_half(q), float32_if_half(k))
            weights = mathematics.softmax(scores, visible, self.empty_rows)[0].to(q.dtype)
        return weights if self.of_keys is None else weights + torch.where(visible, self.of_keys, 0.0)


def attention(call: AttentionCall, drop: Optional[Drop], plain: bool, *tensors: Any) -> tuple[Any, ...]:
    """(out, weights, lse) as in `mathematics.attention`; weights and lse may be None where only the output is wanted.

    plain   only the output is wanted, and dropout uses torch's own generator
    """
    q, k, v, w_v, keep_mask, bias, relative_bias, sinks = tensors
    terms = bool(call.softcap) or relative_bias is not None or sinks is not None
    if not plain or w_v is not None or terms or not says(q, k):
        with without_autocast(q):
            return mathematics.attention(call, drop, *map(float32_if_half, tensors))
    rank, causal = q.dim(), call.causal
    all_seen = call.valid_lens is keep_mask is bias is None and call.window_left < 0 and call.window_right < 0
    if all_seen and causal is not None and not exporting() and (causal == "top_left" or q.shape[-2] == k.shape[-2]):
        q, k, v = (x.unsqueeze(1) if rank == 3 else x for x in (q, k, v))
        out = fused(q, k, v, None, call.empty_rows, call.dropout, call.scale, causal=True)
    else:
        q, k, v, bias, visible = mathematics.seen(call, q, k, v, keep_mask, bias)
        out = fused(q, k, v, visible, call.empty_rows, call.dropout, call.scale, bias)
    return (out if rank == 4 else out[:, 0]), None, None
