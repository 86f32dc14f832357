"""What a user of `watch` gets: the calls of attention in order, and for each its weights, read or summed up later."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Union

import torch
from torch import Tensor

from ..._arguments import scalars
from ..._recognize import THREE_LINES
from ..._summary import NOTHING_SEEN, summarize
from .operands import ModelWeights, Operands

if TYPE_CHECKING:
    from ...viz.page import Page


class Call:
    """One call of attention that `watch` has seen.  Not meant to be constructed directly.

    Attributes
    ----------
    name : str
        The module that called, as in model.named_modules(); "" is the model itself, or no module.
    kind : str
        What was called: "scaled_dot_product_attention", "MultiheadAttention", "MultiHeadAttention", ...
    batch, heads, key_heads, queries, keys : int
        Sizes: the weights are (batch, heads, queries, keys).  Other leading axes are part of the batch.
    causal : bool or str
        False; True: query i sees keys 0..i; or the corner, as in mha_c.functional.
    mask : Tensor or None
        The mask of the call as it was given: bool, or float, which is added to the scores.  Of a MultiheadAttention
        without attn_mask its key_padding_mask (B, K), which torch 2 makes floats of.
    valid_lens : Tensor or None
        The lengths of the call.
    """

    def __init__(self, name: str, kind: str, made_of: Union[Operands, ModelWeights], causal: Any, mask: Any) -> None:
        self.name, self.kind, self.causal, self.mask = name, kind, causal, mask
        self.batch, self.heads, self.queries, self.keys = made_of.shape
        self.key_heads, self.valid_lens = self.heads, None
        if isinstance(made_of, Operands):
            self.key_heads, self.valid_lens = made_of.k.shape[1], made_of.valid_lens
        self._made_of = made_of

    @property
    def weights(self) -> Tensor:
        """The attention weights (B, H, Q, K), before dropout, without gradient; computed again at each reading."""
        return self._tensor(self._made_of.source().weights())

    def received(self) -> Tensor:
        """How much each key receives: the sum of its weights over all queries.

        Returns
        -------
        Tensor (B, H, K)
            Computed in pieces: memory grows with Q + K.
        """
        return self._tensor(summarize(self._made_of.source()).received)

    def entropy(self) -> Tensor:
        """How widely each query looks: the entropy of its weights in bits.

        Returns
        -------
        Tensor (B, H, Q)
            0 for a query that sees one key, log2(n) for n equal weights.  Computed in pieces.
        """
        return self._tensor(summarize(self._made_of.source()).entropy)

    def top(self, k: int = 5) -> tuple[Tensor, Tensor]:
        """The largest weights of each query, and the keys that have them.

        Parameters
        ----------
        k : int
            How many.

        Returns
        -------
        weights : Tensor (B, H, Q, k)
            The largest first; 0 if a query has fewer keys.
        keys : Tensor of int64 (B, H, Q, k)
            Of equal weights the first key comes first; -1 if a query has fewer keys.
        """
        found = summarize(self._made_of.source(), scalars.whole(k, "k"))
        return self._tensor(found.top_weights), self._tensor(found.top_keys)

    def view(self, tokens: Any = None, **options: Any) -> Page:
        """The interactive page of this call's weights: mha_c.viz.view.

        Parameters
        ----------
        tokens : optional
            The words, as in mha_c.viz.view.
        **options : Any
            Other arguments of mha_c.viz.view.

        Returns
        -------
        Page
            A notebook shows it.
        """
        from ...viz import view

        return view(self.weights, tokens, **{"title": self.name or self.kind, **options})

    def playground(self, tokens: Any = None, **options: Any) -> Page:
        """The page that computes attention in any browser, opened at this call's weights.

        Parameters
        ----------
        tokens : optional
            The words, as in mha_c.viz.view.
        **options : Any
            `example` and `page`: see `playground` of `mha_c.MultiHeadAttention`.

        Returns
        -------
        Page
            `.save("lecture.html")` writes one file; a notebook shows it.

        Raises
        ------
        FileNotFoundError
            If `page` names no file.
        """
        from ...viz import playground

        return playground(self.weights, tokens, **options)

    def _tensor(self, array: Any) -> Tensor:
        return torch.from_numpy(array).to(self._made_of[0].device)

    def __repr__(self) -> str:
        heads = f"{self.heads} heads" + (f" ({self.key_heads} key heads)" if self.key_heads != self.heads else "")
        sees = [f"causal={self.causal!r}" if isinstance(self.causal, str) else "causal"] if self.causal else []
        sees += ["mask"] if self.mask is not None else []
        sees += ["lengths"] if self.valid_lens is not None else []
        sizes = f"batch {self.batch}, {heads}, {self.queries} queries x {self.keys} keys"
        return f"<{self.name or '(model)'}: {self.kind}, {', '.join([sizes, *sees])}>"


class Seen:
    """The calls of attention inside a `watch`.  Not meant to be constructed directly.

    Attributes
    ----------
    calls : list of Call
        In order; empty it (seen.calls.clear()) to forget them.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def view(self, call: Any = None, tokens: Any = None, **options: Any) -> Page:
        """The interactive page of one call's weights, or of all calls.

        Parameters
        ----------
        call : int or Call, optional
            Which one.  Default: all of them, as layers of one page.
        tokens : optional
            The words, as in mha_c.viz.view.
        **options : Any
            Other arguments of mha_c.viz.view.

        Returns
        -------
        Page
            A notebook shows it.

        Raises
        ------
        ValueError
            If there is no such call.
        """
        if not self.calls:
            raise ValueError(NOTHING_SEEN)
        if call is None and len(self.calls) > 1:
            from ...viz import view

            names = [f"{i}: {one.name or one.kind}" for i, one in enumerate(self.calls)]
            options = {"layer_names": names, "title": "Attention seen", **options}
            return view([one.weights for one in self.calls], tokens, **options)
        return self._call(call).view(tokens, **options)

    def playground(self, call: Any = None, tokens: Any = None, **options: Any) -> Page:
        """The page that computes attention in any browser, opened at one call's weights.

        Parameters
        ----------
        call : int or Call, optional
            Which one.  Default: the first.
        tokens : optional
            The words, as in mha_c.viz.view.
        **options : Any
            As in `playground` of a call.

        Returns
        -------
        Page
            `.save("lecture.html")` writes one file; a notebook shows it.

        Raises
        ------
        ValueError
            If there is no such call.
        FileNotFoundError
            If `page` names no file.
        """
        if not self.calls:
            raise ValueError(NOTHING_SEEN)
        return self._call(call).playground(tokens, **options)

    def _call(self, call: Any) -> Call:
        if isinstance(call, Call):
            return call
        number = scalars.whole(call or 0, "call", least=-len(self.calls))
        if number >= len(self.calls):
            raise ValueError(f"call must be below {len(self.calls)}, the number of calls seen, got {number}")
        return self.calls[number]

    def __len__(self) -> int:
        return len(self.calls)

    def __iter__(self) -> Iterator[Call]:
        return iter(self.calls)

    def __getitem__(self, number: int) -> Call:
        if not self.calls:
            raise IndexError(NOTHING_SEEN)
        return self.calls[number]

    def __repr__(self) -> str:
        if not self.calls:
            return f"{NOTHING_SEEN}\n{THREE_LINES}"
        lines = [f"{len(self.calls)} calls of attention", *(f"{i:4} {call!r}" for i, call in enumerate(self.calls))]
        return "\n".join(lines)
