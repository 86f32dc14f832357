"""Attention as functions, in forms that students write now: styles of each kind, each with its mistakes by name."""

import numpy as np

from zoo import style


def soft(x, axis=-1):
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


def root(ask, d):
    return 1.0 if ask("no_scale") else float(d) if ask("scale_d") else 1 / d**0.5 if ask("scale_inverted") else d**0.5


SCALES = "no_scale scale_d scale_inverted "
MASKED = SCALES + "mask_ignored mask_after_softmax mask_zero mask_small mask_small_10 softmax_axis no_softmax "


def hidden_score(ask):
    return 0.0 if ask("mask_zero") else -5.0 if ask("mask_small") else -10.0 if ask("mask_small_10") else -1e9


def finished(ask, scores, visible, values):
    """Softmax and product, with the mistakes of both; `visible` hides late where that is the mistake."""
    if ask("no_softmax"):
        return scores @ values
    weights = soft(scores, axis=-2 if ask("softmax_axis") else -1)
    return (np.where(visible, weights, 0.0) if ask("mask_after_softmax") and visible is not None else weights) @ values


# ---- dot products with a mask ----------------------------------------------------------------------------------------


@style("dot_product", MASKED)
def where_true_is_seen(ask):
    def attention(Q, K, V, mask=None):
        scores = Q @ K.transpose(0, 2, 1) / root(ask, K.shape[-1])
        late = ask("mask_ignored") or ask("mask_after_softmax") or (ask("no_softmax") and mask is None)
        if mask is not None and not late:
            scores = np.where(mask, scores, hidden_score(ask))
        return finished(ask, scores, mask, V)

    return attention


@style("dot_product", MASKED)
def indexed_by_what_is_hidden(ask):
    def scaled_attention(query, key, value, attn_mask=None):
        scores = np.einsum("...qd,...kd->...qk", query, key) / root(ask, query.shape[-1])
        if attn_mask is not None and not (ask("mask_ignored") or ask("mask_after_softmax")):
            scores[attn_mask] = hidden_score(ask)
        return finished(ask, scores, None if attn_mask is None else ~attn_mask, value)

    return scaled_attention


@style("dot_product", SCALES + "mask_ignored softmax_axis no_softmax mask_after_softmax")
def added_to_scores(ask):
    def attention(q, k, v, attention_mask=None):
        s = np.matmul(q, np.swapaxes(k, -1, -2)) / root(ask, q.shape[-1])
        if attention_mask is not None and not (ask("mask_ignored") or ask("mask_after_softmax")):
            s = s + attention_mask
        return finished(ask, s, None if attention_mask is None else attention_mask == 0, v)

    return attention


@style("dot_product", SCALES + "mask_ignored softmax_axis mask_small mask_small_10 no_softmax")
def ones_and_zeros(ask):
    def attend(queries, keys, values, mask=None):
        scores = (queries / root(ask, keys.shape[-1])) @ keys.swapaxes(1, 2)
        if mask is not None and not ask("mask_ignored"):
            size = 5 if ask("mask_small") else 10 if ask("mask_small_10") else 1e9
            scores = scores - (1 - mask) * size
        return finished(ask, scores, None, values)

    return attend


@style("dot_product", MASKED)
def one_item_of_two_axes(ask):
    def attention(Q, K, V, mask=None):
        S = Q @ K.T / root(ask, Q.shape[1])
        if mask is not None and not (ask("mask_ignored") or ask("mask_after_softmax")):
            S = np.where(mask == 0, hidden_score(ask), S)
        return finished(ask, S, None if mask is None else mask != 0, V)

    return attention


