"""Readers' classes of the kind J: what is added to a module after it was converted."""

import torch
from torch import nn

from reader_cases import CASES, INF, Base, case, hide_future
from reader_cases_more import replaced

# --- J: what is added afterwards --------------------------------------------------------------------------------------


class Adds(Base):
    tau = 1.0

    def __init__(self):
        super().__init__()
        self.to_out, self.more, self.by_name = nn.Sequential(nn.Identity()), nn.ModuleList(), nn.ModuleDict()
        self.register_buffer("attn_mask", None)
        self.register_parameter("gate", None)
        self.lora = None

    def scores(self, q, k):
        s = super().scores(q, k) / self.tau
        s = s if self.attn_mask is None else s.masked_fill(self.attn_mask, -INF)
        return hide_future(s) if hasattr(self, "sharp") else s

    def forward(self, x):
        x = x if self.lora is None else self.lora(x)
        out = self.to_out(super().forward(x))
        for each in self.more:
            out = each(out)
        if "extra" in self.by_name:
            out = self.by_name["extra"](out)
        adapter = getattr(self, "adapter", None)
        out = out if adapter is None else adapter(out)
        return out if self.gate is None else out * self.gate


for name, change in {
    "instance_attribute": lambda m: setattr(m, "tau", 3.0), "sharp": lambda m: setattr(m, "sharp", 1),
    "adapter": lambda m: setattr(m, "adapter", nn.Linear(32, 32)),
    "buffer": lambda m: setattr(m, "attn_mask", torch.ones(9, 9).triu(1).bool()),
    "parameter": lambda m: setattr(m, "gate", nn.Parameter(torch.full((32,), 0.5))),
    "register_module": lambda m: m.register_module("adapter", nn.Tanh()),
    "sequential": lambda m: m.to_out.append(nn.Tanh()), "module_list": lambda m: m.more.append(nn.Tanh()),
    "module_dict": lambda m: m.by_name.update({"extra": nn.Tanh()}), "lora": lambda m: setattr(m,
    "lora", nn.Linear(32, 32)),
    "dict_write": lambda m: m.__dict__.update(tau=2.0), "double": lambda m: None,
}.items():  # fmt: skip
    CASES[f"added_{name}"] = "J", Adds, replaced(change)


def pruned(m, see):
    x = torch.randn(2, 9, 32)
    see.thrice(m.eval(), x)
    torch.manual_seed(3)
    m.q, m.k, m.v = (nn.Linear(32, 24) for _ in range(3))
    m.o = nn.Linear(24, 32)
    see.thrice(m, x)


class ByWidth(Base):
    def heads(self, x):
        return x.unflatten(-1, (-1, 8)).transpose(1, 2)


case("J", pruned)(ByWidth)
