"""Weights packed for the kernels, by `frozen`."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ... import _core
from .._tensors import array
from .records import Parameters

_NAMES = "W_q", "W_k", "W_v", "W_o"


class Packed(NamedTuple):
    """Weights packed for the kernels; `layer_parts` uses them while parameters and instruction set are the same."""

    isa: str
    parameters: Parameters
    ready: Any  # (packed, bias, (out_features, in_features)) or None, for each projection; the bias is read at the call

    @classmethod
    def of(cls, parameters: Parameters) -> Packed:
        pairs = zip(parameters[:4], parameters[4:8])
        ready = tuple(None if W is None else (pack(W), b, tuple(W.shape)) for W, b in pairs)
        return cls(_core.isa(), parameters, ready)

    def changed(self) -> list[str]:
        """Names of the weights whose numbers have changed; compares every number."""
        trios = zip(_NAMES, self.parameters, self.ready)
        return [name for name, W, then in trios if then is not None and pack(W).tobytes() != then[0].tobytes()]

    def for_projected(self) -> Packed:
        """For a call whose keys and values have been through W_k and W_v already."""
        return self._replace(ready=(self.ready[0], None, None, self.ready[3]))


def pack(weight: Any) -> Any:
    return _core.pack_linear(np.ascontiguousarray(array(weight)))
