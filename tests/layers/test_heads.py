"""mha_c.heads: importance by four methods, the table and the chart, pruning, for NumPy layers and models of them."""

import copy
import pickle

import numpy as np
import pytest

import mha_c
import needs
from checks import same
from measured_heads import HEADS, HIDDENS, LENS, drawn_batch, numpy_layer, squared
from mha_c import _reference, heads, variants

layer, batch = pytest.fixture(numpy_layer), pytest.fixture(drawn_batch)


def reference_loss(layer, batch, gates):
    """The same in plain NumPy, with a factor on each head's output."""
    x, y, lens = batch
    state = layer.state_dict()
    state["W_o.weight"] = (state["W_o.weight"].reshape(HIDDENS, HEADS, -1) * gates[:, None]).reshape(HIDDENS, -1)
    out, _ = _reference.multi_head_attention(x, x, x, state, HEADS, lens)
    return ((out - y) ** 2).mean()


def snapshot(layer):
    grads = {name: None if p.grad is None else p.grad.copy() for name, p in layer.named_parameters()}
    return layer.state_dict(), grads, layer.training, layer.attention.dropout.p


def assert_same(before, after):
    for old, new in zip(before[:2], after[:2]):
        assert old.keys() == new.keys()
        for name in old:
            assert (old[name] is None) == (new[name] is None)
            if old[name] is not None:
                same(old[name], new[name])
    assert before[2:] == after[2:]


# --- Importance -------------------------------------------------------------------------------------


def test_ablation_is_the_growth_of_the_loss(layer, batch):
    found = heads.importance(layer, batch, "ablation", loss=squared)
    whole = reference_loss(layer, batch, np.ones(HEADS))
    without = [reference_loss(layer, batch, 1.0 - np.eye(HEADS)[h]) for h in range(HEADS)]
    np.testing.assert_allclose(found.scores["ablation"], np.array(without) - whole, rtol=1e-9)
    assert found.baseline == pytest.approx(whole, rel=1e-12)
    assert found.names == [0, 1, 2, 3]


def test_ablation_without_a_loss_is_the_change_of_the_output(layer, batch):
    x, _, lens = batch
    found = heads.importance(layer, (x, x, x, lens))
    whole = layer(x, x, x, lens)
    for head, score in enumerate(found.scores["ablation"]):
        less = copy.deepcopy(layer)
        weight = less.W_o.weight.copy()
        weight[:, head * 8 : head * 8 + 8] = 0
        less.W_o.weight = weight
        assert score == pytest.approx(np.linalg.norm(less(x, x, x, lens) - whole) / np.linalg.norm(whole), rel=1e-9)
    assert found.baseline is None


@pytest.mark.parametrize("per_example", [True, False])
def test_gradient_is_that_of_a_gate(layer, batch, per_example):
    found = heads.importance(layer, batch, "gradient", loss=squared, per_example=per_example)
    x, y, lens = batch
    parts = [(x[i : i + 1], y[i : i + 1], lens[i : i + 1]) for i in range(6)] if per_example else [batch]
    step = 1e-5
    expected = np.zeros(HEADS)
    for part in parts:
        for head in range(HEADS):
            gate = step * np.eye(HEADS)[head]
            up, down = (reference_loss(layer, part, 1 + sign * gate) for sign in (1, -1))
            expected[head] += abs(up - down) / (2 * step)
    # The loss is quadratic in a gate, so the central difference is exact but for rounding: 1e-16 / 1e-5.
    np.testing.assert_allclose(found.scores["gradient"], expected / len(parts), rtol=1e-8, atol=1e-10)


def test_entropy_and_confidence(layer, batch):
    x, _, lens = batch
    found = heads.importance(layer, (x, x, x, lens), ["confidence", "entropy"])
    layer(x, x, x, lens)
    weights = layer.attention_weights
    entropy = -(weights * np.log2(np.where(weights > 0, weights, 1))).sum(axis=-1).mean(axis=(0, 2))
    np.testing.assert_allclose(found.scores["entropy"], entropy, rtol=1e-12)
    np.testing.assert_allclose(found.scores["confidence"], weights.max(axis=-1).mean(axis=(0, 2)), rtol=1e-12)
    assert list(found.scores) == ["confidence", "entropy"]
    assert found.ranked("entropy") == list(np.argsort(-entropy))


def test_queries_that_see_nothing_do_not_count():
    layer = mha_c.MultiHeadAttention(8, 2, 0, rng=0, empty_rows="zero")
    x = np.zeros((2, 4, 8))
    found = heads.importance(layer_called(layer, x), (x, x, x, [4, 0]), ["entropy", "confidence"])
    np.testing.assert_allclose(found.scores["entropy"], 2)  # four keys alike: log2(4) bits
    np.testing.assert_allclose(found.scores["confidence"], 0.25)


def layer_called(layer, x):
    layer(x, x, x)
    return layer


