"""From a softmax back to the product that made its scores: what was done to them on the way."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import torch

from .atoms import merged
from .graph import Node, Value
from .masks import Unclear, is_number
from .products import contraction_of
from .tables import Tables
from .views import CASTS, Mixes, Product, View, Views

# Functions that scores may go through; through any other there is no product behind a softmax.
_ALONG = frozenset((
    "add", "sub", "mul", "div", "masked_fill", "where", "__setitem__", "tanh", "clamp", "relu", "__aliased__", "neg",
    "dropout",
    "nan_to_num", "cat", "log", "exp", "masked_scatter", "abs", "sigmoid", "pow", "square", "maximum", "minimum",
))  # fmt: skip


class ScoreOperation(NamedTuple):
    """What was done to the scores: "scale" by a number or Value, "hide" where a condition is `truth`, "add" of a Value,
    "tanh", "sinks"; `view` are the scores at that time, as a view of their product."""

    kind: str
    node: Node
    what: Any = None
    fill: float = 0.0
    truth: bool = True
    view: Optional[View] = None


class Additive(NamedTuple):
    """Scores w_v . tanh(features)."""

    node: Node
    features: Value
    weight: Value


class Back(NamedTuple):
    """The product, the steps in the order in which they were made, and the scores at the end as a view of the
    product."""

    product: Any  # Contraction or Additive
    out: Value
    steps: list[ScoreOperation]
    view: View


class Walk:
    def __init__(self, views: Views, tables: Tables) -> None:
        self.views, self.tables = views, tables
        self._products: dict[tuple[Value, bool], bool] = {}
        self._found: dict[tuple[Value, bool], Any] = {}

    def back(self, scores: Value) -> Back:
        """Unclear: there is no product of two values behind them, or something else was done to them."""
        loose = not self._leads(scores, False)
        if loose and not self._leads(scores, True):
            raise self._stranger(scores)
        chain: list[tuple[Value, ScoreOperation]] = []
        value = scores
        while True:
            found = self._product(value, loose)
            if found is not None:
                break
            step, before = self._step(value, loose)
            chain.append((value, step))
            value = before
        return self._forward(found, value, chain[::-1])

    def _forward(self, product: Any, out: Value, chain: list[tuple[Value, ScoreOperation]]) -> Back:
        view, steps = self.views.whole(out), []
        for value, step in chain:
            if step.kind == "view":
                view = self._viewed(view, step, value)
            else:
                view = self._broadened(view, value, step)
                steps.append(step._replace(view=view))
        return Back(product, out, steps, view)

    def _viewed(self, view: View, step: ScoreOperation, value: Value) -> View:
        try:
            if step.node.name == "__aliased__":
                return view.with_axes(self.views.reshaped(view.axes, value.shape, step.node))
            return self.views._step(view, step.node, value)
        except Mixes as mixes:
            raise Unclear("scores are reshaped in a way that holds for these sizes alone", mixes.node) from None

    def _broadened(self, view: View, value: Value, step: ScoreOperation) -> View:
        """The same elements with axes of size 1 in front."""
        more = len(value.shape) - len(view.axes)
        axes = ((),) * more + view.axes
        for atoms, size in zip(axes, value.shape):
            whole = Product(1)
            for atom in atoms:
                whole = whole.times(atom.size)
            if self.views.now(whole) != self.views.size(size):
                raise Unclear("scores are broadcast to more than they are", step.node)
        return view.with_axes(axes)

    def _stranger(self, scores: Value) -> Unclear:
        """What stands between a softmax and the product of queries and keys, or that there is none."""
        value, last = scores, scores.node
        while value.node is not None and value.node.values():
            last, value = value.node, value.node.values()[0]
            if self._leads(value, False):
                return Unclear(f"scores go through {last.name.strip('_')} before the softmax", last)
        return Unclear("no product of queries and keys is behind this softmax", scores.node)

    # --- Where a product is -------------------------------------------------------------------------------------

    def _leads(self, value: Value, loose: bool) -> bool:
        """Whether a product of queries and keys is behind it."""
        key = value, loose
        if key not in self._products:
            self._products[key] = False
            self._products[key] = self._leads_now(value, loose)
        return self._products[key]

    def _leads_now(self, value: Value, loose: bool) -> bool:
        node = value.node
        if node is None:
            return False
        if self._product(value, loose) is not None:
            return True
        name = node.name.rstrip("_") if not node.name.endswith("__") else node.name
        if name in _ALONG or name in CASTS or self.views._is_view(node, True):
            values = node.values()
            return any(self._leads(x, loose) for x in (values[:1] if self.views._is_view(node, True) else values))
        return False

    def _product(self, value: Value, loose: bool) -> Any:
        key = value, loose
        if key not in self._found:
            self._found[key] = self._product_now(value, loose)
        return self._found[key]

    def _product_now(self, value: Value, loose: bool) -> Any:
        node = value.node
        if node is None:
            return None
        additive = self._additive(node)
        if additive is not None:
            return additive
        found = contraction_of(node)
        if found is None or not set(found.of_a) & set(found.of_b) - set(found.out) - {"."}:
            return None
        weights = [self._is_weight(x) for x in (found.a, found.b)]
        if all(weights) or (any(weights) and not loose):
            return None
        if any(
            self.tables.is_constant(x) for x, weight in ((found.a, weights[0]), (found.b, weights[1])) if not weight
        ):
            return None
        return found

    def _is_weight(self, value: Value) -> bool:
        behind = self.views.behind(value)
        return "parameter" in behind and "input" not in behind

    def _additive(self, node: Node) -> Optional[Additive]:
        """linear(tanh(x), w) with one row, or tanh(x) times a vector."""
        values = node.values()
        if node.name == "linear" and values[1].shape[0] == 1:  # a softmax does not see its bias
            features, weight = values[:2]
        elif node.name in ("matmul", "mv", "einsum") and len(values) == 2 and any(self._is_weight(x) for x in values):
            features, weight = values if self._is_weight(values[1]) else values[::-1]
        else:
            found = contraction_of(node) if node.name == "sum" else None
            if found is None or not any(self._is_weight(x) for x in (found.a, found.b)):
                return None
            features, weight = (found.a, found.b) if self._is_weight(found.b) else (found.b, found.a)
        try:
            source = self.views.of(features).source
        except Mixes:
            return None
        made = source.node
        if made is None or made.name.rstrip("_") != "tanh":
            return None
        return Additive(node, features, weight)

    # --- One step -------------------------------------------------------------------------------------------

    def _step(self, value: Value, loose: bool) -> tuple[ScoreOperation, Value]:
        node = value.node
        assert node is not None
        name = node.name.rstrip("_") if not node.name.endswith("__") else node.name
        if self.views._is_view(node, True):
            given = node.values()
            return ScoreOperation("view", node), given[0]
        method = getattr(self, f"_of_{name.strip('_')}", None)
        if method is None:
            raise Unclear(f"scores go through {name} before the softmax", node)
        return method(node, loose)

    def _lead(self, node: Node, loose: bool) -> tuple[Value, Any, bool]:
        """(the scores among two arguments, the other, whether scores come first)."""
        a, b = node.args[:2]
        if isinstance(a, Value) and self._leads(a, loose):
            return a, b, True
        assert isinstance(b, Value)
        return b, a, False

    def _of_add(self, node: Node, loose: bool) -> tuple[ScoreOperation, Value]:
        lead, other, _ = self._lead(node, loose)
        alpha = node.kwargs.get("alpha", 1)
        if alpha != 1:
            raise Unclear("scores are added with a factor", node)
        return (ScoreOperation("shift", node) if is_number(other) else ScoreOperation("add", node, other, 1.0)), lead

    def _of_sub(self, node: Node, loose: bool) -> tuple[ScoreOperation, Value]:
        lead, other, first = self._lead(node, loose)
        if not first:
            raise Unclear("scores are taken from something", node)
        if is_number(other) or self._is_maximum(other):
            return ScoreOperation("shift", node, other), lead
        return ScoreOperation("add", node, other, -1.0), lead

    def _is_maximum(self, other: Any) -> bool:
        """The largest of some numbers: of each row, a softmax does not see it."""
        while (
            isinstance(other, Value)
            and other.node is not None
            and other.node.name in ("detach", "unsqueeze", "__getitem__")
        ):
            other = other.node.args[0]
        return isinstance(other, Value) and other.node is not None and other.node.name in ("amax", "max")

    def _of_mul(self, node: Node, loose: bool) -> tuple[ScoreOperation, Value]:
        lead, other, _ = self._lead(node, loose)
        return ScoreOperation("scale", node, self._scale(other, node)), lead

    def _of_div(self, node: Node, loose: bool) -> tuple[ScoreOperation, Value]:
        lead, other, first = self._lead(node, loose)
        if not first or node.kwargs:
            raise Unclear("something is divided by scores", node)
        scale = self._scale(other, node)
        return ScoreOperation("scale", node, 1 / scale if not isinstance(scale, Value) else ("1/", scale)), lead

    def _scale(self, other: Any, node: Node) -> Any:
        if is_number(other):
            return other
        said = self.tables.of(other)
        if is_number(said):
            return said
        if isinstance(other, Value) and all(self.views.size(n) == Product(1) for n in other.shape):
            return other
        raise Unclear("scores are multiplied by a tensor", node)

    def _of_neg(self, node: Node, loose: bool) -> tuple[ScoreOperation, Value]:
        return ScoreOperation("scale", node, -1.0), node.args[0]

    def _of_tanh(self, node: Node, loose: bool) -> tuple[ScoreOperation, Value]:
        return ScoreOperation("tanh", node), node.args[0]

    def _of_masked_fill(self, node: Node, loose: bool) -> tuple[ScoreOperation, Value]:
        given: dict[str, Any] = {**dict(zip(("self", "mask", "value"), node.args)), **node.kwargs}
        cond, fill = given["mask"], given["value"]
        return ScoreOperation("hide", node, cond, self._fill(fill, node)), given["self" if "self" in given else "input"]

    def _of_where(self, node: Node, loose: bool) -> tuple[ScoreOperation, Value]:
        if len(node.args) != 3:
            raise Unclear("where() with other arguments", node)
        cond, a, b = node.args
        first = isinstance(a, Value) and self._leads(a, loose)
        return ScoreOperation("hide", node, cond, self._fill(b if first else a, node), truth=not first), (
            a if first else b
        )

    def _of_setitem(self, node: Node, loose: bool) -> tuple[ScoreOperation, Value]:
        scores, index, fill = node.args
        *front, index = index if isinstance(index, tuple) else (index,)
        whole = all(x is Ellipsis or x == slice(None) for x in front)  # a mask of the last axes
        if not (whole and isinstance(index, Value) and index.dtype is torch.bool) or (
            Ellipsis not in front and len(front) + len(index.shape) != len(scores.shape)
        ):
            raise Unclear("scores are set at places that are no mask", node)
        return ScoreOperation("hide", node, index, self._fill(fill, node)), scores

    def _fill(self, fill: Any, node: Node) -> float:
        said = self.tables.of(fill) if not is_number(fill) else fill
        if not is_number(said):
            raise Unclear("hidden scores become what is no number", node)
        return float(said)  # type: ignore[arg-type]

    def _in_order(self, one: Value, other: Value) -> bool:
        """Whether two views of one tensor have its numbers in one order."""
        try:
            views = self.views.of(one), self.views.of(other)
        except Mixes:
            return False
        orders = [merged([atom for atoms in view.axes for atom in atoms]) for view in views]
        return views[0].source is views[1].source and orders[0] == orders[1]

    def _of_aliased(self, node: Node, loose: bool) -> tuple[ScoreOperation, Value]:
        before, written = node.args
        sizes = [1, 1]
        for i, x in enumerate((before, written)):
            for n in x.shape:
                sizes[i] *= int(n)
        if sizes[0] != sizes[1]:
            raise Unclear("a part of the scores is written through a view", node)
        if not self._in_order(before, written.node.writes):
            raise Unclear("scores are written through a view that turns them", node)
        return ScoreOperation("view", node), written
