"""The only module that imports matplotlib; show_heatmaps and show_bars import it inside the call.

A notebook shows pyplot's open figures when a cell ends, and the value of its last line as well: so a function that
draws and returns a figure is usually seen twice.  `_Heatmaps` is seen once in either place.
"""

from __future__ import annotations

from typing import Any

import matplotlib
from matplotlib.figure import Figure


class _Heatmaps(Figure):
    def _ipython_display_(self) -> None:
        """About to be shown by IPython: then pyplot need not show it again.  Raising means: now go on as usual."""
        if "inline" in matplotlib.get_backend():
            import matplotlib.pyplot as plt

            plt.close(self)
        raise NotImplementedError


def new(figsize: tuple[float, float], managed: bool) -> Figure:
    """An empty figure, pyplot's own or one that nobody shows."""
    if not managed:
        return Figure(figsize=figsize, layout="constrained")
    import matplotlib.pyplot as plt

    options: Any = {"FigureClass": _Heatmaps, "layout": "constrained"}
    return plt.figure(figsize=figsize, **options)