@style("dot_product", SCALES + "mask_ignored mask_zero mask_after_softmax no_softmax swapped_keys_values")
def row_by_row(ask):
    def attention(q, k, v, mask=None):
        if ask("swapped_keys_values"):
            k, v = v, k
        out = np.zeros((q.shape[0], q.shape[1], v.shape[2]))
        for b in range(len(q)):
            for i, query in enumerate(q[b]):
                row = np.array([query @ key for key in k[b]]) / root(ask, len(query))
                seen = np.ones(len(row), bool) if mask is None or ask("mask_ignored") else mask[b, i].astype(bool)
                if not ask("mask_after_softmax"):
                    row[~seen] = hidden_score(ask)
                weights = row if ask("no_softmax") else soft(row)
                out[b, i] = np.where(seen, weights, 0) @ v[b] if ask("mask_after_softmax") else weights @ v[b]
        return out

    return attention


@style("dot_product", MASKED)
def padding_of_keys(ask):
    def attention(q, k, v, key_padding_mask=None):
        scores = q @ k.transpose(0, 2, 1) / root(ask, k.shape[-1])
        seen = None if key_padding_mask is None else ~key_padding_mask[:, None, :]
        if seen is not None and not (ask("mask_ignored") or ask("mask_after_softmax")):
            scores = np.where(seen, scores, hidden_score(ask))
        return finished(ask, scores, seen, v), scores

    return attention


@style("dot_product", MASKED)
def four_axes(ask):
    def attention(q, k, v, mask=None):
        _batch, _heads, _steps, d = q.shape
        scores = np.einsum("bhqd,bhkd->bhqk", q, k) / root(ask, d)
        if mask is not None and not (ask("mask_ignored") or ask("mask_after_softmax")):
            scores = np.where(np.broadcast_to(mask, scores.shape), scores, hidden_score(ask))
        return finished(ask, scores, mask, v)

    return attention


@style("masked_softmax", "mask_ignored mask_after_softmax mask_zero mask_small softmax_axis no_softmax")
def softmax_with_a_mask(ask):
    def masked_softmax(X, mask=None):
        late = ask("mask_ignored") or ask("mask_after_softmax")
        scores = X if mask is None or late else np.where(mask, X, hidden_score(ask))
        if ask("no_softmax"):
            return scores
        out = soft(scores, 1 if ask("softmax_axis") else -1)
        return out * mask if ask("mask_after_softmax") and mask is not None else out

    return masked_softmax


# ---- lengths, in one form ------------------------------------------------------------------------------------------


@style("dot_product", SCALES + "softmax_axis")
def a_flag_beside_lengths(ask):
    def attention(q, k, v, valid_lens=None, causal=False):
        scores = q @ k.swapaxes(1, 2) / root(ask, q.shape[-1])
        if valid_lens is not None:
            lens = valid_lens[:, None, None] if valid_lens.ndim == 1 else valid_lens[:, :, None]
            scores = np.where(np.arange(k.shape[1]) < lens, scores, -1e9)
        if causal:
            scores = np.where(np.tri(q.shape[1], k.shape[1], dtype=bool), scores, -1e9)
        return finished(ask, scores, None, v)

    return attention


# ---- causal --------------------------------------------------------------------------------------------------------

PAST = (
    SCALES
    + "sees_future mask_off_by_one causal_corner mask_zero mask_small mask_after_softmax softmax_axis no_softmax "
)


def past_of(ask, queries, keys):
    if ask("causal_corner"):
        return np.triu(np.ones((queries, keys), bool))
    return np.tril(np.ones((queries, keys), bool), -1 if ask("mask_off_by_one") else 0)


@style("causal", PAST)
def causal_without_a_batch(ask):
    def causal_attention(q, k, v):
        scores = q @ k.T / root(ask, q.shape[-1])
        past = past_of(ask, *scores.shape)
        if not (ask("sees_future") or ask("mask_after_softmax")):
            scores = np.where(past, scores, hidden_score(ask))
        return finished(ask, scores, past, v)

    return causal_attention


@style("causal", PAST)
def causal_of_any_axes(ask):
    def attention(x_q, x_k, x_v):
        scores = x_q @ np.swapaxes(x_k, -2, -1) / root(ask, x_q.shape[-1])
        past = past_of(ask, *scores.shape[-2:])
        if not (ask("sees_future") or ask("mask_after_softmax")):
            scores = scores + np.where(past, 0, hidden_score(ask) if not ask("mask_zero") else -scores)
        return finished(ask, scores, past, x_v)

    return attention


