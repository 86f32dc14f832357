"""heads.patterns and heads.importance(joint=True): against loops over their definitions, and on heads made for them."""

import numpy as np
import pytest

import mha_c
import needs
from mha_c import _patterns, heads

CLOSE = {"rtol": 0, "atol": 1e-6}  # means of some dozen float32 weights


def causal_weights(rng, batch=2, n_heads=3, tokens=9):
    scores = rng.standard_normal((batch, n_heads, tokens, tokens)).astype(np.float32)
    weights = np.where(np.tri(tokens, dtype=bool), np.exp(scores), 0)
    return weights / weights.sum(-1, keepdims=True)


def reference(weights, ids):
    """The docstring, query by query."""
    batch, n_heads, queries, keys = weights.shape
    found = {kind: [[] for _ in range(n_heads)] for kind in (*_patterns.PATTERNS, "induction")}
    for b in range(batch):
        for h in range(n_heads):
            for row in range(queries):
                i, w = row + keys - queries, weights[b, h, row].astype(np.float64)
                if i < 2 or not w.any():
                    continue
                seen = w[w > 0]
                even = -(seen * np.log2(seen)).sum() / np.log2(len(seen)) if len(seen) > 1 else 0.0
                for kind, x in (("previous", w[i - 1]), ("first", w[0]), ("self", w[i]), ("even", even)):
                    found[kind][h].append(x)
                after = [j for j in range(1, i) if ids[b][j - 1] == ids[b][i]]
                if after:
                    found["induction"][h].append(w[after].sum())
    return {kind: [np.mean(x) if x else np.nan for x in of_heads] for kind, of_heads in found.items()}


@pytest.mark.parametrize("cut", [0, 4])
def test_the_definitions(rng, cut):
    weights = causal_weights(rng)[:, :, cut:]
    weights[1, :, -1] = 0  # a row without keys
    ids = rng.integers(0, 3, (2, 9))
    found = heads.patterns(weights, ids)
    expected = reference(weights, ids)
    assert found.names == [0, 1, 2]
    for kind, numbers in expected.items():
        np.testing.assert_allclose(found.scores[kind], numbers, **CLOSE, err_msg=kind)
    assert "induction" not in heads.patterns(weights).scores


def test_heads_made_for_each_pattern():
    words = "a b c a b c a b".split()
    n = len(words)
    of_kind = {
        "previous": np.eye(n, k=-1),
        "first": np.eye(1, n).repeat(n, 0),
        "self": np.eye(n),
        "even": np.tri(n) / np.arange(1, n + 1)[:, None],
        "induction": np.eye(n, k=-2),  # the copy is three tokens back, what comes after it two
    }
    for array in of_kind.values():
        array[0] = np.eye(1, n)[0]
    found = heads.patterns(np.stack(list(of_kind.values())), " ".join(words))
    for i, kind in enumerate(of_kind):
        assert found.scores[kind][i] == pytest.approx(1.0) and found.ranked(kind)[0] == i
    assert found.scores["first"][0] == 0 and found.scores["even"][2] == 0
    text = repr(found).splitlines()
    assert text[0] == "what heads look at: the mean weight there" and len(text) == 7


def test_tokens_in_every_form(rng):
    weights, ids = causal_weights(rng, tokens=4), [[1, 2, 1, 2], [5, 5, 5, 6]]
    expected = heads.patterns(weights, np.array(ids)).scores["induction"]
    words = [["x", "y", "x", "y"], ["u", "u", "u", "v"]]
    for tokens in (ids, words, ["x y x y", "u u u v"]):
        np.testing.assert_array_equal(heads.patterns(weights, tokens).scores["induction"], expected)
    one = heads.patterns(weights, "x y x y").scores["induction"]
    np.testing.assert_array_equal(one, heads.patterns(weights, [words[0]] * 2).scores["induction"])
    assert np.isnan(heads.patterns(weights, "a b c d").scores["induction"]).all()
    with pytest.raises(mha_c.ShapeError, match="tokens: 4 are needed for each of 2 items"):
        heads.patterns(weights, "a b c")
    with pytest.raises(mha_c.ShapeError, match="4 queries and 3 keys"):
        heads.patterns(weights[..., :3])


def test_layers_and_lists_of_layers(rng):
    layer, x = mha_c.MultiHeadAttention(16, 4, 0.0, rng=0), rng.standard_normal((2, 5, 16))
    layer(x, x, x)
    of_layer = heads.patterns(layer)
    np.testing.assert_array_equal(of_layer.scores["self"], heads.patterns(layer.attention_weights).scores["self"])
    assert of_layer.names == [0, 1, 2, 3]
    both = heads.patterns([layer.attention_weights, causal_weights(rng)])
    assert both.names[0] == ("layer 1", 0) and both.names[-1] == ("layer 2", 2)
    with pytest.raises(TypeError, match="no attention_weights"):
        heads.patterns(object())


