"""Our torch modules beside d2l's own on this machine's GPU: evaluation, training, and peak memory.

    python benchmarks/devices.py [--device cuda] [--dtype float32] [--seconds 1.0]

The book's shapes M7, M10, M12, M14 (benchmarks/cases.py) against d2l's code, written out here, and attention
(1, 12, 2048, 64) against plain operations.  Both take turns, each turn ends with a synchronisation, and the smallest of
the turns counts.  Without a GPU it says so, and times nothing; `--device cpu` shows that it runs.
"""

import argparse
import time

import torch
from torch import nn

import mha_c.torch

# name, batch, queries, keys, hidden features, heads, whether items have lengths
SHAPES = (
    ("M7", 128, 9, 9, 256, 4, True), ("M10", 64, 64, 64, 128, 2, True), ("M12", 64, 128, 128, 256, 4, True),
    ("M14", 16, 37, 37, 512, 8, False),
)  # fmt: skip
PLAIN = 1, 12, 2048, 64
LONG = "long", 1, 16384, 16384, 512, 8, True


class Book(nn.Module):
    """The multi-head attention of d2l 11.5, as its text writes it."""

    def __init__(self, hiddens, heads):
        super().__init__()
        self.heads = heads
        self.W_q, self.W_k, self.W_v, self.W_o = (nn.Linear(hiddens, hiddens, bias=False) for _ in range(4))

    def forward(self, queries, keys, values, valid_lens):
        q, k, v = (
            W(x).unflatten(2, (self.heads, -1)).transpose(1, 2).flatten(0, 1)
            for W, x in ((self.W_q, queries), (self.W_k, keys), (self.W_v, values))
        )
        scores = torch.bmm(q, k.transpose(1, 2)) / q.shape[-1] ** 0.5
        if valid_lens is not None:
            lens = valid_lens.repeat_interleave(self.heads, dim=0)
            hidden = torch.arange(k.shape[1], device=k.device) >= lens[:, None, None]
            scores = scores.masked_fill(hidden, -1e6 if scores.dtype is not torch.float16 else -6e4)
        self.attention_weights = torch.softmax(scores, -1)
        heads = torch.bmm(self.attention_weights, v).unflatten(0, (-1, self.heads))
        return self.W_o(heads.transpose(1, 2).flatten(2))


def synchronise(device):
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()


def turns(calls, device, seconds):
    """The smallest time of each call, all taking turns for so long."""
    best = [float("inf")] * len(calls)
    for call in calls:  # what is compiled, found and allocated once
        call()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for i, call in enumerate(calls):
            synchronise(device)
            start = time.perf_counter()
            for _ in range(10):
                call()
            synchronise(device)
            best[i] = min(best[i], (time.perf_counter() - start) / 10)
    return best


def trained(call, leaves):
    def step():
        for leaf in leaves:
            leaf.grad = None
        call().square().mean().backward()

    return step


def evaluated(call):
    def step():
        with torch.no_grad():
            return call()

    return step


def layers(shape, device, dtype):
    """(call, leaves) of our layer and of the book's, with the same weights."""
    _, batch, n_queries, n_keys, hiddens, heads, has_lengths = shape
    ours = mha_c.torch.MultiHeadAttention(hiddens, hiddens, hiddens, hiddens, heads, 0.0).to(device, dtype)
    book = Book(hiddens, heads).to(device, dtype)
    book.load_state_dict(ours.state_dict())
    q, k = (torch.randn(batch, n, hiddens, device=device, dtype=dtype) for n in (n_queries, n_keys))
    lens = torch.randint(1, n_keys + 1, (batch,), device=device) if has_lengths else None
    torch.testing.assert_close(ours(q, k, k, lens), book(q, k, k, lens), rtol=0.02, atol=0.02)
    return [(lambda layer=layer: layer(q, k, k, lens), [*layer.parameters()]) for layer in (ours, book)]


def plain(device, dtype):
    """The same of attention alone."""
    q, k, v = (torch.randn(PLAIN, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    ours = mha_c.torch.functional.dot_product_attention
    calls = (lambda: ours(q, k, v), lambda: torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, -1) @ v)
    return [(call, [q, k, v]) for call in calls]


def peak(call, device):
    """MiB that a call of evaluation takes at its highest."""
    counter = getattr(torch, device.type)
    synchronise(device)
    counter.reset_peak_memory_stats()
    before = counter.memory_allocated()
    evaluated(call)()
    synchronise(device)
    return (counter.max_memory_allocated() - before) / 2**20


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    found = next(
        (d for d in ("cuda", "xpu", "mps") if getattr(torch, d, None) and getattr(torch, d).is_available()), None
    )
    parser.add_argument("--device", default=found)
    parser.add_argument("--dtype", default="float32", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--seconds", type=float, default=1.0, help="for each line")
    options = parser.parse_args()
    if options.device is None:
        raise SystemExit("no GPU that torch can use: --device cpu shows that this runs")
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    name = torch.cuda.get_device_name() if device.type == "cuda" else device.type
    print(f"{name}, torch {torch.__version__}, {options.dtype}; times in us, smallest of turns")
    print(f"{'case':24}{'':8}{'mha_c':>10}{'d2l':>10}{'d2l/mha_c':>11}")
    cases = [(shape[0], lambda shape=shape: layers(shape, device, dtype)) for shape in SHAPES]
    for case, make in [*cases, (f"attention {','.join(map(str, PLAIN))}", lambda: plain(device, dtype))]:
        contenders = make()
        for mode, calls in (
            ("eval", [evaluated(call) for call, _ in contenders]),
            ("train", [trained(call, leaves) for call, leaves in contenders]),
        ):
            ours, theirs = turns(calls, device, options.seconds)
            print(f"{case:24}{mode:8}{ours * 1e6:10.0f}{theirs * 1e6:10.0f}{theirs / ours:11.2f}")
    if hasattr(getattr(torch, device.type), "max_memory_allocated"):
        ours, theirs = (peak(call, device) for call, _ in layers(LONG, device, dtype))
        print(f"peak memory of 8 heads of 64, {LONG[2]} tokens with lengths: mha_c {ours:.0f}, d2l {theirs:.0f} MiB")


if __name__ == "__main__":
    main()
