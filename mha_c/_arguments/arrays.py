"""Converts a caller's arguments to ndarrays, and results of the core to the caller's type.

Lists, CPU tensors of torch and objects with `__array__` or `__dlpack__` become arrays here.  Arguments that would
be misread (masked arrays, tensors that require a gradient, tensors on another device) are refused.  The core checks
element types.  torch is never imported: where there is a tensor, torch is loaded already.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ShapeError
from .scalars import INPUTS, tokens, words

if TYPE_CHECKING:
    from .._types import Array
INT64 = np.dtype(np.int64)
MOST = 2**63 - 1  # the largest int64


def is_tensor(value: Any) -> bool:
    """Whether `value` is a torch tensor.  While torch is being imported, it may have no Tensor yet."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, getattr(torch, "Tensor", ()))


def to_array(value: Any, name: str) -> Array:
    """`value` as a plain ndarray, without a copy where possible."""
    if type(value) is np.ndarray:
        return value
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(
            f"{name} is a masked array, whose mask would be ignored; pass {name}.filled(...), and say with valid_lens "
            f"or keep_mask which keys count"
        )
    if isinstance(value, np.ndarray):
        return np.asarray(value)
    if is_tensor(value):
        return _from_tensor(value, name)
    if isinstance(value, (str, bytes)):
        raise TypeError(words(name))
    if value is None:
        raise TypeError(f"{name} must be an array, got None")
    if hasattr(value, "__dlpack__") and not hasattr(value, "__array__"):
        return _from_dlpack(value, name)
    if isinstance(value, (list, tuple)):
        return _from_list(value, name)
    array = np.asarray(value)
    if array.dtype == object:
        raise TypeError(f"{name} must be an array, got {type(value).__name__}")
    return array


def to_arrays(*named: tuple[Any, str]) -> tuple[tuple[Array, ...], bool]:
    """Several arguments as arrays, and whether one of them is a tensor: then the result is a tensor too.

    One object given twice in a row stays one array, so that the core sees that keys and values are the same.
    """
    arrays: list[Array] = []
    any_tensor, previous = False, None
    for value, name in named:
        if value is previous and arrays:
            arrays.append(arrays[-1])
        elif type(value) is np.ndarray:
            arrays.append(value)
        elif is_tensor(value):
            any_tensor = True
            arrays.append(_from_tensor(value, name))
        else:
            arrays.append(to_array(value, name))
        previous = value
    return tuple(arrays), any_tensor


def to_lengths(value: Any, name: str = "valid_lens") -> Any:
    """Lengths as the core takes them: None, or int64.  Floats are rounded up: 2.5 shows keys 0, 1 and 2.

    The type is checked before any conversion: a bool array is a mask that was passed by mistake.
    """
    if value is None or (type(value) is np.ndarray and value.dtype == INT64):
        return value
    if is_tensor(value):
        value = value.detach()  # lengths have no gradient
        if value.is_floating_point():
            value = value.double()  # NumPy has no bfloat16
        array = _from_tensor(value, name)
    elif isinstance(value, (list, tuple)):
        array = _from_length_list(value, name)
    else:
        array = to_array(value, name)
    kind = array.dtype.kind
    if kind == "b":
        raise TypeError(
            f"{name} has dtype bool, like a mask, but takes lengths: how many keys each item or query may see.  "
            "If the keys marked True come first, write mask.sum(-1); any other mask is a layer's or function's "
            "keep_mask=mask, (Q, K) or with the axes of the weights"
        )
    if kind == "f":
        array = array.astype(np.float64)
        finite = np.isfinite(array)
        if not finite.all():
            raise ValueError(
                f"{name} must be finite, but has a NaN or infinity at position {int(np.argmin(finite.ravel()))}"
            )
        array = np.clip(np.ceil(array), -(2.0**62), 2.0**62)
    elif kind in "US":
        raise TypeError(words(name))
    elif kind not in "iu":
        raise TypeError(f"{name} has dtype {array.dtype}, expected integers or floats (lengths)")
    return to_int64(array)


def to_int64(array: Any) -> Array:
    """Whole numbers of any type, of which those beyond int64 become its largest; a scalar becomes an array."""
    beyond = array.dtype.kind == "u" and array.itemsize == 8
    return np.asarray(np.minimum(array, np.uint64(MOST)) if beyond else array, INT64)


def _from_length_list(value: Any, name: str) -> Array:
    """A list of lengths as an array; NumPy makes objects of ints that are too large, which become the nearest int64."""
    try:
        array = np.asarray(value)
    except RuntimeError:  # a list of tensors that require grad
        return _from_list(value, name)
    except (ValueError, Warning):
        array = None
    if array is None or (array.dtype == object and any(isinstance(item, (list, tuple)) for item in array.flat)):
        raise ValueError(f"{name} is a ragged list: write B lengths, or B rows of Q lengths")  # objects: NumPy < 1.24
    if array.dtype == object and all(type(item) is int for item in array.flat):
        return np.clip(array, -MOST - 1, MOST).astype(INT64)
    return array


