"""The functions of torch that a reading may meet, and the shapes of what they give, as formulas of the call's sizes.

A function that is not among RULES leaves its call unread.  The rules are Python on Sizes: whatever they compare
becomes a
condition of the reading, as in the reader's own lines.
"""

from __future__ import annotations

from typing import Any, Callable

from .graph import Value, walked
from .sizes import UNKNOWN, Formula, Log, Size, formula_of, plain

Shape = tuple[Any, ...]


def shapes_of(name: str, args: Any, kwargs: Any, sizes: list[tuple[int, ...]], log: Log) -> list[Shape]:
    """The shapes of the results of a function, whose sizes as numbers are given."""
    rule = RULES[name.rstrip("_") if name.endswith("_") and not name.endswith("__") else name]
    try:
        found = rule(args, kwargs)
    except _FAILED:
        found = None
    shapes = found if isinstance(found, list) else [found] * len(sizes)
    fits = len(shapes) == len(sizes)
    return [_checked(shapes[i] if fits else None, numbers, log) for i, numbers in enumerate(sizes)]


def _checked(shape: Any, numbers: tuple[int, ...], log: Log) -> Shape:
    if shape is not None and len(shape) == len(numbers) and all(plain(a) == b for a, b in zip(shape, numbers)):
        return tuple(shape)
    return tuple(Size(n, UNKNOWN, log) for n in numbers)


_FAILED = (TypeError, ValueError, IndexError, AttributeError, KeyError, ZeroDivisionError, StopIteration)


# --- Arithmetic of shapes -----------------------------------------------------------------------------------


def _factors(sizes: Any) -> tuple[int, list[Any], Any]:
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
    (n, up, one), (m, down, other) = _factors(above), _factors(below)
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
    return bool(formula_of(a) == formula_of(b))


def broadcast(*shapes: Shape) -> Shape:
    rank, found = max(map(len, shapes)), []
    for axis in range(-rank, 0):
        size: Any = 1
        for shape in shapes:
            if len(shape) >= -axis and not same(shape[axis], size):
                size = _wider(size, shape[axis])
        found.append(size)
    return tuple(found)


def _wider(a: Any, b: Any) -> Any:
    if not isinstance(a, Size) and a == 1:
        return b
    if not isinstance(b, Size) and b == 1:
        return a
    if a == b:  # noted: they come from different places
        return a if isinstance(a, Size) else b
    return b if a == 1 else a


def _axis(axis: Any, rank: int) -> int:
    return int(axis) % rank if rank else 0


def _tensors(found: Any) -> list[Value]:
    return [x for x in walked(found) if isinstance(x, Value)]


def _given(args: Any, kwargs: Any, place: int, names: str, default: Any = None) -> Any:
    if len(args) > place:
        return args[place]
    return next((kwargs[name] for name in names.split() if name in kwargs), default)


def _sizes(args: Any, kwargs: Any, place: int, names: str = "size shape") -> list[Any]:
    """Sizes given one by one, or as a tuple."""
    if len(args) > place:
        rest = args[place]
        return list(rest) if isinstance(rest, (tuple, list)) else list(args[place:])
    return list(_given((), kwargs, 0, names))


# --- Rules --------------------------------------------------------------------------------------------------


def _first(args: Any, kwargs: Any) -> Shape:
    return _tensors((args, kwargs))[0].shape


def _all(args: Any, kwargs: Any) -> Shape:
    return broadcast(*[x.shape for x in _tensors((args, kwargs))])


def _scalar_or_first(args: Any, kwargs: Any) -> Shape:
    """Of cast and copies."""
    return _first(args, kwargs)


def _linear(args: Any, kwargs: Any) -> Shape:
    x, weight = _given(args, kwargs, 0, "input"), _given(args, kwargs, 1, "weight")
    _meet(x.shape[-1], weight.shape[-1])
    return (*x.shape[:-1], *weight.shape[:-1])


def _meet(a: Any, b: Any) -> None:
    """Two sizes that torch demands to be equal."""
    if not same(a, b) and not a == b:
        raise ValueError


