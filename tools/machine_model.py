"""How fast the inner loops should run on processors that are not at hand, by llvm-mca's models of them.

    python tools/machine_model.py              # apt-get install llvm-19 (16 or later), gcc-aarch64-linux-gnu

Compiles csrc/kernels for each instruction set and prints, for the inner loops of the register tile of the product, of
exp, tanh and dropout: cycles a step; of them, what its multiply-adds alone would take (a product has nothing else to
wait for: 90 % is the goal); and how often a step touches the stack.
A model knows ports and latencies, not caches: all loads hit.  Its word is no measurement, and some words are odd: LLVM
19 gives Intel's servers one unit for 512-bit multiply-adds, LLVM 16 two, which is right; both give a broadcast from
memory to 512 bits three steps on znver4, two of them where multiply-adds go (as a plain load: 48 cycles, not 60).
"""

import argparse
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

KERNELS = Path(__file__).resolve().parents[1] / "csrc" / "kernels"
FLAGS = "-std=c11 -O3 -ffp-contract=off -fno-math-errno -fno-trapping-math -fvisibility=hidden -S -o -".split()
BRANCH = re.compile(r"\s+(?:j[a-z]+|b\.?[a-z]+|cbn?z|tbn?z)\s+(?:\S+,\s*)*(\.L\w+)")
MULTIPLY_ADD = re.compile(r"\s(?:vf(?:n)?m(?:add|sub)\d+p[sd]|fml[as])\s")


@dataclass(frozen=True)
class Isa:
    name: str
    triple: str
    compilers: tuple
    tile: str
    lanes: int
    stack: str
    steps: int  # that the loops of tiles as wide as a panel take at a time
    cpus: tuple  # names for llvm-mca


X86, ARM = ("x86_64-linux-gnu", ("cc",)), ("aarch64-linux-gnu", ("aarch64-linux-gnu-gcc",))
ISAS = [
    Isa("avx512", *X86, "6x4", 16, "%rsp", 2, ("icelake-server", "sapphirerapids", "znver4")),
    Isa("avx2", *X86, "6x2", 8, "%rsp", 1, ("icelake-server", "sapphirerapids", "znver3", "znver4")),
    Isa("neon", *ARM, "4x4", 4, "sp", 1, ("neoverse-n1", "neoverse-v1", "apple-m1")),
]


def newest_mca():
    for version in range(30, 15, -1):
        for name in f"llvm-mca-{version}", f"/usr/lib/llvm-{version}/bin/llvm-mca":
            if shutil.which(name):
                return name
    sys.exit("llvm-mca 16 or later is missing: apt-get install llvm-19")


