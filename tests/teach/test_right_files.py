"""check: right code as files of real courses have it: weights in dicts, steps before the batch, layers upon a base."""

import pytest

import needs


def answer(report):
    """The answer on the one name that was judged."""
    (each,) = report.judged
    return each.answer


DICTS = """
import numpy as np
def linear(x, w, b):
    return x @ w + b
def mha(x, c_attn, c_proj, n_head):
    qkv = np.split({joint}, 3, axis=-1)
    q, k, v = (np.stack(np.split(each, n_head, axis=-1)) for each in qkv)
    scores = q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1]) + (1 - np.tri(len(x))) * -1e10
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    heads = weights / weights.sum(-1, keepdims=True) @ v
    return linear(np.concatenate(heads, axis=-1), **c_proj)
"""


@pytest.mark.parametrize("joint", ["linear(x, **c_attn)", 'x @ c_attn["w"] + c_attn["b"]'])
def test_weights_in_dicts(judged, joint):
    """As picoGPT and its followers keep them."""
    text = DICTS.format(joint=joint)
    assert answer(judged(text)).ok
    wrong = answer(judged(text.replace("np.sqrt(q.shape[-1])", "q.shape[-1]")))
    assert wrong.mistakes == ["scale_d"] and wrong.lines[0].text.startswith("scores ="), wrong


def test_a_weight_that_is_no_array_is_not_judged(judged):
    """Its error is one of what check gives, not of the code."""
    found = answer(judged(DICTS.format(joint="x @ c_attn.weight")))
    assert (found.ok, found.mistakes) == (None, ["untried"]) and "c_attn" in str(found), found


TIME_FIRST = """
class MultiHeadAttention(Base):
    def forward(self, query, key, value, mask=None):
        n, m, C = query.shape
        def heads(x): return x.view(len(x), m, self.h, C // self.h)
        q, k, v = heads(self.q(query)), heads(self.k(key)), heads(self.v(value))
        scores = torch.einsum("ibhd,jbhd->ijbh", q, k) / (C // self.h) ** 0.5
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(-1) == 0, -1e9)
        x = torch.einsum("ijbh,jbhd->ibhd", scores.softmax(1), v)
        return self.o(x.reshape(n, m, C))
"""
BASE = """
import torch
from torch import nn
class Base(nn.Module):
    {says}
    def __init__(self, d_model, heads, verbose: bool):
        super().__init__()
        self.h = heads
        self.q, self.k, self.v, self.o = (nn.Linear(d_model, d_model) for _ in range(4))
"""


def test_steps_before_the_batch_in_masks_and_in_what_a_base_class_says(judged):
    """(queries, keys, batch), and a flag that the constructor needs."""
    needs.module("torch")
    says = '"""The inputs are [seq_len, batch_size, d_model]."""'
    found = answer(judged(BASE.format(says=says) + TIME_FIRST, "MultiHeadAttention", "multi_head"))
    assert found.ok and "(queries, keys, batch)" in str(found) and "(steps, batch, features)" in str(found), found


ROPE = """
import torch
def apply_rope(x):
    {says}
    d = x.shape[-1]
    angle = torch.arange(x.shape[0])[:, None] * 10000.0 ** -(torch.arange(0, d, 2) / d)
    angle = torch.cat([angle, angle], 1)[:, None, None]
    half = torch.cat([-x[..., d // 2:], x[..., :d // 2]], -1)
    return x * angle.cos() + half * angle.sin()
"""


def test_rotations_of_steps_before_the_batch(judged):
    needs.module("torch")
    found = answer(judged(ROPE.format(says='"""x: [seq_len, batch_size, heads, d]"""')))
    assert found.ok and "(steps, batch, heads, features)" in str(found), found
    silent = answer(judged(ROPE.format(says="")))
    assert silent.mistakes == ["batch_for_steps"] and "(steps, batch" in str(silent), silent
