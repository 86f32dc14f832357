"""Layers and classes of courses and books on language models, in torch, each with its mistakes by name."""

import torch
from torch import nn
from torch.nn import functional as F

from zoo import style


def root(ask, d, all_of=0):
    if ask("scale_num_hiddens"):
        return all_of**0.5
    return 1.0 if ask("no_scale") else float(d) if ask("scale_d") else d**0.5


def hidden_score(ask):
    return 0.0 if ask("mask_zero") else -5.0 if ask("mask_small") else float("-inf")


def weighed(ask, scores, hidden, values, dropout=lambda weights: weights):
    """Softmax, dropout and product; `hidden` is True where a key is not seen, or None."""
    if hidden is not None and not (ask("mask_after_softmax") or ask("mask_ignored")):
        scores = scores.masked_fill(hidden, hidden_score(ask))
    if ask("no_softmax"):
        return scores.masked_fill(scores == float("-inf"), 0.0) @ values
    weights = scores.softmax(1 if ask("softmax_axis_heads") else -2 if ask("softmax_axis") else -1)
    if ask("mask_after_softmax") and hidden is not None:
        weights = weights.masked_fill(hidden, 0.0)
    return dropout(weights) @ values


# ---- functions of tensors --------------------------------------------------------------------------------------------

MASKED = "no_scale scale_d mask_ignored mask_zero mask_small mask_after_softmax softmax_axis "


@style("dot_product", MASKED)
def masked_fill_where_zero(ask):
    def scaled_dot_product(query, key, value, mask=None):
        scores = torch.matmul(query, key.transpose(-2, -1)) / root(ask, query.size(-1))
        return weighed(ask, scores, None if mask is None else mask == 0, value)

    return scaled_dot_product


@style("dot_product", MASKED)
def masked_fill_where_true(ask):
    def attention(q, k, v, attn_mask=None):
        scores = torch.bmm(q, k.transpose(1, 2)) / root(ask, q.shape[-1])
        return weighed(ask, scores, attn_mask, v), scores.softmax(-1)

    return attention


@style("dot_product", MASKED)
def heads_and_a_mask(ask):
    def attend(q, k, v, mask=None):
        _b, _h, _t, d = q.size()
        scores = torch.einsum("bhid,bhjd->bhij", q, k) / root(ask, d)
        return weighed(ask, scores, None if mask is None else ~mask.bool(), v)

    return attend


@style("dot_product", "no_scale scale_d mask_ignored")
def a_mask_that_is_added(ask):
    def attention(q, k, v, attn_mask=None):
        scores = q @ k.mT if hasattr(q, "mT") else q @ k.transpose(-1, -2)
        scores = scores / root(ask, q.shape[-1])
        if attn_mask is not None and not ask("mask_ignored"):
            scores = scores + attn_mask
        return F.softmax(scores, dim=-1) @ v

    return attention


@style("causal", "no_scale scale_d sees_future mask_off_by_one mask_zero mask_after_softmax softmax_axis")
def a_causal_function(ask):
    def causal_attention(q, k, v):
        scores = q @ k.transpose(-2, -1) / root(ask, q.shape[-1])
        n = scores.shape[-1]
        hidden = torch.ones(n, n).triu(2 if ask("mask_off_by_one") else 1).bool()
        return weighed(ask, scores, None if ask("sees_future") else hidden, v)

    return causal_attention


@style("rope", "rope_direction wrong_exponent sin_cos_swapped offset_ignored")
def turned_as_complex(ask):
    def apply_rotary_emb(x, start_pos=0):
        d = x.shape[-1]
        freqs = 1.0 / 10000.0 ** (torch.arange(0, d, 2).float() / (2 * d if ask("wrong_exponent") else d))
        at = torch.arange(x.shape[-2]) + (0 if ask("offset_ignored") else start_pos)
        angles = torch.outer(at.float(), freqs)
        cos, sin = angles.cos(), -angles.sin() if ask("rope_direction") else angles.sin()
        turned = torch.complex(*((sin, cos) if ask("sin_cos_swapped") else (cos, sin)))
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2).contiguous())
        return torch.view_as_real(pairs * turned).flatten(-2)

    return apply_rotary_emb


