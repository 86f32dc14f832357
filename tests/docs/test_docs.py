"""The pages for users are true: their Python runs and prints what they say, and what they name exists."""

import doctest
import importlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import boxes as boxes_alone
import children
import distributed_script
import mha_c
import needs

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(mha_c.__file__).parent
PAGES = [ROOT / name for name in ("README.md", "SECURITY.md", "CONTRIBUTING.md", "benchmarks/README.md")]
PAGES += sorted((ROOT / "docs").glob("*.md"))
TRANSLATED = [ROOT / "README.zh-CN.md", *sorted((ROOT / "docs").glob("*/*.md"))]  # their boxes: test_translations.py
PAGES += TRANSLATED
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RANK_0_SPEAKS = """
import os, sys
if os.environ["RANK"] != "0":
    sys.stdout = open(os.devnull, "w")
"""
GIVEN = {  # pages whose blocks belong together, and what they take for granted
    "docs/scale-out.md": RANK_0_SPEAKS,
    "SECURITY.md": """
import numpy as np, mha_c, torch
layer = mha_c.MultiHeadAttention(4, 4, 4, 8, 2, 0.1)
np.savez("state.npz", **layer.state_dict())
torch.save({name: torch.from_numpy(array) for name, array in layer.state_dict().items()}, "state.pt")
""",
}
TORCHRUN = "docs/scale-out.md"  # the page whose code is for two processes
NEXT = "--- next block ---"


def label(path):
    return path.relative_to(ROOT).as_posix()


def blocks(path):
    """(language, text) of each fenced block."""
    return BLOCK.findall(path.read_text(encoding="utf-8"))


def boxes(path):
    """[(code, what the page says it prints or None)]: a block without a language is what the one before it prints, and
    so are lines behind #> at its own end."""
    found, listed = [], blocks(path)
    for (language, text), (after, expected) in zip(listed, [*listed[1:], ("end", "")]):
        said = "".join(line[3:] or "\n" for line in text.splitlines(True) if line.startswith("#>"))
        if language == "python":
            found.append((text, said or (None if after else expected)))
    return found


def needed(codes):
    """Skips where a page needs more than there is."""
    for name in {name for code in codes for name in boxes_alone.named(code)}:
        needs.module(name)
    if any("d2l import" in code for code in codes):
        needs.d2l("1.0.3")


WITH_CODE = [path for path in PAGES if boxes(path) and path not in TRANSLATED]
TOGETHER = [path for path in WITH_CODE if label(path) in GIVEN]
ALONE = [path for path in WITH_CODE if path not in TOGETHER]


def test_there_are_pages_with_code():
    assert {"README.md", "docs/from-d2l.md", "docs/masks.md", "docs/check.md"} <= set(map(label, ALONE))
    assert sum(len(boxes(page)) for page in ALONE) > 40


@pytest.fixture(scope="module")
def pasted():
    """{code of a box: (its exit status, what it printed)}, of all pages."""
    return children.each_alone(
        sorted({code for page in ALONE for code, _ in boxes(page)}), "-W", "error", MPLBACKEND="agg"
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="boxes are run by fork")
@pytest.mark.parametrize("page", ALONE, ids=label)
def test_each_box_pasted_alone_in_an_empty_folder_prints_what_the_page_says(page, pasted):
    """In an environment with what the box names: torch, d2l, matplotlib.  `...` ends what is only begun."""
    needed([code for code, _ in boxes(page)])
    for code, wanted in boxes(page):
        status, said = pasted[code]
        assert status == 0, f"{code}\n{said}"
        if wanted is not None and wanted.endswith("\n...\n"):
            assert said.startswith(wanted[: -len("...\n")]), code
        elif wanted is not None:
            assert said == wanted, code


@pytest.mark.parametrize("page", ALONE, ids=label)
def test_lines_of_a_box_fit_a_projector(page):
    lines = [line for language, text in blocks(page) if language == "python" for line in text.splitlines()]
    assert [line for line in lines if len(line) > 88 and not line.startswith("#>")] == []


@pytest.mark.parametrize("page", TOGETHER, ids=label)
def test_code_runs_and_prints_what_the_page_says(page, tmp_path):
    """All Python of a page, one block after the other in one process."""
    codes, expected = zip(*boxes(page))
    needed([*codes, GIVEN[label(page)]])
    separated = f"\nprint({NEXT!r})\n".join([GIVEN[label(page)], *codes])
    folder, program = tmp_path / "empty", tmp_path / "page.py"
    folder.mkdir()
    if label(page) == TORCHRUN:
        program.write_text(separated, encoding="utf-8")
        statuses, said = distributed_script.begin([program], tmp_path / "printed")()
        assert statuses == [0, 0], said
    else:
        said = children.python("-W", "error", "-c", separated, cwd=folder).stdout
    _, *printed = said.split(NEXT + "\n")
    assert [said for said, wanted in zip(printed, expected) if wanted not in (None, said)] == []
    assert len(printed) == len(codes)


@pytest.mark.parametrize("page", PAGES, ids=label)
def test_what_a_page_names_exists(page):
    """Links, files, make's targets, and every name of the package."""
    text = page.read_text(encoding="utf-8")
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    assert [link for link in links if link and not (page.parent / link).exists()] == []
    files = re.findall(r"`((?:tests|tools|csrc|mha_c|examples|benchmarks|docs)/[\w/.-]+)`", text)
    assert [name for name in files if not (ROOT / name).exists()] == []
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"(?:`|^)make ([a-z][a-z-]*)", text, re.MULTILINE)
    assert [name for name in targets if not re.search(rf"^{name}( .*)?:", makefile, re.MULTILINE)] == []


