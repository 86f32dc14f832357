"""Python in a process of its own.  conftest.py sees to it that every child finds the package under test."""

import os
import subprocess
import sys

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
