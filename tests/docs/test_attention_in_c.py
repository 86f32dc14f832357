"""examples/c: attention to read is right and short; the checker names the step in which another file differs."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import needs

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "c"
SOURCE = (FOLDER / "attention.c").read_text(encoding="utf-8")
PAGE = ROOT / "docs" / "attention-in-c.md"
VECTORS = ROOT / "tests" / "data" / "vectors.json"
STEPS = "q k v scores weights context output".split()
FLAGS = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-pedantic", f"-I{FOLDER}"]
SANITIZED = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
BROKEN = {  # step: what stands in attention.c, and what a student has written
    "q": [
        ("W[i * size + c]", "W[c * size + i]"),  # transposed
        ("for (int i = 0; i < size; i++) {", "for (int i = 1; i < size; i++) {"),
        ("real sum = 0;\n            for", "static real sum;\n            for"),  # never zero again
    ],
    "k": [("p->keys, p->W_k", "p->keys, p->W_q"), ("p->batch * p->n_keys, size, p->keys", "p->n_keys, size, p->keys")],
    "v": [("p->values, p->W_v", "p->keys, p->W_v")],
    "scores": [
        ("sum / sqrt(d)", "sum"),
        ("sum / sqrt(d)", "sum / d"),
        ("sum / sqrt(d)", "sum / sqrt(p->num_hiddens)"),
        ("sum += q[i] * k[j * p->num_hiddens + i];", "sum += q[i] * k[j * d + i];"),  # heads lie one after the other
        ("key = b * p->n_keys * size + h * d;", "key = b * p->n_keys * size;"),  # of head 0 for all
    ],
    "weights": [
        ("j < valid_len", "j <= valid_len"),
        (": -1e6", ": 0"),
        ("exp(a[j] - m)", "exp(a[j])"),  # too large for scores in the thousands alone
        ("a[j] /= sum;", ";"),
        ("p->valid_lens[row]", "p->valid_lens[b]"),
        (": -1e6", ": -INFINITY"),  # NaN where no key is seen
        ("real m = -INFINITY", "real m = 0"),  # no weights where all scores are far below 0
    ],
    "context": [("c[i] = 0;", ""), ("a[j] * v[j * p->num_hiddens + i]", "a[i] * v[j * p->num_hiddens + i]")],
    "output": [
        ("p->W_o, p->output", "p->W_v, p->output"),
        ("    project(p->batch * p->n_queries, size, p->context, p->W_o, p->output);\n", ""),
    ],
}
WRONG = [(step, before, after) for step, pairs in BROKEN.items() for before, after in pairs]
RIGHT = {  # written in another way
    "as it is": ("", ""),
    "sums from their ends": ("for (int i = 0; i < d; i++) {\n            sum", "for (int i = d; i-- > 0;) {\n  sum"),
    "the mask in the scores": ("s[j] = sum / sqrt(d);", "s[j] = j < valid_len ? sum / sqrt(d) : -1e6;"),
    "only what must be": ("p->scores + score,\n                       p->weights + score", "s, a"),
    "with a main": ("\n/* Y = X W:  Y[r]", "\nint main(void) { return 1; }\n\n/* Y = X W:  Y[r]"),
}  # fmt: skip


def run(command, status=0, **options):
    done = subprocess.run(command, capture_output=True, text=True, timeout=needs.HANGS, **options)
    assert status is None or done.returncode == status, f"{command}\n{done.stdout}{done.stderr}"
    return done


@pytest.fixture(scope="session", params=["float", "double"])
def check(request, tmp_path_factory):
    """Builds a program of a text and the checker; returns its run."""
    cc, folder, real = needs.program("cc"), tmp_path_factory.mktemp(f"in_c_{request.param}"), f"-DREAL={request.param}"
    renamed = "-Dmulti_head_attention=book_attention"
    run([cc, *FLAGS, real, renamed, "-c", FOLDER / "attention.c", "-o", folder / "book.o"])
    run([cc, *FLAGS, real, "-c", FOLDER / "check.c", "-o", folder / "check.o"])

    def checked(text, status):
        (folder / "mine.c").write_text(text)
        files = [folder / name for name in ("mine.c", "check.o", "book.o")]
        run([cc, *FLAGS, "-Wno-unused-parameter", real, "-Dmain=other", *files, "-o", folder / "check", "-lm"])
        return run([folder / "check", VECTORS], status).stdout

    checked.program = folder / "check"
    return checked


def changed(before, after):
    assert before in SOURCE
    return SOURCE.replace(before, after, 1)


def test_it_is_short_and_plain():
    assert len(SOURCE.splitlines()) < 100
    assert re.findall(r"#include (\S+)", SOURCE) == ["<math.h>", '"attention.h"']


@pytest.mark.parametrize("way", RIGHT)
def test_right_ones_are_right(check, way):
    """In all calls, whose outputs are those of vectors.json to 1e-5 in float and 1e-12 in double."""
    text = changed(*RIGHT[way])
    if way == "only what must be":
        text = text.replace(
            "int valid_len = ", "real s[9], a[9];\n                (void)score;\n                int valid_len = "
        )
    said = check(text, 0)
    assert re.match(r"(float|double), 12 calls\n", said)
    outcomes = dict(line.split(maxsplit=1) for line in said.splitlines()[1:])
    unwritten = ["scores", "weights"] if way == "only what must be" else []
    assert outcomes == {x: "not written, so not compared" if x in unwritten else "right" for x in STEPS}


@pytest.mark.parametrize(("step", "before", "after"), WRONG)
def test_the_step_that_differs_is_named(check, step, before, after):
    said = check(changed(before, after), 1)
    lines = {line.split()[0]: line for line in said.splitlines() if re.match(r"  \w", line)}
    named = [name for name, line in lines.items() if "DIFFERS" in line]
    assert named == [step], said
    place = STEPS.index(step)
    assert all(lines[name].endswith(" right") for name in STEPS[:place] if step != "weights" or name != "scores")
    assert "            See " in said and re.search(rf"{step}\[batch \d.*\] is \S+, should be \S+\.\n", said)


@pytest.mark.parametrize(
    ("before", "after", "hint"),
    [
        ("sum / sqrt(d)", "sum", "Each number is 1.4142 times the right one."),
        ("a[j] /= sum;", ";", "of this query add up to 1."),
        ("j < valid_len", "j <= valid_len", "This query may see 1 of 3 keys."),
        ("project(p->batch * p->n_queries, size, p->context, p->W_o, p->output);", "", "It was not written."),
        ("exp(a[j] - m)", "exp(a[j])", "See a call with scores in the thousands: weights["),
        (
            "softmax(p->n_keys,",
            "softmax(valid_len,",
            "It was not written.\n            This query may see",
        ),  # no factor
    ],
)
def test_hints(check, before, after, hint):
    assert hint in check(changed(before, after), 1)


@pytest.mark.parametrize(
    ("before", "after"), [("exp(a[j] - m)", "expf(a[j] - m)"), ("real sum = 0;", "float sum = 0;")]
)
def test_a_float_on_the_way_is_named_in_double(check, before, after):
    said = check(changed(before, after), None)
    assert said.startswith("float") or "It is right to the digits of float: where is a float, or expf," in said
    assert "1 times the right one" not in said


def test_make_check_c_in_both_types_under_sanitizers(tmp_path):
    """As a student types it; what writes beside its arrays is stopped at the line that does."""
    needs.program("make"), needs.program("cc")
    root = tmp_path / "clone"
    for name in ("csrc", "mha_c"):
        (root / name).mkdir(parents=True)
    for name in ("Makefile", "examples/c", "tests/data/vectors.json"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copyfile
        copy(ROOT / name, root / name)
    make = ["make", "--no-print-directory", "check-c"]
    own = dict.fromkeys(("LD_PRELOAD", "ASAN_OPTIONS", "UBSAN_OPTIONS"), "")  # of the core's sanitized build
    environment = {"cwd": root, "env": {**os.environ, **own}}
    plain = run([*make, "CHECK_FLAGS="], **environment)  # the compiler warns of other things then
    right = run(make, **environment)
    assert plain.stdout == right.stdout and not plain.stderr
    assert right.stdout.count(" right\n") == 14 and "float, 12 calls" in right.stdout and not right.stderr
    (tmp_path / "mine.c").write_text(
        changed("int i = 0; i < d; i++) {\n        c[i]", "int i = 0; i <= d; i++) {\n        c[i]")
    )
    wrong = run([*make, f"FILE={tmp_path / 'mine.c'}"], None, **environment)
    line = next(i for i, line in enumerate(SOURCE.splitlines(), 1) if "c[i] = 0" in line)
    assert wrong.returncode and re.search(rf"attend\S* .*mine\.c:{line}\b|mine\.c:{line}:\d+", wrong.stderr)
    (tmp_path / "mine.c").write_text("int unused;\n")
    assert "multi_head_attention" in run([*make, f"FILE={tmp_path / 'mine.c'}"], 2, **environment).stderr


def test_the_checker_notices_vectors_that_the_book_does_not_give(check, tmp_path):
    """Or all files would be held to something else than the vectors."""
    text = VECTORS.read_text()
    output = re.search(r'"multi_head": .*?"output": \[+(-?\d\.\d+)', text, re.DOTALL)
    (tmp_path / "vectors.json").write_text(f"{text[: output.start(1)]}{float(output[1]) + 2e-5}{text[output.end(1) :]}")
    check(SOURCE, 0)
    done = run([check.program, tmp_path / "vectors.json"], 3)
    assert "multi_head 1 of vectors.json: attention.c gives " in done.stderr


def test_the_page_shows_the_lines_of_the_file_and_what_is_printed(check):
    page = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"^```(c|text)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    plain = " ".join(SOURCE.split())
    quoted = [text for language, text in blocks if language == "c" and "from the course" not in text]
    assert len(quoted) >= 4 and [text for text in quoted if " ".join(text.split()) not in plain] == []
    assert f"in {len(SOURCE.splitlines())} lines of plain C" in page
    (printed,) = [text for language, text in blocks if language == "text"]
    said = check(changed("sum / sqrt(d)", "sum"), 1)
    assert said == printed or said.startswith("double")
    assert [name for name in re.findall(r"`(csrc/[\w/.]+)`", page) if not (ROOT / name).is_file()] == []