@style("causal", "no_scale scale_d offset_ignored sees_future mask_off_by_one no_softmax")
def causal_after_a_cache(ask):
    def attention(q, k, v, offset=0):
        scores = np.einsum("bqd,bkd->bqk", q, k) / root(ask, q.shape[-1])
        first = 0 if ask("offset_ignored") else offset
        rows = np.arange(q.shape[1])[:, None] + first - ask("mask_off_by_one")
        if not ask("sees_future"):
            scores = np.where(
                np.arange(k.shape[1])[None] > rows, -np.inf if not ask("mask_off_by_one") else -1e9, scores
            )
        return finished(ask, scores, None, v)

    return attention


@style("causal", "no_scale scale_d sees_future mask_ignored mask_after_softmax softmax_axis")
def causal_and_a_mask(ask):
    def causal_attention(q, k, v, mask=None):
        scores = q @ k.swapaxes(1, 2) / root(ask, q.shape[-1])
        seen = np.ones(scores.shape, bool) if ask("sees_future") else np.tril(np.ones(scores.shape, bool))
        if mask is not None and not ask("mask_ignored"):
            seen = seen & mask
        if not ask("mask_after_softmax"):
            scores = np.where(seen, scores, -1e30)
        return finished(ask, scores, seen, v)

    return causal_attention


CHUNKS = "no_scale scale_d no_rescale sees_future chunk_softmax offset_ignored no_softmax "


@style("causal", CHUNKS)
def chunks_of_keys(ask):
    def causal_chunked(q, k, v, chunk_size=2):
        q = q / root(ask, q.shape[-1])
        m = np.full(q.shape[:2], -1e30)
        total, out = np.zeros(q.shape[:2]), np.zeros((*q.shape[:2], v.shape[-1]))
        for start in range(0, k.shape[1], chunk_size):
            part = np.arange(start, min(start + chunk_size, k.shape[1]))
            s = q @ k[:, part].transpose(0, 2, 1)
            if not ask("sees_future"):
                column = part - start if ask("offset_ignored") else part
                s = np.where(np.arange(q.shape[1])[:, None] >= column, s, -1e30)
            new = np.maximum(m, s.max(-1))
            p, scale = np.exp(s - new[..., None]), np.ones_like(m) if ask("no_rescale") else np.exp(m - new)
            if ask("chunk_softmax"):
                out, total = out + p / p.sum(-1, keepdims=True) @ v[:, part], np.ones_like(m)
            else:
                out, total = out * scale[..., None] + p @ v[:, part], total * scale + p.sum(-1)
            m = new
        return out if ask("no_softmax") else out / total[..., None]

    return causal_chunked


@style("causal", "no_scale scale_d no_rescale sees_future")
def chunks_without_a_batch(ask):
    def flash(Q, K, V, block_size):
        n, d = Q.shape
        O, L, M = np.zeros((n, V.shape[1])), np.zeros((n, 1)), np.full((n, 1), -1e30)
        for j in range(0, len(K), block_size):
            S = Q @ K[j : j + block_size].T / root(ask, d)
            if not ask("sees_future"):
                rows, cols = np.arange(n)[:, None], j + np.arange(S.shape[1])
                S[rows < cols] = -1e30
            top = np.maximum(M, S.max(1, keepdims=True))
            P = np.exp(S - top)
            O = (O if ask("no_rescale") else O * np.exp(M - top)) + P @ V[j : j + block_size]
            L = L * np.exp(M - top) + P.sum(1, keepdims=True)
            M = top
        return O / L

    return flash


