"""Who may know whom: reads the include and import lines of the sources and proves the arrows of CONTRIBUTING.md."""

import ast
import graphlib
import re
import sys
from pathlib import Path

import pytest

import children

ROOT = Path(__file__).resolve().parents[2]
CSRC, PACKAGE = ROOT / "csrc", ROOT / "mha_c"

# --- C: for each kind of file, what it may include (full match) ------------------------------------

MATHS = r"<(stddef|stdint|assert|math|string|float)\.h>"
VECTORS = r"<(immintrin|arm_neon|arm_sve|wasm_simd128)\.h>"
# Rooms from the bottom up: a file includes headers of its own room by their bare names, and of the rooms named here.
RUNTIME, KERNELS = r'"runtime/(common|scratch|threads|threads_interrupt)\.h"', r'"kernels/dispatch\.h"'
OWN = r'"\w+\.h"'
C_RULES = [
    (r"mha\.h", [r"<(stddef|stdint)\.h>"]),
    (r"mha_explain\.h", [OWN]),
    # torch's own threads: what is loaded, and that a region's end can be left out
    (
        r"python/torch/(bound|team)\.[ch]",
        [r'"(team|python/args)\.h"', r"<(dlfcn|link|pthread|setjmp|stdatomic|stddef|stdint|string)\.h>"],
    ),
    # torch's own shortcuts, which know the binding
    (r"python/torch/\w+\.c", [r'"python/(args|layer_call)\.h"', r"<(stdatomic|stdint)\.h>"]),
    # the binding: Python, NumPy, the C API, and headers of its own folder; nothing else of the core
    (r"python/\w+\.[ch]", [OWN, r"<Python\.h>", r"<numpy/\w+\.h>", r"<(math|string|stddef|stdint|limits)\.h>"]),
    # the only files that talk to the system: memory, processor, threads
    (r"runtime/scratch\.[ch]", [OWN, r"<(stdlib|stddef|stdint)\.h>"]),
    (r"runtime/cpu\.[ch]", [OWN, r"<(cpuid|stddef|stdint)\.h>", MATHS]),
    (
        r"runtime/threads\w*\.[ch]",
        [
            OWN,
            r"<(pthread|sched|unistd|time|signal|fenv|errno|stdatomic|stdint|fcntl|limits|stdlib|stdbool|sys/\w+|windows)\.h>",
            MATHS,
        ],
    ),
    (r"runtime/common\.h", [r"<(stddef|stdint|assert)\.h>"]),
    (r"runtime/status\.c", [OWN]),
    # the tables: the contract of kernels and common.h, one vocabulary, the texts
    (r"kernels/\w+_f(32|64)\.c", [OWN, r'"texts\.inc"']),
    (r"kernels/texts\.inc", [r'"\w+\.inc"']),
    (r"kernels/\w+\.inc", []),  # the algorithms: the vocabulary only
    (r"kernels/kernels\.h", [r"<(stddef|stdint)\.h>"]),
    (r"kernels/simd_\w+\.h", [r'"simd_number\.h"', r'"simd_words\.inc"', r'"runtime/common\.h"', MATHS, VECTORS]),
    (r"kernels/dispatch\.[ch]", [OWN, r'"runtime/cpu\.h"', MATHS]),
    (r"attention/\w+\.[ch]", [OWN, RUNTIME, KERNELS, MATHS]),
    (r"layer/\w+\.[ch]", [OWN, RUNTIME, KERNELS, r'"attention/\w+\.h"', MATHS]),
]
C_FILES = sorted(path for pattern in ("**/*.c", "**/*.h", "**/*.inc") for path in CSRC.glob(pattern))
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+(<[^>]+>|"[^"]+")', re.MULTILINE)
# Words of C that only one place may use; the core neither prints nor ends the process nor reads the environment.
OUTSIDE_C = re.compile(
    r"\b(f?printf|puts|abort|exit|getenv|setjmp|longjmp|omp_\w+|cblas_\w+|PyObject|Py_\w+|npy_\w+)\b"
)
ONLY_SCRATCH = re.compile(r"\b(malloc|calloc|realloc|free|aligned_alloc|posix_memalign|alloca)\s*\(")
COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)


def label(path):
    return str(path.relative_to(ROOT))


def test_there_is_something_to_read():
    assert len(C_FILES) > 20 and len(PYTHON_FILES) > 8


@pytest.mark.parametrize("path", C_FILES, ids=label)
def test_includes(path):
    name = path.relative_to(CSRC).as_posix()
    allowed = next(allowed for pattern, allowed in C_RULES if re.fullmatch(pattern, name))
    for include in INCLUDE.findall(path.read_text()):
        assert any(re.fullmatch(rule, include) for rule in allowed), f"{name} includes {include}"
        if include[0] == '"':  # a bare name is a neighbour; only the API stands above the rooms
            target = include[1:-1]
            known = "/" in target or target in ("mha.h", "mha_explain.h") or (path.parent / target).is_file()
            assert known, f"{name} includes {include}"


