"""Training: forward and backward of our torch modules beside the real d2l classes and torch, turn by turn.

    python benchmarks/training.py [--filter M1 S512] [--seconds 1.5] [--json FILE]     each layer and function
    python benchmarks/training.py --loops [--turns 5]       tokens/s of the book's own training loops
    python benchmarks/training.py --to-the-end              the same loops to their last epoch: loss, translations
    python benchmarks/training.py --memory                  forward and backward at 16384 keys

Layers are in training mode with dropout 0.1; inputs and parameters want gradients, which are dropped after each
call.  Before the clock starts, outputs and gradients without dropout are compared.  "autograd" is what torch takes
for an autograd.Function with the same tensors that computes nothing: no Python layer can be faster than that.
"""

import argparse
import contextlib
import io
import json
import re
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Optional

from bench import Libraries, measure, no_peak, options_of, share_of_peak
from cases import D2L, SEED, lengths, visible
from machine import Peak, describe

DROPOUT = 0.1


@dataclass(frozen=True)
class Layer:
    """MultiHeadAttention, or AdditiveAttention where there are no heads; lens and inputs as in cases.py."""

    name: str
    where: str
    batch: int
    queries: int
    keys: int
    num_hiddens: int
    num_heads: int
    lens: Optional[str]
    target: float
    self_attention: bool = True

    @property
    def shape(self):
        heads = f",{self.num_heads}" if self.num_heads else ""
        return f"{self.batch},{self.queries},{self.keys},{self.num_hiddens}{heads}"

    def flops(self):
        """Three times those of the forward call, counted as in cases.py."""
        pairs, key_rows = visible(self._lens(), self.batch, self.queries, self.keys)
        h, q_rows = self.num_hiddens, self.batch * self.queries
        if self.num_heads:
            return 3 * (2 * (2 * q_rows + 2 * key_rows) * h**2 + 4 * pairs * h)
        return 3 * (2 * (q_rows + key_rows) * h**2 + 6 * pairs * h)

    def _lens(self):
        return lengths(self.lens, self.batch, self.queries, self.keys)

    def contenders(self, libs):
        torch, h = libs.torch, self.num_hiddens
        kind = "MultiHeadAttention" if self.num_heads else "AdditiveAttention"
        arguments = (h, self.num_heads, DROPOUT) if self.num_heads else (h, DROPOUT)
        torch.manual_seed(SEED)
        q = torch.randn(self.batch, self.queries, h, requires_grad=True)
        # The book's decoder attends to the outputs of a GRU, whose first axis is time.
        steps = torch.randn(self.keys, self.batch, h, requires_grad=True)
        grad = torch.randn(self.batch, self.queries, h)
        lens = None if self._lens() is None else torch.from_numpy(self._lens())
        inputs = [q] if self.self_attention else [q, steps]

        def call(module):
            k = q if self.self_attention else steps.permute(1, 0, 2)
            return module(q, k, k, lens)

        def make(owner, sizes):
            module = getattr(owner, kind)(*sizes, *arguments)
            call(module)
            return module

        modules = {"mha_c": make(libs.mha_c.torch, ())}
        for name, d2l in libs.d2l.items():
            modules[name] = make(d2l, (h,) * (3 if self.num_heads else 2) if name == D2L[0] else ())
        for module in modules.values():
            module.load_state_dict(modules["mha_c"].state_dict())
        leaves = {name: [*inputs, *module.parameters()] for name, module in modules.items()}
        check(torch, {name: lambda m=module: call(m.eval()) for name, module in modules.items()}, leaves, grad)
        runs = {name: step(torch, lambda m=module: call(m), leaves[name], grad) for name, module in modules.items()}
        for module in modules.values():
            module.train()
        runs["autograd"] = floor(torch, leaves["mha_c"], grad)
        return runs

    reference = D2L


