"""mha_c.torch.distributed: attention over several processes, on top of torch.distributed.

Long sequences: `split_sequence` cuts a sequence into pieces, `ring_attention` computes on them, `join_sequence` joins
the pieces; `spread_sequence(model, group)` lets layers use this.  Wide layers: `shard_heads` gives each process some of
the heads, `gather_heads` puts them together.  More data: mha_c.torch modules are torch modules, so
DistributedDataParallel and fully_shard accept them (docs/scale-out.md).  Imported at the first use only.
"""

from __future__ import annotations

from ._sequence import join_sequence, split_sequence
from .attention import ring_attention, ring_traffic
from .heads import ShardedMultiHeadAttention, gather_heads, shard_heads
from .module import SequenceGroup, spread_sequence

__all__ = [
    "SequenceGroup",
    "ShardedMultiHeadAttention",
    "gather_heads",
    "join_sequence",
    "ring_attention",
    "ring_traffic",
    "shard_heads",
    "split_sequence",
    "spread_sequence",
]
__dir__ = __all__.copy  # what dir() and completion show
