"""The student's own line of a mistake in torch: in what vmap maps, in a helper or its call, a mask, a slice, a flag."""

import pytest

import needs

VMAPPED = """
import torch
from torch.func import vmap


def one_row(q, position, ks, vs):
    s = ks @ q / q.shape[-1] ** 0.5
    s = torch.where(torch.arange(ks.shape[0]) > position, -1e9, s)
    return torch.softmax(s, dim=0) @ vs


def one_item(queries, keys, values):
    return vmap(one_row, in_dims=(0, 0, None, None))(queries, torch.arange(len(queries)), keys, values)


attention = vmap(one_item)
"""
STEPS = """
import torch


def attention(queries, keys, values):
    out = []
    for t in range(queries.shape[1]):
        seen = slice(0, t + 1)
        q = queries[:, t]
        s = torch.einsum("bd,bkd->bk", q, keys[:, seen]) / q.shape[-1] ** 0.5
        out.append((s.softmax(dim=1)[:, :, None] * values[:, seen]).sum(dim=1))
    return torch.stack(out, dim=1)
"""
BAND = """
import torch
import torch.nn.functional as F


def band(n, window):
    keep = torch.tril(torch.ones(n, n, dtype=torch.bool))
    keep = keep & torch.triu(torch.ones(n, n, dtype=torch.bool), diagonal=1 - window)
    return keep


def attention(queries, keys, values, window):
    keep = band(queries.shape[1], window)
    bias = torch.zeros(keep.shape).masked_fill(~keep, float("-inf"))
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=bias)
"""
HELPER = """
import torch
from torch import nn


def masked_softmax(s, lens):
    if lens is None:
        return s.softmax(dim=-1)
    lens = lens[:, None, None] if lens.dim() == 1 else lens[:, :, None]
    least = torch.finfo(s.dtype).min
    hidden = torch.arange(s.shape[-1]) >= lens
    s = s.masked_fill(hidden, least)
    return s.softmax(dim=-1)


class Attention(nn.Module):
    def forward(self, queries, keys, values, valid_lens=None):
        s = queries @ keys.transpose(1, 2) / queries.shape[-1] ** 0.5
        weights = masked_softmax(s, valid_lens)
        return weights @ values
"""
HEADS = """
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, num_hiddens, num_heads):
        super().__init__()
        self.h = num_heads
        self.W_q, self.W_k, self.W_v, self.W_o = (nn.Linear(num_hiddens, num_hiddens) for _ in range(4))

    def split(self, x):
        return x.view(x.size(0), x.size(1), self.h, -1).transpose(1, 2)

    def forward(self, x):
        q = self.split(self.W_q(x))
        k = self.split(self.W_k(x))
        v = self.split(self.W_v(x))
        s = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
        w = s.softmax(dim=-1)
        o = (w @ v).transpose(1, 2).flatten(2)
        return self.W_o(o)
"""
WRAPPER = """
from torch import nn


class Attention(nn.Module):
    def __init__(self, num_hiddens, num_heads):
        super().__init__()
        self.inner = nn.MultiheadAttention(num_hiddens, num_heads, batch_first=True, add_zero_attn=False)

    def forward(self, query, key, value):
        out, _ = self.inner(query, key, value, need_weights=False)
        return out
"""
SPLIT = """
import torch


def width(x, num_heads):
    return x.shape[-1] // num_heads


def split_heads(x, num_heads):
    parts = [x[..., h * width(x, num_heads):(h + 1) * width(x, num_heads)] for h in range(num_heads)]
    stacked = torch.stack(parts, dim=1)
    return stacked.reshape(-1, x.size(1), x.size(2) // num_heads)
"""
TABLE = """
import torch
from torch import nn


class PositionalEncoding(nn.Module):
    def __init__(self, channels, max_len=1000):
        super().__init__()
        freqs = 1.0 / (10000 ** (torch.arange(0, channels, 2).float() / channels))
        angles = torch.outer(torch.arange(max_len).float(), freqs)
        table = torch.stack((angles.sin(), angles.cos()), dim=-1)
        self.register_buffer("table", table.flatten(1), persistent=False)

    def forward(self, x):
        return x + self.table[None, :x.size(1)]
"""
CALLED = {
    VMAPPED: ("attention", "causal"),
    STEPS: ("attention", "causal"),
    BAND: ("attention", "window"),
    HELPER: ("Attention", "dot_product"),
    HEADS: ("Attention", "causal_multi_head"),
    WRAPPER: ("Attention", "multi_head"),
    SPLIT: ("split_heads", "transpose_qkv"),
    TABLE: ("PositionalEncoding", "positional_encoding"),
}


