"""How many threads a process takes: from its variables, its CPUs, its quota, or set_num_threads."""

import ctypes
import functools
import os
import sys
import textwrap
import types
from pathlib import Path

import numpy as np
import pytest

import children
import mha_c
from children import printed
from mha_c import config

THREADS = "import mha_c; print(mha_c.get_num_threads())"
DEFAULT = None  # what `default` finds


@functools.cache
def default():
    """As many threads as a process takes without a variable."""
    return printed(THREADS)[0]


def test_a_process_takes_the_cpus_that_it_may_use():
    cpus = config._cores()
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
def test_a_bad_variable_is_a_warning_and_the_next_counts(value):
    out, warned = printed(THREADS, MHA_C_NUM_THREADS=value, OMP_NUM_THREADS="7")
    assert out == "7"
    assert f"RuntimeWarning: MHA_C_NUM_THREADS={value!r} is ignored: it must be a whole number >= 1" in warned
    assert warned.count("Warning:") == 1


@pytest.mark.parametrize("name", ["MHA_C_NUM_THREADS", "OMP_NUM_THREADS"])
def test_a_bad_variable_alone_is_a_warning_and_the_default(name):
    out, warned = printed(THREADS, **{name: "many"})
    assert out == default() and f"{name}='many' is ignored" in warned


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
        for name in children.CHOICES:
            monkeypatch.delenv(name, raising=False)
        for found, threads in ((1, 1), (None, config._cores()), (10**6, config._cores())):
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


CORES = {  # the CPUs this process may use, what the system tells of each, cores
    "each its own": ([0, 1], {0: "0", 1: "1"}, 2),
    "two threads of one core, as on Colab": ([0, 1], {0: "0-1", 1: "0-1"}, 1),
    "two of each core": ([0, 1, 2, 3], {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}, 2),
    "one of each core": ([0, 1], {0: "0,2", 1: "1,3"}, 2),
    "nothing is told": ([0, 1, 5], {}, 3),
    "of one": ([0, 1, 5], {0: "0-1", 1: "0-1"}, 2),
    "empty files": ([0, 1], {0: "", 1: "\n"}, 2),
}


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no affinity masks: CPUs count")
@pytest.mark.parametrize("case", CORES)
def test_cpus_of_one_core_count_once(case, tmp_path, monkeypatch):
    cpus, told, cores = CORES[case]
    for cpu, siblings in told.items():
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{siblings}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(cpus))
    assert config._cores(str(tmp_path)) == cores


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
