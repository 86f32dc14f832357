"""Attention modules of d2l and torch inside a model, replaced by ours with their weights: `convert`.

d2l is recognised by what a class is called and holds, never imported, so that copies of the book's classes in a
notebook are found too.
"""

from __future__ import annotations

import inspect
from typing import Any, Optional

import torch
from torch import Tensor, nn

from .layers import AdditiveAttention, DotProductAttention, MultiHeadAttention
from .multihead import MultiheadAttention

_CHILDREN: dict[str, tuple[Any, set[str]]] = {  # of d2l's classes, in both generations
    "MultiHeadAttention": (MultiHeadAttention, {"attention", "W_q", "W_k", "W_v", "W_o"}),
    "AdditiveAttention": (AdditiveAttention, {"W_k", "W_q", "w_v", "dropout"}),
    "DotProductAttention": (DotProductAttention, {"dropout"}),
}
_CALL = ["queries", "keys", "values", "valid_lens"]


def convert(module: nn.Module) -> nn.Module:
    """Replace the attention modules inside `module`, in place, and return it (or what stands for it).

    d2l's MultiHeadAttention, AdditiveAttention and DotProductAttention of either generation become the classes of
    the same names, nn.MultiheadAttention becomes `mha_c.torch.MultiheadAttention`.  Parameters stay the very same
    tensors, so optimizers that hold them go on; modes, hooks of the model around them and state_dict keys stay
    too.  Modules with hooks of their own, of unknown subclasses, or with options that we lack, stay as they are.

    Parameters
    ----------
    module : nn.Module
        A model, or an attention module itself.

    Returns
    -------
    nn.Module
        The same model; for an attention module itself, what stands for it.

    Examples
    --------
    >>> import torch, mha_c.torch
    >>> model = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    >>> type(mha_c.torch.convert(model).self_attn)
    <class 'mha_c.torch.multihead.MultiheadAttention'>
    """
    ours = twin(module)
    if ours is not None:
        return ours
    done: dict[int, Optional[nn.Module]] = {}
    for parent in list(module.modules()):
        for name, child in list(parent._modules.items()):  # named_children would leave out a second mention
            if child is None:
                continue
            if id(child) not in done:
                done[id(child)] = twin(child)
            replacement = done[id(child)]
            if replacement is not None:
                setattr(parent, name, replacement)
    return module


def twin(module: nn.Module) -> Optional[nn.Module]:
    """Our module for one attention module, sharing its parameters; None if it is not one that we know."""
    if _has_hooks(module):
        return None
    if type(module) is nn.MultiheadAttention:
        return MultiheadAttention.adopt(module)
    if not _is_d2l(module):
        return None
    ours, _ = _CHILDREN[type(module).__name__]
    copy: Any = ours.__new__(ours)
    nn.Module.__init__(copy)
    if ours is MultiHeadAttention:
        inner = twin(module.attention)
        copy.num_heads = module.num_heads
        copy.attention = module.attention if inner is None else inner
    for name, child in module.named_children():  # the very same projections, in their order
        if name != "attention":
            copy.add_module(name, child)
    return copy.train(module.training)


def _is_d2l(module: nn.Module) -> bool:
    name = type(module).__name__
    if name not in _CHILDREN or type(module).__module__.startswith("mha_c."):
        return False
    _, children = _CHILDREN[name]
    names = {name for name, child in module.named_children() if name != "board"}
    if names != children or any(True for _ in module.buffers()):
        return False
    if len(list(module.parameters(recurse=False))):
        return False
    return [*inspect.signature(type(module).forward).parameters][1:] == _CALL


def _has_hooks(module: nn.Module) -> bool:
    names = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
    return any(getattr(module, name, None) for name in names)


# --- Names of parameters ------------------------------------------------------------------------------


def to_torch_state(state: dict[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """The state_dict of a d2l or mha_c MultiHeadAttention, renamed for nn.MultiheadAttention.

    Parameters
    ----------
    state : dict
        {name: Tensor}.
    prefix : str
        What stands before the names, with its dot.

    Returns
    -------
    dict
        Inputs of three equal sizes become `in_proj_weight`; other sizes q_proj_weight and its like (kdim, vdim).

    Examples
    --------
    >>> import torch, mha_c.torch
    >>> ours = mha_c.torch.MultiHeadAttention(8, 8, 8, 8, 2, 0.0, bias=True)
    >>> theirs = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    >>> theirs.load_state_dict(mha_c.torch.to_torch_state(ours.state_dict()))
    <All keys matched successfully>
    """
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


def from_torch_state(state: dict[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """The reverse of `to_torch_state`: nn.MultiheadAttention's entries under d2l's names.

    Parameters
    ----------
    state : dict
        {name: Tensor}.
    prefix : str
        What stands before the names, with its dot.

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
