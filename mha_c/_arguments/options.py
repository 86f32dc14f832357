"""Converts the keywords of `mha_c.functional` to the arguments of the compiled core; applies W_q and W_k if additive.

`core_options` has all keywords and their defaults; the functions pass keywords on unchanged.
"""

from __future__ import annotations

import inspect
import math
from functools import partial
from typing import TYPE_CHECKING, Any, Optional

import numpy as np

from .._core import linear
from ..errors import ShapeError
from . import scalars
from .arrays import INT64, floats, is_tensor, like_input, to_array, to_lengths
from .masks import to_keep_mask
from .names import did_you_mean
from .scalars import LateSeed

if TYPE_CHECKING:
    from .._types import Array, Causal, Corner, EmptyRows, RngLike, Window

    # relative_bias, softcap (0: none), sinks
    Terms = Optional[tuple[Optional[Array], float, Optional[Array]]]

    # valid_lens, keep_mask, bias, causal, window_left, window_right, scale, dropout, seed, empty_rows, terms
    CoreOptions = tuple[Any, Any, Any, Any, int, int, Optional[float], float, int, EmptyRows, Terms]

CORNERS = "top_left", "bottom_right"


def core_options(
    q: Array, k: Array, valid_lens: Any = None, *, keep_mask: Any = None, bias: Any = None, causal: Causal = False,
    window: Window = None, scale: Optional[float] = None, softcap: Optional[float] = None, relative_bias: Any = None,
    sinks: Any = None, dropout: float = 0.0, rng: RngLike = None, empty_rows: EmptyRows = "zero", **unknown: Any,
) -> CoreOptions:  # fmt: skip
    """The options in the form and order of the core; `_types.AttentionOptions` lists them for type checkers."""
    if unknown:
        raise unknown_option(unknown)
    terms = None
    if softcap is not None or relative_bias is not None or sinks is not None:
        terms = (
            None if relative_bias is None else to_array(relative_bias, "relative_bias"),
            0.0 if softcap is None else scalars.positive(softcap, "softcap"),
            None if sinks is None else to_array(sinks, "sinks"),
        )
    left, right = (-1, -1) if window is None else core_window(window)
    return (
        None if valid_lens is None else to_lengths(valid_lens),
        None if keep_mask is None else to_keep_mask(keep_mask),
        None if bias is None else to_array(bias, "bias"),
        None if causal is False else core_corner(causal, q, k),
        left,
        right,
        None if scale is None else scalars.scale(scale, q.dtype.type is np.float32),
        dropout,
        0 if rng is None and not dropout else core_seed(rng, dropout),
        empty_rows,
        terms,
    )


OPTIONS = {
    name: one for name, one in inspect.signature(core_options).parameters.items() if one.kind is one.KEYWORD_ONLY
}


# A function has no layer whose class would tell the axes: what a mask of this name means to torch.
_ADDED = "where True = may attend; a mask of numbers that are added is bias={0}; where True hides, it is keep_mask=~{0}"
_INSTEAD = {
    **{name: f"write keep_mask={name}, {_ADDED.format(name)}" for name in ("mask", "attn_mask")},
    "attention_mask": "write keep_mask=attention_mask[:, None, None] of a mask (B, K), where 1 = may attend",
    "key_padding_mask": "write keep_mask=~key_padding_mask[:, None, None] of a mask (B, K), whose True hides",
    "enable_gqa": "leave it out: fewer heads of keys than of queries are enough",
}


def unknown_option(unknown: Any) -> TypeError:
    name, named = next(iter(unknown)), ", ".join(OPTIONS)
    guess = did_you_mean(name, (*OPTIONS, "valid_lens", "return_weights", "return_lse"))
    guess = f": {_INSTEAD[name]}." if name in _INSTEAD else guess
    return TypeError(f"unexpected keyword argument {name!r}{guess or ';'} The options of attention are {named}")


def shows_options(function: Any) -> Any:
    """Decorates a function (..., **options): help() and editors show the names of OPTIONS."""
    *others, _ = inspect.signature(function).parameters.values()
    first = sum(one.kind is not one.KEYWORD_ONLY for one in others)
    function.__signature__ = inspect.Signature([*others[:first], *OPTIONS.values(), *others[first:]])
    return function


def check_causal(causal: Causal) -> None:
    if not (causal is None or isinstance(causal, (bool, np.bool_)) or (isinstance(causal, str) and causal in CORNERS)):
        kind = ValueError if isinstance(causal, str) else TypeError
        raise kind(f"causal must be False, True, 'top_left' or 'bottom_right', got {causal!r}")


