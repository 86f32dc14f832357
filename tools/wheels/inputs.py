"""Fetches the headers that inputs.json pins, and lays out one include folder for each platform and interface.

CPython's come from its source archive: public headers, Windows' pyconfig.h, and the list of the stable ABI.  Debian
keeps the very file that python.org publishes, so that either will do, and the hash says that it is the one.  NumPy's
come from its wheels, whose configuration differs between systems.  What was fetched stays in .cache/wheels.
"""

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tarfile
import urllib.error
import urllib.request
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
CACHE = HERE.parents[1] / ".cache" / "wheels"
LINUX = sys.platform == "linux"
PINNED = json.loads((HERE / "inputs.json").read_text(encoding="utf-8"))
# What a module of 3.14t calls beside the stable ABI, by way of Py_DECREF.
FREE_THREADED_FUNCTIONS = ["_Py_DecRefShared", "_Py_MergeZeroLocalRefcount"]


def pinned_file(path, sha256):
    """Whether the file is there; wrong contents are an error."""
    if not path.exists():
        return False
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != sha256:
        raise SystemExit(f"{path}: sha256 is {found}, inputs.json says {sha256}")
    return True


def debian_mirrors():
    """Where this machine's own apt finds Debian's packages; nowhere on another system."""
    if not re.search("^ID=debian$", Path("/etc/os-release").read_text(encoding="utf-8") if LINUX else "", re.MULTILINE):
        return []
    command = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return sorted(uri.rstrip("/") for uri in set(found) if uri.startswith("http") and "security" not in uri)


def places(version, release):
    """Addresses of that release's source archive, whose version is `version`: any that has it will do.  A candidate,
    3.15.0rc2, is 3.15.0~rc2 to Debian, and lies in the folder of 3.15.0 at python.org."""
    final, candidate = re.fullmatch(r"([\d.]+)(\w*)", release).groups()
    for mirror in debian_mirrors():
        spelled = f"{final}~{candidate}" if candidate else final
        yield f"{mirror}/pool/main/p/python{version}/python{version}_{spelled}.orig.tar.xz"
    yield f"https://www.python.org/ftp/python/{final}/Python-{release}.tar.xz"


def fetch(urls, archive, sha256):
    """Makes the file from the first address that has it; a file of another hash is nobody's."""
    for url in urls:
        try:
            with urllib.request.urlopen(url, timeout=60) as answer:
                contents = answer.read()
        except (urllib.error.URLError, TimeoutError) as error:
            print(f"{url}: {error}", file=sys.stderr)
            continue
        found = hashlib.sha256(contents).hexdigest()
        if found == sha256:
            archive.write_bytes(contents)
            return
        print(f"{url}: sha256 is {found}, inputs.json says {sha256}", file=sys.stderr)
    raise SystemExit(f"{archive.name} is nowhere to be had: put another version into inputs.json")


def unpack(tar, folder, members=None):
    """Extracts it; held to the folder by Python from 3.11.4 on, which Debian's 3.11 is not."""
    tar.extraction_filter = getattr(tarfile, "data_filter", lambda member, path: member)
    tar.extractall(folder, members)


def cpython_source(version):
    """The folder with Include, PC, Misc of that version's source."""
    pinned = PINNED["cpython"][version]
    archive = CACHE / f"Python-{pinned['release']}.tar.xz"
    if not pinned_file(archive, pinned["sha256"]):
        CACHE.mkdir(parents=True, exist_ok=True)
        fetch(places(version, pinned["release"]), archive, pinned["sha256"])
    target = CACHE / f"cpython-{pinned['sha256'][:12]}"
    if not target.exists():
        wanted = ("Include/", "PC/pyconfig.h", "Misc/stable_abi.toml")
        with tarfile.open(archive) as tar:
            members = [m for m in tar if m.isfile() and m.name.partition("/")[2].startswith(wanted)]
            for member in members:
                member.name = member.name.partition("/")[2]
            unpack(tar, f"{target}.part", members)
        Path(f"{target}.part").rename(target)
    return target


def numpy_headers(name):
    """The include folder of NumPy's wheel for that platform."""
    pinned, version = PINNED["numpy"][name], PINNED["numpy"]["version"]
    folder = CACHE / f"numpy-{name}"
    wheels = list(folder.glob(f"numpy-{version}-*.whl"))
    if not wheels:
        options = ["--only-binary=:all:", "--python-version=3.13", "--implementation=cp"]
        command = [sys.executable, "-m", "pip", "-q", "download", "--no-deps", *options, f"--dest={folder}"]
        subprocess.run([*command, f"--platform={pinned['platform']}", f"numpy=={version}"], check=True)
        wheels = list(folder.glob(f"numpy-{version}-*.whl"))
    pinned_file(wheels[0], pinned["sha256"])
    target = folder / pinned["sha256"][:12]
    if not target.exists():
        with zipfile.ZipFile(wheels[0]) as wheel:
            inside = [name for name in wheel.namelist() if name.startswith("numpy/_core/include/")]
            wheel.extractall(f"{target}.part", inside)
        Path(f"{target}.part").rename(target)
    return target / "numpy" / "_core" / "include"


def headers(platform, interface, folder):
    """Makes `folder` an include folder for that platform's Python, and returns it with NumPy's."""
    source = cpython_source(interface.headers)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source / "Include", folder, ignore=shutil.ignore_patterns("internal"))
    if platform.system == "windows":
        (given,) = (source / "PC").glob("pyconfig.h*")
        config = given.read_text(encoding="utf-8")
    else:
        config = (HERE / "pyconfig_posix.h").read_text(encoding="utf-8")
    if interface.free_threaded:
        config = f"#define Py_GIL_DISABLED 1\n{config}"
    (folder / "pyconfig.h").write_text(config, encoding="utf-8")
    return folder, numpy_headers(platform.numpy)


def stable_symbols(interface):
    """(functions, data) of the stable ABI up to the oldest Python of the interface, as Windows' DLL exports them."""
    import tomllib  # Python 3.11; the rest of this file is read by older ones too

    oldest = (int(interface.python[2]), int(interface.python[3:]))
    listed = tomllib.loads((cpython_source(interface.headers) / "Misc" / "stable_abi.toml").read_text(encoding="utf-8"))

    def names(kind):
        return [
            name
            for name, facts in listed[kind].items()
            if tuple(map(int, facts["added"].split("."))) <= oldest
            and facts.get("ifdef") in (None, "MS_WINDOWS", "PY_HAVE_THREAD_NATIVE_ID")
        ]

    return names("function"), names("data")
