"""Rotary positions, as readers write them."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

from .graph import Line, Node, Value


class Turn(NamedTuple):
    """Rotary positions on queries or keys.

    pairs     "halves": feature i turns with i + D/2 (half of the turned features); "neighbours": 2i with 2i + 1
    cos, sin  the Values of the tables that were multiplied in, at the shape at which they were
    features  how many features turn, from the front; the others stay
    """

    pairs: str
    cos: Value
    sin: Value
    features: int
    line: Line


def turned(views: Any, tables: Any, source: Value) -> Optional[tuple[Turn, Value, list[Node]]]:
    """(the turn, the value that is turned, nodes) of a value that was turned; None of any other."""
    return None
