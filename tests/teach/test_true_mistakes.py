"""The mistakes that check names are the file's own: no pair that fits a few probes, nothing that check itself did."""

import pytest

import needs
from mha_c import teach

ONLINE = """
import torch


def online_attention(queries, keys, values):
    b, n, d = queries.shape
    top = torch.full((b, n), -1e30)
    total, out = torch.zeros(b, n), torch.zeros(b, n, values.shape[-1])
    row = torch.arange(n)
    for j in range(keys.shape[1]):
        s = (queries * keys[:, j, None]).sum(-1) / d**0.5
        s = torch.where(row >= j, s, torch.tensor(-1e30))
        new = torch.maximum(top, s)
        p = torch.exp(s - new)
        fix = torch.exp(top - new)
        total = total * fix + p
        out = out * fix[..., None] + p[..., None] * values[:, j, None]
        top = new
    return out / total[..., None]
"""
ROLLING = """
import numpy as np


def sliding_window(queries, keys, values, window):
    n, d = queries.shape[1:]
    out, total = np.zeros(queries.shape[:2] + values.shape[2:]), np.zeros(queries.shape[:2])
    for back in range(min(window, n)):
        e = np.exp(np.sum(queries[:, back:] * keys[:, : n - back], axis=-1) / np.sqrt(d))
        out[:, back:] += e[:, :, None] * values[:, : n - back]
        total[:, back:] += e
    return out / total[:, :, None]
"""
SLICES = """
import numpy as np


def local_attention(queries, keys, values, window):
    out = []
    for i in range(queries.shape[1]):
        first = max(0, i - window + 1)
        k, v = keys[:, first : i + 1], values[:, first : i + 1]
        s = np.einsum("bd,bkd->bk", queries[:, i], k) / np.sqrt(queries.shape[-1])
        e = np.exp(s - s.max(axis=-1, keepdims=True))
        out.append(np.einsum("bk,bkd->bd", e / e.sum(axis=-1, keepdims=True), v))
    return np.stack(out, axis=1)
"""
SDPA = """
import torch


def softmax(x, dim):
    x = x - torch.max(x, dim=dim, keepdim=True).values
    e = torch.exp(x)
    return e / torch.sum(e, dim=dim, keepdim=True)


def scaled_dot_product_attention(Q, K, V, mask=None):
    scores = torch.einsum("...qd,...kd->...qk", Q, K) / Q.shape[-1] ** 0.5
    if mask is not None:
        scores = torch.where(mask, scores, float("-inf"))
    return torch.einsum("...qk,...kd->...qd", softmax(scores, dim=-1), V)
"""
STEPS = """
import torch


def causal_attention(queries, keys, values):
    out = []
    for step in range(queries.shape[1]):
        q = queries[:, step]
        s = torch.einsum("bd,bkd->bk", q, keys[:, : step + 1])
        s = s / q.shape[-1] ** 0.5
        out.append((s.softmax(dim=1)[:, :, None] * values[:, : step + 1]).sum(dim=1))
    return torch.stack(out, dim=1)
"""
LISTS = """
import math
import numpy as np


def attention(queries, keys, values, valid_lens=None):
    out = []
    for b, item in enumerate(queries):
        rows = []
        for i, q in enumerate(item):
            n = len(keys[b])
            if valid_lens is not None:
                n = int(valid_lens[b] if np.ndim(valid_lens) == 1 else valid_lens[b][i])
            scores = []
            for j, k in enumerate(keys[b]):
                s = 0.0
                for c in range(len(q)):
                    s += float(q[c]) * float(k[c])
                scores.append(s / math.sqrt(len(q)) if j < n else -1e6)
            top = max(scores)
            weights = [math.exp(s - top) for s in scores]
            total = sum(weights)
            rows.append([sum(w / total * v[c] for w, v in zip(weights, values[b])) for c in range(len(values[b][0]))])
        out.append(rows)
    return np.array(out)
"""
GROUPS = """
import numpy as np


def gqa(q, k, v):
    heads, groups = q.shape[1], k.shape[1]
    share, out = heads // groups, np.empty_like(q)
    for h in range(heads):
        s = q[:, h] @ k[:, h // share].swapaxes(1, 2) / np.sqrt(q.shape[-1])
        s = np.exp(s - s.max(-1, keepdims=True))
        out[:, h] = s / s.sum(-1, keepdims=True) @ v[:, h // share]
    return out
"""
SPLIT = """
import numpy as np


def transpose_qkv(X, num_heads):
    d = X.shape[2] // num_heads
    return np.concatenate([[x[:, h * d : (h + 1) * d] for h in range(num_heads)] for x in X])
"""
MERGE = """
def transpose_output(X, num_heads):
    X = X.reshape(-1, num_heads, *X.shape[1:])
    X = X.transpose(0, 2, 1, 3)
    return X.reshape(*X.shape[:2], -1)
"""
TABLE = """
import numpy as np


def add_positions(x):
    n, d = x.shape[-2:]
    table = np.array([[p / np.power(10000, 2 * (j // 2) / d) for j in range(d)] for p in range(n)])
    table[:, 0::2] = np.sin(table[:, 0::2])
    table[:, 1::2] = np.cos(table[:, 1::2])
    return x + table
"""
COMPLEX = """
import numpy as np


def rope(X, offset=0):
    d = X.shape[-1]
    theta = 10000.0 ** (-2 * np.arange(d // 2) / d)
    z = X[..., 0::2] + 1j * X[..., 1::2]
    z = z * np.exp(1j * np.outer(np.arange(offset, offset + X.shape[-2]), theta))
    return np.stack([z.real, z.imag], axis=-1).reshape(X.shape)
"""