def _matmul(args: Any, kwargs: Any) -> Shape:
    a, b = _given(args, kwargs, 0, "input").shape, _given(args, kwargs, 1, "other mat2 tensor2 vec").shape
    _meet(a[-1], b[-2] if len(b) > 1 else b[-1])
    if len(a) == 1 and len(b) == 1:
        return ()
    if len(b) == 1:
        return a[:-1]
    if len(a) == 1:
        return (*b[:-2], b[-1])
    return (*broadcast(a[:-2], b[:-2]), a[-2], b[-1]) if max(len(a), len(b)) > 2 else (a[-2], b[-1])


def _added_product(args: Any, kwargs: Any) -> Shape:
    return _matmul([_given(args, kwargs, 1, "batch1 mat1"), _given(args, kwargs, 2, "batch2 mat2")], {})


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


def _einsum(args: Any, kwargs: Any) -> Shape:
    terms, right, operands = einsum_terms(args, kwargs)
    sizes: dict[str, Any] = {}
    for term, x in zip(terms, operands):
        for letter, size in zip(term, x.shape):
            sizes[letter] = size if letter not in sizes or same(size, sizes[letter]) else _wider(sizes[letter], size)
    return tuple(sizes[letter] for letter in right)


def _reduced(args: Any, kwargs: Any) -> Any:
    shape, axes = _first(args, kwargs), _given(args, kwargs, 1, "dim axis")
    keep = bool(_given(args, kwargs, 2, "keepdim keepdims", False))
    if axes is None:
        return (1,) * len(shape) if keep else ()
    axes = {_axis(x, len(shape)) for x in (axes if isinstance(axes, (tuple, list)) else [axes])}
    if keep:
        return tuple(1 if i in axes else n for i, n in enumerate(shape))
    return tuple(n for i, n in enumerate(shape) if i not in axes)


def _extreme(args: Any, kwargs: Any) -> Any:
    """max and min: of all, of an axis (two results), or of two tensors."""
    return _all(args, kwargs) if len(_tensors((args, kwargs))) == 2 else _reduced(args, kwargs)


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
    return tuple(shape[_axis(i, len(shape))] for i in _sizes(args, kwargs, 1, "dims"))


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


def _reshape(args: Any, kwargs: Any) -> Shape:
    sizes = _sizes(args, kwargs, 1)
    if len(sizes) == 1 and not isinstance(sizes[0], int):  # .view(dtype)
        raise ValueError
    return filled(args[0].shape, sizes)


def filled(shape: Shape, sizes: list[Any]) -> Shape:
    """The sizes of a reshape, with -1 replaced."""
    known = [n for n in sizes if isinstance(n, Size) or n != -1]
    if len(known) == len(sizes):
        return tuple(sizes)
    rest = quotient(shape, known)
    return tuple(n if isinstance(n, Size) or n != -1 else rest for n in sizes)


def _view_as(args: Any, kwargs: Any) -> Shape:
    return tuple(_given(args, kwargs, 1, "other").shape)


def _flatten(args: Any, kwargs: Any) -> Shape:
    shape = args[0].shape
    a = _axis(_given(args, kwargs, 1, "start_dim", 0), len(shape))
    b = _axis(_given(args, kwargs, 2, "end_dim", -1), len(shape))
    return (*shape[:a], product(shape[a : b + 1]), *shape[b + 1 :])


def _unflatten(args: Any, kwargs: Any) -> Shape:
    shape = args[0].shape
    a = _axis(_given(args, kwargs, 1, "dim"), len(shape))
    sizes = args[2:] if len(args) > 3 else _given(args, kwargs, 2, "sizes unflattened_size")
    return (*shape[:a], *filled((shape[a],), list(sizes)), *shape[a + 1 :])


def _unsqueeze(args: Any, kwargs: Any) -> Shape:
    shape = list(args[0].shape)
    shape.insert(_axis(_given(args, kwargs, 1, "dim"), len(shape) + 1), 1)
    return tuple(shape)


def _squeeze(args: Any, kwargs: Any) -> Shape:
    shape, axis = args[0].shape, _given(args, kwargs, 1, "dim")
    axes = range(len(shape)) if axis is None else axis if isinstance(axis, (tuple, list)) else [axis]
    gone = {_axis(i, len(shape)) for i in axes}
    return tuple(n for i, n in enumerate(shape) if i not in gone or n != 1)


def _expand(args: Any, kwargs: Any) -> Shape:
    sizes, shape = _sizes(args, kwargs, 1), args[0].shape
    shape = (1,) * (len(sizes) - len(shape)) + tuple(shape)
    return tuple(n if not isinstance(new, Size) and new == -1 else new for n, new in zip(shape, sizes))


