"""python -m mha_c prints the configuration; python -m mha_c demo runs the book's examples."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

USAGE = """usage: python -m mha_c            what this installation computes with
       python -m mha_c demo       the book's examples, with the time of each
       python -m mha_c.selftest   every instruction set of this CPU against plain NumPy"""


def main(arguments: Sequence[str]) -> int:
    if not arguments:
        from .config import show_config

        show_config()
        return 0
    if list(arguments) == ["demo"]:
        from .demo import main as demo

        demo()
        return 0
    asked = list(arguments) in (["-h"], ["--help"], ["help"])
    print(USAGE, file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


def quietly(arguments: Sequence[str]) -> int:
    """Run `main`; no error if the reader of the output stops early, as `head` does."""
    try:
        status = main(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout again at exit
        return 1
    return status


if __name__ == "__main__":
    sys.exit(quietly(sys.argv[1:]))
