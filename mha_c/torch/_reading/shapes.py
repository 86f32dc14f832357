"""The shapes of what torch's functions give, as formulas of the call's sizes: a rule for each way.

The rules are Python on Sizes: whatever they compare becomes a condition of the reading, as in the reader's own lines.
"""

from __future__ import annotations

from typing import Any, Callable

from .graph import Value, walked
from .sizes import Size, plain
from .sizing import Shape, broadcast, filled, indexed, meet, pieces, product, quotient, same, wider


def _axis(axis: Any, rank: int) -> int:
    return int(axis) % rank if rank else 0


def _tensors(args: Any, kwargs: Any) -> list[Value]:
    """The Values among the arguments, at any depth."""
    found: list[Value] = []
    for x in (*args, *kwargs.values()) if kwargs else args:
        if type(x) is Value:
            found.append(x)
        elif isinstance(x, (tuple, list, dict, slice)):
            found += [y for y in walked(x) if isinstance(y, Value)]
    return found


def _given(args: Any, kwargs: Any, place: int, names: str, default: Any = None) -> Any:
    if len(args) > place:
        return args[place]
    return next((kwargs[name] for name in names.split() if name in kwargs), default)


def given_sizes(args: Any, kwargs: Any, place: int, names: str = "size shape") -> list[Any]:
    """Sizes given one by one, or as a tuple."""
    if len(args) > place:
        rest = args[place]
        return list(rest) if isinstance(rest, (tuple, list)) else list(args[place:])
    return list(_given((), kwargs, 0, names))


# --- Rules --------------------------------------------------------------------------------------------------


def first(args: Any, kwargs: Any) -> Shape:
    return _tensors(args, kwargs)[0].shape


def broadcasted(args: Any, kwargs: Any) -> Shape:
    return broadcast(*[x.shape for x in _tensors(args, kwargs)])


def linear(args: Any, kwargs: Any) -> Shape:
    x, weight = _given(args, kwargs, 0, "input"), _given(args, kwargs, 1, "weight")
    meet(x.shape[-1], weight.shape[-1])
    return (*x.shape[:-1], *weight.shape[:-1])


def matmul(args: Any, kwargs: Any) -> Shape:
    a, b = _given(args, kwargs, 0, "input").shape, _given(args, kwargs, 1, "other mat2 tensor2 vec").shape
    meet(a[-1], b[-2] if len(b) > 1 else b[-1])
    if len(a) == 1 and len(b) == 1:
        return ()
    if len(b) == 1:
        return a[:-1]
    if len(a) == 1:
        return (*b[:-2], b[-1])
    return (*broadcast(a[:-2], b[:-2]), a[-2], b[-1]) if max(len(a), len(b)) > 2 else (a[-2], b[-1])


def added_product(args: Any, kwargs: Any) -> Shape:
    return matmul([_given(args, kwargs, 1, "batch1 mat1"), _given(args, kwargs, 2, "batch2 mat2")], {})


def einsum_terms(args: Any, kwargs: Any) -> tuple[list[str], str, list[Value]]:
    """(letters of each operand, letters of the result, operands) of torch.einsum; ValueError: with an ellipsis."""
    equation, *operands = args
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = list(operands[0])
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if "." in equation:
        terms, right = _spelled(terms, right if arrow else None, operands)
    elif not arrow:
        right = "".join(sorted(x for x in set(left) - {","} if left.count(x) == 1))
    return terms, right, operands


def _spelled(terms: list[str], right: Any, operands: list[Value]) -> tuple[list[str], str]:
    """The same with capital Greek letters in the place of an ellipsis."""
    if right is None:
        raise ValueError
    longest = max(len(x.shape) - len(term.replace("...", "")) for x, term in zip(operands, terms) if "..." in term)
    letters = "ΑΒΓΔΕΖΗΘ"[:longest]

    def spelled(term: str, rank: int) -> str:
        return term.replace("...", letters[len(letters) - (rank - len(term.replace("...", ""))) :])

    return [spelled(t, len(x.shape)) for t, x in zip(terms, operands)], right.replace("...", letters)


