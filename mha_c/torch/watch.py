"""`watch`: the attention of a model that one does not edit."""

from __future__ import annotations

from typing import Any, Optional

from torch import nn

from .._arguments.calls import refuses_at_the_call
from ._watch import places
from ._watch.names import ModuleNames
from ._watch.seen import Call, Seen

__all__ = ["Call", "Seen", "watch"]


class watch:
    """Record the attention of every call inside `with watch() as seen:`, even if the model keeps no weights.

    >>> import torch, mha_c.torch
    >>> model = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    >>> with mha_c.torch.watch(model) as seen:
    ...     out = model(torch.ones(1, 5, 16))
    >>> seen
    1 calls of attention
       0 <self_attn: MultiheadAttention, batch 1, 2 heads, 5 queries x 5 keys>
    >>> seen.calls[0].weights.shape
    torch.Size([1, 2, 5, 5])

    It sees torch's F.scaled_dot_product_attention, nn.MultiheadAttention and the Transformer layers of torch (which
    leave their fast paths meanwhile), the layers and functions of mha_c.torch, the book's attention classes, and in
    anybody's lines each softmax between two products: of queries with keys, and of the weights with values.

    Parameters
    ----------
    model : torch.nn.Module, optional
        Only calls inside this model are noted.  Default: all calls in this thread; names are those in whichever model
        is called.
    compute : {"core", "torch"}
        "core": calls on the CPU, in float32 or float64 and without dropout, are computed by mha_c, with the same
        results up to rounding and gradients as before.  "torch": all calls are computed as they would be without
        `watch`.

    Returns
    -------
    Seen
        `seen.calls` lists the calls in order.  Each has its module's `name`, sizes, `causal`, `mask`; `weights`, which
        are computed when they are read, unless the model has computed them; and `received()`, `entropy()`, `top(k)`,
        which never need all weights at once.  `seen.view(i, tokens=...)` is the interactive page.

    Raises
    ------
    TypeError
        If model is not a torch module.
    ValueError
        If compute is neither of these.

    Notes
    -----
    A call is noted with copies of its queries and keys, and with its mask: memory grows with Q + K.  Of a model that
    computes its softmax itself, which has all weights at once, a copy of these is kept.  Watches may be
    nested, and errors inside leave nothing behind.  Calls inside torch.func, torch.compile and exporters are not seen.
    In eval mode, on its fast path, nn.TransformerEncoder returns 0 for padding tokens; under `watch` it returns what it
    returns in training mode.
    """

    @refuses_at_the_call
    def __init__(self, model: Optional[nn.Module] = None, *, compute: str = "core") -> None:
        if model is not None and not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch module, got {type(model).__name__}")
        if compute not in ("core", "torch"):
            raise ValueError(f"compute must be 'core' or 'torch', got {compute!r}")
        self.model, self.compute = model, compute
        self._names: Any = None
        self.seen = Seen()

    def __enter__(self) -> Seen:
        if self._names is not None:
            raise RuntimeError("this watch is active already: make another one")
        self.seen = Seen()
        self._names = ModuleNames(self.model)
        places.begin(self, self._names.modules())
        return self.seen

    def __exit__(self, *error: object) -> None:
        places.end(self)
        self._names = None

    def _note(self, frame: Any, kind: str, made_of: Any, causal: Any, mask: Any) -> None:
        name = self._names.of_caller(frame)
        if name is not None:
            self.seen.calls.append(Call(name, kind, made_of, causal, mask))
