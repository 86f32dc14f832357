"""Views: where each element of a value stands in the value that it is a view of, for all sizes at once.

An axis of a view is a list of Atoms, the outermost first: an atom goes along an axis of the source in steps of
`stride`.
An atom without an axis repeats.  So splits of features into heads, chunks of a joint projection, transposed and folded
axes, and copies of shared heads are all the same thing.
"""

from __future__ import annotations

from typing import Any, Optional

import torch

from .atoms import ONE, Atom, Mixes, Product, View, composed, is_dropping, merged, of_number, probability
from .graph import Condition, Node, Reading, Value
from .shapes import PERMUTING, einsum_terms, permutation
from .sizes import Formula, evaluated, formula_of, plain

_MOST = 40  # sizes that have to be the same
_NOTHING: frozenset[str] = frozenset()
_RANDOM = frozenset(("random",))


# Functions whose result has the same elements.
SAME = frozenset(("contiguous", "clone", "alias", "positive"))
CASTS = frozenset(("to", "cpu", "float", "double", "half", "bfloat16", "type", "type_as", "bool", "int", "long"))
SPLITS = frozenset(("chunk", "split", "unbind", "split_with_sizes", "unsafe_chunk"))
CUTS = SPLITS | {"__getitem__", "select", "narrow"}
_RESHAPES = frozenset(("view", "reshape", "view_as", "reshape_as", "flatten", "unflatten", "ravel"))
_EXPANDS = frozenset(("expand", "expand_as", "broadcast_to"))
_LIKE = frozenset(("ones_like", "zeros_like", "full_like", "new_ones", "new_zeros", "new_full", "new_tensor"))
_OTHERS = frozenset(("unsqueeze", "squeeze", "repeat", "tile", "repeat_interleave", "__getitem__", "select", "narrow"))
VIEWS = SAME | SPLITS | _RESHAPES | _EXPANDS | _OTHERS | frozenset(PERMUTING)


