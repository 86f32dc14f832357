"""The README's tables and one chart for each maker of processors, from the JSON files of bench.py and training.py.

    python benchmarks/chart.py build/bench.json build/training.json

What was measured on a maker's processor stays in measured/<maker>.json and docs/benchmark-<maker>.svg until it is
measured there again; the tables, which replace what stands between the two `measured` comments of the README, show all
makers side by side, for one maker's figures do not stand for another's.
"""

import json
import sys
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
MEASURED = ROOT / "benchmarks" / "measured"
MAKERS = "AMD", "Intel", "ARM"
COLOURS = {"M": "#1b6ca8", "A": "#c8553d", "S": "#588157"}
LEGEND = {
    "M": "MultiHeadAttention, over the faster d2l",
    "A": "AdditiveAttention, over the faster d2l",
    "S": "dot_product_attention, over torch SDPA",
}


IN_TABLE = ("M1", "M3", "M5", "M6", "M7", "M10", "A2", "A3", "S512d64c", "S2048d64", "S37d64")
IN_TRAINING = ("M5", "M7", "M14", "A2", "A3", "S128p")


def maker_of(processor):
    return next((maker for maker in MAKERS if maker.lower() in processor.lower()), "ARM")


def summary(report, training):
    """What the README shows of one run."""
    machine = report["machine"]
    said = ", ".join(machine[key] for key in ("processor", "isa", "system"))
    versions = f"Python {machine['python']}, NumPy {machine['numpy']}, torch {machine['torch']}"
    found = {"machine": f"{said}; {versions}"}
    for name, cases, results in (("evaluation", IN_TABLE, report), ("training", IN_TRAINING, training)):
        found[name] = {
            result["case"]: {
                "where": result["where"],
                "shape": result["shape"],
                "mha_c_us": result["times"]["mha_c"]["min_us"],
                "times_faster": round(result["ratio_min"], 2),
            }
            for result in results["results"]
            if result["case"] in cases
        }
    return found


def rows(known, heading, wanted):
    """A table with two columns for each maker: our time, and how many times faster it is."""
    makers = [maker for maker in MAKERS if maker in known]
    yield f"| {heading} | shape |" + "".join(f" {maker}: mha_c | times faster |" for maker in makers)
    yield "|---|---|" + "---:|---:|" * len(makers)
    cases = {case: facts for maker in makers for case, facts in known[maker][heading].items() if case in wanted}
    for case, facts in cases.items():
        cells = [known[maker][heading].get(case) for maker in makers]
        shown = (f" {microseconds(x['mha_c_us'])} | {x['times_faster']:.1f} |" if x else " | |" for x in cells)
        yield f"| {case} {facts['where']} | {facts['shape']} |" + "".join(shown)
    yield ""


def tables(known):
    yield from rows(known, "evaluation", IN_TABLE)
    yield from rows(known, "training", IN_TRAINING)
    yield from (f"{maker}: {known[maker]['machine']}.  " for maker in MAKERS if maker in known)
    yield "`make bench` prints all cases, `make chart` puts them here."


def put_into(readme, lines):
    before, _, rest = readme.read_text().partition("<!-- measured -->")
    after = rest.partition("<!-- end of measured -->")[2]
    body = "\n".join(lines)
    readme.write_text(f"{before}<!-- measured -->\n{body}\n<!-- end of measured -->{after}")


def microseconds(time):
    return f"{time:.1f} us" if time < 100 else f"{time:.0f} us" if time < 1e4 else f"{time / 1e3:.1f} ms"


def main(source, training):
    report = json.loads(Path(source).read_text())
    results, machine = report["results"], report["machine"]
    maker = maker_of(machine["processor"])
    found = summary(report, json.loads(Path(training).read_text()))
    MEASURED.mkdir(exist_ok=True)
    (MEASURED / f"{maker.lower()}.json").write_text(json.dumps(found, indent=1) + "\n")
    files = {name: MEASURED / f"{name.lower()}.json" for name in MAKERS}
    put_into(ROOT / "README.md", tables({n: json.loads(f.read_text()) for n, f in files.items() if f.exists()}))
    target = ROOT / "docs" / f"benchmark-{maker.lower()}.svg"
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
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    main(*sys.argv[1:])
