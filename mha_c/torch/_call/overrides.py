"""Whether somebody wants to see each of torch's operations: an active mode, or a tensor whose class overrides them.

A call of the core is none of torch's operations, so a layer then calls its children one by one, as d2l's would.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .._private import (
    DeviceContext,
    FakeTensor,
    FakeTensorMode,
    dispatch_modes,
    function_modes,
    has_overrides,
    n_dispatch_modes,
    n_function_modes,
)  # fmt: skip


def in_mode() -> bool:
    """Whether a mode looks on.  Not that of torch.device, which sees new tensors alone, nor that of fake tensors, for
    which there are our operators."""
    if n_function_modes() and any(not isinstance(mode, DeviceContext) for mode in function_modes()):
        return True
    return bool(n_dispatch_modes()) and any(not isinstance(mode, FakeTensorMode) for mode in dispatch_modes())


def any_overridden(*tensors: Any) -> bool:
    """Whether one is of a class with a __torch_function__ or __torch_dispatch__ of its own."""
    return any(isinstance(x, Tensor) and not isinstance(x, FakeTensor) and has_overrides(type(x)) for x in tensors)
