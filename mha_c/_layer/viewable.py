"""Viewable: gives layers and torch modules with attention_weights a method that shows them as an interactive page."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .._arguments.calls import refuses_at_the_call
from .._arguments.names import did_you_mean

if TYPE_CHECKING:
    from ..viz.page import Page


class Viewable:
    """Gives `view()` and `playground()` to a class with attention_weights.

    List it last among the bases: the first base of a torch module whose class changes (`convert`) must be nn.Module.
    """

    __slots__ = ()

    @refuses_at_the_call
    def view(self, tokens: Any = None, **options: Any) -> Page:
        """Show the weights of the last call as a page: the last line of a notebook cell, or `.save("page.html")`.

        `tokens` are the words of queries and keys; `options` are those of `mha_c.viz.view`, which says more.
        """
        view = import_module("mha_c.viz").view
        known = inspect.signature(view).parameters
        for name in options:
            if name not in known:
                raise TypeError(f"view() got an unexpected keyword argument {name!r}{did_you_mean(name, known)}")
        return view(self, tokens, **options)

    @refuses_at_the_call
    def playground(self, tokens: Any = None, **options: Any) -> Page:
        """Open the page that computes in any browser at this layer: `.save("lecture.html")` writes one file.

        `tokens` are the words; `options` are those of `mha_c.viz.playground`, which says where the page comes from.
        """
        return import_module("mha_c.viz").playground(self, tokens, **options)
