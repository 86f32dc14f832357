"""Boxes of Python, each pasted alone into a new interpreter in an empty folder: what they print, or how they end.

As a program it reads a file of boxes as JSON and writes what each printed.  What takes long to import is imported once;
then each box runs in a child of its own, which has none of our modules before its own lines import them.
"""

import contextlib
import json
import os
import sys
import tempfile
import traceback

SLOW = ("numpy", "torch", "matplotlib", "matplotlib.figure")


def named(code):
    """The packages beside NumPy that a box needs."""
    needs = {"matplotlib": ("matplotlib", "show_heatmaps", "savefig"), "torch": ("torch", "d2l"), "dask": ("dask",)}
    return [package for package, words in needs.items() if any(word in code for word in words)]


def runs(code, folder, d2l):
    os.chdir(folder)
    sys.modules.update({"d2l": d2l, "d2l.torch": d2l.torch} if d2l and "d2l" in code else {})
    exec(compile(code, "<box>", "exec"), {"__name__": "__main__"})


def printed(code, d2l):
    """(status, what the box printed and, if it failed, its error)"""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as output:
        child = os.fork()
        if child == 0:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            try:
                runs(code, folder, d2l)
                status = 0
            except BaseException:
                traceback.print_exc()
                status = 1
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(status)
        _, status = os.waitpid(child, 0)
        output.seek(0)
        return status, output.read().replace("real_d2l_1_0_3", "d2l.torch")


def real_d2l_package():
    import types

    import real_d2l

    package = types.ModuleType("d2l")
    try:
        package.torch = real_d2l.load("1.0.3")
    except (FileNotFoundError, ModuleNotFoundError):
        return None
    return package


def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        boxes = json.load(file)
    for name in SLOW:
        if name == "numpy" or any(name.partition(".")[0] in named(box) for box in boxes):
            with contextlib.suppress(ModuleNotFoundError):  # then no box that needs it is looked at
                __import__(name)
    d2l = real_d2l_package() if any("d2l import" in box for box in boxes) else None
    assert not any(name.partition(".")[0] == "mha_c" for name in sys.modules)
    json.dump([printed(box, d2l) for box in boxes], sys.stdout)


if __name__ == "__main__":
    main()
