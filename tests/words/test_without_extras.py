"""Without torch, matplotlib or dask: what works, and what names the line that installs what is missing."""

import inspect
import pydoc

import pytest

import children
import mha_c

ABSENT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "matplotlib", "dask"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
import mha_c
"""


def without_extras(code):
    done = children.python("-W", "error", "-c", ABSENT + code, status=None)
    return done.stdout.strip() if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


def test_help_and_inspect_work_without_torch():
    assert without_extras("print(hasattr(mha_c, 'torch'), hasattr(mha_c, 'functional'))") == "False True"
    text = without_extras("import inspect, pydoc; print(len(inspect.getmembers(mha_c)), pydoc.render_doc(mha_c))")
    number, _, page = text.partition(" ")
    assert int(number) == len(inspect.getmembers(mha_c)) - hasattr(mha_c, "torch")
    assert "MultiHeadAttention" in page and "MultiHeadAttention" in pydoc.render_doc(mha_c)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import mha_c.torch", "ModuleNotFoundError: mha_c.torch needs torch: pip install torch"),
        ("from mha_c import torch", "ModuleNotFoundError: mha_c.torch needs torch: pip install torch"),
        ("mha_c.torch.MultiHeadAttention", "AttributeError: mha_c.torch needs torch: pip install torch"),
        ("import mha_c.dask", 'ModuleNotFoundError: mha_c.dask needs dask: pip install "mha_c[dask]"'),
        ("mha_c.show_heatmaps([[[[1.0]]]], 'k', 'q')", 'show_heatmaps needs matplotlib: pip install "mha_c[viz]"'),
    ],
)
def test_what_is_missing_is_said_with_the_line_that_installs_it(code, words):
    """An extra in brackets is quoted: some shells take brackets for a pattern."""
    assert without_extras(code).endswith(words)
