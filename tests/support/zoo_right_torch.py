"""Right implementations in torch: functions, layers and classes as courses, books and public code write them."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from zoo import case, right
from zoo_modules import SEEN, TRIANGLE, cross, rows

FUSED = hasattr(F, "scaled_dot_product_attention")  # since torch 2.0, whose own layer ignores is_causal
ONE = [rows(2, 5, 8)]
OWN = hasattr(torch, "compiler")  # since torch 2.1


def heads_of(x, heads):
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


# ---- functions -------------------------------------------------------------------------------------------------------


@right("dot_product")
def attention(query, key, value, mask=None, dropout=None):
    d_k = query.size(-1)
    scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(d_k)
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    p_attn = F.softmax(scores, dim=-1)
    return torch.matmul(p_attn if dropout is None else dropout(p_attn), value), p_attn


@right("dot_product", FUSED)
def by_torchs_own(q, k, v, attn_mask=None, is_causal=False):
    if is_causal and attn_mask is not None:
        raise ValueError("give one mask that hides all")
    return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, is_causal=is_causal)


@right("dot_product")
def with_lengths(q, k, v, valid_lens=None):
    scores = torch.bmm(q, k.transpose(1, 2)) / q.shape[-1] ** 0.5
    if valid_lens is not None:
        lens = valid_lens.reshape(len(q), -1, 1)
        scores = torch.where(torch.arange(k.shape[1]) < lens, scores, torch.tensor(-1e6))
    return scores.softmax(-1) @ v


@right("causal")
def lower_triangle(q, k, v):
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    past = torch.tril(torch.ones(scores.shape[-2:]))
    return scores.masked_fill(past == 0, float("-inf")).softmax(-1) @ v


@right("causal")
def a_bias_of_minus_infinity(query, key, value):
    future = torch.full((query.shape[-2], key.shape[-2]), float("-inf")).triu(1)
    return torch.softmax(torch.baddbmm(future, query, key.transpose(1, 2), alpha=query.shape[-1] ** -0.5), -1) @ value


@right("causal")
def an_online_softmax(q, k, v, block_size=2):
    out, total, top = torch.zeros(*q.shape[:2], v.shape[-1]), torch.zeros(q.shape[:2]), torch.full(q.shape[:2], -1e30)
    for keys, values, at in zip(k.split(block_size, 1), v.split(block_size, 1), range(0, k.shape[1], block_size)):
        s = torch.einsum("bqd,bkd->bqk", q, keys) / q.shape[-1] ** 0.5
        s = s.masked_fill(torch.arange(q.shape[1])[:, None] < at + torch.arange(keys.shape[1]), -1e30)
        new = torch.maximum(top, s.amax(-1))
        p, scale = (s - new[..., None]).exp(), (top - new).exp()
        total, out, top = total * scale + p.sum(-1), out * scale[..., None] + p @ values, new
    return out / total[..., None]


@right("window")
def a_band(q, k, v, window_size):
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    gap = torch.arange(q.shape[-2])[:, None] - torch.arange(k.shape[-2])
    return scores.masked_fill((gap < 0) | (gap >= window_size), float("-inf")).softmax(-1) @ v


@right("rope")
def neighbours(x, pos=0):
    d = x.shape[-1]
    a = (torch.arange(x.shape[-2]) + pos)[:, None] * 10000.0 ** (-torch.arange(0, d, 2) / d)
    out = torch.empty_like(x)
    out[..., ::2] = x[..., ::2] * a.cos() - x[..., 1::2] * a.sin()
    out[..., 1::2] = x[..., ::2] * a.sin() + x[..., 1::2] * a.cos()
    return out


class Rotary(nn.Module):
    def __init__(self, dim, base=10000):
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / base ** (torch.arange(0, dim, 2).float() / dim))

    def forward(self, x, offset=0):
        freqs = torch.outer(torch.arange(offset, offset + x.shape[-2]).float(), self.inv_freq)
        both = torch.cat((freqs, freqs), dim=-1)
        one, two = x.chunk(2, dim=-1)
        return x * both.cos() + torch.cat((-two, one), -1) * both.sin()


right("rope")(Rotary)
right("rope")(Rotary(8))


@right("grouped", FUSED)
def expanded(q, k, v, attn_mask=None):
    b, h, _t, d = q.shape
    g = k.shape[1]
    k, v = (x[:, :, None].expand(b, g, h // g, -1, d).reshape(b, h, -1, d) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask)


# ---- one input -------------------------------------------------------------------------------------------------------


@case("multi_head", [rows(2, 5, 6)], d_in=6, d_out=4)
class SelfAttentionV1(nn.Module):
    def __init__(self, d_in, d_out):
        super().__init__()
        self.W_query, self.W_key, self.W_value = (nn.Parameter(torch.rand(d_in, d_out)) for _ in range(3))

    def forward(self, x):
        scores = (x @ self.W_query) @ (x @ self.W_key).transpose(-2, -1)
        return torch.softmax(scores / self.W_key.shape[-1] ** 0.5, dim=-1) @ (x @ self.W_value)


SETTINGS = {"n_heads": 2, "emb_dim": 8, "qkv_bias": False, "drop_rate": 0.0, "context_length": 6}


@case("causal_multi_head", [rows(2, 5, 8)], where=FUSED, cfg=SETTINGS)
class FromADictionary(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.heads = cfg["n_heads"]
        self.att = nn.ModuleDict({n: nn.Linear(cfg["emb_dim"], cfg["emb_dim"], bias=cfg["qkv_bias"]) for n in "qkv"})
        self.out_proj, self.drop = nn.Linear(cfg["emb_dim"], cfg["emb_dim"]), nn.Dropout(cfg["drop_rate"])
        self.length = cfg["context_length"]

    def forward(self, x):
        q, k, v = (heads_of(self.att[name](x), self.heads) for name in "qkv")
        rate = self.drop.p if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
        return self.out_proj(out.transpose(1, 2).flatten(2))


@case("causal_multi_head", [rows(2, 5, 8)], where=FUSED)
class SharedKeys(nn.Module):
    """Fewer heads of keys and values than of queries."""

    def __init__(self, d_model=8, n_heads=4, n_kv_heads=2):
        super().__init__()
        self.n_heads, self.n_kv_heads = n_heads, n_kv_heads
        width = d_model // n_heads * n_kv_heads
        self.wq, self.wo = nn.Linear(d_model, d_model, bias=False), nn.Linear(d_model, d_model, bias=False)
        self.wk, self.wv = nn.Linear(d_model, width, bias=False), nn.Linear(d_model, width, bias=False)

    def forward(self, x):
        q = heads_of(self.wq(x), self.n_heads)
        k, v = (heads_of(f(x), self.n_kv_heads).repeat_interleave(self.n_heads // self.n_kv_heads, 1)
                for f in (self.wk, self.wv))  # fmt: skip
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).flatten(2))


right("causal_multi_head", FUSED)(SharedKeys(12, 3, 1))


@case("multi_head", ONE, [*ONE, TRIANGLE.bool()], [*ONE, {"is_causal": True}], where=FUSED, d_model=8, num_heads=2)
class MayBeCausal(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.query, self.key, self.value, self.proj = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, x, mask=None, is_causal=False):
        q, k, v = (heads_of(f(x), self.num_heads) for f in (self.query, self.key, self.value))
        if is_causal:
            past = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
            mask = past if mask is None else past & mask
        return self.proj(F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2))


# ---- three inputs ----------------------------------------------------------------------------------------------------


@case("multi_head", cross(), [*cross(), SEEN[:, None]], core=False, n_head=2, d_model=8, d_k=4, d_v=3, dropout=0.0)
class Transposed(nn.Module):
    """Heads are split after the projection, with names of another school."""

    def __init__(self, n_head, d_model, d_k, d_v, dropout=0.1):
        super().__init__()
        self.n_head, self.d_k, self.d_v = n_head, d_k, d_v
        self.w_qs, self.w_ks = (nn.Linear(d_model, n_head * d_k, bias=False) for _ in range(2))
        self.w_vs, self.fc = nn.Linear(d_model, n_head * d_v, bias=False), nn.Linear(n_head * d_v, d_model, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, q, k, v, mask=None):
        q, k, v = (heads_of(f(x), self.n_head) for f, x in ((self.w_qs, q), (self.w_ks, k), (self.w_vs, v)))
        scores = torch.matmul(q / self.d_k**0.5, k.transpose(2, 3))
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, -1e9)
        out = (self.dropout(scores.softmax(-1)) @ v).transpose(1, 2).contiguous().flatten(2)
        return self.dropout(self.fc(out)), scores


@case("multi_head", [rows(2, 5, 20)])
class WithoutSizes(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(20, 60), nn.Linear(20, 20)

    def forward(self, x):
        q, k, v = (heads_of(each, 5) for each in self.qkv(x).chunk(3, -1))
        return self.proj(((q @ k.transpose(-1, -2)) / 2).softmax(-1).matmul(v).transpose(1, 2).flatten(2))

    num_heads = 5


right("multi_head", OWN)(nn.MultiheadAttention(8, 2, batch_first=True))


class Positions(nn.Module):
    def __init__(self, d_model, dropout=0.1, max_len=5000):
        super().__init__()
        self.dropout = nn.Dropout(p=dropout)
        pe = torch.zeros(max_len, d_model)
        at = torch.arange(0, max_len).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, d_model, 2) * -(math.log(10000.0) / d_model))
        pe[:, 0::2], pe[:, 1::2] = torch.sin(at * div_term), torch.cos(at * div_term)
        self.register_buffer("pe", pe.unsqueeze(0))

    def forward(self, x):
        return self.dropout(x + self.pe[:, : x.size(1)].requires_grad_(False))


right("positional_encoding")(Positions)
right("positional_encoding")(Positions(512))
