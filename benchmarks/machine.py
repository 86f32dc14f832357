"""What the figures were taken on: processor, versions, and the multiply-add peak of one core."""

import ctypes
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent


def processor():
    """The processor's name, as the system gives it, and the vector extensions that matter here."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    fields = dict(line.split(":", 1) for line in reversed(lines) if ":" in line)
    fields = {key.strip(): value.strip() for key, value in fields.items()}
    flags = fields.get("flags", fields.get("Features", "")).split()
    name = fields.get("model name", platform.processor() or platform.machine())
    family = fields.get("cpu family")
    if family:
        name += f" (family {family}, model {fields.get('model')})"
    wanted = ("avx2", "fma", "avx512f", "asimd", "sve")
    return name, [flag for flag in wanted if flag in flags]


def describe(torch, mha_c, threads):
    """The head of every report, as a dict of strings and numbers."""
    import numpy as np

    name, extensions = processor()
    config = mha_c.show_config()
    blas = torch.__config__.show().partition("BLAS_INFO=")[2].partition(",")[0] or "BLAS unknown"
    return {
        "processor": name,
        "extensions": extensions,
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": [round(load, 2) for load in os.getloadavg()],
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": f"{torch.__version__} ({blas}, {torch.backends.cpu.get_cpu_capability()})",
        "mha_c": mha_c.__version__,
        "isa": config["isa"],
        "threads": threads,
        "command": " ".join(["python", *sys.argv]),
    }


class Peak:
    """`peak(seconds)`: the multiply-add rate of one core in GFLOP/s over so long; None without a C compiler."""

    def __init__(self, isa):
        compiler = shutil.which(os.environ.get("CC", "cc"))
        self.probe = None
        if compiler is None:
            return
        with tempfile.TemporaryDirectory() as folder:
            source, library = Path(folder, "peak.c"), Path(folder, "peak.so")
            call = f"double probe(double seconds) {{ return peak_{isa}_for(seconds); }}"
            source.write_text(f'#include "peak.h"\n{call}\n')
            command = [compiler, "-O3", "-std=gnu11", "-w", "-fPIC", "-shared", f"-I{HERE}", source, "-o", library]
            subprocess.run(command, check=True)
            self.probe = ctypes.CDLL(str(library)).probe
        self.probe.restype, self.probe.argtypes = ctypes.c_double, [ctypes.c_double]

    def __call__(self, seconds):
        return self.probe(seconds) if self.probe else None
