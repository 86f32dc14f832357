"""make playground: writes build/playground.html, one file that computes attention with the C core in any browser.

    build/zig/bin/python tools/playground.py

The core is compiled for WebAssembly by the zig that makes the wheels (tools/wheels/requirements.txt), and stands in the
page beside the scripts of playground/ and those of mha_c/viz that it shares with the pages of `mha_c.viz.view` and
`mha_c.teach`.  Two runs give the same bytes.  Needs nothing that is installed but zig.
"""

import argparse
import base64
import importlib.util
import json
import os
import subprocess
import sys
import zlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD, SOURCES, VIZ = ROOT / "build", ROOT / "playground", ROOT / "mha_c" / "viz"
MOST_BYTES = 1_500_000
FLAGS = [
    "-target", "wasm32-wasi", "-mexec-model=reactor", "-O3", "-std=c11", "-ffp-contract=off", "-fno-math-errno",
    "-fno-trapping-math", "-fno-sanitize=all", "-DNDEBUG", "-DMHA_NO_THREADS", "-w", "-Wl,--strip-all",
]  # fmt: skip
CORE = ["attention", "kernels", "layer", "runtime"]
SHARED = [
    "base.js", "store.js", "matrix.js", "lines.js", "sentence.js", "frame.js", "view.js", "grids.js", "scenes.js",
    "lines_of_code.js", "teach.js",
]  # fmt: skip
WORKER = ["core.js", "worker.js"]
TITLE = "Attention playground"
TEXT = "This page computes attention in your browser. It needs JavaScript and WebAssembly."


def compiled():
    """The core as a WebAssembly module."""
    module = BUILD / "playground" / "core.wasm"
    module.parent.mkdir(parents=True, exist_ok=True)
    cache = str(BUILD / "playground" / "zig")
    sources = [path for folder in CORE for path in sorted((ROOT / "csrc" / folder).glob("*.c"))]
    command = [sys.executable, "-m", "ziglang", "cc", *FLAGS, "-Icsrc", "playground/core.c"]
    command += [str(path.relative_to(ROOT)) for path in sources]
    environment = {"ZIG_GLOBAL_CACHE_DIR": cache, "ZIG_LOCAL_CACHE_DIR": cache}
    subprocess.run([*command, "-o", str(module)], cwd=ROOT, check=True, env={**environment, **os.environ})
    return module.read_bytes()


def shared_page():
    """mha_c/viz/page.py by itself: the package would want its extension and NumPy."""
    found = importlib.util.spec_from_file_location("page", VIZ / "page.py")
    page = importlib.util.module_from_spec(found)
    found.loader.exec_module(page)
    return page


def tile_steps():
    """What the player of the online softmax says."""
    return json.loads((ROOT / "mha_c" / "teach" / "players.json").read_text(encoding="utf-8"))["tiles"]


def written(module):
    """The page's HTML around a module."""
    page = shared_page()
    styles = [VIZ / "base.css", VIZ / "view.css", VIZ / "teach.css", SOURCES / "playground.css"]
    own = sorted(path for path in SOURCES.glob("*.js") if path.name != "worker.js")
    own += sorted((SOURCES / "chapters").glob("*.js"))
    parts = [page.asset(path) for path in [*(VIZ / name for name in SHARED), *own]]
    worker = page.joined([page.asset(SOURCES / name) for name in WORKER])
    packed = base64.b64encode(zlib.compress(module, 9)).decode()
    data = {"title": TITLE, "core": packed, "worker": worker, "tileSteps": tile_steps()}
    if os.environ.get("MHA_C_REPOSITORY"):  # where the reader finds the rest
        data["repository"] = os.environ["MHA_C_REPOSITORY"]
    data["models"] = json.loads((SOURCES / "lecture_models.json").read_text(encoding="utf-8"))
    style = json.dumps("".join(map(page.asset, styles)))
    start = f"openPlayground({style}, {page.as_javascript(data)});"
    script = page.joined([*parts, start])
    blob = f'<div class="mhac" data-mhac="playground"><p>{TEXT}</p></div>\n<script>{script}</script>'
    return page.document(TITLE, blob, script, allowed=" 'wasm-unsafe-eval'; worker-src blob:")


def main():
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    target = BUILD / "playground.html"
    print("compiling the core for the browser: a minute or two, several on a busy machine", flush=True)
    text = written(compiled()).encode()
    if len(text) > MOST_BYTES:
        raise SystemExit(f"{target.name} has {len(text)} bytes, at most {MOST_BYTES}")
    target.write_bytes(text)
    print(f"Open {target.relative_to(ROOT)} ({len(text) / 1000:.0f} kB) in a browser.")


if __name__ == "__main__":
    main()
