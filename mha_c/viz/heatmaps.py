"""`show_heatmaps`: d2l's function for NumPy, torch and lists.  matplotlib is imported inside the call only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Optional

import numpy as np

from .._arguments.calls import refuses_at_the_call
from ..errors import ShapeError
from . import labels
from .sources import holds_arrays, to_numpy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .._types import Array

_ONE_PANEL = (2.5, 2.5)  # d2l's default for one panel; figures of several panels are larger
_LABELS_UP_TO = 40  # labels along one axis; more are unreadable in a small panel


@refuses_at_the_call
def show_heatmaps(
    matrices: Any,
    xlabel: str,
    ylabel: str,
    titles: Optional[Sequence[str]] = None,
    figsize: Optional[tuple[float, float]] = _ONE_PANEL,
    cmap: str = "Reds",
    *,
    tokens: Any = None,
) -> Figure:
    """Heat maps of one or several matrices, all on one colour scale.

    >>> import numpy as np
    >>> from mha_c.viz import show_heatmaps
    >>> len(show_heatmaps(np.eye(10).reshape(1, 1, 10, 10), xlabel="Keys", ylabel="Queries").axes)
    2

    Parameters
    ----------
    matrices : array_like (queries, keys), (panels, queries, keys) or (rows, columns, queries, keys)
        Arrays, tensors or lists; d2l takes the last of these shapes.  NaN is left blank.
    xlabel, ylabel : str
        Titles of the axes of keys and queries.
    titles : list of str, optional
        One title per column, as in d2l, or one per panel.
    figsize : tuple of float, optional
        Size of the whole figure in inches.  None: grows with the number of panels.
    cmap : str
        Name of a colormap of matplotlib.
    tokens : optional
        Labels: one sentence for both axes, or a tuple (query tokens, key tokens); a sentence is a list of strings, or a
        string split at its blanks.

    Returns
    -------
    matplotlib.figure.Figure
        One Axes for each panel, and one for the colour bar.

    Raises
    ------
    ShapeError
        If matrices have the wrong rank.
    TypeError
        If matrices are not numeric.
    ValueError
        If titles or tokens do not fit the matrices.
    ImportError
        If matplotlib is missing.

    Notes
    -----
    Unlike d2l's: all panels have one colour scale.  In d2l each has its own, and the colour bar is that of the last.
    Source: d2l 11.1 (10.1 in the first edition).
    """
    panels, shape = _panels(matrices)
    if figsize is None or figsize is _ONE_PANEL:
        figsize = _ONE_PANEL if len(panels) == 1 else (max(2.5, 1.9 * shape[1] + 0.6), max(2.5, 1.9 * shape[0] + 0.3))
    names = None if titles is None else [str(title) for title in titles]
    if names is not None and len(names) not in (shape[1], len(panels)):
        raise ValueError(f"titles has {len(names)} titles for {shape[1]} columns")
    if names is not None and len(names) != len(panels):
        names = names * shape[0]
    figure = new_figure("show_heatmaps", figsize)
    draw(figure, panels, shape, xlabel, ylabel, names, cmap)
    if tokens is not None:
        for ax, panel in zip(figure.axes, panels):
            queries, keys = labels.fit(labels.pair_of(tokens, 0, 1), *panel.shape)
            name_ticks(ax.set_xticks, keys, rotation=90)
            name_ticks(ax.set_yticks, queries)
    return figure


def new_figure(owner: str, figsize: tuple[float, float], managed: bool = True) -> Figure:
    """An empty figure.  If `managed`, pyplot owns the figure and shows it at the end of a notebook cell."""
    try:
        from . import _figure
    except ImportError as missing:
        raise ImportError(f'{owner} needs matplotlib: pip install "mha_c[viz]"') from missing
    return _figure.new(figsize, managed)


def name_ticks(set_ticks: Callable[..., Any], names: Optional[Sequence[str]], **options: Any) -> None:
    """Write the names along an axis, if they are few enough to be readable."""
    if names is not None and len(names) <= _LABELS_UP_TO:  # a $ in a token would start a formula
        set_ticks(range(len(names)), [name.replace("$", r"\$") for name in names], **options)


def _panels(matrices: Any) -> tuple[list[Array], tuple[int, int]]:
    """The panels in reading order, and how many rows and columns they fill."""
    if isinstance(matrices, (list, tuple)) and holds_arrays(matrices):
        rows = [_panels(item)[0] for item in matrices]
        if any(len(row) != len(rows[0]) for row in rows):
            raise ShapeError("matrices: all rows of the list must have the same number of matrices")
        panels = [panel for row in rows for panel in row]
        return panels, ((1, len(rows)) if len(rows[0]) == 1 else (len(rows), len(rows[0])))
    array = to_numpy(matrices, "matrices")
    if array.ndim not in (2, 3, 4) or array.size == 0:
        raise ShapeError(
            "matrices must have shape (queries, keys), (panels, queries, keys) or (rows, columns, queries, keys), "
            f"got {array.shape}"
        )
    panels = list(array.reshape(-1, *array.shape[-2:]))
    n_rows = array.shape[0] if array.ndim == 4 else 1
    return panels, (n_rows, len(panels) // n_rows)


def draw(
    figure: Figure,
    panels: list[Array],
    shape: tuple[int, int],
    xlabel: str,
    ylabel: str,
    titles: Optional[list[str]],
    cmap: str,
) -> None:
    """Draw the panels, row by row, on one colour scale; places after the last panel stay empty."""
    axes = figure.subplots(*shape, sharex=True, sharey=True, squeeze=False).ravel()
    for axis in (axes[0].xaxis, axes[0].yaxis):  # all panels share these axes
        axis.get_major_locator().set_params(integer=True)  # there is no token 2.5
    finite = np.concatenate([panel[np.isfinite(panel)] for panel in panels])
    bottom = float(finite.min(initial=0))  # 0 for weights, the smallest score if below 0
    top = float(finite.max(initial=-np.inf))
    for i, (ax, panel) in enumerate(zip(axes, panels)):
        image = ax.imshow(panel, cmap=cmap, vmin=bottom, vmax=top if top > bottom else bottom + 1)
        if i // shape[1] == shape[0] - 1:
            ax.set_xlabel(xlabel)
        if i % shape[1] == 0:
            ax.set_ylabel(ylabel)
        if titles is not None:
            ax.set_title(titles[i])
    for ax in axes[len(panels) :]:
        ax.axis("off")
    figure.colorbar(image, ax=list(axes), shrink=0.6)
