"""nn.LazyLinear inside a layer: sizes from the first call, before the core reads the weights."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor, nn


def materialize(layer: Any, queries: Optional[Tensor], keys: Optional[Tensor], values: Optional[Tensor]) -> None:
    """Lazy projections of a layer draw their weights, in the order in which d2l's would be called.

    An input that is None is projected already.
    """
    children, inputs = {slot: layer._modules.get(name) for slot, name in layer._layout.slots}, (queries, keys, values)
    for slot, x in enumerate(inputs):
        if x is not None and isinstance(children.get(slot), nn.LazyLinear):
            _materialize(children[slot], x.shape[-1])
    for slot, before in ((3, 2), (8, 0)):  # W_o is called behind W_v, w_v behind W_q
        if inputs[before] is not None and isinstance(children.get(slot), nn.LazyLinear):
            _materialize(children[slot], children[before].out_features)


def _materialize(linear: Any, features: int) -> None:
    with torch.no_grad():
        linear(torch.empty(0, features, dtype=linear.weight.dtype, device=linear.weight.device))
