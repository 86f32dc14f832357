"""examples/distributed.py on two processes: killed in the middle and started again, it comes to the same losses.

Started by hand: what torchrun starts again may wait for ever where gloo connects (seen with torch 2.13).
"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import distributed_script
import needs

VERSION = "1.0.3"
SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "distributed.py"
# d2l under its own name; what the processes may not have any more when they part; and how one of them is killed, in the
# third epoch, whose steps the other has taken with it.
PACKAGE = f"""
import gc
import os
import signal
import sys

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import real_d2l


def destroy_process_group(destroy=dist.destroy_process_group):
    assert not any(type(found) is DistributedDataParallel for found in gc.get_objects()), "it outlives its group"
    destroy()


def all_reduce(tensor, reduce=dist.all_reduce, epochs=[]):
    epochs.append(tensor)
    reduce(tensor)
    if len(epochs) == 3 and dist.get_rank() == 1 and os.environ["KILLED"] == "yes":
        os.kill(os.getpid(), signal.SIGKILL)


dist.destroy_process_group, dist.all_reduce = destroy_process_group, all_reduce
sys.modules["matplotlib"] = None  # nothing is drawn
sys.modules[__name__] = real_d2l.load({VERSION!r})
"""
OPTIONS = ["--epochs", "4", "--pairs", "150", "--num-hiddens", "16", "--ffn-num-hiddens", "16"]


def environment(tmp_path, killed):
    """Where d2l is the test's own package, one rank of which may be killed."""
    package = tmp_path / "packages" / "d2l"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").touch()
    (package / "torch.py").write_text(PACKAGE)
    return {"PYTHONPATH": os.pathsep.join([str(package.parent), *sys.path]), "KILLED": killed}


def by_forks(tmp_path, checkpoints, killed="no"):
    """Two processes; gives the function that waits for their end and has what they printed."""
    words = [SCRIPT, *OPTIONS, "--checkpoints", checkpoints]
    begun = distributed_script.begin(words, tmp_path / f"{checkpoints.name}-{killed}", **environment(tmp_path, killed))

    def finish():
        statuses, printed = begun()
        assert statuses == ([1, -signal.SIGKILL] if killed == "yes" else [0, 0]), printed
        return printed

    return finish


def by_torchrun(tmp_path, checkpoints, killed="no"):
    """The same under torchrun itself."""
    runner = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    variables = {**environment(tmp_path, killed), "GLOO_SOCKET_IFNAME": loopback, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*runner, str(SCRIPT), *OPTIONS, "--checkpoints", str(checkpoints)], cwd=tmp_path,
        env={**os.environ, **variables}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip

    def finish():
        try:
            out, problems = process.communicate(timeout=needs.HANGS)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun ends its processes
            raise
        assert process.returncode == (killed == "yes"), problems
        return out

    return finish


def losses(text):
    return dict(re.findall(r"^epoch (\d+) loss ([\d.]+)$", text, re.MULTILINE))


@pytest.mark.parametrize("start", [by_forks, *([by_torchrun] if needs.NIGHTLY else [])])
def test_a_killed_run_goes_on(start, tmp_path):
    """What was printed before, and after the start from the last checkpoint, is what a whole run prints."""
    needs.d2l(VERSION)
    begun = [start(tmp_path, tmp_path / "killed", killed="yes"), start(tmp_path, tmp_path / "straight")]
    first, whole = (finish() for finish in begun)
    resumed = start(tmp_path, tmp_path / "killed")()
    assert "2 processes, 150 pairs, 2 of 4 epochs done already" in resumed
    assert "2 processes, 150 pairs, 0 of 4 epochs done already" in whole and "mean bleu" in whole
    known = losses(whole)
    assert list(known) == ["1", "2", "3", "4"] and float(known["4"]) < float(known["1"])
    assert losses(first) == {epoch: known[epoch] for epoch in ("1", "2")}
    assert losses(resumed) == {epoch: known[epoch] for epoch in ("3", "4")}
    assert whole.count("mha_c replaces") == 1  # rank 0 alone speaks
    kept = {path.name for path in (tmp_path / "killed").iterdir()}
    assert kept == {"latest", "epoch-4"}
