"""A file is judged in a process of its own, and the verdict comes from here, whatever the file does to that process."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple, Optional

# With the modules that this process finds.  A language that there is not is told by this process.
_CHILD = """import sys
sys.path[:] = {path!r}
try:
    from mha_c.teach.grader.judging import main
except ValueError:
    sys.exit(1)
main()"""
_LATE = 5.0  # seconds after which a child that should have ended itself is ended: C code may hold Python's lock


class Verdict(NamedTuple):
    """What came of a file: `ok` is None where it could not be judged."""

    ok: Optional[bool]
    text: str
    report: dict[str, Any]  # the same for programs


def verdict(file: str, name: Optional[str], kind: Optional[str], mask: Optional[str], seconds: float) -> Verdict:
    """The verdict on a file, or on `name` in it; never later than some seconds after `seconds`."""
    asked = {"file": file, "name": name, "kind": kind, "mask": mask, "seconds": seconds, "token": secrets.token_hex(8)}
    with _process() as process:
        lines = _answers(process, asked)
        last = time.monotonic() + seconds + 60  # an import on a busy machine may take long
        while True:
            line = _next(lines, process, last)
            if line == {"begun": True}:
                last = time.monotonic() + seconds + _LATE
            elif line is not None and line.get("ok", 0) in (True, False, None):
                return Verdict(line["ok"], str(line["text"]), dict(line["report"]))
            elif line is None or process.poll() is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):  # it may have closed its stdout, and go on
                    process.wait(max(0.0, last - time.monotonic()))
                return _of_none(file, process, seconds)


@contextlib.contextmanager
def _process() -> Iterator[subprocess.Popen[bytes]]:
    """The child; at the end it and what it has started are ended."""
    # Threads that wait for work shall sleep: in a loop over a class other processes need the processor.
    environment = {"OMP_WAIT_POLICY": "passive", **os.environ}
    process = subprocess.Popen(
        [sys.executable, "-c", _CHILD.format(path=sys.path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        with contextlib.suppress(OSError):
            if hasattr(os, "killpg"):
                os.killpg(process.pid, signal.SIGKILL)
            else:
                process.kill()
        process.wait()


def _answers(process: subprocess.Popen[bytes], asked: dict[str, Any]) -> queue.SimpleQueue[Optional[dict[str, Any]]]:
    """What the child says, and None at its end.  What does not begin with the token comes from the file."""
    found: queue.SimpleQueue[Optional[dict[str, Any]]] = queue.SimpleQueue()
    token = asked["token"].encode()
    assert process.stdin and process.stdout
    with contextlib.suppress(OSError):  # a child that has ended already
        process.stdin.write(json.dumps(asked).encode() + b"\n")
        process.stdin.close()
    stdout = process.stdout

    def read() -> None:
        for line in stdout:
            if line.startswith(token):
                with contextlib.suppress(ValueError):
                    found.put(dict(json.loads(line[len(token) :])))
        found.put(None)

    threading.Thread(target=read, daemon=True).start()
    return found


def _next(
    lines: queue.SimpleQueue[Optional[dict[str, Any]]], process: subprocess.Popen[bytes], last: float
) -> Optional[dict[str, Any]]:
    """The next line; None where there is none: what the child has started may hold its stdout open."""
    while time.monotonic() < last:
        ended = process.poll() is not None
        with contextlib.suppress(queue.Empty):
            return lines.get(timeout=0.2)
        if ended:
            return None
    return None


def _of_none(file: str, process: subprocess.Popen[bytes], seconds: float) -> Verdict:
    """Why there is no answer, in the words of teach."""
    from .teach.grader.files import FileReport, Problem, no_answer

    status = process.poll()
    report = FileReport(file, problem=Problem(*no_answer(status, seconds)))
    return Verdict(None, str(report), report.as_dict())
