"""What of a student's file is judged: what its names tell, but for parts of another; and what runs when."""

import io
import json
import re
import sys

import pytest

import needs
from mha_c.teach.grader import files

SOFTMAX = """
import numpy as np
def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)
"""
ATTENTION = """
def attention(q, k, v, valid_lens=None):
    scores = q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1])
    if valid_lens is not None:
        lens = np.asarray(valid_lens).reshape(len(valid_lens), -1, 1)
        scores = np.where(np.arange(k.shape[1]) < lens, scores, -1e6)
    return weighted(scores, v)
def weighted(scores, v):
    return softmax(scores) @ v
"""
CAUSAL = """
def causal_attention(q, k, v):
    scores = q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1])
    return softmax(np.where(np.tri(*scores.shape[1:]), scores, -np.inf)) @ v
"""


def names(report):
    return [(each.name, each.kind) for each in report.judged]


def test_a_part_of_another_is_judged_with_it_in_any_order(judged):
    """softmax is reached through `weighted`, whose name tells nothing, and which stands behind what uses it."""
    report = judged(SOFTMAX + ATTENTION)
    assert report.ok and names(report) == [("attention", "dot_product")]


def test_all_that_nobody_uses_is_judged(judged):
    report = judged(SOFTMAX + CAUSAL + ATTENTION)
    assert report.ok and names(report) == [("causal_attention", "causal"), ("attention", "dot_product")]
    wrong = judged(SOFTMAX + CAUSAL.replace("np.tri(", "np.ones(").replace("*scores", "scores") + ATTENTION)
    assert wrong.ok is False and [each.answer.ok for each in wrong.judged] == [False, True]
    assert len(re.findall("\n\nYours? ", str(wrong))) == 2


def test_two_that_use_each_other_are_both_judged(judged):
    both = ATTENTION + "def attention_2(q, k, v, valid_lens=None):\n    return attention(q, k, v, valid_lens)\n"
    report = judged(SOFTMAX + both.replace("    return weighted", "    attention_2\n    return weighted"))
    assert report.ok and len(report.judged) == 2


def test_a_part_is_judged_alone_where_it_is_named(judged):
    report = judged(SOFTMAX + ATTENTION, "softmax", "masked_softmax")
    assert names(report) == [("softmax", "masked_softmax")] and report.judged[0].answer.ok


def test_a_kind_takes_what_has_it_by_name_or_else_what_there_is(judged):
    assert names(judged(SOFTMAX + CAUSAL + ATTENTION, kind="causal")) == [("causal_attention", "causal")]
    alone = judged(SOFTMAX + CAUSAL.replace("causal_attention", "f"), kind="causal")
    assert alone.ok and names(alone) == [("f", "causal")]
    several = judged("def f(q, k, v): pass\ndef g(q, k, v): pass\n", kind="causal")
    assert several.problem.id == "nothing_to_judge" and "it defines f, g" in str(several)
    assert judged(CAUSAL, kind="causality").problem.id == "no_such_kind"


def test_what_is_imported_or_private_is_not_judged(judged):
    judged(SOFTMAX + ATTENTION, file="others.py")
    report = judged("from others import attention\ndef _attention(q, k, v): pass\n")
    assert report.problem.id == "nothing_to_judge" and "it defines no function and no class" in str(report)
    assert judged("from others import attention\n", "attention").ok


def test_a_name_may_be_a_class_or_a_layer(judged):
    text = """
        from dataclasses import dataclass
        import mha_c
        @dataclass
        class Options:
            heads: int = 2
        layer = mha_c.MultiHeadAttention(8, Options().heads, 0.0, rng=0)
        class DotProductAttention(mha_c.DotProductAttention):
            pass
    """
    text = "\n".join(line[8:] for line in text.splitlines())
    assert judged(text, "layer", "multi_head").ok
    assert names(judged(text)) == [("DotProductAttention", "dot_product")]
    assert judged(text, "Options").judged[0].problem.id == "not_judged"


