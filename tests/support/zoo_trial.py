"""Forms and mistakes that a fresh trial found: in NumPy, and, where there is torch, in torch."""

import math

import numpy as np

from zoo import style


def soft(ask, scores):
    """Softmax over the last axis, or what goes wrong in one."""
    e = np.exp(scores - scores.max(-1, keepdims=True))
    if ask("no_softmax"):
        return e
    axis = -1
    axis = {"all": (-2, -1), "queries": -2, "heads": 1, "batch": 0}.get(next(filter(ask, SUMS), "")[13:], axis)
    return e / e.sum(axis=axis, keepdims=True)


SUMS = [f"softmax_axis_{axis}" for axis in ("all", "queries", "heads", "batch")]


@style("dot_product", "no_softmax softmax_axis_all softmax_axis_queries lens_of_first scale_values mask_inverted")
def lengths_of_an_item_or_of_each_query(ask):
    def attention(queries, keys, values, valid_lens=None):
        size = values.shape[-1] if ask("scale_values") else queries.shape[-1]
        scores = np.einsum("bqd,bkd->bqk", queries, keys) / math.sqrt(size)
        if valid_lens is not None:
            lens = np.asarray(valid_lens).reshape(len(queries), -1, 1)
            lens = lens[:, :1] if ask("lens_of_first") else lens
            steps = np.arange(keys.shape[1])
            scores = np.where(steps > lens if ask("mask_inverted") else steps < lens, scores, -1e6)
        return soft(ask, scores) @ values

    return attention


@style("dot_product", "softmax_axis_heads softmax_axis_queries scale_num_hiddens mask_transposed")
def heads_side_by_side(ask):
    def attention_of_heads(q, k, v, mask=None):
        h, d = q.shape[1], q.shape[3]
        logits = q @ k.transpose(0, 1, 3, 2) / math.sqrt(h * d if ask("scale_num_hiddens") else d)
        if mask is not None:
            mask = mask.swapaxes(-1, -2) if ask("mask_transposed") else mask
            logits = np.where(mask, logits, -1e30)
        return soft(ask, logits) @ v

    return attention_of_heads


@style("causal", "no_softmax softmax_axis_queries causal_corner mask_off_by_one")
def numpys_triangle(ask):
    def causal_attention(q, k, v):
        n = q.shape[1]
        hidden = np.triu(np.ones((n, n), dtype=bool), 2 if ask("mask_off_by_one") else 1)
        scores = q @ k.swapaxes(1, 2) / math.sqrt(q.shape[-1])
        return soft(ask, np.where(hidden.T if ask("causal_corner") else hidden, -1e9, scores)) @ v

    return causal_attention


@style("window", "mask_off_by_one causal_corner sees_future window_off_by_one")
def distances(ask):
    def sliding_window(q, k, v, w):
        far = np.arange(q.shape[1])[:, None] - np.arange(k.shape[1])
        keep = (far >= 0) & (far <= w if ask("window_off_by_one") else far < w)
        keep = (far >= -1) & (far < w) if ask("mask_off_by_one") else keep
        keep = (far <= 0) & (far < w) if ask("causal_corner") else keep
        keep = (far >= -w) & (far < w) if ask("sees_future") else keep
        return soft(ask, np.where(keep, q @ k.swapaxes(1, 2) / math.sqrt(q.shape[-1]), -1e9)) @ v

    return sliding_window


@style("grouped", "softmax_axis_heads first_group swapped_keys_values groups_tiled")
def repeated_heads(ask):
    def grouped_query_attention(q, k, v):
        share = q.shape[1] // k.shape[1]
        v = k if ask("swapped_keys_values") else v
        k = np.repeat(k[:, :1], k.shape[1], axis=1) if ask("first_group") else k
        k, v = (np.tile(x, (1, share, 1, 1)) if ask("groups_tiled") else np.repeat(x, share, axis=1) for x in (k, v))
        return soft(ask, q @ k.swapaxes(2, 3) / math.sqrt(q.shape[-1])) @ v

    return grouped_query_attention


@style("causal_multi_head", "scale_num_hiddens swapped_projections no_output_projection")
def one_matrix_for_three(ask):
    def causal_self_attention(x, w_qkv, w_out, n_head):
        batch, steps, width = x.shape
        q, k, v = (t.reshape(batch, steps, n_head, -1).transpose(0, 2, 1, 3) for t in np.split(x @ w_qkv, 3, axis=-1))
        q, k = (k, q) if ask("swapped_projections") else (q, k)
        size = width if ask("scale_num_hiddens") else width // n_head
        scores = np.where(np.tri(steps, dtype=bool), q @ k.transpose(0, 1, 3, 2) / math.sqrt(size), -np.inf)
        out = (soft(ask, scores) @ v).transpose(0, 2, 1, 3).reshape(x.shape)
        return out if ask("no_output_projection") else out @ w_out

    return causal_self_attention


