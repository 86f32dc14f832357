"""Viewable: gives layers and torch modules with attention_weights a method that shows them as an interactive page."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..viz.page import Page


class Viewable:
    """Gives `view()` to a class with attention_weights.

    List it last among the bases: the first base of a torch module whose class changes (`convert`) must be nn.Module.
    """

    __slots__ = ()

    def view(self, tokens: Any = None, **options: Any) -> Page:
        """The weights of the last call as an interactive page; a decoder's page has one row for each step.

        The last expression of a notebook cell shows it; `.save("page.html")` writes one file that needs no network.

        Parameters
        ----------
        tokens : optional
            The words of queries and keys: see `mha_c.viz.view`.
        **options : Any
            Further arguments of `mha_c.viz.view`.

        Returns
        -------
        Page
            See `mha_c.viz.Page`.

        Examples
        --------
        >>> import numpy as np, mha_c
        >>> mha = mha_c.MultiHeadAttention(num_hiddens=8, num_heads=2, dropout=0.1, rng=0)
        >>> x = np.ones((1, 3, 8))
        >>> out = mha(x, x, x)
        >>> print(mha.view(tokens="the cat sat").text.splitlines()[0])
        MultiHeadAttention: 2 heads, 3 queries x 3 keys
        """
        return import_module("mha_c.viz").view(self, tokens, **options)
