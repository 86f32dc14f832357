"""What is chosen at import and what the command line prints; each in a process of its own where that matters."""

import ctypes
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import re
import sys
import textwrap
import types
from pathlib import Path

import numpy as np
import pytest

import children
import mha_c
import needs
from mha_c import _core, config, selftest

OFFERED = [name for name, available in _core.isas() if available]
VARIABLES = ("MHA_C_ISA", "MHA_C_NUM_THREADS", "OMP_NUM_THREADS")


def python(*arguments, check=True, **variables):
    """Runs Python with these environment variables, and none of ours besides."""
    return children.python(*arguments, status=0 if check else None, **{**dict.fromkeys(VARIABLES), **variables})


def printed(code, **variables):
    """(what it printed, what was warned of)"""
    done = python("-c", code, **variables)
    return done.stdout.strip(), done.stderr.strip()


# --- Configuration ---------------------------------------------------------------------------------


def test_show_config(capsys):
    config = mha_c.show_config()
    text = capsys.readouterr().out
    assert config["version"] == mha_c.__version__ and config["numpy"] == np.__version__
    assert config["isas"] == OFFERED and config["isa"] in OFFERED
    assert config["threads"] == mha_c.get_num_threads() and config["threads_from"]
    assert ("torch" in config) == ("torch" in sys.modules)
    for name in ("version", "processor", "isa", "threads", "threads_from", "numpy"):
        assert str(config[name]) in text
    assert len(text.splitlines()) == 6 + ("torch" in config)


def test_version():
    try:
        assert mha_c.__version__ == importlib.metadata.version("mha_c")
    except importlib.metadata.PackageNotFoundError:
        assert mha_c.__version__ == "unknown"


@pytest.mark.parametrize("isa", OFFERED)
def test_the_instruction_set_is_chosen_at_import(isa):
    code = "import mha_c; from mha_c import _core; print(_core.isa(), mha_c.show_config()['isa'])"
    out, warned = printed(code, MHA_C_ISA=isa)
    assert out.startswith(
        f"mha_c {mha_c.__version__} in {Path(mha_c.__file__).parent}\nisa {isa} (MHA_C_ISA;"
    ) and out.endswith(f"{isa} {isa}")
    assert not warned
    too_late = f"import os, mha_c; os.environ['MHA_C_ISA'] = {isa!r}; {code}"
    assert "(the widest; MHA_C_ISA changes it;" in printed(too_late)[0]


def test_the_widest_instruction_set_is_the_default():
    for variables in ({}, {"MHA_C_ISA": ""}):
        assert printed("import mha_c; print(mha_c._core.isa())", **variables)[0] == OFFERED[-1]


@pytest.mark.parametrize("isa", ["sse9", "AVX2", " scalar", *[n for n, offered in _core.isas() if not offered]])
def test_an_absent_instruction_set_fails_the_import(isa):
    done = python("-c", "import mha_c", check=False, MHA_C_ISA=isa)
    assert done.returncode == 1
    refused = f"instruction set {isa!r} is not available: this CPU offers {', '.join(OFFERED)} ("
    assert f"RuntimeError: MHA_C_ISA: {refused}" in done.stderr


THREADS = "import mha_c; print(mha_c.get_num_threads())"
DEFAULT = None  # what `default` finds


@functools.cache
def default():
    """As many threads as a process takes without a variable."""
    return printed(THREADS)[0]


def test_a_process_takes_the_cpus_that_it_may_use():
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    limited = any(not path.read_text().startswith("max") for path in Path("/sys/fs/cgroup").glob("**/cpu.max"))
    assert int(default()) == cpus or (limited and 1 <= int(default()) < cpus)
    if hasattr(os, "sched_setaffinity"):
        assert printed(f"import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]); {THREADS}") == ("1", "")


@pytest.mark.parametrize(
    ("variables", "threads"),
    [
        ({}, DEFAULT),
        ({"MHA_C_NUM_THREADS": "3"}, "3"),
        ({"MHA_C_NUM_THREADS": " 64 "}, "64"),
        ({"MHA_C_NUM_THREADS": ""}, DEFAULT),
        ({"OMP_NUM_THREADS": "5"}, "5"),
        ({"OMP_NUM_THREADS": "4,3,2"}, "4"),
        ({"MHA_C_NUM_THREADS": "3", "OMP_NUM_THREADS": "5"}, "3"),
        ({"MHA_C_NUM_THREADS": "", "OMP_NUM_THREADS": "5"}, "5"),
    ],
)
def test_threads_from_the_environment(variables, threads):
    assert printed(THREADS, **variables) == (threads or default(), "")