def _expand_as(args: Any, kwargs: Any) -> Shape:
    return tuple(_given(args, kwargs, 1, "other").shape)


def _repeat(args: Any, kwargs: Any) -> Shape:
    times, shape = _sizes(args, kwargs, 1, "repeats dims"), args[0].shape
    shape = (1,) * (len(times) - len(shape)) + tuple(shape)
    return tuple(_times(n, t) for n, t in zip(shape, times))


def _times(n: Any, t: Any) -> Any:
    return product((n, t))


def _tile(args: Any, kwargs: Any) -> Shape:
    times = _sizes(args, kwargs, 1, "dims")
    return _repeat([args[0], [1] * (len(args[0].shape) - len(times)) + times], {})


def _repeat_interleave(args: Any, kwargs: Any) -> Shape:
    times, axis = _given(args, kwargs, 1, "repeats"), _given(args, kwargs, 2, "dim axis")
    shape = list(args[0].shape)
    if axis is None:
        shape, axis = [product(shape)], 0
    axis = _axis(axis, len(shape))
    shape[axis] = _times(shape[axis], times)
    return tuple(shape)


def _index(args: Any, kwargs: Any) -> Shape:
    return indexed(args[0].shape, args[1])


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


def _cat(args: Any, kwargs: Any) -> Shape:
    parts = _given(args, kwargs, 0, "tensors")
    axis = _axis(_given(args, kwargs, 1, "dim axis", 0), len(parts[0].shape))
    shape = list(parts[0].shape)
    for i in range(len(shape)):
        for other in parts[1:]:
            if i == axis:
                shape[i] = shape[i] + other.shape[i]
            else:
                _meet(shape[i], other.shape[i])
    return tuple(shape)


def _stack(args: Any, kwargs: Any) -> Shape:
    parts = _given(args, kwargs, 0, "tensors")
    shape = list(parts[0].shape)
    shape.insert(_axis(_given(args, kwargs, 1, "dim", 0), len(shape) + 1), len(parts))
    return tuple(shape)


def _with(shape: Shape, axis: int, size: Any) -> Shape:
    return (*shape[:axis], size, *shape[axis + 1 :])


