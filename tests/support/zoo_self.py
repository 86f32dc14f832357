"""The part of the zoo with one input: self-attention as courses and small GPTs have it."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from zoo import case
from zoo_modules import TRIANGLE, rows


@case("causal_multi_head", [rows(2, 5, 8)], [rows(1, 8, 8)])
class Head(nn.Module):
    """One head of a small GPT: causal by a table of ones."""

    def __init__(self, n_embd=8, head_size=4, block_size=8, dropout=0.0):
        super().__init__()
        self.key = nn.Linear(n_embd, head_size, bias=False)
        self.query = nn.Linear(n_embd, head_size, bias=False)
        self.value = nn.Linear(n_embd, head_size, bias=False)
        self.register_buffer("tril", torch.tril(torch.ones(block_size, block_size)))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        T = x.shape[1]
        k, q = self.key(x), self.query(x)
        wei = q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5
        wei = wei.masked_fill(self.tril[:T, :T] == 0, float("-inf"))
        wei = self.dropout(F.softmax(wei, dim=-1))
        return wei @ self.value(x)


@case("causal_multi_head", [rows(2, 5, 8)], [rows(3, 8, 8)], core=False)
class HeadsInAList(nn.Module):
    def __init__(self, num_heads=2, head_size=4, n_embd=8, dropout=0.0):
        super().__init__()
        self.heads = nn.ModuleList([Head(n_embd, head_size, dropout=dropout) for _ in range(num_heads)])
        self.proj = nn.Linear(head_size * num_heads, n_embd)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        out = torch.cat([h(x) for h in self.heads], dim=-1)
        return self.dropout(self.proj(out))


@case("causal_multi_head", [rows(2, 5, 8)], [rows(3, 9, 8)])
class CausalSelfAttention(nn.Module):
    """c_attn, c_proj, two dropouts and a table, as small GPTs have them."""

    def __init__(self, n_embd=8, n_head=2, dropout=0.0, block_size=16):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.attn_dropout, self.resid_dropout = nn.Dropout(dropout), nn.Dropout(dropout)
        self.n_head, self.n_embd = n_head, n_embd
        self.register_buffer("bias", torch.tril(torch.ones(block_size, block_size)).view(1, 1, block_size, block_size))

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        y = self.attn_dropout(F.softmax(att, dim=-1)) @ v
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


@case("multi_head", [rows(2, 5, 8)])
class VisionAttention(nn.Module):
    """qkv in one, (3, heads) as axes; attn_drop and proj_drop."""

    def __init__(self, dim=8, num_heads=2, qkv_bias=False, dropout=0.0):
        super().__init__()
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.qkv = nn.Linear(dim, dim * 3, bias=qkv_bias)
        self.attn_drop = nn.Dropout(dropout)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(dropout)

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        attn = self.attn_drop(((q @ k.transpose(-2, -1)) * self.scale).softmax(dim=-1))
        x = (attn @ v).transpose(1, 2).reshape(B, N, C)
        return self.proj_drop(self.proj(x))


@case("multi_head", [rows(2, 5, 8)])
class ToQkv(nn.Module):
    """to_qkv in thirds, to_out a Sequential."""

    def __init__(self, dim=8, heads=2, dim_head=3, dropout=0.0):
        super().__init__()
        self.heads, self.scale = heads, dim_head**-0.5
        self.attend, self.dropout = nn.Softmax(dim=-1), nn.Dropout(dropout)
        self.to_qkv = nn.Linear(dim, 3 * heads * dim_head, bias=False)
        self.to_out = nn.Sequential(nn.Linear(heads * dim_head, dim), nn.Dropout(dropout))

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) if hasattr(t, "unflatten") else t
                   for t in self.to_qkv(x).chunk(3, dim=-1))  # fmt: skip
        attn = self.dropout(self.attend(torch.matmul(q, k.transpose(-1, -2)) * self.scale))
        return self.to_out(torch.matmul(attn, v).transpose(1, 2).flatten(2))


@case("multi_head", [rows(2, 5, 6)], [rows(2, 5, 6), {"mask": TRIANGLE}], [rows(2, 5, 6), {"return_attention": True}])
class MultiheadAttention(nn.Module):
    """qkv_proj, head by head; a switch gives the weights, too."""

    def __init__(self, input_dim=6, embed_dim=8, num_heads=2):
        super().__init__()
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.qkv_proj = nn.Linear(input_dim, 3 * embed_dim)
        self.o_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, x, mask=None, return_attention=False):
        batch_size, seq_length, _ = x.size()
        qkv = self.qkv_proj(x).reshape(batch_size, seq_length, self.num_heads, 3 * self.head_dim).permute(0, 2, 1, 3)
        q, k, v = qkv.chunk(3, dim=-1)
        logits = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1))
        if mask is not None:
            logits = logits.masked_fill(mask == 0, -9e15)
        weights = F.softmax(logits, dim=-1)
        o = self.o_proj(torch.matmul(weights, v).permute(0, 2, 1, 3).reshape(batch_size, seq_length, self.embed_dim))
        return (o, weights) if return_attention else o


@case("multi_head", [rows(1, 5, 3)[0]], core=False)
class MatricesAlone(nn.Module):
    """Matrices in the place of Linears, no batch."""

    def __init__(self, d_in=3, d_out=2):
        super().__init__()
        self.W_query, self.W_key = nn.Parameter(torch.rand(d_in, d_out)), nn.Parameter(torch.rand(d_in, d_out))
        self.W_value = nn.Parameter(torch.rand(d_in, d_out))

    def forward(self, x):
        keys, queries, values = x @ self.W_key, x @ self.W_query, x @ self.W_value
        attn_scores = queries @ keys.T
        return torch.softmax(attn_scores / keys.shape[-1] ** 0.5, dim=-1) @ values


@case("causal_multi_head", [rows(2, 5, 4)], [rows(2, 6, 4)])
class CausalAttention(nn.Module):
    """W_query, W_key, W_value without an output; a mask that is cut."""

    def __init__(self, d_in=4, d_out=4, context_length=6, dropout=0.0, qkv_bias=False):
        super().__init__()
        self.d_out = d_out
        self.W_query = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("mask", torch.triu(torch.ones(context_length, context_length), diagonal=1))

    def forward(self, x):
        num_tokens = x.shape[1]
        keys, queries, values = self.W_key(x), self.W_query(x), self.W_value(x)
        attn_scores = queries @ keys.transpose(1, 2)
        attn_scores.masked_fill_(self.mask.bool()[:num_tokens, :num_tokens], -torch.inf)
        attn_weights = self.dropout(torch.softmax(attn_scores / keys.shape[-1] ** 0.5, dim=-1))
        return attn_weights @ values


@case("causal_multi_head", [rows(2, 5, 4)], says="no_output_projection", of_class="", core=False)
class HeadsWithoutOutput(nn.Module):
    def __init__(self, d_in=4, d_out=2, num_heads=3, dropout=0.0):
        super().__init__()
        self.heads = nn.ModuleList([CausalAttention(d_in, d_out, 6, dropout) for _ in range(num_heads)])

    def forward(self, x):
        return torch.cat([head(x) for head in self.heads], dim=-1)


@case("causal_multi_head", [rows(2, 5, 4)], [rows(1, 6, 4)])
class CausalHeads(nn.Module):
    """W_query ... out_proj, one input, a table of bools."""

    def __init__(self, d_in=4, d_out=8, context_length=6, num_heads=2, dropout=0.0, qkv_bias=True):
        super().__init__()
        self.d_out, self.num_heads, self.head_dim = d_out, num_heads, d_out // num_heads
        self.W_query = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.out_proj = nn.Linear(d_out, d_out)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("mask", torch.triu(torch.ones(context_length, context_length), diagonal=1).bool())

    def forward(self, x):
        b, num_tokens, _ = x.shape
        keys, queries, values = (
            W(x).view(b, num_tokens, self.num_heads, self.head_dim).transpose(1, 2)
            for W in (self.W_key, self.W_query, self.W_value)
        )
        attn_scores = queries @ keys.transpose(2, 3)
        attn_scores.masked_fill_(self.mask[:num_tokens, :num_tokens], -torch.inf)
        attn_weights = self.dropout(torch.softmax(attn_scores / keys.shape[-1] ** 0.5, dim=-1))
        return self.out_proj((attn_weights @ values).transpose(1, 2).contiguous().view(b, num_tokens, self.d_out))


class Settings:
    def __init__(self, n_head=2, n_embd=8, dropout=0.0):
        self.n_head, self.n_embd, self.dropout = n_head, n_embd, dropout


@case("causal_multi_head", [rows(2, 5, 8)], [rows(1, 9, 8)])
class FromSettings(nn.Module):
    """A record of settings knows the number of heads."""

    def __init__(self, settings=None):
        super().__init__()
        self.settings = settings or Settings()
        n = self.settings.n_embd
        self.q, self.k, self.v, self.proj = nn.Linear(n, n), nn.Linear(n, n), nn.Linear(n, n), nn.Linear(n, n)
        self.drop = nn.Dropout(self.settings.dropout)
        self.register_buffer("table", torch.tril(torch.ones(16, 16))[None, None])

    def forward(self, x):
        B, T, C = x.shape
        h = self.settings.n_head
        q, k, v = (W(x).view(B, T, h, C // h).transpose(1, 2) for W in (self.q, self.k, self.v))
        scores = (q @ k.transpose(-2, -1) / math.sqrt(C // h)).masked_fill(self.table[:, :, :T, :T] == 0, -1e10)
        return self.proj((self.drop(scores.softmax(-1)) @ v).transpose(1, 2).contiguous().view(B, T, C))


@case("multi_head", [rows(2, 5, 8)], core=False)
class MappingsOfEachHead(nn.Module):
    """A list of projections for each of queries, keys and values; a loop over the heads."""

    def __init__(self, d=8, n_heads=2):
        super().__init__()
        self.n_heads, self.d_head = n_heads, d // n_heads
        self.q_mappings = nn.ModuleList([nn.Linear(d, self.d_head) for _ in range(n_heads)])
        self.k_mappings = nn.ModuleList([nn.Linear(d, self.d_head) for _ in range(n_heads)])
        self.v_mappings = nn.ModuleList([nn.Linear(d, self.d_head) for _ in range(n_heads)])
        self.softmax, self.out = nn.Softmax(dim=-1), nn.Linear(d, d)

    def forward(self, x):
        heads = []
        for q_of, k_of, v_of in zip(self.q_mappings, self.k_mappings, self.v_mappings):
            q, k, v = q_of(x), k_of(x), v_of(x)
            heads.append(self.softmax(q @ k.transpose(1, 2) / (self.d_head**0.5)) @ v)
        return self.out(torch.cat(heads, dim=-1))


@case("multi_head", [rows(2, 5, 8), TRIANGLE.bool()])
class MaskNeeded(nn.Module):
    """A mask that must be given; no attribute says how many heads there are."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x, mask):
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, 2, 4).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-1, -2) / 4**0.5).masked_fill(~mask, float("-inf")).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).reshape(B, T, C))