@pytest.mark.parametrize("value", ["0", "-1", "2.0", "two", "1e3", "0x4", "nan", "4,3", "²", "9" * 12])
def test_a_bad_thread_variable_is_a_warning_and_the_default(value):
    out, warned = printed(THREADS, MHA_C_NUM_THREADS=value)
    assert out == default()
    assert f"RuntimeWarning: MHA_C_NUM_THREADS={value!r} is ignored: it must be a whole number >= 1" in warned
    assert warned.count("Warning:") == 1
    assert printed(THREADS, MHA_C_NUM_THREADS=value, OMP_NUM_THREADS="7")[0] == "7"


QUOTAS = {  # what /proc/self/cgroup says, the files under /sys/fs/cgroup, CPUs
    "no files": ("0::/a/b\n", {}, None),
    "max": ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n"}, None),
    "half a CPU": ("0::/a/b\n", {"a/b/cpu.max": "50000 100000\n"}, 1),
    "a little more than one": ("0::/a/b\n", {"a/b/cpu.max": "100001 100000\n"}, 2),
    "exactly one": ("0::/a/b\n", {"a/b/cpu.max": "100000 100000\n"}, 1),
    "nothing": ("0::/a\n", {"a/cpu.max": "0 100000\n"}, 1),
    "smaller above": ("0::/a/b\n", {"a/b/cpu.max": "900000 100000\n", "a/cpu.max": "300000 100000\n"}, 3),
    "the root, a level between": ("0::/a/b\n", {"a/b/cpu.max": "900000 100000\n", "cpu.max": "200000 100000\n"}, 2),
    "a path that is not in the tree": ("0::/elsewhere/deep\n", {"cpu.max": "100000 100000\n"}, 1),
    "a process in the root": ("0::/\n", {"cpu.max": "100000 100000\n"}, 1),
    "both versions": ("4:memory:/x\n1:name=systemd:/c\n0::/c", {"unified/c/cpu.max": "700000 100000\n"}, 7),
    "version 1": ("3:cpu,cpuacct:/d/e\n", {"cpu/d/e/cpu.cfs_quota_us": "200000\n",
                                           "cpu/d/e/cpu.cfs_period_us": "100000\n"}, 2),
    "the other order": ("3:cpuacct,cpu:/d\n", {"cpu/d/cpu.cfs_quota_us": "2\n", "cpu/d/cpu.cfs_period_us": "1\n"}, 2),
    "other controllers": ("3:cpuset:/d\n2:cpuacct:/d\n1:xcpu:/d\n", {"cpu/d/cpu.cfs_quota_us": "2\n",
                                                                    "cpu/d/cpu.cfs_period_us": "1\n"}, None),
    "-1": ("3:cpu:/d\n", {"cpu/d/cpu.cfs_quota_us": "-1\n", "cpu/d/cpu.cfs_period_us": "100000\n"}, None),
    "a period of 0": ("3:cpu:/d\n", {"cpu/d/cpu.cfs_quota_us": "1\n", "cpu/d/cpu.cfs_period_us": "0\n"}, None),
    "no period": ("3:cpu:/d\n", {"cpu/d/cpu.cfs_quota_us": "1\n"}, None),
    "a container's own root": ("3:cpu:/d\n", {"cpu,cpuacct/cpu.cfs_quota_us": "4\n",
                                             "cpu,cpuacct/cpu.cfs_period_us": "1\n"}, 4),
}  # fmt: skip


def quota(folder, process, files):
    for name, text in {"process": process, **{f"tree/{name}": text for name, text in files.items()}}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return config._cpu_quota(str(folder / "process"), str(folder / "tree"))


@pytest.mark.parametrize("case", QUOTAS)
def test_cpu_quotas(case, tmp_path):
    process, files, n_cpus = QUOTAS[case]
    assert quota(tmp_path, process, files) == n_cpus


