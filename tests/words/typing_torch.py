"""What a user's editor shows for mha_c.torch: see typing_examples.py.  Run by tests/words/test_types.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import mha_c.torch
from mha_c.torch import functional, variants

if TYPE_CHECKING:
    from typing_extensions import assert_type
else:

    def assert_type(value, _):
        return value


x = torch.ones(2, 4, 12)
new = mha_c.torch.MultiHeadAttention(12, 3, 0.5, bias=True)
old = mha_c.torch.MultiHeadAttention(12, 12, 12, 12, 3, 0.5, empty_rows="zero")
additive = mha_c.torch.AdditiveAttention(key_size=12, query_size=12, num_hiddens=8, dropout=0.1)
dot = mha_c.torch.DotProductAttention(0.1)

# Tensors in, a tensor out.
assert_type(new(x, x, x, torch.tensor([3, 2])), Tensor)
assert_type(old(x, x, x, valid_lens=[3, 2], training=True), Tensor)
assert_type(additive(x, x, x), Tensor)
assert_type(dot(x, x, x), Tensor)
assert_type(new.attention_weights, Tensor)
assert_type(new.attention, mha_c.torch.DotProductAttention)
assert_type(new.W_q, torch.nn.Linear)
assert_type(additive.project_keys(x), mha_c.torch.ProjectedKeyValues)
assert_type(mha_c.torch.PositionalEncoding(12, 0.1)(x), Tensor)
assert_type(mha_c.torch.KernelAttention("boxcar")(x, x, x), Tensor)
assert_type(mha_c.torch.GQAAttention(12, 4, 2)(x, x, x), Tensor)
with mha_c.torch.watch() as seen:
    assert_type(mha_c.torch.CausalAttention(12, 4)(x), Tensor)
    assert_type(seen.calls[0].weights, Tensor)
    assert_type(seen.calls[0].top(3), tuple[Tensor, Tensor])

# Functions: one tensor; Any if more is asked for.
out = assert_type(functional.dot_product_attention(x, x, x, causal="top_left", window=(1, None), rng=1), Tensor)
out, lse = assert_type(functional.dot_product_attention(x, x, x, return_lse=True), Any)
assert_type(functional.additive_attention(x, x, x, torch.ones(12), bias=torch.zeros(4, 4)), Tensor)
assert_type(functional.merge(out, lse, out, lse), "tuple[Tensor, Tensor]")
assert_type(mha_c.torch.masked_softmax(x, None, empty_rows="zero"), Tensor)
assert_type(mha_c.torch.sequence_mask(x, [1, 2]), Tensor)
assert_type(mha_c.torch.transpose_qkv(x, 3), Tensor)

# Variants.
assert_type(variants.MultiHeadedSelfAttention(12, 3)(x), Tensor)
assert_type(variants.SelfAttentionAISummer(12)(x, torch.zeros(4, 4, dtype=torch.bool)), Tensor)
assert_type(variants.MultiHeadSelfAttentionAISummer(12, heads=3)(x), Tensor)
assert_type(variants.scaled_dot_product_attention(x, x, x), "tuple[Tensor, Tensor]")