def test_everything_is_as_before(layer, batch):
    layer.train()
    squared(layer, batch)
    squared_before = snapshot(layer)
    heads.importance(layer, [batch, batch], "all", loss=squared)
    assert_same(squared_before, snapshot(layer))

    def failing(layer, batch):
        squared(layer, batch)
        raise KeyError("stop")

    for method in heads.METHODS:
        with pytest.raises(KeyError):
            heads.importance(layer, batch, method, loss=failing)
        assert_same(squared_before, snapshot(layer))


def test_batches(layer, batch):
    x, y, lens = batch
    halves = [(x[:3], y[:3], lens[:3]), (x[3:], y[3:], lens[3:])]
    for method in ("gradient", "entropy"):
        whole = heads.importance(layer, batch, method, loss=squared).scores[method]
        split = heads.importance(layer, iter(halves), method, loss=squared).scores[method]
        np.testing.assert_allclose(split, whole, rtol=1e-12)
    by_name = {"queries": x, "keys": x, "values": x, "valid_lens": lens}
    np.testing.assert_array_equal(heads.importance(layer, by_name), heads.importance(layer, (x, x, x, lens)))


def test_models_of_numpy_layers(batch):
    class Model:
        def __init__(self):
            self.blocks = [numpy_layer(), numpy_layer(bias=False)]
            self.heads = {"last": numpy_layer()}
            self.size = 3

    model = Model()

    def loss(model, batch):
        return sum(squared(layer, batch) for layer in (*model.blocks, model.heads["last"]))

    found = heads.importance(model, batch, ["ablation", "gradient"], loss=loss)
    assert found.names[0] == ("blocks.0", 0) and found.names[-1] == ("heads.last", 3) and len(found.names) == 12
    alone = heads.importance(model.blocks[1], batch, ["ablation", "gradient"], loss=squared)
    for method in found.scores:
        np.testing.assert_allclose(found.scores[method][4:8], alone.scores[method], rtol=1e-9)
    worst = found.ranked()[:3]
    assert heads.prune(model, worst) is model
    left = [layer.num_heads for layer in (*model.blocks, model.heads["last"])]
    assert sum(left) == 9
    heads.prune(model, {"blocks.1": [0]})
    assert model.blocks[1].num_heads == left[1] - 1


def test_bad_calls_of_importance(layer, batch):
    x, _, _ = batch
    for method in ("taylor", [], ["ablation", "x"], None):
        with pytest.raises(ValueError, match="method must be one of ablation, gradient, entropy, confidence"):
            heads.importance(layer, batch, method, loss=squared)
    with pytest.raises(ValueError, match="needs loss="):
        heads.importance(layer, (x, x, x), "gradient")
    with pytest.raises(ValueError, match="loss did not call backward"):
        heads.importance(layer, batch, "gradient", loss=lambda layer, batch: 1.0)
    with pytest.raises(ValueError, match="one number"):
        heads.importance(layer, batch, loss=lambda layer, batch: np.ones(2))
    with pytest.raises(ValueError, match="at least one batch"):
        heads.importance(layer, [])
    for data, loss, says in ((None, None, r"data must be a batch .*, got None"), (batch, 1.0, "loss must be a func")):
        with pytest.raises(TypeError, match=says):
            heads.importance(layer, data, loss=loss)
    with pytest.raises(ValueError, match="set by the first call"):
        heads.importance(mha_c.MultiHeadAttention(8, 2, 0), (x, x, x))
    for model in ({}, 3):
        with pytest.raises(TypeError, match="no multi-head attention"):
            heads.importance(model, (x, x, x))
    for model in (mha_c.AdditiveAttention(8, 0.1), mha_c.DotProductAttention(0), mha_c.KernelAttention()):
        with pytest.raises(TypeError, match="it has one head, which is all of it"):
            heads.importance(model, (x, x, x))


# --- The table and the chart ------------------------------------------------------------------------


def test_ranking_and_table():
    scores = {"entropy": np.array([1.0, 3.0]), "ablation": np.array([2, 1.0])}
    found = heads.Importance([("a", 0), ("a", 1)], scores, baseline=0.5)
    assert found.ranked() == [("a", 1), ("a", 0)] and found.ranked("ablation") == [("a", 1), ("a", 0)]
    with pytest.raises(ValueError, match="was not measured; there is entropy, ablation"):
        found.ranked("gradient")
    lines = repr(found).splitlines()
    assert lines[0] == "head importance, loss with all heads 0.5"
    assert lines[1].split() == ["head", "entropy", "ablation"] and lines[2].split() == ["a", "0", "1", "2"]
    np.testing.assert_array_equal(np.asarray(found), [1, 3])
    negative = heads.Importance([0, 1], {"ablation": np.array([-1.0, 0.5])})
    assert repr(negative).splitlines()[2].split() == ["0", "-1"] and repr(negative).endswith("#" * 10)


