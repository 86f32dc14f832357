"""Whole modules in files that others may have written: what torch.load(weights_only=True) has to be told."""

from __future__ import annotations

from torch import nn

from . import variants
from .bahdanau import Seq2SeqAttentionDecoder
from .layers import AdditiveAttention, DotProductAttention, MultiHeadAttention
from .multihead import MultiheadAttention
from .positions import PositionalEncoding
from .similarity import KernelAttention


def safe_globals() -> list[type]:
    """The classes that a module of mha_c.torch, saved whole, is made of: torch's and ours.

    torch.load(weights_only=True), its default, builds nothing but tensors and what it was allowed.  What these classes
    are built from is numbers and tensors, also after calls; a file can choose them, but runs nothing.  A model of your
    own with such modules in it needs its own classes named as well, whichever attention it has.  Nothing is allowed by
    importing mha_c.  A lazy module has to be called once before it is saved: until then torch keeps methods in it,
    which nothing here can allow.

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
        *(Seq2SeqAttentionDecoder, MultiheadAttention, variants.MultiHeadedSelfAttention),
        *(variants.SelfAttentionAISummer, variants.MultiHeadSelfAttentionAISummer),
    ]
    out_proj = type(nn.MultiheadAttention(1, 1).out_proj)
    return [*ours, nn.Linear, nn.Dropout, nn.Embedding, nn.GRU, out_proj]
