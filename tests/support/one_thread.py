"""Fixture for test files that run torch on small tensors: import it, and every test there uses one thread.

More threads only wait for each other, on a busy machine for ten times as long as the work takes.
"""

import pytest

import needs

torch = needs.module("torch")


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)  # conftest.py puts it back
