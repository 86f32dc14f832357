"""Calls that mypy and pyright have to mark; each such line ends in `# wrong`.  Never run; see test_types.py."""

import numpy as np

import mha_c
from mha_c import functional

x = np.ones((2, 4, 12), dtype=np.float32)
mha = mha_c.MultiHeadAttention(12, 3, 0.5)

mha_c.MultiHeadAttention(12)  # wrong
mha_c.MultiHeadAttention(12, 3, 0.5, biased=True)  # wrong
mha_c.MultiHeadAttention("12", 3, 0.5)  # wrong
mha_c.DotProductAttention(0.1, empty_rows="nan")  # wrong
mha_c.AdditiveAttention()  # wrong
mha(x)  # wrong
mha(x, x, x, train=True)  # wrong
mha.to("cuda")  # wrong
mha.W_x  # wrong
mha(x, x, x).cuda()  # wrong
mha.load_state_dict(None)  # wrong
functional.dot_product_attention(x, x, x, causal="left")  # wrong
functional.dot_product_attention(x, x, x, is_causal=True)  # wrong
mha_c.masked_softmax(x, [1, 2], empty_rows=None)  # wrong
mha_c.set_num_threads("2")  # wrong
mha_c.transpose_qkv(x, "3")  # wrong
