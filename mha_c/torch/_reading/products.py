"""Products of two values, however they are written, by letters; and what was projected by which rows of which
weight."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

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

    weight, bias   each a tuple of Rows, one after the other (a weight for each head, for example); bias is () where
                   there
                   is none
    lines          of the products
    """

    weight: tuple[Rows, ...]
    bias: tuple[Rows, ...]
    lines: tuple[Line, ...]


class Projection(NamedTuple):
    """A node that projects: `source` with its features on axis `features`; the result has them on `result_features`,
    the
    other axes in the same order.  The weight is a parameter (a View of it, of two axes: features out, features in)."""

    source: Value
    features: int
    result_features: int
    weight: View
    bias: Optional[View]
    nodes: tuple[Node, ...]
    weight_in: int = 1  # which axis of the weight's view are the features in


def weight_view(views: Views, value: Value) -> Optional[View]:
    """A view of a parameter, or of a table; None of any other value."""
    try:
        view = views.of(value)
    except Mixes:
        return None
    return view if view.source.kind in ("parameter", "buffer", "constant") else None


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
        return Projection(values[0], last, last, weight, bias, (node,))
    if node.name in ("conv1d", "conv2d", "conv3d") and len(values) >= 2:
        return _convolution(views, node, values)
    if node.name == "addmm" and len(values) == 3 and not node.kwargs:
        bias, weight = weight_view(views, values[0]), weight_view(views, values[2])
        if bias is not None and weight is not None:
            return Projection(values[1], 1, 1, weight, bias, (node,), weight_in=0)
    found = contraction_of(node)
    return None if found is None or found.added is not None or found.factor != 1 else _by_letters(views, found)


def _with_bias(views: Views, node: Node) -> Optional[Projection]:
    a, b = node.values()
    for x, bias in ((a, b), (b, a)):
        view = weight_view(views, bias)
        if view is not None and len(bias.shape) == 1 and x.node is not None:
            inner = projection_of(views, x)
            if inner is not None and inner.bias is None and inner.result_features == len(x.shape) - 1:
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
    return Projection(values[0], axis, axis, weight._replace(axes=weight.axes[:2]), bias, (node,))


def _by_letters(views: Views, found: Contraction) -> Optional[Projection]:
    """x @ W, W x, or an einsum of both, where W has two axes."""
    for x, w, of_x, of_w in ((found.a, found.b, found.of_a, found.of_b), (found.b, found.a, found.of_b, found.of_a)):
        weight = weight_view(views, w)
        if weight is None or weight.source.kind != "parameter" or len(of_w) != 2 or "." in of_x + of_w:
            continue
        inside = [letter for letter in of_w if letter in of_x and letter not in found.out]
        new = [letter for letter in of_w if letter not in of_x]
        if len(inside) != 1 or len(new) != 1 or new[0] not in found.out:
            continue
        rest = [letter for letter in found.out if letter != new[0]]
        if rest != [letter for letter in of_x if letter != inside[0]]:
            continue
        features, result = of_x.index(inside[0]), found.out.index(new[0])
        return Projection(x, features, result, weight, None, (found.node,), weight_in=of_w.index(inside[0]))
    return None


def rows_of(view: View, out_axis: int, picked: list[int]) -> Optional[Rows]:
    """The rows of a parameter that are features `picked` of its view's axis."""
    atoms = view.axes[out_axis]
    rank = len(view.source.shape)
    if len(atoms) > 1 or any(atom.stride.formulas or atom.axis is None for atom in atoms):
        return None
    axis: Any = atoms[0].axis if atoms else out_axis
    start, stride = view.offsets.get(axis, 0), atoms[0].stride.number if atoms else 1
    rows: Any = [start + stride * i for i in picked]
    step = rows[1] - rows[0] if len(rows) > 1 else 1
    if step > 0 and rows == list(range(rows[0], rows[0] + step * len(rows), step)):
        rows = range(rows[0], rows[0] + step * len(rows), step)
    else:
        rows = tuple(rows)
    return Rows(view.source, rows, columns=axis == 1 and rank == 2)


__all__ = [
    "CASTS", "ONE", "Contraction", "Projected", "Projection", "Rows", "composed", "contraction_of", "projection_of",
    "rows_of",
]  # fmt: skip