def test_odd_files_are_no_quota(tmp_path):
    lines = ["", "\n", "garbage", "0", "0:", "0::", ":::::", "0::a/b", "0::/../..", "3:cpu", "3:,,cpu,:/", "0:::/a:b\n",
             "0::/a//b//\n", "\n\n0::/q\n", "0::/" + "a" * 6000, "0::/\0\n", "0::/" + "a/" * 3000]  # fmt: skip
    for line in lines:
        assert quota(tmp_path, line, {}) is None, line
    for text in ["", " ", "max", "1", "100000", "100000 0", "x", "1 x", "-5 1", "², 1", "1.5 1"]:
        assert quota(tmp_path, "0::/r\n", {"r/cpu.max": text}) is None, text
    assert config._cpu_quota(str(tmp_path / "missing")) is None and config._cpu_quota(str(tmp_path)) is None


def test_threads_follow_the_quota(monkeypatch):
    before = config._threads_chosen
    try:
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
        for found, threads in ((1, 1), (None, config._cpus()), (10**6, config._cpus())):
            monkeypatch.setattr(config, "_cpu_quota", lambda found=found: found)
            config._select_threads()
            assert mha_c.get_num_threads() == threads
    finally:
        config._choose_threads(*before)


def test_cpus_are_those_of_the_mask(monkeypatch):
    """On Linux the mask is the system's own; Windows, and systems without masks, are played."""
    if hasattr(os, "sched_getaffinity"):
        mask = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(mask)})
        try:
            assert config._cpus() == 1
        finally:
            os.sched_setaffinity(0, mask)
        assert config._cpus() == len(mask)
        monkeypatch.delattr(os, "sched_getaffinity")
    for found, cpus in ((3, 3), (None, 1)):
        monkeypatch.setattr(os, "cpu_count", lambda found=found: found)
        assert config._cpus() == cpus

    class Kernel:
        @staticmethod
        def GetCurrentProcess():
            return -1

        @staticmethod
        def GetProcessAffinityMask(process, mask, of_system):
            assert process.value == 2 ** (8 * ctypes.sizeof(ctypes.c_void_p)) - 1
            mask._obj.value, of_system._obj.value = seen, 255
            return answer

    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(ctypes, "windll", types.SimpleNamespace(kernel32=Kernel), raising=False)
    for found, answer, seen, cpus in ((8, 1, 0b1011, 3), (8, 1, 0, 8), (8, 0, 1, 8), (96, 1, 1, 96)):  # noqa: B007
        monkeypatch.setattr(os, "cpu_count", lambda found=found: found)
        assert config._cpus() == cpus


def test_a_bad_openmp_variable():
    out, warned = printed(THREADS, OMP_NUM_THREADS="many")
    assert out == default() and "OMP_NUM_THREADS='many' is ignored" in warned


def test_set_num_threads(capsys):
    mha_c.get_num_threads()
    for n in (1, 2, np.int64(3), 1000):
        mha_c.set_num_threads(n)
        assert mha_c.get_num_threads() == n
    assert mha_c.show_config()["threads_from"] == "set_num_threads"
    for wrong in (0, -1, 1.0, True, "2", None, np.nan, [2]):
        with pytest.raises(ValueError, match=r"must be a whole number >= 1, got"):
            mha_c.set_num_threads(wrong)
    assert mha_c.get_num_threads() == 1000


def test_set_num_threads_in_a_with():
    """Back to what was before, said to be from where it was, however the block ends."""
    code = """
    import mha_c
    before = mha_c.get_num_threads(), mha_c.show_config()["threads_from"]
    try:
        with mha_c.set_num_threads(7):
            with mha_c.set_num_threads(3):
                assert mha_c.get_num_threads() == 3
            assert mha_c.get_num_threads() == 7
            assert mha_c.show_config()["threads_from"] == "set_num_threads"
            raise KeyError
    except KeyError:
        pass
    assert (mha_c.get_num_threads(), mha_c.show_config()["threads_from"]) == before
    print(repr(mha_c.set_num_threads(2)), mha_c.get_num_threads(), before[1])
    """
    out, warned = printed(textwrap.dedent(code), MHA_C_NUM_THREADS="5")
    assert out.splitlines()[-1] == "set_num_threads(2) 2 MHA_C_NUM_THREADS" and not warned


