"""Lengths that are allowed, and most often a mistake: a warning in the caller's line, once a process."""

import os

import pytest

import children
import needs

NEGATIVE = """
import warnings
import numpy as np, mha_c
X = np.ones((2, 3, 8), np.float32)
layer = mha_c.MultiHeadAttention(8, 2, 0.0)
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    layer(X, X, X, {lens})
    layer(X, X, X, {lens})
print([str(one.message) for one in seen], {{one.filename for one in seen}})
"""


MASK = """
import warnings
import numpy as np, mha_c
from mha_c import functional
X, mask = np.ones((2, 3, 8), np.float32), np.array({mask})
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    for call in {calls}:
        call(X, X, X, mask)
        call(X, X, X, mask)
print(*[str(one.message) for one in seen], {{one.filename for one in seen}})
"""
MASKS = [
    ("[[1, 1, 0], [1, 0, 0]]", True), ("[[1, 1, 1], [1, 1, 1]]", True), ("[[0, 0, 0], [0, 0, 0]]", False),
    ("[[1, 2, 0], [1, 0, 0]]", False), ("[1, 1]", False),
]  # fmt: skip
CALLS_WITH_MASKS = {
    "layer": "[mha_c.MultiHeadAttention(8, 2, 0.0)]",
    "function": "[functional.dot_product_attention]",
    "masked_softmax": "[lambda x, _, __, mask: mha_c.masked_softmax(x[..., :3], mask)]",
}


@pytest.mark.parametrize("call", CALLS_WITH_MASKS)
@pytest.mark.parametrize("mask, warns", MASKS)
def test_a_mask_in_the_place_of_lengths_warns_once(call, mask, warns):
    done = children.python("-c", MASK.format(mask=mask, calls=CALLS_WITH_MASKS[call]))
    assert ("write valid_lens=mask.sum(-1) (said once) {'<string>'}" in done.stdout) == warns, done.stdout + done.stderr
    assert done.stdout.count("said once") == warns


WAYS = """
import warnings
import torch, mha_c.torch as mt
X = torch.ones(2, 3, 8)
def hooked(layer, part):
    layer.get_submodule(part).register_forward_hook(lambda *_: None)
    return layer
def multi_head():
    return mt.MultiHeadAttention(8, 8, 8, 8, 2, 0.0)
call = {call}
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    call(torch.tensor([[1, 2, 0], [1, 0, 0]]))
    call(torch.zeros(2, 3, dtype=torch.int64))
    print(len(seen))
    call(torch.tensor([[1, 1, 0], [1, 0, 0]]))
    call(torch.ones(2, 3, dtype=torch.int32))
print(*[str(one.message) for one in seen], {{one.filename for one in seen}})
"""
WAYS_WITH_MASKS = {
    "hook on a projection": "lambda mask: hooked(multi_head(), 'W_k')(X, X, X, mask)",
    "hook on the dropout": "lambda mask: hooked(multi_head(), 'attention.dropout')(X, X, X, mask)",
    "additive": "lambda mask: hooked(mt.AdditiveAttention(8, 8, 8, 0.0), 'dropout')(X, X, X, mask)",
    "transform": "lambda mask: torch.func.grad(lambda x: multi_head()(x, X, X, mask).sum())(X)",
    "half": "lambda mask: multi_head().bfloat16()(*[X.bfloat16()] * 3, mask)",
    "masked_softmax": "lambda mask: mt.masked_softmax(X[..., :3], mask)",
    "function": "lambda mask: mt.functional.dot_product_attention(X, X, X, mask)",
    "grouped heads": "lambda mask: mt.GQAAttention(8, 2, 1)(X, X, X, mask)",
    "two ways": "lambda mask: (multi_head()(X, X, X, mask), hooked(multi_head(), 'attention.dropout')(X, X, X, mask))",
}


def of_tensors(mask):
    calls = "[lambda *given: mha_c.torch.DotProductAttention(0.0)(*map(torch.tensor, given))]"
    return "import torch, mha_c.torch" + MASK.format(mask=mask, calls=calls)


def on_way(way):
    return WAYS.format(call=WAYS_WITH_MASKS[way])


@pytest.fixture(scope="module")
def alone():
    """{code: (its exit status, what it printed)} of all that imports torch."""
    if not hasattr(os, "fork"):
        pytest.skip("torch is imported once, by a process that forks")
    return children.each_alone([*(of_tensors(mask) for mask, _ in MASKS), *map(on_way, WAYS_WITH_MASKS)])


@pytest.mark.parametrize("mask, warns", MASKS)
def test_a_mask_of_tensors_in_the_place_of_lengths_warns_once(mask, warns, alone):
    needs.module("torch")
    status, said = alone[of_tensors(mask)]
    assert status == 0, said
    assert ("write valid_lens=mask.sum(-1) (said once) {'<box>'}" in said) == warns, said
    assert said.count("said once") == warns


@pytest.mark.parametrize("way", WAYS_WITH_MASKS)
def test_a_mask_warns_once_whatever_computes_the_call(way, alone):
    needs.module("torch")
    if way == "transform":
        needs.of_torch("torch.func.grad")
    _, said = alone[on_way(way)]
    assert said.startswith("0\n") and said.count("said once") == 1, said
    assert "{'<box>'}" in said


PIECES = """
import warnings
import numpy as np
from mha_c import _summary, functional
_summary.PIECE = 8
X = np.ones((1, 4, 8))
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    functional.weights_summary(X, X, valid_lens=[[1, 0, 3, 4]], causal=True)
    print(len(seen))
    functional.weights_summary(X, X, valid_lens=[[1, 0, 1, 1]])
print(*[str(one.message) for one in seen])
"""


def test_a_piece_of_lengths_is_no_mask_by_mistake():
    """The first two queries of four, which see two keys, have the lengths 1 and 0; the second call has a mask."""
    done = children.python("-c", PIECES)
    assert done.stdout.startswith("0\n") and done.stdout.count("said once") == 1, done.stdout + done.stderr


@pytest.mark.parametrize("lens", ["[-1, 3]", "np.array([-1, 3])", "[0, 9]"])
def test_a_length_below_0_warns_once_in_the_callers_line(lens):
    done = children.python("-c", NEGATIVE.format(lens=lens))
    said = "['valid_lens has a length of -1: lengths below 0 count as 0 (said once)'] {'<string>'}"
    assert done.stdout.strip() == (said if "-1" in lens else "[] set()")
