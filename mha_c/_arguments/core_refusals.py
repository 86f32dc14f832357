"""The errors of the compiled core, in the user's words; and conversion of numbers of less usual types for it.

Called by name from csrc/python: the core decides what is safe for memory, and asks here only when something is not.
A function answers with the exception to raise, or raises it, or gives the number that was asked for.  Those of shapes
read nothing else: `torch/_call/checks.py` asks them about tensors that never reach the core.
"""

from __future__ import annotations

import math
import sys
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Optional, Union

import numpy as np

from .. import _core
from ..errors import ShapeError
from . import scalars

if TYPE_CHECKING:
    from .._types import Array

    Sizes = tuple[int, ...]

# --- Types and numbers ----------------------------------------------------------------------------


def kind(value: Any, name: str, expected: str) -> NoReturn:
    raise TypeError(f"{name} must be {expected}, got {type(value).__name__}")


def dtype(array: Array, name: str, like: Optional[Array], like_name: Optional[str]) -> NoReturn:
    if array.dtype.kind in "US":
        raise TypeError(scalars.words(name))
    if array.dtype.kind in "iu" and scalars.tokens(name, array.dtype, array.shape):
        raise TypeError(scalars.tokens(name, array.dtype, array.shape))
    if array.dtype.type not in (np.float32, np.float64):
        numbers = array.dtype.kind in "biuf"
        advice = f": convert it, for example np.asarray({name}, np.float32)" if numbers else ""  # perhaps a list
        raise TypeError(f"{name} has dtype {array.dtype}, expected float32 or float64{advice}")
    other = "" if like is None else like.dtype.newbyteorder("=")
    raise TypeError(
        f"{name} has dtype {array.dtype}, but {like_name} has dtype {other}: all arrays of a call need the same, for "
        f"example {name}.astype(np.{other})"
    )


def real(value: Any, name: str) -> float:
    number = scalars.real(value, name)
    if number != number:
        raise ValueError(f"{name} must not be NaN")
    return number


probability, positive, seed, choice = scalars.probability, scalars.positive, scalars.seed, scalars.choice
whole = partial(scalars.whole, most=math.inf)  # what int64 does not hold is as good as its largest


def threads(value: Any, most: int) -> int:
    try:
        number = whole(value, "the number of threads")
    except (TypeError, ValueError):  # one kind of error: api.md, 7
        raise ValueError(f"the number of threads must be a whole number >= 1, got {value!r:.100}") from None
    if number > most:
        raise ValueError(f"the number of threads is too large: {value!r:.100}")
    return number


def isa(name: Any) -> NoReturn:
    if not isinstance(name, str):
        kind(name, "name", "a string")
    isas = _core.isas()
    there, offered = ", ".join([i for i, _ in isas]), ", ".join([i for i, available in isas if available])
    raise ValueError(
        f"instruction set {name!r:.100} is not available: this CPU offers {offered} (this build has {there})"
    )


def size(name: str, shape: Sizes) -> NoReturn:
    raise ValueError(f"{name} of shape {shape} would be too large")


# --- Shapes -----------------------------------------------------------------------------------------


def rank(array: Array, name: str, wanted: int, expected: str) -> Optional[Exception]:
    if array.ndim == wanted:
        return None
    one_item = f"; for a single item add the batch axis, {name}[None]" if array.ndim == 2 and wanted == 3 else ""
    return ShapeError(
        f"{name} has shape {tuple(array.shape)} (rank {array.ndim}), expected rank {wanted}: {expected}{one_item}"
    )


def shape(array: Array, name: str, expected: Union[Sizes, str]) -> Exception:
    return ShapeError(f"{name} has shape {tuple(array.shape)}, expected {expected}")


def lengths(array: Array, batch: int, queries: int) -> Exception:
    one = f"; if all items have the same length, write [{array}] * {batch}" if array.ndim == 0 else ""
    expected = f"(B,) = ({batch},) or (B, Q) = ({batch}, {queries}): a length for each item, or for each of its queries"
    return shape(array, "valid_lens", expected + one)


def negative_length(length: int) -> bool:
    """Warn that lengths below 0 count as 0."""
    return _warned(f"valid_lens has a length of {length}: lengths below 0 count as 0 (said once)")


_said: set[str] = set()  # what is said once a process; a race says it twice


def mask_as_lengths() -> bool:
    """Warn, once, that a mask of 0 and 1, which has the shape of lengths, is taken for lengths."""
    if not warns_of_masks():
        return True
    _said.add("mask")
    return _warned(
        "valid_lens of shape (B, Q), here as large as (B, K), holds only 0 and 1: it says that no query sees more than "
        "the first key.  If it is a mask with 1 for each key that counts, write valid_lens=mask.sum(-1) (said once)"
    )


