"""Layers trained in NumPy: a call and its `backward`, parameters and their gradients, what is refused."""

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
    KernelAttention,
    MultiHeadAttention,
    PositionalEncoding,
    ShapeError,
    _core,
    heads,
    variants,
)
from trained_layers import KINDS, B, Q, fitting, inputs, make

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
    getattr(layer, "attention", layer).dropout.p = 0.9
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


def test_an_optimizer_may_come_before_the_first_call():
    rng = np.random.default_rng(0)  # the fixture would be shared by threads
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
