"""A place in a line of a student's, what may stand there instead, and what is asked of it."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

SYMBOLS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.MatMult: "@", ast.FloorDiv: "//",
           ast.Mod: "%"}  # fmt: skip
WIDTH_OF_HEAD = re.compile(r"d|dk|d_k|dh|dim|hd|width|head_dim|dim_head|d_head|head_size|head_width")


class Edit(NamedTuple):
    """Some columns of a line, and what stands there instead."""

    start: int
    end: int
    text: str
    is_of_name: bool = False  # another name, of which there are many


class Scope(NamedTuple):
    """What a function's lines may read: its variables, what self keeps, and the names of its file."""

    variables: Sequence[str]
    attributes: Sequence[str]
    of_file: Sequence[str]
    counters: Sequence[str] = ()  # the variables of its loops
    unread: Sequence[str] = ()  # its variables, and "self.name" for functions, that nothing in it reads
    texts: Sequence[str] = ()  # short ones


def instead(node: Any, text: str, is_of_name: bool = False) -> Edit:
    return Edit(node.col_offset, end_of(node), text, is_of_name)


def end_of(node: Any) -> int:
    return node.end_col_offset


def number_in(node: Any) -> Any:
    """The whole number that is written there; None."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = number_in(node.operand)
        return None if inner is None else -inner
    return node.value if isinstance(node, ast.Constant) and type(node.value) is int else None


def is_number(node: Any) -> bool:
    """Whether a number, or one of NumPy's, is written there."""
    return isinstance(getattr(node, "operand", node), ast.Constant)


def is_product(node: Any) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult)


def called(node: Any) -> str:
    return str(getattr(node.func, "attr", getattr(node.func, "id", "")))


def bracketed(node: Any) -> str:
    """A text before which, or behind which, something may stand."""
    text = ast.unparse(node)
    return f"({text})" if isinstance(node, (ast.BinOp, ast.UnaryOp)) else text
