"""What is shipped, what the extension shows to the outside, and that importing it changes nothing."""

import importlib.machinery
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import children
import mha_c
import needs
from mha_c import _core

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(mha_c.__file__).parent
IN_PLACE = PACKAGE == ROOT / "mha_c"


def in_subprocess(code, **environment):
    """Runs code in a fresh interpreter and returns what it printed, as JSON."""
    return json.loads(children.python("-c", code, **environment).stdout)


def distribution():
    if IN_PLACE:
        pytest.skip("an in-place build has no metadata (make test installs the wheel)")
    return importlib.metadata.distribution("mha_c")


def test_make_test_runs_the_installed_wheel():
    assert not IN_PLACE or not needs.REQUIRE_ALL


def test_metadata():
    metadata = distribution().metadata
    assert metadata["Name"].replace("-", "_") == "mha_c"
    assert metadata["Version"] == mha_c.__version__
    assert metadata["License-Expression"] == "BSD-3-Clause"
    assert metadata["Requires-Python"] == ">=3.9"


def test_numpy_is_the_only_dependency():
    required = [line for line in distribution().requires if "extra ==" not in line]
    assert required == ["numpy>=1.21"]


@pytest.mark.parametrize(
    ("python", "macro", "tag", "numpy"),
    [
        ("3.9", ["Py_LIMITED_API", "0x03090000"], "cp39", "1_21"),
        ("3.15", ["Py_LIMITED_API", "0x03090000"], "cp39", "1_21"),
        ("3.14t", None, None, "1_21"),
        ("3.15t", ["Py_TARGET_ABI3T", "0x030F0000"], "cp315", "2_5"),
    ],
)
def test_which_stable_abi_a_python_gets(python, macro, tag, numpy):
    """NPY_TARGET_VERSION, which decides on which NumPy the binary runs, is that of pyproject's dependencies; abi3t has
    a later one, but no older NumPy has wheels for these Pythons either."""
    needs.module("setuptools")
    asked = [sys.executable, "-W", "ignore", "tools/wheels/extension.py", python]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True)
    extension = json.loads(done.stdout)
    macros = dict(extension["define_macros"])
    chosen = [[name, value] for name, value in macros.items() if name in ("Py_LIMITED_API", "Py_TARGET_ABI3T")]
    assert chosen == ([macro] if macro else []) and extension["py_limited_api"] is bool(macro)
    assert extension["tag"] == tag
    assert macros["NPY_TARGET_VERSION"] == f"NPY_{numpy}_API_VERSION"


