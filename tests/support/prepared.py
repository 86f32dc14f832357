"""Scripts that run in a process of their own after a layer, inputs and the right answer are prepared."""

import textwrap

import children

# What most scripts below start from: a layer, inputs large enough for several threads, the right answer.
PREPARED = """
import atexit, ctypes, os, resource, signal, sys, threading, time
import numpy as np
import mha_c
from mha_c import functional as F
mha_c.set_num_threads(3)
x = np.random.default_rng(0).standard_normal((2, 96, 64), dtype=np.float32)
layer = mha_c.MultiHeadAttention(64, 4, 0.0, rng=0)
right = layer(x, x, x, [50, 96]).tobytes()

def call():
    return layer(x, x, x, [50, 96]).tobytes() == right

class Busy:  # threads that call on and on; `wait` until each has called once more
    def __init__(self, number):
        self.calls, self.stopped = [0] * number, False
        self.threads = [threading.Thread(target=self.work, args=(i,), daemon=True) for i in range(number)]
        [thread.start() for thread in self.threads]

    def work(self, i):
        while not self.stopped:
            assert call()
            self.calls[i] += 1

    def wait(self):
        before = list(self.calls)
        while any(now == then for now, then in zip(self.calls, before)):
            time.sleep(0.0005)

    def stop(self):
        self.stopped = True
        [thread.join() for thread in self.threads]
"""


def python(code, *arguments, status=0):
    """Runs code after PREPARED; returns what it printed."""
    return run("-c", PREPARED + textwrap.dedent(code), *arguments, status=status)


def run(*command, status=0):
    done = children.python("-X", "faulthandler", *command, status=status)
    return done.stdout + done.stderr
