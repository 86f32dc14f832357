"""Builds the one extension module, mha_c._core; everything else is in pyproject.toml.

One binary serves CPython 3.9 and every later version (the limited API, abi3), and one every Python without the global
lock from 3.15 on (abi3t); one before 3.15, which has no stable ABI, gets a binary for its own version.

Switches, read from the environment: MHA_C_DEBUG, MHA_C_SANITIZE, MHA_C_TSAN, MHA_C_COVERAGE (SWITCHES; each builds in a
folder of its own); MHA_C_REPOSITORY, the repository's address, for the links of a published package; MHA_C_OBJECTS, a
folder whose build/ keeps the objects for the next build, where this one's is thrown away.
"""

import os
import re
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from glob import glob

import numpy
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# Never -ffast-math and no contraction: NaN, infinities and the order of sums mean something here.
# Never -march: every instruction set is compiled in target regions and chosen at import.
FLOATS = "-ffp-contract=off -fno-math-errno -fno-trapping-math -fno-tree-slp-vectorize"
BASE = f"-O3 -std=c11 {FLOATS} -fvisibility=hidden -pthread -g0".split()
# The address sanitizer stops at NULL and at an object's end; once more at each access doubles the compiler's minutes.
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-sanitize=null,object-size"]
SWITCHES = {
    "MHA_C_DEBUG": (["-O1", "-g", "-UNDEBUG", "-DMHA_DEBUG", "-Wall", "-Wextra"], []),
    "MHA_C_SANITIZE": (["-O1", "-g1", "-UNDEBUG", "-DMHA_DEBUG", "-fno-omit-frame-pointer", *SANITIZERS], SANITIZERS),
    "MHA_C_TSAN": (["-O1", "-g1", "-UNDEBUG", "-DMHA_DEBUG", "-fsanitize=thread"], ["-fsanitize=thread"]),
    "MHA_C_COVERAGE": (["-O0", "-g", "--coverage", "-DMHA_COVERAGE"], ["--coverage"]),
}
LINK = {"linux": ["-Wl,-z,nodelete"], "win32": ["-lsynchronization"]}  # the latter: WaitOnAddress
OLDEST_PYTHON = (3, 9)  # pyproject's requires-python
# (a macro that chooses a stable ABI, the oldest Python that has it, the oldest NumPy that knows it)
ABI3, ABI3T = ("Py_LIMITED_API", OLDEST_PYTHON, "1_21"), ("Py_TARGET_ABI3T", (3, 15), "2_5")
STABLE_ABI = ABI3T if sysconfig.get_config_var("Py_GIL_DISABLED") else ABI3
LIMITED_API = sys.implementation.name == "cpython" and sys.version_info >= STABLE_ABI[1]
NUMPY = STABLE_ABI[2] if LIMITED_API else ABI3[2]  # of abi3 the lowest NumPy of pyproject's dependencies
# Windows' pyconfig.h tells the sizes only to those who say so themselves, unless they are MSVC.
WINDOWS = [("MS_WINDOWS", ""), ("MS_WIN32", ""), ("MS_WIN64", "")] if sys.platform == "win32" else []
# Built for a browser, Python runs on another system than it builds for.
SYSTEM = "emscripten" if sysconfig.get_platform().endswith("wasm32") else sys.platform
PAGES = {"Source": "", "Issues": "/issues", "Changelog": "/blob/HEAD/CHANGELOG.md"}
ADDRESS = "ADDRESS-OF-THE-REPOSITORY"  # in the README, until `make address` has filled it in
with open("README.md", encoding="utf-8") as file, open("CITATION.cff", encoding="utf-8") as cited:
    README, CITATION = file.read(), cited.read()
CITED = re.search(r'^repository-code: "(.*)"$', CITATION, re.MULTILINE)  # which `make address` writes
REPOSITORY = os.environ.get("MHA_C_REPOSITORY", CITED[1] if CITED else "").rstrip("/")
ACTIVE = [name for name in SWITCHES if os.environ.get(name, "0") not in ("", "0")]


def sorted_glob(*patterns):
    return sorted(path for pattern in patterns for path in glob(pattern))


