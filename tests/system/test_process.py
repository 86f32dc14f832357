"""The package in a process with more going on: forks, children, threads, signals, exits, odd floating-point modes.

What could hang, crash or leave something changed runs in a process of its own, with a time limit.  The pool's own
promises (fork, exit, signal masks, too few CPUs) are tested in C: tests/c/test_threads*.c.
"""

import itertools
import os
import sys
import sysconfig
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

import children
import mha_c
import needs
from mha_c import functional as F
from threads import in_threads

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX processes and signals")
ISOLATED = Path(__file__).parents[1] / "isolated"
REPETITIONS = 200 if needs.NIGHTLY else 10

# What most scripts below start from: a layer, inputs large enough for several threads, the right answer.
PREPARED = """
import atexit, ctypes, os, resource, signal, sys, threading, time
import numpy as np
import mha_c
from mha_c import functional as F
mha_c.set_num_threads(3)
x = np.random.default_rng(0).standard_normal((2, 96, 64), dtype=np.float32)
layer = mha_c.MultiHeadAttention(64, 4, 0.0, rng=0)
right = layer(x, x, x, [50, 96]).tobytes()

def call():
    return layer(x, x, x, [50, 96]).tobytes() == right

class Busy:  # threads that call on and on; `wait` until each has called once more
    def __init__(self, number):
        self.calls, self.stopped = [0] * number, False
        self.threads = [threading.Thread(target=self.work, args=(i,), daemon=True) for i in range(number)]
        [thread.start() for thread in self.threads]

    def work(self, i):
        while not self.stopped:
            assert call()
            self.calls[i] += 1

    def wait(self):
        before = list(self.calls)
        while any(now == then for now, then in zip(self.calls, before)):
            time.sleep(0.0005)

    def stop(self):
        self.stopped = True
        [thread.join() for thread in self.threads]
"""


def python(code, *arguments, status=0):
    """Runs code after PREPARED; returns what it printed."""
    return run("-c", PREPARED + textwrap.dedent(code), *arguments, status=status)


def run(*command, status=0):
    done = children.python("-X", "faulthandler", *command, status=status)
    return done.stdout + done.stderr


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


METHODS = ["fork", "spawn", "forkserver", "loader-fork", "module-spawn"]
METHODS += ["loader-spawn", "module-fork", "module-forkserver"] if needs.NIGHTLY else []


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


# --- Ends and interruptions ---------------------------------------------------------------------------------


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


@pytest.mark.parametrize("what", ["numpy", "torch"])
def test_keyboard_interrupt(what):
    """Ctrl-C ends a call that is under way, of any kind, within a fraction of a second; other threads' calls go on."""
    if what == "torch":
        needs.module("torch")
    lines = run(ISOLATED / "interrupts.py", what, "3").splitlines()
    assert len(lines) == {"numpy": 10, "torch": 3}[what] and all(line.endswith(" in time") for line in lines), lines


def test_another_threads_call_is_not_interrupted():
    """The signal is the main thread's: a long call elsewhere ends as if there had been none."""
    printed = python(
        """
        signal.signal(signal.SIGINT, signal.default_int_handler)
        q, results = np.ones((1, 1, 6000, 64), np.float32), []
        thread = threading.Thread(target=lambda: results.append(F.dot_product_attention(q, q, q)))
        thread.start()
        try:
            time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGINT)
            thread.join()
        except KeyboardInterrupt:
            thread.join()
            print("interrupted", results[0].tobytes() == F.dot_product_attention(q, q, q).tobytes(), call())
        """
    )
    assert "interrupted True True" in printed


def test_a_signal_handler_may_call_during_a_call():
    """And what it calls is not broken off; nor is the call that it came in, unless it raises."""
    printed = python(
        """
        handled, n, seconds = [], 1000, 0.0
        while seconds < 0.25:  # so that the signal comes, and is asked for, during a call
            n, start = 2 * n, time.perf_counter()
            q = np.random.default_rng(0).standard_normal((1, 1, n, 64), dtype=np.float32)
            first = F.dot_product_attention(q, q, q).tobytes()
            seconds = time.perf_counter() - start
        signal.signal(signal.SIGALRM, lambda *_: handled.append(F.dot_product_attention(q, q, q).tobytes() == first))
        while not handled:
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            assert F.dot_product_attention(q, q, q).tobytes() == first
        print("handler", *handled)
        """
    )
    assert "handler True" in printed


