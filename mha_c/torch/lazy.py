"""Attention weights as tensors that compute themselves when first used.

A model may read `attention_weights` after every forward call, as d2l's encoders do, without ever looking at them.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from .._core import saved_weights

_ATTRIBUTES = "shape", "ndim", "dtype", "device", "layout", "requires_grad", "is_leaf", "grad_fn", "is_cpu", "is_cuda"
_KNOWN = {  # answered from shape and type alone
    *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.__len__, Tensor.element_size),
}
DTYPES = {"f": torch.float32, "d": torch.float64}


class Recipe:
    """The weights of one call: (B, H, Q, K), computed once, when wanted."""

    __slots__ = ("_dtype", "_saved", "_tensor")

    def __init__(self, saved: Any, dtype: Optional[torch.dtype] = None) -> None:
        self._saved, self._dtype = saved, dtype
        self._tensor: Optional[Tensor] = None
        if saved[0] == "weights":
            self._keep(saved[1])

    def _keep(self, weights: Any) -> None:
        tensor = torch.from_numpy(weights)
        self._tensor = tensor if self._dtype is None else tensor.to(self._dtype)
        self._saved = None

    def tensor(self) -> Tensor:
        if self._tensor is None:
            self._keep(saved_weights(self._saved))
        assert self._tensor is not None
        return self._tensor

    def shown(self, by_head: bool) -> Tensor:
        """(B, H, Q, K), or (B*H, Q, K): the numbers where they are there, else a tensor that will get them."""
        if self._tensor is not None:
            return self._tensor if by_head else self._tensor.flatten(0, 1)
        q, k, row_max = self._saved[2], self._saved[3], self._saved[5]
        batch, heads, queries = row_max.shape
        shape = (batch, heads, queries, k.shape[1]) if by_head else (batch * heads, queries, k.shape[1])
        return LazyWeights(self, shape, self._dtype or DTYPES[q.dtype.char])

    def __getstate__(self) -> Any:
        return self._saved, self._dtype, self._tensor

    def __setstate__(self, state: Any) -> None:
        self._saved, self._dtype, self._tensor = state


class LazyWeights(Tensor):
    """A tensor without memory until an operation needs its numbers; every result is a plain tensor."""

    _recipe: Recipe
    _is: Optional[Tensor]

    @staticmethod
    def __new__(cls, recipe: Recipe, shape: tuple[int, ...], dtype: torch.dtype) -> LazyWeights:
        self: LazyWeights = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)
        self.__dict__.update(_recipe=recipe, _is=None)
        return self

    def __init__(self, *_: Any) -> None:
        pass

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return func(*_plain(args), **_plain(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*_plain(args), **_plain(kwargs or {}))


def computed(weights: Tensor) -> Tensor:
    """A lazy tensor's plain one, the same at each use."""
    state = weights.__dict__
    result: Optional[Tensor] = state["_is"]
    if result is None:
        result = state["_recipe"].tensor()
        if weights.dim() == 3:
            result = result.flatten(0, 1)
        state["_is"] = result
    return result


def _plain(value: Any) -> Any:
    if type(value) is LazyWeights:
        return computed(value)
    if type(value) in (tuple, list):
        return type(value)(_plain(item) for item in value)
    if type(value) is dict:
        return {key: _plain(item) for key, item in value.items()}
    return value
