"""What a constructor's argument, or a configuration's entry, is by its name; one that answers to any name."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Optional

import numpy as np

from ..._arguments.names import OTHERS
from ..._recognize import CONFIGS, books_name, parameters

_NAMES = [
    "num_heads", "num_kv_heads", "head_dim", "num_hiddens", "query_size", "key_size", "value_size", "max_len",
    "dropout", "bias", "base", "num_layers", "vocab_size",
]  # fmt: skip

# What a word of a name that nobody knows says; the first that fits.
_WORDS = [
    ("(head|key|qk).*(size|dim|width|hid)|(size|dim|width).*head", "head_dim"), ("kv.*head|group", "num_kv_heads"),
    ("head|头", "num_heads"), ("name|type", "name"), ("drop|丢弃|暂退", "dropout"), ("prob|rate|^p_", "rate"),
    ("vocab", "vocab_size"), ("bias", "bias"),
    ("use|flash|enable|caus|is_|norm", "flag"), ("layer|idx|_id$|^id$|depth", "num_layers"),
    ("len|ctx|context|block|seq|pos|max|长", "max_len"),
    ("hid|emb|dim|wid|model|feat|size|chan|unit|state|inner|维|宽|隐", "num_hiddens"),
    ("init|std|range|eps", "small"),
]  # fmt: skip


def _guessed(name: str) -> str:
    """What the words of a name that nobody knows say, or ""."""
    return next((ours for words, ours in _WORDS if re.search(words, name.lower())), "")


def _is_a_width(name: str) -> bool:
    """Whether a name that nobody knows is surely that of a number of features: d_hid, emb_size."""
    says_number = re.search(
        "^(d|n|num|dim)_|(size|dim(ension)?s?|dimensionality|width|features|channels|units)$", name.lower()
    )
    guessed = _guessed(name) or ("num_hiddens" if name.startswith("d_") else "")
    return bool(says_number) and guessed in ("num_hiddens", "head_dim")


class Seed(int):
    """What a constructor draws its weights with: a number, and NumPy's generators, the new and the old one."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        kinds = np.random.default_rng, np.random.RandomState
        made = vars(self).setdefault("made", [kind(int(self)) for kind in kinds])
        for each in made:
            if hasattr(each, name):
                return getattr(each, name)
        raise AttributeError(name)


class _NestedSize(int):
    """A size of a configuration that may be one itself: config.model.width."""

    config: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.config, name)

    def __getitem__(self, name: str) -> Any:
        return self.config[name]


class Config(dict):  # type: ignore[type-arg]
    """A configuration that answers by whatever name a size is asked for: config.n_embd, config["emb_dim"].

    A name that nobody knows is guessed by its words; whether the guess is right, the layer's sizes tell.
    """

    def __init__(self, known: Mapping[str, Any]) -> None:
        # A scale may be sqrt(d), or one over it.
        super().__init__({name: x for name, x in known.items() if name != "scale"})
        vars(self)["asked"] = set()  # the book's names of what was asked for

    def __getitem__(self, name: str) -> Any:
        found = name if name in self else size_of(name)
        guessed = _guessed(str(name))
        if not (found or guessed):
            raise KeyError(name)
        self.asked.add(found or guessed)
        if found:
            return super().__getitem__(found)
        x = super().__getitem__(guessed)
        if type(x) is int:
            x = _NestedSize(x)
            x.config = self
        return x

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def get(self, name: str, default: Any = None) -> Any:
        """The size of this name, or the default."""
        return self[name] if size_of(name) or name in self else default


def size_of(name: str) -> str:
    """The book's name of a constructor's argument, or ""."""
    plain = name.lower()
    for ours, others in OTHERS.items():
        if others.constructor and plain in (ours, *others.constructor.split(), *others.ours.split()):
            return ours
    if "drop" in plain or plain.endswith("_pdrop"):
        return "dropout"
    if re.fullmatch("(random_?)?seed|random_?state|(np_?)?rng|generator", plain):
        return "rng"
    return books_name(name, _NAMES) or ("bias" if plain.endswith("bias") else "")


# ---- constructors ----------------------------------------------------------------------------------------------------


