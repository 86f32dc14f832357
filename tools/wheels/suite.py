"""make test-numpy: the tests of the NumPy part on a wheel of a folder, in an environment of their own.

    python tools/wheels/suite.py FOLDER [--numpy 1.21.6] [--jobs 3] [words for pytest ...]

Nothing but the standard library of Python 3.9 is needed, and no make: so it is the same on Windows and macOS.
"""

import argparse
import os
import subprocess
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT, EMPTY = ROOT / "build" / "test-numpy", ROOT / "build" / "run"
# What other programs or other builds are needed for, and what is C alone.
LEFT_OUT = "browser playground c_core packaging attention_in_c".split()


def run(*command):
    """From an empty folder, so that the installed wheel is what is imported; ends this process if it fails."""
    words = [str(word) for word in command]
    print(" ".join(words), flush=True)
    status = subprocess.run(words, cwd=EMPTY).returncode
    if status != 0:
        raise SystemExit(status)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the wheels are")
    parser.add_argument("--numpy", default="", help="its version; without, the newest there is for this Python")
    parser.add_argument("--jobs", default=str((os.cpu_count() or 1) + 1), help="files that run side by side")
    arguments, words = parser.parse_known_args()
    EMPTY.mkdir(parents=True, exist_ok=True)
    venv.create(ENVIRONMENT, clear=True, with_pip=True)
    python = ENVIRONMENT / ("Scripts/python.exe" if sysconfig.get_platform().startswith("win") else "bin/python")
    pip = [python, "-m", "pip", "-q", "--disable-pip-version-check", "install"]
    run(*pip, "--upgrade", "pip>=25.1")  # the first that knows --group
    numpy = f"numpy=={arguments.numpy}" if arguments.numpy else "numpy"
    run(*pip, "--prefer-binary", numpy, "--group", f"{ROOT / 'pyproject.toml'}:native")
    wheels = arguments.folder.resolve()
    run(*pip, "--no-index", "--no-deps", "--only-binary=:all:", f"--find-links={wheels}", "mha_c")
    run(python, "-m", "mha_c", "demo")
    run(python, "-m", "mha_c.selftest")
    options = [f"--config-file={ROOT / 'pyproject.toml'}", f"--rootdir={ROOT}", "-p", "no:cacheprovider", "-q", "-rfE"]
    options += ["-n", arguments.jobs, "--dist", "loadfile", "--no-loadscope-reorder"]
    options += [f"--ignore-glob={ROOT / 'tests' / '*' / f'test_{word}*'}" for word in LEFT_OUT]
    run(python, "-m", "pytest", *options, ROOT / "tests", *words)


if __name__ == "__main__":
    main()
