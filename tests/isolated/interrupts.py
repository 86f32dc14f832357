"""Long calls and Ctrl-C: run by tests/system/test_interrupts.py in a process of its own.

    python interrupts.py numpy|torch THREADS

Each call would take seconds.  A thread sends SIGINT when it is under way; then KeyboardInterrupt has to come before the
calling thread has worked for LATENCY more, which is its CPU time: others may keep the machine busy.  A broken promise
shows as a call that finishes.
"""

import os
import signal
import sys
import threading
import time

import numpy as np

import mha_c
from mha_c import functional as F

LATENCY = 0.2
MAIN = time.pthread_getcpuclockid(threading.main_thread().ident)


def nothing():
    pass


def numpy_calls():
    """{name: (what comes before, the call)}; all run for seconds."""
    q, x = np.ones((1, 1, 60000, 64), np.float32), np.ones((1, 30000, 64), np.float32)
    few, part = q[:, :, :6000], x[:, :16000]
    bias = np.zeros((6000, 6000), np.float32)
    layer = mha_c.MultiHeadAttention(64, 2, 0.1, rng=0)
    trained = mha_c.MultiHeadAttention(64, 2, 0.1, rng=0)
    many = np.ones((400, 400, 64), np.float32)  # a batch in slices
    table = np.zeros((8, 129), np.float32)
    heads = np.ones((2000, 8, 40, 64), np.float32)  # many short walks

    def again(function, *arguments, **options):
        while True:
            function(*arguments, **options)

    return {
        "one head": (nothing, lambda: F.dot_product_attention(q, q, q)),
        "one head, causal": (nothing, lambda: F.dot_product_attention(q, q, q, causal=True)),
        "additive": (nothing, lambda: F.additive_attention(x, x, x, np.ones(64, np.float32))),
        "weights": (nothing, lambda: again(F.dot_product_attention, few, few, few, return_weights=True)),
        "backward": (nothing, lambda: F.dot_product_attention_backward(q, q, q, q)),
        "bias": (nothing, lambda: again(F.dot_product_attention_backward, few, few, few, few, bias=bias)),
        "layer": (nothing, lambda: layer(x, x, x)),
        "layer backward": (lambda: trained(part, part, part, training=True), lambda: trained.backward(part)),
        "relative bias": (
            nothing,
            lambda: again(F.dot_product_attention_backward, heads, heads, heads, heads, relative_bias=table),
        ),
        "slices": (nothing, lambda: again(layer, many, many, many)),
    }


def torch_calls():
    import torch

    import mha_c.torch as mha_torch

    q = torch.ones(1, 1, 40000, 64, requires_grad=True)
    x = torch.ones(1, 30000, 64)
    module = mha_torch.MultiHeadAttention(64, 2, 0.0)
    small = torch.ones(1, 1, 12000, 64, requires_grad=True)
    outs = []

    def forward():
        outs[:] = [mha_torch.functional.dot_product_attention(small, small, small)]

    def backward():
        for _ in range(1000):
            outs[0].sum().backward(retain_graph=True)

    return {
        "functional": (nothing, lambda: mha_torch.functional.dot_product_attention(q, q, q)),
        "module": (nothing, lambda: module(x, x, x)),
        "backward": (forward, backward),
    }


def interrupted(call):
    """Seconds of CPU that the main thread took from the signal to the exception; None if there was none."""
    sent = []

    def send():
        started = time.clock_gettime(MAIN)
        while time.clock_gettime(MAIN) < started + 0.05:
            time.sleep(0.005)
        sent.append(time.clock_gettime(MAIN))
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=send)
    try:
        thread.start()
        call()
    except KeyboardInterrupt:
        latency = time.clock_gettime(MAIN) - sent[0]
        thread.join()
        return latency
    return None


def main():
    signal.signal(signal.SIGINT, signal.default_int_handler)  # who runs us in the background may have it ignored
    mha_c.set_num_threads(int(sys.argv[2]))
    small = np.random.default_rng(0).standard_normal((2, 3, 50, 16), dtype=np.float32)
    right = F.dot_product_attention(small, small, small).tobytes()
    elsewhere = []  # calls of another thread, which go on

    def work():
        while not elsewhere or elsewhere[-1] != "stop":
            assert F.dot_product_attention(small, small, small).tobytes() == right
            time.sleep(0.001)  # a core of its own for all this time is not what is asked

    other = threading.Thread(target=work)
    other.start()
    try:
        for name, (prepare, call) in (torch_calls() if sys.argv[1] == "torch" else numpy_calls()).items():
            for _ in range(3):  # what the system needs to find memory is the thread's time, too: late is who always is
                prepare()
                latency = interrupted(call)
                if latency is None or latency < LATENCY:
                    break
            print(name, "finished" if latency is None else "in time" if latency < LATENCY else f"late: {latency:.3f} s")
            assert F.dot_product_attention(small, small, small).tobytes() == right
    finally:
        elsewhere.append("stop")
        other.join()


if __name__ == "__main__":
    main()
