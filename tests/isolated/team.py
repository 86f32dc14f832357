"""Calls on torch's own threads, in a process where something else goes on: python team.py WHAT[+WHAT...] ROUNDS.

Each function is one such thing; the process ends with an error, or hangs, if a call gives other bits than one thread.
"""

import contextlib
import ctypes
import faulthandler
import gc
import multiprocessing
import os
import re
import resource
import signal
import sys
import threading
import time

import torch

import mha_c
import mha_c.torch as mt
from mha_c import _core

HANGS = 120  # seconds that a child may take
OPENMP = r"lib[a-z]*omp"  # in the name of a runtime: libgomp, libomp, libiomp5
torch.manual_seed(0)
torch.set_num_threads(3)  # more than a small machine has, so that threads of a team meet late, too
layer = mt.MultiHeadAttention(64, 64, 64, 64, 4, 0.0)
x, lens = torch.randn(4, 96, 64, requires_grad=True), torch.tensor([50, 96, 7, 80])
big = torch.randn(200_000)


def bits():
    """Output and gradient of a layer that is large enough for several threads."""
    out = layer(x, x, x, lens)
    (grad,) = torch.autograd.grad(out.sum(), x)
    return out.detach().numpy().tobytes() + grad.numpy().tobytes()


def torchs():
    """An operation of torch's own on all its threads."""
    return float(torch.exp(big).sum())


def on_one_thread():
    with mha_c.set_num_threads(1):
        return bits()


right = on_one_thread()


def is_right():
    return bits() == right


def n_threads():
    return len(os.listdir("/proc/self/task"))


def in_child(work):
    """The exit status of a fork that does this work."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(HANGS)
        ended = 1
        try:
            ended = 0 if work() else 2
        finally:
            os._exit(ended)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# --- What goes on ---------------------------------------------------------------------------------------


def whose(rounds):
    """The runtime is the one that torch's library calls, and no thread is started beside torch's."""
    torchs()
    before = n_threads()
    assert is_right() and n_threads() == before, "threads beside torch's"
    kind, words = mha_c.config.threads_of()
    loaded = {line.split()[-1] for line in open("/proc/self/maps") if re.search(OPENMP, line)}
    print(kind, words.split()[-1], *sorted(loaded))
    for _ in range(rounds):
        assert is_right()


def bits_of_any_team(rounds):
    rounds = max(1, rounds // 10)
    for n in (1, 2, 3, 5, 8):
        torch.set_num_threads(n)
        for _ in range(rounds):
            assert is_right() and torchs()
    for n in (2, 3):  # ours are set: fewer, or more, than torch has
        torch.set_num_threads(2)
        with mha_c.set_num_threads(n):
            assert is_right()


def forks(rounds):
    def family():
        assert not _core.has_team() and "forked" in mha_c.config.threads_of()[1]
        return is_right() and in_child(is_right) == 0

    for i in range(rounds):
        status = in_child(family if i % 4 == 0 else is_right)
        assert status == 0, f"round {i}: {status}"
        assert is_right() and torchs() and _core.has_team()


def forks_before_use(rounds):
    """The parent has given the team, and begun no region: `right` was computed on one thread."""
    for _ in range(rounds):
        assert in_child(is_right) == 0
    assert is_right()


def forks_while_others_call(rounds):
    stopped = threading.Event()

    def work():
        while not stopped.is_set():
            assert is_right()

    workers = [threading.Thread(target=work) for _ in range(2)]
    [worker.start() for worker in workers]
    for _ in range(rounds):
        assert in_child(is_right) == 0
    stopped.set()
    [worker.join() for worker in workers]
    assert is_right()


class Examples(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        share = mha_c.explain(layer, x, x, x, lens).as_dict()["attention"]["share"]
        return torch.tensor([is_right(), share["most_threads"] == 1, not _core.has_team()])


def loader(rounds):
    """Workers have one thread, and none of a team; the parent uses its own while they work."""
    assert is_right()
    for _ in range(max(1, rounds // 20)):
        for found in torch.utils.data.DataLoader(Examples(), num_workers=2, timeout=HANGS):
            assert found.all() and is_right(), found


def spawn_worker(n):
    return [is_right() and _core.has_team() for _ in range(n)]


def spawn(rounds):
    assert is_right()
    with multiprocessing.get_context("spawn").Pool(1 if rounds < 10 else 2) as pool:  # which import torch for seconds
        for found in pool.map_async(spawn_worker, [rounds] * 4).get(timeout=HANGS * 5):
            assert all(found)


def forked_pool(rounds):
    assert is_right()
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert all(pool.map_async(child_is_right, range(rounds)).get(timeout=HANGS * 5))


def child_is_right(_):
    return is_right() and not _core.has_team()


def of_joblib(backend):
    torch.set_num_threads(3)  # joblib gives a worker its share of the cores, which may be one
    return is_right() and _core.has_team() == (backend != "multiprocessing")  # whose workers are forks


def joblibs(rounds):
    """joblib's threads, its processes and its forks."""
    from joblib import Parallel, delayed

    for backend in ("threading", "loky", "multiprocessing"):
        found = Parallel(n_jobs=2, backend=backend)(delayed(of_joblib)(backend) for _ in range(rounds))
        assert len(found) == rounds and all(found), backend
        assert is_right() and torchs()


