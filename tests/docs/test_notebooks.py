"""The notebooks run, print what they are for and draw their pictures."""

import os
import re
import time
from pathlib import Path

import pytest

import needs
import tools

resource = needs.module("resource")  # POSIX
ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = ROOT / "examples" / "notebooks"
SECONDS = 120  # for one notebook on two cores

# For each notebook: what it installs, how many pictures and pages it shows, and what its printed text must match.
SHOWN = {
    "bahdanau": ("torch matplotlib", 1, 1, [r"loss 0\.\d+", r"tokens/s", r"held-out sentences: bleu (0\.[5-9]|1\.)"]),
    "decoding": (
        "matplotlib",
        2,
        0,
        [
            r"(?s)(the same to the last bit: True.*){3}",
            r"rows in all: 40200 again, 400 with a cache",
            r"all steps: [\d.]+ times faster.*the last ten: [\d.]+",
            r"item 1 as if it were alone: True",
            r"\[6 6 4\]",
            r"full: it has room for 8 steps",
        ],
    ),
    "generation": (
        "torch matplotlib",
        2,
        0,
        [
            r"(99\.\d|100\.0)% of the second letters are right",
            r"the same letters: True\nlargest difference of logits: \de[-+]0[05-9]",
            r"at a context of 1024: \d+ times faster with a cache",
            r"MHA, .* 4096 bytes a step\nGQA, .* 1024 bytes a step\nMQA, .* 512 bytes a step",
            r"step by step, off by [1-9]",
            r"differs from the book's in one thing: positions begin at 0, whatever the offset\.(?s:.)*"
            r"\['offset_ignored'\]",
            r"all steps +100\.0% .* (9\d\.\d|100\.0)% of the late ones",
            r"window 16 +\d[\d.]+% .* [1-5]\d\.\d% of the late ones, +16384 bytes",
            r"window 16, 1 sink +[\d.]+% .* (9\d\.\d|100\.0)% of the late ones, +17408 bytes",
            r"give the first token [2-9]\d% of their attention",
            r"8 bits +the result is off by +0\.\d%\n(rank .* off by +\d+\.\d%\n){4}",
        ],
    ),
    "inside_any_model": (
        "torch matplotlib",
        3,
        1,
        [
            r"9\d\.\d% of the predictable letters are right",
            r"0 <blocks\.0: scaled_dot_product_attention, batch 64, 4 heads, 32 queries x 32 keys, causal>",
            r"sum of a row: 1\.000000",
            r"previous-token head: \('blocks\.0', \d\)  induction head: \('blocks\.1', \d\)",
            r"without \d: \+0\.\d\d, without \d: \+0\.\d\d, without both: \+\d\.\d\d",
            r"received by all keys: 16000, entropy of the last queries: 11\.\d\d bits",
        ],
    ),
    "long_sequences": (
        "matplotlib",
        1,
        1,
        [r"measured: .* operations/s", r"16384 +[\d.]+ ms +\d+ MiB", r"(?s)(the same: True.*){2}"],
    ),
    "multihead": (
        "matplotlib",
        4,
        2,
        [
            r"loss [\d.]+, (4|5)\d\.\d% of the letters right",
            r"attention 7 +0\.\d+ +0\.\d+ +\d\.\d+ +0\.\d+",
            r"(?s)least important first \(ablation\)\n  loss( +\d\.\d{3}){8}",
            r"(?m)^ +4 +8192 +[\d.]+ +\d+\.\d",  # how many times faster: test_cost.py judges it
        ],
    ),
    "predicting": (
        "matplotlib",
        1,
        0,
        [
            r"the same as in training: 1 of 8",
            r"position 0 for each: two orders of words differ by \d\.\de-0[78]",
            r"its own position: two orders of words differ by \d\.\de-01",
            r"position 0 for each: off by [1-9]",
            r"its own position: off by 0\.000",
            r"with a cache: off by (0\.0e\+00|\d\.\de-0[78])",
        ],
    ),
    "scoring": (
        "matplotlib",
        6,
        1,
        [r"\[\[\[ 2\.  3\.  4\.  5\.\]\]\n\n \[\[10\. 11\. 12\. 13\.\]\]\]", r"same weights: True"],
    ),
    "similarity": (
        "matplotlib",
        5,
        0,
        [r"(?s)(the same: True.*){2}", r"at 100: nan", r"the nearest, True", r"best width 0\.\d"],
    ),
    "write_it_yourself": (
        "matplotlib",
        0,
        2,
        [
            r"differs from the book's in one thing: masked scores become 0(?s:.)*should be: .*np.where\(.*, X, -1e9\)",
            r"Your masked_softmax computes what the book's masked_softmax does",
            r"differs from the book's in one thing: it divides scores by d, not by sqrt\(d\)\.",
            r"Your dot_product_attention computes what the book's dot_product does",
            r"\['one_line'\]\nleaking: 4 of 5 laws hold",
            r"BROKEN  items_apart",
            r"differs from the book's in one thing: there is no tanh",
            r"Your additive_attention computes what",
            r"differs from the book's in one thing: a plain reshape \(view\) makes the heads",
            r"Your multi_head_attention computes what",
            r"One line is not as the book has it(?s:.)*\['no_values'\]",
        ],
    ),
    "your_own_attention": (
        "torch",
        0,
        0,
        [
            r"Your MyAttention computes what the book's multi_head does",
            r"left __main__\.Broken as it is: its scale is not 1 / sqrt\(d\)",
            r"the same: True\nthe same weights: True\nstill mine: True True",
            r"with a hook: its own lines: something that it read has changed",
            r"without it: the compiled core, in the place of its own lines",
            r"forward .*: [\d.]+ times as fast",
            r"step 0: loss [\d.]+\nstep 19: loss 0\.\d+",
        ],
    ),
    "self_attention": ("matplotlib", 2, 1, [r"(?s)(the same: True.*){6}only shuffled: True.*only shuffled: False"]),
}


