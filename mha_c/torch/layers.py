"""The attention layers of the book as torch modules: MultiHeadAttention, DotProductAttention, AdditiveAttention.

They can replace d2l's: real nn.Linear children with d2l's names in d2l's order (so that weights load both ways and
Xavier initialization finds them), training mode at the start, gradients by autograd.  A plain call is one call of the
compiled core, and so is its backward pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional, overload

import torch
from torch import Tensor, nn

from .. import layers as of_numpy
from .._arguments import constructors, scalars
from .._arguments.calls import refuses_at_the_call
from .._layer.description import BOOK_NAMES
from ..masking import TransposesHeads
from . import masking
from ._call import general
from ._call.children import Layout
from ._decoder.projected import ProjectedKeyValues, project
from ._module import AttentionModule
from ._twins import twin

if TYPE_CHECKING:
    from .._types import EmptyRows


@twin(of_numpy.DotProductAttention)
class DotProductAttention(AttentionModule):
    """Scaled dot-product attention: softmax(queries keys^T / sqrt(d)) values.

    Attributes
    ----------
    dropout : nn.Dropout
        The dropout of the attention weights.

    Examples
    --------
    >>> import torch, mha_c.torch
    >>> queries, keys = torch.ones(2, 1, 2), torch.ones(2, 10, 2)
    >>> values = torch.arange(40.0).reshape(1, 10, 4).repeat(2, 1, 1)
    >>> attention = mha_c.torch.DotProductAttention(dropout=0.5).eval()
    >>> attention(queries, keys, values, torch.tensor([2, 6])).shape
    torch.Size([2, 1, 4])
    """

    @refuses_at_the_call
    def __init__(self, dropout: float, *, empty_rows: EmptyRows = "uniform") -> None:
        super().__init__(empty_rows)
        self.dropout = nn.Dropout(scalars.probability(dropout))

    _lines = general.dot_product


DotProductAttention._layout = Layout.of(())


@twin(of_numpy.MultiHeadAttention)
class MultiHeadAttention(AttentionModule, TransposesHeads):
    """Multi-head attention: each head attends in its own features, and W_o joins what all heads found.

    >>> import torch, mha_c.torch
    >>> mha = mha_c.torch.MultiHeadAttention(num_hiddens=100, num_heads=5, dropout=0.5)
    >>> X, Y = torch.ones(2, 4, 100), torch.ones(2, 6, 100)
    >>> mha(X, Y, Y, torch.tensor([3, 2])).shape
    torch.Size([2, 4, 100])
    >>> mha.attention_weights.shape
    torch.Size([2, 5, 4, 6])

    Call: mha(queries, keys, values, valid_lens=None, *, causal=False, keep_mask=None, bias=None, training=None,
    cache=None)

    queries, keys, values  (B, Q, .), (B, K, .), (B, K, .), of the parameters' device and type; on the CPU 16-bit floats
      are computed in float32; the result is (B, Q, num_hiddens)
    valid_lens  (B,) or (B, Q): how many keys count; the others are never read, unless a part of the layer was replaced
      or has hooks: then the call is the book's own lines
    causal  True hides what comes after a query
    keep_mask  bool, (Q, K) or (B, H, Q, K) (of layers with one head (B, Q, K)), where sizes 1 broadcast: True may
      attend; with a cache K are all steps
    bias  added to the scores, of the same shapes and of the inputs' type; gradients flow back to it
    training  overrides the mode of the dropout
    cache  of `new_cache`: keys and values of earlier steps, to which those of this call are added

    A wrong argument raises ShapeError, TypeError or ValueError.  The first edition's constructor,
    MultiHeadAttention(key_size, query_size, value_size, num_hiddens, num_heads, dropout, bias=False), works, too, and
    sets the features of the inputs; else the projections are nn.LazyLinear until the first call sets them, as in d2l.
    `attention_weights` (B, H, Q, K), before dropout, are computed when first read; gradients flow from them to inputs
    and parameters, not to the output (RuntimeError).  Each call with dropout draws one seed from torch's generator.  On
    other devices torch's own kernels compute.  Source: d2l 11.5 (10.5 in the first edition); Vaswani et al. 2017.

    Attributes
    ----------
    attention : DotProductAttention
        The attention of each head, as in d2l: it has `dropout`, and `attention_weights` (B*H, Q, K), row b*H + h.
    W_q, W_k, W_v, W_o : nn.Linear
        The projections of queries, keys, values and of the joined heads.
    """

    _masking = masking
    _forms = constructors.MULTI_HEAD
    _by_head = True

    @overload
    def __init__(
        self, num_hiddens: int, num_heads: int, dropout: float, bias: bool = ..., *, use_bias: bool = ...,
        empty_rows: EmptyRows = ..., device: Any = ..., dtype: Optional[torch.dtype] = ...,
    ) -> None: ...  # fmt: skip
    @overload
    def __init__(
        self, key_size: int, query_size: int, value_size: int, num_hiddens: int, num_heads: int, dropout: float,
        bias: bool = ..., *, use_bias: bool = ..., empty_rows: EmptyRows = ..., device: Any = ...,
        dtype: Optional[torch.dtype] = ...,
    ) -> None: ...  # fmt: skip
    @constructors.shows(*_forms)
    @refuses_at_the_call
    def __init__(
        self, *sizes: Any, empty_rows: EmptyRows = "uniform", device: Any = None,
        dtype: Optional[torch.dtype] = None, **named: Any,
    ) -> None:  # fmt: skip
        given = constructors.multi_head(sizes, named)
        hiddens = given["num_hiddens"]
        bias = scalars.switch(given["bias"], "bias")
        super().__init__(empty_rows)
        self.num_heads = given["num_heads"]
        self.attention: DotProductAttention = self._new_attention(given["dropout"], empty_rows)
        place = {"device": device, "dtype": dtype}
        self.W_q = linear(given.get("query_size"), hiddens, bias, place)
        self.W_k = linear(given.get("key_size"), hiddens, bias, place)
        self.W_v = linear(given.get("value_size"), hiddens, bias, place)
        self.W_o = linear(hiddens if "key_size" in given else None, hiddens, bias, place)

    def _new_attention(self, dropout: Any, empty_rows: EmptyRows) -> Any:
        return DotProductAttention(dropout, empty_rows=empty_rows)

    def _inner(self) -> Any:
        return self._modules["attention"]

    def _read_weights(self) -> Any:
        if self._last is not None:  # a program has assigned them
            return super()._read_weights()
        inner = self.attention
        if isinstance(inner, AttentionModule):
            return inner._shown(self.num_heads, type(self).__name__)
        weights = inner.attention_weights
        return weights.reshape(-1, self.num_heads, *weights.shape[-2:])

    _lines = general.multi_head


MultiHeadAttention._layout = Layout.of(
    enumerate(BOOK_NAMES),
    ("attention", DotProductAttention),
    [(None, name, getattr(MultiHeadAttention, name)) for name in ("transpose_qkv", "transpose_output")],
)


@twin(of_numpy.AdditiveAttention)
class AdditiveAttention(AttentionModule):
    """Additive (Bahdanau) attention: softmax(w_v . tanh(W_q queries + W_k keys)) values; no biases, no scale.

    Attributes
    ----------
    W_k, W_q, w_v : nn.Linear
        The projections of keys and queries, and the one that makes a score of their sum.
    dropout : nn.Dropout
        The dropout of the attention weights.

    Notes
    -----
    Children in d2l's order: W_k, W_q, w_v, dropout.  Unlike d2l's, it never builds the (B, Q, K, num_hiddens) tensor of
    features, forward or backward.  Source: d2l 11.3 (10.3 in the first edition); Bahdanau, Cho and Bengio 2014.

    Examples
    --------
    >>> import torch, mha_c.torch
    >>> attention = mha_c.torch.AdditiveAttention(key_size=2, query_size=20, num_hiddens=8, dropout=0.1)
    >>> attention(torch.ones(2, 1, 20), torch.ones(2, 10, 2), torch.ones(2, 10, 4), torch.tensor([2, 6])).shape
    torch.Size([2, 1, 4])
    """

    _forms = constructors.ADDITIVE

    @overload
    def __init__(
        self, num_hiddens: int, dropout: float, *, empty_rows: EmptyRows = ..., device: Any = ...,
        dtype: Optional[torch.dtype] = ...,
    ) -> None: ...  # fmt: skip
    @overload
    def __init__(
        self, key_size: int, query_size: int, num_hiddens: int, dropout: float, *, empty_rows: EmptyRows = ...,
        device: Any = ..., dtype: Optional[torch.dtype] = ...,
    ) -> None: ...  # fmt: skip
    @constructors.shows(*_forms)
    @refuses_at_the_call
    def __init__(
        self, *sizes: Any, empty_rows: EmptyRows = "uniform", device: Any = None,
        dtype: Optional[torch.dtype] = None, **named: Any,
    ) -> None:  # fmt: skip
        given = constructors.additive(sizes, named)
        hiddens = given["num_hiddens"]
        super().__init__(empty_rows)
        place = {"device": device, "dtype": dtype}
        self.W_k = linear(given.get("key_size"), hiddens, False, place)
        self.W_q = linear(given.get("query_size"), hiddens, False, place)
        self.w_v = linear(hiddens if "key_size" in given else None, 1, False, place)
        self.dropout = nn.Dropout(scalars.probability(given["dropout"]))

    @twin(of_numpy.AdditiveAttention.project_keys)
    @refuses_at_the_call
    def project_keys(self, keys: Tensor, valid_lens: Any = None) -> ProjectedKeyValues:
        """Project the keys by W_k once, for a decoder that uses the same keys at every step."""
        return project(self, keys, None, valid_lens)

    _lines = general.additive


AdditiveAttention._layout = Layout.of(((0, "W_q"), (1, "W_k"), (8, "w_v")))

# Those of all generations of the book.
OF_BOOK: tuple[type[AttentionModule], ...] = (MultiHeadAttention, DotProductAttention, AdditiveAttention)


# --- What the layers share ----------------------------------------------------------------------------


def linear(size: Any, out_features: int, bias: bool, place: dict[str, Any]) -> nn.Linear:
    """A projection; an nn.LazyLinear where no size is given."""
    if size is None:
        return nn.LazyLinear(out_features, bias, **place)
    return nn.Linear(size, out_features, bias, **place)
