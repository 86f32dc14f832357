"""What this installation computes with: instruction set and threads, chosen once at import; show_config.

MHA_C_ISA            scalar, neon, wasm, avx2 or avx512; default: the best of this CPU; RuntimeError if missing here
MHA_C_NUM_THREADS    threads that one call may use; default: OMP_NUM_THREADS, or else the cores this process may use,
                     and for calls with torch's tensors as many as torch.get_num_threads() says
MHA_C_THREADS_OF     own: calls run on threads of our own; host: on torch's, once mha_c.torch is imported; default: on
                     torch's where it is safe
"""

from __future__ import annotations

import os
import platform
import re
import sys
import warnings
from typing import Any, Optional

import numpy as np

from . import _core
from ._arguments.calls import refuses_at_the_call

__all__ = ["get_num_threads", "register_with_threadpoolctl", "set_num_threads", "show_config"]
__dir__ = __all__.copy  # what dir() and completion show

# The number of threads, and who chose it.  A temporary limit that has ended again leaves no trace here.
_threads_chosen = 0, ""
_by_default = "the cores this process may use"  # the reason that nobody has chosen
_own_threads_reason = "mha_c.torch is not imported"  # while calls run on threads of our own
_torchs_runtime = ""  # the file of the OpenMP runtime on whose threads they run
_isa_reason = "the widest; MHA_C_ISA changes it"


def get_num_threads() -> int:
    """How many threads one call may use, including the calling thread.

    Returns
    -------
    int
        At least 1.

    Examples
    --------
    >>> import mha_c
    >>> mha_c.get_num_threads() >= 1
    True
    """
    return _core.get_num_threads()


@refuses_at_the_call
def set_num_threads(n: int) -> NumThreads:
    """Let every call from now on use up to `n` threads.

    In a `with` statement the setting ends with the block.  Results are bit-identical for every `n`.  Small calls always
    use one thread.

    Parameters
    ----------
    n : int
        A whole number >= 1; more than the CPUs is allowed.

    Returns
    -------
    NumThreads
        For a `with` statement: its end restores the old number.

    Raises
    ------
    ValueError
        If `n` is anything else, including True and 2.0.

    Examples
    --------
    >>> import mha_c
    >>> before = mha_c.get_num_threads()
    >>> with mha_c.set_num_threads(1):
    ...     print(mha_c.get_num_threads())
    1
    >>> mha_c.get_num_threads() == before
    True
    """
    return NumThreads(n)


class NumThreads:
    """The result of `set_num_threads`: the end of a `with` statement restores the old number of threads."""

    def __init__(self, n: int) -> None:
        self._n, self._before = n, (_core.get_num_threads(), _threads_chosen)
        _choose_threads(n, "set_num_threads")

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        global _threads_chosen
        n, _threads_chosen = self._before
        limit_threads(n)

    def __repr__(self) -> str:
        return f"set_num_threads({self._n})"


_registered: list[Any] = []  # what threadpoolctl knows of us


def register_with_threadpoolctl() -> None:
    """Let threadpoolctl, and with it joblib and scikit-learn, see and limit the threads of mha_c in this process.

    threadpoolctl recognizes a library by its file name, and does not know ours: so this must be called, once.  Then
    `threadpool_limits(limits=1)` limits mha_c, too, and `limits={"mha_c": 1}` mha_c only.

    Raises
    ------
    ImportError
        If threadpoolctl is not installed (mha_c does not depend on it: pip install threadpoolctl).

    Examples
    --------
    >>> import mha_c, threadpoolctl
    >>> mha_c.config.register_with_threadpoolctl()
    >>> with threadpoolctl.threadpool_limits(limits=1):  # calls use one thread here, like BLAS and OpenMP
    ...     print(mha_c.get_num_threads())
    1
    """
    import threadpoolctl

    if _registered:
        return
    ours = os.path.realpath(_core.__file__)

    class Controller(threadpoolctl.LibController):  # type: ignore[misc]
        user_api = internal_api = "mha_c"
        filename_prefixes = (os.path.basename(ours).lower(),)
        check_symbols = ("PyInit__core", "PyModExport__core")  # the second since Python 3.15

        def get_num_threads(self) -> int:
            return _core.get_num_threads()

        def set_num_threads(self, num_threads: int) -> None:
            limit_threads(num_threads)

        def get_version(self) -> str:
            return version()

        def set_additional_attributes(self) -> None:
            if os.path.realpath(self.filepath) != ours:  # another package's _core, without our symbols
                self.dynlib = None

    threadpoolctl.register(Controller)
    _registered.append(Controller)


