"""device= and dtype= of every torch module, as torch's own modules have them; tables of positions as tensors."""

import pytest
import torch

from mha_c import functional as of_numpy
from mha_c import torch as mt
from mha_c.torch import functional, variants

MODULES = {
    "MultiHeadAttention": lambda **place: mt.MultiHeadAttention(8, 8, 8, 8, 2, 0.1, **place),
    "MultiHeadAttention, sizes open": lambda **place: mt.MultiHeadAttention(8, 2, 0.1, **place),
    "AdditiveAttention": lambda **place: mt.AdditiveAttention(8, 8, 4, 0.1, **place),
    "KernelAttention": lambda **place: mt.KernelAttention(width=2.0, **place),
    "PositionalEncoding": lambda **place: mt.PositionalEncoding(8, 0.1, **place),
    "GQAAttention": lambda **place: mt.GQAAttention(8, 4, 2, **place),
    "CausalAttention": lambda **place: mt.CausalAttention(8, 2, **place),
    "Seq2SeqAttentionDecoder": lambda **place: mt.Seq2SeqAttentionDecoder(10, 4, 8, 2, **place),
    "MultiheadAttention": lambda **place: mt.nn.MultiheadAttention(8, 2, **place),
    "MultiHeadedSelfAttention": lambda **place: variants.MultiHeadedSelfAttention(8, 2, **place),
    "SelfAttentionAISummer": lambda **place: variants.SelfAttentionAISummer(8, **place),
    "MultiHeadSelfAttentionAISummer": lambda **place: variants.MultiHeadSelfAttentionAISummer(8, 2, **place),
}


def test_no_module_with_parameters_is_left_out():
    kinds = [getattr(module, name) for module in (mt, mt.nn, variants) for name in module.__all__]
    modules = {kind.__name__ for kind in kinds if isinstance(kind, type) and issubclass(kind, torch.nn.Module)}
    assert modules - {name.partition(",")[0] for name in MODULES} == {"DotProductAttention", "AttentionDecoder"}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_made_where_and_as_it_is_asked_for(name):
    found = MODULES[name](device="meta", dtype=torch.float64)
    tensors = [*found.parameters(), *found.buffers()]
    assert tensors and all(x.device.type == "meta" and x.dtype is torch.float64 for x in tensors)
    usual = MODULES[name]()
    assert all(x.device.type == "cpu" and x.dtype is torch.float32 for x in [*usual.parameters(), *usual.buffers()])


def test_tables_of_positions_are_those_of_numpy():
    for heads in (1, 4, 6):
        slopes = functional.alibi_slopes(heads, dtype=torch.float64)
        assert slopes.tolist() == of_numpy.alibi_slopes(heads).tolist()
    assert functional.alibi_slopes(4, device="meta").shape == (4,)
    at = torch.arange(-200, 200)
    for options in ({}, {"num_buckets": 8, "max_distance": 20, "bidirectional": False}):
        assert functional.t5_buckets(at, **options).tolist() == of_numpy.t5_buckets(at.numpy(), **options).tolist()
    with pytest.raises(TypeError, match="distances must be a torch tensor"):
        functional.t5_buckets([1, 2])
