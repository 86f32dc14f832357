"""What some tests need beyond NumPy and pytest.

Where it is missing the test is skipped by name; under MHA_C_REQUIRE_ALL=1 (continuous integration) it fails.
"""

import contextlib
import importlib
import inspect
import os
import re
import shutil
import subprocess

import pytest

import real_d2l

# Seconds after which what hangs is ended, processes and calls of others.  A limit for what has no other end, far above
# what a sanitized build takes on a machine that computes other things too; no promise about speed.
HANGS = 900
SYSTEM_PIECES = "apt-get install -y g++ gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user chromium chromium-driver"
REQUIRE_ALL = os.environ.get("MHA_C_REQUIRE_ALL", "0") not in ("", "0")
NIGHTLY = os.environ.get("MHA_C_NIGHTLY", "0") not in ("", "0")  # `make nightly`: more of the same
FREE_SEEDS = os.environ.get("MHA_C_FREE_SEEDS", "0") not in ("", "0")  # there: new examples of properties each time


def skip_or_fail(reason):
    if REQUIRE_ALL:
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason, allow_module_level=True)


def module(name):
    """The Python module of that name."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return skip_or_fail(f"needs the Python module {name}")


def of_torch(*features):
    """Skips unless this torch has each of these: a name from "torch." on, or a name and (an argument of it)."""
    torch = module("torch")
    for feature in features:
        if not torch_has(feature):
            reason = f"needs {feature}, which torch {torch.__version__} does not have"
            if REQUIRE_ALL:  # the torch of the usual tests has all of them
                pytest.fail(reason, pytrace=False)
            pytest.skip(reason, allow_module_level=True)


def torch_has(feature):
    """Whether this torch has what `of_torch` asks for."""
    path, _, argument = feature.rstrip(")").partition("(")
    found = module("torch")
    for name in path.split(".")[1:]:
        if not hasattr(found, name):
            with contextlib.suppress(ImportError):  # a module that torch does not import by itself
                importlib.import_module(f"{found.__name__}.{name}")
        found = getattr(found, name, None)
    if not argument or found is None:
        return found is not None
    try:
        return argument in inspect.signature(found).parameters
    except ValueError:  # one of C: its text tells
        return argument in (found.__doc__ or "")


def whole_modules():
    """What torch.load takes to read a module that was saved whole."""
    return {"weights_only": False} if torch_has("torch.load(weights_only)") else {}


def program(*names):
    """The path of the first of these programs that is installed."""
    for name in names:
        path = shutil.which(name)
        if path:
            return path
    return skip_or_fail(f"needs {names[0]} ({SYSTEM_PIECES})")


def browser():
    """(browser, chromedriver): where several browsers are installed, the one that the driver was made for."""
    driver, names = program("chromedriver"), ("chromium", "chromium-browser", "google-chrome")
    there = [path for path in map(shutil.which, names) if path]
    fitting = [path for path in there if _major(path) == _major(driver)]
    return (fitting or [program(*names)])[0], driver


def _major(program):
    """The first number of its version."""
    said = subprocess.run([program, "--version"], capture_output=True, text=True).stdout
    return re.search(r" (\d+)\.", said)[1]


def d2l(version):
    """The real d2l.torch of that version."""
    module("torch")
    try:
        return real_d2l.load(version)
    except FileNotFoundError as missing:
        return skip_or_fail(f"{missing} (make test puts it there)")