@style("rope", "rope_direction wrong_exponent sin_cos_swapped")
def a_class_with_tables(ask):
    class RotaryPositionalEmbedding(nn.Module):
        def __init__(self, theta, d_k, max_seq_len, device=None):
            super().__init__()
            inverse = theta ** (-torch.arange(0, d_k, 2, device=device) / (2 * d_k if ask("wrong_exponent") else d_k))
            angles = torch.arange(max_seq_len)[:, None] * inverse
            self.register_buffer("cos", angles.cos(), persistent=False)
            self.register_buffer("sin", -angles.sin() if ask("rope_direction") else angles.sin(), persistent=False)

        def forward(self, x, token_positions):
            cos, sin = self.cos[token_positions], self.sin[token_positions]
            cos, sin = (sin, cos) if ask("sin_cos_swapped") else (cos, sin)
            even, odd = x[..., 0::2], x[..., 1::2]
            return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)

    return RotaryPositionalEmbedding


def rotate_half(x):
    one, two = x.chunk(2, dim=-1)
    return torch.cat((-two, one), dim=-1)


@style("rope", "rope_direction wrong_exponent offset_ignored")
def turned_halves(ask):
    def rotate(x, position_ids=None):
        at = torch.arange(x.shape[-2]) if position_ids is None or ask("offset_ignored") else position_ids
        d = x.shape[-1]
        inverse = 10000 ** -(torch.arange(0, d, 2) / (d * 2 if ask("wrong_exponent") else d))
        angles = torch.cat([at[..., None] * inverse] * 2, dim=-1)
        return x * angles.cos() + (-rotate_half(x) if ask("rope_direction") else rotate_half(x)) * angles.sin()

    return rotate


@style("grouped", "no_scale scale_d groups_tiled mask_ignored mask_after_softmax softmax_axis")
def repeated_keys_and_values(ask):
    def gqa(q, k, v, mask=None):
        share = q.shape[1] // k.shape[1]
        k, v = (x.repeat(1, share, 1, 1) if ask("groups_tiled") else x.repeat_interleave(share, dim=1) for x in (k, v))
        scores = q @ k.transpose(-1, -2) / root(ask, q.shape[-1])
        return weighed(ask, scores, None if mask is None else mask.logical_not(), v)

    return gqa


# ---- layers with one input -------------------------------------------------------------------------------------------

LAYER = "no_scale scale_d scale_num_hiddens heads_without_transpose no_output_projection sees_future mask_off_by_one "


def split_heads(ask, x, heads):
    if ask("heads_without_transpose"):
        return x.reshape(x.shape[0], heads, x.shape[1], -1)
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def join_heads(ask, x):
    batch, heads, steps, d = x.shape
    return x.reshape(batch, steps, heads * d) if ask("heads_without_transpose") else x.transpose(1, 2).flatten(2)


def attend_to_the_past(ask, q, k, v, width):
    scores = q @ k.transpose(-2, -1) / root(ask, q.shape[-1], width)
    n = scores.shape[-1]
    hidden = torch.triu(torch.ones(n, n, dtype=torch.bool), diagonal=2 if ask("mask_off_by_one") else 1)
    return weighed(ask, scores, None if ask("sees_future") else hidden, v)


