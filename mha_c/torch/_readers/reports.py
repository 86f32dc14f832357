"""`report`: what became of the modules of a model that `convert` has looked at."""

from __future__ import annotations

from typing import Any, Optional

from torch import nn

from ..._arguments.calls import refuses_at_the_call
from ..._layer.description import LOOKED
from .._reading.graph import Line
from .modules import Looked, is_read

_WAITS = "waits for its first call"
_OURS = "core"


class Report:
    """What `mha_c.torch.report` gives: it prints as a table; `as_dict()` has the same."""

    def __init__(self, rows: dict[str, dict[str, Any]]) -> None:
        self._rows = rows

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """{name of a module: {"class", "way", "reason", "line", "file", "number", "instead"}}; None where there is no
        such thing.  `way` is "core", "waits" or "left"; a module of the core has a reason where calls of some form are
        left."""
        return {name: dict(row) for name, row in self._rows.items()}

    def __repr__(self) -> str:
        if not self._rows:
            return "no module was looked at: mha_c.torch.convert(model) does"
        names = [name or "(the model)" for name in self._rows]
        width, kinds = max(map(len, names)), max(len(row["class"]) for row in self._rows.values())
        lines = []
        for name, row in zip(names, self._rows.values()):
            lines.append(f"{name:<{width}}  {row['class']:<{kinds}}  {_in_words(row)}")
            if row["instead"]:
                lines.append(f"{'':<{width}}  {'':<{kinds}}  write {row['instead']}")
        return "\n".join(lines)


def _in_words(row: dict[str, Any]) -> str:
    if row["reason"] is None:
        return _WAITS if row["way"] == "waits" else _OURS
    where = f", in line {row['number']}: {row['line']}" if row["line"] else ""
    own = f"its own lines: {row['reason']}{where}"
    before = {"left": "", "waits": "waits for another call; so far ", "core": f"{_OURS}; in calls of another form "}
    return before[row["way"]] + own


@refuses_at_the_call
def report(model: nn.Module) -> Report:
    """Say what became of each attention in a model that `convert` was given.

    >>> import torch, mha_c.torch
    >>> class MyAttention(torch.nn.Module):
    ...     def forward(self, q, k, v):
    ...         return torch.softmax(q @ k.transpose(1, 2), -1) @ v
    >>> model, x = mha_c.torch.convert(MyAttention()), torch.ones(2, 4, 8)
    >>> mha_c.torch.report(model)
    (the model)  MyAttention  waits for its first call

    Parameters
    ----------
    model : nn.Module
        A model, or one module.

    Returns
    -------
    Report
        Prints as a table with a line for each module that is an attention of ours, or whose calls are or were read: its
        name in the model, its class, and "core"; or the reason why its own lines run, with the line of yours that no
        layer of ours has, and what to write instead where the core has it.  `as_dict()` returns the same.

    Raises
    ------
    TypeError
        If model is not a torch module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"report takes a torch module, got {type(model).__name__}")
    rows = {}
    for name, part in model.named_modules():
        looked = LOOKED.get(part)
        if looked is None and (type(part).__module__.startswith("mha_c.") and hasattr(type(part), "_explained")):
            looked = Looked("core")
        if looked is not None and (looked.attends or is_read(part)):
            rows[name] = _row(part, looked)
    return Report(rows)


def _row(module: nn.Module, looked: Looked) -> dict[str, Any]:
    reason = looked.reason
    line: Optional[Line] = None if reason is None else reason.line
    return {
        "class": type(module).__qualname__, "way": looked.way, "reason": None if reason is None else reason.words,
        "line": None if line is None else line.text, "file": None if line is None else line.file,
        "number": None if line is None else line.number, "instead": looked.instead or None,
    }  # fmt: skip
