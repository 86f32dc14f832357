"""Multi-head attention whose sequence is spread over a group: what MultiHeadAttention(sequence_group=...) computes."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ... import _arguments
from .._module import GLOBAL_HOOKS, is_changed
from ._group import ranks_of
from ._sequence import LAYOUTS
from .attention import ring_attention


class SequenceGroup:
    """A process group and a layout, held by a module.

    Copies of a module share it; it cannot be pickled, for a process group belongs to its process.

    Not made by hand.
    """

    def __init__(self, group: Any, layout: Any) -> None:
        ranks_of(group, "MultiHeadAttention(sequence_group=...)")
        self.group, self.layout = group, _arguments.choice(layout, "sequence_layout", LAYOUTS)

    def attend(self, module: Any, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Any, p: float) -> Tensor:
        """This rank's rows of the layer's output.

        Parameters
        ----------
        module : MultiHeadAttention
            The layer.
        queries, keys, values : Tensor (B, N/n, .)
            This rank's pieces.
        valid_lens : Any
            Those of the whole sequence.
        p : float
            Of the dropout.

        Returns
        -------
        Tensor (B, N/n, num_hiddens)
            The rows.

        Raises
        ------
        TypeError
            Where an inner module is replaced or hooked.
        """
        inner = module.attention
        for name, child, kind in (
            ("attention", inner, module._layout.inner[1]), ("attention.dropout", inner.dropout, nn.Dropout)
        ):  # fmt: skip
            if any(GLOBAL_HOOKS) or type(child) is not kind or is_changed(child):
                raise TypeError(
                    f"{name} is a {type(child).__name__} that is replaced or hooked: with sequence_group it is never "
                    f"called, for no rank has all the weights; only a plain {kind.__name__} can be served"
                )
        q, k, v = (
            linear(x).unflatten(2, (module.num_heads, -1)).transpose(1, 2)
            for linear, x in ((module.W_q, queries), (module.W_k, keys), (module.W_v, values))
        )
        context = ring_attention(
            q, k, v, valid_lens, dropout=p, layout=self.layout, group=self.group, empty_rows=module.empty_rows
        )
        out: Tensor = module.W_o(context.transpose(1, 2).flatten(2))
        return out

    def refuse_weights(self) -> None:
        """Say why there are no attention_weights.

        Raises
        ------
        RuntimeError
            Always.
        """
        raise RuntimeError(
            "attention_weights are not kept with sequence_group: no rank has the keys of the whole sequence.  Use a "
            "layer without it on a sequence that one process can hold"
        )

    def __deepcopy__(self, memo: Any) -> SequenceGroup:
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "a MultiHeadAttention with sequence_group cannot be pickled, for its process group belongs to this "
            "process: save its state_dict() and build the layer again"
        )
