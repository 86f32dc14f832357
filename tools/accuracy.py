"""How exact attention is, beside torch: prints a table for every instruction set of this CPU, writes docs/accuracy.md.

    python tools/accuracy.py              two minutes
    python tools/accuracy.py --full       more lengths, and every head size: some minutes
    python tools/accuracy.py --dry        print only

tests/support/accuracy.py says what is measured; tests/exactness/test_accuracy.py holds the limits.
"""

import argparse
import os
import platform
import sys
import time
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # nothing here is large enough for more

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "benchmarks")]

import numpy as np  # noqa: E402
import torch  # noqa: E402

import accuracy  # noqa: E402
import machine  # noqa: E402
import mha_c  # noqa: E402
from mha_c import _core  # noqa: E402

TARGET = ROOT / "docs" / "accuracy.md"
LENGTHS = [2, 9, 129, 1024, 8192, 65536]
FULL_LENGTHS = [1, 2, 7, 8, 9, 63, 64, 65, 129, 1000, 1024, 8192, 65536]
FULL_DIMS = [1, 8, 59, 64, 80, 111, 128, 256]
DRAWS, VALUE_DIM = 12, 16
ISAS = [name for name, offered in _core.isas() if offered]
# A few contested rows decide about their E, whichever side it is on (tests/exactness/test_accuracy.py).
CONTESTED = ("scores of std 1e3", "scores of std 1e4", "cancelling products", "Cauchy tails")


