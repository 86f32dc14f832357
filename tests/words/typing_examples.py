"""What a user's editor shows for the public names: `assert_type` holds for mypy and pyright, and the lines run.

Run by tests/words/test_types.py.  Arrays in give arrays out, of the same type; tensors and lists give Any.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

import mha_c
from mha_c import functional, variants

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import assert_type

    F32 = NDArray[np.float32]
    F64 = NDArray[np.float64]
    AnyArray = NDArray[Any]
else:

    def assert_type(value, _):
        return value


x = np.ones((2, 4, 12), dtype=np.float32)
wide = np.ones((2, 4, 12))

# Both generations of the constructor.
new = mha_c.MultiHeadAttention(12, 3, 0.5, bias=True, rng=0)
old = mha_c.MultiHeadAttention(12, 12, 12, 12, 3, 0.5, use_bias=False, dtype=np.float64, empty_rows="zero")
additive = mha_c.AdditiveAttention(8, 0.1)
sized = mha_c.AdditiveAttention(key_size=12, query_size=12, num_hiddens=8, dropout=0.1)
dot = mha_c.DotProductAttention(0.1, rng=np.random.default_rng(0))

# Arrays in, an array of their type out.
out = assert_type(new(x, x, x, valid_lens=[3, 2]), "F32")
assert_type(old(wide, wide, wide, np.array([3, 2]), training=True), "F64")
assert_type(new([[[1.0] * 12] * 4] * 2, wide, wide), Any)
assert_type(additive(x, x, x), "F32")
keys = assert_type(additive.project_keys(x), mha_c.ProjectedKeyValues)
assert_type(additive(x, keys, x), "F32")
assert_type(keys.shape, "tuple[int, ...]")
both = assert_type(new.project(x, x, valid_lens=[3, 2]), mha_c.ProjectedKeyValues)
assert_type(new(x, both), "F32")
cache = assert_type(new.new_cache(batch=2, max_len=8), mha_c.KeyValueCache)
assert_type(new(x, x, x, cache=cache), "F32")

# train() and eval() give the layer back as what it is.
trained = assert_type(new.train(), mha_c.MultiHeadAttention)
assert_type(dot.eval(), mha_c.DotProductAttention)
assert_type(new.attention, mha_c.DotProductAttention)
assert_type(new.attention_weights, "AnyArray")
assert_type(new.attention.attention_weights, "AnyArray")

# Training.
out = trained(x, x, x)
grad_queries, grad_keys, grad_values = assert_type(trained.backward(out), "tuple[F32, F32, F32]")
for parameter in new.parameters():
    assert_type(parameter.data, "AnyArray")
    assert_type(parameter.grad, "AnyArray | None")

# Parameters.
assert_type(new.W_q.weight, "AnyArray")
assert_type(new.W_q.bias, "AnyArray | None")
new.W_q.weight = np.zeros((12, 12))
assert_type(new.W_q(x), "F32")
state = assert_type(new.state_dict(), "dict[str, AnyArray]")
assert_type(new.load_state_dict(state, strict=False).missing_keys, "list[str]")
new.initialize(rng=1, method="torch")
assert_type(new.attention.dropout.p, float)

# Functions: one array; Any if more is asked for.
q = x[:, None]
result = assert_type(functional.dot_product_attention(q, q, q, causal=True, window=(2, None), scale=0.5), "F32")
assert_type(functional.dot_product_attention(q, q, q, return_lse=True), Any)
lse = np.zeros(result.shape[:-1], dtype=np.float32)
w_v = np.ones(8)
W = np.ones((8, 12))
assert_type(functional.additive_attention(wide, wide, wide, w_v, W, W, [3, 2], dropout=0.5, rng=1), "F64")
assert_type(functional.merge(result, lse, result, lse), "tuple[F32, F32]")
grads = assert_type(functional.dot_product_attention_backward(result, q, q, q, bias=np.zeros((4, 4), "f4")),
                    "tuple[F32, ...]")  # fmt: skip
assert_type(mha_c.masked_softmax(x, None, empty_rows="zero"), "F32")
assert_type(mha_c.sequence_mask(np.ones((2, 3), dtype=np.int64), [1, 2], value=-1), "NDArray[np.int64]")
split = assert_type(mha_c.transpose_qkv(x, 3), "F32")
assert_type(mha_c.transpose_output(split, 3), "F32")
assert_type(new.transpose_qkv(x), "F32")

# Positions and similarity.
assert_type(functional.rotary(q, range(4)), "F32")
assert_type(mha_c.PositionalEncoding(12, 0.1)(wide, start=3), "F64")
assert_type(mha_c.KernelAttention("boxcar")(x, x, x), "F32")
gqa = mha_c.GQAAttention(x.shape[-1], 1, 1).train()
assert_type(gqa.backward(assert_type(gqa(x, x, x), "F32")), "tuple[F32, F32, F32]")
causal = mha_c.CausalAttention(x.shape[-1], 1).train()
assert_type(causal.backward(assert_type(causal(x), "F32")), "F32")
assert_type(functional.weights_summary(q, q).received, Any)
regression = mha_c.KernelAttention("gaussian").train()
assert_type(regression.backward(regression(x, x, x)), "tuple[F32, F32, F32]")

# Variants.
assert_type(variants.scaled_dot_product_attention(x, x, x), "tuple[F32, F32]")
layer = variants.MultiHeadSelfAttentionAISummer(12, heads=3)
assert_type(layer(x, mask=np.zeros((4, 4), dtype=bool)), "F32")
course = variants.MultiHeadedSelfAttention(12, 3).train()
assert_type(course(x), "F32")
assert_type(course.backward(out), "F32")

# The system.
n = assert_type(mha_c.get_num_threads(), int)
with mha_c.set_num_threads(n):
    pass
assert_type(mha_c.__version__, str)
try:
    new(x, x[:1], x)
except mha_c.ShapeError as error:
    assert_type(str(error), str)
