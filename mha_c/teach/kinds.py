"""Of which kind an implementation is: what it is asked to be, or what its name and its arguments tell."""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import Any, Optional

from .._recognize import books_name, parameters
from .mistakes import KINDS

_KINDS = [  # by the name of an implementation, else by an argument that only this kind has
    ("multi_head", "multi_?head|mha", "W_o"), ("additive", "additive|bahdanau", "w_v"),
    ("transpose_qkv", "transpose_qkv|split", ""), ("transpose_output", "transpose_output|merge|join|combine", ""),
    ("positional_encoding", "position", ""), ("causal", "causal", ""), ("masked_softmax", "softmax", ""),
    ("dot_product", "dot|attention", "queries"), ("masked_softmax", "softmax", "valid_lens"),
]  # fmt: skip


def unknown_kind(kind: Any) -> ValueError:
    """The error for a kind that there is not."""
    near = get_close_matches(str(kind).lower(), KINDS, 1)
    return ValueError(
        f"kind must be one of {', '.join(KINDS)}, got {kind!r}" + (f"; did you mean {near[0]!r}?" if near else "")
    )


def told(mine: Any, kind: Optional[str]) -> str:
    """The kind: the one asked for, or what name and signature tell."""
    if callable(kind) and isinstance(mine, str):
        raise TypeError("the function comes first, then its kind: write check(your_function, kind)")
    if kind is not None and kind not in KINDS:
        raise unknown_kind(kind)
    if not (callable(mine) or hasattr(mine, "forward")):
        raise TypeError(f"mine must be a function, a class or a layer, got {type(mine).__name__}")
    name = getattr(mine, "__name__", type(mine).__name__)
    signs = {books_name(p.name, [sign for _, _, sign in _KINDS if sign]) for p in parameters(mine)}
    by_name = [each for each, pattern, _ in _KINDS if re.search(pattern, name, re.IGNORECASE)]
    by_sign = [each for each, _, sign in _KINDS if sign and sign in signs]
    if not (kind or by_name or by_sign):
        raise ValueError(f"{name}: its name does not tell what it is; give kind, one of {', '.join(KINDS)}")
    return kind or [*by_name, *by_sign][0]
