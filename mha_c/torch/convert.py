"""`convert`: the attention of a model is computed by the core from now on, and keeps its weights.

d2l's classes and torch's become ours.  A class that a reader has written stays the reader's: its calls are read, and
where all of their lines are one layer of ours, later calls are the core's: `_readers/`.
"""

from __future__ import annotations

import warnings
from typing import Any, TypeVar

from torch import nn

from .._arguments.calls import refuses_at_the_call
from .._recognize import THREE_LINES
from ._readers.converting import converted, read_at_first_call
from ._torch_state import from_torch_state as from_torch_state
from ._torch_state import to_torch_state as to_torch_state

Converted = TypeVar("Converted", bound=Any)


@refuses_at_the_call
def convert(module: Converted, *inputs: Any, **named: Any) -> Converted:
    """Let the core compute the attention modules inside `module`, in place, and return `module`.

    >>> import torch, mha_c.torch
    >>> model = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    >>> type(mha_c.torch.convert(model).self_attn)
    <class 'mha_c.torch.nn.MultiheadAttention'>

    A class of your own is read at its first call:

    >>> class MyAttention(torch.nn.Module):
    ...     def forward(self, q, k, v):
    ...         return torch.softmax(q @ k.transpose(1, 2) / q.shape[-1] ** 0.5, -1) @ v
    >>> x = torch.ones(2, 4, 8)
    >>> attention = mha_c.torch.convert(MyAttention(), x, x, x)
    >>> isinstance(attention, MyAttention), mha_c.explain(attention, x, x, x).as_dict()["way"]
    (True, 'core')

    d2l's attention classes of any generation become our classes of the same names, nn.MultiheadAttention becomes
    `mha_c.torch.nn.MultiheadAttention`.  Of every other module nothing is guessed, and nothing is called: the first
    call of each form is its own, and is read, line by line: what torch is asked, what Python reads, what the call
    changes.  If all of it is one layer of ours, later calls of that form are the core's, as long as all that was read
    is as it was; else its own lines run for ever.  It stays yours: its class, names, state_dict, pickle and hooks.
    In all cases modules and parameters stay the same objects, so optimizers keep working.
    `mha_c.torch.report(model)` says what became of each module, and which line of yours no layer of ours has.

    Parameters
    ----------
    module : nn.Module or class
        A model, or an attention module itself.  Of a class the instances are read at their first calls, so that
        `@mha_c.torch.convert` above a class in a notebook is enough.
    *inputs, **named : Any
        With these, convert makes the first call itself: module(*inputs, **named).

    Returns
    -------
    nn.Module or class
        The same object.

    Raises
    ------
    TypeError
        If `module` is neither a torch module nor a class of them.  An error of the first call is the module's own.

    Warns
    -----
    UserWarning
        Says that `module` contains nothing to convert; or, once a call was read, which attention is left as it was.

    Notes
    -----
    A query that a mask leaves without keys gets 0 where your own lines give NaN.  Dropout drops other weights than
    your own lines would, by the same law.  nn.TransformerEncoderLayer has a fast path of its own in eval mode under
    no_grad.  It reads the weights and calls no attention module, neither ours nor torch's;
    torch.backends.mha.set_fastpath_enabled(False) switches it off.  A class is read where this torch has modes for
    functions (2.0), and nothing else traces the thread: a debugger, a measurement of coverage.
    """
    if isinstance(module, type) and issubclass(module, nn.Module):
        return read_at_first_call(module)
    if not isinstance(module, nn.Module):
        got = f"{type(module).__name__}{of_arrays(module)}"
        raise TypeError(f"convert takes a torch module, got {got}; or a class of modules")
    if not converted(module):
        warnings.warn(
            f"convert found nothing to replace in {type(module).__name__}: it holds no class but torch's.  "
            f"{THREE_LINES}",
            stacklevel=3,
        )
    if inputs or named:
        module(*inputs, **named)
    return module


def of_arrays(layer: Any) -> str:
    """What a refusal adds if it was given a layer for NumPy arrays."""
    ours = type(layer).__module__.partition(".")[0] == "mha_c"
    return f" of arrays, whose calls are the core's already (mha_c.torch.{type(layer).__name__} takes tensors)" * ours