def constructor_parameters(mine: Any) -> list[inspect.Parameter]:
    """Of a class; none where it does not say.  What must be True or False is False where nothing else is said."""
    try:
        every = inspect.signature(mine).parameters.values()
    except (TypeError, ValueError):
        return []
    found = (each for each in every if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD))
    return [each.replace(default=False) if _is_needed_flag(each) else each for each in found]


def _is_needed_flag(parameter: inspect.Parameter) -> bool:
    return parameter.annotation in (bool, "bool") and parameter.default is parameter.empty


def class_of_file(mine: Any, annotation: Any) -> Optional[type]:
    """The class of the student's own file that an annotation names."""
    room = getattr(getattr(mine, "__init__", mine), "__globals__", getattr(mine, "__globals__", {}))
    annotation = room.get(annotation) if isinstance(annotation, str) else annotation
    return annotation if isinstance(annotation, type) and annotation.__module__ == mine.__module__ else None


def own_defaults(mine: Any, annotation: Any) -> dict[str, Any]:
    """What the configuration of a file, as a dataclass is, holds by default by names that say no size."""
    found = class_of_file(mine, annotation)
    held = vars(found) if found is not None else {}
    known = {name: x for name, x in held.items() if isinstance(x, (bool, int, float, str)) and not name.startswith("_")}
    return {name: x for name, x in known.items() if not (size_of(name) or _guessed(name))}


def takes_config(mine: Any) -> bool:
    """Whether the constructor of a class takes its sizes as one object."""
    return any(is_config(mine, each.name) for each in constructor_parameters(mine))


def is_config(mine: Any, name: str) -> bool:
    """Whether an argument of the constructor is such an object, as its name or the code says: settings.width."""
    if name.lower() in CONFIGS:
        return True
    if size_of(name):
        return False
    return bool(re.search(rf"\b{name}(\.[a-z]\w*\b(?!\()|\[['\"])", _text_of(mine.__init__)))


@lru_cache(maxsize=8)  # Python reads a whole file to find a function in it, and changed lines make a layer each
def _text_of(constructor: Any) -> str:
    try:
        return inspect.getsource(constructor)
    except (OSError, TypeError):
        return ""


_LONG = re.compile("len|ctx|context|block|seq|steps|pos_|positions")  # how many steps at most
_OF_INPUTS = ("query_size", "key_size", "value_size")


def names_of(mine: Any, wanted: Sequence[inspect.Parameter], kind: str = "") -> dict[str, str]:
    """What the book calls the arguments of a constructor; "" where nothing tells."""
    names = {parameter.name: size_of(parameter.name) for parameter in wanted}
    names.update(_weights_among([name for name, ours in names.items() if not ours]))
    if "query_size" not in names.values() and list(names.values()).count("num_hiddens") == 2:
        names[next(name for name, ours in names.items() if ours == "num_hiddens")] = "query_size"  # (d_in, d_out)
    if "num_heads" in names.values() and not {"query_size", "head_dim"} & {*names.values()}:  # as in Keras
        for_heads = {"key_size": "head_dim", "value_size": "head_dim"}
        names = {name: for_heads.get(ours, ours) if "dim" in name else ours for name, ours in names.items()}
    if {"num_heads", "num_hiddens"} <= {*names.values()}:  # (n_heads, d_model, d_query, d_value): of the paper
        of_paper = (x for x, ours in names.items() if x[:3] in ("d_q", "d_k", "d_v") and ours in _OF_INPUTS)
        names.update(dict.fromkeys([*of_paper], "head_dim"))
    names.update((name, "max_len") for name in unknown_of(wanted) if not names[name] and _LONG.search(name.lower()))
    unknown = [name for name in unknown_of(wanted) if not names[name]]
    widths = [name for name in unknown if _is_a_width(name) and not is_config(mine, name)]
    if widths and "num_hiddens" not in names.values():
        told = {widths[0]: "query_size", widths[1]: "num_hiddens"} if len(widths) == 2 else {widths[0]: "num_hiddens"}
        names.update(told)  # (input_dimension, output_dimension)
        unknown = [name for name in unknown if name not in told]
    of_table = kind in ("positional_encoding", "rope")  # these have no heads and no scores
    scales = [name for name in unknown if not of_table and _scale_of(mine, name)]
    if scales and "temperature" not in names.values():
        names[scales[0]] = _scale_of(mine, scales[0])
        unknown.remove(scales[0])
    if kind == "additive" and len(unknown) in (2, 3) and len(unknown) == len(unknown_of(wanted)):  # it has no heads
        sizes = [*("query_size", "key_size")[: len(unknown) - 1], "num_hiddens"]
        return {**names, **dict(zip(unknown, sizes))}
    unknown = [name for name in unknown if not _counts_nothing(next(x for x in wanted if x.name == name))]
    alone = "num_hiddens" if of_table else "num_heads"
    if len(unknown) == 1 and len(wanted) > 1 and alone not in names.values() and not is_config(mine, unknown[0]):
        names[unknown[0]] = alone
    return names


