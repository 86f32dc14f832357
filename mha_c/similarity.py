"""Attention pooling by similarity: the book's Nadaraya-Watson regression as a layer whose one parameter is a width.

A query's weights are a kernel of its distances to the keys, divided by their sum.  The layer gives the logarithms of
the kernel to the core as the bias of an attention whose scores are 0.  So the core handles lengths and empty rows, and
computes the weights and the gradient of the bias.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Optional, Union, overload

import numpy as np

from ._arguments import calls, scalars
from ._arguments.arrays import gradient_like, like_input, of_one_type, parameter_array, to_array, to_arrays
from ._arguments.calls import refuses_at_the_call
from ._arguments.options import causal_lengths
from ._core import explain_attention
from ._layer.lacks import ONE_HEAD, lacks
from ._layer.module import IncompatibleKeys, Trained
from ._layer.viewable import Viewable
from .errors import ShapeError
from .functional import dot_product_attention, dot_product_attention_backward

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ._types import Array, Causal, Real

    Kernel = Union[str, Callable[[Any], Any]]

__all__ = ["KernelAttention"]
__dir__ = __all__.copy  # what dir() and completion show

# The logarithms of the kernels, as functions of u = distance / width.
LOGARITHMS: dict[Any, Callable[[Array], Array]] = {
    "gaussian": lambda u: -u * u / 2,
    "boxcar": lambda u: np.where(u < 1, 0, -np.inf).astype(u.dtype),
    "epanechnikov": lambda u: np.log1p(-np.minimum(u, 1)),
    "constant": np.zeros_like,
}
NEGATIVE = "kernel must return values >= 0, got a negative one or NaN"
# Inputs may also be 1-D as in the book: one number for each query, key or value.
RANKS = "must have shape (B, rows, features), or (rows,) for numbers"


class _KernelRecord(NamedTuple):
    """What `backward` needs of a training call."""

    inputs: tuple[Array, ...]
    lens: Optional[Array]
    bias: Array  # (B, Q, K), the logarithms of the kernel
    shape: tuple[int, ...]  # of the result
    kernel: Kernel
    width: float
    as_tensor: bool


@lacks(
    new_cache="it projects nothing, so the keys and values of a decoder are its inputs: keep those",
    project="it projects nothing: give the call the keys and values themselves",
    **ONE_HEAD,
    convert="the book computes this pooling in functions, not in a module",
    compare="the book computes this pooling in functions, not in a module",
    steps="the players draw softmax of products and of sums; its weights are a kernel of distances, shown by view()",
)
class KernelAttention(Trained, Viewable):
    """Nadaraya-Watson regression: the mean of the values, weighted by how near their keys are to the query.

    >>> import numpy as np, mha_c
    >>> x, y = np.array([0.0, 1.0, 4.0]), np.array([1.0, 3.0, 5.0])
    >>> attention = mha_c.KernelAttention("boxcar", width=2.0)
    >>> attention(np.array([0.5, 3.0, 9.0]), x, y)
    array([2., 5., 3.])
    >>> attention.attention_weights[0]
    array([0.5, 0.5, 0. ])

    Each weight is kernel(distance of query and key / width), divided by the sum over the keys of the query.

    Call: attention(queries, keys, values, valid_lens=None, *, causal=False, training=None)

    queries, keys, values  (B, Q, d), (B, K, d), (B, K, Dv); the result is (B, Q, Dv); or, as in the book, (Q,), (K,),
      (K,) and (Q,); all of float32, or all of float64
    valid_lens, causal, training  as in `MultiHeadAttention`

    After a call `attention_weights` is (B, Q, K) or (Q, K).  After a call in training mode (`train()`), `backward`
    gives the gradients of the inputs and adds the gradient of the width to `width_grad`, a number (None before the
    first `backward`).

    Parameters
    ----------
    kernel : {"gaussian", "boxcar", "epanechnikov", "constant"} or function
        With u = distance / width, in this order: exp(-u**2 / 2); 1 where u < 1, else 0; max(0, 1 - u), as in the book
        (the book's "epanechikov" is elsewhere the triangular kernel, and Epanechnikov's own kernel is
        `lambda u: (1 - u**2).clip(0)`); 1.  A function takes an array of u and returns its values, which must be >= 0.
    width : float
        The distance that counts as 1: above 0, also when rounded to the inputs' type.  It can be read and assigned.
    derivative : function, optional
        For `backward`: the derivative with respect to u, if the kernel is a function.
    empty_rows : {"uniform", "zero"}
        What a query gets if its weights are all 0: the mean of all values (also of those beyond its length), or 0.

    Attributes
    ----------
    width_grad : float or None
        The gradient of the width, to which each `backward` adds; None before the first.

    Notes
    -----
    It raises ValueError if the width is not above 0 or is infinite, or if the kernel is below 0 or NaN.
    Unlike the book's code: Gaussian weights stay right far from every key, where the book's are 0/0 (they are a softmax
    of the distances, not a quotient of numbers that underflow), as long as u**2 is finite in the inputs' type; the rows
    of the weights are the queries.  The (B, Q, K) array of distances is stored.
    Source: d2l 11.2 (10.2 in the first edition); Nadaraya 1964, Watson 1964.
    """

    _record: Optional[_KernelRecord] = None

    @refuses_at_the_call
    def __init__(
        self,
        kernel: Kernel = "gaussian",
        width: float = 1.0,
        *,
        derivative: Optional[Callable[[Any], Any]] = None,
        empty_rows: str = "uniform",
    ) -> None:
        self._kernel = checked_kernel(kernel)
        if derivative is not None and not (callable(derivative) and callable(kernel)):
            raise TypeError(
                "derivative must be a function, for a kernel that is a function: named kernels have their own"
            )
        self._derivative = derivative
        self.width = width
        self.width_grad: Optional[float] = None
        self._empty_rows = scalars.empty_rows(empty_rows)
        self._weights: Optional[tuple[Array, bool]] = None

    @property
    def kernel(self) -> Kernel:
        """The kernel: its name or the function."""
        return self._kernel

    @property
    def width(self) -> float:
        """The unit of distance: the kernel's argument is distance / width."""
        return self._width

    @width.setter
    @refuses_at_the_call
    def width(self, value: float) -> None:
        self._width = scalars.positive(value, "width")

    @overload
    def __call__(
        self, queries: NDArray[Real], keys: NDArray[Real], values: NDArray[Real], valid_lens: Any = None, *,
        causal: Causal = False, training: Optional[bool] = None,
    ) -> NDArray[Real]: ...  # fmt: skip
    @overload
    def __call__(
        self, queries: Any, keys: Any, values: Any, valid_lens: Any = None, *, causal: Causal = False,
        training: Optional[bool] = None,
    ) -> Any: ...  # fmt: skip
    @calls.checks_names
    def __call__(
        self, queries: Any, keys: Any, values: Any, valid_lens: Any = None, *, causal: Causal = False,
        training: Optional[bool] = None,
    ) -> Any:  # fmt: skip
        """Compute the mean of the values for each query; the help of the class lists what a call takes."""
        in_training = self.training if training is None else scalars.flag(training, "training")
        arrays, as_tensor = to_arrays((queries, "queries"), (keys, "keys"), (values, "values"))
        check_shapes(*[array.shape for array in arrays])  # first: whole numbers of two axes are no tokens here
        of_one_type(arrays, "queries", "keys", "values")
        numbers = arrays[0].ndim == 1
        q, k, v = with_items(arrays)
        lens = causal_lengths(causal, q, k, valid_lens)
        bias = self._log_kernel(distances(q, seen_keys(q, k, lens), self._width))
        out, weights = dot_product_attention(
            q[..., :0], k[..., :0], v, lens, bias=bias, empty_rows=self._empty_rows, return_weights=True
        )
        out, weights = (out.reshape(-1), weights[0]) if numbers else (out, weights)
        self._weights = weights, as_tensor
        if in_training:
            kept = None if lens is None else np.array(lens)
            self._record = _KernelRecord(arrays, kept, bias, out.shape, self._kernel, self._width, as_tensor)
        return like_input(out, as_tensor)

    def _log_kernel(self, u: Array) -> Any:
        if callable(self._kernel):
            similarity = np.asarray(to_array(self._kernel(u), "kernel(u)"))
            check_of_distances("kernel", similarity.shape, u.shape)
            if not np.issubdtype(similarity.dtype, np.number) and similarity.dtype != bool:
                raise TypeError(f"kernel must return real numbers, got {similarity.dtype}")
            if not (similarity[np.isfinite(u)] >= 0).all():
                raise ValueError(NEGATIVE)
            similarity = similarity.astype(u.dtype, copy=False)
        with np.errstate(divide="ignore", over="ignore"):
            return np.log(similarity) if callable(self._kernel) else LOGARITHMS[self._kernel](u)

    @overload
    def backward(self, grad_output: NDArray[Real]) -> tuple[NDArray[Real], NDArray[Real], NDArray[Real]]: ...
    @overload
    def backward(self, grad_output: Any) -> tuple[Any, Any, Any]: ...
    @refuses_at_the_call
    def backward(self, grad_output: Any) -> Any:
        """Gradients of a loss with respect to queries, keys and values; adds that of the width to `width_grad`.

        If a query equals a key, the kernel may have no derivative: the gradient there is 0.  The inputs of the call
        must not have changed since.

        Parameters
        ----------
        grad_output : array
            The gradient with respect to the result of the last call in training mode, in its shape and type.

        Returns
        -------
        tuple of arrays
            (grad_queries, grad_keys, grad_values), in the shapes of the inputs.

        Raises
        ------
        RuntimeError
            If there was no call in training mode before, if its backward was called already, or if the kernel is a
            function and has no `derivative`.
        ShapeError, TypeError
            If grad_output does not have the shape and type of the output.

        Examples
        --------
        >>> import numpy as np, mha_c
        >>> attention = mha_c.KernelAttention("gaussian").train()
        >>> out = attention(np.array([0.5]), np.array([0.0, 2.0]), np.array([1.0, 3.0]))
        >>> grad_queries, _, grad_values = attention.backward(np.ones(1))
        >>> grad_values.round(3), round(attention.width_grad, 3)
        (array([0.731, 0.269]), 0.786)
        """
        record = self._record
        if record is None:
            raise RuntimeError("KernelAttention.backward: call backward once after each call in training mode")
        grad = gradient_like(record.shape, record.inputs[0].dtype, grad_output)
        q, k, v, grad = with_items((*record.inputs, grad))
        _, _, grad_v, of_bias = dot_product_attention_backward(
            grad, q[..., :0], k[..., :0], v, record.lens, bias=record.bias, empty_rows=self._empty_rows
        )
        k = seen_keys(q, k, record.lens)
        u = distances(q, k, record.width)
        grad_q, grad_k, grad_width = _of_distances(q, k, record.width, *self._slopes(record, u, of_bias))
        self._record = None
        self.width_grad = grad_width + (self.width_grad or 0.0)
        grads = (g.reshape(x.shape) for g, x in zip((grad_q, grad_k, grad_v), record.inputs))
        return tuple(like_input(g, record.as_tensor) for g in grads)

    def _slopes(self, record: _KernelRecord, u: Array, of_bias: Array) -> tuple[Array, Array]:
        """The gradient of u = distance / width, divided by u, and times u; 0 where the gradient of the bias is 0."""
        counts = of_bias != 0  # elsewhere u may be NaN: keys that no query saw
        if record.kernel == "gaussian":
            over_u = np.where(counts, -of_bias, 0)
            near = np.where(counts, u, 0)
            return over_u, over_u * near * near
        if record.kernel in ("boxcar", "constant"):
            return np.zeros_like(of_bias), np.zeros_like(of_bias)
        counts &= u > 0
        u = np.where(counts, u, 1)
        if record.kernel == "epanechnikov":
            slope: Any = -1
        elif self._derivative is None:
            raise RuntimeError("backward needs the derivative of the kernel: KernelAttention(kernel, derivative=...)")
        else:
            slope = np.asarray(to_array(self._derivative(u), "derivative(u)"))
            check_of_distances("derivative", slope.shape, u.shape)
        of_u = np.where(counts, of_bias * (slope / np.exp(np.where(counts, record.bias, 0))), 0).astype(of_bias.dtype)
        return of_u / u, of_u * u

    def zero_grad(self) -> None:
        """Delete the gradient of the width."""
        self.width_grad = None

    def state_dict(self) -> dict[str, Array]:
        """The width under its name, as the torch module has it.

        Returns
        -------
        dict
            {"width": array of one number}.
        """
        return {"width": np.array(self._width)}

    @refuses_at_the_call
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> IncompatibleKeys:
        """Take the width from what `state_dict` gives, of this layer or of the torch module.

        Parameters
        ----------
        state_dict : dict
            {"width": a number, array or tensor}.
        strict : bool
            False: other entries are ignored, and the width may be missing.

        Returns
        -------
        IncompatibleKeys
            Two lists: (missing_keys, unexpected_keys).

        Raises
        ------
        ValueError
            If an entry is missing or unexpected, or if the width is not above 0.
        """
        keys = IncompatibleKeys(
            [] if "width" in state_dict else ["width"], [name for name in state_dict if name != "width"]
        )
        if scalars.flag(strict, "strict") and any(keys):
            raise ValueError(f"KernelAttention has one parameter, width; missing {keys[0]}, unexpected {keys[1]}")
        if not keys.missing_keys:
            self.width = float(parameter_array(np.asarray(state_dict["width"], float), "width").reshape(()))
        return keys

    def _explained(
        self, queries: Any, keys: Any, values: Any, valid_lens: Any = None, *, causal: Causal = False,
        training: Optional[bool] = None,
    ) -> dict[str, Any]:  # fmt: skip
        """For mha_c.explain and mha_c.cost: the facts of a call."""
        arrays, _ = to_arrays((queries, "queries"), (keys, "keys"), (values, "values"))
        of_one_type(arrays, "queries", "keys", "values")
        return explained(arrays, valid_lens, causal, self._empty_rows)

    @property
    def attention_weights(self) -> Any:
        """Weights of the last call, (B, Q, K) or (Q, K): rows sum to 1, and keys that do not count have 0."""
        if self._weights is None:
            raise AttributeError("KernelAttention has no attention_weights yet: call the layer first, then read them")
        return like_input(*self._weights)

    def __repr__(self) -> str:
        return f"KernelAttention(kernel={self._kernel!r}, width={self._width})"


