"""tools/gpu.sh: what it runs, what it leaves and says; with a Python that is played, for want of a GPU."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import needs

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs bash")
ROOT = Path(__file__).resolve().parents[2]
PLAYED = """#!/bin/sh
echo "$@" >> "{calls}"
case "$*" in
-) {machine} ;;
*build_ext*) {build} ;;
*pytest*) {tests} ;;
*devices.py*) {times} ;;
esac
"""
PASSES = {
    "machine": "echo 'GPU Of A Test; torch 9'",
    "build": "true",
    "tests": "echo '7 passed'",
    "times": "echo 'M7 eval 1 2'",
}


@pytest.fixture
def gpu(tmp_path):
    """Runs a copy of the script with a played Python; gives (status, printed, tests.txt, devices.txt, calls)."""
    needs.program("bash")
    (tmp_path / "clone" / "tools").mkdir(parents=True)
    script = shutil.copy(ROOT / "tools" / "gpu.sh", tmp_path / "clone" / "tools")

    def run(seconds="450", **played):
        calls, python = tmp_path / "calls", tmp_path / "python"
        python.write_text(PLAYED.format(calls=calls, **{**PASSES, **played}))
        python.chmod(0o755)
        environment = {**os.environ, "PYTHON": str(python), "SECONDS_IN_ALL": seconds}
        done = subprocess.run(["bash", script, tmp_path / "out"], env=environment, capture_output=True, text=True,
                              cwd=tmp_path, timeout=needs.HANGS)  # fmt: skip
        files = [tmp_path / "out" / name for name in ("tests.txt", "devices.txt")]
        return done.returncode, done.stdout, *(f.read_text() if f.exists() else None for f in files), calls.read_text()

    return run


def test_all_of_it(gpu):
    status, printed, tests, devices, calls = gpu()
    assert status == 0 and "***" not in printed
    assert tests.splitlines() == ["GPU Of A Test; torch 9", "7 passed"]
    assert devices.splitlines() == ["GPU Of A Test; torch 9", "M7 eval 1 2"]
    _, build, suite, times = calls.splitlines()
    assert build == "setup.py -q build_ext --inplace" and times == "benchmarks/devices.py"
    files = "torch/test_devices.py", "torch/test_devices_while_decoding.py", "d2l/test_d2l_devices.py"
    assert " ".join([" -k cuda", *(f"tests/{file}" for file in files)]) in suite
    assert all((ROOT / word).exists() for word in [*suite.split(), times] if word.endswith(".py"))


def test_without_a_gpu_the_tests_run_and_nothing_is_timed(gpu):
    status, printed, tests, devices, calls = gpu(machine="echo 'GPU none; torch 9'; exit 3")
    assert status == 3 and "torch finds no GPU here: the tests run on a device of their own" in printed
    assert "7 passed" in tests and devices.endswith("*** not timed: torch finds no GPU here ***\n")
    assert "devices.py" not in calls.replace("test_devices.py", "").replace("test_d2l_devices.py", "")
    assert "-k cuda" not in calls


def test_without_torch_it_says_which_python_was_asked(gpu):
    """The question itself is Python's: asked of one that has no torch."""
    status, printed, *_ = gpu(machine=f"exec '{sys.executable}' -I -S -")
    assert status == 1 and "cannot import torch and NumPy" in printed and "PYTHON=... names the one that can" in printed


@pytest.mark.parametrize("name", ["build", "tests", "times"])
def test_what_fails_is_told_and_the_rest_goes_on(gpu, name):
    status, printed, tests, devices, calls = gpu(**{name: "echo trouble; exit 7"})
    assert status == 1 and f"*** {name}: exit status 7 ***" in printed
    assert "trouble" in (devices if name == "times" else tests) and len(calls.splitlines()) == 4


def test_what_takes_too_long_is_ended_and_time_in_all_is_kept(gpu):
    status, printed, tests, devices, _ = gpu(seconds="6", tests="echo 'some passed'; exec sleep 60")
    assert status == 1 and "some passed" in tests and "*** tests: ended after " in tests
    assert "*** times: no time is left of 6 s ***" in devices and printed.rstrip().endswith("devices.txt")


def test_steps_end_before_eight_minutes():
    """At most, together; and what begins late gets only what is left."""
    text = (ROOT / "tools" / "gpu.sh").read_text()
    assert "SECONDS_IN_ALL:-450" in text and 450 + 5 < 8 * 60


def test_the_question_itself(tmp_path):
    """Of this Python, whose torch has no GPU, or has one."""
    torch = needs.module("torch")
    text = (ROOT / "tools" / "gpu.sh").read_text()
    code = text.partition("<< 'END'\n")[2].partition("\nEND\n")[0]
    done = subprocess.run([sys.executable, "-"], input=code, capture_output=True, text=True)
    assert done.returncode == (0 if torch.cuda.is_available() else 3)
    assert f"torch {torch.__version__}" in done.stdout
    none = (
        "import importlib.util as u; real = u.find_spec; u.find_spec = lambda x: None if x == 'pytest' else real(x)\n"
    )
    done = subprocess.run([sys.executable, "-"], input=none + code, capture_output=True, text=True)
    assert done.returncode == 1 and "has no pytest: `tools/gpu.sh --prepare`" in done.stdout
