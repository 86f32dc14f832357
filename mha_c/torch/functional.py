"""Attention as functions of tensors, with gradients by autograd: the twins of `mha_c.functional`.

Shapes: q (B, [H,] Q, D), k (B, [Hkv,] K, D), v (B, [Hkv,] K, Dv), where Hkv divides H and query head h uses key
head h // (H // Hkv).  float32 and float64 are computed natively; bfloat16 and float16 are computed in float32, and the
result is rounded.  Unless said otherwise, arguments mean what they mean in `mha_c.functional`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Optional, overload

import torch
from torch import Tensor
from torch.nn.functional import linear

from .. import functional as of_numpy
from .._arguments import scalars
from .._arguments.calls import is_refusal, refuses_at_the_call
from .._arguments.options import core_corner, core_window, shows_options, unknown_option
from ..errors import ShapeError
from ._call.attention import attend
from ._call.dropout import Rng
from ._call.masks import to_keep_mask
from ._call.records import AttentionCall, AttentionTensors
from ._private import on_cpu
from ._tensors import (
    FLOATS,
    HALVES,
    autocasting,
    check_inputs,
    is_compiling,
    refuse_half_fake,
    refuse_types,
    result_type,
)
from ._twins import twin
from .positions import alibi_slopes, rotary, t5_buckets
from .summary import weights_summary

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .._types import Keywords

    TensorOptions = Keywords[Optional[Tensor], "Rng"]

__all__ = [
    "additive_attention",
    "alibi_slopes",
    "dot_product_attention",
    "merge",
    "rotary",
    "t5_buckets",
    "weights_summary",
]
__dir__ = __all__.copy  # what dir() and completion show


@overload
def dot_product_attention(
    q: Tensor, k: Tensor, v: Tensor, valid_lens: Any = None, *,
    return_weights: Literal[False] = False, return_lse: Literal[False] = False, **options: Unpack[TensorOptions],
) -> Tensor: ...  # fmt: skip
@overload
def dot_product_attention(
    q: Tensor, k: Tensor, v: Tensor, valid_lens: Any = None, *,
    return_weights: bool = False, return_lse: bool = False, **options: Unpack[TensorOptions],
) -> Any: ...  # fmt: skip
@twin(of_numpy.dot_product_attention)
@shows_options
def dot_product_attention(
    q: Tensor, k: Tensor, v: Tensor, valid_lens: Any = None, *,
    return_weights: bool = False, return_lse: bool = False, **options: Unpack[TensorOptions],
) -> Any:  # fmt: skip
    """Attention: softmax(scale q k^T + bias) v over the keys that each query may see.

    >>> import torch, mha_c.torch
    >>> q, k, v = torch.randn(3, 1, 4, 5, 8, requires_grad=True)
    >>> mha_c.torch.functional.dot_product_attention(q, k, v, causal=True).shape
    torch.Size([1, 4, 5, 8])

    Gradients of the output, the weights and lse flow back to q, k, v, bias, relative_bias and sinks; they are 0 for a
    query that gets 0 because it sees no key.

    Parameters
    ----------
    rng : None, int or torch.Generator
        None: torch's generator, so that torch.manual_seed reproduces a run; the same int drops the same weights again.
    """
    try:
        return _attention(q, k, v, None, valid_lens, return_weights, return_lse, **options)
    except (TypeError, ValueError) as error:
        if is_refusal(error):
            raise error.with_traceback(None) from None
        raise


@overload
def additive_attention(
    q: Tensor, k: Tensor, v: Tensor, w_v: Tensor, W_q: Optional[Tensor] = None, W_k: Optional[Tensor] = None,
    valid_lens: Any = None, *,
    return_weights: Literal[False] = False, return_lse: Literal[False] = False, **options: Unpack[TensorOptions],
) -> Tensor: ...  # fmt: skip
@overload
def additive_attention(
    q: Tensor, k: Tensor, v: Tensor, w_v: Tensor, W_q: Optional[Tensor] = None, W_k: Optional[Tensor] = None,
    valid_lens: Any = None, *,
    return_weights: bool = False, return_lse: bool = False, **options: Unpack[TensorOptions],
) -> Any: ...  # fmt: skip
@twin(of_numpy.additive_attention)
@shows_options
def additive_attention(
    q: Tensor, k: Tensor, v: Tensor, w_v: Tensor, W_q: Optional[Tensor] = None, W_k: Optional[Tensor] = None,
    valid_lens: Any = None, *,
    return_weights: bool = False, return_lse: bool = False, **options: Unpack[TensorOptions],
) -> Any:  # fmt: skip
    """Additive (Bahdanau) attention: softmax(scale w_v . tanh(W_q q + W_k k) + bias) v.

    Gradients flow back to all tensors that require them.

    Examples
    --------
    >>> import torch, mha_c.torch
    >>> q, k, v = torch.zeros(1, 1, 2), torch.zeros(1, 2, 2), torch.tensor([[[1.0], [3.0]]])
    >>> mha_c.torch.functional.additive_attention(q, k, v, w_v=torch.ones(2))
    tensor([[[2.]]])
    """
    try:
        check_inputs(w_v=w_v)
        if w_v.dim() != 1:
            raise ShapeError(f"w_v must have shape (h,), got {tuple(w_v.shape)}")
        q = _projected(q, "q", W_q, "W_q", w_v.shape[0])
        k = _projected(k, "k", W_k, "W_k", w_v.shape[0])
        return _attention(q, k, v, w_v, valid_lens, return_weights, return_lse, **options)
    except (TypeError, ValueError) as error:
        if is_refusal(error):
            raise error.with_traceback(None) from None
        raise


@twin(of_numpy.merge)
@refuses_at_the_call
def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Join the attention over some keys (a) and over other keys (b) into the attention over all of them.

    Examples
    --------
    >>> import torch
    >>> from mha_c.torch import functional
    >>> q, k, v = torch.randn(3, 1, 6, 4)
    >>> a = functional.dot_product_attention(q, k[:, :2], v[:, :2], return_lse=True)
    >>> b = functional.dot_product_attention(q, k[:, 2:], v[:, 2:], return_lse=True)
    >>> torch.allclose(functional.merge(*a, *b)[0], functional.dot_product_attention(q, k, v), atol=1e-6)
    True
    """
    check_inputs(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    for name, x, shape in (("lse_a", lse_a, out_a.shape[:-1]), ("out_b", out_b, out_a.shape),
                           ("lse_b", lse_b, out_a.shape[:-1])):  # fmt: skip
        if x.dtype is not out_a.dtype:
            raise TypeError(f"{name} must be {out_a.dtype} like out_a, got {x.dtype}")
        if x.shape != shape:
            raise ShapeError(f"{name} must have shape {tuple(shape)}, got {tuple(x.shape)}")
    if out_a.dtype in HALVES:  # computed in float32, so that the result is rounded once
        out, lse = merge(out_a.float(), lse_a.float(), out_b.float(), lse_b.float())
        return out.to(out_a.dtype), lse.to(out_a.dtype)
    a_is_empty, b_is_empty = torch.isneginf(lse_a), torch.isneginf(lse_b)
    larger = torch.maximum(lse_a, lse_b)
    larger = torch.where(torch.isneginf(larger), torch.zeros_like(larger), larger).detach()
    share_a, share_b = torch.exp(lse_a - larger), torch.exp(lse_b - larger)
    total = torch.where(a_is_empty & b_is_empty, torch.ones_like(larger), share_a + share_b)
    # An empty side may hold NaN; a product with 0 would pass the NaN on to the gradient of the other side's lse.
    kept_a, kept_b = out_a.masked_fill(a_is_empty[..., None], 0.0), out_b.masked_fill(b_is_empty[..., None], 0.0)
    out = kept_a * (share_a / total)[..., None] + kept_b * (share_b / total)[..., None]
    out = torch.where(b_is_empty[..., None], out_a, torch.where(a_is_empty[..., None], out_b, out))
    out = torch.where((a_is_empty & b_is_empty)[..., None], torch.zeros_like(out), out)
    lse = torch.where(b_is_empty, lse_a, torch.where(a_is_empty, lse_b, larger + torch.log(total)))
    return out, lse


def _attention(
    q: Tensor, k: Tensor, v: Tensor, w_v: Optional[Tensor], valid_lens: Any, return_weights: bool, return_lse: bool, *,
    keep_mask: Any = None, bias: Optional[Tensor] = None, causal: Any = False, window: Any = None,
    scale: Optional[float] = None, softcap: Optional[float] = None, relative_bias: Optional[Tensor] = None,
    sinks: Optional[Tensor] = None, dropout: float = 0.0, rng: Rng = None, empty_rows: Any = "zero", **unknown: Any,
) -> Any:  # fmt: skip
    if unknown:
        raise unknown_option(unknown)
    if not (type(q) is type(k) is type(v) is Tensor and q.dtype in FLOATS and bias is relative_bias is sinks is None):
        terms = {"bias": bias, "relative_bias": relative_bias, "sinks": sinks}
        check_inputs(q=q, k=k, v=v, **{name: x for name, x in terms.items() if x is not None})
    if keep_mask is not None:
        keep_mask = to_keep_mask(keep_mask)
    left, right = (-1, -1) if window is None else core_window(window)
    call = AttentionCall(
        valid_lens, None if causal is False else core_corner(causal, q, k), left, right,
        scalars.scale(scale, q.dtype is not torch.float64), dropout, 0, empty_rows, return_weights, return_lse,
        0.0 if softcap is None else scalars.positive(softcap, "softcap"),
    )  # fmt: skip
    found = attend(call, AttentionTensors(q, k, v, w_v, keep_mask, bias, relative_bias, sinks), rng)
    wanted = [x for x, want in zip(found, (True, return_weights, return_lse)) if want]
    if autocasting() and (on_cpu(q) or q.is_meta):
        wanted = [x.to(result_type(q.dtype)) for x in wanted]
    return wanted[0] if len(wanted) == 1 else tuple(wanted)


def _projected(x: Tensor, name: str, weight: Optional[Tensor], weight_name: str, n_out: int) -> Tensor:
    """x (..., features) times weight (n_out, features) transposed."""
    if weight is None:
        return x
    check_inputs(**{name: x, weight_name: weight})
    refuse_half_fake(**{name: x, weight_name: weight})
    if weight.dim() != 2 or x.dim() < 2 or tuple(weight.shape) != (n_out, x.shape[-1]):
        features = x.shape[-1] if x.dim() else "features"
        raise ShapeError(
            f"{weight_name} must have shape (h, features of {name}) = ({n_out}, {features}), "
            f"got {tuple(weight.shape)}; {name} has shape {tuple(x.shape)}"
        )
    if weight.dtype != x.dtype and not is_compiling() and {weight.dtype, x.dtype}.isdisjoint(HALVES):
        refuse_types(**{name: x.dtype, weight_name: weight.dtype})
    return linear(x, weight.to(x.dtype))
