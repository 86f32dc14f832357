"""check quotes the student's own line, and what it should be: that was tried, so the file with it is right."""

import json
import warnings

import pytest

import needs
from students_files import CLASS, NUMPY, TORCH

# (id, the right text, the text with the slip): the slip's own line is to be quoted.
IN_NUMPY = [
    ("scale_d", "K.shape[-1] ** 0.5", "K.shape[-1]"),
    ("scale_inverted", "scores / K.shape[-1] ** 0.5", "scores * K.shape[-1] ** 0.5"),
    ("softmax_axis", "softmax(scores, axis=-1)", "softmax(scores, axis=1)"),
    ("softmax_axis", "np.sum(e, axis=axis", "np.sum(e, axis=1"),
    ("no_softmax", "weights = softmax(scores, axis=-1)", "weights = scores"),
    ("mask_off_by_one", ":] < lens", ":] <= lens"),
    ("mask_zero", "-np.inf)", "0.0)"),
    ("lens_of_first", "lens = lens[:, None]", "lens = lens[:1, None]"),
]
IN_TORCH = [
    ("scale_num_hiddens", "math.sqrt(q.shape[-1])", "math.sqrt(queries.shape[-1])"),
    ("softmax_axis", "dim=-1", "dim=2"),
    ("heads_without_transpose", "x.view(b, t, self.num_heads, d // self.num_heads).transpose(1, 2)",
     "x.view(b, self.num_heads, t, d // self.num_heads)"),
    ("heads_joined_wrong", "out.transpose(1, 2).reshape(b, t, h * d)", "out.reshape(b, t, h * d)"),
    ("no_output_projection", "return self.W_o(out)", "return out"),
    ("swapped_projections", "self.W_k(keys)", "self.W_q(keys)"),
    ("swapped_keys_values", "self.W_v(values)", "self.W_v(keys)"),
]  # fmt: skip


def is_at_the_slip(judged, text, id, old, new):
    """The answer names the slip and quotes its line; with the line that it should be the file is right."""
    assert text.count(old) == 1
    wrong = text.replace(old, new)
    answer = judged(wrong).judged[0].answer
    assert answer.mistakes == [id], answer
    number = text[: text.index(old)].count("\n") + 1
    line = answer.lines[0]
    assert (line.file, line.number, line.text) == ("mine.py", number, wrong.splitlines()[number - 1].strip()), answer
    assert f"mine.py, line {number}:" in str(answer) and line.text in str(answer)
    return wrong, line


@pytest.mark.parametrize(
    ("text", "slip"), [*((NUMPY, each) for each in IN_NUMPY), *((TORCH, each) for each in IN_TORCH)]
)
def test_the_line_and_what_it_should_be(judged, text, slip):
    """The mended line is shown where it was tried: with it the file is right."""
    if text is TORCH:
        needs.module("torch")
    wrong, line = is_at_the_slip(judged, text, *slip)
    lines = wrong.splitlines(keepends=True)
    lines[line.number - 1] = lines[line.number - 1].replace(line.text, line.should_be)
    assert line.should_be and judged("".join(lines), file="mended.py").ok, line


def test_the_end_of_a_slice_is_taken_away(judged):
    """A larger number would be right for small inputs alone."""
    _, line = is_at_the_slip(judged, NUMPY, "lens_of_first", "lens = lens[:, None]", "lens = lens[:1, None]")
    assert line.should_be == "lens = lens[:, None]"


def test_for_programs(judged):
    answer = judged(NUMPY.replace(" ** 0.5", "")).judged[0].answer
    assert json.loads(json.dumps(answer.lines[0].as_dict())) == {
        "file": "mine.py",
        "line": 19,
        "text": "scores = scores / K.shape[-1]",
        "should_be": "scores = scores / K.shape[-1] ** 0.5",
        "book": "scores = queries @ keys.swapaxes(1, 2) / np.sqrt(d)",
    }


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("weights[:, h] @ v", "weights[:, 0] @ v"),
        ("range(self.num_heads)]", "reversed(range(self.num_heads))]"),
        ("@ self.W_o", "@ self.W_o.T"),
        ("x.reshape(b, t, self.num_heads, d // self.num_heads).transpose(0, 2, 1, 3)",
         "x.reshape(b, t, d // self.num_heads, self.num_heads).transpose(0, 3, 1, 2)"),
        ("scores = scores * scale", "scores = scores / scale"),
        ("weights = softmax(scores)", "weights = scores"),
        ("return e / e.sum(axis=-1, keepdims=True)", "return e"),
        ("return e / e.sum(axis=-1, keepdims=True)", "return np.log(e / e.sum(axis=-1, keepdims=True))"),
        ("bhkd->bhqk", "bhkd->bhkq"),
    ],
)  # fmt: skip
def test_the_smallest_change_that_makes_all_right(judged, right, wrong):
    """Whether or not the mistake is known: in any line of the functions that ran, helpers and methods."""
    assert CLASS.count(right) == 1
    answer = judged(CLASS.replace(right, wrong), "MultiHeadAttention").judged[0].answer
    number = CLASS[: CLASS.index(right)].count("\n") + 1
    assert (answer.lines[0].number, answer.ok) == (number, False), answer
    lines = CLASS.replace(right, wrong).splitlines(keepends=True)
    lines[number - 1] = lines[number - 1].replace(answer.lines[0].text, answer.lines[0].should_be)
    assert answer.lines[0].should_be and judged("".join(lines), "MultiHeadAttention", file="mended.py").ok


DROPPED = "self.dropout(torch.softmax(scores, dim=-1))"
ON_SCORES = "torch.softmax(self.dropout(scores), dim=-1)"


