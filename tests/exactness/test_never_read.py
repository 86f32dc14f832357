"""Keys and values that no query sees are never read: they lie on pages whose reading ends the process.

The table of the promise is in docs/promises.md; the calls are in tests/isolated/forbidden_pages.py.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import mha_c
import needs

SCRIPT = Path(__file__).parents[1] / "isolated" / "forbidden_pages.py"
pytestmark = pytest.mark.skipif(os.name == "nt" or sys.platform == "emscripten", reason="needs mprotect")


def run(*arguments):
    here = str(Path(mha_c.__file__).parents[1])
    path = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-X", "faulthandler", SCRIPT, *arguments]
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=needs.HANGS)


def test_a_read_of_a_forbidden_page_is_noticed():
    done = run("numpy", "control")
    assert done.returncode != 0 and done.stdout.splitlines() == ["control"], done.stdout + done.stderr


def assert_all_run(world):
    done = run(world)
    calls = done.stdout.splitlines()
    assert (done.returncode, calls[-1:]) == (0, ["done"]), f"after {calls[-1:]}: {done.stderr[-4000:]}"
    return calls


def test_no_layer_or_function_of_numpy_reads_what_no_query_sees():
    assert len(assert_all_run("numpy")) > 300


def test_no_layer_or_function_of_torch_reads_what_no_query_sees():
    needs.module("torch")
    assert len(assert_all_run("torch")) > 500
