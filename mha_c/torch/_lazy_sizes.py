"""nn.LazyLinear inside a layer: the first call sets the sizes before the core reads the weights."""

from __future__ import annotations

import copy
from typing import Any, Optional, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter, is_lazy


def materialize(layer: Any, queries: Optional[Tensor], keys: Optional[Tensor], values: Optional[Tensor]) -> None:
    """Draw the weights of lazy projections of a layer, in the order in which d2l would call them.

    An input is None if it is projected already.
    """
    children, inputs = {slot: layer._modules.get(name) for slot, name in layer._layout.slots}, (queries, keys, values)
    for slot, x in enumerate(inputs):
        if x is not None and isinstance(children.get(slot), nn.LazyLinear):
            _materialize(children[slot], x.shape[-1])
    for slot, before in ((3, 2), (8, 0)):  # d2l calls W_o after W_v, w_v after W_q
        if inputs[before] is not None and isinstance(children.get(slot), nn.LazyLinear):
            _materialize(children[slot], children[before].out_features)


def copied(module: Any) -> Any:
    """A deep copy, also of a module with open sizes, whose parameters not every torch can copy."""
    lazy, new = [x for x in module.parameters() if is_lazy(x)], cast(Any, UninitializedParameter)
    twins: Any = {id(x): new(x.requires_grad, x.device, x.dtype) for x in lazy}
    return copy.deepcopy(module, twins)


def _materialize(linear: Any, features: int) -> None:
    with torch.no_grad():
        linear(torch.empty(0, features, dtype=linear.weight.dtype, device=linear.weight.device))
