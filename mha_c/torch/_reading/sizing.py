"""Arithmetic of shapes: products, broadcasting, slices, as formulas."""

from __future__ import annotations

from typing import Any

from .graph import Value
from .sizes import Formula, Log, Size, formula_of, plain

Shape = tuple[Any, ...]


def factors(sizes: Any) -> tuple[int, list[Any], Any]:
    """(number, formulas of the other factors, a Size among them or None) of a product."""
    number, formulas, one = 1, [], None
    for size in sizes:
        if isinstance(size, Size):
            one = size
            for part in _flat(size.formula):
                if isinstance(part, int):
                    number *= part
                else:
                    formulas.append(part)
        else:
            number *= size
    return number, formulas, one


def _flat(formula: Any) -> list[Any]:
    if isinstance(formula, Formula) and formula.name == "*":
        return [x for part in formula.parts for x in _flat(part)]
    return [formula]


def quotient(above: Any, below: Any) -> Any:
    """The product of sizes divided by another, with what both have left out."""
    (n, up, one), (m, down, other) = factors(above), factors(below)
    for formula in list(down):
        if formula in up:
            up.remove(formula)
            down.remove(formula)
    if not down and not up:
        return n // m
    size = one if one is not None else other
    value = 1
    for x in above:
        value *= plain(x)
    for x in below:
        value //= plain(x)
    if not down and n % m == 0:
        return _product(n // m, up, value, size.log)
    return size.log.number(value, Formula("//", (_joined(n, up), _joined(m, down))))


def _joined(number: int, formulas: list[Any]) -> Any:
    parts = tuple(([] if number == 1 else [number]) + sorted(formulas, key=repr))
    return parts[0] if len(parts) == 1 else Formula("*", parts) if parts else 1


def _product(number: int, formulas: list[Any], value: int, log: Log) -> Any:
    return log.number(value, _joined(number, formulas))


def product(sizes: Any) -> Any:
    return quotient(sizes, ())


def same(a: Any, b: Any) -> bool:
    """Whether two sizes are the same by their formulas."""
    return a is b or bool(formula_of(a) == formula_of(b))


def broadcast(*shapes: Shape) -> Shape:
    rank, found = max(map(len, shapes)), []
    for axis in range(-rank, 0):
        size: Any = 1
        for shape in shapes:
            if len(shape) >= -axis and not same(shape[axis], size):
                size = wider(size, shape[axis])
        found.append(size)
    return tuple(found)


def wider(a: Any, b: Any) -> Any:
    if not isinstance(a, Size) and a == 1:
        return b
    if not isinstance(b, Size) and b == 1:
        return a
    if a == b:  # noted: they come from different places
        return a if isinstance(a, Size) else b
    return b if a == 1 else a


def meet(a: Any, b: Any) -> None:
    """Two sizes that torch demands to be equal."""
    if not same(a, b) and not a == b:
        raise ValueError


def filled(shape: Shape, sizes: list[Any]) -> Shape:
    """The sizes of a reshape, with -1 replaced."""
    known = [n for n in sizes if isinstance(n, Size) or n != -1]
    if len(known) == len(sizes):
        return tuple(sizes)
    rest = quotient(shape, known)
    return tuple(n if isinstance(n, Size) or n != -1 else rest for n in sizes)


def indexed(shape: Shape, index: Any) -> Shape:
    """The shape of x[index]; ValueError where numbers of a tensor decide."""
    index = list(index) if isinstance(index, tuple) else [index]
    taken = sum(1 for x in index if x is not None and x is not Ellipsis)
    if not any(x is Ellipsis for x in index):
        index.append(Ellipsis)
    place = next(i for i, x in enumerate(index) if x is Ellipsis)
    index[place : place + 1] = [slice(None)] * (len(shape) - taken)
    found, axes, tensors, at = [], iter(shape), [], None
    for x in index:
        if x is None:
            found.append(1)
        elif isinstance(x, slice):
            found.append(sliced(next(axes), x))
        elif isinstance(x, bool) or isinstance(x, (list, tuple)):
            raise ValueError
        elif isinstance(x, Value):
            if "bool" in str(x.dtype) or "uint8" in str(x.dtype):
                raise ValueError
            next(axes)
            if at is not None and len(found) != at:
                at = 0  # tensors that do not stand together: their axes come first
            at = len(found) if at is None else at
            tensors.append(x.shape)
        else:
            next(axes)  # a number
    if tensors:
        found[at:at] = broadcast(*tensors)
    return tuple(found)


def sliced(size: Any, piece: slice) -> Any:
    """How many of so many a slice takes."""
    step = 1 if piece.step is None else piece.step
    start, stop = (_place(x, size) for x in (piece.start, piece.stop))
    start = 0 if start is None else start
    if stop is None or same(stop, size):
        n = size if not isinstance(start, Size) and start == 0 else size - start
    else:
        n = stop if not isinstance(start, Size) and start == 0 else stop - start
    n = n if not isinstance(n, Size) and n > 0 else (n if n > 0 else 0)
    return n if not isinstance(step, Size) and step == 1 else -(-n // step)


def _place(number: Any, size: Any) -> Any:
    if number is None or (not isinstance(number, Size) and number == 0) or same(number, size):
        return number
    if number < 0:
        number = size + number
        return 0 if number < 0 else number
    return size if number > size else number


def pieces(size: Any, each: Any) -> list[Any]:
    """Of that size, as long as there are some."""
    found, done = [], 0
    while done < plain(size):
        whole = done + plain(each) <= plain(size)
        found.append(each if whole else size - done)
        done += plain(each)
    if isinstance(size, Size) and not (len(found) * plain(each) == plain(size) and product((each, len(found))) == size):
        size.log.pin(size.formula)
    return found
