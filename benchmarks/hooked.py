"""A layer with a forward hook on one of its parts, beside d2l's own with the same hook: its share of d2l's time.

    python benchmarks/hooked.py [--seconds 1.5] [--parts W_q W_k W_v W_o attention attention.dropout]

MultiHeadAttention with M1 of cases.py and with a batch of 64; evaluation and training, with lengths and without, one
thread.  Both take turns; the share is that of minima, beside it that of medians.  On one projection it is to be 1 or
less, on the dropout 1.3.
"""

import argparse
import statistics
import sys
from pathlib import Path

import torch

import mha_c
import mha_c.torch as mt
from bench import measure
from cases import draw, lengths
from machine import describe
from own_classes import evaluation, training

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
import real_d2l

CASES = {"M1": (2, 4, 6, 100, 5), "M64": (64, 9, 9, 256, 4)}  # batch, queries, keys, num_hiddens, num_heads
PARTS = "W_q", "W_k", "W_v", "W_o", "attention", "attention.dropout"


def hooked(layer, part, inputs):
    layer(*inputs)  # sizes of lazy projections
    layer.get_submodule(part).register_forward_hook(lambda module, inputs, output: None)
    return layer


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1.5, help="time for each line")
    parser.add_argument("--parts", nargs="*", default=PARTS)
    arguments, d2l = parser.parse_args(), real_d2l.load("1.0.3")
    torch.set_num_threads(1)
    print(describe(torch, mha_c, 1))
    print(f"{'':<46}{'d2l':>9}{'mha_c':>9}   us{'share':>8}{'median':>8}")
    for part in arguments.parts:
        most = 1.0 if part.startswith("W_") else 1.3
        for name, (batch, queries, keys, hiddens, heads) in CASES.items():
            x, y = (torch.from_numpy(draw(batch, n, hiddens).copy()) for n in (queries, keys))
            for lens in torch.as_tensor(lengths("random", batch, queries, keys)), None:
                for what in evaluation, training:
                    layers = {"d2l": d2l.MultiHeadAttention(hiddens, heads, 0.1)}
                    layers["mha_c"] = mt.MultiHeadAttention(hiddens, heads, 0.1)
                    calls = {
                        kind: what(hooked(x_, part, (x, y, y, lens)), (x, y, y, lens)) for kind, x_ in layers.items()
                    }
                    times = measure(calls, arguments.seconds)[0]
                    share, median = (f(times["mha_c"]) / f(times["d2l"]) for f in (min, statistics.median))
                    miss = "" if share <= most else " MISS"
                    line = f"{part:<18}{name:<5}{what.__name__:<11}{'lengths' if lens is not None else 'none':<12}"
                    print(f"{line}{min(times['d2l']) / 1e3:>9.1f}{min(times['mha_c']) / 1e3:>9.1f}     {share:>8.2f}"
                          f"{median:>8.2f}{miss}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