@style("positional_encoding", "sin_cos_swapped wrong_exponent no_input")
def a_table_made_once(ask):
    class PositionalEncoding:
        def __init__(self, num_hiddens, max_len=64):
            j = np.arange(0, num_hiddens, 2)
            angle = np.arange(max_len)[:, None] / 10000 ** (
                j // num_hiddens if ask("wrong_exponent") else j / num_hiddens
            )
            self.P = np.zeros((1, max_len, num_hiddens))
            self.P[0, :, 0::2] = np.sin(angle)
            self.P[0, :, 1::2] = np.sin(angle) if ask("sin_cos_swapped") else np.cos(angle)

        def __call__(self, X):
            return X * (not ask("no_input")) + self.P[:, : X.shape[1]]

    return PositionalEncoding


@style("rope", "rope_pairs")
def pairs_in_a_last_axis(ask):
    def rope(x, offset=0):
        half = x.shape[-1] // 2
        angle = np.arange(offset, offset + x.shape[-2])[:, None] / 10000 ** (np.arange(half) / half)
        halves = x.reshape(*x.shape[:-1], 2, half).swapaxes(-1, -2)
        one, two = np.moveaxis(halves if ask("rope_pairs") else x.reshape(*x.shape[:-1], half, 2), -1, 0)
        turned = one * np.cos(angle) - two * np.sin(angle), one * np.sin(angle) + two * np.cos(angle)
        return np.stack(turned, axis=-1).reshape(x.shape)

    return rope


try:
    import torch
    from torch import nn
except ImportError:
    pass
