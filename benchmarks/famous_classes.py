"""Attention as known courses and repositories type it: their lines, the same converted, and with torch's own function.

    python benchmarks/famous_classes.py [--seconds 0.5] [--ours]

Prints the table of docs/your-own-attention.md: how many times as fast as its own lines each class is, converted and, in
brackets, with F.scaled_dot_product_attention in the place of its three lines; evaluation and training (forward and
backward, no dropout), one thread, two sizes.  The three take turns; medians of
the processor's time count, which a busy machine changes less than a clock's.

--ours prints another table: how many times as long each class takes, converted, as our own layer of the same kind on
the same input; in brackets, how many times as fast as its own lines it is.
"""

import argparse
import copy
import random
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import mha_c.torch
from mha_c.config import processor

SIZES = {"2 x 10 tokens, 64 features": (2, 10, 64), "8 x 64 tokens, 128 features": (8, 64, 128)}
LARGE = {"8 x 128 tokens, 256 features": (8, 128, 256)}
HEADS = 4


def mixed(q, k, v, keep, by_torch):
    """The three lines, or torch's function."""
    if by_torch:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=keep)
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    if keep is not None:
        scores = scores.masked_fill(~keep, float("-inf"))
    return scores.softmax(dim=-1) @ v


class MinGPT(nn.Module):
    """One projection for all three, a causal table as a buffer."""

    def __init__(self, features, tokens, by_torch):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(features, 3 * features), nn.Linear(features, features)
        self.register_buffer("mask", torch.ones(tokens, tokens).tril().bool()[None, None])
        self.by_torch = by_torch

    def forward(self, x):
        batch, tokens, features = x.shape
        q, k, v = self.c_attn(x).split(features, dim=2)
        q, k, v = (y.view(batch, tokens, HEADS, features // HEADS).transpose(1, 2) for y in (q, k, v))
        y = mixed(q, k, v, self.mask[:, :, :tokens, :tokens], self.by_torch)
        return self.c_proj(y.transpose(1, 2).contiguous().view(batch, tokens, features))


class Annotated(nn.Module):
    """Four projections in a list, and a padding mask as an argument."""

    def __init__(self, features, tokens, by_torch):
        super().__init__()
        self.linears = nn.ModuleList([nn.Linear(features, features) for _ in range(4)])
        self.by_torch = by_torch

    def forward(self, query, key, value, mask=None):
        batch = query.size(0)
        inputs = zip(self.linears, (query, key, value))
        q, k, v = (line(x).view(batch, -1, HEADS, line.out_features // HEADS).transpose(1, 2) for line, x in inputs)
        x = mixed(q, k, v, None if mask is None else mask.unsqueeze(1), self.by_torch)
        return self.linears[-1](x.transpose(1, 2).contiguous().view(batch, -1, self.linears[-1].in_features))


class Lecture(nn.Module):
    """One causal head of a lecture on GPT: no output projection."""

    def __init__(self, features, tokens, by_torch):
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(features, features, bias=False) for _ in range(3))
        self.register_buffer("tril", torch.ones(tokens, tokens).tril().bool())
        self.by_torch = by_torch

    def forward(self, x):
        tokens = x.shape[1]
        return mixed(self.query(x), self.key(x), self.value(x), self.tril[:tokens, :tokens], self.by_torch)


class Vision(nn.Module):
    """A vision transformer's: one projection, no mask."""

    def __init__(self, features, tokens, by_torch):
        super().__init__()
        self.to_qkv, self.to_out = nn.Linear(features, 3 * features, bias=False), nn.Linear(features, features)
        self.by_torch = by_torch

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.to_qkv(x).chunk(3, dim=-1))
        return self.to_out(mixed(q, k, v, None, self.by_torch).transpose(1, 2).flatten(2))


class OurHead(nn.Module):
    """Three projections, and our attention in the place of the lines of a lecture's head."""

    def __init__(self, features):
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(features, features, bias=False) for _ in range(3))
        self.attention = mha_c.torch.DotProductAttention(dropout=0)

    def forward(self, x):
        return self.attention(self.query(x), self.key(x), self.value(x), causal=True)


CLASSES = {
    "minGPT: one projection, causal": (MinGPT, lambda x: (x,)),
    "Annotated Transformer, no mask": (Annotated, lambda x: (x, x, x)),
    "Annotated Transformer, padding mask": (Annotated, lambda x: (x, x, x, padding(x))),
    "a GPT lecture's head, causal": (Lecture, lambda x: (x,)),
    "vision transformer, no mask": (Vision, lambda x: (x,)),
}


def our_layer(name, features):
    """Our own layer of the same kind as a class."""
    if name.startswith("minGPT"):
        return mha_c.torch.CausalAttention(features, HEADS, bias=True)
    if name.startswith("a GPT"):
        return OurHead(features)
    return mha_c.torch.MultiHeadAttention(features, HEADS, 0, bias=True)


def our_arguments(name, x):
    """What our own layer is called with where the class is called with an input."""
    if name.startswith(("minGPT", "a GPT")):
        return (x,), {}
    return (x, x, x), {"keep_mask": padding(x)[:, None]} if "padding" in name else {}


def padding(x):
    lens = torch.tensor([x.shape[1], x.shape[1] // 2] * (len(x) // 2))
    return (torch.arange(x.shape[1]) < lens[:, None])[:, None]


def evaluation(module, inputs, named):
    with torch.no_grad():
        module(*inputs, **named)


def training(module, inputs, named):
    module(*inputs, **named).sum().backward()
    module.zero_grad(set_to_none=True)


MODES = (("eval", evaluation), ("train", training))


def times(call, cases, seconds):
    """The median time of each of some (module, arguments, named arguments), which take turns, in any order: who comes
    after the reader's lines finds the caches full of others' things."""
    found = [[] for _ in cases]
    end = time.perf_counter() + seconds
    while len(found[0]) < 5 or time.perf_counter() < end:
        for i in random.sample(range(len(cases)), len(cases)):
            start = time.process_time()
            call(*cases[i])
            found[i].append(time.process_time() - start)
    return [*map(np.median, found)]


def beside_their_lines(name, size, call, mode, seconds):
    """A cell of the page's table."""
    batch, tokens, features = size
    kind, arguments = CLASSES[name]
    own, by_torch = (kind(features, tokens, how) for how in (False, True))
    by_torch.load_state_dict(own.state_dict())
    converted, x = copy.deepcopy(own), torch.randn(batch, tokens, features)
    mha_c.torch.convert(converted)
    modules = [getattr(module, mode)() for module in (own, converted, by_torch)]
    lines, ours, theirs = times(call, [(module, arguments(x), {}) for module in modules], seconds)
    return f"{lines / ours:.1f} ({lines / theirs:.1f})"


def beside_our_layer(name, size, call, mode, seconds):
    """A cell of the other table."""
    batch, tokens, features = size
    kind, arguments = CLASSES[name]
    own, layer, x = kind(features, tokens, False), our_layer(name, features), torch.randn(batch, tokens, features)
    converted = mha_c.torch.convert(copy.deepcopy(own))
    given = arguments(x), {}
    cases = [(getattr(module, mode)(), *given) for module in (own, converted)]
    cases.append((getattr(layer, mode)(), *our_arguments(name, x)))
    lines, ours, layers = times(call, cases, seconds)
    return f"{ours / layers:.2f} ({lines / ours:.1f})"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--ours", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    mha_c.set_num_threads(1)
    sizes, cell = ({**SIZES, **LARGE}, beside_our_layer) if given.ours else (SIZES, beside_their_lines)
    print(f"{processor()}, one thread, torch {torch.__version__}")
    print("| class | " + " | ".join(f"{size}, {call.__name__}" for size in sizes for _, call in MODES) + " |")
    print("|---|" + "---:|" * (2 * len(sizes)))
    for name in CLASSES:
        torch.manual_seed(0)
        cells = [cell(name, size, call, mode, given.seconds) for size in sizes.values() for mode, call in MODES]
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
