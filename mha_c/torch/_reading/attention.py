"""The attention in a graph: from each softmax back to the product of queries and keys, and forward to the values."""

from __future__ import annotations

import math
from typing import Any, Optional, Union

from .ahead import Ahead, Output
from .found import Attention, Operand
from .graph import Node, Reading, Reason, Value
from .masks import Mask, MaskReader, Unclear, _letters
from .operands import Origin, times
from .products import Contraction, Projected, Rows, side_by_side
from .scores import Additive, Back, Walk
from .sizes import formula_of
from .tables import Tables
from .turns import Turn
from .views import CASTS, ONE, Mixes, View, Views, is_dropping, probability


def attentions(reading: Reading) -> list[Union[Attention, Reason]]:
    """One for each softmax of the graph, and each call of torch's own attention, in their order: what it attends with,
    or why that could not be found, with the line.  A softmax that is no attention (of a classifier) has a Reason, too.

    What has to be so in each call, beside the reading's conditions (that keys have as many items as queries, where a
    line
    folds both by one number), is added to them."""
    finder = Finder(reading)
    found: list[Union[Attention, Reason]] = []
    for node in reading.graph.nodes:
        asked = _WHOLE.get(node.name) or _softmax_of(node)
        if asked is not None:
            found.append(_found(reading, finder, node, asked))
    for leaf in finder.contents:
        tensor = leaf.tensor
        if tensor is not None and reading.settings is not None:
            reading.settings.numbers(tensor)
    return found


def _found(reading: Reading, finder: Finder, node: Node, asked: Any) -> Union[Attention, Reason]:
    for last in (False, False, True):
        try:
            found: Union[Attention, Reason] = finder.of(node, asked)
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


_WHOLE = {"softmin": "softmin", "scaled_dot_product_attention": "fused", "multi_head_attention_forward": "torch"}


def _softmax_of(node: Node) -> Optional[tuple[Value, Any]]:
    """(scores, the axis as it is said) of what gives a softmax: torch's function, or one of the ways to write it; None
    of any other node."""
    given = node.values()
    if node.name == "softmax":
        return given[0], _axis_of(node)
    if node.name in ("div", "div_") and len(given) == 2:  # exp(s) / exp(s).sum(-1, keepdim=True)
        above, below = given[0].node, given[1].node
        if above is None or above.name not in ("exp", "exp_") or below is None or below.name != "sum":
            return None
        return (above.values()[0], _axis_of(below)) if _is_total(below, given[0]) else None
    before = given[0].node if node.name == "exp" and given else None  # exp_ takes its gradient from log_softmax
    if before is None:
        return None
    if before.name == "log_softmax":
        return before.values()[0], _axis_of(before)
    if before.name == "sub" and len(before.values()) == 2 and not before.kwargs:  # exp(s - s.logsumexp(-1, True))
        scores, total = before.values()
        if total.node is not None and total.node.name == "logsumexp" and _is_total(total.node, scores):
            return scores, _axis_of(total.node)
    return None


def _is_total(node: Node, value: Value) -> bool:
    """Whether a sum is over an axis of this value, which it keeps."""
    return node.values() == [value] and len(node.results[0].shape) == len(value.shape)


def _axis_of(node: Node) -> Any:
    axis = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    return axis[0] if isinstance(axis, (list, tuple)) and len(axis) == 1 else axis


