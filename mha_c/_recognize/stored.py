"""How a layer stores a weight: `Part` says where, and the functions here read and write it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Optional

import numpy as np

PER_HEAD = ((0, 2), (1,)), ((0, 1), (2,)), ((1, 2), (0,))  # outputs, inputs of (H, D, K), (H, K, D), (D, H, K)


class Part(NamedTuple):
    """A stored weight, or some of its outputs or inputs.

    Attributes
    ----------
    weight, bias : str
        Paths from the layer, such as "heads.0.key.weight"; bias is "" where there is none.
    outputs_first : bool
        Whether it is stored as (outputs, inputs), as a Linear does; else (inputs, outputs), as in X @ W.
    rows : sequence of int, optional
        The outputs that belong to it; None: all.
    columns : slice, optional
        The inputs that belong to it; None: all.
    axes : tuple of two tuples
        Of a weight with an axis of heads: which of its axes make the outputs, and which the inputs.
    """

    weight: str
    bias: str = ""
    outputs_first: bool = True
    rows: Optional[Sequence[int]] = None
    columns: Optional[slice] = None
    axes: tuple[tuple[int, ...], ...] = ()

    def rows_of(self, biases: int) -> Any:
        """Which of so many biases belong to it: a joint projection may have one vector, or each of its parts."""
        own = self.rows
        if own is None or len(own) == biases:
            return slice(None)
        return slice(own.start, own.stop) if isinstance(own, range) else list(own)

    def __str__(self) -> str:
        name = self.weight[: -len(".weight")] if self.weight.endswith(".weight") else self.weight
        if self.columns is not None:
            return f"{name}[inputs {self.columns.start or 0}:{self.columns.stop or ''}]"
        return name if self.rows is None else f"{name}[outputs {self.rows[0]}..{self.rows[-1]}]"


class Leaf(NamedTuple):
    """One projection, or one matrix that may be one."""

    name: str  # without numbers: "heads.key"
    place: tuple[int, ...]  # the numbers in it: of "heads.3.key" (3,)
    part: Part
    shape: tuple[int, int]  # (outputs, inputs); 0 where not known yet

    @property
    def path(self) -> str:
        return str(self.part)


def paths(layer: Any) -> list[str]:
    """Of all parameters, or of all arrays: of the layer, in its lists and dicts, the weight and bias of its parts."""
    if hasattr(layer, "named_parameters"):
        return [path for path, _ in layer.named_parameters()]
    found = _within(layer, 2)  # of a layer, and of its heads; a model that holds layers has no weights of its own
    return [path for path in found if hasattr(at(layer, path), "shape")]


def _within(layer: Any, depth: int) -> list[str]:
    """The paths of what a layer of no library of tensors holds, and of what its parts hold."""
    found: list[str] = []
    for name, held in getattr(layer, "__dict__", {}).items() if depth else ():
        for path, part in _parts(name, held):
            inner = _of_part(part) or ([] if hasattr(part, "shape") else _within(part, depth - 1))
            found += [f"{path}.{each}" for each in inner] or [path]
    return found


_WEIGHT, _HOLDS = ("weight", "weights", "W", "w", "kernel"), ("data", "value", "values")


def _of_part(part: Any) -> list[str]:
    """Where a part keeps its weight and bias: a Linear of NumPy's has W and b, or w.data and b.data."""
    if hasattr(part, "weight"):
        return ["weight", "bias"]
    held = {name: x for name, x in getattr(part, "__dict__", {}).items() if name in (*_WEIGHT, "bias", "b")}
    return [_to_numbers(name, x) for name, x in held.items()]


def _to_numbers(name: str, held: Any) -> str:
    """The path to the array: the attribute itself, or one that it holds."""
    inner = [each for each in _HOLDS if isinstance(getattr(held, each, None), np.ndarray)]
    return f"{name}.{inner[0]}" if inner and not isinstance(held, np.ndarray) else name


def _parts(path: str, held: Any) -> Iterator[tuple[str, Any]]:
    """What a list or a dict holds, and a dict in it, by paths; else what there is."""
    if isinstance(held, (list, dict)):
        for key, part in held.items() if isinstance(held, dict) else enumerate(held):
            yield from _parts(f"{path}.{key}", part) if isinstance(part, dict) else [(f"{path}.{key}", part)]
    else:
        yield path, held


def leaves_of(layer: Any) -> Iterator[Leaf]:
    """What a layer holds that can be weights, in its order."""
    every = paths(layer)
    bias_of_each = {path: _bias_beside(path, every) for path in every}
    biases = {*bias_of_each.values()}
    for path in every:
        stored = at(layer, path)
        projects = path not in biases and _may_project(layer, path)
        if projects and (_is_open(stored) or len(stored.shape) in (1, 2, 3) or _is_pointwise(layer, path)):
            yield _leaf(layer, path, bias_of_each[path])


def _bias_beside(path: str, every: Sequence[str]) -> str:
    """The path of the bias beside a weight: bias, in_proj_bias, b_q, B_Q, b.0 beside W.0; "" where there is none."""
    words = path.split(".")
    last = max((i for i, word in enumerate(words) if not word.isdigit() and not (i and word in _HOLDS)), default=0)
    name, called = words[last], []
    if name.endswith("weight"):
        called.append(name[: -len("weight")] + "bias")
    elif name[0] in "Ww":
        called.append(("B" if name[0] == "W" and name[1:2].isupper() else "b") + name[1:])
    if name.lower() in ("w", "weight", "kernel", "matrix"):  # in a dict, or a part, of one projection
        called += ["b", "bias"]
    paths_of = [".".join([*words[:last], each, *words[last + 1 :]]) for each in called]
    return next((each for each in paths_of if each in every), "")


