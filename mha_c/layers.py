"""The attention layers of the book: MultiHeadAttention, DotProductAttention, AdditiveAttention.

Constructors take the arguments of every edition of d2l; parameters have d2l's names, and results d2l's shapes.  One
call of a layer is one call of the compiled core.  The layer keeps what `attention_weights` needs, and computes the
weights when they are read.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from . import masking
from ._arguments import constructors, scalars
from ._arguments.calls import refuses_at_the_call
from ._decoder.caches import ProjectedKeyValues
from ._decoder.steps import DecodingLayer
from ._layer.lacks import ONE_HEAD, lacks
from ._layer.module import Dropout
from .linear import LinearAttribute, State

if TYPE_CHECKING:
    from ._types import EmptyRows, RngLike

__all__ = ["AdditiveAttention", "DotProductAttention", "MultiHeadAttention"]
__dir__ = __all__.copy  # what dir() and completion show


@lacks(**ONE_HEAD)
class DotProductAttention(DecodingLayer):
    """Scaled dot-product attention: softmax(queries keys^T / sqrt(d)) values.

    >>> import numpy as np, mha_c
    >>> queries, keys = np.ones((2, 1, 2)), np.ones((2, 10, 2))
    >>> values = np.arange(40.0).reshape(1, 10, 4).repeat(2, axis=0)
    >>> attention = mha_c.DotProductAttention(dropout=0.5)
    >>> attention(queries, keys, values, valid_lens=[2, 6]).round(4)
    array([[[ 2.,  3.,  4.,  5.]],
    <BLANKLINE>
           [[10., 11., 12., 13.]]])
    >>> attention.attention_weights.shape
    (2, 1, 10)

    Call: attention(queries, keys, values, valid_lens=None, *, causal=False, keep_mask=None, bias=None, training=None,
    cache=None)

    queries, keys, values  (B, Q, d), (B, K, d), (B, K, Dv); the result is (B, Q, Dv)
    valid_lens, causal, keep_mask, bias, training, cache  as in `MultiHeadAttention`, and so is all else

    Parameters
    ----------
    dropout : float
        Probability with which an attention weight is dropped, in training mode.
    dtype, rng, empty_rows : as in `MultiHeadAttention`
        Keyword-only.

    Notes
    -----
    Source: d2l 11.3 (10.3 in the first edition); Vaswani et al. 2017, "Attention is all you need".
    """

    @refuses_at_the_call
    def __init__(
        self, dropout: float, *, dtype: Any = np.float32, rng: RngLike = None, empty_rows: EmptyRows = "uniform"
    ) -> None:
        super().__init__((), dropout, dtype, rng, empty_rows)

    @property
    def dropout(self) -> Dropout:
        """The layer's dropout: its probability `p`."""
        return self._dropout

    def _children(self) -> Iterable[tuple[str, Any]]:
        return [("dropout", self._dropout)]


