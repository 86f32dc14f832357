"""What `_core.layer_forward` keeps of a call, and how to compute the attention weights of that call from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, NamedTuple

import numpy as np

from .._core import attention_weights, isa

if TYPE_CHECKING:
    from .._types import Array


class Kept(NamedTuple):
    """The tuple of `_core.layer_forward`, with names: csrc/python/layer_call.h defines its order.

    A pickle of a layer holds one, and may hold anything: the core checks sizes, and all that does not fit is a
    ValueError of `saved_weights`.
    """

    isa: Any = None  # the name of the instruction set
    weights: Any = None  # (B, H, Q, K), or None; then the next five determine them
    q: Any = None  # (B, Q, features)
    k: Any = None  # (B, K, features)
    w_v: Any = None  # or None
    row_max: Any = None  # (B, H, Q)
    row_sum: Any = None
    lengths: Any = None  # or None
    num_heads: Any = None  # a number, or (of queries, of keys)
    empty_rows: Any = None
    values: Any = None  # after a call in training: the projected values, or None
    context: Any = None  # and the attended ones
    seed: Any = None  # of the call's dropout
    options: Any = None  # what hides keys and changes scores besides lengths, or None: see _core.layer_forward

    def for_weights(self) -> tuple[Any, ...]:
        """Without what only the backward pass reads."""
        if self.options is None:
            return self[:N_FOR_WEIGHTS]
        return (*self[:N_FOR_WEIGHTS], None, None, None, self.options)


class Placed(NamedTuple):
    """What a call kept whose keys lie in another order than their steps, or are not all there: a cache with a window.

    pieces   for some queries after others: what their weights (B, H, n, K) are computed from, a Kept or what has
             `weights()`; and the steps of these keys, (B, K) or (1, K) of int64, -1 where there is none
    n_steps  how many steps there have been: the columns of the weights
    """

    pieces: tuple[Any, ...]
    n_steps: int

    def weights(self, view: Callable[[Array], Any] = np.asarray) -> Array:
        found = []
        for kept, steps in self.pieces:
            part = np.asarray(saved_weights(kept, view) if type(kept) in (tuple, Kept) else kept.weights())
            full = np.zeros((*part.shape[:3], self.n_steps), part.dtype)
            for item, at in enumerate(np.broadcast_to(steps, (len(part), steps.shape[1]))):
                full[item][:, :, at[at >= 0]] = part[item][:, :, at >= 0]
            found.append(full)
        return np.concatenate(found, axis=2)


N_FOR_WEIGHTS = 10  # the first elements of a Kept, which determine the weights of a call without options


def for_backward(q: Any, k: Any, row_max: Any, row_sum: Any, lens: Any, values: Any, attended: Any) -> Kept:
    """Only those elements that `_core.layer_backward` reads."""
    return Kept(q=q, k=k, row_max=row_max, row_sum=row_sum, lengths=lens, values=values, context=attended)


def saved_weights(saved: Any, view: Callable[[Array], Any] = np.asarray) -> Any:
    """Attention weights (B, H, Q, K) in new memory: a copy if kept, else computed again, to the bit, from q and k.

    saved   a Kept, or the tuple of layer_forward
    view    applied to q before the core gets it: torch.from_numpy makes the core use torch's threads
    RuntimeError if the call used another instruction set.
    """
    if isinstance(saved, Placed):
        return saved.weights(view)
    try:
        kept = Kept(*saved)
        if len(saved) not in (N_FOR_WEIGHTS, 12, 13, len(Kept._fields)):  # 12: version 0.1.0; 13: 0.2.0
            raise ValueError(f"{len(saved)} elements")
        if kept.weights is not None:
            if kept.weights.ndim == 4 and kept.weights.dtype in (np.float32, np.float64):
                return np.array(kept.weights, order="C")
        elif kept.isa == isa():
            heads, kv_heads = kept.num_heads if isinstance(kept.num_heads, tuple) else (kept.num_heads,) * 2
            q, k = _by_heads(kept.q, heads), _by_heads(kept.k, kv_heads)
            rows = kept.row_max, kept.row_sum, kept.empty_rows
            return attention_weights(view(q), k, kept.w_v, kept.lengths, *rows, kept.options)
        elif isinstance(kept.isa, str):
            raise RuntimeError(
                f"attention_weights of a call computed with {kept.isa!r:.100} cannot be rebuilt to the bit with "
                f"{isa()}: call the layer again"
            )
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ValueError(f"saved is not what layer_forward returned: {error}") from None
    raise ValueError("saved is not what layer_forward returned: another kind")


def _by_heads(x: Array, num_heads: int) -> Array:
    """(B, H, rows, D): head h has the columns h*D .. (h+1)*D of the features."""
    batch, rows, features = x.shape
    head_dim = features // num_heads if num_heads > 0 else -1
    return x.reshape(batch, rows, num_heads, head_dim).transpose(0, 2, 1, 3)
