"""What the extension module exports, imports and must not hold: python tools/check_symbols.py FILE.so

Exported: PyInit__core (of abi3t PyModExport__core) and nothing else.  Imported: nothing that prints, ends the process,
or brings a BLAS or an OpenMP runtime.  No instruction that changes the floating-point mode of the caller.  Exit status
1 on a breach.
"""

import re
import subprocess
import sys

EXPORTED = [{"PyInit__core"}, {"PyModExport__core"}]
BANNED = re.compile(r"^_?(\w*printf|puts|putchar|exit|_exit|abort|cblas_\w+|[sd]gemm_|omp_\w+|GOMP_\w+|__kmpc_\w+)$")
MODE_CHANGES = re.compile(r"\s(v?ldmxcsr|fldcw|fldenv|msr\s+fpcr)\b")


def run(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def breaches(library):
    exported = {line.split()[-1].partition("@")[0] for line in run("nm", "-D", "--defined-only", library).splitlines()}
    if exported not in EXPORTED:
        yield f"exports {sorted(exported)}, should export PyInit__core alone"
    for line in run("nm", "-D", "--undefined-only", library).splitlines():
        name = line.split()[-1].partition("@")[0]
        if BANNED.match(name):
            yield f"uses {name}"
    changes = {line.strip() for line in run("objdump", "-d", library).splitlines() if MODE_CHANGES.search(line)}
    yield from (f"changes the floating-point mode: {line}" for line in sorted(changes))


def main(library):
    found = list(breaches(library))
    print("\n".join(found) or f"{library}: symbols are in order")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
