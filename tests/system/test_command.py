"""The command mha_c, as a user types it: what it prints, its exit status, and a grading loop over ten files."""

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import children
import mha_c
import needs
from mha_c import _core, selftest
from mha_c.viz import own_layer

ROOT = Path(__file__).resolve().parents[2]
RIGHT = """
import numpy as np

def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)

def attention(q, k, v, valid_lens=None):
    scores = q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1])
    if valid_lens is not None:
        lens = np.asarray(valid_lens).reshape(len(valid_lens), -1, 1)
        scores = np.where(np.arange(k.shape[1]) < lens, scores, -1e6)
    return softmax(scores) @ v
"""
FILES = {  # name: (text, exit status, the first mistake or the problem's id)
    "ada": (RIGHT, 0, None),
    "alan": (RIGHT.replace("np.sqrt(q.shape[-1])", "q.shape[-1]"), 1, "scale_d"),
    "barbara": (RIGHT.replace(" < lens", " <= lens"), 1, "mask_off_by_one"),
    "claude": (RIGHT.replace("x.max(-1", "x.max(1").replace("e.sum(-1", "e.sum(1"), 1, "softmax_axis"),
    "donald": (RIGHT + "\n)", 2, "does_not_import"),
    "edsger": ("import a_package_that_nobody_has\n" + RIGHT, 2, "does_not_import"),
    "frances": ('print("hello", {"ok": True})\n' + RIGHT.replace("return softmax", "print(q.shape); return softmax"), 0,
                None),
    "grace": (RIGHT.replace("return softmax", "raise SystemExit(0)\n    return softmax"), 2, "exits"),
    "john": ("raise SystemExit(0)", 2, "does_not_import"),
    "katherine": (RIGHT.replace("def attention", "def my_atention"), 2, "no_such_name"),
}  # fmt: skip


def command(*arguments, status=0, **options):
    return children.python("-m", "mha_c", *arguments, status=status, **options)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "submissions").mkdir()
    for name, (text, _, _) in FILES.items():
        (tmp_path / "submissions" / f"{name}.py").write_text(text)
    return tmp_path


def first(report):
    """The first mistake, or the id of the problem."""
    problem = report["problem"] or next((x["problem"] for x in report["checked"] if x["problem"]), None)
    return problem["id"] if problem else next((id for x in report["checked"] for id in x["mistakes"]), None)