def einsum(args: Any, kwargs: Any) -> Shape:
    terms, right, operands = einsum_terms(args, kwargs)
    sizes: dict[str, Any] = {}
    for term, x in zip(terms, operands):
        for letter, size in zip(term, x.shape):
            sizes[letter] = size if letter not in sizes or same(size, sizes[letter]) else wider(sizes[letter], size)
    return tuple(sizes[letter] for letter in right)


def reduced(args: Any, kwargs: Any) -> Any:
    shape, axes = first(args, kwargs), _given(args, kwargs, 1, "dim axis")
    keep = bool(_given(args, kwargs, 2, "keepdim keepdims", False))
    if axes is None:
        return (1,) * len(shape) if keep else ()
    axes = {_axis(x, len(shape)) for x in (axes if isinstance(axes, (tuple, list)) else [axes])}
    if keep:
        return tuple(1 if i in axes else n for i, n in enumerate(shape))
    return tuple(n for i, n in enumerate(shape) if i not in axes)


def extreme(args: Any, kwargs: Any) -> Any:
    """max and min: of all, of an axis (two results), or of two tensors."""
    return broadcasted(args, kwargs) if len(_tensors(args, kwargs)) == 2 else reduced(args, kwargs)


def _transpose(args: Any, kwargs: Any) -> Shape:
    shape = list(args[0].shape)
    a = _axis(_given(args, kwargs, 1, "dim0 axis0"), len(shape))
    b = _axis(_given(args, kwargs, 2, "dim1 axis1"), len(shape))
    shape[a], shape[b] = shape[b], shape[a]
    return tuple(shape)


def _last_two(args: Any, kwargs: Any) -> Shape:
    *front, a, b = args[0].shape
    return (*front, b, a)


def _turned_round(args: Any, kwargs: Any) -> Shape:
    return tuple(args[0].shape[::-1])


def _permute(args: Any, kwargs: Any) -> Shape:
    shape = args[0].shape
    return tuple(shape[_axis(i, len(shape))] for i in given_sizes(args, kwargs, 1, "dims"))


def permutation(name: str, args: Any, kwargs: Any) -> tuple[int, ...]:
    """Of the functions that only change the order of axes: result axis i is axis permutation[i] of the argument."""
    rank = len(args[0].shape)
    given = PERMUTING[name]([_Axes(rank), *args[1:]], kwargs)
    return tuple(int(x) for x in given)


class _Axes:
    """Stands for a tensor whose sizes are the numbers of its axes."""

    def __init__(self, rank: int) -> None:
        self.shape = tuple(range(rank))


def _movedim(args: Any, kwargs: Any) -> Shape:
    shape = list(args[0].shape)
    source, target = _given(args, kwargs, 1, "source"), _given(args, kwargs, 2, "destination")
    source = [source] if isinstance(source, int) else source
    target = [target] if isinstance(target, int) else target
    source, target = ([_axis(x, len(shape)) for x in axes] for axes in (source, target))
    rest = [n for i, n in enumerate(shape) if i not in source]
    for place, i in sorted(zip(target, source)):
        rest.insert(place, shape[i])
    return tuple(rest)


def reshape(args: Any, kwargs: Any) -> Shape:
    sizes = given_sizes(args, kwargs, 1)
    if len(sizes) == 1 and not isinstance(sizes[0], int):  # .view(dtype)
        raise ValueError
    return filled(args[0].shape, sizes)


def view_as(args: Any, kwargs: Any) -> Shape:
    return tuple(_given(args, kwargs, 1, "other").shape)


def flatten(args: Any, kwargs: Any) -> Shape:
    shape = args[0].shape
    a = _axis(_given(args, kwargs, 1, "start_dim", 0), len(shape))
    b = _axis(_given(args, kwargs, 2, "end_dim", -1), len(shape))
    return (*shape[:a], product(shape[a : b + 1]), *shape[b + 1 :])


def unflatten(args: Any, kwargs: Any) -> Shape:
    shape = args[0].shape
    a = _axis(_given(args, kwargs, 1, "dim"), len(shape))
    sizes = args[2:] if len(args) > 3 else _given(args, kwargs, 2, "sizes unflattened_size")
    return (*shape[:a], *filled((shape[a],), list(sizes)), *shape[a + 1 :])


