"""A table of numbers for each head: what `heads.importance` and `heads.patterns` return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Optional

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ._types import Array


class HeadTable:
    """Names of heads, and for each measure one number a head.

    Attributes
    ----------
    names : list
        The heads, in order.
    scores : dict
        For each measure an array with one number for each head.
    """

    _title = "heads"

    def __init__(self, names: Sequence[Any], scores: Mapping[str, Array]) -> None:
        self.names, self.scores = list(names), dict(scores)

    def chart(self, **options: Any) -> Figure:
        """Draw a bar chart with one panel for each measure.  Needs matplotlib.

        Parameters
        ----------
        **options : Any
            Further arguments of `mha_c.viz.show_bars`, such as `figsize` in inches.

        Returns
        -------
        matplotlib.figure.Figure
            The chart.
        """
        from .viz.bars import show_bars

        one_layer = len({name[0] for name in self.names if isinstance(name, tuple)}) < 2
        labels = [str(name[-1]) if isinstance(name, tuple) and one_layer else label_of(name) for name in self.names]
        return show_bars(self.scores, labels, **options)

    def _checked(self, measure: Optional[str]) -> str:
        if measure is not None and measure not in self.scores:
            raise ValueError(f"method {measure!r} was not measured; there is {', '.join(self.scores)}")
        return next(iter(self.scores)) if measure is None else measure

    def __array__(self, dtype: Any = None, copy: Optional[bool] = None) -> Array:
        return np.array(self.scores[self._checked(None)], dtype=dtype)

    def __repr__(self) -> str:
        labels = [label_of(name) for name in self.names]
        width = max(map(len, ["head", *labels]))
        lines = [self._title, f"{'head':<{width}}" + "".join(f"{measure:>14}" for measure in self.scores)]
        # The table of one measure has bars of characters, not a picture.
        top = np.abs(np.array(self)).max(initial=0) if len(self.scores) == 1 else 0
        for label, *numbers in zip(labels, *self.scores.values()):
            bar = "#" * round(20 * max(0.0, float(numbers[0])) / top) if top > 0 else ""
            lines.append(f"{label:<{width}}{''.join(f'{number:>14.4g}' for number in numbers)}  {bar}".rstrip())
        return "\n".join(lines)


def label_of(name: Any) -> str:
    return str(name) if not isinstance(name, tuple) else f"{name[0]} {name[1]}"
