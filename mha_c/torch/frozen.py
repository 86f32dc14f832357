"""Weights packed once, for inference loops: `with mha_c.torch.frozen(model):`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from .. import _core
from ._call.children import standard_parts
from ._module import AttentionModule
from ._private import on_cpu
from ._tensors import FLOATS, array

_NAMES = "W_q", "W_k", "W_v", "W_o"


class Packed(NamedTuple):
    """Weights packed for the kernels; `layer_parts` uses them while parameters and instruction set are the same."""

    isa: str
    parameters: Any
    ready: Any  # (packed, bias, (out_features, in_features)) or None, for each projection; the bias is read at the call
    copies: list[Any]  # of W_k and W_v, made once something is kept and shared from then on: `decoding.known_weights`

    @classmethod
    def of(cls, parameters: Any) -> Packed:
        ready = tuple(
            None if W is None else (pack(W), b, tuple(W.shape)) for W, b in zip(parameters[:4], parameters[4:])
        )
        return cls(_core.isa(), parameters, ready, [])

    def changed(self) -> list[str]:
        """Names of the weights whose numbers have changed; compares every number."""
        trios = zip(_NAMES, self.parameters, self.ready)
        return [name for name, W, then in trios if then is not None and pack(W).tobytes() != then[0].tobytes()]


def pack(weight: Any) -> Any:
    return _core.pack_linear(np.ascontiguousarray(array(weight)))


@contextmanager
def frozen(model: nn.Module) -> Iterator[nn.Module]:
    """Pack the weights of mha_c's attention layers in `model` once, for calls in a `with` that record no gradient.

    This saves time for small batches in large layers: other calls bring the weights into the kernels' order each time.
    Outside the `with` statement every call uses the current numbers of the parameters.

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
        On leaving, if a weight has changed inside: calls since the change may have used the old numbers.  Every number
        is compared, and the message names the weights.  Where the `with` ends by another error, that error goes on, and
        the message is a warning.

    Examples
    --------
    >>> import torch, mha_c.torch
    >>> mha, x = mha_c.torch.MultiHeadAttention(8, 8, 8, 8, 2, 0.0).eval(), torch.ones(1, 3, 8)
    >>> with torch.no_grad(), mha_c.torch.frozen(mha):
    ...     results = [mha(x, x, x) for _ in range(3)]
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"frozen takes a torch module, got {type(model).__name__}")
    found: list[tuple[str, AttentionModule, Packed]] = []
    for name, module in model.named_modules():
        parts = standard_parts(module) if isinstance(module, AttentionModule) else None
        if parts is not None and all(x is None or (x.dtype in FLOATS and on_cpu(x)) for x in parts[0][:4]):
            found.append((name, module, Packed.of(parts[0])))
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


def _released(found: list[tuple[str, AttentionModule, Packed]]) -> str:
    """Ends the use of packed weights; a message if some of them were not the module's any more."""
    for _, module, packed in found:
        if module.__dict__.get("_frozen") is packed:
            del module.__dict__["_frozen"]
    changed = [f"{prefix}.{name}.weight".lstrip(".") for prefix, _, packed in found for name in packed.changed()]
    what = f"changed inside frozen(): {', '.join(changed)}; calls since then may have used the numbers of before"
    return what if changed else ""
