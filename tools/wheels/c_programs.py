"""Builds the core and tests/c with zig or emscripten for a system that is not this one, and runs them there.

    python tools/wheels/c_programs.py windows | musl | browser [program ...]

windows: under wine, with Windows threads.  musl: static programs of that C library.  browser: WebAssembly in node,
without threads.  A program whose head says ` * POSIX only: why` is left out.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FLAGS = "-std=c11 -O2 -g0 -ffp-contract=off -fno-math-errno -fno-trapping-math -Wall -Wextra".split()
ZIG = [sys.executable, "-m", "ziglang", "cc", "-target"]
EMCC = ["emcc", "-DMHA_NO_THREADS", "-sALLOW_MEMORY_GROWTH=1"]
SYSTEMS = {  # compiler, words for the link, runner, suffix
    "windows": ([*ZIG, "x86_64-windows-gnu"], ["-lapi-ms-win-core-synch-l1-2-0"], ["wine"], ".exe"),
    "musl": ([*ZIG, "x86_64-linux-musl", "-pthread"], ["-static", "-lm"], [], ""),
    "browser": (EMCC, ["-O1", "-sSINGLE_FILE=1", "-sINITIAL_MEMORY=268435456"], ["node"], ".js"),
}


def said_in_head(program, key):
    found = re.search(rf"^ \* {key}: (.*)$", program.read_text(encoding="utf-8").partition("*/")[0], re.MULTILINE)
    return found and found.group(1)


def run(*command, seconds=900):
    environment = {**os.environ, "WINEDEBUG": "-all"}
    done = subprocess.run(
        [str(word) for word in command],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", timeout=seconds, env=environment,
    )  # fmt: skip
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))}\nexit status {done.returncode}\n{done.stdout[-6000:]}")
    return done.stdout


def build_and_run(system, chosen=(), extra=()):
    """Returns the names of the programs that ran; the first failure ends the process with what it printed."""
    compiler, link, runner, suffix = SYSTEMS[system]
    for needed in (compiler[0], *runner):
        if shutil.which(needed) is None:
            raise SystemExit(f"{needed} is missing: apt-get install -y wine emscripten nodejs")
    folder = ROOT / "build" / "c-programs" / "-".join([system, *(word.strip("-") for word in extra)])
    folder.mkdir(parents=True, exist_ok=True)
    flags = [*compiler, *FLAGS, *extra, f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'tests' / 'c'}"]
    sources = sorted(path for path in ROOT.glob("csrc/*/*.c") if path.parent.name != "python")
    programs = [path for path in sorted(ROOT.glob("tests/c/test_*.c")) if not said_in_head(path, "POSIX only")]
    programs = [path for path in programs if not chosen or path.stem in chosen]

    def compile_one(source):
        target = folder / f"{source.stem}.o"
        run(*flags, "-c", source, "-o", target)
        return target

    ran = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        core = list(pool.map(compile_one, sources))
    for program in programs:
        words = (said_in_head(program, "build") or "").split()
        words = [] if any("--wrap=pthread" in word for word in words) and system != "musl" else words
        own = [ROOT / "csrc" / word if word.endswith(".c") else word for word in words]
        replaced = {path.stem for path in own if isinstance(path, Path)}
        target = folder / f"{program.stem}{suffix}"
        run(*flags, program, *own, *(path for path in core if path.stem not in replaced), *link, "-o", target)
        start = time.monotonic()
        said = run(*runner, target, "quick").strip().splitlines()
        print(f"{system} {program.stem}: {said[-1] if said else 'ok'} ({time.monotonic() - start:.1f} s)", flush=True)
        ran.append(program.stem)
    return ran


if __name__ == "__main__":
    build_and_run(sys.argv[1], sys.argv[2:])
