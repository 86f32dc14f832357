"""A call of a reader's module by the core: a CoreCall, and all that it was read from, which must be as it was."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from .._call import core
from .._call.attention import attend
from .._call.dropout import core_dropout
from .._call.records import AttentionCall, AttentionTensors, LayerInputs, LayerParameters, Options, new_record
from .._reading.graph import Reading
from .._reading.holding import Fact
from .._reading.sizes import Axis, plain
from .._weights.last import Last, last_of
from .angles import Angles
from .arranging import arrangement, filled
from .call_masks import CallMasks
from .layer import DROPPED, OUT, CoreCall, ResultTensor
from .left import Left, LeftThisTime, LeftWithGraph
from .replaying import graph_key, near, without_dropout
from .rows import viewed
from .weights import parameters_of

REFUSED = (BufferError, TypeError, ValueError, RuntimeError, IndexError, KeyError, NotImplementedError)
MOST_SHAPES = 1000  # that a plan remembers
_SCALED = "its scale is not 1 / sqrt(d), and one call of a layer has no other"
_CAPPED = "its scores are capped, and one call of a layer caps none"
_UNTOLD = "its axes could not be told"
_INSTEAD = {
    _SCALED: "dot_product_attention(q, k, v, scale=...)",
    _CAPPED: "dot_product_attention(q, k, v, softcap=...)",
}


class _CallSettings:
    """What `core.call` reads of a module."""

    _last = None

    def __init__(self, heads: int, kv_heads: int, empty_rows: str) -> None:
        self.num_heads, self.empty_rows = heads, empty_rows
        self.counts = heads if heads == kv_heads else (heads, kv_heads)

    def _head_counts(self) -> Any:
        return self.counts


class _Rate(NamedTuple):
    """A dropout as `core.call` reads it."""

    p: float
    training: bool = True


class CoreResult(NamedTuple):
    """What a call by the core gives: the output in the core's order of axes, and what its weights come of."""

    out: Tensor
    last: Optional[Last]
    heads: Optional[int]


