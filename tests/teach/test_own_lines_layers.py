"""Lines of classes inside classes, of masks that no call gets, of products in the other order, of scales by a name."""

import pytest

import needs

HEADS = """
import torch
import torch.nn as nn
import torch.nn.functional as F


def scaled_attention(q, k, v, mask=None):
    scale_factor = 1 / q.size(-1) ** 0.5
    scores = torch.matmul(q, k.transpose(-2, -1)) * scale_factor
    if mask is not None:
        scores = scores.masked_fill(mask, -torch.inf)
    return F.softmax(scores, dim=-1) @ v


class Head(nn.Module):
    def __init__(self, n_embd, head_size):
        super().__init__()
        self.key = nn.Linear(n_embd, head_size)
        self.query = nn.Linear(n_embd, head_size)
        self.value = nn.Linear(n_embd, head_size)

    def forward(self, x):
        k = self.key(x)
        q = self.query(x)
        v = self.value(x)
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return scaled_attention(q, k, v, future)


class MultiHeadAttention(nn.Module):
    def __init__(self, n_embd, num_heads):
        super().__init__()
        self.heads = nn.ModuleList([Head(n_embd, n_embd // num_heads) for _ in range(num_heads)])
        self.proj = nn.Linear(n_embd, n_embd)

    def forward(self, x):
        return self.proj(torch.cat([head(x) for head in self.heads], dim=-1))
"""


@pytest.mark.parametrize(
    ("right", "wrong", "id", "should_be"),
    [
        ("k = self.key(x)", "k = self.query(x)", "swapped_projections", "k = self.key(x)"),
        ("v = self.value(x)", "v = self.key(x)", "swapped_projections", "v = self.value(x)"),
        ("1 / q.size(-1) ** 0.5", "1 / q.size(-1)", "scale_d", "scale_factor = 1 / q.size(-1) ** 0.5"),
        ("(q, k.transpose", "(k, q.transpose", "swapped_projections",
         "scores = torch.matmul(q, k.transpose(-2, -1)) * scale_factor"),
        ("(q, k, v, future)", "(q, k, v)", "sees_future", "return scaled_attention(q, k, v, future)"),
        ("scores = scores.masked_fill", "scores.masked_fill", "sees_future",
         "scores = scores.masked_fill(mask, -torch.inf)"),
        ("(q, k.transpose", "(q, v.transpose", "swapped_keys_values",
         "scores = torch.matmul(q, k.transpose(-2, -1)) * scale_factor"),
    ],
)  # fmt: skip
def test_a_line_of_a_class_in_a_class(judged, right, wrong, id, should_be):
    needs.module("torch")
    assert HEADS.count(right) == 1
    text = HEADS.replace(right, wrong)
    number = 1 + HEADS[: HEADS.index(right)].count("\n")
    answer = judged(text, "MultiHeadAttention", kind="causal_multi_head").judged[0].answer
    assert answer.mistakes[:1] == [id], str(answer)
    assert [(each.number, each.should_be) for each in answer.lines] == [(number, should_be)]


def test_a_number_of_heads_by_a_name_in_no_table(judged):
    """With one head a mistake in heads is no mistake."""
    needs.module("torch")
    layer = """
import torch
from torch import nn


class Aufmerksamkeit(nn.Module):
    def __init__(self, dim, koepfe):
        super().__init__()
        self.koepfe = koepfe
        self.W_q, self.W_k, self.W_v, self.W_o = (nn.Linear(dim, dim) for _ in range(4))

    def teilen(self, x):
        return x.view(x.size(0), x.size(1), self.koepfe, -1).transpose(1, 2)

    def forward(self, x, maske=None):
        f, s, w = self.teilen(self.W_q(x)), self.teilen(self.W_k(x)), self.teilen(self.W_v(x))
        punkte = f @ s.transpose(-1, -2) / f.size(-1) ** 0.5
        if maske is not None:
            punkte = punkte.masked_fill(maske == 0, -1e9)
        aus = torch.softmax(punkte, -1) @ w
        return self.W_o(aus.transpose(1, 2).reshape(x.shape))
"""
    right = judged(layer, "Aufmerksamkeit", kind="multi_head").judged[0].answer
    assert right.ok and "number of heads" not in str(right)
    wrong = layer.replace("aus.transpose(1, 2).reshape", "aus.reshape")
    assert judged(wrong, "Aufmerksamkeit", kind="multi_head").judged[0].answer.mistakes == ["heads_joined_wrong"]


TABLE = """
import math, torch
class PositionalEncoding(torch.nn.Module):
    '''sin(pos / 10000 ** (2 * i / d))'''
    def __init__(self, d_model, max_len):
        super().__init__()
        self.table = torch.zeros(max_len, d_model)
        for pos in range(max_len):
            for i in range(d_model):
                angle = pos / 10000 ** (2 * i / d_model)
                self.table[pos, i] = math.cos(angle) if i % 2 else math.sin(angle)
    def forward(self, x):
        part = self.table[:x.shape[1]]
        return x + part[None]
"""


BY_A_FUNCTION = """
import numpy as np, torch
class PositionalEncoding(torch.nn.Module):
    def __init__(self, d_hid, n_position=200):
        super().__init__()
        self.register_buffer("table", self._table(n_position, d_hid))
    def _table(self, n_position, d_hid):
        def angles(position):
            return [position / np.power(1000, 2 * (j // 2) / d_hid) for j in range(d_hid)]
        table = np.array([angles(i) for i in range(n_position)])
        table[:, 0::2] = np.sin(table[:, 0::2])
        table[:, 1::2] = np.cos(table[:, 1::2])
        return torch.FloatTensor(table).unsqueeze(0)
    def forward(self, x):
        return x + self.table[:, :x.size(1)]
"""


@pytest.mark.parametrize(
    ("text", "line"), [(TABLE, "angle = pos / 10000 ** "), (BY_A_FUNCTION, "return [position / np")]
)
def test_a_table_of_pythons_numbers_has_its_line_where_it_is_made(judged, text, line):
    """Python's numbers are not noted: what reads the table is no student's mistake."""
    needs.module("torch")
    (each,) = judged(text).judged
    (told,) = each.answer.lines
    assert each.answer.mistakes == ["wrong_exponent"] and told.text.startswith(line), each