def unsqueeze(args: Any, kwargs: Any) -> Shape:
    shape = list(args[0].shape)
    shape.insert(_axis(_given(args, kwargs, 1, "dim"), len(shape) + 1), 1)
    return tuple(shape)


def squeeze(args: Any, kwargs: Any) -> Shape:
    shape, axis = args[0].shape, _given(args, kwargs, 1, "dim")
    axes = range(len(shape)) if axis is None else axis if isinstance(axis, (tuple, list)) else [axis]
    gone = {_axis(i, len(shape)) for i in axes}
    return tuple(n for i, n in enumerate(shape) if i not in gone or n != 1)


def expand(args: Any, kwargs: Any) -> Shape:
    sizes, shape = given_sizes(args, kwargs, 1), args[0].shape
    shape = (1,) * (len(sizes) - len(shape)) + tuple(shape)
    return tuple(n if not isinstance(new, Size) and new == -1 else new for n, new in zip(shape, sizes))


def expand_as(args: Any, kwargs: Any) -> Shape:
    return tuple(_given(args, kwargs, 1, "other").shape)


def repeat(args: Any, kwargs: Any) -> Shape:
    times, shape = given_sizes(args, kwargs, 1, "repeats dims"), args[0].shape
    shape = (1,) * (len(times) - len(shape)) + tuple(shape)
    return tuple(product((n, t)) for n, t in zip(shape, times))


def tile(args: Any, kwargs: Any) -> Shape:
    times = given_sizes(args, kwargs, 1, "dims")
    return repeat([args[0], [1] * (len(args[0].shape) - len(times)) + times], {})


def repeat_interleave(args: Any, kwargs: Any) -> Shape:
    times, axis = _given(args, kwargs, 1, "repeats"), _given(args, kwargs, 2, "dim axis")
    shape = list(args[0].shape)
    if axis is None:
        shape, axis = [product(shape)], 0
    axis = _axis(axis, len(shape))
    shape[axis] = product((shape[axis], times))
    return tuple(shape)


def index(args: Any, kwargs: Any) -> Shape:
    return indexed(args[0].shape, args[1])


def cat(args: Any, kwargs: Any) -> Shape:
    parts = _given(args, kwargs, 0, "tensors")
    axis = _axis(_given(args, kwargs, 1, "dim axis", 0), len(parts[0].shape))
    shape = list(parts[0].shape)
    for i in range(len(shape)):
        for other in parts[1:]:
            if i == axis:
                shape[i] = shape[i] + other.shape[i]
            else:
                meet(shape[i], other.shape[i])
    return tuple(shape)


def stack(args: Any, kwargs: Any) -> Shape:
    parts = _given(args, kwargs, 0, "tensors")
    shape = list(parts[0].shape)
    shape.insert(_axis(_given(args, kwargs, 1, "dim", 0), len(shape) + 1), len(parts))
    return tuple(shape)


def _with(shape: Shape, axis: int, size: Any) -> Shape:
    return (*shape[:axis], size, *shape[axis + 1 :])


