"""The C core without Python: every tests/c/test_*.c is built with plain cc and run.

A test program is linked with all of csrc/ but csrc/python/, has tests/c and csrc on its include path, goes through
every instruction set of the CPU by itself, prints what failed and exits with 0 or not.  Given the argument
`quick` (by day, and under emulation and sanitizers) it leaves out what takes more than a second or two natively.
A line ` * build: ...` in its head adds words to the link; sources of csrc/ among them are compiled anew with these
words and take the place of the core's own.  ` * nightly: ...` has its arguments in `make nightly`;
` * not emulated: why` skips it under qemu; ` * leaks not counted: why` turns the search for leaks at its exit off.
Three builds: as shipped, of the objects that setup.py makes; with address and undefined-behaviour sanitizers; for
64-bit ARM, run under qemu, which is where the NEON kernels are tested on other machines.  `make coverage` has one of
its own instead, with counters.  Objects are kept in build/c-tests: only what changed is compiled again.
"""

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

import needs
from mha_c import _core

ROOT = Path(__file__).resolve().parents[2]
CORPUS = sorted((ROOT / "tests" / "fuzz" / "corpus").glob("*.txt"))
PROGRAMS = sorted(ROOT.glob("tests/c/test_*.c"))
FLAGS = "-std=c11 -ffp-contract=off -fno-math-errno -fno-trapping-math -fvisibility=hidden -pthread".split()
FLAGS += ["-Wall", "-Wextra"]
# NULL and the end of a known object are addresses where the address sanitizer stops: to ask for them once more at each
# access would double the time that the compiler takes for the widest kernels.
ASKED_ONCE = ["-fno-sanitize=null,object-size"]
BUILDS = {
    "native": (["cc"], ["-O3"], [], [] if needs.NIGHTLY else ["quick"]),
    "sanitized": (
        ["cc"],
        ["-O1", "-g1", "-DMHA_DEBUG", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", *ASKED_ONCE],
        [],
        ["quick"],
    ),
    "aarch64": (
        ["aarch64-linux-gnu-gcc"],
        ["-O3", "-static", "-DFIRST_ISA=MHA_ISA_NEON"],
        ["qemu-aarch64", "qemu-aarch64-static"],
        ["quick"],
    ),
}

# Kernels compiled with -Og.  Sanitized, those of vectors: their own instructions stay what they are, and -O1 takes
# minutes for the widest.  For ARM those that FIRST_ISA leaves out.
UNOPTIMISED = {"sanitized": "avx", "aarch64": "scalar"}
# Kernels taken as shipped beside a sanitized core, since a sanitizer takes 17 s for the widest: those that this
# processor has no instructions for, and by day all vectors.  They are the scalar ones' lines with other types, and what
# they read beside their operands stops at test_guards.c's pages.
AS_SHIPPED = tuple(name for name, offered in _core.isas() if name != "scalar" and not (offered and needs.NIGHTLY))
# Of the test programs themselves, not the core: by day a compiler takes longer for most than they run.  qemu takes as
# long for what -O3, three times as slow a compiler, makes.
OF_PROGRAMS = {"native": [] if needs.NIGHTLY else ["-O1"], "aarch64": ["-O2"]}
COUNTERS = os.environ.get("MHA_C_COUNTERS")  # the folder where `make coverage` looks for them
if COUNTERS:
    BUILDS = {"counted": (["cc"], ["-O0", "-g", "--coverage", "-DMHA_COVERAGE"], [], ["quick"])}


def run(command, **kwargs):
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    done = subprocess.run(command, timeout=needs.HANGS, **output, **kwargs)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\nexit status {done.returncode}\n{done.stdout[-8000:]}"
    return done.stdout


def said_in_head(program, key):
    """What follows ` * key: ` in the comment at the head of a test program, or None."""
    found = re.search(rf"^ \* {key}: (.*)$", program.read_text().partition("*/")[0], re.MULTILINE)
    return found and found.group(1)


def shipped_objects(folder):
    """What setup.py makes of the core: compiled now only where `make wheel` or `make dev` has left no newer object."""
    needs.module("setuptools")
    run([sys.executable, "setup.py", "-q", "build_ext", "--build-lib", folder], cwd=ROOT)
    (kept,) = ROOT.glob(f"build/temp.*-{sys.implementation.cache_tag}")
    return sorted(path for path in kept.glob("csrc/*/*.o") if path.parent.name != "python")


# For `make`, in a folder of objects: each is compiled again where it is older than a file that it was made from.  It
# comes into being whole, whatever ends the compiler.
RULES = """
VPATH := {folders}
all: {objects}
%.o: %.c ; @{compile} $(if $(filter {unoptimised}%,$*),-Og) -MMD -MT $@ -MF $*.d -c $< -o $@.$$$$ && mv $@.$$$$ $@
-include *.d
"""
# `make test` runs these tests, and its own words are not for a make that they start.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}


def compiled(name, sources, compile, unoptimised="none"):
    """The objects of these sources, in a folder of build/c-tests that is of this compiler, its words and these sources:
    made now only where they are not there as they should be."""
    objects = [f"{source.stem}.o" for source in sources]
    folders = sorted({str(source.parent) for source in sources})
    rules = RULES.format(folders=" ".join(folders), objects=" ".join(objects), unoptimised=unoptimised,
                         compile=shlex.join(map(str, compile)))  # fmt: skip
    words = run([compile[0], "--version"]) + rules
    all_kept = Path(COUNTERS or ROOT / "build" / "c-tests")
    folder = all_kept / f"{name}-{zlib.crc32(words.encode()):08x}"
    for other in {*all_kept.glob(f"{name}-*")} - {folder}:
        shutil.rmtree(other)
    folder.mkdir(parents=True, exist_ok=True)
    run([needs.program("make"), "-f", "-", f"-j{os.cpu_count()}"], cwd=folder, input=rules, env=ENVIRONMENT)
    return [folder / name for name in objects]


@pytest.fixture(scope="session", params=BUILDS)
def build(request, tmp_path_factory):
    """(function that links a test program, command prefix, arguments) of one build; compiles the core once."""
    compilers, options, emulators, arguments = BUILDS[request.param]
    if request.param == "aarch64" and platform.machine() in ("aarch64", "arm64"):
        pytest.skip("this machine is 64-bit ARM: the native build is the same")
    compiler = needs.program(*compilers)
    prefix = [needs.program(*emulators)] if emulators else []
    folder = Path(COUNTERS or tmp_path_factory.mktemp(request.param))
    strict = ["-Werror"] if needs.REQUIRE_ALL else []  # a newer compiler may warn of more
    flags = [compiler, *FLAGS, *strict, *options, f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'tests' / 'c'}"]
    sources = sorted(path for path in ROOT.glob("csrc/*/*.c") if path.parent.name != "python")

    shipped = shipped_objects(folder) if request.param in ("native", "sanitized") else []
    objects = [path for path in shipped if request.param == "native" or path.stem.startswith(AS_SHIPPED)]
    missing = [source for source in sources if source.stem not in {path.stem for path in objects}]
    if missing:
        objects += compiled(request.param, missing, flags, UNOPTIMISED.get(request.param, "none"))

    def link(program, *more):
        target, extra = folder / program.stem, shlex.split(said_in_head(program, "build") or "")
        sources = [ROOT / "csrc" / word if word.endswith(".c") else word for word in extra]
        own = {source.stem for source in sources if isinstance(source, Path)}
        rest = [path for path in objects if path.stem not in own]
        run([*flags, *OF_PROGRAMS.get(request.param, []), program, *more, *sources, *rest, "-o", target, "-lm"])
        return target

    yield link, prefix, arguments
    if not COUNTERS:
        shutil.rmtree(folder)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_program(build, program):
    link, prefix, arguments = build
    reason = said_in_head(program, "not emulated")
    if prefix and reason:
        pytest.skip(f"not emulated: {reason}")
    if needs.NIGHTLY and not arguments:
        arguments = shlex.split(said_in_head(program, "nightly") or "")
    leaks = 0 if said_in_head(program, "leaks not counted") else 1
    run([*prefix, link(program), *arguments], env={**os.environ, "ASAN_OPTIONS": f"detect_leaks={leaks}"})


@pytest.mark.skipif(not needs.NIGHTLY, reason="another compiler, and a build of its own: make nightly")
def test_nothing_is_added_to_null(tmp_path):
    """gcc's sanitizer lets NULL + offset pass, clang's does not: the sources that reckon with addresses most.

    A trap ends the program where it happens: clang's library, which would tell more, is a package of its own.
    """
    sources = [
        ROOT / "csrc" / name
        for name in ("kernels/scalar_f32.c", "layer/linear.c", "layer/layer.c", "attention/backward.c")
    ]
    checks = [needs.program("clang"), "-O1", "-fsanitize=pointer-overflow", "-fsanitize-trap=all", *FLAGS[:-2]]
    checks += [f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'tests' / 'c'}"]
    rest = [path for path in shipped_objects(tmp_path) if path.stem not in {source.stem for source in sources}]
    checked = compiled("null", sources, checks)
    for name in "test_slices", "test_projections", "test_backward":
        program, target = ROOT / "tests" / "c" / f"{name}.c", tmp_path / name
        run([*checks, program, *checked, *rest, "-o", target, "-lm"])
        run([target, "quick"])


def test_systems_of_32_bits_park_on_a_condition():
    """Their old futex call takes another timespec than today's: what it then waits for is no time at all."""
    header = ["-include", ROOT / "csrc" / "runtime" / "threads_posix.h", "-x", "c", os.devnull]
    flags = ["-std=c11", "-D_GNU_SOURCE", f"-I{ROOT / 'csrc' / 'runtime'}", "-E", "-dM"]
    parks = {}
    for width in "-D__LP64__=1", "-U__LP64__":
        macros = run([needs.program("cc"), *flags, width, *header])
        found = re.search(r"^#define MHA_PARK_ON_FUTEX (\d)$", macros, re.MULTILINE)
        parks[width] = found and found[1]
    assert parks == {"-D__LP64__=1": "1" if sys.platform == "linux" else "0", "-U__LP64__": "0"}


def test_there_is_a_corpus_for_every_fuzz_target():
    assert {path.stem for path in CORPUS} == {p.stem[5:] for p in (ROOT / "tests" / "fuzz").glob("fuzz_*.c")}


@pytest.mark.parametrize("build", ["counted" if COUNTERS else "sanitized"], indirect=True)
@pytest.mark.parametrize("corpus", CORPUS, ids=lambda path: path.stem)
def test_fuzz_corpus(build, corpus):
    """The inputs that fuzzing found worth keeping, run again; `make fuzz` looks for new ones."""
    target, replay = (ROOT / "tests" / "fuzz" / name for name in (f"fuzz_{corpus.stem}.c", "replay.c"))
    # A target takes what it needs of headers that the programs share.
    run([build[0](target, replay, "-Wno-unused-function")], input=corpus.read_text())