def _chunk(args: Any, kwargs: Any) -> list[Shape]:
    shape, n = args[0].shape, _given(args, kwargs, 1, "chunks")
    axis = _axis(_given(args, kwargs, 2, "dim", 0), len(shape))
    size = shape[axis]
    each = quotient((size,), (n,)) if size % n == 0 else -(-size // n)
    return [_with(shape, axis, x) for x in _pieces(size, each)]


def _pieces(size: Any, each: Any) -> list[Any]:
    """Of that size, as long as there are some."""
    found, done = [], 0
    while done < plain(size):
        whole = done + plain(each) <= plain(size)
        found.append(each if whole else size - done)
        done += plain(each)
    if isinstance(size, Size) and not (len(found) * plain(each) == plain(size) and product((each, len(found))) == size):
        size.log.pin(size.formula)
    return found


def _split(args: Any, kwargs: Any) -> list[Shape]:
    shape, sizes = args[0].shape, _given(args, kwargs, 1, "split_size_or_sections split_size split_sizes")
    axis = _axis(_given(args, kwargs, 2, "dim", 0), len(shape))
    pieces = list(sizes) if isinstance(sizes, (tuple, list)) else _pieces(shape[axis], sizes)
    return [_with(shape, axis, n) for n in pieces]


def _unbind(args: Any, kwargs: Any) -> list[Shape]:
    shape = args[0].shape
    axis = _axis(_given(args, kwargs, 1, "dim", 0), len(shape))
    if isinstance(shape[axis], Size):
        shape[axis].log.pin(shape[axis].formula)
    return [(*shape[:axis], *shape[axis + 1 :])] * plain(shape[axis])


def _select(args: Any, kwargs: Any) -> Shape:
    shape = args[0].shape
    axis = _axis(_given(args, kwargs, 1, "dim"), len(shape))
    return (*shape[:axis], *shape[axis + 1 :])


def _narrow(args: Any, kwargs: Any) -> Shape:
    shape = args[0].shape
    return _with(shape, _axis(_given(args, kwargs, 1, "dim"), len(shape)), _given(args, kwargs, 3, "length"))


def _arange(args: Any, kwargs: Any) -> Shape:
    numbers = [x for x in args if isinstance(x, (int, float))]
    if len(numbers) < 2:
        end = numbers[0] if numbers else kwargs["end"]
        numbers = [kwargs.get("start", 0), end]
    start, end, step = (*numbers, kwargs.get("step", 1))[:3]
    n = end if not isinstance(start, Size) and start == 0 else end - start
    return (n,) if not isinstance(step, Size) and step == 1 else (-(-n // step),)


def _filled_with(args: Any, kwargs: Any) -> Shape:
    return tuple(_sizes(args, kwargs, 0))


def _full(args: Any, kwargs: Any) -> Shape:
    return tuple(_given(args, kwargs, 0, "size"))


def _new_filled(args: Any, kwargs: Any) -> Shape:
    return tuple(_sizes(args, kwargs, 1))


def _new_full(args: Any, kwargs: Any) -> Shape:
    return tuple(_given(args, kwargs, 1, "size"))


def _eye(args: Any, kwargs: Any) -> Shape:
    n = args[0]
    return n, args[1] if len(args) > 1 else n


def _of_numbers(args: Any, kwargs: Any) -> Any:
    """torch.tensor of numbers."""
    shape, x = [], _given(args, kwargs, 0, "data")
    while isinstance(x, (tuple, list)):
        shape.append(len(x))
        x = x[0]
    return tuple(shape)


def _conv(args: Any, kwargs: Any) -> Shape:
    """Of convolutions that keep places: kernels of one."""
    x, weight = args[0].shape, args[1].shape
    if any(n != 1 for n in weight[2:]):
        raise ValueError
    return (*x[: len(x) - len(weight) + 1], weight[0], *x[len(x) - len(weight) + 2 :])


def _gather(args: Any, kwargs: Any) -> Shape:
    return tuple(_given(args, kwargs, 2, "index").shape)


def _embedding(args: Any, kwargs: Any) -> Shape:
    return (*args[0].shape, args[1].shape[-1])


def _attended(args: Any, kwargs: Any) -> Shape:
    q, v = _given(args, kwargs, 0, "query").shape, _given(args, kwargs, 2, "value").shape
    return (*q[:-1], v[-1])


def _outer(args: Any, kwargs: Any) -> Shape:
    return args[0].shape[0], args[1].shape[0]


def _pad(args: Any, kwargs: Any) -> Shape:
    shape, pad = list(args[0].shape), _given(args, kwargs, 1, "pad")
    for i in range(len(pad) // 2):
        shape[-1 - i] = shape[-1 - i] + pad[2 * i] + pad[2 * i + 1]
    return tuple(shape)


def _diagonal_mask(args: Any, kwargs: Any) -> Shape:
    return tuple(args[0].shape)


def _setitem(args: Any, kwargs: Any) -> Shape:
    return tuple(args[0].shape)


def _unknown(args: Any, kwargs: Any) -> Any:
    raise ValueError  # its sizes are not needed: Size of unknown formulas


PERMUTING: dict[str, Callable[..., Any]] = {
    "transpose": _transpose, "t": _turned_round, "T": _turned_round, "mT": _last_two, "permute": _permute,
    "movedim": _movedim, "adjoint": _last_two, "mH": _last_two, "H": _turned_round,
}  # fmt: skip

_FIRST = (
    "softmax log_softmax softmin exp log log2 log10 log1p expm1 sqrt rsqrt square tanh sigmoid relu gelu silu elu selu "
    "leaky_relu softplus hardtanh relu6 mish hardswish hardsigmoid logsigmoid celu softsign tanhshrink "
    "abs neg reciprocal sign floor ceil round trunc frac sin cos tan asin acos atan sinh cosh erf "
    "logical_not bitwise_not isnan isinf isfinite isneginf isposinf nan_to_num clamp clamp_min clamp_max "
    "cumsum cumprod flip roll tril triu contiguous clone detach positive alias "
    "to float double half bfloat16 long int bool type cpu short "
    "layer_norm rms_norm normalize instance_norm batch_norm group_norm dropout "
    "zeros_like ones_like full_like empty_like fill zero masked_fill masked_scatter index_fill threshold scaled_softmax "
    "cummax renorm softshrink hardshrink logit sinc exp2 deg2rad sgn type_as index_add index_copy scatter "
    "scatter_add __aliased__"
).split()
_BROADCAST = (
    "add sub mul div pow floor_divide remainder fmod maximum minimum fmax fmin atan2 eq ne lt le gt ge logical_and "
    "logical_or logical_xor bitwise_and bitwise_or bitwise_xor where addcmul addcdiv lerp isclose true_divide "
    "logaddexp hypot xlogy"
).split()
_REDUCED = "sum mean prod amax amin any all logsumexp argmax argmin std var norm median nansum count_nonzero".split()
_OF_SIZES = "zeros ones empty".split()

RULES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(_FIRST, _first), **dict.fromkeys(_BROADCAST, _all), **dict.fromkeys(_REDUCED, _reduced),
    **dict.fromkeys(_OF_SIZES, _filled_with), **PERMUTING,
    "max": _extreme, "min": _extreme, "type_as": _first, "copy": _first, "expand_as": _expand_as,
    "linear": _linear, "matmul": _matmul, "bmm": _matmul, "mm": _matmul, "mv": _matmul, "dot": _matmul,
    "baddbmm": _added_product, "addmm": _added_product, "addbmm": _unknown, "einsum": _einsum, "outer": _outer,
    "view": _reshape, "reshape": _reshape, "view_as": _view_as, "reshape_as": _view_as, "flatten": _flatten,
    "ravel": lambda args, kwargs: (product(args[0].shape),),
    "unflatten": _unflatten, "unsqueeze": _unsqueeze, "squeeze": _squeeze, "expand": _expand, "repeat": _repeat,
    "tile": _tile, "repeat_interleave": _repeat_interleave, "__getitem__": _index, "__setitem__": _setitem,
    "cat": _cat, "stack": _stack, "chunk": _chunk, "split": _split, "tensor_split": _unknown, "unbind": _unbind,
    "select": _select, "narrow": _narrow, "arange": _arange, "full": _full, "eye": _eye, "linspace": _unknown,
    "new_zeros": _new_filled, "new_ones": _new_filled, "new_empty": _new_filled, "new_full": _new_full,
    "new_tensor": lambda args, kwargs: _of_numbers(args[1:], kwargs), "tensor": _of_numbers, "as_tensor": _of_numbers,
    "scalar_tensor": lambda args, kwargs: (), "meshgrid": _unknown, "broadcast_tensors": _unknown,
    "broadcast_to": lambda args, kwargs: _expand([args[0], *_sizes(args, kwargs, 1)], {}),
    "conv1d": _conv, "conv2d": _conv, "conv3d": _conv, "gather": _gather, "index_select": _unknown, "topk": _unknown,
    "sort": _unknown, "argsort": _first, "take_along_dim": _unknown, "embedding": _embedding, "diagonal": _unknown,
    "unfold": _unknown, "diag": _unknown, "diag_embed": _unknown, "one_hot": _unknown, "bincount": _unknown,
    "scaled_dot_product_attention": _attended, "multi_head_attention_forward": _unknown, "pad": _pad,
    "view_as_complex": lambda args, kwargs: args[0].shape[:-1],
    "view_as_real": lambda args, kwargs: (*args[0].shape, 2), "polar": _all, "complex": _all, "real": _first,
    "imag": _first, "conj": _first, "cdist": _unknown, "bilinear": _unknown, "cosine_similarity": _unknown,
    "avg_pool1d": _unknown, "avg_pool2d": _unknown, "max_pool1d": _unknown, "max_pool2d": _unknown,
    "interpolate": _unknown,
    "adaptive_avg_pool2d": _unknown, "adaptive_avg_pool1d": _unknown, "glu": _unknown, "pixel_shuffle": _unknown,
    "tril_indices": _unknown, "triu_indices": _unknown, "cross_entropy": _unknown, "mse_loss": _unknown,
    "rot90": _unknown,
    "searchsorted": _unknown, "bucketize": _all, "tensordot": _unknown, "chain_matmul": _unknown, "kron": _unknown,
    "vstack": _unknown, "hstack": _unknown, "dstack": _unknown, "column_stack": _unknown, "trace": _unknown,
    "atleast_2d": _unknown, "log_sigmoid": _first, "logcumsumexp": _first, "cov": _unknown, "cross": _unknown,
    "vsplit": _unknown, "hsplit": _unknown, "split_with_sizes": _split, "unsafe_chunk": _chunk, "upsample": _unknown,
}  # fmt: skip
