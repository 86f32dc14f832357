"""Weights packed for the kernels, by `frozen`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Optional

import numpy as np

from ... import _core
from .._tensors import array
from .records import LayerParameters

if TYPE_CHECKING:
    from ..._types import PackedLinear


class Packed(NamedTuple):
    """Weights packed for the kernels; `layer_parts` uses them while parameters and instruction set are the same."""

    isa: str
    parameters: LayerParameters
    ready: tuple[Optional[PackedLinear], ...]  # of each projection; the bias is read at the call

    @classmethod
    def of(cls, module: Any, parameters: LayerParameters) -> Packed:
        in_core = module._for_core(parameters)
        pairs = zip(in_core[:4], in_core[4:8])
        ready = tuple(None if W is None else (pack(W), b, tuple(W.shape)) for W, b in pairs)
        return cls(_core.isa(), parameters, ready)

    def changed(self, module: Any) -> list[str]:
        """Names of the module's weights whose numbers have changed; compares every number."""
        names: dict[int, str] = dict(module._layout.slots)
        trios = zip(range(4), module._for_core(self.parameters), self.ready)
        found = [i for i, W, then in trios if then is not None and pack(W).tobytes() != then[0].tobytes()]
        return list(dict.fromkeys(names.get(i, names[1]) for i in found))  # one child may be several projections

    def for_projected(self) -> Packed:
        """For a call whose keys and values have been through W_k and W_v already."""
        return self._replace(ready=(self.ready[0], None, None, self.ready[3]))


def pack(weight: Any) -> Any:
    return _core.pack_linear(np.ascontiguousarray(array(weight)))