@dataclass(frozen=True)
class Function:
    """dot_product_attention beside torch's scaled_dot_product_attention, (B, H, N, D)."""

    batch: int
    heads: int
    length: int
    head_dim: int
    target: float
    dropout: float = 0.0
    where = "attention alone"
    reference = ("torch SDPA",)

    @property
    def name(self):
        return f"S{self.length}" + ("p" if self.dropout else "")

    @property
    def shape(self):
        return f"{self.batch},{self.heads},{self.length},{self.head_dim}" + (" dropout" if self.dropout else "")

    def flops(self):
        """Two products forward, five backward."""
        return 14 * self.batch * self.heads * self.length**2 * self.head_dim

    def contenders(self, libs):
        torch = libs.torch
        torch.manual_seed(SEED)
        shape = self.batch, self.heads, self.length, self.head_dim
        leaves = [torch.randn(shape, requires_grad=True) for _ in range(3)]
        grad = torch.randn(shape)
        ours = libs.mha_c.torch.functional.dot_product_attention
        theirs = torch.nn.functional.scaled_dot_product_attention
        check(torch, {"mha_c": lambda: ours(*leaves), "torch SDPA": lambda: theirs(*leaves)},
              {"mha_c": leaves, "torch SDPA": leaves}, grad)  # fmt: skip
        return {
            "mha_c": step(torch, lambda: ours(*leaves, dropout=self.dropout), leaves, grad),
            "torch SDPA": step(torch, lambda: theirs(*leaves, dropout_p=self.dropout), leaves, grad),
            "autograd": floor(torch, leaves, grad),
        }


CASES = [
    Layer("M1", "multi-head attention, first example", 2, 4, 6, 100, 5, "random", 6, self_attention=False),
    Layer("M3", "encoder, first example", 2, 100, 100, 24, 8, "random", 4),
    Layer("M5", "Transformer of d2l 0.17", 64, 10, 10, 32, 4, "random", 3),
    Layer("M6", "Transformer of d2l 0.17 predicting", 1, 1, 10, 32, 4, "random", 6, self_attention=False),
    Layer("M7", "Transformer of d2l 1.0", 128, 9, 9, 256, 4, "random", 1.4),
    Layer("M8", "Transformer of d2l 1.0 predicting", 4, 1, 9, 256, 4, "random", 3, self_attention=False),
    Layer("M10", "BERT pre-training, batch 64 of 512", 64, 64, 64, 128, 2, "random", 1.8),
    Layer("M14", "vision transformer, batch 16 of 128", 16, 37, 37, 512, 8, None, 1.2),
    Layer("A2", "Bahdanau decoder of d2l 0.17", 64, 1, 10, 32, 0, "random", 3, self_attention=False),
    Layer("A3", "Bahdanau decoder of d2l 1.0", 128, 1, 9, 256, 0, "random", 1.7, self_attention=False),
    Layer("A5", "Bahdanau decoder, first example", 4, 1, 7, 16, 0, None, 4, self_attention=False),
    Function(64, 4, 10, 8, 3),
    Function(64, 8, 37, 64, 2.5),
    Function(1, 12, 128, 64, 1.3),
    Function(1, 12, 512, 64, 1.2),
    Function(1, 8, 2048, 64, 1.2),
    Function(1, 12, 128, 64, 2, DROPOUT),
    Function(1, 12, 512, 64, 3, DROPOUT),
    Function(1, 8, 2048, 64, 3, DROPOUT),
]


def step(torch, call, leaves, grad):
    """One training step's share of a layer: forward, backward, gradients dropped."""
    backward = torch.autograd.backward

    def run():
        backward(call(), grad)
        for leaf in leaves:
            leaf.grad = None

    return run


def floor(torch, leaves, grad):
    """The same step of a function that copies ready gradients and computes nothing."""
    ready = [torch.ones_like(leaf) for leaf in leaves]

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *tensors):
            ctx.save_for_backward(*tensors)
            return grad.clone()

        @staticmethod
        def backward(ctx, _):
            ctx.saved_tensors  # noqa: B018  as any real function would
            return tuple(ready)

    return step(torch, lambda: Nothing.apply(*leaves), leaves, grad)


