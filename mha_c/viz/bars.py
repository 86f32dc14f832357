"""`show_bars`: columns of numbers as bar charts, side by side.  matplotlib is imported inside the call only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Optional

import numpy as np

from .._arguments.calls import refuses_at_the_call
from .heatmaps import name_ticks, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@refuses_at_the_call
def show_bars(
    columns: Mapping[str, Any],
    labels: Sequence[str],
    xlabel: str = "Head",
    *,
    figsize: Optional[tuple[float, float]] = None,
    color: str = "#b2182b",
) -> Figure:
    """Draw one bar chart for each column, side by side, with the same labels.

    >>> from mha_c.viz import show_bars
    >>> len(show_bars({"ablation": [0.5, 0.1]}, ["0", "1"]).axes)
    1

    Parameters
    ----------
    columns : dict
        {title: values}, one value for each label.
    labels : list of str
        One label for each bar.
    xlabel : str
        Title of the axis with the labels.
    figsize : tuple of float, optional
        Size of the whole figure in inches.  Default: grows with the number of panels and labels.
    color : str
        Colour of the bars.

    Returns
    -------
    matplotlib.figure.Figure
        One Axes for each column.

    Raises
    ------
    ImportError
        If matplotlib is missing; the message says what to install.
    """
    if not isinstance(columns, Mapping):
        raise TypeError(f"columns must be a dict {{title: numbers}}, got {type(columns).__name__}")
    if figsize is None:
        figsize = (max(2.6, 0.22 * len(labels) + 1.0) * len(columns), 2.6)
    figure = new_figure("show_bars", figsize)
    upright = max(map(len, labels), default=0) > 3
    panels = figure.subplots(1, len(columns), squeeze=False)[0]
    for ax, (title, numbers) in zip(panels, columns.items()):
        ax.bar(range(len(labels)), np.asarray(numbers, dtype=float), color=color, width=0.8)
        ax.set_title(title)
        ax.set_xlabel(xlabel)
        ax.spines[["top", "right"]].set_visible(False)
        ax.axhline(0, color="0.6", linewidth=0.8)
        name_ticks(ax.set_xticks, labels, rotation=90 * upright)
    return figure
