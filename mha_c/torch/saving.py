"""Loading whole modules from files of unknown origin: the classes that torch.load(weights_only=True) must allow."""

from __future__ import annotations

from importlib import import_module

from torch import nn


def safe_globals() -> list[type]:
    """The classes, torch's and ours, that loading a whole module of mha_c.torch needs.

    torch.load(weights_only=True), the default of torch, builds only tensors and the classes that were allowed.  These
    classes hold numbers and tensors only, also after calls: a file can choose the numbers, but it runs no code.  For a
    model of your own with such modules, allow the classes of the model too.  `import mha_c` allows nothing by itself.
    Call a lazy module once before you save it: until then torch keeps methods in the module, which this list cannot
    allow.

    Returns
    -------
    list of classes
        For torch.serialization.safe_globals (torch 2.5 and later), or add_safe_globals (2.4) for the rest of the
        program; before these, torch loads no whole module with weights_only=True: save the state_dict.

    Examples
    --------
    >>> import io, torch, mha_c.torch
    >>> file = io.BytesIO()
    >>> torch.save(mha_c.torch.MultiHeadAttention(8, 8, 8, 8, 2, 0.0), file)
    >>> _ = file.seek(0)
    >>> with torch.serialization.safe_globals(mha_c.torch.safe_globals()):
    ...     mha = torch.load(file, weights_only=True)
    >>> mha.num_heads
    2
    """
    ours = []
    for module in map(import_module, ("mha_c.torch", "mha_c.torch.nn", "mha_c.torch.variants")):
        public = (getattr(module, name) for name in module.__all__)
        ours += [one for one in public if isinstance(one, type) and issubclass(one, nn.Module)]
    out_proj = type(nn.MultiheadAttention(1, 1).out_proj)
    return [*ours, nn.Linear, nn.Dropout, nn.Embedding, nn.GRU, out_proj]
