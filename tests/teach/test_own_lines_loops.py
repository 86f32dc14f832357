"""Lines of what loops over its batch, of plain numbers, of heads that share keys, and of projections with a bias."""

import sys
from time import process_time
from types import SimpleNamespace

import pytest

import needs

LOOP = """
import math
import numpy as np


def attend(q, k, v, lengths=None):
    out = np.zeros((*q.shape[:2], v.shape[2]))
    for b in range(len(q)):
        limit = k.shape[1] if lengths is None else int(lengths[b])
        for i in range(q.shape[1]):
            scores = np.array([np.dot(q[b, i], k[b, j]) / math.sqrt(q.shape[-1]) for j in range(limit)])
            exps = [math.exp(s - max(scores)) for s in scores]
            total = sum(exps)
            for j in range(limit):
                out[b, i] += exps[j] / total * v[b, j]
    return out
"""


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("/ math.sqrt(q.shape[-1])", "/ q.shape[-1]"),
        ("q[b, i], k[b, j]", "q[b, 0], k[b, j]"),
        ("int(lengths[b])", "int(lengths[b]) - 1"),
        ("total = sum(exps)", "total = max(exps)"),
        ("out[b, i] += exps", "out[b, i] = exps"),
        ("total * v[b, j]", "total * k[b, j]"),
    ],
)
def test_a_loop_that_takes_a_length_for_each_item_alone(judged, right, wrong):
    """What raises for a length of each query may be wrong besides: this line is told, not the loop's first."""
    assert LOOP.count(right) == 1
    answer = judged(LOOP.replace(right, wrong), "attend", kind="dot_product").judged[0].answer
    assert answer.ok is False
    assert [line.number for line in answer.lines] == [LOOP[: LOOP.index(right)].count("\n") + 1]


LISTS = """
import math


def attention(queries, keys, values):
    out = []
    for Q, K, V in zip(queries, keys, values):
        rows = []
        for q in Q:
            scores = [sum(a * b for a, b in zip(q, k)) for k in K]
            e = [math.exp(x) for x in scores]
            rows.append([sum(w * v[c] for w, v in zip(e, V)) / sum(e) for c in range(len(V[0]))])
        out.append(rows)
    return out
"""


def test_plain_numbers_say_no_line(judged):
    """Python's own numbers are not noted: the first array that is wrong tells no line."""
    answer = judged(LISTS, "attention", kind="dot_product").judged[0].answer
    assert (answer.mistakes, list(answer.lines)) == (["no_scale"], [])


BIASES = """
import numpy as np


def mha(x, W_qkv, b_qkv, W_o, b_o, num_heads):
    q, k, v = np.split(x @ W_qkv + b_qkv, 3, axis=-1)
    n, outs = x.shape[-2], []
    for a, b, c in zip(*(np.split(t, num_heads, axis=-1) for t in (q, k, v))):
        scores = a @ b.swapaxes(-1, -2) / np.sqrt(a.shape[-1]) + (1 - np.tri(n)) * -1e10
        e = np.exp(scores - scores.max(-1, keepdims=True))
        outs.append(e / e.sum(-1, keepdims=True) @ c)
    return np.concatenate(outs, axis=-1) @ W_o + b_o
"""


def test_biases_as_arguments(judged):
    answer = judged(BIASES, "mha", kind="causal_multi_head").judged[0].answer
    assert answer.ok and "b_qkv: biases were 0 in each call" in str(answer)
    lost = judged(BIASES.replace(" + b_o", ""), "mha", kind="causal_multi_head").judged[0].answer
    assert lost.mistakes == ["bias_lost"] and "The bias of W_o has no effect" in str(lost)
    wrong = judged(BIASES.replace("* -1e10", "* -1e-10"), "mha", kind="causal_multi_head").judged[0].answer
    assert wrong.mistakes == ["sees_future"]
    assert wrong.lines[0].number == 9 and wrong.lines[0].should_be.endswith("(1 - np.tri(n)) * -1e9")


def test_weights_in_a_dict_are_not_judged(judged):
    text = BIASES.replace("W_qkv, b_qkv, W_o, b_o, num_heads", "key, value, params, num_heads")
    text = text.replace(
        "    q, k", '    W_qkv, b_qkv, W_o, b_o = (params[x] for x in ("qkv", "b", "o", "c"))\n    q, k'
    )
    answer = judged(text, "mha", kind="multi_head").judged[0].answer
    assert (answer.ok, answer.mistakes) == (None, ["untried"]) and "for params" in str(answer)


