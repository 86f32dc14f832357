"""mha_c.heads: importance by four methods, pruning, for NumPy layers, torch modules and models of either."""

import copy
import importlib
import pickle

import numpy as np
import pytest

import mha_c
import needs
from checks import fastest, same
from mha_c import _reference, heads, variants

HEADS, HIDDENS = 4, 32
LENS = [3, 5, 2, 5, 1, 4]


def numpy_layer(bias=True, dtype=np.float64, dropout=0.3):
    layer = mha_c.MultiHeadAttention(HIDDENS, HIDDENS, HIDDENS, HIDDENS, HEADS, dropout, bias=bias, rng=0, dtype=dtype)
    state = layer.state_dict()
    drawn = np.random.default_rng(1)
    layer.load_state_dict({name: drawn.standard_normal(x.shape) / 4 for name, x in state.items()})
    return layer


@pytest.fixture
def layer():
    return numpy_layer()


@pytest.fixture
def batch():
    rng = np.random.default_rng(2)
    x, y = rng.standard_normal((2, 6, 5, HIDDENS))
    return x, y, LENS


def squared(layer, batch):
    """Mean squared error; goes back, as "gradient" asks."""
    x, y, lens = batch
    error = layer(x, x, x, lens) - y
    if layer.training:
        layer.backward(2 * error / error.size)
    return (error**2).mean()


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


def test_half_the_heads_take_less_time():
    """Half the arithmetic, in time of the thread; the bound leaves room for what shares the caches."""
    layer = mha_c.MultiHeadAttention(256, 8, 0.0, rng=0)
    x = np.random.default_rng(0).standard_normal((2, 256, 256), dtype=np.float32)
    layer(x, x, x)
    half = heads.prune(copy.deepcopy(layer), [0, 2, 4, 6])
    with mha_c.set_num_threads(1):
        whole, pruned = fastest(lambda: layer(x, x, x), lambda: half(x, x, x), times=30)
    assert whole / pruned > 1.3


# --- torch ------------------------------------------------------------------------------------------


def torch_layers(torch):
    """The same layer four times: ours for torch, and d2l's of both generations where they are at hand."""
    import mha_c.torch

    made = {"mha_c": mha_c.torch.MultiHeadAttention(HIDDENS, HIDDENS, HIDDENS, HIDDENS, HEADS, 0.3, bias=True).double()}
    for version, sizes in (("0.17.6", [HIDDENS] * 3), ("1.0.3", [])):
        try:
            d2l = needs.real_d2l.load(version)
        except FileNotFoundError:
            continue
        made[version] = d2l.MultiHeadAttention(*sizes, HIDDENS, HEADS, 0.3, bias=True).double()
        x = torch.zeros(1, 1, HIDDENS, dtype=torch.float64)
        made[version](x, x, x, None)
    state = {name: torch.from_numpy(array) for name, array in numpy_layer().state_dict().items()}
    for module in made.values():
        module.load_state_dict(state)
    return made


def test_torch_modules_give_the_same_numbers(layer, batch):
    torch = needs.module("torch")
    expected = heads.importance(layer, batch, "all", loss=squared)
    tensors = tuple(torch.as_tensor(part) for part in batch)

    def loss(module, batch):
        x, y, lens = batch
        return ((module(x, x, x, lens) - y) ** 2).mean()

    x = tensors[0]
    for module in torch_layers(torch).values():
        module.W_o.weight.requires_grad_(False)
        found = heads.importance(module, tensors, "all", loss=loss)
        assert module.training and not module.W_o.weight.requires_grad and module.W_q.weight.grad is None
        assert found.baseline == pytest.approx(expected.baseline, rel=1e-12)
        for method in heads.METHODS:
            np.testing.assert_allclose(found.scores[method], expected.scores[method], rtol=1e-8, err_msg=method)
        by_output = heads.importance(module, (x, x, x, tensors[2]))
        np.testing.assert_allclose(by_output, heads.importance(layer, (batch[0],) * 3 + (LENS,)), rtol=1e-8)


def test_pruned_torch_modules(batch):
    torch = needs.module("torch")
    x, lens = torch.as_tensor(batch[0]), torch.as_tensor(batch[2])
    expected = heads.prune(numpy_layer(), [0, 2])(batch[0], batch[0], batch[0], LENS)
    for module in torch_layers(torch).values():
        model = torch.nn.ModuleDict({"block": module}).eval()
        heads.prune(model, [("block", 0), ("block", 2)])
        out = module(x, x, x, lens)
        np.testing.assert_allclose(out.detach(), expected, rtol=0, atol=1e-14)
        assert module.W_q.out_features == 16 and module.W_o.in_features == 16 and module.num_heads == 2
        assert all(p.requires_grad and p.is_leaf for p in module.parameters())
        out.sum().backward()
        assert module.W_v.weight.grad.shape == (16, HIDDENS)


