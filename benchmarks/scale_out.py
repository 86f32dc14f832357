"""The time of a step of ring attention against ranks, sequence length and network speed: a model, its check, a picture.

    python benchmarks/scale_out.py build/distributed.json docs/scale-out.svg

Reads what benchmarks/distributed.py measured here.  One process gives the seconds of a pair of query and key, two
processes what a byte costs to send, receive and join; the CPU seconds of four are then foretold and compared.

A rank computes n rounds of 1/n of its work.  While it computes a round, the next piece arrives: a round takes as long
as the longer of the two, so a step takes

    W / n^2 + (n - 1) max(W / n^2 + o S / n, S / (n B) + L)     S bytes of keys and values, B bytes/s, L s of latency,
                                                                W s of work for one process, o s of handling a byte

and backward the same with its own W and twice S.  The bytes are those of the formula in docs/scale-out.md.
"""

import argparse
import json
from pathlib import Path

HEADS, DIM, ITEMSIZE = 8, 64, 4
NETWORKS = {"1 Gbit/s": 125e6, "10 Gbit/s": 1.25e9, "100 Gbit/s": 12.5e9}
LATENCY = 50e-6


class Model:
    """Seconds of work for a (query, key) pair of a head forward and backward, and for handling a byte."""

    def __init__(self, measured):
        one, two = (next(row for row in measured["rows"] if row["ranks"] == n) for n in (1, 2))
        pairs = HEADS * measured["tokens"] ** 2
        self.pair = one["forward"] / pairs, one["backward"] / pairs
        extra = two["forward"] + two["backward"] - one["forward"] - one["backward"]
        self.byte = max(0.0, extra) / sum(two["formula"]) / 1e6

    def cpu_seconds(self, n, tokens):
        """Of all ranks, forward and backward."""
        return sum(self.pair) * HEADS * tokens**2 + self.byte * 3 * (n - 1) * piece_bytes(tokens, 1)

    def seconds(self, n, tokens, bandwidth):
        """A step's, on n ranks with a core each."""
        total = 0.0
        for pair, copies in zip(self.pair, (1, 2)):
            size = copies * piece_bytes(tokens, n)
            computing = pair * HEADS * (tokens / n) ** 2
            sending = size / bandwidth + LATENCY
            total += computing + (n - 1) * max(computing + self.byte * size, sending)
        return total


def piece_bytes(tokens, n):
    return HEADS * 2 * DIM * ITEMSIZE * tokens / n


def check(model, measured):
    print("CPU seconds of forward and backward, all ranks: foretold and measured")
    for row in measured["rows"]:
        found, known = model.cpu_seconds(row["ranks"], measured["tokens"]), row["forward"] + row["backward"]
        print(f"{row['ranks']:>3} ranks{found:>10.2f}{known:>10.2f}{found / known - 1:>+8.1%}")


def draw(model, file):
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "mha_c"
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.6), sharey=True)
    ranks = [1, 2, 4, 8, 16, 32, 64]
    for panel, tokens in zip(panels, (16384, 131072)):
        for name, bandwidth in NETWORKS.items():
            alone = model.seconds(1, tokens, bandwidth)
            speedups = [alone / model.seconds(n, tokens, bandwidth) for n in ranks]
            panel.plot(ranks, speedups, marker="o", markersize=3, label=name)
        panel.plot(ranks, ranks, color="0.7", linewidth=1, linestyle="--", label="as many as ranks")
        panel.set(xscale="log", yscale="log", xlabel="ranks, a core each", title=f"{tokens} tokens, 8 heads of 64")
        panel.set_xticks(ranks, labels=map(str, ranks))
        panel.set_yticks(ranks, labels=map(str, ranks))
        panel.minorticks_off()
    panels[0].set_ylabel("times faster than one rank")
    panels[0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})
    print(f"drawn: {file}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("measured", type=Path)
    parser.add_argument("picture", type=Path, nargs="?")
    options = parser.parse_args()
    measured = json.loads(options.measured.read_text())
    model = Model(measured)
    print(f"a pair: {model.pair[0] * 1e9:.2f} ns forward, {model.pair[1] * 1e9:.2f} ns backward; "
          f"a byte: {model.byte * 1e9:.2f} ns")  # fmt: skip
    check(model, measured)
    for tokens in (16384, 131072):
        for name, bandwidth in NETWORKS.items():
            times = [model.seconds(n, tokens, bandwidth) for n in (1, 4, 16, 64)]
            print(f"{tokens:>7} tokens, {name:>10}: {', '.join(f'{t:.3g} s' for t in times)}  on 1, 4, 16, 64 ranks")
    if options.picture:
        draw(model, options.picture)


if __name__ == "__main__":
    main()
