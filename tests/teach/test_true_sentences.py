"""What check says of a file is true of that file: the book's line, what a line should be, the notes."""

import pytest

import needs
from students_files import CLASS, NUMPY, TORCH

CAUSAL = """
import math
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.q, self.k, self.v, self.out = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (each(x).view(b, t, self.num_heads, -1).transpose(1, 2) for each in (self.q, self.k, self.v))
        scores = torch.einsum("bhtd,bhsd->bhts", q, k) / math.sqrt(c // self.num_heads)
        scores = scores.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), -1e9)
        y = scores.softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(b, t, c))
"""
ROPE = """
from functools import lru_cache
import torch


@lru_cache(maxsize=None)
def table(d, steps):
    inverse = 1.0 / 10000 ** (torch.arange(0, d, 2) / d)
    angles = torch.outer(torch.arange(steps), inverse)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def halves(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def rope(q, k):
    cos, sin = table(q.shape[-1], q.shape[-2])
    q_turned = q * cos + halves(q) * sin
    k_turned = k * cos + halves(k) * sin
    return q_turned, k_turned
"""
CHUNKS = """
import numpy as np


def attention(queries, keys, values, valid_lens=None):
    b, n, d = queries.shape
    top, total, out = np.full((b, n, 1), -np.inf), 0.0, 0.0
    for start in range(0, keys.shape[1], 2):
        k, v = keys[:, start : start + 2], values[:, start : start + 2]
        s = queries @ k.swapaxes(1, 2) / np.sqrt(d)
        if valid_lens is not None:
            s = np.where(start + np.arange(k.shape[1]) < valid_lens.reshape(b, -1, 1), s, -1e6)
        new = np.maximum(top, s.max(-1, keepdims=True))
        p = np.exp(s - new)
        total = total * np.exp(top - new) + p.sum(-1, keepdims=True)
        out = out * np.exp(top - new) + p @ v
        top = new
    return out / total
"""
ADDITIVE = """
import numpy as np


def additive_attention(queries, keys, values, W_q, W_k, w_v):
    features = np.tanh((queries @ W_q)[:, :, None] + (keys @ W_k)[:, None])
    scores = features @ w_v
    e = np.exp(scores - scores.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True) @ values
"""
BOTH_MASKS = """
import torch


def scaled_dot_product_attention(query, key, value, attn_mask=None):
    weight = query @ key.transpose(-2, -1) / query.size(-1) ** 0.5
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            weight = weight.masked_fill(attn_mask.logical_not(), float("-inf"))
        else:
            weight = weight + attn_mask
    return torch.softmax(weight, dim=-1) @ value
"""


def changed(text, right, wrong):
    assert text.count(right) == 1, right
    return text.replace(right, wrong)


def answer_to(judged, text, right, wrong, kind):
    if "import torch" in text:
        needs.module("torch")
    answer = judged(changed(text, right, wrong), kind=kind).judged[0].answer
    assert not answer.ok, answer
    return answer


@pytest.mark.parametrize(
    ("text", "right", "wrong", "kind", "id", "book"),
    [
        (NUMPY, "weights, V)", "weights, K)", "dot_product", "swapped_keys_values",
         "return attention_weights @ values"),
        (CAUSAL, 'bhts", q, k)', 'bhts", q, v)', "causal_multi_head", "swapped_keys_values",
         "scores = queries @ keys.swapaxes(1, 2) / np.sqrt(d)"),
        (CAUSAL, "math.sqrt(c // self.num_heads)", "math.sqrt(c)", "causal_multi_head", "scale_num_hiddens",
         "scores = queries @ keys.swapaxes(1, 2) / np.sqrt(d)"),
    ],
)  # fmt: skip
def test_the_books_line_is_the_one_of_the_mistake(judged, text, right, wrong, kind, id, book):
    """Not the line before which the book's function would have exchanged its arguments."""
    answer = answer_to(judged, text, right, wrong, kind)
    assert answer.mistakes == [id] and answer.lines[0].book == book, answer


@pytest.mark.parametrize(
    ("text", "right", "wrong", "kind", "should_be"),
    [
        # A sum in the place of the quotient would make the same softmax.
        (ADDITIVE, "@ w_v", "@ w_v / len(w_v) ** 0.5", "additive", "scores = features @ w_v"),
        (CLASS, "@ self.W_o", "@ self.W_o.T", "multi_head",
         "return np.concatenate(heads, axis=-1) @ self.W_o"),
        (ROPE, "torch.arange(steps)", "torch.arange(steps) + 1", "rope",
         "angles = torch.outer(torch.arange(steps), inverse)"),
        (NUMPY, "return e / np.sum(e, axis=axis, keepdims=True)", "return e", "dot_product",
         "return e / e.sum(-1, keepdims=True)"),
    ],
)  # fmt: skip
def test_a_line_is_mended_as_one_would(judged, text, right, wrong, kind, should_be):
    """In its own line, which stands in a helper or behind a cache, and with nothing that undoes itself."""
    answer = answer_to(judged, text, right, wrong, kind)
    assert [each.should_be for each in answer.lines] == [should_be], answer


