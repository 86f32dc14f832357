"""Rotary positions that readers write: the core turns by their own tables, as they are in each call."""

import copy

import pytest
import torch
from torch import nn

import mha_c.torch as mt
import needs
from converted import TOLERANCE
from reader_scripts import converted, played, way

pytestmark = pytest.mark.skipif(not needs.torch_reads(), reason="nothing is read here")
MANY = 16  # positions of a table


def angles_of(n, width):
    return torch.outer(torch.arange(n).float(), 10000.0 ** (-torch.arange(0, width, 2).float() / width))


def halves(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def neighbours(x, cos, sin):
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)


def rotate_every_two(x):
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).reshape(x.shape)


def as_complex(x, table):
    return torch.view_as_real(torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * table).flatten(-2)


class Turned(nn.Module):
    """(B, H, T, D) are turned by rows of a table; `angles` are (T, D/2)."""

    width = 8

    def __init__(self, d=32, heads=4, joint=True, dropout=0.0):
        super().__init__()
        self.heads, self.joint, self.drop = heads, joint, nn.Dropout(dropout)
        self.qkv, self.o = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.q, self.k, self.v = (nn.Linear(d, d) for _ in range(3))
        angles = angles_of(MANY, self.width)
        self.register_buffer("cos", angles.cos()), self.register_buffer("sin", angles.sin())

    def turn(self, x):
        n = x.shape[-2]
        return neighbours(x, self.cos[:n], self.sin[:n])

    def turns(self, q, k, v):
        return self.turn(q), self.turn(k), v

    def forward(self, x):
        parts = self.qkv(x).chunk(3, -1) if self.joint else (self.q(x), self.k(x), self.v(x))
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in parts)
        q, k, v = self.turns(q, k, v)
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
        return self.o((self.drop(scores.softmax(-1)) @ v).transpose(1, 2).flatten(2))


def with_turn(turn, **names):
    return type("Form", (Turned,), {"turn": turn, **names})


def wide(m, x, join=torch.cat):
    n = x.shape[-2]
    return (join((t[:n], t[:n]), -1) for t in (m.cos, m.sin))


def partly(m, x):
    n = x.shape[-2]
    return torch.cat((neighbours(x[..., :4], m.cos[:n], m.sin[:n]), x[..., 4:]), -1)


def apart(m, x):  # what comes out lies in another order
    n = x.shape[-2]
    a, b = x[..., ::2], x[..., 1::2]
    return torch.cat((a * m.cos[:n] - b * m.sin[:n], a * m.sin[:n] + b * m.cos[:n]), -1)


FORMS = {
    "neighbours": Turned, "halves": with_turn(lambda m, x: halves(x, *wide(m, x))),
    "complex": with_turn(lambda m, x: as_complex(x, torch.complex(m.cos, m.sin)[: x.shape[-2]])),
    "every_two": with_turn(lambda m, x: x * m.cos[: x.shape[-2]].repeat_interleave(2, -1) + rotate_every_two(x)
                           * m.sin[: x.shape[-2]].repeat_interleave(2, -1)),
    "heads_behind": with_turn(lambda m, x: neighbours(x.transpose(1, 2), m.cos[: x.shape[2], None],
                                                      m.sin[: x.shape[2], None]).transpose(1, 2)),
    "computed": with_turn(lambda m, x: neighbours(x, (a := angles_of(x.shape[-2], 8)).cos(), a.sin())),
    "other_way": with_turn(lambda m, x: neighbours(x, m.cos[: x.shape[-2]], -m.sin[: x.shape[-2]])),
    "partly": with_turn(partly, width=4), "apart": with_turn(apart),
}  # fmt: skip


@pytest.mark.parametrize("joint", (True, False))
@pytest.mark.parametrize("name", FORMS)
def test_turned_heads_are_the_cores(name, joint):
    """Results, gradients, other sizes, and other numbers in the table after the first call."""
    torch.manual_seed(1)
    module = FORMS[name](joint=joint)
    twin = copy.deepcopy(module)
    converted(module)

    def same(n):
        results = []
        x = torch.randn(2, n, 32)
        for one in (module, twin):
            one.zero_grad()
            own = x.clone().requires_grad_()
            out = one(own)
            out.square().sum().backward()
            results.append([out, own.grad, *(p.grad for p in one.parameters() if p.grad is not None)])
        for got, expected in zip(*results):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)  # as TOLERANCE, of sums of 18 rows

    for n in (9, 4, 9, 16, 4, 16):
        same(n)
    assert way(module, torch.randn(2, 4, 32).requires_grad_()) == "core" or not needs.index_is_seen()
    for change in (
        lambda m: m.cos.mul_(0.5),
        lambda m: m.sin.data.add_(0.1),
        lambda m: m.register_buffer("sin", m.cos),
    ):
        change(module), change(twin)
        same(9), same(4)