@pytest.mark.parametrize(
    ("id", "new", "line"),
    [
        ("no_dropout", "torch.softmax(scores, dim=-1)", "out = weights @ v"),
        ("dropout_on_scores", ON_SCORES, f"weights = {ON_SCORES}"),
    ],
)
def test_the_line_of_dropout(judged, id, new, line):
    """Where the weights that lose nothing are used; where scores are dropped, and not where the output is, too."""
    needs.module("torch")
    text = TORCH.replace("return self.W_o(out)", "return self.dropout(self.W_o(out))") if id != "no_dropout" else TORCH
    answer = judged(text.replace(DROPPED, new)).judged[0].answer
    assert answer.mistakes == [id] and [each.text for each in answer.lines] == [line], answer


def test_the_mean_of_weights_is_not_taken_for_weights_that_are_dropped(judged):
    needs.module("torch")
    assert judged(TORCH.replace("return self.W_o(out)", "return self.W_o(out), weights.mean(1)")).ok


HEADS = """
import torch
from torch import nn


class Head(nn.Module):
    def __init__(self, n_embd, head_size):
        super().__init__()
        self.key = nn.Linear(n_embd, head_size, bias=False)
        self.query = nn.Linear(n_embd, head_size, bias=False)
        self.value = nn.Linear(n_embd, head_size, bias=False)
        self.register_buffer("tril", torch.tril(torch.ones(64, 64)))

    def forward(self, x):
        B, T, C = x.shape
        k, q = self.key(x), self.query(x)
        wei = q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5
        wei = wei.masked_fill(self.tril[:T, :T] == 0, float("-inf"))
        return wei.softmax(-1) @ self.value(x)


class MultiHeadAttention(nn.Module):
    def __init__(self, n_embd, num_heads):
        super().__init__()
        self.heads = nn.ModuleList([Head(n_embd, n_embd // num_heads) for _ in range(num_heads)])
        self.proj = nn.Linear(n_embd, n_embd)

    def forward(self, x):
        out = torch.cat([h(x) for h in self.heads], dim=-1)
        return self.proj(out)
"""


@pytest.mark.parametrize(
    ("id", "old", "new"),
    [
        ("scale_num_hiddens", "k.shape[-1] ** -0.5", "C ** -0.5"),
        ("swapped_projections", "@ self.value(x)", "@ k"),
        ("first_head", "h(x) for h", "self.heads[0](x) for h"),
    ],
)
def test_the_line_of_a_head_in_a_list(judged, id, old, new):
    """No array of such a class has all heads, as the book's have."""
    needs.module("torch")
    number = HEADS[: HEADS.index(old)].count("\n") + 1
    answer = judged(HEADS.replace(old, new), "MultiHeadAttention").judged[0].answer
    assert answer.mistakes == [id] and answer.lines[0].number == number, answer


JOINT = """
import math
import torch
from torch import nn


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_attn = nn.Linear(config.d_model, 3 * config.d_model)
        self.c_proj = nn.Linear(config.d_model, config.d_model)
        self.num_heads = config.num_heads
        self.register_buffer("bias", torch.tril(torch.ones(config.max_len, config.max_len)))

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (y.view(B, T, self.num_heads, -1).transpose(1, 2) for y in (q, k, v))
        att = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
        att = att.masked_fill(self.bias[:T, :T] == 0, float("-inf")).softmax(-1)
        return self.c_proj((att @ v).transpose(1, 2).reshape(B, T, C))
"""


@pytest.mark.parametrize("order", ["k, v, q", "v, q, k"])
def test_the_order_of_a_joint_projection(judged, order):
    needs.module("torch")
    answer = judged(JOINT.replace("q, k, v = self", f"{order} = self")).judged[0].answer
    assert answer.mistakes == ["swapped_projections"] and answer.lines[0].text.startswith(order), answer


def test_layers_of_no_features_that_a_class_is_tried_with_warn_nobody(judged):
    needs.module("torch")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert judged(JOINT.replace("q.size(-1))", "q.size(-1) + 1)")).judged[0].answer.ok is False
    assert not seen


def test_names_in_chinese(judged):
    """Of a constructor's arguments, of weights, and of what a call takes."""
    needs.module("torch")
    text = TORCH.replace("masked_fill", "where_hidden")
    theirs = "隐藏维度 头数 查询投影 键投影 值投影 输出层 查询 键 值 掩码".split()
    for ours, other in zip("num_hiddens num_heads W_q W_k W_v W_o queries keys values mask".split(), theirs):
        text = text.replace(ours, other)
    text = text.replace("where_hidden", "masked_fill")
    assert judged(text).ok
    wrong = judged(text.replace("math.sqrt(q.shape[-1])", "q.shape[-1]"))
    assert wrong.judged[0].answer.mistakes == ["scale_d"]


def test_an_empty_array_that_is_written_over_is_no_slip(judged):
    text = """
import numpy as np


def causal_attention(q, k, v):
    out = np.empty_like(v)
    for i in range(q.shape[1]):
        seen = i + 1
        scores = np.einsum("bd,bsd->bs", q[:, i], k[:, :seen]) / np.sqrt(q.shape[-1])
        e = np.exp(scores - scores.max(1, keepdims=True))
        out[:, i] = np.einsum("bs,bsd->bd", e / e.sum(1, keepdims=True), v[:, :seen])
    return out
"""
    answer = judged(text.replace("i + 1", "q.shape[1]")).judged[0].answer
    assert answer.mistakes == ["sees_future"] and answer.lines[0].number > 7, answer
