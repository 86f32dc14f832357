"""Attention layers of other systems as torch modules, with the originals' names and arguments, on the same C core.

scaled_dot_product_attention, MultiHeadedSelfAttention, SelfAttentionAISummer, MultiHeadSelfAttentionAISummer.
Parameters are real nn.Linear children with the originals' names, so that state_dicts load both ways.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, Optional

import torch
from torch import Tensor, nn

from .. import variants as of_numpy
from .._arguments import scalars
from .._arguments.calls import refuses_at_the_call
from .._arguments.constructors import divisible
from .._layer.description import KNOWN_NAMES
from ._call.formulas import composed
from ._call.inputs import check_projected
from ._call.records import AttentionCall
from ._heads import AttendsHeads
from ._module import TakesArrays
from ._private import unflatten
from ._tensors import check_inputs
from ._twins import twin
from .functional import dot_product_attention

__all__ = [
    "MultiHeadSelfAttentionAISummer",
    "MultiHeadedSelfAttention",
    "SelfAttentionAISummer",
    "scaled_dot_product_attention",
]
__dir__ = __all__.copy  # what dir() and completion show


@twin(of_numpy.scaled_dot_product_attention)
@refuses_at_the_call
def scaled_dot_product_attention(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Attention with any leading axes: softmax(query key^T / sqrt(d)) value, and the weights.

    Examples
    --------
    >>> import torch
    >>> from mha_c.torch import variants
    >>> context, weights = variants.scaled_dot_product_attention(torch.ones(5, 3), torch.ones(4, 3), torch.ones(4, 2))
    >>> context.shape, weights.shape
    (torch.Size([5, 2]), torch.Size([5, 4]))
    """
    check_inputs(query=query, key=key, value=value)
    leading = of_numpy.leading_axes(query, key, value, torch.broadcast_shapes)
    n_items = math.prod(leading)
    q, k, v = (x.expand(*leading, *x.shape[-2:]).reshape(n_items, *x.shape[-2:]) for x in (query, key, value))
    out, weights = dot_product_attention(q, k, v, return_weights=True)
    return out.reshape(*leading, *out.shape[1:]), weights.reshape(*leading, *weights.shape[1:])


@twin(of_numpy.MultiHeadedSelfAttention)
class MultiHeadedSelfAttention(AttendsHeads):
    """Multi-head self-attention with one argument and four projections without biases.

    Call: layer(x (B, T, d_model)) returns (B, T, d_model); `attention_weights` is then (B, num_heads, T, T).  Children
    that were replaced, or that have hooks, are called.

    Attributes
    ----------
    query_projection, key_projection, value_projection, final_linear_layer : nn.Linear
        The projections of queries, keys, values and of the joined heads.
    d_model : int
        Features of x.

    Examples
    --------
    >>> import torch
    >>> from mha_c.torch import variants
    >>> variants.MultiHeadedSelfAttention(d_model=8, num_heads=2)(torch.ones(1, 3, 8)).shape
    torch.Size([1, 3, 8])
    """

    @refuses_at_the_call
    def __init__(
        self, d_model: int, num_heads: int, *, device: Any = None, dtype: Optional[torch.dtype] = None
    ) -> None:
        super().__init__()
        self.d_model, self.num_heads = divisible(d_model, "d_model", num_heads)
        for name in KNOWN_NAMES[2]:
            setattr(self, name, nn.Linear(d_model, d_model, bias=False, device=device, dtype=dtype))

    @refuses_at_the_call
    def forward(self, x: Tensor) -> Tensor:
        """Attention of x to itself: see the class."""
        linears = [getattr(self, name) for name in KNOWN_NAMES[2]]
        for linear in linears[:3]:
            check_projected(linear, "x", x)
        attended = partial(self._attended, AttentionCall(empty_rows="uniform"))
        return composed((x, x, x), linears, self.num_heads, attended)

    if TYPE_CHECKING:  # nn.Module's takes and gives Any

        def __call__(self, x: Tensor) -> Tensor: ...


class _AISummer(TakesArrays):
    """What the layers of The AI Summer share: `to_qvk`, whose features have the order that mha_c.variants describes.

    Attributes
    ----------
    to_qvk : nn.Linear
        The one projection for queries, keys and values.
    W_0 : nn.Linear or None
        The projection of the joined heads; None in the layer with one head.
    dim, heads, dim_head : int
        Features of x, how many heads, and features of a head.
    """

    def __init__(self, dim: int, heads: int, dim_head: int, place: dict[str, Any]) -> None:
        super().__init__()
        self.dim, self.heads, self.dim_head = dim, heads, dim_head
        self.to_qvk = nn.Linear(dim, 3 * heads * dim_head, bias=False, **place)
        self.W_0: Any = None

    @refuses_at_the_call
    def forward(self, x: Tensor, mask: Optional[Tensor] = None) -> Tensor:
        """Attention of x to itself: see the class."""
        check_projected(self.to_qvk, "x", x)
        keep = None if mask is None else of_numpy.kept(torch.as_tensor(mask), x.shape[1])
        # (B, T, d, i, h) -> (i, B, h, T, d), with dense rows for the core.
        features = unflatten(self.to_qvk(x), 2, (self.dim_head, 3, self.heads))
        q, k, v = features.permute(3, 0, 4, 1, 2).contiguous().unbind(0)
        out: Tensor = dot_product_attention(q, k, v, keep_mask=keep, scale=self.dim_head**-0.5)
        out = out.transpose(1, 2).flatten(2)
        return out if self.W_0 is None else self.W_0(out)

    if TYPE_CHECKING:  # nn.Module's takes and gives Any

        def __call__(self, x: Tensor, mask: Optional[Tensor] = None) -> Tensor: ...


@twin(of_numpy.SelfAttentionAISummer)
class SelfAttentionAISummer(_AISummer):
    """Single-head self-attention of The AI Summer: one projection for queries, keys and values.

    Examples
    --------
    >>> import torch
    >>> from mha_c.torch import variants
    >>> causal = torch.ones(3, 3, dtype=torch.bool).triu(1)
    >>> variants.SelfAttentionAISummer(4)(torch.ones(2, 3, 4), mask=causal).shape
    torch.Size([2, 3, 4])
    """

    @refuses_at_the_call
    def __init__(self, dim: int, *, device: Any = None, dtype: Optional[torch.dtype] = None) -> None:
        dim = scalars.whole(dim, "dim")
        super().__init__(dim, 1, dim, {"device": device, "dtype": dtype})


@twin(of_numpy.MultiHeadSelfAttentionAISummer)
class MultiHeadSelfAttentionAISummer(_AISummer):
    """Multi-head self-attention of The AI Summer: one projection for q, k and v, and W_0 after the joined heads.

    Attributes
    ----------
    W_0 : nn.Linear
        The projection of the joined heads.

    Examples
    --------
    >>> import torch
    >>> from mha_c.torch import variants
    >>> variants.MultiHeadSelfAttentionAISummer(16, heads=4)(torch.ones(2, 3, 16)).shape
    torch.Size([2, 3, 16])
    """

    @refuses_at_the_call
    def __init__(
        self, dim: int, heads: int = 8, dim_head: Optional[int] = None, *, device: Any = None,
        dtype: Optional[torch.dtype] = None,
    ) -> None:  # fmt: skip
        place = {"device": device, "dtype": dtype}
        super().__init__(*of_numpy.ai_summer_sizes(dim, heads, dim_head), place)
        self.W_0 = nn.Linear(self.heads * self.dim_head, self.dim, bias=False, **place)
