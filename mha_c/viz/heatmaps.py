"""`show_heatmaps`: d2l's function for NumPy, torch and lists.  matplotlib is imported inside the call only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Optional

import numpy as np
from numpy.typing import NDArray

from mha_c.errors import ShapeError
from mha_c.viz import labels
from mha_c.viz.sources import holds_arrays, to_numpy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Array = NDArray[Any]

_ONE_PANEL = (2.5, 2.5)  # d2l's default; left at it, a figure of several panels grows
_LABELS_UP_TO = 40  # tokens along one axis; more cannot be read in a small panel


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

    Parameters
    ----------
    matrices : array_like (queries, keys), (panels, queries, keys) or (rows, columns, queries, keys)
        The last as in d2l; NumPy, torch or lists.  NaN is left blank.
    xlabel, ylabel : str
        What keys and queries are.
    titles : list of str, optional
        One per column, as in d2l, or one per panel.
    figsize : tuple of float, optional
        Inches of the whole figure; where it is None, the figure grows with the number of panels.
    cmap : str
        Matplotlib's name of the colours.
    tokens : optional
        Labels: one sentence for both axes, or a tuple (query tokens, key tokens); a sentence is a list of strings, or a
        string split at its blanks.

    Returns
    -------
    matplotlib.figure.Figure
        One axes a panel, and the colour bar.

    Raises
    ------
    ShapeError
        Where matrices have another rank.
    TypeError
        Where they are no numbers.
    ValueError
        Where titles or tokens do not fit them.
    ImportError
        Where matplotlib is missing.

    Notes
    -----
    d2l: there each panel has its own colour scale while the one colour bar belongs to the last; here they share it.

    Examples
    --------
    >>> import numpy as np
    >>> from mha_c.viz import show_heatmaps
    >>> len(show_heatmaps(np.eye(10).reshape(1, 1, 10, 10), xlabel="Keys", ylabel="Queries").axes)
    2
    """
    grid, shape = _grid(matrices)
    if figsize is None or figsize is _ONE_PANEL:
        figsize = (max(2.5, 1.9 * shape[1] + 0.6), max(2.5, 1.9 * shape[0] + 0.3)) if len(grid) > 1 else _ONE_PANEL
    per_panel = None if titles is None else [str(title) for title in titles]
    if per_panel is not None and len(per_panel) not in (shape[1], len(grid)):
        raise ValueError(f"titles: {len(per_panel)} titles for {shape[1]} columns")
    if per_panel is not None and len(per_panel) != len(grid):
        per_panel = per_panel * shape[0]
    return draw(grid, shape, xlabel, ylabel, per_panel, figsize, cmap, tokens, managed=True)


def _grid(matrices: Any) -> tuple[list[Optional[Array]], tuple[int, int]]:
    """The panels in reading order, None for a gap, and how many rows and columns they fill."""
    if isinstance(matrices, (list, tuple)) and holds_arrays(matrices):
        arrays = [_grid(item)[0] for item in matrices]
        if any(len(row) != len(arrays[0]) for row in arrays):
            raise ShapeError("matrices: the rows of the list hold different numbers of matrices")
        if len(arrays[0]) == 1:
            return [row[0] for row in arrays], (1, len(arrays))
        return [panel for row in arrays for panel in row], (len(arrays), len(arrays[0]))
    array = to_numpy(matrices, "matrices")
    if array.ndim not in (2, 3, 4) or array.size == 0:
        raise ShapeError(
            "matrices: shape (queries, keys), (panels, queries, keys) or (rows, columns, queries, keys) expected, "
            f"got {array.shape}"
        )
    panels = array.reshape(-1, array.shape[-2], array.shape[-1])
    rows = array.shape[0] if array.ndim == 4 else 1
    return list(panels), (rows, len(panels) // rows)


def draw(
    grid: list[Optional[Array]],
    shape: tuple[int, int],
    xlabel: str,
    ylabel: str,
    titles: Optional[list[str]],
    figsize: Optional[tuple[float, float]],
    cmap: str,
    tokens: Any,
    managed: bool = False,
) -> Figure:
    """The figure itself; `managed` hands it to pyplot, which shows it at the end of a notebook cell."""
    try:
        from mha_c.viz import _figure
    except ImportError as missing:
        raise ImportError('show_heatmaps needs matplotlib: pip install "mha_c[viz]"') from missing
    figsize = figsize or (1.9 * shape[1] + 0.6, 1.9 * shape[0] + 0.3)
    figure = _figure.new(figsize, managed)
    axes = figure.subplots(*shape, sharex=True, sharey=True, squeeze=False).ravel()
    for axis in (axes[0].xaxis, axes[0].yaxis):  # which all panels share
        axis.get_major_locator().set_params(integer=True)  # there is no token 2.5
    finite = np.concatenate([panel[np.isfinite(panel)] for panel in grid if panel is not None] or [np.zeros(0)])
    top = float(finite.max(initial=-np.inf)) if finite.size else 1.0
    bottom = min(0.0, float(finite.min())) if finite.size else 0.0  # weights start at 0, scores where they start
    image = None
    for i, (ax, panel) in enumerate(zip(axes, grid)):
        if panel is None:
            ax.axis("off")
            continue
        image = ax.imshow(panel, cmap=cmap, vmin=bottom, vmax=top if top > bottom else bottom + 1)
        if i // shape[1] == shape[0] - 1:
            ax.set_xlabel(xlabel)
        if i % shape[1] == 0:
            ax.set_ylabel(ylabel)
        if titles is not None:
            ax.set_title(titles[i])
        if tokens is not None:
            _label(ax, tokens, panel.shape)
    if image is not None:
        figure.colorbar(image, ax=list(axes), shrink=0.6)
    return figure


def _label(ax: Any, tokens: Any, size: tuple[int, ...]) -> None:
    queries, keys = labels.fit(labels.pair_of(tokens, 0, 1), size[0], size[1])
    # a token may hold a $, which would start a formula
    if keys is not None and len(keys) <= _LABELS_UP_TO:
        ax.set_xticks(range(len(keys)), [key.replace("$", r"\$") for key in keys], rotation=90)
    if queries is not None and len(queries) <= _LABELS_UP_TO:
        ax.set_yticks(range(len(queries)), [query.replace("$", r"\$") for query in queries])
