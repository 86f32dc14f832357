"""Products of two values, however they are written, by letters; and what was projected by which rows of which
weight."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

from .atoms import of_number
from .graph import Line, Node, Value
from .shapes import einsum_terms
from .sizes import formula_of
from .views import CASTS, ONE, Mixes, View, Views, composed

_LETTERS = "zyxwvuts"


class Contraction(NamedTuple):
    """out = sum of a * b over the letters that `out` has not.  Letters of axes of size 1 that repeat are blanks,
    "."."""

    node: Node
    a: Value
    b: Value
    of_a: str
    of_b: str
    out: str
    factor: float = 1.0
    added: Optional[Value] = None
    added_factor: float = 0.0


def contraction_of(node: Node) -> Optional[Contraction]:
    """What a node multiplies and sums; None where it is no product of two values."""
    name, args, kwargs = node.name, node.args, node.kwargs
    if name in ("matmul", "bmm", "mm", "mv") and len(node.values()) == 2:
        a, b = node.values()
        return _matmul(node, a, b)
    if name == "linear" and len(node.values()) >= 2 and not _is_leaf(node.values()[1]):
        a, b = node.values()[:2]
        front = _LETTERS[: len(a.shape) - 1]
        return Contraction(node, a, b, front + "c", "jc", front + "j") if len(node.values()) == 2 else None
    if name in ("baddbmm", "addmm"):
        added, a, b = node.values()[:3]
        found = _matmul(node, a, b)
        return found._replace(factor=kwargs.get("alpha", 1.0), added=added, added_factor=kwargs.get("beta", 1.0))
    if name == "einsum":
        try:
            terms, out, operands = einsum_terms(args, kwargs)
        except (ValueError, IndexError):
            return None
        if len(terms) == 2:
            (a, b), (x, y) = operands, (_blanked(t, v) for t, v in zip(terms, operands))
            return Contraction(node, a, b, x, y, out)
    if name == "sum" and isinstance(args[0], Value) and args[0].node is not None and args[0].node.name == "mul":
        return _sum_of_products(node, args[0].node)
    return None


def _is_leaf(value: Value) -> bool:
    return value.node is None


def _blanked(term: str, value: Value) -> str:
    return "".join("." if _is_one(n) else x for x, n in zip(term, value.shape))


def _is_one(size: Any) -> bool:
    return formula_of(size) is size and size == 1


def _matmul(node: Node, a: Value, b: Value) -> Contraction:
    front = max(len(a.shape), len(b.shape), 2) - 2
    letters = _LETTERS[:front]
    of_a = (letters[front - (len(a.shape) - 2) :] + "i" if len(a.shape) > 1 else "") + "c"
    of_b = letters[front - (len(b.shape) - 2) :] + "cj" if len(b.shape) > 1 else "c"
    out = letters + ("i" if len(a.shape) > 1 else "") + ("j" if len(b.shape) > 1 else "")
    n = len(of_a) - 2
    of_a = _blanked(of_a[:n], a) + of_a[n:] if n > 0 else of_a
    n = len(of_b) - 2
    of_b = _blanked(of_b[:n], b) + of_b[n:] if n > 0 else of_b
    return Contraction(node, a, b, of_a, of_b, out)


def _sum_of_products(node: Node, product: Node) -> Optional[Contraction]:
    if len(product.values()) != 2:
        return None
    axis = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    keep = node.args[2] if len(node.args) > 2 else node.kwargs.get("keepdim", False)
    rank = len(product.results[0].shape)
    axis = axis[0] if isinstance(axis, (list, tuple)) and len(axis) == 1 else axis
    if not isinstance(axis, int) or keep or rank > len(_LETTERS):
        return None
    letters = list(_LETTERS[:rank])
    letters[axis] = "c"
    terms = []
    for value in product.values():
        terms.append(_blanked("".join(letters[rank - len(value.shape) :]), value))
    a, b = product.values()
    return Contraction(node, a, b, terms[0], terms[1], "".join(x for x in letters if x != "c"))


class Rows(NamedTuple):
    """Some output features of a weight, or of a bias: which value, and which of its rows, in this order.

    value      the Value: a parameter's leaf, or what is made of such alone
    rows       a range, or a tuple of numbers, counted through the axes `outs`
    outs, ins  its axes of output and of input features: ((0,), (1,)) of a Linear's, ((1,), (0,)) of `x @ W`; of a
               bias `ins` is empty
    cut        None, or (first, number) of the input features
    """

    value: Value
    rows: Any
    outs: tuple[int, ...] = (0,)
    ins: tuple[int, ...] = (1,)
    cut: Optional[tuple[int, int]] = None

    @property
    def columns(self) -> bool:
        """Whether features are columns, as in `x @ W`."""
        return (self.outs, self.ins) == ((1,), (0,))


class Projected(NamedTuple):
    """Features that come of a matrix product with a weight, plus a bias or None: rows of one, or of several, weights.

    weight, bias   each a tuple of Rows, one after the other (a weight for each head, for example); bias is () where
                   there
                   is none
    lines          of the products
    """

    weight: tuple[Rows, ...]
    bias: tuple[Rows, ...]
    lines: tuple[Line, ...]


class Projection(NamedTuple):
    """A node that projects: `source` with its features on some axes, and others that have size 1 (`ones`); the result
    has them on `result_features`, the other axes in the same order.

    weight   a View; `ins` and `outs` are its axes that go along those features
    bias     a View, whose axes go along `result_features` in their order; or None
    """

    source: Value
    features: tuple[int, ...]
    result_features: tuple[int, ...]
    weight: View
    bias: Optional[View]
    nodes: tuple[Node, ...]
    ins: tuple[int, ...] = (1,)
    outs: tuple[int, ...] = (0,)
    ones: tuple[int, ...] = ()

    def rows(self, picked: Any) -> Optional[tuple[Rows, tuple[Rows, ...]]]:
        """The rows that have these features, of the weight and of the bias, () where there is none; None where they are
        none of either.

        picked   a number for each of `result_features` for each feature; or a range, where there is one of them"""
        weight = rows_of(self.weight, self.outs, self.ins, picked)
        if weight is None or self.bias is None:
            return None if weight is None else (weight, ())
        bias = rows_of(self.bias, tuple(range(len(self.result_features))), (), picked)
        return None if bias is None else (weight, (bias,))


def weight_view(views: Views, value: Value) -> Optional[View]:
    """A view of a parameter or of a table, or of what is made of these alone; None of any other value."""
    try:
        view = views.of(value)
    except Mixes:
        return None
    if views.behind(view.source) & {"input", "random"}:
        return None
    mixed = any(len(atoms) > 1 or any(atom.axis is None for atom in atoms) for atoms in view.axes)
    return views.whole(value) if mixed else view


def projection_of(views: Views, value: Value) -> Optional[Projection]:
    """How a value was projected, where it was."""
    node = value.node
    if node is None:
        return None
    if node.name == "add" and len(node.values()) == 2:  # x @ W + b
        return _with_bias(views, node)
    values = node.values()
    if node.name == "linear" and len(values) >= 2:
        weight = weight_view(views, values[1])
        bias = weight_view(views, values[2]) if len(values) > 2 else None
        if weight is None or (len(values) > 2 and bias is None):
            return None
        last = len(value.shape) - 1
        return Projection(values[0], (last,), (last,), weight, bias, (node,))
    if node.name in ("conv1d", "conv2d", "conv3d") and len(values) >= 2:
        return _convolution(views, node, values)
    if node.name == "addmm" and len(values) == 3 and not node.kwargs:
        bias, weight = weight_view(views, values[0]), weight_view(views, values[2])
        if bias is not None and weight is not None:
            return Projection(values[1], (1,), (1,), weight, bias, (node,), (0,), (1,))
    found = contraction_of(node)
    return None if found is None or found.added is not None or found.factor != 1 else _by_letters(views, found)


def side_by_side(views: Views, value: Value) -> Optional[list[Projection]]:
    """The projections whose sum a value is, where one weight projects cat([a, b], -1); None of any other."""
    whole = projection_of(views, value)
    made = None if whole is None else views.of(whole.source).source.node
    if whole is None or made is None or made.name != "cat" or made.results[0] is not whole.source:
        return None
    axis = made.args[1] if len(made.args) > 1 else made.kwargs.get("dim", 0)
    rank = len(whole.source.shape)
    atoms = whole.weight.axes[whole.ins[0]]
    if len(whole.ins) > 1 or len(atoms) != 1 or (int(axis) % rank,) != whole.features:
        return None
    found: list[Projection] = []
    start = 0
    for part in made.values():
        size, offsets = views.size(part.shape[int(axis)]), dict(whole.weight.offsets)
        if size.formulas:
            views.assume(size, of_number(int(part.shape[int(axis)])), made)
            size = views.size(part.shape[int(axis)])
        if size.formulas or atoms[0].axis is None or atoms[0].stride != ONE:
            return None
        offsets[atoms[0].axis] = offsets.get(atoms[0].axis, 0) + start
        start += size.number
        axes = [*whole.weight.axes]
        axes[whole.ins[0]] = (atoms[0]._replace(size=size),)
        weight = whole.weight._replace(axes=tuple(axes), offsets=offsets)
        nodes = (*whole.nodes, made)
        found.append(whole._replace(source=part, weight=weight, bias=None if found else whole.bias, nodes=nodes))
    return found


def _with_bias(views: Views, node: Node) -> Optional[Projection]:
    a, b = node.values()
    for x, bias in ((a, b), (b, a)):
        view = weight_view(views, bias)
        if view is None or x.node is None:
            continue
        inner = projection_of(views, x)
        if inner is None or inner.bias is not None or inner.result_features[-1] != len(x.shape) - 1:
            continue
        own = [i - (len(x.shape) - len(bias.shape)) for i in inner.result_features]
        rest = [n for i, n in enumerate(bias.shape) if i not in own]
        if own[0] >= 0 and all(views.size(n) == ONE for n in rest):
            sizes = zip(inner.result_features, own)
            if all(views.size(x.shape[i]) == views.size(bias.shape[j]) for i, j in sizes):
                view = view._replace(axes=tuple(view.axes[i] for i in own))
                return inner._replace(bias=view, nodes=(node, *inner.nodes))
    return None


def _convolution(views: Views, node: Node, values: list[Value]) -> Optional[Projection]:
    weight = weight_view(views, values[1])
    options = [*node.args[3:], *node.kwargs.values()]
    plain = all(x in (0, 1, (0,), (1,), (0, 0), (1, 1), "valid") or isinstance(x, Value) or x is None for x in options)
    if weight is None or any(n != 1 for n in values[1].shape[2:]) or not plain:
        return None
    stride = node.args[3] if len(node.args) > 3 else node.kwargs.get("stride", 1)
    groups = node.args[6] if len(node.args) > 6 else node.kwargs.get("groups", 1)
    if set(stride if isinstance(stride, (tuple, list)) else [stride]) != {1} or groups != 1:
        return None
    bias = weight_view(views, values[2]) if len(values) > 2 else None
    axis = len(values[0].shape) - len(values[1].shape) + 1
    return Projection(values[0], (axis,), (axis,), weight, bias, (node,), tuple(range(1, len(weight.axes))))


def _by_letters(views: Views, found: Contraction) -> Optional[Projection]:
    """x @ W, W x, or an einsum of both, however many axes W has."""
    for x, w, of_x, of_w in ((found.a, found.b, found.of_a, found.of_b), (found.b, found.a, found.of_b, found.of_a)):
        weight = weight_view(views, w)
        if weight is None or "parameter" not in views.behind(w) or "." in of_w:
            continue
        inside = [letter for letter in of_x if letter in of_w and letter not in found.out]
        new = [letter for letter in found.out if letter in of_w and letter not in of_x]
        if not inside or not new or sorted(inside + new) != sorted(of_w):
            continue
        ones = tuple(i for i, letter in enumerate(of_x) if letter == ".")
        rest = [letter for letter in found.out if letter not in new]
        if rest != [letter for letter in of_x if letter not in inside and letter != "."]:
            continue
        return Projection(
            x, tuple(of_x.index(y) for y in inside), tuple(found.out.index(y) for y in new), weight, None,
            (found.node,), tuple(of_w.index(y) for y in inside), tuple(of_w.index(y) for y in new), ones,
        )  # fmt: skip
    return None


def rows_of(view: View, outs: tuple[int, ...], ins: tuple[int, ...], picked: Any) -> Optional[Rows]:
    """The rows of what a view is of, whose output features on its axes `outs` are at the places `picked`; None where
    they are none."""
    value, found = view.source, [[view.axes[i] for i in axes] for axes in (outs, ins)]
    if any(not isinstance(formula_of(n), int) for n in value.shape):
        return None
    if any(atom.axis is None or atom.stride.formulas or atom.size.formulas for x in found for y in x for atom in y):
        return None
    inside = [atom for atoms in found[1] for atom in atoms]
    in_axes: Any = tuple(dict.fromkeys(atom.axis for atom in inside))
    out_axes = (
        tuple(i for i in range(len(value.shape)) if i not in in_axes and value.shape[i] != 1)
        or tuple(i for i in range(len(value.shape)) if i not in in_axes)[:1]
    )
    in_axes = in_axes or tuple(i for i in range(len(value.shape)) if i not in out_axes) if ins else ()
    cut = _cut(view, inside, in_axes)
    if cut is OTHER or any(len(atoms) > 1 or any(atom.axis in in_axes for atom in atoms) for atoms in found[0]):
        return None
    strides: dict[Any, int] = {}
    total = 1
    for axis in reversed(out_axes):
        strides[axis] = total
        total *= int(value.shape[axis])
    start = sum(view.offsets.get(axis, 0) * strides[axis] for axis in out_axes)
    steps = [sum(strides[atom.axis] * atom.stride.number for atom in atoms) for atoms in found[0]]
    if isinstance(picked, range) and (len(picked) == 1 or steps[0] > 0):
        step = picked.step * steps[0] if len(picked) > 1 else 1
        first = start + picked.start * steps[0]
        return Rows(value, range(first, first + step * len(picked), step), out_axes, in_axes, cut)
    places = [(i,) for i in picked] if isinstance(picked, range) else picked
    rows: Any = [start + sum(i * step for i, step in zip(place, steps)) for place in places]
    step = rows[1] - rows[0] if len(rows) > 1 else 1
    if step > 0 and rows == list(range(rows[0], rows[0] + step * len(rows), step)):
        rows = range(rows[0], rows[0] + step * len(rows), step)
    else:
        rows = tuple(rows)
    return Rows(value, rows, out_axes, in_axes, cut)


OTHER: Any = object()


def _cut(view: View, inside: Any, axes: tuple[int, ...]) -> Any:
    """None where a view has all input features of a value, in their order; (first, number) of a piece; OTHER."""
    number, whole = 1, 1
    for atom in reversed(inside):
        number *= atom.size.number
    for axis in axes:
        whole *= int(view.source.shape[axis])
    if any(atom.stride != ONE for atom in inside) or len(inside) != len({atom.axis for atom in inside}):
        return OTHER
    if number == whole:
        return None
    return (view.offsets.get(axes[0], 0), number) if len(axes) == 1 else OTHER


__all__ = [
    "CASTS", "ONE", "Contraction", "Projected", "Projection", "Rows", "composed", "contraction_of", "projection_of",
    "rows_of", "side_by_side",
]  # fmt: skip
