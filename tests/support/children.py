"""Python in a process of its own.  conftest.py sees to it that every child finds the package under test."""

import os
import subprocess
import sys

import needs


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