LEFT = {
    "queries_alone": with_turn(Turned.turn, turns=lambda m, q, k, v: (m.turn(q), k, v)),
    "values_too": with_turn(Turned.turn, turns=lambda m, q, k, v: (m.turn(q), m.turn(k), m.turn(v))),
    "two_tables": with_turn(Turned.turn, turns=lambda m, q, k, v: (m.turn(q), as_complex(
        k, torch.complex(m.sin, m.cos)[: k.shape[-2]]), v)),
    "rows_moved": with_turn(Turned.turn, turns=lambda m, q, k, v: (m.turn(q), neighbours(
        k, m.cos[1 : 1 + k.shape[-2]], m.sin[1 : 1 + k.shape[-2]]), v)),
    "two_orders": with_turn(Turned.turn, turns=lambda m, q, k, v: (m.turn(q), apart(m, k), v)),
    "wrong_sign": with_turn(lambda m, x: torch.stack((
        x[..., ::2] * m.cos[: x.shape[-2]] - x[..., 1::2] * m.sin[: x.shape[-2]],
        x[..., 1::2] * m.cos[: x.shape[-2]] - x[..., ::2] * m.sin[: x.shape[-2]]), -1).flatten(-2)),
    "halves_differ": with_turn(lambda m, x: halves(x, *wide(m, x, lambda ts, axis: torch.cat((ts[0], ts[1] * 2), -1)))),
    "of_heads": with_turn(lambda m, x: neighbours(x, m.cos[:4, None], m.sin[:4, None])),
    "stretched": with_turn(lambda m, x: x * m.cos[: x.shape[-2]].repeat(1, 2)),
    "negated_once": with_turn(lambda m, x: halves(x, *wide(m, x)) + x * 0.5),
    "learned": with_turn(lambda m, x: neighbours(x, m.o.weight[: x.shape[-2], :4], m.o.weight[: x.shape[-2], 4:8])),
    "dropped": with_turn(lambda m, x: neighbours(x, nn.functional.dropout(m.cos[: x.shape[-2]]), m.sin[: x.shape[-2]])),
    "of_the_input": with_turn(lambda m, x: neighbours(x, x.mean((0, 1))[:, :4].cos(), x.mean((0, 1))[:, :4].sin())),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_what_is_no_turn_of_the_cores_is_left(name):
    def script(m, see):
        m.eval()
        for n in (9, 4, 9):
            see.thrice(m, torch.randn(2, n, 32))

    played(LEFT[name], script)
    module = converted(LEFT[name]())
    for _ in range(2):
        module(torch.randn(2, 9, 32))
    assert way(module, torch.randn(2, 9, 32)) != "core" and mt.report(module).as_dict()[""]["reason"]


class GivenTables(nn.Module):
    """Tables of each item, (B, 1, T, D), are arguments."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x, cos, sin):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        q, k = halves(q, cos, sin), halves(k, cos, sin)
        return self.o(((q @ k.mT / 8**0.5).softmax(-1) @ v).transpose(1, 2).flatten(2))


def tables(items, n, twice=True, gradient=False):
    angles = angles_of(64, 8)[torch.randint(0, 64, (items, n))]
    found = [t.repeat(1, 1, 2)[:, None] for t in (angles.cos(), angles.sin())]
    if not twice:
        found[1] = found[1] * torch.arange(1, 9)
    return [t.requires_grad_(gradient) for t in found]


def test_tables_of_each_item_are_read_anew_in_each_call():
    def script(m, see):
        m.eval()
        for items, n, twice in ((2, 9, True), (3, 4, True), (2, 9, False), (1, 9, True), (2, 9, True)):
            x = torch.randn(2, n, 32)
            see.thrice(m, x, *tables(items, n, twice))
        cos, sin = tables(2, 9, gradient=True)
        see.thrice(m, torch.randn(2, 9, 32), cos, sin)

    played(GivenTables, script)
    module = converted(GivenTables())
    for _ in range(2):
        module(torch.randn(2, 9, 32), *tables(2, 9))
    assert way(module, torch.randn(2, 9, 32), *tables(2, 9)) == "core"


@pytest.mark.skipif(
    not (needs.torch_reads() and needs.index_is_seen()), reason="the reader's own lines, which save the table itself"
)
def test_a_table_that_changes_before_the_backward_pass_gives_the_gradients_of_the_call():
    module = FORMS["neighbours"]()
    twin = copy.deepcopy(module)
    converted(module)
    module(torch.randn(2, 9, 32, requires_grad=True))
    for _ in range(3):
        x = torch.randn(2, 9, 32, requires_grad=True)
        y = x.detach().clone().requires_grad_()
        out = module(x)
        with torch.no_grad():
            module.cos.data.mul_(-1)
        (out.sum() + twin(y).sum()).backward()
        torch.testing.assert_close(x.grad, y.grad, **TOLERANCE)
        twin.cos.data.mul_(-1)
