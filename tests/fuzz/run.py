"""Fuzzes the C API with libFuzzer under AddressSanitizer and UndefinedBehaviorSanitizer.

    python tests/fuzz/run.py [--seconds 60] [--keep] [forward backward arguments]

Needs clang with its runtime (apt-get install -y clang libclang-rt-dev).  Each target starts from its corpus,
tests/fuzz/corpus/<target>.txt, one input in hexadecimal a line; the suite replays those without clang (test_c_core.py).
--keep writes back the inputs that together reach everything reached, the smallest first.  An input that fails is
printed in that form: put it into the corpus together with the fix.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
WORK = ROOT / "build" / "fuzz"
TARGETS = ("forward", "backward", "arguments")
FLAGS = ["-std=c11", "-O1", "-g", "-ffp-contract=off", "-fno-math-errno", "-fsanitize=address,undefined",
         "-fno-sanitize-recover=undefined", "-Wno-unused-function", "-Wno-pass-failed", "-pthread",
         f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'tests' / 'c'}"]  # fmt: skip
MOST_BYTES, MOST_KEPT = 96, 150


def clang():
    names = ["clang", *(f"clang-{version}" for version in range(21, 11, -1))]
    found = next((path for path in map(shutil.which, names) if path), None)
    return found or sys.exit("clang is missing: apt-get install -y clang libclang-rt-14-dev")


def build(targets):
    """The programs; objects that are newer than all sources stay, for those of AVX-512 take minutes."""
    WORK.mkdir(parents=True, exist_ok=True)
    compiler, core = clang(), sorted(path for path in ROOT.glob("csrc/*/*.c") if path.parent.name != "python")

    newest = max(path.stat().st_mtime for path in [*ROOT.glob("csrc/**/*.*"), Path(__file__)])

    def compile_source(source):
        target = WORK / f"{source.stem}.o"
        if target.exists() and target.stat().st_mtime > newest:
            return target
        subprocess.run([compiler, *FLAGS, "-fsanitize=fuzzer-no-link", "-c", source, "-o", target], check=True)
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_source, core))
    for target in targets:
        source = HERE / f"fuzz_{target}.c"
        command = [compiler, *FLAGS, "-fsanitize=fuzzer", source, *objects, "-o", WORK / target, "-lm"]
        subprocess.run(command, check=True)


def corpus_of(target):
    path = HERE / "corpus" / f"{target}.txt"
    return [bytes.fromhex(line) for line in path.read_text().splitlines()] if path.exists() else []


def fuzz(target, seconds):
    """Runs one target; returns whether it found nothing."""
    folder = WORK / f"{target}.corpus"
    folder.mkdir(exist_ok=True)
    for i, data in enumerate(corpus_of(target)):
        (folder / f"kept-{i}").write_bytes(data)
    command = [WORK / target, f"-max_total_time={seconds}", f"-max_len={MOST_BYTES}", "-timeout=60",
               "-print_final_stats=1", f"-artifact_prefix={WORK / target}-", folder]  # fmt: skip
    done = subprocess.run(command, cwd=WORK, stderr=subprocess.PIPE, text=True, errors="replace")
    runs = re.search(r"number_of_executed_units: (\d+)", done.stderr)
    covered = re.findall(r"cov: (\d+)", done.stderr)
    n_runs, n_edges = runs.group(1) if runs else "?", covered[-1] if covered else "?"
    print(f"{target}: {n_runs} runs in {seconds} s, {n_edges} edges", flush=True)
    if done.returncode != 0:
        print(done.stderr[-6000:])
        for found in WORK.glob(f"{target}-*"):
            print(f"{found.name}: {found.read_bytes().hex()}")
    return done.returncode == 0


def keep(target):
    """Writes back a small corpus that reaches what the large one does."""
    small = WORK / f"{target}.small"
    shutil.rmtree(small, ignore_errors=True)
    small.mkdir()
    command = [WORK / target, "-merge=1", f"-max_len={MOST_BYTES}", small, WORK / f"{target}.corpus"]
    subprocess.run(command, cwd=WORK, stderr=subprocess.DEVNULL, check=True)
    inputs = sorted((path.read_bytes() for path in small.iterdir()), key=lambda data: (len(data), data))
    path = HERE / "corpus" / f"{target}.txt"
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(data.hex() + "\n" for data in inputs[:MOST_KEPT] if data))
    print(f"{target}: {len(inputs)} inputs reach everything, {min(len(inputs), MOST_KEPT)} kept")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("targets", nargs="*", default=[], metavar="TARGET")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args()
    targets = options.targets or TARGETS
    build(targets)
    fine = [fuzz(target, options.seconds) for target in targets]
    if options.keep:
        for target in targets:
            keep(target)
    return not all(fine)


if __name__ == "__main__":
    sys.exit(main())
