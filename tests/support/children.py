"""Python in a process of its own.  conftest.py sees to it that every child finds the package under test."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import needs

# What chooses for the package when it is imported.
CHOICES = "MHA_C_ISA", "MHA_C_NUM_THREADS", "OMP_NUM_THREADS"


def python(*arguments, status=0, cwd=None, **variables):
    """`python("-c", code, MHA_C_ISA="scalar")`: its stdout and stderr as text.  A variable that is None is taken away.

    Its exit status must be `status`; None takes any.  What hangs is ended.
    """
    environment = {**os.environ, **variables}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True, timeout=needs.HANGS, cwd=cwd,
        env={name: value for name, value in environment.items() if value is not None},
    )  # fmt: skip
    assert status is None or done.returncode == status, f"exit status {done.returncode}\n{done.stdout}{done.stderr}"
    return done


def unchosen(*arguments, status=0, **variables):
    """The same with these environment variables, and none besides that chooses for the package."""
    return python(*arguments, status=status, **{**dict.fromkeys(CHOICES), **variables})


def printed(code, **variables):
    """(what the code printed, what was warned of), of `unchosen`."""
    done = unchosen("-c", code, **variables)
    return done.stdout.strip(), done.stderr.strip()


def each_alone(codes, *options, **variables):
    """{code: (its exit status, what it printed)}: each in a fork of one process, which has imported what takes long."""
    here = os.path.dirname(__file__)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "boxes.json"
        file.write_text(json.dumps(codes), encoding="utf-8")
        path = os.pathsep.join([os.environ["PYTHONPATH"], here])
        done = python(*options, os.path.join(here, "boxes.py"), file, PYTHONPATH=path, **variables)
    return dict(zip(codes, json.loads(done.stdout)))
