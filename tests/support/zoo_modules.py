"""Modules of the zoo, as readers type them, in the words and the shapes of the book, of courses and of public code."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from zoo import case


def rows(batch, n, features, seed=0):
    return torch.randn(batch, n, features, generator=torch.Generator().manual_seed(seed + n))


def self_of(features=8, n=5):
    x = rows(2, n, features)
    return [x, x, x]


def cross(q=8, k=8, v=8):
    return [rows(2, 3, q), rows(2, 5, k, 1), rows(2, 5, v, 2)]


LENS, EACH = torch.tensor([2, 5]), torch.tensor([[1, 2, 5], [5, 3, 4]])
SEEN = torch.tensor([[1, 1, 0, 1, 0], [1, 0, 0, 1, 1]])
PAIRS = torch.tril(torch.ones(3, 5), diagonal=2) * torch.tensor([1.0, 1, 0, 1, 1])
TRIANGLE = torch.tril(torch.ones(5, 5))


# ---- the book's, typed ------------------------------------------------------------------------------------------


def sequence_mask(X, valid_len, value=0):
    maxlen = X.size(1)
    mask = torch.arange(maxlen, dtype=torch.float32)[None, :] < valid_len[:, None]
    X[~mask] = value
    return X


def masked_softmax(X, valid_lens):
    if valid_lens is None:
        return F.softmax(X, dim=-1)
    shape = X.shape
    valid_lens = torch.repeat_interleave(valid_lens, shape[1]) if valid_lens.dim() == 1 else valid_lens.reshape(-1)
    X = sequence_mask(X.reshape(-1, shape[-1]), valid_lens, value=-1e6)
    return F.softmax(X.reshape(shape), dim=-1)


def transpose_qkv(X, num_heads):
    X = X.reshape(X.shape[0], X.shape[1], num_heads, -1).permute(0, 2, 1, 3)
    return X.reshape(-1, X.shape[2], X.shape[3])


def transpose_output(X, num_heads):
    X = X.reshape(-1, num_heads, X.shape[1], X.shape[2]).permute(0, 2, 1, 3)
    return X.reshape(X.shape[0], X.shape[1], -1)


@case("dot_product", [*cross(), LENS], [*cross(), None], [*cross(), EACH])
class DotProductAttention(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.dropout = nn.Dropout(dropout)

    def forward(self, queries, keys, values, valid_lens=None):
        d = queries.shape[-1]
        scores = torch.bmm(queries, keys.transpose(1, 2)) / math.sqrt(d)
        self.attention_weights = masked_softmax(scores, valid_lens)
        return torch.bmm(self.dropout(self.attention_weights), values)


@case("additive", [*cross(6, 4, 7), LENS], [*cross(6, 4, 7), None], [*cross(6, 4, 7), EACH])
class AdditiveAttention(nn.Module):
    def __init__(self, key_size=4, query_size=6, num_hiddens=5, dropout=0.0):
        super().__init__()
        self.W_k = nn.Linear(key_size, num_hiddens, bias=False)
        self.W_q = nn.Linear(query_size, num_hiddens, bias=False)
        self.w_v = nn.Linear(num_hiddens, 1, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, queries, keys, values, valid_lens):
        queries, keys = self.W_q(queries), self.W_k(keys)
        features = torch.tanh(queries.unsqueeze(2) + keys.unsqueeze(1))
        scores = self.w_v(features).squeeze(-1)
        self.attention_weights = masked_softmax(scores, valid_lens)
        return torch.bmm(self.dropout(self.attention_weights), values)


@case("multi_head", [*cross(6, 4, 7), LENS], [*cross(6, 4, 7), None], [*cross(6, 4, 7), EACH])
class MultiHeadAttention(nn.Module):
    """The first edition's: functions for the heads, sizes given."""

    def __init__(self, key_size=4, query_size=6, value_size=7, num_hiddens=8, num_heads=2, dropout=0.0, bias=False):
        super().__init__()
        self.num_heads = num_heads
        self.attention = DotProductAttention(dropout)
        self.W_q = nn.Linear(query_size, num_hiddens, bias=bias)
        self.W_k = nn.Linear(key_size, num_hiddens, bias=bias)
        self.W_v = nn.Linear(value_size, num_hiddens, bias=bias)
        self.W_o = nn.Linear(num_hiddens, num_hiddens, bias=bias)

    def forward(self, queries, keys, values, valid_lens):
        queries = transpose_qkv(self.W_q(queries), self.num_heads)
        keys = transpose_qkv(self.W_k(keys), self.num_heads)
        values = transpose_qkv(self.W_v(values), self.num_heads)
        if valid_lens is not None:
            valid_lens = torch.repeat_interleave(valid_lens, repeats=self.num_heads, dim=0)
        output = self.attention(queries, keys, values, valid_lens)
        return self.W_o(transpose_output(output, self.num_heads))


