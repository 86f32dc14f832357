"""Names of parameters: those of d2l's MultiHeadAttention, and those of nn.MultiheadAttention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .._arguments.calls import refuses_at_the_call
from ._twins import twin


@refuses_at_the_call
def to_torch_state(state: dict[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """The state_dict of a d2l or mha_c MultiHeadAttention, renamed for nn.MultiheadAttention.

    Parameters
    ----------
    state : dict
        {name: Tensor}.
    prefix : str
        The prefix of the names, including its dot.

    Returns
    -------
    dict
        With `in_proj_weight` if all input sizes are num_hiddens, else with q_proj_weight and so on (kdim, vdim).

    Examples
    --------
    >>> import torch, mha_c.torch
    >>> ours = mha_c.torch.MultiHeadAttention(8, 8, 8, 8, 2, 0.0, bias=True)
    >>> theirs = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    >>> theirs.load_state_dict(mha_c.torch.to_torch_state(ours.state_dict()))
    <All keys matched successfully>
    """
    _check_names(state, *(f"{prefix}W_{name}.weight" for name in "qkvo"))
    weights = [state[f"{prefix}W_{name}.weight"] for name in "qkv"]
    renamed = {}
    if len({tuple(weight.shape) for weight in weights}) == 1 and weights[0].shape[0] == weights[0].shape[1]:
        renamed["in_proj_weight"] = torch.cat(weights)
    else:
        renamed.update({f"{name}_proj_weight": weight for name, weight in zip("qkv", weights)})
    if f"{prefix}W_q.bias" in state:
        renamed["in_proj_bias"] = torch.cat([state[f"{prefix}W_{name}.bias"] for name in "qkv"])
    renamed["out_proj.weight"] = state[f"{prefix}W_o.weight"]
    if f"{prefix}W_o.bias" in state:
        renamed["out_proj.bias"] = state[f"{prefix}W_o.bias"]
    return renamed


@twin(to_torch_state)
@refuses_at_the_call
def from_torch_state(state: dict[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """The reverse of `to_torch_state`: nn.MultiheadAttention's entries under d2l's names.

    Returns
    -------
    dict
        {name: Tensor}, as a MultiHeadAttention loads them.

    Examples
    --------
    >>> import torch, mha_c.torch
    >>> theirs = torch.nn.MultiheadAttention(8, 2, bias=False, batch_first=True)
    >>> ours = mha_c.torch.MultiHeadAttention(8, 8, 8, 8, 2, 0.0)
    >>> ours.load_state_dict(mha_c.torch.from_torch_state(theirs.state_dict()))
    <All keys matched successfully>
    """
    _check_names(state, f"{prefix}out_proj.weight")
    unknown = [name for name in ("bias_k", "bias_v") if f"{prefix}{name}" in state]
    if unknown:
        raise ValueError(f"{', '.join(unknown)}: d2l's MultiHeadAttention has no such parameters")
    if f"{prefix}in_proj_weight" in state:
        weights = list(state[f"{prefix}in_proj_weight"].chunk(3))
    else:
        weights = [state[f"{prefix}{name}_proj_weight"] for name in "qkv"]
    biases = state[f"{prefix}in_proj_bias"].chunk(3) if f"{prefix}in_proj_bias" in state else (None,) * 3
    renamed = {}
    out = state[f"{prefix}out_proj.weight"], state.get(f"{prefix}out_proj.bias")
    for name, weight, bias in zip("qkvo", [*weights, out[0]], [*biases, out[1]]):
        renamed[f"W_{name}.weight"] = weight
        if bias is not None:
            renamed[f"W_{name}.bias"] = bias
    return renamed


def _check_names(state: Any, *names: str) -> None:
    """Errors unless `state` is a state_dict that has these entries."""
    if not isinstance(state, Mapping):
        raise TypeError(
            f"state must be a state_dict, {{name: Tensor}}, got {type(state).__name__}: write m.state_dict()"
        )
    missing = [name for name in names if name not in state]
    if missing:
        raise ValueError(f"state has no {', '.join(missing)}: give the prefix of its names, with the dot")