TORCH = """
import torch
import torch.nn as nn
import torch.nn.functional as F


class Attention(nn.Module):
    def __init__(self, dim: int, n_heads: int, n_kv_heads: int):
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, dim // n_heads
        self.wq = nn.Linear(dim, n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)

    def split(self, x, heads):
        x = torch.reshape(x, (x.shape[0], -1, heads, self.head_dim))
        return torch.permute(x, (0, 2, 1, 3))

    def joined(self, y):
        y = y.transpose(1, 2)
        return y.flatten(2)

    def forward(self, x):
        q = self.split(self.wq(x), self.n_heads)
        k = self.split(self.wk(x), self.n_kv_heads)
        v = self.split(self.wv(x), self.n_kv_heads)
        k = k.repeat_interleave(self.n_heads // self.n_kv_heads, dim=1)
        v = v.repeat_interleave(self.n_heads // self.n_kv_heads, dim=1)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.wo(self.joined(y))
"""


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("", ""),
        ("attention(q, k, v)", "attention(q, v, k)"),
        ("attention(q, k, v)", "attention(q, k, v, scale=1.0)"),
        ("return self.wo(self.joined(y))", "return self.joined(y)"),
    ],
)
def test_a_layer_of_groups_by_the_name_of_the_functions_kind(judged, right, wrong):
    needs.module("torch")
    answer = judged(TORCH.replace(right, wrong) if right else TORCH, "Attention", kind="grouped").judged[0].answer
    assert answer.ok is (not right), answer
    if right:
        assert answer.lines[0].number == TORCH[: TORCH.index(right)].count("\n") + 1, answer


WHILE = """
import numpy as np


def with_axes(mask):
    while mask.ndim < 4:
        mask = np.expand_dims(mask, 1)
    return mask


def attention(q, k, v, mask=None):
    scores = q @ k.swapaxes(1, 2) / q.shape[-1] ** 0.5
    if mask is not None:
        scores = scores * with_axes(mask)[:, 0]
    e = np.exp(scores - scores.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True) @ v
"""


def test_a_changed_line_of_a_loop_without_end_is_tried_and_ends(judged):
    """`mask = mask` in place of `mask = np.expand_dims(mask, 1)` never ends; nothing mends it, so all are tried."""
    answer = judged(WHILE, "attention", kind="dot_product").judged[0].answer
    assert answer.mistakes == ["mask_zero"] and [each.text for each in answer.lines] == [
        "scores = scores * with_axes(mask)[:, 0]"
    ]


def test_an_array_of_zeros_is_not_where_a_window_begins(judged):
    text = """
import numpy as np


def local_attention(Q, K, V, window):
    B, n, d = Q.shape
    out = np.zeros((B, n, V.shape[-1]))
    for t in range(n):
        lo = max(0, t - window)
        s = np.einsum("bd,bkd->bk", Q[:, t], K[:, lo:t + 1]) / np.sqrt(d)
        w = np.exp(s - s.max(1, keepdims=True))
        out[:, t] = np.einsum("bk,bkd->bd", w / w.sum(1, keepdims=True), V[:, lo:t + 1])
    return out
"""
    answer = judged(text, "local_attention", kind="window").judged[0].answer
    assert answer.mistakes == ["window_off_by_one"]
    assert [each.text for each in answer.lines] == ["lo = max(0, t - window)"], str(answer)


OF_LISTS = """
import math
def softmax_row(row):
    out = []
    for x in row:
        out.append(math.exp(x - max(row)))
    result = []
    for x in out:
        result.append(x)
    return result
def attention(queries, keys, values):
    result = []
    for q, k, v in zip(queries, keys, values):
        rows = []
        for i in range(len(q)):
            w = softmax_row([sum(a * b for a, b in zip(q[i], each)) / math.sqrt(len(each)) for each in k])
            row = []
            for c in range(len(v[0])):
                row.append(sum(w[j] * v[j][c] for j in range(len(w))))
            rows.append(row)
        result.append(rows)
    return result
"""


def test_changed_lines_of_lists_end(judged):
    """`for x in out: out.append(x)` has no end, and `row.append(row)` no shape: both are one name from a right line."""
    begin = process_time()
    (each,) = judged(OF_LISTS).judged
    assert each.answer.mistakes == ["no_softmax"] and process_time() - begin < 3, each


