"""What a constructor's argument, or a configuration's entry, is by its name; one that answers to any name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..._arguments.names import OTHERS
from ..._recognize import books_name

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
]  # fmt: skip


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
        super().__init__(known)
        vars(self)["asked"] = set()  # the book's names of what was asked for

    def __getitem__(self, name: str) -> Any:
        found = name if name in self else size_of(name)
        guessed = next((ours for words, ours in _WORDS if re.search(words, str(name).lower())), "")
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
    return books_name(name, _NAMES) or ("bias" if plain.endswith("bias") else "")
