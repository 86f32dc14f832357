"""Attention layers of the book's third generation as torch modules: GQAAttention, and CausalAttention of its GPT."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Optional

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.nn import functional as F

from .. import grouped as of_numpy
from .._arguments import calls, scalars
from .._arguments.calls import refuses_at_the_call
from .._arguments.options import check_causal_steps, core_corner
from .._decoder.steps import Decodes
from ._call.children import Layout, Parts
from ._call.choice import CORE, in_one_call, parts_for_core
from ._call.formulas import visible_keys
from ._call.inputs import check_projected
from ._call.records import AttentionCall, Parameters
from ._decoder.decoding import KeyValueCache, Steps
from ._decoder.projected import ProjectedKeyValues, project
from ._heads import AttendsHeads
from ._module import DecodingModule, leaf_of_a_graph
from ._private import fused_attention, in_python
from ._tensors import FLOATS, elsewhere, exporting, is_compiling, recorded_or_transformed
from ._twins import twin
from ._weights.last import in_steps

if TYPE_CHECKING:
    from .._types import Causal


class RotatesHeads(AttendsHeads, DecodingModule):
    """What both layers share: attention of heads that are rotated on request, and decoding.

    Attributes
    ----------
    rope : bool
        Whether queries and keys are rotated by their positions.
    """

    rope: bool

    def _joined(self, q: Tensor, k: Tensor, v: Tensor, valid_lens: Any, causal: Any, projected: bool = False) -> Tensor:
        """(B, Q, H * D), of q (B, Q, H, D) and k, v (B, K, Hkv, D); projected: k is rotated already."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if self.rope and self._rotates_as_made():
            turn = turns(k) if k.shape[2] >= q.shape[2] else turns(q)
            q, k = turned(q, turn), k if projected else turned(k, turn)
        elif self.rope:
            q, k = self._rope(q), k if projected else self._rope(k)
        lens = None if valid_lens is None else torch.as_tensor(valid_lens).clone()  # the caller may change it
        if has_own_function():
            out = self._by_own_function(q, k, v, self._options(q, k, lens, causal))
        else:
            out = self._attended(AttentionCall(lens, causal), q, k, v)
        return out.transpose(1, 2).flatten(2)

    def _by_own_function(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        self.__dict__["_last"] = None  # nobody has seen its weights
        out: Tensor = F.scaled_dot_product_attention(q, k, v, **options)
        return out

    def _rope(self, x: Tensor) -> Tensor:
        """x (B, H, T, D), rotated by the positions 0, 1, ...; a program may put its own under this name of the book."""
        return turned(x, turns(x))

    def _rotates_as_made(self) -> bool:
        return type(self)._rope is RotatesHeads._rope and "_rope" not in self.__dict__

    def _refusal(self, error: Exception, inputs: dict[str, Any], valid_lens: Any = None) -> Optional[Exception]:
        """What is wrong with the inputs of a call that has failed, in our words, without a traceback: the caller's line
        comes next.  None if nothing is.  (A call that has not failed is not looked at.)"""
        try:
            if calls.is_of_a_library(error):
                self._check_named(inputs, valid_lens)
        except (TypeError, ValueError) as found:
            return found.with_traceback(None)
        return error.with_traceback(None) if calls.is_refusal(error) else None

    def _check_named(self, inputs: dict[str, Any], valid_lens: Any) -> None:
        if isinstance(inputs.get("keys"), ProjectedKeyValues):
            inputs = {"queries": inputs["queries"]}
        if "X" not in inputs and any(x is None for x in inputs.values()):
            raise calls.missing(type(self).__name__, **inputs)
        if "keys" in inputs:
            calls.check_order(type(self).__name__, inputs["keys"], inputs["values"], valid_lens)
        for (name, x), (_, child) in zip(inputs.items(), self._layout.slots):
            check_projected(getattr(self, child), name, x)

    def _options(self, q: Tensor, k: Tensor, lens: Any, causal: Any) -> dict[str, Any]:
        """What the book's lines give to scaled_dot_product_attention behind q, k, v."""
        raise NotImplementedError

    def _heads(self, inputs: Any) -> Any:
        """q (B, Q, H, D) and k, v (B, K, Hkv, D), by the children."""
        raise NotImplementedError

    def _kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.num_heads

    def _step(self, cache: Any, inputs: Any, valid_lens: Any) -> Tensor:
        """A call with a cache: by the core if it can read all parts, else by the children."""
        if is_compiling() and not exporting():
            return in_python(self._step, cache, inputs, valid_lens)
        if self.rope and not self._rotates_as_made():
            raise ValueError("a cache rotates each step at its own position, which this layer's own _rope cannot")
        steps = Steps.of(self, cache, inputs, valid_lens, None)._replace(
            num_heads=(self.num_heads, self._kv_heads()), turn=self._turn if self.rope else None
        )
        parts = None if has_own_function() else parts_for_core(self, *inputs)
        if parts is not None:
            parts = Parts._make(parts)
            parts = parts._replace(parameters=self._for_core(parts.parameters))
            output = in_one_call(self, CORE, parts, inputs, None, None, steps)
            if output is not None:
                return output
        first = cache._steps
        q, k, v = self._heads(inputs)
        if self.rope:
            turn = turns(q.transpose(1, 2), first)
            q, k = (turned(x.transpose(1, 2), turn).transpose(1, 2) for x in (q, k))
        seen = steps.appended(k.flatten(2), v.flatten(2))
        k, v = (x.unflatten(2, (-1, q.shape[3])) for x in seen[:2])
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if has_own_function():
            mask = visible_keys(q, k, seen.valid_lens, seen.keep_mask)
            shared = {} if self._kv_heads() == self.num_heads else {"enable_gqa": True}
            out = self._by_own_function(q, k, v, {"attn_mask": mask, **shared})
        else:
            call = AttentionCall(seen.valid_lens, return_weights=seen.steps is not None)
            out = self._attended(call, q, k, v, seen.keep_mask)
            self.__dict__["_last"] = in_steps(self.__dict__["_last"], seen.steps, seen.n_steps)
        joined: Tensor = self._modules["W_o"](out.transpose(1, 2).flatten(2))
        return joined

    def _turn(self, first: Any, n_steps: int, dtype: torch.dtype) -> Any:
        """Cosines and sines of n steps from `first` on, a number or (B,), as the core takes them."""
        features = self._modules["W_o"].in_features // self.num_heads
        kind = torch.float64 if dtype is torch.float64 else torch.float32
        if isinstance(first, int):
            return _turn_of_all(first, n_steps, features, torch.get_default_dtype(), kind)
        return tuple(x.squeeze(1).to(kind).numpy() for x in _turns(places(first, n_steps), features))


@twin(of_numpy.GQAAttention)
class GQAAttention(RotatesHeads):
    """Grouped-query attention: num_heads heads of queries, which share num_kv_heads heads of keys and values.

    Call: gqa(queries (B, Q, num_hiddens), keys (B, K, num_hiddens), values (B, K, num_hiddens), valid_lens=None, *,
    causal=None) returns (B, Q, num_hiddens).  Arguments, types and errors are those of `MultiHeadAttention`;
    `attention_weights` is then (B, num_heads, Q, K).

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

    @twin(Decodes.project)
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
        causal: Causal = None, cache: Optional[KeyValueCache] = None, **misnamed: Any,
    ) -> Tensor:  # fmt: skip
        """One call of the layer: see the class."""
        try:
            if misnamed:
                raise calls.misnamed(self, "forward", misnamed)
            if isinstance(queries, Proxy):
                return leaf_of_a_graph(self, (queries, keys, values, valid_lens), causal=causal, cache=cache)
            if cache is not None:
                self._check_looks_back(causal)
                return self._step(cache, (queries, keys, values), valid_lens)
            rows: Any = keys, values
            if projected := isinstance(keys, ProjectedKeyValues):
                *rows, valid_lens = keys._given_to(self, queries, values, valid_lens)
            q, k, v = self._heads((queries, *rows), projected)
            corner = core_corner(of_numpy.corner(self.causal, valid_lens, causal), queries, rows[0])
            found: Tensor = self.W_o(self._joined(q, k, v, valid_lens, corner, projected))
            return found
        except Exception as error:
            inputs = {} if misnamed else {"queries": queries, "keys": keys, "values": values}
            refusal = self._refusal(error, inputs, valid_lens)
            if refusal is None:
                raise
            raise refusal from None

    def _kv_heads(self) -> int:
        return self.num_kv_heads

    def _heads(self, inputs: Any, projected: bool = False) -> Any:
        q, k, v = inputs
        q, k, v = self.W_q(q), k if projected else self.W_k(k), v if projected else self.W_v(v)
        return [x.unflatten(2, (-1, self.head_dim)) for x in (q, k, v)]

    def _corner(self, valid_lens: Any, causal: Any) -> Any:
        return of_numpy.corner(self.causal, valid_lens, causal)

    def _options(self, q: Tensor, k: Tensor, lens: Any, causal: Any) -> dict[str, Any]:
        alone = lens is None and causal != "bottom_right"
        mask = None if alone else visible_keys(q, k, lens, causal=causal)
        mask = None if mask is None else mask.expand(*mask.shape[:2], q.shape[2], -1)
        return {"attn_mask": mask, "is_causal": alone and causal is not None, "enable_gqa": True}

    def _check_looks_back(self, causal: Causal = None) -> None:
        check_causal_steps(causal)
        if not (self.causal if causal is None else causal):
            raise ValueError(of_numpy.LOOKS_AHEAD)

    if TYPE_CHECKING:  # nn.Module's takes and gives Any
        W_q: nn.Linear
        W_k: nn.Linear
        W_v: nn.Linear
        W_o: nn.Linear

        def __call__(
            self, queries: Tensor, keys: Any, values: Any = None, valid_lens: Any = None, *,
            causal: Causal = None, cache: Optional[KeyValueCache] = None,
        ) -> Tensor: ...  # fmt: skip


GQAAttention._layout = Layout.of(enumerate(("W_q", "W_k", "W_v", "W_o")), dropout=None)


@twin(of_numpy.CausalAttention)
class CausalAttention(RotatesHeads):
    """The causal self-attention of the book's GPT: one projection W_qkv for queries, keys and values.

    Call: attention(X (B, T, num_hiddens)) returns (B, T, num_hiddens); further arguments are ignored, as in the book,
    whose blocks pass X three times.  `attention_weights` is then (B, num_heads, T, T).  valid_lens (B,) is for a cache:
    how many new steps of each item count, also as fourth argument.

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
        self, X: Tensor, *others: Any, causal: Causal = True, cache: Optional[KeyValueCache] = None,
        valid_lens: Any = None, **misnamed: Any,
    ) -> Tensor:  # fmt: skip
        """One call of the layer: see the class."""
        try:
            if misnamed:
                raise calls.misnamed(self, "forward", misnamed)
            if causal is not True:
                of_numpy.check_is_causal(causal)
            if cache is None and valid_lens is None and not isinstance(X, Proxy):
                q, k, v = self._heads((X,))
                found: Tensor = self.W_o(self._joined(q, k, v, None, "top_left"))
                return found
            counts = of_numpy.counted(cache, others, valid_lens)
            if isinstance(X, Proxy):
                return leaf_of_a_graph(self, (X,), causal=causal, cache=cache, valid_lens=counts)
            return self._step(cache, (X, X, X), counts)
        except Exception as error:
            refusal = self._refusal(error, {} if misnamed else {"X": X})
            if refusal is None:
                raise
            raise refusal from None

    def _corner(self, valid_lens: Any, causal: Any) -> Any:
        return "top_left"

    def _options(self, q: Tensor, k: Tensor, lens: Any, causal: Any) -> dict[str, Any]:
        return {"is_causal": True}

    def _heads(self, inputs: Any) -> Any:
        return self.W_qkv(inputs[0]).unflatten(2, (3, self.num_heads, -1)).unbind(2)

    def _for_core(self, parameters: Parameters) -> Parameters:
        assert parameters.W_k is not None  # all three, as the layout says
        W_q, W_k, W_v = parameters.W_k.chunk(3)
        b_q, b_k, b_v = (None,) * 3 if parameters.b_k is None else parameters.b_k.chunk(3)
        return parameters._replace(W_q=W_q, W_k=W_k, W_v=W_v, b_q=b_q, b_k=b_k, b_v=b_v)

    if TYPE_CHECKING:  # nn.Module's takes and gives Any

        def __call__(
            self, X: Tensor, *others: Any, causal: Causal = True, cache: Optional[KeyValueCache] = None,
            valid_lens: Any = None,
        ) -> Tensor: ...  # fmt: skip