def check_causal_steps(causal: Causal) -> None:
    """Refuse what a call with a cache cannot be: each of its new steps sees itself and those before it, or less."""
    check_causal(causal)
    if isinstance(causal, str) and causal == "top_left":
        raise ValueError(
            "causal='top_left' lets new step i see keys 0..i, but behind the steps in a cache it is step "
            "len(cache) + i: a call with a cache is causal from its last key, so leave causal out"
        )


def core_corner(causal: Causal, q: Any, k: Any) -> Optional[Corner]:
    """`causal` as the core takes it: None, "top_left" or "bottom_right"."""
    check_causal(causal)
    if not causal or isinstance(causal, str):
        return causal or None
    n_queries, n_keys = (array.shape[-2] if array.ndim > 1 else 0 for array in (q, k))
    if n_queries != n_keys:
        raise ValueError(
            f"causal=True is ambiguous for {n_queries} queries and {n_keys} keys: write 'top_left' (query i sees keys "
            f"0..i) or 'bottom_right' (the last query sees the last key, as in decoding with earlier keys)"
        )
    return "top_left"


def causal_lengths(causal: Causal, queries: Any, keys: Any, valid_lens: Any) -> Any:
    """Lengths (B, Q) that hide what a causal mask hides, and what valid_lens hide: the form in which a layer's call has
    this mask.  Of arrays or tensors (B, rows, .); what does not fit together is left to the core, which refuses it."""
    corner, lens = core_corner(causal, queries, keys), to_lengths(valid_lens)
    batch, n_queries, n_keys = (*queries.shape[:2], keys.shape[1]) if queries.ndim == keys.ndim == 3 else (0, 0, 0)
    if corner is None or (lens is not None and lens.shape not in ((batch,), (batch, n_queries))):
        return lens
    first = 1 if corner == "top_left" else 1 + n_keys - n_queries
    seen = np.empty((batch, n_queries), INT64)
    seen[:] = np.arange(first, first + n_queries)
    if first < 0:
        np.maximum(seen, 0, out=seen)  # no lengths of the caller's, so no warning of lengths below 0
    return seen if lens is None else np.minimum(seen, lens[:, None] if lens.ndim == 1 else lens)


def core_window(window: Any) -> tuple[int, int]:
    """(left, right) as the core takes them: -1 means no limit."""
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        pair = (
            f": write ({window}, {window}), or ({window}, 0) for earlier keys only"
            if type(window) is int and window > 0
            else ""
        )
        raise TypeError(f"window must be None or a pair (left, right), got {window!r}{pair}")
    left, right = (-1 if side is None else scalars.whole(side, "window", least=0, most=math.inf) for side in window)
    return left, right


def core_seed(rng: RngLike, dropout: Any) -> Any:
    """The seed of this call's dropout; drawn from a Generator only if dropout is above 0, and by the core."""
    if isinstance(rng, (int, np.integer)):
        return scalars.seed(rng)
    stream = scalars.generator(rng)
    return LateSeed(partial(scalars.draw_seed, stream)) if dropout else 0


def additive_features(q: Any, k: Any, w_v: Any, W_q: Any, W_k: Any) -> tuple[Any, Any, Array]:
    """The operands of additive scores: q and k with h features, and w_v (h,)."""
    w_v = to_array(w_v, "w_v")
    if w_v.ndim != 1:
        raise ShapeError(f"w_v must have shape (h,), got {w_v.shape}")
    q = q if W_q is None else projected(q, "q", W_q, "W_q", w_v.shape[0])
    k = k if W_k is None else projected(k, "k", W_k, "W_k", w_v.shape[0])
    return q, k, w_v


def projected(x: Any, name: str, weight: Any, weight_name: str, n_out: int) -> Any:
    """x (..., features) times weight (n_out, features) transposed."""
    array, W = floats(to_array(x, name), name), to_array(weight, weight_name)
    if array.ndim not in (3, 4):
        raise ShapeError(f"{name} must have shape (B, [H,] rows, features), got {array.shape}")
    if W.shape != (n_out, array.shape[-1]):
        wanted = f"(h, features of {name}) = ({n_out}, {array.shape[-1]})"
        raise ShapeError(f"{weight_name} must have shape {wanted}, got {W.shape}; {name} has shape {array.shape}")
    if W.dtype.type is not array.dtype.type:
        raise TypeError(f"{weight_name} must have the type of {name}, {array.dtype}, got {W.dtype}")
    return like_input(linear(array, (W, None)), is_tensor(x))
