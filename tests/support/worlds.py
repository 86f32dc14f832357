"""Several real processes that talk over the loopback interface by torch.distributed's gloo.

`World(n)` starts n processes once; `world.run(function, ...)` has each of them call function(rank, n, ...), one after
the other or, if that talks, together, and gives the list of their results.  The functions stand in
distributed_cases.py, so that the processes find them by name.
"""

import contextlib
import datetime
import importlib
import multiprocessing
import os
import tempfile
import traceback

PATIENCE = 900  # seconds, for processes that a busy machine lets wait: needs.HANGS, which imports more than they need


class RankError(Exception):
    """What a rank raised: its type's name, its text and its traceback."""

    def __init__(self, rank, kind, text, trace):
        super().__init__(f"rank {rank}: {kind}: {text}\n{trace}")
        self.rank, self.kind, self.text = rank, kind, text


def forked(target, *args):
    """A process that has begun target(*args), in a fork of one that imports once for all what takes long."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "torch.distributed.checkpoint.state_dict",
            "torch.distributed.fsdp",
            "torch._dynamo",
            "mha_c.torch.distributed",
        ]
    )
    process = context.Process(target=target, args=args, daemon=True)
    process.start()
    return process


class World:
    def __init__(self, n, timeout=PATIENCE):
        self.n = n
        self._folder = tempfile.TemporaryDirectory(prefix="mha_c-world-")
        pairs = [multiprocessing.Pipe() for _ in range(n)]
        self.pipes = [ours for ours, _ in pairs]
        store = f"{self._folder.name}/store"
        self.processes = [forked(_serve, rank, n, store, timeout, theirs) for rank, (_, theirs) in enumerate(pairs)]
        for _, theirs in pairs:
            theirs.close()

    def run(self, function, *args, **named):
        """Each rank's result; the first rank's error, if there is one."""
        results = self.ask(function, *args, **named)
        for result in results:
            if isinstance(result, RankError):
                raise result
        return results

    def ask(self, function, *args, ranks=None, **named):
        """The same with errors among the results; None for a rank that is gone."""
        self.start(function, *args, **named)
        return [self.result(rank) for rank in (range(self.n) if ranks is None else ranks)]

    def start(self, function, *args, **named):
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send((function.__module__, function.__name__, args, named))

    def result(self, rank):
        try:
            if not self.pipes[rank].poll(PATIENCE):
                raise AssertionError(f"rank {rank} hangs")
            kind, value = self.pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            return None
        return value if kind == "result" else RankError(rank, *value)

    def close(self):
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def _serve(rank, n, store, timeout, pipe):
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if os.uname().sysname == "Darwin" else "lo")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(store, n)
    store.set(f"here {rank}", "")
    store.wait([f"here {i}" for i in range(n)], datetime.timedelta(seconds=PATIENCE))  # however long they take to start
    timeout = datetime.timedelta(seconds=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n, timeout=timeout)
    while True:
        try:
            module, name, args, named = pipe.recv()
        except (EOFError, OSError):
            break
        try:
            function = getattr(importlib.import_module(module), name)
            answer = "result", function(rank, n, *args, **named)
        except Exception as error:
            answer = "error", (type(error).__name__, str(error), traceback.format_exc())
        pipe.send(answer)
    os._exit(0)  # others may be gone: no farewell
