"""make test-torch: tests/torch and tests/d2l, the book's chapters among them, with another torch.

    python tools/torches.py 1.12.0 [words for pytest ...]
    python tools/torches.py 1.12.0 --environment FOLDER     in one that has this torch already
    python tools/torches.py 1.12.0 --prepare                makes the environment alone, which needs no wheel of ours
    python tools/torches.py 1.12.0 --python                 prints the Python that belongs to it, as 3.9
    python tools/torches.py --list                          prints the versions of torches.txt

The environment is made as the book's install page says, in build/torch-VERSION, and kept.  Then pip installs our
wheel, which must change nothing that is there.  A test that asks torch for what it does not have is skipped; the end of
the report says why.
Nothing but the standard library of Python 3.9 is needed, and no make: so it is the same on Windows and macOS.
"""

import argparse
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from wheels.pythons import pythons

ROOT = Path(__file__).resolve().parents[1]
TABLE, WHEELS, EMPTY = ROOT / "tools" / "torches.txt", ROOT / "build" / "wheel", ROOT / "build" / "run"
COLUMNS = "torch python numpy matplotlib d2l".split()


def torches():
    """{version: its row} in the order of the table."""
    lines = [line.split() for line in TABLE.read_text(encoding="utf-8").splitlines() if line and line[0] != "#"]
    return {line[0]: dict(zip(COLUMNS, line)) for line in lines}


def python(row):
    """The version of Python for a row: of those it names, the first that this machine has, else the last."""
    *first, last = row["python"].split(",")
    return next((x for x in first if (tuple(map(int, x.split("."))), False) in pythons(x)), last)


def run(*command):
    """From an empty folder, so that the installed wheel is what is imported; ends this process if it fails."""
    words = [str(word) for word in command]
    print(" ".join(words), flush=True)
    status = subprocess.run(words, cwd=EMPTY).returncode
    if status != 0:
        raise SystemExit(status)


def interpreter(environment):
    return environment / ("Scripts/python.exe" if sysconfig.get_platform().startswith("win") else "bin/python")


def pip(environment, *words):
    run(interpreter(environment), "-m", "pip", "-q", "--disable-pip-version-check", *words)


def make(environment, row):
    """The environment that the book's page makes, and pytest."""
    done = environment / "made"
    if done.exists():
        return
    venv.create(environment, clear=True, with_pip=True)
    pip(environment, "install", "--upgrade", "pip>=25.1")  # the first that knows --group
    pinned = [f"{name}=={row[name]}" for name in ("torch", "numpy", "matplotlib")]
    pip(environment, "install", "--no-cache-dir", *pinned)
    if row["d2l"] != "-":  # its own pins are for notebooks
        pip(environment, "install", "--no-deps", f"d2l=={row['d2l']}")
    pip(environment, "install", *pinned, "--group", f"{ROOT / 'pyproject.toml'}:native")
    done.touch()


def packages(environment):
    freeze = [str(interpreter(environment)), "-m", "pip", "--disable-pip-version-check", "freeze", "--all"]
    return set(subprocess.run(freeze, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines())


def install(environment):
    """The wheel, by `pip install mha_c[torch,viz]`; an error unless all that was there is there as it was."""
    (wheel,) = WHEELS.glob("*.whl")
    pip(environment, "uninstall", "-y", "mha_c")
    before = packages(environment)
    pip(environment, "install", "--prefer-binary", f"{wheel}[torch,viz]")
    after = packages(environment)
    changed, new = sorted(before - after), sorted(after - before)
    if changed or [line for line in new if not line.startswith("mha_c")]:
        raise SystemExit(f"pip has changed the environment: {', '.join(changed)} became {', '.join(new)}")
    print(f"pip added {', '.join(new)} and changed nothing of {len(before)} packages", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("torch", nargs="?", choices=[*torches()])
    parser.add_argument("--environment", type=Path)
    parser.add_argument("--prepare", action="store_true")
    parser.add_argument("--python", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--jobs", default=str((os.cpu_count() or 1) + 1), help="files that run side by side")
    arguments, words = parser.parse_known_args()
    if arguments.list or arguments.torch is None:
        print(*torches(), sep="\n")
        return
    row = torches()[arguments.torch]
    if arguments.python:
        print(python(row))
        return
    EMPTY.mkdir(parents=True, exist_ok=True)
    environment = arguments.environment
    if environment is None:
        version = ".".join(map(str, sys.version_info[:2]))
        if version not in row["python"].split(","):
            print(f"*** torch {arguments.torch} belongs to Python {row['python']}, this is {version} ***", flush=True)
        environment = ROOT / "build" / f"torch-{arguments.torch}"
        make(environment, row)
    if arguments.prepare:
        return
    install(environment)
    options = [f"--config-file={ROOT / 'pyproject.toml'}", f"--rootdir={ROOT}", "-p", "no:cacheprovider", "-q", "-rfEs"]
    options += ["-n", arguments.jobs, "--dist", "loadfile", "--no-loadscope-reorder"]
    options += ["-o", "filterwarnings=default"]  # old libraries warn of what has come since
    run(interpreter(environment), "-m", "pytest", *options, ROOT / "tests" / "torch", ROOT / "tests" / "d2l", *words)


if __name__ == "__main__":
    main()
