"""Do the tests notice?  Changes the C core in one place at a time, rebuilds, runs tests, and lists what no test saw.

    python tools/mutants.py [--count 60] [--seed 0] [--at FILE:LINE ...] [--jobs 2] [--python PYTHON]

A mutant is one changed operator, constant, comparison, negation, min/max, or one statement left out, in the kernels'
texts and the drivers.  It is killed if a C test program (tests/c, built for scalar and avx2) or, failing that, a few
pytest files report a failure, crash, hang or do not build.  Sites are drawn with a fixed seed, so that runs compare.
Mutants that give the same machine code are none, and survivors that can change speed only are explained in
tools/mutants_explained.txt, one `file: line of code` or `file: line of code => changed line` each; both count neither
way, and both are printed.  Exit status 1 if fewer than 90 % of the rest are killed.
"""

import argparse
import os
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "mutants"
EXPLAINED = ROOT / "tools" / "mutants_explained.txt"
TEXTS = ["kernels/*.inc", "attention/*.c", "attention/walk.h", "layer/*.c", "runtime/scratch.c"]
PROGRAMS = ["visible", "arguments", "attention", "values", "projections", "slices", "backward", "shared_gradients",
            "failures", "guards", "safety", "explain", "scratch", "math"]  # fmt: skip
PROGRAMS = [f"test_{name}" for name in PROGRAMS]
PYTESTS = ["test_functional.py", "test_dropout.py", "test_gradients.py", "test_gradient_bits.py",
           "test_binding_results.py", "test_layers.py", "test_layer_backward.py", "test_determinism.py",
           "test_arrangements.py", "test_exactness.py", "test_score_terms.py", "test_weights_in_rows.py",
           "test_step.py", "test_paths.py", "test_explain.py"]  # fmt: skip
