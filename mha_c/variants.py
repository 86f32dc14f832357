"""Attention layers of other systems on the same C core, with the names, arguments and results of the originals.

scaled_dot_product_attention, MultiHeadedSelfAttention, SelfAttentionAISummer, MultiHeadSelfAttentionAISummer.
Types follow the layers of the book: float32 or float64 inputs give results of the same type; CPU tensors
without gradient give tensors.  Weights start Xavier-uniform; `state_dict` and `load_state_dict` use the original names.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Optional, overload

import numpy as np

from ._arguments import scalars
from ._arguments.arrays import check_features, floats, like_input, of_one_type, to_array, to_arrays
from ._arguments.calls import refuses_at_the_call
from ._arguments.constructors import divisible
from ._core import linear
from ._layer.call import AttentionLayer
from ._layer.description import KNOWN_NAMES
from ._layer.module import Layer
from .errors import ShapeError
from .functional import dot_product_attention
from .linear import LinearAttribute, State, packing_type

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ._types import Real, RngLike

__all__ = [
    "MultiHeadSelfAttentionAISummer",
    "MultiHeadedSelfAttention",
    "SelfAttentionAISummer",
    "scaled_dot_product_attention",
]
__dir__ = __all__.copy  # what dir() and completion show


@overload
def scaled_dot_product_attention(
    query: NDArray[Real], key: NDArray[Real], value: NDArray[Real]
) -> tuple[NDArray[Real], NDArray[Real]]: ...
@overload
def scaled_dot_product_attention(query: Any, key: Any, value: Any) -> tuple[Any, Any]: ...
@refuses_at_the_call
def scaled_dot_product_attention(query: Any, key: Any, value: Any) -> tuple[Any, Any]:
    """Attention with any leading axes: softmax(query key^T / sqrt(d)) value, and the weights.

    >>> import numpy as np
    >>> from mha_c import variants
    >>> context, weights = variants.scaled_dot_product_attention(np.ones((5, 3)), np.ones((4, 3)), np.ones((4, 2)))
    >>> context.shape, weights.shape
    ((5, 2), (5, 4))

    Parameters
    ----------
    query : array_like (..., Q, d)
        All three arrays have one type.
    key : array_like (..., K, d)
        Leading axes of the three arrays broadcast.
    value : array_like (..., K, Dv)
        One row for each key.

    Returns
    -------
    context : array (..., Q, Dv)
        For each query, the weighted mean of the values.
    weights : array (..., Q, K)
        Rows sum to 1.

    Raises
    ------
    ShapeError
        If shapes do not match.
    TypeError
        If types differ or are not floats.
    """
    (q, k, v), as_tensor = to_arrays((query, "query"), (key, "key"), (value, "value"))
    of_one_type((q, k, v), "query", "key", "value")
    leading = leading_axes(q, k, v, np.broadcast_shapes)
    n_items = math.prod(leading)
    q, k, v = (np.broadcast_to(x, (*leading, *x.shape[-2:])).reshape(n_items, *x.shape[-2:]) for x in (q, k, v))
    context, weights = dot_product_attention(q, k, v, return_weights=True)
    return tuple(like_input(x.reshape(*leading, *x.shape[1:]), as_tensor) for x in (context, weights))


class MultiHeadedSelfAttention(AttentionLayer):
    """Multi-head self-attention with one argument and four projections without biases.

    >>> import numpy as np
    >>> from mha_c import variants
    >>> variants.MultiHeadedSelfAttention(d_model=8, num_heads=2)(np.ones((1, 3, 8))).shape
    (1, 3, 8)

    Call: layer(x (B, T, d_model)) returns (B, T, d_model); `attention_weights` is then (B, num_heads, T, T).

    Parameters
    ----------
    d_model : int
        Features of x; num_heads divides it.
    num_heads : int
        How many heads.
    dtype : float32 or float64
        Type of the parameters.
    rng : None, int or numpy.random.Generator
        Random numbers for the initial weights.

    Attributes
    ----------
    query_projection, key_projection, value_projection, final_linear_layer : Linear
        The projections of queries, keys, values and of the joined heads.
        Their `weight` and `bias` can be read and assigned.
    d_model : int
        Features of x.

    Notes
    -----
    Parameters: `query_projection`, `key_projection`, `value_projection`, `final_linear_layer`.  Errors are those of
    `MultiHeadAttention`.
    """

    query_projection, key_projection = LinearAttribute(), LinearAttribute()
    value_projection, final_linear_layer = LinearAttribute(), LinearAttribute()
    _roles = KNOWN_NAMES[2]
    _by_head = True

    @refuses_at_the_call
    def __init__(self, d_model: int, num_heads: int, *, dtype: Any = np.float32, rng: RngLike = None) -> None:
        self.d_model, self._num_heads = divisible(d_model, "d_model", num_heads)
        states = tuple(State(name, self.d_model, self.d_model) for name in self._roles)
        super().__init__(states, 0, dtype, rng, "uniform")

    @property
    def num_heads(self) -> int:
        """How many heads."""
        return self._num_heads

    @overload  # type: ignore[override]
    def __call__(self, x: NDArray[Real]) -> NDArray[Real]: ...
    @overload
    def __call__(self, x: Any) -> Any: ...
    @refuses_at_the_call
    def __call__(self, x: Any) -> Any:
        (array,), as_tensor = to_arrays((x, "x"))
        check_features(floats(array, "x"), "x", self.d_model)
        source = x if as_tensor else array  # a tensor is passed on, so that attention_weights is a tensor too
        return super().__call__(source, source, source)

    def _asked(self, x: Any) -> Any:  # type: ignore[override]  # of one input
        return super()._asked(x, x, x)

    @overload  # type: ignore[override]
    def backward(self, grad_output: NDArray[Real]) -> NDArray[Real]: ...
    @overload
    def backward(self, grad_output: Any) -> Any: ...
    @refuses_at_the_call
    def backward(self, grad_output: Any) -> Any:
        """The gradient with respect to x; otherwise like `MultiHeadAttention.backward`.

        Parameters
        ----------
        grad_output : array of the result's shape and type
            The gradient of a loss with respect to the result.

        Returns
        -------
        array of x's shape
            The gradient with respect to x.
        """
        grad_queries, grad_keys, grad_values = super().backward(grad_output)
        return grad_queries + grad_keys + grad_values


class _AISummer(Layer):
    """What the layers of The AI Summer share: `to_qvk`, and the projection of the joined heads, if there is one.

    Attributes
    ----------
    to_qvk : Linear
        The one projection for queries, keys and values.
        Their `weight` and `bias` can be read and assigned.
    dim, heads, dim_head : int
        Features of x, how many heads, and features of a head.
    """

    to_qvk = LinearAttribute()

    def __init__(
        self, dim: int, heads: int, dim_head: int, dtype: Any, rng: RngLike, behind: tuple[State, ...] = ()
    ) -> None:
        self.dim, self.heads, self.dim_head = dim, heads, dim_head
        scalars.check_size("to_qvk.weight", dim_head * 3 * heads, dim)
        super().__init__((State("to_qvk", dim_head * 3 * heads, dim), *behind), dtype, rng)

    @overload
    def __call__(self, x: NDArray[Real], mask: Any = None) -> NDArray[Real]: ...
    @overload
    def __call__(self, x: Any, mask: Any = None) -> Any: ...
    @refuses_at_the_call
    def __call__(self, x: Any, mask: Any = None) -> Any:
        (array,), as_tensor = to_arrays((x, "x"))
        check_features(floats(array, "x"), "x", self.dim)
        batch, steps, _ = array.shape
        keep = None if mask is None else kept(to_array(mask, "mask"), steps)
        packed = [state.packed(packing_type(array, self.dtype)) for state in self._parameters.states.values()]
        split = linear(array, packed[0]).reshape(batch, steps, self.dim_head, 3, self.heads)
        q, k, v = split.transpose(3, 0, 4, 1, 2)
        out = dot_product_attention(q, k, v, keep_mask=keep, scale=self.dim_head**-0.5)
        joined = out.transpose(0, 2, 1, 3).reshape(batch, steps, self.heads * self.dim_head)
        return like_input(linear(joined, packed[1]) if packed[1:] else joined, as_tensor)


class SelfAttentionAISummer(_AISummer):
    """Single-head self-attention of The AI Summer: one projection for queries, keys and values.

    >>> import numpy as np
    >>> from mha_c import variants
    >>> causal = np.triu(np.ones((3, 3), dtype=bool), k=1)
    >>> variants.SelfAttentionAISummer(4)(np.ones((2, 3, 4)), mask=causal).shape
    (2, 3, 4)

    Call: layer(x (B, T, dim), mask=None) returns (B, T, dim).  `mask` (T, T) is bool, and **True = drop**: the opposite
    of `keep_mask`.  A query that drops all keys gets 0 (in the original: NaN).  Scores are scaled by dim**-0.5.

    Parameters
    ----------
    dim : int
        Features of x.
    dtype : float32 or float64
        Type of the parameters.
    rng : None, int or numpy.random.Generator
        Random numbers for the initial weights.

    Raises
    ------
    ShapeError
        If x or mask has the wrong shape.
    TypeError
        If x or mask has the wrong type.

    Notes
    -----
    Parameter `to_qvk` (3*dim, dim): output feature d*3 + i is component d of the query (i = 0), key (1), value (2).
    Source: The-AI-Summer/self-attention-cv, transformer_vanilla, SelfAttention.
    """

    @refuses_at_the_call
    def __init__(self, dim: int, *, dtype: Any = np.float32, rng: RngLike = None) -> None:
        dim = scalars.whole(dim, "dim")
        super().__init__(dim, 1, dim, dtype, rng)


class MultiHeadSelfAttentionAISummer(_AISummer):
    """Multi-head self-attention of The AI Summer: one projection for q, k and v, and W_0 after the joined heads.

    >>> import numpy as np
    >>> from mha_c import variants
    >>> variants.MultiHeadSelfAttentionAISummer(16, heads=4)(np.ones((2, 3, 16))).shape
    (2, 3, 16)

    Call: layer(x (B, T, dim), mask=None) returns (B, T, dim); `mask` as in SelfAttentionAISummer (True = drop).  Scores
    are scaled by dim_head**-0.5.

    Parameters
    ----------
    dim : int
        Features of x.
    heads : int
        How many heads.
    dim_head : int, optional
        Features of a head.  Default: dim // heads.
    dtype : float32 or float64
        Type of the parameters.
    rng : None, int or numpy.random.Generator
        Random numbers for the initial weights.

    Attributes
    ----------
    W_0 : Linear
        The projection of the joined heads.
        Their `weight` and `bias` can be read and assigned.

    Raises
    ------
    ShapeError
        If x or mask has the wrong shape.
    TypeError
        If x or mask has the wrong type.
    ValueError
        If dim // heads is 0.

    Notes
    -----
    Parameters: `to_qvk` (3*heads*dim_head, dim), whose output feature (d*3 + i)*heads + h is component d of the
    query (i = 0), key (1) or value (2) of head h; `W_0` (dim, heads*dim_head), over features h*dim_head + d.
    Source: The-AI-Summer/self-attention-cv, transformer_vanilla, MultiHeadSelfAttention.
    """

    W_0 = LinearAttribute()

    @refuses_at_the_call
    def __init__(
        self, dim: int, heads: int = 8, dim_head: Optional[int] = None, *, dtype: Any = np.float32, rng: RngLike = None
    ) -> None:
        dim, heads, dim_head = ai_summer_sizes(dim, heads, dim_head)
        super().__init__(dim, heads, dim_head, dtype, rng, (State("W_0", dim, heads * dim_head),))


# --- Checks that mha_c.torch.variants uses too, for tensors ---------------------------------------------


def leading_axes(query: Any, key: Any, value: Any, broadcast: Callable[..., Any]) -> tuple[int, ...]:
    """The broadcast of all axes before rows and features; ShapeError if the three do not fit together."""
    named = (query, "query"), (key, "key"), (value, "value")
    shapes = {name: tuple(x.shape) for x, name in named}
    for name, shape in shapes.items():
        if len(shape) < 2:
            raise ShapeError(f"{name} must have shape (..., rows, features), got {shape}")
    q, k, v = shapes.values()
    if k[-1] != q[-1]:
        raise ShapeError(f"key has {k[-1]} features, but query has {q[-1]}: {k}, {q}")
    if v[-2] != k[-2]:
        raise ShapeError(f"value has {v[-2]} rows, but key has {k[-2]}: {v}, {k}")
    try:
        return tuple(broadcast(q[:-2], k[:-2], v[:-2]))
    except (ValueError, RuntimeError):  # NumPy's and torch's
        raise ShapeError(f"the leading axes of query {q}, key {k} and value {v} do not broadcast") from None


def ai_summer_sizes(dim: Any, heads: Any, dim_head: Any) -> tuple[int, int, int]:
    dim, heads = scalars.whole(dim, "dim"), scalars.whole(heads, "heads")
    if dim_head is None and dim < heads:
        raise ValueError(f"dim ({dim}) // heads ({heads}) is 0: give dim_head")
    return dim, heads, dim // heads if dim_head is None else scalars.whole(dim_head, "dim_head")


def kept(mask: Any, steps: int) -> Any:
    """The keep_mask of a mask in which True means drop."""
    if str(mask.dtype) not in ("bool", "torch.bool"):
        raise TypeError(f"mask must be bool, True = drop, got {mask.dtype}")
    if tuple(mask.shape) != (steps, steps):
        raise ShapeError(f"mask must have shape (T, T) = ({steps}, {steps}), got {tuple(mask.shape)}")
    return ~mask
