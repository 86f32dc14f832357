"""What a reader gets who changes nothing: whole models of both d2l generations, plain beside patched, with the threads
that torch takes by itself, and with one; wall time.

    python benchmarks/readers.py [--seconds 3] [--compiled] [--epochs] [--filter 256] [--json FILE]

    encoder     d2l's whole TransformerEncoder: evaluation, and a step (forward and backward, gradients dropped)
    own         the same, our calls on threads of our own instead of torch's (MHA_C_THREADS_OF=own)
    compiled    --compiled: beside encoder, torch.compile of the plain one and of the patched one, which takes a minute
                or two to compile each
    epochs      --epochs: an epoch of the book's own training loops, each timed alone

Each figure is the plain model's time / the other's: of medians, because threads that meet have no best case that a
reader would see; all sides take turns, burst by burst.
"""

import argparse
import contextlib
import gc
import json
import os
import statistics
import time
from pathlib import Path

from bench import Libraries
from cases import D2L, SEED
from machine import describe

EAGER, LAZY = D2L  # the generations
SHAPES = (  # d2l, num_hiddens, num_heads, ffn_num_hiddens, layers, batch, steps
    (EAGER, 32, 4, 64, 2, 64, 10),
    (LAZY, 32, 4, 64, 2, 64, 10),
    (LAZY, 256, 4, 64, 2, 128, 9),
    (LAZY, 256, 8, 512, 4, 32, 64),
    (LAZY, 128, 4, 256, 2, 64, 30),
)
EPOCHS = (("transformer", LAZY), ("bahdanau", LAZY), ("transformer", EAGER), ("bahdanau", EAGER))
LEAST_ROUNDS = 8
BURST = 0.05  # seconds of one side before the next one has its turn


def encoder(d2l, is_eager, hiddens, heads, ffn, layers):
    if is_eager:
        return d2l.TransformerEncoder(200, *[hiddens] * 4, [hiddens], hiddens, ffn, heads, layers, 0.1)
    return d2l.TransformerEncoder(200, hiddens, ffn, heads, layers, 0.1)


def encoders(libs, shape):
    """{"plain", "patched"}: with the same parameters; and their inputs."""
    generation, hiddens, heads, ffn, layers, batch, steps = shape
    torch, d2l = libs.torch, libs.d2l[generation]
    torch.manual_seed(SEED)
    tokens, lens = torch.randint(0, 200, (batch, steps)), torch.randint(1, steps + 1, (batch,))
    sizes = generation == EAGER, hiddens, heads, ffn, layers
    plain = encoder(d2l, *sizes)
    with libs.mha_c.d2l.patch(d2l):
        patched = encoder(d2l, *sizes)
    for model in (plain, patched):
        model.eval()(tokens, lens)  # sets lazy sizes
    patched.load_state_dict(plain.state_dict())
    torch.testing.assert_close(patched(tokens, lens), plain(tokens, lens), atol=1e-4, rtol=1e-3)
    return {"plain": plain, "patched": patched}, (tokens, lens)


def evaluation(torch, model, inputs):
    def run():
        with torch.no_grad():
            model(*inputs)

    return run


def step(torch, model, inputs):
    def run():
        model(*inputs).sum().backward()
        for parameter in model.parameters():
            parameter.grad = None

    return run


class Threads:
    """Lets the calls that follow use the reader's threads, torch's or our own, or one."""

    def __init__(self, libs):
        self.torch, self.mha_c = libs.torch, libs.mha_c
        self.readers, self.ours = libs.torch.get_num_threads(), libs.mha_c.get_num_threads()
        self.core = libs.mha_c._core

    def choose(self, one, own):
        self.torch.set_num_threads(1 if one else self.readers)
        self.mha_c.config.limit_threads(1 if one else self.ours)
        self.core.use_torch_threads(0 if own else 2**30)


def measure(sides, seconds):
    """{name: median seconds} of {name: (prepare, call)}, which take turns."""
    for prepare, call in sides.values():
        prepare()
        for _ in range(3):
            call()
    times, end, rounds = {name: [] for name in sides}, time.perf_counter() + seconds, 0
    gc.collect()
    gc.disable()
    try:
        while rounds < LEAST_ROUNDS or time.perf_counter() < end:
            for name, (prepare, call) in sides.items():
                prepare()
                call()
                began = last = time.perf_counter()
                while last - began < BURST or last == began:
                    call()
                    now = time.perf_counter()
                    times[name].append(now - last)
                    last = now
            rounds += 1
    finally:
        gc.enable()
    return {name: statistics.median(found) for name, found in times.items()}


