"""The players of whole layers: their numbers are the layers', their shapes the book's, each step says its line."""

import copy
import json
import pickle
import re

import numpy as np
import pytest

import mha_c
import needs
from mha_c import teach
from mha_c.teach.asking import mistakes
from mha_c.teach.checks import verdicts

pytest_plugins = ["browser_fixtures"]


@pytest.fixture
def X(rng):
    return rng.standard_normal((3, 4)).round(1)


def batch(*arrays):
    return [x[None] for x in arrays]


@pytest.mark.parametrize("valid_lens", [None, 2, [1, 2, 3], 0])
@pytest.mark.parametrize("bias", [False, True])
def test_multi_head_is_what_the_layer_computes(X, valid_lens, bias):
    layer = mha_c.MultiHeadAttention(6, 3, 0.0, bias, dtype=np.float64, rng=1)
    lens = None if valid_lens is None else np.broadcast_to(np.asarray(valid_lens, np.int64), (3,))[None].copy()
    out = layer(*batch(X, X, X), lens)
    made = teach.multi_head(layer, X, valid_lens=valid_lens).matrices
    np.testing.assert_allclose(made["output"], out[0], atol=1e-12)
    np.testing.assert_allclose(made["weights"].reshape(3, 3, 3), layer.attention_weights[0], atol=1e-12)
    np.testing.assert_allclose(made["q_heads"], mha_c.transpose_qkv(made["q"][None], 3).reshape(-1, 2))
    np.testing.assert_allclose(made["joined"][:, 2:4], made["heads"][3:6])  # head 1: its columns, its rows


def test_additive_is_what_the_layer_computes(rng, X):
    layer = mha_c.AdditiveAttention(key_size=2, query_size=4, num_hiddens=5, dropout=0.0, dtype=np.float64, rng=1)
    keys, values = rng.standard_normal((4, 2)), rng.standard_normal((4, 3))
    out = layer(*batch(X, keys, values), [3])
    made = teach.additive(layer, X, keys, values, valid_lens=3).matrices
    np.testing.assert_allclose(made["output"], out[0], atol=1e-12)
    np.testing.assert_allclose(made["weights"], layer.attention_weights[0], atol=1e-12)
    np.testing.assert_allclose(made["features"][1 * 4 + 2], made["q"][1] + made["k"][2])


@pytest.mark.parametrize("generation", ["0.17.6", "1.0.3"])
def test_the_books_own_layers(X, generation):
    d2l, torch = needs.d2l(generation), needs.module("torch")
    sized = generation == "0.17.6"
    layer = d2l.MultiHeadAttention(*([4, 4, 4] if sized else []), 6, 3, 0.5).eval()
    tensor = torch.tensor(X, dtype=torch.float32)[None]
    if not sized:
        with pytest.raises(TypeError, match="W_q has no weight yet: call the layer once"):
            teach.multi_head(layer, X)
    out = layer(tensor, tensor, tensor, torch.tensor([2])).detach().numpy()
    made = teach.multi_head(layer, tensor, valid_lens=[2]).matrices
    np.testing.assert_allclose(made["output"], out[0], atol=1e-5)
    additive = d2l.AdditiveAttention(*([4, 4] if sized else []), 5, 0.5).eval()
    out = additive(tensor, tensor, tensor, None).detach().numpy()
    np.testing.assert_allclose(teach.additive(additive, tensor, tensor).matrices["output"], out[0], atol=1e-5)


