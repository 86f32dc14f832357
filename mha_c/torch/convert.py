"""`convert`: the attention of a model is computed by the core from now on, and keeps its weights.

d2l's classes and torch's become ours.  A class that a reader has written stays the reader's: `_own/` compares what it
computes and gives the instance a class that differs in its call alone.
"""

from __future__ import annotations

import warnings
from typing import Any, TypeVar

from torch import nn

from .._arguments.calls import refuses_at_the_call
from .._recognize import THREE_LINES
from ._own import finding
from ._torch_state import from_torch_state as from_torch_state
from ._torch_state import to_torch_state as to_torch_state

Converted = TypeVar("Converted", bound=Any)


@refuses_at_the_call
def convert(module: Converted) -> Converted:
    """Let the core compute the attention modules inside `module`, in place, and return `module`.

    >>> import torch, mha_c.torch
    >>> model = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    >>> type(mha_c.torch.convert(model).self_attn)
    <class 'mha_c.torch.nn.MultiheadAttention'>

    A class of your own:

    >>> class MyAttention(torch.nn.Module):
    ...     def forward(self, q, k, v):
    ...         return torch.softmax(q @ k.transpose(1, 2) / q.shape[-1] ** 0.5, -1) @ v
    >>> attention, x = mha_c.torch.convert(MyAttention()), torch.ones(2, 4, 8)
    >>> isinstance(attention, MyAttention), mha_c.explain(attention, x, x, x).as_dict()["way"]
    (True, 'core')

    d2l's attention classes of any generation become our classes of the same names, nn.MultiheadAttention becomes
    `mha_c.torch.nn.MultiheadAttention`.  A class that you have written yourself, by whatever names, stays yours: if it
    computes what a layer of ours computes, its instance gets a class that is made for it, a subclass of yours under
    its name, in which the core computes the call.  Attributes, state_dict keys and hooks stay, weights are kept under
    the same name, a copy stays fast, and a pickle loads as your class.  Your own lines run again wherever a call is of
    a form that was not compared, or a part was replaced.  In all cases modules and parameters stay the same objects, so
    optimizers keep working.

    A module is compared by calling a copy of it with small inputs: outputs, attention weights, gradients, masks and
    lengths, and the place of its dropout.  Random numbers, modes and gradients of yours do not change.

    Parameters
    ----------
    module : nn.Module or class
        A model, or an attention module itself.  Of a class the instances are compared at their first call, so that
        `@mha_c.torch.convert` above a class in a notebook is enough.

    Returns
    -------
    nn.Module or class
        The same object.

    Raises
    ------
    TypeError
        If `module` is neither a torch module nor a class of them.

    Warns
    -----
    UserWarning
        Names the attention modules that are left as they were and says what differs, as `mha_c.teach.check` does; or
        says that `module` contains none.

    Notes
    -----
    A query that a mask leaves without keys gets 0 where your own lines give NaN.  Dropout drops other weights than
    your own lines would, by the same law.  nn.TransformerEncoderLayer has a fast path of its own in eval mode under
    no_grad.  It reads the weights and calls no attention module, neither ours nor torch's;
    torch.backends.mha.set_fastpath_enabled(False) switches it off.
    """
    if isinstance(module, type) and issubclass(module, nn.Module):
        return finding.compare_at_first_call(module)
    if not isinstance(module, nn.Module):
        raise TypeError(f"convert takes a torch module, got {type(module).__name__}; or a class of modules")
    left, found = finding.converted(module)
    if left:
        warnings.warn(finding.left_as_they_were(left), stacklevel=3)
    elif not found:
        warnings.warn(
            f"convert found nothing to replace in {type(module).__name__}: no module in it takes queries, keys and "
            f"values, or has their projections.  {THREE_LINES}",
            stacklevel=3,
        )
    return module
