"""The README's chart, the tables of benchmarks/README.md and a chart, from the JSON files of the benchmarks.

    python benchmarks/chart.py build/bench.json build/training.json          # of one thread
    python benchmarks/chart.py --readers build/readers.json                  # of readers.py: with a reader's threads
    python benchmarks/chart.py               # tables and the README's chart again, from benchmarks/measured

What was measured on a processor stays in measured/<processor>.json and docs/benchmark-<processor>.svg until it is
measured again.  The tables, which replace what stands between the two `measured` comments of the page, have a column a
processor, headed by the date and commit of its figures: one processor's do not stand for another's, nor those of one
commit for another's.  The README's chart is of the processors whose readers' figures are there.
"""

import datetime
import json
import subprocess
import sys
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Patch

ROOT = Path(__file__).resolve().parents[1]
MEASURED = ROOT / "benchmarks" / "measured"
PROCESSORS = {  # what the system calls it begins so
    "AMD Zen 5": "AMD EPYC (family 26",
    "AMD Zen 4": "AMD EPYC (family 25, model 17",
    "AMD Zen 3": "AMD EPYC (family 25, model 1)",
    "Intel Xeon": "Intel",
    "ARM": "",
}
COLOURS = {"M": "#1b6ca8", "A": "#c8553d", "G": "#8a5a9e", "S": "#588157"}
SHADES = "#1b6ca8", "#7fb2d6", "#c8553d", "#588157"  # a processor each
LEGEND = {
    "M": "MultiHeadAttention, beside the faster d2l",
    "A": "AdditiveAttention, beside the faster d2l",
    "G": "GQAAttention, beside its lines on torch",
    "S": "dot_product_attention, beside torch's",
}


IN_TABLE = ("M1", "M3", "M5", "M6", "M7", "M10", "A2", "A3", "S512d64c", "S2048d64", "S37d64")
IN_TRAINING = ("M5", "M7", "M14", "A2", "A3", "S128p")
IN_README = {  # the shape of an encoder of readers.py, and what it is to somebody who knows the book
    "d2l 0.17.6, 32, 4, 64, 2, 64, 10": "first edition's translation",
    "d2l 1.0.3, 256, 4, 64, 2, 128, 9": "d2l 1.0's translation",
    "d2l 1.0.3, 256, 8, 512, 4, 32, 64": "four larger blocks, 64 tokens",
}
INKED = "text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"
UNDATED = {"Date": None}  # the same bytes for the same figures, as names of parts without a random number are
matplotlib.rcParams["svg.hashsalt"] = "mha_c"


def words(result):
    """A case for somebody who knows the book: where it stands there, and its sizes."""
    sizes, _, option = result["shape"].partition(" ")
    batch, *rest = sizes.split(",")
    if result["case"].startswith("S"):
        heads, tokens, features = rest
        keys = f"{tokens.replace('x', ' query, ')} keys" if "x" in tokens else f"{tokens} tokens"
        found = f"{batch} x {heads} heads, {keys}, {features} features"
    else:
        queries, keys, hiddens, *heads = rest
        found = f"{batch} x {queries} {'query' if queries == '1' else 'queries'}, {keys} keys, {hiddens} hidden"
        found += "".join(f", {number} heads" for number in heads)
    return f"{result['where']}: {found}{option and f', {option}'}"


def known_as(processor):
    return next(name for name, begins in PROCESSORS.items() if processor.startswith(begins))


def stem(name):
    return name.lower().replace(" ", "-")


def of_run(machine):
    """What and when was measured."""
    said = ", ".join(machine[key] for key in ("processor", "isa", "system"))
    versions = f"Python {machine['python']}, NumPy {machine['numpy']}, torch {machine['torch']}"
    commit = git("rev-parse", "HEAD")[:7]
    return {"machine": f"{said}; {versions}", "date": f"{datetime.date.today()}", "commit": commit}


def summary(report, training):
    """What the tables show of one run."""
    found = of_run(report["machine"])
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


def readers_summary(report):
    """{"reader", "one"}: {shape: (evaluation, training)}: how many times as fast whole encoders are."""
    found = {**of_run(report["machine"]), "threads": report["machine"]["threads"]}
    for threads in ("reader", "one"):
        found[threads] = {
            ", ".join(map(str, row["shape"])): [
                round(row["ratios"][what][f"patched, {threads}"], 2) for what in ("eval", "step")
            ]
            for row in report["results"]
        }
    return found


def git(*words):
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip()


def heading(name, facts):
    """Of a column: the processor, when and at which commit it was measured."""
    return f"{name}<br>{facts['date']}, {facts['commit']}"


def table(known, kind, cases):
    """A column a processor: our time, how many times longer the other takes; cases: {case: words}."""
    yield f"| {kind} |" + "".join(f" {heading(name, facts)} |" for name, facts in known.items())
    yield "|---|" + "---:|" * len(known)
    for case, words in cases.items():
        cells = [facts[kind].get(case) for facts in known.values()]
        shown = (f" {microseconds(x['mha_c_us'])}, {x['times_faster']:.1f} x |" if x else " |" for x in cells)
        yield f"| {words} |" + "".join(shown)
    yield ""


