"""What may not take longer than something else: hidden keys than seen ones, projections' gradients than torch.mm's.

    python benchmarks/beside.py [--seconds 1.5]
    python benchmarks/beside.py --own-threads [FOLDER ...] [--seconds 1.5]

Each pair takes turns; the ratio of our time to the other's is that of minima, beside it that of medians.  One thread.

--own-threads: calls on two threads of our own, alone and in turn with two of NumPy or of torch, which want the same
cores; the medians of our call and of what the other computes between, in us.  FOLDERs hold other builds of the
package, with another SPIN_NS in csrc/runtime/threads.c, say: a process for each, which take turns.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from functools import partial
from time import perf_counter_ns

import numpy as np
import torch

import mha_c
from bench import measure
from cases import draw
from mha_c.functional import dot_product_attention


def attention(shape, causal):
    q, k, v = (array.copy() for array in draw(3, *shape))
    return lambda: dot_product_attention(q, k, v, causal=causal)


def gradients(rows, in_features, out_features):
    """Gradients of x and W of y = x W^T, ours and torch's."""
    x, grad_y = draw(rows, in_features), draw(rows, out_features)
    weight = draw(out_features, in_features)
    tx, tg, tw = map(torch.from_numpy, (x, grad_y, weight))

    def theirs():
        return torch.mm(tg, tw), torch.mm(tg.T, tx)

    def ours():
        return mha_c._core.linear_backward(grad_y, x, weight, False)[:2]

    for mine, other in zip(ours(), theirs()):
        np.testing.assert_allclose(mine, other, atol=1e-3, rtol=1e-3)
    return {"mha_c": ours, "beside": theirs}


def causal_beside_full(*shape):
    contenders = {"mha_c": attention(shape, True), "beside": attention(shape, False)}
    return f"{'x'.join(map(str, shape))}, causal / full", contenders


def show(what, contenders, seconds, most):
    """One line; our share of the other's time is to be `most` or less."""
    times = measure(contenders, seconds)[0]
    ratio, median = (f(times["mha_c"]) / f(times["beside"]) for f in (min, statistics.median))
    miss = "" if ratio <= most else " MISS"
    print(
        f"{what:<44}{min(times['mha_c']) / 1e3:>10.1f} us{ratio:>8.2f}{median:>8.2f}   <= {most:.2f}{miss}", flush=True
    )


# --- Threads of our own beside those of others --------------------------------------------------------------

TURNS = 10  # of each build
LAYERS = {"small": (64, 10, 32), "large": (128, 9, 256)}  # batch, tokens, features


def numpy_product():
    a, b = draw(512, 512), draw(512, 512)
    return partial(np.matmul, a, b, out=np.empty((512, 512), np.float32))


def torch_feed_forward():
    part = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256))
    x = torch.from_numpy(draw(128, 9, 256))
    return partial(torch.no_grad()(part), x)


def layer_of(size):
    x = draw(*LAYERS[size])
    layer = mha_c.MultiHeadAttention(x.shape[2], 4, 0.0, rng=0)
    return partial(layer, x, x, x)


def scenes():
    """{name: (our call, what the other computes before each, or None)}"""
    numpys, torchs = numpy_product(), torch_feed_forward()
    found = {f"{size}, alone": (layer_of(size), None) for size in LAYERS}
    found.update({f"{size}, NumPy between": (layer_of(size), numpys) for size in LAYERS})
    found.update({f"{size}, torch between": (layer_of(size), torchs) for size in LAYERS})
    return found


def timed(ours, other, seconds):
    """[(nanoseconds of our call, of the other's)]"""
    times, end = [], perf_counter_ns() + seconds * 1e9
    while perf_counter_ns() < end:
        start = perf_counter_ns()
        if other:
            other()
        between = perf_counter_ns()
        ours()
        times.append((perf_counter_ns() - between, between - start))
    return times


def answer():
    """In a build's own process: reads a scene and a time, writes medians, until there is no more."""
    torch.set_num_threads(2)
    mha_c.set_num_threads(2)
    found = scenes()
    for line in sys.stdin:
        name, seconds = json.loads(line)
        timed(*found[name], 0.02)
        print(json.dumps([statistics.median(side) for side in zip(*timed(*found[name], seconds))]), flush=True)


def show_own_threads(folders, seconds):
    processes = {}
    for folder in folders or [None]:
        path = {} if folder is None else {"PYTHONPATH": os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])}
        processes[folder or "ours, other, us"] = subprocess.Popen(
            [sys.executable, __file__, "--answer"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "MHA_C_THREADS_OF": "own", **path},
        )  # fmt: skip
    print(f"{'':<24}" + "".join(f"{os.path.basename(name):>20}" for name in processes))
    for scene in scenes():
        found = {name: [] for name in processes}
        for _ in range(TURNS):
            for name, process in processes.items():
                print(json.dumps((scene, seconds / TURNS)), file=process.stdin, flush=True)
                found[name].append(json.loads(process.stdout.readline()))
        shown = [[statistics.median(side) / 1e3 for side in zip(*each)] for each in found.values()]
        print(f"{scene:<24}" + "".join(f"{ours:>11.1f}{other:>9.1f}" for ours, other in shown), flush=True)
    for process in processes.values():
        process.communicate()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1.5, help="time for each pair, or for each figure of a build")
    parser.add_argument("--own-threads", nargs="*", metavar="FOLDER", help="instead: two threads beside two of others")
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    seconds = options.seconds
    if options.answer:
        return answer()
    if options.own_threads is not None:
        return show_own_threads(options.own_threads, seconds)
    torch.set_num_threads(1)
    mha_c.set_num_threads(1)
    print(f"{'':<44}{'ours':>13}{'ratio':>8}{'median':>8}   aimed at")
    for shape in ((64, 4, 10, 8), (64, 8, 37, 64), (1, 12, 128, 64)):
        show(*causal_beside_full(*shape), seconds, 1.2)
    lengths = {"mha_c": attention((1, 12, 127, 64), False), "beside": attention((1, 12, 128, 64), False)}
    show("1x12x127x64 / 1x12x128x64", lengths, seconds, 1.05)
    for shape in ((592, 512, 512), (512, 768, 768), (1152, 256, 256), (4096, 128, 128)):
        show(f"gradients of {'x'.join(map(str, shape))} / torch.mm", gradients(*shape), seconds, 1 / 0.95)


if __name__ == "__main__":
    main()
