"""The Python of a file as its parts: a file of Python is one, a notebook has one for each cell of code."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Union

from ..words.sentences import said

# A line that is for the notebook alone: %matplotlib inline, !pip install d2l, files = !ls, help?.
_FOR_THE_NOTEBOOK = re.compile(r"^([ \t]*)(?:(?:\w+[ \t]*=[ \t]*)?[%!].*|\?.*|[\w.]+\?\??[ \t]*)$", re.MULTILINE)
_CELL_OF_PYTHON = re.compile(r"%%(time|timeit|capture|prun)\b")


def parts(path: Path) -> list[tuple[str, Union[str, bytes]]]:
    """[(its name in tracebacks, its text)], lines where the file has them."""
    if path.suffix != ".ipynb":
        return [(str(path), path.read_bytes())]
    try:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    except (ValueError, KeyError, TypeError):
        words = "{name} is no notebook of format 4: open it in Jupyter, and save it again"
        raise ValueError(said(words, name=path.name)) from None
    of_code = [(i, "".join(cell["source"])) for i, cell in enumerate(cells, 1) if cell["cell_type"] == "code"]
    return [(f"{path}, cell {i}", _python(text)) for i, text in of_code]


def _python(text: str) -> str:
    """A cell without what is for the notebook alone; as it is, if it is Python already."""
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        if text.lstrip().startswith("%%") and not _CELL_OF_PYTHON.match(text.lstrip()):
            return ""  # of another language
        return _FOR_THE_NOTEBOOK.sub(r"\1pass", text)
    return text


def is_part(path: Path, name: str) -> bool:
    """Whether a traceback's name is that of the file or of one of its cells."""
    return name == str(path) or name.startswith(f"{path}, cell ")
