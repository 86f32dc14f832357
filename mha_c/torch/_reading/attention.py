"""The attention in a graph: from each softmax back to the product of queries and keys, and forward to the values."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Optional, Union

from .graph import Line, Node, Reading, Reason, Value
from .masks import Mask, Masks, Unclear, _letters
from .products import Contraction, Projected, Projection, Rows, composed, contraction_of, projection_of, rows_of
from .scores import Additive, Back, Walk
from .sizes import Ratio, Size, formula_of
from .tables import Tables
from .turns import Turn, turned
from .views import CASTS, ONE, Mixes, View, Views, is_dropping, probability


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


def attentions(reading: Reading) -> list[Union[Attention, Reason]]:
    """One for each softmax of the graph, and each call of torch's own attention, in their order: what it attends with,
    or why that could not be found, with the line.  A softmax that is no attention (of a classifier) has a Reason, too.

    What has to be so in each call, beside the reading's conditions (that keys have as many items as queries, where a
    line
    folds both by one number), is added to them."""
    finder = _Finder(reading)
    found: list[Union[Attention, Reason]] = []
    for node in reading.graph.nodes:
        kind = _kind_of(node)
        if kind is not None:
            found.append(_found(reading, finder, node, kind))
    for leaf in finder.tables.read:
        tensor = leaf.tensor
        if tensor is not None and reading.settings is not None:
            reading.settings.numbers(tensor)
    return found


def _found(reading: Reading, finder: _Finder, node: Node, kind: str) -> Union[Attention, Reason]:
    for last in (False, False, True):
        try:
            found: Union[Attention, Reason] = finder.of(node, kind)
        except Unclear as why:
            found = Reason(why.words, (why.node or node).line)
        except Mixes as mixes:
            found = Reason("axes are mixed in a way that holds for these sizes alone", (mixes.node or node).line)
        assumed = finder.views.assumed
        if isinstance(found, Attention):
            reading.conditions.extend(assumed)
        if assumed:
            finder.begin()
        if isinstance(found, Attention) or not assumed or last:
            break
        reading.conditions.extend(assumed)  # some sizes were compared before that was known
        finder.begin()
    return found


def _kind_of(node: Node) -> Optional[str]:
    if node.name == "softmax":
        return "softmax"
    if node.name == "scaled_dot_product_attention":
        return "fused"
    if node.name == "multi_head_attention_forward":
        return "torch"
    if node.name in ("div", "div_") and len(node.values()) == 2:
        above, below = node.values()
        made = below.node
        sums = made is not None and made.name == "sum" and made.args[0] is above
        if sums and above.node is not None and above.node.name in ("exp", "exp_"):
            return "by hand"
    return None


class _Finder:
    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self.begin()

    def begin(self) -> None:
        """From the conditions that the reading has now."""
        self.views = Views(self.reading.conditions, self.reading.sizes())
        self.tables = Tables(self.views)
        self.masks = Masks(self.views, self.tables)
        self.walk = Walk(self.views, self.tables)

    def of(self, node: Node, kind: str) -> Attention:
        if kind == "torch":
            return self._torch(node)
        if kind == "fused":
            return self._fused(node)
        if kind == "softmax":
            scores = node.values()[0]
            axis = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
        else:
            above, below = node.values()
            scores = above.node.args[0]  # type: ignore[union-attr]
            made: Any = below.node
            axis = made.args[1] if len(made.args) > 1 else made.kwargs.get("dim")
            axis = axis[0] if isinstance(axis, (list, tuple)) else axis
        if not isinstance(axis, int):
            raise Unclear("the axis of a softmax is not said", node)
        rank = len(scores.shape)
        return self._of_scores(node, scores, int(axis) % rank)

    # --- Scores -------------------------------------------------------------------------------------------

    def _of_scores(self, node: Node, scores: Value, axis: int) -> Attention:
        back = self.walk.back(scores)
        if isinstance(back.product, Additive):
            sides = self._additive_sides(back, axis, node)
        else:
            sides = self._dot_sides(back, axis, node)
        queries, keys, letters, w_v, factor = sides
        places = [self._places(step.view, letters) for step in back.steps]
        scale, softcap, masks, sinks = self._steps(back, places, factor, queries, keys)
        weights = node.results[0]
        weights_places = self._places(back.view, letters)
        ahead = _Ahead(self, weights, weights_places)
        values, mixed, drop, path = ahead.values()
        end = _Output(self, mixed, ahead.mixed_letters, values) if mixed is not None else None
        nodes = {node, *path, *(s.node for s in back.steps), *queries.nodes, *keys.nodes}
        nodes |= set() if values is None else set(values.nodes)
        nodes |= set() if end is None else set(end.nodes)
        return Attention(
            kind="additive" if w_v is not None else "dot", queries=queries, keys=keys, values=values, w_v=w_v,
            scale=scale,
            masks=tuple(masks), softcap=softcap, sinks=sinks,
            dropout=probability(drop) if drop is not None and is_dropping(drop) else 0.0, dropout_node=drop,
            weights=weights, weights_axes=_letters(weights_places),
            dropped=drop.results[0] if drop is not None else None,
            mixed=mixed, output=end.value if end else None, output_axes=end.axes if end else (),
            projected_output=end.projected if end else None, output_dropout=end.dropout if end else None,
            nodes=frozenset(nodes), line=node.line, node=node,
        )  # fmt: skip

    def _places(self, view: Optional[View], letters: list[list[Any]]) -> Any:
        """The letters along the axes of a view of the product, from those of the product's own axes."""
        assert view is not None
        found = []
        for atoms in view.axes:
            place: list[Any] = []
            for atom in atoms:
                if atom.axis is None:
                    raise Unclear("scores are repeated")
                own = letters[atom.axis]
                place += own if len(own) == 1 else self._piece(own, atom)
            found.append(tuple((letter, size) for letter, size in place))
        return tuple(found)

    def _piece(self, own: list[Any], atom: Any) -> list[Any]:
        from .views import Atom, _within

        fake = tuple(Atom(i, size, ONE) for i, (_, size) in enumerate(own))
        pieces = _within(fake, atom, None)
        return [(own[x.axis][0], x.size) for x in pieces]  # type: ignore[index]

    def _steps(self, back: Back, places: list[Any], factor: float, queries: Operand, keys: Operand) -> Any:
        later: Any = 1.0
        softcap, masks, sinks = None, [], None
        for step, place in zip(back.steps[::-1], places[::-1]):
            if step.kind == "scale":
                later = _times(later, step.what)
            elif step.kind == "tanh":
                if softcap is not None or masks_before(masks, later):
                    raise Unclear("scores go through tanh, and what is done to them after is not read", step.node)
                softcap, later = later, later
            elif step.kind == "hide":
                if softcap is not None:
                    raise Unclear("a mask is put on before a tanh", step.node)
                fill = _times(step.fill, later)
                masks = self.masks.hiding(step.what, step.truth, place, fill, False, step.node) + masks
            elif step.kind == "add":
                if softcap is not None:
                    raise Unclear("a bias is added before a tanh", step.node)
                masks = self.masks.adding(step.what, place, _times(later, step.fill), step.node) + masks
        scale = _times(_times(later, factor), _times(queries.scale, keys.scale))
        return scale, softcap, masks, sinks

    # --- Operands -----------------------------------------------------------------------------------------

    def _dot_sides(self, back: Back, axis: int, node: Node) -> Any:
        product: Contraction = back.product
        atoms = back.view.axes[axis]
        if len(atoms) > 1:
            raise Unclear("the softmax goes over several axes", node)
        letter = product.out[atoms[0].axis] if atoms else product.out[-1]  # type: ignore[index]
        if letter in product.of_b and letter not in product.of_a:
            q, of_q, k, of_k = product.a, product.of_a, product.b, product.of_b
        elif letter in product.of_a and letter not in product.of_b:
            q, of_q, k, of_k = product.b, product.of_b, product.a, product.of_a
        else:
            raise Unclear("the softmax does not go over keys", node)
        summed = set(of_q) & set(of_k) - set(product.out)
        names = {**dict.fromkeys(summed, "d"), letter: "k"}
        only_q = [x for x in of_q if x not in of_k and x in product.out]
        only_k = [x for x in of_k if x not in of_q and x in product.out and x != letter]
        if only_k:
            raise Unclear("keys have an axis that queries have not", product.node)
        if only_q:
            names[only_q[-1]] = "q"
        rest = [x for x in product.out if x not in names]
        queries = self.operand(q, [names.get(x, x if x != "." else "") for x in of_q], rest)
        keys = self.operand(k, [names.get(x, x if x != "." else "") for x in of_k], rest)
        letters = self._product_letters(product, names, queries, of_q, keys, of_k)
        if product.added is not None and product.added_factor != 0:
            raise Unclear("baddbmm adds something to the scores", product.node)
        return queries[0], keys[0], letters, None, product.factor

    def _product_letters(self, product: Contraction, names: Any, queries: Any, of_q: str, keys: Any, of_k: str) -> Any:
        """For each axis of the product its letters with sizes: those of the queries, else of the keys."""
        found = []
        for i, x in enumerate(product.out):
            size = self.views.size(product.node.results[0].shape[i])
            if x in names:
                found.append([(names[x], size)])
            elif x in of_q:
                found.append(queries[1][of_q.index(x)])
            else:
                found.append(keys[1][of_k.index(x)])
        return found

    def operand(self, value: Value, letters: list[str], rest: list[str]) -> tuple[Operand, list[list[Any]]]:
        """How a side of a product came; `letters` of its axes: "d", "q", "k", "" or, of those in `rest`, unknown ones.

        Also the letters with sizes of its axes.
        """
        chain = _Chain(self, value, letters)
        return chain.operand(rest)

    def _additive_sides(self, back: Back, axis: int, node: Node) -> Any:
        product: Additive = back.product
        view = self.views.of(product.features)
        total = view.source.node.args[0]  # type: ignore[union-attr]
        made = total.node if isinstance(total, Value) else None
        if made is None or made.name.rstrip("_") != "add" or len(made.values()) < 2:
            raise Unclear("what is in the tanh is no sum of queries and keys", view.source.node)
        rank = len(total.shape)
        out = product.node.results[0]
        atoms = back.view.axes[axis]
        features_view = self.views.of(product.features, stop=(view.source,))
        along = features_view.axes
        if len(atoms) != 1 or len(along[atoms[0].axis or 0]) != 1:
            raise Unclear("the softmax does not go over keys", node)
        key_axis = along[atoms[0].axis][0].axis  # type: ignore[index]
        a, b = made.values()[:2]
        sides = []
        for x in (a, b):
            shape = (1,) * (rank - len(x.shape)) + tuple(x.shape)
            sides.append([self.views.size(n) for n in shape])
        keys_first = sides[0][key_axis] != ONE
        if keys_first and sides[1][key_axis] != ONE:
            raise Unclear("queries hang on the place of the key", made)
        q, k = (b, a) if keys_first else (a, b)
        names: list[str] = []
        q_sizes, k_sizes = (sides[1], sides[0]) if keys_first else (sides[0], sides[1])
        for i in range(rank):
            if i == rank - 1:
                names.append("d")
            elif i == key_axis:
                names.append("k")
            elif k_sizes[i] == ONE and q_sizes[i] != ONE and "q" not in names:
                names.append("q")
            else:
                names.append(f"x{i}")
        rest = [x for x in names if x[0] == "x"]
        found = []
        for x, sizes in ((q, q_sizes), (k, k_sizes)):
            own = [n if s != ONE else "" for n, s in zip(names, sizes)][rank - len(x.shape) :]
            found.append(self.operand(x, own, rest))
        letters = []
        for i in range(len(out.shape)):
            place: list[Any] = []
            for atom in along[i] if i < len(along) else ():
                name = names[atom.axis]  # type: ignore[index]
                place.append((name if name[0] != "x" else "b", atom.size))
            letters.append(place)
        return found[0][0], found[1][0], letters, product.weight, 1.0

    # --- torch's own ----------------------------------------------------------------------------------------

    def _fused(self, node: Node) -> Attention:
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
        given = {**dict.fromkeys(names), **dict(zip(names, node.args)), **node.kwargs}
        q, k, v, mask = (given[x] for x in names[:4])
        rank = len(q.shape)
        front = [f"x{i}" for i in range(rank - 2)]

        def side(x: Value, last: str) -> Any:
            own = [n if self.views.size(s) != ONE else "" for n, s in zip(front, x.shape)]
            return self.operand(x, [*own, last, "d"], front)

        queries, keys = side(q, "q"), side(k, "k")
        values = side(v, "k")
        letters = [*queries[1][:-1], [("k", self.views.size(k.shape[-2]))]]
        places = tuple(tuple(place) for place in letters)
        scale = given["scale"]
        if scale is None:
            scale = q.shape[-1] ** -0.5 if formula_of(q.shape[-1]) is q.shape[-1] else ("d**-0.5", q.shape[-1])
        scale = _times(scale, _times(queries[0].scale, keys[0].scale))
        masks: list[Mask] = []
        if given["is_causal"]:
            masks.append(Mask("causal", None, (), -math.inf, False, 1, 0, (), True, node.line))
        if mask is not None:
            if "bool" in str(mask.dtype):
                masks += self.masks.hiding(mask, False, places, -math.inf, False, node)
            else:
                masks += self.masks.adding(mask, places, 1.0, node)
        out = node.results[0]
        mixed_letters = [*queries[1][:-1], [("d", self.views.size(v.shape[-1]))]]
        end = _Output(self, out, mixed_letters, values[0])
        nodes = {node, *queries[0].nodes, *keys[0].nodes, *values[0].nodes, *end.nodes}
        return Attention(
            kind="fused", queries=queries[0], keys=keys[0], values=values[0], w_v=None, scale=scale, masks=tuple(masks),
            softcap=None, sinks=None, dropout=float(given["dropout_p"] or 0.0), dropout_node=None, weights=None,
            weights_axes=(), dropped=None, mixed=out, output=end.value, output_axes=end.axes,
            projected_output=end.projected,
            output_dropout=end.dropout, nodes=frozenset(nodes), line=node.line, node=node,
        )  # fmt: skip

    def _torch(self, node: Node) -> Attention:
        return Attention(
            kind="torch", queries=None, keys=None, values=None, w_v=None, scale=None, masks=(), softcap=None,
            sinks=None,
            dropout=0.0, dropout_node=None, weights=node.results[1] if len(node.results) > 1 else None, weights_axes=(),
            dropped=None, mixed=None, output=node.results[0], output_axes=(), projected_output=None,
            output_dropout=None,
            nodes=frozenset((node,)), line=node.line, node=node,
        )  # fmt: skip


