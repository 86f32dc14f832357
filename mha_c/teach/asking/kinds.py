"""Of which kind an implementation is: what it is asked to be, or what its weights, its name and its arguments tell."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from difflib import get_close_matches
from types import CodeType
from typing import Any, Optional

from ..._recognize import books_name, parameters, root_of, weights_of
from ..._recognize.roles import chooses_keys, roles
from ..words.sentences import said
from .configuration import constructor_parameters
from .making import Making, Unmade, holds_triangle, make
from .mistakes import KINDS

_SOFTMAX = r"softmax(?!\w*(loss|entropy|grad|backward|derivative))|ソフトマックス|소프트맥스"
_KINDS = [  # by the name of an implementation, else by an argument that only this kind has
    ("causal_multi_head", "(causal|masked)_?(multi|self)_?(head|attention)|causal_?mha|因果.*多头", ""),
    ("multi_head", "multi_?head|mha|多头|マルチヘッド|멀티_?헤드", "W_o"),
    ("additive", "additive|bahdanau|concat_?attention|加性", "w_v"),
    ("transpose_qkv", "transpose_qkv|split", ""), ("transpose_output", "transpose_output|merge|join|combine", ""),
    ("rope", "rope|rotary|rotate", ""), ("grouped", "group|gqa|multi_?query|mqa", ""),
    ("positional_encoding", "position(?!_?wise)|sinusoid", ""), ("window", "window|sliding|local", "window"),
    ("causal", "causal|chunk|flash|online|因果", ""),
    ("masked_softmax", _SOFTMAX, ""),
    ("dot_product", "dot|attention|attend|sdpa|注意|アテンション|어텐션", "queries"),
    ("masked_softmax", _SOFTMAX, "valid_lens"),
]  # fmt: skip


def unknown_kind(kind: Any) -> ValueError:
    """The error for a kind that there is not."""
    near = get_close_matches(str(kind).lower(), KINDS, 1)
    words = said("kind must be one of {kinds}, got {kind!r}", kinds=", ".join(KINDS), kind=kind)
    return ValueError(words + (said("; did you mean {near!r}?", near=near[0]) if near else ""))


def told(mine: Any, kind: Optional[str]) -> str:
    """The kind: the one asked for, or what weights, name and signature tell."""
    if callable(kind) and isinstance(mine, str):
        raise TypeError(said("the function comes first, then its kind: write check(your_function, kind)"))
    if kind is not None and kind not in KINDS:
        raise unknown_kind(kind)
    if not (callable(mine) or hasattr(mine, "forward")):
        raise TypeError(said("mine must be a function, a class or a layer, got {type}", type=type(mine).__name__))
    if kind == "grouped" and not inspect.isroutine(mine) and _by_weights(mine):
        return _guessed(mine)[0]  # a layer whose heads share keys and values: the function takes heads
    return kind or _guessed(mine)[0]


def reason(mine: Any) -> str:
    """Why it is taken for its kind, as a clause; "" where its name is that of the kind."""
    kind, why = _guessed(mine)
    plain = _name(mine).replace("_", "").lower()
    return "" if plain.startswith(kind.replace("_", "")) or plain == "scaleddotproductattention" else why


def _name(mine: Any) -> str:
    return str(getattr(mine, "__name__", type(mine).__name__))


def _guessed(mine: Any) -> tuple[str, str]:
    """(kind, why)."""
    name, given = _name(mine), parameters(mine)
    signs = {books_name(each.name, [sign for _, _, sign in _KINDS if sign]) for each in given}
    by_name = [kind for kind, pattern, _ in _KINDS if re.search(pattern, name, re.IGNORECASE)]
    inputs = {*roles(mine, ["queries", "keys", "values"]).values()} & {"queries", "keys", "values"}
    if {"keys", "values"} <= inputs:  # SoftmaxAttention is no softmax
        by_name = [kind for kind in by_name if kind != "masked_softmax"]
    plain = ("q", "query", "queries")
    if not any(root_of(each.name) in ("q", "qkv") and each.name.lower() not in plain for each in given):
        signs.discard("W_o")  # "w" alone may be a window
    by_sign = [kind for kind, _, sign in _KINDS if sign and sign in signs]
    held = _by_weights(mine)
    if held:
        one_input = not {"keys", "values"} & inputs
        named = re.search("caus|gpt|decoder|masked", name, re.IGNORECASE)
        causal = held == "multi_head" and one_input and (named or _makes_a_triangle(mine))
        return ("causal_multi_head" if causal or "causal_multi_head" in by_name else held), "of its weights"
    names = [each.name for each in given]
    if _makes_a_triangle(mine) and by_name[:1] == ["dot_product"]:
        return "causal", "it makes a triangular mask"
    if any(books_name(each, ["W_q"]) for each in names) and any(
        re.fullmatch("W_?[vV](al(ue)?)?", each) for each in names
    ):
        signs = {*signs - {"w_v"}, "W_o"}
    if "W_o" in signs and "causal_multi_head" not in by_name and not ({"causal"} & {*by_name}):
        return "multi_head", "it takes weights"
    if "W_o" in signs:
        return "causal_multi_head", "of its name and weights"
    without_weights = inspect.isroutine(mine) and {"keys", "values"} <= inputs
    if by_name[:1] == ["causal_multi_head"] and without_weights and not any(x.lower() == "num_heads" for x in names):
        return "causal", "of its name"  # self-attention whose caller projects
    if by_name:
        return by_name[0], "of its name"
    if not by_sign:
        if isinstance(mine, type):
            _made(mine)  # an error of its constructor says more
        words = "{name}: its name does not tell what it is; give kind, one of {kinds}"
        raise ValueError(said(words, name=name, kinds=", ".join(KINDS)))
    return by_sign[0], "of its arguments"


def _by_weights(mine: Any) -> str:
    """multi_head or additive, where a layer holds the weights of one; else ""."""
    if inspect.isroutine(mine) or type(mine).__name__ == "partial":
        return ""
    try:
        layer = _made(mine) if isinstance(mine, type) else mine
    except (Unmade, TypeError):
        return ""
    try:
        return next((kind for kind in ("multi_head", "additive") if weights_of(layer, kind)), "")
    except Exception:  # what a layer holds may be anything
        return ""


def _made(mine: Any) -> Any:
    """A layer of a class."""
    return make(mine, Making(8, 2, 8, 8, 8))


def _makes_a_triangle(mine: Any) -> bool:
    """Whether it always makes a causal mask, as its code or what its layers keep says; an argument may choose it."""
    call = mine if inspect.isroutine(mine) else getattr(mine, "forward", None) or mine.__call__
    made_by = mine if isinstance(mine, type) else type(mine)
    given = [*parameters(mine), *(constructor_parameters(made_by) if not inspect.isroutine(mine) else ())]
    if any(map(chooses_keys, given)):
        return False
    if {*_names_in(getattr(call, "__code__", None))} & {"tril", "triu", "tri", "tril_indices", "triu_indices"}:
        return True
    if not inspect.isroutine(mine):
        try:
            return holds_triangle(_made(mine) if isinstance(mine, type) else mine)
        except (Unmade, TypeError):
            return False
    return False


def _names_in(code: Any) -> Iterator[str]:
    """The names that a function's code reads, and that of functions within it."""
    if isinstance(code, CodeType):
        yield from code.co_names
        for each in code.co_consts:
            yield from _names_in(each)


_HOLDS_AN_ATTENTION = re.compile("(?!.*(block|layer|coder|model|former)).*(attention|attn)", re.IGNORECASE)


def projected_by(mine: Any) -> str:
    """The class that holds this one, and behind it another that projects its output; "" where there is none.

    Of BERT's three classes of one attention the innermost has queries, keys and values, the next W_o, and the third
    holds both: without W_o the innermost is right.
    """
    own = mine if isinstance(mine, type) else type(mine)
    room = vars(sys.modules.get(own.__module__, sys))
    words = {name: _words_of_init(each) for name, each in room.items() if isinstance(each, type)}
    for name in words:
        if own.__name__ in words[name] and name != own.__name__ and _HOLDS_AN_ATTENTION.match(name):
            beside = words[name] & {*words} - {own.__name__}
            if "Linear" in words[name].union(*(words[each] for each in beside)):
                return name
    return ""


def _words_of_init(made: type) -> set[str]:
    code = getattr(vars(made).get("__init__"), "__code__", None)
    return {*code.co_names} if code else set()
