"""The gradients of the functions in functional.py, which exports them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional, overload

import numpy as np

from ._arguments.arrays import like_input, to_array, to_arrays
from ._arguments.calls import refuses_at_the_call
from ._arguments.options import additive_features, core_options, shows_options
from ._core import attention_backward, attention_forward, linear_backward

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Unpack

    from ._types import Array, AttentionOptions, Real


@overload
def dot_product_attention_backward(
    grad_out: NDArray[Real], q: NDArray[Real], k: NDArray[Real], v: NDArray[Real], valid_lens: Any = None,
    **options: Unpack[AttentionOptions],
) -> tuple[NDArray[Real], ...]: ...  # fmt: skip
@overload
def dot_product_attention_backward(
    grad_out: Any, q: Any, k: Any, v: Any, valid_lens: Any = None, **options: Unpack[AttentionOptions]
) -> Any: ...
@shows_options
@refuses_at_the_call
def dot_product_attention_backward(
    grad_out: Any, q: Any, k: Any, v: Any, valid_lens: Any = None, **options: Unpack[AttentionOptions]
) -> Any:
    """Gradients of a loss with respect to q, k, v (and bias), from the gradient with respect to the output.

    It computes the output again (a layer's `backward` does not need to).  The array of all scores never exists.

    Parameters
    ----------
    grad_out : array of the shape of `dot_product_attention(q, k, v, ...)`
        The gradient with respect to the output.
    q, k, v, valid_lens, keep_mask, bias, causal, window : as in that call
        Keys and values that no query sees get a gradient of exactly 0.
    scale, softcap, relative_bias, sinks, dropout : as in that call
        All these must have the values that they had in that call.
    rng : int, optional
        With dropout: the int of the forward call, so that the same weights are dropped.
    empty_rows : as in that call
        What a query without visible keys got.

    Returns
    -------
    tuple of arrays
        The gradients of q, k and v, then those of bias, relative_bias and sinks, if given.  Each has the shape of its
        argument: axes that were broadcast are summed.

    Raises
    ------
    ValueError
        If dropout is above 0 and rng is not an int.  Other errors are those of the forward call.

    Notes
    -----
    Source: Dao 2023, FlashAttention-2; unlike there, row maximum and row sum stay two numbers, which loses no digits.

    Examples
    --------
    >>> import numpy as np
    >>> from mha_c import functional
    >>> q, k = np.zeros((1, 1, 4)), np.zeros((1, 2, 4))
    >>> v = np.array([[[1.0], [3.0]]])
    >>> grad_q, grad_k, grad_v = functional.dot_product_attention_backward(np.ones((1, 1, 1)), q, k, v)
    >>> grad_v[0, :, 0]
    array([0.5, 0.5])
    """
    (grad, q, k, v), as_tensor = to_arrays((grad_out, "grad_out"), (q, "q"), (k, "k"), (v, "v"))
    grad_q, grad_k, grad_v, _, *others = _gradients(grad, q, k, v, None, valid_lens, options)
    return _given(as_tensor, grad_q, grad_k, grad_v, *others)


@overload
def additive_attention_backward(
    grad_out: NDArray[Real], q: NDArray[Real], k: NDArray[Real], v: NDArray[Real], w_v: NDArray[Real],
    W_q: Optional[NDArray[Real]] = None, W_k: Optional[NDArray[Real]] = None, valid_lens: Any = None,
    **options: Unpack[AttentionOptions],
) -> tuple[NDArray[Real], ...]: ...  # fmt: skip
@overload
def additive_attention_backward(
    grad_out: Any, q: Any, k: Any, v: Any, w_v: Any, W_q: Any = None, W_k: Any = None, valid_lens: Any = None,
    **options: Unpack[AttentionOptions],
) -> Any: ...  # fmt: skip
@shows_options
@refuses_at_the_call
def additive_attention_backward(
    grad_out: Any, q: Any, k: Any, v: Any, w_v: Any, W_q: Any = None, W_k: Any = None, valid_lens: Any = None,
    **options: Unpack[AttentionOptions],
) -> Any:  # fmt: skip
    """Gradients of a loss with respect to q, k, v, w_v (and W_q, W_k, bias): the backward of `additive_attention`.

    Parameters
    ----------
    grad_out : array of the shape of `additive_attention(q, k, v, ...)`
        The gradient with respect to the output.
    q, k, v, w_v, W_q, W_k, valid_lens, keep_mask, bias, causal, window : as in that call
        Rows of k that no query sees add nothing to the gradient of W_k, even if they hold NaN.
    scale, softcap, relative_bias, sinks, dropout : as in that call
        All these must have the values that they had in that call.
    rng : int, optional
        As in `dot_product_attention_backward`, which also lists the errors.
    empty_rows : as in that call
        What a query without visible keys got.

    Returns
    -------
    tuple of arrays
        The gradients of q, k, v and w_v, then those of W_q, W_k, bias, relative_bias and sinks, if given.

    Examples
    --------
    >>> import numpy as np
    >>> from mha_c import functional
    >>> v = np.array([[[1.0], [3.0]]])
    >>> grads = functional.additive_attention_backward(
    ...     np.ones((1, 1, 1)), np.zeros((1, 1, 2)), np.eye(2)[None], v, w_v=np.array([1.0, 1.0]), W_k=np.eye(2)
    ... )
    >>> [grad.shape for grad in grads]  # of q, k, v, w_v, W_k
    [(1, 1, 2), (1, 2, 2), (1, 2, 1), (2,), (2, 2)]
    """
    (grad, q, k, v), as_tensor = to_arrays((grad_out, "grad_out"), (q, "q"), (k, "k"), (v, "v"))
    q_features, k_features, w_v = additive_features(q, k, w_v, W_q, W_k)
    grad_q, grad_k, grad_v, grad_w_v, *others = _gradients(grad, q_features, k_features, v, w_v, valid_lens, options)
    grad_W_q = grad_W_k = None
    if W_q is not None:
        grad_q, grad_W_q = _project_back(grad_q, q, to_array(W_q, "W_q"))
    if W_k is not None:
        grad_k, grad_W_k = _project_back(grad_k, k, to_array(W_k, "W_k"))
    return _given(as_tensor, grad_q, grad_k, grad_v, grad_w_v, grad_W_q, grad_W_k, *others)


def _gradients(
    grad_out: Array, q: Array, k: Array, v: Array, w_v: Optional[Array], valid_lens: Any, options: AttentionOptions
) -> tuple[Any, ...]:
    """Gradients of q, k, v, w_v, bias, relative_bias and sinks: the forward call once more, then the backward call."""
    if options.get("dropout") and not isinstance(options.get("rng"), (int, np.integer)):  # others would be dropped
        raise ValueError("rng must be the whole number that the forward call was given: it decides what is dropped")
    found = core_options(q, k, valid_lens, **options)
    in_order, terms = found[:-1], found[-1]
    out, _, _, row_stats = attention_forward(q, k, v, w_v, *in_order, False, False, True, None, terms)
    has_bias = options.get("bias") is not None
    return attention_backward(grad_out, out, row_stats, q, k, v, w_v, *in_order, has_bias, None, terms)


def _project_back(grad: Array, x: Array, W: Array) -> tuple[Array, Array]:
    """Gradients of x and W, from the gradient of x W^T.  Rows whose gradient is 0 are skipped: padding may hold NaN."""
    counts = grad.any(axis=-1, keepdims=True)
    grad_x, grad_W, _ = linear_backward(grad, x if counts.all() else np.where(counts, x, x.dtype.type(0)), W, False)
    return grad_x, grad_W


def _given(as_tensor: bool, *gradients: Optional[Array]) -> tuple[Any, ...]:
    """The gradients that are not None, in the type of the inputs."""
    return tuple(like_input(gradient, as_tensor) for gradient in gradients if gradient is not None)
