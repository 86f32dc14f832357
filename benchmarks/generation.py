"""Generation with a cache: the GPT of the book's third generation, with a cache of the book's kind and with ours.

    python benchmarks/generation.py [--book d2l-neu/d2l/torch.py] [--contexts 64 512 2048] [--steps 24] [--threads 1]
    python benchmarks/generation.py --window 64 --steps 100000          # a window's memory and time, all along
    python benchmarks/generation.py --bytes                             # bytes of a step beside those of its cache

cat      torch's operations on a cache that grows by torch.cat, as the book's generate_cached has it
buffer   the same on a buffer that was allocated before, of which each step reads what is there
ours     the same model under mha_c.d2l.patch(), each attention with cache=

12 layers, 768 hidden, 12 heads (options), rotary positions, batch 1, float32.  All three give the same logits, which is
checked.  Without --book the model is a stand-in with the book's classes and our own lines.  All three take each step in
turns, so that other programs meet all alike, and the fastest step counts.  `attention` is the time of the 12 attention
layers alone, projections included; `heads` is what is left of it without the four projections.
"""

import argparse
import contextlib
import io
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

import bench  # noqa: F401  so that the tests' modules are found
import counts
import mha_c.d2l
import mha_c.torch
from machine import describe

HERE = Path(__file__).resolve().parent


def load(place):
    """The module with the book's classes: its own d2l.torch, or the stand-in."""
    if place is None:
        import third_generation

        return third_generation
    import real_d2l

    return real_d2l.load_file("third_generation_itself", place)


def build(d2l, options, max_len):
    torch.manual_seed(0)
    model = d2l.GPT(
        options.vocabulary, num_hiddens=options.hiddens, num_heads=options.heads, num_blks=options.layers,
        max_len=max_len, pos="rope",
    )  # fmt: skip
    return model.eval()


def turned(x, first):
    """Rotary positions first, first + 1, ... of neighbouring pairs; x (B, H, T, D)."""
    rates = 10000.0 ** (-torch.arange(0, x.shape[3], 2) / x.shape[3])
    angles = torch.arange(first, first + x.shape[2], dtype=torch.float32)[:, None] * rates
    a, b, cos, sin = x[..., 0::2], x[..., 1::2], angles.cos(), angles.sin()
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)


class Growing:
    """The keys and values of all steps, joined anew in each."""

    def __init__(self, attention, max_len):
        self.attention, self.rows = attention, ()

    def keys_and_values(self, k, v):
        self.rows = tuple(torch.cat(pair, 2) for pair in zip(self.rows, (k, v))) if self.rows else (k, v)
        return self.rows

    def length(self):
        return self.rows[0].shape[2] if self.rows else 0

    def __call__(self, x):
        batch, n, _ = x.shape
        heads = self.attention.num_heads
        q, k, v = (part.reshape(batch, n, heads, -1).transpose(1, 2) for part in self.attention.W_qkv(x).chunk(3, -1))
        first = self.length()
        q, k = turned(q, first), turned(k, first)
        k, v = self.keys_and_values(k, v)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=n > 1)
        return self.attention.W_o(y.transpose(1, 2).reshape(x.shape))


class Buffer(Growing):
    """The same on memory that was there before."""

    def __init__(self, attention, max_len):
        head_dim = attention.W_o.in_features // attention.num_heads
        self.attention, self.n = attention, 0
        self.rooms = [torch.zeros(1, attention.num_heads, max_len, head_dim) for _ in range(2)]

    def length(self):
        return self.n

    def keys_and_values(self, k, v):
        last = self.n + k.shape[2]
        for room, rows in zip(self.rooms, (k, v)):
            room[:, :, self.n : last] = rows
        self.n = last
        return [room[:, :, :last] for room in self.rooms]


class Ours:
    def __init__(self, attention, max_len):
        self.attention, self.cache = attention, attention.new_cache(1, max_len)

    def __call__(self, x):
        return self.attention(x, cache=self.cache)


