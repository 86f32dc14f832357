"""The attention layers of the book's third generation: GQAAttention, whose heads share keys and values, and
CausalAttention of its GPT."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional, overload

import numpy as np

from ._arguments import calls, scalars
from ._arguments.arrays import check_features, floats, to_array
from ._arguments.calls import refuses_at_the_call
from ._arguments.constructors import divisible
from ._arguments.options import check_causal, check_causal_steps
from ._decoder.caches import ProjectedKeyValues
from ._decoder.steps import DecodingLayer
from ._layer.lacks import lacks
from ._layer.module import Dropout
from .linear import LinearAttribute, State
from .positions import turn_of_steps

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ._decoder.caches import KeyValueCache
    from ._types import Causal, Real, RngLike
    from .linear import States

__all__ = ["CausalAttention", "GQAAttention"]
__dir__ = __all__.copy  # what dir() and completion show


def grouped_sizes(num_hiddens: Any, num_heads: Any, num_kv_heads: Any, rope: Any) -> tuple[int, int, int]:
    """(num_hiddens, num_heads, num_kv_heads); ValueError unless each is a multiple of the next one."""
    num_hiddens, num_heads = divisible(num_hiddens, "num_hiddens", num_heads)
    num_kv_heads = scalars.whole(num_kv_heads, "num_kv_heads")
    if num_heads % num_kv_heads:
        raise ValueError(f"num_heads ({num_heads}) must be divisible by num_kv_heads ({num_kv_heads})")
    if rope and num_hiddens // num_heads % 2:
        raise ValueError(
            f"rope=True rotates pairs of features: num_hiddens / num_heads must be even, got {num_hiddens // num_heads}"
        )
    return num_hiddens, num_heads, num_kv_heads


def corner(causal: bool, keys: Any, valid_lens: Any, given: Causal) -> Any:
    """The corner of a call: `given`; if that is None, of the book's causal mask, which is that of torch's is_causal,
    or, with lengths, also of keys that were projected with them, one where the last query sees the last key."""
    if given is not None or not causal:
        return causal if given is None else given
    if valid_lens is None and isinstance(keys, ProjectedKeyValues):
        valid_lens = keys._valid_lens
    return "top_left" if valid_lens is None else "bottom_right"


def check_is_causal(causal: Causal) -> None:
    """ValueError for causal=False in a call of CausalAttention; its corners are one, as it has a query for each key."""
    check_causal(causal)
    if causal is not None and not causal:
        raise ValueError(
            "a CausalAttention is always causal: GQAAttention(num_hiddens, num_heads, num_heads, causal=False) is not"
        )


def counted(cache: Any, others: tuple[Any, ...], valid_lens: Any) -> Any:
    """How many new steps of each item of a CausalAttention count: valid_lens, also where other layers have them by
    position.  ValueError without a cache; by position they are ignored then, as in the book."""
    if cache is None and valid_lens is not None:
        raise ValueError(
            "valid_lens of a CausalAttention says how many new steps of each item count in a call with cache=; "
            "GQAAttention takes valid_lens in every call"
        )
    return others[2] if valid_lens is None and len(others) > 2 else valid_lens


LOOKS_AHEAD = (
    "a cache is for causal attention: a layer with causal=False may see later steps.  `project` keeps the keys and "
    "values of an encoder"
)


class RotatesHeads(DecodingLayer):
    """What both layers share: heads that are rotated on request, and of which a query without keys gets 0."""

    _by_head = _turns = True
    _num_kv_heads: int
    _dropout = Dropout(0)  # also of a pickle of an earlier version
    _empty_rows = "zero"
    rope: bool

    def __init__(self, sizes: tuple[int, int, int], widths: dict[str, int], bias: Any, dtype: Any, rng: Any) -> None:
        self._num_hiddens, self._num_heads, self._num_kv_heads = sizes
        self._head_dim = sizes[0] // sizes[1]  # also of a layer that has lost heads
        bias = scalars.flag(bias, "bias")
        states = (State(name, n_out, sizes[0], bias) for name, n_out in {**widths, "W_o": sizes[0]}.items())
        super().__init__(tuple(states), 0, dtype, rng, "zero")

    @property
    def num_heads(self) -> int:
        """Heads of queries."""
        return self._num_heads

    def _turn(self, first: Any, n_steps: int, dtype: Any) -> Any:
        return turn_of_steps(first, n_steps, self._head_dim, dtype) if self.rope else None


@lacks(steps="the players draw heads that have keys of their own; view() shows its weights")
class GQAAttention(RotatesHeads):
    """Grouped-query attention: num_heads heads of queries, which share num_kv_heads heads of keys and values.

    >>> import numpy as np, mha_c
    >>> gqa = mha_c.GQAAttention(num_hiddens=16, num_heads=4, num_kv_heads=2, rng=0)
    >>> X = np.ones((2, 5, 16), dtype=np.float32)
    >>> gqa(X, X, X, valid_lens=[5, 3]).shape, gqa.attention_weights.shape
    ((2, 5, 16), (2, 4, 5, 5))

    Call: gqa(queries, keys, values, valid_lens=None, *, causal=None, keep_mask=None, bias=None, training=None,
    cache=None)

    queries, keys, values  (B, Q, num_hiddens), (B, K, num_hiddens), (B, K, num_hiddens); the result is as queries
    causal  None: as the constructor says
    valid_lens, keep_mask, bias, training  as in `MultiHeadAttention`, as types and errors
    cache  of `new_cache`; it and what `project` returns hold num_kv_heads heads, rotated already

    `attention_weights` is then (B, num_heads, Q, K); `backward` gives the gradients of a call in training mode.

    Parameters
    ----------
    num_hiddens : int
        Features of the inputs and of the result; num_heads divides it.
    num_heads : int
        Heads of queries; num_kv_heads divides it.
    num_kv_heads : int
        Heads of keys and values: query head h uses key head h // (num_heads // num_kv_heads).
    bias : bool
        Whether the four projections add a bias.
    rope : bool
        Whether queries and keys are rotated by their positions, which start at 0 (features 2i and 2i + 1 are a pair).
    causal : bool
        Whether query i sees keys 0..i only; with valid_lens, keys 0..i + K - Q.  A call's own causal= takes its place.
    dtype : float32 or float64
        Type of the parameters.
    rng : None, int or numpy.random.Generator
        Random numbers for the initial weights.

    Attributes
    ----------
    W_q, W_k, W_v, W_o : Linear
        The projections of queries, keys, values and of the joined heads.
    rope, causal : bool
        As given to the constructor.

    Notes
    -----
    Parameters `W_q`, `W_k`, `W_v`, `W_o`: W_k and W_v have num_kv_heads * (num_hiddens / num_heads) rows.  A query
    without visible keys gets 0 before W_o.  Unlike d2l's: no keys are copied for the heads that share them; angles of
    rope are float64 (d2l's are float32: at position 1000 the results differ by about 1e-4).
    Source: Ainslie et al. 2023, GQA; the book's third generation, whose state_dicts load.
    """

    W_q, W_k, W_v, W_o = LinearAttribute(), LinearAttribute(), LinearAttribute(), LinearAttribute()

    @refuses_at_the_call
    def __init__(
        self, num_hiddens: int, num_heads: int, num_kv_heads: int, bias: bool = False, rope: bool = False,
        causal: bool = True, *, dtype: Any = np.float32, rng: RngLike = None,
    ) -> None:  # fmt: skip
        self.rope, self.causal = scalars.flag(rope, "rope"), scalars.flag(causal, "causal")
        sizes = grouped_sizes(num_hiddens, num_heads, num_kv_heads, self.rope)
        n_shared = sizes[2] * (sizes[0] // sizes[1])
        super().__init__(sizes, {"W_q": sizes[0], "W_k": n_shared, "W_v": n_shared}, bias, dtype, rng)

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values."""
        return self._num_kv_heads

    def _check_looks_back(self, causal: Causal = None) -> None:
        check_causal_steps(causal)
        if not (self.causal if causal is None else causal):
            raise ValueError(LOOKS_AHEAD)

    @overload
    def __call__(
        self, queries: NDArray[Real], keys: Any, values: Any = None, valid_lens: Any = None, *, causal: Causal = None,
        keep_mask: Any = None, bias: Any = None, training: Optional[bool] = None, cache: Optional[KeyValueCache] = None,
    ) -> NDArray[Real]: ...  # fmt: skip
    @overload
    def __call__(
        self, queries: Any, keys: Any, values: Any = None, valid_lens: Any = None, *, causal: Causal = None,
        keep_mask: Any = None, bias: Any = None, training: Optional[bool] = None, cache: Optional[KeyValueCache] = None,
    ) -> Any: ...  # fmt: skip
    @calls.checks_names
    def __call__(
        self, queries: Any, keys: Any, values: Any = None, valid_lens: Any = None, *, causal: Causal = None,
        keep_mask: Any = None, bias: Any = None, training: Optional[bool] = None, cache: Optional[KeyValueCache] = None,
    ) -> Any:  # fmt: skip
        if cache is None:
            causal = corner(self.causal, keys, valid_lens, causal)
        return super().__call__(
            queries, keys, values, valid_lens, causal=causal, keep_mask=keep_mask, bias=bias, training=training,
            cache=cache,
        )  # fmt: skip

    def _asked(
        self, queries: Any, keys: Any, values: Any = None, valid_lens: Any = None, *, causal: Causal = None,
        cache: Any = None, **others: Any,
    ) -> Any:  # fmt: skip
        if cache is None:
            causal = corner(self.causal, keys, valid_lens, causal)
        return super()._asked(queries, keys, values, valid_lens, causal=causal or False, cache=cache, **others)

    @overload
    def backward(self, grad_output: NDArray[Real]) -> tuple[NDArray[Real], NDArray[Real], NDArray[Real]]: ...
    @overload
    def backward(self, grad_output: Any) -> tuple[Any, Any, Any]: ...
    @refuses_at_the_call
    def backward(self, grad_output: Any) -> Any:
        """Gradients of a loss with respect to queries, keys and values; adds those of the parameters to their `grad`.

        Parameters
        ----------
        grad_output : array of the shape and type of the last training call's output
            The gradient with respect to the output.

        Returns
        -------
        tuple of three arrays
            The gradients of the inputs.  The rules are those of `MultiHeadAttention.backward`.

        Raises
        ------
        RuntimeError
            If there was no call in training mode before, or if its backward was called already.
        """
        return self._backward(grad_output)


@lacks(
    project="its keys and values are those of its one input, X",
    steps="the players read W_q, W_k and W_v, and its projections are one; view() shows its weights",
)
class CausalAttention(RotatesHeads):
    """The causal self-attention of the book's GPT: one projection W_qkv for queries, keys and values.

    >>> import numpy as np, mha_c
    >>> attention = mha_c.CausalAttention(num_hiddens=16, num_heads=4, rope=True, rng=0)
    >>> attention(np.ones((2, 5, 16))).shape, attention.attention_weights.shape
    ((2, 5, 16), (2, 4, 5, 5))

    Call: attention(X, *, keep_mask=None, bias=None, training=None, cache=None, valid_lens=None)

    X  (B, T, num_hiddens), as the result; further arguments are ignored: the book's blocks pass X three times
    keep_mask, bias, training, cache  as in `MultiHeadAttention`, within the causal mask
    valid_lens  (B,), for a cache: how many new steps of each item count, also as fourth argument

    Types and errors are those of `MultiHeadAttention`; `attention_weights` is then (B, num_heads, T, T), and `backward`
    gives the gradient of a call in training mode.

    Parameters
    ----------
    num_hiddens, num_heads : int
        Features of X and of the result, and the number of heads, which divides them.
    bias : bool
        Whether the two projections add a bias.
    rope : bool
        Whether queries and keys are rotated by their positions, which start at 0 (features 2i and 2i + 1 are a pair).
    dtype : float32 or float64
        Type of the parameters.
    rng : None, int or numpy.random.Generator
        Random numbers for the initial weights.

    Attributes
    ----------
    W_qkv : Linear
        The one projection: its rows are those of the queries, then of the keys, then of the values.
    W_o : Linear
        The projection of the joined heads.
    rope : bool
        As given to the constructor.

    Raises
    ------
    ShapeError, TypeError, ValueError
        As in `MultiHeadAttention`.

    Notes
    -----
    Unlike d2l's: angles of rope are float64, as in `GQAAttention`.
    Source: the book's third generation, GPT.CausalAttention, whose state_dicts load.
    """

    W_qkv, W_o = LinearAttribute(), LinearAttribute()
    _roles = "W_qkv", "W_qkv", "W_qkv", "W_o"

    @refuses_at_the_call
    def __init__(
        self, num_hiddens: int, num_heads: int, bias: bool = False, rope: bool = False, *, dtype: Any = np.float32,
        rng: RngLike = None,
    ) -> None:  # fmt: skip
        self.rope = scalars.flag(rope, "rope")
        hiddens, heads, _ = grouped_sizes(num_hiddens, num_heads, 1, self.rope)
        super().__init__((hiddens, heads, heads), {"W_qkv": 3 * hiddens}, bias, dtype, rng)

    @overload
    def __call__(
        self, X: NDArray[Real], *others: Any, causal: Causal = True, keep_mask: Any = None, bias: Any = None,
        training: Optional[bool] = None, cache: Optional[KeyValueCache] = None, valid_lens: Any = None,
    ) -> NDArray[Real]: ...  # fmt: skip
    @overload
    def __call__(
        self, X: Any, *others: Any, causal: Causal = True, keep_mask: Any = None, bias: Any = None,
        training: Optional[bool] = None, cache: Optional[KeyValueCache] = None, valid_lens: Any = None,
    ) -> Any: ...  # fmt: skip
    @calls.checks_names
    def __call__(
        self, X: Any, *others: Any, causal: Causal = True, keep_mask: Any = None, bias: Any = None,
        training: Optional[bool] = None, cache: Optional[KeyValueCache] = None, valid_lens: Any = None,
    ) -> Any:  # fmt: skip
        if causal is not True:
            check_is_causal(causal)
        counts = None
        if cache is not None or valid_lens is not None:
            counts = counted(cache, others, valid_lens)
        if type(X) is not np.ndarray or X.ndim != 3 or X.shape[2] != self._num_hiddens:
            self._check_input(X)
        corner: Any = "top_left" if cache is None else False
        try:
            return super().__call__(
                X, X, X, counts, causal=corner, keep_mask=keep_mask, bias=bias, training=training, cache=cache
            )
        except TypeError:
            self._check_input(X)  # under its own name: the core calls it queries
            raise

    def _asked(  # type: ignore[override]  # of one input
        self, X: Any, *others: Any, causal: Causal = True, cache: Any = None, valid_lens: Any = None, **more: Any
    ) -> Any:
        check_is_causal(causal)
        counts = None if cache is valid_lens is None else counted(cache, others, valid_lens)
        self._check_input(X)
        return super()._asked(X, X, X, counts, causal="top_left" if cache is None else False, cache=cache, **more)

    def _check_input(self, X: Any) -> None:
        check_features(floats(to_array(X, "X"), "X"), "X", self._num_hiddens)

    def _packed(self, states: States, dtype: Any) -> tuple[Any, ...]:
        return *states["W_qkv"].packed_parts(dtype, 3), states["W_o"].packed(dtype)

    def _rows(self, states: States) -> Any:
        n = states["W_qkv"].out_features // 3
        return (0, n), (n, n), (2 * n, n)

    @overload  # type: ignore[override]  # of one input
    def backward(self, grad_output: NDArray[Real]) -> NDArray[Real]: ...
    @overload
    def backward(self, grad_output: Any) -> Any: ...
    @refuses_at_the_call
    def backward(self, grad_output: Any) -> Any:
        """The gradient of a loss with respect to X; adds those of the parameters to their `grad`.

        Parameters
        ----------
        grad_output : array of the shape and type of the last training call's output
            The gradient with respect to the output.

        Returns
        -------
        array of X's shape
            The gradient.  The rules are those of `MultiHeadAttention.backward`.

        Raises
        ------
        RuntimeError
            If there was no call in training mode before, or if its backward was called already.
        """
        return self._backward(grad_output, join=True)[0]
