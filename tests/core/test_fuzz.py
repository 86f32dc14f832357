"""The inputs that fuzzing found worth keeping (tests/fuzz/corpus), run again; `make fuzz` looks for new ones."""

import subprocess
from pathlib import Path

import pytest

import needs

ROOT = Path(__file__).resolve().parents[2]
CORPUS = sorted((ROOT / "tests" / "fuzz" / "corpus").glob("*.txt"))
FLAGS = ["-std=c11", "-O1", "-ffp-contract=off", "-fno-math-errno", "-pthread", "-Wall", "-Wextra",
         "-Wno-unused-function"]  # fmt: skip


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz")
    sources = sorted(path for path in ROOT.glob("csrc/*/*.c") if path.parent.name != "python")
    includes = [f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'tests' / 'c'}"]
    subprocess.run([needs.program("cc"), *FLAGS, *includes, "-c", *sources], check=True, cwd=folder)
    return folder, includes


def test_there_is_a_corpus_for_every_target():
    assert {path.stem for path in CORPUS} == {p.stem[5:] for p in (ROOT / "tests" / "fuzz").glob("fuzz_*.c")}


@pytest.mark.parametrize("corpus", CORPUS, ids=lambda path: path.stem)
def test_corpus(objects, corpus):
    folder, includes = objects
    program = folder / corpus.stem
    sources = [ROOT / "tests" / "fuzz" / name for name in (f"fuzz_{corpus.stem}.c", "replay.c")]
    link = [needs.program("cc"), *FLAGS, *includes, *sources, *folder.glob("*.o"), "-o", program, "-lm"]
    subprocess.run(link, check=True)
    done = subprocess.run([program], input=corpus.read_text(), capture_output=True, text=True, timeout=needs.HANGS)
    assert done.returncode == 0, done.stdout + done.stderr
