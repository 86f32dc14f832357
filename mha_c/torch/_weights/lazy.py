"""Attention weights as tensors that compute their numbers at the first use.

A model may read `attention_weights` after every forward call, as d2l's encoders do, and never use the numbers.
"""

from __future__ import annotations

from typing import Any, Callable, Optional

import torch
from torch import Tensor
from torch.autograd import Function

from .._call.autograd import GONE, Shown, WeightsFunction
from .._call.scored import Computed
from .._private import as_plain_tensor, has_wrappers, make_wrapper

_ATTRIBUTES = "shape", "ndim", "dtype", "device", "layout", "requires_grad", "is_leaf", "grad_fn", "is_cpu", "is_cuda"
_KNOWN = {  # functions that need shape and type only
    *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES if getattr(Tensor, name, None) is not None),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.__len__, Tensor.element_size),
}
_NUMBERS_ALONE = {Tensor.numpy, Tensor.__array__, Tensor.tolist, Tensor.__repr__, Tensor.__deepcopy__,
                  Tensor.__reduce_ex__, Tensor.__dlpack__}  # fmt: skip
_REQUIRES_GRAD: Any = getattr(Tensor, "requires_grad").__get__  # noqa: B009  the descriptor's
_HAVE_NO_GRADIENT = {Tensor.retain_grad, Tensor.register_hook}


class Recipe:
    """The weights of one call: (B, H, Q, K), computed once, at the first use.

    kept    what has `shape` and `computed()`: Scored, Computed, or `last.OfCore`
    """

    __slots__ = ("_dtype", "_kept", "_tensor")

    def __init__(self, kept: Any, dtype: torch.dtype) -> None:
        self._kept, self._dtype = kept, dtype
        self._tensor: Optional[Tensor] = None
        if kept.is_ready():
            self._keep(kept.computed())

    def _keep(self, weights: Tensor) -> None:
        self._tensor = weights if weights.dtype is self._dtype else weights.to(self._dtype)
        self._kept = None

    def tensor(self) -> Tensor:
        kept = self._kept  # read first: another thread may be here, and drops it once there is a tensor
        if self._tensor is None:
            with torch.inference_mode(False), torch.no_grad():  # plain tensors, whatever the reader's mode
                self._keep(kept.computed())
        assert self._tensor is not None
        return self._tensor

    def kept(self) -> Any:
        """The weights if they are computed, else what they can be computed from."""
        kept = self._kept
        return kept if self._tensor is None else Computed(self._tensor)

    def shown(self, heads: Optional[int], source: Any = None) -> Tensor:
        """(B, heads, Q, K), or (B*H, Q, K) for None: the weights if they are computed, else a lazy tensor.

        source  what the gradient of the weights flows back to (`autograd.Source`)
        """
        if source is None:
            return self._lazy(heads) if self._tensor is None else with_heads(self._tensor, heads)
        arguments = source.arguments()
        shown = Shown(self._lazy(heads), source, arguments is None)
        found: Tensor = WeightsFunction.apply(shown, *(arguments or [torch.empty((), requires_grad=True)]))
        if shown.gone and type(found) is LazyWeights:
            found._gone = True
        return found

    def _lazy(self, heads: Optional[int]) -> Tensor:
        if not has_wrappers:
            return with_heads(self.tensor(), heads)
        kept, tensor = self._kept, self._tensor  # in this order, as in `tensor`
        sizes, device = (kept.shape, kept.device) if tensor is None else (tensor.shape, tensor.device)
        batch, own_heads, queries, keys = sizes
        rows = batch * own_heads
        shape = (rows, queries, keys) if heads is None else (rows // heads, heads, queries, keys)
        weights: Any = make_wrapper(LazyWeights, shape, dtype=self._dtype, device=device)
        weights._recipe = self
        return weights


class LazyWeights(Tensor):
    """A tensor without memory until an operation needs its numbers; results of operations are plain tensors.

    `Recipe.shown` makes it in one call of torch: a separate constructor would take a third longer.
    """

    _recipe: Recipe
    _is: Optional[Tensor] = None
    _gone = False  # the graph of the call

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _KNOWN:
            with as_plain_tensor():
                found = func(*args, **(kwargs or {}))
            return found or numbers_are_a_leaf(args[0]) if func == _REQUIRES_GRAD else found
        if func in _HAVE_NO_GRADIENT:
            asked = args[:1]
        elif func is torch.autograd.grad:
            asked = args[1] if isinstance(args[1], (tuple, list)) else args[1:2]
        else:
            asked = ()
        if any(type(x) is cls and not numbers_are_a_leaf(x) for x in asked):
            raise RuntimeError(
                "mha_c computes the output of a layer without its attention_weights, so the output has no gradient "
                "for them; a hook on the layer's dropout module is called with weights that the output depends on"
            )
        taken = numbers if func in _NUMBERS_ALONE else computed
        return func(*_each(args, taken), **_each(kwargs or {}, taken))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*_each(args, numbers), **_each(kwargs or {}, numbers))


