"""Weights packed once, for inference loops: `with mha_c.torch.frozen(model):`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from ._call.children import standard_parts
from ._call.packed import Packed
from ._module import DecodingModule
from ._private import on_cpu
from ._tensors import FLOATS


@contextmanager
def frozen(model: nn.Module) -> Iterator[nn.Module]:
    """Pack the weights of mha_c's attention layers in `model` once, for the calls without gradients in a `with` block.

    This saves time for small batches in large layers: other calls pack the weights each time.  Outside the block every
    call uses the current parameters.

    Parameters
    ----------
    model : nn.Module
        A model with layers of mha_c.torch.

    Yields
    ------
    nn.Module
        The same model.

    Raises
    ------
    RuntimeError
        If a weight has changed by the end of the block: calls since the change may have used the old weight.
        All weights are compared, and the message names those that changed.  If the block ends with another error, that
        error is raised, and this one becomes a warning.

    Examples
    --------
    >>> import torch, mha_c.torch
    >>> mha, x = mha_c.torch.MultiHeadAttention(8, 8, 8, 8, 2, 0.0).eval(), torch.ones(1, 3, 8)
    >>> with torch.no_grad(), mha_c.torch.frozen(mha):
    ...     results = [mha(x, x, x) for _ in range(3)]
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"frozen takes a torch module, got {type(model).__name__}")
    found: list[tuple[str, DecodingModule, Packed]] = []
    for name, module in model.named_modules():
        parts = standard_parts(module) if isinstance(module, DecodingModule) else None
        weights = () if parts is None else parts.parameters.weights()
        if parts is not None and all(x is None or (x.dtype in FLOATS and on_cpu(x)) for x in weights):
            found.append((name, module, Packed.of(module, parts.parameters)))
    for _, module, packed in found:
        module.__dict__["_frozen"] = packed
    try:
        yield model
    except BaseException:
        changed = _released(found)
        if changed:  # the error of the body goes on
            warnings.warn(changed, RuntimeWarning, stacklevel=3)
        raise
    changed = _released(found)
    if changed:
        raise RuntimeError(changed)


def _released(found: list[tuple[str, DecodingModule, Packed]]) -> str:
    """Ends the use of packed weights; a message if some of them were not the module's any more."""
    for _, module, packed in found:
        if module.__dict__.get("_frozen") is packed:
            del module.__dict__["_frozen"]
    changed = [
        f"{prefix}.{name}.weight".lstrip(".") for prefix, module, packed in found for name in packed.changed(module)
    ]
    what = f"changed inside frozen(): {', '.join(changed)}; calls since then may have used the old weights"
    return what if changed else ""