BYTES = (2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B")
OPERATIONS = (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1, "")
SECONDS = (1, "s"), (1e-3, "ms"), (1e-6, "us")


def in_words(number: float, units: tuple[tuple[float, str], ...] = BYTES) -> str:
    """The number as text in the largest unit that is not larger than it: 17 MiB, 2.15 G, 45.3 us."""
    factor, unit = next((pair for pair in units if number >= pair[0]), units[-1])
    scaled = number / factor
    return f"{scaled:{'.0f' if scaled >= 1000 else '.3g'}} {unit}".rstrip()


def show_config() -> dict[str, Any]:
    """Print what mha_c computes with, in a few lines for a bug report, and return it as a dict.

    Returns
    -------
    dict
        Keys: version, processor, isa (the active instruction set), isas (those in the core that this CPU has), kernels
        (for each type: numbers in a vector, rows and columns of a register tile), threads, threads_from, share_from
        (seconds of work below which a call stays on one thread), threads_of ("torch": calls run on the threads that
        torch has, as many as torch.get_num_threads() says; "own": on threads of mha_c's own), threads_of_from (which
        runtime's, or why), numpy.  If torch is already imported, also torch, and torch_device: the kind of accelerator
        that torch has here, or None.

    See Also
    --------
    explain : What this means for one call.

    Examples
    --------
    >>> import mha_c
    >>> config = mha_c.show_config()  # doctest: +ELLIPSIS
    mha_c ... in ...
    isa ...
    kernels ...
    threads ...
    processor ...
    numpy ...
    >>> config["isa"] in config["isas"]
    True
    """
    offered = [name for name, available in _core.isas() if available]
    kernels = _core.explain_kernels()
    share, chosen = kernels.pop("share"), (_core.get_num_threads(), _threads_chosen[1])
    config: dict[str, Any] = {
        "version": version(),
        "processor": processor(),
        "isa": _core.isa(),
        "isas": offered,
        "kernels": kernels,
        "threads": chosen[0],
        "threads_from": chosen[1] if chosen == _threads_chosen else "limited by threadpoolctl",
        "share_from": share["least_seconds"],
        **dict(zip(("threads_of", "threads_of_from"), threads_of())),
        "numpy": np.__version__,
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        config["torch"] = str(getattr(torch, "__version__", "being imported"))
        found = getattr(getattr(torch, "accelerator", None), "current_accelerator", lambda check: None)(True)
        config["torch_device"] = getattr(found, "type", None)
    print(f"mha_c {config['version']} in {os.path.dirname(__file__)}")
    print(f"isa {config['isa']} ({_isa_reason}; this CPU: {' '.join(offered)})")
    shapes = ", ".join(
        f"{dtype} {facts['lanes']} in a vector, {facts['tile_rows']} x {facts['tile_columns']} in a register tile"
        for dtype, facts in config["kernels"].items()
    )
    print(f"kernels {shapes}")
    least = f"calls of less than {config['share_from'] * 1e6:.0f} us use one"
    print(f"threads {config['threads']} ({config['threads_from']}; {least}; {config['threads_of_from']})")
    print(f"processor {config['processor']}")
    print(f"numpy {config['numpy']}   python {sys.version.split()[0]} on {sys.platform}")
    if torch is not None:
        device = config["torch_device"] or "another device"
        print(f"torch {config['torch']} (tensors on the CPU: by the core above; on {device}: by torch's own kernels)")
    return config


def processor() -> str:
    """The processor's name, as the system gives it; on x86 also the numbers of its family, which say more."""
    found = re.findall(r"^(model name|cpu family|model)[ \t]*: (.*)$", _text("/proc/cpuinfo"), re.MULTILINE)
    fields = dict(reversed(found))  # of the first processor
    name = fields.get("model name") or platform.processor() or platform.machine()
    family = f" (family {fields['cpu family']}, model {fields['model']})" if "cpu family" in fields else ""
    return f"{name}{family}"


def version() -> str:
    """The version of the installed package; looked up at the first use, because that takes a few milliseconds."""
    from importlib import metadata

    try:
        return metadata.version("mha_c")
    except metadata.PackageNotFoundError:  # Python runs from a source tree that is not installed
        return "unknown"


def _select_isa() -> None:
    global _isa_reason
    name = os.environ.get("MHA_C_ISA", "")
    try:
        if name:
            _core.set_isa(name)
            _isa_reason = "MHA_C_ISA"
    except ValueError as error:
        raise RuntimeError(f"MHA_C_ISA: {error}") from None


def _choose_threads(n: int, reason: str) -> None:
    global _threads_chosen
    _core.set_num_threads(n, reason == _by_default)
    _threads_chosen = _core.get_num_threads(), reason


def limit_threads(n: int) -> None:
    """Let calls use `n` threads, for a while: the number that was chosen is still the one that was."""
    _core.set_num_threads(n, (n, _by_default) == _threads_chosen)


def _select_threads() -> None:
    for variable in ("MHA_C_NUM_THREADS", "OMP_NUM_THREADS"):
        text = os.environ.get(variable, "").strip()
        # OpenMP allows a list, one number for each level of nesting; we have one level.
        number = text.split(",")[0].strip() if variable == "OMP_NUM_THREADS" else text
        try:
            if text:
                return _choose_threads(int(number), variable)
        except ValueError:  # not a number, or too small or too large for the core
            _ignored(variable, text, "a whole number >= 1")
    cores, quota = _cores(), _cpu_quota()
    if quota is not None and quota < cores:
        return _choose_threads(quota, "the CPU quota of this process")
    _choose_threads(cores, _by_default)


# Where a kernel says that a process was forked and has executed no program since: Linux's PF_FORKNOEXEC.
_FORKED = 0x40


def _forked(stat: str = "/proc/self/stat") -> bool:
    """Whether this process is a fork, so that threads that libraries had before are not in it; True where unknown."""
    fields = _text(stat).rpartition(")")[2].split()
    return len(fields) < 7 or not fields[6].isdigit() or bool(int(fields[6]) & _FORKED)


def share_torch_threads() -> None:
    """Run calls on torch's own threads, from now on, where that is safe; `import mha_c.torch` calls this once."""
    global _torchs_runtime, _own_threads_reason
    choice = os.environ.get("MHA_C_THREADS_OF", "").strip()
    if choice not in ("", "own", "host"):
        _ignored("MHA_C_THREADS_OF", choice, "own or host")
    if choice == "own":
        _own_threads_reason = "MHA_C_THREADS_OF"
    elif sys.platform != "linux":
        _own_threads_reason = "torch's are shared on Linux alone"
    elif _forked():
        _own_threads_reason = "this process was forked: torch's may be those of its parent"
    else:
        quota = _cpu_quota()  # a larger team would use it up, most of it by waiting
        _torchs_runtime = _core.use_torch_threads(quota or 2**30) or ""
        _own_threads_reason = "this process was forked" if _torchs_runtime else "torch has no OpenMP runtime here"
    if choice == "host" and not _core.has_team():
        warnings.warn(f"MHA_C_THREADS_OF='host' is ignored: {_own_threads_reason}", RuntimeWarning, stacklevel=4)


def threads_of() -> tuple[str, str]:
    """Whose threads calls run on, "torch" or "own", and in words which runtime's, or why."""
    if _core.has_team():
        return "torch", f"torch's own, of {os.path.basename(_torchs_runtime)}"
    return "own", f"mha_c's own: {_own_threads_reason}"


def _cores(root: str = "/sys/devices/system/cpu") -> int:
    """How many cores this process may use: CPUs of one core count once, where the system tells which they are.

    Two threads on one core share its arithmetic, of which one thread of ours leaves nothing over.
    """
    if not hasattr(os, "sched_getaffinity"):
        return _cpus()
    # What is not told, as in some sandboxes, is a core of its own.
    told = ((cpu, _text(f"{root}/cpu{cpu}/topology/thread_siblings_list").strip()) for cpu in os.sched_getaffinity(0))
    return len({siblings or cpu for cpu, siblings in told})


def _cpus() -> int:
    """How many CPUs this process may use: the CPUs in its affinity mask, where the system has such masks."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    cpus = os.cpu_count() or 1
    if sys.platform == "win32" and cpus <= 64:  # above 64 Windows forms groups, and a mask covers one
        import ctypes  # some Pythons on other systems lack it

        kernel, mask, of_system = ctypes.windll.kernel32, ctypes.c_size_t(), ctypes.c_size_t()
        process = ctypes.c_void_p(kernel.GetCurrentProcess())
        if kernel.GetProcessAffinityMask(process, ctypes.byref(mask), ctypes.byref(of_system)):
            return bin(mask.value).count("1") or cpus
    return cpus


def _cpu_quota(of_process: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> Optional[int]:
    """How many CPUs' time the cgroups of this process allow, rounded up; None without a limit.

    `docker run --cpus` and Kubernetes set this quota.  More threads would use up the quota of a period early, and then
    all threads wait until the next period.  Every level of the cgroup tree may have a quota; the smallest counts.  A
    container often sees only its own part of the tree, mounted as a root, while its path starts at the host's root: the
    walk up to the mount then finds the container's quota.  Files that are missing or malformed mean no limit.
    """
    quotas = []
    for line in _text(of_process).splitlines():
        _, *rest = line.split(":", 2)  # number, controllers, path; version 2 has no controllers
        if len(rest) < 2 or (rest[0] and "cpu" not in rest[0].split(",")):
            continue
        names, version = rest[1].split("/"), 1 if rest[0] else 2
        for mount in ("/cpu", "/cpu,cpuacct") if rest[0] else ("", "/unified"):
            for n in range(len(names)):
                quotas.append(_quota_in(root + mount + "/".join(names[: n + 1]), version))
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota_in(folder: str, version: int) -> Optional[int]:
    if version == 2:  # one file: "max 100000" or "150000 100000"
        numbers = _text(f"{folder}/cpu.max").split()[:2]
    else:  # two files, a quota of -1 for none
        numbers = [_text(f"{folder}/cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    if len(numbers) < 2 or not all(number.isascii() and number.isdigit() for number in numbers) or int(numbers[1]) == 0:
        return None
    return max(1, -(-int(numbers[0]) // int(numbers[1])))


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(1 << 16)
    except (OSError, ValueError):
        return ""


def _ignored(variable: str, text: str, wanted: str) -> None:
    warnings.warn(f"{variable}={text!r} is ignored: it must be {wanted}", RuntimeWarning, stacklevel=3)


def apply_environment() -> None:
    """Read the environment variables; `import mha_c` calls this once."""
    _select_isa()
    _select_threads()