@case("multi_head", [*cross(), LENS], [*cross(), None])
class HeadsByMethods(nn.Module):
    """The second edition's: methods for the heads, sizes from the first call."""

    def __init__(self, num_hiddens=8, num_heads=4, dropout=0.0, bias=True):
        super().__init__()
        self.num_heads = num_heads
        self.attention = DotProductAttention(dropout)
        self.W_q, self.W_k = nn.LazyLinear(num_hiddens, bias=bias), nn.LazyLinear(num_hiddens, bias=bias)
        self.W_v, self.W_o = nn.LazyLinear(num_hiddens, bias=bias), nn.LazyLinear(num_hiddens, bias=bias)

    def split(self, X):
        X = X.reshape(X.shape[0], X.shape[1], self.num_heads, -1).permute(0, 2, 1, 3)
        return X.reshape(-1, X.shape[2], X.shape[3])

    def join(self, X):
        X = X.reshape(-1, self.num_heads, X.shape[1], X.shape[2]).permute(0, 2, 1, 3)
        return X.reshape(X.shape[0], X.shape[1], -1)

    def forward(self, queries, keys, values, valid_lens=None):
        q, k, v = self.split(self.W_q(queries)), self.split(self.W_k(keys)), self.split(self.W_v(values))
        lens = None if valid_lens is None else valid_lens.repeat_interleave(self.num_heads, dim=0)
        return self.W_o(self.join(self.attention(q, k, v, lens)))