def readme_for_the_index():
    """README.md where its files are not at hand: links become addresses in the repository, or words without one."""
    with open("pyproject.toml", encoding="utf-8") as project:
        version = re.search(r'^version = "(.*)"', project.read(), re.MULTILINE)[1]

    def absolute(link):
        picture, words, path = link.groups()
        if not REPOSITORY:
            return "" if picture else words
        return f"{picture}[{words}]({REPOSITORY}/{'raw' if picture else 'blob'}/v{version}/{path})"

    text = re.sub(r'<picture>.*?src="([^"]+)" alt="([^"]*)".*?</picture>', r"![\2](\1)", README)
    if REPOSITORY:  # without the paragraph that says what to write there
        text = re.sub(rf"^`{ADDRESS}` .*?\n\n", "", text, flags=re.MULTILINE | re.DOTALL).replace(ADDRESS, REPOSITORY)
    return re.sub(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)]+)\)", absolute, text)


def is_current(target):
    """Whether the object is newer than this file and than all that the compiler says (-MMD) it was made from."""
    rule = f"{os.path.splitext(target)[0]}.d"
    if not (os.path.exists(target) and os.path.exists(rule)):
        return False
    with open(rule, encoding="utf-8") as file:
        words = re.findall(r"(?:\\ |\S)+", file.read().replace("\\\n", " ").partition(": ")[2])
    sources = ["setup.py", *(word.replace("\\ ", " ") for word in words)]
    return all(map(os.path.exists, sources)) and os.path.getmtime(target) > max(map(os.path.getmtime, sources))


class BuildExt(build_ext):
    """Compiles the sources side by side, and only those that changed or that include what did."""

    def finalize_options(self):
        super().finalize_options()
        self.build_temp = os.path.join(os.environ.get("MHA_C_OBJECTS", ""), "-".join([self.build_temp, *ACTIVE]))

    def copy_extensions_to_source(self):
        """In place: a module left by another build of this Python may come first when imported, so it goes."""
        super().copy_extensions_to_source()
        for ext in self.extensions:
            built = self.get_ext_fullpath(ext.name)
            for path in glob(os.path.join(os.path.dirname(built), "_core.*.so")):
                if os.path.basename(path) != os.path.basename(built):
                    os.remove(path)

    def build_extension(self, ext):
        if self.compiler.compiler_type == "msvc":
            raise SystemExit(
                "mha_c: MSVC cannot compile the kernels.  Take a wheel file (`make wheels` builds Windows' on Linux), "
                "or build with clang or gcc: python setup.py build_ext --compiler=mingw32"
            )
        compile_sources = self.compiler.compile

        def compile_one(source, options):
            (target,) = self.compiler.object_filenames([source], output_dir=options["output_dir"])
            if is_current(target) and not self.force:
                return [target]
            return compile_sources([source], **{**options, "extra_postargs": [*options["extra_postargs"], "-MMD"]})

        def compile_all(sources, **options):
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                objects = list(pool.map(lambda source: compile_one(source, options), sources))
            return [target for targets in objects for target in targets]

        self.compiler.compile = compile_all
        super().build_extension(ext)


core = Extension(
    "mha_c._core",
    sources=sorted_glob("csrc/*/*.c", "csrc/*/*/*.c"),
    depends=["setup.py", *sorted_glob("csrc/*.h", "csrc/*.inc", "csrc/*/*.h", "csrc/*/*.inc")],
    include_dirs=["csrc", numpy.get_include()],
    define_macros=[
        *([(STABLE_ABI[0], "0x{:02X}{:02X}0000".format(*STABLE_ABI[1]))] if LIMITED_API else []),
        *WINDOWS,
        ("NPY_NO_DEPRECATED_API", "NPY_1_21_API_VERSION"),
        ("NPY_TARGET_VERSION", f"NPY_{NUMPY}_API_VERSION"),
    ],
    extra_compile_args=BASE + [flag for name in ACTIVE for flag in SWITCHES[name][0]],
    # -lm: the pool reads the floating-point mode.  nodelete: parked threads live as long as the process.
    extra_link_args=["-pthread", "-lm", *LINK.get(SYSTEM, [])]
    + [flag for name in ACTIVE for flag in SWITCHES[name][1]],
    py_limited_api=LIMITED_API,
)

setup(
    ext_modules=[core],
    long_description=readme_for_the_index(),
    long_description_content_type="text/markdown",
    project_urls={name: f"{REPOSITORY}{path}" for name, path in PAGES.items() if REPOSITORY},
    cmdclass={"build_ext": BuildExt},
    options={"bdist_wheel": {"py_limited_api": "cp{}{}".format(*STABLE_ABI[1])}} if LIMITED_API else {},
)
