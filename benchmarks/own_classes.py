"""A reader's own classes, converted: their share of the gain that our layers have over the lines of the book.

    python benchmarks/own_classes.py [--seconds 1.5]

M1, M5 and A2 of cases.py, typed by a reader (tests/support/zoo_modules.py); evaluation and training, one thread.  The
three take turns; minima count.  gain = own lines / ours; share = gain of the converted class / gain of ours.
"""

import argparse
import copy
import sys
from pathlib import Path

import torch

import mha_c
import mha_c.torch as mt
from bench import measure
from cases import draw, lengths
from machine import describe

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
import zoo_modules

CASES = {  # name: (batch, queries, keys, num_hiddens, num_heads, lengths)
    "M1": (2, 4, 6, 100, 5, [3, 2]),
    "M5": (64, 10, 10, 32, 4, "random"),
    "A2": (64, 1, 10, 32, 0, "random"),
}
LEAST = 0.8


def modules(name):
    """(the reader's module, the same converted, our layer) with the same weights, and inputs."""
    batch, queries, keys, hiddens, heads, lens = CASES[name]
    if heads:
        own = zoo_modules.MultiHeadAttention(hiddens, hiddens, hiddens, hiddens, heads, 0.1)
        ours = mt.MultiHeadAttention(hiddens, hiddens, hiddens, hiddens, heads, 0.1)
    else:
        own = zoo_modules.AdditiveAttention(hiddens, hiddens, hiddens, 0.1)
        ours = mt.AdditiveAttention(hiddens, hiddens, hiddens, 0.1)
    ours.load_state_dict(own.state_dict())
    x, y = (torch.from_numpy(draw(batch, n, hiddens).copy()) for n in (queries, keys))
    y = x if name == "M5" else y
    return {"own": own, "converted": mt.convert(copy.deepcopy(own)), "mha_c": ours}, (
        x, y, y, torch.as_tensor(lengths(lens, batch, queries, keys)),
    )  # fmt: skip


def evaluation(module, inputs):
    module.eval()

    def call():
        with torch.no_grad():
            return module(*inputs)

    return call


def training(module, inputs):
    module.train()
    parameters = [*module.parameters()]

    def call():
        module(*inputs).sum().backward()
        for x in parameters:
            x.grad = None

    return call


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1.5, help="time for each case")
    seconds = parser.parse_args().seconds
    torch.set_num_threads(1)
    print(describe(torch, mha_c, 1))
    print(f"{'':<16}{'own lines':>10}{'converted':>11}{'mha_c':>8}   us{'gain':>8}{'share':>8}")
    for name in CASES:
        for what in (evaluation, training):
            found, inputs = modules(name)
            times = measure({each: what(module, inputs) for each, module in found.items()}, seconds)[0]
            own, converted, ours = (min(times[each]) / 1e3 for each in ("own", "converted", "mha_c"))
            share = ours / converted
            miss = "" if share >= LEAST else " MISS"
            print(f"{name} {what.__name__:<12}{own:>11.1f}{converted:>11.1f}{ours:>8.1f}     {own / ours:>7.2f}"
                  f"{share:>8.2f}{miss}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
