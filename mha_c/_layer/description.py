"""One record of a layer: `describe` asks the layer, whoever made it, and all that is not a call asks the record.

A layer of this package says the names of its projections itself; of others, such as the book's modules, they are known.
torch is not imported here: a module is a layer like another.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple, Optional

LOOKED: Any = weakref.WeakKeyDictionary()  # {module: what became of it}, of all that mha_c.torch.convert looked at
BOOK_NAMES = "W_q", "W_k", "W_v", "W_o"
# Names of the four projections: the book's, those of its GPT, those of variants.MultiHeadedSelfAttention.
KNOWN_NAMES = (
    BOOK_NAMES,
    ("W_qkv", "W_qkv", "W_qkv", "W_o"),
    ("query_projection", "key_projection", "value_projection", "final_linear_layer"),
)


class ProjectionSizes(NamedTuple):
    """A projection of a layer."""

    name: str  # the attribute that has the weight; of torch.nn.MultiheadAttention what its weights are called after
    in_features: int  # 0 while it is not known
    out_features: int  # of all its parts
    parts: int = 1  # 3: queries, keys and values are projected as one


class Description(NamedTuple):
    """What is known of a layer before any call.

    projections    of queries, keys, values and of the joined heads; None where the layer has none
    num_heads      heads of queries; None if the layer joins none, or does not say
    num_kv_heads   heads of keys and values
    scoring        what a score is made of: "products", "sums" or "distances"
    is_causal      whether a query sees no later key, also where the call does not ask for it
    turns          whether queries and keys are rotated by their positions
    """

    projections: tuple[Optional[ProjectionSizes], ...]
    num_heads: Any
    num_kv_heads: Any
    scoring: str
    is_causal: bool
    turns: bool

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the four projections; "" where there is none."""
        return tuple("" if each is None else each.name for each in self.projections)

    @property
    def labels(self) -> tuple[str, ...]:
        """As `names`; one for several inputs is told with what it makes of them."""
        names = self.names
        what = zip(names, ("queries", "keys", "values", "heads"))
        return tuple(name if names.count(name) == 1 else f"{name}, {part}" for name, part in what)

    @property
    def has_heads(self) -> bool:
        """Whether it is multi-head attention: it splits what it has projected, and joins the heads."""
        return self.num_heads is not None and None not in self.projections

    @property
    def head_dim(self) -> int:
        """Features of a head's values."""
        out = self.projections[3]
        assert out is not None  # it has heads
        return out.in_features // int(self.num_heads)

    @property
    def is_of_the_book(self) -> bool:
        """Whether it is the book's multi-head attention, and no more: three projections, each head with its own keys,
        nothing hidden and nothing rotated that the call does not ask for."""
        one_each = len({*self.names}) == 4 and self.num_heads == self.num_kv_heads
        return self.has_heads and one_each and not (self.is_causal or self.turns)


def describe(layer: Any) -> Description:
    """The record of a layer; nothing of the layer changes."""
    projections = _projections(layer)
    heads = None if projections[3] is None else getattr(layer, "num_heads", None)
    return Description(
        projections,
        heads,
        getattr(layer, "num_kv_heads", heads),
        "sums" if hasattr(layer, "w_v") else "distances" if hasattr(layer, "kernel") else "products",
        bool(getattr(layer, "causal", False)) or hasattr(layer, "W_qkv"),  # the book's GPT has no other attention
        bool(getattr(layer, "rope", False)),
    )


def _projections(layer: Any) -> tuple[Optional[ProjectionSizes], ...]:
    if hasattr(layer, "in_proj_weight") and hasattr(layer, "out_proj"):  # torch.nn.MultiheadAttention
        wide, out = layer.embed_dim, ProjectionSizes("out_proj", layer.embed_dim, layer.embed_dim)
        if layer.in_proj_weight is not None:
            return *[ProjectionSizes("in_proj", wide, 3 * wide, 3)] * 3, out
        sizes = ("q_proj", wide), ("k_proj", layer.kdim), ("v_proj", layer.vdim)
        return *(ProjectionSizes(name, size, wide) for name, size in sizes), out
    names = next((names for names in KNOWN_NAMES if all(hasattr(layer, name) for name in names)), BOOK_NAMES)
    names = getattr(layer, "_roles", names)
    parts = *(names[:3].count(name) for name in names[:3]), 1
    return tuple(_sizes(name, getattr(layer, name, None), n) for name, n in zip(names, parts))


def _sizes(name: str, linear: Any, parts: int) -> Optional[ProjectionSizes]:
    """A part that somebody has put in its place may say no sizes: they are not known then."""
    if linear is None:
        return None
    n_in, n_out = (getattr(linear, what, None) or 0 for what in ("in_features", "out_features"))
    return ProjectionSizes(name, n_in, n_out, parts)
