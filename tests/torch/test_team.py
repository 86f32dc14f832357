"""Calls run on torch's own threads; on ours where torch's could hang, end the process, or are not known.

What could hang runs in a process of its own (tests/isolated/team.py), a thousand rounds of each by night.
"""

import functools
import os
import re
import resource
import subprocess
from pathlib import Path

import pytest
import torch

import children
import mha_c
import mha_c.torch
import needs
from mha_c import _core, config

SCRIPT = Path(__file__).parents[1] / "isolated" / "team.py"
pytestmark = pytest.mark.skipif(not _core.has_team(), reason=f"not on torch's threads: {config.threads_of()[1]}")


@functools.cache  # a process imports torch for seconds: what it has printed serves several tests
def team(what, *more, rounds=5, **variables):
    """By night a thousand rounds."""
    rounds = 1000 if needs.NIGHTLY and rounds > 3 else rounds
    done = children.unchosen(SCRIPT, what, rounds, *more, MHA_C_THREADS_OF=None, **variables)
    assert done.stdout.strip().endswith("done"), done.stdout + done.stderr
    return done.stdout.split()


# By day in one process, which ends inside calls; by night each in one of its own, for as long as a process may take.
THREADED = "whose+bits_of_any_team+callers+regions+torch_starts_and_stops+spawn+interrupts+handlers_that_fork+exits"


@pytest.mark.parametrize("what", ["forks_before_use+forks+forks_while_others_call+forked_pool+loader", THREADED])
def test_with_something_else_going_on(what):
    for some in what.split("+") if needs.NIGHTLY else [what]:
        team(some)


def test_workers_of_joblib():
    needs.module("joblib")
    team("joblibs")


@pytest.mark.skipif(not needs.NIGHTLY, reason="by day the process of the test above ends so")
def test_exit_with_threads_inside_calls():
    for _ in range(1000):
        team.__wrapped__("exits", rounds=3)


def test_the_runtime_is_torchs_own():
    kind, name, *loaded, _ = team("whose" if needs.NIGHTLY else THREADED)
    assert kind == "torch" and name in {os.path.basename(path) for path in loaded}
    own = Path(torch.__file__).parent
    mine = [path for path in loaded if own in Path(path).parents]
    assert not mine or name == Path(mine[0]).name