@pytest.mark.parametrize("in_child", ["True", "F.dot_product_attention(*3 * [large[:, :, :500]]).any()"])
def test_a_fork_in_a_signal_handler_ends_the_call_of_the_child(in_child):
    """The threads that helped the call are not in the child: what they had begun is never finished there.

    Nor does the child wait for them where its handler calls first, with threads of the child's own.
    """
    python(
        """
        n, seconds, parent, children = 500, 0.0, os.getpid(), []
        mha_c.set_num_threads(2)
        while seconds < 0.1:  # so that the signal is asked for during a call
            n, start = 2 * n, time.perf_counter()
            q = np.random.default_rng(1).standard_normal((1, 16, n, 64), dtype=np.float32)
            first = F.dot_product_attention(q, q, q).tobytes()
            seconds = time.perf_counter() - start
        large, refused = q, 0

        def handler(*_):
            children.append(os.fork())
            assert children[-1] != 0 or IN_CHILD

        signal.signal(signal.SIGALRM, handler)
        while refused < 6:  # the other times the signal came too late to be seen during the call
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            try:
                ended = "after the call" if F.dot_product_attention(q, q, q).tobytes() == first else "wrong"
            except RuntimeError as error:
                ended = "refused" if "forked" in str(error) else str(error)
            while not children:
                time.sleep(0.001)
            if os.getpid() != parent:
                again = call() and F.dot_product_attention(q, q, q).tobytes() == first
                os._exit({"refused": 0, "after the call": 2}.get(ended, 1) if again else 1)
            assert ended == "after the call", ended
            status = os.waitstatus_to_exitcode(os.waitpid(children.pop(), 0)[1])
            assert status in (0, 2), status
            refused += status == 0
        assert call()
        """.replace("IN_CHILD", in_child)
    )


def test_a_signal_handler_may_call():
    printed = python(
        """
        handled = []
        signal.signal(signal.SIGALRM, lambda *_: handled.append(call()))
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        while not handled:
            assert call()
        print("handler", *handled)
        """
    )
    assert printed.strip() == "handler True"


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


# --- Floating-point mode --------------------------------------------------------------------------------------

ROUNDING = {"downward": 0x400, "upward": 0x800, "towards zero": 0xC00}


@pytest.mark.skipif(
    sys.platform != "linux" or os.uname().machine != "x86_64", reason="the name of glibc, the numbers of x86-64's modes"
)
@pytest.mark.parametrize("mode", ROUNDING)
def test_rounding_mode_of_the_caller(mode):
    """Kept, used by every thread alike, and the result is right to a little more than usual."""
    printed = python(
        """
        libm = ctypes.CDLL("libm.so.6")
        mode = int(sys.argv[1])
        exact = np.frombuffer(right, np.float32)
        bits = set()
        for threads in 1, 3:
            mha_c.set_num_threads(threads)
            libm.fesetround(mode)
            out = layer(x, x, x, [50, 96])
            kept = libm.fegetround() == mode
            libm.fesetround(0)
            assert kept
            bits.add(out.tobytes())
        # Directed rounding errs by up to twice as much, and all errors in one direction: a few dozen sums of 64 terms.
        print(len(bits) == 1, np.abs(out.ravel() - exact).max() < 64 * 2**-23 * np.abs(exact).max(), call())
        """,
        str(ROUNDING[mode]),
    )
    assert printed.strip() == "True True True"


def test_flush_to_zero_of_the_caller():
    """torch.set_flush_denormal sets it for the calling thread: kept, and results change by no more than subnormals."""
    needs.module("torch")
    printed = python(
        """
        import torch
        tiny = np.float32(1e-42)
        assert torch.set_flush_denormal(True)
        flushed = float(tiny * np.float32(1)) == 0
        out = layer(x, x, x, [50, 96])
        kept = (float(tiny * np.float32(1)) == 0) == flushed
        torch.set_flush_denormal(False)
        # Weights below 1e-38 may vanish; they are factors of values around 1.
        print(kept, np.abs(out.ravel() - np.frombuffer(right, np.float32)).max() <= 1e-36, call())
        """
    )
    assert printed.strip() == "True True True"


@pytest.mark.skipif(sys.platform != "linux", reason="feenableexcept is glibc's")
@pytest.mark.parametrize("name", [name for name, offered in mha_c._core.isas() if offered and name != "scalar"])
def test_floating_point_traps_of_the_caller(name):
    """With division by zero, overflow and invalid operations trapped, finite inputs raise none of them.

    Of plain C compilers may make code that works out what is then not chosen.
    """
    printed = python(
        """
        mha_c._core.set_isa(sys.argv[1])
        libm = ctypes.CDLL("libm.so.6")
        lens = np.arange(192).reshape(2, 96) % 97
        few, few_lens = np.ascontiguousarray(x[:, :10]), np.arange(20).reshape(2, 10) % 11
        calls = [
            lambda: F.dot_product_attention(x, x, x, lens, causal="top_left"),
            lambda: F.dot_product_attention(few, few, few, few_lens),
            lambda: layer(x, x, x, lens),
            lambda: layer(few, few, few, few_lens),
        ]
        expected = [call() for call in calls]
        libm.feenableexcept(1 | 4 | 8)
        found = [call() for call in calls]
        libm.fedisableexcept(1 | 4 | 8)
        print(all(a.tobytes() == b.tobytes() for a, b in zip(expected, found)))
        """,
        name,
    )
    assert printed.strip() == "True"
