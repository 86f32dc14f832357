"""The student's own line, and what it should be, in styles where another line would mend as well, or numbers are
written into arrays that note nothing."""

import pytest

import needs

SLOTS = """
import numpy as np


def mha(X_q, X_k, X_v, W_q, W_k, W_v, W_o, num_heads, valid_lens=None):
    B, N, D = X_q.shape
    d = D // num_heads
    out = np.empty((B, N, D))
    Q, K, V = X_q @ W_q, X_k @ W_k, X_v @ W_v
    for h in range(num_heads):
        a, b = h * d, (h + 1) * d
        s = Q[:, :, a:b] @ K[:, :, a:b].transpose(0, 2, 1) / np.sqrt(d)
        if valid_lens is not None:
            lens = np.reshape(valid_lens, (B, -1, 1))
            s[np.broadcast_to(np.arange(s.shape[2]) >= lens, s.shape)] = -1e6
        p = np.exp(s) / np.exp(s).sum(2)[:, :, None]
        out[:, :, a:b] = p @ V[:, :, a:b]
    return out @ W_o
"""
CHUNKS = """
import numpy as np


def chunked(queries, keys, values, valid_lens=None, size=2):
    b, n, d = queries.shape
    m = np.full((b, n, 1), -np.inf)
    total, acc = np.zeros((b, n, 1)), np.zeros((b, n, values.shape[-1]))
    for start in range(0, keys.shape[1], size):
        k, v = keys[:, start:start + size], values[:, start:start + size]
        s = queries @ k.swapaxes(1, 2) / np.sqrt(d)
        if valid_lens is not None:
            at = start + np.arange(k.shape[1])
            s = np.where(at < valid_lens.reshape(b, -1, 1), s, -1e6)
        m_new = np.maximum(m, s.max(-1, keepdims=True))
        p = np.exp(s - m_new)
        c = np.exp(m - m_new)
        total = total * c + p.sum(-1, keepdims=True)
        acc = acc * c + p @ v
        m = m_new
    return acc / total
"""
INNER = """
import numpy as np


def attention(q, k, v, valid_lens=None):
    def softmax(x):
        x = x - x.max(axis=-1, keepdims=True)
        e = np.exp(x)
        return e / e.sum(axis=-1, keepdims=True)

    def mask(s):
        if valid_lens is None:
            return s
        lens = valid_lens[:, None, None] if valid_lens.ndim == 1 else valid_lens[:, :, None]
        m = np.arange(s.shape[-1])[None, None] >= lens
        return np.where(m, -1e6, s)

    return softmax(mask(np.einsum("bqd,bkd->bqk", q, k) / np.sqrt(q.shape[-1]))) @ v
"""
TRIANGLE = """
import numpy as np


def causal_attention(queries, keys, values):
    n, m = queries.shape[1], keys.shape[1]
    d = float(queries.shape[2])
    hide = 1 - np.tri(n, m, m - n)
    logits = np.tensordot(queries, keys, axes=([2], [2])).transpose(0, 2, 1, 3)
    logits = logits[np.arange(len(queries)), np.arange(len(queries))] / d ** 0.5
    logits = logits - 1e9 * hide
    probs = np.exp(logits - logits.max(axis=2, keepdims=True))
    return np.einsum("bij,bjk->bik", probs / probs.sum(axis=2)[..., np.newaxis], values)
"""
ANGLES = """
import numpy as np


def angles(pos, k, d):
    i = k // 2
    return pos / np.power(10000, 2 * i / d)


def positional_encoding(X):
    n, d = X.shape[-2:]
    a = angles(np.arange(n)[:, None], np.arange(d)[None, :], d)
    a[:, 0::2] = np.sin(a[:, 0::2])
    a[:, 1::2] = np.cos(a[:, 1::2])
    return X + a
"""
CALLED = {
    SLOTS: ("mha", "multi_head"),
    CHUNKS: ("chunked", "dot_product"),
    INNER: ("attention", "dot_product"),
    TRIANGLE: ("causal_attention", "causal"),
    ANGLES: ("positional_encoding", "positional_encoding"),
}


def line_of(answer, text, judged_as):
    (line,) = answer.lines
    assert answer.mistakes[0] == judged_as, answer
    return line.text, line.should_be


@pytest.mark.parametrize("text", CALLED)
def test_each_is_right(judged, text):
    called, kind = CALLED[text]
    answer = judged(text, called, kind=kind).judged[0].answer
    assert answer.ok, answer
    assert ("as wide as its result" in str(answer)) == (text == SLOTS)