def assembly(isa, number):
    """Of the unit of one type, f32 or f64; None without a compiler."""
    compiler = next((shutil.which(name) for name in isa.compilers if shutil.which(name)), None)
    if compiler is None:
        return None
    command = [compiler, *FLAGS, f"-I{KERNELS.parent}", KERNELS / f"{isa.name}_{number}.c"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def functions(text):
    """{name: its lines}"""
    found, current = {}, []
    for line in text.splitlines():
        name = re.match(r"([a-z]\w+?)(?:\.\w+)*:", line)
        if name:
            current = found.setdefault(name.group(1), [])
        current.append(line)
    return found


def innermost_loops(lines):
    """The instructions between a label and the branch back to it, where no other such branch is among them."""
    labels = {line[:-1]: i for i, line in enumerate(lines) if re.match(r"\.L\w+:$", line)}
    ends = [(i, BRANCH.match(line)) for i, line in enumerate(lines)]
    loops = [(labels[m.group(1)], i) for i, m in ends if m and labels.get(m.group(1), len(lines)) < i]
    inner = [(a, b) for a, b in loops if not any(a <= c and d < b for c, d in loops)]
    return [[line for line in lines[a:b] if re.match(r"\s+[a-z]", line)] for a, b in inner]


def n_multiply_adds(loop):
    return sum(bool(MULTIPLY_ADD.search(line)) for line in loop)


def work_of(loop, tile_of):
    """What tells the loop that does a kernel's work: its multiply-adds; of a tile, that there is little else."""
    if tile_of is None:
        return n_multiply_adds(loop), len(loop)
    rows, vectors = map(int, tile_of.tile.split("x"))
    return n_multiply_adds(loop) == tile_of.steps * rows * vectors, -len(loop)


def loop_of(isa, code, kernel):
    names = {"product": [f"tile_{isa.tile}"], "dropout": ["decide", "decide_within", "dropout_factors"]}
    for name in names.get(kernel, [f"{kernel}_many"]):
        loops = innermost_loops(code.get(name, []))
        if loops:
            return max(loops, key=lambda loop: work_of(loop, isa if kernel == "product" else None))
    raise LookupError(f"{kernel}, {isa.name}: no loop in the assembly")


def touches_of(isa, loop):
    """How many instructions of a loop read or write the stack: registers that did not suffice."""
    return sum(bool(re.search(rf"[(\[]{isa.stack}[,)\]]", line)) for line in loop)


def spilling_tiles(isa, code):
    """Shapes of tiles whose inner loop touches the stack."""
    found = []
    for name, lines in sorted(code.items()):
        shape = re.fullmatch(r"tile_(\d+)x(\d)", name)
        if shape:
            n_sums = int(shape.group(1)) * int(shape.group(2))
            steps = isa.steps if 1 < int(shape.group(2)) <= int(isa.tile.split("x")[1]) else 1
            loops = [loop for loop in innermost_loops(lines) if n_multiply_adds(loop) == steps * n_sums]
            # Longer ones store a part's sums: as many multiply-adds, but no step.
            shortest = min(map(len, loops), default=0)
            if n_sums > 4 and any(touches_of(isa, loop) for loop in loops if len(loop) <= shortest + 2):
                found.append("x".join(shape.groups()))
    return found


def cycles_per_step(mca, isa, cpu, loop):
    command = [mca, f"-mtriple={isa.triple}", f"-mcpu={cpu}", "-iterations=500"]
    done = subprocess.run(command, input="\n".join(loop) + "\n", check=True, capture_output=True, text=True)
    return int(re.search(r"Total Cycles:\s+(\d+)", done.stdout).group(1)) / 500


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--show", action="store_true", help="print the loops themselves, too")
    show = parser.parse_args().show
    mca = newest_mca()
    heads = f"{'cycles a step':>14}{'multiply-adds':>15}{'they alone':>18}{'on the stack':>14}"
    print(f"{'':8}{'loop':9}{'processor':16}{heads}")
    for isa in ISAS:
        text = assembly(isa, "f32")
        if text is None:
            print(f"{isa.name:8}no compiler: {' or '.join(isa.compilers)}")
            continue
        code = functions(text)
        for kernel in "product", "exp", "tanh", "dropout":
            loop = loop_of(isa, code, kernel)
            sums = [line for line in loop if MULTIPLY_ADD.search(line)]
            n_stack = touches_of(isa, loop)
            for cpu in isa.cpus:
                cycles, least = cycles_per_step(mca, isa, cpu, loop), cycles_per_step(mca, isa, cpu, sums or loop)
                share = f"{least:.1f}, {100 * least / cycles:.0f} %" if kernel == "product" else ""
                print(f"{isa.name:8}{kernel:9}{cpu:16}{cycles:>14.1f}{len(sums):>15}{share:>18}{n_stack:>14}")
            if show:
                print("\n".join(loop))
        codes = {"f32": code, "f64": functions(assembly(isa, "f64"))}
        spilling = [f"{shape} {number}" for number in codes for shape in spilling_tiles(isa, codes[number])]
        print(f"{isa.name:8}tiles whose inner loop touches the stack: {', '.join(spilling) or 'none'}")


if __name__ == "__main__":
    main()
