"""What each parameter of a call is for: which argument of the book it is, what hides keys, and what says nothing."""

from __future__ import annotations

import inspect
import re
from typing import Any

from .names import books_name, parameters

# In this order: the first that fits.  Names are compared whole, in lower case.
_ROLES = {
    "valid_lens": "valid_?lens?|(valid|seq|src|key|kv)?_?len(gth)?s?|num_valid|n_valid|valid_lengths?",
    "window": "window(_?size|_?len(gth)?)?|w|win|sliding_window|attention_window|local_window|span",
    "chunk_size": "(k_|kv_|key_)?(chunk|block|tile)(_?(size|len(gth)?|k))?|c|b[ck]|step_size",
    "offset": "offset|start|start_pos(ition)?|pos(ition)?_offset|past(_len(gth)?)?|cache_len(gth)?|pos_start|shift"
    "|kv_offset|q_offset|num_past|prefix_len|begin|start_index|first",
    "positions": "positions?|pos|position_ids|token_positions?|pos_ids|input_pos|indices|idx|t|ts|timesteps|steps",
    "cos": "(freqs?_)?cos(ines?)?(_?(cached?|tables?|emb|values?|q|pos))?",
    "sin": "(freqs?_)?sin(es?)?(_?(cached?|tables?|emb|values?|q|pos))?",
    "cis": "(freqs?_?|pos_?)?(cis|complex)",
    "base": "base|theta|(rope|freq|theta|rotary|rope_freq)_?(base|theta)|base_freq(uency)?|max_period",
    "size": "d_?(k|v|model|head|embed|q|qk)|(embed|model|hidden|head|key)_?(dim|size)|n_embd|max_(seq_?)?len(gth)?"
    "|context_(len|length|size)|block_size|num_hiddens",
    "bias": "b(ias)?_(w?[qkvo]|w?qkv|out|proj|query|key|value|attn|c_attn|c_proj)|b[qvo]"
    "|(w?[qkvo]|qkv|out|c_attn|c_proj)_b(ias)?",
    "axis": "dim|axis",
    "mask": "(?!q(uer(y|ies))?_).*mask.*|msk|m|.*(attn|attention|score|position|logit)_?bias|visible|allowed?|allow"
    "|keep|seen|(.*_)?pad(ding)?s?|tril|blocked|hidden_keys|hide|may_see|can_see|yanma|.*掩码|.*遮罩|.*マスク|.*마스크",
}  # fmt: skip
TABLES = "cos", "sin", "cis"  # of rotations
# Of parameters that are True or False, and of attributes.
_FLAG = re.compile("caus|mask|future|autoregress|decod|lower|tri", re.IGNORECASE)
_CAUSAL = re.compile("caus|auto_?regress|(hide|mask)_?(the_)?future", re.IGNORECASE)
_HARMLESS = re.compile(
    "drop|^p$|train|determin|scale|temperature|tau|eps|need|return|output_|average|verbose|debug|show|store|keep_w|save"
    "|^dim$|^axis$|rng|seed|generator|dtype|device|cache|past|bias|max_(seq_)?len|num_heads|^(r|e)?dropout|name$"
    "|^q(uer(y|ies))?_.*mask$|^rope$|rotary|use_|cos|sin|freq|layer_idx|^args$|gqa",
    re.IGNORECASE,
)


