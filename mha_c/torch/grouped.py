"""Attention layers of the book's third generation as torch modules: GQAAttention, and CausalAttention of its GPT."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.nn import functional as F

from .. import grouped as of_numpy
from .._arguments import calls, scalars
from .._arguments.calls import refuses_at_the_call
from .._arguments.options import check_causal_steps
from .._decoder.steps import DecodingLayer
from .._layer.description import BOOK_NAMES
from ._call import general
from ._call.children import Layout
from ._call.formulas import visible_keys
from ._call.inputs import check_projected
from ._call.records import Asked, AttentionCall, LayerInputs, LayerParameters, Options, new_record
from ._call.turning import turned, turns
from ._decoder.decoding import KeyValueCache, NewSteps
from ._decoder.projected import ProjectedKeyValues, project
from ._explained import explained
from ._module import AttentionModule, called, leaf_of_a_graph
from ._private import fused_attention
from ._twins import twin

if TYPE_CHECKING:
    from .._types import Causal


class RotatesHeads(AttentionModule):
    """What both layers share: heads that are rotated on request, and may share keys.

    Attributes
    ----------
    rope : bool
        Whether queries and keys are rotated by their positions.
    """

    rope: bool
    empty_rows = "zero"
    _by_head = True
    _has_options = True

    def _read_weights(self) -> Any:
        return self._shown(self.num_heads)

    # --- What the layer is to the core ------------------------------------------------------------

    def _turned_features(self) -> int:
        return self._modules["W_o"].in_features // self.num_heads if self.rope else 0

    def _options(self, given: Any, inputs: LayerInputs, parts: Any) -> Optional[Options]:
        turn, rows = None, self._rows_of_joint(parts[0])
        if self.rope:
            queries, keys, _ = inputs
            turn = self._turn(0, max(queries.shape[1], keys.shape[1]), queries.dtype)
        return new_record(Options, (*given, turn, rows))

    # --- The book's lines, where another than the core computes them --------------------------------

    def _general(
        self, inputs: LayerInputs, asked: Asked, projected: bool, steps: Optional[NewSteps], plain: bool
    ) -> Tensor:
        if steps is not None and self.rope and not self._rotates_as_made():
            raise ValueError("a cache rotates each step at its own position, which this layer's own _rope cannot")
        return general.of_heads(self, inputs, asked, projected, steps, plain)

    def _projected(self, inputs: LayerInputs, projected: bool) -> Any:
        """Queries, keys and values (B, rows, heads, features), by the children."""
        raise NotImplementedError

    def _heads(self, inputs: LayerInputs, projected: bool, first: Any = 0) -> Any:
        """The same (B, heads, rows, features), rotated at the positions from `first` on; projected keys are already."""
        q, k, v = (x.transpose(1, 2) for x in self._projected(inputs, projected))
        if self.rope and self._rotates_as_made():
            turn = turns(k if k.shape[2] >= q.shape[2] else q, first)
            q, k = turned(q, turn), k if projected else turned(k, turn)
        elif self.rope:
            q, k = self._rope(q), k if projected else self._rope(k)
        return q, k, v

    def _rope(self, x: Tensor) -> Tensor:
        """x (B, H, T, D), rotated by the positions 0, 1, ...; a program may put its own under this name of the book."""
        return turned(x, turns(x))

    def _rotates_as_made(self) -> bool:
        return type(self)._rope is RotatesHeads._rope and "_rope" not in self.__dict__

    def _has_own_function(self) -> bool:
        """Whether a program has put its own function in the place of torch's, which the book's lines call."""
        return fused_attention is not None and F.scaled_dot_product_attention is not fused_attention

    def _reads_names(self) -> bool:
        return not self._has_own_function()

    def _by_own_function(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, masks: Any) -> Tensor:
        keep_mask, bias = masks
        is_causal = call.valid_lens is keep_mask is bias is None and call.causal != "bottom_right" and call.causal
        hidden: Any = None if is_causal else visible_keys(q, k, call.valid_lens, keep_mask, call.causal)
        if bias is not None:
            hidden = bias if hidden is None else torch.where(hidden, bias, -torch.inf)
        elif hidden is not None:
            hidden = hidden.expand(*hidden.shape[:2], q.shape[2], -1)
        options = self._as_the_book_gives({"attn_mask": hidden, "is_causal": bool(is_causal), "enable_gqa": True})
        out: Tensor = F.scaled_dot_product_attention(q, k, v, **options)
        return out

    def _as_the_book_gives(self, options: dict[str, Any]) -> dict[str, Any]:
        return options

    # --- Errors -------------------------------------------------------------------------------------

    def _in_our_words(self, error: Exception, inputs: dict[str, Any], valid_lens: Any = None) -> Exception:
        """What is wrong with the inputs of a call that has failed, without a traceback: the caller's line comes next.
        (A call that has not failed is not looked at.)"""
        try:
            if calls.is_of_a_library(error):
                self._check_named(inputs, valid_lens)
        except (TypeError, ValueError) as found:
            return found.with_traceback(None)
        return error.with_traceback(None) if calls.is_refusal(error) else error

    def _check_named(self, inputs: dict[str, Any], valid_lens: Any) -> None:
        if isinstance(inputs.get("keys"), ProjectedKeyValues):
            inputs = {"queries": inputs["queries"]}
        if "X" not in inputs and any(x is None for x in inputs.values()):
            raise calls.missing(type(self).__name__, **inputs)
        if "keys" in inputs:
            calls.check_order(type(self).__name__, inputs["keys"], inputs["values"], valid_lens)
        for (name, x), (_, child) in zip(inputs.items(), self._layout.slots):
            check_projected(getattr(self, child), name, x)


def layout_of(slots: Any) -> Layout:
    """The layout of a layer of the third generation, which looks up torch's attention and its own `_rope`."""
    function = [] if fused_attention is None else [(nn.functional, "scaled_dot_product_attention", fused_attention)]
    return Layout.of(slots, methods=[(None, "_rope", RotatesHeads._rope), *function], dropout=None)


