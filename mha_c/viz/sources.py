"""Plain arrays of attention weights from every kind of source.

`view` and `show_heatmaps` use it.  A source may be a NumPy array, a torch tensor (torch is never imported here),
a nested list, a list per layer or per decoding step as in d2l's decoders, or a layer or model that has
`attention_weights`.  `collect` returns one array (batch, heads, queries, keys) per layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

import numpy as np

from .._arguments import scalars
from .._arguments.arrays import to_array
from ..errors import ShapeError

if TYPE_CHECKING:
    from .._types import Array
Tree = Any  # an array, or a list of trees


class LayerWeights(NamedTuple):
    """The weights of one layer: (batch, heads, queries, keys)."""

    name: str
    weights: Array


def to_numpy(value: Any, name: str = "weights") -> Array:
    """A float32 or float64 array; it shares memory with the input where possible."""
    if isinstance(value, (list, tuple)):  # may hold tensors, which NumPy cannot convert inside lists
        value = [to_numpy(item, name) if holds_arrays(item, rank=1) else item for item in value]
    elif hasattr(value, "detach"):  # a torch tensor: drop the graph
        value = on_cpu(value.detach())
        if str(getattr(value, "dtype", "")) == "torch.bfloat16":  # NumPy has no such type
            value = value.float()
    elif isinstance(value, np.ma.MaskedArray):  # masked elements become NaN: left blank, or refused
        value = np.ma.filled(value.astype(np.result_type(value, np.float32)), np.nan)
    array = to_array(value, name) if isinstance(value, (list, tuple)) else np.asarray(value)
    if array.dtype.kind not in "fiub":
        advice = ": give its attention_weights" if hasattr(type(value), "attention_weights") else ""
        raise TypeError(f"{name} must be numbers, got {type(value).__name__} of dtype {array.dtype}{advice}")
    if array.dtype not in (np.float32, np.float64):
        array = array.astype(np.float32)
    return array


def on_cpu(value: Any) -> Any:
    """The value itself; a tensor on another device is copied to the CPU."""
    return value.cpu() if hasattr(value, "cpu") else value


def holds_arrays(value: Any, rank: int = 2) -> bool:
    """Whether `value` is an array, or a list with an array at some depth.  Rows of numbers (rank 1) make one matrix."""
    if isinstance(value, (list, tuple)):
        return any(holds_arrays(item, rank) for item in value)
    return int(getattr(value, "ndim", 0)) >= rank


def collect(
    source: Any, num_heads: Optional[int] = None, layer_names: Optional[Sequence[str]] = None
) -> list[LayerWeights]:
    """The layers' weights, each (batch, heads, queries, keys).

    An array of rank 3 is (heads, queries, keys), or, from a layer, (batch, queries, keys).  If the number of heads is
    known, its first axis is d2l's batch * heads.
    """
    asked = None if num_heads is None else scalars.whole(num_heads, "num_heads")
    holder = not isinstance(source, (list, tuple)) and not holds_arrays(source, rank=1)
    tree = _tree(_read_attribute(source) if holder else source)
    steps = isinstance(tree, list) and _is_list_of_steps(tree)
    if steps:
        tree = _join_steps(tree)
    leaves, names = _flatten(tree)
    if holder and num_heads is None and any(leaf.ndim == 3 for leaf in leaves):
        num_heads = _find_num_heads(source)
    if layer_names is not None:
        if len(layer_names) != len(leaves):
            raise ValueError(f"layer_names has {len(layer_names)} names for {len(leaves)} layers")
        names = [str(name) for name in layer_names]
    layers = [LayerWeights(name, _four_axes(leaf, num_heads, holder or steps)) for name, leaf in zip(names, leaves)]
    for leaf, layer in zip(leaves, layers):
        if asked not in (None, layer.weights.shape[1]):
            raise ShapeError(f"weights {leaf.shape} have {layer.weights.shape[1]} head(s), but num_heads is {asked}")
    return layers


def _read_attribute(holder: Any) -> Any:
    """`attention_weights` of a layer, of the child of d2l's multi-head layer, or Hugging Face's `attentions`."""
    for owner in (holder, getattr(holder, "attention", None)):
        for name in ("attention_weights", "attentions"):
            # getattr's default would swallow our layers' "call the layer first"
            if owner is not None and (hasattr(type(owner), name) or hasattr(owner, name)):
                return getattr(owner, name)
    watched = "; with mha_c.torch.watch(model) as seen: model(x); then seen.view()"
    seen = watched if hasattr(holder, "parameters") else ""
    raise TypeError(
        f"{type(holder).__name__} has no attention_weights: give an array, a list of arrays, "
        f"or a layer or model that was called and keeps its weights{seen}"
    )


def _find_num_heads(holder: Any) -> Optional[int]:
    counts = [getattr(holder, "num_heads", None)]
    if callable(getattr(holder, "modules", None)):  # a torch model: look at its layers
        # Instance attributes only: a class attribute may be that of an inner attention, to which heads are a batch.
        counts += [getattr(module, "__dict__", {}).get("num_heads") for module in holder.modules()]
    found = sorted({int(count) for count in counts if isinstance(count, (int, np.integer))})
    if len(found) > 1:  # some layers have been pruned
        listed = ", ".join(map(str, found))
        raise ValueError(f"layers of {type(holder).__name__} have different numbers of heads, {listed}: give one layer")
    return found[0] if found else None


def _tree(source: Any) -> Tree:
    if isinstance(source, (list, tuple)) and holds_arrays(source):
        return [_tree(item) for item in source]
    array = to_numpy(source)
    if array.size == 0:
        raise ShapeError(f"weights have nothing to show: their shape is {array.shape}")
    return array


def _leaves(tree: Tree) -> list[Array]:
    return [leaf for item in tree for leaf in _leaves(item)] if isinstance(tree, list) else [tree]


def _depth(tree: Tree) -> int:
    return 1 + max(_depth(item) for item in tree) if isinstance(tree, list) else 0


def _is_list_of_steps(tree: list[Tree]) -> bool:
    """Whether `tree` comes from decoding one token at a time: a list of steps, whose weights have a single query.

    d2l's recurrent decoder gives [step], and its predictions [step][one]; its Transformer [step][self, cross][block].
    One call of that Transformer gives [self, cross][block], which is not a list of steps even for a single query.
    """
    if any(leaf.ndim != 3 or leaf.shape[1] != 1 for leaf in _leaves(tree)):
        return False
    inner = {len(item) if isinstance(item, list) else 0 for item in tree}
    if len(inner) > 1:
        return False
    return _depth(tree) != 2 or inner == {1} or len(tree) != 2


def _join_steps(steps: Sequence[Tree]) -> Tree:
    """Join a list of steps into one array with one query per step; shorter rows of keys are padded with zeros."""
    if isinstance(steps[0], list):
        joined = [_join_steps([step[i] for step in steps]) for i in range(len(steps[0]))]
        return joined[0] if len(joined) == 1 else joined
    num_keys = max(step.shape[2] for step in steps)
    rows = [np.pad(step, ((0, 0), (0, 0), (0, num_keys - step.shape[2]))) for step in steps]
    return np.concatenate(rows, axis=1)


def _flatten(tree: Tree) -> tuple[list[Array], list[str]]:
    if not isinstance(tree, list):
        if tree.ndim != 5:
            return [tree], [""]
        tree = list(tree)  # one array holds several layers
    if len(tree) == 1:
        return _flatten(tree[0])
    if any(isinstance(item, list) for item in tree):
        kinds = ["self-attention", "cross-attention"] if len(tree) == 2 else [str(i + 1) for i in range(len(tree))]
        sizes = [len(item) if isinstance(item, list) else 1 for item in tree]
        return _leaves(tree), [f"{kind}, block {i + 1}" for kind, size in zip(kinds, sizes) for i in range(size)]
    return _leaves(tree), [f"layer {i + 1}" for i in range(len(tree))]


def _four_axes(weights: Array, num_heads: Optional[int], first_is_batch: bool) -> Array:
    if weights.ndim == 4:
        return weights
    if weights.ndim == 2:
        return weights[None, None]
    if weights.ndim != 3:
        raise ShapeError(
            f"weights must have rank 2 (queries, keys), 3 (heads, queries, keys) or 4 (batch, heads, queries, keys), "
            f"got shape {weights.shape}"
        )
    if num_heads is not None:
        if weights.shape[0] % num_heads:
            raise ShapeError(f"weights {weights.shape}: the first axis is not a multiple of num_heads ({num_heads})")
        return weights.reshape(-1, num_heads, *weights.shape[1:])
    return weights[:, None] if first_is_batch else weights[None]
