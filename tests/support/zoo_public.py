"""More of the zoo: forms met in courses and public notebooks, typed anew."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from zoo import case
from zoo_modules import PAIRS, SEEN, TRIANGLE, cross, rows, self_of

# ---- masks that must be given -----------------------------------------------------------------------------------

HIDDEN = (PAIRS == 0).expand(2, 3, 5)


@case("dot_product", [*(x.unflatten(-1, (2, 4)).transpose(1, 2) for x in cross()), HIDDEN[:, None]], core=False)
class WeightsOfHeads(nn.Module):
    """Heads are made outside; True is hidden; no default for the mask."""

    def forward(self, Q, K, V, attn_mask):
        scores = torch.matmul(Q, K.transpose(-1, -2)) / math.sqrt(Q.shape[-1])
        scores.masked_fill_(attn_mask, -1e9)
        attn = nn.Softmax(dim=-1)(scores)
        return torch.matmul(attn, V), attn


@case("multi_head", [*cross(), HIDDEN], of_class="raises")
class HiddenPadding(nn.Module):
    """The inner attention is made in the call; the mask, (B, Q, K) with True hidden, is repeated for the heads."""

    def __init__(self, d_model=8, n_heads=2):
        super().__init__()
        self.n_heads = n_heads
        self.W_Q, self.W_K = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)
        self.W_V, self.fc = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model, bias=False)

    def forward(self, input_Q, input_K, input_V, attn_mask):
        n, inputs = input_Q.size(0), zip((self.W_Q, self.W_K, self.W_V), (input_Q, input_K, input_V))
        Q, K, V = (W(x).view(n, -1, self.n_heads, 4).transpose(1, 2) for W, x in inputs)
        attn_mask = attn_mask.unsqueeze(1).repeat(1, self.n_heads, 1, 1)
        context, attn = WeightsOfHeads()(Q, K, V, attn_mask)
        return self.fc(context.transpose(1, 2).reshape(n, -1, 8)), attn


@case("multi_head", [rows(2, 5, 8), SEEN == 0])
class KeyPadding(nn.Module):
    """(B, K), True where the key is padding."""

    def __init__(self, d=8, h=2):
        super().__init__()
        self.h, self.qkv, self.o, self.last_attn = h, nn.Linear(d, 3 * d), nn.Linear(d, d), None

    def forward(self, x, key_pad):
        B, T, d = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.h, d // self.h).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / math.sqrt(d // self.h)
        attn = scores.masked_fill(key_pad[:, None, None, :], float("-inf")).softmax(-1)
        self.last_attn = attn.detach()
        return self.o((attn @ v).transpose(1, 2).reshape(B, T, d))


@case("additive", [rows(1, 2, 4)[0], rows(5, 2, 6), SEEN], core=False)
class TranslatorWithMask(nn.Module):
    """(hidden (B, H), encoder_outputs (T, B, E), mask (B, T)); weights alone."""

    def __init__(self, enc=6, dec=4):
        super().__init__()
        self.attn_fc, self.v_fc = nn.Linear(enc + dec, dec), nn.Linear(dec, 1, bias=False)

    def forward(self, hidden, encoder_outputs, mask):
        hidden = hidden.unsqueeze(1).repeat(1, encoder_outputs.shape[0], 1)
        energy = torch.tanh(self.attn_fc(torch.cat((hidden, encoder_outputs.permute(1, 0, 2)), dim=2)))
        return F.softmax(self.v_fc(energy).squeeze(2).masked_fill(mask == 0, -1e10), dim=1)


@case("additive", [rows(1, 2, 4)[0], rows(2, 5, 6)], says="raises", of_class="not_judged", core=False)
class CaptionOfAPicture(nn.Module):
    """The encoder's projection first; its values by a product and a sum."""

    def __init__(self, encoder_dim=6, decoder_dim=4, attention_dim=5):
        super().__init__()
        self.encoder_att, self.decoder_att = nn.Linear(encoder_dim, attention_dim), nn.Linear(decoder_dim, 5)
        self.full_att = nn.Linear(attention_dim, 1)

    def forward(self, decoder_hidden, features):
        energy = torch.tanh(self.encoder_att(features) + self.decoder_att(decoder_hidden).unsqueeze(1))
        alpha = torch.softmax(self.full_att(energy).squeeze(2), dim=1)
        return (features * alpha.unsqueeze(2)).sum(dim=1), alpha


# ---- weights with an axis of heads -----------------------------------------------------------------------------