@pytest.mark.parametrize("repository", ["", "https://example.org/mha_c"])
def test_readme_of_the_package_index_has_no_dead_links(repository):
    """There are no files beside it there: links are addresses, of files that exist, or words."""
    needs.module("setuptools")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "setup.py", "-q", "--long-description"],
        capture_output=True, text=True, check=True, cwd=ROOT, env={**os.environ, "MHA_C_REPOSITORY": repository},
    )  # fmt: skip
    cited = re.search(r'^repository-code: "(.*)"$', (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    install = f"pip install git+{cited[1] if cited else repository or 'ADDRESS-OF-THE-REPOSITORY'}\n"
    ours = re.compile(rf"{re.escape(repository)}/(?:blob|raw)/v[\d.]+\w*/(.*)" if repository else "(?!)")
    links = re.findall(r"\]\(([^)]*)\)", done.stdout)
    assert links and all(link.startswith("https://") for link in links)
    assert install in done.stdout or "pip install mha_c\n" in done.stdout  # the latter after the first release
    paths = [found[1] for found in map(ours.match, links) if found]
    assert len(paths) >= (8 if repository else 0)
    assert not [path for path in paths if not (ROOT / path.partition("#")[0]).exists()]


def test_files_of_the_package():
    sources = {p.relative_to(ROOT / "mha_c") for p in (ROOT / "mha_c").rglob("*") if p.is_file()}
    kinds = (".py", ".pyi", ".js", ".css", ".html", ".json", ".txt", ".wasm")
    wanted = {p for p in sources if p.suffix in kinds or p.name == "py.typed"}
    assert Path("py.typed") in wanted and Path("_core.pyi") in wanted
    assert not [str(p) for p in wanted if not (PACKAGE / p).is_file()]


def test_wheel_holds_the_package_and_nothing_else():
    wheels = list((ROOT / "build" / "wheel").glob("*.whl"))
    if not wheels:
        needs.skip_or_fail("needs build/wheel/*.whl (make wheel)")
    with zipfile.ZipFile(wheels[0]) as wheel:
        names = wheel.namelist()
    assert {name.split("/")[0] for name in names} <= {"mha_c", f"mha_c-{mha_c.__version__}.dist-info"}
    assert sum(name.startswith("mha_c/_core.") and name.endswith((".so", ".pyd")) for name in names) == 1
    assert not [name for name in names if name.endswith((".c", ".h", ".inc", ".o", ".pyc"))]
    assert wheels[0].stat().st_size < 2_000_000


def test_one_binary_serves_every_python():
    """The limited API of the oldest Python: with it 3.9's wheel is 3.13's.  Without the global lock there is one from
    3.15 on."""
    assert 'requires-python = ">=3.9"' in (ROOT / "pyproject.toml").read_text()
    free_threaded = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
    abi = "abi3" if not free_threaded else "abi3t" if sys.version_info >= (3, 15) else None
    assert (Path(_core.__file__).name.split(".")[1].partition("-")[0] in (abi, "pyd")) is bool(abi)
    for wheel in (ROOT / "build" / "wheel").glob("*.whl"):
        assert (f"-{'cp315-abi3.abi3t' if abi == 'abi3t' else 'cp39-abi3'}-" in wheel.name) is bool(abi)


def test_symbols():
    """Only PyInit__core goes out; nothing prints, exits, or brings OpenMP or BLAS in; no ldmxcsr."""
    for tool in ("nm", "objdump"):
        needs.program(tool)
    if any("sanitize" in part or "coverage" in part for part in PACKAGE.parts):
        pytest.skip("instrumented build")
    spec = importlib.util.spec_from_file_location("check_symbols", ROOT / "tools" / "check_symbols.py")
    check_symbols = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(check_symbols)
    assert list(check_symbols.breaches(_core.__file__)) == []


PROCESS_STATE = """
import ctypes, json, os, resource, signal, sys, threading, warnings
import numpy as np

def state():
    libm = ctypes.CDLL(None)
    tiny = np.float32(1e-45)
    status = open("/proc/self/status").read() if os.path.exists("/proc/self/status") else ""
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return {
        "rounding": libm.fegetround(),
        "subnormals": [float(tiny * np.float32(1)), float(np.float32(2e-38) * np.float32(0.25))],
        "numpy errors": np.geterr(),
        "threads": fields.get("Threads"),
        "affinity": fields.get("Cpus_allowed"),
        "signals": [fields.get(name) for name in ("SigBlk", "SigIgn", "SigCgt")],
        "handlers": [str(signal.getsignal(s)) for s in sorted(signal.valid_signals())],
        "environment": dict(os.environ),
        "limits": [resource.getrlimit(r) for r in (resource.RLIMIT_STACK, resource.RLIMIT_AS, resource.RLIMIT_NOFILE)],
        "locale": __import__("locale").setlocale(0),
        "cwd": os.getcwd(),
        "python threads": threading.active_count(),
        "filters": [str(f) for f in warnings.filters],
        "path": sys.path[:],
        "hooks": [str(h) for h in (sys.excepthook, sys.displayhook, sys.meta_path)],
    }
before = state()
import mha_c
imported = state()
x = np.ones((2, 4, 8), np.float32)
mha_c.MultiHeadAttention(8, 2, 0.1)(x, x, x, [3, 2])
after = state()
print(json.dumps([
    {key: [before[key], now[key]] for key in before if now[key] != before[key]} for now in (imported, after)
]))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="reads POSIX state")
def test_import_and_a_small_call_change_nothing_in_the_process():
    """Floating-point mode, threads, signals, environment, limits, warnings: as they were."""
    assert in_subprocess(PROCESS_STATE) == [{}, {}]


def test_every_isa_of_this_machine_type_is_compiled():
    machine = os.uname().machine if hasattr(os, "uname") else ""
    names = [name for name, _ in _core.isas()]
    expected = {"x86_64": ["scalar", "avx2", "avx512"], "aarch64": ["scalar", "neon"]}.get(machine)
    if expected:
        assert names == expected


def test_readme_example_prints_what_the_readme_says(capsys, tmp_path, monkeypatch):
    """Runs README.md's box that writes a page, on NumPy alone, and compares with the lines behind #> at its end."""
    blocks = re.findall(r"```(\w*)\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    code = next(code for language, code in blocks if language == "python" and "attention.html" in code)
    printed = "".join(line[3:] for line in code.splitlines(True) if line.startswith("#> "))
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out.strip() == printed.strip() and (tmp_path / "attention.html").exists()


# --- Importing where there is no core -----------------------------------------------------------------


@pytest.fixture
def without_core(tmp_path):
    """A folder with the package but for the compiled core, and the words of the import there."""
    shutil.copytree(PACKAGE, tmp_path / "mha_c", ignore=shutil.ignore_patterns("*.so", "*.pyd", "__pycache__"))

    def words():
        done = subprocess.run([sys.executable, "-c", "import mha_c"], capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 1
        *_, last = done.stderr.strip().splitlines()
        assert last.startswith("ImportError: ") and "circular" not in done.stderr
        return last

    return tmp_path, words


def test_import_in_the_source_folder_says_so(without_core):
    folder, words = without_core
    (folder / "csrc").mkdir()
    (folder / "csrc" / "mha.h").touch()
    for text in ("imported from its source folder", str(folder), "leave that folder", "make dev"):
        assert text in words()
    (folder / "mha_c" / "_core.cpython-30-none.so").touch()
    assert "built for another Python or system: _core.cpython-30-none.so" in words()


def test_import_of_a_broken_installation_says_so(without_core):
    folder, words = without_core
    for text in ("the compiled core of mha_c is missing", str(folder), "reinstall"):
        assert text in words()


def test_a_core_that_does_not_load_is_the_loaders_to_explain(without_core):
    folder, words = without_core
    (folder / "mha_c" / f"_core{importlib.machinery.EXTENSION_SUFFIXES[0]}").write_bytes(b"no library")
    assert "missing" not in words() and "_core" in words()
