"""make nightly: what takes long, one part after the other, and a page that says how each ended.

    python tools/nightly.py                     all parts: some hours on two cores
    python tools/nightly.py sanitize fuzz       these
    python tools/nightly.py --page              the page alone, of the parts that have run, here or elsewhere

A part is a goal of the Makefile.  What it prints goes to build/nightly/PART.log, how it ended to PART.json, and the
page to build/nightly/report.md.  Properties are tried on new examples every time; one that fails prints the line that
brings it back.
"""

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from torches import python, torches

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "nightly"
TODAY = datetime.date.today()
PARTS = {
    "suite": ["test", "MHA_C_NIGHTLY=1"],
    "playground": ["playground", "ARGS=--compile"],
    "clients": ["clients"],
    "guards": ["guards"],
    "sanitize": ["sanitize"],
    "valgrind": ["valgrind"],
    "tsan": ["tsan"],
    "fuzz": ["fuzz", "ARGS=--seconds 300"],
    "mutants": ["mutants", f"ARGS=--count 150 --seed {TODAY.timetuple().tm_yday}"],
    "coverage": ["coverage"],
    "free-threaded": ["free-threaded", "PYTHON=3.14t"],
    "marimo": ["test-marimo"],
    "numpy-1.21.6": ["test-numpy", "NUMPY=1.21.6", "PYTHON=3.9"],
    **{
        f"torch-{version}": ["test-torch", f"TORCH={version}", f"PYTHON={python(row)}"]
        for version, row in torches().items()
    },
}
# The line in which a program says how it ended: pytest, then whatever others print last.
ENDED = re.compile(r"^=*\s*(\d+ (?:passed|failed|error).* in [\d.]+s.*?)\s*=*$", re.MULTILINE)


def command(part):
    """The words of make; a Python's version becomes its path."""

    def told(word):
        key, _, version = word.partition("=")
        if key != "PYTHON":
            return word
        finder = [sys.executable, str(ROOT / "tools" / "wheels" / "pythons.py"), version]
        path = subprocess.run(finder, stdout=subprocess.PIPE, text=True).stdout.strip()
        return f"PYTHON={path or f'python{version}'}"

    return ["make", *map(told, PARTS[part])]


def run(part):
    """Its result, which is kept beside its log."""
    log, begun = FOLDER / f"{part}.log", time.monotonic()
    print(f"{part}: {log.relative_to(ROOT)}", flush=True)
    with open(log, "w", encoding="utf-8") as file:
        status = subprocess.run(
            command(part), cwd=ROOT, stdout=file, stderr=subprocess.STDOUT,
            env={**os.environ, "MHA_C_FREE_SEEDS": "1"},
        ).returncode  # fmt: skip
    text = log.read_text(encoding="utf-8", errors="replace")
    lines = [line for line in text.splitlines() if line.strip()]
    said = ENDED.findall(text) or lines[-1:] or ["nothing"]
    failures = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    result = {"status": status, "minutes": (time.monotonic() - begun) / 60, "said": said, "failures": failures[:20]}
    (FOLDER / f"{part}.json").write_text(json.dumps(result), encoding="utf-8")
    return status


def page():
    """The parts that have run, those that failed first."""
    results = {part: json.loads((FOLDER / f"{part}.json").read_text(encoding="utf-8"))
               for part in PARTS if (FOLDER / f"{part}.json").exists()}  # fmt: skip
    failed = [part for part, result in results.items() if result["status"] != 0]
    yield f"# Nightly run of {TODAY}: {len(results) - len(failed)} of {len(results)} parts passed"
    yield ""
    yield "| part | | minutes | said |"
    yield "|---|---|---|---|"
    for part in sorted(results, key=lambda part: part not in failed):
        result = results[part]
        said = "; ".join(result["said"])[-200:].replace("|", "\\|")
        yield f"| {part} | {'FAILED' if part in failed else 'passed'} | {result['minutes']:.0f} | {said} |"
    for part in failed:
        yield from ["", f"## {part}: exit status {results[part]['status']}", ""]
        yield from [f"- `{line[:300]}`" for line in results[part]["failures"]] or [f"see {part}.log"]
    missing = [part for part in PARTS if part not in results]
    yield from ["", f"Not run: {', '.join(missing)}."] if missing else []


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="all of them if none is named")
    parser.add_argument("--page", action="store_true", help="run nothing")
    arguments = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    statuses = [] if arguments.page else [run(part) for part in arguments.parts or PARTS]
    text = "\n".join(page()) + "\n"
    (FOLDER / "report.md").write_text(text, encoding="utf-8")
    print(text)
    if os.environ.get("GITHUB_STEP_SUMMARY"):  # there it is the page of the run
        with open(os.environ["GITHUB_STEP_SUMMARY"], "a", encoding="utf-8") as summary:
            summary.write(text)
    return any(statuses) or (arguments.page and "FAILED" in text)


if __name__ == "__main__":
    sys.exit(main())
