"""Docstrings of what mha_c has for arrays and mha_c.torch for tensors: what holds for both is written once, there."""

from __future__ import annotations

import inspect
import re
from typing import Any, Callable, TypeVar

Twin = TypeVar("Twin", bound=Callable[..., Any])
_ORDER = "Parameters", "Attributes", "Returns", "Raises", "Notes", "Examples"


def twin(original: Any) -> Callable[[Twin], Twin]:
    """Complete a docstring by the sections, and the parameters of its signature, that only the original's has."""

    def completed(own: Twin) -> Twin:
        if own.__doc__ and original.__doc__:  # not under python -OO
            theirs, mine = _sections(_of_tensors(inspect.cleandoc(original.__doc__))), _sections(own.__doc__)
            names = [name for name in inspect.signature(own).parameters if name not in ("self", "args", "kwargs")]
            parameters = {**_parameters(theirs), **_parameters(mine)}
            told = {**theirs, **mine, "Parameters": "\n".join(dict.fromkeys(parameters[name] for name in names))}
            parts = [f"{title}\n{'-' * len(title)}\n{told[title]}" for title in _ORDER if told.get(title)]
            own.__doc__ = "\n\n".join((told[""], *parts))
        return own

    return completed


def _sections(doc: str) -> dict[str, str]:
    """{title: text}; what stands before the first title is named ""."""
    head, *others = re.split(r"\n\n(\w+)\n-+\n", inspect.cleandoc(doc))
    return {"": head, **dict(zip(others[::2], others[1::2]))}


def _parameters(sections: dict[str, str]) -> dict[str, str]:
    """{name: its lines}; names that are explained together have the same lines."""
    blocks = [block for block in re.split(r"\n(?=\S)", sections.get("Parameters", "")) if block]
    return {name: block for block in blocks for name in block.partition(" : ")[0].split(", ")}


def _of_tensors(doc: str) -> str:
    doc = doc.replace(", float32 or float64", "").replace("arrays", "tensors").replace("an array", "a tensor")
    return re.sub(r"\b(array_like|ndarray|array)\b", "Tensor", doc)
