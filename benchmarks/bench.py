"""Our layers beside the real d2l classes and torch, in one process, turn by turn.

    python benchmarks/bench.py [--filter M1 S] [--seconds 1.5] [--threads 1] [--json FILE]

For each case every contender computes the same from the same numbers (checked before the clock starts).
They take turns in short bursts, so that whatever else the machine does hits all of them; every single call
is timed.  `ratio` is theirs / ours, of the minima and of the medians; the faster d2l generation counts.
README.md beside this file says how to read the table.
"""

import argparse
import gc
import json
import math
import statistics
import sys
from pathlib import Path
from time import perf_counter_ns

import numpy as np

from cases import CASES, D2L, GEOMETRIC_MEAN_TARGET
from machine import Peak, describe

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
LONGEST_PROBE = 0.01  # seconds that the peak is measured before and after a turn
ROUNDS = 15  # turns of each contender, at least; fewer only where a single call is very long


class Libraries:
    """Ours and theirs, all with the same number of threads; 0: each as a reader has them, who sets nothing."""

    def __init__(self, threads):
        import torch

        import mha_c
        import mha_c.functional
        import real_d2l

        if threads:
            torch.set_num_threads(threads)
            mha_c.set_num_threads(threads)
        self.torch, self.mha_c = torch, mha_c
        self.d2l = {name: real_d2l.load(name.split()[1]) for name in D2L}


def check_agreement(results):
    """All contenders computed the same thing; a wrong result has no speed."""
    ours = np.asarray(results["mha_c"])
    for name, result in results.items():
        # Far above rounding (1e-6 here), far below any mistake in mask, scale or weights.
        np.testing.assert_allclose(ours, np.asarray(result), atol=1e-4, rtol=1e-3, err_msg=name)


def time_burst(call, n_calls):
    """Nanoseconds of each of n calls; one more before them brings code and data back into the caches."""
    if n_calls > 1:
        call()
    times = []
    for _ in range(n_calls):
        start = perf_counter_ns()
        call()
        times.append(perf_counter_ns() - start)
    return times


def no_peak(seconds):
    """In the place of a Peak, where a share of it would say nothing."""


def measure(contenders, seconds, peak=no_peak):
    """{name: times in ns}, the contenders taking turns until the time is used; and, for each turn of ours, how long a
    call took and the machine's peak beside it."""
    estimate = {name: min(time_burst(call, 3)) for name, call in contenders.items()}
    turn = seconds * 1e9 / ROUNDS / len(contenders)
    n_calls = {name: max(1, min(200, int(turn / estimate[name]))) for name in contenders}
    times, beside = {name: [] for name in contenders}, []
    start, rounds = perf_counter_ns(), 0
    gc.collect()
    gc.disable()
    try:
        while rounds < 4 or perf_counter_ns() - start < seconds * 1e9:
            for name, call in contenders.items():
                probe = peak if name == "mha_c" else no_peak
                span = min(n_calls[name] * estimate[name] / 1e9, LONGEST_PROBE)
                before = probe(span)
                burst = time_burst(call, n_calls[name])
                after = probe(span)
                times[name] += burst
                if before and after:
                    beside.append((statistics.median(burst), (before + after) / 2))
            rounds += 1
    finally:
        gc.enable()
    return times, beside


def share_of_peak(flops, beside):
    """What part of the peak at that moment our calls reached, in the median of the turns; None if it was not measured.

    The machine may be shared: a call's best time and the probe's best are of different moments.
    """
    return statistics.median(flops / time / rate for time, rate in beside) if beside else None


def run_case(case, libs, seconds, peak):
    contenders = case.contenders(libs)
    with libs.torch.no_grad():
        check_agreement({name: call() for name, call in contenders.items()})
        times, beside = measure(contenders, seconds, peak)
    summary = {
        name: {"min_us": min(t) / 1e3, "median_us": statistics.median(t) / 1e3, "calls": len(t)}
        for name, t in times.items()
    }
    ours = summary["mha_c"]
    rivals = [summary[name] for name in case.reference]
    gflops = case.flops() / ours["min_us"] / 1e3
    return {
        "case": case.name,
        "where": case.where,
        "shape": case.shape,
        "times": summary,
        "ratio_min": min(rival["min_us"] for rival in rivals) / ours["min_us"],
        "ratio_median": min(rival["median_us"] for rival in rivals) / ours["median_us"],
        "target": case.target,
        "gflops": gflops,
        "share_of_peak": share_of_peak(case.flops(), beside),
    }


def show_row(result):
    times, share = result["times"], result["share_of_peak"]
    theirs = [name for name in times if name != "mha_c" and name != "nn.MultiheadAttention"]
    fastest = min(theirs, key=lambda name: times[name]["min_us"])
    layer = times.get("nn.MultiheadAttention")
    target, ratio = result["target"], result["ratio_min"]
    print(
        f"{result['case']:<12}{result['shape']:<22}{times['mha_c']['min_us']:>10.1f}"
        f"{times[fastest]['min_us']:>11.1f}{layer['min_us'] if layer else math.nan:>11.1f}"
        f"{ratio:>8.2f}{result['ratio_median']:>8.2f}"
        f"{target or math.nan:>8.2f} {'MISS' if target and ratio < target else '    '}"
        f"{result['gflops']:>8.1f}{100 * share if share else math.nan:>6.0f}%".replace("nan", "  -"),
        flush=True,
    )


def show_mean(results, threads):
    ratios = [result["ratio_min"] for result in results if result["case"][0] in "MA"]
    if ratios:
        mean = statistics.geometric_mean(ratios)
        miss = "  MISS" if threads == 1 and mean < GEOMETRIC_MEAN_TARGET else ""
        print(f"\ngeometric mean of {len(ratios)} M and A ratios: {mean:.2f} (target {GEOMETRIC_MEAN_TARGET}){miss}")


def options_of(description):
    """What every comparison can be asked."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--filter", nargs="*", default=[], help="cases whose names start with one of these")
    parser.add_argument("--seconds", type=float, default=1.5, help="time for each case; more on a busy machine")
    parser.add_argument("--quick", action="store_const", dest="seconds", const=0.3, help="the same as --seconds 0.3")
    parser.add_argument("--threads", type=int, default=1, help="0: those that a reader has, who sets nothing")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    return parser


def main():
    arguments = options_of(__doc__.split("\n")[0]).parse_args()
    names = tuple(arguments.filter)
    # "M1" means M1 alone, not M10 to M14; "M" or "S2048" mean all that start so.
    exact = {case.name for case in CASES}.intersection(names)
    cases = [c for c in CASES if not names or c.name in exact or c.name.startswith(tuple(set(names) - exact) or "?")]

    libs = Libraries(arguments.threads)
    machine = describe(libs.torch, libs.mha_c, arguments.threads)
    peak = Peak(machine["isa"]) if arguments.threads == 1 else no_peak
    for key, value in machine.items():
        print(f"{key:<11} {value}")
    print("\nmicroseconds, minima; ratio = fastest of d2l or torch SDPA / ours; % of the FMA peak of this moment\n")
    print(
        f"{'case':<12}{'B,Q,K,h,H | B,H,N,D':<22}{'ours':>10}{'theirs':>11}{'nn.MHA':>11}"
        f"{'ratio':>8}{'median':>8}{'target':>8}     {'GFLOP/s':>8}{'peak':>7}"
    )
    results = []
    for case in cases:
        results.append(run_case(case, libs, arguments.seconds, peak))
        show_row(results[-1])
    show_mean(results, arguments.threads)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps({"machine": machine, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