CausalAttention._layout = Layout.of(
    ((1, "W_qkv"), (3, "W_o")), dropout=None
)  # among the Parameters of keys: so a cache knows it

OF_MODELS = GQAAttention, CausalAttention  # in those of the third generation


def has_own_function() -> bool:
    """Whether a program has put its own function in the place of torch's, which the book's lines call: then ours do."""
    return fused_attention is not None and F.scaled_dot_product_attention is not fused_attention


# --- Rotary positions, as the book computes them ----------------------------------------------------------


def turns(x: Tensor, first: Any = 0) -> tuple[Tensor, Tensor]:
    """(cosines, sines) of the angles (T, D/2) of x (B, H, T, D), whose positions begin with `first`; (B, 1, T, D/2) if
    each item has its own.  In torch's default type: the book's own numbers."""
    if isinstance(first, int):
        at = torch.arange(first, first + x.shape[-2], dtype=torch.float32, device=x.device)
    else:
        at = places(first, x.shape[-2]).to(x.device, non_blocking=True)
    return _turns(at, x.shape[-1])


def places(first: Any, n_steps: int) -> Tensor:
    """(B, 1, T): the positions of n steps from `first` (B,) on."""
    return torch.from_numpy((first[:, None, None] + np.arange(n_steps)).astype(np.float32))


