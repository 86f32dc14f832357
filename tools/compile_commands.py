"""Writes compile_commands.json, by which an editor (clangd) knows how each C file is compiled; `make dev` calls it.

python tools/compile_commands.py
"""

import json
import shlex
import sysconfig
from pathlib import Path

import setuptools

ROOT = Path(__file__).resolve().parents[1]


def commands():
    extension = setuptools.distutils.core.run_setup("setup.py", ["-q"], "init").ext_modules[0]
    folders = [*extension.include_dirs, sysconfig.get_path("include"), "tests/c"]
    macros = [f"-D{name}={value}" if value else f"-D{name}" for name, value in extension.define_macros]
    words = [*shlex.split(sysconfig.get_config_var("CC")), *extension.extra_compile_args, *macros]
    words += [f"-I{folder}" for folder in folders]
    for path in [*extension.sources, *(str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("tests/c/*.c")))]:
        yield {"directory": str(ROOT), "file": path, "arguments": [*words, "-c", path]}


if __name__ == "__main__":
    (ROOT / "compile_commands.json").write_text(json.dumps(list(commands()), indent=1) + "\n", encoding="utf-8")
