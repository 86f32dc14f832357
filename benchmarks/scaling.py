"""How ours grows: with a second thread, with the number of keys, in memory; what one call costs at least, and
what scores do that lie far apart.

    python benchmarks/scaling.py

Each line names what is aimed at.  Nothing else is needed than mha_c and NumPy.
"""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np

import mha_c
from bench import measure
from cases import CASES
from mha_c.functional import dot_product_attention, dot_product_attention_backward

MEMORY = """
import resource, sys
import numpy as np
from mha_c.functional import dot_product_attention
q, k, v = np.random.default_rng(0).standard_normal((3, 1, 8, 16384, 64), dtype=np.float32)
dot_product_attention(q[:, :, :256], k[:, :, :256], v[:, :, :256])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
out = dot_product_attention(q, k, v)
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print((after - before) * (1 if sys.platform == "darwin" else 1024) / 1e6, out.nbytes / 1e6)
"""


def line(what, figure, target, met):
    print(f"{what:<58}{figure:>16}   {target:<14}{'' if met else 'MISS'}", flush=True)


def minima(contenders, seconds):
    return {name: min(times) for name, times in measure(contenders, seconds)[0].items()}


def with_threads(n, call):
    def run():
        mha_c.set_num_threads(n)
        return call()

    return run


def ours_of(case):
    """The NumPy side of a multi-head case, with weights of its own."""
    layer = mha_c.MultiHeadAttention(case.num_hiddens, case.num_heads, 0.1, rng=0)
    x = np.random.default_rng(1).standard_normal((case.batch, case.queries, case.num_hiddens), dtype=np.float32)
    lens = case.valid_lens()
    return lambda: layer(x, x, x, lens)


def attention(heads, n):
    q, k, v = np.random.default_rng(2).standard_normal((3, 1, heads, n, 64), dtype=np.float32)
    return lambda: dot_product_attention(q, k, v)


def threads():
    if len(os.sched_getaffinity(0)) < 2:
        print("one CPU only: two threads were not measured")
        return
    m12 = next(case for case in CASES if case.name == "M12")
    for what, call in (("M12", ours_of(m12)), ("attention 1,12,2048,64", attention(12, 2048))):
        times = minima({n: with_threads(n, call) for n in (1, 2)}, 3)
        ratio = times[1] / times[2]
        line(f"{what}: one thread / two threads", f"{ratio:.2f}", ">= 1.7", ratio >= 1.7)
    mha_c.set_num_threads(1)


def keys():
    times = minima({n: attention(8, n) for n in (4096, 8192)}, 5)
    ratio = times[8192] / times[4096]
    line("attention 1,8,N,64: N = 8192 / N = 4096", f"{ratio:.2f}", "<= 4.2", ratio <= 4.2)  # 4, and 5 % of noise


def sharp_scores():
    """Weights near the smallest numbers, times values or gradients of this size, beside those of ordinary scores."""
    q, k, v, grad = np.random.default_rng(3).standard_normal((4, 1, 12, 128, 64), dtype=np.float32)
    for size in 1, 1e-3:
        values, gradient = np.float32(size) * v, np.float32(size) * grad
        for what, call in (
            ("attention 1,12,128,64", lambda q, v=values: dot_product_attention(q, k, v)),
            ("its gradients", lambda q, g=gradient: dot_product_attention_backward(g, q, k, v)),
        ):
            times = minima({"ordinary": partial(call, q), "sharp": partial(call, 30 * q)}, 2)
            ratio = times["sharp"] / times["ordinary"]
            line(f"{what}, {size:g} in size: scores of std 30 / 1", f"{ratio:.2f}", "<= 1.5", ratio <= 1.5)


def memory():
    folder = Path(mha_c.__file__).parents[1]  # so that the child imports this very package
    child = [sys.executable, "-c", MEMORY]
    done = subprocess.run(child, cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
    grown, result = map(float, done.stdout.split())
    extra = max(0.0, grown - result)
    line("attention 1,8,16384,64: memory beside the result", f"{extra:.1f} MB", "< 100 MB", extra < 100)


def overhead():
    """A layer so small that only the way in and out counts."""
    x = np.ones((1, 1, 4), np.float32)
    layer, dot = mha_c.MultiHeadAttention(4, 1, 0.0, rng=0), mha_c.DotProductAttention(0.0)
    calls = {
        "DotProductAttention": lambda: dot(x, x, x),
        "MultiHeadAttention": lambda: layer(x, x, x, None),
        "functional.dot_product_attention": lambda: dot_product_attention(x, x, x),
    }
    for name, time in minima(calls, 1).items():
        line(f"{name} of one query, one key, 4 features", f"{time / 1e3:.2f} us", "<= 1.5 us", time <= 1500)


if __name__ == "__main__":
    mha_c.show_config()
    mha_c.set_num_threads(1)
    overhead()
    keys()
    sharp_scores()
    memory()
    threads()