FLAGS = ["-std=c11", "-O1", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-pthread", "-w", "-DMHA_DEBUG"]
FLAGS += ["-fsanitize=bounds", "-fsanitize-undefined-trap-on-error"]  # tests/core/test_c_core.py sanitizes more
SWAPS = [(" < ", " <= "), (" <= ", " < "), (" > ", " >= "), (" >= ", " > "), (" == ", " != "), (" != ", " == "),
         (" + ", " - "), (" - ", " + "), (" * ", " + "), (" / ", " * "), (" % ", " / "), (" += ", " -= "),
         (" && ", " || "), (" || ", " && "), ("mha_min(", "mha_max("), ("mha_max(", "mha_min(")]  # fmt: skip
NOTHING = "the same machine code"
STATEMENT = re.compile(
    r"^ +(?!return|const|size_t|char|mha_rows|double|int|vf )[\w\->.\[\]]+(\([^;{}]*\)| [+*-]?= [^;{}]*);$"
)


def sites_of(path):
    """(line number, old line, new line) of every mutant of a file."""
    in_comment = False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
        starts, code = in_comment, re.sub(r'"[^"]*"|/\*.*?\*/', lambda m: " " * len(m.group()), line)
        in_comment = ("*/" not in code) if starts else ("/*" in code)
        if starts or in_comment or code.lstrip().startswith(("#", "MHA_ASSERT", "_Static")) or "(void)" in code:
            continue
        for old, new in SWAPS:
            for found in re.finditer(re.escape(old), code):
                yield number, line, line[: found.start()] + new + line[found.end() :]
        for found in re.finditer(r"(?<![\w.\[])\d+(?![\w.xX])", code):
            value = int(found.group())
            yield number, line, f"{line[: found.start()]}{value + 1 if value != 1 else 0}{line[found.end() :]}"
        for found in re.finditer(r"(?<=[ (])!(?=[\w(])", code):
            yield number, line, line[: found.start()] + line[found.end() :]
        if STATEMENT.match(code):
            yield number, line, re.sub(r"\S.*", ";", line)


class Build:
    """A copy of the sources in a folder, objects of the unchanged ones, and how to make the rest again."""

    def __init__(self, python, work):
        self.python, self.work = python, work
        self.patience = 10.0  # by how much slower than a quiet machine this one may be
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(ROOT / "csrc", work / "csrc")
        # Without AVX-512, which takes longest to compile and whose kernels have the same texts.
        cpu = work / "csrc" / "runtime" / "cpu.c"
        text = cpu.read_text(encoding="utf-8").replace("return x86_offers(HAS_AVX512, SAVES_ZMM);", "return 0;")
        cpu.write_text(text, encoding="utf-8")
        asked = (
            "import numpy, sysconfig as s;"
            "print(numpy.get_include(), s.get_paths()['include'], s.get_config_var('EXT_SUFFIX'))"
        )
        numpy, headers, self.suffix = subprocess.check_output([python, "-c", asked], text=True).split()
        self.includes = [f"-I{work / 'csrc'}", f"-I{ROOT / 'tests' / 'c'}", f"-I{numpy}", f"-I{headers}"]
        package = work / "package" / "mha_c"
        shutil.copytree(ROOT / "mha_c", package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        self.sources = sorted(p for p in (work / "csrc").rglob("*.c"))
        self.compile(self.sources)
        programs = [ROOT / "tests" / "c" / f"{name}.c" for name in PROGRAMS]
        self.compile(programs)
        self.unchanged = {source: self.object_of(source).read_bytes() for source in self.sources}

    def object_of(self, source):
        return self.work / f"{source.parent.name}-{source.stem}.o"

    def compile(self, sources):
        def one(source):
            target = str(self.object_of(source))
            return self.passes(["cc", *FLAGS, *self.includes, "-c", str(source), "-o", target], 600)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return all(pool.map(one, sources))

    def is_unchanged(self, sources):
        """Whether the objects are those of the unchanged sources, to the byte."""
        return all(self.object_of(source).read_bytes() == self.unchanged[source] for source in sources)

    def link(self, program):
        core = [str(self.object_of(s)) for s in self.sources if self.work / "csrc" / "python" not in s.parents]
        text = (ROOT / "tests" / "c" / f"{program}.c").read_text(encoding="utf-8")
        stated = re.search(r"^ \* build: (.*)$", text, re.MULTILINE)
        wanted = stated.group(1).split() if stated else []
        own = str(self.object_of(ROOT / "tests" / "c" / f"{program}.c"))
        command = ["cc", own, *core, *wanted, "-pthread", "-lm", "-o", str(self.work / program)]
        return subprocess.run(command, capture_output=True).returncode == 0

    def link_extension(self):
        target = self.work / "package" / "mha_c" / f"_core{self.suffix}"
        command = ["cc", "-shared", *map(str, map(self.object_of, self.sources)), "-pthread", "-lm", "-o", str(target)]
        return subprocess.run(command, capture_output=True).returncode == 0

    def killer(self):
        """The first test that fails, or None."""
        for program in PROGRAMS:
            if not self.link(program) or not self.passes([str(self.work / program), "quick"], 60):
                return program
        if not self.link_extension():
            return "the linker"
        files = [str(next(ROOT.glob(f"tests/*/{name}"))) for name in PYTESTS]
        options = ["-x", "-q", "-p", "no:cacheprovider", "-W", "ignore", "-k", "not avx512 and not as_good_as"]
        where = [f"--rootdir={ROOT}", f"--config-file={ROOT / 'pyproject.toml'}"]
        command = [self.python, "-m", "pytest", *where, *options]
        environment = {**os.environ, "PYTHONPATH": str(self.work / "package"), "OMP_NUM_THREADS": "2"}
        return None if self.passes([*command, *files], 400, environment) else "pytest"

    def passes(self, command, seconds, environment=None):
        """Whether it ends well, in so many seconds of a quiet machine."""
        seconds *= self.patience
        try:
            done = subprocess.run(command, capture_output=True, timeout=seconds, env=environment, cwd=self.work)
        except subprocess.TimeoutExpired:
            return False
        if -done.returncode in (signal.SIGKILL, signal.SIGTERM):
            raise RuntimeError(f"{command[0]} was killed from outside: nothing is known")
        return done.returncode == 0


def try_mutant(build, path, number, new):
    """The name of the test that kills the mutant, NOTHING if it is none, or None."""
    copy = build.work / "csrc" / path.relative_to(ROOT / "csrc")
    original = copy.read_text(encoding="utf-8")
    lines = original.splitlines(keepends=True)
    lines[number] = new + "\n"
    copy.write_text("".join(lines), encoding="utf-8")
    units = [f"{isa}_{number}.c" for isa in ("scalar", "avx2") for number in ("f32", "f64")]
    kernels = [build.work / "csrc" / "kernels" / unit for unit in units]
    if path.suffix == ".h":
        changed = [source for source in build.sources if source.parent.name != "kernels"]
    else:
        changed = kernels if path.suffix == ".inc" else [copy]
    try:
        if not build.compile(changed):
            return "the compiler"
        return NOTHING if build.is_unchanged(changed) else build.killer()
    finally:
        copy.write_text(original, encoding="utf-8")
        build.compile(changed)


def judged(sites, python, jobs):
    """Each site with what kills it, as soon as that is known; `jobs` builds side by side."""
    builds = queue.Queue()

    def start(number):
        build = Build(python, WORK / str(number))
        started = time.monotonic()
        first = build.killer()
        # A hang is four times what all tests took together.
        build.patience = max(1.0, (time.monotonic() - started) / 100)
        builds.put(build)
        return first

    def judge(site):
        build = builds.get()
        try:
            path, number, _, new = site
            return site, try_mutant(build, path, number, new)
        finally:
            builds.put(build)

    with ThreadPoolExecutor(jobs) as pool:
        failing = [first for first in pool.map(start, range(jobs)) if first]
        if failing:
            sys.exit(f"the unchanged core fails {failing[0]}")
        yield from pool.map(judge, sites)


def explained():
    lines = EXPLAINED.read_text(encoding="utf-8").splitlines() if EXPLAINED.exists() else []
    return {line.split(" -> ")[0].strip() for line in lines if line and not line.startswith("#")}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="mutants at a time")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--at", nargs="*", default=[], metavar="FILE:LINE", help="these places instead of a sample")
    options = parser.parse_args()
    paths = sorted(path for pattern in TEXTS for path in (ROOT / "csrc").glob(pattern))
    sites = [(path, *site) for path in paths for site in sites_of(path)]
    print(f"{len(sites)} mutants are possible in {len(paths)} files")
    if options.at:
        sites = [s for s in sites if f"{s[0].name}:{s[1] + 1}" in options.at]
    else:
        sites = random.Random(options.seed).sample(sites, min(options.count, len(sites)))
    known = explained()
    n_killed, n_nothing, survivors = 0, 0, []
    for (path, number, old, new), killer in judged(sites, options.python, options.jobs):
        where = f"{path.name}: {old.strip()}"
        n_nothing += killer == NOTHING
        n_killed += killer not in (None, NOTHING)
        if killer is None:
            survivors.append(where if where in known else f"{where} => {new.strip()}")
        state = killer or ("survives, as explained" if survivors[-1] in known else "SURVIVES")
        print(f"{path.name}:{number + 1}: {old.strip()}  ->  {new.strip()}: {state}", flush=True)
    unexplained = [where for where in survivors if where not in known]
    total = n_killed + len(unexplained)
    rate = n_killed / max(total, 1)
    n_explained = len(survivors) - len(unexplained)
    print(f"{len(sites)} mutants: {n_nothing} are the same code, {n_killed} are killed, {len(survivors)} survive,")
    print(f"of which {n_explained} are explained; {rate:.1%} of the other {total} are killed")
    return rate < 0.9


if __name__ == "__main__":
    sys.exit(main())