@case("causal_multi_head", [rows(2, 5, 8)])
class ParametersOfHeads(nn.Module):
    """(H, D, K) for each of W_Q, W_K, W_V, with biases beside them; (H, K, D) for W_O."""

    def __init__(self, n_heads=2, d_model=8, d_head=3):
        super().__init__()
        g = torch.Generator().manual_seed(5)
        for name in "QKV":
            setattr(self, f"W_{name}", nn.Parameter(torch.randn(n_heads, d_model, d_head, generator=g) / 3))
            setattr(self, f"b_{name}", nn.Parameter(torch.randn(n_heads, d_head, generator=g)))
        self.W_O = nn.Parameter(torch.randn(n_heads, d_head, d_model, generator=g) / 3)
        self.b_O = nn.Parameter(torch.randn(d_model, generator=g))

    def forward(self, x):
        q, k, v = (torch.einsum("btd,hdk->bthk", x, W) + b
                   for W, b in ((self.W_Q, self.b_Q), (self.W_K, self.b_K), (self.W_V, self.b_V)))  # fmt: skip
        scores = torch.einsum("bqhk,bmhk->bhqm", q, k) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -1e5)
        z = torch.einsum("bhqm,bmhk->bqhk", scores.softmax(-1), v)
        return torch.einsum("bqhk,hkd->bqd", z, self.W_O) + self.b_O


@case("multi_head", [rows(2, 5, 8)])
class EinsumThenLinear(nn.Module):
    """(D, H, K), then a Linear."""

    def __init__(self, d=8, h=2, k=4):
        super().__init__()
        self.wq, self.wk, self.wv = (nn.Parameter(rows(d, h, k, seed) / 3) for seed in (1, 2, 3))
        self.out = nn.Linear(h * k, d)

    def forward(self, x):
        q, k, v = (torch.einsum("btd,dhk->bhtk", x, W) for W in (self.wq, self.wk, self.wv))
        return self.out(((q @ k.transpose(-2, -1) / k.shape[-1] ** 0.5).softmax(-1) @ v).transpose(1, 2).flatten(2))


# ---- names, flags, places of dropout ----------------------------------------------------------------------------


@case("multi_head", [rows(2, 5, 8)])
class WithLayerPast(nn.Module):
    """c_q, c_k, c_v; an argument for a cache that is not used; dropout of a function, by the rate of a module."""

    def __init__(self, n_embd=8, n_head=2, dropout=0.0):
        super().__init__()
        self.n_head, self.attn_drop = n_head, nn.Dropout(dropout)
        self.c_q, self.c_k, self.c_v, self.c_proj = (nn.Linear(n_embd, n_embd) for _ in range(4))

    def forward(self, x, layer_past=None):
        q, k, v = (W(x).unflatten(-1, (self.n_head, -1)).transpose(1, 2) for W in (self.c_q, self.c_k, self.c_v))
        weights = (q @ k.transpose(-2, -1) / math.sqrt(k.shape[-1])).softmax(-1)
        weights = F.dropout(weights, self.attn_drop.p if self.training else 0.0)
        return self.c_proj((weights @ v).transpose(1, 2).flatten(2))


@case("causal_multi_head", [rows(2, 5, 8)])
class ByGenerators(nn.Module):
    """One head, of an input that is called context."""

    def __init__(self, e=8, a=4):
        super().__init__()
        self.key_gen, self.query_gen, self.value_gen = (nn.Linear(e, a, bias=False) for _ in range(3))

    def forward(self, context):
        k, q, v = self.key_gen(context), self.query_gen(context), self.value_gen(context)
        scores = q @ torch.transpose(k, 1, 2) / k.shape[2] ** 0.5
        return F.softmax(scores.masked_fill(torch.ones_like(scores).tril() == 0, float("-inf")), dim=2) @ v


class Prepared(nn.Module):
    def __init__(self, d_model, heads):
        super().__init__()
        self.linear, self.heads = nn.Linear(d_model, d_model), heads

    def forward(self, x):
        return self.linear(x).unflatten(-1, (self.heads, -1))