def test_chart():
    needs.module("matplotlib")
    found = heads.Importance([0, 1], {"entropy": np.array([1.0, 3.0]), "ablation": np.array([2, -1.0])})
    figure = found.chart(figsize=(5, 3))
    assert [ax.get_title() for ax in figure.axes] == ["entropy", "ablation"]
    assert [bar.get_height() for bar in figure.axes[1].patches] == [2, -1]
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["0", "1"]
    assert list(figure.get_size_inches()) == [5, 3]
    for names, shown in [([("a", 0), ("a", 1)], ["0", "1"]), ([("a", 0), ("b", 0)], ["a 0", "b 0"])]:
        (ax,) = heads.Importance(names, {"entropy": np.ones(2)}).chart().axes
        assert [label.get_text() for label in ax.get_xticklabels()] == shown


# --- Pruning ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("removed", [[0], [3], [1, 2], [0, 1, 3], []])
def test_what_remains_is_unchanged(bias, removed, dtype, batch):
    layer = numpy_layer(bias, dtype)
    x = batch[0].astype(dtype)
    kept = [head for head in range(HEADS) if head not in removed]
    muted = copy.deepcopy(layer)
    weight = muted.W_o.weight.copy()
    weight.reshape(HIDDENS, HEADS, -1)[:, removed] = 0
    muted.W_o.weight = weight
    expected = muted(x, x, x, LENS)

    assert heads.prune(layer, removed) is layer
    out = layer(x, x, x, LENS)
    same(layer.attention_weights, muted.attention_weights[:, kept])
    # Sums over fewer columns: rounding of the order of the sum's own.
    np.testing.assert_allclose(out, expected, rtol=0, atol=20 * np.finfo(dtype).eps * np.abs(expected).max())
    left = len(kept) * HIDDENS // HEADS
    assert layer.num_heads == len(kept) and layer.num_hiddens == HIDDENS
    assert [W.weight.shape for W in (layer.W_q, layer.W_k, layer.W_v)] == [(left, HIDDENS)] * 3
    assert layer.W_o.weight.shape == (HIDDENS, left)
    assert f"(W_o): Linear(in_features={left}, out_features={HIDDENS}, bias={bias})" in repr(layer)


def test_a_pruned_layer_is_a_layer(layer, batch):
    x, _, lens = batch
    heads.prune(layer, [2])
    out = layer(x, x, x, lens)
    twin = numpy_layer()
    heads.prune(twin, 2)
    twin.load_state_dict(layer.state_dict())
    for other in (twin, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        same(other(x, x, x, lens), out)
        assert other.num_heads == 3
    layer.initialize(rng=0)
    assert layer.W_v.weight.shape == (24, HIDDENS)
    heads.prune(layer, [0, 1])
    assert layer.attention_weights.shape[1] == 3  # of the last call, still
    assert layer(x, x, x).shape == x.shape and layer.attention_weights.shape[1] == 1


def test_a_pruned_layer_can_be_trained(layer, batch):
    layer.train()
    squared(layer, batch)
    heads.prune(layer, [1])
    assert all(p.grad is None for p in layer.parameters())
    with pytest.raises(RuntimeError, match="once after each call in training mode"):
        layer.backward(batch[1])
    layer.attention.dropout.p = 0
    losses = []
    for _ in range(20):
        layer.zero_grad()
        losses.append(squared(layer, batch))
        for parameter in layer.parameters():
            parameter -= 0.5 * parameter.grad
    assert losses[-1] < 0.9 * losses[0]


def test_the_other_multi_head_layer():
    layer = variants.MultiHeadedSelfAttention(12, 3, rng=0)
    x = np.random.default_rng(0).standard_normal((2, 5, 12))
    found = heads.importance(layer, x, ["ablation", "entropy"])
    whole = layer(x)
    heads.prune(layer, found.ranked()[:1])
    assert layer.num_heads == 2 and layer.query_projection.weight.shape == (8, 12)
    change = np.linalg.norm(layer(x) - whole) / np.linalg.norm(whole)
    assert change == pytest.approx(found.scores["ablation"].min(), rel=1e-6)  # float32 parameters


def test_bad_calls_of_prune_change_nothing(layer, batch):
    before = layer.state_dict()
    for wrong, error, text in [
        ([4], ValueError, "no head 4, those of this layer are 0 to 3"),
        ([-1], ValueError, "no head -1"),
        ([0, 1, 2, 3], ValueError, "one must stay"),
        *[([head], TypeError, "heads must be whole numbers") for head in (1.0, True)],
        *[(none, TypeError, "heads must be .*, got ") for none in (None, 1.5, {"": None})],
        *[([pair], ValueError, "with a layer among ''") for pair in (("x", 1), ("", 0, 1), ([], 0))],
    ]:
        with pytest.raises(error, match=text):
            heads.prune(layer, wrong)
    model = {"a": layer, "b": numpy_layer()}
    with pytest.raises(ValueError, match="all 4 heads of 'b' would be removed"):
        heads.prune(model, {"a": [0], "b": range(4)})
    assert layer.num_heads == 4 and layer.state_dict().keys() == before.keys()
    for name, array in layer.state_dict().items():
        same(array, before[name])
    with pytest.raises(ValueError, match="set by the first call"):
        heads.prune(mha_c.MultiHeadAttention(8, 2, 0), [0])
