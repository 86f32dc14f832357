"""Loading whole modules from files of unknown origin: the classes that torch.load(weights_only=True) must allow."""

from __future__ import annotations

from torch import nn

from . import variants
from .bahdanau import Seq2SeqAttentionDecoder
from .grouped import CausalAttention, GQAAttention
from .layers import AdditiveAttention, DotProductAttention, MultiHeadAttention
from .nn import MultiheadAttention
from .positions import PositionalEncoding
from .similarity import KernelAttention


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
        For torch.serialization.safe_globals, or add_safe_globals for the rest of the program.

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
    ours = [
        *(MultiHeadAttention, DotProductAttention, AdditiveAttention, KernelAttention, PositionalEncoding),
        *(GQAAttention, CausalAttention, Seq2SeqAttentionDecoder, MultiheadAttention),
        *(variants.MultiHeadedSelfAttention, variants.SelfAttentionAISummer, variants.MultiHeadSelfAttentionAISummer),
    ]
    out_proj = type(nn.MultiheadAttention(1, 1).out_proj)
    return [*ours, nn.Linear, nn.Dropout, nn.Embedding, nn.GRU, out_proj]
