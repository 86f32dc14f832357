"""What a call's own tensors decide, beside their sizes: queries that see no key, and memory that `view` refuses."""

from __future__ import annotations

from typing import Any

import torch

from .._reading.graph import Reading
from .layer import LARGE


def some_row_is_empty(rank: int, masks: Any, causal: Any, inputs: Any) -> bool:
    """Whether a query of a call sees no key.

    rank    of the scores
    masks   (lengths, keep_mask, bias) of the call
    """
    lens, keep, bias = masks
    n_queries, n_keys = inputs[0].shape[-2], inputs[1].shape[-2]
    seen = torch.ones(1, 1, dtype=torch.bool) if keep is None else keep
    if bias is not None:
        seen = seen & (bias > -LARGE)
    if lens is not None:
        seen = seen & (torch.arange(n_keys) < lens.reshape(lens.shape[0], *[1] * (rank - 3), -1, 1))
    if causal:
        seen = seen & torch.ones(n_queries, n_keys, dtype=torch.bool).tril()
    return not bool(seen.any(-1).all())


_VIEWS = frozenset((
    "transpose", "permute", "unsqueeze", "squeeze", "expand", "__getitem__", "view", "unflatten", "mT", "T", "t",
    "movedim", "chunk", "split", "unbind", "narrow", "select", "expand_as", "view_as",
))  # fmt: skip


def viewed(reading: Reading) -> set[str]:
    """The inputs whose memory is seen with other sizes: `view` refuses where `reshape` copies."""
    found = set()
    for node in reading.graph.nodes:
        value = node.values()[0] if node.name in ("view", "view_as") else None
        while value is not None and value.node is not None and value.node.name in _VIEWS:
            value = value.node.values()[0]
        if value is not None and value.node is None and value.kind == "input":
            found.add(value.name)
    return found
