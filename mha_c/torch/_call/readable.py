"""Whether the core may compute a call in the place of torch's operations: asked here, and nowhere else.

    parts_for_core    of the call of a layer; the quick way, at each call
    readable          of tensors
    observed          of all else, in `_private.py`: who sees each of torch's operations, of which our call is none

What these do not ask the core refuses itself, before it computes: BufferError of a tensor without plain memory or on
another device, TypeError of types that differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from ..._core import layer_parts
from .._private import is_compiling, observed_at_once, quickly_on_cpu
from .._tensors import PLAIN


def parts_for_core(module: Any, queries: Any, keys: Any, values: Any) -> Optional[tuple[Any, ...]]:
    """The Parts of the layer, as a tuple, if the core computes a call with these inputs; else None."""
    if not (type(queries) in PLAIN and type(keys) in PLAIN and type(values) in PLAIN):
        return None
    if is_compiling() or observed_at_once():
        return None
    return layer_parts(module, module._layout) if quickly_on_cpu(queries) else None


def readable(tensors: Sequence[Any], dtype: Optional[torch.dtype] = None, mask: Optional[Tensor] = None) -> bool:
    """Whether the core can read them, tensors or None, as far as their classes tell, and the device of the first, where
    all must be; where a dtype is given, also whether all but the mask are of it.

    Not asked in a compiler, which does not know how the device is asked here.
    """
    for x in tensors:
        if x is not None and not (type(x) in PLAIN and (x.dtype is dtype or dtype is None or x is mask)):
            return False
    return bool(quickly_on_cpu(tensors[0]))