def check(torch, calls, leaves, grad):
    """All contenders give the same output and gradients, to far less than any mistake in the mathematics."""
    found = {}
    for name, call in calls.items():
        out = call()
        found[name] = [out.detach(), *torch.autograd.grad(out, leaves[name], grad)]
    for name, results in found.items():
        by_shape = zip(results, found["mha_c"])
        for theirs, ours in by_shape:
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4 * float(theirs.abs().max()), msg=name)


def run_case(case, libs, seconds, peak):
    contenders = case.contenders(libs)
    times, beside = measure(contenders, seconds, peak)
    best = {name: min(t) / 1e3 for name, t in times.items()}
    middle = {name: sorted(t)[len(t) // 2] / 1e3 for name, t in times.items()}
    rate = case.flops() / best["mha_c"] / 1e3
    return {
        "case": case.name, "where": case.where, "shape": case.shape, "target": case.target,
        "times": {name: {"min_us": best[name], "median_us": middle[name]} for name in best},
        "ratio_min": min(best[name] for name in case.reference) / best["mha_c"],
        "ratio_median": min(middle[name] for name in case.reference) / middle["mha_c"],
        "ratio_limit": min(best[name] for name in case.reference) / best["autograd"],
        "gflops": rate, "share_of_peak": share_of_peak(case.flops(), beside),
    }  # fmt: skip


def show_row(result):
    best = {name: t["min_us"] for name, t in result["times"].items()}
    theirs = best["mha_c"] * result["ratio_min"]
    miss = "MISS" if result["ratio_min"] < result["target"] else ""
    share = f"{100 * result['share_of_peak']:.0f}%" if result["share_of_peak"] else "-"
    print(
        f"{result['case']:<8}{result['shape']:<26}{best['mha_c']:>10.1f}{theirs:>11.1f}{best['autograd']:>10.1f}"
        f"{result['ratio_min']:>8.2f}{result['ratio_median']:>8.2f}{result['target']:>8.2f} {miss:<4}"
        f"{result['ratio_limit']:>8.1f}{result['gflops']:>9.1f}{share:>6}",
        flush=True,
    )


# --- The book's own loops -----------------------------------------------------------------------------------


def train_loops(libs, turns):
    """Tokens/s of d2l's loops, d2l's classes and ours in turns of a few epochs."""
    import book_models

    print(f"\n{'loop':<28}{'d2l':>12}{'mha_c':>12}{'ratio':>8}{'target':>8}")
    for kind, target in (("transformer", 1.3), ("bahdanau", 1.25)):
        for name, d2l in libs.d2l.items():
            eager = book_models.is_eager(d2l)
            rates = {False: [], True: []}
            for turn in range(2 * turns):
                patched = bool(turn % 2)
                libs.torch.manual_seed(SEED)
                with quiet() as printed, libs.mha_c.d2l.patch(d2l) if patched else contextlib.nullcontext():
                    start = time.perf_counter()
                    epochs = 2 if eager else 3
                    book_models.train(d2l, kind, epochs, 32 if eager else 256, dropout=0.1 if eager else 0.2)
                    seconds = time.perf_counter() - start
                said = re.search(r"([\d.]+) tokens/sec", printed.getvalue())
                # 1.0's loop prints nothing: 512 sentences of 9 steps an epoch, validation included in the time
                rates[patched].append(float(said.group(1)) if said else 512 * 9 * epochs / seconds)
            theirs, ours = max(rates[False]), max(rates[True])
            name = f"{kind}, {name}"
            print(f"{name:<28}{theirs:>12,.0f}{ours:>12,.0f}{ours / theirs:>8.2f}{target:>8.2f}", flush=True)


def train_to_the_end(libs):
    """The loops of 0.17 with the book's epochs, d2l's classes and ours: loss, and BLEU of sentences it has seen."""
    import book_models

    d2l = libs.d2l[D2L[0]]
    for kind, epochs in (("transformer", 200), ("bahdanau", 250)):
        for patched in (True, False):
            libs.torch.manual_seed(SEED)
            with quiet() as printed, libs.mha_c.d2l.patch(d2l) if patched else contextlib.nullcontext():
                model, source, target, _ = book_models.train(d2l, kind, epochs, dropout=0.1)
            found = book_models.translations(d2l, model, source, target, n_sentences=12)
            scores = [d2l.bleu(translated, french, k=2) for _, french, translated in found]
            result = re.search(r"loss.*", printed.getvalue()).group(0)
            print(f"{kind:<12} {'mha_c' if patched else 'd2l':<6} {result}; mean BLEU {sum(scores) / len(scores):.3f}")
            for english, _, translated in found[:4] if patched else []:
                print(f"    {english} => {translated}", flush=True)


@contextlib.contextmanager
def quiet():
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        yield printed


# --- Memory ----------------------------------------------------------------------------------------------------


def measure_memory():
    """In a fresh process: what forward and backward take beyond inputs, output and gradients."""
    done = subprocess.run([sys.executable, __file__, "--memory-child"], capture_output=True, text=True, check=True)
    print(done.stdout.strip())


def memory_child():
    import torch

    import mha_c.torch

    torch.manual_seed(SEED)
    q, k, v = (torch.randn(1, 8, 16384, 64, requires_grad=True) for _ in range(3))
    grad = torch.randn(1, 8, 16384, 64)
    small = [torch.randn(1, 1, 300, 64, requires_grad=True) for _ in range(3)]
    mha_c.torch.functional.dot_product_attention(*small, dropout=DROPOUT).sum().backward()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    out = mha_c.torch.functional.dot_product_attention(q, k, v, dropout=DROPOUT)
    out.backward(grad)
    seconds = time.perf_counter() - start
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / (1024 if sys.platform != "darwin" else 2**20)
    results = 4 * q.numel() * 4 / 2**20
    print(f"1,8,16384,64 with dropout: {peak:.0f} MiB more at the peak, of which output and gradients are")
    print(f"{results:.0f}; {peak - results:.0f} beyond (target under 400); {seconds:.1f} s")


def main():
    parser = options_of(__doc__.split("\n")[0])
    parser.add_argument("--loops", action="store_true", help="tokens/s of the book's training loops")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--to-the-end", action="store_true", help="train with the book's number of epochs")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--memory-child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory_child:
        return memory_child()
    if options.memory:
        return measure_memory()
    libs = Libraries(options.threads)
    import mha_c.d2l
    import mha_c.torch  # noqa: F401

    if options.loops:
        return train_loops(libs, options.turns)
    if options.to_the_end:
        return train_to_the_end(libs)
    machine = describe(libs.torch, libs.mha_c, options.threads)
    peak = Peak(machine["isa"]) if options.threads == 1 else no_peak
    names = tuple(options.filter)
    exact = {case.name for case in CASES}.intersection(names)
    cases = [c for c in CASES if not names or c.name in exact or c.name.startswith(tuple(set(names) - exact) or "?")]
    print("forward and backward, microseconds, minima; ratio = fastest of d2l or torch SDPA / ours; limit = the ratio")
    print("of a function that computes nothing\n")
    print(f"{'case':<8}{'B,Q,K,h,H | B,H,N,D':<26}{'ours':>10}{'theirs':>11}{'autograd':>10}{'ratio':>8}{'median':>8}"
          f"{'target':>8}     {'limit':>8}{'GFLOP/s':>9}{'peak':>6}")  # fmt: skip
    results = []
    for case in cases:
        results.append(run_case(case, libs, options.seconds, peak))
        show_row(results[-1])
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"machine": machine, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
