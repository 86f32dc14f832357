"""What `make wheels` holds each wheel to, and the table at its end.

    python tools/wheels/check.py FILE ...     the same for Pyodide's, which another builder makes

Tag: the oldest system a module runs on, read from the file itself.  ABI: symbols of the interpreter.  Symbols: one
function goes out, nothing comes in that prints, ends the process or brings another runtime.  Page: what
`layer.playground()` shows, which only `make wheels` adds.
"""

import importlib.util
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import inputs
import lief
import webassembly

lief.logging.disable()  # it doubts an empty table of zig's linker
LARGEST = 1_400_000  # bytes of a wheel
HERE = Path(__file__).resolve().parent
SYSTEM_LIBRARIES = {  # libdl looks up torch's runtime of threads; it is a part of every glibc
    "linux": r"lib(c|m|pthread)\.so\.6|libpthread\.so\.0|libdl\.so\.2|libc\.so|ld-linux-(aarch64\.so\.1|x86-64\.so\.2)",
    "macos": r"/usr/lib/libSystem\.B\.dylib",
    "windows": r"(?i)kernel32\.dll|api-ms-win-(crt|core-synch)-[\w-]+\.dll",
}

# What the start code of a Windows library says before it gives up; our objects have none of them, as Linux's show.
WINDOWS_START = {"_exit", "abort", "__stdio_common_vfprintf"}

# What a module of WebAssembly says to the one that loads it.
WEBASSEMBLY_LINKER = {"__wasm_call_ctors", "__wasm_apply_data_relocs", "_initialize"}

UNDEFINED = 0  # the section of a symbol that comes in; lief's own list has only those whose library it knows
MACOS_LINKER = {"__mh_dylib_header", "___dso_handle"}  # marks that zig's linker makes itself


