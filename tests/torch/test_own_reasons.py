"""The reason of a class that is left is the line's own: what is kept, what follows the softmax, what scales."""

import warnings

import pytest
import torch
from torch import nn

import mha_c.torch as mt
import needs

pytestmark = pytest.mark.skipif(not needs.torch_reads(), reason="nothing is read here")


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.o, self.tau = nn.Linear(32, 96), nn.Linear(32, 32), nn.Parameter(torch.ones(1))
        self.aux = None

    def scores(self, s):
        return s

    def weights(self, w):
        return w

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (y.view(B, T, 4, C // 4).transpose(1, 2) for y in self.qkv(x).split(C, dim=2))
        w = self.weights(self.scores(q @ k.transpose(-2, -1) / 8**0.5).softmax(-1))
        return self.o((w @ v).transpose(1, 2).reshape(B, T, C))


class KeepsLoss(Own):
    def weights(self, w):
        self.aux = -(w * w.clamp_min(1e-9).log()).sum(-1).mean()
        return w


class KeepsScores(Own):
    def scores(self, s):
        self.aux = s
        return s


class GivesScores(Own):
    def forward(self, x):
        q, k, v = (y.unflatten(-1, (4, 8)).transpose(1, 2) for y in self.qkv(x).split(32, dim=2))
        s = q @ k.transpose(-2, -1) / 8**0.5
        return self.o((s.softmax(-1) @ v).transpose(1, 2).flatten(2)), s


class Clamps(Own):
    def weights(self, w):
        return w.clamp(min=1e-9)


class Tempers(Own):
    def scores(self, s):
        hidden = torch.ones(s.shape[-2:], dtype=torch.bool).triu(1)
        return s.masked_fill(hidden, float("-inf")) / self.tau


@pytest.mark.parametrize(
    ("kind", "words", "line"),
    [
        (KeepsLoss, "it keeps aux, which is not its weights", "self.aux = -(w"),
        (KeepsScores, "it keeps aux, which is not its weights", "self.aux = s"),
        (GivesScores, "it gives what comes before the softmax", "s = q @ k"),
        (Clamps, "clamp follows the softmax, before its weights meet values", "w.clamp(min=1e-9)"),
        (Tempers, "a tensor scales the scores", ".softmax(-1)"),
    ],
)
def test_the_reason_is_of_the_line(kind, words, line):
    module = kind()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mt.convert(module, torch.randn(2, 9, 32))
    found = mt.report(module).as_dict()[""]
    assert found["way"] == "left" and found["reason"] == words and line in found["line"]


def test_torchs_function_behind_projections_is_one_call():
    """Its own scale is that of head_dim, also where that follows from a size."""

    class Fused(Own):
        def forward(self, x):
            B, T, C = x.size()
            q, k, v = (y.view(B, T, 4, C // 4).transpose(1, 2) for y in self.qkv(x).split(C, dim=2))
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.o(y.transpose(1, 2).reshape(B, T, C))

    module, x = Fused().eval(), torch.randn(2, 9, 32)
    own = module(x)
    mt.convert(module, x)
    assert mt.report(module).as_dict()[""]["way"] == "core"
    assert torch.allclose(module(x), own, atol=1e-5)  # sums of 32 products in another order
