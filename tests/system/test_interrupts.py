"""Signals during calls, in a process of its own: Ctrl-C, handlers that call or fork.

Those that come while a call asks for its thread: tests/binding/test_signals.py.
"""

import sys
from pathlib import Path

import pytest

import needs
from prepared import python, run

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX processes and signals")
ISOLATED = Path(__file__).parents[1] / "isolated"


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
        n, under_way = 1000, False
        while not under_way:  # else the call had ended before the signal came
            n, begun, results = 2 * n, threading.Event(), []
            q = np.ones((1, 1, n, 64), np.float32)

            def long_call():
                begun.set()
                results.append(F.dot_product_attention(q, q, q).tobytes())

            thread = threading.Thread(target=long_call)
            thread.start()
            begun.wait()
            try:
                os.kill(os.getpid(), signal.SIGINT)
                thread.join()
            except KeyboardInterrupt:
                under_way = not results
            thread.join()
        print("interrupted", results[0] == F.dot_product_attention(q, q, q).tobytes(), call())
        """
    )
    assert "interrupted True True" in printed


def test_a_signal_handler_may_call_during_a_call():
    """And what it calls is not broken off; nor is the call that it came in, unless it raises."""
    printed = python(
        """
        same, ended, n = [], [], 1000

        def handler(*_):
            same.append(F.dot_product_attention(q, q, q).tobytes() == first)
            ended.append(time.thread_time())

        signal.signal(signal.SIGALRM, handler)
        worked_on = 0.0
        while worked_on < 0.02:  # else the call was all but over when the handler ran, or had not begun
            n = min(2 * n, 16000)
            q = np.random.default_rng(0).standard_normal((1, 1, n, 64), dtype=np.float32)
            first = F.dot_product_attention(q, q, q).tobytes()
            ended.clear()
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            found, now = F.dot_product_attention(q, q, q), time.thread_time()
            while not ended:
                time.sleep(0.001)
            assert found.tobytes() == first
            worked_on = now - ended[0]
        print("handler", *set(same))
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