class ReadingPlan:
    """How the core computes calls of one key.

    layer       what is computed
    reading     what it was read from
    names       of the inputs, in the order of a call's tensors
    shapes      {the shapes of a call's tensors: whether the plan is for them}
    free        axes of inputs that readings of the same graph had at other sizes: of these the plan serves all sizes
                for which the conditions of the reading hold
    """

    def __init__(self, layer: CoreCall, reading: Reading, tensors: list[Tensor]) -> None:
        self.layer, self.reading = layer, reading
        self.names = _names(reading, tensors)
        self.shapes: dict[Any, bool] = {shapes_of(tensors): True}
        self.free: set[Axis] = set()
        self.places = tuple(self.names.index(each.name) for each in layer.inputs)
        seen = viewed(reading)
        self.viewed = tuple(i for i, name in enumerate(self.names) if name in seen)
        self._prepare()

    def _prepare(self) -> None:
        layer = self.layer
        projects = any(x is not None for x in layer.projections) or layer.w_v is not None
        on_heads = "h" in layer.inputs[0].letters
        self.order = "bhqc" if on_heads else "bqc"
        try:
            self.into = tuple(arrangement(_rows_as_queries(each.letters), self.order) for each in layer.inputs)
            back = {
                x: arrangement(self.order, _rows_as_queries(x.letters)) for x in _leaves(layer.result) if x.what == OUT
            }
        except ValueError:
            wide = any(each.letters.count(x) > 1 for each in layer.inputs for x in "qk")
            words = "its positions have several axes, and those of the core have one" if wide else _UNTOLD
            first = layer.projections[0] if wide else None
            raise Left(words, first.lines[0] if first is not None else layer.line) from None
        self.back, self.rate = back, _Rate(layer.dropout)
        others = self._no_layer_has()
        self.whole = not on_heads and not others
        if projects and not self.whole:
            raise Left(others, layer.line, _INSTEAD.get(others, ""))
        self.rows, self.parameters = parameters_of(layer)
        if self.whole and type(self.parameters) is LayerParameters:
            settings = self.reading.settings
            settings.keep_facts(_not_asked_by_core(settings.facts, self.parameters))
        self.options = _CallSettings(int(layer.heads), int(layer.kv_heads), layer.empty_rows)
        self.plain = not (layer.masks or layer.causal or layer.window is not None or self.rows or layer.turn)
        self.plain = self.plain and layer.heads == layer.kv_heads
        of_out = isinstance(layer.result, ResultTensor) and layer.result.what == OUT and layer.result.attached
        self.simple = of_out and not layer.kept and not layer.out_dropout
        self.last_turn = back[layer.result] if of_out else None
        self._leave_what_is_slower()
        axes = "bqk" if not on_heads and not self.whole else "bhqk"
        self.masks = CallMasks(layer, self.names, self.places[0], axes)
        self.angles = None if layer.turn is None else Angles(layer, self.names)

    def _leave_what_is_slower(self) -> None:
        """Left where the core gives no gain at any size, by what was measured."""
        layer, with_graph = self.layer, torch.is_grad_enabled()
        returned = [x for x in _leaves(layer.result) if x.what != OUT]
        shown = [*returned, *(given for _, _, given in layer.kept)]
        if returned and (layer.kind != "dot" or layer.projections[0] is None):
            words = "it projects nothing and returns its attention weights: then the core is hardly faster"
            if layer.kind != "dot":
                words = "it returns its attention weights, which the core makes in a second pass: slower than its lines"
            raise Left(words, layer.line)
        if with_graph and any(x.attached for x in returned):
            words = "it returns its attention weights with their graph, which the core makes in a second pass: slower"
            raise LeftWithGraph(f"{words} than its lines", layer.line, "weights.detach(), if no loss is made of them")
        if layer.dropout and any(x.what == DROPPED for x in shown) and not (self.whole and with_graph):
            raise LeftWithGraph("it shows weights after dropout, and the core has them before", layer.line)
        columns = [x for part in layer.projections if part is not None for x in part.weight if x.columns]
        if columns and layer.heads == 1 and "b" not in layer.inputs[0].letters:
            raise Left("one head of 2-D inputs by x @ W is no faster in the core", layer.line)
        if with_graph and columns and layer.heads == 1:
            words = "one head with weights that are columns, x @ W, is no faster in the core when gradients are taken"
            raise LeftWithGraph(words, layer.line, "nn.Linear")

        unmasked = not (layer.masks or layer.causal or layer.window is not None or layer.dropout)
        if with_graph and unmasked and not any(layer.projections) and self._is_wide():
            words = "nothing is projected, hidden or dropped, and rows are wide: with gradients the core is no faster"
            raise LeftWithGraph(words, layer.line)

    def _is_wide(self) -> bool:
        """Whether plain dot products with gradients took 1.0 to 1.3 times as long in the core."""
        sizes: dict[str, int] = {}
        for each in self.layer.inputs[1::-1]:
            sizes.update(zip(each.letters, map(plain, self.reading.graph.inputs[each.name].shape)))
        n, width = sizes.get("q", 1) * sizes.get("k", 1), sizes.get("c", 0)
        return self.layer.kind == "dot" and width >= 128 and n * width >= 1 << 20

    def _no_layer_has(self) -> str:
        """What one call of a layer has not, in words; "" where it has all."""
        layer = self.layer
        for words, there in (
            (_SCALED, layer.scale is not None),
            (_CAPPED, layer.softcap is not None), ("more scores take part in the sum", layer.sinks is not None),
        ):  # fmt: skip
            if there:
                return words
        return ""

    # --- Whether it is for a call ------------------------------------------------------------------------------

    def suits(self, tensors: list[Tensor]) -> Optional[bool]:
        """Whether the plan is for tensors of these shapes; None where that is to be read first."""
        shapes = shapes_of(tensors)
        known = self.shapes.get(shapes)
        if known is None and self.free:
            sizes = self.masks.sizes(tensors)
            others = {axis for axis, n in self.reading.sizes().items() if sizes.get(axis) != n}
            if 0 not in sizes.values() and others <= self.free and self.reading.holds_for(sizes):
                known = self.shapes[shapes] = True
                if len(self.shapes) > MOST_SHAPES:
                    self.shapes = {shapes: True}
        return known

    def agrees(self, reading: Reading, tensors: list[Tensor], result: Any) -> bool:
        """Whether a reading with other sizes is this plan's, too; if so, the plan is for sizes like these."""
        sizes = reading.sizes()
        if reading.refused is not None or not self.reading.holds_for(sizes) or not self._is_same(reading):
            return False
        try:
            self.check(tensors, result)
        except (Left, *REFUSED):
            return False
        own = self.reading.sizes()
        self.free |= {axis for axis, n in sizes.items() if own[axis] != n}
        self.shapes[shapes_of(tensors)] = True
        return True

    def _is_same(self, reading: Reading) -> bool:
        """Whether it has the same graph, and hangs on the same settings."""
        own = graph_key(self.reading)
        return (
            own is not None
            and graph_key(reading) == own
            and reading.settings.places() <= self.reading.settings.places()
        )

    def counts(self, tensors: list[Tensor]) -> dict[str, int]:
        """How many items, heads, queries and keys a call has."""
        queries, keys = (
            x if into is None else into(x) for x, into in zip((tensors[i] for i in self.places), self.into[:2])
        )
        heads = queries.shape[1] if self.order == "bhqc" else self.options.num_heads
        numbers = queries.shape[0], heads, queries.shape[-2], keys.shape[-2]
        return dict(zip(("batch", "heads", "queries", "keys"), numbers))

    # --- The call ----------------------------------------------------------------------------------------------

    def computed(self, tensors: list[Tensor], rate: Optional[_Rate] = None) -> CoreResult:
        """The call by the core, its result in the core's order of axes."""
        i, j, k = self.places
        q_into, k_into, v_into = self.into
        q, keys, values = tensors[i], tensors[j], tensors[k]
        if q_into is not None or k_into is not None or v_into is not None:
            first = (q, keys, values)
            q = q if q_into is None else q_into(q)
            keys = q if first[1] is first[0] and k_into is q_into else keys if k_into is None else k_into(keys)
            values = keys if first[2] is first[1] else values if v_into is None else v_into(values)
        rate = self.rate if rate is None else rate
        if self.whole:
            return self._by_layer((q, keys, values), tensors, rate)
        return self._by_attention((q, keys, values), tensors, rate)

    def _by_layer(self, inputs: LayerInputs, tensors: list[Tensor], rate: _Rate) -> CoreResult:
        box: dict[str, Any] = {}
        parts = self.parameters if type(self.parameters) is LayerParameters else self.parameters()
        lens = options = None
        if not self.plain:
            lens, keep, bias = self.masks.of(tensors, inputs)
            angles = self.angles and self.angles.of(tensors, self.masks.sizes(tensors), inputs)
            options = new_record(Options, (self.layer.causal, keep, bias, angles, self.rows))
        out = core.call(self.options, (parts, box, rate, None), inputs, lens, None, None, None, options)
        return new_record(CoreResult, (out, box["_last"], self.options.num_heads))

    def _by_attention(self, inputs: LayerInputs, tensors: list[Tensor], rate: _Rate) -> CoreResult:
        layer = self.layer
        q, k, v = inputs
        lens, keep, bias = self.masks.of(tensors, inputs)
        scale = layer.scale
        if scale is not None:
            scale = float(self.masks.number(scale, tensors))
        call = AttentionCall(
            lens, layer.causal, -1, -1, scale, rate.p, empty_rows=layer.empty_rows, softcap=layer.softcap or 0.0,
        )  # fmt: skip
        operands = AttentionTensors(q, k, v, None, keep, bias)
        found = attend(call, operands)
        last = last_of(call, operands, found, (True, True)) if layer.kept else None  # none are returned
        return CoreResult(found.out, last, q.shape[1] if q.dim() == 4 else None)

    # --- The guard ---------------------------------------------------------------------------------------------

    def check(self, tensors: list[Tensor], result: Any) -> None:
        """Left if the core gives other numbers than the reader's lines gave in this call."""
        expected = result
        if self.layer.dropout or self.layer.out_dropout:
            expected = without_dropout(self.reading, dict(zip(self.names, tensors)))
        with torch.no_grad():
            try:
                found = self.computed(tensors, _Rate(0.0))
            except REFUSED as error:
                words = f"the core refuses it: {type(error).__name__}: {error}".split("\n")[0]
                raise Left(words, self.layer.line) from None
            pairs: list[Any] = []
            _paired(self.layer.result, expected, pairs)
            for given, own in pairs:
                ours = self.shown(given, found)
                if own.numel() and not bool(own.isfinite().any()):
                    raise LeftThisTime("its own lines give no number but NaN or infinity", self.layer.line)
                if ours.shape != own.shape or ours.dtype is not own.dtype or not near(ours, own):
                    far = float((ours - own).abs().max()) if ours.shape == own.shape and own.numel() else 0
                    raise Left(f"the core gives other numbers, by {far:.2g}: please report this class", self.layer.line)

    def shown(self, given: ResultTensor, found: CoreResult, later: bool = False) -> Tensor:
        """What a call gives in one place of its result.  later: weights may be computed when they are read."""
        if given.what != OUT:
            last, by_heads = found.last, "h" in given.letters or given.averaged
            assert last is not None
            if later and not (given.what == DROPPED and self.layer.dropout):
                weights = last.weights(found.heads if by_heads else None)
            else:
                with torch.set_grad_enabled(given.attached and torch.is_grad_enabled()):
                    weights = self._weights(given, found, last)
            weights = weights.mean(1) if given.averaged else weights
            turned = arrangement("bhqk" if by_heads and not given.averaged else "bqk", given.letters.replace("f", "b"))
            weights = weights if turned is None else turned(weights)
            return weights if given.attached else weights.detach()
        back = self.back[given]
        out = found.out if back is None else back(found.out)
        return out if given.attached else out.detach()

    def _weights(self, given: ResultTensor, found: CoreResult, last: Last) -> Tensor:
        """The weights as a tensor of their own, as the values met them if they are given after dropout."""
        by_heads = "h" in given.letters or given.averaged
        done = last.source.call if given.what == DROPPED and self.layer.dropout and last.source is not None else None
        drop = None if done is None else core_dropout(done.dropout, done.seed)
        if drop is None:
            return last.numbers(found.heads if by_heads else None)
        weights = drop(last.numbers(found.heads))
        return weights if by_heads else weights.flatten(0, 1)

    def result(self, found: CoreResult) -> Any:
        """What a call gives."""
        if self.simple:
            return found.out if self.last_turn is None else self.last_turn(found.out)
        if self.layer.out_dropout:
            found = found._replace(out=torch.nn.functional.dropout(found.out, self.layer.out_dropout))
        return filled(self.layer.result, lambda given: self.shown(given, found), ResultTensor)