class Finder:
    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self.contents: dict[Value, None] = {}  # the tables whose contents were read
        self.begin()

    def begin(self) -> None:
        """From the conditions that the reading has now."""
        self.views = Views(self.reading)
        self.tables = Tables(self.views, self.contents)
        self.masks = MaskReader(self.views, self.tables)
        self.walk = Walk(self.views, self.tables)

    def of(self, node: Node, asked: Any) -> Attention:
        """`asked`: one of the words of `_WHOLE`, or what `_softmax_of` tells."""
        if asked == "torch":
            return self._torch(node)
        if asked == "fused":
            return self._fused(node)
        if asked == "softmin":
            raise Unclear("softmin is not read: write softmax of -scores", node)
        scores, axis = asked
        if not isinstance(axis, int):
            several = isinstance(axis, (list, tuple))
            raise Unclear(
                "a softmax over several axes is not read" if several else "no axis of a softmax is said", node
            )
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
        ahead = Ahead(self, weights, weights_places)
        values, mixed, drop, path = ahead.values()
        end = Output(self, mixed, ahead.mixed_letters, values) if mixed is not None else None
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
        if not self.views.covers(view):
            raise Unclear("a part of the scores, or of what their weights give, is left out")
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
        from .atoms import Atom, within

        fake = tuple(Atom(i, size, ONE) for i, (_, size) in enumerate(own))
        pieces = within(fake, atom, None)
        return [(own[x.axis][0], x.size) for x in pieces]  # type: ignore[index]

    def _steps(self, back: Back, places: list[Any], factor: float, queries: Operand, keys: Operand) -> Any:
        later: Any = 1.0
        softcap, sinks = None, None
        masks: list[Any] = []
        for step, place in zip(back.steps[::-1], places[::-1]):
            if step.kind == "scale":
                later = times(later, step.what)
            elif step.kind == "shift" and isinstance(step.what, Value):
                own = self.masks.places_of(step.what, place)
                if any(letter == "k" for letters in own for letter, _ in letters):
                    raise Unclear("what is taken from the scores differs from key to key", step.node)
            elif step.kind == "tanh":
                if softcap is not None:
                    raise Unclear("scores go through tanh, and what is done to them after is not read", step.node)
                softcap, later = later, later
            elif step.kind == "hide":
                if softcap is not None:
                    raise Unclear("a mask is put on before a tanh", step.node)
                fill = times(step.fill, later)
                masks = self.masks.hiding(step.what, step.truth, place, fill, False, step.node) + masks
            elif step.kind == "add":
                if softcap is not None:
                    raise Unclear("a bias is added before a tanh", step.node)
                masks = self.masks.adding(step.what, place, times(later, step.fill), step.node) + masks
        scale = times(times(later, factor), times(queries.scale, keys.scale))
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
        summed = set(of_q) & set(of_k) - set(product.out) - {"."}
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
            else:  # in neither: an axis of size 1 in both, as that of a single head
                found.append(keys[1][of_k.index(x)] if x in of_k else [])
        return found

    def operand(self, value: Value, letters: list[str], rest: list[str]) -> tuple[Operand, list[list[Any]]]:
        """How a side of a product came; `letters` of its axes: "d", "q", "k", "" or, of those in `rest`, unknown ones.

        Also the letters with sizes of its axes.
        """
        chain = Origin(self, value, letters)
        return chain.operand(rest)

    def _additive_sides(self, back: Back, axis: int, node: Node) -> Any:
        product: Additive = back.product
        view = self.views.of(product.features)
        total = view.source.node.args[0]  # type: ignore[union-attr]
        made = total.node if isinstance(total, Value) else None
        both = None if made is None else side_by_side(self.views, total)
        if made is None or (both is None and (made.name.rstrip("_") != "add" or len(made.values()) < 2)):
            raise Unclear("what is in the tanh is no sum of queries and keys", made or view.source.node)
        if both is not None and len(both) != 2:
            raise Unclear("more than queries and keys are projected side by side", made)
        rank = len(total.shape)
        out = product.node.results[0]
        atoms = back.view.axes[axis]
        features_view = self.views.of(product.features, stop=(view.source,))
        along = features_view.axes
        if len(atoms) != 1 or len(along[atoms[0].axis or 0]) != 1:
            raise Unclear("the softmax does not go over keys", node)
        key_axis: Any = along[atoms[0].axis][0].axis  # type: ignore[index]
        a, b = made.values()[:2] if both is None else both
        sides = []
        for x in (a, b):
            if isinstance(x, Value):
                shape = (1,) * (rank - len(x.shape)) + tuple(x.shape)
                sides.append([self.views.size(n) for n in shape])
            else:  # what is projected side by side is repeated along the other's axes
                places = self.views.of(x.source).axes
                there = [any(atom.axis is not None for atom in atoms) for atoms in places]
                there[x.features[0]] = True
                sides.append([self.views.size(n) if i else ONE for n, i in zip(total.shape, there)])
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
            own = [n if s != ONE else "" for n, s in zip(names, sizes)]
            if isinstance(x, Value):
                found.append(self.operand(x, own[rank - len(x.shape) :], rest))
            else:
                found.append(Origin(self, total, own, x).operand(rest))
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
        scale = times(scale, times(queries[0].scale, keys[0].scale))
        masks: list[Mask] = []
        if given["is_causal"]:
            masks.append(Mask("causal", None, (), -math.inf, False, 1, 0, (), node.line))
        if mask is not None:
            if "bool" in str(mask.dtype):
                masks += self.masks.hiding(mask, False, places, -math.inf, False, node)
            else:
                masks += self.masks.adding(mask, places, 1.0, node)
        out = node.results[0]
        mixed_letters = [*queries[1][:-1], [("d", self.views.size(v.shape[-1]))]]
        end = Output(self, out, mixed_letters, values[0])
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


__all__ = ["CASTS", "Attention", "Mask", "Operand", "Projected", "Rows", "Turn", "attentions"]
