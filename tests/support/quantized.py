"""Stand-ins of the layers that bitsandbytes puts in the place of nn.Linear."""

import torch
from torch import nn


class Int8Linear(nn.Linear):
    """As Linear8bitLt of bitsandbytes: an nn.Linear with weights of another type, and a `forward` that knows them."""

    def __init__(self, old):
        super().__init__(old.in_features, old.out_features, bias=False)
        self.scale = old.weight.detach().abs().max() / 127
        self.weight = nn.Parameter((old.weight.detach() / self.scale).round().to(torch.int8), requires_grad=False)

    def forward(self, x):
        return x @ (self.weight.to(x.dtype) * self.scale).T


class Packed4bit(Int8Linear):
    """As Linear4bit: the weight has another shape, too."""

    def __init__(self, old):
        super().__init__(old)
        self.weight = nn.Parameter(self.weight.detach().reshape(-1, 1), requires_grad=False)

    def forward(self, x):
        return x @ (self.weight.to(x.dtype).reshape(self.out_features, -1) * self.scale).T