class Model:
    """A GPT whose attention layers go on from their caches."""

    def __init__(self, gpt, way, max_len):
        self.gpt, self.attentions = gpt, [way(block.attention, max_len) for block in gpt.blks]

    def __call__(self, tokens):
        h = self.gpt.token_emb(tokens)
        for block, attention in zip(self.gpt.blks, self.attentions):
            h = h + attention(block.norm1(h))
            h = h + block.ffn(block.norm2(h))
        return F.linear(self.gpt.norm(h), self.gpt.token_emb.weight)


def clock(threads):
    return time.thread_time if threads == 1 else time.perf_counter


def seconds_of(now, call, *args):
    start = now()
    found = call(*args)
    return now() - start, found


def one_context(gpts, context, options):
    """{way: seconds of a step, of its attention layers, of these without projections}; the largest difference."""
    now, max_len = clock(options.threads), context + options.steps + 1
    ways = {name: Model(gpts[name], way, max_len) for name, way in WAYS.items()}
    tokens = torch.randint(options.vocabulary, (1, context + options.steps))
    worst, times = 0.0, {name: [] for name in ways}
    logits = [model(tokens[:, :context]) for model in ways.values()]
    for i in range(context, context + options.steps):
        logits = []
        for name, model in ways.items():
            seconds, found = seconds_of(now, model, tokens[:, i : i + 1])
            times[name].append(seconds)
            logits.append(found)
        worst = max(worst, *((found - logits[0]).abs().max().item() for found in logits[1:]))
    x, parts = torch.randn(1, 1, options.hiddens), {name: [] for name in (*ways, "projections")}
    models = {name: Model(gpts[name], way, max_len + options.steps) for name, way in WAYS.items()}
    filled = torch.randn(1, context, options.hiddens)
    for model in models.values():
        for attention in model.attentions:
            attention(filled)
    for _ in range(options.steps):
        for name, model in models.items():
            parts[name].append(seconds_of(now, lambda layers: [layer(x) for layer in layers], model.attentions)[0])
        layers = [block.attention for block in gpts["cat"].blks]
        parts["projections"].append(
            seconds_of(now, lambda layers: [y.W_o(y.W_qkv(x)[..., : x.shape[2]]) for y in layers], layers)[0]
        )
    rest = min(parts["projections"])
    return {name: (min(times[name]), min(parts[name]), min(parts[name]) - rest) for name in ways}, worst


WAYS = {"cat": Growing, "buffer": Buffer, "ours": Ours}


def compare(options):
    d2l, longest = load(options.book), max(options.contexts) + 2 * options.steps + 2
    theirs = build(d2l, options, longest)
    with contextlib.redirect_stdout(io.StringIO()), mha_c.d2l.patch(d2l):
        ours = build(d2l, options, longest)
    ours.load_state_dict(theirs.state_dict())
    gpts = {"cat": theirs, "buffer": theirs, "ours": ours}
    print(f"{'context':>8}{'':>11}{'cat':>10}{'buffer':>10}{'ours':>10}   cat/ours  buffer/ours   (ms)")
    for context in options.contexts:
        found, worst = one_context(gpts, context, options)
        for i, what in enumerate(("step", "attention", "heads")):
            row = [1e3 * found[name][i] for name in WAYS]
            ratios = f"{row[0] / row[2]:>8.2f}{row[1] / row[2]:>12.2f}"
            print(f"{context:>8} {what:<10}" + "".join(f"{ms:>10.2f}" for ms in row) + f"   {ratios}")
        print(f"{context:>8} logits differ by at most {worst:.1e}")


