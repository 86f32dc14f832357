"""tools/nightly.py: each part is run, none stops the others, and the page begins with what failed."""

import sys

import pytest

import tools

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs make")


@pytest.fixture
def nightly(tmp_path, monkeypatch):
    found = tools.load("tools/nightly.py")
    monkeypatch.setattr(found, "FOLDER", tmp_path)
    monkeypatch.setattr(found, "ROOT", tmp_path)
    monkeypatch.setattr(found, "PARTS", {"good": ["good"], "bad": ["bad", "WHY=of course"], "later": ["good"]})
    for name in "GITHUB_STEP_SUMMARY", "MAKEFLAGS", "MAKELEVEL", "MFLAGS":  # of the make that runs this test
        monkeypatch.delenv(name, raising=False)
    lines = ["good:", '\t@echo "seeds $$MHA_C_FREE_SEEDS"', "\t@echo '== 5 passed, 2 skipped in 1.25s =='", "bad:"]
    lines += ["\t@echo 'FAILED tests/a.py::test_b - it is so, $(WHY)'", "\t@exit 3", ""]
    (tmp_path / "Makefile").write_text("\n".join(lines))
    return found


def test_every_part_runs_and_the_page_says_how_it_ended(nightly, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["nightly.py", "good", "bad"])
    assert nightly.main()
    assert (tmp_path / "good.log").read_text().splitlines()[0] == "seeds 1"  # new examples of properties
    page = (tmp_path / "report.md").read_text().splitlines()
    assert page[0].endswith("1 of 2 parts passed") and page[4].startswith("| bad | FAILED | 0 |")
    assert page[5] == "| good | passed | 0 | 5 passed, 2 skipped in 1.25s |"
    assert "- `FAILED tests/a.py::test_b - it is so, of course`" in page and page[-1] == "Not run: later."
    monkeypatch.setattr(sys, "argv", ["nightly.py", "--page"])  # from what other machines have left there
    assert nightly.main() and (tmp_path / "report.md").read_text().splitlines() == page


def test_a_night_without_a_failure(nightly, tmp_path, monkeypatch):
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary"))
    monkeypatch.setattr(sys, "argv", ["nightly.py", "good", "later"])
    assert not nightly.main()
    assert (tmp_path / "summary").read_text() == (tmp_path / "report.md").read_text()


def test_a_version_of_python_becomes_the_command_that_starts_it(nightly, monkeypatch):
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    real = tools.load("tools/nightly.py")
    monkeypatch.setattr(real, "PARTS", {"one": ["free-threaded", f"PYTHON={version}"], "none": ["x", "PYTHON=3.99"]})
    assert real.command("one")[2].endswith(f"python{version}") and "/" in real.command("one")[2]
    assert real.command("none") == ["make", "x", "PYTHON=python3.99"]
