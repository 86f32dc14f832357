"""The README's chart and its tables, from the JSON files of bench.py and training.py.

    python benchmarks/chart.py build/bench.json build/training.json docs/benchmark.svg README.md

The tables replace what stands between the two `measured` comments of the README.
"""

import json
import sys
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

COLOURS = {"M": "#1b6ca8", "A": "#c8553d", "S": "#588157"}
LEGEND = {
    "M": "MultiHeadAttention, over the faster d2l",
    "A": "AdditiveAttention, over the faster d2l",
    "S": "dot_product_attention, over torch SDPA",
}


IN_TABLE = ("M1", "M3", "M5", "M6", "M7", "M10", "M12", "A2", "A3", "S512d64c", "S2048d64", "S37d64")
IN_TRAINING = ("M1", "M5", "M7", "M14", "A2", "A3", "S128", "S128p")


def rows(results, cases, heading):
    yield f"| {heading} | shape | mha_c | d2l or torch SDPA | times faster |"
    yield "|---|---|---:|---:|---:|"
    for result in results:
        if result["case"] in cases:
            ours = result["times"]["mha_c"]["min_us"]
            theirs = microseconds(ours * result["ratio_min"])
            name = f"{result['case']} {result['where']}"
            yield f"| {name} | {result['shape']} | {microseconds(ours)} | {theirs} | {result['ratio_min']:.1f} |"
    yield ""


def tables(report, training):
    machine = report["machine"]
    yield from rows(report["results"], IN_TABLE, "evaluation")
    yield from rows(training["results"], IN_TRAINING, "training")
    yield f"{machine['processor']}, {machine['isa']}, {machine['system']}, one thread; Python {machine['python']},"
    yield f"NumPy {machine['numpy']}, torch {machine['torch']}. `make bench` prints all cases,"
    yield "`make chart` puts them here."


def put_into(readme, lines):
    before, _, rest = readme.read_text().partition("<!-- measured -->")
    after = rest.partition("<!-- end of measured -->")[2]
    body = "\n".join(lines)
    readme.write_text(f"{before}<!-- measured -->\n{body}\n<!-- end of measured -->{after}")


def microseconds(time):
    return f"{time:.1f} us" if time < 100 else f"{time:.0f} us" if time < 1e4 else f"{time / 1e3:.1f} ms"


def main(source, training, target, readme):
    report = json.loads(Path(source).read_text())
    results, machine = report["results"], report["machine"]
    put_into(Path(readme), tables(report, json.loads(Path(training).read_text())))
    matplotlib.rcParams.update({"svg.hashsalt": "mha_c", "svg.fonttype": "none", "font.size": 8})
    figure = Figure(figsize=(7, 0.19 * len(results) + 1), layout="constrained")
    axes = figure.add_subplot()
    labels = [f"{result['case']}  {result['shape']}" for result in results]
    ratios = [result["ratio_min"] for result in results]
    for kind, colour in COLOURS.items():
        places = [i for i, result in enumerate(results) if result["case"].startswith(kind)]
        if places:
            axes.barh(places, [ratios[i] - 1 for i in places], left=1, color=colour, label=LEGEND[kind], height=0.72)
    for i, ratio in enumerate(ratios):
        axes.text(max(ratio, 1) * 1.03, i, f"{ratio:.1f}" if ratio >= 10 else f"{ratio:.2f}", va="center", fontsize=7)
    axes.set_xscale("log")
    axes.set_xlim(min(0.8, *ratios), max(ratios) * 1.5)
    ticks = [tick for tick in (1, 2, 3, 5, 10, 20, 30, 50) if tick < max(ratios) * 1.5]
    axes.set_xticks(ticks, map(str, ticks))
    axes.minorticks_off()
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.set_xlabel(
        f"times faster, {machine['threads']} thread; {machine['processor']}, {machine['isa']}, "
        f"torch {machine['torch'].split()[0]}"
    )
    figure.legend(loc="outside upper center", ncols=3, frameon=False, fontsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    main(*sys.argv[1:])