def _may_project(layer: Any, path: str) -> bool:
    """Whether it is no bias, and nothing of a norm or of a wide convolution; of a Linear the weight may alone."""
    owner_path, _, name = path.rpartition(".")
    owner = at(layer, owner_path)
    if "bias" in name.lower() or hasattr(owner, "normalized_shape"):
        return False
    if hasattr(owner, "kernel_size") and not _is_pointwise(layer, path):
        return False
    return name == "weight" or not _is_linear(owner)


def _is_pointwise(layer: Any, path: str) -> bool:
    """Whether it is the weight of a convolution over one step, which is a Linear: (outputs, inputs, 1)."""
    owner_path, _, name = path.rpartition(".")
    owner = at(layer, owner_path)
    if name != "weight" or not hasattr(owner, "kernel_size") or getattr(owner, "groups", 1) != 1:
        return False
    stored = at(layer, path)
    return not _is_open(stored) and len(stored.shape) > 2 and math.prod(stored.shape[2:]) == 1


def _is_linear(owner: Any) -> bool:
    return hasattr(owner, "in_features") or hasattr(owner, "nf")


def _leaf(layer: Any, path: str, bias: str) -> Leaf:
    owner_path, _, last = path.rpartition(".")
    owner, stored = at(layer, owner_path), at(layer, path)
    is_pointwise = _is_pointwise(layer, path)
    in_part = hasattr(owner, "in_features") or is_pointwise or not hasattr(layer, "named_parameters")
    in_part = last == "weight" and in_part
    in_part = in_part and not isinstance(owner, dict)
    part = Part(path, bias, in_part or last.endswith("_weight"))
    if not _is_open(stored) and len(stored.shape) == 3 and not is_pointwise:
        part = part._replace(axes=PER_HEAD[0])
    says_nothing = last == "weight" or (last in _HOLDS and not hasattr(layer, "named_parameters"))
    words = owner_path.split(".") if says_nothing and owner_path else path.split(".")
    return Leaf(
        ".".join(word for word in words if not word.isdigit()),
        tuple(int(word) for word in words if word.isdigit()),
        part, shape_of(layer, part),
    )  # fmt: skip


def at(layer: Any, path: str) -> Any:
    """What is at the end of a path; names of torch's lists are numbers, and Python's lists take them as such."""
    found = layer
    for word in filter(None, path.split(".")):
        # A weight without a size yet is None here: the NumPy layers' own have no attribute until then.
        if isinstance(found, dict) and not hasattr(found, word):
            found = found.get(word)
        else:
            is_place = word.isdigit() and isinstance(found, (list, tuple))
            found = found[int(word)] if is_place else getattr(found, word, None)
    return found


def _is_open(stored: Any) -> bool:
    return stored is None or type(stored).__name__.startswith("Uninitialized")


def shape_of(layer: Any, part: Part) -> tuple[int, int]:
    """(outputs, inputs) of a part; 0 for what is not known yet."""
    stored = at(layer, part.weight)
    if _is_open(stored):
        owner = at(layer, part.weight.rpartition(".")[0])
        return int(getattr(owner, "out_features", 0)), int(getattr(owner, "in_features", 0))
    sizes = tuple(stored.shape[:2]) if len(stored.shape) > 1 else (stored.shape[0], 1)
    if part.axes:
        shape = stored.shape
        return tuple(math.prod(shape[axis] for axis in axes) for axes in part.axes)
    outputs, inputs = sizes if part.outputs_first else sizes[::-1]
    if len(stored.shape) == 1:
        outputs, inputs = 1, stored.shape[0]
    if part.columns is not None:
        inputs = len(range(*part.columns.indices(inputs)))
    return (outputs if part.rows is None else len(part.rows)), inputs


def stored_in(layer: Any, part: Part) -> Any:
    """A stored weight as an array (outputs, inputs)."""
    stored = np.asarray(_plain(at(layer, part.weight)))
    if stored.ndim == 1:
        return stored[None]
    if part.axes:
        outputs, inputs = part.axes
        return stored.transpose(*outputs, *inputs).reshape(shape_of(layer, part))
    stored = stored.reshape(stored.shape[:2])  # of a convolution over one step, too
    return stored if part.outputs_first else stored.T


def as_it_was(layer: Any, part: Part, stored: Any) -> Any:
    """The inverse of `stored_in`."""
    if part.axes:
        order = (*part.axes[0], *part.axes[1])
        sizes = [at(layer, part.weight).shape[axis] for axis in order]
        return stored.reshape(sizes).transpose(np.argsort(order))
    return stored if part.outputs_first else stored.T


def place(part: Part) -> Any:
    """Where the part is in what `stored_in` gives."""
    rows: Any = slice(None) if part.rows is None else list(part.rows)
    return rows, slice(None) if part.columns is None else part.columns


def bias_of(layer: Any, part: Part) -> Any:
    """The whole stored bias (outputs,), or None."""
    found = at(layer, part.bias) if part.bias else None
    return None if found is None else np.asarray(_plain(found)).reshape(-1)


def _plain(x: Any) -> Any:
    return x.detach().cpu().numpy() if hasattr(x, "detach") else x


def write(layer: Any, path: str, new: Any) -> None:
    """Write an array into an attribute: into the numbers of a tensor, in the place of an array."""
    owner, _, name = path.rpartition(".")
    owner = at(layer, owner)
    old = at(owner, name)
    new = np.asarray(new).reshape(tuple(old.shape))
    if hasattr(old, "detach"):
        old.data.copy_(old.data.new_tensor(new))
    elif isinstance(owner, list):
        owner[int(name)] = np.array(new, old.dtype)
    elif isinstance(owner, dict):
        owner[name] = np.array(new, old.dtype)
    else:
        setattr(owner, name, np.array(new, old.dtype))