def masks_before(masks: list[Mask], later: Any) -> bool:
    return False


def _times(a: Any, b: Any) -> Any:
    """The product of numbers; a tuple of what is no number."""
    plain_a, plain_b = not isinstance(a, (tuple, Value)), not isinstance(b, (tuple, Value))
    if plain_a and plain_b:
        return a * b
    if plain_a and a == 1:
        return b
    if plain_b and b == 1:
        return a
    return ("*", a, b)


class _Chain:
    """Back from a side of a product: views, a scale, turns, casts, the projection, views of its source."""

    def __init__(self, finder: _Finder, value: Value, letters: list[str]) -> None:
        self.finder, self.views, self.value, self.letters = finder, finder.views, value, letters
        self.scale: Any = 1.0
        self.turn: Optional[Turn] = None
        self.nodes: list[Node] = []
        self.view = self.views.whole(value)
        self.projection: Optional[Projection] = None
        self._back()

    def _back(self) -> None:
        while True:
            inner = self.views.of(self.view.source)
            self._through(inner)
            source = self.view.source
            found = projection_of(self.views, source)
            if found is not None:
                self.projection = found
                self.nodes += found.nodes
                return
            if not (self._scaled(source) or self._turned(source)):
                return

    def _through(self, inner: View) -> None:
        self.nodes += inner.nodes
        self.view = composed(self.view, inner, self.value.node)

    def _go(self, to: Value, node: Node) -> None:
        """The same elements, made of another value of the same shape."""
        self.nodes.append(node)
        self.view = self.view._replace(source=to)

    def _scaled(self, source: Value) -> bool:
        node = source.node
        if node is None or node.name.rstrip("_") not in ("mul", "div") or len(node.args) != 2:
            return False
        a, b = node.args
        for x, by in ((a, b), (b, a))[: 2 if node.name.startswith("mul") else 1]:
            said = self.finder.tables.of(by)
            number = by if isinstance(by, (Size, Ratio)) else said
            if isinstance(number, (int, float)) and isinstance(x, Value) and x.shape == source.shape:
                self.scale = _times(self.scale, number if node.name.startswith("mul") else 1 / number)
                self._go(x, node)
                return True
        return False

    def _turned(self, source: Value) -> bool:
        if self.turn is not None:
            return False
        found = turned(self.views, self.finder.tables, source)
        if found is None:
            return False
        turn, before, nodes = found
        self.turn = turn
        self.nodes += nodes
        self.view = self.view._replace(source=before)
        return True

    def operand(self, rest: list[str]) -> tuple[Operand, list[list[Any]]]:
        source, features = self.view.source, None
        if self.projection is not None:
            features = self.projection.result_features
        elif self._d_axis() is not None:
            features = self._d_axis()
        places, kinds = self._letters_of(features, rest)
        axes = tuple("".join(letter for letter, _ in place) for place in places)
        heads = self._heads(places)
        projected, kept, source_axes = None, source, self._along(kinds, source)
        if self.projection is not None:
            projected = self._rows(places)
            kept, source_axes = self._source(self.projection, source_axes)
        found = Operand(self.value, axes, kept, source_axes, projected, self.turn, self.scale, heads, tuple(self.nodes))
        return found, places

    def _d_axis(self) -> Optional[int]:
        for letter, atoms in zip(self.letters, self.view.axes):
            if letter == "d" and atoms:
                return atoms[-1].axis
        return None

    def _letters_of(self, features: Optional[int], rest: list[str]) -> Any:
        """The letters of each axis, with sizes; and {axis of the source: letters in their order}."""
        places: list[list[Any]] = []
        kinds: dict[int, list[tuple[int, str, Any]]] = {}
        seen_batch = False
        for letter, atoms in zip(self.letters, self.view.axes):
            place: list[Any] = []
            for atom in atoms:
                known = letter if letter in ("d", "q", "k") else ""
                if atom.axis is None:
                    name = known or "r"
                    name = "r" if known in ("d", "") else known
                elif known:
                    name = known
                elif atom.axis == features:
                    name = "h"
                elif self.projection is None and seen_batch and self._is_heads(letter, rest):
                    name = "h"
                else:
                    name, seen_batch = "b", True
                place.append((name, atom.size))
                if atom.axis is not None:
                    kinds.setdefault(atom.axis, []).append((_order(atom.stride), name, atom))
            places.append(place)
        return places, kinds

    def _is_heads(self, letter: str, rest: list[str]) -> bool:
        """Without a projection, the last of several axes in front of positions is that of heads."""
        return bool(rest) and letter == rest[-1] and len(rest) > 1

    def _heads(self, places: list[list[Any]]) -> Any:
        number = ONE
        for place in places:
            for letter, size in place:
                if letter == "h":
                    number = number.times(size)
        return number.number if not number.formulas else number

    def _along(self, kinds: Any, source: Value) -> tuple[str, ...]:
        return tuple(
            "".join(name for _, name, _ in sorted(kinds.get(i, []), key=lambda x: -x[0]))
            for i in range(len(source.shape))
        )

    def _rows(self, places: Any) -> Optional[Projected]:
        """Which rows of the weight the heads' features are, (h d)."""
        projection = self.projection
        assert projection is not None
        axis = projection.result_features
        start = self.view.offsets.get(axis, 0)
        if any(i != axis for i in self.view.offsets):
            raise Unclear("a part of the inputs is left out", self.value.node)
        heads = [
            a for letter, atoms in zip(self.letters, self.view.axes) for a in atoms if a.axis == axis and letter != "d"
        ]
        features = [
            a for letter, atoms in zip(self.letters, self.view.axes) for a in atoms if a.axis == axis and letter == "d"
        ]
        picked = [start]
        for atom in [*heads, *features]:
            if atom.size.formulas or atom.stride.formulas:
                raise Unclear("features are cut in a way that hangs on the call's sizes", self.value.node)
            picked = [x + i * atom.stride.number for x in picked for i in range(atom.size.number)]
        weight = rows_of(projection.weight, 1 - projection.weight_in, picked)
        bias = None if projection.bias is None else rows_of(projection.bias, 0, picked)
        if weight is None or (projection.bias is not None and bias is None):
            raise Unclear("rows of a weight are picked in a way that is not read", projection.nodes[0])
        lines = tuple(node.line for node in projection.nodes)
        return Projected((weight,), () if bias is None else (bias,), lines)

    def _source(self, projection: Projection, axes: tuple[str, ...]) -> tuple[Value, tuple[str, ...]]:
        """What was projected, behind views, and the letters of its axes."""
        own = [x for i, x in enumerate(axes) if i != projection.result_features]
        own.insert(projection.features, "c")
        view = self.views.of(projection.source)
        self.nodes += view.nodes
        found = [""] * len(view.source.shape)
        for letters, atoms in zip(own, view.axes):
            for atom in atoms:
                if atom.axis is None:
                    continue
                if found[atom.axis] and found[atom.axis] != letters:
                    return projection.source, tuple(own)
                found[atom.axis] = letters
        if view.offsets or any(len(atoms) > 1 for atoms in view.axes):
            return projection.source, tuple(own)
        return view.source, tuple(found)


