"""Attention as functions of arrays: dot_product_attention, additive_attention, their gradients, merge, positions.

Shapes: q (B, [H,] Q, D), k (B, [Hkv,] K, D), v (B, [Hkv,] K, Dv), where Hkv divides H and query head h uses key head
h // (H // Hkv).  All arrays of a call are float32, or all are float64, and the results have the same type.  CPU tensors
without gradient give tensors.  The functions differ from the layers in two points: by default a query without visible
keys gets 0 (a layer: the mean of all values), and dropout acts whenever it is above 0 (a layer: in training mode only).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Optional, overload

import numpy as np

from ._arguments import scalars
from ._arguments.arrays import like_input, of_one_type, to_arrays
from ._arguments.calls import is_refusal, refuses_at_the_call
from ._arguments.options import additive_features, core_options, shows_options
from ._core import attention_forward
from ._gradients import additive_attention_backward, dot_product_attention_backward
from ._summary import Scores, WeightsSummary, summarize
from .errors import ShapeError
from .positions import alibi_slopes, rotary, rotary_backward, t5_buckets

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Unpack

    from ._types import Array, AttentionOptions, Causal, EmptyRows, Real, Window

__all__ = [
    "WeightsSummary",
    "additive_attention",
    "additive_attention_backward",
    "alibi_slopes",
    "dot_product_attention",
    "dot_product_attention_backward",
    "merge",
    "rotary",
    "rotary_backward",
    "t5_buckets",
    "weights_summary",
]
__dir__ = __all__.copy  # what dir() and completion show


@overload
def dot_product_attention(
    q: NDArray[Real], k: NDArray[Real], v: NDArray[Real], valid_lens: Any = None, *,
    return_weights: Literal[False] = False, return_lse: Literal[False] = False, **options: Unpack[AttentionOptions],
) -> NDArray[Real]: ...  # fmt: skip
@overload
def dot_product_attention(
    q: Any, k: Any, v: Any, valid_lens: Any = None, *,
    return_weights: bool = False, return_lse: bool = False, **options: Unpack[AttentionOptions],
) -> Any: ...  # fmt: skip
@shows_options
def dot_product_attention(
    q: Any, k: Any, v: Any, valid_lens: Any = None, *,
    return_weights: bool = False, return_lse: bool = False, **options: Unpack[AttentionOptions],
) -> Any:  # fmt: skip
    """Attention: softmax(scale q k^T + bias) v over the keys that each query may see.

    >>> import numpy as np
    >>> from mha_c import functional
    >>> q, k = np.zeros((1, 3, 4)), np.zeros((1, 3, 4))
    >>> v = np.array([[[1.0], [2.0], [6.0]]])
    >>> functional.dot_product_attention(q, k, v, causal=True)[0, :, 0]
    array([1. , 1.5, 3. ])

    Parameters
    ----------
    q : array (B, [H,] Q, D)
        Queries.  All arrays of a call have one type, float32 or float64.
    k : array (B, [Hkv,] K, D)
        Keys; Hkv divides H.
    v : array (B, [Hkv,] K, Dv)
        Values.  Keys and values that no query sees are never read.
    valid_lens : array_like (B,) or (B, Q), optional
        How many keys of an item, or of a query, count: integers, or floats, which are rounded up.
    keep_mask : bool array, optional
        True where a query may see a key.  Its shape is (Q, K), or has the rank of the scores and broadcasts to theirs.
    bias : array, optional
        Added to the scaled scores; the same shapes as keep_mask.  A query whose row is all -inf sees no key.
    causal : {False, True, "top_left", "bottom_right"}
        "top_left": query i sees keys 0..i.  "bottom_right": query i sees keys 0..i + K - Q, so that the last query sees
        all keys.  True is allowed if Q = K: both are the same then.
    window : tuple (left, right), optional
        Query i sees key j when i - left <= j <= i + right; None on a side means no limit on that side.  With
        causal="bottom_right", i + K - Q takes the place of i.
    scale : float, optional
        Factor of the scores.  Default: 1/sqrt(D).
    softcap : float, optional
        Above 0: scaled scores become softcap * tanh(score / softcap), before anything is added to them.
    relative_bias : array (H, 2R + 1), optional
        Column R + d is added to the score of query i and key j, where d is the distance j - i, clipped to -R..R, with i
        counted as for `window`; see `alibi_slopes`, `t5_buckets`.
    sinks : array (H,), optional
        One more score for each row of a head.  It takes a share of the weight but has no value, so that rows of weights
        sum to less than 1.  With sinks, a query without visible keys gets 0, whatever empty_rows says.
    dropout : float
        Each weight is dropped with this probability.
    rng : None, int or numpy.random.Generator
        Random numbers for dropout.  The same int drops the same weights again; a Generator is asked for one such int.
    empty_rows : {"zero", "uniform"}
        What a query without visible keys gets; "uniform" is the mean of all values.
    return_weights : bool
        Also return the weights.
    return_lse : bool
        Also return the log-sum-exp.

    Returns
    -------
    out : array (B, [H,] Q, Dv)
        Returned alone, not in a tuple, if nothing else is asked for.
    weights : array (B, [H,] Q, K)
        With return_weights: the weights before dropout, exactly 0 for a key that a query does not see.
    lse : array (B, [H,] Q)
        With return_lse: natural log of the sum of exp(score) over visible keys and sink; -inf for a row with neither.

    Raises
    ------
    ShapeError
        If shapes do not match; a ValueError.
    TypeError
        If types differ or are not those above.
    ValueError
        If an option or a length has a value that is not allowed.

    Notes
    -----
    torch's scaled_dot_product_attention(attn_mask=...) is keep_mask for a bool mask and bias for a float one;
    its is_causal=True is causal="top_left".  Source: Vaswani et al. 2017; lse as in Dao 2023, FlashAttention-2;
    softcap as in Gemma 2, sinks as in gpt-oss, relative_bias as in T5 and ALiBi.
    """
    try:
        return _attention(q, k, v, None, valid_lens, options, (return_weights, return_lse))
    except (TypeError, ValueError) as error:
        if is_refusal(error):
            raise error.with_traceback(None) from None
        raise


@overload
def additive_attention(
    q: NDArray[Real], k: NDArray[Real], v: NDArray[Real], w_v: NDArray[Real],
    W_q: Optional[NDArray[Real]] = None, W_k: Optional[NDArray[Real]] = None, valid_lens: Any = None, *,
    return_weights: Literal[False] = False, return_lse: Literal[False] = False, **options: Unpack[AttentionOptions],
) -> NDArray[Real]: ...  # fmt: skip
@overload
def additive_attention(
    q: Any, k: Any, v: Any, w_v: Any, W_q: Any = None, W_k: Any = None, valid_lens: Any = None, *,
    return_weights: bool = False, return_lse: bool = False, **options: Unpack[AttentionOptions],
) -> Any: ...  # fmt: skip
@shows_options
def additive_attention(
    q: Any, k: Any, v: Any, w_v: Any, W_q: Any = None, W_k: Any = None, valid_lens: Any = None, *,
    return_weights: bool = False, return_lse: bool = False, **options: Unpack[AttentionOptions],
) -> Any:  # fmt: skip
    """Additive (Bahdanau) attention: softmax(scale w_v . tanh(W_q q + W_k k) + bias) v.

    >>> import numpy as np
    >>> from mha_c import functional
    >>> v = np.array([[[1.0], [3.0]]])
    >>> functional.additive_attention(np.zeros((1, 1, 2)), np.zeros((1, 2, 2)), v, w_v=np.ones(2))
    array([[[2.]]])

    Parameters
    ----------
    q : array (B, [H,] Q, query_size)
        Queries.  They have h features where W_q is None.
    k : array (B, [Hkv,] K, key_size)
        Keys.  They have h features where W_k is None.
    v : array (B, [Hkv,] K, Dv)
        Values.  Keys and values that no query sees are never read.
    w_v : array (h,)
        Weights of the h features.
    W_q : array (h, query_size), optional
        Projection of q; None where q is projected already.
    W_k : array (h, key_size), optional
        Projection of k; None where k is projected already.
    valid_lens, keep_mask, bias, causal, window : as in `dot_product_attention`
        What each query sees.
    scale : float, optional
        Factor of the scores.  Default: 1.
    softcap, relative_bias, sinks, dropout, rng, empty_rows : as in `dot_product_attention`
        How scores become weights.
    return_weights, return_lse : bool
        Also return the weights, the log-sum-exp, or both.  Errors are those of `dot_product_attention`.

    Returns
    -------
    array (B, [H,] Q, Dv)
        The output; if more is asked for, a tuple: output, then weights, then lse.

    Notes
    -----
    The (B, Q, K, h) array of features that d2l builds never exists.  Source: Bahdanau, Cho and Bengio 2014.
    """
    try:
        q, k, w_v = additive_features(q, k, w_v, W_q, W_k)
        return _attention(q, k, v, w_v, valid_lens, options, (return_weights, return_lse))
    except (TypeError, ValueError) as error:
        if is_refusal(error):
            raise error.with_traceback(None) from None
        raise


@overload
def merge(
    out_a: NDArray[Real], lse_a: NDArray[Real], out_b: NDArray[Real], lse_b: NDArray[Real]
) -> tuple[NDArray[Real], NDArray[Real]]: ...
@overload
def merge(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> tuple[Any, Any]: ...
@refuses_at_the_call
def merge(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> tuple[Any, Any]:
    """Join the attention over some keys (a) and over other keys (b) into the attention over all of them.

    >>> import numpy as np
    >>> from mha_c import functional
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 1, 6, 4))
    >>> whole, lse = functional.dot_product_attention(q, k, v, return_lse=True)
    >>> a = functional.dot_product_attention(q, k[:, :2], v[:, :2], return_lse=True)
    >>> b = functional.dot_product_attention(q, k[:, 2:], v[:, 2:], return_lse=True)
    >>> np.allclose(functional.merge(*a, *b)[0], whole)
    True

    Parameters
    ----------
    out_a, lse_a : array (B, [H,] Q, Dv), (B, [H,] Q)
        Results of a call with return_lse=True (without dropout), of one type.
    out_b, lse_b : array (B, [H,] Q, Dv), (B, [H,] Q)
        Results of such a call for the same queries over other keys.

    Returns
    -------
    out : array (B, [H,] Q, Dv)
        If a query saw no key in one call (lse -inf): the row of the other call, bit for bit.  If in neither: 0.
    lse : array (B, [H,] Q)
        Over all keys; -inf if a query saw no key in either call.

    Raises
    ------
    ShapeError
        If shapes differ.
    TypeError
        If types differ.

    Notes
    -----
    Source: FlashAttention and ring attention join blocks by this rule.  All logarithms are natural.
    """
    named = (out_a, "out_a"), (lse_a, "lse_a"), (out_b, "out_b"), (lse_b, "lse_b")
    arrays, as_tensor = to_arrays(*named)
    _check_parts(dict(zip(("out_a", "lse_a", "out_b", "lse_b"), arrays)))
    a, log_a, b, log_b = arrays
    a_is_empty, b_is_empty = np.isneginf(log_a), np.isneginf(log_b)
    larger = np.maximum(log_a, log_b)
    larger = np.where(np.isneginf(larger), larger.dtype.type(0), larger)
    with np.errstate(invalid="ignore", over="ignore"):  # NaN and +inf in, NaN out, as from one softmax
        share_a, share_b = np.exp(log_a - larger), np.exp(log_b - larger)
        total = share_a + share_b
        total[a_is_empty & b_is_empty] = 1
        lse = larger + np.log(total)
        out = a * (share_a / total)[..., None] + b * (share_b / total)[..., None]
    # np.where, not a product with 0: an empty side may hold anything, and the other side keeps its bits.
    out = np.where(b_is_empty[..., None], a, np.where(a_is_empty[..., None], b, out))
    out[a_is_empty & b_is_empty] = 0
    lse = np.where(b_is_empty, log_a, np.where(a_is_empty, log_b, lse))
    return like_input(out, as_tensor), like_input(lse, as_tensor)


@refuses_at_the_call
def weights_summary(
    q: Any, k: Any, valid_lens: Any = None, *, keep_mask: Any = None, bias: Any = None, causal: Causal = False,
    window: Window = None, scale: Optional[float] = None, softcap: Optional[float] = None, relative_bias: Any = None,
    sinks: Any = None, empty_rows: EmptyRows = "zero", top: int = 0,
) -> WeightsSummary:  # fmt: skip
    """Summarise attention weights without a (Q, K) array: what each key receives, each query's entropy, the largest.

    >>> import numpy as np
    >>> from mha_c import functional
    >>> q = k = np.zeros((1, 3, 4))
    >>> found = functional.weights_summary(q, k, causal=True, top=2)
    >>> found.received.round(3)
    array([[1.833, 0.833, 0.333]])
    >>> found.top_keys
    array([[[ 0, -1],
            [ 0,  1],
            [ 0,  1]]])

    The weights of `dot_product_attention` are computed in pieces, and each piece is freed when it is summed up: for
    20,000 tokens, whose weights would fill 1.6 GB a head, less than 100 MB are needed.

    Parameters
    ----------
    q : array (B, [H,] Q, D)
        Queries; float32 or float64.
    k : array (B, [Hkv,] K, D)
        Keys of the same type; Hkv divides H.
    valid_lens, keep_mask, bias, causal, window : as in `dot_product_attention`
        What each query sees.
    scale, softcap, relative_bias, sinks, empty_rows : as in `dot_product_attention`
        How scores become weights.
    top : int
        How many of the largest weights of each query to return.

    Returns
    -------
    WeightsSummary
        A named tuple: received (B, [H,] K), the sum over queries of each key's weights; entropy (B, [H,] Q) in bits;
        top_weights and top_keys (B, [H,] Q, top), largest first (of equal weights the first key first); the key is -1
        if a query has fewer keys.

    Raises
    ------
    ShapeError, TypeError, ValueError
        As in `dot_product_attention`.

    Notes
    -----
    Sums are computed in float64 and rounded once to the type of q.  Source: "received" is what H2O (Zhang et al. 2023)
    calls the accumulated attention score of a key; a sink (Xiao et al. 2023) is a key that receives much.
    """
    (q, k), as_tensor = to_arrays((q, "q"), (k, "k"))
    of_one_type((q, k), "q", "k")
    top = scalars.whole(top, "top", least=0)
    options = core_options(
        q, k, valid_lens, keep_mask=keep_mask, bias=bias, causal=causal, window=window, scale=scale, softcap=softcap,
        relative_bias=relative_bias, sinks=sinks, empty_rows=empty_rows,
    )  # fmt: skip
    found = summarize(Scores.of(q, k, None, options), top)
    arrays = found if q.ndim == 4 else (x[:, 0] for x in found)
    return WeightsSummary(*(like_input(x, as_tensor) for x in arrays))


def _attention(
    q: Any, k: Any, v: Any, w_v: Optional[Array], valid_lens: Any, options: AttentionOptions, extras: tuple[bool, bool]
) -> Any:
    """extras: whether weights and lse are wanted."""
    as_tensor = False
    if type(q) is not np.ndarray or type(k) is not np.ndarray or type(v) is not np.ndarray:
        (q, k, v), as_tensor = to_arrays((q, "q"), (k, "k"), (v, "v"))
    # Arguments one by one: to unpack a tuple into a call costs as much as the arithmetic of a small call.
    found = core_options(q, k, valid_lens, **options)
    lens, keep_mask, bias, corner, left, right, scale, p, seed, empty_rows, terms = found
    return_weights, return_lse = extras
    out, weights, lse = attention_forward(
        q, k, v, w_v, lens, keep_mask, bias, corner, left, right, scale, p, seed, empty_rows,
        return_weights, return_lse, False, None, terms,
    )  # fmt: skip
    if not (return_weights or return_lse):
        return like_input(out, True) if as_tensor else out
    return tuple(like_input(array, as_tensor) for array in (out, weights, lse) if array is not None)


def _check_parts(parts: dict[str, Array]) -> None:
    first = parts["out_a"]
    of_one_type(tuple(parts.values()), *parts)
    for name, array in parts.items():
        shape = first.shape[:-1] if name.startswith("lse") else first.shape
        if array.shape != shape or first.ndim < 2:
            wanted = "(B, [H,] Q)" if name.startswith("lse") else "(B, [H,] Q, Dv)"
            raise ShapeError(f"{name} must have shape {wanted} = {shape}, got {array.shape}; out_a has {first.shape}")
