"""attention_weights of the torch modules: what they are, that they cost nothing until used, that they are tensors."""

import copy
import gc
import os
import pickle
import sys
import warnings
import weakref

import numpy as np
import pytest
import torch

import needs
from mha_c import torch as mt
from seen_by_torch import bytes_taken, events_of_python
from threads import in_threads
from torch_modules import inputs


@pytest.mark.parametrize("keys", [6, 400])  # kept as they are; rebuilt when used
@pytest.mark.parametrize("grad", [False, True])
def test_attention_weights(keys, grad):
    layer, (q, k, v) = mt.MultiHeadAttention(12, 10, 14, 20, 5, 0.5), inputs(keys=keys, queries=50)
    with pytest.raises(AttributeError, match="call the layer first"):
        layer.attention_weights  # noqa: B018
    with pytest.raises(AttributeError, match="call the layer first"):
        layer.attention.attention_weights  # noqa: B018
    assert not hasattr(layer, "attention_weights") and not hasattr(layer.attention, "nonsense")
    with torch.set_grad_enabled(grad):
        layer(q, k, v, torch.tensor([3, keys]))
    by_head, flat = layer.attention_weights, layer.attention.attention_weights
    assert by_head.shape == (2, 5, 50, keys) and flat.shape == (10, 50, keys)
    assert by_head.dtype == flat.dtype == torch.float32 and flat.requires_grad == by_head.requires_grad == grad
    with torch.no_grad():  # what the call used, whatever happens since
        layer.W_q.weight.mul_(3)
        q.zero_()
    assert torch.equal(by_head.reshape(10, 50, keys), flat)
    torch.testing.assert_close(flat.sum(-1), torch.ones(10, 50))
    assert not flat[:5, :, 3:].any() and torch.equal(torch.cat([flat, flat])[:10], flat)
    assert isinstance(flat.numpy(), np.ndarray) and type(flat.reshape(-1)) is torch.Tensor
    assert np.array_equal(np.asarray(flat), copy.deepcopy(flat).cpu().detach().numpy())
    assert torch.equal(pickle.loads(pickle.dumps(flat)), flat)


def test_lazy_weights_behave_like_tensors():
    layer, x = mt.MultiHeadAttention(8, 8, 8, 8, 8, 0.0), torch.randn(1, 40, 8, requires_grad=True)

    def fresh():
        layer(x, x, x)
        return layer.attention.attention_weights

    expected = fresh() + 0
    for use in (
        lambda w: w.clone(),
        lambda w: w[:],
        lambda w: torch.stack([w])[0],
        lambda w: w.detach(),
        lambda w: w.data,
        lambda w: torch.as_tensor(w.numpy()),
        lambda w: torch.tensor(w.tolist()),
        lambda w: w.to(torch.float32) * 1,
        lambda w: torch.zeros(8, 40, 40).copy_(w),
        lambda w: torch.cat(list(w)).reshape(8, 40, 40),
        lambda w: torch.from_dlpack(w),
        lambda w: w.view(8, 40, 40),
        lambda w: w.permute(0, 2, 1).mT,
        lambda w: torch.compile(lambda t: t * 1, backend="eager")(w),
    ):
        compiles = "compile" in repr(use.__code__.co_names)
        if compiles and not needs.torch_has("torch.compiler.is_exporting"):
            continue
        with warnings.catch_warnings():
            if compiles:  # some compilers say that they do not know such tensors
                warnings.simplefilter("ignore")
            assert torch.equal(use(fresh()), expected)
    weights = fresh()
    assert (len(weights), weights.dim(), weights.numel(), weights.is_leaf) == (8, 3, 12800, False)
    assert "tensor(" in repr(weights) and weights.sum().item() == pytest.approx(320)
    weights.mul_(2)
    torch.testing.assert_close(weights.sum().item(), 640.0)


