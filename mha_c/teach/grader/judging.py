"""The process in which a file is judged: what `mha_c check` starts, asks on stdin, and reads on stdout."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any, Callable

from ..asking.answers import failed
from .files import FileReport, Problem, ended_after, judged

_written = json.dumps  # what the file does to json later is nothing to this


def main() -> None:
    """Reads what is asked, judges, and ends the process, whatever threads the file has left."""
    asked = json.loads(sys.stdin.readline())
    file = asked["file"]
    with _stdout_alone() as stdout:
        send = _sender(stdout, asked["token"])
        send({"begun": True})

        def show(report: FileReport) -> None:
            send({"ok": report.ok, "text": str(report), "report": report.as_dict()})

        try:
            with ended_after(asked["seconds"], file, show):
                show(judged(file, asked["name"], asked["kind"], mask=asked["mask"]))
        except BaseException as error:  # of check itself, or of a file that changed what check uses
            show(FileReport(file, problem=Problem("internal", failed(error))))
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(0)


def _sender(stdout: int, token: str) -> Callable[[dict[str, Any]], None]:
    """Writes a line that begins with the token; what stands there already may be of the file."""
    write = os.write

    def send(line: dict[str, Any]) -> None:
        rest = f"\n{token}{_written(line)}\n".encode()
        with contextlib.suppress(OSError):  # a file may have closed it: then there is no answer
            while rest:
                rest = rest[write(stdout, rest) :]

    return send


@contextlib.contextmanager
def _stdout_alone() -> Iterator[int]:
    """What stdout is; all that is printed goes to stderr, that of C and of other programs, too."""
    kept = os.dup(1)
    with contextlib.suppress(OSError):  # without a stderr it goes where it went
        os.dup2(2, 1)
    yield kept