def test_all_are_tested():
    assert {path.stem for path in NOTEBOOKS.glob("*.md")} == set(SHOWN)
    listed = (ROOT / "docs" / "notebooks.md").read_text(encoding="utf-8")
    assert [name for name in SHOWN if f"notebooks/{name}.md" not in listed] == []
    assert {path.suffix for path in NOTEBOOKS.iterdir() if path.is_file()} == {".md"}  # text only in git


def executed(name, folder):
    """The notebook as the site has it, without its first cell, after a run in an empty folder in a kernel of this
    interpreter, and the seconds it took."""
    needs.module("jupytext"), needs.module("ipykernel")
    nbclient = needs.module("nbclient")
    notebooks = tools.load("tools/notebooks.py")
    notebook = notebooks.portable(name)
    assert "../" not in "".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    install = notebooks.install_cell(notebook)
    assert re.fullmatch(rf"%pip install -q git\+\S+ {SHOWN[name][0]}", install.source.splitlines()[-1])
    notebook.cells.remove(install)
    client = nbclient.NotebookClient(
        notebook, timeout=needs.HANGS, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    started, cpu = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    client.execute(env=os.environ)
    seconds, after = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    of_two_cores = (after.ru_utime + after.ru_stime - cpu.ru_utime - cpu.ru_stime) / 2
    return notebook, min(seconds, of_two_cores)  # a machine busy with something else is not the notebook's fault


# One of NumPy, one of torch, one of pictures and pages; the others by night, and at each push by `make docs`.  What
# they call is called by the tests of its folder.
BY_DAY = "write_it_yourself", "your_own_attention", "scoring"


@pytest.mark.parametrize("name", SHOWN if needs.NIGHTLY else BY_DAY)
def test_notebook(name, tmp_path):
    needs.module("matplotlib")
    if "torch" in SHOWN[name][0]:
        needs.module("torch")
    notebook, seconds = executed(name, tmp_path)
    printed, pictures, pages = "", 0, 0
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            assert output.get("name") != "stderr", output
            data = output.get("data", {})
            printed += output.get("text", "")  # a stream may come in pieces, cut anywhere
            printed += data["text/plain"] + "\n" if "text/plain" in data and "text/html" not in data else ""
            pages += "data-mhac=" in data.get("text/html", "")
            pictures += "image/png" in data and "text/html" not in data
    _, _, _, patterns = SHOWN[name]
    assert (pictures, pages) == SHOWN[name][1:3]
    missing = [pattern for pattern in patterns if not re.search(pattern, printed)]
    assert not missing, printed
    assert seconds < SECONDS