def test_a_file_finds_its_neighbours_and_its_name_is_not_main(judged, tmp_path):
    (tmp_path / "helper_of_mine.py").write_text(SOFTMAX)
    text = f"from helper_of_mine import np, softmax{ATTENTION}\nif __name__ == '__main__':\n    raise SystemExit(1)\n"
    assert judged(text).ok
    assert not (tmp_path / "__pycache__" / "mine.cpython-39.pyc").exists()


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("x = 1\nraise KeyError('a')", 2, "KeyError: 'a'"),
        ("x = (", 1, "SyntaxError"),
        ("import sys\nsys.exit()", 2, "ends the program"),
        ("def f():\n    import nothing_such\nf()", 2, "install it where mha_c is"),
        ("x = '\0'", None, "null bytes"),
    ],
)
def test_what_does_not_import_is_told_with_its_line(judged, text, line, says):
    problem = judged(text).problem
    assert problem.id == "does_not_import" and says in str(problem)
    assert problem.line == line or (line is None and says in str(problem))


def test_files_that_are_none(judged, tmp_path):
    assert files.judged(str(tmp_path)).problem.id == "no_such_file"
    assert "it takes one file" in str(files.judged(str(tmp_path)))
    problem = judged("{}", file="mine.ipynb").problem
    assert problem.id == "does_not_import" and "mine.ipynb is no notebook of format 4" in str(problem)


def notebook(*cells):
    cells = [{"cell_type": kind, "source": text.splitlines(True)} for kind, text in cells]
    return json.dumps({"cells": cells, "nbformat": 4, "nbformat_minor": 5, "metadata": {}})


OF_THE_NOTEBOOK = (
    "code",
    f"%matplotlib inline\n!pip install d2l\nfiles = !ls{SOFTMAX}if True:\n    %time softmax\nsoftmax?\n",
)
REPORTING = ("code", 'print("100 %%"\n  % ())\ntext = """\n%d"""\n')  # Python, though lines begin with %


def test_the_cells_of_a_notebook_are_one_file(judged):
    """What uses what is told across cells; what is for the notebook alone, or of another language, does not run."""
    others = [("markdown", "# Homework"), ("code", "%%bash\nls | wc\n"), ("code", "%%time\nsoftmax(np.ones((2, 3)))")]
    report = judged(notebook(OF_THE_NOTEBOOK, ("code", ATTENTION), *others, REPORTING), file="mine.ipynb")
    assert report.ok and names(report) == [("attention", "dot_product")], report
    wrong = notebook(OF_THE_NOTEBOOK, ("code", ATTENTION.replace("np.sqrt(q.shape[-1])", "q.shape[-1]")))
    assert judged(wrong, file="mine.ipynb").judged[0].answer.mistakes == ["scale_d"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = 1\ny = zz\n", ".  Cell 3, line 2:\nNameError: name 'zz'"),
        ("x = 1\ny = (\n", 'mine.ipynb, cell 3", line 2'),
    ],
)
def test_a_cell_that_fails_is_named(judged, text, says):
    problem = judged(notebook(("markdown", "x"), OF_THE_NOTEBOOK, ("code", text)), file="mine.ipynb").problem
    assert (problem.id, problem.line) == ("does_not_import", 2) and says in str(problem)


def test_an_error_in_a_cell_shows_its_line(judged):
    text = "def attention(q, k, v):\n    return of_nobody(q)\n"
    assert "return of_nobody(q)" in str(judged(notebook(("code", text)), file="mine.ipynb"))


def test_nothing_is_read_from_stdin(judged, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("5\n"))
    problem = judged("x = 1\nn = int(input('How many? '))\n").problem
    assert problem.line == 2 and "EOFError" in str(problem) and '`if __name__ == "__main__":`' in str(problem)
    assert sys.stdin.read() == "5\n"