def explained(arrays: Any, valid_lens: Any, causal: Causal, empty_rows: str) -> dict[str, Any]:
    """The facts of a call with such arrays; their numbers are not read."""
    check_shapes(*[array.shape for array in arrays])
    q, k, v = with_items(arrays)
    lens = causal_lengths(causal, q, k, valid_lens)
    bias = np.broadcast_to(q.dtype.type(0), (*q.shape[:2], k.shape[1]))
    masks = lens, None, bias, None, -1, -1, None, 0.0, 0, empty_rows
    attention = explain_attention(q[..., :0], k[..., :0], v, None, *masks, True)
    held = 2 * bias.size * bias.itemsize  # the distances, and the logarithms of their kernels
    facts = {"dtype": q.dtype.name, "projections": {}, "attention": attention}
    kept = {"kept": "weights", "kept_bytes": bias.size * bias.itemsize}
    return {**facts, "scratch_bytes": attention["scratch_bytes"] + held, **kept}


def checked_kernel(kernel: Any) -> Kernel:
    """The kernel, checked: a name in LOGARITHMS (or the book's spelling), or a function."""
    if callable(kernel):
        return kernel
    name = "epanechnikov" if isinstance(kernel, str) and kernel == "epanechikov" else kernel
    return scalars.choice(name, "kernel", *LOGARITHMS)