def run_encoder(libs, shape, seconds, with_compiled):
    models, inputs = encoders(libs, shape)
    threads, found = Threads(libs), {}
    kinds = [("reader", False, False)]
    if not with_compiled:
        kinds += [("own", False, True), ("one", True, False)]
    for what, make in (("eval", evaluation), ("step", step)):
        runs = {name: make(libs.torch, model.train(what == "step"), inputs) for name, model in models.items()}
        sides = {}
        for kind, one, own in kinds:
            for name, run in runs.items():
                if name == "patched" or not own:
                    sides[f"{name}, {kind}"] = lambda one=one, own=own: threads.choose(one, own), run
        if with_compiled:
            libs.torch._dynamo.reset()  # what it has compiled for evaluation, and for other sizes
            for name, model in models.items():
                compiled = make(libs.torch, libs.torch.compile(model), inputs)
                sides[f"{name} compiled"] = lambda: threads.choose(False, False), compiled
        found[what] = measure(sides, seconds)
    return found


def ratios(times):
    """{what is shown: how many times the plain model's time}."""
    plain = {"one": times.get("plain, one")}
    return {
        name: plain.get(name.rpartition(", ")[2], times["plain, reader"]) / seconds
        for name, seconds in times.items()
        if not name.startswith("plain, ")
    }


def show_encoders(libs, options):
    results = []
    for shape in SHAPES:
        if options.filter and not any(str(x) in map(str, shape) for x in options.filter):
            continue
        found = run_encoder(libs, shape, options.seconds, options.compiled)
        row = {what: ratios(times) for what, times in found.items()}
        results.append({"shape": shape, "ratios": row, "seconds": found})
        if len(results) == 1:
            print(f"{'d2l, h, heads, ffn, layers, batch, steps':<42}      " + "".join(f"{n:>18}" for n in row["eval"]))
        for what, figures in row.items():
            print(
                f"{', '.join(map(str, shape)):<42}  {what}" + "".join(f"{x:>18.2f}" for x in figures.values()),
                flush=True,
            )
    for what in ("eval", "step"):
        means = {
            n: statistics.geometric_mean(r["ratios"][what][n] for r in results) for n in results[0]["ratios"][what]
        }
        print(f"{'geometric mean':<42}  {what}" + "".join(f"{x:>18.2f}" for x in means.values()))
    return results


def epoch_of(libs, kind, generation, patched):
    """A function that trains one more epoch with the book's own loop, and gives its seconds."""
    import book_models

    d2l, eager = libs.d2l[generation], generation == EAGER
    libs.torch.manual_seed(SEED)

    @contextlib.contextmanager
    def as_in_a_notebook():  # which patches at its top
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            with libs.mha_c.d2l.patch(d2l) if patched else contextlib.nullcontext():
                yield

    with as_in_a_notebook():
        train = book_models.one_epoch(d2l, kind, 32 if eager else 256, dropout=0.1 if eager else 0.2)

    def run():
        with as_in_a_notebook():
            return train()

    return run


def epoch_ratios(libs, kind, generation, seconds):
    """{"plain", "patched", "own"}: the seconds of single epochs, one of each in turn."""
    threads, found = Threads(libs), {"plain": [], "patched": [], "own": []}
    models = {patched: epoch_of(libs, kind, generation, patched) for patched in (False, True)}
    for run in models.values():
        run(), run()
    end = time.perf_counter() + seconds
    while len(found["own"]) < LEAST_ROUNDS or time.perf_counter() < end:
        for name, times in found.items():
            threads.choose(False, name == "own")
            times.append(models[name != "plain"]())
    return found


def show_epochs(libs, options):
    """The ratio is the median of those of epochs that follow each other."""
    results = []
    print(f"\n{'epoch of the book, ms':<28}{'plain':>10}{'patched':>10}{'own':>10}{'ratio':>8}{'own':>8}{'turns':>8}")
    for kind, generation in EPOCHS:
        row = f"{kind}, {generation}"
        if options.filter and not all(x in row for x in options.filter):
            continue
        found = epoch_ratios(libs, kind, generation, options.seconds)
        ratios = [statistics.median(p / x for p, x in zip(found["plain"], found[n])) for n in ("patched", "own")]
        results.append({"kind": kind, "d2l": generation, "seconds": found, "ratios": ratios})
        print(f"{row:<28}" + "".join(f"{1e3 * statistics.median(times):>10.1f}" for times in found.values())
              + "".join(f"{ratio:>8.2f}" for ratio in ratios) + f"{len(found['own']):>8}", flush=True)  # fmt: skip
    return results


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3, help="for each figure: evaluation, a step, an epoch")
    parser.add_argument("--filter", nargs="*", default=[], help="shapes with one of these words, epochs with all")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--epochs", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    libs = Libraries(0)
    import mha_c.d2l
    import mha_c.torch  # noqa: F401

    machine = describe(libs.torch, libs.mha_c, libs.torch.get_num_threads())
    results = show_epochs(libs, options) if options.epochs else show_encoders(libs, options)
    if options.json:
        options.json.write_text(json.dumps({"machine": machine, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