def test_a_plain_softmax_is_not_blamed_for_its_mask(judged):
    """It is a helper of the attention whose name tells nothing; asked for, or with a mask in its name, it is judged."""
    assert judged(SOFTMAX + "def mix(a, b): return softmax(a) @ b").problem
    assert names(judged(SOFTMAX.replace("softmax(x", "masked_softmax(x"))) == [("masked_softmax", "masked_softmax")]
    assert names(judged(SOFTMAX, kind="masked_softmax")) == [("softmax", "masked_softmax")]


def test_a_file_of_a_package_finds_the_package(judged, tmp_path):
    """As `python -m` would have it: by its relative imports, and by the package's name."""
    folder = tmp_path / "course" / "layers"
    folder.mkdir(parents=True)
    (tmp_path / "course" / "__init__.py").write_text("")
    (folder / "__init__.py").write_text("from . import weights\n")
    (folder / "weights.py").write_text(SOFTMAX)
    (tmp_path / "course" / "numbers_of_us.py").write_text("ONE = 1\n")
    imports = "import numpy as np\nfrom .weights import softmax\nfrom ..numbers_of_us import ONE\n"
    imports += "from course.layers.weights import softmax as same\nassert same is softmax and ONE == 1\n"
    report = judged(imports + ATTENTION, file="course/layers/mine.py")
    assert report.ok and names(report) == [("attention", "dot_product")], report
    assert judged(imports + ATTENTION.replace("np.sqrt(q.shape[-1])", "1"), file="course/layers/mine.py").ok is False


@pytest.mark.parametrize("made", ["d = 4", "d, n = 4, 2", "for d in (4, 8): pass"])
def test_a_name_that_only_a_program_has_is_no_mistake(judged, made):
    """The function is right where the file runs as a program, and cannot be asked where it does not."""
    text = SOFTMAX + ATTENTION.replace("q.shape[-1]", "d")
    (each,) = judged(f"{text}if __name__ == '__main__':\n    {made}\n").judged
    assert (each.ok, each.problem.id) == (None, "only_in_main") and str(each.problem).startswith("d has a value only")
    assert judged(text + "if True:\n    e = 4\n").ok is False  # nobody gives it a value


WHOLE = """
class {name}:
    def __init__(self, num_hiddens):
        self.W_q, self.W_k, self.W_v, self.W_o = np.ones((4, num_hiddens, num_hiddens))
    def __call__(self, queries, keys, values):
        q, k, v = queries @ self.W_q, keys @ self.W_k, values @ self.W_v
        {line}
        return attention(q, k, v) @ self.W_o
"""


@pytest.mark.parametrize(
    "line", ["q = q[:, :, ::-1] + np.tanh(k[:, :1]) ** 2", "assert q.shape[0] == 7", "v = v[:, :, :1, None]"]
)
def test_what_may_be_another_attention_is_no_verdict(judged, line):
    """An attention with relative positions differs from the book's, and is right; a plain name promises the book's."""
    other = judged(SOFTMAX + ATTENTION + WHOLE.format(name="RelativeAttention", line=line))
    whole = next(each for each in other.judged if each.name == "RelativeAttention")
    assert other.ok is None and (whole.ok, whole.problem.id) == (None, "not_sure")
    assert "\n\nYour" in whole.text and whole.as_dict()["problem"]["id"] == "not_sure"
    named = judged(SOFTMAX + ATTENTION + WHOLE.format(name="RelativeAttention", line=line), "RelativeAttention")
    assert named.ok is False
    assert judged(SOFTMAX + ATTENTION + WHOLE.format(name="MultiHeadAttention", line=line)).ok is False


HEADS = """
import numpy as np

def split_heads(x, num_heads):
    {}

def merge_heads(x, num_heads):
    {}
"""


