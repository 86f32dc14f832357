"""The only module that imports matplotlib; show_heatmaps and show_bars import it inside the call.

A notebook shows pyplot's open figures when a cell ends, and also the value of the cell's last line.  So a figure that a
function draws and returns is usually shown twice.  `_Heatmaps` is shown once.
"""

from __future__ import annotations

from typing import Any

import matplotlib
from matplotlib.figure import Figure


class _Heatmaps(Figure):
    def _ipython_display_(self) -> None:
        """IPython calls this before it shows the figure: pyplot must not show it again.  Raising: IPython goes on."""
        if "inline" in matplotlib.get_backend():
            import matplotlib.pyplot as plt

            plt.close(self)
        raise NotImplementedError


def new(figsize: tuple[float, float], managed: bool) -> Figure:
    """An empty figure, managed by pyplot or not: pyplot shows those that it manages."""
    if not managed:
        return Figure(figsize=figsize, layout="constrained")
    import matplotlib.pyplot as plt

    options: Any = {"FigureClass": _Heatmaps, "layout": "constrained"}
    return plt.figure(figsize=figsize, **options)
