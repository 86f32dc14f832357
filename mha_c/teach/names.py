"""What students call things: which of the book's arguments a parameter is, and of which kind an implementation is."""

from __future__ import annotations

import inspect
import re
from difflib import get_close_matches
from typing import Any, Optional

from .mistakes import KINDS

_OTHERS = {  # the book's names, and others for the same
    "queries": "query q", "keys": "key k", "values": "value v", "X": "x input inputs scores score s a logits",
    "valid_lens": "valid_len valid_length valid_lengths lens lengths length",
    "num_heads": "n_heads heads h H nhead n_head",
    "W_q": "wq w_query q_proj query_proj query", "W_k": "wk w_key k_proj key_proj key",
    "W_v": "wv w_value v_proj value_proj value", "W_o": "wo w_out w_output o_proj out_proj proj", "w_v": "wv",
    "num_hiddens": "hidden_size d_model embed_dim hidden_dim hiddens num_hidden dim", "max_len": "max_length",
    "query_size": "d d_k", "key_size": "", "value_size": "",
    "dropout": "dropout_p drop p dropout_rate", "bias": "use_bias",
}  # fmt: skip
HEADS = ("num_heads", *_OTHERS["num_heads"].split())
_NOBODYS = re.compile("mask|drop|train|bias|scale", re.IGNORECASE)  # parameters that stand in no argument's place
_KINDS = [  # by the name of an implementation, else by an argument that only this kind has
    ("multi_head", "multi_?head|mha", "W_o"), ("additive", "additive|bahdanau", "w_v"),
    ("transpose_qkv", "transpose_qkv|split", ""), ("transpose_output", "transpose_output|merge|join|combine", ""),
    ("positional_encoding", "position", ""), ("causal", "causal", ""), ("masked_softmax", "softmax", ""),
    ("dot_product", "dot|attention", "queries"), ("masked_softmax", "softmax", "valid_lens"),
]  # fmt: skip


def books_name(name: str, wanted: list[str]) -> str:
    """Which of the wanted names of the book `name` stands for, or ""."""
    return next((each for each in wanted if name.lower() in (each.lower(), *_OTHERS[each].split())), "")


def attribute(layer: Any, name: str) -> str:
    """What a layer calls the weight of this name of the book, or ""."""
    if hasattr(layer, name):
        return name
    held = ((each, getattr(layer, each, None)) for each in dir(layer) if books_name(each, [name]))
    return next((each for each, weight in held if hasattr(weight, "weight") or hasattr(weight, "shape")), "")


def parameters(mine: Any) -> list[inspect.Parameter]:
    """Of a call; none where it is written in C, or takes any number of them."""
    call = mine if inspect.isroutine(mine) else getattr(mine, "forward", None) or mine.__call__
    try:
        found = list(inspect.signature(call).parameters.values())[isinstance(mine, type) :]  # without self
    except (TypeError, ValueError):
        return []
    return [] if any(p.kind is p.VAR_POSITIONAL for p in found) else [p for p in found if p.kind is not p.VAR_KEYWORD]


def taken(mine: Any, wanted: list[str]) -> dict[str, str]:
    """{parameter: the book's name for it, or ""}; one by another name is what stands in its place."""
    found = parameters(mine)
    names = dict.fromkeys((p.name for p in found), "")
    for parameter in found:
        name = books_name(parameter.name, wanted)
        names[parameter.name] = name if name not in names.values() else ""
    for parameter, name in zip(found, wanted):
        if not names[parameter.name] and name not in names.values() and not _NOBODYS.search(parameter.name):
            names[parameter.name] = name
    return names or {name: name for name in wanted}


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
