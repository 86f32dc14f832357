"""The layer of ours that a reading is: what one call of the core needs, or the line that no layer of ours has.

A reading is proof: all that the lines computed is in its graph.  Here each part of the graph is either a part of the
one call, or a reason why there is none.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

import torch

from .._reading.attention import Attention, Operand, attentions
from .._reading.graph import Line, Node, Reading, Reason, ReasonAtFirst, Value, walked
from .._reading.listed import of_listed_heads
from .._reading.masks import Mask
from .._reading.products import Projected, contraction_of
from .._reading.sizes import formula_of
from .._reading.turns import Turn
from .left import Left, LeftAtFirst, LeftThisTime
from .letters import axes_of_source, first_after, letters_of, seen_through, view_of

if TYPE_CHECKING:
    from ..._types import Corner, EmptyRows

LARGE = 1e5  # no score in float32 that trains is lower than minus this
OUT, WEIGHTS, DROPPED = "out", "weights", "dropped"


class Input(NamedTuple):
    """Where queries, keys or values come from.

    name      of the input, as in `Graph.inputs`
    letters   of its axes: "bqc", "bkc", "bhqc", "qbc", "qc"; they are arranged in the core's order
    """

    name: str
    letters: str


class ResultTensor(NamedTuple):
    """What a call gives, or keeps, in the place of a tensor.

    what      "out", "weights", "dropped"
    letters   of its axes
    attached  whether gradients flow back from it
    averaged  whether weights are the mean of those of the heads
    """

    what: str
    letters: str
    attached: bool = True
    averaged: bool = False


class CoreCall(NamedTuple):
    """One call of a layer of ours.

    kind            "dot" or "additive"
    inputs          of queries, keys, values
    projections     of queries, keys, values, output: a Projected, or None
    w_v             of additive scores
    heads, kv_heads
    scale           None where it is 1 / sqrt(head_dim); else a number, or a Size
    masks           all but the causal one
    causal          None, "top_left", "bottom_right"
    window          None, or the distance from a query back to the first key that it sees, negative
    empty_rows      what a query without keys gets
    some_empty      whether the lines give it something else, as hidden scores become several numbers
    softcap, sinks
    turn            None, or the rotary positions of queries and keys
    dropout         the rate of the weights, as the call was: 0 in evaluation
    out_dropout     of the output
    result          the structure of what it gives, with a ResultTensor in the place of each tensor
    kept            ((path, name, structure), ...): attributes that it sets
    line            of its softmax
    """

    kind: str
    inputs: tuple[Input, Input, Input]
    projections: tuple[Optional[Projected], ...]
    w_v: Optional[Value]
    heads: Any
    kv_heads: Any
    scale: Any
    masks: tuple[Mask, ...]
    causal: Optional[Corner]
    window: Any
    empty_rows: EmptyRows
    some_empty: bool
    softcap: Any
    sinks: Optional[Value]
    turn: Optional[Turn]
    dropout: float
    out_dropout: float
    result: Any
    kept: tuple[tuple[str, str, Any], ...]
    line: Line


def layer_of(reading: Reading) -> CoreCall:
    """The layer that a reading is; Left where it is none.  What holds for some sizes alone becomes its condition."""
    with reading.walk():
        return _layer_of(reading)


def _layer_of(reading: Reading) -> CoreCall:
    found = attentions(reading)
    known = [one for one in found if isinstance(one, Attention)]
    if reading.refused is not None:
        kind = LeftAtFirst if isinstance(reading.refused, ReasonAtFirst) else Left
        raise kind(reading.refused.words, reading.refused.line, attends=bool(found))
    if not known:
        reasons = [one for one in found if isinstance(one, Reason)]
        if not reasons:
            raise Left("no softmax in it", attends=False)
        raise Left(reasons[0].words, reasons[0].line)
    one: Any = known[0] if len(found) == 1 else of_listed_heads(reading, found)
    if one is None:
        raise Left(f"it holds {len(found)} of them, and one call of the core has one", found[1].line)
    return _Fitted(reading, one).layer()


class _Fitted:
    """One attention of a reading beside a layer of ours."""

    def __init__(self, reading: Reading, one: Attention) -> None:
        self.reading, self.one = reading, one
        self.meanings: dict[Any, str] = {}
        for operand in (one.queries, one.keys, one.values):
            if isinstance(operand, Operand):
                self._add_meanings(operand)

    def _add_meanings(self, operand: Operand) -> None:
        for formula, letter in axes_of_source(operand.source, short(operand.source_axes, one_row="")).items():
            letter = "q" if letter == "k" and self.meanings.get(formula) == "q" else letter  # as many keys as queries
            self.meanings[formula] = letter

    def layer(self) -> CoreCall:
        one = self.one
        if one.kind == "torch":
            raise Left("torch's own layer computes it", one.line)
        if one.values is None or one.output is None:
            raise self._without_values()
        self._check_type()
        self._check_writes()
        masks, causal, window = self._masks()
        out_dropout, result = 0.0, self.reading.output
        self.behind: list[Node] = []
        kept = self._kept()
        result = self._structure(result)
        for node in self.behind:
            out_dropout = max(out_dropout, _rate(node))
        return CoreCall(
            kind="additive" if one.kind == "additive" else "dot",
            inputs=(self._input(one.queries, "q"), self._input(one.keys, "k"), self._input(one.values, "k")),
            projections=(one.queries.projected, one.keys.projected, one.values.projected, one.projected_output),
            w_v=one.w_v, heads=_number(one.queries.heads), kv_heads=_number(one.keys.heads),
            scale=self._scale(), masks=masks, causal=causal, window=window, empty_rows=self._empty_rows(),
            some_empty=self._hides_by_several(),
            softcap=_plain(one.softcap), sinks=one.sinks, turn=self._turn(),
            dropout=one.dropout, out_dropout=out_dropout, result=result, kept=kept,
            line=one.line,
        )  # fmt: skip

    def _without_values(self) -> Left:
        """Why its weights meet no values."""
        one, users = self.one, [*self.one.weights.users] if self.one.weights is not None else []
        while len(users) == 1 and (view_of(users[0], self.meanings) is not None or users[0].name == "dropout"):
            users = users[0].results[0].users
        after = [node for node in users if node.name != "detach"] or users
        if len(after) == 1 and contraction_of(after[0]) is not None:
            return Left("the softmax goes over another axis than the one that its weights are summed over", one.line)
        if len(after) == 1:
            return Left(f"{_named(after[0])} follows the softmax, before its weights meet values", after[0].line)
        return Left(
            "it gives its weights, which meet no values in it" if not after else "its weights meet no values", one.line
        )

    # --- Inputs ---------------------------------------------------------------------------------------------

    def _input(self, operand: Operand, row: str) -> Input:
        value, noun = operand.source, {"q": "queries", "k": "keys or values"}[row]
        letters = short(operand.source_axes)
        while value.node is not None:
            before = view_of(value.node, self.meanings)
            if before is None:
                where = f"comes before the {noun} are projected"
                if operand.projected is None:
                    where = f"makes the {noun}, which no call of the core does"
                raise Left(f"{_named(value.node)} {where}", value.node.line)
            value = before
            letters = letters_of(value, self.meanings)
        if value.kind != "input":
            raise Left(f"its {noun} are no argument of the call", self.one.line)
        if isinstance(operand.scale, Value):
            raise Left(f"its {noun} are multiplied by a tensor", self.one.line)
        if "?" in letters:
            raise Left(f"the axes of its {noun} could not be told", self.one.line)
        return Input(value.name, letters)

    # --- Scores ---------------------------------------------------------------------------------------------

    def _scale(self) -> Any:
        """None, or a number, where it is not that of head_dim."""
        one = self.one
        if one.kind == "fused" and isinstance(one.scale, tuple) and one.scale[0] == "d**-0.5":
            if one.queries.projected is not None:
                return None
            raise Left("torch's scaled_dot_product_attention computes it, on inputs that nothing projects", one.line)
        if not isinstance(one.scale, (int, float)):
            raise Left("a tensor scales the scores", one.line)
        if one.kind == "additive":
            if one.scale != 1:
                raise Left(f"additive scores are multiplied by {float(one.scale):.4g}", one.line)
            return None
        axes = [axis for axis, letters in enumerate(one.queries.axes) if letters == "d"]
        width = one.queries.value.shape[axes[0]] if len(axes) == 1 else None
        if width is None or abs(one.scale * width**0.5 - 1) >= _NEAR:  # of formulas a condition of the reading
            return one.scale
        return None

    def _turn(self) -> Optional[Turn]:
        one: Any = self.one
        if one.values.turn is not None:
            raise Left("values are rotated, too", one.values.turn.line)
        turn, other = one.queries.turn, one.keys.turn
        if turn is None and other is None:
            return None
        if turn is None or other is None:
            raise Left("queries or keys alone are rotated", (turn or other).line)
        if one.kind == "additive":
            raise Left("queries and keys of additive scores are rotated", turn.line)
        if not turn.is_like(other):
            raise Left("queries and keys are rotated by different tables", other.line)
        return turn

    def _masks(self) -> tuple[tuple[Mask, ...], Optional[Corner], Any]:
        masks: list[Mask] = []
        causal: Optional[Corner] = None
        window = None
        for mask in self.one.masks:
            if not isinstance(mask.fill, (int, float)):  # and what was hidden before
                raise Left("a tensor scales the scores", self.one.line)
            if mask.sense != "add" and not mask.fill <= -LARGE:
                words = f"hidden scores become {mask.fill:g}, which is no mask where scores are lower"
                raise Left(words, mask.line, "keep_mask=mask")
            if mask.sense == "causal" and formula_of(mask.offset) == 0:
                causal = "top_left"
            elif mask.sense == "window" and window is None:
                window = mask.offset
            else:
                masks.append(mask._replace(fill=_plain(mask.fill), factor=_plain(mask.factor)))
        return tuple(masks), causal, window

    def _empty_rows(self) -> EmptyRows:
        """A query all of whose keys are hidden: with a number in the place of scores all weights are equal."""
        lowest = torch.finfo(self.one.queries.value.dtype).min  # what is lower becomes -inf
        fills = [mask.fill for mask in self.one.masks if mask.sense != "add"]
        return "uniform" if fills and all(fill >= lowest for fill in fills) else "zero"

    def _hides_by_several(self) -> bool:
        """Whether a query all of whose keys are hidden sees some of them: those whose scores became a higher number, or
        had one added."""
        masks = [mask for mask in self.one.masks if mask.sense != "add"]
        biases = [mask for mask in self.one.masks if mask.sense == "add"]
        hides = {float(mask.fill) for mask in masks}
        if all(mask.value is None for mask in self.one.masks):
            return False  # causal, or a window: each query sees itself
        finite = any(fill > -math.inf for fill in hides)
        return len(hides) > 1 or (bool(biases) and finite) or any(mask.added and finite for mask in masks)

    # --- Results --------------------------------------------------------------------------------------------

    def _structure(self, found: Any) -> Any:
        """What a call gives, or keeps, with a ResultTensor in the place of each tensor."""
        if isinstance(found, Value):
            return self._given(found)
        if isinstance(found, (tuple, list)):
            parts = [self._structure(x) for x in found]
            return type(found)(*parts) if hasattr(found, "_fields") else type(found)(parts)
        if isinstance(found, dict):
            return {key: self._structure(x) for key, x in found.items()}
        if any(isinstance(x, Value) for x in walked(found)) or not isinstance(
            found, (int, float, str, bool, type(None))
        ):
            raise Left(f"it gives a {type(found).__name__}", self.one.line)
        if not isinstance(formula_of(found), (int, float, str, bool, type(None))):
            raise Left("it gives a number that follows from sizes", self.one.line)
        return found

    def _given(self, value: Value) -> ResultTensor:
        one, attached, start = self.one, True, value
        averaged: Optional[Node] = None
        path: list[Node] = []
        ends = {id(x): what for x, what in ((one.dropped, DROPPED), (one.weights, WEIGHTS), (one.output, OUT)) if x}
        while id(value) not in ends:
            node = value.node
            if node is None:
                raise Left(f"it gives {value.name or 'a tensor'} back as it is", one.line)
            before = view_of(node, self.meanings)
            if before is None and node.name == "detach":
                before, attached = node.values()[0], False
            if before is None and node.name == "dropout":
                before = node.values()[0]
                self.behind.append(node)
            if before is None and node.name == "mean" and one.weights is not None:
                before, averaged = node.values()[0], node
            if before is None:
                node = first_after(node, ends, self.meanings)
                raise Left(_GIVES_SCORES if node in one.nodes else _what_follows(node), node.line)
            value = before
            path.insert(0, node)
        what = ends[id(value)]
        if averaged is not None and what == OUT:
            raise Left(_what_follows(averaged), averaged.line)
        if what is not OUT:
            letters = seen_through(short(one.weights_axes, "k"), path)
            if averaged is not None and "h" in letters:
                raise Left(_what_follows(averaged), averaged.line)
        elif value is start:
            letters = short(one.output_axes)
        else:
            letters = letters_of(start, self.meanings)
        if "?" in letters or len(letters) != len(start.shape):
            raise Left("its result's axes could not be told", one.line)
        return ResultTensor(what, letters, attached, averaged is not None)

    def _kept(self) -> tuple[tuple[str, str, Any], ...]:
        found = []
        for effect in self.reading.effects:
            if effect.path is None:
                raise Left(f"it sets {effect.name} of an object that is no part of it", effect.line)
            behind, self.behind = self.behind, []
            try:
                structure = self._structure(effect.value)
            except Left:
                structure = None
            shows = isinstance(structure, ResultTensor) and structure.what != OUT and not structure.averaged
            if self.behind or not shows:
                raise Left(f"it keeps {effect.name}, which is not its weights", effect.line)
            self.behind = behind
            found.append((effect.path, effect.name, structure))
        return tuple(found)

    def _check_writes(self) -> None:
        for node in self.reading.graph.nodes:
            if node.writes is not None and node.writes.node is None:
                raise Left(f"it changes {node.writes.name or 'a tensor'} in place", node.line)
            self._check_rounding(node)
        known = {id(self.one.dropout_node), id(self.one.output_dropout)}
        for node in self.reading.random:
            if id(node) not in known and node.name != "dropout":
                raise Left("it draws random numbers", node.line)

    def _check_type(self) -> None:
        dtype = self.one.queries.source.dtype
        if dtype not in (torch.float32, torch.float64):
            words = f"it is called with {_type_name(dtype)}, and the core computes float32 and float64"
            raise LeftThisTime(words, self.one.line)

    def _check_rounding(self, node: Node) -> None:
        """No number may be rounded to a type that holds fewer digits than the inputs."""
        own = self.one.queries.source.dtype
        after = node.results[0].dtype if node.results else own
        if after is own or not after.is_floating_point:
            return
        before = [x.dtype for x in node.values() if x.dtype.is_floating_point]
        if before and torch.finfo(after).eps > max(torch.finfo(x).eps for x in (own, *before)):
            words = f"{_named(node)} rounds to {_type_name(after)}, and the core computes as the inputs are"
            raise Left(words, node.line)


def constructor_of(layer: CoreCall) -> str:
    """How to write a layer of ours that computes as much."""
    W_q = layer.projections[0]
    if W_q is None:
        return "DotProductAttention(dropout=0)"
    hiddens = sum(len(rows.rows) for rows in W_q.weight)
    if layer.kind == "additive":
        return f"AdditiveAttention(num_hiddens={hiddens}, dropout=0)"
    if layer.heads != layer.kv_heads:
        return f"GQAAttention(num_hiddens={hiddens}, num_heads={layer.heads}, num_kv_heads={layer.kv_heads})"
    return f"MultiHeadAttention(num_hiddens={hiddens}, num_heads={layer.heads}, dropout=0)"


def short(axes: tuple[str, ...], features: str = "c", one_row: str = "1") -> str:
    """The axes of an operand in a letter each: "c" features, "1" an axis of one; "?" where two are on one axis."""
    known = {"": one_row or "1", "d": features, "hd": features, "c": features, "bh": "f"}
    return "".join(known.get(letters, letters if len(letters) == 1 else "?") for letters in axes)


def _type_name(dtype: torch.dtype) -> str:
    return str(dtype).rpartition(".")[2]


def _named(node: Node) -> str:
    return node.name.strip("_")


def _what_follows(node: Node) -> str:
    names = {"add": "something is added to what it gives", "layer_norm": "a norm follows what it gives"}
    return names.get(_named(node), f"{_named(node)} follows what it gives")


def _rate(node: Optional[Node]) -> float:
    """What a dropout drops as it was called."""
    if node is None:
        return 0.0
    named = {**dict(zip(("input", "p", "training"), node.args)), **node.kwargs}
    return float(named.get("p", 0.5)) if named.get("training", True) else 0.0


def _number(n: Any) -> int:
    """How many heads; 1 where the inputs' own axes tell."""
    return int(n) if isinstance(n, int) else 1


def _plain(number: Any) -> Any:
    """A number without its formula: float() pins the axes that it hangs on."""
    return float(number) if isinstance(number, (int, float)) else number


_NEAR, _GIVES_SCORES = 1e-6, "it gives what comes before the softmax"
