"""Attention that a model computes itself: a softmax between two products, in anybody's lines.

What a product of two results gives are scores; what is made of scores, number by number, are scores; a softmax of them
gives weights; and where weights meet values in a product, that was attention.  A tensor's part in this is noted beside
the tensor, never in it.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple, Optional

from torch import Tensor, nn

from .._tensors import recorded_or_transformed
from .operands import ModelWeights, copied

_PRODUCTS = frozenset(
    ("matmul", "__matmul__", "__rmatmul__", "bmm", "mm", "einsum", "baddbmm", "addbmm", "mv", "linear")
)
_SOFTMAX = frozenset(("softmax", "_softmax", "softmax_"))
_ADDING = frozenset(("add", "add_", "__add__", "__radd__", "__iadd__", "baddbmm"))
_HIDING = frozenset(("masked_fill", "masked_fill_", "where"))
_SUMS = frozenset(("sum",))
_TIMES = frozenset(("mul", "__mul__", "__rmul__", "mul_", "__imul__"))
_PASSING = frozenset(
    ("__get__", "__set__", "size", "dim", "backward", "__len__", "__repr__", "tolist", "numpy", "item")
)


class Meaning(NamedTuple):
    """What a tensor is.

    what     "features" of a tanh, which may become additive scores; "scores"; "weights"; "mixed": weights times values,
             not summed yet
    mask     what has hidden some scores, or was added to them
    shown    of weights: a list of the weights as the softmax gave them, and as the model has shaped them since
    """

    what: str
    mask: Optional[Tensor] = None
    shown: Any = None


class Products:
    """The parts that tensors play while somebody watches, in one thread."""

    def __init__(self) -> None:
        self._parts: dict[int, tuple[Any, Meaning]] = {}

    def _part(self, x: Any) -> Optional[Meaning]:
        found = self._parts.get(id(x))
        return found[1] if found is not None and found[0]() is x else None

    def _put(self, x: Any, part: Meaning) -> None:
        if isinstance(x, Tensor):
            key, parts = id(x), self._parts

            def forget(dead: Any) -> None:
                if key in parts and parts[key][0] is dead:
                    del parts[key]

            parts[key] = weakref.ref(x, forget), part

    def saw(self, function: Any, args: Any, kwargs: Any, out: Any) -> Optional[tuple[ModelWeights, Optional[Tensor]]]:
        """Note a call; (weights, mask) where it was weights that met their values."""
        name = getattr(function, "__name__", "")
        if name in _PASSING:
            return None
        given = _tensors(args) + (_tensors(tuple(kwargs.values())) if kwargs else [])
        parts = [self._part(x) for x in given]
        known = next((part for part in parts if part is not None), None)
        if name in _PRODUCTS:
            return self._product(name, given, parts, known, out)
        if known is None:
            if name == "tanh":
                self._follow(Meaning("features"), out)
            return None
        if known.what == "features":
            self._follow(Meaning("scores") if name in _SUMS else known, out)
            return None
        if name in _SOFTMAX and known.what == "scores":
            if isinstance(out, Tensor) and not recorded_or_transformed():
                axis = args[1] if len(args) > 1 else (kwargs or {}).get("dim", -1)
                self._put(out, Meaning("weights", known.mask, _SoftmaxResult(out, axis)))
            return None
        if known.what == "mixed":
            if name in _SUMS:
                return _noted(known)
            self._follow(known, out)
            return None
        if known.what == "weights":
            others = [x for x, part in zip(given, parts) if part is None]
            if name in _TIMES and others and others[0].dim() > 1 and others[0].shape != given[parts.index(known)].shape:
                if isinstance(out, Tensor) and out.shape[-1] == others[0].shape[-1]:
                    known.shown.meets(given[parts.index(known)])
                    self._put(out, known._replace(what="mixed"))
                    return None
            if isinstance(out, Tensor):
                known.shown.seen(out)
        self._follow(self._masked(known, name, given, parts), out)
        return None

    def _product(
        self, name: str, given: list[Tensor], parts: list[Optional[Meaning]], known: Optional[Meaning], out: Any
    ) -> Optional[tuple[ModelWeights, Optional[Tensor]]]:  # fmt: skip
        if known is not None and known.what == "weights" and len(given) > 1:
            known.shown.meets(given[parts.index(known)])
            return _noted(known)
        vector = any(isinstance(x, nn.Parameter) and (x.dim() == 1 or x.shape[-1] == 1) for x in given[1:])
        if vector and name != "linear":  # one number for each pair: an additive score
            self._follow(Meaning("scores"), out)
            return None
        if name == "linear":
            if isinstance(out, Tensor) and out.shape[-1:] == (1,):
                self._put(out, Meaning("scores"))
            elif known is not None and known.what == "scores" and given and given[0].dim() > 3:  # heads are mixed
                self._follow(known, out)
            return None
        results = [x for x in given if not isinstance(x, nn.Parameter)]
        if len(results) > 1 and isinstance(out, Tensor) and out.dim() > 1:
            mask = given[0] if name in ("baddbmm", "addbmm") and given[0].numel() > 1 else None
            self._put(out, Meaning("scores", mask))
        return None

    def _masked(self, known: Meaning, name: str, given: list[Tensor], parts: list[Optional[Meaning]]) -> Meaning:
        """The part of scores that a mask was put on."""
        if known.what != "scores" or known.mask is not None:
            return known
        others = [x for x, part in zip(given, parts) if part is None and x.dim() > 1 and x.numel() > 1]
        return known._replace(mask=others[0]) if others and name in _ADDING | _HIDING else known

    def _follow(self, part: Meaning, out: Any) -> None:
        for x in _tensors((out,)):
            if x.is_floating_point():
                self._put(x, part)


class _SoftmaxResult:
    """Weights as the softmax gave them, before anything changes them in place; and how the model shaped them."""

    def __init__(self, weights: Tensor, axis: Any) -> None:
        if isinstance(axis, int) and axis % weights.dim() != weights.dim() - 1:
            heads_last = weights.dim() == 4 and axis % 4 == 2
            weights = weights.permute(0, 3, 1, 2) if heads_last else weights.movedim(axis, -1)
        self.weights = copied(weights)
        self.shape, self.noted = tuple(self.weights.shape), False

    def seen(self, out: Tensor) -> None:
        """A shape with an axis of heads tells how many heads there are."""
        if len(self.shape) == 3 and out.dim() == 4 and out.numel() == self.weights.numel():
            if tuple(out.shape[-2:]) == self.shape[-2:]:
                self.shape = tuple(out.shape)

    def meets(self, out: Tensor) -> None:
        """The shape in which weights meet their values tells (items, keys) from (queries, keys)."""
        if len(self.shape) == 2 and out.dim() == 3 and out.numel() == self.weights.numel():
            self.shape = (self.shape[0], 1, self.shape[1])


def _noted(part: Meaning) -> Optional[tuple[ModelWeights, Optional[Tensor]]]:
    shown = part.shown
    if shown.noted:  # weights that meet others later, as in a rollout
        return None
    shown.noted = True
    weights = shown.weights.reshape(shown.shape)
    while weights.dim() < 4:
        weights = weights[:, None] if weights.dim() == 3 else weights[None]
    if weights.dim() > 4:
        weights = weights.flatten(0, -4)
    return ModelWeights(weights), part.mask


def _tensors(found: Any) -> list[Tensor]:
    tensors: list[Tensor] = []
    for x in found:
        if isinstance(x, Tensor):
            tensors.append(x)
        elif isinstance(x, (tuple, list)):
            tensors += _tensors(x)
    return tensors
