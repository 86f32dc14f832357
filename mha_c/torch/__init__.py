"""mha_c.torch: the layers as torch modules, with gradients by autograd.  The only part of mha_c that imports torch.

>>> import torch, mha_c.torch
>>> mha = mha_c.torch.MultiHeadAttention(num_hiddens=8, num_heads=2, dropout=0.1)
>>> X = torch.randn(2, 4, 8)
>>> mha(X, X, X, torch.tensor([3, 2])).sum().backward()
>>> mha.W_q.weight.grad.shape
torch.Size([8, 8])

Layers of the book: MultiHeadAttention, DotProductAttention, AdditiveAttention, KernelAttention, PositionalEncoding,
AttentionDecoder, Seq2SeqAttentionDecoder.  Functions: mha_c.torch.functional.  Other systems' layers:
mha_c.torch.variants; the twin of torch's own: mha_c.torch.nn.MultiheadAttention.
convert(model) replaces the attention modules of d2l and torch inside a model; mha_c.d2l replaces the classes of the
book's package.
"""

from __future__ import annotations

try:
    import torch as _torch  # noqa: F401  raises our own error where torch is missing
except ModuleNotFoundError as missing:
    if missing.name != "torch":
        raise
    raise ModuleNotFoundError("mha_c.torch needs torch: pip install torch", name="torch") from None

from . import _private, functional, nn, variants
from ._decoder.decoding import KeyValueCache
from ._decoder.projected import ProjectedKeyValues
from ._readers.reports import report
from .bahdanau import AttentionDecoder, Seq2SeqAttentionDecoder
from .convert import convert, from_torch_state, to_torch_state
from .frozen import frozen
from .grouped import CausalAttention, GQAAttention
from .layers import AdditiveAttention, DotProductAttention, MultiHeadAttention
from .masking import masked_softmax, sequence_mask, transpose_output, transpose_qkv
from .positions import PositionalEncoding
from .saving import safe_globals
from .similarity import KernelAttention
from .watch import watch

__all__ = [
    "AdditiveAttention",
    "AttentionDecoder",
    "CausalAttention",
    "DotProductAttention",
    "GQAAttention",
    "KernelAttention",
    "KeyValueCache",
    "MultiHeadAttention",
    "PositionalEncoding",
    "ProjectedKeyValues",
    "Seq2SeqAttentionDecoder",
    "convert",
    "from_torch_state",
    "frozen",
    "functional",
    "masked_softmax",
    "nn",
    "report",
    "safe_globals",
    "sequence_mask",
    "to_torch_state",
    "transpose_output",
    "transpose_qkv",
    "variants",
    "watch",
]
__dir__ = __all__.copy  # what dir() and completion show
_private.leave_to_python("mha_c")
