"""make wheels: every platform's wheel, built and checked on one Linux machine.  The files go to dist/.

Clang, linker and C libraries of all targets come with zig (requirements.txt), headers as inputs.py says.  The source
archive is made first and everything else from it.  Two runs give the same bytes: no file carries a time but that of
the last commit (SOURCE_DATE_EPOCH), no debug information, no path.
"""

import argparse
import base64
import gzip
import hashlib
import io
import itertools
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import check
import inputs
from platforms import INTERFACES, PLATFORMS

ROOT = Path(__file__).resolve().parents[2]
WORK, DIST = ROOT / "build" / "wheels", ROOT / "dist"
SIZES, EXTENSION = (str(Path(__file__).with_name(name)) for name in ("sizes.c", "extension.py"))
ZIG = [sys.executable, "-m", "ziglang"]
LINK = {
    "linux": ["-shared", "-Wl,-z,nodelete", "-lm", "-pthread"],
    "macos": ["-shared", "-Wl,-undefined,dynamic_lookup"],
    "windows": ["-shared", "-lapi-ms-win-core-synch-l1-2-0"],  # WaitOnAddress
}
WINDOWS = ["-DMS_WINDOWS=", "-DMS_WIN32=", "-DMS_WIN64="]  # pyconfig.h knows only MSVC; without them sizes are wrong


def run(*command, **options):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, **options)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def last_commit():
    """SOURCE_DATE_EPOCH, or the time of the last commit."""
    given = os.environ.get("SOURCE_DATE_EPOCH")
    return int(given or run("git", "log", "-1", "--format=%ct", cwd=ROOT))


def source_archive(when):
    """Makes dist/*.tar.gz, every member with one time and no owner, and unpacks it in WORK."""
    made = WORK / "sdist"
    run(sys.executable, "-m", "build", "--no-isolation", "--sdist", "--outdir", made, ROOT)
    (archive,) = made.glob("*.tar.gz")
    plain = io.BytesIO()
    with tarfile.open(archive) as given, tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for member in sorted(given.getmembers(), key=lambda member: member.name):
            clean = tarfile.TarInfo(member.name)
            clean.type, clean.size, clean.mtime = member.type, member.size, when
            clean.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            tar.addfile(clean, given.extractfile(member) if member.isfile() else None)
        inputs.unpack(given, WORK)
    with open(DIST / archive.name, "wb") as raw, gzip.GzipFile("", "wb", mtime=when, fileobj=raw) as packed:
        packed.write(plain.getvalue())
    return WORK / archive.name.removesuffix(".tar.gz")


def described(source):
    """setup.py's Extension for each interface, the folder with the package's Python files, and that of its metadata."""
    extensions = {}
    for interface in INTERFACES:
        asked = [sys.executable, EXTENSION, interface.headers + "t" * interface.free_threaded]
        extensions[interface] = json.loads(run(*asked, cwd=source))
        tag, wanted = extensions[interface]["tag"], interface.python if interface.stable else None
        assert tag == wanted, f"setup.py tags {interface.python}-{interface.abi} as {tag}"
    run(sys.executable, "setup.py", "-q", "build_py", "--build-lib", WORK / "package", cwd=source)
    (WORK / "metadata").mkdir()
    run(sys.executable, "setup.py", "-q", "dist_info", "--output-dir", WORK / "metadata", cwd=source)
    (metadata,) = (WORK / "metadata").glob("*.dist-info")
    return extensions, WORK / "package", metadata