class MultiHeadAttention(DecodingLayer, masking.TransposesHeads):
    """Multi-head attention: each head attends in its own features, and W_o joins what all heads found.

    >>> import numpy as np, mha_c
    >>> X = np.ones((2, 4, 100), dtype=np.float32)
    >>> mha = mha_c.MultiHeadAttention(num_hiddens=100, num_heads=5, dropout=0.5, rng=0)
    >>> mha(X, X, X, valid_lens=[3, 2]).shape
    (2, 4, 100)
    >>> mha.attention_weights.shape
    (2, 5, 4, 4)

    Call: mha(queries, keys, values, valid_lens=None, *, causal=False, keep_mask=None, bias=None, training=None,
    cache=None)

    queries, keys, values  (B, Q, .), (B, K, .), (B, K, .): arrays, lists or CPU tensors without gradient, float32 or
      float64; the result, (B, Q, num_hiddens), is of their type
    valid_lens  (B,) or (B, Q): how many keys count; the others are never read
    causal  True hides what comes after a query
    keep_mask  bool, (Q, K) or (B, H, Q, K) (of layers with one head (B, Q, K)), where sizes 1 broadcast: True may
      attend; with a cache K are all steps
    bias  of such a shape, and of the inputs' type: added to the scores
    training  overrides train() and eval() for one call
    cache  of `new_cache`: keys and values of earlier steps, to which those of this call are added

    A wrong argument raises ShapeError, TypeError or ValueError, and changes nothing.  The first edition's constructor,
    MultiHeadAttention(key_size, query_size, value_size, num_hiddens, num_heads, dropout, bias=False), works as well,
    and says how many features the inputs have; else the first call does.
    Source: d2l 11.5 (10.5 in the first edition); Vaswani et al. 2017, section 3.2.2.

    Parameters
    ----------
    num_hiddens, num_heads : int
        Features of the result, and how many heads share them: num_heads must divide num_hiddens.
    dropout : float
        Probability with which an attention weight is dropped, in training mode.
    bias : bool
        Whether the four projections add a bias; `use_bias` is the same.
    dtype : float32 or float64
        Type of the parameters.
    rng : None, int or numpy.random.Generator
        For the initial weights, which are Xavier-uniform, and for dropout.
    empty_rows : {"uniform", "zero"}
        What a query whose length is <= 0 gets: the mean of all values, as in d2l, or 0.

    Attributes
    ----------
    W_q, W_k, W_v, W_o : Linear
        The projections; their `weight` and `bias` can be read and assigned.
    """

    W_q, W_k, W_v, W_o = LinearAttribute(), LinearAttribute(), LinearAttribute(), LinearAttribute()
    _forms = constructors.MULTI_HEAD
    _by_head = True
    _masking = masking

    @overload
    def __init__(
        self, num_hiddens: int, num_heads: int, dropout: float, bias: bool = ..., *, use_bias: bool = ...,
        dtype: Any = ..., rng: RngLike = ..., empty_rows: EmptyRows = ...,
    ) -> None: ...  # fmt: skip
    @overload
    def __init__(
        self, key_size: int, query_size: int, value_size: int, num_hiddens: int, num_heads: int, dropout: float,
        bias: bool = ..., *, use_bias: bool = ..., dtype: Any = ..., rng: RngLike = ..., empty_rows: EmptyRows = ...,
    ) -> None: ...  # fmt: skip
    @constructors.shows(*_forms)
    @refuses_at_the_call
    def __init__(
        self, *sizes: Any, dtype: Any = np.float32, rng: RngLike = None, empty_rows: EmptyRows = "uniform", **named: Any
    ) -> None:
        given = constructors.multi_head(sizes, named)
        hiddens = given["num_hiddens"]
        self._num_hiddens: int = hiddens
        self._num_heads = given["num_heads"]
        bias = scalars.flag(given["bias"], "bias")
        inputs = ("W_q", "query_size"), ("W_k", "key_size"), ("W_v", "value_size")
        states = [State(name, hiddens, given.get(size), bias) for name, size in inputs]
        super().__init__((*states, State("W_o", hiddens, hiddens, bias)), given["dropout"], dtype, rng, empty_rows)
        self._child = self._attention = DotProductAttention(0, dtype=dtype, rng=self._rng, empty_rows=empty_rows)
        self._child._shown = self._shown  # both show the same memory
        self._attention._dropout = self._dropout

    @property
    def num_hiddens(self) -> int:
        """Features of the result."""
        return self._num_hiddens

    @property
    def num_heads(self) -> int:
        """How many heads, H."""
        return self._num_heads

    @property
    def attention(self) -> DotProductAttention:
        """The attention of each head, as in d2l: it has `dropout`, and `attention_weights` (B*H, Q, K), row b*H + h."""
        return self._attention

    def _children(self) -> Iterable[tuple[str, Any]]:
        return [("attention", self._attention), *self._linears.items()]


