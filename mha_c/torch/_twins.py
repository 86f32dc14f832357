"""Docstrings of what mha_c has for arrays and mha_c.torch for tensors: what holds for both is written once, there."""

from __future__ import annotations

import inspect
import re
from typing import Any, Callable, TypeVar

from .._layer.lacks import lacking, lacks

Twin = TypeVar("Twin", bound=Callable[..., Any])
_ORDER = "Parameters", "Attributes", "Returns", "Raises", "Notes", "Examples"
_PLACE = "optional\n    Device and type of the parameters, as in torch's modules."


def twin(original: Any) -> Callable[[Twin], Twin]:
    """What the original lacks, its twin lacks, too.  A docstring is completed by what only the original's has: the
    sections but for examples, the parameters of its signature, what stands between first line and first section."""

    def completed(own: Twin) -> Twin:
        if isinstance(own, type) and lacking(original):
            lacks(**lacking(original))(own)
        if own.__doc__ and original.__doc__:  # not under python -OO
            theirs, mine = _sections(_of_tensors(inspect.cleandoc(original.__doc__))), _sections(own.__doc__)
            names = [name for name in inspect.signature(own).parameters if name not in ("self", "args", "kwargs")]
            known = {**_parameters(theirs), **({"device": _PLACE, "dtype": _PLACE} if "device" in names else {})}
            known.update(_parameters(mine))
            alike: dict[str, list[str]] = {}
            for name in names if known else ():  # a method may say in sentences what it takes
                alike.setdefault(known[name], []).append(name)
            parameters = "\n".join(f"{', '.join(group)} : {text}" for text, group in alike.items())
            told = {**theirs, "Examples": "", **mine, "Parameters": parameters}
            parts = [f"{title}\n{'-' * len(title)}\n{told[title]}" for title in _ORDER if told.get(title)]
            summary, *paragraphs = mine[""].split("\n\n")
            between = [each for each in theirs[""].split("\n\n")[1:] if not each.startswith(">>")]
            own.__doc__ = "\n\n".join((summary, *(paragraphs or between), *parts))
        return own

    return completed


def _sections(doc: str) -> dict[str, str]:
    """{title: text}; what stands before the first title is named ""."""
    head, *others = re.split(r"\n\n(\w+)\n-+\n", inspect.cleandoc(doc))
    return {"": head, **dict(zip(others[::2], others[1::2]))}


def _parameters(sections: dict[str, str]) -> dict[str, str]:
    """{name: its type and text}; names that are explained together have the same."""
    blocks = [block.partition(" : ") for block in re.split(r"\n(?=\S)", sections.get("Parameters", "")) if block]
    return {name: text for names, _, text in blocks for name in names.split(", ")}


def _of_tensors(doc: str) -> str:
    doc = doc.replace(", float32 or float64", "").replace("arrays", "tensors").replace("an array", "a tensor")
    return re.sub(r"\b(array_like|ndarray|array)\b", "Tensor", doc)
