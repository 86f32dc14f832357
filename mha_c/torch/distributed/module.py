"""Multi-head attention whose sequence is spread over a group: `spread_sequence`.

The layer stays the same object.  The attention inside it is replaced by one that calls `ring_attention`; the layer
calls it like every attention that a program puts there, with the heads folded into the batch.
"""

from __future__ import annotations

from typing import Any, Optional

import torch.distributed as dist
from torch import Tensor, nn

from ..._arguments import scalars
from ..._arguments.calls import refuses_at_the_call
from .._call.children import has_own_attention, is_changed
from .._call.dropout import rate
from .._twins import twin
from ..layers import MultiHeadAttention
from ._group import Ranks, ranks_of
from ._sequence import LAYOUTS
from .attention import ring_attention


@twin(ring_attention)
@refuses_at_the_call
def spread_sequence(
    module: nn.Module, group: Optional[dist.ProcessGroup] = None, *, layout: str = "contiguous"
) -> nn.Module:
    """Change the attention layers in a module, in place: each rank of a group gives them a piece of the sequence.

    Every rank calls a layer with its piece, as `split_sequence` cuts it, and gets its piece of the result that one
    process would compute.  valid_lens are those of the whole sequence; attention weights are not kept.  The gradients
    of the parameters come from the rank's piece only: sum them over the ranks.

    Parameters
    ----------
    module : nn.Module
        A mha_c.torch.MultiHeadAttention, or a model that contains some.

    Returns
    -------
    nn.Module
        The same module.

    Raises
    ------
    ValueError
        If the module contains no such layer.
    TypeError
        If the attention in a layer is replaced or has hooks, because spread_sequence replaces it.

    See Also
    --------
    ring_attention : What such a layer computes.

    Examples
    --------
    >>> import torch, torch.distributed as dist, mha_c.torch
    >>> from mha_c.torch.distributed import spread_sequence
    >>> dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())  # torchrun starts more
    >>> layer, x = mha_c.torch.MultiHeadAttention(8, 8, 8, 8, 2, 0.0), torch.randn(1, 4, 8)
    >>> whole = layer(x, x, x)
    >>> torch.allclose(spread_sequence(layer)(x, x, x), whole, atol=1e-6)
    True
    >>> dist.destroy_process_group()
    """
    ranks = ranks_of(group, "spread_sequence")
    scalars.choice(layout, "layout", *LAYOUTS)
    layers = [part for part in module.modules() if isinstance(part, MultiHeadAttention)]
    if not layers:
        raise ValueError(f"{type(module).__name__} has no MultiHeadAttention in it")
    for layer in layers:
        before: Any = layer._modules["attention"]
        if not has_own_attention(layer) and (type(before) is not _SpreadAttention or is_changed(before)):
            raise TypeError(
                f"attention is a {type(before).__name__} that is replaced or hooked: spread_sequence puts another in "
                f"its place, so it would never be called"
            )
    for layer in layers:
        layer.attention = _SpreadAttention(layer, ranks, layout)
    return module


class _SpreadAttention(nn.Module):
    """The attention inside a layer, where each rank computes the rows of its piece."""

    def __init__(self, layer: MultiHeadAttention, ranks: Ranks, layout: str) -> None:
        super().__init__()
        self.num_heads, self.empty_rows, self.ranks, self.layout = layer.num_heads, layer.empty_rows, ranks, layout
        self.dropout = layer.attention.dropout

    def forward(
        self, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Any = None, *, training: Optional[bool] = None
    ) -> Tensor:
        """Results (B*H, N/n, d) of this rank's rows; valid_lens are those of the whole sequence, once for each head."""
        dropout: Any = self.dropout
        if type(dropout) is not nn.Dropout or is_changed(dropout):
            raise TypeError(
                f"attention.dropout is a {type(dropout).__name__} that is replaced or hooked: where a sequence is "
                f"spread it is never called, because no rank has all the weights; only a plain nn.Dropout works"
            )
        p = rate(dropout, training)
        q, k, v = (x.unflatten(0, (-1, self.num_heads)) for x in (queries, keys, values))
        lens = None if valid_lens is None else valid_lens[:: self.num_heads]
        options: Any = {"layout": self.layout, "group": self.ranks.group, "empty_rows": self.empty_rows}
        return ring_attention(q, k, v, lens, dropout=p, **options).flatten(0, 1)

    def lengths_of_causal(self, causal: Any, *_: Any) -> Any:
        raise ValueError(
            f"causal={causal!r}: a rank of spread_sequence has a piece of the sequence and does not know its length N: "
            f"write valid_lens=torch.arange(1, N + 1).repeat(B, 1)"
        )

    @property
    def attention_weights(self) -> Tensor:
        raise RuntimeError(
            "attention_weights are not kept where a sequence is spread: no rank has the keys of the whole sequence.  "
            "Use a layer without spread_sequence on a sequence that one process can hold"
        )