def queries_for(n_keys):
    """So many rows that the largest error is not mere luck, and a cell takes a second."""
    return max(4, min(64, 2**15 // n_keys))


def measure(family, dtype, n_keys, dim):
    """{isa: Ratios} of one cell."""
    sizes = accuracy.Sizes(DRAWS, queries_for(n_keys), n_keys, dim, VALUE_DIM)
    p = accuracy.problem(family, sizes, dtype, seed=n_keys + 65537 * dim)
    known = accuracy.exact(p)
    theirs = accuracy.error(accuracy.torch_math(p), known)
    cells = {}
    for isa in ISAS:
        _core.set_isa(isa)
        found = _core.attention_forward(p.q, p.k, p.v, None, p.valid_lens)[0]
        cells[isa] = accuracy.ratios(accuracy.error(found, known), theirs)
    return cells


def measure_all(lengths, dims):
    """{(dtype, family, keys, dim): {isa: Ratios}}, printed as it grows; "typical" is R of the root mean square of all
    kappas, not of the largest error."""
    cells = {}
    titles = "   ".join(f"{isa + ': R':>10} {'typical':>8} {'kappa':>5}" for isa in ISAS)
    print(f"{'':7} {'':22} {'keys':>5} {'dim':>3}   {titles}   torch's kappa")
    for dtype in ("float32", "float64"):
        for family in accuracy.FAMILIES:
            for dim in dims if family == "normal" else [64]:
                for n_keys in lengths:
                    cell = cells[dtype, family, n_keys, dim] = measure(family, dtype, n_keys, dim)
                    columns = [f"{r.rms:10.2f} {r.typical:8.2f} {r.kappa:5.1f}" for r in cell.values()]
                    last = next(iter(cell.values())).torch_kappa
                    print(f"{dtype} {family:22} {n_keys:5} {dim:3}   {'   '.join(columns)}   {last:6.1f}", flush=True)
    return cells


# --- The page -----------------------------------------------------------------------------------------

HEAD = """# How exact the results are

The results of `mha_c` are as exact as torch's own: both differ from the book's formulas only by rounding. The tables
say by how much, for ordinary numbers and for numbers chosen to be difficult.

Our errors are compared with those of torch's plain attention (matmul, softmax, matmul in the same type, no fused
kernel) on the same inputs, and with what rounding allows. `python tools/accuracy.py` writes this page; `make test`
checks the limits in `tests/exactness/test_accuracy.py`.

- **R** is our largest error over torch's, as root mean square over {draws} draws. Below 1, ours is more exact.
- **kappa** is an error divided by what the rounding of its sums can cause:
  `u (sum p|v| + sum p|v - o| scale sum|q k|)` with u = 2^-24 or 2^-53. It measures ordinary, huge and cancelling
  numbers alike; a sum of n terms, added one after another, may reach n.
- The exact result is computed in long double for float64, and in float64 for float32.

{machine}

"""

IN_SHORT = """## In short

`make test` checks that R is at most 2 (sqrt(2) times that for scalar kernels) in all families except those marked *
below: in these, R depends on luck, and is anything from 0.02 to 42. Kappa is at most 16 (sqrt(2) times that for scalar
kernels) in all families. The first two columns leave out the families marked *.

"""

CLOSING = """
## What is behind the figures

- The products of a score are summed in parts of 32, the weighted values in parts of 64, and these in depth blocks of
  128 and key blocks. When blocks are joined, a second number keeps what the sums of weights and the outputs lose to
  rounding. This is why R is below 1, and why kappa does not grow with the number of keys.
- For a few keys torch's matrix product uses kernels that split sums of 64 more finely than into parts of 32: there R is
  above 1, by an amount that only such a comparison shows (kappa is at most {small_kappa:.1f}).
- If a large key comes last, one long sum is rounded at its size only once; ours is rounded so at the end of each part,
  depth block and key block: in float64, R is up to 2 there. If such a key comes first or in the middle, one long sum is
  rounded at its size with every term that follows: there R is 0.01 for 65 536 keys.
- In the families marked *, one row in hundreds has two keys with nearly equal scores, and the rounding of these two
  scores decides the largest error. Either side may be lucky by a factor of forty; kappa takes account of such rows.
- Weights below e^-86 = 4e-38 of their row's largest (float64: e^-707 = 9e-308) are 0, as in torch's fused kernels. Just
  below this limit numbers become subnormal, and each of them stops the vector units of Intel's processors for some
  hundred cycles; beside a weight of 1, no result has room for their digits. So scores that differ by 87 or more take no
  longer than others, and calls with ordinary numbers meet no subnormal number (`tests/c/flags.h`). A weight just above
  the limit, times a value or gradient far below 1, may be subnormal, and is kept: with scores of standard deviation 30
  and 128 keys, an Intel Xeon with AVX-512 takes at most 1.2 times as long for numbers of size 1; with values and
  gradients of size 0.001, 1.5 times forward and 4 times backward (`make scaling`; forced to AVX2, 5 times).
- Weighted values are added before the sum is divided by that of the weights: if the sum exceeds the largest number of
  the type (3.4e38 in float32), the output is infinite, although the mean would not be.
- Scalar kernels, for CPUs without AVX2, round each product before adding it, which costs a factor of sqrt(2).
"""


def table(cells, dtype, isa, lengths, dim):
    lines = ["| | " + " | ".join(f"{n} keys" for n in lengths) + " |", "|---" * (len(lengths) + 1) + "|"]
    for family in accuracy.FAMILIES:
        columns = []
        for n_keys in lengths:
            r = cells[dtype, family, n_keys, dim][isa]
            columns.append(f"{r.rms:.2f}, {r.kappa:.1f} ({r.torch_kappa:.1f})")
        mark = " *" if family in CONTESTED else ""
        lines.append(f"| {family}{mark} | " + " | ".join(columns) + " |")
    return "\n".join(lines)


def worst(cells, dtype, isa, at_least):
    """Of the families that are not contested, for so many keys and more: largest R, largest kappa, with their cells."""
    chosen = {key: cell[isa] for key, cell in cells.items() if key[0] == dtype and key[2] >= at_least}
    tame = {key: r for key, r in chosen.items() if key[1] not in CONTESTED}
    r_key = max(tame, key=lambda key: tame[key].rms)
    kappa_key = max(chosen, key=lambda key: chosen[key].kappa)
    return (tame[r_key].rms, r_key), (chosen[kappa_key].kappa, kappa_key)


def summary(cells, lengths):
    lines = ["| | largest R | R from 129 keys on | largest kappa |", "|---|---|---|---|"]
    for dtype in ("float32", "float64"):
        for isa in reversed(ISAS):
            (r, r_key), (kappa, kappa_key) = worst(cells, dtype, isa, 0)
            (long_r, long_key), _ = worst(cells, dtype, isa, 129)
            lines.append(
                f"| {dtype}, {isa} | {r:.2f} ({r_key[1]}, {r_key[2]} keys) | {long_r:.2f} ({long_key[1]}, "
                f"{long_key[2]} keys) | {kappa:.1f} ({kappa_key[1]}, {kappa_key[2]} keys) |"
            )
    return "\n".join(lines)


def page(cells, lengths, dim):
    name, _ = machine.processor()
    mkl = "MKL" if "mkl" in torch.__config__.show().lower() else "its own BLAS"
    versions = f"torch {torch.__version__} with {mkl}, NumPy {np.__version__}"
    about = f"{name}, {platform.system()}; {versions}; {dim} features a head."
    text = HEAD.format(draws=DRAWS, machine=about)
    text += IN_SHORT + summary(cells, lengths) + "\n"
    for dtype in ("float32", "float64"):
        rows = table(cells, dtype, ISAS[-1], lengths, dim)
        text += f"\n## {dtype}, {ISAS[-1]}\n\nR, kappa (torch's kappa).\n\n{rows}\n"
    small = max(cell[ISAS[-1]].kappa for key, cell in cells.items() if key[2] < 100)
    return text + CLOSING.format(small_kappa=small)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--full", action="store_true", help="more lengths, every head size")
    parser.add_argument("--dry", action="store_true", help="print, but leave docs/accuracy.md as it is")
    options = parser.parse_args()
    torch.set_num_threads(1)
    mha_c.set_num_threads(1)
    start, before = time.perf_counter(), _core.isa()
    lengths, dims = (FULL_LENGTHS, FULL_DIMS) if options.full else (LENGTHS, [64])
    try:
        cells = measure_all(lengths, dims)
    finally:
        _core.set_isa(before)
    print(summary(cells, lengths))
    print(f"{time.perf_counter() - start:.0f} s")
    if not options.dry:
        TARGET.write_text(page(cells, LENGTHS, 64), encoding="utf-8")
        print(f"written: {TARGET.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