def system_runtime():
    """gcc's OpenMP library, as a program that is linked with it would load it."""
    path = subprocess.run(
        [needs.program("cc"), "-print-file-name=libgomp.so.1"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not os.path.isabs(path):
        needs.skip_or_fail("needs gcc's OpenMP library, libgomp.so.1")
    return os.path.realpath(path)


def test_another_runtime_beside_torchs(tmp_path):
    """Under another name, so that the linker keeps both; torch's own is taken, whichever was loaded first."""
    other = tmp_path / "libgomp-other.so.1"
    other.write_bytes(Path(system_runtime()).read_bytes())
    other = renamed(other)
    kind, name, *loaded, _ = team("another_runtime", other)
    assert kind == "torch" and name != other.name and str(other) in loaded and len(loaded) > 1, loaded


def renamed(library):
    """Its name inside, which the linker goes by, is another one, too: of the same length."""
    bits = library.read_bytes()
    assert b"\0libgomp.so.1\0" in bits
    library.write_bytes(bits.replace(b"\0libgomp.so.1\0", b"\0libgopm.so.1\0"))
    return library


def own_runtime():
    """The copy that torch's wheel brings."""
    package = Path(torch.__file__).parent
    own = sorted((package / "lib").glob("libgomp*")) or sorted((package.parent / "torch.libs").glob("libgomp*"))
    if not own:
        pytest.skip("this torch has no OpenMP runtime of its own")
    return own[0]


def test_a_runtime_that_is_preloaded():
    """As people do against "cannot allocate memory in static TLS block": torch is bound to that one, and so are we."""
    other = Path(system_runtime())
    own_runtime()
    kind, name, *loaded, _ = team("whose+forks", rounds=3, LD_PRELOAD=str(other))
    assert kind == "torch" and name == other.name and str(other) in loaded


def test_condas_layout(tmp_path):
    """One runtime for all libraries of the environment, in its own folder, behind a link with the name torch asks."""
    own = own_runtime()
    if own.name != "libgomp.so.1":
        pytest.skip("torch's copy has a name of its own, which no environment has")
    folder = tmp_path / "env" / "lib"
    folder.mkdir(parents=True)
    other = folder / "libgomp.so.1.0.0"
    other.write_bytes(Path(system_runtime()).read_bytes())
    (folder / "libgomp.so.1").symlink_to(other.name)
    kind, name, *loaded, _ = team("whose+forks+regions", rounds=3, LD_LIBRARY_PATH=str(folder))
    if loaded == [str(own)]:
        pytest.skip("this torch looks into its own folder before it looks where the system is told to")
    assert kind == "torch" and name == "libgomp.so.1" and loaded == [str(other)]


def test_a_process_without_threads_to_spare_lives_on():
    """libgomp ends a process where it cannot start a thread: here stacks are larger than what memory is left."""
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    if hard != resource.RLIM_INFINITY:
        pytest.skip("this system has a limit for stacks")
    code = f"""
    import os, resource, sys
    resource.setrlimit(resource.RLIMIT_STACK, (2**34, {hard}))
    os.execv(sys.executable, [sys.executable, {str(SCRIPT)!r}, "no_threads_left", "3"])
    """
    done = children.unchosen("-c", "\n".join(line.strip() for line in code.splitlines()), MHA_C_THREADS_OF=None)
    assert done.stdout.strip() == "done", done.stdout + done.stderr


# What a process says that has asked for these threads: one process for each choice, asked all at once.
WHOSE = """
import torch, mha_c, mha_c.torch as mt
from mha_c import config
layer, x = mt.MultiHeadAttention(64, 64, 64, 64, 4, 0.0).eval(), torch.randn(8, 200, 64)
def most():
    return mha_c.explain(layer, x, x, x).as_dict()["attention"]["share"]["most_threads"]
print(*config.threads_of())
for n in (1, 2, 3, 5):
    torch.set_num_threads(n)
    with mha_c.set_num_threads(2):
        set_to_two = most()
    print(n, most(), set_to_two)
torch.set_num_threads(2)
explained = mha_c.explain(layer, x, x, x)
print(explained, explained.detail)
"""


@pytest.fixture(scope="module")
def asked_for():
    """{choice: (its first line, its numbers of threads, what was explained, warnings)}"""

    @functools.cache
    def answer(choice):
        said, warned = children.printed(WHOSE, MHA_C_THREADS_OF=choice)
        first, *numbers = said.split("\n", 5)
        return first, [line.split() for line in numbers[:4]], numbers[4], warned

    return answer


def test_whose_threads_can_be_chosen(capsys, asked_for):
    said, _, _, warned = asked_for("own")
    assert (said, warned) == ("own mha_c's own: MHA_C_THREADS_OF", "")
    for choice in ("host", "", None) if needs.NIGHTLY else (None,):
        assert asked_for(choice)[0].startswith("torch torch's own, of lib")
    said, _, _, warned = asked_for("yours")
    assert said.startswith("torch") and "MHA_C_THREADS_OF='yours' is ignored: it must be own or host" in warned
    shown = mha_c.show_config()
    assert shown["threads_of"] == "torch" and shown["threads_of_from"] in capsys.readouterr().out


def test_before_torch_they_are_our_own():
    code = "import mha_c; from mha_c import config; print(*config.threads_of())"
    assert children.printed(code, MHA_C_THREADS_OF=None)[0] == "own mha_c's own: mha_c.torch is not imported"


def test_a_fork_that_imports_us_after_torch_has_threads_of_its_own():
    """torch's team was its parent's: whoever began a region here would wait for it forever."""
    code = """
    import os, torch
    x = torch.ones(1, 8, 300, 64)  # on all threads, which torch's own operations of this size would wait for in a fork
    for choice in ({}, {"MHA_C_THREADS_OF": "host"}):
        pid = os.fork()
        if pid == 0:
            os.environ.update(choice)
            import warnings, mha_c.torch
            from mha_c import config
            mha_c.torch.functional.dot_product_attention(x, x, x)
            print(*config.threads_of(), flush=True)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
    """
    said, warned = children.printed("\n".join(line[4:] for line in code.splitlines()), MHA_C_THREADS_OF=None)
    unchosen, chosen = said.splitlines()
    assert unchosen == "own mha_c's own: this process was forked: torch's may be those of its parent"
    assert chosen.startswith("own") and warned.count("is ignored") == 1
    assert "MHA_C_THREADS_OF='host' is ignored: this process was forked" in warned


def test_forks_are_recognized(tmp_path):
    stat = tmp_path / "stat"
    for flags, forked in ((4194304, False), (4194304 | 0x40, True), ("x", True)):
        stat.write_text(f"12 (a) b) c) S 1 12 12 0 -1 {flags} 100 0\n")
        assert config._forked(str(stat)) is forked
    assert config._forked(str(tmp_path / "missing")) and not config._forked()


def test_torchs_number_counts_unless_ours_was_set(asked_for):
    if config._cpu_quota() is not None:
        pytest.skip("the quota of this process counts like a number that was set")
    assert asked_for(None)[1] == [["1", "1", "1"], ["2", "2", "2"], ["3", "3", "2"], ["5", "5", "2"]]


def test_what_is_explained_says_whose_threads(asked_for):
    for choice, of_torch in ((None, " of torch"), ("own", "")):
        said = asked_for(choice)[2]
        assert f", 2 threads{of_torch}; " in said and re.search(f"threads +2{of_torch},", said), said