@twin(of_numpy.GQAAttention)
class GQAAttention(RotatesHeads):
    """Grouped-query attention: num_heads heads of queries, which share num_kv_heads heads of keys and values.

    Call: gqa(queries, keys, values, valid_lens=None, *, causal=None, keep_mask=None, bias=None, cache=None)

    queries, keys, values  (B, Q, num_hiddens), (B, K, num_hiddens), (B, K, num_hiddens); the result is as queries
    causal  None: as the constructor says
    valid_lens, keep_mask, bias, cache  as in `MultiHeadAttention`, as types and errors; weights (B, num_heads, Q, K)

    Attributes
    ----------
    W_q, W_k, W_v, W_o : nn.Linear
        The projections of queries, keys, values and of the joined heads.
    num_kv_heads : int
        Heads of keys and values.
    head_dim : int
        Features of a head.
    causal : bool
        Whether query i sees keys 0..i only.

    Notes
    -----
    Children, in d2l's order: W_q, W_k, W_v, W_o, so that state_dicts load both ways.  No keys are copied for the heads
    that share them.  A query without visible keys gets 0 before W_o.  Angles of rope have torch's default dtype, as in
    the book.  Source: Ainslie et al. 2023, GQA; the book's third generation.

    Examples
    --------
    >>> import torch, mha_c.torch
    >>> gqa = mha_c.torch.GQAAttention(num_hiddens=16, num_heads=4, num_kv_heads=2, rope=True)
    >>> X = torch.ones(2, 5, 16)
    >>> gqa(X, X, X, torch.tensor([5, 3])).shape, gqa.attention_weights.shape
    (torch.Size([2, 5, 16]), torch.Size([2, 4, 5, 5]))
    """

    @refuses_at_the_call
    def __init__(
        self, num_hiddens: int, num_heads: int, num_kv_heads: int, bias: bool = False, rope: bool = False,
        causal: bool = True, *, device: Any = None, dtype: Optional[torch.dtype] = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.rope, self.causal = scalars.switch(rope, "rope"), scalars.switch(causal, "causal")
        hiddens, self.num_heads, self.num_kv_heads = of_numpy.grouped_sizes(
            num_hiddens, num_heads, num_kv_heads, self.rope
        )
        self.head_dim, bias = hiddens // self.num_heads, scalars.switch(bias, "bias")
        n_shared, place = self.num_kv_heads * self.head_dim, {"device": device, "dtype": dtype}
        for name, n_out in (("W_q", hiddens), ("W_k", n_shared), ("W_v", n_shared), ("W_o", hiddens)):
            setattr(self, name, nn.Linear(hiddens, n_out, bias, **place))

    @twin(DecodingLayer.project)
    @refuses_at_the_call
    def project(self, keys: Tensor, values: Tensor, valid_lens: Any = None) -> ProjectedKeyValues:
        """Project keys by W_k and values by W_v once, for a decoder that uses the same encoder outputs at every step.

        `valid_lens` is for calls that give none.  Keys are rotated at the positions 0, 1, ... with rope.  Gradients
        flow back to keys, values, W_k and W_v.

        >>> import torch, mha_c.torch
        >>> gqa = mha_c.torch.GQAAttention(num_hiddens=16, num_heads=4, num_kv_heads=2, causal=False)
        >>> kv = gqa.project(torch.ones(2, 6, 16), torch.ones(2, 6, 16), torch.tensor([3, 6]))
        >>> gqa(torch.ones(2, 1, 16), kv).shape
        torch.Size([2, 1, 16])
        """
        kv = project(self, keys, values, valid_lens)
        if self.rope:
            heads = kv._keys.unflatten(2, (-1, self.head_dim)).transpose(1, 2)
            kv._keys = self._rope(heads).transpose(1, 2).flatten(2)
        return kv

    @calls.shows_names
    def forward(
        self, queries: Any = None, keys: Any = None, values: Any = None, valid_lens: Any = None, *,
        causal: Causal = None, keep_mask: Any = None, bias: Optional[Tensor] = None,
        cache: Optional[KeyValueCache] = None, **misnamed: Any,
    ) -> Tensor:  # fmt: skip
        """One call of the layer: see the class."""
        try:
            if misnamed:
                raise calls.misnamed(self, "forward", misnamed)
            if isinstance(queries, Proxy):
                corner: Any = causal
            elif cache is not None:
                corner = self._check_looks_back(causal)
            else:
                corner = of_numpy.corner(self.causal, keys, valid_lens, causal)
            return called(self, (queries, keys, values), (valid_lens, keep_mask, bias, corner, None), cache)
        except Exception as error:
            inputs = {} if misnamed else {"queries": queries, "keys": keys, "values": values}
            refusal = self._in_our_words(error, inputs, valid_lens)
            if refusal is error and error.__traceback__ is not None:
                raise
            raise refusal from None

    def _explained(
        self, queries: Any = None, keys: Any = None, values: Any = None, valid_lens: Any = None, *, causal: Any = None,
        **others: Any,
    ) -> dict[str, Any]:  # fmt: skip
        corner = of_numpy.corner(self.causal, keys, valid_lens, causal)
        return explained(self, queries, keys, values, valid_lens, causal=corner, **others)

    def _head_counts(self) -> Any:
        return self.num_heads, self.num_kv_heads

    def _projected(self, inputs: LayerInputs, projected: bool) -> Any:
        q, k, v = inputs
        q, k, v = self.W_q(q), k if projected else self.W_k(k), v if projected else self.W_v(v)
        return [x.unflatten(2, (-1, self.head_dim)) for x in (q, k, v)]

    def _check_looks_back(self, causal: Causal = None) -> bool:
        check_causal_steps(causal)
        if not (self.causal if causal is None else causal):
            raise ValueError(of_numpy.LOOKS_AHEAD)
        return True

    if TYPE_CHECKING:  # nn.Module's takes and gives Any
        W_q: nn.Linear
        W_k: nn.Linear
        W_v: nn.Linear
        W_o: nn.Linear

        def __call__(  # type: ignore[override]  # the model's mode alone says whether it trains
            self, queries: Tensor, keys: Any, values: Any = None, valid_lens: Any = None, *,
            causal: Causal = None, keep_mask: Any = None, bias: Optional[Tensor] = None,
            cache: Optional[KeyValueCache] = None,
        ) -> Tensor: ...  # fmt: skip


GQAAttention._layout = layout_of(enumerate(BOOK_NAMES))


@twin(of_numpy.CausalAttention)
class CausalAttention(RotatesHeads):
    """The causal self-attention of the book's GPT: one projection W_qkv for queries, keys and values.

    Call: attention(X, *, keep_mask=None, bias=None, cache=None, valid_lens=None)

    X  (B, T, num_hiddens), as the result; further arguments are ignored: the book's blocks pass X three times
    keep_mask, bias, cache  as in `MultiHeadAttention`, within the causal mask
    valid_lens  (B,), for a cache: how many new steps of each item count, also as fourth argument

    Types and errors are those of `MultiHeadAttention`; `attention_weights` is then (B, num_heads, T, T).

    Attributes
    ----------
    W_qkv : nn.Linear
        The one projection: its rows are those of the queries, then of the keys, then of the values.
    W_o : nn.Linear
        The projection of the joined heads.

    Notes
    -----
    Children, in d2l's order: W_qkv, W_o.  Angles of rope as in `GQAAttention`.
    Source: the book's third generation, GPT.CausalAttention.

    Examples
    --------
    >>> import torch, mha_c.torch
    >>> attention = mha_c.torch.CausalAttention(num_hiddens=16, num_heads=4, rope=True)
    >>> attention(torch.ones(2, 5, 16)).shape
    torch.Size([2, 5, 16])
    """

    @refuses_at_the_call
    def __init__(
        self, num_hiddens: int, num_heads: int, bias: bool = False, rope: bool = False, *, device: Any = None,
        dtype: Optional[torch.dtype] = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.rope, bias = scalars.switch(rope, "rope"), scalars.switch(bias, "bias")
        hiddens, self.num_heads, _ = of_numpy.grouped_sizes(num_hiddens, num_heads, 1, self.rope)
        place = {"device": device, "dtype": dtype}
        self.W_qkv = nn.Linear(hiddens, 3 * hiddens, bias, **place)
        self.W_o = nn.Linear(hiddens, hiddens, bias, **place)

    @calls.shows_names
    def forward(
        self, X: Tensor, *others: Any, causal: Causal = True, keep_mask: Any = None, bias: Optional[Tensor] = None,
        cache: Optional[KeyValueCache] = None, valid_lens: Any = None, **misnamed: Any,
    ) -> Tensor:  # fmt: skip
        """One call of the layer: see the class."""
        try:
            if misnamed:
                raise calls.misnamed(self, "forward", misnamed)
            if causal is not True:
                of_numpy.check_is_causal(causal)
            counts = None
            if cache is not None or valid_lens is not None or isinstance(X, Proxy):
                counts = of_numpy.counted(cache, others, valid_lens)
            corner = "top_left" if cache is None else True
            return called(self, (X, X, X), (counts, keep_mask, bias, corner, None), cache)
        except Exception as error:
            refusal = self._in_our_words(error, {} if misnamed else {"X": X})
            if refusal is error and error.__traceback__ is not None:
                raise
            raise refusal from None

    def _leaf(self, inputs: Any, asked: Asked, cache: Any) -> Any:
        named = {"keep_mask": asked.keep_mask, "bias": asked.bias, "cache": cache, "valid_lens": asked.valid_lens}
        return leaf_of_a_graph(self, inputs[:1], **named)

    def _explained(  # type: ignore[override]  # of one input
        self, X: Any = None, *others: Any, causal: Any = True, cache: Any = None, valid_lens: Any = None, **masks: Any
    ) -> dict[str, Any]:
        of_numpy.check_is_causal(causal)
        counts = of_numpy.counted(cache, others, valid_lens) if cache is not None or valid_lens is not None else None
        return explained(self, X, X, X, counts, causal="top_left", cache=cache, **masks)

    def _head_counts(self) -> Any:
        return self.num_heads, self.num_heads

    def _as_the_book_gives(self, options: dict[str, Any]) -> dict[str, Any]:
        return {name: x for name, x in options.items() if name != "enable_gqa" and x is not None and x is not False}

    def _rows_of_joint(self, parameters: LayerParameters) -> Any:
        assert parameters.W_q is not None  # all three, as the layout says
        n = parameters.W_q.shape[0] // 3
        return (0, n), (n, n), (2 * n, n)

    def _for_core(self, parameters: LayerParameters) -> LayerParameters:
        return parameters.apart(self._rows_of_joint(parameters))

    def _projected(self, inputs: LayerInputs, projected: bool) -> Any:
        return self.W_qkv(inputs[0]).unflatten(2, (3, self.num_heads, -1)).unbind(2)

    if TYPE_CHECKING:  # nn.Module's takes and gives Any

        def __call__(  # type: ignore[override]  # of one input
            self, X: Tensor, *others: Any, causal: Causal = True, keep_mask: Any = None, bias: Optional[Tensor] = None,
            cache: Optional[KeyValueCache] = None, valid_lens: Any = None,
        ) -> Tensor: ...  # fmt: skip


CausalAttention._layout = layout_of([*((slot, "W_qkv") for slot in range(3)), (3, "W_o")])

OF_MODELS = GQAAttention, CausalAttention  # in those of the third generation
