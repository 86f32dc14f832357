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
import sys
import traceback
import types
import warnings
from pathlib import Path

import pytest

import real_d2l

# Seconds after which what hangs is ended, processes and calls of others.  A limit for what has no other end, far above
# what a sanitized build takes on a machine that computes other things too; no promise about speed.
HANGS = 900
SYSTEM_PIECES = (
    "apt-get install -y g++ clang gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user chromium chromium-driver"
)
REQUIRE_ALL = os.environ.get("MHA_C_REQUIRE_ALL", "0") not in ("", "0")
NIGHTLY = os.environ.get("MHA_C_NIGHTLY", "0") not in ("", "0")  # `make nightly`: more of the same
FEW = False  # conftest.py sets it: a few cases of each test, for a second environment
FREE_SEEDS = os.environ.get("MHA_C_FREE_SEEDS", "0") not in ("", "0")  # there: new examples of properties each time


def draws(by_day, by_night=None):
    """How many examples a property is tried with."""
    if FEW:
        return min(by_day, 15)
    return by_night if NIGHTLY and by_night else by_day


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
    for feature in features:
        if not torch_has(feature):
            skip_without(feature)


def skip_without(feature):
    """Skips by name; under MHA_C_REQUIRE_ALL a failure, as the torch of the usual tests has all that tests ask for."""
    skip_or_fail(f"needs {feature}, which torch {module('torch').__version__} does not have")


def torch_reads():
    """Whether calls are read with this torch (not 1.12, whose modes are others), and nothing else traces here."""
    modes = torch_has("torch.overrides.TorchFunctionMode") and not torch_has("torch.overrides.push_torch_function_mode")
    return modes and sys.gettrace() is None


def index_is_seen():
    """Whether this torch shows a mode `x[i]`, an index of one number, slice or tensor (not 2.0.0, where a class with
    such a line stays the reader's)."""
    torch, seen = module("torch"), []

    class Noting(module("torch.overrides").TorchFunctionMode):
        def __torch_function__(self, function, types, arguments=(), named=None):
            seen.append(function)
            return function(*arguments, **(named or {}))

    x = torch.zeros(2)
    with Noting():
        x[0]
    return bool(seen)


def torch_has(feature):
    """Whether this torch has what `of_torch` asks for."""
    path, _, argument = feature.rstrip(")").partition("(")
    found = module("torch")
    for name in path.split(".")[1:]:
        if isinstance(found, types.ModuleType) and not hasattr(found, name):
            with contextlib.suppress(ImportError):  # a module that torch does not import by itself
                importlib.import_module(f"{found.__name__}.{name}")
        found = getattr(found, name, None)
    if not argument or found is None:
        return found is not None
    try:
        return argument in inspect.signature(found).parameters
    except ValueError:  # one of C: its text tells
        return argument in (found.__doc__ or "")


def export():
    """Skips where torch.export goes through the compiler (2.6), which ends in errors inside layers, d2l's too."""
    of_torch("torch.export.export")
    if inspect.signature(module("torch").export.export).parameters["strict"].default:
        skip_without("torch.export without its compiler")


def torch_does(what, attempt):
    """Skips unless `attempt` gives something true, on a torch that has the names for it but does not do it."""
    try:
        done = attempt()
    except (RuntimeError, TypeError, NotImplementedError):
        done = False
    if not done:
        skip_without(what)


def autocast(dtype):
    """Skips on a torch whose autocast on the CPU does not know this type."""
    torch = module("torch")

    def works():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with torch.autocast("cpu", dtype=dtype):
                return torch.ones(1, 2).mm(torch.ones(2, 1)).dtype is dtype

    torch_does(f"autocast of {dtype} on the CPU", works)


def distributed():
    """Skips on a torch that was built without torch.distributed."""
    if not module("torch").distributed.is_available():
        skip_or_fail("needs a torch with torch.distributed")


def operators():
    """Skips on a torch in which mha_c has no operators of its own."""
    of_torch("torch.library.register_vmap")


def compilers():
    """Skips on a torch whose compiler goes around our layers, or that has none."""
    of_torch("torch.compile")
    if importlib.import_module("mha_c.torch._private").compilers_go_around:
        skip_without("a compiler that takes mha_c's layers")


def fake_modes_in_threads():
    """Skips where torch itself crashes as the second thread enters a FakeTensorMode: 2.11 for CUDA without a device."""
    torch = module("torch")
    if torch.__version__.startswith("2.11.") and torch.version.cuda and not torch.cuda.is_available():
        skip_without("FakeTensorMode in threads where no device is")


def fresh_compiler():
    """torch's compiler without the graphs of other tests; torch 2.0 imports it only when asked to."""
    of_torch("torch._dynamo")
    module("torch._dynamo").reset()


def usual_torch():
    """Whether this torch is the one of constraints.txt, for which the docs' tables are made."""
    text = (Path(__file__).resolve().parents[2] / "constraints.txt").read_text()
    return f"torch=={module('torch').__version__.split('+')[0]}" in text


def name_of_torch(path):
    """What torch has under this name; where it has nothing, a function that skips the test which calls it."""
    found = module("torch") if torch_has(path) else None
    for name in path.split(".")[1:] if found is not None else ():
        found = getattr(found, name)
    return (lambda *_, **__: of_torch(path)) if found is None else found


NO_SUCH_NAME = re.compile(
    r"module '(torch[\w.]*)' has no attribute '(\w+)'|(?:type object )?'(\w+)' (?:object )?has no attribute '(\w+)'"
    r"|No module named '(torch[\w.]*)'|cannot import name '(\w+)' from '(torch[\w.]*)'"
)


def lacking(error):
    """The name that a line of a test has asked of torch in vain; None where the error is another one.

    A test that says torch.func says so what it needs.  In a line of mha_c such an error is a fault.
    """
    found = NO_SUCH_NAME.match(str(error))
    frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    while frames and frames[-1].co_name == "__getattr__":  # torch's own
        frames.pop()
    tests = Path(__file__).resolve().parents[1]
    if found is None or not frames or tests not in Path(frames[-1].co_filename).resolve().parents:
        return None
    owner, name, kind, attribute, alone, imported, where = found.groups()
    if kind is not None:
        torch = module("torch")
        classes = [getattr(place, kind, None) for place in (torch, torch.nn)]
        of_torch = any(isinstance(one, type) and one.__module__.startswith("torch") for one in classes)
        if kind == "NoneType" or not of_torch:  # torch has one of this name, and a missing answer is no torch's fault
            return None
        return f"{kind}.{attribute}"
    return alone or f"{owner or where}.{name or imported}"


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
