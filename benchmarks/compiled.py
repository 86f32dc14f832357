"""torch.compile: one layer, and a model of eight, eager and compiled, beside d2l's modules.

    python benchmarks/compiled.py [--seconds 4] [--training]

eager, compiled   a layer as it is, and torch.compile(layer, fullgraph=True)
bound             the eager layer and behind it a compiled module with the same parameters that computes next to
                  nothing: what torch takes to call anything compiled, once more than the layer itself.  Where weights
                  fill the caches, a call finds its code and torch's in none of them, and here too.
d2l, d2l compiled the book's module (0.17.6) with the same parameters
a layer of 8      eight such layers, the result of each the input of the next, whole models compiled: an eighth

All share one set of parameters.  Inference is under no_grad; --training is forward and backward, gradients dropped.
`marginal` is what a layer takes where others share its graph: (eight - one) / 7.  One thread, turn by turn
(`bench.py`); microseconds, the smallest.
"""

import argparse
import contextlib

from bench import Libraries, measure
from cases import SEED
from machine import describe
from training import step

SHAPES = ((1, 2, 32, 4), (1, 2, 512, 8), (128, 9, 256, 4))  # batch, queries, num_hiddens, num_heads
N_LAYERS = 8
PROJECTIONS = "W_q", "W_k", "W_v", "W_o"


def chain(torch, layers):
    class Chain(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(layers)

        def forward(self, x):
            for layer in self.layers:
                x = layer(x, x, x, None)
            return x

    return Chain()


def nothing(torch, like):
    """A module with the parameters of `like` that reads a row of each."""

    class Nothing(torch.nn.Module):
        def __init__(self):
            super().__init__()
            for name in PROJECTIONS:
                setattr(self, name, getattr(like, name))

        def forward(self, x):
            return x + self.W_q.weight[0] + self.W_k.weight[0] + self.W_v.weight[0] + self.W_o.weight[0]

    return Nothing()


def models(libs, hiddens, heads, training):
    """{name: (eager module of x, compiled)} of one layer and of eight; the modules of both kinds share parameters."""
    torch, sizes = libs.torch, (hiddens,) * 4
    torch.manual_seed(SEED)
    ours = [libs.mha_c.torch.MultiHeadAttention(*sizes, heads, 0.0) for _ in range(N_LAYERS)]
    theirs = [libs.d2l["d2l 0.17.6"].MultiHeadAttention(*sizes, heads, 0.0) for _ in ours]
    for layer, other in zip(ours, theirs):
        for name in PROJECTIONS:
            setattr(other, name, getattr(layer, name))
    found = {}
    for name, layers in (("ours", ours), ("d2l", theirs)):
        for n_layers in (1, N_LAYERS):
            model = chain(torch, layers[:n_layers]).train(training)
            found[name, n_layers] = model, torch.compile(model, fullgraph=True)
    empty = nothing(torch, ours[0]).train(training)
    found["nothing", 1] = empty, torch.compile(empty, fullgraph=True)
    return found


def contenders(libs, shape, training):
    torch = libs.torch
    batch, queries, hiddens, heads = shape
    found = models(libs, hiddens, heads, training)
    x = torch.randn(batch, queries, hiddens, requires_grad=training)
    grad, runs = torch.randn(batch, queries, hiddens), {}
    for (name, n_layers), (eager, compiled) in found.items():
        for kind, model in (("", eager), (" compiled", compiled)):
            leaves = [x, *eager.parameters()]
            run = step(torch, lambda model=model: model(x), leaves, grad) if training else lambda model=model: model(x)
            runs[f"{name}{kind} {n_layers}"] = run
    for n_layers in (1, N_LAYERS):
        results = [model(x) for name in ("ours", "d2l") for model in found[name, n_layers]]
        for other in results[1:]:
            torch.testing.assert_close(other, results[0], atol=1e-4, rtol=1e-3)
    eager, empty = runs["ours 1"], runs["nothing compiled 1"]

    def bound():
        eager()
        empty()

    names = [f"{name}{kind} {n}" for n in (1, N_LAYERS) for name in ("ours", "d2l") for kind in ("", " compiled")]
    return {"bound": bound, **{name: runs[name] for name in names}}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--training", action="store_true")
    options = parser.parse_args()
    libs = Libraries(1)
    head = describe(libs.torch, libs.mha_c, 1)
    print(f"{head['processor']}, one thread, torch {libs.torch.__version__}; microseconds")
    columns = "eager", "compiled", "bound", "d2l", "d2l compiled"
    print(f"{'B,Q,h,H':>14} {'':14}" + "".join(f"{name:>14}" for name in columns))
    for shape in SHAPES:
        libs.torch._dynamo.reset()  # graphs of other sizes of the same code
        with contextlib.nullcontext() if options.training else libs.torch.no_grad():
            times, _ = measure(contenders(libs, shape, options.training), options.seconds)
        least = {name: min(found) / 1e3 for name, found in times.items()}
        keys = "ours", "ours compiled", "bound", "d2l", "d2l compiled"
        one = [least[key if key == "bound" else f"{key} 1"] for key in keys]
        eight = [None if key == "bound" else least[f"{key} {N_LAYERS}"] for key in keys]
        rows = {
            "one layer": one,
            f"a layer of {N_LAYERS}": [None if t is None else t / N_LAYERS for t in eight],
            "marginal": [None if t is None else (t - t1) / (N_LAYERS - 1) for t, t1 in zip(eight, one)],
        }
        for what, row in rows.items():
            cells = "".join(f"{'' if t is None else format(t, '.1f'):>14}" for t in row)
            print(f"{','.join(map(str, shape)):>14} {what:14}" + cells)


if __name__ == "__main__":
    main()