def _order(stride: Any) -> int:
    return stride.number * (1 << 40 if stride.formulas else 1)


class _Ahead:
    """From the weights to what they meet."""

    def __init__(self, finder: _Finder, weights: Value, places: Any) -> None:
        self.finder, self.weights, self.places = finder, weights, places
        self.mixed_letters: Any = None

    def values(self) -> tuple[Optional[Operand], Optional[Value], Optional[Node], list[Node]]:
        """(values, what was mixed, the dropout, nodes on the way); Nones where weights meet no values."""
        value, view, drop, path = self.weights, self.finder.views.whole(self.weights), None, []
        letters = [list(place) for place in self.places]
        stack = [(value, view, drop, path)]
        changed: Optional[Node] = None
        while stack:
            value, view, drop, path = stack.pop(0)
            for node in value.users:
                found = None
                for one in [node, *(node.results[0].users if node.name == "mul" else ())]:
                    found = contraction_of(one)
                    if found is not None and (found.a is value or found.b is value):
                        made = self._met(found, value, view, letters)
                        if made is not None:
                            return made, one.results[0], drop, [*path, *dict.fromkeys((node, one))]
                nexts = self._next(node, value, view, drop, path)
                if nexts is not None:
                    stack.append(nexts)
                elif found is None and node.name in (
                    "mul",
                    "masked_fill",
                    "masked_fill_",
                    "__setitem__",
                    "div",
                    "add",
                    "where",
                ):
                    if not _sums(node):
                        changed = changed or node
        if changed is not None:
            raise Unclear(f"attention weights go through {changed.name} before they meet the values", changed)
        return None, None, drop, []

    def _next(self, node: Node, value: Value, view: View, drop: Any, path: list[Node]) -> Any:
        views = self.finder.views
        if not node.values() or node.values()[0] is not value:
            return None
        if node.name == "dropout":
            if drop is not None:
                raise Unclear("weights are dropped twice", node)
            return node.results[0], view, node, [*path, node]
        if views._is_view(node, True) and len(node.results) == 1:
            try:
                return node.results[0], views._step(view, node, node.results[0]), drop, [*path, node]
            except Mixes:
                return None
        return None

    def _met(self, found: Contraction, value: Value, view: View, letters: Any) -> Optional[Operand]:
        of_w, of_v, v = (found.of_a, found.of_b, found.b) if found.a is value else (found.of_b, found.of_a, found.a)
        places = self.finder._places(view, letters)
        own = {x: place for x, place in zip(of_w, places) if x != "."}
        summed = [x for x in of_w if x in of_v and x not in found.out]
        keys = [x for x, place in own.items() if [letter for letter, _ in place] == ["k"]]
        if not keys or summed != keys:
            return None
        names, rest = [], []
        for x in of_v:
            if x == keys[0]:
                names.append("k")
            elif x == "." or x == "":
                names.append("")
            elif x in of_w:
                names.append(x)
                rest.append(x)
            else:
                names.append("d")
        made, v_places = self.finder.operand(v, names, rest)
        self.mixed_letters = []
        for x in found.out:
            place = own.get(x) or (v_places[of_v.index(x)] if x in of_v else [])
            self.mixed_letters.append([(a, b) for a, b in place])
        return made


