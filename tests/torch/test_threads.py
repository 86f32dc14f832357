"""How many threads torch calls use, and that NumPy layers keep theirs."""

import concurrent.futures
import os
import subprocess
import sys

import pytest

import mha_c
import needs

torch = needs.module("torch")

from mha_c import _core  # noqa: E402
from mha_c.torch import _tensors  # noqa: E402

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
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "3", "2", "3"]


def test_torchs_limit_is_that_of_one_call_of_one_thread():
    def seen():
        return _core.get_num_threads()

    def everywhere():
        with concurrent.futures.ThreadPoolExecutor(1) as other:
            return seen(), other.submit(seen).result()

    before, ours = torch.get_num_threads(), mha_c.get_num_threads()
    try:
        mha_c.set_num_threads(3)
        for allowed, found in ((1, (1, 3)), (2, (2, 3)), (8, (3, 3))):
            torch.set_num_threads(allowed)
            assert _tensors._on_torchs_threads(everywhere)() == found and seen() == 3
        torch.set_num_threads(1)
        with pytest.raises(ZeroDivisionError):
            _tensors._on_torchs_threads(lambda: 1 / 0)()
        assert seen() == 3
    finally:
        torch.set_num_threads(before)
        mha_c.set_num_threads(ours)
