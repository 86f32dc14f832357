"""Right implementations, each written in another way: names, axes, meanings of masks, sizes, calls."""

import math

import numpy as np

from zoo import right


def soft(x, axis=-1):
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


# ---- dot products and masks ------------------------------------------------------------------------------------------


@right("dot_product")
def sdpa(Q, K, V, mask=None):
    S = Q @ np.moveaxis(K, -1, -2) / np.sqrt(Q.shape[-1])
    return soft(S if mask is None else np.where(mask == 1, S, -1e12)) @ V


@right("dot_product")
def hidden_where_one(query, key, value, mask=None):
    scores = np.einsum("bqd,bkd->bqk", query, key) / query.shape[2] ** 0.5
    if mask is not None:
        scores += mask * -1e9
    return soft(scores) @ value


@right("dot_product")
def a_mask_with_a_head_axis(q, k, v, mask=None):
    scores = (q @ k.swapaxes(1, 2) / math.sqrt(k.shape[2]))[:, None]
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    return (soft(scores) @ v[:, None])[:, 0]


@right("dot_product")
def one_mask_for_all(q, k, v, attn_mask=None):
    def row(x, keys, values, seen):
        s = keys @ x / len(x) ** 0.5
        e = np.exp(s - s.max()) * seen
        return e / e.sum() @ values

    assert attn_mask is None or attn_mask.ndim == 2
    seen = np.ones((q.shape[1], k.shape[1])) if attn_mask is None else attn_mask
    return np.array([[row(x, k[b], v[b], seen[i]) for i, x in enumerate(item)] for b, item in enumerate(q)])


@right("dot_product")
def padding(query, key, value, padding_mask=None):
    scores = query @ key.transpose(0, 2, 1) / np.sqrt(key.shape[-1])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    if padding_mask is not None:
        assert padding_mask.ndim == 2
        weights = weights * ~padding_mask[:, np.newaxis]
    return weights / weights.sum(-1, keepdims=True) @ value


@right("dot_product")
def a_bias(q, k, v, attn_bias=None):
    scores = q @ k.transpose(0, 2, 1) * q.shape[-1] ** -0.5
    return soft(scores if attn_bias is None else scores + attn_bias) @ v


@right("dot_product")
def masks_and_a_scale(q, k, v, mask=None, scale=None, return_weights=False):
    scores = q @ k.swapaxes(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    weights = soft(scores if mask is None else np.where(mask, scores, np.finfo(scores.dtype).min))
    return (weights @ v, weights) if return_weights else weights @ v


@right("dot_product")
def an_item(q, k, v, mask=None):
    n, d = q.shape
    scores = np.array([[np.dot(q[i], k[j]) for j in range(len(k))] for i in range(n)]) / d**0.5
    if mask is not None:
        scores = scores + np.where(mask, 0.0, -1e9)
    return soft(scores) @ v


@right("dot_product")
def an_item_with_a_length(q, k, v, valid_len=None):
    assert q.ndim == 2
    scores = q @ k.T / np.sqrt(q.shape[1])
    if valid_len is not None:
        scores = np.where(np.arange(len(k)) < np.reshape(valid_len, (-1, 1)), scores, -1e9)
    return soft(scores) @ v


@right("dot_product")
def heads_of_items(queries, keys, values, mask=None):
    b, h, _, d = queries.shape
    flat = [x.reshape(b * h, *x.shape[2:]) for x in (queries, keys, values)]
    scores = flat[0] @ flat[1].transpose(0, 2, 1) / d**0.5
    if mask is not None:
        shape = (b, h, queries.shape[2], keys.shape[2])
        scores = np.where(np.broadcast_to(mask, shape).reshape(scores.shape), scores, -1e9)
    return (soft(scores) @ flat[2]).reshape(b, h, queries.shape[2], -1)


@right("dot_product")
def lengths_and_a_mask(q, k, v, valid_lens=None, mask=None):
    scores = q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1])
    if valid_lens is not None:
        scores = np.where(np.arange(k.shape[1]) < valid_lens.reshape(len(q), -1, 1), scores, -1e9)
    if mask is not None:
        scores = np.where(mask, scores, -1e9)
    return soft(scores) @ v


