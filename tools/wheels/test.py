"""make test-wheels: dist/'s wheels on everything that can run here.  Prints what ran, and what could not.

x86-64   every Python found, each with the oldest and the newest NumPy there is for it: import, demo, selftest; with
         CC=false, for no compiler may be asked.  On one of them the tests that need no torch.
arm64    Debian's Python and NumPy's wheel under qemu-user: selftest, and tests of layers, functions and gradients.  On
         Debian only, whose packages have the Python.
musl     the C core's programs, static.  There is no Python on musl to be had from Debian or the package index.
windows  the C core's programs under wine.
browser  the C core's programs as WebAssembly in node: scalar and SIMD128, without threads.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

import c_programs
from inputs import debian_mirrors
from pythons import pythons

ROOT = Path(__file__).resolve().parents[2]
WORK, DIST = ROOT / "build" / "test-wheels", ROOT / "dist"
OLDEST_NUMPY = {(3, 9): "1.21.6", (3, 10): "1.21.6", (3, 11): "1.23.5", (3, 12): "1.26.4", (3, 13): "2.1.3"}
EMULATED = ["test_layer_constructors", "test_layers", "test_layer_calls", "test_exactness", "test_trained_gradients",
            "test_numpy_training"]  # fmt: skip
SUITE = [*EMULATED, "test_functional", "test_binding", "test_binding_values"]
DEBIAN_ARM64 = """
APT::Architecture "arm64";
APT::Architectures {{ "arm64"; }};
APT::Install-Recommends "false";
Dir::State "{0}/state";
Dir::State::status "{0}/state/status";
Dir::Cache "{0}/cache";
Dir::Etc::sourcelist "{0}/sources.list";
Dir::Etc::sourceparts "/dev/null";
"""


def run(*command, **environment):
    """Runs it in an empty folder, so that what is imported is what is installed; its last line."""
    WORK.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [str(word) for word in command],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=WORK, env={**os.environ, **environment},
    )  # fmt: skip
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))}\nexit status {done.returncode}\n{done.stdout[-6000:]}")
    return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""


def on_x86():
    for (version, free), path in pythons().items():
        name = ".".join(map(str, version)) + ("t" if free else "")
        numpys = {"oldest": f"numpy=={OLDEST_NUMPY[version]}"} if version in OLDEST_NUMPY and not free else {}
        for which, numpy in {**numpys, "newest": "numpy"}.items():
            folder = WORK / f"python{name}-{which}"
            run(path, "-m", "venv", "--clear", folder)
            pip = [folder / "bin" / "python", "-m", "pip", "-q", "--disable-pip-version-check", "install"]
            run(*pip, "--only-binary=:all:", numpy)
            run(*pip, "--no-index", "--no-deps", f"--find-links={DIST}", "mha_c", CC="false")
            python = folder / "bin" / "python"
            run(python, "-m", "mha_c", "demo", CC="false")
            said = [run(python, "-c", "import numpy; print(numpy.__version__)"), run(python, "-m", "mha_c.selftest")]
            print(f"x86-64 Python {name}, NumPy {said[0]}: demo; selftest: {said[1]}", flush=True)
    run(*pip, "pytest", "hypothesis", "threadpoolctl")
    print(f"x86-64 Python {name}: {run(python, *suite(SUITE))}", flush=True)


def suite(modules):
    tests = [next(ROOT.glob(f"tests/*/{module}.py")) for module in modules]
    options = [f"--config-file={ROOT / 'pyproject.toml'}", f"--rootdir={ROOT}", "-p", "no:cacheprovider", "-q", "-W"]
    return ["-m", "pytest", *options, "ignore::pytest.PytestWarning", *tests]


def arm64_python():
    """Debian's Python for 64-bit ARM, unpacked under WORK: the command that runs it."""
    base = WORK / "arm64"
    python = ["qemu-aarch64", "-L", base / "root", base / "root" / "usr" / "bin" / "python3.11"]
    if not (base / "root").exists():
        for folder in ("state/lists/partial", "cache/archives/partial", "root.part"):
            (base / folder).mkdir(parents=True, exist_ok=True)
        (base / "state" / "status").write_text("")
        (base / "sources.list").write_text(f"deb {debian_mirrors()[0]} bookworm main\n")
        (base / "apt.conf").write_text(DEBIAN_ARM64.format(base))
        settings = {"APT_CONFIG": str(base / "apt.conf")}
        run("apt-get", "update", "-qq", **settings)
        wanted = ["python3.11-minimal", "libpython3.11-stdlib", "libstdc++6"]
        run("apt-get", "install", "-qq", "-y", "--download-only", *wanted, **settings)
        for package in (base / "cache" / "archives").glob("*.deb"):
            run("dpkg-deb", "-x", package, base / "root.part")
        (base / "root.part").rename(base / "root")
    return python


def on_arm64():
    if not debian_mirrors():
        print("arm64: not run, this system is not Debian")
        return
    if shutil.which("qemu-aarch64") is None:
        raise SystemExit("qemu-aarch64 is missing: apt-get install -y qemu-user")
    python, site = arm64_python(), WORK / "arm64" / "site"
    shutil.rmtree(site, ignore_errors=True)
    platforms = ["--platform=manylinux_2_28_aarch64", "--platform=manylinux2014_aarch64", "--python-version=3.11"]
    options = [*platforms, "--only-binary=:all:", f"--target={site}", f"--find-links={DIST}"]
    packages = ["mha_c", "numpy", "pytest", "hypothesis", "threadpoolctl"]
    run(sys.executable, "-m", "pip", "-q", "install", *options, *packages)
    where = {"PYTHONPATH": str(site), "CC": "false"}
    run(*python, "-m", "mha_c", "demo", **where)
    print(f"arm64 Python 3.11 in qemu: demo; selftest: {run(*python, '-m', 'mha_c.selftest', **where)}", flush=True)
    print(f"arm64 Python 3.11 in qemu: {run(*python, *suite(EMULATED), **where)}", flush=True)


PARTS = {
    "x86": on_x86,
    "arm64": on_arm64,
    "musl": lambda: c_programs.build_and_run("musl"),
    "windows": lambda: c_programs.build_and_run("windows"),
    "browser": lambda: c_programs.build_and_run("browser"),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="all of them if none is named")
    chosen = parser.parse_args().parts or list(PARTS)
    os.environ.setdefault("ZIG_GLOBAL_CACHE_DIR", str(ROOT / "build" / "wheels" / "zig"))
    for part in chosen:
        PARTS[part]()
    if list(PARTS) == chosen:
        print("not run: macOS and 64-bit ARM Windows, for which there is no emulator;", end=" ")
        print("the Python of Windows, of musl and of browsers")


if __name__ == "__main__":
    main()
