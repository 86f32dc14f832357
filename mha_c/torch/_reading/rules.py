"""The functions of torch that a reading may meet: a function that is not among RULES leaves its call unread."""

from __future__ import annotations

from typing import Any, Callable

from . import shapes, sizing
from .sizes import UNKNOWN, Log, Size
from .sizing import Shape

_FIRST = (
    "softmax log_softmax softmin exp log log2 log10 log1p expm1 sqrt rsqrt square tanh sigmoid relu gelu silu elu selu "
    "leaky_relu softplus hardtanh relu6 mish hardswish hardsigmoid logsigmoid celu softsign tanhshrink "
    "abs neg reciprocal sign floor ceil round trunc frac sin cos tan asin acos atan sinh cosh erf "
    "logical_not bitwise_not isnan isinf isfinite isneginf isposinf nan_to_num clamp clamp_min clamp_max "
    "cumsum cumprod flip roll tril triu contiguous clone detach positive alias "
    "to float double half bfloat16 long int bool type cpu short "
    "layer_norm rms_norm normalize instance_norm batch_norm group_norm dropout "
    "zeros_like ones_like full_like empty_like fill zero masked_scatter index_fill threshold "
    "scaled_softmax "
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
    **dict.fromkeys(_FIRST, shapes.first),
    **dict.fromkeys(_BROADCAST, shapes.broadcasted),
    **dict.fromkeys(_REDUCED, shapes.reduced),
    **dict.fromkeys(_OF_SIZES, shapes.filled_with), **shapes.PERMUTING,
    "max": shapes.extreme, "min": shapes.extreme, "type_as": shapes.first, "copy": shapes.first,
    "expand_as": shapes.expand_as,
    "linear": shapes.linear, "masked_fill": shapes.masked,
    "matmul": shapes.matmul, "bmm": shapes.matmul, "mm": shapes.matmul,
    "mv": shapes.matmul, "dot": shapes.matmul,
    "baddbmm": shapes.added_product, "addmm": shapes.added_product, "addbmm": shapes.unknown,
    "einsum": shapes.einsum, "outer": shapes.outer,
    "view": shapes.reshape, "reshape": shapes.reshape, "view_as": shapes.view_as, "reshape_as": shapes.view_as,
    "flatten": shapes.flatten,
    "ravel": lambda args, kwargs: (sizing.product(args[0].shape),),
    "unflatten": shapes.unflatten, "unsqueeze": shapes.unsqueeze, "squeeze": shapes.squeeze,
    "expand": shapes.expand, "repeat": shapes.repeat,
    "tile": shapes.tile, "repeat_interleave": shapes.repeat_interleave, "__getitem__": shapes.index,
    "__setitem__": shapes.setitem,
    "cat": shapes.cat, "stack": shapes.stack, "chunk": shapes.chunk, "split": shapes.split,
    "tensor_split": shapes.unknown, "unbind": shapes.unbind,
    "select": shapes.select, "narrow": shapes.narrow, "arange": shapes.arange, "full": shapes.full,
    "eye": shapes.eye, "linspace": shapes.unknown,
    "new_zeros": shapes.new_filled, "new_ones": shapes.new_filled, "new_empty": shapes.new_filled,
    "new_full": shapes.new_full,
    "new_tensor": lambda args, kwargs: shapes.of_numbers(args[1:], kwargs), "tensor": shapes.of_numbers,
    "as_tensor": shapes.of_numbers,
    "scalar_tensor": lambda args, kwargs: (), "meshgrid": shapes.unknown, "broadcast_tensors": shapes.unknown,
    "broadcast_to": lambda args, kwargs: shapes.expand([args[0], *shapes.given_sizes(args, kwargs, 1)], {}),
    "conv1d": shapes.conv, "conv2d": shapes.conv, "conv3d": shapes.conv, "gather": shapes.gather,
    "index_select": shapes.unknown, "topk": shapes.unknown,
    "sort": shapes.unknown, "argsort": shapes.first, "take_along_dim": shapes.unknown,
    "embedding": shapes.embedding, "diagonal": shapes.unknown,
    "unfold": shapes.unknown, "diag": shapes.unknown, "diag_embed": shapes.unknown, "one_hot": shapes.unknown,
    "bincount": shapes.unknown,
    "scaled_dot_product_attention": shapes.attended, "multi_head_attention_forward": shapes.unknown, "pad": shapes.pad,
    "view_as_complex": lambda args, kwargs: args[0].shape[:-1],
    "view_as_real": lambda args, kwargs: (*args[0].shape, 2), "polar": shapes.broadcasted,
    "complex": shapes.broadcasted, "real": shapes.first,
    "imag": shapes.first, "conj": shapes.first, "cdist": shapes.unknown, "bilinear": shapes.unknown,
    "cosine_similarity": shapes.unknown,
    "avg_pool1d": shapes.unknown, "avg_pool2d": shapes.unknown, "max_pool1d": shapes.unknown,
    "max_pool2d": shapes.unknown,
    "interpolate": shapes.unknown,
    "adaptive_avg_pool2d": shapes.unknown, "adaptive_avg_pool1d": shapes.unknown, "glu": shapes.unknown,
    "pixel_shuffle": shapes.unknown,
    "tril_indices": shapes.unknown, "triu_indices": shapes.unknown, "cross_entropy": shapes.unknown,
    "mse_loss": shapes.unknown,
    "rot90": shapes.unknown,
    "searchsorted": shapes.unknown, "bucketize": shapes.broadcasted, "tensordot": shapes.unknown,
    "chain_matmul": shapes.unknown, "kron": shapes.unknown,
    "vstack": shapes.unknown, "hstack": shapes.unknown, "dstack": shapes.unknown, "column_stack": shapes.unknown,
    "trace": shapes.unknown,
    "atleast_2d": shapes.unknown, "log_sigmoid": shapes.first, "logcumsumexp": shapes.first,
    "cov": shapes.unknown, "cross": shapes.unknown,
    "vsplit": shapes.unknown, "hsplit": shapes.unknown, "split_with_sizes": shapes.split,
    "unsafe_chunk": shapes.chunk, "upsample": shapes.unknown,
}  # fmt: skip


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
    if shape is not None:
        try:
            if (*map(int.__index__, shape),) == numbers:  # as plain numbers
                return tuple(shape)
        except TypeError:
            pass
    return tuple(Size(n, UNKNOWN, log) for n in numbers)


_FAILED = (TypeError, ValueError, IndexError, AttributeError, KeyError, ZeroDivisionError, StopIteration)