def banned():
    """What a module must not import: tools/check_symbols.py."""
    spec = importlib.util.spec_from_file_location("check_symbols", HERE.parent / "check_symbols.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.BANNED


def tool(*words):
    """What one of the tools printed; their complaint is ours."""
    done = subprocess.run([sys.executable, "-m", *map(str, words)], capture_output=True, text=True)
    if done.returncode != 0:
        raise AssertionError(f"{words[0]}: {done.stdout}{done.stderr}")
    return done.stdout


def names_in(binary, platform):
    """(exported, imported, libraries) of a parsed module, C names."""
    if platform.system == "windows":
        exported = [entry.name for entry in binary.get_export().entries]
        return exported, [e.name for i in binary.imports for e in i.entries], [i.name for i in binary.imports]
    imported = [symbol.name for symbol in binary.imported_symbols]
    if platform.system == "macos":
        table = binary.dyld_exports_trie or binary.dyld_info
        exported = [export.symbol.name for export in table.exports if export.symbol]
        exported = [name for name in exported if name not in MACOS_LINKER]
        strip = [[name.removeprefix("_") for name in names] for names in (exported, imported)]
        return *strip, [library.name for library in binary.libraries if library.name != binary_id(binary)]
    imported = [symbol.name for symbol in binary.dynamic_symbols if symbol.name and symbol.shndx == UNDEFINED]
    return [symbol.name for symbol in binary.exported_symbols], imported, list(binary.libraries)


def binary_id(binary):
    """A macOS library's own name, which stands among those it needs."""
    own = [c for c in binary.commands if c.command == lief.MachO.LoadCommand.TYPE.ID_DYLIB]
    return own[0].name if own else None


def symbols(binary, interface, platform):
    exported, imported, libraries = names_in(binary, platform)
    assert exported == [interface.entry], f"exports {exported}"
    own_start = WINDOWS_START if platform.system == "windows" else set()
    stopped = [name for name in imported if banned().match(name) and name not in own_start]
    assert not stopped, f"uses {stopped}"
    python = {interface.library} if platform.system == "windows" else set()
    others = [name for name in libraries if not re.fullmatch(SYSTEM_LIBRARIES[platform.system], name)]
    others = sorted(set(others) ^ python)
    assert not others, f"needs {others}"
    return f"1 out, {len(imported)} in"


def oldest_system(wheel, binary, platform):
    """The tag is true: what the file asks of its system is no more than it says."""
    if "musl" in platform.zig:  # auditwheel knows musl only where musl is
        versions = [requirement.name for requirement in binary.symbols_version_requirement]
        assert list(binary.libraries) == ["libc.so"] and not versions, f"needs {list(binary.libraries)}, {versions}"
        return "musl"
    if platform.system == "linux":
        shown = " ".join(tool("auditwheel", "show", wheel).split())
        found = re.search(r'platform tag: "(\w+)"', shown)
        assert found and found.group(1) in platform.tag.split("."), shown
        return found.group(1).partition("linux_")[2]
    if platform.system == "macos":
        oldest = list(binary.build_version.minos)
        assert oldest[:2] == [11, 0], f"runs on macOS {oldest} and later"
        assert binary.has_code_signature or "x86_64" in platform.tag, "Apple silicon loads signed files only"
        return "macOS 11.0"
    return f"Windows {binary.optional_header.major_operating_system_version}"


def wheel(path, module, interface, platform):
    """The row of one wheel: (name, size, results); an AssertionError becomes the result."""
    binary = lief.parse(str(module))
    binary = binary.at(0) if isinstance(binary, lief.MachO.FatBinary) else binary

    def size():
        assert str(HERE.parents[1]).encode() not in module.read_bytes(), "the folder it was built in stands in it"
        assert path.stat().st_size <= LARGEST, f"{path.stat().st_size} bytes"
        return f"{path.stat().st_size // 1000} kB"

    def stable():
        if not interface.stable:
            return f"{interface.abi} only"
        if not interface.free_threaded:
            tool("abi3audit", "--strict", path)
            return "abi3audit"
        _, imported, _ = names_in(binary, platform)  # to abi3audit abi3t's own PyModExport__core is a breach
        of_python = {name for name in imported if name.startswith(("Py", "_Py"))}
        others = sorted(of_python.difference(*inputs.stable_symbols(interface)))
        assert of_python and not others, f"not in abi3t: {others}"
        return f"abi3t, {len(of_python)} names"

    def metadata():
        tool("twine", "check", "--strict", path)
        return "twine"

    def names():
        return symbols(binary, interface, platform)

    checks = [size, lambda: oldest_system(path, binary, platform), stable, names, metadata]
    return [path.name, *map(result, checks)]


def browser_wheel(path):
    """The row of Pyodide's wheel, whose module is WebAssembly and whose other files must be the sources."""
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist() if name.startswith("mha_c/")}
    (module,) = [files.pop(name) for name in list(files) if name.startswith("mha_c/_core.") and name.endswith(".so")]

    def size():
        assert path.stat().st_size <= LARGEST, f"{path.stat().st_size} bytes"
        return f"{path.stat().st_size // 1000} kB"

    def tag():
        found = re.search(r"-(cp\d+-abi3)-((?:pyodide|pyemscripten)_\d+_\d+)_wasm32\.whl$", path.name)
        assert found, "not a tag of Pyodide's"
        return found[2]

    def package():
        other = [name for name, text in files.items() if (HERE.parents[1] / name).read_bytes() != text]
        assert not other, f"{other} are not the sources"
        return f"abi3, {len(files)} files"

    def names():
        exported, imported = webassembly.names(module)
        exported = sorted(set(exported) - WEBASSEMBLY_LINKER)
        assert exported == ["PyInit__core"], f"exports {exported}"
        stopped = [name for name in imported if banned().match(name)]
        assert not stopped, f"uses {stopped}"
        return f"1 out, {len(imported)} in"

    def metadata():
        tool("twine", "check", "--strict", path)
        return "twine"

    return [path.name, *map(result, (size, tag, package, names, metadata))]


def result(check):
    try:
        return check()
    except AssertionError as error:
        return f"FAILED: {error}"


def report(rows):
    """Prints the table; the number of wheels that failed."""
    table = [["wheel", "size", "runs on", "interpreter", "symbols", "metadata", "page"], *rows]
    widths = [max(len(cell) for cell in column if not cell.startswith("FAILED")) for column in zip(*table)]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)))
    return sum(any(cell.startswith("FAILED") for cell in row) for row in rows)


if __name__ == "__main__":
    sys.exit(report([browser_wheel(Path(name)) for name in sys.argv[1:]]))
