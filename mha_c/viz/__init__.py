"""Seeing attention weights: `show_heatmaps` (d2l's, static, needs matplotlib) and `view` (a page to explore).

    view(mha, tokens="the cat sat on the mat")            # last expression of a notebook cell
    view(weights, tokens=(target, source)).save("a.html")  # one file, opens from the disk
    playground(mha, inputs=x).save("lecture.html")         # the page that computes, opened at this layer

Neither imports torch; both take its tensors.
"""

from .bars import show_bars
from .heatmaps import show_heatmaps
from .interactive import view
from .own_layer import playground
from .page import Page

__all__ = ["Page", "playground", "show_bars", "show_heatmaps", "view"]
__dir__ = __all__.copy  # what dir() and completion show
