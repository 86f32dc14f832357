"""Readers' classes of the kinds K to M: what depends on modes and types, on weights, on large numbers."""

import torch
from torch import nn
from torch.nn import functional as F

from reader_cases import Base, Sized, case, hide_future, of_sizes

# --- K: modes, types -------------------------------------------------------------------------------------------------


def in_modes(m, see):
    x = torch.randn(2, 9, 32)
    for _ in range(2):
        see.thrice(m.eval(), x)
        with torch.no_grad():
            see.thrice(m, x)
        with torch.inference_mode():
            see.thrice(m, x)
        see.thrice(m.train(), x)
        out = see.thrice(m, x.clone().requires_grad_(True))
        see(torch.autograd.grad(out.sum(), [*m.parameters()]))
        with torch.no_grad():
            see.thrice(m, x.clone().requires_grad_(True))
    m.double()
    see.thrice(m, x.double())
    see.call(m, x)  # of another type
    m.float()
    for p in m.parameters():
        p.requires_grad_(False)
    see.thrice(m, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        see(m(x).dtype)


for name, change in {
    "is_grad_enabled": lambda s, q, k: s * (2.0 if torch.is_grad_enabled() else 1.0),
    "requires_grad": lambda s, q, k: s * (2.0 if q.requires_grad else 1.0),
    "dtype": lambda s, q, k: s * (2.0 if q.dtype == torch.float64 else 1.0),
    "is_inference": lambda s, q, k: s * (2.0 if torch.is_inference_mode_enabled() else 1.0),
    "device": lambda s, q, k: s * (2.0 if q.device.type == "cpu" else 1.0),
    "contiguous": lambda s, q, k: s * (2.0 if q.is_contiguous() else 1.0),
    "finfo": lambda s, q, k: s + torch.finfo(s.dtype).eps,
    "plain": lambda s, q, k: s,
    "default_dtype": lambda s, q, k: s * torch.get_default_dtype().itemsize,
}.items():
    case("K", in_modes, name=f"mode_{name}", change=change)(Sized)


class InTraining(Base):
    def scores(self, q, k):
        s = super().scores(q, k)
        return s * 2 if self.training else s


case("K", in_modes)(InTraining)


# --- L: weights -------------------------------------------------------------------------------------------------------


def with_weights(m, see):
    x = torch.randn(2, 9, 32)
    inputs = [x] * (3 if isinstance(m, Cooled) else 1)
    see.thrice(m, *inputs)
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    for _ in range(4):
        out = see.call(m, *inputs)
        optimizer.zero_grad()
        out.square().mean().backward()
        optimizer.step()
    see({name: p for name, p in m.named_parameters()})
    see({name: p.grad for name, p in m.named_parameters()})
    with torch.no_grad():
        for p in m.parameters():
            p.mul_(30.0)
    see.thrice(m, *inputs)
    for p in m.parameters():
        p.data = p.data / 20
    see.thrice(m, *inputs)


@case("L", with_weights)
class Cooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.tau = nn.Parameter(torch.tensor(2.0))

    def forward(self, query, key, value):
        s = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
        return (s / self.tau.clamp(min=1.0)).softmax(-1) @ value


@case("L", with_weights)
class Renormed(Base):
    def forward(self, x):
        self.v.weight.data.renorm_(2, 0, 3.0)
        return super().forward(x)


@case("L", with_weights)
class Clamps(Base):
    def forward(self, x):
        with torch.no_grad():
            self.q.weight.clamp_(-0.2, 0.2)
        return super().forward(x)


@case("L", with_weights)
class FirstCallSets(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("ready", torch.tensor(False))

    def forward(self, x):
        if not self.ready:
            self.k.weight.data.div_(x.std())
            self.ready.fill_(True)
        return super().forward(x)


case("L", with_weights, name="plain_weights")(Base)


# --- M: large numbers -------------------------------------------------------------------------------------------------


def large(m, see):
    for factor in (1, 20, 400, 1):
        for n in (9, 40):
            see.thrice(m, torch.randn(2, n, 32) * factor)


for name, change in {
    "clamped_1000": lambda s, q, k: s.clamp(-1000, 1000),
    "clamped_50": lambda s, q, k: s.clamp(-50, 50),
    "hides_with_20": lambda s, q, k: s.masked_fill(torch.ones(s.shape[-2:]).triu(1).bool(), -20.0),
    "hides_with_1e4": lambda s, q, k: s.masked_fill(torch.ones(s.shape[-2:]).triu(1).bool(), -1e4),
    "softcap_30": lambda s, q, k: 30 * torch.tanh(s / 30),
    "minus_max": lambda s, q, k: s - s.amax(-1, keepdim=True),
    "half": lambda s, q, k: s.bfloat16().float(),
}.items():
    case("M", large, name=f"large_{name}", change=change)(Sized)


@case("M", large)
class ClipsQkv(Base):
    def forward(self, x):
        q, k, v = (self.heads(layer(x).clamp(-8, 8)) for layer in (self.q, self.k, self.v))
        return self.o((self.scores(q, k).softmax(-1) @ v).transpose(1, 2).flatten(2))


@case("M", large)
class ClampsOutput(Base):
    def forward(self, x):
        return super().forward(x).clamp(-10, 10)


@case("M", large)
class GradientsClamped(Base):
    def scores(self, q, k):
        s = super().scores(q, k)
        if s.requires_grad:
            s.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
        return s


@case("M", of_sizes(5, 9, features=96))
class WideHeads(Base):
    def __init__(self):
        super().__init__(96, 12)

    def scores(self, q, k):
        s = super().scores(q, k)
        return torch.cat([s[:, :4], hide_future(s[:, 4:])], 1) if s.shape[1] > 4 else s


def functional_softmax(s):
    return F.softmax(s, dim=-1)