def _not_asked_by_core(facts: Iterable[Fact], parameters: LayerParameters) -> list[Fact]:
    """The facts but those of parameters that the core asks, too: it refuses other types than the inputs', and all
    sizes that do not fit those of W_q and of the last projection."""
    last = parameters.W_v if parameters.W_o is None else parameters.W_o
    asked = {id(x) for x in parameters if x is not None}
    free = {(id(parameters.W_q), "shape"), (id(last), "shape")}
    return [x for x in facts if x.name == "requires_grad" or id(x.owner) not in asked or (id(x.owner), x.name) in free]


def _rows_as_queries(letters: str) -> str:
    return letters.replace("k", "q").replace("f", "b")


def shapes_of(tensors: list[Tensor]) -> Any:
    n = len(tensors)
    return tensors[0].shape if n == 1 else tuple([x.shape for x in tensors])


def _names(reading: Reading, tensors: list[Tensor]) -> tuple[str, ...]:
    """The name of each tensor among the inputs of the graph."""
    names = {id(value.tensor): name for name, value in reading.graph.inputs.items()}
    return tuple(names.get(id(x), "") for x in tensors)


def _leaves(structure: Any) -> list[ResultTensor]:
    found: list[ResultTensor] = []
    filled(structure, found.append, ResultTensor)
    return found


def _paired(structure: Any, result: Any, pairs: list[Any]) -> None:
    if isinstance(structure, ResultTensor):
        pairs.append((structure, result))
    elif isinstance(structure, (tuple, list)):
        for one, other in zip(structure, result):
            _paired(one, other, pairs)
    elif isinstance(structure, dict):
        for key, one in structure.items():
            _paired(one, result[key], pairs)
