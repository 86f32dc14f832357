"""Languages: each sentence has its translation, with the same fields and terms; nothing else is said."""

import ast
import json
import os
import re
import string
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mha_c import teach
from mha_c.teach.asking import answers, masks
from mha_c.teach.checks import verdicts
from mha_c.teach.grader import files
from mha_c.teach.words import sentences as words

ROOT = Path(__file__).resolve().parents[2]
TEACH = ROOT / "mha_c" / "teach"
OTHERS = [language for language in words.LANGUAGES if language != "en"]
CHINESE = re.compile("[\u4e00-\u9fff。]")
# Modules of check, laws and puzzle.  The players of stepping.py and playing.py have viz/playground_page/words.js.
OF_OTHERS = {"__init__", "book", "playing", "probes", "stepping", "trained_layer"}
MODULES = {path.stem: path for path in sorted(TEACH.rglob("*.py")) if path.stem not in OF_OTHERS}
SENTENCE = re.compile(r"[A-Za-z]{2,},? [a-z]+")  # two words
NOT_SAID = [  # strings of two words that nobody reads, or that are said before there is a language
    r'"?>?<.*', r"(font|display): .*",
    r'.*check\(mine, kind, weights=.*', r"import numpy as np\n", r"valid_lens is not None",
    r"the book, changed|your text", r"one query|((one query, )?time|steps)( first)?(, heads)?|one group",
    r"language must be one of ", r"\) for x in ", r"(return|scores = |X\[|lens\b).*",
    r".*if 1:.*", r"[\w .,*]* batch_first.*",
]  # fmt: skip
OF_NAMES = {"making", "configuration"}  # modules with lists of names
NAMES = r"(\w+ )*\w+ ?"


@pytest.fixture(params=OTHERS)
def language(request):
    teach.set_language(request.param)
    yield request.param
    teach.set_language("en")


def read_by_students():
    """Every string of the modules that may be a sentence, but for docstrings: (module, text)."""
    for module, path in MODULES.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        with_docs = (ast.Module, ast.ClassDef, ast.FunctionDef)
        docs = {
            node.body[0].value for node in ast.walk(tree) if isinstance(node, with_docs) and ast.get_docstring(node)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docs:
                yield module, node.value


def said_literally():
    """The strings that are given to said(...), of one word, too."""
    for path in MODULES.values():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "said":
                yield from (x.value for x in ast.walk(node.args[0]) if isinstance(getattr(x, "value", 0), str))


def of_tables():
    yield from words.SENTENCES.values()
    yield from re.findall(
        r"^\w+(?: \(\w+\))?: (.*)", (TEACH / "asking" / "mistakes.txt").read_text(encoding="utf-8"), re.MULTILINE
    )
    yield from verdicts.SECTIONS.values()
    yield from (masks._AXES_SAY[one] for one in masks._AXES_SAY if masks._AXES_SAY[one] != "1")
    yield from ("book", "yours", *answers.Example._field_defaults["names"], "before", "after")
    yield from ("right", "wrong")  # verdicts on a file


def sentences():
    known = {*said_literally(), *of_tables()}
    whole = [text for module, text in read_by_students() if SENTENCE.search(text) and module not in OF_NAMES]
    whole = [text for text in whole if not any(re.fullmatch(each, text, re.DOTALL) for each in NOT_SAID)]
    # A string of two words that is no part of a known sentence is one itself: said by a name, or not at all.
    return known | {text for text in whole if not any(text in other for other in known)}


def fields(sentence):
    return {name for _, name, _, _ in string.Formatter().parse(sentence) if name is not None}


@pytest.mark.parametrize("language", OTHERS)
def test_each_sentence_is_translated(language):
    every = sentences()
    assert len(every) > 280
    table = words.translations(language)
    assert sorted(every - {*table}) == [], "without a translation"
    assert sorted({*table} - every - {text for _, text in read_by_students()}) == [], "translated, and said no more"


def test_no_sentence_is_hidden_among_names():
    """These modules have lists of names; what else they have of two words is a sentence."""
    texts = {text for module, text in read_by_students() if module in OF_NAMES and SENTENCE.search(text)}
    texts = {text for text in texts if not re.fullmatch(NAMES, text) and not re.fullmatch(NOT_SAID[2], text)}
    assert len(texts) >= 2 and texts <= {*words.translations("zh")}


@pytest.mark.parametrize("language", OTHERS)
def test_the_file_has_pairs_with_the_same_fields(language):
    text = (TEACH / "words" / "languages" / f"{language}.txt").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line and line[0] != "#"]
    table = words.translations(language)
    assert len(lines) == 2 * len(table)  # none twice
    for english, other in table.items():
        assert fields(english) == fields(other), english
        assert english.count("\n") == other.count("\n") and other == other.rstrip(), english
        assert not CHINESE.search(english), english
        assert CHINESE.search(other) or not re.search("[a-z]", re.sub(r"\{.*?\}", "", english)), english
        names = set(re.findall(r"\w+_\w+", re.sub(r"\{.*?\}", "", english)))
        assert names <= {*re.findall(r"\w+_\w+", other, re.ASCII)}, english


