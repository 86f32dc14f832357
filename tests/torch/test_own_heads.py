"""Heads in a list, each a module or projections of its own, side by side: one call of the core, if they are alike."""

import copy
import warnings

import pytest
import torch
from torch import nn

import mha_c.torch as mt
import needs

pytestmark = pytest.mark.skipif(not (needs.torch_reads() and needs.index_is_seen()), reason="nothing is read here")
X = torch.randn(2, 5, 8)


class Head(nn.Module):
    """`scale`, `window`: what may differ from head to head."""

    def __init__(self, width=4, scale=0.5, window=9):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, width, bias=i > 0) for i in range(3))
        self.scale, self.window, self.drop = scale, window, nn.Dropout(0.0)
        self.register_buffer("tril", torch.ones(16, 16).tril())

    def forward(self, x, mask=None):
        s = self.q(x) @ self.k(x).transpose(-2, -1) * self.scale
        if self.window < 9:
            i = torch.arange(x.shape[1])
            s = s.masked_fill(i[:, None] - i >= self.window, -torch.inf)
        s = s.masked_fill(self.tril[: x.shape[1], : x.shape[1]] == 0, -torch.inf)
        s = s if mask is None else s.masked_fill(mask[:, None] == 0, -torch.inf)
        return self.drop(s.softmax(-1)) @ self.v(x)


class Heads(nn.Module):
    def __init__(self, *heads):
        super().__init__()
        self.heads, self.o = nn.ModuleList(heads or (Head(), Head())), nn.Linear(8, 8)

    def forward(self, x, *mask):
        return self.o(torch.cat([head(x, *mask) for head in self.heads], dim=-1))


class Turned(Heads):
    def forward(self, x):
        return self.o(torch.cat([head(x) for head in reversed([*self.heads])], dim=-1))


class Summed(Heads):
    def forward(self, x):
        return self.o(torch.cat([self.heads[0](x), self.heads[0](x) + self.heads[1](x)], dim=-1))


class InRows(Heads):
    """One head for the first half of the tokens, the other for the rest: no heads of one attention."""

    def forward(self, x):
        return torch.cat([self.heads[0](x), self.heads[1](x)], dim=1)


class OfTwo(Heads):
    def forward(self, x, y):
        return self.o(torch.cat([self.heads[0](x), self.heads[1](y)], dim=-1))


def played(module, calls, change=lambda m: None):
    """Results and gradients of calls, some after a change, of the converted module and of its twin."""
    twin = copy.deepcopy(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mt.convert(module)
        for args in (*calls, *calls):
            torch.testing.assert_close(module(*args), twin(*args))
        change(module), change(twin)
        for args in (*calls, *calls):
            one, other = module(*args), twin(*args)
            torch.testing.assert_close(one, other)
            one.sin().sum().backward(), other.sin().sum().backward()
    for (name, x), y in zip(module.named_parameters(), twin.parameters()):
        torch.testing.assert_close(x.grad, y.grad, msg=name)
    return mt.report(module).as_dict()[""]["way"]


MASK = torch.tensor([[1, 1, 0, 1, 1], [1, 0, 1, 1, 0]])
FORMS = {
    "alike": (Heads, (), [(X,)]),
    "masked": (Heads, (), [(X, MASK)]),
    "last first": (Turned, (), [(X,)]),
    "both of one window": (Heads, (Head(window=3), Head(window=3)), [(X,)]),
}


@pytest.mark.parametrize("form", FORMS)
def test_heads_in_a_list_are_one_call(form):
    kind, heads, calls = FORMS[form]
    assert played(kind(*copy.deepcopy(heads)), calls) == "core"


OTHERS = {
    "other windows": (Heads, (Head(window=2), Head(window=3)), [(X,)]),
    "other scales": (Heads, (Head(scale=0.5), Head(scale=0.25)), [(X,)]),
    "other widths": (Heads, (Head(3), Head(5)), [(X,)]),
    "added": (Summed, (), [(X,)]),
    "in rows": (InRows, (Head(8), Head(8)), [(X,)]),
    "of two inputs": (OfTwo, (), [(X, X + 1)]),
    "of one input twice": (Heads, (shared := Head(), shared), [(X,)]),
}


@pytest.mark.parametrize("form", OTHERS)
def test_heads_that_are_not_alike_keep_their_numbers(form):
    kind, heads, calls = OTHERS[form]
    played(kind(*copy.deepcopy(heads)), calls)


CHANGES = {
    "a head's weight": lambda m: m.heads[1].k.weight.data.mul_(3),
    "another weight": lambda m: setattr(m.heads[0].v, "weight", nn.Parameter(torch.ones(4, 8))),
    "scale": lambda m: setattr(m.heads[1], "scale", 2.0),
    "table": lambda m: m.heads[1].tril.fill_(1),
    "turned": lambda m: setattr(m, "heads", nn.ModuleList([*m.heads][::-1])),
    "a hook": lambda m: m.heads[0].register_forward_hook(lambda module, args, out: out * 2) and None,
    "another head": lambda m: m.heads.__setitem__(0, Head(window=2)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_one_head_are_seen(change):
    torch.manual_seed(0)
    played(Heads(), [(X,)], lambda m: (torch.manual_seed(1), CHANGES[change](m)))
