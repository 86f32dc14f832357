"""The table of what `make wheels` builds: systems, and the Pythons of each."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Platform:
    """One system and processor, in the words of each tool."""

    tag: str  # of the wheel
    zig: str  # target of the compiler, with the oldest system that is promised
    numpy: str  # whose headers: a name in inputs.json
    suffix: str  # of extension modules for one version of Python
    machine: str = ""  # the processor, as dlltool says it (Windows)

    @property
    def system(self):
        return "windows" if "windows" in self.zig else "macos" if "macos" in self.zig else "linux"


PLATFORMS = [
    Platform("manylinux_2_17_x86_64.manylinux2014_x86_64", "x86_64-linux-gnu.2.17", "linux", "x86_64-linux-gnu.so"),
    Platform("manylinux_2_17_aarch64.manylinux2014_aarch64", "aarch64-linux-gnu.2.17", "linux", "aarch64-linux-gnu.so"),
    Platform("musllinux_1_2_x86_64", "x86_64-linux-musl", "linux", "x86_64-linux-musl.so"),
    Platform("musllinux_1_2_aarch64", "aarch64-linux-musl", "linux", "aarch64-linux-musl.so"),
    Platform("macosx_11_0_x86_64", "x86_64-macos.11.0", "macos-x86_64", "darwin.so"),
    Platform("macosx_11_0_arm64", "aarch64-macos.11.0", "macos-arm64", "darwin.so"),
    Platform("win_amd64", "x86_64-windows-gnu", "windows", "win_amd64.pyd", "i386:x86-64"),
    Platform("win_arm64", "aarch64-windows-gnu", "windows", "win_arm64.pyd", "arm64"),
]


@dataclass(frozen=True)
class Interface:
    """One binary interface of CPython; each platform gets a wheel for each."""

    python: str  # tag of the wheel
    abi: str  # one, or several with dots between them, as the wheel's name has them
    headers: str  # whose headers: a version in inputs.json
    library: str  # Windows' DLL that has it

    @property
    def free_threaded(self):
        return self.abi.endswith("t")

    @property
    def stable(self):
        """Whether later versions of Python have it too."""
        return self.abi.startswith("abi3")

    @property
    def entry(self):
        """The one function that a module exports."""
        return "PyModExport__core" if self.stable and self.free_threaded else "PyInit__core"

    def exists_on(self, platform):
        """Without the global lock headers before 3.15 ask 64-bit ARM Windows for a register by a word of MSVC."""
        return self.stable or platform.tag != "win_arm64"

    def module(self, platform):
        """File name of the extension module."""
        if platform.system == "windows":
            return "_core.pyd" if self.stable else f"_core.{self.abi}-{platform.suffix}"
        if self.stable:
            return f"_core.{self.abi.split('.')[-1]}.so"
        return f"_core.cpython-{self.abi[2:]}-{platform.suffix}"


INTERFACES = [
    Interface("cp39", "abi3", "3.13", "python3.dll"),  # setup.py's OLDEST_PYTHON, and every later version
    Interface("cp314", "cp314t", "3.14", "python314t.dll"),
    Interface("cp315", "abi3.abi3t", "3.15", "python3t.dll"),  # every later version, with the global lock and without
]