def check_width(width: float, limits: Any) -> None:
    """ValueError for a width that is 0 or infinite in the type of these limits: distances would be 0/0 and inf/inf."""
    if not float(limits.tiny) <= width <= float(limits.max):
        raise ValueError(f"width must lie in {limits.tiny:.2g} .. {limits.max:.2g} for {limits.dtype}, got {width}")


def check_shapes(queries: tuple[int, ...], keys: tuple[int, ...], values: tuple[int, ...]) -> None:
    """ShapeError unless the shapes are queries (B, Q, d), keys (B, K, d), values (B, K, Dv), or all have one axis."""
    for name, shape in (("queries", queries), ("keys", keys), ("values", values)):
        if len(shape) not in (1, 3) or len(shape) != len(queries):
            raise ShapeError(f"{name} {RANKS}, got {shape}; queries {queries}")
    if keys[:-1] != values[:-1] or (len(keys) == 1 and keys != values):
        raise ShapeError(f"keys {keys} and values {values} must have the same rows")
    if len(keys) == 3 and (queries[0] != keys[0] or queries[2] != keys[2]):
        raise ShapeError(f"queries {queries} and keys {keys} must have the same batch and features")


def check_of_distances(name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if found != wanted:
        raise ShapeError(f"{name} must return an array of the distances' shape, {wanted}, got {found}")


def with_items(given: Any) -> Any:
    """The inputs with three axes: 1-D inputs, as in the book, become rows of one feature in one item."""
    return (x.reshape(1, -1, 1) for x in given) if given[0].ndim == 1 else given


def seen_keys(q: Array, k: Array, lens: Any) -> Array:
    """k with zeros for keys that no query sees, which are not read; the core refuses lengths of a wrong shape."""
    if lens is None or lens.shape not in (q.shape[:1], q.shape[:2]):
        return k
    seen = np.zeros(k.shape, k.dtype)
    for item, n in enumerate(lens.reshape(len(k), -1).max(axis=1, initial=0)):
        seen[item, :n] = k[item, :n]
    return seen


@np.errstate(over="ignore")  # what is too far for a number is inf
def distances(q: Array, k: Array, width: float) -> Array:
    """(B, Q, K): |q - k| / width by differences, since |q|**2 - 2 q.k + |k|**2 loses what near points differ by."""
    check_width(width, np.finfo(q.dtype))
    width = q.dtype.type(width)
    if q.shape[2] == 1:
        return np.abs(q - k.swapaxes(1, 2)) / width
    squares = np.zeros((*q.shape[:2], k.shape[1]), q.dtype)
    for d in range(q.shape[2]):
        difference = q[:, :, d, None] - k[:, None, :, d]
        squares += difference * difference
    return np.sqrt(squares) / width


def _of_distances(q: Array, k: Array, width: float, over_u: Array, times_u: Array) -> tuple[Array, Array, float]:
    """Gradients of q, k and the width, from those of u = |q - k| / width, over u and times u: see `_slopes`."""
    by_square = over_u / over_u.dtype.type(width) / over_u.dtype.type(width)  # a square might be 0
    grad_q, grad_k = np.zeros_like(q), np.zeros_like(k)
    for d in range(q.shape[2]):
        difference = np.where(by_square != 0, q[:, :, d, None] - k[:, None, :, d], 0) * by_square
        grad_q[:, :, d], grad_k[:, :, d] = difference.sum(2), -difference.sum(1)
    return grad_q, grad_k, float(-times_u.sum(dtype=np.float64) / width)