def _weights_among(names: Sequence[str]) -> dict[str, str]:
    """{argument: W_q, ..., or b_q, ...} where a constructor takes its weights, and does not make them."""
    found = {name: books_name(name, ["W_q", "W_k", "W_v", "W_o"]) for name in names}
    if not {"W_q", "W_k"} <= {*found.values()}:
        return {}
    biases = ((name, re.fullmatch("b(?:ias)?_?([qkvo])", name.lower())) for name in names)
    found.update((name, f"b_{bias[1]}") for name, bias in biases if bias)
    if "W_o" not in found.values():  # of additive attention
        found.update(dict.fromkeys({"w_v", "v", "v_a", "w_a", "va"} & {*names}, "w_v"))
    return {name: ours for name, ours in found.items() if ours}


_COUNTS_STEPS = re.compile("n|t|l|seq|(n_?|num_?)?(pos(itions?)?|steps)|(n_|num_)tokens", re.IGNORECASE)


def sizes_of_table(function: Any) -> dict[str, str]:
    """{parameter: the size of a table of positions that it is}, of a function that makes one and takes no input."""
    told = {each.name: size_of(each.name) for each in parameters(function)}
    told = {name: "num_hiddens" if size == "query_size" else size for name, size in told.items()}
    first, *others = [*told, ""]
    if not told.get(first, "X") and told.get(others[0]) == "num_hiddens" and _COUNTS_STEPS.fullmatch(first):
        told[first] = "max_len"  # (n, d)
    found = {name: size for name, size in told.items() if size in ("max_len", "num_hiddens")}
    return found if {*found.values()} == {"max_len", "num_hiddens"} and "X" not in told else {}


def _scale_of(mine: Any, name: str) -> str:
    """Whether an argument that a class keeps is what scores are divided by, "temperature", or times which they are
    taken, "scale"; "" for any other."""
    kept = re.search(rf"\bself\.(\w+)(?:\s*:\s*\w+)?\s*=\s*(?:float\()?{name}\b\)?\s*$", _text_of(mine), re.MULTILINE)
    if kept is None:
        return ""
    if re.search("sqrt|root|temp(?!l)", name.lower()):
        return "temperature"
    uses = re.findall(rf".*(?<![/*]) ?([/*]) *self\.{kept[1]}\b.*|.*\bself\.{kept[1]} ([*]) \w.*", _text_of(mine))
    says = re.search("scal|inv|norm|fac|tau|alpha|beta|den|div", name.lower())
    lines = re.findall(rf".*\bself\.{kept[1]}\b.*", _text_of(mine))
    if not uses or not (says or any(re.search("@|matmul|bmm|einsum", each) for each in lines)):
        return ""  # a number of heads is divided by, too
    return "temperature" if uses[0][0] == "/" else "scale"


def _counts_nothing(parameter: inspect.Parameter) -> bool:
    """Whether an argument is no number of heads or features: a factor, or said to be no whole number."""
    return parameter.annotation in (float, "float") or bool(re.search("factor|alpha|beta|eps|ratio", parameter.name))


def unknown_of(wanted: Sequence[inspect.Parameter]) -> list[str]:
    """The arguments that must be given, and whose names no table has."""
    return [each.name for each in wanted if each.default is each.empty and not size_of(each.name)]