def test_layers_of_other_courses_for_torch():
    torch = needs.module("torch")
    from mha_c.torch import variants as torch_variants

    module = torch_variants.MultiHeadedSelfAttention(12, 3)
    x = torch.randn(2, 5, 12)
    heads.prune(module, heads.importance(module, x, "confidence").ranked()[:1])
    assert module.num_heads == 2 and module(x).shape == x.shape and module.attention_weights.shape == (2, 2, 5, 5)


def test_layers_show_themselves(layer, batch):
    torch = needs.module("torch")
    import mha_c.torch

    x = batch[0][:1]
    layer(x, x, x)
    tokens = "the cat sat on it".split()
    page = layer.view(tokens=tokens, title="Ours")
    assert page.text.startswith("Ours: 4 heads, 5 queries x 5 keys") and all(token in page.html() for token in tokens)
    tensor = torch.as_tensor(x)
    for module in (
        torch_layers(torch)["mha_c"],
        mha_c.torch.variants.MultiHeadedSelfAttention(HIDDENS, HEADS).double(),
    ):
        module(*([tensor] * (1 if hasattr(module, "d_model") else 3)))
        assert f"{type(module).__name__}: 4 heads, 5 queries x 5 keys" in module.view(tokens).text
    decoder = mha_c.torch.Seq2SeqAttentionDecoder(vocab_size=10, embed_size=8, num_hiddens=16, num_layers=1)
    decoder(
        torch.zeros(2, 3, dtype=torch.long), decoder.init_state((torch.zeros(7, 2, 16), torch.zeros(1, 2, 16)), None)
    )
    assert "1 head, 3 queries x 7 keys" in decoder.view().text
    with pytest.raises(AttributeError, match="call the layer first"):
        mha_c.DotProductAttention(0).view()


def test_the_attention_of_torch_itself(batch):
    torch = needs.module("torch")
    module = torch.nn.MultiheadAttention(HIDDENS, HEADS, batch_first=True).double()
    x, y = (torch.as_tensor(part) for part in batch[:2])

    def loss(module, batch):
        x, y = batch
        return ((module(x, x, x)[0] - y) ** 2).mean()

    found = heads.importance(module, (x, y), ["ablation", "gradient"], loss=loss)
    with torch.no_grad():
        whole = float(loss(module, (x, y)))
        module.out_proj.weight[:, :8] = 0
        assert found.scores["ablation"][0] == pytest.approx(float(loss(module, (x, y))) - whole, rel=1e-9)
    with pytest.raises(ValueError, match="keeps no attention_weights"):
        heads.importance(module, (x, y), "entropy", loss=loss)
    with pytest.raises(TypeError, match="must fill embed_dim"):
        heads.prune(module, [0])


@pytest.mark.parametrize("role", ["W_o", "W_q"])
@pytest.mark.parametrize("kind", ["weight_norm", "pruned", "several"])
def test_weights_that_are_computed_anew_are_refused(role, kind):
    """What is changed in them would have no effect: each head would seem to matter nothing."""
    torch = needs.module("torch")
    import mha_c.torch

    layer, x = mha_c.torch.MultiHeadAttention(8, 8, 8, 8, 2, 0.0), torch.randn(2, 3, 8)
    linear, calls = getattr(layer, role), [lambda: heads.prune(layer, [0])]
    if kind == "weight_norm":
        torch.nn.utils.parametrizations.weight_norm(linear)
    elif kind == "pruned":
        importlib.import_module("torch.nn.utils.prune").random_unstructured(linear, "weight", 0.5)
    else:
        setattr(layer, role, torch.nn.Sequential(linear))
    if role == "W_o":
        calls.append(lambda: heads.importance(layer, (x, x, x)))
        calls.append(lambda: heads.importance(layer, (x, x, x), "gradient", loss=lambda part, data: part(*data).sum()))
    for call in calls:
        with pytest.raises(TypeError, match=f"{role} must be a torch.nn.Linear whose weight"):
            call()
    assert layer.num_heads == 2 and layer(x, x, x).shape == x.shape
    assert heads.importance(layer, (x, x, x), "entropy").scores["entropy"].shape == (2,)