@case("multi_head", [dict(zip(("query", "key", "value"), self_of()))], says="batch_for_steps")
class HeadsLast(nn.Module):
    """Time first, by keywords alone; weights (Q, K, B, H), kept after dropout."""

    def __init__(self, heads=2, d_model=8, dropout_prob=0.0):
        super().__init__()
        self.query, self.key, self.value = (Prepared(d_model, heads) for _ in range(3))
        self.output, self.dropout, self.attn = nn.Linear(d_model, d_model), nn.Dropout(dropout_prob), None
        self.heads, self.softmax = heads, nn.Softmax(dim=1)

    def forward(self, *, query, key, value, mask=None):
        q, k, v = self.query(query), self.key(key), self.value(value)
        scores = torch.einsum("ibhd,jbhd->ijbh", q, k) * q.shape[-1] ** -0.5
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(-1) == 0, float("-inf"))
        attn = self.dropout(self.softmax(scores))
        self.attn = attn.detach()
        return self.output(torch.einsum("ijbh,jbhd->ibhd", attn, v).flatten(2))


# ---- heads that are rotated --------------------------------------------------------------------------------------


class RotaryEmbedding(nn.Module):
    def __init__(self, dim, base=10000):
        super().__init__()
        self.register_buffer("inv_freq", base ** (-torch.arange(0, dim, 2).float() / dim))

    def forward(self, x):
        angles = torch.outer(torch.arange(x.shape[-2]).float(), self.inv_freq)
        angles, (first, second) = torch.cat((angles, angles), dim=-1), x.chunk(2, dim=-1)
        return x * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()


@case("causal_multi_head", [rows(2, 5, 8)], [rows(2, 140, 8)])
class RotatedAndShared(nn.Module):
    """Features i and i + D / 2 turn together, by a module; two heads of queries share one of keys."""

    def __init__(self, d=8, num_heads=4, num_kv_heads=2):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.rope = num_heads, num_kv_heads, RotaryEmbedding(2, 500000)
        self.q_proj, self.o_proj = nn.Linear(d, d, bias=False), nn.Linear(d, d, bias=False)
        self.k_proj, self.v_proj = nn.Linear(d, 4, bias=False), nn.Linear(d, 4, bias=False)

    def forward(self, x):
        n = self.num_heads, self.num_kv_heads, self.num_kv_heads
        projections = zip((self.q_proj, self.k_proj, self.v_proj), n)
        q, k, v = (W(x).unflatten(-1, (heads, -1)).transpose(1, 2) for W, heads in projections)
        q, k, v = self.rope(q), self.rope(k).repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), float("-inf"))
        return self.o_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


@case("multi_head", [rows(2, 5, 8)], says="one_line", of_class="raises")
class RotatedAsComplexNumbers(nn.Module):
    """Features 2i and 2i + 1 turn together, by a table of complex numbers."""

    def __init__(self, d=8, num_heads=2, max_len=12):
        super().__init__()
        self.num_heads, self.qkv, self.proj = num_heads, nn.Linear(d, 3 * d), nn.Linear(d, d)
        angles = torch.outer(torch.arange(max_len).float(), 10000.0 ** (-torch.arange(0, 4, 2).float() / 4))
        self.register_buffer("freqs_cis", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def turn(self, x):
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * self.freqs_cis[: x.shape[-2]]).flatten(-2)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        weights = (self.turn(q) @ self.turn(k).transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).flatten(2))


def angles(rows_of_a_table, width=4):
    return torch.outer(torch.arange(rows_of_a_table).float(), 10000.0 ** (-torch.arange(0, width, 2).float() / width))


@case("multi_head", [rows(2, 5, 8), {"freqs_cis": torch.polar(torch.ones(5, 2), angles(9)[4:])}], says="untried")
class FrequenciesAreGiven(RotatedAsComplexNumbers):
    """The rows of a table of complex numbers, by the model, as many as there are queries."""

    def forward(self, x, freqs_cis, mask=None):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = (torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * freqs_cis for x in (q, k))
        scores = torch.view_as_real(q).flatten(3) @ torch.view_as_real(k).flatten(3).transpose(2, 3) / 2
        scores = scores if mask is None else scores + mask
        return self.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


@case(
    "causal_multi_head",
    [rows(2, 5, 8), TRIANGLE == 0, {"cos": angles(9).cos().repeat(1, 2), "sin": angles(9).sin().repeat(1, 2)}],
    of_class="mask_inverted",
)
class CosinesAreGiven(RotatedAsComplexNumbers):
    """Whole tables of cosines and sines, as wide as a head; a mask that hides."""

    def forward(self, x, mask, cos, sin):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        n = x.shape[1]
        q, k = (y * cos[:n] + torch.cat((-y[..., 2:], y[..., :2]), dim=-1) * sin[:n] for y in (q, k))
        scores = (q @ k.transpose(2, 3) / 2).masked_fill(mask, -torch.inf)
        return self.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
