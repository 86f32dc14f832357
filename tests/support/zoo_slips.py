"""Slips of one part, a reshape, a key, a group, a flag."""

import math

import numpy as np

from zoo import style
from zoo_functions import soft


@style("dot_product", "lost_key lost_chunk key_twice softmax_plus_one no_rescale")
def keys_in_chunks(ask):
    def memory_efficient_attention(q, k, v, valid_lens=None, kv_chunk_size=2):
        steps, size = np.arange(k.shape[1]), kv_chunk_size
        top, total, out = (0.0, 1.0, 0.0) if ask("softmax_plus_one") else (-np.inf, 0.0, 0.0)
        for at in range(size if ask("lost_chunk") else 0, len(steps), size + ask("lost_key")):
            part = steps[at : at + size + ask("key_twice")]
            s = np.einsum("bqd,bkd->bqk", q, k[:, part]) / math.sqrt(q.shape[-1])
            if valid_lens is not None:
                s = np.where(part < np.reshape(valid_lens, (len(q), -1, 1)), s, -1e6)
            new_top = np.maximum(top, s.max(-1, keepdims=True))
            p, old = np.exp(s - new_top), 1.0 if ask("no_rescale") else np.exp(top - new_top)
            total, out, top = total * old + p.sum(-1, keepdims=True), out * old + p @ v[:, part], new_top
        return out / total

    return memory_efficient_attention


@style("causal", "mask_off_by_one sees_future lost_chunk lost_key offset_ignored")
def blocks_of_queries_and_keys(ask):
    def block_causal_attention(q, k, v, block=2):
        out = []
        for first in range(0, q.shape[1], block):
            rows = np.arange(first, min(first + block, q.shape[1]))[:, None]
            cols = np.arange(rows[-1, 0] + 1)
            seen = cols <= rows + ask("mask_off_by_one")  # of the keys that are there, which end with the block
            seen |= ask("sees_future")
            if ask("lost_chunk") and first:
                seen = seen & (cols < first)
            if ask("lost_key"):
                seen = seen & (cols != first - 1)
            if ask("offset_ignored"):
                seen = (cols % block <= rows % block) & (cols < first + block)
            s = q[:, rows[:, 0]] @ k[:, cols].swapaxes(1, 2) / math.sqrt(q.shape[-1])
            out.append(soft(np.where(seen, s, -1e9)) @ v[:, cols])
        return np.concatenate(out, axis=1)

    return block_causal_attention


@style("grouped", "groups_tiled wrong_group first_group groups_swapped causal_for_mask hides_future")
def a_loop_over_heads(ask):
    def gqa(queries, keys, values, mask=None):
        heads, groups = queries.shape[1], keys.shape[1]
        out = []
        for h in range(heads):
            g = h // groups if ask("wrong_group") else h % groups if ask("groups_tiled") else h // (heads // groups)
            g = 0 if ask("first_group") else g
            s = queries[:, h] @ keys[:, g].swapaxes(1, 2) / math.sqrt(queries.shape[-1])
            past = np.tri(*s.shape[1:], dtype=bool)
            if mask is not None:
                s = np.where(past if ask("causal_for_mask") else mask[:, 0], s, -1e9)
            s = np.where(past, s, -1e9) if ask("hides_future") else s
            out.append(soft(s) @ values[:, g])
        out = np.stack(out, axis=1)
        if ask("groups_swapped"):
            out = out.reshape(len(out), groups, -1, *out.shape[2:]).swapaxes(1, 2).reshape(out.shape)
        return out

    return gqa


