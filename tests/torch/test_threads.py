"""How many threads torch calls use, and that NumPy layers keep theirs."""

import os

import pytest
import torch

import children
import mha_c
import mha_c.torch as mt
from mha_c import _core

THREADS = """
import os, torch, mha_c, mha_c.torch as mt


def started():
    return len(os.listdir("/proc/self/task"))
mha_c.set_num_threads(3)
torch.set_num_threads(1)
layer, x = mt.MultiHeadAttention(64, 64, 64, 64, 4, 0.5), torch.randn(8, 200, 64)
before = started()
layer(x, x, x).sum().backward()
layer.attention_weights.sum()
layer.eval()(x, x, x)
print(started() - before, mha_c.get_num_threads())
numpy_layer, y = mha_c.MultiHeadAttention(64, 64, 64, 64, 4, 0.5), x.numpy()
numpy_layer(y, y, y)
print(started() - before, mha_c.get_num_threads())
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts the threads that Linux lists")
def test_threads_stay_within_torchs():
    """A torch call starts no more than torch may use, and NumPy layers keep their number."""
    assert children.python("-c", THREADS).stdout.split() == ["0", "3", "2", "3"]


def test_torchs_limit_is_that_of_one_call(monkeypatch):
    """Of one thread, and over with it, also where the call fails; NumPy calls and small ones do not ask."""
    layer, asked = mt.MultiHeadAttention(64, 4, 0.0).eval(), []

    def count(answer):
        asked.append(mha_c.get_num_threads())
        if isinstance(answer, Exception):
            raise answer
        return answer

    x, small = torch.randn(8, 200, 64), torch.randn(1, 2, 64)
    expected, before = layer(x, x, x), mha_c.get_num_threads()
    served = torch.Tensor.__dlpack_c_exchange_api__, torch.Tensor, torch.nn.Parameter, torch.ones(1).is_neg
    try:
        mha_c.set_num_threads(3)
        for answer in (1, 2, 10**12, -1, "three", None, ValueError("no")):
            _core.serve_tensors(*served, lambda answer=answer: count(answer))
            assert torch.equal(layer(x, x, x), expected) and asked.pop() == 3 and mha_c.get_num_threads() == 3
            mha_c.MultiHeadAttention(64, 4, 0.0)(x.numpy(), x.numpy(), x.numpy())
            layer(small, small, small)
            assert not asked
    finally:
        _core.serve_tensors(*served, torch.get_num_threads)
        mha_c.set_num_threads(before)


def test_what_is_said_is_within_torchs_limit_too():
    layer, x = mt.MultiHeadAttention(64, 64, 64, 64, 4, 0.0).eval(), torch.randn(8, 200, 64)
    numpy_layer, y = mha_c.MultiHeadAttention(64, 64, 64, 64, 4, 0.0), x.numpy()
    mha_c.get_num_threads(), torch.get_num_threads()
    mha_c.set_num_threads(3)
    for torchs in (1, 2, 8):
        torch.set_num_threads(torchs)
        share = mha_c.explain(layer, x, x, x).as_dict()["attention"]["share"]
        assert share["most_threads"] == min(torchs, 3) == mha_c.cost(layer, 200, batch=8, measure=False).threads
        assert mha_c.explain(numpy_layer, y, y, y).as_dict()["attention"]["share"]["most_threads"] == 3
    assert mha_c.cost(numpy_layer, 200, measure=False).threads == mha_c.get_num_threads() == 3