@pytest.mark.parametrize(
    ("text", "id", "right", "wrong", "should_be"),
    [
        (SLOTS, "swapped_projections", "X_q @ W_q, X_k @ W_k,", "X_q @ W_k, X_k @ W_q,", "X_q @ W_q, X_k @ W_k,"),
        (SLOTS, "no_scale", " / np.sqrt(d)", "", "/ d ** 0.5"),
        (SLOTS, "softmax_axis", ".sum(2)[:, :, None]", ".sum(1)[:, None, :]", ".sum(-1, keepdims=True)"),
        (SLOTS, "swapped_keys_values", "p @ V[", "p @ K[", "p @ V["),
        (SLOTS, "heads_interleaved", "out[:, :, a:b] =", "out[:, :, h::num_heads] =", "h * d:(h + 1) * d"),
        (SLOTS, "no_output_projection", "return out @ W_o", "return out", "return out @ W_o"),
        (CHUNKS, "lost_key", "start:start + size], values[:, start:start + size]",
         "start:start + size - 1], values[:, start:start + size - 1]", ""),
        (CHUNKS, "offset_ignored", "at = start + np.arange", "at = np.arange", "+ start"),
        (CHUNKS, "mask_off_by_one", "at < valid", "at <= valid", "at < valid"),
        (CHUNKS, "no_rescale", "c = np.exp(m - m_new)", "c = 1.0", ""),
        (CHUNKS, "no_rescale", "acc = acc * c + p @ v", "acc = acc + p @ v", ""),
        (CHUNKS, "chunk_sum", "total = total * c + p.sum", "total = p.sum", ""),
        (CHUNKS, "no_softmax", "return acc / total", "return acc", ""),
        (INNER, "mask_inverted", "None] >= lens", "None] < lens", "None] >= lens"),
        (INNER, "mask_after_softmax", 'softmax(mask(np.einsum("bqd,bkd->bqk", q, k) / np.sqrt(q.shape[-1])))',
         'mask(softmax(np.einsum("bqd,bkd->bqk", q, k) / np.sqrt(q.shape[-1])))', ""),
        (TRIANGLE, "mask_inverted", "hide = 1 - np.tri", "hide = np.tri", "hide = 1 - np.tri"),
        (TRIANGLE, "mask_inverted", "logits - 1e9", "logits + 1e9", "logits - 1e9 * hide"),
        (TRIANGLE, "no_scale", " / d ** 0.5", "", "/ d ** 0.5"),
        (ANGLES, "wrong_exponent", "i = k // 2", "i = k", "i = k // 2"),
        (ANGLES, "no_input", "return X + a", "return a", "return X + a"),
    ],
)  # fmt: skip
def test_the_line_that_was_changed(judged, text, id, right, wrong, should_be):
    assert text.count(right) == 1
    called, kind = CALLED[text]
    line = line_of(judged(text.replace(right, wrong), called, kind=kind).judged[0].answer, text, id)
    assert wrong.strip() in line[0] and should_be in line[1], line


