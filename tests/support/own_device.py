"""torch's device "own", whose memory is that of own_device.cpp: what a GPU's users meet, on machines without a GPU.

`load()` builds it with g++ and torch's headers (half a minute; kept in build/) and gives it its name, once a process.
"""

import fcntl
import hashlib
import subprocess
import types
from pathlib import Path

import torch

import needs

SOURCE = Path(__file__).with_suffix(".cpp")
BUILD = SOURCE.parents[2] / "build"
loaded = False


def built():
    """The path of the extension for this torch and this source."""
    compiler = needs.program("g++", "c++", "clang++")
    header = Path(torch.__file__).parent / "include" / "ATen" / "detail" / "PrivateUse1HooksInterface.h"
    if not header.exists() or "isBuilt" not in header.read_text(encoding="utf-8"):
        needs.skip_without("PrivateUse1HooksInterface::isBuilt")
    root, text = Path(torch.__file__).parent, SOURCE.read_bytes() + torch.__version__.encode()
    library = BUILD / f"own_device-{hashlib.sha256(text).hexdigest()[:16]}.so"
    BUILD.mkdir(exist_ok=True)
    with open(BUILD / "own_device.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # processes of one run wait for the first
        if not library.exists():
            include = root / "include"
            subprocess.run(
                [compiler, "-std=c++20", "-O0", "-shared", "-fPIC",
                 f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
                 f"-I{include}", f"-I{include / 'torch' / 'csrc' / 'api' / 'include'}", str(SOURCE),
                 f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10", "-o", f"{library}.part"],
                check=True,
            )  # fmt: skip
            Path(f"{library}.part").rename(library)
    return library


def load():
    """The device; a call of the test's whole file is skipped where there is no compiler."""
    global loaded
    if not loaded:
        library = built()
        torch.utils.rename_privateuse1_backend("own")
        torch._register_device_module("own", module())
        torch.ops.load_library(str(library))
        try:
            torch.ones((), device="own", requires_grad=True).backward()
        except RuntimeError:  # autograd counted the devices at its first backward call, before this one was there
            torch.autograd.set_multithreading_enabled(False)  # the caller's thread serves them all
        loaded = True
    return torch.device("own", 0)


def devices():
    """The device; and a real one, where there is one."""
    return [load(), *(torch.device("cuda", i) for i in range(min(1, torch.cuda.device_count())))]


# Sums of some tens of terms around 1, thrice behind one another, in another order.
TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-11}


def close(found, wanted, dtype=torch.float32):
    """The same numbers, wherever they are."""
    for a, b in zip(found, wanted, strict=True):
        a, b = a.detach().cpu(), b.detach().cpu()
        torch.testing.assert_close(a, b, rtol=0, atol=TOLERANCES[dtype] * max(1.0, float(b.abs().max())))


def module():
    """What torch asks a device's module, `torch.own`: the generator is the CPU's."""
    found = types.ModuleType("torch.own")
    found.is_available, found.is_initialized, found._is_in_bad_fork = (lambda: True), (lambda: True), (lambda: False)
    found.device_count, found.current_device = (lambda: 1), (lambda: 0)
    found.device = lambda index: torch.autograd.set_grad_enabled(torch.is_grad_enabled())  # a context without effect
    found.manual_seed_all = found.manual_seed = lambda seed: None
    found.get_rng_state, found.set_rng_state = (lambda device=0: torch.get_rng_state()), (lambda state, device=0: None)
    found.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    found.synchronize = lambda device=None: None
    return found


def reads():
    """How often the CPU has waited for numbers of the device so far."""
    return torch.ops.own_device.reads()


def peak_bytes(call):
    """The most memory of the device that a call takes beyond what was in use."""
    before = torch.ops.own_device.forget()
    found = call()
    del found
    return torch.ops.own_device.highest() - before
