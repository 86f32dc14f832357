"""What a call of ours costs on a processor that is not at hand: instructions, and bytes that its caches do not hold.

    python benchmarks/counts.py [--beside FOLDER] [--filter M1 S512]        # apt-get install valgrind

Valgrind counts one warm call of each case, the same in every run, with the caches of Zen 2 and 3 in its model: 32 KiB,
8 ways, and 512 KiB behind them.  It knows no AVX-512: what is counted is AVX2.  Its caches fetch nothing ahead.
With --beside another built tree of the project is counted too: below `before` is ours as a share of its count.
Evaluation as in cases.py; training (t) is the NumPy layers' forward and backward, with the kernels of mha_c.torch.
"""

import argparse
import ctypes
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
CLIENT = """
#include <valgrind/callgrind.h>
void begin(void) { CALLGRIND_START_INSTRUMENTATION; }
void warm(void) { CALLGRIND_ZERO_STATS; }
void end(const char *name) { CALLGRIND_DUMP_STATS_AT(name); CALLGRIND_STOP_INSTRUMENTATION; }
"""
CACHES = "--cache-sim=yes --I1=32768,8,64 --D1=32768,8,64 --LL=524288,8,64"
LINE = 64
MOST_WORK = 1.3e9  # multiply-adds twice; what has more is counted if asked for by its name: others show the same
COLD_WORK = 5e7  # from here on a call's first misses are few beside the others


def calls_of(case, mha_c, draw):
    """The call of a case of cases.py, on ours alone; and a step of a layer's training, or None."""
    if not hasattr(case, "num_hiddens"):
        q = draw(case.batch, case.heads, case.queries, case.head_dim)
        k, v = draw(2, case.batch, case.heads, case.keys, case.head_dim)
        return lambda: mha_c.functional.dot_product_attention(q, k, v, causal=case.causal), None
    lens = None if hasattr(case, "num_kv_heads") else case.valid_lens()
    if hasattr(case, "num_kv_heads"):
        layer = case.layer(mha_c)
        q = k = v = draw(case.batch, case.queries, case.num_hiddens)
    elif hasattr(case, "num_heads"):
        layer = mha_c.MultiHeadAttention(case.num_hiddens, case.num_heads, 0.1, rng=0)
        q = draw(case.batch, case.queries, case.num_hiddens)
        k = v = q if case.self_attention else draw(case.batch, case.keys, case.num_hiddens)
    else:
        layer = mha_c.AdditiveAttention(case.num_hiddens, 0.1, rng=0)
        q = draw(case.batch, case.queries, case.query_size)
        k = draw(case.keys, case.batch, case.key_size).transpose(1, 0, 2)
        v = k if case.value_size is None else draw(case.batch, case.keys, case.value_size)
    grad = draw(case.batch, case.queries, case.num_hiddens if hasattr(case, "num_heads") else v.shape[2])

    def training():
        layer(q, k, v, lens, training=True)
        layer.zero_grad()
        layer.backward(grad)

    return lambda: layer(q, k, v, lens), training


def child(client, names):
    """Under valgrind: each call of each case once, with warm caches."""
    import mha_c
    import mha_c.functional
    from cases import CASES, draw

    counter = ctypes.CDLL(client)
    mha_c.set_num_threads(1)
    for case in CASES:
        if case.name not in names if names else case.flops() > MOST_WORK:
            continue
        evaluate, train = calls_of(case, mha_c, draw)
        for name, run, work in ((case.name, evaluate, case.flops()), (f"{case.name} t", train, 3 * case.flops())):
            if run is None or (not names and work > MOST_WORK):
                continue
            run()
            counter.begin()
            if work < COLD_WORK:
                run()
            counter.warm()
            run()
            counter.end(name.encode())


def count(tree, names):
    """{case: (instructions, bytes from the second cache, bytes from behind it)}"""
    with tempfile.TemporaryDirectory() as folder:
        source, client, out = Path(folder, "client.c"), Path(folder, "client.so"), Path(folder, "counts")
        source.write_text(CLIENT)
        subprocess.run([os.environ.get("CC", "cc"), "-shared", "-fPIC", source, "-o", client], check=True)
        command = ["valgrind", "-q", "--tool=callgrind", "--instr-atstart=no", *CACHES.split()]
        command += [f"--callgrind-out-file={out}", sys.executable, __file__, "--child", client, "--filter", *names]
        world = {**os.environ, "PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1"}
        if any((tree / "mha_c").glob("_core*.so")):  # built in place; else the installed one
            world["PYTHONPATH"] = str(tree)
        subprocess.run(command, check=True, env=world, cwd=folder)
        found = {}
        for path in sorted(Path(folder).glob("counts.*")):
            text = path.read_text()
            name = re.search(r"Trigger: Client Request: (.*)", text)
            if name is not None:
                events = re.search(r"^events: (.*)", text, re.M).group(1).split()
                totals = re.search(r"^(?:summary|totals): (.*)", text, re.M).group(1).split()
                n = {event: int(total) for event, total in zip(events, totals)}
                near, far = n["D1mr"] + n["D1mw"], n["DLmr"] + n["DLmw"]
                found[name.group(1)] = n["Ir"], LINE * near, LINE * far
    return found


def show(ours, theirs):
    columns = ("instructions", "bytes from the 2nd cache", "from behind it")
    before = " before |" if theirs else ""
    print("| case |" + "".join(f" {column} |{before}" for column in columns))
    print("|---|" + "---:|" * (len(columns) * (1 + bool(theirs))))
    for name, figures in ours.items():
        cells = [f"{figure / 1e3:.0f}k" for figure in figures]
        if theirs:
            other = theirs.get(name, (0, 0, 0))
            cells = [f"{c} | {n / o:.2f}" if o else f"{c} | -" for c, n, o in zip(cells, figures, other)]
        print(f"| {name} | {' | '.join(cells)} |")
    for training in (False, True):
        ratios = [ours[n][0] / theirs[n][0] for n in ours if n in theirs and n.endswith(" t") == training]
        if ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            print(f"\n{'training' if training else 'evaluation'}: instructions, geometric mean {mean:.3f} of before, "
                  f"most {max(ratios):.3f}, in {len(ratios)} cases")  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--filter", nargs="*", default=[], help="names of cases")
    parser.add_argument("--beside", type=Path, help="another tree of the project, built in place")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return child(options.child, options.filter)
    if shutil.which("valgrind") is None:
        sys.exit("valgrind is missing: apt-get install valgrind")
    ours = count(HERE.parent, options.filter)
    show(ours, count(options.beside.resolve(), options.filter) if options.beside else {})


if __name__ == "__main__":
    main()
