"""make playground: compiles the core for browsers, and writes build/playground.html, one file that computes with it.

    build/zig/bin/python tools/playground.py          # also puts the new core into the package, where it is committed
    build/zig/bin/python tools/playground.py --keep   # leaves the package's: a test says whether it is the same
    python3 tools/playground.py --known               # the page alone, if these sources made the package's core

tools/playground.txt says of which sources and flags the package's core was made: as long as they are the same, `make
playground` needs no compiler.  `make playground ARGS=--compile` compiles all the same and ends with an error if that
gives another core; by night it does.
The compiler is the zig that makes the wheels (tools/wheels/requirements.txt); mha_c/viz/whole_page.py puts the core
into the page, here and after `pip install`.  Two runs give the same bytes.  Needs nothing that is installed but zig.
"""

import argparse
import hashlib
import importlib
import os
import subprocess
import sys
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build"
COMPILED = BUILD / "playground" / "core.wasm"
MOST_BYTES = 1_500_000
FLAGS = [
    "-target", "wasm32-wasi", "-mexec-model=reactor", "-O3", "-std=c11", "-ffp-contract=off", "-fno-math-errno",
    "-fno-trapping-math", "-fno-sanitize=all", "-DNDEBUG", "-DMHA_NO_THREADS", "-w", "-Wl,--strip-all",
]  # fmt: skip
CORE = ["attention", "kernels", "layer", "runtime"]
MADE_OF = ROOT / "tools" / "playground.txt"


def made_of(core):
    """What MADE_OF has if these sources, flags and this compiler made this core."""
    pinned = (ROOT / "tools" / "wheels" / "requirements.txt").read_text(encoding="utf-8")
    compiler = [line for line in pinned.splitlines() if line.startswith("ziglang==")]
    found = hashlib.sha256(repr((FLAGS, compiler)).encode())
    sources = [path for folder in ("", *CORE) for path in sorted((ROOT / "csrc" / folder).glob("*.*"))]
    for path in (ROOT / "tools" / "playground.c", *sources):
        found.update(path.name.encode() + b"\0" + path.read_bytes())
    return f"sources {found.hexdigest()}\ncore {hashlib.sha256(core).hexdigest()}\n"


def compile_core():
    """The core as a WebAssembly module, in COMPILED."""
    COMPILED.parent.mkdir(parents=True, exist_ok=True)
    cache = str(COMPILED.parent / "zig")
    sources = [path for folder in CORE for path in sorted((ROOT / "csrc" / folder).glob("*.c"))]
    command = [sys.executable, "-m", "ziglang", "cc", *FLAGS, "-Icsrc", "tools/playground.c"]
    command += [str(path.relative_to(ROOT)) for path in sources]
    environment = {"ZIG_GLOBAL_CACHE_DIR": cache, "ZIG_LOCAL_CACHE_DIR": cache}
    subprocess.run([*command, "-o", str(COMPILED)], cwd=ROOT, check=True, env={**environment, **os.environ})


def whole_page():
    """mha_c.viz.whole_page by itself: the package would want its extension and NumPy."""
    for name in ("mha_c", "mha_c.viz"):
        package = sys.modules[name] = types.ModuleType(name)
        package.__path__ = [str(ROOT.joinpath(*name.split(".")))]
    return importlib.import_module("mha_c.viz.whole_page")


def core_for(page, options):
    """The core of the page: the package's, if it is of these sources, or compiled now."""
    core = page.CORE.read_bytes()
    if MADE_OF.exists() and MADE_OF.read_text(encoding="utf-8") == made_of(core) and not options.compile:
        COMPILED.parent.mkdir(parents=True, exist_ok=True)
        COMPILED.write_bytes(core)
        return core
    if options.known:
        raise SystemExit(1)
    print("compiling the core for the browser: a minute or two, several on a busy machine", flush=True)
    compile_core()
    compiled = COMPILED.read_bytes()
    if options.compile and compiled != core:
        raise SystemExit(f"these sources make another {page.CORE.relative_to(ROOT)}: make playground, then commit it")
    if not options.keep and not options.compile:
        page.CORE.write_bytes(compiled)
        MADE_OF.write_text(made_of(compiled), encoding="utf-8")
        print(f"commit {page.CORE.relative_to(ROOT)} and {MADE_OF.relative_to(ROOT)} if they are new.")
    return compiled


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true", help="leave the package's core as it is")
    parser.add_argument("--known", action="store_true", help="compile nothing: exit 1 where that would be needed")
    parser.add_argument("--compile", action="store_true", help="always, and exit 1 if that gives another core")
    page = whole_page()
    core = core_for(page, parser.parse_args())
    text = page.whole_page(core, os.environ.get("MHA_C_REPOSITORY")).encode()
    target = BUILD / "playground.html"
    if len(text) > MOST_BYTES:
        raise SystemExit(f"{target.name} has {len(text)} bytes, at most {MOST_BYTES}")
    target.write_bytes(text)
    print(f"Open {target.relative_to(ROOT)} ({len(text) / 1000:.0f} kB) in a browser.")


if __name__ == "__main__":
    main()