# --- Import ------------------------------------------------------------------------------------------


def test_import_is_quiet_and_light():
    code = (
        "import mha_c, sys; mha_c.MultiHeadAttention(4, 2, 0.1); mha_c.variants; "
        "print(sorted({'torch', 'matplotlib', 'IPython', 'd2l'} & set(sys.modules)))"
    )
    done = python("-W", "error", "-c", code)
    assert done.stdout.strip() == "[]" and not done.stderr


def test_import_takes_little_longer_than_numpys():
    """Two fifths of what NumPy's takes, 30 ms, in the same process: a busy machine is so for both.  Caches may be
    cold, so the best of a few counts, and twice that."""
    code = """
import time
before = time.process_time()
import numpy, numpy.random
between = time.process_time()
import mha_c
print((time.process_time() - between) / (between - before))
"""
    assert min(float(printed(code)[0]) for _ in range(4)) < 0.8


def test_names_that_come_later():
    assert {"torch", "variants", "viz", "show_heatmaps", "__version__"} <= set(dir(mha_c))
    assert callable(mha_c.show_heatmaps) and mha_c.variants.MultiHeadedSelfAttention
    with pytest.raises(AttributeError, match="module 'mha_c' has no attribute 'MultiheadAttention'"):
        mha_c.MultiheadAttention  # noqa: B018
    assert all(hasattr(mha_c, name) for name in mha_c.__all__)
    namespace = {}
    exec("from mha_c import *", namespace)
    assert namespace["MultiHeadAttention"] is mha_c.MultiHeadAttention


def modules_shown(module):
    """The module, and all of ours that dir() leads to from there."""
    yield module
    for name in dir(module):
        value = getattr(module, name, None)  # mha_c.torch is not there without torch
        if isinstance(value, types.ModuleType) and value.__name__.startswith(f"{module.__name__}."):
            yield from modules_shown(value)


def test_dir_shows_public_names_only():
    """Ours, and none of what a module needs for itself; modules that are not shown themselves keep to it, too."""
    for extra in ("torch", "threadpoolctl"):
        needs.module(extra)
    shown = {module.__name__: module for module in modules_shown(mha_c)}
    assert {"mha_c.torch.functional", "mha_c.viz", "mha_c.heads", "mha_c.d2l"} <= set(shown)
    for path in Path(mha_c.__file__).parent.glob("[a-z]*.py"):
        shown[path.stem] = importlib.import_module(f"mha_c.{path.stem}")
    for where, module in shown.items():
        assert set(module.__all__) <= set(dir(module)), f"{where} needs `__dir__ = __all__.copy` behind its __all__"
        for name in dir(module):
            value = getattr(module, name)
            owner = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", "mha_c")
            assert name == "__version__" or not name.startswith("_"), f"{where}.{name}"
            assert owner.split(".")[0] == "mha_c", f"{where}.{name} is {owner}'s"


ERRORS = re.compile(r"\b([A-Z]\w*Error)\b(?:, [A-Z]\w*Error)*(?: \(a ValueError\))?(.{0,30})", re.DOTALL)
# How a sentence goes on that says when: "TypeError where types differ".
WHEN = re.compile(r"(?i)\s+(where|for|if|before|on leaving|while|with|without|once|lists|names|every|also|as in)\b")


def documented():
    """(name, docstring) of every public function and class, and of their public methods and properties."""
    for module in modules_shown(mha_c):
        for name in dir(module):
            value = getattr(module, name, None)
            members = {f".{n}": f for n, f in vars(value).items() if n[0] != "_"} if isinstance(value, type) else {}
            for suffix, thing in {"": value, **members}.items():
                if (callable(thing) or isinstance(thing, property)) and thing.__doc__:
                    yield f"{module.__name__}.{name}{suffix}", thing.__doc__


def test_docstrings_say_when_each_error_is_raised():
    needs.module("torch")
    found = list(documented())
    assert len(found) > 80
    unsaid = {
        f"{name}: {error.group()!r}"
        for name, text in found
        for error in ERRORS.finditer(text.replace("(ValueError)", "").partition(">>>")[0])
        if not WHEN.match(error.group(2)) and not text[: error.start()].rstrip("`").endswith((": ", "a ", "an "))
    }
    assert unsaid == set()


