"""Summaries of attention weights for tensors: the twin of mha_c.functional.weights_summary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import functional as of_numpy
from .._arguments.calls import refuses_at_the_call
from .._summary import WeightsSummary
from ._tensors import HALVES, array, check_inputs, refuse_transforms
from ._twins import twin

if TYPE_CHECKING:
    from .._types import Causal, EmptyRows, Window


@twin(of_numpy.weights_summary)
@refuses_at_the_call
def weights_summary(
    q: Tensor, k: Tensor, valid_lens: Any = None, *, keep_mask: Any = None, bias: Any = None, causal: Causal = False,
    window: Window = None, scale: Any = None, softcap: Any = None, relative_bias: Any = None, sinks: Any = None,
    empty_rows: EmptyRows = "zero", top: int = 0,
) -> WeightsSummary:  # fmt: skip
    """Summarise attention weights without a (Q, K) tensor: what each key receives, each query's entropy, the largest.

    Parameters
    ----------
    q, k : Tensor (B, [H,] Q, D), (B, [Hkv,] K, D)
        Of one type, on one device.  16-bit floats are computed in float32, and the results are float32.

    Returns
    -------
    WeightsSummary
        Tensors without gradient on q's device: received (B, [H,] K), entropy (B, [H,] Q) in bits, top_weights and
        top_keys (B, [H,] Q, top).

    Notes
    -----
    The compiled core computes it on the CPU: tensors on other devices are copied (q and k are only Q + K rows).

    Examples
    --------
    >>> import torch
    >>> from mha_c.torch import functional
    >>> q, k = torch.randn(2, 1, 4, 6, 8)
    >>> functional.weights_summary(q, k, causal=True).received.shape
    torch.Size([1, 4, 6])
    """
    check_inputs(q=q, k=k)
    refuse_transforms("weights_summary")
    terms = {"keep_mask": keep_mask, "bias": bias, "relative_bias": relative_bias, "sinks": sinks}
    found = of_numpy.weights_summary(
        on_cpu(q), on_cpu(k), on_cpu(valid_lens), **{name: on_cpu(x) for name, x in terms.items()}, causal=causal,
        window=window, scale=scale, softcap=softcap, empty_rows=empty_rows, top=top,
    )  # fmt: skip
    return WeightsSummary(*(torch.from_numpy(x).to(q.device) for x in found))


def on_cpu(value: Any) -> Any:
    """A tensor's numbers as an array, 16-bit floats as float32; what is no tensor as it is."""
    if not isinstance(value, Tensor):
        return value
    value = value.detach().cpu()
    return array(value.float() if value.dtype in HALVES else value)
