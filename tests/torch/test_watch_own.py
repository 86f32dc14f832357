"""mha_c.torch.watch on models that compute their softmax themselves: each attention is seen, and nothing is changed."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import needs
from converted import tensors
from mha_c import torch as mt
from zoo import ZOO

pytestmark = pytest.mark.skipif(not needs.torch_reads(), reason="nothing is read here")
ALONE = ("ThreeLetters", "AttentionOfATranslator", "TranslatorWithMask")  # give their weights, which meet no values


class Own(nn.Module):
    """Heads, a causal mask, dropout in place behind the softmax."""

    def __init__(self, folded=False):
        super().__init__()
        self.qkv, self.folded, self.dropout = nn.Linear(8, 24), folded, nn.Dropout(0.5, inplace=True)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(2, 3) / 2
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
        if self.folded:
            weights = F.softmax(scores.flatten(0, 1), dim=-1)
            self.weights = weights.view(len(x), 2, *weights.shape[1:]) + 0
            return torch.bmm(self.dropout(weights), v.flatten(0, 1)).reshape(v.shape).transpose(1, 2).flatten(2)
        weights = scores.softmax(-1)
        self.weights = weights + 0
        return (self.dropout(weights) @ v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("folded", [False, True])
def test_weights_are_those_of_the_softmax(folded, training):
    model, x = nn.Sequential(Own(folded), nn.Linear(8, 8), Own(folded)).train(training), torch.randn(3, 5, 8)
    torch.manual_seed(0)
    expected = model(x)
    torch.manual_seed(0)
    with mt.watch(model) as seen:
        found = model(x)
    assert torch.equal(found, expected)
    if not training:  # torch itself refuses gradients behind a dropout in place
        grads = [torch.autograd.grad(out.square().sum(), [*model.parameters()]) for out in (found, expected)]
        assert all(torch.equal(one, other) for one, other in zip(*grads))
    assert [call.name for call in seen.calls] == ["0", "2"] and [call.kind for call in seen.calls] == ["softmax"] * 2
    for call, own in zip(seen.calls, (model[0], model[2])):
        assert torch.equal(call.weights, own.weights) and call.weights.shape == (3, 2, 5, 5)
        assert not call.weights.requires_grad and call.mask.shape[-2:] == (5, 5)
        torch.testing.assert_close(call.received(), own.weights.detach().sum(2))


@pytest.mark.parametrize("name", [name for name in ZOO if name not in ALONE])
def test_all_that_readers_write_is_seen(name):
    """The students' classes: as many calls as before, the same results, the weights that they keep."""
    module = ZOO[name].make().eval()
    for args, named in ZOO[name].calls:
        with torch.no_grad():
            expected = tensors(module(*args, **named))
            with mt.watch(module, compute="torch") as seen:
                found = tensors(module(*args, **named))
        assert len(seen) >= 1 and all(torch.equal(one, other) for one, other in zip(found, expected))
        for each in seen:  # each row sums to 1, or sees no key
            sums = each.weights.sum(-1)
            assert torch.allclose(sums[~sums.isnan()], torch.ones(()), atol=1e-5)


def test_no_other_softmax_is_seen():
    """Of a classifier, of a mixture of experts, of a gate."""

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.experts = nn.Linear(8, 4), nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x):
            share = self.gate(x).softmax(-1)
            return torch.einsum("bte,bted->btd", share, torch.stack([each(x) for each in self.experts], 2)).softmax(-1)

    model, x = Experts(), torch.randn(2, 5, 8)
    with mt.watch(model) as seen:
        model(x)
    assert len(seen) == 0


def test_weights_that_meet_others_later_are_no_call():
    """A rollout of the weights of two layers."""
    model, x = nn.Sequential(Own(), Own()).eval(), torch.randn(1, 5, 8)
    with mt.watch() as seen:
        model(x)
        model[0].weights @ model[1].weights
    assert len(seen) == 2
