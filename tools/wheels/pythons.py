"""The Pythons of this machine, on the path and of pyenv.

python tools/wheels/pythons.py 3.9     prints the command of that one; exit status 1 if there is none
"""

import os
import re
import subprocess
import sys
from pathlib import Path

WHICH = "import sys, sysconfig as s; print(*sys.version_info[:2], bool(s.get_config_var('Py_GIL_DISABLED')))"


def pythons(version="3.*"):
    """{(version, free-threaded): command} of those that we support; the first on the path is taken."""
    found = {}
    places = [*os.environ["PATH"].split(os.pathsep), *map(str, Path("~/.pyenv/versions").expanduser().glob("*/bin"))]
    for place in places:
        for path in sorted(Path(place).glob(f"python{version}")):
            if re.fullmatch(r"python3\.\d+t?", path.name):
                done = subprocess.run([str(path), "-c", WHICH], capture_output=True, text=True)
                if done.returncode == 0:
                    major, minor, free = done.stdout.split()
                    found.setdefault(((int(major), int(minor)), free == "True"), path)
    return {key: path for key, path in sorted(found.items()) if key[0] >= (3, 9)}


def main(wanted):
    version = tuple(map(int, wanted.rstrip("t").split(".")))
    path = pythons(wanted).get((version, wanted.endswith("t")))
    if path is not None:
        print(path)
    return path is None


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