def test_the_grading_loop_of_the_page_over_ten_files(folder):
    """The lines of docs/command.md as they stand there, with a mha_c that is this Python's."""
    needs.program("sh")
    page = (ROOT / "docs" / "command.md").read_text(encoding="utf-8")
    (loop,) = [text for text in re.findall(r"^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL) if "for " in text]
    typed = folder / "bin" / "mha_c"
    typed.parent.mkdir()
    typed.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m mha_c "$@"\n')
    typed.chmod(typed.stat().st_mode | stat.S_IEXEC)
    path = os.pathsep.join([str(typed.parent), os.environ["PATH"]])
    done = subprocess.run(["sh", "-c", loop], cwd=folder, capture_output=True, text=True, timeout=needs.HANGS,
                          env={**os.environ, "PATH": path})  # fmt: skip
    statuses = dict(re.findall(r"^submissions/(\w+)\.py: (\d)$", done.stdout, re.MULTILINE))
    assert statuses == {name: str(status) for name, (_, status, _) in FILES.items()}
    for name, (_, status, id) in FILES.items():
        report = json.loads((folder / "submissions" / f"{name}.json").read_text())
        assert report["ok"] is [True, False, None][status] and first(report) == id, name
        assert report["file"] == f"submissions/{name}.py"
    assert "hello {'ok': True}" in done.stderr and done.stderr.count("(1, 1, 4)") >= 1
    assert not list(folder.rglob("__pycache__"))


def test_check_says_what_to_do(folder):
    said = {name: command("check", f"submissions/{name}.py", cwd=folder, status=FILES[name][1]).stdout
            for name in ("ada", "alan", "donald", "edsger", "grace")}  # fmt: skip
    assert said["alan"].startswith(
        "submissions/alan.py:attention (dot_product): wrong\n\nYours differs from the book's in one thing: it divides"
    )
    assert said["ada"].startswith("submissions/ada.py:attention (dot_product): right\n")
    assert "SyntaxError" in said["donald"] and f", line {len(FILES['donald'][0].splitlines())}" in said["donald"]
    assert "Line 1:\nModuleNotFoundError: No module named 'a_package_that_nobody_has'" in said["edsger"]
    assert "`uvx --with a_package_that_nobody_has ...`" in said["edsger"]
    assert "ends the program (SystemExit) when it is called" in said["grace"]
    report = json.loads(command("check", "submissions/grace.py", "--json", cwd=folder, status=2).stdout)
    lines = FILES["grace"][0].splitlines()
    assert report["checked"][0]["problem"]["line"] == lines.index("    raise SystemExit(0)") + 1
    meant = command("check", "submissions/katherine.py:attention", cwd=folder, status=2).stdout
    assert "it has no 'attention': did you mean my_atention?" in meant


def test_a_mask_must_mean_what_is_asked_for(tmp_path):
    """Inverted ones are right by themselves, and wrong where the other meaning is asked for."""
    (tmp_path / "mine.py").write_text(f"""{RIGHT.partition("def attention")[0]}
def attention(Q, K, V, mask=None):
    scores = Q @ K.swapaxes(-1, -2) / np.sqrt(Q.shape[-1])
    return softmax(scores if mask is None else np.where(mask, -1e9, scores)) @ V
""")
    report = json.loads(command("check", "mine.py", "--json", cwd=tmp_path).stdout)
    assert report["ok"] and "hid" in report["checked"][0]["mask"]
    wrong = json.loads(command("check", "mine.py", "--mask", "attend", "--json", cwd=tmp_path, status=1).stdout)
    assert wrong["checked"][0]["mistakes"] == ["mask_inverted"]


LOOPS = """import threading, time
threading.Thread(target=time.sleep, args=(1000,)).start()
def attention(q, k, v):
    while WHILE:
        try:
            time.sleep(WHILE)
        except BaseException:
            pass
    return q
"""


def test_a_file_that_does_not_end_is_ended(tmp_path):
    """With the line at which it is; and one that leaves a thread behind holds up no loop over a class."""
    (tmp_path / "mine.py").write_text(LOOPS.replace("WHILE", "1"))
    done = command("check", "mine.py", "--json", "--seconds", "5", cwd=tmp_path, status=2)
    problem = json.loads(done.stdout)["problem"]
    assert problem["id"] == "takes_too_long" and problem["line"] in range(4, 9)
    assert problem["text"].startswith("it still runs after 5 seconds.  Line ")
    (tmp_path / "mine.py").write_text(LOOPS.replace("WHILE", "0"))
    assert json.loads(command("check", "mine.py", "--json", cwd=tmp_path, status=1).stdout)["ok"] is False


def test_stdout_is_the_answer_alone_whoever_prints(tmp_path):
    text = (
        f"{RIGHT}\nimport os, subprocess, sys\nos.write(1, b'of C')\nsubprocess.run([sys.executable, '-c', 'print(5)'])"
    )
    (tmp_path / "mine.py").write_text(text)
    done = command("check", "mine.py", "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["ok"] and "of C" in done.stderr and "5" in done.stderr


LIE = '{"ok": true, "report": {}, "text": ""}'
HOSTILE = {  # what stands before the right or the wrong function: (whether it is wrong, the file's ok)
    "import os; os._exit(0)": (False, None),
    "import atexit, os; atexit.register(lambda: os._exit(0))": (True, False),
    f"import os\nfor fd in range(1, 20):\n    try: os.write(fd, b'{LIE}')\n    except OSError: pass": (True, False),
    "import os, time; os.closerange(3, 20); time.sleep(1)": (False, None),
    "import os; os.fork()": (True, False),
    "import json; json.dumps = lambda *_, **__: '{}'": (True, False),
    "import os, signal; os.kill(os.getpid(), 9)": (False, None),
    "class Encoder:\n    def __init__(self, num_hiddens): raise NotImplementedError\n    def __call__(self, x): pass":
    (False, True),
}  # fmt: skip


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks and signals are those of POSIX")
@pytest.mark.parametrize("line", HOSTILE)
def test_a_status_is_a_verdict_whatever_the_file_does(line, tmp_path):
    is_wrong, ok = HOSTILE[line]
    text = RIGHT.replace("np.sqrt(q.shape[-1])", "q.shape[-1]") if is_wrong else RIGHT
    (tmp_path / "mine.py").write_text(f"{line}\n{text}")
    done = command("check", "mine.py", "--json", cwd=tmp_path, status={True: 0, False: 1, None: 2}[ok])
    report = json.loads(done.stdout)
    assert report["ok"] is ok and "Traceback" not in done.stderr
    assert first(report) == ("scale_d" if is_wrong else "ended" if ok is None else None)


@pytest.mark.parametrize(
    "words", ["check", "dance", *(f"check a.py --{x}" for x in ("loud", "seconds 0", "seconds nan"))]
)
def test_wrong_words_are_told_on_stderr(words):
    done = command(*words.split(), status=2)
    assert done.stderr.startswith("usage: python -m mha_c") and not done.stdout


COMMANDS = "config", "demo", "selftest", "playground", "check"


@pytest.mark.parametrize("words", COMMANDS)
def test_each_command_has_help(words):
    assert command(words, "--help").stdout.startswith(f"usage: python -m mha_c {words} ")


def test_help_lists_every_command():
    said = command("--help").stdout
    assert said.startswith("usage: python -m mha_c ") and all(words in said for words in COMMANDS)


def test_version_alone():
    assert command("--version").stdout == f"mha_c {mha_c.__version__}\n"


def test_config_is_also_what_no_command_prints():
    said = command().stdout
    assert re.match(r"mha_c \S+ in .*\nisa \w+ \(", said) and "threads" in said and "numpy" in said
    assert command("config").stdout == said


@pytest.mark.parametrize(("words", "statuses"), [("", {3}), ("demo", {3}), ("--help", {0, 3})], ids=str)
def test_a_reader_who_stops_early_is_no_error(words, statuses):
    """As `| head -1` does; 1 would be a verdict.  argparse itself writes the help, and takes no notice."""
    process = subprocess.Popen(
        [sys.executable, "-m", "mha_c", *words.split()], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait(needs.HANGS) in statuses
    process.stderr.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is a file of Linux")
@pytest.mark.parametrize(
    "asked", ["", "demo", "selftest", "--help", "--version", "check mine.py", "check none.py", "late"]
)
def test_a_full_disk_is_said_in_a_line(asked, tmp_path):
    """With a status of its own: a grader must not take it for a wrong answer."""
    (tmp_path / "mine.py").write_text(RIGHT.replace("np.sqrt(q.shape[-1])", "1"))
    asked = "check mine.py --seconds 0.001" if asked == "late" else asked
    with open("/dev/full", "w") as full:
        environment = {**os.environ, "PYTHONUNBUFFERED": "", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        call = [sys.executable, "-m", "mha_c", *asked.split()]
        done = subprocess.run(call, stdout=full, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment)
    assert re.fullmatch(r"mha_c: the answer could not be written: .*No space left on device\n", done.stderr)
    assert done.returncode == 3


def test_the_playground_is_written_and_opened(tmp_path):
    """By any installation, in an empty folder."""
    page = tmp_path / "playground.html"
    (tmp_path / "open").write_text(f'#!/bin/sh\nprintf %s "$1" > {tmp_path / "opened"}\n')
    (tmp_path / "open").chmod(0o755)
    for _ in "again":  # over its own file
        done = command("playground", cwd=tmp_path, BROWSER=f"{tmp_path / 'open'} %s")
        assert done.stdout == f"Opened {page.as_uri()}\n"
    assert (tmp_path / "opened").read_text() == page.as_uri()
    assert own_layer.ELEMENT.search(page.read_text(encoding="utf-8")) and page.stat().st_size > 300_000
    done = command("playground", "there.html", "--no-browser", cwd=tmp_path)
    assert done.stdout == f"Open this in a browser: {(tmp_path / 'there.html').as_uri()}\n"
    assert (tmp_path / "there.html").read_bytes() == page.read_bytes()
    page.write_text("<p>the reader's own")
    done = command("playground", "--no-browser", cwd=tmp_path, status=2)
    assert "is another file, and stays" in done.stderr and page.read_text() == "<p>the reader's own"


def test_the_wheel_has_the_command():
    """`[project.scripts]` names a function that there is; an installed package has the program itself."""
    text = (ROOT / "pyproject.toml").read_text()
    (target,) = re.findall(r'^mha_c = "(.*)"$', text, re.MULTILINE)
    module, _, function = target.partition(":")
    code = f"import importlib; print(importlib.import_module({module!r}).{function}(['config']))"
    assert children.python("-c", code).stdout.endswith("\n0\n")
    installed = shutil.which("mha_c", path=str(Path(sys.executable).parent))
    if installed:
        done = subprocess.run([installed, "--help"], capture_output=True, text=True, check=True)
        assert done.stdout.startswith("usage: mha_c ")


# --- What it runs: demo, selftest --------------------------------------------------------------------------


def test_demo_prints_what_the_book_prints_and_ends_with_lines_that_work(tmp_path):
    out = command("demo").stdout
    next_lines = out.rpartition("\n\n")[2]
    assert next_lines.count("\n") >= 4
    children.python("-W", "error", "-c", next_lines, cwd=tmp_path)
    assert "What next?" in out and "mhac" in (tmp_path / "attention.html").read_text(encoding="utf-8")
    for text in (
        "[[[ 2.  3.  4.  5.]]",
        "[[10. 11. 12. 13.]]]",
        "[[[0.5    0.5    0.     0. ",
        "0.1667 0.1667 0.1667 0.1667 0.1667 0.1667 0. ",
        "(attention): DotProductAttention(",
        "(dropout): Dropout(p=0.5, inplace=False)",
        "(W_q): Linear(in_features=100, out_features=100, bias=False)",
        "output (2, 4, 100), attention_weights (2, 5, 4, 6)",
    ):
        assert text in out
    assert len(re.findall(r"^--- .*: \d+\.\d us$", out, re.MULTILINE)) == out.count("---") >= 5


OFFERED = [name for name, available in _core.isas() if available]


def test_selftest():
    done = children.python("-m", "mha_c.selftest")
    lines = done.stdout.splitlines()
    assert [line.split()[:2] for line in lines[1:-1]] == [[n, t] for n in OFFERED for t in ("float32", "float64")]
    assert lines[-1].startswith("all within bounds") and "FAIL" not in done.stdout


def test_selftest_notices_errors(monkeypatch, capsys):
    active = _core.isa()
    monkeypatch.setattr(selftest, "BOUNDS", {"float32": 1e-9})
    monkeypatch.setattr(selftest, "CASES", selftest.CASES[:2])
    assert selftest.main() == 1
    assert f"{2 * len(OFFERED)} FAILED" in capsys.readouterr().out and _core.isa() == active


def test_selftest_measures_errors():
    one = np.ones((2, 2))
    assert selftest.error([one], [one]) == 0
    assert selftest.error([one * 1.5], [one]) == 0.5
    assert selftest.error([np.array([1, -np.inf])], [np.array([1, -np.inf])]) == 0
    assert selftest.error([np.array([1, np.nan])], [np.array([1, -np.inf])]) == np.inf
    assert selftest.error([np.array([1, np.nan])], [one[0]]) == np.inf
    assert selftest.error([one[0]], [one]) == np.inf