@style("causal_multi_head", LAYER + "mask_zero mask_after_softmax softmax_axis")
def sizes_in_and_out_and_a_context(ask):
    class MultiHeadAttention(nn.Module):
        def __init__(self, d_in, d_out, context_length, dropout, num_heads, qkv_bias=False):
            super().__init__()
            assert d_out % num_heads == 0
            self.d_out, self.num_heads, self.head_dim = d_out, num_heads, d_out // num_heads
            self.W_query = nn.Linear(d_in, d_out, bias=qkv_bias)
            self.W_key = nn.Linear(d_in, d_out, bias=qkv_bias)
            self.W_value = nn.Linear(d_in, d_out, bias=qkv_bias)
            self.out_proj = nn.Linear(d_out, d_out)
            self.dropout = nn.Dropout(dropout)
            self.register_buffer("mask", torch.triu(torch.ones(context_length, context_length), diagonal=1))

        def forward(self, x):
            q, k, v = (split_heads(ask, f(x), self.num_heads) for f in (self.W_query, self.W_key, self.W_value))
            scores = q @ k.transpose(2, 3) / root(ask, self.head_dim, self.d_out)
            hidden = self.mask.bool()[: x.shape[1], : x.shape[1]]
            if ask("mask_off_by_one"):
                hidden = torch.ones_like(hidden).triu(2)
            out = join_heads(ask, weighed(ask, scores, None if ask("sees_future") else hidden, v, self.dropout))
            return out if ask("no_output_projection") else self.out_proj(out)

    return MultiHeadAttention


@style("causal_multi_head", LAYER)
def a_config_and_one_projection(ask):
    class CausalSelfAttention(nn.Module):
        def __init__(self, config):
            super().__init__()
            assert config.n_embd % config.n_head == 0
            self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
            self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
            self.n_head, self.n_embd = config.n_head, config.n_embd
            self.resid_dropout = nn.Dropout(config.dropout)
            ones = torch.ones(config.block_size, config.block_size)
            self.register_buffer("bias", torch.tril(ones).view(1, 1, config.block_size, config.block_size))

        def forward(self, x):
            q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
            q, k, v = (split_heads(ask, each, self.n_head) for each in (q, k, v))
            out = join_heads(ask, attend_to_the_past(ask, q, k, v, self.n_embd))
            return self.resid_dropout(out if ask("no_output_projection") else self.c_proj(out))

    return CausalSelfAttention


@style("causal_multi_head", LAYER)
def a_layer_of_sixteen_features(ask):
    class SelfAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads = 2
            self.qkv, self.proj = nn.Linear(16, 48, bias=False), nn.Linear(16, 16)

        def forward(self, x):
            q, k, v = (split_heads(ask, each, self.heads) for each in self.qkv(x).chunk(3, dim=-1))
            out = join_heads(ask, attend_to_the_past(ask, q, k, v, 16))
            return out if ask("no_output_projection") else self.proj(out)

    return SelfAttention()


@style("causal_multi_head", "no_scale sees_future rope_on_values wrong_exponent heads_without_transpose")
def rotary_or_not(ask, halves=False):
    class CausalMultiHeadSelfAttention(nn.Module):
        def __init__(self, d_model, num_heads):
            super().__init__()
            self.num_heads = num_heads
            self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
                nn.Linear(d_model, d_model, bias=False) for _ in range(4)
            )

        def rope(self, x):
            d = x.shape[-1]
            inverse = 10000 ** (-torch.arange(0, d, 2) / (2 * d if ask("wrong_exponent") else d))
            angles = torch.arange(x.shape[-2])[:, None] * inverse
            cos, sin = angles.cos(), angles.sin()
            if halves:
                return x * torch.cat([cos, cos], -1) + rotate_half(x) * torch.cat([sin, sin], -1)
            even, odd = x[..., ::2], x[..., 1::2]
            return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)

        def forward(self, x, token_positions=None):
            q, k, v = (split_heads(ask, f(x), self.num_heads) for f in (self.q_proj, self.k_proj, self.v_proj))
            q, k = self.rope(q), self.rope(k)
            if ask("rope_on_values"):
                v = self.rope(v)
            return self.o_proj(join_heads(ask, attend_to_the_past(ask, q, k, v, x.shape[-1])))

    return CausalMultiHeadSelfAttention


@style("causal_multi_head", "no_scale sees_future rope_on_values heads_without_transpose")
def rotary_halves(ask):
    return rotary_or_not.made(ask, halves=True)


