"""Python started in odd ways: without docstrings and assertions, or in a language that knows ASCII only."""

import pytest

from children import python

WAYS = {
    "without docstrings and assertions": (["-OO"], {}),
    "in a language that knows ASCII only": ([], {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}),
}
EVERYTHING = """
import sys
import numpy as np
import mha_c
from mha_c import functional, variants, viz
x = np.ones((1, 3, 8), np.float32)
layer = mha_c.MultiHeadAttention(8, 2, 0.0, rng=0)
print(layer, mha_c.explain(layer, x, x, x), mha_c.cost(layer, 3), mha_c.show_config())
layer(x, x, x, training=True)
layer.backward(x)
viz.view(layer.attention_weights, tokens=["a", "b", "\\u4f60"]).save(sys.argv[1])
try:
    layer(x, x, x[:, :2])
except mha_c.ShapeError as error:
    print(error)
"""


@pytest.mark.parametrize("way", WAYS)
def test_everything_works_when_python_is_started(way, tmp_path):
    options, variables = WAYS[way]
    page = tmp_path / "page.html"
    said = python(*options, "-c", EVERYTHING, page, **variables).stdout
    assert "MultiHeadAttention(" in said and "values has 2 keys" in said
    assert "你" in page.read_text(encoding="utf-8") or "\\u4f60" in page.read_text(encoding="utf-8")
    assert "Bahdanau" in python(*options, "-m", "mha_c", "demo", **variables).stdout