def callers(rounds):
    """Threads that call at once, each with operations of torch between, and short-lived threads beside them."""

    def work():
        for _ in range(rounds):
            assert is_right() and torchs()

    errors = []

    def noted(work):
        try:
            work()
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=noted, args=(work,)) for _ in range(4)]
    [worker.start() for worker in workers]
    for _ in range(rounds):
        short = threading.Thread(target=noted, args=(lambda: [is_right() for _ in range(2)],))
        short.start()
        short.join()
    [worker.join() for worker in workers]
    assert not errors, errors


def regions(rounds):
    """Calls by all threads of a region of torch's own runtime, which they do not begin another one in."""
    runtime = ctypes.CDLL(next(line.split()[-1] for line in open("/proc/self/maps") if re.search(OPENMP, line)))
    found = []
    body = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: found.append(is_right()))
    assert is_right()
    for _ in range(rounds):
        runtime.GOMP_parallel(body, None, 0, 0)
        assert is_right() and torchs()
    assert len(found) == 3 * rounds and all(found)


def another_runtime(rounds):
    """Another OpenMP runtime is loaded beside torch's and used in turns with it; calls are made in its regions, too."""
    other = ctypes.CDLL(sys.argv[3])
    found = []
    body = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: found.append(is_right()))
    for _ in range(rounds):
        other.GOMP_parallel(body, None, 2, 0)
        assert is_right() and torchs()
    assert found and all(found)
    whose(1)


def long_call():
    """A call that takes long enough for a signal to meet it; it returns bits, as torch's own operations on the team of
    a parent would hang in its fork."""
    n, seconds = 500, 0.0
    torch.set_num_threads(2)
    while seconds < 0.1:
        n *= 2
        q, start = torch.randn(1, 8, n, 64), time.perf_counter()
        mt.functional.dot_product_attention(q, q, q)
        seconds = time.perf_counter() - start
    return lambda: mt.functional.dot_product_attention(q, q, q).numpy().tobytes()


def interrupts(rounds):
    """Ctrl-C ends a call on the team; the next one is right."""
    call, raised = long_call(), 0
    first = call()
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    for _ in range(rounds):
        try:  # begins before the timer: a busy machine may come back to this line only after the signal
            signal.setitimer(signal.ITIMER_REAL, 0.02)
            call()
            signal.pause()
        except KeyboardInterrupt:
            raised += 1
    assert raised == rounds and call() == first and is_right()


def handlers_that_fork(rounds):
    """The child comes out of the region that it has lost, and computes with threads of its own."""
    call, parent, ended, children = long_call(), os.getpid(), 0, []
    first = call()

    def handler(*_):
        children.append(os.fork())
        if children[-1] == 0:
            signal.alarm(HANGS)

    signal.signal(signal.SIGALRM, handler)
    for _ in range(rounds):
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        try:
            said = "right" if call() == first else "wrong"
        except RuntimeError as error:
            said = "refused" if "forked" in str(error) else str(error)
        while not children:
            time.sleep(0.001)
        if os.getpid() != parent:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            # For torch this thread is still in the region: it does all by itself.
            fine = is_right() and not _core.has_team() and (said == "right" or torchs())
            os._exit({"refused": 0, "right": 2}.get(said, 1) if fine else 3)
        assert said == "right", said
        status = os.waitpid(children.pop(), 0)[1]
        assert status in (0, 2 << 8), status
        ended += status == 0
    assert ended > 0, "no signal came during a call"


def exits(rounds):
    """The process ends while threads are inside calls."""
    # On arrays: a thread that comes back from a call of torch's own, autograd or not, while Python ends, is ended in
    # torch's C++, which then ends the process with "terminate called".
    ours, array, lengths = mha_c.MultiHeadAttention(64, 64, 64, 64, 4, 0.0), x.detach().numpy(), lens.numpy()
    assert mha_c.config.threads_of()[0] == "torch"

    def work():
        while True:
            ours(array, array, array, lengths)

    for _ in range(min(rounds, 3)):
        threading.Thread(target=work, daemon=True).start()
    time.sleep(0.05)


def no_threads_left(rounds):
    """Where torch's runtime could not start a thread, it would end the process: ours are smaller, or one does all."""
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**29, used + 2**29))  # a stack is larger, see the test
    for _ in range(rounds):
        assert is_right()
    with contextlib.suppress(RuntimeError):
        threading.Thread(target=print).start()
        raise AssertionError("a thread could be started")


def torch_starts_and_stops(rounds):
    """The number of torch's threads changes all the time; ours are collected with what they belong to."""
    for i in range(rounds):
        torch.set_num_threads(1 + i % 4)
        assert is_right() and (i % 2 or torchs())
        gc.collect(0)


if __name__ == "__main__":
    faulthandler.dump_traceback_later(850, exit=True)
    for what in sys.argv[1].split("+"):
        torch.set_num_threads(3)
        globals()[what](int(sys.argv[2]))
    print("done")
