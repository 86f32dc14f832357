"""Students' attention in torch: functions, layers and classes, right, and with their mistakes by name."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from zoo import style
from zoo_students import ADDITIVE, JOINS, MASKS, POSITIONS, SCALES


def lengths_mask(ask, scores, valid_lens):
    """True for keys that are hidden."""
    if valid_lens is None:
        return None
    batch, queries, keys = scores.shape
    if valid_lens.dim() == 1:
        lens = valid_lens.repeat(queries) if ask("lens_tiled") else torch.repeat_interleave(valid_lens, queries)
    else:
        lens = valid_lens.reshape(-1)
    places = torch.arange(keys)[None, None, :]
    lens = lens.view(batch, queries, 1)
    hidden = places > lens if ask("mask_off_by_one") else places >= lens
    return ~hidden if ask("mask_inverted") else hidden


def torch_weights(ask, scores, hidden):
    if hidden is not None and not ask("mask_after_softmax") and not ask("no_mask"):
        scores = scores.masked_fill(hidden, 1e-9 if ask("mask_zero") else -1e9)
    if ask("no_softmax"):
        return scores
    weights = F.softmax(scores, dim=1 if ask("softmax_axis") else -1)
    return weights.masked_fill(hidden, 0.0) if ask("mask_after_softmax") and hidden is not None else weights


@style("masked_softmax", MASKS)
def torch_masked_softmax(ask):
    return lambda scores, valid_lens=None: torch_weights(ask, scores, lengths_mask(ask, scores, valid_lens))


@style("dot_product", MASKS + SCALES)
def torch_dot_product(ask):
    class DotProduct(nn.Module):
        def __init__(self, dropout):
            super().__init__()
            self.dropout = nn.Dropout(dropout)

        def forward(self, queries, keys, values, valid_lens=None):
            if ask("swapped_keys_values"):
                keys, values = values, keys
            scores = torch.bmm(queries, keys.transpose(1, 2))
            scale = {"no_scale": 1, "scale_d": 1 / queries.shape[-1], "scale_inverted": math.sqrt(queries.shape[-1]),
                     "scale_keys": keys.shape[1] ** -0.5}  # fmt: skip
            scores = scores * next((x for name, x in scale.items() if ask(name)), queries.shape[-1] ** -0.5)
            self.attention_weights = torch_weights(ask, scores, lengths_mask(ask, scores, valid_lens))
            return torch.bmm(self.dropout(self.attention_weights), values)

    return DotProduct


@style("additive", ADDITIVE + MASKS)
def torch_additive(ask):
    class Additive(nn.Module):
        def __init__(self, key_size, query_size, num_hiddens, dropout):
            super().__init__()
            self.W_k, self.W_q = nn.Linear(key_size, num_hiddens, bias=False), nn.Linear(query_size, num_hiddens)
            self.w_v = nn.Linear(num_hiddens, 1, bias=False)
            self.dropout = nn.Dropout(dropout)

        def forward(self, queries, keys, values, valid_lens):
            if ask("swapped_keys_values"):
                keys, values = values, keys
            W_q, W_k = (self.W_k, self.W_q) if ask("swapped_projections") else (self.W_q, self.W_k)
            q, k = W_q(queries).unsqueeze(2), W_k(keys).unsqueeze(1)
            features = q * k if ask("product_for_sum") else q + k
            features = features if ask("no_tanh") else features.tanh()
            scores = features.sum(-1) if ask("no_w_v") else self.w_v(features).squeeze(-1)
            if ask("scaled"):
                scores = scores / features.shape[-1] ** 0.5
            weights = torch_weights(ask, scores, lengths_mask(ask, scores, valid_lens))
            return self.dropout(weights) @ values

    return Additive


@style(
    "multi_head",
    """heads_without_transpose heads_interleaved no_output_projection scale_num_hiddens no_scale swapped_projections
    no_mask softmax_axis_heads swapped_keys_values""",
)
def torch_multi_head(ask):
    """Heads as an axis of their own."""

    class MyMultiHead(nn.Module):
        def __init__(self, d_model, n_heads):
            super().__init__()
            self.num_heads = n_heads
            self.W_q, self.W_k, self.W_v, self.W_o = (nn.Linear(d_model, d_model) for _ in range(4))

        def split(self, x):
            batch, steps, hiddens = x.shape
            if ask("heads_without_transpose"):
                return x.view(batch, self.num_heads, steps, hiddens // self.num_heads)
            if ask("heads_interleaved"):
                return x.view(batch, steps, -1, self.num_heads).permute(0, 3, 1, 2)
            return x.view(batch, steps, self.num_heads, -1).transpose(1, 2)

        def join(self, x):
            batch, _, steps, _ = x.shape
            if ask("heads_without_transpose"):
                return x.reshape(batch, steps, -1)
            return x.permute(0, 2, 3, 1).flatten(2) if ask("heads_interleaved") else x.transpose(1, 2).flatten(2)

        def forward(self, queries, keys, values, valid_lens=None):
            if ask("swapped_keys_values"):
                keys, values = values, keys
            W_q, W_k = (self.W_k, self.W_q) if ask("swapped_projections") else (self.W_q, self.W_k)
            q, k, v = self.split(W_q(queries)), self.split(W_k(keys)), self.split(self.W_v(values))
            size = queries.shape[-1] if ask("scale_num_hiddens") else q.shape[-1]
            scores = q @ k.transpose(-1, -2) / (1 if ask("no_scale") else math.sqrt(size))
            if valid_lens is not None and not ask("no_mask"):
                lens = valid_lens[:, None] if valid_lens.dim() == 1 else valid_lens
                scores = scores.masked_fill(torch.arange(k.shape[2]) >= lens[:, None, :, None], float("-inf"))
            out = self.join(torch.softmax(scores, dim=1 if ask("softmax_axis_heads") else -1) @ v)
            return out if ask("no_output_projection") else self.W_o(out)

    return MyMultiHead


@style("transpose_qkv", "heads_without_transpose heads_interleaved")
def torch_transpose_qkv(ask):
    def transpose_qkv(X, num_heads):
        b, t, h = X.size()
        if ask("heads_without_transpose"):
            return X.view(b * num_heads, t, h // num_heads)
        if ask("heads_interleaved"):
            return X.view(b, t, -1, num_heads).permute(0, 3, 1, 2).reshape(b * num_heads, t, -1)
        return torch.cat(X.split(h // num_heads, dim=-1), dim=1).view(b * num_heads, t, h // num_heads)

    return transpose_qkv


@style("transpose_output", JOINS)
def torch_transpose_output(ask):
    def transpose_output(X, num_heads):
        four = X.unflatten(0, (-1, num_heads))
        if ask("heads_joined_wrong"):
            return four.reshape(four.shape[0], four.shape[2], -1)
        return (four.permute(0, 2, 3, 1) if ask("heads_interleaved") else four.permute(0, 2, 1, 3)).flatten(2)

    return transpose_output


@style("positional_encoding", POSITIONS)
def torch_positional_encoding(ask):
    class Positions(nn.Module):
        def __init__(self, num_hiddens, dropout, max_len=100):
            super().__init__()
            self.dropout = nn.Dropout(dropout)
            steps = torch.arange(max_len).float()[:, None] + ask("position_off_by_one")
            exponent = torch.arange(0, num_hiddens, 2).float() / num_hiddens
            angles = steps / 10000 ** (exponent / 2 if ask("wrong_exponent") else exponent)
            even, odd = (torch.cos, torch.sin) if ask("sin_cos_swapped") else (torch.sin, torch.cos)
            self.register_buffer("P", torch.stack([even(angles), odd(angles)], dim=-1).flatten(1)[None])

        def forward(self, X):
            return self.dropout(X + self.P[:, : X.shape[1]])

    return Positions


@style("causal", "sees_future causal_corner mask_off_by_one no_scale scale_d mask_zero softmax_axis")
def torch_causal(ask):
    def causal_attention(q, k, v):
        steps = q.shape[1]
        scores = torch.einsum("bid,bjd->bij", q, k)
        scores = scores if ask("no_scale") else scores / (q.shape[-1] if ask("scale_d") else q.shape[-1] ** 0.5)
        seen = torch.ones(steps, k.shape[1], dtype=torch.bool)
        seen = seen.triu() if ask("causal_corner") else seen.tril(1 if ask("mask_off_by_one") else 0)
        if not ask("sees_future"):
            scores = scores.masked_fill(~seen, 0.0 if ask("mask_zero") else float("-inf"))
        return scores.softmax(dim=1 if ask("softmax_axis") else -1) @ v

    return causal_attention
