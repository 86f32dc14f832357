"""mha_c.torch.distributed: attention over several processes, on top of torch.distributed.

Long sequences: `ring_attention`, on the pieces that `split_sequence` cuts and `join_sequence` puts together.
Imported only when asked for.
"""

from __future__ import annotations

from ._sequence import join_sequence, split_sequence
from .attention import ring_attention

__all__ = ["join_sequence", "ring_attention", "split_sequence"]