# Inside these folders, from the bottom up: a file calls functions of files before it, and includes their headers.
INSIDE = {
    "attention": "visible problem plan room job walk operands blocks rows scores values empty_rows weights columns "
    "forward backward_tile score_grads backward attention dropout masked_softmax",
    "layer": "turn linear linear_pack linear_append linear_backward needed layer slices layer_backward explain",
}


def calls_within(folder):
    """{file of the folder: files of it whose functions it calls}."""
    texts = {path.stem: COMMENT.sub("", path.read_text()) for path in (CSRC / folder).glob("*.c")}
    home = {name: stem for stem, text in texts.items() for name in re.findall(r"^(\w+)\(", text, re.MULTILINE)}
    called = {stem: {home.get(word) for word in re.findall(r"\b(?:mha|py)_\w+", text)} for stem, text in texts.items()}
    return {stem: found - {stem, None} for stem, found in called.items()}


@pytest.mark.parametrize("folder", sorted({path.parent.relative_to(CSRC).as_posix() for path in CSRC.glob("*/**/*.c")}))
def test_no_two_files_of_a_folder_call_each_other_in_a_circle(folder):
    assert len(list(graphlib.TopologicalSorter(calls_within(folder)).static_order())) >= 3


@pytest.mark.parametrize("folder", INSIDE)
def test_files_of_a_folder_know_those_below_them(folder):
    order = INSIDE[folder].split()
    assert {path.stem for path in (CSRC / folder).glob("*.[ch]")} == set(order)
    places = {stem: place for place, stem in enumerate(order)}
    for stem, called in calls_within(folder).items():
        assert [other for other in called if places[other] > places[stem]] == [], stem
    for header in (CSRC / folder).glob("*.h"):
        own = [name[1:-3] for name in INCLUDE.findall(header.read_text()) if "/" not in name and name[0] == '"']
        assert [name for name in own if places.get(name, -1) > places[header.stem]] == [], header.name


@pytest.mark.parametrize("path", [p for p in C_FILES if "python" not in p.parts], ids=label)
def test_the_core_keeps_to_itself(path):
    text = COMMENT.sub("", path.read_text())
    assert not OUTSIDE_C.findall(text)
    if not path.name.startswith(("scratch.", "threads")):
        assert not ONLY_SCRATCH.findall(text)


@pytest.mark.parametrize("path", sorted(CSRC.glob("kernels/*_f??.c")), ids=label)
def test_an_isa_uses_one_vocabulary(path):
    vocabularies = {include for include in INCLUDE.findall(path.read_text()) if include.startswith('"simd_')}
    isa, _, _ = path.stem.partition("_")
    assert vocabularies == {f'"simd_{isa}.h"'}


# --- Python: a module imports only what stands before it in this list ------------------------------

ORDER = [
    ("_core", "_no_core", "_types"),
    ("errors", "_arguments.names", "_language"),
    ("_arguments.scalars",),
    ("_arguments.core_refusals",),
    ("_arguments.arrays", "_arguments.calls", "_layer.kept_weights"),
    ("_arguments.masks",),
    ("_layer.viewable", "_layer.lacks", "_layer.description"),
    ("config",),
    ("masking", "linear"),
    ("_layer.module", "_decoder.span"),
    ("positions",),
    ("_arguments.constructors", "_arguments.options"),
    ("_gradients", "_summary"),
    ("functional",),
    ("_reference",),
    ("_decoder.caches", "_layer.plan"),
    ("_decoder.rolling",),
    ("_layer.call",),
    ("_decoder.steps",),
    ("layers", "variants", "similarity", "grouped"),
    ("dask",),
    ("selftest",),
    ("viz", "_recognize"),
    ("_layers_with_heads", "_explain", "_head_tables"),
    ("_patterns",),
    ("_cost",),
    ("heads",),
    ("torch",),
    ("d2l",),
    ("teach",),  # nothing below imports it
    ("__init__",),
    ("demo", "_verdict"),
    ("__main__",),
]
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}
PYTHON_FILES = sorted(PACKAGE.glob("**/*.py"))
STANDARD = getattr(sys, "stdlib_module_names", frozenset())  # Python 3.10 and later know
# package: the one module that may import it
FOREIGN = {"torch": "torch", "matplotlib": "viz", "IPython": "viz", "threadpoolctl": "config", "dask": "dask"}


def module_of(parts):
    """What ORDER calls the module, or what it stands in, that has these parts of a name below mha_c."""
    names = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((name for name in names if name in RANK), None)