@style("causal", "no_scale no_rescale")
def chunks_merged_by_logsumexp(ask):
    def chunked_attention(q, k, v, chunk=3):
        out = lse = None
        for at in range(0, k.shape[1], chunk):
            s = np.einsum("bqd,bkd->bqk", q, k[:, at : at + chunk]) / root(ask, q.shape[2])
            s = np.where(np.arange(q.shape[1])[:, None] < at + np.arange(s.shape[2]), -1e30, s)
            top = s.max(-1, keepdims=True)
            new_lse = top + np.log(np.exp(s - top).sum(-1, keepdims=True))
            new = np.exp(s - new_lse) @ v[:, at : at + chunk]
            if out is None:
                out, lse = new, new_lse
                continue
            both = np.logaddexp(lse, new_lse)
            out = out + np.exp(new_lse - both) * new if ask("no_rescale") else (
                np.exp(lse - both) * out + np.exp(new_lse - both) * new)  # fmt: skip
            lse = both
        return out

    return chunked_attention


# ---- windows -------------------------------------------------------------------------------------------------------

WINDOW = SCALES + "window_off_by_one sees_future window_ignored mask_zero mask_after_softmax softmax_axis no_softmax "


@style("window", WINDOW)
def a_band_of_the_scores(ask):
    def sliding_window_attention(q, k, v, window):
        scores = q @ k.transpose(0, 2, 1) / root(ask, q.shape[-1])
        i, j = np.indices(scores.shape[1:])
        size = window + ask("window_off_by_one")
        near = np.abs(i - j) < size if ask("sees_future") else (j <= i) & (ask("window_ignored") | (j > i - size))
        if not ask("mask_after_softmax"):
            scores = np.where(near, scores, hidden_score(ask))
        return finished(ask, scores, near, v)

    return sliding_window_attention


@style("window", SCALES + "window_off_by_one sees_future window_ignored no_softmax")
def a_slice_for_each_query(ask):
    def local_attention(queries, keys, values, window_size=2):
        out = np.zeros((*queries.shape[:2], values.shape[-1]))
        for t in range(queries.shape[1]):
            first = 0 if ask("window_ignored") else max(0, t - window_size + (0 if ask("window_off_by_one") else 1))
            last = t + window_size if ask("sees_future") else t + 1
            rows = np.einsum("bd,bkd->bk", queries[:, t], keys[:, first:last]) / root(ask, queries.shape[2])
            weights = rows if ask("no_softmax") else soft(rows)
            out[:, t] = np.einsum("bk,bkv->bv", weights, values[:, first:last])
        return out

    return local_attention


@style("window", WINDOW)
def a_triangle_less_a_triangle(ask):
    def windowed(Q, K, V, w):
        S = Q @ K.T / root(ask, Q.shape[1])
        n = len(S)
        ones = np.ones((n, n))
        low = np.zeros((n, n)) if ask("window_ignored") else np.tril(ones, -w - (1 if ask("window_off_by_one") else 0))
        keep = (np.tril(ones, w - 1) if ask("sees_future") else np.tril(ones)) - low > 0
        if ask("sees_future"):
            keep = np.tril(ones, w - 1) * np.triu(ones, 1 - w) > 0
        if not ask("mask_after_softmax"):
            S = np.where(keep, S, hidden_score(ask))
        return finished(ask, S, keep, V)

    return windowed


# ---- rotary positions ------------------------------------------------------------------------------------------------

ROPE = "rope_direction wrong_exponent position_off_by_one sin_cos_swapped "


def rope_angles(ask, positions, d, base=10000.0):
    j = np.arange(0, d, 2) / (2 if ask("wrong_exponent") else 1)
    return np.outer(positions + ask("position_off_by_one"), base ** (-j / d))


def cos_sin(ask, angles):
    cos, sin = np.cos(angles), np.sin(angles)
    return (sin, cos) if ask("sin_cos_swapped") else (cos, -sin if ask("rope_direction") else sin)


@style("rope", ROPE + "offset_ignored")
def neighbours_by_slices(ask):
    def apply_rope(x, offset=0):
        positions = np.arange(x.shape[1]) + (0 if ask("offset_ignored") else offset)
        cos, sin = cos_sin(ask, rope_angles(ask, positions, x.shape[-1]))
        out = np.empty_like(x)
        out[..., ::2] = x[..., ::2] * cos - x[..., 1::2] * sin
        out[..., 1::2] = x[..., ::2] * sin + x[..., 1::2] * cos
        return out

    return apply_rope