def test_a_maximum_is_not_what_is_mended(judged):
    """Without any maximum nothing would have to be rescaled: these numbers would be right, too."""
    answer = answer_to(judged, CHUNKS, "out * np.exp(top - new) + p @ v", "out + p @ v", "dot_product")
    assert "should be" not in str(answer), answer


def test_two_mistakes_do_not_explain_what_one_width_makes_alike(judged):
    """A chunk that loses its last key, of two, is no matrix that is not transposed."""
    text = changed(CHUNKS, "valid_lens=None)", "valid_lens=None, size=2)").replace(", 2):", ", size):")
    right = "keys[:, start : start + 2], values[:, start : start + 2]"
    answer = answer_to(judged, text, right, right.replace("+ 2", "+ size - 1"), "dot_product")
    assert "transposed" not in str(answer) and "its scale is fixed" not in str(answer), answer


@pytest.mark.parametrize(
    ("right", "wrong", "line"),
    [
        ("k_turned = k * cos + halves(k) * sin", "k_turned = k", "k_turned = k"),
        ("return q_turned, k_turned", "return q_turned, k", "return q_turned, k"),
    ],
)
def test_keys_that_are_not_turned_are_given_where_they_get_their_name(judged, right, wrong, line):
    """What turns them is not said of numbers that no call turned; as halves or as neighbours, neither."""
    answer = answer_to(judged, ROPE, right, wrong, "rope")
    assert answer.mistakes == ["keys_not_rotated"]
    assert [(each.text, each.should_be) for each in answer.lines] == [(line, "")], answer
    assert "neighbour" not in str(answer)


def test_what_no_mistake_explains_says_nothing_of_pairs(judged):
    answer = answer_to(judged, ROPE, "q_turned = q * cos + halves(q) * sin", "q_turned = q * cos", "rope")
    assert answer.mistakes == ["unknown"] and "neighbour" not in str(answer), answer


def test_a_base_of_100_is_not_an_exponent_alone(judged):
    answer = answer_to(judged, ROPE, "10000", "100", "rope")
    assert "100 in the place of 10000" in str(answer), answer


def test_the_values_matrix_that_makes_the_keys_is_one_thing(judged):
    text = changed(TORCH, "self.W_k(keys)", "self.W_v(keys)")
    needs.module("torch")
    answer = judged(text).judged[0].answer
    assert "W_v projects the keys, too, and W_k nothing" in str(answer), answer
    assert [each.should_be for each in answer.lines] == ["k = self.split(self.W_k(keys))"]


@pytest.mark.parametrize("is_right", [True, False])
def test_a_branch_for_masks_of_true_and_false_is_asked_beside_one_for_numbers(judged, is_right):
    needs.module("torch")
    text = BOTH_MASKS if is_right else changed(BOTH_MASKS, 'float("-inf")', "0.0")
    answer = judged(text, kind="dot_product").judged[0].answer
    assert answer.mistakes == ([] if is_right else ["mask_zero"]), answer


def test_a_line_that_raises_for_each_mask_is_all_that_is_said(judged):
    """Of no reading of its weights anything else is wrong, and what True means in the mask nothing tells."""
    needs.module("torch")
    text = changed(TORCH, "mask.unsqueeze(1) == 0", "mask is None")
    answer = judged(text).judged[0].answer
    assert answer.mistakes == ["raises"] and "the others are right" in str(answer), answer
    assert "lets a key be seen" not in str(answer) and "hides a key" not in str(answer), answer


STEPS_FIRST = """
import torch
from torch import nn


class SeqFirst(nn.Module):
    \"\"\"Inputs are (seq_len, batch, d_model).\"\"\"

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(d_model, d_model) for _ in range(4))

    def split(self, x):
        return x.reshape(len(x), -1, x.shape[-1] // self.num_heads).transpose(0, 1)

    def forward(self, query, key, value):
        q, k, v = self.split(self.q_proj(query)), self.split(self.k_proj(key)), self.split(self.v_proj(value))
        weights = torch.softmax(q @ k.transpose(1, 2) / q.shape[-1] ** 0.5, dim=-1)
        return self.out_proj((weights @ v).transpose(0, 1).reshape(query.shape))
"""


def test_code_that_says_steps_first_is_asked_so_with_a_mistake_too(judged):
    answer = answer_to(judged, STEPS_FIRST, "q.shape[-1] ** 0.5", "q.shape[-1]", "multi_head")
    assert answer.mistakes == ["scale_d"] and "(steps, batch, features)" in str(answer), answer


def test_a_triangle_in_a_function_within_makes_it_causal(judged):
    text = """
import numpy as np


def attention(queries, keys, values):
    def hidden(scores):
        return np.where(np.tri(*scores.shape[1:], scores.shape[2] - scores.shape[1]) > 0, scores, -1e9)

    scores = hidden(queries @ keys.swapaxes(1, 2) / queries.shape[-1] ** 0.5)
    e = np.exp(scores - scores.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True) @ values
"""
    answer = judged(text).judged[0].answer
    assert answer.ok and "causal" in str(answer), answer
