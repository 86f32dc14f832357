"""The repository's address: one word for it everywhere until it is known, then one command that fills it in."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import needs
import tools

ROOT = Path(__file__).resolve().parents[2]
ADDRESS = "https://example.org/somebody/mha_c"
address = tools.load("tools/address.py")


def with_installs(root):
    """{file: the addresses behind git+ in it} of all texts."""
    files = [*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob("examples/notebooks/*.md")]
    found = {path.relative_to(root).as_posix(): re.findall(r"git\+(\w[\w:/.-]+)", path.read_text()) for path in files}
    return {name: {*addresses} for name, addresses in found.items() if addresses}


def test_one_word_stands_for_the_address_everywhere():
    found = with_installs(ROOT)
    if "pip install mha_c\n" not in (ROOT / "README.md").read_text():  # before the first release
        assert len(found) >= 18 and {"README.md", "README.zh-CN.md", "docs/colab.md"} <= {*found}
    assert len({*map(frozenset, found.values())}) == 1
    texts = [path.read_text() for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"))]
    assert {*re.findall(r"ADDRESS-OF-[A-Z-]+", "".join(texts))} <= {address.UNKNOWN, "ADDRESS-OF-YOUR-COPY"}


def forget(known, root):
    """Where the address was filled in, the word for it stands there again, as before that."""
    for path in [*root.rglob("*.md"), root / "mha_c" / "viz" / "whole_page.py", root / address.CITED]:
        text = re.sub(r'repository-code: ".*"\n', "", path.read_text(encoding="utf-8"))
        path.write_text(text.replace(known, address.UNKNOWN), encoding="utf-8")


def test_make_address_fills_it_in(tmp_path):
    """On a copy: pages, notebooks, the playground's last page, CITATION and the links of the package index."""
    needs.module("setuptools")
    # What Python compiles beside us comes into being under a name that is gone when it is copied.
    without = shutil.ignore_patterns("*.so", "*.svg", "*.png", "__pycache__")
    for name in ("docs", "examples", "benchmarks", "tools", "mha_c"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=without)
    for path in (p for p in ROOT.iterdir() if p.is_file()):
        shutil.copy(path, tmp_path)
    forget(*{*map(frozenset, with_installs(ROOT).values())}.pop(), tmp_path)
    make = ["make", "--no-print-directory", "address", f"PYTHON={sys.executable}"]  # `make test` may have called us
    refused = subprocess.run([*make, "REPOSITORY=mine"], cwd=tmp_path, capture_output=True, text=True)
    assert refused.returncode and "make address REPOSITORY=" in refused.stderr
    for changed in (True, False):
        done = subprocess.run(
            [*make, f"REPOSITORY={ADDRESS}"], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        assert done.stdout.startswith("0 files") is not changed, done.stdout
    found = with_installs(tmp_path)
    assert {*found} == {*with_installs(ROOT)} and all(addresses == {ADDRESS} for addresses in found.values())
    assert [str(path) for path in tmp_path.rglob("*.md") if address.UNKNOWN in path.read_text()] == []
    assert f'repository-code: "{ADDRESS}"' in (tmp_path / "CITATION.cff").read_text()
    assert f'REPOSITORY = "{ADDRESS}"' in (tmp_path / "mha_c" / "viz" / "whole_page.py").read_text()
    environment = {name: value for name, value in os.environ.items() if name != "MHA_C_REPOSITORY"}
    asked = [sys.executable, "-W", "ignore", "setup.py", "-q", "--long-description"]
    done = subprocess.run(asked, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert f"({ADDRESS}/blob/v" in done.stdout
