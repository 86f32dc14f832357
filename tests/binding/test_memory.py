"""Memory seen from outside: nothing public leaks, and every allocation of the extension may fail.

The work is done by tests/isolated/leaks.py and failing_memory.py in processes of their own, under an allocator that
counts and fails on demand (tests/isolated/memory_shim.c, preloaded).
"""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import children
import needs

ISOLATED = Path(__file__).parents[1] / "isolated"
REPETITIONS = "2000" if needs.NIGHTLY else "100"


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    if sys.platform != "linux" or not os.confstr("CS_GNU_LIBC_VERSION"):
        pytest.skip("the shim calls glibc's allocator by its own names")
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        pytest.skip("a free-threaded Python has an allocator of its own")
    if "asan" in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("AddressSanitizer has an allocator of its own")
    target = tmp_path_factory.mktemp("shim") / "memory_shim.so"
    command = [needs.program("cc"), "-O1", "-shared", "-fPIC", ISOLATED / "memory_shim.c", "-o", target, "-ldl"]
    subprocess.run(command, check=True)
    return target


def run(shim, script, *arguments):
    """(exit status, what it printed)"""
    variables = {"LD_PRELOAD": str(shim), "PYTHONMALLOC": "malloc", "OPENBLAS_NUM_THREADS": "1"}
    done = children.python("-X", "faulthandler", ISOLATED / script, *arguments, status=None, **variables)
    return done.returncode, done.stdout + done.stderr


def test_nothing_public_leaks(shim):
    status, printed = run(shim, "leaks.py", REPETITIONS)
    assert status == 0, printed


def test_a_leak_would_be_seen(shim):
    status, printed = run(shim, "leaks.py", "100", "control")
    assert status == 1 and "4 calls, 3 leak" in printed, printed
    assert all(f"control: {kind}:" in printed for kind in ("block", "object", "reference")), printed


def test_every_allocation_may_fail_and_so_may_threads(shim):
    status, printed = run(shim, "failing_memory.py")
    assert status == 0, printed
    assert "no thread can be started: the same bits" in printed