else:

    def hidden_future(steps):
        return torch.ones(steps, steps, dtype=torch.bool).triu(1)

    def split(x, heads):
        return x.view(*x.shape[:2], heads, -1).transpose(1, 2)

    @style("additive", "no_w_v product_for_sum no_tanh mask_ignored")
    def v_beside_values(ask):
        def additive_attention(query, key, value, Wq, Wk, v, mask=None):
            q, k = (query @ Wq).unsqueeze(-2), (key @ Wk).unsqueeze(-3)
            h = q - k if ask("product_for_sum") else q + k
            h = h if ask("no_tanh") else h.tanh()
            e = h.sum(-1) if ask("no_w_v") else (h * v.reshape(-1)).sum(-1)
            if mask is not None and not ask("mask_ignored"):
                e = e.masked_fill(~mask, -1e9)
            return e.softmax(-1) @ value

        return additive_attention

    @style("multi_head", "scale_d softmax_axis swapped_keys_values no_output_projection")
    def sizes_as_in_keras(ask):
        class MultiHeadAttention(nn.Module):
            def __init__(self, num_heads, key_dim, d_model):
                super().__init__()
                self.key_dim = key_dim
                self.W_q, self.W_k, self.W_v = (
                    nn.Parameter(torch.randn(d_model, num_heads, key_dim)) for _ in range(3)
                )
                self.W_o = nn.Parameter(torch.randn(num_heads, key_dim, d_model))

            def forward(self, query, value, key=None, attention_mask=None):
                key = value if key is None else key
                of_keys = key if ask("swapped_keys_values") else value
                pairs = (query, self.W_q), (key, self.W_k), (of_keys, self.W_v)
                q, k, v = (torch.einsum("btd,dhk->bhtk", x, W) for x, W in pairs)
                s = q @ k.transpose(2, 3) / (self.key_dim if ask("scale_d") else self.key_dim**0.5)
                if attention_mask is not None:
                    s = s.masked_fill(~attention_mask[:, None], -1e9)
                out = s.softmax(1 if ask("softmax_axis") else -1) @ v
                if ask("no_output_projection"):
                    return out.transpose(1, 2).flatten(2)
                return torch.einsum("bhtk,hkd->btd", out, self.W_o)

        return MultiHeadAttention

    @style("multi_head", "scale_num_hiddens bias_lost heads_without_transpose no_projection")
    def a_configuration_that_calls_read(ask):
        class MultiHeadAttention(nn.Module):
            def __init__(self, config):
                super().__init__()
                self.config = config
                size = config.d_model
                self.wq, self.wk, self.wo = (nn.Linear(size, size, bias=config.bias) for _ in range(3))
                self.wv = nn.Linear(size, size, bias=config.bias and not ask("bias_lost"))

            def forward(self, q, k, v, mask=None):
                heads = self.config.n_heads
                q, k, v = self.wq(q), self.wk(k), v if ask("no_projection") else self.wv(v)
                if ask("heads_without_transpose"):
                    q, k, v = (x.reshape(len(x), heads, x.shape[1], -1) for x in (q, k, v))
                else:
                    q, k, v = (split(x, heads) for x in (q, k, v))
                s = q @ k.transpose(2, 3) / (self.config.d_model if ask("scale_num_hiddens") else q.shape[-1]) ** 0.5
                if mask is not None:
                    s = s.masked_fill(mask.unsqueeze(1) == 0, float("-inf"))
                out = s.softmax(-1) @ v
                plain = ask("heads_without_transpose")
                out = out.reshape(len(out), out.shape[2], -1) if plain else out.transpose(1, 2).flatten(2)
                return self.wo(out)

        return MultiHeadAttention

    @style("causal_multi_head", "bias_lost bias_always bias_wrong softmax_axis mask_off_by_one")
    def biases_by_a_flag(ask):
        class CausalSelfAttention(nn.Module):
            def __init__(self, d_in, d_out, context_length, num_heads, qkv_bias=False):
                super().__init__()
                self.num_heads = num_heads
                wanted = qkv_bias or ask("bias_always")
                self.W_query = nn.Linear(d_in, d_out, bias=wanted)
                self.W_key = nn.Linear(d_in, d_out, bias=qkv_bias)
                self.W_value = nn.Linear(d_in, d_out, bias=qkv_bias and not ask("bias_lost"))
                self.out_proj = nn.Linear(d_out, d_out)

            def forward(self, x):
                q, k, v = (split(f(x), self.num_heads) for f in (self.W_query, self.W_key, self.W_value))
                if ask("bias_wrong"):
                    v = v - 2 * self.out_proj.bias.sum()
                s = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5
                shown = hidden_future(x.shape[1])
                s = s.masked_fill(shown.roll(1, -1).triu(2) if ask("mask_off_by_one") else shown, -torch.inf)
                weights = s.softmax(-2 if ask("softmax_axis") else -1)
                return self.out_proj((weights @ v).transpose(1, 2).flatten(2))

        return CausalSelfAttention

    @style(
        "multi_head", "bias_lost no_output_projection no_projection swapped_projections no_dropout dropout_on_scores"
    )
    def open_sizes_that_a_mistake_leaves_open(ask):
        class MultiHeadAttention(nn.Module):
            def __init__(self, num_hiddens, num_heads, dropout, bias=False):
                super().__init__()
                self.num_heads = num_heads
                self.W_q, self.W_k, self.W_v = (nn.LazyLinear(num_hiddens, bias=bias) for _ in range(3))
                self.W_o = nn.LazyLinear(num_hiddens, bias=bias and not ask("bias_lost"))
                self.dropout = nn.Dropout(dropout)

            def forward(self, queries, keys, values, valid_lens):
                v = values if ask("no_projection") else (self.W_k if ask("swapped_projections") else self.W_v)(values)
                q, k, v = (split(x, self.num_heads) for x in (self.W_q(queries), self.W_k(keys), v))
                s = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5
                if valid_lens is not None:
                    lens = valid_lens.reshape(len(q), 1, -1, 1)
                    s = s.masked_fill(torch.arange(k.shape[2]) >= lens, -1e6)
                weights = (self.dropout(s) if ask("dropout_on_scores") else s).softmax(-1)
                weights = weights if ask("no_dropout") or ask("dropout_on_scores") else self.dropout(weights)
                out = (weights @ v).transpose(1, 2).flatten(2)
                return out if ask("no_output_projection") else self.W_o(out)

        return MultiHeadAttention

    @style("multi_head", "together bias_unused")
    def three_masks(ask):
        class MultiheadAttention(nn.Module):
            def __init__(self, embed_dim, num_heads):
                super().__init__()
                self.num_heads = num_heads
                self.in_proj_weight = nn.Parameter(torch.randn(3 * embed_dim, embed_dim))
                self.in_proj_bias = nn.Parameter(torch.randn(3 * embed_dim))
                self.out_proj = nn.Linear(embed_dim, embed_dim)

            def forward(self, query, key, value, attn_mask=None, key_padding_mask=None, is_causal=False):
                weights, biases = self.in_proj_weight.chunk(3), list(self.in_proj_bias.chunk(3))
                biases[2] = biases[2] * 0 if ask("bias_unused") else biases[2]
                triples = zip((query, key, value), weights, biases)
                q, k, v = (split(nn.functional.linear(*each), self.num_heads) for each in triples)
                s = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5
                several = attn_mask is not None and key_padding_mask is not None and is_causal
                if attn_mask is not None and not (several and ask("together")):
                    s = s.masked_fill(attn_mask, -1e9)
                if key_padding_mask is not None:
                    s = s.masked_fill(key_padding_mask[:, None, None], -1e9)
                if is_causal:
                    s = s.masked_fill(torch.ones(s.shape[2:], dtype=torch.bool).triu(1), -1e9)
                return self.out_proj((s.softmax(-1) @ v).transpose(1, 2).flatten(2))

        return MultiheadAttention
