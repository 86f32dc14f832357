"""Layers trained in NumPy: `backward` against autograd and finite differences, parameters, what is refused."""

import copy
import importlib.util
import pickle
from pathlib import Path

import numpy as np
import pytest

import needs
from checks import same
from mha_c import (
    AdditiveAttention,
    DotProductAttention,
    KernelAttention,
    MultiHeadAttention,
    PositionalEncoding,
    ShapeError,
    _core,
    heads,
    set_num_threads,
    variants,
)

B, Q, K = 2, 5, 9
LENS = {"all": None, "per item": [4, 0], "per query": np.array([[1, 2, 3, 4, 9], [9, 0, 2, 9, 1]])}
ROLES = "W_q", "W_k", "W_v", "W_o"


def inputs(rng, dtype=np.float64, queries=Q, keys=K):
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in ((B, queries, 6), (B, keys, 5), (B, keys, 8)))


def make(kind, dropout=0.0, rng=0, dtype=np.float64, empty_rows="uniform"):
    options = {"rng": rng, "dtype": dtype, "empty_rows": empty_rows}
    if kind == "dot":
        return DotProductAttention(dropout, **options)
    if kind == "additive":
        return AdditiveAttention(5, 6, 7, dropout, **options)
    layer = MultiHeadAttention(5, 6, 8, 12, 3, dropout, bias=kind == "with biases", **options)
    for _, p in layer.named_parameters():
        p.data = layer._rng.standard_normal(p.shape)  # biases that are not 0
    return layer


KINDS = ["multi-head", "with biases", "additive", "dot"]


def fitting(kind, arrays):
    """Dot products need keys as wide as the queries."""
    return (arrays[0][..., :5], *arrays[1:]) if kind == "dot" else arrays


def by_torch(layer, arrays, grad, **options):
    """(gradients of queries, keys, values; gradients of the parameters by name) from autograd."""
    torch_math = needs.module("torch_math")
    parameters = {name: torch_math.leaf(array) for name, array in layer.state_dict().items()}
    x = [torch_math.leaf(array) for array in arrays]
    w_v = parameters.get("w_v.weight")
    weights, biases = ([parameters.get(f"{name}.{part}") for name in ROLES] for part in ("weight", "bias"))
    heads = getattr(layer, "num_heads", 1)
    out = torch_math.layer(x, weights, biases, None if w_v is None else w_v[0], heads, **options)
    found = torch_math.gradients(out, grad, [*x, *parameters.values()])
    return found[:3], dict(zip(parameters, found[3:]))


def near(found, expected, tolerance=1e-12):
    """The gradient of W_k's bias, which softmax does not see, is 0 but for the rounding of terms above 1."""
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * max(np.abs(expected).max(), 1))


def next_seed(stream):
    """The seed that a layer with this stream draws for its next call, by a copy of the stream."""
    return int(copy.deepcopy(stream).integers(0, 2**64, dtype=np.uint64))


# --- Right numbers -------------------------------------------------------------------------------


