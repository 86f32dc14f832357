"""examples/distributed.py under torchrun: killed in the middle, it goes on, and comes to the same losses."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import needs

VERSION = "1.0.3"
SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "distributed.py"
# d2l under its own name; and what the processes may not have any more when they part.
PACKAGE = f"""
import gc
import sys

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import real_d2l


def destroy_process_group(destroy=dist.destroy_process_group):
    assert not any(type(found) is DistributedDataParallel for found in gc.get_objects()), "it outlives its group"
    destroy()


dist.destroy_process_group = destroy_process_group
sys.modules[__name__] = real_d2l.load({VERSION!r})
"""
OPTIONS = ["--epochs", "4", "--pairs", "150", "--num-hiddens", "16", "--ffn-num-hiddens", "16"]


def start(tmp_path, checkpoints, n=2):
    package = tmp_path / "packages" / "d2l"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").touch()
    (package / "torch.py").write_text(PACKAGE)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(package.parent), *sys.path]),
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "OMP_NUM_THREADS": "1",
    }
    runner = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n)]
    command = [*runner, str(SCRIPT), *OPTIONS, "--checkpoints", str(checkpoints)]
    return subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def children(pid):
    if sys.platform == "linux":
        return sorted(child for child, parent in processes() if parent == pid)
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True)
    return [int(child) for child, parent in map(str.split, listed.stdout.splitlines()) if int(parent) == pid]


def processes():
    """Each process and its parent, as Linux lists them; without those that end meanwhile."""
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            yield int(file.parent.name), int(file.read_text().rpartition(")")[2].split()[1])


def losses(text):
    return dict(re.findall(r"^epoch (\d+) loss ([\d.]+)$", text, re.MULTILINE))


def finish(process):
    try:
        out, problems = process.communicate(timeout=needs.HANGS)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its processes
        raise
    assert process.returncode == 0, problems
    return out


def test_a_killed_run_goes_on(tmp_path):
    needs.d2l(VERSION)
    killed, straight = start(tmp_path, tmp_path / "killed"), start(tmp_path, tmp_path / "straight")
    seen = ""
    for line in killed.stdout:
        seen += line
        if line.startswith("epoch 2"):
            os.kill(children(killed.pid)[-1], signal.SIGKILL)  # then torchrun ends the others
            break
    killed.communicate(timeout=needs.HANGS)
    assert killed.returncode != 0
    resumed = finish(start(tmp_path, tmp_path / "killed"))
    whole = finish(straight)
    assert "2 processes, 150 pairs, 0 of 4 epochs done already" in whole and "mean bleu" in whole
    done = int(re.search(r"(\d) of 4 epochs done already", resumed)[1])
    assert done >= 2
    known = losses(whole)
    assert list(known) == ["1", "2", "3", "4"] and float(known["4"]) < float(known["1"])
    assert losses(seen) == {epoch: known[epoch] for epoch in ("1", "2")}
    assert losses(resumed) == {epoch: loss for epoch, loss in known.items() if int(epoch) > done}
    assert whole.count("mha_c replaces") == 1  # rank 0 alone speaks
    kept = {path.name for path in (tmp_path / "killed").iterdir()}
    assert kept == {"latest", "epoch-4"}
