"""docs/promises.md as data: each promise, and the tests that it names."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAME = re.compile(r"`(\w+\.(?:py|c))(?:::(\w+))?`")


def rows():
    """[(promise, [(file, test or "")])] of all tables but those of commands."""
    text = (ROOT / "docs" / "promises.md").read_text(encoding="utf-8")
    found = re.findall(r"^\| (.+) \| (.+) \|$", text, re.MULTILINE)
    return [(promise, NAME.findall(held)) for promise, held in found
            if promise not in ("promise", "command") and not promise.startswith("`make")]  # fmt: skip


@cache
def functions_of(file):
    """Names of the functions of the one file of tests/ that is called so; an empty set if there is none."""
    paths = list((ROOT / "tests").rglob(file))
    if len(paths) != 1:
        return set()
    text = paths[0].read_text(encoding="utf-8")
    if file.endswith(".c"):
        return set(re.findall(r"^(\w+)\(", text, re.MULTILINE))
    return {node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}


def smoke():
    """(file, test) of the first test in Python of each promise."""
    firsts = ([pair for pair in named if pair[0].endswith(".py") and pair[1]][:1] for _, named in rows())
    return [pair for first in firsts for pair in first]
