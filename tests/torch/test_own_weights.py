"""Projections by weights of any axes, by weights that are made of parameters in the call, and side by side."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mha_c.torch as mt
import needs
from reader_scripts import converted, played

pytestmark = pytest.mark.skipif(not needs.torch_reads(), reason="nothing is read here")
D, H, K = 8, 2, 3


def made(*shape):
    return nn.Parameter(torch.randn(shape) / 3)


def attended(q, k, v):
    return (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(-1) @ v


class Form(nn.Module):
    """`heads(x, W, b)` gives (B, H, T, K); W has the axes of `axes`."""

    axes = "hdk"

    def __init__(self):
        super().__init__()
        sizes = {"h": H, "d": D, "k": K}
        for name in "qkv":
            setattr(self, name, made(*[sizes[x] for x in self.axes]))
            setattr(self, f"b{name}", made(H, K))
        self.o, self.bo = made(H, K, D), made(D)

    def output(self, z):
        return torch.einsum("bhqk,hkd->bqd", z, self.o) + self.bo

    def forward(self, x):
        q, k, v = (self.heads(x, getattr(self, n), getattr(self, f"b{n}")) for n in "qkv")
        return self.output(attended(q, k, v))


def form(heads, axes="hdk", **names):
    return type("Drawn", (Form,), {"heads": lambda m, *given: heads(*given), "axes": axes, **names})


FORMS = {
    "hdk": form(lambda x, W, b: torch.einsum("btd,hdk->bhtk", x, W) + b[:, None]),
    "dhk": form(lambda x, W, b: (torch.einsum("btd,dhk->bthk", x, W) + b).transpose(1, 2), "dhk"),
    "hkd": form(lambda x, W, b: torch.einsum("btd,hkd->bthk", x, W).permute(0, 2, 1, 3), "hkd"),
    "khd": form(lambda x, W, b: torch.einsum("hkd,btd->bthk", W.permute(1, 0, 2), x).transpose(1, 2), "khd"),
    "by_matmul": form(lambda x, W, b: x[:, None] @ W + b[:, None]),
    "of_a_view": form(lambda x, W, b: torch.einsum("btd,dhk->bhtk", x, W.flatten(1).view(D, H, K)), "dhk"),
    "output_is_flat": form(
        lambda x, W, b: torch.einsum("btd,hdk->bhtk", x, W),
        output=lambda m, z: z.transpose(1, 2).flatten(2) @ m.o.flatten(0, 1) + m.bo,
    ),
    "output_of_heads_last": form(
        lambda x, W, b: torch.einsum("btd,hdk->bthk", x, W).transpose(1, 2),
        output=lambda m, z: torch.einsum("bqkh,hkd->bqd", z.permute(0, 2, 3, 1), m.o),
    ),
    "scaled_weights": form(
        lambda x, W, b: (x @ (W * 2.0).permute(1, 0, 2).reshape(D, -1)).unflatten(-1, (H, K)).transpose(1, 2)
    ),
    "by_stack": form(
        lambda x, W, b: (
            F.linear(x, torch.cat([w.t() for w in W]), torch.cat([*b])).unflatten(-1, (H, K)).transpose(1, 2)
        )
    ),
}


class LowRank(nn.Module):
    """W + B A, and a mask of weights."""

    def __init__(self):
        super().__init__()
        self.qkv, self.A, self.B = nn.Linear(D, 3 * D), made(2, D), made(3 * D, 2)
        self.register_buffer("keeps", (torch.rand(3 * D, D) > 0.3).float())

    def forward(self, x):
        W = (self.qkv.weight + self.B @ self.A) * self.keeps
        q, k, v = F.linear(x, W, self.qkv.bias).unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4)
        return attended(q, k, v).transpose(1, 2).flatten(2)


class SideBySide(nn.Module):
    """One weight for [query; key]."""

    def __init__(self, first="query", n_query=6, n_key=4):
        super().__init__()
        self.first, self.W, self.v = first, nn.Linear(n_query + n_key, 5), nn.Linear(5, 1, bias=False)

    def forward(self, query, key, value, mask=None):
        both = [query[:, :, None].expand(-1, -1, key.shape[1], -1), key[:, None].repeat(1, query.shape[1], 1, 1)]
        both = both if self.first == "query" else both[::-1]
        scores = self.v(torch.tanh(self.W(torch.cat(both, -1)))).squeeze(-1)
        scores = scores if mask is None else scores.masked_fill(~mask[:, None], -1e9)
        return scores.softmax(-1) @ value


FORMS["low_rank"] = LowRank
FORMS["query_beside_key"] = SideBySide
FORMS["key_beside_query"] = lambda: SideBySide("key")


def inputs_of(module, n=5):
    if isinstance(module, SideBySide):
        mask = torch.rand(2, n) < 0.7
        return [torch.randn(2, 3, 6), torch.randn(2, n, 4), torch.randn(2, n, 7), mask | ~mask.any(-1, keepdim=True)]
    return [torch.randn(2, n, D)]


@pytest.mark.parametrize("name", FORMS)
def test_weights_of_any_form_are_read(name):
    """Results, gradients, other sizes, and weights that change after the first call."""
    torch.manual_seed(1)
    module = FORMS[name]()
    twin = copy.deepcopy(module)
    converted(module)

    def same(n):
        given, results = inputs_of(module, n), []
        for one in (module, twin):
            one.zero_grad()
            own = [x.clone().requires_grad_() if x.is_floating_point() else x for x in given]
            out = one(*own)
            out.square().sum().backward()
            grads = [x.grad for x in (*own, *one.parameters()) if x.grad is not None]
            results.append([out, *grads])
        for got, expected in zip(*results):
            largest = max(1.0, float(expected.detach().abs().max()))  # float32, sums of some tens of terms like this
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5 * largest)

    for n in (5, 9, 5, 4, 9):
        same(n)
    assert mt.report(module).as_dict()[""]["way"] == "core"
    for change in (lambda p: p.data.mul_(0.5), lambda p: p.detach().add_(0.1)):
        for one in (module, twin):
            for p in one.parameters():
                change(p)
        same(5)


def test_hostile_weights_keep_the_readers_numbers():
    def hostile(kind):
        def heads(x, W, b):
            if kind == "of_the_data":
                W = W * x.mean()
            elif kind == "dropped":
                W = F.dropout(W, 0.5, True)
            elif kind == "detached":
                W = W.detach()
            elif kind == "without_gradients":
                with torch.no_grad():
                    W = W * 2.0
            elif kind == "other_for_each_head":
                return torch.einsum("bhtd,hdk->bhtk", torch.stack([x, x * 2], 1), W)
            elif kind == "bias_of_positions":
                return torch.einsum("btd,hdk->bhtk", x, W) + torch.arange(x.shape[1])[:, None] * b[0, 0]
            return torch.einsum("btd,hdk->bhtk", x, W) + b[:, None]

        return form(heads)

    def script(m, see):
        for n in (5, 9, 5):
            see.thrice(m, torch.randn(2, n, D))
        loss = m(torch.randn(2, 5, D)).square().sum()
        loss.backward()
        see([p.grad for p in m.parameters() if p.grad is not None])

    for kind in ("of_the_data", "dropped", "detached", "without_gradients", "other_for_each_head", "bias_of_positions"):
        played(hostile(kind), script)


class Mean(nn.Module):
    """The mean of the weights of all heads is returned."""

    mean = staticmethod(lambda w: w.mean(1))

    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        w = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(-1)
        return self.o((w @ v).transpose(1, 2).flatten(2)), self.mean(w)


MEANS = {
    "heads": (lambda w: w.mean(1), True), "by_name": (lambda w: w.mean(dim=-3), True),
    "kept": (lambda w: w.mean(1, keepdim=True), True), "turned": (lambda w: w.mean(1).transpose(1, 2), True),
    "queries": (lambda w: w.mean(2), False), "keys": (lambda w: w.mean(-1), False), "all": (lambda w: w.mean(), False),
    "items": (lambda w: w.mean(0), False), "two": (lambda w: w.mean((1, 2)), False),
    "twice": (lambda w: w.mean(1).mean(1), False),
}  # fmt: skip


@pytest.mark.parametrize("name", MEANS)
def test_the_mean_over_heads_is_returned(name):
    mean, by_core = MEANS[name]
    kind = type("Mean", (Mean,), {"mean": staticmethod(mean)})

    def script(m, see):
        with torch.no_grad():
            for n in (5, 2, 5):
                see.thrice(m.eval(), torch.randn(2, n, 8))
        see.thrice(m, torch.randn(2, 5, 8))

    played(kind, script)
    module = converted(kind().eval())
    with torch.no_grad():
        for _ in range(2):
            module(torch.randn(2, 5, 8))
    assert (mt.report(module).as_dict()[""]["way"] == "core") is by_core
