"""The forms in which a student takes the same numbers: arrays or tensors, their axes, one call or one for each item.

`parts` cuts a probe into calls, `joined` puts the outputs together as the book has them.
"""

from __future__ import annotations

import inspect
import itertools
import re
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import FunctionType
from typing import Any, NamedTuple, Optional

import numpy as np

from ..._recognize import books_name, parameters, root_of
from ..._recognize.roles import roles, says
from .masks import MaskWay
from .probes import Inputs

_SEQUENCES = ("X", "queries", "keys", "values")
HEADS = 2  # of a function that takes (batch, heads, steps, features)
LAYOUTS = {  # of each kind, the book's own first
    "masked_softmax": ("batch", "item", "heads"),
    "dot_product": ("batch", "item", "heads"),
    "causal": ("batch", "item", "heads"),
    "window": ("batch", "item", "heads"),
    "grouped": ("grouped", "one group"),
    "rope": ("batch", "item", "heads", "steps, heads", "time first, heads"),
    "additive": ("batch", "one query", "one query, time first", "single_query", "item"),
    "multi_head": ("batch", "item", "time first"),
    "causal_multi_head": ("batch", "item", "time first"),
    "positional_encoding": ("batch", "item"),
    "transpose_qkv": ("batch",),
    "transpose_output": ("batch",),
}
RANKS = {
    "item": 2,
    "grouped": 4,
    "heads": 4,
    "steps, heads": 4,
    "time first, heads": 4,
}  # axes of an input; of other layouts 3
LAYOUTS_SAY = {
    "item": "one item, without a batch axis",
    "one group": "one item, (heads, steps, features), without a batch axis",
    "heads": "(batch, heads, steps, features)",
    "steps, heads": "(batch, steps, heads, features)",
    "time first": "(steps, batch, features)",
    "time first, heads": "(steps, batch, heads, features)",
    "single_query": "one query for each item, (batch, 1, features)",
    "one query": "one query for each item, (batch, features)",
    "one query, time first": "one query for each item, (batch, features), and keys as (steps, batch, features)",
}

STEPS_FIRST = ("time first", "time first, heads")
# Forms that count only where the general one raises: one query for all, batch and steps exchanged.
NARROWER = (*STEPS_FIRST, "single_query", "one query", "one query, time first")
_STEPS = r"(?:T|L|S|seq\w*|sequence\w*|n?steps|num_steps|time\w*|length|src_len|tgt_len)"
_BATCH = r"(?:B|N|b|bs|bsz|batch\w*)"
# What adds to the scores a number of the positions, learned or not: ALiBi, T5, Shaw.
ADDS_POSITIONS = re.compile(
    r"alibi|relative[ _]?(attention_?bias|pos|bias)\w*|rel_?pos\w*|positional?_?bias", re.IGNORECASE
)
_STEPS_FIRST = re.compile(rf"\b{_STEPS}\s*,\s*{_BATCH}\b")
_BATCH_FIRST = re.compile(rf"\b{_BATCH}\s*,\s*{_STEPS}\b|batch_first\s*=\s*True")


_MASK = r"(?!\w*drop)\w*mask\w*"
_MULTIPLIED = re.compile(
    rf"\b1(?:\.0?)? *- *(?:[\w.]+\()?{_MASK}"
    rf"|\b{_MASK}(?:\(\)|\[[^\]]*\]|\.\w+|, float\)|\))* *\* *\(?-? ?\d"
    rf"|\d[\w.+-]*\)? *\* *\(?{_MASK}"
)


class Way(NamedTuple):
    """One way to give a student the same numbers."""

    tensors: bool  # torch's tensors; else NumPy's arrays of float64
    outputs_first: bool = False  # weights that are arguments are (outputs, inputs)
    column: bool = False  # w_v is a matrix
    layout: str = "batch"
    weights: int = 0  # which of the ways to read a layer's weights
    mask: Optional[MaskWay] = None
    batched: bool = False  # positions, or tables of rotations, have a batch axis
    tables: str = ""  # of rotations: a number for each pair; "halves", "pairs": for each feature, laid so
    precision: str = "float32"  # of tensors
    keys: tuple[str, ...] = ()  # of dicts that hold each weight that is an argument, and its bias
    lens_of_items: bool = False  # lengths are (batch,): those of each query raise an error
    one_width: bool = False  # inputs are as wide as the result: others raise an error
    one_length: bool = False  # there are as many queries as keys: others are refused by a line of the student's

    @property
    def dtype(self) -> str:
        """The type of its numbers."""
        return self.precision if self.tensors else "float64"


