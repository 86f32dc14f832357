"""mha_c.torch.distributed: attention over several processes, on top of torch.distributed.

Long sequences: `split_sequence` cuts a sequence into pieces, `ring_attention` computes on them, `join_sequence` joins
the pieces; `spread_sequence(model, group)` lets layers use this.  More data, or wider layers: mha_c.torch modules are
torch modules, so DistributedDataParallel, fully_shard and parallelize_module accept them (docs/scale-out.md).
Imported at the first use only.
"""

from __future__ import annotations

from ._sequence import join_sequence, split_sequence
from .attention import ring_attention, ring_traffic
from .module import spread_sequence

__all__ = [
    "join_sequence",
    "ring_attention",
    "ring_traffic",
    "split_sequence",
    "spread_sequence",
]
__dir__ = __all__.copy  # what dir() and completion show