@pytest.mark.parametrize("page", PAGES, ids=label)
def test_names_of_the_package_exist(page):
    missing = []
    text = re.sub(r"^```js\n.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for name in sorted(set(re.findall(r"(?<!window\.)(?<!ops\.)\bmha_c(?:\.\w+)+", text))):
        if name in ("mha_c.h", "mha_c.so"):
            continue
        if "torch" in name or "d2l" in name:
            needs.module("torch")
        value, path = mha_c, "mha_c"
        for part in name.split(".")[1:]:
            path += f".{part}"
            value = getattr(value, part, None) or (importlib.import_module(path) if part.islower() else None)
            if value is None:
                missing.append(name)
                break
    assert missing == []


# --- What can be had today -----------------------------------------------------------------------------

NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.md"))
FROM_THE_INDEX = re.compile(r"""pip install (?:-\S+ )*["']?mha_c(?:\[[\w,]+\])?(?![\w*-])""")


def released():
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## \d+\.\d+\.\d+ \((.*)\)$", changes, re.MULTILINE)
    assert versions
    return any(version != "not released" for version in versions)


def test_no_page_promises_what_is_not_there():
    """Before the first release nothing is in the package index, and a line that asks it says that this is to come."""
    promised = [
        (label(page), line)
        for page in [*PAGES, *NOTEBOOKS]
        for line in page.read_text(encoding="utf-8").splitlines()
        if FROM_THE_INDEX.search(line) and "Once released" not in line
    ]
    if released():
        assert ("README.md", "pip install mha_c") in promised, "RELEASING.md, step 7"
    else:
        assert promised == []


def test_the_lines_that_install_from_a_clone_end_with_the_package_that_was_installed(tmp_path):
    """What the page has behind `pip install .`, in a folder whose own mha_c has no core."""
    (lines,) = [text for language, text in blocks(ROOT / "docs" / "start.md") if text.startswith("pip install .")]
    clone = tmp_path / "clone"
    shutil.copytree(PACKAGE, clone / "mha_c", ignore=shutil.ignore_patterns("*.so", "*.pyd", "__pycache__"))
    behind = lines.partition("\n")[2].replace("python ", f"{shlex.quote(sys.executable)} ")
    done = subprocess.run(["sh", "-e", "-c", behind], cwd=clone, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("mha_c "), done.stderr
    children.python("-m", "mha_c", cwd=clone, status=1)  # or the lines need not leave the folder


def test_the_first_minute_ends_with_a_line_that_works(tmp_path):
    """The last line that `make demo` prints, typed in the clone, whose own folder mha_c has no core; and what Python
    says to those who type another one."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    recipe = makefile[makefile.index("\ndemo: ") :].split("\n\n", 1)[0].replace("\\\n", "")
    (printf,) = [line.strip("\t@ ") for line in recipe.splitlines() if "printf" in line]
    said = subprocess.run(["sh", "-c", printf], capture_output=True, text=True, check=True).stdout
    command = said.rstrip().splitlines()[-1].split()
    assert command[0] == ".venv/bin/python"
    clone = tmp_path / "clone"
    shutil.copytree(PACKAGE, clone / "mha_c", ignore=shutil.ignore_patterns("*.so", "*.pyd", "__pycache__"))
    (clone / "csrc").mkdir()
    (clone / "csrc" / "mha.h").touch()
    # -I leaves PYTHONPATH out as well.  Before what is installed here, behind the folder of the shell if that is there.
    where = (
        f"import sys; sys.path.insert(sys.path[0] == '', {str(PACKAGE.parent)!r}); import mha_c; print(mha_c.__file__)"
    )
    ways = {"cwd": clone, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, *command[1:], "-c", where], **ways)
    assert done.returncode == 0 and Path(done.stdout.strip()).parent == PACKAGE, done.stderr
    wrong = subprocess.run([sys.executable, "-c", "import mha_c"], **ways)
    assert "or start Python as `python -I`" in wrong.stderr
    (clone / ".venv" / "bin").mkdir(parents=True)
    (clone / ".venv" / "bin" / "python").touch()
    wrong = subprocess.run([sys.executable, "-c", "import mha_c"], **ways)
    assert f"start Python as `{clone / '.venv' / 'bin' / 'python'} -I`" in wrong.stderr


# --- Docstrings ---------------------------------------------------------------------------------------


def test_every_public_name_is_documented_as_numpydoc_asks():
    needs.module("numpydoc"), needs.module("torch"), needs.module("matplotlib"), needs.module("dask.array")
    spec = importlib.util.spec_from_file_location("docstrings", ROOT / "tools" / "docstrings.py")
    docstrings = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(docstrings)
    assert list(docstrings.all_complaints()) == []


MODULES = {
    re.sub(r"\.__init__$", "", ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts))
    for path in PACKAGE.rglob("*.py")
    if ">>>" in path.read_text(encoding="utf-8")
}


@pytest.mark.parametrize("name", sorted(MODULES))
def test_examples_of_docstrings(name):
    if ".torch" in name or name == "mha_c.d2l":
        needs.module("torch")
    if ".viz" in name:
        needs.module("matplotlib")
    if name == "mha_c.dask":
        needs.module("dask.array")
    if name == "mha_c.config":
        needs.module("threadpoolctl")
    with mha_c.set_num_threads(mha_c.get_num_threads()):
        found = doctest.testmod(importlib.import_module(name), extraglobs={"__name__": "__main__"})  # as a reader types
    assert found.attempted and not found.failed