@right("dot_product")
def a_causal_flag(q, k, v, mask=None, is_causal=False):
    scores = q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1])
    if is_causal:
        scores = np.where(np.tri(*scores.shape[1:], dtype=bool), scores, -np.inf)
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    return soft(scores) @ v


@right("dot_product")
def by_a_name_that_says_nothing(q, k, v, z=None):
    scores = q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1])
    return soft(scores if z is None else np.where(z, scores, -1e9)) @ v


@right("masked_softmax")
def softmax_of_what_is_seen(scores, mask=None):
    e = np.exp(scores - scores.max(-1, keepdims=True)) * (1 if mask is None else mask)
    return e / e.sum(-1, keepdims=True)


@right("masked_softmax")
def softmax_with_padding(x, pad_mask=None):
    return soft(x if pad_mask is None else np.where(pad_mask[:, None, :], -1e9, x))


@right("masked_softmax")
def softmax_of_a_matrix(x, mask=None):
    _rows, _columns = x.shape
    return soft(x if mask is None else np.where(mask, x, -1e9))


# ---- causal, chunks, windows -----------------------------------------------------------------------------------------


@right("causal")
def upper_triangle_hidden(q, k, v):
    s = q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1])
    s[:, np.triu(np.ones(s.shape[1:], bool), 1)] = -np.inf
    return soft(s) @ v


@right("causal")
def growing(q, k, v):
    def step(t):
        return soft(np.einsum("...d,...kd->...k", q[..., t, :], k[..., : t + 1, :]) / q.shape[-1] ** 0.5)

    return np.stack([np.einsum("...k,...kd->...d", step(t), v[..., : t + 1, :]) for t in range(q.shape[-2])], -2)


@right("causal")
def one_input(x):
    s = np.where(np.tri(x.shape[1], dtype=bool), x @ x.swapaxes(1, 2) / np.sqrt(x.shape[2]), -1e9)
    return soft(s) @ x


@right("causal")
def with_heads(q, k, v):
    _b, _h, t, d = q.shape
    s = np.einsum("bhtd,bhsd->bhts", q, k) / math.sqrt(d)
    return soft(np.where(np.arange(t)[:, None] >= np.arange(t), s, -1e9)) @ v


@right("causal")
def at_an_offset(q, k, v, start_pos=0):
    s = q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5
    rows = start_pos + np.arange(q.shape[-2])
    return soft(np.where(rows[:, None] >= np.arange(k.shape[-2]), s, -1e9)) @ v


@right("causal")
def with_padding(q, k, v, key_padding_mask=None):
    s = q @ k.swapaxes(1, 2) / q.shape[-1] ** 0.5
    seen = np.tri(q.shape[1], k.shape[1], dtype=bool)[None]
    if key_padding_mask is not None:
        seen = seen & ~key_padding_mask[:, None]
    e = np.where(seen, np.exp(s - s.max(-1, keepdims=True)), 1e-30)
    return e / e.sum(-1, keepdims=True) @ v


@right("causal")
def chunks_in_two_passes(q, k, v, block_size=2):
    starts = range(0, k.shape[1], block_size)

    def scores(at):
        s = q @ k[:, at : at + block_size].swapaxes(1, 2) / np.sqrt(q.shape[-1])
        return np.where(np.arange(q.shape[1])[:, None] >= at + np.arange(s.shape[2]), s, -1e30)

    top = np.max([scores(at).max(-1) for at in starts], axis=0)[..., None]
    shares = [np.exp(scores(at) - top) for at in starts]
    total = sum(each.sum(-1, keepdims=True) for each in shares)
    return sum(each @ v[:, at : at + block_size] for at, each in zip(starts, shares)) / total


@right("causal")
def chunks_of_queries(q, k, v, chunk=2):
    out = []
    for at in range(0, q.shape[1], chunk):
        part = q[:, at : at + chunk]
        end = at + part.shape[1]
        s = part @ k[:, :end].swapaxes(1, 2) / np.sqrt(q.shape[-1])
        out.append(soft(np.where(at + np.arange(part.shape[1])[:, None] >= np.arange(end), s, -1e9)) @ v[:, :end])
    return np.concatenate(out, axis=1)


@right("window")
def windows_by_distance(q, k, v, window_size):
    s = np.einsum("bid,bjd->bij", q, k) / q.shape[-1] ** 0.5
    gap = np.subtract.outer(np.arange(q.shape[1]), np.arange(k.shape[1]))
    return soft(np.where((gap < 0) | (gap >= window_size), -np.inf, s)) @ v


