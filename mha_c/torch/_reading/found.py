"""What is said of an attention that was found in a graph: the records."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

from .graph import Line, Node, Value
from .masks import Mask
from .products import Projected
from .turns import Turn


class Operand(NamedTuple):
    """Queries, keys or values, and how they came.

    value      as they stand in the product with the other side, of any shape
    axes       for each axis of `value` its letters: "b" batch, "h" head, "q" or "k" position, "d" feature, "bh" both
               on one
               axis, "r" a repetition (shared heads are repeated), "" of size 1
    source     the Value that was projected, or, without a projection, that the views are of: an input, or any result
    source_axes   the same of the source: of a projected one its features are "c"
    projected  None, or the weights: their rows in the order of heads and features, (h d)
    turn       None, or its rotary positions
    scale      what it was multiplied by before the product: a number, or a Value; 1.0 where not
    heads      how many heads it has (those of keys may be fewer: shared); a number or Size; 1 where there are none
    nodes      from the source to the product
    """

    value: Value
    axes: tuple[str, ...]
    source: Value
    source_axes: tuple[str, ...]
    projected: Optional[Projected]
    turn: Optional[Turn]
    scale: Any
    heads: Any
    nodes: tuple[Node, ...]


class Attention(NamedTuple):
    """One attention: softmax(scale * queries keys^T, capped, biased, masked) values.

    kind        "dot", "additive" (w_v . tanh(queries + keys)), "fused" (F.scaled_dot_product_attention) or "torch"
                (F.multi_head_attention_forward, whose arguments are its node's)
    queries, keys   Operands; None of "torch"
    values      None where the weights meet no values
    w_v         of "additive": its weight
    scale       a number, or Value, or ("1/", Value), by which scores are multiplied, those of the operands in it
    masks       in the order in which they were put on; fills and factors include what scores are multiplied by later
    softcap     None, or c of c * tanh(scores / c)
    sinks       None, or the Value of extra scores that take part in the sum alone
    dropout     the probability with which weights are dropped; 0.0 where the node draws nothing, or there is none
    dropout_node   the node, or None
    weights     the Value of the weights, before dropout; None where they never exist (fused)
    weights_axes   for each of its axes the letters
    dropped     the Value after dropout, or None
    mixed       the Value of weights @ values, or None; of "fused" its result
    output      the Value that the output projection gave, or else the joined heads, or `mixed`
    output_axes    for each axis its letters: after a projection the features are "c"; joined heads "hd"
    projected_output   None, or its weights: `rows` are those of the weight's output; `columns_in` (h d) order is whole
    output_dropout     None, or the dropout node behind it
    nodes       all nodes that this attention explains, from the projections to `output`
    line        of the softmax, or of the fused call
    node        the softmax, or the call
    """

    kind: str
    queries: Any
    keys: Any
    values: Optional[Operand]
    w_v: Optional[Value]
    scale: Any
    masks: tuple[Mask, ...]
    softcap: Any
    sinks: Optional[Value]
    dropout: float
    dropout_node: Optional[Node]
    weights: Optional[Value]
    weights_axes: tuple[str, ...]
    dropped: Optional[Value]
    mixed: Optional[Value]
    output: Optional[Value]
    output_axes: tuple[str, ...]
    projected_output: Optional[Projected]
    output_dropout: Optional[Node]
    nodes: frozenset[Node]
    line: Line
    node: Node