def chunk(args: Any, kwargs: Any) -> list[Shape]:
    shape, n = args[0].shape, _given(args, kwargs, 1, "chunks")
    axis = _axis(_given(args, kwargs, 2, "dim", 0), len(shape))
    size = shape[axis]
    each = quotient((size,), (n,)) if size % n == 0 else -(-size // n)
    return [_with(shape, axis, x) for x in pieces(size, each)]


def split(args: Any, kwargs: Any) -> list[Shape]:
    shape, sizes = args[0].shape, _given(args, kwargs, 1, "split_size_or_sections split_size split_sizes")
    axis = _axis(_given(args, kwargs, 2, "dim", 0), len(shape))
    parts = list(sizes) if isinstance(sizes, (tuple, list)) else pieces(shape[axis], sizes)
    return [_with(shape, axis, n) for n in parts]


def unbind(args: Any, kwargs: Any) -> list[Shape]:
    shape = args[0].shape
    axis = _axis(_given(args, kwargs, 1, "dim", 0), len(shape))
    if isinstance(shape[axis], Size):
        shape[axis].log.pin(shape[axis].formula)
    return [(*shape[:axis], *shape[axis + 1 :])] * plain(shape[axis])


def select(args: Any, kwargs: Any) -> Shape:
    shape = args[0].shape
    axis = _axis(_given(args, kwargs, 1, "dim"), len(shape))
    return (*shape[:axis], *shape[axis + 1 :])


def narrow(args: Any, kwargs: Any) -> Shape:
    shape = args[0].shape
    return _with(shape, _axis(_given(args, kwargs, 1, "dim"), len(shape)), _given(args, kwargs, 3, "length"))


def arange(args: Any, kwargs: Any) -> Shape:
    numbers = [x for x in args if isinstance(x, (int, float))]
    if len(numbers) < 2:
        end = numbers[0] if numbers else kwargs["end"]
        numbers = [kwargs.get("start", 0), end]
    start, end, step = (*numbers, kwargs.get("step", 1))[:3]
    n = end if not isinstance(start, Size) and start == 0 else end - start
    return (n,) if not isinstance(step, Size) and step == 1 else (-(-n // step),)


def filled_with(args: Any, kwargs: Any) -> Shape:
    return tuple(given_sizes(args, kwargs, 0))


def full(args: Any, kwargs: Any) -> Shape:
    return tuple(_given(args, kwargs, 0, "size"))


def new_filled(args: Any, kwargs: Any) -> Shape:
    return tuple(given_sizes(args, kwargs, 1))


def new_full(args: Any, kwargs: Any) -> Shape:
    return tuple(_given(args, kwargs, 1, "size"))


def eye(args: Any, kwargs: Any) -> Shape:
    n = args[0]
    return n, args[1] if len(args) > 1 else n


def of_numbers(args: Any, kwargs: Any) -> Any:
    """torch.tensor of numbers."""
    shape, x = [], _given(args, kwargs, 0, "data")
    while isinstance(x, (tuple, list)):
        shape.append(len(x))
        x = x[0]
    return tuple(shape)


def conv(args: Any, kwargs: Any) -> Shape:
    """Of convolutions that keep places: kernels of one."""
    x, weight = args[0].shape, args[1].shape
    if any(n != 1 for n in weight[2:]):
        raise ValueError
    if _given(args, kwargs, 6, "groups", 1) == 1:
        meet(x[len(x) - len(weight) + 1], weight[1])
    return (*x[: len(x) - len(weight) + 1], weight[0], *x[len(x) - len(weight) + 2 :])


def gather(args: Any, kwargs: Any) -> Shape:
    return tuple(_given(args, kwargs, 2, "index").shape)


def embedding(args: Any, kwargs: Any) -> Shape:
    return (*args[0].shape, args[1].shape[-1])


def attended(args: Any, kwargs: Any) -> Shape:
    q, v = _given(args, kwargs, 0, "query").shape, _given(args, kwargs, 2, "value").shape
    return (*q[:-1], v[-1])


def outer(args: Any, kwargs: Any) -> Shape:
    return args[0].shape[0], args[1].shape[0]


def pad(args: Any, kwargs: Any) -> Shape:
    shape, pad = list(args[0].shape), _given(args, kwargs, 1, "pad")
    for i in range(len(pad) // 2):
        shape[-1 - i] = shape[-1 - i] + pad[2 * i] + pad[2 * i + 1]
    return tuple(shape)


def setitem(args: Any, kwargs: Any) -> Shape:
    shape, index = args[0].shape, args[1]
    index = index[0] if isinstance(index, tuple) and len(index) == 1 else index
    if isinstance(index, Value) and "bool" in str(index.dtype):
        for a, b in zip(shape, index.shape):
            meet(a, b)
    return tuple(shape)


def masked(args: Any, kwargs: Any) -> Shape:
    """Of masked_fill, whose mask is broadcast."""
    return broadcast(_given(args, kwargs, 0, "input").shape, _given(args, kwargs, 1, "mask").shape)


def unknown(args: Any, kwargs: Any) -> Any:
    raise ValueError  # its sizes are not needed: Size of unknown formulas


PERMUTING: dict[str, Callable[..., Any]] = {
    "transpose": _transpose, "t": _turned_round, "T": _turned_round, "mT": _last_two, "permute": _permute,
    "movedim": _movedim, "adjoint": _last_two, "mH": _last_two, "H": _turned_round,
}  # fmt: skip