def warns_of_masks() -> bool:
    """Whether it has not been said yet."""
    return "mask" not in _said


def warn_of_mask(lens: Array, n_keys: int) -> None:
    """The same of lengths (B, Q) of a call that the core does not see."""
    if 1 < n_keys == lens.shape[1] and lens.size and lens.min() >= 0 and lens.max() == 1:
        mask_as_lengths()


def _warned(text: str) -> bool:
    """True, after a warning in the caller's line."""
    frame: Any = sys._getframe()
    depth = 1
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("mha_c", "torch"):
        frame, depth = frame.f_back, depth + 1
    warnings.warn(text, UserWarning, stacklevel=depth)
    return True


def no_features(array: Array, name: str) -> Exception:
    return ShapeError(f"{name} has rank {array.ndim}, expected (..., features)")


def x_features(x: Array, expected: int) -> Exception:
    return ShapeError(f"x has {x.shape[-1]} features, but the projection expects {expected}")


def leading_axes(grad_y: Array, x: Array) -> Exception:
    return shape(grad_y, "grad_y", f"the leading axes of x, which has shape {tuple(x.shape)}")


def _clash(what: str, name: str, a: Array, axis: int, other: str, b: Array, other_axis: int) -> Optional[Exception]:
    """An error unless both sizes are equal; `what` has a placeholder for a's size: "batch size {}"."""
    if a.shape[axis] == b.shape[other_axis]:
        return None
    return ShapeError(
        f"{name} has {what.format(a.shape[axis])}, but {other} has {b.shape[other_axis]}: "
        f"{name}.shape = {tuple(a.shape)}, {other}.shape = {tuple(b.shape)}"
    )


# --- Attention --------------------------------------------------------------------------------------


def attention(q: Array, k: Array, v: Array, w_v: Optional[Array]) -> Optional[Exception]:
    n, heads = q.ndim, "H, " if q.ndim == 4 else ""
    found = (
        (None if n == 4 else rank(q, "q", 3, "(B, Q, D), or rank 4: (B, H, Q, D)"))
        or rank(k, "k", n, f"(B, {heads}K, D)")
        or rank(v, "v", n, f"(B, {heads}K, Dv)")
        or _clash("batch size {}", "k", k, 0, "q", q, 0)
        or _clash("batch size {}", "v", v, 0, "q", q, 0)
        or _clash("{} features", "k", k, -1, "q", q, -1)
        or _clash("{} keys", "v", v, -2, "k", k, -2)
    )
    if found is None and w_v is not None:
        found = rank(w_v, "w_v", 1, "(features of q,)") or _clash("{} features", "w_v", w_v, 0, "q", q, -1)
    if found is None and n == 4:
        found = _clash("{} heads", "v", v, 1, "k", k, 1)
        if found is None and q.shape[1] != k.shape[1] and (k.shape[1] == 0 or q.shape[1] % k.shape[1]):
            found = ShapeError(f"k has {k.shape[1]} heads, expected a divisor of the {q.shape[1]} heads of q")
    return found


def bool_bias(name: str) -> NoReturn:
    raise TypeError(
        f"{name} has dtype bool, but a bias is added to the scores: pass a mask (True = may attend) as keep_mask"
    )


def joint_rows(rows: Any, most: int) -> NoReturn:
    raise ValueError(f"rows of a joint weight must lie in its {most} rows, got {rows}")


def mask_kind(value: Any, name: str) -> NoReturn:
    if not hasattr(value, "dtype") or isinstance(value, np.generic):
        kind(value, name, "an array of bool")
    raise TypeError(
        f"{name} has dtype {value.dtype}, expected bool, or whole numbers 0 and 1 (True = may attend): write {name} != "
        f"0, or pass it as bias if it is to be added to the scores"
    )


def mask(array: Array, name: str, scores: Sizes) -> Optional[Exception]:
    """An error if a mask has a wrong rank (with the likely intended code) or an axis that does not broadcast."""
    n, full = len(scores), f"the scores {'(B, H, Q, K)' if len(scores) == 4 else '(B, Q, K)'} = {scores}"
    if array.ndim not in (2, n):
        hints = {
            (1, n): f"add the query axis: {name}[None, :] for one value per key",
            (3, 4): f"add an axis: {name}[:, None] for one per batch item, {name}[None] for one per head",
            (4, 3): f"the inputs have no heads axis: drop it, {name}[:, 0]",
        }
        return ShapeError(
            f"{name} has shape {tuple(array.shape)} (rank {array.ndim}), expected rank 2 (Q, K) or rank {n}, that of "
            f"{full}: {hints.get((array.ndim, n), 'no other rank is broadcast')}"
        )
    for axis, (got, expected) in enumerate(zip(array.shape, scores[n - array.ndim :])):
        if got not in (1, expected):
            per_item = f"; for one value per key of each item write {name}[:, None{', None' * (n - 3)}]"
            return ShapeError(
                f"{name} has shape {tuple(array.shape)}, which does not broadcast to {full}: axis {axis} is {got}, "
                f"expected {expected}{'' if expected == 1 else ' or 1'}"
                f"{per_item if tuple(array.shape) == (scores[0], scores[-1]) else ''}"
            )
    return None