def roles(mine: Any, wanted: list[str]) -> dict[str, str]:
    """{parameter of a call: what it is for}.

    One of the wanted names of the book; "valid_lens", "mask" or "causal", wanted or not, since they may hide keys;
    "window", "chunk_size", "offset", "positions", "base"; "cos", "sin", "cis": tables of rotations; "size": a number
    that follows from the inputs, as d_model does; "axis"; "-" for what hides no key, such as dropout; "" for a name
    that says nothing.
    """
    found = parameters(mine)
    if not found:
        return {name: name for name in wanted}
    told = {each.name: _by_name(each, wanted) for each in found}
    for name in set(told.values()) & set(wanted):  # two parameters for one argument: the first has it
        for other in [each for each, role in told.items() if role == name][1:]:
            told[other] = "w_v" if name == "values" and "w_v" in wanted and "w_v" not in told.values() else ""
    for each in found:  # bk stands for a block of keys, too
        if each.name.lower() == "bk" and told.get(each.name[:1] + "qQ"[each.name[1] == "K"]) == "bias":
            told[each.name] = "bias"
    own = [name for name in wanted if name in told.values()]
    needed = [each for each in found if each.default is each.empty]
    if len(needed) == 1 and own == ["keys"] and told[needed[0].name] == "keys":  # context: the only input
        told[needed[0].name] = "queries"
    by_place = [each for each in found if told[each.name] not in ("size", "base")]
    for each, name in zip(by_place, wanted):
        if not told[each.name] and name not in told.values() and not isinstance(each.default, (bool, str)):
            told[each.name] = name
    rest = [each.name for each in needed if not told[each.name]]
    if wanted and rest and wanted[0] not in told.values() and not {"queries", "keys", "values"} & {*told.values()}:
        told[rest[0]] = wanted[0]  # weights and sizes first, the input last
    return told


def arguments(mine: Any) -> dict[str, str]:
    """{parameter of a call: "queries", "keys", "values", "valid_lens", "mask", "cos", "sin", "cis", or ""} of an
    attention.

    A call with queries alone is self-attention; one with queries and keys alone has values that are the keys.  Which
    keys a mask hides, and whether a parameter that says nothing matters, only numbers can tell.
    """
    wanted = ["queries", "keys", "values"]
    told = (*wanted, "valid_lens", "mask", *TABLES)
    found = {name: role if role in told else "" for name, role in roles(mine, wanted).items()}
    if "keys" not in found.values():  # (query, values): one input is both
        found = {name: "keys" if role == "values" else role for name, role in found.items()}
    return found


def is_flag(parameter: inspect.Parameter) -> bool:
    """Whether it is True or False, and its name says that it hides keys, as causal=False does."""
    name = parameter.name.lower().replace("use_", "")
    return isinstance(parameter.default, bool) and bool(_FLAG.search(name)) and not _HARMLESS.search(name)


def trains(mine: Any) -> set[str]:
    """The arguments of a call that say that it trains, and say so unless they are given."""
    names = ("training", "train", "is_training", "is_train")
    return {each.name for each in parameters(mine) if each.name in names and each.default in (True, each.empty)}


def chooses_keys(parameter: inspect.Parameter) -> bool:
    """Whether its name says that it chooses which keys are hidden: a mask, a window, a flag of any default."""
    name = parameter.name.lower().replace("use_", "")
    if _FLAG.search(name) and not _HARMLESS.search(name):
        return True
    return any(re.fullmatch(_ROLES[role], name) and len(name) > 2 for role in ("mask", "window"))


def causal_flag(layer: Any) -> str:
    """The attribute of a layer that is True and says that it hides the future, as causal does; "" for none."""
    held = getattr(layer, "__dict__", {})
    return next((name for name, x in held.items() if x is True and _CAUSAL.search(name)), "")


def says(role: str, name: str) -> bool:
    """Whether a name is one for this role, "valid_lens" or "base", whatever else it may be."""
    return bool(books_name(name, [role]) or re.fullmatch(_ROLES[role], name.lower()))


def _by_name(parameter: inspect.Parameter, wanted: list[str]) -> str:
    """What the name alone tells; "" if it tells nothing."""
    name = parameter.name.lower()
    if isinstance(parameter.default, bool):
        return "causal" if is_flag(parameter) else "-"
    if isinstance(parameter.default, float) and not re.fullmatch(_ROLES["base"], name):  # fill=-1e6, eps=1e-9
        return "-"
    book = books_name(parameter.name, wanted)
    if book:
        return book
    if name == "bias" and "queries" in wanted and "W_q" not in wanted:  # of the scores: there are no weights
        return "mask"
    if isinstance(parameter.default, str):
        return "-"
    if name == "bias" and parameter.default is None and not any(each.startswith("W_") for each in wanted):
        return "mask"  # of scores
    for role, pattern in _ROLES.items():
        if re.fullmatch(pattern, name) and (role in wanted or len(name) > 2 or role in ("mask", "bias")):
            counts = isinstance(parameter.default, int) and role == "positions"
            return "offset" if counts else role
    return "-" if _HARMLESS.search(name) else ""