def of_the_playground():
    """{an English text of the playground: the Chinese one}."""
    text = (ROOT / "mha_c" / "viz" / "playground_page" / "words.js").read_text(encoding="utf-8")
    rows = [json.loads(line.rstrip(",")) for line in re.findall(r"^  (\[.*\],?)$", text, re.MULTILINE)]
    return {row[0]: row[2] for row in rows}


TERMS = {  # how a sentence has a term: as the playground does
    r"\bquer(y|ies)\b": "query", r"\bkeys?\b": "key", r"\bvalues?\b": "value", r"\bscores?\b": "score",
    r"\bweights\b": "Weight", r"\bheads?\b": "head", r"\bfeatures?\b": "feature", r"\bmasks?\b": "Masks",
    r"\boutput\b": "output", r"\b[Dd]ropout\b": "Dropout", r"\badditive\b": "additive", r"\blengths hide\b": "lengths",
    r"dot-product": "dot product",
}  # fmt: skip


@pytest.mark.parametrize("term", TERMS)
def test_terms_are_those_of_the_playground(term):
    chinese = of_the_playground()[TERMS[term]]
    with_term = {english: x for english, x in words.translations("zh").items() if re.search(term, english)}
    assert with_term
    assert [english for english, x in with_term.items() if chinese not in x] == []


# ---- as it is met ----------------------------------------------------------------------------------------------------


class Recorded(dict):
    """A table that remembers what it was asked for and has not."""

    missed = ()

    def get(self, english, default=None):
        if english not in self and re.search("[a-z]", english) and not CHINESE.search(english):
            self.missed += (english,)
        return super().get(english, default)


def scaled_by_d(queries, keys, values, valid_lens=None):
    return teach.book.masked_softmax(queries @ keys.swapaxes(1, 2) / queries.shape[-1], valid_lens) @ values


def not_for_two_axes(X, valid_lens=None):
    if valid_lens is not None and valid_lens.ndim == 2:
        valid_lens = valid_lens - 1
    return teach.book.masked_softmax(X, valid_lens)


def raises(queries, keys, values, valid_lens=None):
    raise ValueError("no")


def small(queries, keys, values, valid_lens=None):
    scores = queries @ keys.swapaxes(1, 2) / np.sqrt(queries.shape[-1])
    if valid_lens is not None:
        seen = np.arange(keys.shape[1]) < valid_lens.reshape(len(valid_lens), -1, 1)
        scores = np.where(seen, scores, scores - 5)
    return teach.book.softmax(scores, -1) @ values


def masked(queries, keys, values, mask=None):
    return teach.book.causal(queries, keys, values, 1 if mask is None else mask != 0, keys.shape[1])


def writes(queries, keys, values, valid_lens=None):
    result = teach.book.dot_product(queries, keys, values, valid_lens).astype(np.float32)
    queries[:] = 0
    return result


def of_no_output(X, valid_lens=None):
    pass


def turned(X, valid_lens=None):
    return teach.book.masked_softmax(X, valid_lens).swapaxes(0, 1)


def large(queries, keys, values, valid_lens=None):
    return teach.book.dot_product(queries, keys, values, valid_lens) + 1


ASKED = [
    (scaled_by_d, "dot_product"), (not_for_two_axes, "masked_softmax"), (raises, "dot_product"), (small, "dot_product"),
    (masked, "dot_product"), (writes, "dot_product"), (of_no_output, "masked_softmax"), (turned, "masked_softmax"),
    (large, "dot_product"), (lambda q, k, v: teach.book.dot_product(q, k, v), "dot_product"),
    (lambda X, **of_any: X, "masked_softmax"), (lambda X: X + 1, "positional_encoding"),
    (teach.book.rope, "rope"), (teach.book.rope_halves, "rope"), (teach.book.grouped, None), (teach.book.window, None),
    (lambda X, num_heads: X, "transpose_qkv"), (lambda q, k, v, surprise=None: teach.book.causal(q, k, v), "causal"),
]  # fmt: skip


def english_in(text):
    """Three English words after each other, which no code has."""
    return re.findall(r"[a-z]{2,} [a-z]{2,} [a-z]{2,}", text)


