"""What a layer does not have, and why: one record for each class, which the words themselves raise and the page "What
each layer can do" prints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Callable, TypeVar

Kind = TypeVar("Kind", bound=type)


class Lacking:
    """A method that a class of layers does not have: reading it raises the AttributeError that says why."""

    def __init__(self, word: str) -> None:
        self._word = word
        self.__doc__ = "Not of this layer."  # what help() prints below the name

    def __get__(self, layer: Any, kind: type) -> Any:
        raise AttributeError(why_not(kind, self._word))


def lacks(**words: str) -> Callable[[Kind], Kind]:
    """Decorates a class of layers: {word: why it means nothing there}.  A word is a method, or a function that takes a
    layer, which asks `check_has`."""

    def noted(kind: Any) -> Any:
        kind._lacks = {**lacking(kind), **words}
        for word in words:
            if word in METHODS:
                setattr(kind, word, Lacking(word))
        return kind

    return noted


METHODS = "new_cache", "project"
ONE_HEAD = dict.fromkeys(("importance", "prune"), "it has one head, which is all of it")


def lacking(kind: type) -> Mapping[str, str]:
    return getattr(kind, "_lacks", {})


def why_not(kind: type, word: str) -> str:
    return f"{kind.__name__} has no {word}: {lacking(kind)[word]}"


def check_has(layer: Any, word: str) -> None:
    """TypeError if the layer's class lacks the word."""
    if word in lacking(type(layer)):
        raise TypeError(why_not(type(layer), word))
