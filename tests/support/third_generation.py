"""A stand-in of the book's third generation (torch 2.11), in our own words, as its d2l.torch would be imported.

Names, arguments, children and results are the original's; the lines are not.  What differs from the generations before:
there is no AdditiveAttention; MultiHeadAttention asserts that heads divide; a query without keys gets weights of 0; and
GQAAttention and GPT.CausalAttention call torch's scaled_dot_product_attention by its name in torch.nn.functional.
"""

import math
import sys

import torch
from torch import nn
from torch.nn import functional as F

d2l = sys.modules[__name__]
Norm = getattr(nn, "RMSNorm", nn.LayerNorm)  # what torch has had since 2.4, or its neighbour: no matter here


class Module(nn.Module):
    """The book's base of models, which draws a board of its progress."""

    def __init__(self):
        super().__init__()
        self.board = object()

    def loss(self, y_hat, y):
        raise NotImplementedError


def masked_softmax(X, valid_lens):
    if valid_lens is None:
        return F.softmax(X, dim=-1)
    lens = valid_lens[:, None] if valid_lens.dim() == 1 else valid_lens
    seen = torch.arange(X.shape[-1], device=X.device) < lens[..., None]
    weights = F.softmax(X.masked_fill(~seen, torch.finfo(X.dtype).min), dim=-1)
    return weights * seen.any(-1, keepdim=True).to(X.dtype)


class DotProductAttention(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.dropout = nn.Dropout(dropout)

    def forward(self, queries, keys, values, valid_lens=None):
        scores = torch.bmm(queries, keys.transpose(1, 2)) / math.sqrt(queries.shape[-1])
        self.attention_weights = masked_softmax(scores, valid_lens)
        return torch.bmm(self.dropout(self.attention_weights), values)


class MultiHeadAttention(d2l.Module):
    def __init__(self, num_hiddens, num_heads, dropout, bias=False, **kwargs):
        super().__init__()
        assert num_hiddens % num_heads == 0, "heads must divide num_hiddens"
        self.num_heads = num_heads
        self.attention = d2l.DotProductAttention(dropout)
        for name in ("W_q", "W_k", "W_v", "W_o"):
            setattr(self, name, nn.LazyLinear(num_hiddens, bias=bias))

    def forward(self, queries, keys, values, valid_lens):
        projected = self.W_q(queries), self.W_k(keys), self.W_v(values)
        if valid_lens is not None:
            valid_lens = valid_lens.repeat_interleave(self.num_heads, dim=0)
        heads = self.attention(*map(self.transpose_qkv, projected), valid_lens)
        return self.W_o(self.transpose_output(heads))

    def transpose_qkv(self, X):
        batch, rows, _ = X.shape
        return X.reshape(batch, rows, self.num_heads, -1).transpose(1, 2).reshape(batch * self.num_heads, rows, -1)

    def transpose_output(self, X):
        _, rows, features = X.shape
        joined = X.reshape(-1, self.num_heads, rows, features).transpose(1, 2)
        return joined.reshape(-1, rows, self.num_heads * features)


def turned(x):
    """Rotary positions of neighbouring pairs of features."""
    half = torch.arange(0, x.shape[-1], 2, device=x.device)
    angle = torch.arange(x.shape[-2], device=x.device)[:, None] * 10000.0 ** (-half / x.shape[-1])
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), -1).flatten(-2)