class Compiler:
    """Compiles the sources for one platform; objects of the core serve every interface."""

    def __init__(self, source, extensions, platform):
        self.source, self.extensions, self.platform = source, extensions, platform
        self.folder = WORK / platform.zig
        extension = extensions[INTERFACES[0]]
        self.sources = extension["sources"]
        self.flags = [*extension["extra_compile_args"], "-Icsrc", "-fno-sanitize=all", "-fPIC", "-DNDEBUG"]
        if platform.system == "windows":
            self.flags = [flag for flag in self.flags if flag not in ("-fPIC", "-pthread")] + WINDOWS
        self.core = {}

    def zig(self, *words):
        return run(*ZIG, "cc", "-target", self.platform.zig, *words, cwd=self.source)

    def compile(self, sources, name, *flags):
        """(source, object) jobs, done side by side by the caller."""
        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        for path in sources:
            target = folder / f"{path.replace('/', '-')}.o"
            yield target, lambda path=path, target=target: self.zig(*self.flags, *flags, "-c", path, "-o", target)

    def core_jobs(self):
        return self.compile([s for s in self.sources if "/python/" not in s], "core")

    def binding_jobs(self, interface, *first):
        """`first`: include folders to look at before the platform's own."""
        folders = inputs.headers(self.platform, interface, self.folder / f"include-{interface.abi}")
        macros = dict(self.extensions[interface]["define_macros"])
        flags = [*(f"-I{folder}" for folder in (*first, *folders)), *(f"-D{k}={v}" for k, v in macros.items())]
        binding = [s for s in self.sources if "/python/" in s] + [SIZES]
        return self.compile(binding, f"{interface.abi}{len(first) or ''}", *flags)

    def link(self, objects, interface):
        module = self.folder / interface.abi / interface.module(self.platform)
        libraries = [self.import_library(interface)] if self.platform.system == "windows" else []
        name = [f"-Wl,-install_name,@rpath/{module.name}"] if self.platform.system == "macos" else []  # else its path
        self.zig("-s", *objects, *libraries, *LINK[self.platform.system], *name, "-o", module)
        return module

    def import_library(self, interface):
        """What the linker needs to know of Windows' python3.dll: its names, written as a .def and made a library."""
        functions, data = inputs.stable_symbols(interface)
        functions += [] if interface.stable else inputs.FREE_THREADED_FUNCTIONS
        names = [*sorted(functions), *(f"{name} DATA" for name in sorted(data))]
        definition = self.folder / f"{interface.library}.def"
        definition.write_text("\n".join([f"LIBRARY {interface.library}", "EXPORTS", *names, ""]))
        library = definition.with_suffix(".lib")
        run(*ZIG, "dlltool", "-m", self.platform.machine, "-d", definition, "-l", library)
        return library


def pack(module, interface, platform, package, metadata, when):
    """Writes the wheel: the package's files, the module, the metadata with this platform's tags."""
    pairs = itertools.product(interface.abi.split("."), platform.tag.split("."))
    tags = [f"Tag: {interface.python}-{abi}-{tag}" for abi, tag in pairs]
    head = ["Wheel-Version: 1.0", "Generator: mha_c tools/wheels", "Root-Is-Purelib: false"]
    files = {str(p.relative_to(package)): p.read_bytes() for p in package.rglob("*") if p.is_file()}
    files[f"mha_c/{module.name}"] = module.read_bytes()
    described = [path for path in metadata.rglob("*") if path.is_file()]
    files.update({f"{metadata.name}/{path.relative_to(metadata)}": path.read_bytes() for path in described})
    files[f"{metadata.name}/WHEEL"] = "\n".join([*head, *tags, ""]).encode()

    def recorded(name):
        digest = base64.urlsafe_b64encode(hashlib.sha256(files[name]).digest()).rstrip(b"=").decode()
        return f"{name},sha256={digest},{len(files[name])}"

    record = f"{metadata.name}/RECORD"
    names = sorted(files, key=lambda name: (".dist-info/" in name, name))
    files[record] = "\n".join([*map(recorded, names), f"{record},,", ""]).encode()
    stem = metadata.name.removesuffix(".dist-info")
    wheel = DIST / f"{stem}-{interface.python}-{interface.abi}-{platform.tag}.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name in [*names, record]:
            info = zipfile.ZipInfo(name, time.gmtime(when)[:6])
            info.compress_type, info.create_system = zipfile.ZIP_DEFLATED, 3
            info.external_attr = (0o100755 if name.endswith((".so", ".pyd")) else 0o100644) << 16
            archive.writestr(info, files[name])
    return wheel


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="platforms whose tag contains this word")
    arguments = parser.parse_args()
    when = last_commit()
    os.environ["SOURCE_DATE_EPOCH"] = str(when)
    os.environ["ZIG_GLOBAL_CACHE_DIR"] = os.environ["ZIG_LOCAL_CACHE_DIR"] = str(WORK / "zig")
    for folder in (WORK / "sdist", WORK / "package", WORK / "metadata", DIST):
        shutil.rmtree(folder, ignore_errors=True)
    DIST.mkdir()
    WORK.mkdir(parents=True, exist_ok=True)
    source = source_archive(when)
    extensions, package, metadata = described(source)
    chosen = [platform for platform in PLATFORMS if arguments.only in platform.tag]
    rows = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for platform in chosen:
            compiler = Compiler(source, extensions, platform)
            core = dict(compiler.core_jobs())
            interfaces = [interface for interface in INTERFACES if interface.exists_on(platform)]
            bindings = {interface: dict(compiler.binding_jobs(interface)) for interface in interfaces}
            jobs = [job for group in (core, *bindings.values()) for job in group.values()]
            list(pool.map(lambda job: job(), jobs))
            for interface, binding in bindings.items():
                module = compiler.link([*core, *binding], interface)
                wheel = pack(module, interface, platform, package, metadata, when)
                rows.append(check.wheel(wheel, module, interface, platform))
                print(wheel.name, flush=True)
    return check.report(rows)


if __name__ == "__main__":
    sys.exit(main())