TURNS = """
import functools

import torch


@functools.lru_cache(maxsize=None)
def table(dim, length):
    f = torch.outer(torch.arange(length).float(), 10000.0 ** -(torch.arange(0, dim, 2).float() / dim))
    return f.cos(), f.sin()


def rotary(x, offset=0):
    cos, sin = table(x.size(-1), offset + x.size(-2))
    cos, sin = cos[offset:], sin[offset:]
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
"""
PARTIAL = """
from functools import partial

import torch

softmax = partial(torch.softmax, dim=-1)


def attend(queries, keys, values):
    scores = torch.bmm(queries, keys.mT) / queries.shape[-1] ** 0.5
    return torch.bmm(softmax(scores), values)
"""
GROUPS = """
import torch


def grouped_query_attention(q, k, v, mask=None):
    b, hq, n, d = q.shape
    hk = k.shape[1]
    r = hq // hk
    q = q.reshape(b, hk, r, n, d)
    s = torch.einsum("bgrqd,bgkd->bgrqk", q, k) * d ** -0.5
    if mask is not None:
        s = s.masked_fill(~mask, -torch.inf)
    o = torch.einsum("bgrqk,bgkd->bgrqd", s.softmax(-1), v)
    return o.reshape(b, hq, n, -1)
"""
HEADS = """
import torch
from torch import nn


class MHA(nn.Module):
    \"\"\"Inputs are (seq_len, batch, d_model), as in fairseq.\"\"\"

    def __init__(self, d_model, nhead, dropout=0.0):
        super().__init__()
        self.nhead = nhead
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(d_model, d_model) for _ in range(3))
        self.out_proj, self.drop = nn.Linear(d_model, d_model), nn.Dropout(dropout)

    def forward(self, query, key, value, key_padding_mask=None):
        tgt, bsz, dim = query.size()
        hd = dim // self.nhead
        q = self.q_proj(query).view(tgt, bsz * self.nhead, hd).transpose(0, 1)
        k = self.k_proj(key).view(-1, bsz * self.nhead, hd).transpose(0, 1)
        v = self.v_proj(value).view(-1, bsz * self.nhead, hd).transpose(0, 1)
        aw = torch.bmm(q, k.transpose(1, 2)) / hd ** 0.5
        if key_padding_mask is not None:
            aw = aw.view(bsz, self.nhead, tgt, -1)
            aw = aw + key_padding_mask[:, None, None] * -1e9
            aw = aw.view(bsz * self.nhead, tgt, -1)
        p = torch.exp(aw - aw.max(-1, keepdim=True).values)
        p = p / p.sum(-1, keepdim=True)
        p = self.drop(p)
        attn = torch.bmm(p, v)
        attn = attn.transpose(0, 1).contiguous().view(tgt, bsz, dim)
        return self.out_proj(attn)
"""
FILLED = HEADS.replace(
    "aw + key_padding_mask[:, None, None] * -1e9",
    'aw.masked_fill(key_padding_mask.unsqueeze(1).unsqueeze(2).to(torch.bool), float("-inf"))',
)
SLICES = """
import torch
from torch import nn


class Sliced(nn.Module):
    def __init__(self, num_hiddens, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.W_q, self.W_k, self.W_v, self.W_o = (nn.LazyLinear(num_hiddens, bias=False) for _ in range(4))

    def forward(self, queries, keys, values):
        Q, K, V = self.W_q(queries), self.W_k(keys), self.W_v(values)
        d = Q.shape[-1] // self.num_heads
        results = []
        for h in range(self.num_heads):
            sl = slice(h * d, (h + 1) * d)
            s = Q[:, :, sl] @ K[:, :, sl].transpose(1, 2) / d ** 0.5
            results.append(s.softmax(-1) @ V[:, :, sl])
        return self.W_o(torch.cat(results, dim=-1))
"""
IN_TORCH = {
    TURNS: ("rotary", "rope"),
    PARTIAL: ("attend", "dot_product"),
    GROUPS: ("grouped_query_attention", "grouped"),
    HEADS: ("MHA", "multi_head"),
    FILLED: ("MHA", "multi_head"),
    SLICES: ("Sliced", "multi_head"),
}


@pytest.mark.parametrize(
    ("text", "id", "right", "wrong", "should_be"),
    [
        (TURNS, "sin_cos_swapped", "return f.cos(), f.sin()", "return f.sin(), f.cos()", "return f.cos(), f.sin()"),
        (TURNS, "rope_direction", "a * cos - b * sin, a * sin + b * cos", "a * cos + b * sin, -a * sin + b * cos",
         "(a * cos - b * sin, a * sin + b * cos)"),
        (FILLED, "heads_joined_wrong", "attn = attn.transpose(0, 1).contiguous()", "attn = attn.contiguous()", ""),
        (HEADS, "mask_small", "* -1e9", "* -1.0", "* -1e9"),
        (HEADS, "no_softmax", "p = p / p.sum(-1, keepdim=True)", "p = p", "p = p / p.sum(-1, keepdims=True)"),
        (HEADS, "dropout_on_scores", "p = torch.exp(aw -", "aw = self.drop(aw); p = torch.exp(aw -", ""),
        (PARTIAL, "softmax_axis", "dim=-1)", "dim=-2)", ""),
        (GROUPS, "groups_swapped", "reshape(b, hk, r, n, d)", "reshape(b, r, hk, n, d).transpose(1, 2)",
         "reshape(b, hk, r, n, d)"),
        (GROUPS, "groups_swapped", "return o.reshape(", "return o.transpose(1, 2).reshape(", "return o.reshape("),
        (GROUPS, "mask_zero", "-torch.inf", "0", "-1e9"),
        (SLICES, "heads_interleaved", "slice(h * d, (h + 1) * d)", "slice(h, None, self.num_heads)",
         "slice(h * d, (h + 1) * d)"),
    ],
)  # fmt: skip
def test_the_line_that_was_changed_in_torch(judged, text, id, right, wrong, should_be):
    needs.module("torch")
    assert text.count(right) == 1
    called, kind = IN_TORCH[text]
    assert judged(text, called, kind=kind).judged[0].answer.ok
    line = line_of(judged(text.replace(right, wrong), called, kind=kind).judged[0].answer, text, id)
    assert wrong.strip() in line[0] and should_be in line[1], line