def test_reading_weights_is_cheap():
    """There is no room for weights, and for 16 times as many no call more in Python."""
    layer = mt.MultiHeadAttention(32, 32, 32, 32, 4, 0.1)

    def calls_of_a_reading():
        events = events_of_python(lambda: layer.attention.attention_weights)
        return events.count("call") + events.count("c_call")

    found = []
    for length in (10, 41):
        x = torch.randn(64, length, 32, requires_grad=True)
        layer(x, x, x, None)
        found.append(calls_of_a_reading())
    assert found[0] == found[1] < 120
    layer(x, x, x)
    of_weights = 4 * 64 * 4 * 41 * 41  # bytes
    assert bytes_taken(lambda: layer.attention.attention_weights) < of_weights / 20
    assert bytes_taken(lambda: layer.attention.attention_weights.sum()) >= of_weights


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("length", [4, 100])  # weights that are kept, and that are computed when looked at
def test_requires_grad_holds(length, grad):
    """Weights that were shown are a leaf like any tensor, until the next call."""
    layer, x = mt.DotProductAttention(0.0), torch.randn(2, length, 8)
    layer(x, x, x)
    weights = layer.attention_weights
    assert not weights.requires_grad
    with pytest.raises(RuntimeError, match=r"without its attention_weights|does not require grad"):
        torch.autograd.grad((weights * 2).sum(), weights)
    assert weights.requires_grad_() is not None and weights.requires_grad and weights.is_leaf
    assert layer.attention_weights is weights
    with torch.set_grad_enabled(grad):
        loss = (weights * weights).sum()
    assert loss.requires_grad == grad
    if grad:
        torch.testing.assert_close(torch.autograd.grad(loss, weights)[0], 2 * weights.detach())
        (3 * weights).sum().backward()
        assert torch.equal(weights.grad, torch.full_like(weights.detach(), 3))
    weights.requires_grad = False
    assert not weights.requires_grad and not (weights * 2).requires_grad
    left = weakref.ref(weights.requires_grad_())
    (weights * 2).sum()
    del weights, loss
    layer(x, x, x)
    gc.collect()
    assert left() is None


@pytest.mark.parametrize("way", ["cache", "projected"])
def test_what_was_assigned_goes_with_a_decoders_call(way):
    layer, x = mt.MultiHeadAttention(8, 8, 8, 8, 2, 0.0).eval(), torch.randn(2, 3, 8)
    with torch.no_grad():
        kv = layer.project(x, x)
        layer.attention_weights = assigned = torch.zeros(1)
        assert layer.attention_weights is assigned
        _ = layer(x, x, x, cache=layer.new_cache(2, 3)) if way == "cache" else layer(x, kv)
    flat = layer.attention.attention_weights
    assert torch.equal(layer.attention_weights, flat.reshape(2, 2, 3, 3))


def overtaken(call, other, step):
    """`call`, with `other` in another thread before instruction number `step` in our code.

    None if there are not so many; else what it has given, and nothing has been raised and caught on the way.
    """
    left, raised, before = [step], [], sys.gettrace()

    def trace(frame, event, what):
        if f"{os.sep}mha_c{os.sep}" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "exception" and what[0] is not StopIteration:
            raised.append(what)
        if event == "opcode":
            left[0] -= 1
            if left[0] == -1:
                in_threads(other)
        return trace

    sys.settrace(trace)
    try:
        found = call()
    finally:
        sys.settrace(before)
    assert not raised
    return None if left[0] >= 0 else found


READINGS = {
    "the numbers": lambda weights, layer: layer.attention_weights + 0,
    "what was shown before": lambda weights, layer: weights + 0,
    "a copy": lambda weights, layer: copy.copy(layer),
}


@pytest.mark.parametrize("reading", READINGS)
def test_threads_read_the_same_call(reading):
    """Another thread reads the weights, and drops what they come from, between any two instructions of a reading."""
    layer, x, found = mt.DotProductAttention(0.0), torch.randn(1, 40, 8), []
    layer(x, x, x)
    expected = layer.attention_weights + 0
    overtaken(lambda: READINGS[reading](layer.attention_weights, layer), None, 9999)  # Python 3.12 sees none at first
    for step in range(9999):
        layer(x, x, x)
        weights = None if reading == "the numbers" else layer.attention_weights
        read = overtaken(
            lambda weights=weights: READINGS[reading](weights, layer),
            lambda: found.append(layer.attention_weights + 0),
            step,
        )
        if read is None:
            break
        read = read.attention_weights + 0 if reading == "a copy" else read
        assert torch.equal(read, expected) and torch.equal(found.pop(), expected)
    assert 100 < step < 9998


