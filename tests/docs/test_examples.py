"""The examples run, on a few sentences; the corpus is what it says; BLEU is the book's."""

import sys
from pathlib import Path

import numpy as np
import pytest

import children
import needs

needs.module("torch")
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CORPUS = EXAMPLES / "data" / "fra_eng_small.txt"


def run(tmp_path, script, *arguments):
    done = children.python(EXAMPLES / script, *arguments, cwd=tmp_path, OMP_NUM_THREADS="1", MPLBACKEND="agg")
    return done.stdout, done.stderr


@pytest.fixture
def translation(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import translation

    yield translation
    sys.modules.pop("translation", None)


# --- The corpus ---------------------------------------------------------------------------------------------


def test_the_corpus_is_in_the_books_format(translation):
    lines = CORPUS.read_text(encoding="utf-8").splitlines()
    pairs = [line.split("\t") for line in lines]
    assert len(pairs) > 700 and all(len(pair) == 2 and all(pair) for pair in pairs)
    assert len({english for english, _ in pairs}) == len(pairs)
    assert [len(english) for english, _ in pairs] == sorted(len(english) for english, _ in pairs)
    assert all(len(translation.split(text)) <= 8 for pair in pairs for text in pair)  # 9 steps with <eos>
    assert any("\u202f" in french for _, french in pairs)


def test_the_corpus_is_what_its_script_makes(tmp_path):
    script = tmp_path / "make_corpus.py"
    script.write_text((EXAMPLES / "data" / "make_corpus.py").read_text(encoding="utf-8"), encoding="utf-8")
    children.python(script)
    assert (tmp_path / CORPUS.name).read_bytes() == CORPUS.read_bytes()


@pytest.mark.parametrize("version", needs.real_d2l.VERSIONS[:1])
def test_sentences_are_split_as_in_the_book(version, translation):
    d2l = needs.d2l(version)
    source, target = d2l.tokenize_nmt(d2l.preprocess_nmt(CORPUS.read_text(encoding="utf-8")), 599)
    assert translation.read_pairs(CORPUS, 600) == list(zip(source, target))
    calm = "il est calme ."
    for predicted, expected in ((calm, calm), ("il est", calm), ("va !", "cours !")):
        ours = translation.bleu(predicted.split(), expected.split(), k=2)
        assert ours == pytest.approx(d2l.bleu(predicted, expected, k=2))
    assert translation.bleu([], ["va"]) == 0


def test_reading_pairs(tmp_path, translation):
    path = tmp_path / "pairs.txt"
    path.write_text("Go.\tVa !\nthree\tcolumns\there\n\nRun!\tCours\u202f!\n", encoding="utf-8")
    assert translation.read_pairs(path, 10) == [(["go", "."], ["va", "!"]), (["run", "!"], ["cours", "!"])]
    assert len(translation.read_pairs(path, 1)) == 1
    path.write_text("no tab\n", encoding="utf-8")
    with pytest.raises(SystemExit, match="two columns"):
        translation.read_pairs(path, 10)


# --- The scripts ----------------------------------------------------------------------------------------------


RUNS = [  # one with a corpus and a sentence of its own
    ("bahdanau.py", (1, 1), "She takes the car.", "150 pairs", ["--pairs", "150"], 6),
    ("transformer.py", (2, 4), "Go now!", "141 pairs", ["--data", "own.txt", "--sentence", "Go now!"], 4),
]


BY_NIGHT = [] if needs.NIGHTLY else RUNS[:1]  # by day one script, which imports the same module as the other


@pytest.mark.parametrize(
    "script, shape, sentence, pairs, options, n_keys",
    [pytest.param(*run, id=run[0]) for run in RUNS if run not in BY_NIGHT],
)
def test_a_short_run(script, shape, sentence, pairs, options, n_keys, tmp_path):
    needs.module("matplotlib")
    lines = [*CORPUS.read_text(encoding="utf-8").splitlines()[-140:], "Go now!\tVa maintenant !"]
    (tmp_path / "own.txt").write_text("\n".join(lines), encoding="utf-8")
    out, progress = run(tmp_path, script, "--epochs", "2", "--out", "found", *options)
    assert out.startswith(pairs) and "tokens/s" in out and "mean bleu" in out and f"{sentence} =>" in out
    assert "2/2" in progress and "loss" in progress
    name = script.replace(".py", "_attention")
    saved = np.load(tmp_path / "found" / f"{name}.npz")
    weights = saved["weights"]
    assert weights.shape[:2] == shape and weights.shape[3] == len(saved["keys"]) == n_keys
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)
    assert (tmp_path / "found" / f"{name}.png").stat().st_size > 5000