OF_LISTS_AND_LENGTHS = """
import math
import numpy as np
def attention(queries, keys, values, valid_lens=None):
    result = []
    for b in range(len(queries)):
        rows = []
        for i in range(len(queries[b])):
            count = len(keys[b])
            if valid_lens is not None:
                count = int(np.ravel(valid_lens[b])[i if np.ndim(valid_lens) > 1 else 0])
            scores = []
            for j in range(len(keys[b])):
                s = sum(x * y for x, y in zip(queries[b][i], keys[b][j])) / math.sqrt(len(keys[b][j]))
                if j >= count:
                    s = 0
                scores.append(s)
            weights = [math.exp(x - max(scores)) for x in scores]
            row = []
            for c in range(len(values[b][0])):
                row.append(sum(w / sum(weights) * values[b][j][c] for j, w in enumerate(weights)))
            rows.append(row)
        result.append(rows)
    return np.array(result)
"""


def test_no_changed_line_makes_lists_that_hold_each_other(judged):
    """NumPy makes an array of such until memory ends, in one line of the student's."""
    begin = process_time()
    (each,) = judged(OF_LISTS_AND_LENGTHS).judged
    assert each.answer.mistakes == ["mask_zero"] and process_time() - begin < 3, each
    assert each.answer.lines[0].text == "s = 0"


def test_a_list_that_holds_itself_is_an_answer(judged):
    text = "def attention(q, k, v):\n    x = [1.0]\n    x += [x, x]\n    return x\n"
    (each,) = judged(text).judged
    assert each.ok is False and "lists within lists" in each.text, each


OF_A_CLASS = """
import depths
import torch
from torch import nn


class SoftmaxAttention(nn.Module):
    def __init__(self, dropout=0.0):
        depths.note()
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.scale = 2.0

    def forward(self, queries, keys, values):
        scores = torch.bmm(queries, keys.transpose(1, 2)) / self.scale
        return torch.bmm(self.dropout(torch.softmax(scores, -1)), values)
"""
OF_ITSELF = """
import depths
import numpy as np


def total(x, n):
    depths.note()
    if n == 1:
        return x[..., :1]
    return total(x[..., 1:], n - 1) + x[..., :1]


def attention(q, k, v):
    exps = np.exp(q @ k.transpose(0, 2, 1))
    return 1.1 * exps / (total(exps, exps.shape[-1]) + 0.3) @ v
"""
OF_SOFTMAX = """
import depths
import numpy as np


def softmax(x):
    depths.note()
    e = np.exp(x)
    return 1.1 * e / (e.sum(-1, keepdims=True) + 0.3)


def attention(q, k, v):
    return softmax(q @ k.transpose(0, 2, 1)) @ v
"""


@pytest.mark.parametrize(("text", "id"), [(OF_A_CLASS, "scale_fixed"), (OF_ITSELF, "unknown"), (OF_SOFTMAX, "unknown")])
def test_no_changed_line_calls_itself_without_end(judged, monkeypatch, text, id):
    """At Python's own limit others' code fails, too, and what nobody can catch is printed."""
    deepest = 0

    def note():
        nonlocal deepest
        around = [sys._getframe(1)]
        while around[-1].f_back is not None:
            around.append(around[-1].f_back)
        deepest = max(deepest, sum(each.f_code is around[0].f_code for each in around))

    monkeypatch.setitem(sys.modules, "depths", SimpleNamespace(note=note))
    if text is OF_A_CLASS:
        needs.module("torch")
    (each,) = judged(text).judged
    assert each.answer.mistakes == [id] and deepest <= 20, (deepest, each)