def like_input(array: Array, as_tensor: bool) -> Any:
    """A result in the type of the inputs: a tensor on the same memory, or the array itself."""
    torch = sys.modules.get("torch") if as_tensor else None
    return array if torch is None else torch.from_numpy(array)


def parameter_array(value: Any, name: str) -> Array:
    """A weight to copy: like `to_array`, but it also takes a torch parameter that requires a gradient."""
    if is_tensor(value):
        value = value.detach()
    return floats(to_array(value, name), name)


def floats(array: Array, name: str) -> Array:
    """The array, after a check of its type; for arrays that the core does not see under this name."""
    if array.dtype.type not in (np.float32, np.float64):
        embed = tokens(name, array.dtype, array.shape) if array.dtype.kind in "iu" else None
        raise TypeError(embed or f"{name} must be float32 or float64, got {array.dtype}")
    return array


def check_features(x: Any, name: str, features: int) -> None:
    """ShapeError unless the array, or tensor, has shape (items, steps, features)."""
    if x.ndim != 3 or x.shape[2] != features:
        raise ShapeError(f"{name} must have shape (B, T, {features}), got {tuple(x.shape)}")


def of_one_type(arrays: tuple[Array, ...], *names: str) -> None:
    """TypeError unless all are float32, or all are float64."""
    for array, name in zip(arrays, names):
        if floats(array, name).dtype.type is not arrays[0].dtype.type:  # byte order does not matter
            raise TypeError(f"{name} must be {arrays[0].dtype} like {names[0]}, got {array.dtype}")


def gradient_like(shape: tuple[int, ...], dtype: Any, grad_output: Any) -> Array:
    """The argument of a `backward`, checked: it must have the shape and type of the call's output."""
    array = floats(to_array(grad_output, "grad_output"), "grad_output")
    if array.shape != shape:
        raise ShapeError(f"grad_output has shape {array.shape}, but the output it belongs to has {shape}")
    if array.dtype.type is not dtype.type:
        raise TypeError(f"grad_output must be {dtype} like the output it belongs to, got {array.dtype}")
    return array


def _from_tensor(value: Any, name: str) -> Array:
    if value.requires_grad:
        raise TypeError(
            f"{name} is a tensor that requires grad, and the NumPy side of mha_c records no gradients: use the same "
            f"name from mha_c.torch, or pass {name}.detach()"
        )
    if value.device.type != "cpu":
        raise TypeError(f"{name} is on device {value.device}; mha_c computes on the CPU: pass {name}.cpu()")
    if value.is_nested:
        raise TypeError(nested(name))
    try:
        array: Array = value.numpy()
    except (TypeError, RuntimeError) as error:  # bfloat16, sparse, quantised, nested, conjugated, traced, ...
        raise TypeError(
            f"{name} is a {value.dtype} tensor ({value.layout}) that has no NumPy form ({error}); the NumPy side of "
            f"mha_c computes float32 and float64"
        ) from None
    return array


def nested(name: str) -> str:
    """The error message for a nested tensor."""
    return (
        f"{name} is a nested tensor, whose items have no common length: pad it with "
        f"torch.nested.to_padded_tensor({name}, 0), and give the lengths as valid_lens"
    )


def _from_dlpack(value: Any, name: str) -> Array:
    if not hasattr(np, "from_dlpack"):
        raise TypeError(f"{name} is a DLPack object, which needs NumPy 1.22 or later, not {np.__version__}")
    try:
        return np.from_dlpack(value)
    except (RuntimeError, BufferError) as error:
        raise TypeError(f"{name} ({type(value).__name__}) is not readable by the CPU: {error}") from None


def ragged(name: str) -> ValueError:
    """The error for a list whose rows differ in length."""
    lengths = ", and give the real lengths as valid_lens" if name in INPUTS else ""
    return ValueError(f"{name} is a list that makes no array: its rows differ in length; pad the short ones{lengths}")


def _from_list(value: Any, name: str) -> Array:
    try:
        array = np.asarray(value)
    except (ValueError, RuntimeError, Warning) as error:  # RuntimeError: a list of tensors that require grad
        if isinstance(error, RuntimeError):
            raise TypeError(f"{name} is a list that makes no array: {error}") from None
        raise ragged(name) from None
    if array.dtype == object:  # NumPy before 1.24 also makes this of a ragged list
        if any(isinstance(item, (list, tuple)) for item in value):
            raise ragged(name)
        raise TypeError(f"{name} is a list that makes no array of numbers")
    if array.dtype.kind in "biu" and array.ndim >= 3:  # queries, keys, values
        raise TypeError(f"{name} is a list of whole numbers, expected floats: write np.array({name}, np.float32)")
    return array
