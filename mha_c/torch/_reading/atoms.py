"""Atoms: the pieces of which the axes of a view are made, and views of views."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple, Optional

from .graph import Node, Value


class Product(NamedTuple):
    """A size as a product: a number and formulas, which are sorted."""

    number: int
    formulas: tuple[Any, ...] = ()

    def times(self, other: Product) -> Product:
        if other is ONE or self is ONE:
            return self if other is ONE else other
        if self.formulas and other.formulas:
            return Product(self.number * other.number, tuple(sorted(self.formulas + other.formulas, key=repr)))
        return Product(self.number * other.number, self.formulas or other.formulas)

    def over(self, other: Product) -> Optional[Product]:
        """The quotient, where it is a product again."""
        if other is ONE or (not self.formulas and not other.formulas):
            fits = other is ONE or (other.number != 0 and self.number % other.number == 0)
            return (self if other is ONE else of_number(self.number // other.number)) if fits else None
        rest = list(self.formulas)
        for formula in other.formulas:
            if formula not in rest:
                return None
            rest.remove(formula)
        if other.number == 0 or self.number % other.number:
            return None
        return Product(self.number // other.number, tuple(rest))


@cache
def of_number(number: int) -> Product:
    """A size that is a plain number."""
    return Product(number)


ONE = of_number(1)


class Atom(NamedTuple):
    axis: Optional[int]
    size: Product
    stride: Product


class View(NamedTuple):
    """`axes` of a view of `source`; `offsets` {axis of the source: (number, Product or None) where it begins}."""

    source: Value
    axes: tuple[tuple[Atom, ...], ...]
    offsets: Mapping[int, Any]
    nodes: tuple[Node, ...] = ()

    def with_axes(self, axes: tuple[tuple[Atom, ...], ...]) -> View:
        """The same with other axes."""
        return View(self.source, axes, self.offsets, self.nodes)


class Mixes(Exception):
    """A view that mixes axes in a way that holds for these sizes only, or is none."""

    def __init__(self, node: Optional[Node]) -> None:
        self.node = node


def composed(outer: View, inner: View, node: Any) -> View:
    """A view of a value that is a view itself, as a view of that one's source."""
    offsets = dict(inner.offsets)
    for axis, start in outer.offsets.items():
        atoms = inner.axes[axis]
        if len(atoms) != 1 or atoms[0].stride.formulas:
            raise Mixes(node)
        if atoms[0].axis is not None:
            offsets[atoms[0].axis] = offsets.get(atoms[0].axis, 0) + start * atoms[0].stride.number
    axes = []
    for atoms in outer.axes:
        found: list[Atom] = []
        for atom in atoms:
            found += [atom] if atom.axis is None else within(inner.axes[atom.axis], atom, node)
        axes.append(merged(found))
    return View(inner.source, tuple(axes), offsets, outer.nodes + inner.nodes)


def within(atoms: tuple[Atom, ...], wanted: Atom, node: Any) -> list[Atom]:
    """The piece of an axis, of these atoms, that an atom goes along."""
    if len(atoms) == 1:
        return [Atom(atoms[0].axis, wanted.size, wanted.stride.times(atoms[0].stride))]
    found: list[Atom] = []
    rest, stride = wanted.size, wanted.stride
    for atom in reversed(atoms):
        if rest == ONE:
            break
        if stride != ONE:
            below, above = stride.over(atom.size), atom.size.over(stride)
            if below is not None:
                stride = below
                continue
            if above is None:
                raise Mixes(node)
            atom, stride = Atom(atom.axis, above, atom.stride.times(stride)), ONE
        below = rest.over(atom.size)
        if below is None and atom.size.over(rest) is None:
            raise Mixes(node)
        found.insert(0, atom if below is not None else Atom(atom.axis, rest, atom.stride))
        rest = below if below is not None else ONE
    if rest != ONE:
        raise Mixes(node)
    return found


def merged(atoms: list[Atom]) -> tuple[Atom, ...]:
    """Neighbours that go along one axis without a gap are one atom."""
    found: list[Atom] = []
    for atom in atoms:
        if atom.size == ONE:
            continue
        last = found[-1] if found else None
        if (
            last is not None
            and last.axis == atom.axis
            and (atom.axis is None or last.stride == atom.stride.times(atom.size))
        ):
            found[-1] = Atom(atom.axis, last.size.times(atom.size), atom.stride)
        else:
            found.append(atom)
    return tuple(found)


def is_dropping(node: Node) -> bool:
    """Whether a dropout draws."""
    training = node.args[2] if len(node.args) > 2 else node.kwargs.get("training", True)
    return bool(training) and probability(node) > 0


def probability(node: Node) -> float:
    p = node.args[1] if len(node.args) > 1 else node.kwargs.get("p", 0.5)
    return float(p)
