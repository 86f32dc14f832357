"""What `_core.layer_forward` keeps of a call, and how to compute the attention weights of that call from it.

csrc/python/layer_call.h defines the order of the tuple.  Its first N_FOR_WEIGHTS elements determine the weights:

    the instruction set, weights (B, H, Q, K) or None, and if None: q (B, Q, features), k (B, K, features), w_v or None,
    row_max (B, H, Q), row_sum (B, H, Q), lengths or None, num_heads, empty_rows

After a training call two more follow: the projected values or None, and the attended values.  A pickle of a layer holds
the first N_FOR_WEIGHTS, and may hold anything: the core checks sizes, and all that does not fit is a ValueError here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable

import numpy as np

from .._core import attention_weights, isa

if TYPE_CHECKING:
    from .._types import Array

N_FOR_WEIGHTS = 10
LENGTHS = 7  # index of the lengths in the tuple


def for_backward(q: Any, k: Any, row_max: Any, row_sum: Any, lens: Any, values: Any, attended: Any) -> tuple[Any, ...]:
    """The tuple with only those elements that `_core.layer_backward` reads."""
    return None, None, q, k, None, row_max, row_sum, lens, None, None, values, attended


def saved_weights(saved: Any, view: Callable[[Array], Any] = np.asarray) -> Any:
    """Attention weights (B, H, Q, K) in new memory: a copy if kept, else computed again, to the bit, from q and k.

    saved   the first N_FOR_WEIGHTS elements of what was kept
    view    applied to q before the core gets it: torch.from_numpy makes the core use torch's threads
    RuntimeError where the call used another instruction set.
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
    """(B, H, rows, D): head h has the columns h*D .. (h+1)*D of the features."""
    batch, rows, features = x.shape
    head_dim = features // num_heads if num_heads > 0 else -1
    return x.reshape(batch, rows, num_heads, head_dim).transpose(0, 2, 1, 3)
