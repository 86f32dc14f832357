"""The attention in a graph: from each softmax back to the product of queries and keys, and forward to the values."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional, Union

from .graph import Line, Node, Reading, Reason, Value


class Rows(NamedTuple):
    """Some output features of a weight, or of a bias: which parameter (a leaf), and which of its rows, in this order.

    value      the parameter's Value
    rows       a range, or a tuple of numbers
    columns    of a weight: whether features are its columns, as in `x @ W`; a 1x1 convolution has rows
    """

    value: Value
    rows: Any
    columns: bool = False


class Projected(NamedTuple):
    """Features that come of a matrix product with a weight, plus a bias or None: rows of one, or of several, weights.

    weight, bias   each a tuple of Rows, one after the other (a weight for each head, for example); bias is () where there
                   is none
    lines          of the products
    """

    weight: tuple[Rows, ...]
    bias: tuple[Rows, ...]
    lines: tuple[Line, ...]


class Turn(NamedTuple):
    """Rotary positions on queries or keys.

    pairs     "halves": feature i turns with i + D/2 (half of the turned features); "neighbours": 2i with 2i + 1
    cos, sin  the Values of the tables that were multiplied in, at the shape at which they were
    features  how many features turn, from the front; the others stay
    """

    pairs: str
    cos: Value
    sin: Value
    features: int
    line: Line


class Operand(NamedTuple):
    """Queries, keys or values, and how they came.

    value      as they stand in the product with the other side, of any shape
    axes       the axes of `value` by meaning, as letters: "b" batch (any axes in front: "b", "bb"), "h" head, "q" or "k"
               position, "d" feature; "bh" together on one axis is "(bh)"
    source     the Value that was projected, or, without a projection, that the views are of: an input, or any result
    source_axes   its axes in the same letters, "c" the features of the source: "bqc", "qbc" (time first), "bcq"
    projected  None, or the weights
    turn       None, or its rotary positions
    scale      what it was multiplied by before the product: a number, Size or Value; 1.0 where not
    heads      how many heads it has (those of keys may be fewer: shared)
    """

    value: Value
    axes: str
    source: Value
    source_axes: str
    projected: Optional[Projected]
    turn: Optional[Turn]
    scale: Any
    heads: Any


class Mask(NamedTuple):
    """What was done to the scores before the softmax, beside scaling.

    sense    "hide": where `value` is True (not 0), scores become `fill`; "keep": where it is False (0); "add": it is added;
             "causal": query i sees keys up to i + `offset`; "window": keys from i - `window` + 1 on (plus offset);
             "lengths": keys before `value`
    value    None of "causal" and "window"; else a Value as the lines had it before views and comparisons with 0: an input,
             a table (a leaf), or any result.  A result that hangs on no input's numbers is a table, too: `constant`
    axes     for each of (b, h, q, k) the axis of `value` that goes along it, or None: it is broadcast
    fill     the number that hidden scores become, or that is added to them where `sense` is "hide" and `added`
    added    whether the fill was added, not put in their place
    """

    sense: str
    value: Optional[Value]
    axes: tuple[Optional[int], ...]
    fill: float
    added: bool
    offset: Any
    window: Any
    constant: bool
    line: Line


class Attention(NamedTuple):
    """One attention: softmax(scale * queries keys^T, capped, biased, masked) values.

    kind        "dot", "additive" (w_v . tanh(queries + keys)), "fused" (F.scaled_dot_product_attention) or "torch"
                (F.multi_head_attention_forward)
    queries, keys   Operands
    values      None where the weights meet no values
    w_v         of "additive": its weight
    scale       a number, Size or Value by which scores are multiplied, those of the operands in it
    masks       in the order in which they were put on
    softcap     None, or c of c * tanh(scores / c)
    sinks       None, or the Value of extra scores that take part in the sum alone
    dropout     None, or its probability: a number, or the module's path and attribute stand in `dropout_line`
    dropout_node   the node, or None
    weights     the Value of the weights, before dropout; None where they never exist (fused)
    dropped     the Value after dropout, or None
    mixed       the Value of weights @ values, or None
    output      the Operand-like end: the Value that the output projection gave, or else the joined heads, or `mixed`
    projected_output   None, or its weights
    output_dropout     None, or the dropout node behind it
    nodes       all nodes that this attention explains, from the projections to `output`
    line        of the softmax, or of the fused call
    """

    kind: str
    queries: Operand
    keys: Operand
    values: Optional[Operand]
    w_v: Optional[Projected]
    scale: Any
    masks: tuple[Mask, ...]
    softcap: Any
    sinks: Optional[Value]
    dropout: Any
    dropout_node: Optional[Node]
    weights: Optional[Value]
    dropped: Optional[Value]
    mixed: Optional[Value]
    output: Optional[Value]
    projected_output: Optional[Projected]
    output_dropout: Optional[Node]
    nodes: frozenset[Node]
    line: Line


def attentions(reading: Reading) -> list[Union[Attention, Reason]]:
    """One for each softmax of the graph, and each call of torch's own attention, in their order: what it attends with,
    or why that could not be found, with the line.  A softmax that is no attention (of a classifier) has a Reason, too."""
    raise NotImplementedError
