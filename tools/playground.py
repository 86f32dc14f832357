"""make playground: compiles the core for browsers, and writes build/playground.html, one file that computes with it.

    build/zig/bin/python tools/playground.py          # also puts the new core into the package, where it is committed
    build/zig/bin/python tools/playground.py --keep   # leaves the package's: a test says whether it is the same

The compiler is the zig that makes the wheels (tools/wheels/requirements.txt); mha_c/viz/whole_page.py puts the core
into the page, here and after `pip install`.  Two runs give the same bytes.  Needs nothing that is installed but zig.
"""

import argparse
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


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true", help="leave the package's core as it is")
    keep = parser.parse_args().keep
    print("compiling the core for the browser: a minute or two, several on a busy machine", flush=True)
    compile_core()
    page, core = whole_page(), COMPILED.read_bytes()
    if core != page.CORE.read_bytes() and not keep:
        page.CORE.write_bytes(core)
        print(f"{page.CORE.relative_to(ROOT)} is new: commit it.")
    text = page.whole_page(core, os.environ.get("MHA_C_REPOSITORY")).encode()
    target = BUILD / "playground.html"
    if len(text) > MOST_BYTES:
        raise SystemExit(f"{target.name} has {len(text)} bytes, at most {MOST_BYTES}")
    target.write_bytes(text)
    print(f"Open {target.relative_to(ROOT)} ({len(text) / 1000:.0f} kB) in a browser.")


if __name__ == "__main__":
    main()