def _turns(at: Tensor, features: int) -> tuple[Tensor, Tensor]:
    rates = 10000.0 ** (-torch.arange(0, features, 2, device=at.device) / features)
    angles = at[..., None] * rates
    return angles.cos(), angles.sin()


TABLE = 64  # positions of a table: a step of one position computes none of its own


def _turn_of_all(first: int, n_steps: int, features: int, default: torch.dtype, dtype: torch.dtype) -> Any:
    at = first % TABLE
    if at + n_steps <= TABLE:
        return tuple(x[at : at + n_steps] for x in _turn_table(first - at, TABLE, features, default, dtype))
    return _turn_table(first, n_steps, features, default, dtype)


@lru_cache(maxsize=4)  # all layers of a model ask for the same at each step
def _turn_table(first: int, n_steps: int, features: int, default: torch.dtype, dtype: torch.dtype) -> Any:
    angles = _turns(torch.arange(first, first + n_steps, dtype=torch.float32, device="cpu"), features)
    return tuple(x.to(dtype).numpy() for x in angles)


def turned(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """x (B, H, T, D), the features 2i and 2i + 1 of which are turned by angle i.

    One product of complex numbers has the same bits as the book's six operations and takes a sixth of their time, or
    less.  Compilers, exporters and transforms follow those six.
    """
    cos, sin = (part[..., : x.shape[-2], :] for part in turn)
    if x.dtype in FLOATS and not (elsewhere(x) or recorded_or_transformed()):
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * torch.complex(cos, sin).to(pairs.dtype)).flatten(-2)
    first, second = x[..., 0::2], x[..., 1::2]
    found = torch.stack((first * cos - second * sin, first * sin + second * cos), -1).flatten(-2)
    return found.to(x.dtype)