@style("causal_multi_head", "qkv_order heads_without_transpose")
def one_projection_as_an_argument(ask):
    def causal_self_attention(x, w_qkv, w_o, n_heads):
        batch, steps, width = x.shape
        joint = x @ w_qkv
        q, k, v = joint.reshape(batch, steps, 3, n_heads, -1).transpose(2, 0, 3, 1, 4)
        if ask("qkv_order"):
            q, k, v = joint.reshape(batch, steps, n_heads, 3, -1).transpose(3, 0, 2, 1, 4)
        if ask("heads_without_transpose"):
            q, k, v = joint.reshape(3, batch, n_heads, steps, -1)
        s = q @ k.swapaxes(2, 3) / math.sqrt(width // n_heads)
        out = soft(np.where(np.tri(steps, dtype=bool), s, -np.inf)) @ v
        return out.swapaxes(1, 2).reshape(x.shape) @ w_o

    return causal_self_attention


@style("window", "window_off_by_one sees_future")
def a_window_of_the_constructor(ask):
    class SlidingWindow:
        def __init__(self, window_size=128):
            self.window_size = window_size

        def __call__(self, q, k, v):
            far = np.arange(q.shape[1])[:, None] - np.arange(k.shape[1])
            far = abs(far) if ask("sees_future") else far
            seen = (far >= 0) & (far < self.window_size + ask("window_off_by_one"))
            return soft(np.where(seen, q @ k.swapaxes(1, 2) / math.sqrt(q.shape[-1]), -1e9)) @ v

    return SlidingWindow


@style("window", "window_off_by_one sees_future")
def a_layer_with_a_window(ask):
    return a_window_of_the_constructor.made(ask)(3)


@style("positional_encoding", "sin_cos_swapped position_off_by_one wrong_exponent sin_cos_halves")
def a_table_of_sizes(ask):
    def sinusoidal_table(num_positions, d_model):
        i = np.arange(0, d_model, 2)
        rows = np.arange(num_positions)[:, None] + ask("position_off_by_one")
        angle = rows / 10000 ** (i / (2 if ask("wrong_exponent") else 1) / d_model)
        sines = (np.cos(angle), np.sin(angle)) if ask("sin_cos_swapped") else (np.sin(angle), np.cos(angle))
        table = np.concatenate(sines, axis=1)
        return (
            table if ask("sin_cos_halves") else table.reshape(num_positions, 2, -1).swapaxes(1, 2).reshape(table.shape)
        )

    return sinusoidal_table


try:
    import torch
    from torch import nn
except ImportError:
    pass
else:
    HEADS = "heads_without_transpose_q heads_without_transpose_v heads_interleaved_k heads_joined_wrong "

    @style("multi_head", HEADS + "qkv_order causal_for_mask")
    def one_reshape_of_four(ask):
        class Attention(nn.Module):
            def __init__(self, dim, num_heads):
                super().__init__()
                self.num_heads = num_heads
                self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

            def heads(self, x, name):
                batch, steps, _ = x.shape
                if ask(f"heads_without_transpose_{name}"):
                    return x.reshape(batch, self.num_heads, steps, -1)
                if ask(f"heads_interleaved_{name}"):
                    return x.reshape(batch, steps, -1, self.num_heads).permute(0, 3, 1, 2)
                return x.reshape(batch, steps, self.num_heads, -1).transpose(1, 2)

            def forward(self, x, mask=None):
                joint = self.qkv(x)
                q, k, v = joint.chunk(3, dim=-1)
                if ask("qkv_order"):
                    v = joint.unflatten(-1, (self.num_heads, 3, -1))[..., 2, :].flatten(2)
                q, k, v = (self.heads(each, name) for each, name in zip((q, k, v), "qkv"))
                past = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
                s = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5
                if mask is not None:
                    s = s.masked_fill(~(past if ask("causal_for_mask") else mask[:, None]), -1e9)
                out = s.softmax(-1) @ v
                return self.proj(out.reshape(x.shape) if ask("heads_joined_wrong") else out.transpose(1, 2).flatten(2))

        return Attention

    @style("causal_multi_head", "groups_tiled groups_swapped heads_without_transpose first_group together")
    def shared_keys(ask):
        class GroupedQueryAttention(nn.Module):
            def __init__(self, dim, n_heads, n_kv_heads):
                super().__init__()
                self.n_heads, self.n_kv_heads, size = n_heads, n_kv_heads, dim // n_heads
                self.wq, self.wo = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
                self.wk, self.wv = (nn.Linear(dim, n_kv_heads * size, bias=False) for _ in range(2))

            def shared(self, x):
                batch, steps, width = x.shape
                size, share = width // self.n_kv_heads, self.n_heads // self.n_kv_heads
                if ask("heads_without_transpose"):
                    x = x.reshape(batch, self.n_kv_heads, steps, size)
                else:
                    x = x.reshape(batch, steps, self.n_kv_heads, size).transpose(1, 2)
                x = x[:, :1] if ask("first_group") else x
                return (
                    x.repeat(1, self.n_heads // x.shape[1], 1, 1)
                    if ask("groups_tiled")
                    else x.repeat_interleave(self.n_heads if ask("first_group") else share, dim=1)
                )

            def forward(self, x, key_mask=None):
                steps = x.shape[1]
                q = self.wq(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
                k, v = self.shared(self.wk(x)), self.shared(self.wv(x))
                seen = torch.ones(steps, steps, dtype=torch.bool).tril()
                if key_mask is not None:
                    seen = seen | key_mask[:, None, None] if ask("together") else seen & key_mask[:, None, None]
                s = (q @ k.transpose(2, 3) / q.shape[-1] ** 0.5).masked_fill(~seen, -1e9)
                out = (s.softmax(-1) @ v).transpose(1, 2)
                if ask("groups_swapped"):
                    out = out.unflatten(2, (self.n_kv_heads, -1)).transpose(2, 3)
                return self.wo(out.reshape(x.shape))

        return GroupedQueryAttention

    def flagged(ask):
        class MultiHeadAttention(nn.Module):
            def __init__(self, dim, num_heads, causal=False):
                super().__init__()
                self.num_heads, self.causal = num_heads, causal
                self.W_q, self.W_k, self.W_v, self.W_o = (nn.Linear(dim, dim) for _ in range(4))

            def forward(self, q, k, v, mask=None):
                triples = (self.W_q, q), (self.W_k, k), (self.W_v, v)
                q, k, v = (w(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for w, x in triples)
                s = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5
                if mask is not None:
                    s = s.masked_fill(~mask[:, None], -1e9)
                if self.causal and not (ask("together") and mask is not None) and not ask("mask_ignored"):
                    future = torch.ones(s.shape[2:], dtype=torch.bool).triu(2 if ask("mask_off_by_one") else 1)
                    s = s.masked_fill(future, -1e9)
                return self.W_o((s.softmax(1 if ask("softmax_axis") else -1) @ v).transpose(1, 2).flatten(2))

        return MultiHeadAttention

    @style("multi_head", "mask_off_by_one together softmax_axis mask_ignored")
    def a_layer_with_a_flag(ask):
        return flagged(ask)(8, 2, causal=True)

    @style("multi_head", "mask_off_by_one together mask_ignored")
    def a_class_with_a_flag(ask):
        return flagged(ask)

    @style("causal", "mask_off_by_one no_rescale")
    def chunks_of_the_constructor(ask):
        class ChunkedCausalAttention(nn.Module):
            def __init__(self, chunk_size=64):
                super().__init__()
                self.chunk_size = chunk_size

            def forward(self, q, k, v):
                steps = torch.arange(k.shape[1])
                top = torch.full((*q.shape[:2], 1), -1e38)
                total, out = torch.zeros_like(top), torch.zeros(*q.shape[:2], v.shape[-1])
                for part in steps.split(self.chunk_size):
                    seen = part <= steps[:, None] + ask("mask_off_by_one")
                    s = (q @ k[:, part].transpose(1, 2) / q.shape[-1] ** 0.5).masked_fill(~seen, -1e30)
                    new_top = torch.maximum(top, s.amax(-1, keepdim=True))
                    p, old = (s - new_top).exp(), 1 if ask("no_rescale") else (top - new_top).exp()
                    total, out, top = total * old + p.sum(-1, keepdim=True), out * old + p @ v[:, part], new_top
                return out / total

        return ChunkedCausalAttention
