"""What some tests need beyond NumPy and pytest.

Where it is missing the test is skipped by name; under MHA_C_REQUIRE_ALL=1 (continuous integration) it fails.
"""

import importlib
import os
import shutil

import pytest

import real_d2l

# Seconds after which what hangs is ended, processes and calls of others.  A limit for what has no other end, far above
# what a sanitized build takes on a machine that computes other things too; no promise about speed.
HANGS = 900
SYSTEM_PIECES = "apt-get install -y g++ gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user chromium chromium-driver"
REQUIRE_ALL = os.environ.get("MHA_C_REQUIRE_ALL", "0") not in ("", "0")
NIGHTLY = os.environ.get("MHA_C_NIGHTLY", "0") not in ("", "0")  # `make nightly`: more of the same


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


def program(*names):
    """The path of the first of these programs that is installed."""
    for name in names:
        path = shutil.which(name)
        if path:
            return path
    return skip_or_fail(f"needs {names[0]} ({SYSTEM_PIECES})")


def d2l(version):
    """The real d2l.torch of that version."""
    module("torch")
    try:
        return real_d2l.load(version)
    except FileNotFoundError as missing:
        return skip_or_fail(f"{missing} (make test puts it there)")
