"""What `_core.layer_forward` kept of a call, and the attention weights of that call from it.

The tuple has an order of its own (csrc/python/layer_call.h).  Of its first N_FOR_WEIGHTS the weights are a function:

    the instruction set, weights (B, H, Q, K) or None, and if None: q (B, Q, features), k (B, K, features), w_v or None,
    row_max (B, H, Q), row_sum (B, H, Q), lengths or None, num_heads, empty_rows

Behind them, in training: the projected values or None, the attended values.  A layer's pickle holds the first ones, so
they may be anything: the core checks what it needs for memory, and whatever does not fit is a ValueError here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable

import numpy as np

from .._core import attention_weights, isa

if TYPE_CHECKING:
    from .._types import Array

N_FOR_WEIGHTS = 10
LENGTHS = 7  # place of the lengths


def for_backward(q: Any, k: Any, row_max: Any, row_sum: Any, lens: Any, values: Any, attended: Any) -> tuple[Any, ...]:
    """What was kept, as far as `_core.layer_backward` reads it."""
    return None, None, q, k, None, row_max, row_sum, lens, None, None, values, attended


def saved_weights(saved: Any, view: Callable[[Array], Any] = np.asarray) -> Any:
    """(B, H, Q, K) in memory of their own: kept as they were, or computed again to the bit from q, k and statistics.

    saved   the first N_FOR_WEIGHTS of what was kept
    view    what makes of q what the core is asked with: torch.from_numpy for a tensor, on torch's threads
    RuntimeError where the instruction set is another than in the call.
    """
    try:
        name, weights, q, k, w_v, row_max, row_sum, lens, num_heads, empty_rows = saved
        if weights is not None:
            if weights.ndim == 4 and weights.dtype in (np.float32, np.float64):
                return np.array(weights, order="C")
        elif name == isa():
            return attention_weights(
                view(_by_heads(q, num_heads)), _by_heads(k, num_heads), w_v, lens, row_max, row_sum, empty_rows
            )
        elif isinstance(name, str):
            raise RuntimeError(
                f"attention_weights of a call computed with {name!r:.100} cannot be rebuilt to the bit with "
                f"{isa()}: call the layer again"
            )
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ValueError(f"saved is not what layer_forward returned: {error}") from None
    raise ValueError("saved is not what layer_forward returned: another kind")


def _by_heads(x: Array, num_heads: int) -> Array:
    """Heads are columns h*D .. (h+1)*D of the features."""
    batch, rows, features = x.shape
    head_dim = features // num_heads if num_heads > 0 else -1
    return x.reshape(batch, rows, num_heads, head_dim).transpose(0, 2, 1, 3)
