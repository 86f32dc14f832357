"""Signals that come while a long call asks whether it is in the main thread (csrc/python/call.c).

Those that come later, during a call: tests/system/test_interrupts.py.
"""

import threading
import time

import numpy as np
import pytest

import mha_c
from mha_c import functional as F


@pytest.mark.parametrize("n", [4000, 60000])
@pytest.mark.parametrize("raised", [KeyboardInterrupt, TimeoutError])
def test_a_signal_while_the_call_asks_for_its_thread(raised, n, monkeypatch):
    """A handler that runs in the Python of that question, and raises there: the call ends, at once if it is long."""
    q, main_thread = np.ones((1, 1, n, 64), np.float32), threading.main_thread

    def interrupted():
        monkeypatch.setattr(threading, "main_thread", main_thread)
        raise raised

    monkeypatch.setattr(threading, "main_thread", interrupted)
    started = time.thread_time()
    with mha_c.set_num_threads(1), pytest.raises(raised):
        F.dot_product_attention(q, q, q)
    assert time.thread_time() - started < 1  # 60000 queries and keys take at least 5, on one thread at its peak
    assert np.all(F.dot_product_attention(q[:, :, :9], q, q) == 1)


def test_a_call_when_threading_is_gone(monkeypatch):
    """At Python's end modules are taken apart: then nobody asks for signals, and the call goes on."""
    q = np.ones((1, 1, 2000, 64), np.float32)
    monkeypatch.setattr(threading, "main_thread", None)
    assert np.all(F.dot_product_attention(q, q, q) == 1)