def answer_to(judged, text, right, wrong, kind):
    if "import torch" in text:
        needs.module("torch")
    assert text.count(right) == 1
    assert judged(text, kind=kind, file="right.py").judged[0].answer.ok
    return judged(text.replace(right, wrong), kind=kind).judged[0].answer


@pytest.mark.parametrize(
    ("text", "right", "wrong", "kind", "id", "says"),
    [
        (ONLINE, "        top = new\n", "", "causal", "no_rescale", "does not keep its maximum"),
        (ONLINE, "total * fix + p", "total + p", "causal", "no_rescale", "the sum of weights is not rescaled when"),
        (ONLINE, "out * fix[..., None]", "out", "causal", "no_rescale", "the output is not rescaled when a later key"),
        (ROLLING, "values[:, : n - back]", "values[:, back:]", "window", "own_value", "the value of its own position"),
        (SLICES, "i - window + 1)", "min(i, i - window + 2))", "window", "window_off_by_one", "always the query's own"),
        (SDPA, "    e = torch.exp(x)\n", "    e = x\n", "dot_product", "no_softmax", "less their maximum, are divided"),
        (STEPS, "s / q.shape[-1] ** 0.5", "s / (step + 1) ** 0.5", "causal", "scale_keys", "that a query sees"),
        (LISTS, "s += ", "s = ", "dot_product", "last_feature", "the last features alone"),
        (LISTS, "= sum(weights)", "= len(weights)", "dot_product", "no_softmax", "divided by the number of keys"),
        (GROUPS, "np.sqrt(q.shape[-1])", "np.sqrt(heads)", "grouped", "scale_num_heads", "the number of heads"),
        (GROUPS, "@ v[:, h // share]", "@ v.mean(1)", "grouped", "group_mean", "the mean of all heads' values"),
        (SPLIT, "x[:, h * d : (h + 1) * d]", "x[:, :d]", "transpose_qkv", "first_head", "of the first head"),
        (MERGE, "X.reshape(*X.shape[:2], -1)", "X.sum(2)", "transpose_output", "sum_of_heads", "heads are added"),
        (MERGE, "    X = X.transpose(0, 2, 1, 3)\n", "", "transpose_output", "wrong_axes", "the steps of a head"),
        (MERGE, "(0, 2, 1, 3)", "(0, 1, 3, 2)", "transpose_output", "wrong_axes", "the last two axes"),
        (TABLE, "[p / np", "[0 / np", "positional_encoding", "position_ignored", "the encoding of position 0"),
        (TABLE, "    table[:, 1::2] = np.cos(table[:, 1::2])\n", "", "positional_encoding", "sin_cos_swapped",
         "the angle itself, without cos"),
        (COMPLEX, "X[..., 0::2] + 1j * X[..., 1::2]", "X[..., 1::2] + 1j * X[..., 0::2]", "rope", "rope_pairs",
         "exchanged before they are turned"),
    ],
)  # fmt: skip
def test_a_slip_that_is_often_met_has_its_name(judged, text, right, wrong, kind, id, says):
    """Without one, two odd mistakes may explain the same numbers, and the student looks for both."""
    answer = answer_to(judged, text, right, wrong, kind)
    assert answer.mistakes == [id] and says in str(answer), answer


def test_two_mistakes_that_raise_elsewhere_explain_nothing(judged):
    """Where values are as wide as keys, scores of queries and values give what is seen of one key alone."""
    answer = answer_to(judged, SLICES, "i - window + 1)", "i - (window - 1) // 2 * 2)", "window")
    assert "in two things" not in str(answer), answer


def test_an_error_of_a_mask_of_another_type_is_not_the_students():
    """Its mask of booleans is taken; that integers are not says nothing."""
    needs.module("torch")
    room = {}
    exec(SDPA.replace("    e = torch.exp(x)\n", "    e = x\n"), room)
    answer = teach.check(room["scaled_dot_product_attention"], "dot_product", mask="attend")
    assert answer.mistakes == ["no_softmax"] and "boolean" not in str(answer), answer


def test_an_infinite_exp_is_no_matter_of_masks(judged):
    answer = answer_to(judged, ONLINE, "torch.exp(top - new)", "torch.exp(new - top)", "causal")
    assert answer.mistakes == ["nan"] and "masked_fill" not in str(answer), answer
    assert "exp of a large number is infinite" in str(answer) and answer.lines[0].number == 15, answer


def test_a_product_is_no_score_yet(judged):
    """What is wrong in the line of the scores is behind the projections, not behind the scores."""
    answer = answer_to(judged, GROUPS, "np.sqrt(q.shape[-1])", "q.shape[-1] * 0.3 - 1", "grouped")
    assert "numbers are the book's: scores" not in str(answer), answer


def test_a_scale_is_not_where_a_query_is_picked(judged):
    answer = answer_to(judged, STEPS, "s / q.shape[-1] ** 0.5", "s / (step + 1) ** 0.5", "causal")
    assert [each.text for each in answer.lines] == ["s = s / (step + 1) ** 0.5"], answer
