"""How the public names look to a type checker: run by tests/test_system.py, and checked there with mypy --strict."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

import mha_c
from mha_c import functional, variants

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]  # NumPy 1.21 cannot evaluate it

x: Array = np.ones((2, 4, 12), dtype=np.float32)

# Both generations of the constructor.
new = mha_c.MultiHeadAttention(12, 3, 0.5, bias=True, rng=0)
old = mha_c.MultiHeadAttention(12, 12, 12, 12, 3, 0.5, use_bias=False, dtype=np.float64, empty_rows="zero")
additive = mha_c.AdditiveAttention(8, 0.1)
sized = mha_c.AdditiveAttention(key_size=12, query_size=12, num_hiddens=8, dropout=0.1)
dot = mha_c.DotProductAttention(0.1, rng=np.random.default_rng(0))

# Arrays in, an array out.
out: Array = new(x, x, x, valid_lens=[3, 2])
out = old(x, x, x, np.array([3, 2]), training=True)
out = additive(x, x, x)
keys: mha_c.ProjectedKeys = additive.project_keys(x)
context: Array = additive(x, keys, x)
shape: tuple[int, ...] = keys.shape

# train() and eval() give the layer back as what it is.
trained: mha_c.MultiHeadAttention = new.train()
same: mha_c.DotProductAttention = dot.eval()
inner: mha_c.DotProductAttention = new.attention
weights: Array = new.attention_weights

# Parameters.
weight: Array = new.W_q.weight
bias: Array | None = new.W_q.bias
new.W_q.weight = np.zeros((12, 12))
state: dict[str, Array] = new.state_dict()
new.load_state_dict(state)
new.initialize(rng=1, method="torch")
p: float = new.attention.dropout.p

# Functions.
q: Array = x[:, None]
result: Array = functional.dot_product_attention(q, q, q, causal=True, window=(2, None), scale=0.5)
result, lse = functional.dot_product_attention(q, q, q, return_lse=True)
merged, merged_lse = functional.merge(result, lse, result, lse)
soft: Array = mha_c.masked_softmax(x, None, empty_rows="zero")
masked: Array = mha_c.sequence_mask(x, [1, 2], value=-1)
split: Array = mha_c.transpose_qkv(x, 3)
joined: Array = mha_c.transpose_output(split, 3)

# Variants.
pair: tuple[Array, Array] = variants.scaled_dot_product_attention(x, x, x)
layer = variants.MultiHeadSelfAttentionAISummer(12, heads=3)
out = layer(x, mask=np.zeros((4, 4), dtype=bool))

# The system.
n: int = mha_c.get_num_threads()
mha_c.set_num_threads(n)
version: str = mha_c.__version__
try:
    new(x, x[:1], x)
except mha_c.ShapeError as error:
    message: str = str(error)
