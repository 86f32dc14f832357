"""Attention layers of the book's third generation as torch modules: GQAAttention, and CausalAttention of its GPT."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional

import torch
from torch import Tensor, nn

from .. import grouped as of_numpy
from .._arguments import calls, scalars
from .._arguments.arrays import check_features
from .._arguments.calls import refuses_at_the_call
from .._arguments.options import core_corner
from ._call.records import AttentionCall
from ._heads import AttendsHeads
from ._tensors import FLOATS, check_inputs, elsewhere, recorded_or_transformed
from ._twins import twin

if TYPE_CHECKING:
    from .._types import Causal


class RotatesHeads(AttendsHeads):
    """What both layers share: attention of heads that are rotated on request.

    Attributes
    ----------
    rope : bool
        Whether queries and keys are rotated by their positions.
    """

    rope: bool

    def _joined(self, q: Tensor, k: Tensor, v: Tensor, valid_lens: Any, causal: Any) -> Tensor:
        """(B, Q, H * D), of q (B, Q, H, D) and k, v (B, K, Hkv, D)."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if self.rope:
            turn = turns(k) if k.shape[2] >= q.shape[2] else turns(q)
            q, k = turned(q, turn), turned(k, turn)
        lens = None if valid_lens is None else torch.as_tensor(valid_lens).clone()  # the caller may change it
        return self._attended(AttentionCall(lens, causal), q, k, v).transpose(1, 2).flatten(2)


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

    @calls.checks_names
    def forward(
        self, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Any = None, *, causal: Causal = None
    ) -> Tensor:
        """One call of the layer: see the class."""
        calls.check_order(type(self).__name__, keys, values, valid_lens)
        inputs = {"queries": queries, "keys": keys, "values": values}
        check_inputs(**inputs)
        for name, x in inputs.items():
            check_features(x, name, self.head_dim * self.num_heads)
        projected = self.W_q(queries), self.W_k(keys), self.W_v(values)
        q, k, v = (x.unflatten(2, (-1, self.head_dim)) for x in projected)
        corner = core_corner(of_numpy.corner(self.causal, valid_lens, causal), queries, keys)
        joined = self._joined(q, k, v, valid_lens, corner)
        found: Tensor = self.W_o(joined)
        return found

    if TYPE_CHECKING:  # nn.Module's takes and gives Any
        W_q: nn.Linear
        W_k: nn.Linear
        W_v: nn.Linear
        W_o: nn.Linear

        def __call__(
            self, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Any = None, *, causal: Causal = None
        ) -> Tensor: ...


@twin(of_numpy.CausalAttention)
class CausalAttention(RotatesHeads):
    """The causal self-attention of the book's GPT: one projection W_qkv for queries, keys and values.

    Call: attention(X (B, T, num_hiddens)) returns (B, T, num_hiddens); further arguments are ignored, as in the book,
    whose blocks pass X three times.  `attention_weights` is then (B, num_heads, T, T).

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

    @calls.checks_names
    def forward(self, X: Tensor, *others: Any, causal: Causal = True) -> Tensor:
        """One call of the layer: see the class."""
        of_numpy.check_is_causal(causal)
        check_inputs(X=X)
        check_features(X, "X", self.W_o.in_features)
        q, k, v = self.W_qkv(X).unflatten(2, (3, self.num_heads, -1)).unbind(2)
        found: Tensor = self.W_o(self._joined(q, k, v, None, "top_left"))
        return found

    if TYPE_CHECKING:  # nn.Module's takes and gives Any

        def __call__(self, X: Tensor, *others: Any, causal: Causal = True) -> Tensor: ...


# --- Rotary positions, as the book computes them ----------------------------------------------------------


def turns(x: Tensor) -> tuple[Tensor, Tensor]:
    """(cosines, sines) of the angles (T, D/2) of x (B, H, T, D), in torch's default type: the book's own numbers."""
    features = x.shape[-1]
    place = torch.arange(x.shape[-2], dtype=torch.float32, device=x.device)
    rates = 10000.0 ** (-torch.arange(0, features, 2, device=x.device) / features)
    angles = place[:, None] * rates
    return angles.cos(), angles.sin()


def turned(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """x (B, H, T, D), the features 2i and 2i + 1 of which are turned by angle i.

    One product of complex numbers has the same bits as the book's six operations and takes a sixth of their time, or
    less.  Compilers, exporters and transforms follow those six.
    """
    cos, sin = (part[: x.shape[-2]] for part in turn)
    if x.dtype in FLOATS and not (elsewhere(x) or recorded_or_transformed()):
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * torch.complex(cos, sin).to(pairs.dtype)).flatten(-2)
    first, second = x[..., 0::2], x[..., 1::2]
    found = torch.stack((first * cos - second * sin, first * sin + second * cos), -1).flatten(-2)
    return found.to(x.dtype)