@right("window")
def windows_of_an_item(Q, K, V, w):
    out = np.empty((len(Q), V.shape[1]))
    for i, query in enumerate(Q):
        near = slice(max(i + 1 - w, 0), i + 1)
        out[i] = soft(K[near] @ query / np.sqrt(Q.shape[1])) @ V[near]
    return out


@right("window")
def windows_of_heads(q, k, v, window):
    _b, _h, t, d = q.shape
    ones = np.ones((t, t))
    near = np.tril(ones) - np.tril(ones, -window)
    s = q @ k.swapaxes(2, 3) / np.sqrt(d)
    return soft(s + (near - 1) * 1e9) @ v


# ---- rotary positions and groups -------------------------------------------------------------------------------------


def table(positions, d, base=10000.0):
    return np.multiply.outer(positions, base ** (-np.arange(0, d, 2) / d))


@right("rope")
def rope_by_matrices(x, offset=0):
    out = np.zeros_like(x)
    for t in range(x.shape[1]):
        for j, a in enumerate(table(t + offset, x.shape[-1])):
            turn = np.array([[np.cos(a), -np.sin(a)], [np.sin(a), np.cos(a)]])
            out[:, t, 2 * j : 2 * j + 2] = x[:, t, 2 * j : 2 * j + 2] @ turn.T
    return out


@right("rope")
def rope_of_positions(x, positions, theta=10000.0):
    a = table(positions, x.shape[-1], theta)
    x1, x2 = x[..., ::2], x[..., 1::2]
    return np.stack([x1 * np.cos(a) - x2 * np.sin(a), x2 * np.cos(a) + x1 * np.sin(a)], -1).reshape(x.shape)


@right("rope")
def rope_in_halves(x, offset=0):
    a = table(np.arange(x.shape[-2]) + offset, x.shape[-1])
    left, right_ = np.split(x, 2, axis=-1)
    return np.concatenate([left * np.cos(a) - right_ * np.sin(a), right_ * np.cos(a) + left * np.sin(a)], -1)


@right("rope")
def rope_with_batched_positions(x, position_ids):
    assert position_ids.ndim == 2
    turned = x[..., ::2] + 1j * x[..., 1::2]
    turned = turned * np.exp(1j * table(position_ids, x.shape[-1]))
    return np.stack([turned.real, turned.imag], -1).reshape(x.shape)


@right("rope")
def rope_of_steps_and_heads(x, start=0):
    _b, t, _h, d = x.shape
    a = table(np.arange(t) + start, d)[:, None]
    c, s = np.repeat(np.cos(a), 2, -1), np.repeat(np.sin(a), 2, -1)
    other = np.stack([-x[..., 1::2], x[..., ::2]], -1).reshape(x.shape)
    return x * c + other * s


class RotaryTable:
    def __init__(self, dim, max_seq_len=128, base=10000):
        self.angles = table(np.arange(max_seq_len), dim, base)

    def __call__(self, x, offset=0):
        a = self.angles[offset : offset + x.shape[-2]]
        half = x.shape[-1] // 2
        turned = np.concatenate([-x[..., half:], x[..., :half]], -1)
        return x * np.cos(np.tile(a, 2)) + turned * np.sin(np.tile(a, 2))


right("rope")(RotaryTable)


@right("grouped")
def groups_by_index(q, k, v):
    which = np.arange(q.shape[1]) // (q.shape[1] // k.shape[1])
    s = np.einsum("bhqd,bhkd->bhqk", q, k[:, which]) / q.shape[-1] ** 0.5
    return np.einsum("bhqk,bhkd->bhqd", soft(s), v[:, which])


@right("grouped")
def groups_with_a_mask(query, key, value, mask=None):
    n = query.shape[1] // key.shape[1]
    s = query @ np.kron(key, np.ones((1, n, 1, 1))).swapaxes(2, 3) / np.sqrt(query.shape[-1])
    return soft(s if mask is None else np.where(mask, s, -1e9)) @ value.repeat(n, 1)


