"""Fixture for test files that run torch on small tensors: import it, and every test there uses one thread.

More threads only wait for each other, on a busy machine for ten times as long as the work takes.
"""

import pytest

import mha_c
import needs

torch = needs.module("torch")


@pytest.fixture(autouse=True)
def one_thread():
    before, ours = torch.get_num_threads(), mha_c.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    mha_c.set_num_threads(ours)
