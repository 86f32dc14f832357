"""What people call things: which of the book's arguments a parameter is, which of its weights an attribute is."""

from __future__ import annotations

import inspect
import re
from typing import Any

from .._arguments.names import OTHERS

HEADS = ("num_heads", *OTHERS["num_heads"].anywhere.split())
CONFIGS = "config", "cfg", "conf", "args", "hparams", "configuration", "params", "opt"
_MORE_HEADS = re.compile("(n|num|number|count)?_?(of_)?((attn|attention|self|q|query)_)?(h|heads?)(_?(num|count))?")
_WRITTEN_IN_C = {"scaled_dot_product_attention": ("query", "key", "value", "attn_mask")}  # no signature tells these

# Words of a weight's name that say nothing: W_q, fc_q, linear_q, q_lin, to_q, w_qs, query_projection are one.
_FILL = (
    "w wt weight weights fc lin linear proj projection project to layer dense net map attn attention self mat matrix "
    "transform in u mapping mappings maps projector conv"
).split()
_CHINESE_FILL = re.compile("线性|投影|映射|变换|权重|矩阵|层")  # the same in words that nothing separates
_ROOTS = {
    "q": "q qs wq wqs uq query queries toqueries toquery toq 查询", "k": "k ks wk wks uk key keys tokeys tokey tok 键",
    "v": "v vs wv wvs uv value values val tovalues tovalue tov 值",
    "o": "o wo w0 out outs output outputs concat final unify unifyheads combine merge joint 输出",
    "qkv": "qkv wqkv", "kv": "kv wkv",
}  # fmt: skip
_ROOT = {word: root for root, words in _ROOTS.items() for word in words.split()}
_WHOLE = {  # names that are made of such words alone, or stand in for a name
    "in_proj": "qkv", "c_attn": "qkv", "query_key_value": "qkv", "c_proj": "o", "proj": "o", "projection": "o",
    "fc": "o", "linear": "o", "dense": "o", "w_0": "o", "w": "o", "fc_o": "o", "last": "o",
}  # fmt: skip


def books_name(name: str, wanted: list[str]) -> str:
    """Which of the wanted names of the book `name` stands for, or ""."""
    for each in wanted:
        if name.lower() == each.lower() or (each in OTHERS and name.lower() in OTHERS[each].anywhere.lower().split()):
            return each
        if each.startswith("W_") and root_of(name) == each[2:]:
            return each
    return ""


def heads_of(layer: Any) -> int:
    """The number of heads that a layer's attributes, or those of its configuration, say; 0 where they say none."""
    held = {name: x for name, x in getattr(layer, "__dict__", {}).items() if _counts(x)}
    found: list[Any] = [x for name in HEADS for x in [getattr(layer, name, None)] if _counts(x)]
    spelt = {re.sub("(?<=[a-z])(?=[A-Z])", "_", name).lower().strip("_"): x for name, x in held.items()}
    found += [x for name, x in spelt.items() if _MORE_HEADS.fullmatch(name)]
    held_by = [getattr(layer, name, None) for name in CONFIGS]
    configs: list[Any] = [each if type(each) is dict else getattr(each, "__dict__", {}) for each in held_by]
    found += [each[name] for each in configs for name in HEADS if _counts(each.get(name))]
    return int(found[0]) if found else 0


def _counts(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and x > 0


def root_of(name: str) -> str:
    """What a weight of this name makes: "q", "k", "v", "o", "qkv", "kv", or "" where the name does not say."""
    name = re.sub("(?<=[a-z])(?=[A-Z])", "_", name).lower().strip("_")
    name = name[: -len("_weight")] if name.endswith("_weight") else name
    if name in _WHOLE:
        return _WHOLE[name]
    words = _CHINESE_FILL.sub("", "".join(word for word in name.split("_") if word not in _FILL))
    several = "".join(sorted(words, key="qkv".find)) if len(words) > 1 and {*words} <= {*"qkv"} else ""
    return _ROOT.get(several or words, "")  # kqv, vk: in another order


def parameters(mine: Any) -> list[inspect.Parameter]:
    """Of a call; none where it is written in C and not known, or takes any number of them."""
    call = mine if inspect.isroutine(mine) else getattr(mine, "forward", None) or mine.__call__
    try:
        found = list(inspect.signature(call).parameters.values())[isinstance(mine, type) :]  # without self
    except (TypeError, ValueError):
        known = _WRITTEN_IN_C.get(getattr(mine, "__name__", ""), ())
        default = {"attn_mask": None}
        return [
            inspect.Parameter(
                name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default.get(name, inspect.Parameter.empty)
            )
            for name in known
        ]
    named = [p for p in found if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return named if any(p.kind is not p.KEYWORD_ONLY for p in named) or len(named) == len(found) else []