def _sums(node: Node) -> bool:
    """An entropy, a mean of weights for a loss."""
    return all(user.name in ("sum", "mean") for result in node.results for user in result.users) and bool(
        node.results and node.results[0].users
    )


class _Output:
    """From what was mixed to the end: joined heads, the output projection, its dropout."""

    def __init__(self, finder: _Finder, mixed: Value, letters: Any, values: Any) -> None:
        self.finder = finder
        self.nodes: list[Node] = []
        self.projected: Optional[Projected] = None
        self.dropout: Optional[Node] = None
        self.value, self.view = mixed, finder.views.whole(mixed)
        self.letters = [list(place) for place in letters]
        self._joined()
        self.axes = self._axes()
        self._projected()

    def _axes(self) -> tuple[str, ...]:
        try:
            return _letters(self.finder._places(self.view, self.letters))
        except (Unclear, Mixes):
            return ()

    def _joined(self) -> None:
        views = self.finder.views
        while len(self.value.users) == 1:
            node = self.value.users[0]
            if not views._is_view(node, False) or len(node.results) != 1 or node.values()[0] is not self.value:
                return
            try:
                view = views._step(self.view, node, node.results[0])
            except Mixes:
                return
            self.view, self.value = view, node.results[0]
            self.nodes.append(node)

    def _projected(self) -> None:
        if len(self.value.users) != 1:
            return
        node = self.value.users[0]
        result = node.results[0] if node.results else None
        if result is None:
            return
        follower = result.users[0] if len(result.users) == 1 else None
        if (
            follower is not None
            and follower.name == "add"
            and projection_of(self.finder.views, follower.results[0]) is not None
        ):
            result, node = follower.results[0], follower
        found = projection_of(self.finder.views, result)
        if found is None or found.source is not self.value or found.features >= len(self.axes):
            return
        if self.axes[found.features] not in ("hd", "d"):
            return
        n = int(result.shape[found.result_features])
        weight = rows_of(found.weight, 1 - found.weight_in, list(range(n)))
        bias = None if found.bias is None else rows_of(found.bias, 0, list(range(n)))
        if weight is None or (found.bias is not None and bias is None):
            return
        lines = tuple(x.line for x in found.nodes)
        self.projected = Projected((weight,), () if bias is None else (bias,), lines)
        axes = [x for i, x in enumerate(self.axes) if i != found.features]
        axes.insert(found.result_features, "c")
        self.axes, self.value = tuple(axes), result
        self.nodes += found.nodes
        if len(result.users) == 1 and result.users[0].name == "dropout":
            self.dropout = result.users[0]
            self.value = self.dropout.results[0]
            self.nodes.append(self.dropout)


__all__ = ["CASTS", "Attention", "Mask", "Operand", "Projected", "Rows", "Turn", "attentions"]
