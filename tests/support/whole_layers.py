"""d2l's layers with rows that no query sees, and all that a call of one gives."""

import torch

from notebook import additive, multi_head, wave

LENS = {"items": torch.tensor([3, 2]), "queries": torch.tensor([[1, 2, 3, 5], [2, 4, 1, 1]]), "none": None}
HIDDEN = 7.0  # in rows of keys and values that no query sees


def inputs():
    """queries, keys, values of two items with five keys, of which two or three are never seen: these are large."""
    queries, keys, values = wave(2, 4, 8), wave(3, 5, 8)[:2] + 0.1, wave(2, 5, 8) - 0.2
    for x in keys, values:
        x[0, 3:], x[1, 2:] = HIDDEN, -HIDDEN
    return [x.clone().requires_grad_() for x in (queries, keys, values)]


def layers(d2l):
    found = {"multi-head": multi_head(d2l), "dot": d2l.DotProductAttention(0.0)}
    if hasattr(d2l, "AdditiveAttention"):
        found["additive"] = additive(d2l)
    return found


def called(layer, lens, *given):
    """Output, gradients of inputs and of parameters, attention weights of one call with these lengths."""
    given = given or inputs()
    out = layer(*given, lens)
    inner = getattr(layer, "attention", layer)
    learned = [x for x in (*given, *layer.parameters()) if x.requires_grad and x.is_floating_point()]
    grads = torch.autograd.grad(out.square().sum(), learned, allow_unused=True)
    return [out, *(x for x in grads if x is not None), inner.attention_weights]