def test_what_was_seen_is_read_in_pieces(rng, monkeypatch):
    torch = needs.module("torch")
    from mha_c import _summary
    from mha_c import torch as mt

    q = torch.randn(2, 3, 9, 8)
    with mt.watch() as seen:
        for _ in range(2):
            mt.functional.dot_product_attention(q, q, q, causal=True)
    with pytest.raises(TypeError, match="no call of attention was seen"), mt.watch() as nothing:
        heads.patterns(nothing)
    ids = np.arange(18).reshape(2, 9) % 4
    whole = heads.patterns([call.weights for call in seen.calls], ids)
    monkeypatch.setattr(_summary, "PIECE", 20)
    found = heads.patterns(seen, ids)
    assert found.names[:3] == [("dot_product_attention (call 0)", h) for h in range(3)]
    for kind, numbers in whole.scores.items():
        np.testing.assert_allclose(found.scores[kind], numbers, **CLOSE, err_msg=kind)
    alone = heads.patterns(seen.calls[:1])
    assert alone.names[0] == ("dot_product_attention", 0)


# --- Jointly --------------------------------------------------------------------------------------------------


def twin_heads():
    """Two heads of four that do the same; the model takes the sign of their sum, so that one of them is enough."""
    layer = mha_c.MultiHeadAttention(8, 8, 8, 8, 4, 0.0, rng=0, dtype="float64")
    state = layer.state_dict()
    for name in ("W_q", "W_k", "W_v"):
        state[f"{name}.weight"][2:4] = state[f"{name}.weight"][:2]
    state["W_o.weight"][:, 2:4] = state["W_o.weight"][:, :2]
    state["W_o.weight"][:, 4:] *= 1e-3
    layer.load_state_dict(state)
    return layer


def signs(layer, batch):
    x, y = batch
    return (np.sign(layer(x, x, x)) != y).mean()


def test_jointly(rng):
    layer, x = twin_heads(), rng.standard_normal((8, 5, 8))
    batch = x, np.sign(layer(x, x, x))
    plain = heads.importance(layer, batch, loss=signs)
    found = heads.importance(layer, batch, loss=signs, joint=True)
    np.testing.assert_array_equal(found.scores["ablation"], plain.scores["ablation"])
    np.testing.assert_array_equal(found.joint, found.joint.T)
    np.testing.assert_array_equal(found.joint.diagonal(), found.scores["ablation"])
    state = layer.state_dict()
    for i in range(4):
        for j in range(4):
            without = dict(state, **{"W_o.weight": state["W_o.weight"].copy()})
            for head in (i, j):
                without["W_o.weight"][:, 2 * head : 2 * head + 2] = 0
            layer.load_state_dict(without)
            assert found.joint[i, j] == signs(layer, batch) - found.baseline
    first, second, beyond = found.pairs()[0]
    assert (first, second) == (0, 1) and beyond > 0.3
    assert found.scores["ablation"][:2].max() < 0.1  # each alone can be pruned


def test_jointly_without_a_loss_and_in_torch(rng):
    torch = needs.module("torch")
    from mha_c import torch as mt

    layer, x = mt.MultiHeadAttention(8, 8, 8, 8, 2, 0.0), torch.randn(2, 3, 8)
    before = layer(x, x, x)
    found = heads.importance(layer, (x, x, x), joint=True)
    assert found.joint[0, 1] == pytest.approx(1.0)  # nothing is left
    assert torch.equal(layer(x, x, x), before)
    with pytest.raises(ValueError, match="joint=True needs the method 'ablation'"):
        heads.importance(layer, (x, x, x), "entropy", joint=True)
    with pytest.raises(ValueError, match="pairs need importance"):
        heads.importance(layer, (x, x, x)).pairs()


@pytest.mark.parametrize("kind", ["CausalAttention", "GQAAttention"])
def test_layers_of_the_third_generation(kind):
    """Their heads can be measured, and pruned: those that share keys go together (test_pruned_groups.py)."""
    torch = needs.module("torch")
    from mha_c import torch as mt

    layer = getattr(mt, kind)(*((16, 4, 2) if kind[0] == "G" else (16, 4)))
    x = torch.randn(2, 5, 16)
    found = heads.importance(layer, (x, x, x), ["ablation", "entropy"])
    assert len(found.names) == 4 and (found.scores["ablation"] > 0).all()
    assert_prunes(layer, x)


@pytest.mark.parametrize("kind", ["CausalAttention", "GQAAttention"])
def test_numpy_layers_with_shared_heads(rng, kind):
    layer, x = getattr(mha_c, kind)(16, 4, *[2] * (kind[0] == "G"), rng=0), rng.standard_normal((2, 5, 16))
    found = heads.importance(layer, (x, x, x), ["ablation", "confidence"])
    assert len(found.names) == 4 and (found.scores["ablation"] > 0).all()
    assert_prunes(layer, x)


def assert_prunes(layer, x):
    """Two heads that share keys and values can go, one of them cannot."""
    if "GQA" in type(layer).__name__:
        with pytest.raises(ValueError, match="heads 0, 1 share keys and values, so they go together or stay"):
            heads.prune(layer, [0])
        assert layer.num_heads == 4
    heads.prune(layer, [0, 1])
    assert layer.num_heads == 2 and layer(x, x, x).shape == x.shape
