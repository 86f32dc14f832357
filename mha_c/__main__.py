"""The command mha_c, which is also python -m mha_c."""

from __future__ import annotations

import argparse
import json
import os
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Optional

if TYPE_CHECKING:
    pass

EXAMPLES = """\
mha_c check mine.py                 which line of my attention is wrong?
mha_c check mine.py:attention --kind causal
mha_c check ada.py --json           for graders: exit status 0 right, 1 wrong, 2 could not be judged
mha_c playground                    writes playground.html, a lecture that computes in a browser, and opens it
"""
UNWRITTEN = 3  # the exit status where the answer could not be written: to a full disk, or to a reader that has gone


def config(asked: argparse.Namespace) -> int:
    from .config import show_config, version

    if asked.version:
        print(f"mha_c {version()}")
    else:
        show_config()
    return 0


def demo(_: argparse.Namespace) -> int:
    from .demo import main

    main()
    return 0


def selftest(_: argparse.Namespace) -> int:
    from .selftest import main

    return main()


def playground(asked: argparse.Namespace) -> int:
    from .viz.own_layer import ELEMENT
    from .viz.whole_page import whole_page

    page = Path(asked.file)
    if page.exists() and not ELEMENT.search(page.read_text(encoding="utf-8", errors="replace")):
        print(f"{page} is another file, and stays: mha_c playground NAME.html writes the page there", file=sys.stderr)
        return 2
    page.write_text(whole_page(), encoding="utf-8")
    address = page.resolve().as_uri()
    opened = not asked.no_browser and webbrowser.open(address)
    print(f"{'Opened' if opened else 'Open this in a browser:'} {address}")
    return 0


def check(asked: argparse.Namespace) -> int:
    from ._verdict import verdict

    try:
        found = verdict(*file_and_name(asked.file), asked.kind, asked.mask, asked.seconds)
    except ValueError as error:  # of MHA_C_LANGUAGE
        print(error, file=sys.stderr)
        return 2
    try:
        print(json.dumps(found.report, indent=2) if asked.json else found.text, flush=True)
    except OSError as error:
        return unwritten(error)
    return {True: 0, False: 1, None: 2}[found.ok]


def unwritten(error: OSError) -> int:
    """Says why the answer could not be written, but for a reader that has gone, and gives the exit status for it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes stdout again at exit
    if not isinstance(error, BrokenPipeError):
        print(f"mha_c: the answer could not be written: {error}", file=sys.stderr)
    return UNWRITTEN


def file_and_name(words: str) -> tuple[str, Optional[str]]:
    """FILE or FILE:NAME; a colon may be part of a file's own name, as in C:\\mine.py."""
    file, colon, name = words.rpartition(":")
    return (file, name) if colon and name.isidentifier() and not Path(words).exists() else (words, None)


def parser() -> argparse.ArgumentParser:
    by_python = Path(sys.argv[0]).name == "__main__.py"
    made = argparse.ArgumentParser(
        prog="python -m mha_c" if by_python else "mha_c",
        description="The attention layers of the book Dive into Deep Learning on a C core.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--version", action="store_true", help="prints its version alone")
    made.set_defaults(run=config)
    commands = made.add_subparsers(title="commands", metavar="COMMAND")
    for command, says in (
        (config, "what this installation computes with (also without a command)"),
        (demo, "the book's examples, with the time of each"),
        (selftest, "every instruction set of this CPU against plain NumPy"),
        (playground, "writes the page that computes attention in a browser, and opens it"),
        (check, "compares an implementation with the book's, and says which line is wrong"),
    ):
        sub = commands.add_parser(command.__name__, help=says, description=f"{says[0].upper()}{says[1:]}.")
        sub.set_defaults(run=command)
        if command is playground:
            sub.add_argument("file", nargs="?", default="playground.html", help="the file to write the page to")
            sub.add_argument("--no-browser", action="store_true", help="only print the page's address")
        if command is check:
            _of_check(sub)
    return made


def _of_check(sub: argparse.ArgumentParser) -> None:
    sub.formatter_class = argparse.RawDescriptionHelpFormatter
    sub.epilog = (
        "Exit status: 0 right, 1 wrong, 2 could not be judged: the file does not import, or no name tells what it is;"
        "\n3 the answer could not be written."
        "\nWhat the file itself prints goes to stderr, so that stdout is the answer alone."
        "\nMHA_C_LANGUAGE=zh in the environment: the answer in Chinese."
    )
    sub.add_argument("file", metavar="FILE[:NAME]", help="a file of Python or a notebook, and what to judge in it; "
                     "default: all that it defines whose name tells what it is, but for parts of another")  # fmt: skip
    sub.add_argument("--kind", help="what it should compute, if its name does not tell: dot_product, multi_head, ...")
    sub.add_argument("--mask", choices=["attend", "hide", "add", "none"], help="what True means in its mask: the key "
                     "may be seen, or is hidden; or the mask is added to the scores; or the task has no masks; "
                     "default: whichever is right")  # fmt: skip
    sub.add_argument("--seconds", type=seconds, default=60, help="how long the file may take; default: %(default)g")
    sub.add_argument("--json", action="store_true", help="the answer as JSON")


def seconds(words: str) -> float:
    """A time above 0; argparse names this function where it is no number."""
    found = float(words)
    if not found > 0:
        raise argparse.ArgumentTypeError(f"it must be above 0, got {words}: write --seconds 60")
    return found


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the command, and return its exit status; no traceback where the output cannot be written."""
    try:
        try:
            asked = parser().parse_args(arguments)
            status: int = asked.run(asked)
        finally:  # --help ends the program
            sys.stdout.flush()
    except OSError as error:
        return unwritten(error)
    return status


if __name__ == "__main__":
    sys.exit(main())