@style("causal_multi_head", "no_scale scale_num_hiddens sees_future mask_off_by_one")
def heads_in_a_list(ask):
    class Head(nn.Module):
        def __init__(self, n_embd, head_size, block_size):
            super().__init__()
            self.key, self.query, self.value = (nn.Linear(n_embd, head_size, bias=False) for _ in range(3))
            self.register_buffer("tril", torch.tril(torch.ones(block_size, block_size)))

        def forward(self, x):
            k, q = self.key(x), self.query(x)
            return attend_to_the_past(ask, q, k, self.value(x), x.shape[-1])

    class MultiHead(nn.Module):
        def __init__(self, n_embd=8, num_heads=2, block_size=16):
            super().__init__()
            self.heads = nn.ModuleList(Head(n_embd, n_embd // num_heads, block_size) for _ in range(num_heads))
            self.proj = nn.Linear(n_embd, n_embd)

        def forward(self, x):
            return self.proj(torch.cat([head(x) for head in self.heads], dim=-1))

    return MultiHead


@style("causal_multi_head", "no_scale sees_future no_output_projection heads_without_transpose")
def a_function_of_weights(ask):
    def causal_self_attention(x, W_q, W_k, W_v, W_o, num_heads):
        q, k, v = (split_heads(ask, x @ W, num_heads) for W in (W_q, W_k, W_v))
        out = join_heads(ask, attend_to_the_past(ask, q, k, v, x.shape[-1]))
        return out if ask("no_output_projection") else out @ W_o

    return causal_self_attention


# ---- layers with three inputs, or one, and a mask --------------------------------------------------------------------

HEADS = "no_scale scale_num_hiddens heads_without_transpose no_output_projection mask_ignored mask_after_softmax "


@style("multi_head", HEADS)
def four_linears(ask):
    class MultiHeadedAttention(nn.Module):
        def __init__(self, h, d_model, dropout=0.1):
            super().__init__()
            self.d_k, self.h = d_model // h, h
            self.linears = nn.ModuleList(nn.Linear(d_model, d_model) for _ in range(4))
            self.dropout = nn.Dropout(p=dropout)

        def forward(self, query, key, value, mask=None):
            q, k, v = (split_heads(ask, f(x), self.h) for f, x in zip(self.linears, (query, key, value)))
            scores = q @ k.transpose(-2, -1) / root(ask, self.d_k, self.d_k * self.h)
            hidden = None if mask is None else mask.unsqueeze(1) == 0
            out = join_heads(ask, weighed(ask, scores, hidden, v, self.dropout))
            return out if ask("no_output_projection") else self.linears[-1](out)

    return MultiHeadedAttention


@style("multi_head", HEADS)
def default_sizes(ask):
    class MultiHeadAttention(nn.Module):
        def __init__(self, d_model=512, n_heads=8):
            super().__init__()
            self.n_heads, self.d_model = n_heads, d_model
            self.w_q, self.w_k, self.w_v, self.w_concat = (nn.Linear(d_model, d_model) for _ in range(4))

        def forward(self, q, k, v, mask=None):
            q, k, v = (split_heads(ask, f(x), self.n_heads) for f, x in ((self.w_q, q), (self.w_k, k), (self.w_v, v)))
            scores = torch.einsum("bhid,bhjd->bhij", q, k) / root(ask, q.shape[-1], self.d_model)
            out = join_heads(ask, weighed(ask, scores, None if mask is None else mask == 0, v))
            return out if ask("no_output_projection") else self.w_concat(out)

    return MultiHeadAttention


@style("multi_head", HEADS)
def padding_hidden(ask):
    class Attention(nn.Module):
        def __init__(self, embed_dim, num_heads):
            super().__init__()
            self.num_heads = num_heads
            self.to_q, self.to_k, self.to_v = (nn.Linear(embed_dim, embed_dim, bias=False) for _ in range(3))
            self.to_out = nn.Linear(embed_dim, embed_dim)

        def forward(self, x, key_padding_mask=None):
            q, k, v = (split_heads(ask, f(x), self.num_heads) for f in (self.to_q, self.to_k, self.to_v))
            scores = q @ k.transpose(-1, -2) / root(ask, q.shape[-1], x.shape[-1])
            hidden = None if key_padding_mask is None else key_padding_mask[:, None, None]
            out = join_heads(ask, weighed(ask, scores, hidden, v))
            return out if ask("no_output_projection") else self.to_out(out)

    return Attention


@style("multi_head", "no_scale no_output_projection mask_ignored heads_without_transpose")
def all_in_one_projection(ask):
    class EncoderAttention(nn.Module):
        def __init__(self, dim, num_heads=8, qkv_bias=False):
            super().__init__()
            self.num_heads = num_heads
            self.qkv, self.proj = nn.Linear(dim, dim * 3, bias=qkv_bias), nn.Linear(dim, dim)

        def forward(self, x, attn_mask=None):
            q, k, v = (split_heads(ask, each, self.num_heads) for each in self.qkv(x).chunk(3, -1))
            scores = q @ k.transpose(-2, -1) / root(ask, q.shape[-1])
            if attn_mask is not None and not ask("mask_ignored"):
                scores = scores + attn_mask
            out = join_heads(ask, scores.softmax(-1) @ v)
            return out if ask("no_output_projection") else self.proj(out)

    return EncoderAttention


# ---- additive scores -------------------------------------------------------------------------------------------------


@style("additive", "no_tanh softmax_axis no_softmax")
def one_linear_for_both(ask):
    class Attention(nn.Module):
        def __init__(self, enc_hid_dim, dec_hid_dim):
            super().__init__()
            self.attn = nn.Linear(enc_hid_dim + dec_hid_dim, dec_hid_dim)
            self.v = nn.Linear(dec_hid_dim, 1, bias=False)

        def forward(self, hidden, encoder_outputs):
            steps = encoder_outputs.shape[1]
            hidden = hidden.unsqueeze(1).repeat(1, steps, 1)
            energy = self.attn(torch.cat((hidden, encoder_outputs), dim=2))
            scores = self.v(energy if ask("no_tanh") else torch.tanh(energy)).squeeze(2)
            return scores if ask("no_softmax") else F.softmax(scores, dim=0 if ask("softmax_axis") else 1)

    return Attention


@style("additive", "no_tanh")
def time_first(ask):
    class BahdanauAttention(nn.Module):
        def __init__(self, enc_hid_dim, dec_hid_dim):
            super().__init__()
            self.attn = nn.Linear(enc_hid_dim + dec_hid_dim, dec_hid_dim)
            self.v = nn.Linear(dec_hid_dim, 1, bias=False)

        def forward(self, hidden, encoder_outputs):
            steps = encoder_outputs.shape[0]
            both = torch.cat((hidden.unsqueeze(0).expand(steps, -1, -1), encoder_outputs), dim=2)
            energy = self.attn(both)
            return self.v(energy if ask("no_tanh") else energy.tanh()).squeeze(2).t().softmax(1)

    return BahdanauAttention


@style("additive", "no_tanh mask_ignored mask_zero")
def two_linears_and_a_mask(ask):
    class AdditiveAttention(nn.Module):
        def __init__(self, query_size, key_size, num_hiddens):
            super().__init__()
            self.query_layer = nn.Linear(query_size, num_hiddens, bias=False)
            self.key_layer = nn.Linear(key_size, num_hiddens, bias=False)
            self.energy_layer = nn.Linear(num_hiddens, 1, bias=False)

        def forward(self, query, keys, values, mask=None):
            features = self.query_layer(query).unsqueeze(2) + self.key_layer(keys).unsqueeze(1)
            scores = self.energy_layer(features if ask("no_tanh") else torch.tanh(features)).squeeze(-1)
            return weighed(ask, scores, None if mask is None else mask == 0, values)

    return AdditiveAttention