def for_benchmarks(known):
    with_readers = {name: facts["readers"] for name, facts in known.items() if "readers" in facts}
    for name, readers in with_readers.items():
        yield from readers_table(name, readers)
    known = {name: facts for name, facts in known.items() if "evaluation" in facts}
    for kind, cases in (("evaluation", IN_TABLE), ("training", IN_TRAINING)):
        facts = {case: x for each in reversed(known.values()) for case, x in each[kind].items()}
        wanted = {case: f"{words({'case': case, **facts[case]})} ({case})" for case in cases if case in facts}
        yield from table(known, kind, wanted)
    yield from (f"{name}: {facts['machine']}.  " for name, facts in {**with_readers, **known}.items())


def readers_table(name, facts):
    """Whole encoders: with the reader's threads, and with one."""
    columns = f"{facts['threads']} threads", "in training", "one thread", "in training"
    yield f"| whole encoder in torch, {heading(name, facts)} |" + "".join(f" {x} |" for x in columns)
    yield "|---|" + "---:|" * len(columns)
    for shape in facts["reader"]:
        d2l, hiddens, heads, ffn, layers, batch, steps = shape.split(", ")
        model = f"{d2l}: {layers} blocks, {hiddens} hidden, {heads} heads, {ffn} between; {batch} x {steps} tokens"
        yield f"| {model} |" + "".join(f" {x:.2f} x |" for x in (*facts["reader"][shape], *facts["one"][shape]))
    yield ""


def put_into(page, lines):
    before, _, rest = page.read_text().partition("<!-- measured -->")
    after = rest.partition("<!-- end of measured -->")[2]
    body = "\n".join(lines).rstrip()
    page.write_text(f"{before}<!-- measured -->\n{body}\n<!-- end of measured -->{after}")


def microseconds(time):
    return f"{time:.1f} us" if time < 100 else f"{time:.0f} us" if time < 1e4 else f"{time / 1e3:.1f} ms"


def keep(machine, found):
    """Adds what was found on this processor to what is known of it; returns its name."""
    name = known_as(machine["processor"])
    file = MEASURED / f"{stem(name)}.json"
    before = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**before, **found}, indent=1) + "\n")
    return name


def main(*sources):
    if sources[:1] == ("--readers",):
        report = json.loads(Path(sources[1]).read_text())
        keep(report["machine"], {"readers": readers_summary(report)})
    elif sources:
        report, training = (json.loads(Path(source).read_text()) for source in sources)
        results, machine = report["results"], report["machine"]
        name = keep(machine, summary(report, training))
        said = f"{machine['processor']}, {machine['isa']}, torch {machine['torch'].split()[0]}"
        bars = [(result["case"], words(result), result["ratio_min"]) for result in results]
        with matplotlib.rc_context({"svg.fonttype": "none", "font.size": 8}):
            drawn = chart(bars, machine["threads"], said)
            drawn.savefig(ROOT / "docs" / f"benchmark-{stem(name)}.svg", metadata=UNDATED)
    files = {name: MEASURED / f"{stem(name)}.json" for name in PROCESSORS}
    known = {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}
    put_into(ROOT / "benchmarks" / "README.md", for_benchmarks(known))
    for name, ground, ink in (("speed", "white", "black"), ("speed-dark", "#0d1117", "#e6edf3")):
        with matplotlib.rc_context({**dict.fromkeys(INKED, ink), "font.size": 11.5}):
            figure = readme_chart(known)
        figure.savefig(ROOT / "docs" / "img" / f"{name}.svg", metadata=UNDATED, facecolor=ground)


def readme_chart(known):
    """How many times as fast whole encoders are: with the threads that a reader has, and with one."""
    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.add_subplot(facecolor="none")
    bars, rows = {}, [f"{words}{more}" for words in IN_README.values() for more in ("", ",\nin training")]
    for name, facts in ((name, facts["readers"]) for name, facts in known.items() if "readers" in facts):
        for threads, said in (("reader", f"{facts['threads']} threads, as a reader has them"), ("one", "one thread")):
            bars[f"{name}, {said}"] = [ratio for shape in IN_README for ratio in facts[threads][shape]]
    height = 0.8 / len(bars)
    for i, ratios in enumerate(bars.values()):
        for j, ratio in enumerate(ratios):
            at = j + (i - (len(bars) - 1) / 2) * height
            axes.barh(at, ratio - 1, left=1, height=0.9 * height, color=SHADES[i])
            axes.text(ratio + 0.01, at, f"{ratio:.1f}", va="center", fontsize=10.5)
    axes.set_xlim(1, 2.15)
    axes.set_xticks([1, 1.25, 1.5, 1.75, 2], ["1", "1.25", "1.5", "1.75", "2"])
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel("times as fast as the book's code: whole encoders in torch")
    axes.spines[["top", "right"]].set_visible(False)
    patches = [Patch(color=shade) for shade in SHADES[: len(bars)]]
    figure.legend(patches, bars, loc="outside upper center", ncols=2, frameon=False)
    return figure


def chart(bars, threads, machine):
    """bars: (case, words, how many times faster)."""
    figure = Figure(figsize=(9, 0.19 * len(bars) + 1), layout="constrained")
    axes = figure.add_subplot()
    ratios = [ratio for _, _, ratio in bars]
    for kind, colour in COLOURS.items():
        places = [i for i, (case, _, _) in enumerate(bars) if case.startswith(kind)]
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
    axes.set_yticks(range(len(bars)), [text for _, text, _ in bars])
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.set_xlabel(f"times faster, {threads} thread{'s' if threads != 1 else ''}\n{machine}")
    figure.legend(loc="outside upper center", ncols=3, frameon=False, fontsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


if __name__ == "__main__":
    main(*sys.argv[1:])
