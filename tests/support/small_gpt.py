"""A small GPT that knows nothing of mha_c, and the formula of its attention weights."""

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """Causal self-attention as many write it: one projection, F.scaled_dot_product_attention in a method."""

    def __init__(self, width, heads, key_heads):
        super().__init__()
        self.heads, self.key_heads, self.head = heads, key_heads, width // heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, (heads + 2 * key_heads) * self.head)
        self.out = nn.Linear(width, width)
        self.ff = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def split(self, x):
        parts = self.qkv(x).split([n * self.head for n in (self.heads, self.key_heads, self.key_heads)], -1)
        return [part.unflatten(2, (-1, self.head)).transpose(1, 2) for part in parts]

    def attend(self, x):
        q, k, v = self.split(x)
        grouped = {"enable_gqa": True} if self.heads != self.key_heads else {}
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, **grouped).transpose(1, 2).flatten(2)

    def forward(self, x):
        x = x + self.out(self.attend(self.norm(x)))
        return x + self.ff(x)


def gpt(layers=2, width=32, heads=4, key_heads=4, vocabulary=11):
    torch.manual_seed(0)
    blocks = nn.ModuleDict({"blocks": nn.Sequential(*(Block(width, heads, key_heads) for _ in range(layers)))})
    return nn.Sequential(nn.Embedding(vocabulary, width), blocks["blocks"], nn.Linear(width, vocabulary))


def formula(q, k, keep=None, bias=None, scale=None):
    """softmax(scale q k^T + bias), in float64."""
    q, k = (x.detach().double() for x in (q, k))
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if bias is None else scores + bias
    scores = scores if keep is None else scores.masked_fill(~keep, -torch.inf)
    return torch.softmax(scores, -1).nan_to_num(0.0).float()
