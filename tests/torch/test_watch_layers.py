"""mha_c.torch.watch: calls of our layers, of our functions and of the book's own classes."""

import numpy as np
import pytest
import torch
from torch import nn

from mha_c import torch as mt
from watching import CLOSE

KEEP = np.tri(5, 7, 2, dtype=bool)  # an array


class Ours(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = mt.MultiHeadAttention(16, 2, 0.1)
        self.one = mt.DotProductAttention(0.1)
        self.additive = mt.AdditiveAttention(8, 0.1)
        self.of_torch = mt.nn.MultiheadAttention(16, 2, batch_first=True)
        self.other = mt.variants.MultiHeadedSelfAttention(16, 2)

    def forward(self, x, lens):
        x = self.heads(x, x, x, lens)
        x = self.one(x, x, x, lens)
        x = self.additive(x, x, x)
        x = self.of_torch(x, x, x)[0]
        return self.other(x)


def test_our_layers():
    model, x, lens = Ours().eval(), torch.randn(2, 5, 16), torch.tensor([3, 0])
    model(x, lens)
    expected = model(x, lens)
    with mt.watch(model) as seen:
        found = model(x, lens)
        assert torch.equal(found, expected)  # by the same ways: the same bits
    kinds = {call.name: call for call in seen.calls}
    assert list(kinds) == ["heads", "one", "additive", "of_torch", "other"]
    for name in ("heads", "one", "additive", "other"):
        weights = getattr(model, name).attention_weights
        weights = weights if weights.dim() == 4 else weights[:, None]
        torch.testing.assert_close(kinds[name].weights, weights.detach(), **CLOSE)
        torch.testing.assert_close(kinds[name].received(), weights.detach().sum(2), **CLOSE)
    assert kinds["heads"].valid_lens.tolist() == [3, 0]


def test_layers_with_children_of_other_kinds():
    """A hook on a child, or another child: the layer calls its children one by one, and is noted once."""
    x = torch.randn(2, 5, 16)
    hooked, other = mt.MultiHeadAttention(16, 2, 0.0), mt.MultiHeadAttention(16, 2, 0.0)
    other.attention = mt.AdditiveAttention(8, 0.0)
    hooked.W_q.register_forward_hook(lambda *_: None)
    for layer in (hooked, other):
        with mt.watch(layer) as seen:
            layer(x, x, x)
        (call,) = seen.calls
        assert call.kind == "MultiHeadAttention" and call.heads == 2
        torch.testing.assert_close(call.weights, layer.attention_weights.detach(), **CLOSE)


def test_functions_of_ours():
    q, k, bias = torch.randn(2, 5, 8), torch.randn(2, 7, 8), torch.randn(5, 7)
    with mt.watch() as seen:
        mt.functional.dot_product_attention(q, k, k, [3, 7], bias=bias, window=(2, None), causal="bottom_right")
        mt.functional.additive_attention(q, k, k, torch.ones(8), softcap=2.0)
        mt.functional.dot_product_attention(q, k, k, keep_mask=KEEP)
    found = [
        mt.functional.dot_product_attention(q, k, k, [3, 7], bias=bias, window=(2, None), causal="bottom_right",
                                            return_weights=True)[1],
        mt.functional.additive_attention(q, k, k, torch.ones(8), softcap=2.0, return_weights=True)[1],
        mt.functional.dot_product_attention(q, k, k, keep_mask=KEEP, return_weights=True)[1],
    ]  # fmt: skip
    for call, weights in zip(seen.calls, found):
        torch.testing.assert_close(call.weights[:, 0], weights, **CLOSE)
    assert seen.calls[0].causal == "bottom_right" and seen.calls[0].mask is bias


def test_the_books_own_classes(d2l):
    sizes = (16, 16, 16) if "0_17" in d2l.__name__ else ()
    encoder = nn.ModuleDict({"self": d2l.MultiHeadAttention(*sizes, 16, 2, 0.0)})
    one, x, lens = d2l.DotProductAttention(0.0), torch.randn(2, 5, 16), torch.tensor([3, 5])
    with mt.watch() as seen:
        encoder["self"](x, x, x, lens)
        one(x, x, x, lens)
    assert [call.kind for call in seen.calls] == ["MultiHeadAttention", "DotProductAttention"]
    inner = encoder["self"].attention.attention_weights
    torch.testing.assert_close(seen.calls[0].weights, inner.reshape(2, 2, 5, 5).detach(), rtol=0, atol=0)
    torch.testing.assert_close(seen.calls[1].weights[:, 0], one.attention_weights, rtol=0, atol=0)
    assert "__call__" not in vars(d2l.MultiHeadAttention)


class WithHeads(nn.Module):
    """Of the book's name, with heads in its own `forward`, and no child called attention."""

    def __init__(self, num_heads):
        super().__init__()
        self.num_heads = num_heads

    def forward(self, x, folds):
        batch, rows, _ = x.shape
        q = x.reshape(batch, rows, self.num_heads, -1).transpose(1, 2)
        weights = torch.softmax(q @ q.transpose(2, 3), -1)
        self.attention_weights = weights.flatten(0, 1) if folds else weights.mean(1)
        return (weights @ q).transpose(1, 2).flatten(2)


def test_heads_of_a_class_that_computes_them_itself():
    kind = type("MultiHeadAttention", (WithHeads,), {})
    x = torch.randn(3, 4, 8)
    for folds, heads in ((True, 2), (False, 1)):
        model = kind(2)
        with mt.watch(model) as seen:
            model(x, folds)
        assert seen.calls[0].weights.shape == (3, heads, 4, 4)
        torch.testing.assert_close(seen.calls[0].weights.flatten(0, 1), model.attention_weights)


def test_the_padding_mask_of_a_call():
    model, x = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 4, 8)
    padding = torch.tensor([[False, False, False, True], [False, False, True, True]])
    with mt.watch(model) as seen:
        model(x, x, x)
        model(x, x, x, key_padding_mask=padding)
        model(x, x, x, key_padding_mask=padding, attn_mask=torch.zeros(4, 4, dtype=torch.bool))
    assert seen.calls[0].mask is None and seen.calls[2].mask.shape == (4, 4)
    mask = seen.calls[1].mask  # as torch gave it: in floats, before torch 2 in bools
    assert torch.equal(mask if mask.dtype is torch.bool else mask == -torch.inf, padding)
    assert "mask" in repr(seen.calls[1])


def test_a_model_with_a_softmax_of_its_own_is_told_what_to_do():
    with mt.watch() as seen:
        torch.softmax(torch.randn(2, 3, 3), -1)
    for ask, error in ((seen.view, ValueError), (seen.playground, ValueError), (lambda: seen[0], IndexError)):
        with pytest.raises(error, match=r"computes its own softmax.*convert\(model\).*view\(weights\)"):
            ask()
    assert "convert(model)" in repr(seen)
