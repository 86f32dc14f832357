"""Numbers of tokens in the place of their vectors: the mistake is a missing embedding, not a type."""

import numpy as np
import pytest

import mha_c
import needs
from mha_c import functional

TOKENS = np.array([[1, 2, 3], [4, 5, 6]])
X = np.ones((2, 3, 8), np.float32)
CALLS = {
    "multi-head": lambda ours: ours.MultiHeadAttention(8, 2, 0.0),
    "dot": lambda ours: ours.DotProductAttention(0.0),
    "additive": lambda ours: ours.AdditiveAttention(8, 0.0),
    "grouped": lambda ours: ours.GQAAttention(8, 2, 1),
    "function": lambda ours: ours.functional.dot_product_attention,
    "labelled": lambda ours: lambda q, k, v: ours.variants.MultiHeadedSelfAttention(8, 2)(q),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("kind", ["array", "int32", "list", "tensor"])
def test_embed_them_first(name, kind):
    tokens, ours, x = TOKENS, mha_c, X
    if kind == "tensor":
        torch, ours = needs.module("torch"), needs.module("mha_c.torch")
        tokens, x = torch.tensor(TOKENS), torch.tensor(X)
    elif kind != "array":
        tokens = TOKENS.tolist() if kind == "list" else TOKENS.astype(kind)
    call = CALLS[name](ours)
    with pytest.raises(TypeError, match=r"^(queries|q|x) has shape \(2, 3\) .* embed them first"):
        call(tokens, tokens, tokens)
    if name != "labelled" and (name, kind) != ("function", "tensor"):  # which says that the types differ
        with pytest.raises(TypeError, match=r"^(keys|k) has shape \(2, 3\) .* embed them first"):
            call(x, tokens, x)


@pytest.mark.parametrize("side", ["numpy", "torch"])
def test_a_layer_without_vectors_is_not_told_to_embed(side):
    """KernelAttention takes numbers themselves: (Q,), (K,), (K,), or three axes."""
    ours, to = mha_c, lambda x: x
    if side == "torch":
        ours, to = needs.module("mha_c.torch"), needs.module("torch").tensor
    attention = ours.KernelAttention()
    with pytest.raises(mha_c.ShapeError, match=r"^queries must have shape .*got .*\(2, 3\)"):
        attention(*[to(TOKENS)] * 3)
    for shape in (-1,), (1, 2, 3):
        with pytest.raises(TypeError, match=r"float") as refused:
            attention(*[to(TOKENS.reshape(shape))] * 3)
        assert "embed" not in str(refused.value)


def test_other_whole_numbers_are_still_told_to_be_converted():
    with pytest.raises(TypeError, match=r"convert it, for example np.asarray\(q, np.float32\)"):
        functional.dot_product_attention(X.astype(int), X, X)
