"""The cosines and sines of a call by the core, from the tables by which the reader's lines turn queries and keys."""

from __future__ import annotations

import math
from itertools import groupby
from typing import Any, Callable, Optional

import torch
from torch import Tensor

from .._reading.graph import Value
from .._reading.turns import Column, Turn
from .layer import CoreCall
from .left import Left, LeftThisTime
from .replaying import Replay


class Angles:
    """How the angles of a CoreCall are made of the tensors of a call.  Left where the core has none like these.

    names   of the inputs, in the order of a call's tensors
    """

    def __init__(self, layer: CoreCall, names: tuple[str, ...]) -> None:
        turn: Any = layer.turn
        self.line, self.names = turn.line, names
        self.flat = {table: _Flat(table, turn) for table in turn.tables()}
        self.made = [
            [_gathered([pair and pair[i] for pair in pairs], rest) for i in (0, 1)]
            for pairs, rest in ((turn.cosines, 1.0), (turn.sines, 0.0))
        ]
        self.same = [all(pair is None or pair[0] == pair[1] for pair in pairs) for pairs in (turn.cosines, turn.sines)]

    def of(self, tensors: Any, sizes: Any, inputs: Any) -> Any:
        """(cosines, sines) as the core takes them; LeftThisTime where a call's tables are none.

        sizes    of the axes of the call's tensors
        inputs   its queries and keys in the core's order of axes
        """
        replay, (q, k) = Replay(dict(zip(self.names, tensors)), sizes), inputs[:2]
        tables = {table: flat.of(replay.value(table), *q.shape[:2]) for table, flat in self.flat.items()}
        if q.shape[1] != k.shape[1] or any(x is None for x in tables.values()):
            raise LeftThisTime("its tables of angles have other sizes than its inputs, or a gradient", self.line)
        found = []
        with torch.no_grad():
            for (one, other), same in zip(self.made, self.same):
                made = one(tables)
                if made.dtype is not q.dtype or not (same or torch.equal(made, other(tables))):
                    raise LeftThisTime("its tables turn the two features of a pair by two angles", self.line)
                found.append(made.numpy())
        return tuple(found)


class _Flat:
    """A table as (positions, columns), or (items, positions, columns)."""

    def __init__(self, table: Value, turn: Turn) -> None:
        pairs = [pair for pair in (*turn.cosines, *turn.sines) if pair is not None]
        one = next(place for pair in pairs for place in pair if place.table is table)
        front = len(table.shape) - min(one.features, len(table.shape))
        self.columns = math.prod(int(n) for n in table.shape[front:])
        letters = turn.axes[len(turn.axes) - front :]
        self.axes = one.long
        if [letters[i] for i in one.long] not in (["q"], ["b", "q"], ["k"], ["b", "k"]):
            raise Left("its angles hang on more than items and positions", turn.line)

    def of(self, table: Tensor, items: int, rows: int) -> Optional[Tensor]:
        """None of a table of other sizes, or with a gradient."""
        shape = (items, rows)[2 - len(self.axes) :]
        if table.requires_grad or tuple([table.shape[i] for i in self.axes]) != shape:
            return None
        return table.reshape(*shape, self.columns) if table.numel() == math.prod((*shape, self.columns)) else None


def _gathered(places: list[Optional[Column]], rest: float) -> Callable[[Any], Tensor]:
    """What gives a number of each place for each position, `rest` where there is none, of flat tables."""
    runs: list[Any] = []
    for key, group in groupby(places, lambda place: place and (place.table, place.part)):
        columns: Any = [0 if place is None else place.column for place in group]
        if key is not None:
            step = columns[1] - columns[0] if len(columns) > 1 else 1
            if step > 0 and columns == [*range(columns[0], columns[-1] + 1, step)]:
                columns = slice(columns[0], columns[-1] + 1, step)
        runs.append((key, columns))

    def made(tables: Any) -> Tensor:
        pieces = []
        like = next(iter(tables.values()))
        like = like.real if like.is_complex() else like
        for key, columns in runs:
            if key is None:
                pieces.append(like.new_full((*like.shape[:-1], len(columns)), rest))
                continue
            table, part = key
            numbers = getattr(tables[table], part) if part else tables[table]
            pieces.append(numbers[..., columns])
        return torch.cat(pieces, -1)  # a copy, also of one: tables may change before gradients are computed

    return made