@style("rope", ROPE + "offset_ignored")
def neighbours_as_complex_numbers(ask):
    def rotary(x, start_pos=0):
        steps = np.arange(x.shape[-2]) + (0 if ask("offset_ignored") else start_pos)
        cos, sin = cos_sin(ask, rope_angles(ask, steps, x.shape[-1]))
        turned = (x[..., 0::2] + 1j * x[..., 1::2]) * (cos + 1j * sin)
        return np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)

    return rotary


@style("rope", ROPE + "offset_ignored")
def halves(ask):
    def rotary_embedding(x, position_ids=None):
        positions = np.arange(x.shape[-2]) if position_ids is None or ask("offset_ignored") else position_ids
        angles = rope_angles(ask, positions, x.shape[-1])
        cos, sin = (np.concatenate([each, each], -1) for each in cos_sin(ask, angles))
        half = x.shape[-1] // 2
        return x * cos + np.concatenate([-x[..., half:], x[..., :half]], -1) * sin

    return rotary_embedding


@style("rope", ROPE)
def number_by_number(ask):
    def rope(x, positions):
        out = x.copy()
        d = x.shape[-1]
        for t, position in enumerate(positions):
            for pair in range(d // 2):
                angle = (position + ask("position_off_by_one")) / 10000 ** (
                    (1 if ask("wrong_exponent") else 2) * pair / d
                )
                c, s = (float(each) for each in cos_sin(ask, np.array(angle)))
                a, b = x[..., t, 2 * pair], x[..., t, 2 * pair + 1]
                out[..., t, 2 * pair], out[..., t, 2 * pair + 1] = a * c - b * s, a * s + b * c
        return out

    return rope


# ---- grouped heads ---------------------------------------------------------------------------------------------------

GROUPS = SCALES + "groups_tiled softmax_axis no_softmax "


@style("grouped", GROUPS + "mask_ignored mask_zero mask_after_softmax")
def groups_repeated(ask):
    def grouped_query_attention(q, k, v, mask=None):
        n = q.shape[1] // k.shape[1]
        k, v = ((np.tile(x, (1, n, 1, 1)) if ask("groups_tiled") else x.repeat(n, axis=1)) for x in (k, v))
        scores = q @ k.swapaxes(-1, -2) / root(ask, q.shape[-1])
        if mask is not None and not (ask("mask_ignored") or ask("mask_after_softmax")):
            scores = np.where(mask, scores, hidden_score(ask))
        return finished(ask, scores, mask, v)

    return grouped_query_attention


@style("grouped", GROUPS)
def groups_with_an_axis_of_their_own(ask):
    def gqa(query, key, value):
        b, h, t, d = query.shape
        g = key.shape[1]
        if ask("groups_tiled"):
            q = query.reshape(b, h // g, g, t, d).transpose(0, 2, 1, 3, 4)
        else:
            q = query.reshape(b, g, h // g, t, d)
        s = np.einsum("bgrtd,bgsd->bgrts", q, key) / root(ask, d)
        w = s if ask("no_softmax") else soft(s, -2 if ask("softmax_axis") else -1)
        out = np.einsum("bgrts,bgsd->bgrtd", w, value)
        return (out.transpose(0, 2, 1, 3, 4) if ask("groups_tiled") else out).reshape(b, h, t, d)

    return gqa


@style("grouped", GROUPS)
def head_after_head(ask):
    def attention(q, k, v):
        heads, groups = q.shape[-3], k.shape[-3]
        out = []
        for h in range(heads):
            g = h % groups if ask("groups_tiled") else h // (heads // groups)
            s = q[..., h, :, :] @ np.swapaxes(k[..., g, :, :], -1, -2) / root(ask, q.shape[-1])
            out.append(finished(ask, s, None, v[..., g, :, :]))
        return np.stack(out, axis=-3)

    return attention
