"""The page of `layer.playground()` in the wheels of `make wheels`; an ordinary build from the sources has none."""

import shutil
import subprocess
import sys
import zipfile

PAGE = "mha_c/viz/playground.html"  # beside the module that looks for it
ELEMENT = b'<div class="mhac" data-mhac="playground">'  # what a reader's layer is written in front of


def add(source, package):
    """`make playground` in the folder of the sources; its page goes to the package's files."""
    subprocess.run([sys.executable, "tools/playground.py"], cwd=source, check=True)
    shutil.copyfile(source / "build" / "playground.html", package / PAGE)


def check(wheel):
    """The page's size; an AssertionError where the wheel has none, or another."""
    with zipfile.ZipFile(wheel) as archive:
        assert PAGE in archive.namelist(), "no page"
        text = archive.read(PAGE)
    assert ELEMENT in text, f"{PAGE} is another page"
    return f"{len(text) // 1000} kB"