@pytest.mark.parametrize("training", [None, True])
def test_the_last_call_is_shown(X, training):
    layer = mha_c.DotProductAttention(0.0)
    with pytest.raises(ValueError, match="this DotProductAttention was not called yet: call it, or give steps queries"):
        teach.steps(layer)
    layer(*batch(X, X, X), [1], training=training)
    out = layer(*batch(X, X, X), [2], training=training)
    np.testing.assert_allclose(teach.steps(layer).output, out[0], atol=1e-12)
    lens = np.array([2])
    out = layer(*batch(X, X, X), lens)  # the way of plain arrays, which has no lists
    np.testing.assert_allclose(teach.steps(layer).output, out[0], atol=1e-12)
    heads = mha_c.MultiHeadAttention(4, 2, 0.0, dtype=np.float64, rng=0)
    out_of_heads = heads(*batch(X, X, X), [2], training=training)
    np.testing.assert_allclose(teach.multi_head(heads).matrices["output"], out_of_heads[0], atol=1e-12)
    additive = mha_c.AdditiveAttention(4, 0.0, dtype=np.float64, rng=0)
    out = additive(*batch(X, X, X), training=training)
    np.testing.assert_allclose(teach.additive(additive).matrices["output"], out[0], atol=1e-12)
    np.testing.assert_allclose(teach.steps(heads).matrices["output"], out_of_heads[0], atol=1e-12)  # of any layer
    missing = "has not kept what it was called with: give steps the same arrays"
    for other in (heads.attention, pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):
        assert other.attention_weights.shape[1:] == (len(X), len(X))  # the weights are there, what went in is not
        with pytest.raises(ValueError, match=missing):
            teach.steps(other)
    heads(*batch(X, X, X), cache=heads.eval().new_cache(1, len(X)))
    with pytest.raises(ValueError, match="has not kept what it was called with: give multi_head"):
        teach.multi_head(heads)


def test_torchs_layer_has_kept_no_inputs(X):
    torch = needs.module("torch")
    layer = mha_c.torch.DotProductAttention(0.0)
    layer(*[torch.tensor(X[None], dtype=torch.float32)] * 3)
    with pytest.raises(ValueError, match="has not kept what it was called with: give steps the same arrays"):
        teach.steps(layer)


def test_the_text_is_for_any_terminal(X):
    heads = mha_c.MultiHeadAttention(4, 2, 0.0, rng=0)
    heads(*batch(X, X, X), [2])
    additive = mha_c.AdditiveAttention(4, 0.0, rng=0)
    additive(*batch(X, X, X), [2])
    steps = teach.steps(X, X, X, 2)
    right, wrong = (teach.check(mine, "dot_product") for mine in (teach.book.dot_product, lambda q, k, v: v @ v))
    laws = teach.laws(lambda X, valid_lens: X, "masked_softmax")
    players = teach.multi_head(heads), teach.additive(additive), steps, steps.tiles()
    for shown in (*players, teach.puzzle(3), right, wrong, laws):
        assert str(shown).isascii()
    every = [*mistakes.MISTAKES, *((text,) for text in verdicts.SECTIONS.values())]
    assert all(str(each).isascii() for each in every)


def test_what_cannot_be_played(X):
    layer = mha_c.MultiHeadAttention(4, 2, 0.0, rng=0)
    with pytest.raises(TypeError, match="W_q has no weight yet"):
        teach.multi_head(layer, X)
    layer(*batch(X, X, X))
    with pytest.raises(mha_c.ShapeError, match="W_q takes 4 features, got 3"):
        teach.multi_head(layer, X[:, :3])
    with pytest.raises(TypeError, match="the player reads W_q, W_k, w_v; w_v has no weight"):
        teach.additive(layer, X, X)
    with pytest.raises(ValueError, match="up to 64 x 64"):
        large = mha_c.MultiHeadAttention(100, 5, 0.0, rng=0)
        large(*[np.ones((1, 2, 4), np.float32)] * 3)
        teach.multi_head(large, X)


