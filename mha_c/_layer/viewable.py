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
        view = import_module("mha_c.viz").view
        known = inspect.signature(view).parameters
        for name in options:
            if name not in known:
                raise TypeError(f"view() got an unexpected keyword argument {name!r}{did_you_mean(name, known)}")
        return view(self, tokens, **options)

    @refuses_at_the_call
    def playground(self, tokens: Any = None, **options: Any) -> Page:
        """The page that computes attention in any browser, opened at this layer: its chapter "Many heads" shows it.

        It shows the weights of the last call.  With `inputs=` it shows the whole way instead, from the inputs through
        W_q, W_k, W_v, the heads and W_o, computed in the page from the layer's parameters: change the number of heads,
        choose a head or a word, copy the layer as Python.  The other chapters are the lecture's.

        The page itself, playground.html, holds the C core as WebAssembly.  The wheels of a release contain it; a
        package that was built from its sources does not: `make playground` makes it in a clone, and the site has it as
        a download.  It is searched for in the current folder, in its build folder, in that of a clone and in the
        package; if it is elsewhere, give its path as `page=`.

        Parameters
        ----------
        tokens : optional
            The words of queries and keys: see `mha_c.viz.view`.
        **options : Any
            `inputs`, `valid_lens`, `example` and `page`: see `mha_c.viz.playground`.

        Returns
        -------
        Page
            `.save("lecture.html")` writes one file that needs no network; the last line of a notebook cell shows it.

        Raises
        ------
        FileNotFoundError
            If playground.html is not found: the message says how to get it.

        Examples
        --------
        >>> import numpy as np, mha_c
        >>> mha = mha_c.MultiHeadAttention(num_hiddens=8, num_heads=2, dropout=0.1, rng=0)
        >>> x = np.ones((1, 3, 8))
        >>> out = mha(x, x, x)
        >>> mha.playground("the cat sat", inputs=x).save("lecture.html")  # doctest: +SKIP
        """
        return import_module("mha_c.viz").playground(self, tokens, **options)