def doubled(inputs: Inputs) -> Inputs:
    """A probe with HEADS items for each: those of an item become its heads; lengths and masks are those of the item."""
    made = dict(inputs)
    for name, x in inputs.items():
        if name in ("valid_lens", "mask") and isinstance(x, np.ndarray):
            made[name] = np.repeat(x, HEADS, axis=0)
        elif name in _SEQUENCES:
            made[name] = np.stack([x, (0.7 - x[::-1, ::-1]).round(1)], axis=1).reshape(-1, *x.shape[1:])
    return made


def parts(inputs: Inputs, layout: str) -> list[Inputs]:
    """The calls that a probe becomes: inputs as the layout has them; "shape" is (batch, heads, queries, keys)."""
    first: Any = inputs.get("queries", inputs.get("X"))
    batch, heads = len(first), inputs.get("num_heads", 1)
    masks_softmax = "X" in inputs and ("valid_lens" in inputs or "mask" in inputs) and "W_q" not in inputs
    keys = inputs["keys"].shape[-2] if "keys" in inputs else first.shape[-1] if masks_softmax else first.shape[-2]
    shape = (batch, heads, first.shape[-2], keys)
    if layout == "grouped":
        return [{**inputs, "shape": (batch, first.shape[1], *shape[2:])}]
    if layout in ("item", "one group"):
        each = [{name: _item(name, x, i) for name, x in inputs.items()} for i in range(batch)]
        return [{**one, "shape": (1, first.shape[1] if layout == "one group" else heads, *shape[2:])} for one in each]
    if "one query" in layout or layout == "single_query":
        kept = [slice(i, i + 1) if layout == "single_query" else i for i in range(shape[2])]
        each = [{**inputs, "queries": inputs["queries"][:, k], **_of_query(inputs, i)} for i, k in enumerate(kept)]
        turns = [name for name in ("keys", "values") if "time" in layout and name in inputs]
        each = [{**one, **{name: one[name].swapaxes(0, 1) for name in turns}} for one in each]
        return [{**one, "shape": (batch, heads, 1, keys)} for one in each]
    made = {**inputs, "shape": shape}
    if "heads" in layout:
        made["shape"] = (batch // HEADS, HEADS, *shape[2:])
        for name in {"valid_lens", "mask"} & {*inputs}:
            made[name] = inputs[name][::HEADS] if isinstance(inputs[name], np.ndarray) else inputs[name]
    for name in {*_SEQUENCES} & {*inputs}:
        made[name] = _laid(inputs[name], layout)
    return [made]


def _item(name: str, x: Any, i: int) -> Any:
    if name in _SEQUENCES:
        return x[i]
    if name == "valid_lens" and x is not None:
        return int(x[i]) if x.ndim == 1 else x[i]
    return x[i : i + 1] if name == "mask" and isinstance(x, np.ndarray) else x


def _of_query(inputs: Inputs, i: int) -> Inputs:
    """Lengths and masks of one query."""
    found: Inputs = {}
    lens: Any = inputs.get("valid_lens")
    if lens is not None:
        found["valid_lens"] = lens if lens.ndim == 1 else lens[:, i]
    if isinstance(inputs.get("mask"), np.ndarray):
        found["mask"] = inputs["mask"][:, i : i + 1]
    return found


def _laid(x: Any, layout: str) -> Any:
    if layout == "time first":
        return x.swapaxes(0, 1)
    if "heads" in layout:
        x = x.reshape(-1, HEADS, *x.shape[1:])
        return x.transpose(*_HEADS_LAID.get(layout, (0, 1, 2, 3)))
    return x


_HEADS_LAID = {"steps, heads": (0, 2, 1, 3), "time first, heads": (2, 0, 1, 3)}  # axes of (batch, heads, steps, ...)


def joined(outputs: Sequence[Any], layout: str) -> Any:
    """The outputs of a probe's calls as the book has them: arrays, or tensors with their graph."""
    if layout in ("item", "one group"):
        return _stacked(outputs, 0)
    if "one query" in layout or layout == "single_query":
        return _stacked([x[:, 0] if x.ndim == 3 and x.shape[1] == 1 else x for x in outputs], 1)
    x = outputs[0]
    if layout == "time first":
        return x.swapaxes(0, 1) if x.ndim > 1 else x
    if "heads" in layout:
        if layout in _HEADS_LAID and x.ndim == 4:
            x = _moved(x, np.argsort(_HEADS_LAID[layout]).tolist())
        return x.reshape(-1, *x.shape[2:]) if x.ndim == 4 else x
    return x


def _moved(x: Any, axes: Sequence[int]) -> Any:
    return x.transpose(axes) if isinstance(x, np.ndarray) else x.permute(axes)


def _stacked(outputs: Sequence[Any], axis: int) -> Any:
    torch: Any = sys.modules.get("torch")
    if torch is not None and isinstance(outputs[0], torch.Tensor):
        return torch.stack(list(outputs), dim=axis)
    return np.stack(outputs, axis=axis)


def says_steps_first(mine: Any) -> bool:
    """Whether code, or what it documents, has (steps, batch, ...); torch's own layers do, unless they say otherwise."""
    if str(getattr(mine, "__module__", "")).startswith("torch."):
        return getattr(mine, "batch_first", None) is False
    made = mine if isinstance(mine, type) else type(mine)
    bases = [each for each in made.__mro__ if each.__module__.split(".")[0] not in ("torch", "builtins")]
    text = "".join(map(_text_of, [mine] if inspect.isroutine(mine) else bases))
    return bool(_STEPS_FIRST.search(text)) and not _BATCH_FIRST.search(text)


def makes_batch_first(layer: Any) -> bool:
    """Whether the code of a layer makes one of torch's that has the batch first."""
    made = layer if isinstance(layer, type) else type(layer)
    return re.search(r"batch_first\s*=\s*True", _text_of(made)) is not None


def keys_of_weights(function: Any, names: Sequence[str]) -> tuple[str, ...]:
    """The keys of what these arguments hold, if a function takes dicts: linear(x, **c_attn), c_attn["w"]."""
    text, found = _text_of(function), dict[str, None]()
    for name in names:
        found.update(dict.fromkeys(re.findall(rf"\b{name}\[[\"'](\w+)[\"']\]", text)))
        for called in re.findall(rf"\b(\w+)\([^()]*\*\*{name}\b", text):
            theirs = getattr(function, "__globals__", {}).get(called)
            found.update(
                dict.fromkeys([*inspect.signature(theirs).parameters][1:] if inspect.isfunction(theirs) else ())
            )
    return tuple(found)


class HeldByKey(dict):  # type: ignore[type-arg]
    """Weights by name: params["W_q"], params.W_q."""

    __getattr__ = dict.__getitem__


def held_weights(mine: Any) -> dict[str, dict[Any, str]]:
    """{argument: {key: W_q, ..., or b_q, ...}} of those of a function that hold all weights: by names, or by places,
    where one line gives each a name."""
    text, found = _text_of(mine) if inspect.isroutine(mine) else "", dict[str, dict[Any, str]]()
    for name in [each.name for each in parameters(mine)] if text else ():
        read = rf"\b{name}(?:\[[\"'](\w+)[\"']\]|\.([A-Za-z]\w*)\b(?!\())"
        keys: list[Any] = [first or second for first, second in re.findall(read, text)]
        told = {key: books_name(key, ["W_q", "W_k", "W_v", "W_o"]) or bias_of(key) for key in keys}
        listed = re.search(rf"^ *\(?((?:\w+, *)+\w+)\)? *= *{name} *$", text, re.MULTILINE)
        if listed and not told:
            names = re.split(", *", listed[1])
            told = {i: books_name(x, ["W_q", "W_k", "W_v", "W_o"]) or bias_of(x) for i, x in enumerate(names)}
        if len({ours for ours in told.values() if ours[:1] == "W"}) > 1 and all(told.values()):
            found[name] = told
    return found


def bias_of(name: str) -> str:
    """b_q, ... of what others call so: bq, out_bias; "" for all else."""
    word = re.sub("^b(ias)?_?|_b(ias)?$", "", name.lower())
    root = root_of(word) if word != name.lower() else ""
    return f"b_{root}" if root in ("q", "k", "v", "o") else ""


def additive_weights(function: Any, takes: Mapping[str, str]) -> dict[str, str]:
    """{argument: W_q, W_k or w_v} of three by names in no table, as a paper has them: W_a, U_a, v_a.

    What multiplies the queries is W_q, whatever the order; where the code does not tell, the order is the book's.
    """
    needed = [each.name for each in parameters(function) if each.default is each.empty]
    names = [x for x in needed if takes.get(x) not in ("queries", "keys", "values") and not says("valid_lens", x)]
    weights = ["W_q", "W_k", "w_v"]
    if len(names) != 3 or {books_name(each, weights) for each in names} >= {*weights}:
        return {}
    first = {ours: name for name, ours in takes.items() if ours in ("queries", "keys")}
    body = re.sub(r"\A.*?:[ \t]*\n", "", _text_of(function), flags=re.DOTALL)

    def multiplies(pair: tuple[str, str]) -> bool:
        return re.search(r"\b{}\b[^\n@]*(@|,) *{}\b".format(*pair), body) is not None

    inputs = first.get("queries", ""), first.get("keys", "")
    orders = (each for each in itertools.permutations(names) if all(map(multiplies, zip(inputs, each))))
    return dict(zip(next(orders, names), weights))


def has_bool_masks_apart(mine: Any) -> bool:
    """Whether code has lines of its own for masks of True and False, beside those for masks of numbers."""
    text = _text_of(mine if inspect.isroutine(mine) or isinstance(mine, type) else type(mine))
    return re.search(r"\.dtype\s*(==|is)\s*(torch|np)\.bool", text) is not None


def told_roles(mine: Any, wanted: list[str], kind: str) -> dict[str, str]:
    """What each parameter of a call is for, as `roles` tells; what a loop steps by is the size of a chunk, whatever its
    name."""
    held = held_weights(mine) if {"W_q", "W_k", "W_v"} <= {*wanted} else {}
    found = roles(mine, [x for x in wanted if not held or x[:2] != "W_"])
    found.update(dict.fromkeys(held, "weights"))
    if kind in ("causal", "dot_product") and "chunk_size" not in found.values() and inspect.isroutine(mine):
        steps = re.findall(r"\brange\((?:[^()]|\([^()]*\))*, *(\w+) *\)", _text_of(mine))
        found.update((name, "chunk_size") for name in steps[:1] if found.get(name) in ("", "size"))
    return found


def take_pairs(takes: dict[str, str]) -> None:
    """Queries and keys that are turned in one call: both are X."""
    for theirs in takes:
        found = re.fullmatch("x?_?(q|k)(uer(y|ies)|eys?)?(_?(states?|heads?))?", theirs.lower())
        if found:
            takes[theirs] = "X" if theirs == next(iter(takes)) else "second"
    if "second" in takes.values():  # what is told by place comes after both
        rest = [name for name, role in takes.items() if role == "offset" and not re.search("off|start|pos", name)]
        takes.update(dict.fromkeys(rest, ""))


def multiplies_masks(mine: Any) -> bool:
    """Whether code takes a mask for one of 0 and 1: it is subtracted from 1, or a number multiplies it."""
    room = getattr(mine, "__globals__", None) or vars(sys.modules.get(getattr(mine, "__module__", ""), sys))
    read: list[Any] = [mine if inspect.isroutine(mine) or isinstance(mine, type) else type(mine)]
    text = ""
    for each in read:  # and the functions and classes of its file that they call
        own = _text_of(each)
        called = [room.get(name) for name in dict.fromkeys(re.findall(r"\b([A-Za-z_]\w*)\(", own))]
        theirs = [x for x in called if isinstance(x, (type, FunctionType)) and x.__module__ == read[0].__module__]
        read += [x for x in theirs if x not in read]
        text += own
    return bool(_MULTIPLIED.search(text)) and not has_bool_masks_apart(mine)


def added_by_position(mine: Any) -> str:
    """The word of its code, or of what it documents, that says that scores get a number of positions; "" if none."""
    found = ADDS_POSITIONS.search(_text_of(mine if inspect.isroutine(mine) or isinstance(mine, type) else type(mine)))
    return found[0] if found else ""


@lru_cache(maxsize=16)  # Python reads a whole file to find a class in it, and an answer asks several times
def _text_of(mine: Any) -> str:
    try:
        return inspect.getsource(mine)
    except (OSError, TypeError):
        return ""