HELPERS = """
import numpy as np


def softmax(x, axis=-1):
    top = x.max(axis=axis, keepdims=True)
    total = np.sum(np.exp(x - top), axis=axis, keepdims=True)
    return np.exp(x - top) / total


def attention(queries, keys, values, valid_lens=None):
    out = np.zeros((*queries.shape[:2], values.shape[2]))
    for b in range(len(queries)):
        n = keys.shape[1] if valid_lens is None else int(valid_lens[b])
        scores = queries[b] @ keys[b, :n].T / np.sqrt(queries.shape[-1])
        out[b] = softmax(scores) @ values[b, :n]
    return out


def causal(q, k, v):
    rows = []
    for t in range(q.shape[1]):
        e = np.einsum("bd,bkd->bk", q[:, t], k[:, : t + 1]) / np.sqrt(q.shape[-1])
        rows.append((softmax(e)[:, :, None] * v[:, : t + 1]).sum(axis=1))
    return np.stack(rows, axis=1)


def window_attention(q, k, v, window):
    dist = np.arange(q.shape[1])[:, None] - np.arange(k.shape[1])
    near = (dist >= 0) & (dist < window)
    s = np.where(near, q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1]), -1e9)
    return softmax(s) @ v


def grouped_attention(q, k, v):
    share = q.shape[1] // k.shape[1]
    k = np.concatenate([k[:, [g]] for g in range(k.shape[1]) for _ in range(share)], axis=1)
    v = np.repeat(v, share, axis=1)
    return softmax(q @ k.swapaxes(2, 3) / np.sqrt(q.shape[-1])) @ v


def turned(x):
    y = np.empty_like(x)
    y[..., ::2], y[..., 1::2] = -x[..., 1::2], x[..., ::2]
    return y


def tables(n, d):
    angle = np.arange(n)[:, None] / 10000 ** (np.arange(0, d, 2) / d)
    return np.cos(angle).repeat(2, axis=1), np.sin(angle).repeat(2, axis=1)


def rope(x):
    cos, sin = tables(*x.shape[-2:])
    return x * cos + turned(x) * sin


def masked_softmax(X, valid_lens=None):
    e = np.exp(X - X.max(axis=-1, keepdims=True))
    if valid_lens is not None:
        e = e * (np.arange(X.shape[2]) < valid_lens[:, None, None])
    return e / e.sum(axis=-1, keepdims=True)


def causal_self_attention(x, W_q, W_k, W_v, W_o, num_heads):
    q, k, v = (np.stack(np.split(x @ W, num_heads, axis=-1), axis=1) for W in (W_q, W_k, W_v))
    s = q @ k.swapaxes(2, 3) / np.sqrt(q.shape[-1])
    seen = np.tri(x.shape[1], dtype=bool)
    weights = softmax(np.where(seen, s, -1e9))
    return np.concatenate(list(np.moveaxis(weights @ v, 1, 0)), axis=-1) @ W_o


def multi_head_attention(queries, keys, values, W_q, W_k, W_v, W_o, num_heads):
    out = 0
    for a, b, c, d in zip(*(np.split(W, num_heads, axis=1) for W in (W_q, W_k, W_v)), np.split(W_o, num_heads)):
        q, k, v = queries @ a, keys @ b, values @ c
        weights = softmax(q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1]))
        out = out + (weights @ v) @ d
    return out
"""


@pytest.mark.parametrize(
    ("name", "kind", "right", "wrong"),
    [
        ("attention", "dot_product", "np.sum(np.exp(x - top)", "np.sum(np.abs(x - top)"),  # in a helper with an axis
        ("attention", "dot_product", "values[b, :n]", "values[b, -n:]"),
        ("rope", "rope", "x * cos + turned(x) * sin", "x * cos + x * sin"),
        ("masked_softmax", "masked_softmax", "/ e.sum(axis=-1", "/ e.sum(axis=-2"),
        ("causal_self_attention", "causal_multi_head", "softmax(np.where(seen, s, -1e9))", "softmax(s)"),
        ("causal", "causal", "sum(axis=1))", "max(axis=1))"),
        ("window_attention", "window", "(dist >= 0) & (dist < window)", "(dist >= 0) | (dist < window)"),
        ("grouped_attention", "grouped", "for g in range(k.shape[1]) for _ in range(share)",
         "for _ in range(share) for g in range(k.shape[1])"),
        ("multi_head_attention", "multi_head", "softmax(q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1]))",
         "np.tanh(q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1]))"),
    ],
)  # fmt: skip
def test_lines_of_helpers_rows_and_heads(judged, name, kind, right, wrong):
    assert judged(HELPERS, name, kind=kind).ok and HELPERS.count(right) == 1
    answer = judged(HELPERS.replace(right, wrong), name, kind=kind).judged[0].answer
    assert answer.ok is False
    assert [line.number for line in answer.lines] == [HELPERS[: HELPERS.index(right)].count("\n") + 1], answer