class OfAGoneGraph(Tensor):
    """What is computed from weights whose call's graph is gone: torch.autograd.grad says so in our words, where torch
    would say that its inputs were not used.  (`backward` meets the node of the weights, which says the same.)"""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = _each(args, computed), _each(kwargs or {}, computed)
        if func in _NUMBERS_ALONE:
            args = args[0].as_subclass(Tensor), *args[1:]
        elif func is torch.autograd.grad:
            args, kwargs = args[:6], {**kwargs, "allow_unused": True}
        with as_plain_tensor():
            found = func(*args, **kwargs)
        if func is torch.autograd.grad and any(x is None for x in found):
            raise RuntimeError(GONE)
        if isinstance(found, (tuple, list)):
            return type(found)(map(cls._marked, found)) if type(found) in (tuple, list) else found
        return cls._marked(found)

    @classmethod
    def _marked(cls, found: Any) -> Any:
        return found.as_subclass(cls) if type(found) is Tensor and found.requires_grad else found


class NumbersOf(Function):
    """apply(weights) -> their numbers; the gradient of these flows back to the lazy weights."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor) -> Tensor:
        return numbers(weights).detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad


def with_heads(weights: Tensor, heads: Optional[int]) -> Tensor:
    """(B, H, Q, K) or (B*H, Q, K): as the second if heads is None, else with these heads, others where a caller has
    folded them into the batch.  (B, Q, K), of a call without heads, as it is."""
    if weights.dim() > 3:
        if weights.shape[-3] == heads:
            return weights
        weights = weights.flatten(-4, -3)
    return weights if heads is None else weights.unflatten(-3, (-1, heads))


def computed(weights: Tensor) -> Tensor:
    """The plain tensor of a lazy one, the same at each use; connected to it in autograd's graph if gradients are on."""
    if type(weights) is not LazyWeights:
        return weights
    if numbers_are_a_leaf(weights) or not (weights.requires_grad and torch.is_grad_enabled()):
        return numbers(weights)
    result: Optional[Tensor] = weights.__dict__.get("_function")
    if result is None:
        result = NumbersOf.apply(weights)
        if weights.__dict__.get("_gone"):
            result = result.as_subclass(OfAGoneGraph)
        weights.__dict__["_function"] = result
    return result


def numbers_are_a_leaf(weights: Any) -> bool:
    """Whether a program has called requires_grad_() on the weights: then they are a leaf with their own gradient."""
    found: Optional[Tensor] = weights.__dict__.get("_is")
    return found is not None and found.requires_grad


def numbers(weights: Tensor) -> Tensor:
    state = weights.__dict__
    result: Optional[Tensor] = state.get("_is")
    if result is None:
        result = with_heads(state["_recipe"].tensor(), None if weights.dim() == 3 else weights.shape[1])
        state["_is"] = result
    return result


def _each(value: Any, taken: Callable[[Tensor], Tensor]) -> Any:
    if type(value) is LazyWeights:
        return taken(value)
    if type(value) in (tuple, list):
        return type(value)(_each(item, taken) for item in value)
    if type(value) is dict:
        return {key: _each(item, taken) for key, item in value.items()}
    return value
