"""Lines whose difference a first call of small sizes, or of items that are all alike, does not show: a part that is the
whole there, what is taken from scores, what is written through a view that turns them."""

import copy
import math

import pytest
import torch
from torch import nn

import mha_c.torch as mt
import needs

pytestmark = pytest.mark.skipif(not needs.torch_reads(), reason="nothing is read here")


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))

    def given(self, x):
        return x

    def heads(self, q, k, v):
        return q, k, v

    def scores(self, s):
        return s

    def mixed(self, y):
        return y

    def forward(self, x):
        x = self.given(x)
        q, k, v = self.heads(*(f(x).unflatten(-1, (4, -1)).transpose(1, 2) for f in (self.q, self.k, self.v)))
        y = self.scores(q @ k.transpose(-2, -1) / math.sqrt(8)).softmax(-1) @ v
        return self.o(self.mixed(y).transpose(1, 2).flatten(2))


def causal(s):
    return torch.ones(s.shape[-2:], dtype=torch.bool).tril(-1)


def turned(self, s):
    s.transpose(-2, -1).masked_fill_(causal(s), -1e9)
    return s


def reshaped(self, s):
    s.view(-1, *s.shape[-2:]).masked_fill_(causal(s).transpose(0, 1), -1e9)
    return s


# What a class does otherwise, the words of the reason, or "" where it is the core's.
PARTS = {
    "first_keys": ({"heads": lambda self, q, k, v: (q, k[:, :, :4], v[:, :, :4])}, "a part of"),
    "first_of_all": ({"heads": lambda self, q, k, v: (q[:, :, :4], k[:, :, :4], v[:, :, :4])}, "a part of"),
    "first_queries": ({"mixed": lambda self, y: y[:, :, :4]}, "getitem follows"),
    "first_positions": ({"given": lambda self, x: x[:, :4]}, "getitem"),
    "half_of_the_items": ({"given": lambda self, x: x[: x.shape[0] // 2 + 1]}, "getitem"),
    "half_of_the_positions": ({"given": lambda self, x: x[:, : x.shape[1] // 2 + 1]}, "getitem"),
    "the_first_item": ({"given": lambda self, x: x[:1].expand_as(x)}, "expand"),
    "largest_of_a_row": ({"scores": lambda self, s: s - s.amax(-1, keepdim=True)}, ""),
    "largest_of_all": ({"scores": lambda self, s: s - s.max()}, ""),
    "largest_of_a_column": ({"scores": lambda self, s: s - s.amax(-2, keepdim=True)}, "from key to key"),
    "larger_of_two": ({"scores": lambda self, s: s - torch.max(s, torch.zeros_like(s))}, "from key to key"),
    "turned": ({"scores": turned}, "a view that turns them"),
    "reshaped": ({"scores": reshaped}, ""),
    "detached": ({"scores": lambda self, s: s.detach()}, "scores go through detach"),
    "flipped": ({"mixed": lambda self, y: y.flip(1)}, "flip follows"),
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", PARTS)
def test_a_first_call_that_shows_nothing(name, grad):
    methods, words = PARTS[name]
    own = type("Part", (Own,), methods)()
    module = mt.convert(copy.deepcopy(own))
    calls = [torch.ones(*sizes, 32) for sizes in ((1, 1), (1, 2), (2, 4), (2, 2), (3, 4))]
    calls += [torch.randn(*sizes, 32) for sizes in ((2, 4), (2, 7), (5, 6), (1, 9))]
    with torch.set_grad_enabled(grad):
        for x in calls:
            # float32 in another order of operations.
            torch.testing.assert_close(module(x), own(x), rtol=1e-5, atol=1e-5)
    reason = mt.report(module).as_dict()[""]["reason"]
    assert words in reason if words else reason is None, reason