class Views:
    """Traces views of one reading, whose conditions say which sizes are the same."""

    def __init__(self, reading: Reading) -> None:
        self._same: dict[Any, Any] = {}
        self._graph, self._sizes = reading.graph, reading.sizes()
        self.assumed: list[Condition] = []  # what has to be so, beside the conditions
        self._products: dict[Any, Product] = {}
        self._views: dict[tuple[Value, bool], View] = {}
        self._wholes: dict[Value, View] = {}
        self._behind: dict[Value, frozenset[str]] = {}
        for _ in range(2):  # what follows from one may need another
            for one in reading.conditions:
                if isinstance(one.formula, Formula) and one.formula.name == "==" and one.outcome:
                    self._equal(*one.formula.parts)

    def _equal(self, a: Any, b: Any) -> None:
        """Two products are the same, as far as one factor follows from it."""
        one, other = self._product(a), self._product(b)
        mine, theirs = list(one.formulas), list(other.formulas)
        for formula in one.formulas:
            if formula in theirs:
                mine.remove(formula)
                theirs.remove(formula)
        n, m = one.number, other.number
        if len(mine) == 1 and len(theirs) == 1 and n == m:
            self._same[mine[0]] = theirs[0]
        elif len(mine) == 1 and not theirs and m % n == 0:
            self._same[mine[0]] = m // n
        elif len(theirs) == 1 and not mine and n % m == 0:
            self._same[theirs[0]] = n // m
        else:
            return
        self._products.clear()

    def assume(self, one: Product, other: Product, node: Optional[Node]) -> None:
        """Two sizes that are the same here have to be so in each call.  Mixes: they are not the same here."""
        mine = [x for x in one.formulas if x not in other.formulas]
        theirs = [x for x in other.formulas if x not in one.formulas]
        for a in mine:
            for b in theirs:
                if self._number(a) == self._number(b) != 1:
                    return self._assume(a, b, node)
        for formulas, n, m in ((mine, other.number, one.number), (theirs, one.number, other.number)):
            if (
                len(mine) + len(theirs) == 1
                and len(formulas) == 1
                and n % m == 0
                and self._number(formulas[0]) == n // m
            ):
                return self._assume(formulas[0], n // m, node)
        raise Mixes(node)

    def _assume(self, a: Any, b: Any, node: Optional[Node]) -> None:
        if any(one.formula.parts == (a, b) for one in self.assumed) or len(self.assumed) > _MOST:
            raise Mixes(node)  # it did not help
        self.assumed.append(Condition(Formula("==", (a, b)), True, None if node is None else node.line))
        self._equal(a, b)
        self._views.clear()
        self._wholes.clear()

    def assume_one(self, size: Product) -> None:
        """A size that is 1 here has to be 1 in each call."""
        if size.number == 1 and all(self._number(x) == 1 for x in size.formulas):
            for formula in size.formulas:
                self._assume(formula, 1, None)

    def now(self, size: Product) -> Product:
        """A product by what is known now."""
        if not size.formulas or not self.assumed:
            return size
        found = Product(size.number)
        for formula in size.formulas:
            found = found.times(self._product(formula))
        return found

    def _number(self, formula: Any) -> Any:
        return evaluated(formula, self._sizes)

    def _representative(self, formula: Any) -> Any:
        while formula in self._same:
            formula = self._same[formula]
        return formula

    def size(self, number: Any) -> Product:
        """A size as a product."""
        return of_number(number) if type(number) is int else self._product(formula_of(number))

    def _product(self, formula: Any) -> Product:
        if type(formula) is int:
            return of_number(formula)
        found = self._products.get(formula)
        if found is None:
            found = self._products[formula] = self._product_of(formula)
        return found

    def _product_of(self, formula: Any) -> Product:
        formula = self._representative(plain(formula))
        if isinstance(formula, Formula) and formula.name == "*":
            found = ONE
            for part in formula.parts:
                found = found.times(self._product(part))
            return found
        if isinstance(formula, Formula) and formula.name == "//":
            quotient = self._product(formula.parts[0]).over(self._product(formula.parts[1]))
            if quotient is not None:
                return quotient
        return Product(formula) if isinstance(formula, int) else Product(1, (formula,))

    def behind(self, value: Value) -> frozenset[str]:
        """The kinds of the leaves that a value is made of; "random" among them where something is drawn."""
        known = self._behind
        if not known:
            known.update((leaf, frozenset((leaf.kind,))) for leaf in self._graph.leaves)
            for node in self._graph.nodes:
                kinds = _RANDOM if node.name == "dropout" else _NOTHING
                known.update(dict.fromkeys(node.results, kinds.union(*[known[x] for x in _numbers_of(node)])))
        return known[value]

    def whole(self, value: Value) -> View:
        """A value as a view of itself."""
        known = self._wholes.get(value)
        if known is None:
            axes = [(Atom(i, self.size(n), ONE),) if not _is_one(n) else () for i, n in enumerate(value.shape)]
            known = self._wholes[value] = View(value, tuple(axes), {})
        return known

    def of(self, value: Value, casts: bool = False, stop: Any = ()) -> View:
        """The value as a view of what it is made of by views alone.  Mixes: it holds for these sizes only."""
        if not stop:
            known = self._views.get((value, casts))
            if known is None:
                known = self._of(value, casts, ())
                self._views[value, casts] = known
            return known
        return self._of(value, casts, stop)

    def _of(self, value: Value, casts: bool, stop: Any) -> View:
        chain: list[tuple[Node, Value]] = []
        while value.node is not None and value not in stop:
            node = value.node
            if not self._is_view(node, casts):
                break
            chain.append((node, value))
            value = node.args[-1] if node.name == "einsum" else node.args[0]
            value = value[0] if isinstance(value, (list, tuple)) else value
        found = self.whole(value)
        for node, result in reversed(chain):
            found = self._step(found, node, result)
        return View(found.source, found.axes, found.offsets, tuple([node for node, _ in chain]))

    def _is_view(self, node: Node, casts: bool) -> bool:
        if node.name == "__getitem__":
            return not any(isinstance(x, Value) for x in _flat_index(node.args[1]))
        if node.name == "einsum":
            return len(node.values()) == 1
        if node.name in VIEWS:
            return len(node.args) > 0 and isinstance(node.args[0], Value)
        if node.name in CASTS and isinstance(node.args[0], Value):
            return _keeps_numbers(node.args[0].dtype, node.results[0].dtype, casts)
        return node.name == "dropout" and not is_dropping(node)

    def _step(self, view: View, node: Node, result: Value) -> View:
        name, args, kwargs = node.name, node.args, node.kwargs
        if name in SAME or name in CASTS or name == "dropout":
            return view
        if name in PERMUTING:
            order = permutation(name, args, kwargs)
            return view.with_axes(tuple(view.axes[i] for i in order))
        if name in _RESHAPES or name in ("unsqueeze", "squeeze"):
            return view.with_axes(self.reshaped(view.axes, result.shape, node))
        if name in _EXPANDS:
            return view.with_axes(self._expanded(view.axes, node.args[0].shape, result.shape))
        if name in SPLITS:
            return self._split(view, node, result)
        if name == "einsum":
            (term,), right, _ = einsum_terms(args, kwargs)
            if sorted(term) != sorted(right):
                raise Mixes(node)
            return view.with_axes(tuple(view.axes[term.index(x)] for x in right))
        if name == "__getitem__":
            return self._indexed(view, node)
        if name == "repeat_interleave":
            return self._repeated(view, node, result)
        if name in ("repeat", "tile"):
            return self._tiled(view, node, result)
        if name == "select":
            rank = len(args[0].shape)
            index = [slice(None)] * (int(_arg(node, 1, "dim")) % rank) + [_arg(node, 2, "index")]
            return self._by_index(view, index, node)
        if name == "narrow":
            axis, start, length = (_arg(node, i, word) for i, word in ((1, "dim"), (2, "start"), (3, "length")))
            index = [slice(None)] * (int(axis) % len(args[0].shape)) + [slice(start, start + length)]
            return self._by_index(view, index, node)
        raise Mixes(node)

    def covers(self, view: View, but: tuple[int, ...] = ()) -> bool:
        """Whether all of the source is seen, on all axes `but` these."""
        seen: dict[int, Product] = {}
        for atoms in view.axes:
            for atom in atoms:
                if atom.axis is not None:
                    seen[atom.axis] = seen.get(atom.axis, ONE).times(self.now(atom.size))
        sizes = {i: self.now(self.size(n)) for i, n in enumerate(view.source.shape) if i not in but}
        return all(size in (ONE, seen.get(i)) for i, size in sizes.items())

    def reshaped(self, axes: Any, shape: Any, node: Node) -> tuple[tuple[Atom, ...], ...]:
        atoms, found = [atom for axis in axes for atom in axis], []
        for size in shape:
            rest, group = self.size(size), []
            while rest != ONE:
                if not atoms:
                    raise Mixes(node)
                atom = atoms.pop(0)
                if self.assumed:
                    rest, atom = self.now(rest), Atom(atom.axis, self.now(atom.size), self.now(atom.stride))
                below = rest.over(atom.size)
                above = atom.size.over(rest) if below is None else None
                if below is not None:
                    group.append(atom)
                    rest = below
                elif above is not None:
                    group.append(Atom(atom.axis, rest, atom.stride.times(above)))
                    atoms.insert(0, Atom(atom.axis, above, atom.stride))
                    rest = ONE
                else:
                    self.assume(rest, atom.size, node)
                    atoms.insert(0, atom)
            found.append(tuple(group))
        if atoms:
            raise Mixes(node)
        return tuple(merged([*group]) for group in found)

    def _expanded(self, axes: Any, before: Any, after: Any) -> tuple[tuple[Atom, ...], ...]:
        new = len(after) - len(before)
        found = []
        for i, size in enumerate(after):
            own = axes[i - new] if i >= new else ()
            if own and before[i - new] == 1 and size != 1:
                self.assume_one(self.size(before[i - new]))
                own = ()
            found.append(own if own or _is_one(size) else (Atom(None, self.size(size), ONE),))
        return tuple(found)

    def _split(self, view: View, node: Node, result: Value) -> View:
        rank = len(node.args[0].shape)
        place = 1 if node.name == "unbind" else 2
        axis = int(_arg(node, place, "dim", 0)) % rank
        if node.name == "unbind":
            return self._by_index(view, [slice(None)] * axis + [result.index], node)
        start = sum(plain(x.shape[axis]) for x in node.results[: result.index])
        number = _number_of(node.results[: result.index], axis, self)
        if number is None:
            raise Mixes(node)
        return self._cut(view, axis, number, self.size(result.shape[axis]), node, start)

    def _cut(self, view: View, axis: int, start: int, size: Product, node: Node, _: Any = None, step: int = 1) -> View:
        """A piece of an axis."""
        atoms = view.axes[axis]
        if len(atoms) == 1:
            pieces: tuple[Atom, ...] = (Atom(atoms[0].axis, size, atoms[0].stride.times(Product(step))),)
            first = atoms[0]
            whole = start
        elif len(atoms) > 1 and step == 1:
            first, inner = atoms[0], ONE
            for atom in atoms[1:]:
                inner = inner.times(atom.size)
            outer = size.over(inner)
            if outer is None or inner.formulas or start % inner.number:
                raise Mixes(node)
            pieces = (Atom(first.axis, outer, first.stride), *atoms[1:])
            whole = start // inner.number
        else:
            raise Mixes(node)
        offsets = dict(view.offsets)
        if whole:
            if first.stride.formulas:
                raise Mixes(node)
            if first.axis is not None:
                offsets[first.axis] = offsets.get(first.axis, 0) + whole * first.stride.number
        pieces = tuple(atom for atom in pieces if atom.size != ONE)
        axes = (*view.axes[:axis], pieces, *view.axes[axis + 1 :])
        return View(view.source, axes, offsets, view.nodes)

    def _indexed(self, view: View, node: Node) -> View:
        index = node.args[1]
        return self._by_index(view, list(index) if isinstance(index, tuple) else [index], node)

    def _by_index(self, view: View, index: list[Any], node: Node) -> View:
        taken = sum(1 for x in index if x is not None and x is not Ellipsis)
        index = list(index) if any(x is Ellipsis for x in index) else [*index, Ellipsis]
        place = next(i for i, x in enumerate(index) if x is Ellipsis)
        rank = len(view.axes)
        index[place : place + 1] = [slice(None)] * (rank - taken)
        sizes, axis = iter(node.args[0].shape), 0
        for x in index:
            if x is None:
                view = view.with_axes((*view.axes[:axis], (), *view.axes[axis:]))
                axis += 1
            elif isinstance(x, slice):
                view = self._sliced(view, axis, x, next(sizes), node)
                axis += 1
            elif isinstance(x, int) and not isinstance(x, bool):
                size = next(sizes)
                at = self._place(x, size, node)
                view = self._cut(view, axis, at, ONE, node) if view.axes[axis] else view
                view = view.with_axes((*view.axes[:axis], *view.axes[axis + 1 :]))
            else:
                raise Mixes(node)
        return view

    def _place(self, x: Any, size: Any, node: Node) -> int:
        """A start as a plain number: constants only."""
        if formula_of(x) is not x:
            raise Mixes(node)
        if x >= 0:
            return int(x)
        if formula_of(size) is not size:
            raise Mixes(node)
        return int(size + x)

    def _sliced(self, view: View, axis: int, x: slice, size: Any, node: Node) -> View:
        step = 1 if x.step is None else int(x.step)
        result = sliced_size(x, size, self)
        if x.start in (None, 0) and formula_of(x.start) is x.start and step == 1 and result == self.size(size):
            return view
        if not view.axes[axis]:
            return view
        start = 0 if x.start is None else self._place(x.start, size, node)
        if result is None:
            raise Mixes(node)
        return self._cut(view, axis, start, result, node, step=step)

    def _repeated(self, view: View, node: Node, result: Value) -> View:
        times, axis = _arg(node, 1, "repeats"), _arg(node, 2, "dim")
        if not isinstance(times, int):
            raise Mixes(node)
        if axis is None:
            view, axis = view.with_axes((tuple(atom for each in view.axes for atom in each),)), 0
        axis = int(axis) % len(view.axes)
        atoms = (*view.axes[axis], *self._copies(times))
        return view.with_axes((*view.axes[:axis], atoms, *view.axes[axis + 1 :]))

    def _copies(self, times: Any) -> tuple[Atom, ...]:
        return () if _is_one(times) else (Atom(None, self.size(times), ONE),)

    def _tiled(self, view: View, node: Node, result: Value) -> View:
        times = node.args[1] if isinstance(node.args[1], (tuple, list)) else node.args[1:]
        new = len(result.shape) - len(view.axes)
        times = [1] * (len(result.shape) - len(times)) + list(times)
        axes = ((),) * new + view.axes
        return view.with_axes(tuple((*self._copies(n), *axis) for n, axis in zip(times, axes)))


def sliced_size(x: slice, size: Any, views: Views) -> Optional[Product]:
    """How many a slice takes, as a product, where that is one."""
    if x.stop is None and x.start in (None, 0):
        step = 1 if x.step is None else int(x.step)
        return views.size(size).over(Product(step))
    start = 0 if x.start is None else x.start
    if formula_of(start) is not start:
        return None
    stop = size if x.stop is None else x.stop
    if formula_of(stop) is stop and formula_of(size) is size:
        return Product(len(range(*slice(start, stop, x.step).indices(int(size)))))
    if start == 0 and x.step in (None, 1):
        if formula_of(stop) is stop and stop < 0:
            return None
        return views.size(stop)
    return None


def _number_of(values: Any, axis: int, views: Views) -> Optional[int]:
    total = 0
    for value in values:
        size = views.size(value.shape[axis])
        if size.formulas:
            return None
        total += size.number
    return total


def _keeps_numbers(before: torch.dtype, after: torch.dtype, casts: bool) -> bool:
    """Whether a cast changes no number, or, with `casts`, rounds to another type of fractions at most."""
    if before == after or not casts:
        return before == after
    if after.is_floating_point or before is torch.bool:
        return True
    whole = after is not torch.bool and not before.is_floating_point
    return whole and torch.iinfo(after).max >= torch.iinfo(before).max


def _numbers_of(node: Node) -> list[Value]:
    """The values on whose numbers a result hangs: not that of which it has the shape or the type alone."""
    given = node.values()
    return given[1:] if node.name in _LIKE and node.args and node.args[0] is given[0] else given


def _arg(node: Node, place: int, name: str, default: Any = None) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def _flat_index(index: Any) -> list[Any]:
    return list(index) if isinstance(index, (tuple, list)) else [index]


def _is_one(size: Any) -> bool:
    return type(size) is int and size == 1


__all__ = ["ONE", "Atom", "Mixes", "Product", "View", "Views", "composed", "is_dropping", "probability"]
