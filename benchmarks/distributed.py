"""Ring attention on one machine: work per CPU second, bytes sent and memory of a rank, against one process.

    python benchmarks/distributed.py             # (1, 8, 16384, 64) on 1, 2 and 4 processes; make bench-distributed
    python benchmarks/distributed.py --tokens 131072 --processes 4 --once    # memory of a long sequence, minutes
    python benchmarks/distributed.py --model docs/scale-out.svg              # the time of a step, drawn to 64 ranks

Every process has one thread.  Processes share the machine's cores, so time is counted in CPU seconds of all of them.
Efficiency is one process's over that; "apart" is what as many processes take side by side that share out the heads
and do not talk, for neighbors in a cache cost each other time too, and "net" is that over the ring's.  Bytes are those
that the loopback interface has counted; memory is how far the resident memory of a rank rises above what it was before
its first input.
"""

import argparse
import datetime
import json
import multiprocessing
import os
import resource
import tempfile
from pathlib import Path

HEADS, DIM = 8, 64


def cpu_seconds():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def loopback_bytes():
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith("lo:"):
            return int(line.split(":")[1].split()[8])
    return 0


def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024  # MiB


def reset_peak():
    Path("/proc/self/clear_refs").write_text("5")


def work(rank, n, store, options, pipe):
    """What a rank measures, as a dict for each repetition."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist

    from mha_c.torch.distributed import ring_attention, split_sequence
    from mha_c.torch.functional import dot_product_attention

    torch.set_num_threads(1)
    timeout = datetime.timedelta(hours=1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=n, timeout=timeout)
    layout = "zigzag" if options.causal else "contiguous"

    def attention(q, k, v):
        if n == 1 and not options.ring:
            return dot_product_attention(q, k, v, causal=options.causal)
        return ring_attention(q, k, v, causal=options.causal, layout=layout)

    small = [torch.randn(1, HEADS, 64, DIM, requires_grad=True) for _ in range(3)]
    out = attention(*small)
    out.backward(torch.ones_like(out))  # everything is loaded
    del out

    def timed(attention, heads, rows):
        """CPU seconds forward and backward, and what the loopback interface sent in each."""
        inputs = [torch.randn(1, heads, rows, DIM, requires_grad=True) for _ in range(3)]
        grad = torch.randn(1, heads, rows, DIM)
        seconds, sent = [], []
        for step in (lambda: outputs.append(attention(*inputs)), lambda: outputs.pop().backward(grad)):
            dist.barrier()
            before, start = loopback_bytes(), cpu_seconds()
            step()
            seconds.append(cpu_seconds() - start)
            dist.barrier()
            sent.append(loopback_bytes() - before)
        return seconds, sent

    outputs = []
    rows = split_sequence(torch.empty(options.tokens), rank, n, layout=layout, dim=0).numel()
    found = []
    for _ in range(options.repeat):
        reset_peak()
        before = status("VmRSS")
        torch.manual_seed(rank)
        (forward, backward), sent = timed(attention, HEADS, rows)
        memory, apart = status("VmHWM") - before, [forward, backward]
        if n > 1 and options.apart:
            apart, _ = timed(lambda *x: dot_product_attention(*x, causal=options.causal), HEADS // n, options.tokens)
        found.append({"forward": forward, "backward": backward, "apart forward": apart[0], "apart backward": apart[1],
                      "sent forward": sent[0], "sent backward": sent[1], "memory": memory})  # fmt: skip
    pipe.send(found)
    dist.barrier()


def run(n, options):
    """The ranks' measurements: [rank][repetition]."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(n)]
        store = f"file://{folder}/store"
        ranks = [context.Process(target=work, args=(rank, n, store, options, pipes[rank][1])) for rank in range(n)]
        for process in ranks:
            process.start()
        found = [theirs.recv() for theirs, _ in pipes]
        for process in ranks:
            process.join()
    return found


def best(measured, part):
    """CPU seconds of all ranks in the repetition that took the fewest."""
    return min(sum(rank[i][part] for rank in measured) for i in range(len(measured[0])))


def formula(n, options):
    """Bytes sent by all ranks in a call forward."""
    from mha_c.torch.distributed import ring_traffic

    layout = "zigzag" if options.causal else "contiguous"
    keys = sum(ring_traffic(n, options.tokens, causal=options.causal, layout=layout))
    return keys * HEADS * 2 * DIM * 4


def report(options):
    from machine import processor

    print(f"{processor()[0]}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")
    causal = ", causal, zigzag" if options.causal else ""
    print(f"ring attention on (1, {HEADS}, {options.tokens}, {DIM}), float32{causal}; CPU seconds and MB of all ranks")
    head = ("ranks", *("forward", "eff.", "apart", "net", "back", "eff.", "apart", "net"),
            *("MB sent", "formula", "MB back", "formula", "MiB a rank"))  # fmt: skip
    print("{:>5}{:>9}{:>6}{:>7}{:>6}{:>9}{:>6}{:>7}{:>6}{:>9}{:>9}{:>9}{:>9}{:>12}".format(*head))
    first, table = None, []
    for n in options.processes:
        measured = run(n, options)
        forward, backward = best(measured, "forward"), best(measured, "backward")
        apart = best(measured, "apart forward"), best(measured, "apart backward")
        first = first or (forward, backward)
        memory = max(rank[0]["memory"] for rank in measured)
        sent = [measured[0][0][f"sent {way}"] / 1e6 for way in ("forward", "backward")]
        expected = formula(n, options) / 1e6
        table.append({"ranks": n, "forward": forward, "backward": backward, "memory": memory, "sent": sent,
                      "apart": apart, "formula": [expected, 2 * expected]})  # fmt: skip
        print(
            f"{n:>5}{forward:>9.2f}{first[0] / forward:>6.0%}{apart[0]:>7.2f}{apart[0] / forward:>6.0%}"
            f"{backward:>9.2f}{first[1] / backward:>6.0%}{apart[1]:>7.2f}{apart[1] / backward:>6.0%}"
            f"{sent[0]:>9.1f}{expected:>9.1f}{sent[1]:>9.1f}{2 * expected:>9.1f}{memory:>12.0f}",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps({"tokens": options.tokens, "rows": table}, indent=1))
    return table


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--once", dest="repeat", action="store_const", const=1)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--ring", action="store_true", help="one process goes by ring_attention too")
    parser.add_argument("--no-apart", dest="apart", action="store_false", help="not the processes that do not talk")
    parser.add_argument("--json", type=Path)
    report(parser.parse_args())


if __name__ == "__main__":
    main()