def corner_with_origin() -> NoReturn:
    raise ValueError("causal='bottom_right' needs the sizes of the whole call: it takes no origin")


def far_origin(origin: Any, last: int) -> NoReturn:
    raise ValueError(f"origin must be at most {last}, the last place that dropout counts, got {origin!r:.100}")


def relative_bias(table: Array, heads: int) -> Exception:
    expected = f"(H, 2R + 1) with H = {heads}"
    return rank(table, "relative_bias", 2, "(H, 2R + 1)") or shape(table, "relative_bias", expected)


# --- Layers -------------------------------------------------------------------------------------------


def cache_counts(before: Any, counts: Any, longest: int, room: int) -> NoReturn:
    raise ValueError(
        f"a cache with room for {room} rows, of which {before} are taken, cannot take {counts} more and have {longest}"
    )


def inputs(queries: Array, keys: Array, values: Array) -> Optional[Exception]:
    return (
        rank(queries, "queries", 3, "(B, Q, features)")
        or rank(keys, "keys", 3, "(B, K, features)")
        or rank(values, "values", 3, "(B, K, features)")
        or _clash("batch size {}", "keys", keys, 0, "queries", queries, 0)
        or _clash("batch size {}", "values", values, 0, "queries", queries, 0)
        or _clash("{} keys", "values", values, 1, "keys", keys, 1)
    )


def features(
    queries: Array, keys: Array, values: Array, linears: tuple[Any, ...], w_v: Optional[Array], num_heads: int,
    num_kv_heads: Optional[int] = None,
) -> Optional[Exception]:  # fmt: skip
    """An error unless features fit; linears: (out_features, in_features) of W_q, W_k, W_v, W_o, or None."""
    given = ("queries", queries, "W_q"), ("keys", keys, "W_k"), ("values", values, "W_v")
    for (name, array, weight), linear in zip(given, linears):
        if linear is not None and linear[1] != array.shape[2]:
            return ShapeError(
                f"{name} has {array.shape[2]} features (shape {tuple(array.shape)}), but {weight} expects {linear[1]}: "
                "a layer keeps the sizes of its first call, so for others make a new one"
            )
    W_q, W_k, _, W_o = linears
    of_q, of_k, of_v = (x.shape[2] if linear is None else linear[0] for (_, x, _), linear in zip(given, linears))
    if num_kv_heads not in (None, num_heads):
        sizes = f"{of_q}, {of_k} and {of_v} features"
        return ShapeError(f"{num_heads} heads of queries and {num_kv_heads} of keys and values do not fit {sizes}")
    if of_k != of_q and W_q is None and W_k is None:
        return _clash("{} features", "keys", keys, 2, "queries", queries, 2)
    if of_k != of_q:
        k, q = "keys has" if W_k is None else "W_k gives", "queries has" if W_q is None else "W_q gives"
        return ShapeError(f"{k} {of_k} features, but {q} {of_q}: they are scored against each other")
    for n, name in ((of_q, "queries and keys"), (of_v, "values")):
        if n % num_heads:
            raise ValueError(f"num_heads = {num_heads} does not divide the {n} projected features of {name}")
    if W_o is not None and W_o[1] != of_v:
        return ShapeError(f"W_o expects {W_o[1]} features, but the attended values have {of_v}")
    if w_v is None:
        return None
    return rank(w_v, "w_v", 1, "(features of a head,)") or shape(w_v, "w_v", (of_q // num_heads,))


def projection(name: str) -> NoReturn:
    raise TypeError(f"{name} must be (weight, bias or None) or (packed, bias or None, (out_features, in_features))")


class PackedForOthers(ValueError):
    """A weight is packed for another instruction set than the active one, which another thread may have selected."""


def packed(name: str, sizes: Sizes, expected: Sizes) -> Exception:
    return PackedForOthers(
        f"{name}: not a weight of {sizes[0]} x {sizes[1]} packed for the active instruction set ({_core.isa()}), which "
        f"makes {expected} of it: pack it again"
    )


def bias(array: Array, name: str, expected: int) -> Exception:
    return shape(array, f"{name}.bias", (expected,))