def test_each_step_says_its_line_and_its_shape(X):
    layer = mha_c.MultiHeadAttention(6, 3, 0.0, rng=1)
    layer(*batch(X, X, X))
    player = teach.multi_head(layer, X, tokens="the cat sat")
    assert "masked" not in [step.get("id") for step in player.data["steps"]]  # there is no mask
    said = {step["code"]: step["shape"] for step in player.data["steps"]}
    assert said["self.W_q(queries)"] == "(1, 3, 6)"
    assert said["queries = self.transpose_qkv(self.W_q(queries))"] == "(3, 3, 2)"
    assert said["output_concat = self.transpose_output(output)"] == "(1, 3, 6)"
    assert "output_concat = self.transpose_output(output)   # (1, 3, 6)" in str(player)
    masked = teach.multi_head(layer, X, valid_lens=2)
    assert "masked" in [step.get("id") for step in masked.data["steps"]]
    json.dumps(masked.data, allow_nan=False)
    steps = teach.steps(X, X, X)
    assert [step["id"] for step in steps.data["steps"]] == ["inputs", "scores", "scaled", "weights", "output"]
    assert steps.data["steps"][1]["code"] == "scores = torch.bmm(queries, keys.transpose(1, 2))"


def number(text):
    return float(re.search(r"= ([-\d.]+)$", text.replace("−", "-"))[1])


def player_of_heads(X):
    heads = mha_c.MultiHeadAttention(4, 2, 0.0, True, rng=1)
    heads(*batch(X, X, X))
    heads.W_q.bias = np.array([1, 2, 3, 4], np.float32)
    return teach.multi_head(heads, X, valid_lens=[1, 2, 3], tokens="the cat sat")


def player_of_sums(X):
    additive = mha_c.AdditiveAttention(key_size=4, query_size=4, num_hiddens=4, dropout=0.0, rng=0)
    return teach.additive(additive, X, X[:2], X[:2], valid_lens=1)


@pytest.mark.by_day("width", "made", together=1)
@pytest.mark.parametrize("width", [390, 1024])
@pytest.mark.parametrize("made", [player_of_heads, player_of_sums])
def test_pointing_at_the_last_cell_of_each_step(show, width, made):
    """Each step's arithmetic ends with the number of its cell, and numbers stay in the cells on a phone."""
    player = made(np.random.default_rng(4).standard_normal((3, 4)).round(1))  # no score of ten, which has one decimal
    shown = show(player)
    shown.browser.size(width, 900)
    shown.settle()
    for step in player.data["steps"][1:]:
        shown.click(".mhac-primary")
        matrix = player.matrices[step["grids"][-1]["matrix"]]
        assert shown.text(".mhac-code") == f"{step['code']}   # {step['shape']}"
        for row in range(len(matrix)):
            x, y = (matrix.shape[1] - 0.5) / matrix.shape[1], (row + 0.5) / len(matrix)
            point(shown, x, y, len(matrix))
            said = shown.text(".mhac-sum")
            column = int(re.search(r", (\d+):", said)[1])
            name = player.data["labels"][step["named"]].index(said.rpartition(f", {column}:")[0])
            expected = max(matrix[name, column], -1e6)
            assert number(said) == pytest.approx(expected, abs=0.006) or expected == -1e6, step
        widths = shown.run("return [...R.querySelectorAll('.mhac-grid')].map(g => [g.querySelector('canvas')"
                           ".clientWidth, g.querySelector('.mhac-note')?.textContent])")  # fmt: skip
        for pixels, note in widths:
            columns = int(note.split(" × ")[1]) if note else 1
            assert pixels / columns >= 29, (step["title"], pixels, note)
        assert shown.overflow() == 0


def point(shown, x, y, rows):
    """Moves over the cells of the result, which lie at the right and at the bottom of its canvas."""
    shown.run(
        "const c = [...R.querySelectorAll('.mhac-grid canvas')].pop(), b = c.getBoundingClientRect();"
        "const to = (clientX, clientY) => c.dispatchEvent(new PointerEvent('pointermove', {clientX, clientY}));"
        f"to(b.right - 30, b.bottom - {rows} * 10 * (1 - {y}) - 5)"
    )