class DotAttn(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.Dropout = nn.Dropout(dropout)

    def forward(self, query, key, value, valid_len=None):
        scores = query @ key.transpose(-1, -2) / query.size(-1) ** 0.5
        if valid_len is not None:
            valid_len = valid_len[:, None] if valid_len.dim() == 1 else valid_len
            hidden = torch.arange(scores.size(-1)) >= valid_len.unsqueeze(-1)
            scores = scores.masked_fill(hidden, -1e9)
        self.weights = torch.softmax(scores, dim=-1)
        return self.Dropout(self.weights) @ value


@case("multi_head", [*cross(), LENS], [*cross()], [*cross(), EACH])
class MHA(nn.Module):
    """Other names: Wq, DotAttn, self.Dropout, query_size first."""

    def __init__(self, query_size=8, key_size=8, value_size=8, hiddens=8, n_heads=2, dropout=0.0):
        super().__init__()
        self.n_heads = n_heads
        self.attn = DotAttn(dropout)
        self.Wq, self.Wk = nn.Linear(query_size, hiddens, bias=False), nn.Linear(key_size, hiddens, bias=False)
        self.Wv, self.Wo = nn.Linear(value_size, hiddens, bias=False), nn.Linear(hiddens, hiddens, bias=False)

    def forward(self, query, key, value, valid_len=None):
        q, k, v = (transpose_qkv(W(x), self.n_heads) for W, x in ((self.Wq, query), (self.Wk, key), (self.Wv, value)))
        if valid_len is not None:
            valid_len = valid_len.repeat_interleave(self.n_heads, dim=0)
        return self.Wo(transpose_output(self.attn(q, k, v, valid_len), self.n_heads))


@case("dot_product", [*cross(), LENS], [*cross(), EACH], says="raises")
class MinusInfinity(DotProductAttention):
    """float('-inf') in the place of -1e6; lengths that it must be given."""

    def forward(self, queries, keys, values, valid_lens):
        scores = torch.einsum("bqd,bkd->bqk", queries, keys) / math.sqrt(keys.shape[2])
        lens = valid_lens.reshape(len(queries), -1, 1)
        scores[(torch.arange(keys.shape[1]) >= lens).expand_as(scores)] = float("-inf")
        return torch.einsum("bqk,bkd->bqd", self.dropout(scores.softmax(-1)), values)


@case(
    "dot_product", [*cross()], [*cross(), SEEN[:, None, :].expand(2, 3, 5).bool()], [*cross(), PAIRS.bool()], core=False
)
class MaskInThePlaceOfLengths(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.dropout = nn.Dropout(dropout)

    def forward(self, q, k, v, mask=None):
        scores = q.matmul(k.transpose(-2, -1)) / math.sqrt(q.size(-1))
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        attn = self.dropout(F.softmax(scores, dim=-1))
        return attn.matmul(v), attn


@case("dot_product", [*cross()])
class NoLengths(nn.Module):
    def forward(self, query, key, value):
        return F.softmax(query @ key.mT / query.shape[-1] ** 0.5 if hasattr(query, "mT") else
                         query @ key.transpose(1, 2) / query.shape[-1] ** 0.5, -1) @ value  # fmt: skip


@case("additive", [*cross(6, 4, 7), LENS], [*cross(6, 4, 7), None])
class AdditiveByOtherNames(nn.Module):
    def __init__(self, query_size=6, key_size=4, hiddens=5, dropout=0.0):
        super().__init__()
        self.query_layer, self.key_layer = nn.Linear(query_size, hiddens), nn.Linear(key_size, hiddens)
        self.score = nn.Linear(hiddens, 1, bias=False)
        self.drop = nn.Dropout(dropout)

    def forward(self, query, key, value, lens=None):
        scores = self.score((self.query_layer(query)[:, :, None] + self.key_layer(key)[:, None]).tanh())[..., 0]
        if lens is not None:
            hidden = torch.arange(key.size(1))[None] >= lens[:, None]
            scores.masked_fill_(hidden[:, None], -1e6)
        self.alpha = scores.softmax(dim=2)
        return self.drop(self.alpha) @ value


@case("multi_head", [rows(2, 5, 8), LENS], [rows(2, 5, 8), None])
class SelfAttentionWithLengths(MHA):
    """One input and lengths."""

    def forward(self, X, valid_lens=None):
        return super().forward(X, X, X, valid_lens)


# ---- the annotated Transformer's line -------------------------------------------------------------------------


def attention(query, key, value, mask=None, dropout=None):
    d_k = query.size(-1)
    scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(d_k)
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    p_attn = scores.softmax(dim=-1)
    if dropout is not None:
        p_attn = dropout(p_attn)
    return torch.matmul(p_attn, value), p_attn


@case("multi_head", [*cross()], [*cross(), SEEN[:, None, :]], [*self_of(), TRIANGLE[None]])
class MultiHeadedAttention(nn.Module):
    def __init__(self, h=2, d_model=8, dropout=0.0):
        super().__init__()
        assert d_model % h == 0
        self.d_k = d_model // h
        self.h = h
        self.linears = nn.ModuleList([nn.Linear(d_model, d_model) for _ in range(4)])
        self.attn = None
        self.dropout = nn.Dropout(p=dropout)

    def forward(self, query, key, value, mask=None):
        if mask is not None:
            mask = mask.unsqueeze(1)
        n = query.size(0)
        query, key, value = [
            lin(x).view(n, -1, self.h, self.d_k).transpose(1, 2) for lin, x in zip(self.linears, (query, key, value))
        ]
        x, self.attn = attention(query, key, value, mask=mask, dropout=self.dropout)
        x = x.transpose(1, 2).contiguous().view(n, -1, self.h * self.d_k)
        return self.linears[-1](x)


@case("multi_head", [*cross()], [*cross(), SEEN[:, None, None].bool()], [*cross(), PAIRS[None, None].bool()])
class TensorScale(nn.Module):
    """fc_q ... fc_o, and a tensor for the scale; output and weights are returned."""

    def __init__(self, hid_dim=8, n_heads=4, dropout=0.0, device="cpu"):
        super().__init__()
        self.hid_dim, self.n_heads, self.head_dim = hid_dim, n_heads, hid_dim // n_heads
        self.fc_q, self.fc_k = nn.Linear(hid_dim, hid_dim), nn.Linear(hid_dim, hid_dim)
        self.fc_v, self.fc_o = nn.Linear(hid_dim, hid_dim), nn.Linear(hid_dim, hid_dim)
        self.dropout = nn.Dropout(dropout)
        self.scale = torch.sqrt(torch.FloatTensor([self.head_dim])).to(device)

    def forward(self, query, key, value, mask=None):
        batch = query.shape[0]
        Q, K, V = self.fc_q(query), self.fc_k(key), self.fc_v(value)
        Q, K, V = (x.view(batch, -1, self.n_heads, self.head_dim).permute(0, 2, 1, 3) for x in (Q, K, V))
        energy = torch.matmul(Q, K.permute(0, 1, 3, 2)) / self.scale
        if mask is not None:
            energy = energy.masked_fill(mask == 0, -1e10)
        weights = torch.softmax(energy, dim=-1)
        x = torch.matmul(self.dropout(weights), V).permute(0, 2, 1, 3).contiguous()
        return self.fc_o(x.view(batch, -1, self.hid_dim)), weights


class ScaledDotProductAttention(nn.Module):
    """With a temperature; heads as an axis."""

    def __init__(self, temperature, attn_dropout=0.0):
        super().__init__()
        self.temperature = temperature
        self.dropout = nn.Dropout(attn_dropout)

    def forward(self, q, k, v, mask=None):
        attn = torch.matmul(q / self.temperature, k.transpose(2, 3))
        if mask is not None:
            attn = attn.masked_fill(mask == 0, -1e9)
        attn = self.dropout(F.softmax(attn, dim=-1))
        return torch.matmul(attn, v), attn


@case("multi_head", [*cross()], [*cross(), SEEN[:, None, :]])
class WithTemperature(nn.Module):
    """w_qs, w_ks, w_vs and fc; the inner class divides by a temperature."""

    def __init__(self, n_head=2, d_model=8, d_k=4, d_v=3, dropout=0.0):
        super().__init__()
        self.n_head, self.d_k, self.d_v = n_head, d_k, d_v
        self.w_qs = nn.Linear(d_model, n_head * d_k, bias=False)
        self.w_ks = nn.Linear(d_model, n_head * d_k, bias=False)
        self.w_vs = nn.Linear(d_model, n_head * d_v, bias=False)
        self.fc = nn.Linear(n_head * d_v, d_model, bias=False)
        self.attention = ScaledDotProductAttention(temperature=d_k**0.5, attn_dropout=dropout)

    def forward(self, q, k, v, mask=None):
        d_k, d_v, n_head = self.d_k, self.d_v, self.n_head
        sz_b, len_q, len_k, len_v = q.size(0), q.size(1), k.size(1), v.size(1)
        q = self.w_qs(q).view(sz_b, len_q, n_head, d_k).transpose(1, 2)
        k = self.w_ks(k).view(sz_b, len_k, n_head, d_k).transpose(1, 2)
        v = self.w_vs(v).view(sz_b, len_v, n_head, d_v).transpose(1, 2)
        if mask is not None:
            mask = mask.unsqueeze(1)
        q, attn = self.attention(q, k, v, mask=mask)
        q = q.transpose(1, 2).contiguous().view(sz_b, len_q, -1)
        return self.fc(q), attn


class ScaleDotProductAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.softmax = nn.Softmax(dim=-1)

    def forward(self, q, k, v, mask=None, e=1e-12):
        d_tensor = k.size(3)
        score = (q @ k.transpose(2, 3)) / math.sqrt(d_tensor)
        if mask is not None:
            score = score.masked_fill(mask == 0, -10000)
        score = self.softmax(score)
        return score @ v, score


@case("multi_head", [*cross()], [*cross(), SEEN[:, None, None]], core=False)
class WithConcat(nn.Module):
    """w_q, w_k, w_v, w_concat, and methods split and concat."""

    def __init__(self, d_model=8, n_head=2):
        super().__init__()
        self.n_head = n_head
        self.attention = ScaleDotProductAttention()
        self.w_q, self.w_k = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)
        self.w_v, self.w_concat = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)

    def forward(self, q, k, v, mask=None):
        q, k, v = self.split(self.w_q(q)), self.split(self.w_k(k)), self.split(self.w_v(v))
        out, _ = self.attention(q, k, v, mask=mask)
        return self.w_concat(self.concat(out))

    def split(self, tensor):
        batch, length, d = tensor.size()
        return tensor.view(batch, length, self.n_head, d // self.n_head).transpose(1, 2)

    def concat(self, tensor):
        batch, head, length, d = tensor.size()
        return tensor.transpose(1, 2).contiguous().view(batch, length, head * d)


@case("multi_head", [*cross()[::-1][:2], cross()[0], SEEN[:, None, None]], [cross()[2], cross()[1], cross()[0], None])
class ValuesFirst(nn.Module):
    """values, keys, query, mask in this order; einsum; fc_out."""

    def __init__(self, embed_size=8, heads=2):
        super().__init__()
        self.embed_size, self.heads, self.head_dim = embed_size, heads, embed_size // heads
        self.values, self.keys = nn.Linear(embed_size, embed_size), nn.Linear(embed_size, embed_size)
        self.queries, self.fc_out = nn.Linear(embed_size, embed_size), nn.Linear(embed_size, embed_size)

    def forward(self, values, keys, query, mask):
        N, value_len, key_len, query_len = query.shape[0], values.shape[1], keys.shape[1], query.shape[1]
        values = self.values(values).reshape(N, value_len, self.heads, self.head_dim)
        keys = self.keys(keys).reshape(N, key_len, self.heads, self.head_dim)
        queries = self.queries(query).reshape(N, query_len, self.heads, self.head_dim)
        energy = torch.einsum("nqhd,nkhd->nhqk", [queries, keys])
        if mask is not None:
            energy = energy.masked_fill(mask == 0, float("-1e20"))
        weights = torch.softmax(energy / (self.head_dim ** (1 / 2)), dim=3)
        out = torch.einsum("nhql,nlhd->nqhd", [weights, values]).reshape(N, query_len, self.embed_size)
        return self.fc_out(out)