def test_functions_and_layers_name_their_errors():
    """By type, or by saying whose errors they are."""
    asked = {"get_num_threads", "show_config", "main"}  # these have no arguments
    silent = {
        f"{module.__name__}.{name}"
        for module in modules_shown(mha_c)
        for name in {*dir(module)} - asked
        if hasattr(module, name)
        if inspect.isfunction(getattr(module, name)) or "__call__" in getattr(getattr(module, name), "__dict__", ())
        if not module.__name__.startswith(("mha_c.torch", "mha_c.teach.book"))  # the book's own lines have no docstring
        if not re.search(r"[A-Z]\w*Error|[Ee]rrors|no error", getattr(module, name).__doc__)
    }
    assert silent == set()


def test_shape_error():
    assert issubclass(mha_c.ShapeError, ValueError) and mha_c.ShapeError.__name__ == "ShapeError"
    assert mha_c.ShapeError.__module__ == "mha_c"


def test_the_package_is_typed():
    assert (Path(mha_c.__file__).parent / "py.typed").is_file()


# --- The command line -----------------------------------------------------------------------------------


def test_python_m_mha_c_prints_the_configuration():
    out = python("-m", "mha_c").stdout
    assert re.match(r"mha_c \S+ in .*\nisa \w+ \(", out) and "threads" in out and "numpy" in out


def test_demo_prints_what_the_book_prints_and_ends_with_lines_that_work(tmp_path):
    out = python("-m", "mha_c", "demo").stdout
    next_lines = out.rpartition("\n\n")[2]
    assert next_lines.count("\n") >= 4
    python("-W", "error", "-c", next_lines, cwd=tmp_path)
    assert "What next?" in out and "mhac" in (tmp_path / "attention.html").read_text(encoding="utf-8")
    for text in (
        "[[[ 2.  3.  4.  5.]]",
        "[[10. 11. 12. 13.]]]",
        "[[[0.5    0.5    0.     0. ",
        "0.1667 0.1667 0.1667 0.1667 0.1667 0.1667 0. ",
        "(attention): DotProductAttention(",
        "(dropout): Dropout(p=0.5, inplace=False)",
        "(W_q): Linear(in_features=100, out_features=100, bias=False)",
        "output (2, 4, 100), attention_weights (2, 5, 4, 6)",
    ):
        assert text in out
    assert len(re.findall(r"^--- .*: \d+\.\d us$", out, re.MULTILINE)) == out.count("---") >= 5


def test_usage():
    assert python("-m", "mha_c", "--help").stdout.startswith("usage: python -m mha_c ")
    done = python("-m", "mha_c", "dance", check=False)
    assert done.returncode == 2 and done.stderr.startswith("usage:")


def test_selftest():
    done = python("-m", "mha_c.selftest")
    lines = done.stdout.splitlines()
    assert [line.split()[:2] for line in lines[1:-1]] == [[n, t] for n in OFFERED for t in ("float32", "float64")]
    assert lines[-1].startswith("all within bounds") and "FAIL" not in done.stdout


def test_selftest_notices_errors(monkeypatch, capsys):
    active = _core.isa()
    monkeypatch.setattr(selftest, "BOUNDS", {"float32": 1e-9})
    monkeypatch.setattr(selftest, "CASES", selftest.CASES[:2])
    assert selftest.main() == 1
    assert f"{2 * len(OFFERED)} FAILED" in capsys.readouterr().out and _core.isa() == active


def test_selftest_measures_errors():
    one = np.ones((2, 2))
    assert selftest.error([one], [one]) == 0
    assert selftest.error([one * 1.5], [one]) == 0.5
    assert selftest.error([np.array([1, -np.inf])], [np.array([1, -np.inf])]) == 0
    assert selftest.error([np.array([1, np.nan])], [np.array([1, -np.inf])]) == np.inf
    assert selftest.error([np.array([1, np.nan])], [one[0]]) == np.inf
    assert selftest.error([one[0]], [one]) == np.inf