@right("grouped")
def groups_that_may_be_causal(q, k, v, causal=False):
    q5 = q.reshape(len(q), k.shape[1], -1, *q.shape[2:])
    s = q5 @ k[:, :, None].swapaxes(-1, -2) / q.shape[-1] ** 0.5
    if causal:
        s = np.where(np.tri(*s.shape[-2:], dtype=bool), s, -np.inf)
    return (soft(s) @ v[:, :, None]).reshape(q.shape)


@right("grouped")
def groups_without_a_batch(q, k, v):
    heads, _t, d = q.shape
    n = heads // len(k)
    return np.stack([soft(q[h] @ k[h // n].T / d**0.5) @ v[h // n] for h in range(heads)])


# ---- layers ----------------------------------------------------------------------------------------------------------


@right("multi_head")
def self_attention(X, W_q, W_k, W_v):
    Q, K, V = X @ W_q, X @ W_k, X @ W_v
    return soft(Q @ K.T / np.sqrt(K.shape[1])) @ V


@right("multi_head")
def multi_head_attention(X, W_q, W_k, W_v, W_o, n_heads):
    parts = [np.array_split(X @ W, n_heads, axis=-1) for W in (W_q, W_k, W_v)]
    return np.concatenate([soft(q @ k.T / q.shape[-1] ** 0.5) @ v for q, k, v in zip(*parts)], axis=-1) @ W_o


@right("multi_head")
def multi_head_with_a_mask(q, k, v, W_q, W_k, W_v, W_o, num_heads, mask=None):
    def heads(x):
        return x.reshape(*x.shape[:2], num_heads, -1).transpose(0, 2, 1, 3)

    Q, K, V = heads(q @ W_q), heads(k @ W_k), heads(v @ W_v)
    s = Q @ K.swapaxes(2, 3) / Q.shape[-1] ** 0.5
    if mask is not None:
        s = np.where(mask[:, None], s, -1e9)
    out = soft(s) @ V
    return out.transpose(0, 2, 1, 3).reshape(len(q), q.shape[1], -1) @ W_o


class ArraysAndOneInput:
    """Weights by short names, one sequence without a batch axis."""

    def __init__(self, d_model, n_heads):
        self.n_heads = n_heads
        self.Wq, self.Wk, self.Wv, self.Wo = np.random.default_rng(0).normal(size=(4, d_model, d_model))

    def forward(self, x):
        q, k, v = (np.stack(np.split(x @ W, self.n_heads, -1)) for W in (self.Wq, self.Wk, self.Wv))
        past = np.tri(len(x), dtype=bool)
        out = soft(np.where(past, q @ k.transpose(0, 2, 1) / q.shape[-1] ** 0.5, -1e9)) @ v
        return np.concatenate(list(out), -1) @ self.Wo


right("causal_multi_head")(ArraysAndOneInput)
right("causal_multi_head")(ArraysAndOneInput(12, 3))


@right("causal_multi_head")
def causal_of_arrays(x, W_q, W_k, W_v, W_o, num_heads):
    b, t, c = x.shape
    q, k, v = ((x @ W).reshape(b, t, num_heads, c // num_heads) for W in (W_q, W_k, W_v))
    s = np.einsum("bthd,bshd->bhts", q, k) / math.sqrt(c // num_heads)
    s[:, :, np.triu(np.ones((t, t), bool), 1)] = -np.inf
    return np.einsum("bhts,bshd->bthd", soft(s), v).reshape(b, t, c) @ W_o


@right("additive")
def additive_of_weights(q, k, v, mask, W_q, W_k, w_v):
    features = np.tanh((q @ W_q)[:, :, None] + (k @ W_k)[:, None])
    s = features @ w_v
    return soft(s if mask is None else np.where(mask, s, -1e9)) @ v


@right("positional_encoding")
def positions_of_an_item(x):
    out = np.empty(x.shape)
    for t, row in enumerate(x):
        for i in range(len(row)):
            angle = t / 10000 ** ((i - i % 2) / len(row))
            out[t, i] = row[i] + (math.cos(angle) if i % 2 else math.sin(angle))
    return out


class TableOfFixedWidth:
    def __init__(self, d_model=24, max_len=40):
        a = table(np.arange(max_len), d_model)
        self.table = np.stack([np.sin(a), np.cos(a)], -1).reshape(max_len, d_model)

    def __call__(self, x):
        return x + self.table[: x.shape[1]]


right("positional_encoding")(TableOfFixedWidth)
right("positional_encoding")(TableOfFixedWidth(20))