@pytest.mark.parametrize("empty_rows", ["uniform", "zero"])
@pytest.mark.parametrize("lens", LENS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_autograd_agrees(rng, isa, kind, lens, empty_rows, dropout):
    stream = np.random.default_rng(5)
    layer = make(kind, dropout, stream, empty_rows=empty_rows).train()
    arrays = fitting(kind, inputs(rng))
    seed = next_seed(stream)
    out = layer(*arrays, LENS[lens])
    grad = rng.standard_normal(out.shape)
    found = layer.backward(grad)
    options = {"valid_lens": LENS[lens], "empty_rows": empty_rows, "dropout": dropout, "seed": seed}
    of_inputs, of_parameters = by_torch(layer, arrays, grad, **options)
    for a, b in zip(found, of_inputs):
        near(a, b)
    assert [name for name, _ in layer.named_parameters()] == list(of_parameters)
    for name, p in layer.named_parameters():
        near(p.grad, of_parameters[name])


def test_autograd_agrees_on_a_larger_layer(rng, isa):
    layer = MultiHeadAttention(48, 4, 0.1, bias=True, rng=(stream := np.random.default_rng(1)), dtype=np.float64)
    x = rng.standard_normal((3, 150, 30))
    layer(x, x, x)
    seed = next_seed(stream)
    lens = [150, 71, 3]
    out = layer(x, x, x, lens, training=True)
    grad = rng.standard_normal(out.shape)
    of_inputs, of_parameters = by_torch(layer, (x, x, x), grad, valid_lens=lens, dropout=0.1, seed=seed)
    for a, b in zip(layer.backward(grad), of_inputs):
        near(a, b)
    for name, p in layer.named_parameters():
        near(p.grad, of_parameters[name])


@pytest.mark.parametrize("kind", KINDS)
def test_finite_differences_agree(rng, kind):
    layer, arrays, lens = make(kind), fitting(kind, inputs(rng)), [4, 0]
    out = layer(*arrays, lens, training=True)
    grad = rng.standard_normal(out.shape) / 4
    of_inputs = layer.backward(grad)

    def loss():
        return (layer(*arrays, lens) * grad).sum()

    step = 1e-4
    for x, gradient in zip(arrays, of_inputs):
        for _ in range(8):
            at = tuple(rng.integers(0, n) for n in x.shape)
            middle, ends = x[at], []
            for move in (-2, -1, 1, 2):
                x[at] = middle + move * step
                ends.append(loss())
            x[at] = middle
            assert abs((8 * (ends[2] - ends[1]) - (ends[3] - ends[0])) / (12 * step) - gradient[at]) < 1e-8
    for p in layer.parameters():
        way, before = rng.standard_normal(p.shape), p.data.copy()
        ends = []
        for move in (-2, -1, 1, 2):
            p.data = before + move * step * way
            ends.append(loss())
        p.data = before
        # The way has a length of some units, and the third derivative goes with its cube.
        assert abs((8 * (ends[2] - ends[1]) - (ends[3] - ends[0])) / (12 * step) - (p.grad * way).sum()) < 1e-7


@pytest.mark.parametrize("kind", KINDS)
def test_padding_has_no_influence(rng, dtype, isa, kind):
    arrays, lens = fitting(kind, inputs(rng, dtype)), [4, 7]
    results = []
    for rubbish in (0.0, np.nan, np.inf):
        queries, keys, values = (x.copy() for x in arrays)
        for b, n in enumerate(lens):
            keys[b, n:] = values[b, n:] = rubbish
        layer = make(kind, 0.3, dtype=dtype)
        out = layer(queries, keys, values, lens, training=True)
        _, grad_keys, grad_values = found = layer.backward(np.ones_like(out))
        for b, n in enumerate(lens):
            assert not grad_keys[b, n:].any() and not grad_values[b, n:].any()
        results.append([x.tobytes() for x in (*found, *(p.grad for p in layer.parameters()))])
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("kind", KINDS)
def test_other_type_than_the_layers(rng, kind):
    """A float32 layer computes in float64 where it is asked to, and keeps gradients in its own type."""
    narrow, wide = make(kind, dtype=np.float32), make(kind)
    wide.load_state_dict(narrow.state_dict())
    arrays = fitting(kind, inputs(rng))
    same(*(layer.backward(np.ones_like(layer(*arrays, training=True))) for layer in (narrow, wide)))
    for a, b in zip(narrow.parameters(), wide.parameters()):
        same(a.grad, b.grad.astype(np.float32))


@pytest.mark.parametrize("kind", KINDS)
def test_neither_threads_nor_layout_change_a_bit(rng, dtype, isa, kind):
    arrays = fitting(kind, inputs(rng, dtype, 70, 90))
    results = []
    for n in range(1, 9):
        set_num_threads(n)
        layer = make(kind, 0.2, dtype=dtype)
        out = layer(*arrays, [90, 41], training=True)
        grad = np.random.default_rng(0).standard_normal(out.shape).astype(dtype)
        grad = np.asfortranarray(grad) if n % 2 else np.repeat(grad, 2, axis=1)[:, ::2]
        found = layer.backward(grad)
        results.append([x.tobytes() for x in (*found, *(p.grad for p in layer.parameters()))])
    assert all(result == results[0] for result in results)


def test_the_gradient_of_a_sum(rng, dtype):
    """Stride 0 on every axis, as autograd hands it on."""
    arrays = inputs(rng, dtype)
    first, second = make("multi-head", dtype=dtype), make("multi-head", dtype=dtype)
    shape = first(*arrays, training=True).shape
    second(*arrays, training=True)
    same(first.backward(np.broadcast_to(dtype.type(1), shape)), second.backward(np.ones(shape, dtype)))


# --- A call and its backward -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_call_whatever_changes_after_it(rng, kind):
    arrays = fitting(kind, inputs(rng))
    layer, other = make(kind, 0.3), make(kind, 0.3)
    grad = np.ones_like(other(*arrays, lens := np.array([4, 8]), training=True))
    expected = other.backward(grad)
    out = layer(*arrays, lens, training=True)
    out += 7  # a residual connection in place
    lens[:] = 1
    layer(*arrays, training=False)  # another call, which keeps nothing
    layer._dropout.p = 0.9
    for p in layer.parameters():
        p.data = np.zeros(p.shape)
    same(layer.backward(grad), expected)
    for p, q in zip(layer.parameters(), other.parameters()):
        same(p.grad, q.grad)


def test_gradients_add_up_until_they_are_cleared(rng):
    layer, arrays = make("with biases"), inputs(rng)
    assert all(p.grad is None for p in layer.parameters())
    layer.backward(np.ones_like(layer(*arrays, training=True)))
    once = [p.grad.copy() for p in layer.parameters()]
    layer.backward(np.ones_like(layer(*arrays, training=True)))
    for p, grad in zip(layer.parameters(), once):
        same(p.grad, grad + grad)
    layer.zero_grad()
    assert all(p.grad is None for p in layer.parameters())
    layer.backward(np.ones_like(layer(*arrays, training=True)))
    for p, grad in zip(layer.parameters(), once):
        same(p.grad, grad)


NEEDS_CALL = r"{}.backward: call backward once after each call in training mode \(layer.train\(\), or training=True in"


@pytest.mark.parametrize("kind", KINDS)
def test_backward_without_its_call(rng, kind):
    layer, arrays = make(kind), fitting(kind, inputs(rng))
    words = NEEDS_CALL.format(type(layer).__name__)
    with pytest.raises(RuntimeError, match=words):
        layer.backward(np.ones((B, Q, 8)))
    out = layer(*arrays)
    with pytest.raises(RuntimeError, match=words):
        layer.backward(np.ones_like(out))
    layer.train()(*arrays)
    layer.backward(np.ones_like(out))
    with pytest.raises(RuntimeError, match=words):
        layer.backward(np.ones_like(out))
    with pytest.raises(ShapeError):
        layer(arrays[0][:1], *arrays[1:])  # a refused call leaves nothing to go back through
    with pytest.raises(RuntimeError, match=words):
        layer.backward(np.ones_like(out))


def test_the_inner_attention_has_no_backward_of_its_own(rng):
    layer = make("multi-head")
    layer(*inputs(rng), training=True)
    with pytest.raises(RuntimeError, match=NEEDS_CALL.format("DotProductAttention")):
        layer.attention.backward(np.ones((B, Q, 4)))


@pytest.mark.parametrize(
    ("grad", "error", "words"),
    [
        (np.ones((B, Q, 11)), ShapeError, r"grad_output has shape \(2, 5, 11\), but the output it belongs to has"),
        (np.ones(12), ShapeError, r"grad_output has shape \(12,\)"),
        (1.0, ShapeError, r"grad_output has shape \(\)"),
        (np.ones((B, Q, 12), np.float32), TypeError, "grad_output must be float64 like the output it belongs to"),
        (np.ones((B, Q, 12), int), TypeError, "grad_output must be float32 or float64, got int64"),
        (None, TypeError, "grad_output must be an array, got None"),
    ],
)
def test_a_refused_gradient_changes_nothing(rng, grad, error, words):
    layer, arrays = make("with biases"), inputs(rng)
    out = layer(*arrays, training=True)
    with pytest.raises(error, match=words):
        layer.backward(grad)
    assert all(p.grad is None for p in layer.parameters())
    layer.backward(np.ones_like(out).tolist())  # a list will do


def test_projected_keys_lead_nowhere(rng):
    layer, (queries, keys, values) = make("additive"), inputs(rng)
    layer(queries, layer.project_keys(keys), values, training=True)
    with pytest.raises(RuntimeError, match="was given projected keys, through which no gradient reaches W_k"):
        layer.backward(np.ones((B, Q, 8)))
    layer(queries, keys, values, training=True)
    layer.backward(np.ones((B, Q, 8)))


@pytest.mark.parametrize("kind", KINDS)
def test_copies_start_without_gradients(rng, kind):
    layer, arrays = make(kind), fitting(kind, inputs(rng))
    out = layer(*arrays, training=True)
    layer.backward(np.ones_like(out))
    layer(*arrays, training=True)
    for other in (copy.copy(layer), copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        with pytest.raises(RuntimeError):
            other.backward(np.ones_like(out))
        other(*arrays, training=True)
        other.backward(np.ones_like(out))
    layer.backward(np.ones_like(out))


def test_tensors_give_tensors(rng):
    torch = needs.module("torch")
    layer, other, arrays = make("with biases"), make("with biases"), inputs(rng)
    out = layer(*(torch.from_numpy(x) for x in arrays), training=True)
    found = layer.backward(torch.ones_like(out))
    expected = other.backward(np.ones_like(other(*arrays, training=True)))
    for a, b in zip(found, expected):
        assert isinstance(a, torch.Tensor)
        same(a.numpy(), b)


def test_self_attention_of_one_argument_gives_one_gradient(rng):
    layer = variants.MultiHeadedSelfAttention(8, 2, rng=0, dtype=np.float64).train()
    x, step = rng.standard_normal((2, 5, 8)), 1e-4
    grad = rng.standard_normal(x.shape)
    layer(x)
    gradient, way = layer.backward(grad), rng.standard_normal(x.shape)
    layer.eval()
    ends = [(layer(x + move * step * way) * grad).sum() for move in (-2, -1, 1, 2)]
    assert abs((8 * (ends[2] - ends[1]) - (ends[3] - ends[0])) / (12 * step) - (gradient * way).sum()) < 1e-7


# --- Parameters ---------------------------------------------------------------------------------------


def test_parameters_are_handles(rng):
    layer = make("with biases")
    assert [p.name for p in layer.parameters()] == list(layer.state_dict())
    weight = dict(layer.named_parameters())["W_v.weight"]
    assert repr(weight) == "Parameter('W_v.weight', shape=(12, 8))" and weight.grad is None
    before = layer.W_v.weight.copy()
    weight -= 0.5
    same(layer.W_v.weight, before - 0.5)
    weight += np.full(weight.shape, 0.25)
    same(layer.W_v.weight, before - 0.5 + 0.25)
    weight.data = before
    same(weight.data, before)
    weight -= 1
    same(layer.W_v.weight, before - 1)
    with pytest.raises(ValueError, match="read-only"):
        weight.data[0] = 1  # what is read is not the layer's to write
    with pytest.raises(ShapeError, match=r"W_v.weight must have shape \(12, 8\), got \(3,\)"):
        weight.data = np.ones(3)


def test_gradients_can_be_changed_and_taken_away(rng):
    layer = make("with biases")
    layer.backward(np.ones_like(layer(*inputs(rng), training=True)))
    p = layer.parameters()[0]
    before = p.grad.copy()
    p.grad *= 0.5  # clipping
    same(layer.W_q.weight_grad, before * 0.5)
    layer.W_q.weight_grad *= 2
    same(p.grad, before)
    p.grad = None
    assert layer.W_q.weight_grad is None
    with pytest.raises(ShapeError, match=r"the gradient of W_q.weight must have shape \(12, 6\), got \(6, 12\)"):
        p.grad = before.T
    with pytest.raises(TypeError, match=r"the gradient of W_q.weight must be float32 or float64, got int64"):
        p.grad = np.ones((12, 6), int)
    without = make("multi-head")
    assert without.W_q.bias_grad is None
    without.W_q.bias_grad = None
    with pytest.raises(ValueError, match="W_q has no bias"):
        without.W_q.bias_grad = np.ones(12)


def test_an_optimizer_may_come_before_the_first_call(rng):
    layer = MultiHeadAttention(12, 3, 0.0, rng=0, dtype=np.float64)
    parameters = layer.parameters()
    assert repr(parameters[0]) == "Parameter('W_q.weight', not initialised yet)" and parameters[0].grad is None
    with pytest.raises(AttributeError, match="W_q is not initialised yet"):
        parameters[0].data  # noqa: B018
    x = rng.standard_normal((2, 4, 5))
    target = rng.standard_normal((2, 4, 12))
    losses = []
    for _ in range(60):
        error = layer(x, x, x, training=True) - target
        losses.append(np.square(error).mean())
        layer.zero_grad()
        layer.backward(2 * error / error.size)
        for p in parameters:
            p -= 0.5 * p.grad
    assert losses[-1] < 0.7 * losses[0] and all(a > b for a, b in zip(losses, losses[1:]))


def test_the_example_learns():
    path = Path(__file__).resolve().parents[2] / "examples" / "train_numpy.py"
    spec = importlib.util.spec_from_file_location("train_numpy", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    model, losses = example.train(steps=200)
    assert losses[0] > 2.5 and np.mean(losses[-20:]) < 0.3
    keys, values, n_pairs, questions, answers = example.draw_items(np.random.default_rng(9), 100)
    assert (model.forward(keys, values, n_pairs, questions).argmax(-1) == answers).mean() > 0.95


def test_training_calls_and_others_give_the_same(rng, dtype, isa):
    for kind in KINDS:
        layer, arrays = make(kind, dtype=dtype), fitting(kind, inputs(rng, dtype))
        quiet = layer(*arrays, [4, 9])
        weights = layer.attention_weights
        same(layer(*arrays, [4, 9], training=True), quiet)
        same(layer.attention_weights, weights)
        assert _core.isa() == isa


def test_heads_are_measured_while_nothing_else_drops_or_learns():
    """A model's positions and its decoder's attention drop too, and a student has gradients from before."""

    class Model:
        def __init__(self):
            self.positions = PositionalEncoding(8, 0.5, rng=0)
            self.attention = MultiHeadAttention(8, 8, 8, 8, 2, 0.5, rng=1)
            self.decoder = AdditiveAttention(8, 8, 4, 0.5, rng=2)
            self.pooling = KernelAttention()

        def parts(self):
            return self.positions, self.attention, self.decoder, self.pooling

    def loss(model, batch):
        (x,) = batch
        out = model.positions(x)
        for part in model.parts()[1:]:
            out = part(out, out, out)
        if model.attention.training:
            gradient = 2 * out / out.size
            for part in model.parts()[:0:-1]:
                gradient = sum(part.backward(gradient))
            model.positions.backward(gradient)
        return (out**2).mean()

    model, batch = Model(), (np.random.default_rng(3).standard_normal((3, 5, 8)),)
    for part in model.parts():
        part.train()
    loss(model, batch)
    before = model.decoder.W_q.weight_grad.copy(), model.pooling.width_grad
    first, second = (heads.importance(model, batch, ["ablation", "gradient"], loss=loss) for _ in range(2))
    for method in first.scores:
        np.testing.assert_array_equal(first.scores[method], second.scores[method])
    assert all(part.training for part in model.parts()) and model.positions.dropout.p == 0.5
    same(model.decoder.W_q.weight_grad, before[0])
    assert model.pooling.width_grad == before[1]
