"""The package in a process with more going on: forks, children, threads, exits, too little memory.

What could hang, crash or leave something changed runs in a process of its own, with a time limit.  The pool's own
promises (fork, exit, signal masks, too few CPUs) are tested in C: tests/c/test_threads*.c.
"""

import itertools
import sys
import sysconfig
import time
from pathlib import Path

import numpy as np
import pytest

import mha_c
import needs
from mha_c import functional as F
from prepared import python, run
from threads import in_threads

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX processes and signals")
ISOLATED = Path(__file__).parents[1] / "isolated"
REPETITIONS = 200 if needs.NIGHTLY else 10


# --- Fork and children --------------------------------------------------------------------------------


def test_fork_after_use_and_while_another_thread_computes():
    """Children and their children get the right bits; none hangs (alarm), whatever the fork interrupted."""
    python(
        """
        def family(depth):
            pid = os.fork()
            if pid == 0:
                signal.alarm(int(sys.argv[2]))
                os._exit(0 if call() and (depth == 0 or family(depth - 1)) and call() else 1)
            return os.waitpid(pid, 0)[1] == 0

        for others in 0, 2:
            busy = Busy(others)
            for i in range(int(sys.argv[1])):
                busy.wait()
                assert family(i % 3 == 0)
            busy.wait()
            busy.stop()
            assert call()
        """,
        str(REPETITIONS),
        str(needs.HANGS // 2),
    )


METHODS = ["fork", "spawn", "forkserver", "module-fork"]
# Each of these imports torch anew.  By day test_team.py has a loader and spawns, and test_saving.py pickles modules.
METHODS += ["loader-fork", "loader-spawn", "module-spawn", "module-forkserver"] if needs.NIGHTLY else []


@pytest.mark.parametrize("method", METHODS)
def test_worker_processes(method):
    if method.startswith(("loader", "module")):
        needs.module("torch")
    run(ISOLATED / "workers.py", method)


# --- Threads ----------------------------------------------------------------------------------------------


def while_another(disturb, check, times, met):
    """`check` in each of two threads while a third calls `disturb`: so many times, and until `met()`, however the
    system lets the threads take turns."""
    done, disturbed, interval = [], 0, sys.getswitchinterval()
    end = time.monotonic() + needs.HANGS

    def disturber():
        nonlocal disturbed
        while len(done) < 2:
            disturb()
            disturbed += 1

    def checker():
        try:
            checked = 0
            while checked < times or disturbed < 10 or not met():
                check()
                checked += 1
                assert time.monotonic() < end, "what was waited for did not come"
        finally:
            done.append(True)

    sys.setswitchinterval(1e-5)  # the threads take turns after a few lines, not after many calls
    try:
        in_threads(disturber, checker, checker)
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("kind", ["multi-head", "dot-product", "additive"])
def test_many_threads_on_one_layer(kind, rng):
    """Each caller gets its own result; the weights read afterwards are those of one call, never a mixture."""
    make = {
        "multi-head": lambda: mha_c.MultiHeadAttention(32, 4, 0.0, rng=0),
        "dot-product": lambda: mha_c.DotProductAttention(0.0),
        "additive": lambda: mha_c.AdditiveAttention(16, 0.0, rng=0),
    }[kind]
    inputs = [rng.standard_normal((2, 40 + i, 32), dtype=np.float32) for i in range(8)]
    alone, expected, weights = make(), [], []
    for i, x in enumerate(inputs):
        expected.append(alone(x, x, x, [30, 40 + i]).copy())
        weights.append(alone.attention_weights.tobytes())
    shared = make()  # sizes open: the first calls race to fix them

    def work(i):
        for _ in range(REPETITIONS * 3):
            np.testing.assert_array_equal(shared(inputs[i], inputs[i], inputs[i], [30, 40 + i]), expected[i])
            assert shared.attention_weights.tobytes() in weights

    in_threads(*(lambda i=i: work(i) for i in range(8)))


def test_weights_replaced_during_calls(rng):
    """A call uses the old parameters or the new ones, as a whole."""
    x = rng.standard_normal((2, 24, 16), dtype=np.float32)
    layers = [mha_c.MultiHeadAttention(16, 16, 16, 16, 2, 0.0, bias=True, rng=seed) for seed in range(2)]
    states = [layer.state_dict() for layer in layers]
    allowed = [layer(x, x, x).tobytes() for layer in layers]
    shared, turns, seen = layers[0], itertools.cycle(states), set()

    def compute():
        seen.add(shared(x, x, x).tobytes())

    while_another(lambda: shared.load_state_dict(next(turns)), compute, REPETITIONS * 100, lambda: seen >= set(allowed))
    assert seen == set(allowed)


def test_inputs_and_lengths_changed_during_calls(rng):
    """Any mixture of numbers may come out, but nothing outside the arrays is touched: lengths are read once."""
    q = rng.standard_normal((2, 200, 32), dtype=np.float32)
    lens, keep = np.full((2, 200), 200), np.ones((200, 200), bool)
    draws, finite = np.random.default_rng(1), set()

    def change():
        lens[...] = draws.integers(-(2**62), 2**62, lens.shape)
        keep[...] = draws.random(keep.shape) < 0.5
        q[...] = np.nan if draws.random() < 0.5 else 1

    def compute():
        out, weights = F.dot_product_attention(q, q, q, lens, keep_mask=keep, return_weights=True)
        assert out.shape == q.shape and weights.shape == (2, 200, 200)
        finite.add(bool(np.isfinite(out).all()))

    while_another(change, compute, REPETITIONS * 5, lambda: len(finite) == 2)
    assert finite == {True, False}


# --- Ends, and what ends a call -----------------------------------------------------------------------------


def test_exit_with_a_thread_inside_a_call():
    for _ in range(max(3, REPETITIONS // 10)):
        python(
            """
            Busy(2).wait()
            """
        )


def test_calls_while_the_interpreter_ends():
    """From atexit, from a finaliser and from a module's teardown."""
    printed = python(
        """
        class Last:
            def __del__(self, call=call, print=print):
                print("finaliser", call())
        keep = Last()
        cycle = [Last()]
        cycle.append(cycle)
        atexit.register(lambda: print("atexit", call()))
        """
    )
    assert "atexit True" in printed and "Error" not in printed


def test_a_free_threaded_python_keeps_its_global_lock_off():
    printed = python('print("lock:", getattr(sys, "_is_gil_enabled", lambda: True)())')
    assert f"lock: {not sysconfig.get_config_var('Py_GIL_DISABLED')}" in printed


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux holds a process to a limit of its addresses")
def test_too_little_memory_is_a_memory_error():
    printed = python(
        """
        q = np.zeros((1, 20000, 4), np.float32)
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, used + 2**28))
        try:
            F.dot_product_attention(q, q, q, return_weights=True)  # 1.6 GB of weights
        except MemoryError:
            print("refused", call())
        """
    )
    assert "refused True" in printed


def test_a_second_interpreter():
    """There the import is refused from Python 3.12 on, because NumPy refuses it; the process lives on."""
    printed = python(
        """
        try:
            import _interpreters as interpreters  # Python 3.13
        except ImportError:
            import _xxsubinterpreters as interpreters
        reading, writing = os.pipe()
        other = interpreters.create()
        ended = interpreters.run_string(other, f'''
        import os
        try:
            import mha_c
            said = b"imported"
        except ImportError:
            said = b"refused"
        os.write({writing}, said)
        ''')
        assert ended is None, ended  # Python 3.13 returns what nobody caught there
        said = os.read(reading, 100).decode()
        interpreters.destroy(other)
        print(said, call())
        """
    )
    allowed = ["refused True", "imported True"] if sys.version_info < (3, 12) else ["refused True"]
    assert printed.strip() in allowed, printed