def test_reading_too_early_or_behind_an_exporter():
    layer, x = mt.MultiHeadAttention(8, 8, 8, 8, 2, 0.0).eval(), torch.randn(2, 5, 8)
    for module in (layer, layer.attention, mt.variants.MultiHeadedSelfAttention(8, 2), mt.KernelAttention()):
        with pytest.raises(AttributeError, match="no attention_weights yet: call the layer first"):
            _ = module.attention_weights
        assert not hasattr(module, "attention_weights") and getattr(module, "attention_weights", None) is None
    with pytest.raises(AttributeError, match="no attribute 'attention_weight'"):
        _ = layer.attention_weight
    needs.export()
    torch.export.export(layer, (x, x, x))
    for module in (layer, layer.attention):
        with pytest.raises(AttributeError, match="traced for export, so it has no attention weights"):
            _ = module.attention_weights


def test_weights_of_children_are_one_tensor_for_all_readings():
    layer, x = mt.MultiHeadAttention(8, 8, 8, 8, 2, 0.0), torch.randn(2, 5, 8)
    layer.W_q.register_forward_hook(lambda module, inputs, out: 2 * out)  # so children are called one by one
    layer(x, x, x)
    with torch.no_grad():
        shown = layer.attention_weights
    assert shown.shape == (2, 2, 5, 5) and shown.requires_grad and layer.attention_weights is shown
    shown.data[0, 0] = 7.0
    assert layer.attention.attention_weights[0].eq(7).all()
    layer(x, x, x)
    assert layer.attention_weights is not shown


@pytest.mark.parametrize("first", ["attention", "layer"])
def test_both_shapes_are_one_memory_whichever_is_read_first(first):
    """Also to autograd, which counts changes: read without gradients, changed and used with them."""
    layer = mt.MultiHeadAttention(8, 8, 8, 8, 2, 0.0).eval()
    with torch.no_grad():
        layer(*[torch.randn(3, 4, 8)] * 3)
        if first == "attention":
            flat, by_head = layer.attention.attention_weights, layer.attention_weights
        else:
            by_head, flat = layer.attention_weights, layer.attention.attention_weights
    assert by_head.shape == (3, 2, 4, 4) and flat.shape == (6, 4, 4) and flat.is_leaf and by_head.is_leaf
    second, factor = flat if first == "layer" else by_head, torch.tensor(2.0, requires_grad=True)
    loss = (factor * (by_head if second is flat else flat)).sum()
    second.add_(1)
    assert torch.equal(flat.reshape(3, 2, 4, 4), by_head) and torch.equal(flat.sum(-1), torch.full((6, 4), 5.0))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_is_known_without_the_numbers_is_torchs_answer():
    layer, x, found = mt.MultiHeadAttention(10, 10, 10, 20, 5, 0.0), torch.randn(2, 51, 10), []
    with torch.no_grad():
        layer(x, x, x)
    weights = layer.attention_weights
    taken = bytes_taken(
        lambda: found.extend([weights.grad_fn, weights.requires_grad, weights.is_leaf, weights.is_cuda])
    )
    assert taken < 4 * weights.numel() / 5
    plain = weights.clone()
    assert found == [plain.grad_fn, plain.requires_grad, plain.is_leaf, plain.is_cuda] == [None, False, True, False]
    assert weights.requires_grad_().requires_grad is True


@pytest.mark.parametrize("keys", [6, 400])  # kept as they are; rebuilt when used
@pytest.mark.parametrize("before", [False, True])
def test_a_look_under_inference_mode_takes_no_gradient_away(keys, before):
    found = []
    for looks in (False, True):
        torch.manual_seed(0)
        layer, (q, k, v) = mt.MultiHeadAttention(12, 10, 14, 20, 5, 0.0), inputs(keys=keys, queries=50)
        layer(q, k, v)
        weights = layer.attention_weights if before else None
        if looks:
            with torch.inference_mode():
                layer.attention_weights.sum()
        weights = layer.attention_weights if weights is None else weights
        weights.square().sum().backward()
        found.append(layer.W_q.weight.grad)
    assert torch.equal(*found)


def test_weights_first_seen_under_inference_mode_are_tensors_like_others():
    layer, factor = mt.DotProductAttention(0.0), torch.ones((), requires_grad=True)
    with torch.no_grad():
        layer(*inputs(sizes=(10, 10, 14)))
    with torch.inference_mode():
        layer.attention_weights.sum()
    (layer.attention_weights * factor).sum().backward()
    torch.testing.assert_close(factor.grad, torch.tensor(8.0))  # rows of weights
