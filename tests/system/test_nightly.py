"""tools/nightly.py: each part is run, none stops the others, and the page begins with what failed."""

import collections
import itertools
import os
import re
import sys
from pathlib import Path

import pytest

import children
import tools
from mha_c import _core

ROOT = Path(__file__).resolve().parents[2]

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
    version = f"{sys.version_info[0]}.{sys.version_info[1]}{sys.abiflags.replace('d', '')}"  # "t": no global lock
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable), prepend=os.pathsep)  # wherever it is
    real = tools.load("tools/nightly.py")
    monkeypatch.setattr(real, "PARTS", {"one": ["free-threaded", f"PYTHON={version}"], "none": ["x", "PYTHON=3.99"]})
    assert real.command("one")[2].endswith(f"python{version}") and "/" in real.command("one")[2]
    assert real.command("none") == ["make", "x", "PYTHON=python3.99"]


def cases_of(file, *more, **variables):
    """{test: ids of its cases}."""
    words = "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", "-p", "no:xdist", f"--rootdir={ROOT}"
    words += f"--config-file={ROOT / 'pyproject.toml'}", ROOT / "tests" / file, *more
    done = children.python(*words, **variables)
    cases = collections.defaultdict(list)
    for line in filter(lambda line: "::" in line, done.stdout.splitlines()):
        cases[line.partition("[")[0]].append(line.partition("[")[2])
    return cases


def test_a_second_environment_runs_each_test_with_a_few_of_its_cases():
    all_of_them, few = (cases_of("exactness/test_outputs.py", *more) for more in ((), ("--few",)))
    assert few.keys() == all_of_them.keys() and max(map(len, all_of_them.values())) > 20
    assert max(map(len, few.values())) == 2
    assert all(len(few[name]) > 1 for name, cases in all_of_them.items() if len(cases) > len(_core.isas()))


def test_by_day_each_pair_of_values_comes_together_and_by_night_all_do():
    file = "exactness/test_one_visible_key.py"
    night, day = (cases_of(file, MHA_C_NIGHTLY=night) for night in ("1", None))
    assert night.keys() == day.keys()
    (every,), (chosen,) = ([cases for test, cases in each.items() if "functions" in test] for each in (night, day))
    every, chosen = ([tuple(case.split("-")) for case in each] for each in (every, chosen))
    lacking = {name for name, offered in _core.isas() if not offered}
    every = [case for case in every if not lacking.intersection(case)]
    for one, other in itertools.combinations(range(len(every[0])), 2):
        assert {(case[one], case[other]) for case in chosen} == {(case[one], case[other]) for case in every}
    assert len(chosen) * 4 < len(every)


@pytest.mark.parametrize(("there", "chosen"), [([(3, 13), (3, 14)], "3.14"), ([(3, 13)], "3.13"), ([], "3.13")])
def test_a_torch_gets_the_first_of_its_pythons_that_is_there(there, chosen, monkeypatch):
    torches = tools.load("tools/torches.py")
    monkeypatch.setattr(torches, "pythons", lambda version: {(each, False): "python" for each in there})
    assert torches.python({"python": "3.14,3.13"}) == chosen and torches.python({"python": "3.9"}) == "3.9"


def test_the_page_on_releases_follows_the_table_of_torches():
    torches = tools.load("tools/torches.py").torches()
    rows = [line.split("|") for line in (ROOT / "RELEASING.md").read_text(encoding="utf-8").splitlines()]
    rows = {row[1].strip(): [cell.strip() for cell in row[2:]] for row in rows if len(row) > 4}
    oldest, *_, newest = torches
    assert rows["torch (optional)"][:2] == [oldest, newest.rpartition(".")[0]]
    pythons = {version for row in torches.values() for version in row["python"].split(",")}
    words = re.search(r"with torch on ([\d., and]+) \(`tools/torches.txt`\)", rows["CPython"][2])[1]
    assert re.findall(r"3\.\d+", words) == sorted(pythons, key=lambda version: int(version.partition(".")[2]))


def test_by_night_it_runs_them_whole():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    goals = re.findall(r"make (test-\w+) (.*) ARGS=--few", script)
    assert [goal for goal, _ in goals] == ["test-numpy", "test-torch"]
    parts = tools.load("tools/nightly.py").PARTS.values()
    assert all(not any("--few" in word for word in part) for part in parts)
    (numpy,) = re.findall(r"NUMPY=\S+", goals[0][1])
    assert ["test-numpy", numpy, "PYTHON=3.9"] in parts
    oldest, *_ = tools.load("tools/torches.py").torches()
    assert any(part[:2] == ["test-torch", f"TORCH={oldest}"] for part in parts)