@pytest.mark.parametrize(("mine", "kind"), ASKED)
def test_answers_and_laws_are_of_one_language(mine, kind, language, monkeypatch):
    table = Recorded(words.translations(language))
    monkeypatch.setattr(words, "_translations", table)
    answer, laws = teach.check(mine, kind), teach.laws(mine, kind)
    pages = [str(answer), answer._repr_html_(), str(laws)]
    assert table.missed == ()
    prose = [re.sub("<.*?>", "", part) for part in answer._parts if isinstance(part, str)] + pages[2].splitlines()
    assert [found for part in prose for found in english_in(part)] == []
    assert all(CHINESE.search(page) for page in pages) and not any("Note:" in page for page in pages)


@pytest.mark.parametrize("level", [1, 3])
def test_a_puzzle_is_of_one_language(level, language):
    text = str(teach.puzzle(4, level=level))
    outside = text.replace(teach.puzzle(4, level=level).source, "")
    assert CHINESE.search(text) and english_in(outside) == []


def test_columns_stand_below_each_other(language):
    lines = str(teach.check(scaled_by_d, "dot_product")).splitlines()
    own = teach.check(scaled_by_d, "dot_product").lines[0]
    rows = [line for line in lines if any(line.endswith(text) for _, text in own.rows())]
    assert len(rows) == len(own.rows()) == 3
    starts = {answers.columns(line[: -len(text)]) for line, (_, text) in zip(rows, own.rows())}
    assert len(starts) == 1


# ---- how it is chosen ------------------------------------------------------------------------------------------------


def test_english_is_the_source_and_comes_back():
    before = str(teach.check(scaled_by_d, "dot_product"))
    teach.set_language("zh")
    teach.set_language("en")
    assert str(teach.check(scaled_by_d, "dot_product")) == before and not CHINESE.search(before)


@pytest.mark.parametrize("other", ["fr", "", "zh-CN", "ZH"])
def test_an_unknown_language_is_refused_with_those_there_are(other):
    with pytest.raises(ValueError, match=re.escape(f"language must be one of en, zh, got {other!r}")):
        teach.set_language(other)
    assert not CHINESE.search(str(teach.check(scaled_by_d, "dot_product")))


def test_what_a_user_adds_is_said_as_it_is(language):
    teach.add_mistake("scale_7", "dot_product", "scores are {divided} by 7", "np.sqrt(d)", "7")

    def mine(queries, keys, values, valid_lens=None):
        return teach.book.masked_softmax(queries @ keys.swapaxes(1, 2) / 7, valid_lens) @ values

    answer = teach.check(mine, "dot_product")
    assert answer.mistakes == ["scale_7"] and "：scores are {divided} by 7。" in str(answer)


def command(tmp_path, language, text):
    (tmp_path / "mine.py").write_text(text, encoding="utf-8")
    asked = [sys.executable, "-m", "mha_c", "check", str(tmp_path / "mine.py")]
    environment = {**os.environ, "MHA_C_LANGUAGE": language, "PYTHONIOENCODING": "utf-8"}
    return subprocess.run(asked, env=environment, cwd=tmp_path, capture_output=True, text=True, encoding="utf-8")


def test_the_command_speaks_the_language_of_the_environment(tmp_path):
    found = command(tmp_path, "zh", "def attention(q, k, v):\n    return q @ k.swapaxes(1, 2) @ v\n")
    assert found.returncode == 1 and "错误" in found.stdout and "评分没有除以 sqrt(d)" in found.stdout, found
    found = command(tmp_path, "zh", "import a_package_that_is_not_there\n")
    assert found.returncode == 2 and "无法判断：导入失败" in found.stdout and english_in(found.stdout) == [], found


def test_the_command_refuses_an_unknown_language_in_a_line(tmp_path):
    found = command(tmp_path, "fr", "")
    assert found.returncode == 2 and found.stdout == ""
    assert found.stderr.strip() == "MHA_C_LANGUAGE: language must be one of en, zh, got 'fr'"


def test_problems_of_a_file_are_of_one_language(language, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = tmp_path / "some.py"
    path.write_text("def thing(a):\n    raise SystemExit\ndef other(b):\n    return b\n", encoding="utf-8")
    asked = [(), ("thng",), ("thing", "no_kind"), ("thing", "masked_softmax"), (None, "rope"), ("thing",)]
    reports = [files.judged(str(path), *each) for each in asked]
    reports += [files.judged(str(tmp_path / name)) for name in ("missing.py", "some.ipynb")]
    (tmp_path / "cells.ipynb").write_text('{"cells": [{"cell_type": "code", "source": ["input()"]}]}')
    (tmp_path / "old.ipynb").write_text('{"worksheets": []}')
    reports += [files.judged(str(tmp_path / name)) for name in ("cells.ipynb", "old.ipynb", ".")]
    assert [found for each in reports for found in english_in(str(each))] == []
