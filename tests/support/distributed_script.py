"""A script on two processes, as torchrun would start them, in forks of one that has imported torch: what torch and its
distributed parts take to import is three times what a short script takes."""

import os
import runpy
import socket
import sys

import needs
import worlds


def begin(words, printed, **variables):
    """Two processes of the script and its words.  Gives the function that waits for them, and has their exit statuses
    and what they printed: it goes to that file."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    variables.update(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME=loopback)
    words = [*map(str, words)]
    processes = [worlds.forked(run, words, printed, {**variables, "RANK": str(rank)}) for rank in range(2)]

    def finish():
        for process in processes:
            process.join(needs.HANGS)
        return [process.exitcode for process in processes], printed.read_text()

    return finish


def run(words, printed, variables):
    """One of them."""
    os.environ.update(variables)
    sys.argv = words
    sys.path[:0] = [os.path.dirname(words[0]), *variables.get("PYTHONPATH", "").split(os.pathsep)]
    os.dup2(os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)

    import torch

    torch.set_num_threads(1)
    runpy.run_path(words[0], run_name="__main__")
