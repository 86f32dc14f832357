"""attention_weights as a function of inputs and parameters: its gradient, whatever is done with them."""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from mha_c import torch as mt
from torch_derivatives import check, with_parameters
from torch_features import pairs
from torch_modules import entropy, leaf

# By torch, for jvp.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
F64 = torch.float64


@pytest.mark.parametrize("lens", [None, torch.tensor([3, 1]), torch.tensor([[0, 2, 1], [3, 3, 0]])])
@pytest.mark.parametrize("keys", [3, 30])  # the weights are kept; or they are computed again
def test_weights_in_a_loss(lens, keys):
    for ours, theirs in pairs(bias=True):
        results = []
        for layer in (ours, theirs):
            x = torch.linspace(-1, 1, 24, dtype=F64).reshape(2, 3, 4).requires_grad_()
            y = torch.linspace(-1, 2, 8 * keys, dtype=F64).reshape(2, keys, 4).requires_grad_()
            layer.zero_grad()
            out = layer(x, y, y, lens)
            shown = layer.attention.attention_weights if hasattr(layer, "attention") else layer.attention_weights
            assert shown.requires_grad and shown.grad_fn is not None and not shown.is_leaf
            (out.sum() + 0.1 * entropy(shown)).backward()
            results.append([x.grad, y.grad, *[p.grad for p in layer.parameters()]])
        torch.testing.assert_close(*results)


@pytest.mark.parametrize("keys", [3, 12])
def test_weights_are_differentiable(keys):
    for layer in (mt.MultiHeadAttention(2, 3, 2, 4, 2, 0.4, True), mt.AdditiveAttention(2, 3, 3, 0.4)):
        call, v = with_parameters(layer.double(), [keys, 1]), leaf(2, keys, 2)

        def weights(q, k, *parameters, layer=layer, call=call, v=v):
            call(q, k, v, *parameters)
            return layer.attention_weights * 1

        check(weights, leaf(2, 2, 3), leaf(2, keys, 2), *layer.parameters())


class Through(torch.autograd.Function):
    """What takes tensors without the protocol of subclasses."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


@pytest.mark.parametrize(
    "use",
    [
        lambda w: w.sum(-1).square().sum() + (w**3).sum(),
        lambda w: torch.cat([w, w]).square().sum(),
        lambda w: Through.apply(w).square().sum(),
        lambda w: torch.utils.checkpoint.checkpoint(lambda w: w.square().sum(), w, use_reentrant=False),
        lambda w: torch.stack(list(w)).max(),
        lambda w: w.clone().mT[0].square().sum(),
    ],
)
def test_no_use_of_weights_loses_their_gradient(use):
    import torch.utils.checkpoint

    layer = mt.MultiHeadAttention(8, 8, 8, 8, 2, 0.0).double()
    x = leaf(1, 40, 8)
    layer(x, x, x)
    found = torch.autograd.grad(use(layer.attention.attention_weights), [x, layer.W_k.weight])
    layer.attention.dropout.register_forward_hook(lambda *_: None)  # the composed way
    layer(x, x, x)
    expected = torch.autograd.grad(use(layer.attention.attention_weights), [x, layer.W_k.weight])
    torch.testing.assert_close(found, expected)


def test_weights_that_carry_no_gradient():
    layer, x = mt.MultiHeadAttention(8, 8, 8, 8, 2, 0.0), torch.randn(1, 40, 8, requires_grad=True)
    layer(x, x, x)
    weights = layer.attention.attention_weights
    assert np.array_equal(weights.numpy(), np.asarray(weights)) and weights.tolist()[0][0]
    for plain in (weights.detach(), copy.deepcopy(weights), pickle.loads(pickle.dumps(weights)), weights.data):
        assert not plain.requires_grad and torch.equal(plain, weights)
    with torch.no_grad():
        assert layer.attention_weights.requires_grad and not (weights * 1).requires_grad  # as d2l's
        layer(x, x, x)
    assert not layer.attention_weights.requires_grad
    for p in (x, *layer.W_q.parameters(), *layer.W_k.parameters()):
        p.requires_grad_(False)
    assert layer(x, x, x).requires_grad and not layer.attention_weights.requires_grad


def test_what_weights_cannot_do_is_said():
    layer, x = mt.MultiHeadAttention(8, 8, 8, 8, 2, 0.0), torch.randn(1, 40, 8, requires_grad=True)
    out = layer(x, x, x)
    weights = layer.attention.attention_weights
    for ask in (weights.retain_grad, lambda: weights.register_hook(print),
                lambda: torch.autograd.grad(out.sum(), weights, allow_unused=True)):  # fmt: skip
        with pytest.raises(RuntimeError, match="hook on the layer's dropout"):
            ask()
    for change in (lambda: layer.W_k.weight.add_(1), lambda: x.mul_(2)):
        layer(x, x, x)
        early = layer.attention_weights.sum()
        with torch.no_grad():
            change()
        for late in (early, layer.attention_weights.sum()):
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                late.backward()


def test_copies_of_a_module_after_a_training_step():
    model = nn.Sequential(nn.Linear(8, 8))
    layer = mt.MultiHeadAttention(8, 8, 8, 8, 2, 0.0)
    x = model(torch.randn(1, 40, 8))
    layer(x, x, x).sum().backward()
    layer.kept = layer.attention.attention_weights  # as the book's encoders do
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), copy.copy(layer)):
        assert torch.equal(twin.attention_weights, layer.attention_weights) and torch.equal(twin.kept, layer.kept)