@pytest.mark.parametrize(
    ("split", "merged"),
    [
        ("return x.reshape(*x.shape[:2], num_heads, -1).transpose(0, 2, 1, 3)",
         "b, h, t, d = x.shape; return x.transpose(0, 2, 1, 3).reshape(b, t, h * d)"),
        ("t, d = x.shape; return x.reshape(t, num_heads, d // num_heads).transpose(1, 0, 2)",
         "h, t, d = x.shape; return x.transpose(1, 0, 2).reshape(t, -1)"),
    ],
)  # fmt: skip
def test_heads_that_are_laid_with_other_axes_are_no_verdict(judged, split, merged):
    """Most write (batch, heads, steps, features); the book has batch and heads in one axis."""
    result = judged(HEADS.format(split, merged))
    assert [(each.name, each.ok, each.problem.id) for each in result.judged] == [
        ("split_heads", None, "not_sure"), ("merge_heads", None, "not_sure"),
    ]  # fmt: skip
    of_book = "x = x.reshape(*x.shape[:2], {}).transpose(0, {}); return x.reshape(-1, *x.shape[2:])"
    right, wrong = of_book.format("num_heads, -1", "2, 1, 3"), of_book.format("-1, num_heads", "3, 1, 2")
    assert [each.ok for each in judged(HEADS.format(right, merged)).judged] == [True, None]
    assert judged(HEADS.format(wrong, merged)).judged[0].answer.mistakes == ["heads_interleaved"]


def test_a_mistake_with_a_name_is_wrong_whatever_the_class_is_called(judged):
    text = SOFTMAX + ATTENTION.replace("np.sqrt(q.shape[-1])", "q.shape[-1]")
    report = judged(text + WHOLE.format(name="RelativeAttention", line="pass"))
    assert report.ok is False and "scale_d" in report.judged[0].answer.mistakes


OWN_TENSOR = """
import numpy as np

class Tensor:
    def __init__(self, data):
        self.held = np.asarray(data, float)

class SelfAttention:
    def __init__(self, n_embd: int, n_head: int, rng: np.random.Generator):
        self.n_head = n_head
        self.Wq, self.Wk, self.Wv, self.Wo = (rng.standard_normal((n_embd, n_embd)) for _ in range(4))

    def __call__(self, x: Tensor) -> Tensor:
        q, k, v = (x.held @ each for each in (self.Wq, self.Wk, self.Wv))
        return Tensor(q @ k.swapaxes(1, 2) @ v @ self.Wo)

class RoPE:
    def __init__(self, head_dim: int, base: float, max_len: int, scaling_factor: float):
        angles = np.arange(max_len)[:, None] / (scaling_factor * base ** (np.arange(0, head_dim, 2) / head_dim))
        self.cos, self.sin = np.cos(angles), np.sin(angles)

    def __call__(self, x, positions):
        one, two, c, s = x[..., 0::2], x[..., 1::2], self.cos[positions], self.sin[positions]
        return np.stack([one * c - two * s, one * s + two * c], -1).reshape(x.shape)
"""


def test_what_takes_objects_of_its_own_or_a_factor_that_nobody_knows_is_not_judged(judged):
    result = judged(OWN_TENSOR)
    assert [(each.name, each.ok) for each in result.judged] == [("SelfAttention", None), ("RoPE", None)], result


IN_MAIN = """
import numpy as np
import torch
from torch import nn

class ScaledDotProductAttention(nn.Module):
    def forward(self, Q, K, V, attn_mask):
        scores = torch.matmul(Q, K.transpose(-1, -2)) / np.sqrt(d_k)
        scores.masked_fill_(attn_mask, -1e9)
        weights = nn.Softmax(dim=-1)(scores)
        return torch.matmul(weights, V), weights

if __name__ == "__main__":
    d_k = 64
"""


def test_a_way_that_no_probe_can_be_given_says_nothing(judged):
    """All raise, since a size is known in the program alone; causal attention cannot be given a mask of keys."""
    needs.module("torch")
    (each,) = judged(IN_MAIN).judged
    assert (each.ok, each.problem.id) == (None, "only_in_main"), each