@lacks(**ONE_HEAD)
class AdditiveAttention(DecodingLayer):
    """Additive (Bahdanau) attention: softmax(w_v . tanh(W_q queries + W_k keys)) values; no biases, no scale.

    >>> import numpy as np, mha_c
    >>> queries, keys = np.ones((2, 1, 20)), np.ones((2, 10, 2))
    >>> values = np.arange(40.0).reshape(1, 10, 4).repeat(2, axis=0)
    >>> attention = mha_c.AdditiveAttention(num_hiddens=8, dropout=0.1)
    >>> attention(queries, keys, values, valid_lens=[2, 6]).round(4)
    array([[[ 2.,  3.,  4.,  5.]],
    <BLANKLINE>
           [[10., 11., 12., 13.]]])

    Call: attention(queries, keys, values, valid_lens=None, *, causal=False, keep_mask=None, bias=None, training=None,
    cache=None)

    queries, values  (B, Q, query_size), (B, K, Dv); the result is (B, Q, Dv)
    keys  (B, K, key_size), or what `project_keys` gave
    valid_lens, causal, keep_mask, bias, training, cache  as in `MultiHeadAttention`, and so is all else

    The first edition's constructor, AdditiveAttention(key_size, query_size, num_hiddens, dropout), works as well, and
    says how many features keys and queries have; else the first call does.

    Parameters
    ----------
    num_hiddens : int
        Features of the projected keys and queries, which are added.
    dropout : float
        Probability with which an attention weight is dropped, in training mode.
    dtype, rng, empty_rows : as in `MultiHeadAttention`
        Keyword-only.

    Attributes
    ----------
    W_k, W_q, w_v : Linear
        The projections of keys and queries, and the one that makes a score of their sum.

    Notes
    -----
    Unlike d2l's, it never builds the (B, Q, K, num_hiddens) array of features.
    Source: d2l 11.3 (10.3 in the first edition); Bahdanau, Cho and Bengio 2014.
    """

    W_k, W_q, w_v = LinearAttribute(), LinearAttribute(), LinearAttribute()
    _forms = constructors.ADDITIVE

    @overload
    def __init__(
        self, num_hiddens: int, dropout: float, *, dtype: Any = ..., rng: RngLike = ..., empty_rows: EmptyRows = ...
    ) -> None: ...
    @overload
    def __init__(
        self, key_size: int, query_size: int, num_hiddens: int, dropout: float, *,
        dtype: Any = ..., rng: RngLike = ..., empty_rows: EmptyRows = ...,
    ) -> None: ...  # fmt: skip
    @constructors.shows(*_forms)
    @refuses_at_the_call
    def __init__(
        self, *sizes: Any, dtype: Any = np.float32, rng: RngLike = None, empty_rows: EmptyRows = "uniform", **named: Any
    ) -> None:
        given = constructors.additive(sizes, named)
        hiddens = given["num_hiddens"]
        states = [State(name, hiddens, given.get(size)) for name, size in (("W_k", "key_size"), ("W_q", "query_size"))]
        super().__init__((*states, State("w_v", 1, hiddens)), given["dropout"], dtype, rng, empty_rows)

    @property
    def dropout(self) -> Dropout:
        """The layer's dropout: its probability `p`."""
        return self._dropout

    @refuses_at_the_call
    def project_keys(self, keys: Any, valid_lens: Any = None) -> ProjectedKeyValues:
        """Project the keys by W_k once, for a decoder that uses the same keys at every step.

        Parameters
        ----------
        keys : array_like (B, K, key_size)
            The keys that a call would take.
        valid_lens : array_like (B,) or (B, Q), optional
            As in `project`, which projects the values too.

        Returns
        -------
        ProjectedKeyValues
            A call takes it in place of `keys`, skips W_k and returns the same result.  If W_k has changed since, the
            call raises a ValueError: project again.

        Notes
        -----
        d2l has no such call and projects the keys again at each step.  Errors are those of a call with these keys.

        Examples
        --------
        >>> import numpy as np, mha_c
        >>> attention = mha_c.AdditiveAttention(num_hiddens=8, dropout=0.1, rng=0)
        >>> encoder_outputs = np.ones((2, 10, 16), dtype=np.float32)
        >>> keys = attention.project_keys(encoder_outputs, valid_lens=[2, 6])
        >>> attention(np.ones((2, 1, 20), dtype=np.float32), keys, encoder_outputs).shape
        (2, 1, 16)
        """
        return self._projected(valid_lens, keys=keys)

    def _children(self) -> Iterable[tuple[str, Any]]:
        return [*self._linears.items(), ("dropout", self._dropout)]