def is_type_checking(node):
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imported_names(path, of_types=False):
    """Absolute dotted names of all imports, inside functions too; of_types: those for type checkers as well."""
    package = ("mha_c", *path.relative_to(PACKAGE).parent.parts)

    def visit(node):
        if is_type_checking(node) and not of_types:
            return
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            base = ".".join(part for part in (base, node.module) if part)
            yield from (f"{base}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            yield from visit(child)

    return list(visit(ast.parse(path.read_text())))


@pytest.mark.skipif(not STANDARD, reason="needs Python 3.10")
@pytest.mark.parametrize("path", PYTHON_FILES, ids=label)
def test_imports(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    if parts[1:] == ("__init__",) and not imported_names(path):
        return  # the head of a folder
    module = module_of(parts)
    assert module, f"say in ORDER of {Path(__file__).name} where {label(path)} stands"
    for name in imported_names(path):
        top, *rest = name.split(".")
        if top == "mha_c":
            target = module_of(rest) or "__init__"  # mha_c.Name: through the public face
            if target != module and name != "mha_c.__version__":
                assert RANK[target] < RANK[module], f"{label(path)} imports {name}"
        elif top != "numpy":
            owner = FOREIGN.get(top)
            assert top in STANDARD or owner == module, f"{label(path)} imports {name}"


def test_no_module_is_reached_by_the_name_of_its_file():
    """What one part tells others without being imported stands below both."""
    reached = re.compile(r"sys\.modules\b[^\n]*mha_c")
    assert [label(path) for path in PYTHON_FILES if reached.search(path.read_text())] == []


def imports_of_modules():
    """For each module of mha_c, those of them that it imports: for types, and inside functions, too."""
    names = {path: ".".join(("mha_c", *path.relative_to(PACKAGE).with_suffix("").parts)) for path in PYTHON_FILES}
    names = {path: name[: -len(".__init__")] if path.stem == "__init__" else name for path, name in names.items()}
    found = {}
    for path, name in names.items():
        imported = imported_names(path, of_types=True)
        modules = {x if x in names.values() else x.rpartition(".")[0] for x in imported}
        found[name] = modules.intersection(names.values()) - {name, "mha_c"}  # mha_c._core, which is no file of these
    return found


def folder_of(name, folders):
    """The place of the folder of `mha_c.teach` that a module stands in, among these; None if it is in none of them."""
    top, _, rest = name.partition("mha_c.teach.")
    return folders.index(rest.partition(".")[0]) if not top and rest.partition(".")[0] in folders else None


def test_no_circle_of_imports():
    found = imports_of_modules()
    assert "mha_c.torch.layers" in found["mha_c.torch._readers.known"] and "mha_c._types" in found["mha_c.layers"]
    assert len(list(graphlib.TopologicalSorter(found).static_order())) > 80
    # Of teach's folders from the bottom up: a module imports those of its own and of those before it.
    folders = "words book asking why checks grader".split()
    for name, imported in found.items():
        place = folder_of(name, folders)
        assert [x for x in imported if place is not None and (folder_of(x, folders) or 0) > place] == [], name
    # What several processes do stands on top: nobody below knows of it.
    top = "mha_c.torch.distributed"
    assert all(name.startswith(top) for name, imported in found.items() if any(x.startswith(top) for x in imported))


# Two classes of one name, which a reader may take for one another: a NumPy class and its twin as a torch module.
TWINS = {
    *"AISummer AdditiveAttention CausalAttention DotProductAttention GQAAttention KernelAttention".split(),
    *"KeyValueCache MultiHeadAttention MultiHeadSelfAttentionAISummer MultiHeadedSelfAttention".split(),
    *"PositionalEncoding ProjectedKeyValues RotatesHeads SelfAttentionAISummer".split(),
}


def test_a_word_names_one_class():
    homes = {}
    for path in PYTHON_FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name.lstrip("_"), []).append(path.relative_to(PACKAGE))
    assert len(homes) > 200
    several = {name: paths for name, paths in homes.items() if len(paths) > 1}
    assert {name: paths for name, paths in several.items() if name not in TWINS} == {}
    assert several.keys() == TWINS
    assert all(sorted(path.parts[0] == "torch" for path in paths) == [False, True] for paths in several.values())


@pytest.mark.skipif(not STANDARD, reason="needs Python 3.10")
def test_import_brings_numpy_and_nothing_else():
    code = (
        "import sys, numpy, numpy.typing; before = set(sys.modules); import mha_c; "
        "new = {name.partition('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names); "
        "lazy = [n for n in ('viz', 'torch', 'd2l', 'heads', 'dask') if f'mha_c.{n}' in sys.modules]; "
        "print(sorted(new), lazy)"
    )
    assert children.python("-c", code).stdout.strip() == "['mha_c'] []"


# --- Benchmarks and examples: public names only ----------------------------------------------------


@pytest.mark.parametrize(
    "path", [*sorted((ROOT / "benchmarks").glob("*.py")), *sorted((ROOT / "examples").glob("*.py"))], ids=label
)
def test_users_of_the_package_use_public_names(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mha_c"):
            assert not any(alias.name.startswith("_") for alias in node.names)
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            assert not any("mha_c._" in name for name in names)