class GQAAttention(nn.Module):
    def __init__(self, num_hiddens, num_heads, num_kv_heads, bias=False, rope=False, causal=True):
        super().__init__()
        assert num_hiddens % num_heads == 0
        assert num_heads % num_kv_heads == 0
        self.num_heads, self.num_kv_heads, self.rope, self.causal = num_heads, num_kv_heads, rope, causal
        self.head_dim = num_hiddens // num_heads
        self.W_q = nn.Linear(num_hiddens, num_hiddens, bias=bias)
        self.W_k = nn.Linear(num_hiddens, num_kv_heads * self.head_dim, bias=bias)
        self.W_v = nn.Linear(num_hiddens, num_kv_heads * self.head_dim, bias=bias)
        self.W_o = nn.Linear(num_hiddens, num_hiddens, bias=bias)

    def _rope(self, x):
        return turned(x)

    def forward(self, queries, keys, values, valid_lens=None):
        batch, n_queries, _ = queries.shape
        projected = self.W_q(queries), self.W_k(keys), self.W_v(values)
        q, k, v = (x.reshape(batch, x.shape[1], -1, self.head_dim).transpose(1, 2) for x in projected)
        if self.rope:
            q, k = self._rope(q), self._rope(k)
        mask, n_keys = None, k.shape[2]
        if valid_lens is not None:
            lens = valid_lens[:, None].expand(batch, n_queries) if valid_lens.dim() == 1 else valid_lens
            mask = torch.arange(n_keys) < lens[..., None]
            if self.causal:  # the last query sees the last key
                place = torch.arange(n_queries)[:, None] + n_keys - n_queries
                mask = mask & (torch.arange(n_keys) <= place)
            mask = mask[:, None]
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=self.causal and mask is None, enable_gqa=True
        )
        return self.W_o(out.transpose(1, 2).reshape(batch, n_queries, -1))


class FeedForward(nn.Module):
    def __init__(self, num_hiddens, act="swiglu", bias=False):
        super().__init__()
        width = 2 * num_hiddens
        self.W_1, self.W_2 = nn.Linear(num_hiddens, width, bias), nn.Linear(width, num_hiddens, bias)

    def forward(self, X):
        return self.W_2(F.silu(self.W_1(X)))


class TransformerBlock(nn.Module):
    def __init__(
        self, num_hiddens, num_heads, dropout=0, norm="rms", act="swiglu", pre_norm=True, bias=False, attn_factory=None,
        ffn_factory=None,
    ):  # fmt: skip
        super().__init__()
        own = attn_factory or (lambda: d2l.MultiHeadAttention(num_hiddens, num_heads, dropout, bias=bias))
        self.norm1, self.norm2 = Norm(num_hiddens), Norm(num_hiddens)
        self.attention, self.ffn = own(), (ffn_factory or (lambda: FeedForward(num_hiddens, act, bias)))()
        self.dropout = nn.Dropout(dropout)

    def forward(self, X, valid_lens=None):
        Y = self.norm1(X)
        X = X + self.dropout(self.attention(Y, Y, Y, valid_lens))
        return X + self.dropout(self.ffn(self.norm2(X)))


class GPT(nn.Module):
    class CausalAttention(nn.Module):
        def __init__(self, num_hiddens, num_heads, bias=False, rope=False):
            super().__init__()
            self.num_heads, self.rope = num_heads, rope
            self.W_qkv = nn.Linear(num_hiddens, 3 * num_hiddens, bias=bias)
            self.W_o = nn.Linear(num_hiddens, num_hiddens, bias=bias)

        def _rope(self, x):
            return turned(x)

        def forward(self, X, *_):
            batch, steps, features = X.shape
            q, k, v = (x.reshape(batch, steps, self.num_heads, -1).transpose(1, 2) for x in self.W_qkv(X).chunk(3, -1))
            if self.rope:
                q, k = self._rope(q), self._rope(k)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.W_o(out.transpose(1, 2).reshape(batch, steps, features))

    def __init__(self, vocab_size, num_hiddens=256, num_heads=8, num_blks=6, max_len=1024, pos="rope", bias=False):
        super().__init__()
        self.pos, self.max_len = pos, max_len
        self.token_emb = nn.Embedding(vocab_size, num_hiddens)
        if pos == "learned":
            self.pos_emb = nn.Embedding(max_len, num_hiddens)
        blocks = [
            d2l.TransformerBlock(
                num_hiddens, num_heads, bias=bias,
                attn_factory=lambda: self.CausalAttention(num_hiddens, num_heads, bias, rope=pos == "rope"),
            )
            for _ in range(num_blks)
        ]  # fmt: skip
        self.blks, self.norm = nn.ModuleList(blocks), Norm(num_hiddens)

    def forward(self, X):
        H = self.token_emb(X)
        if self.pos == "learned":
            H = H + self.pos_emb(torch.arange(X.shape[1]))
        for block in self.blks:
            H = block(H)
        return F.linear(self.norm(H), self.token_emb.weight)