def along(options):
    """One layer with a window: time of a step and memory at every tenth of the way."""
    attention = mha_c.torch.GQAAttention(256, 8, 2, rope=True).eval()
    cache, x = attention.new_cache(1, None, window=options.window, sinks=4), torch.randn(1, 1, 256)
    memory = lambda: int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text()).group(1))  # noqa: E731
    taken = []
    print(f"window {options.window}, sinks 4: us of a step, KiB of the cache, KiB of the process")
    for i in range(1, options.steps + 1):
        start = time.thread_time()
        attention(x, x, x, cache=cache)
        taken.append(time.thread_time() - start)
        if i % max(options.steps // 10, 1) == 0:
            print(f"{i:>8}{1e6 * float(np.median(taken)):>10.1f}{cache.nbytes / 1024:>10.1f}{memory():>12}")
            taken.clear()


CLIENT = """
import ctypes, sys
import numpy as np
sys.path.insert(0, sys.argv[1])
import mha_c
counter, context, kind = ctypes.CDLL(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
mha_c.set_num_threads(1)
layer = (mha_c.CausalAttention(768, 12, rope=True, rng=0) if kind == "MHA" else
         mha_c.GQAAttention(768, 12, {"GQA": 4, "MQA": 1}[kind], rope=True, rng=0))
one = np.random.default_rng(0).standard_normal((1, 1, 768), dtype="f4")
cache = layer.new_cache(1, context + 4)
layer(one, one, one, cache=cache)
cache._steps = context  # as if so many had been there: valgrind would take minutes
layer(one, one, one, cache=cache)
counter.begin(); counter.warm()
layer(one, one, one, cache=cache)
counter.end(b"step")
read = sum(p.data.nbytes for p in layer.parameters())
print("RESULT", read, cache.nbytes * int(cache.lengths[0]) // cache.max_len)
"""


def bytes_of_a_step(kind, context):
    """Of one warm step: (bytes from behind modelled caches of 512 KiB, bytes of the weights, of the filled cache)."""
    with tempfile.TemporaryDirectory() as folder:
        source, client, out = (Path(folder, name) for name in ("client.c", "client.so", "counts"))
        source.write_text(counts.CLIENT)
        subprocess.run(["cc", "-shared", "-fPIC", source, "-o", client], check=True)
        command = ["valgrind", "-q", "--tool=callgrind", "--instr-atstart=no", *counts.CACHES.split()]
        command += [f"--callgrind-out-file={out}", sys.executable, "-c", CLIENT, str(HERE.parent), str(client)]
        done = subprocess.run([*command, str(context), kind], check=True, capture_output=True, text=True)
        weights, cache = map(int, re.search(r"RESULT (\d+) (\d+)", done.stdout).groups())
        (text,) = (x for x in (path.read_text() for path in Path(folder).glob("counts.*")) if "Request: step" in x)
    events = re.search(r"^events: (.*)", text, re.M).group(1).split()
    n = dict(zip(events, map(int, re.search(r"^(?:summary|totals): (.*)", text, re.M).group(1).split())))
    return counts.LINE * (n["DLmr"] + n["DLmw"]), weights, cache


def count_bytes(options):
    """What a step moves for its cache: beyond what the same step moves with a cache of one row, which reads the weights
    and what Python needs.  With H / Hkv heads of queries for one of keys, H / Hkv of 2 * 64 numbers are the weights
    that attention_weights can show, for 1.09 times the cache in MQA of 12 heads."""
    print("kind  context    weights     cache    moved  with 1 row   (moved - with 1 row) / cache")
    for kind in ("MHA", "GQA", "MQA"):
        least, *_ = bytes_of_a_step(kind, 1)
        for context in options.contexts:
            moved, weights, cache = bytes_of_a_step(kind, context)
            row = f"{kind:<6}{context:>7}{weights:>11}{cache:>10}{moved:>9}{least:>12}"
            print(f"{row}   {(moved - least) / cache:.2f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--book", type=Path)
    parser.add_argument("--contexts", type=int, nargs="+", default=[64, 512, 2048])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hiddens", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--vocabulary", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--window", type=int)
    parser.add_argument("--bytes", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    mha_c.set_num_threads(options.threads)
    print(describe(torch, mha_c, options.threads))
    with torch.no_grad():
        if options.window:
            along(options)
        elif options.bytes:
            count_bytes(options)
        else:
            compare(options)


if __name__ == "__main__":
    main()