@pytest.mark.parametrize(
    ("text", "id", "right", "wrong", "should_be"),
    [
        (VMAPPED, "no_scale", "s = ks @ q / q.shape[-1] ** 0.5", "s = ks @ q", "ks.shape[-1] ** 0.5"),
        (VMAPPED, "swapped_keys_values", "dim=0) @ vs", "dim=0) @ ks", "@ vs"),
        (STEPS, "causal_corner", "slice(0, t + 1)", "slice(t, None)", "slice(0, t + 1)"),
        (STEPS, "sees_future", "slice(0, t + 1)", "slice(0, queries.shape[1])", "slice(0, t + 1)"),
        (BAND, "window_off_by_one", "diagonal=1 - window", "diagonal=-window", ""),
        (BAND, "window_ignored", "attn_mask=bias", "is_causal=True", ""),
        (HELPER, "no_mask", "masked_softmax(s, valid_lens)", "masked_softmax(s, None)", ""),
        (HELPER, "mask_zero", "torch.finfo(s.dtype).min", "torch.finfo(s.dtype).eps", "torch.finfo(s.dtype).min"),
        (HEADS, "heads_without_transpose", "self.h, -1).transpose(1, 2)", "self.h, -1)", ""),
        (HEADS, "scale_after_softmax", "w = s.softmax(dim=-1)", "w = s.softmax(dim=-1) / q.shape[-1] ** 0.5", ""),
        (WRAPPER, "softmax_plus_one", "add_zero_attn=False", "add_zero_attn=True", "add_zero_attn=False"),
        (SPLIT, "heads_interleaved", "h * width(x, num_heads):(h + 1) * width(x, num_heads)", "h::num_heads", ""),
        (TABLE, "sin_cos_halves", "torch.stack(", "torch.cat(", ""),
    ],
)
def test_the_line_of_a_mistake(judged, text, id, right, wrong, should_be):
    needs.module("torch")
    assert text.count(right) == 1
    called, kind = CALLED[text]
    assert judged(text, called, kind=kind).judged[0].answer.ok
    changed = text.replace(right, wrong)
    if id == "scale_after_softmax":
        changed = changed.replace("transpose(2, 3) / q.shape[-1] ** 0.5", "transpose(2, 3)")
    answer = judged(changed, called, kind=kind).judged[0].answer
    assert answer.mistakes[0] == id
    assert [line.number for line in answer.lines] == [text[: text.index(right)].count("\n") + 1]
    assert should_be in answer.lines[0].should_be


TYPED = """
import torch
from torch import nn, Tensor


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    shifted: Tensor = (x - x.amax(dim, keepdim=True)).exp()
    return shifted / shifted.sum(dim, keepdim=True)


class Attention(nn.Module):
    def forward(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        d: int = queries.shape[-1]
        scores: Tensor = queries @ keys.transpose(1, 2) / d**0.5
        return softmax(scores) @ values


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding_of_tokens: nn.Embedding = nn.Embedding(16, 4)
        self.W_q, self.W_k, self.W_v, self.W_o = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embedding_of_tokens(tokens)
        return self.W_o(softmax(self.W_q(x) @ self.W_k(x).transpose(1, 2)) @ self.W_v(x))
"""


@pytest.mark.parametrize(
    ("id", "right", "wrong"),
    [
        ("no_softmax", "shifted: Tensor = (x - x.amax(dim, keepdim=True)).exp()", "shifted: Tensor = x"),
        ("no_scale", "scores: Tensor = queries @ keys.transpose(1, 2) / d**0.5",
                     "scores: Tensor = queries @ keys.transpose(1, 2)"),
    ],
)  # fmt: skip
def test_a_line_that_gives_a_type_besides_is_changed_as_without(judged, id, right, wrong):
    needs.module("torch")
    assert [each.name for each in judged(TYPED).judged] == ["Attention"]
    (each,) = judged(TYPED.replace(right, wrong)).judged
    (line,) = each.answer.lines
    assert each.answer.mistakes == [id] and line.text == wrong and line.should_be, each
