"""What would write or read beside an array: results of many axes as tensors, methods that run during a call,
instruction sets that change meanwhile, and arrays without numbers, which take neither time nor memory.
"""

import itertools
import sys
import threading
import time
import tracemalloc

import numpy as np
import pytest

import mha_c
import needs
from binding_calls import DV, F32, PROJECTIONS, B, D, K, Q, layer, numbers
from checks import MANY
from core_calls import core as _core
from mha_c import _core as positional

# --- Results of many axes that become tensors ----------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 4, 5, 13, 30])
def test_results_of_any_rank_become_tensors(rank):
    torch = needs.module("torch")
    import mha_c.torch  # noqa: F401 (it tells the core what tensors are)

    x = np.ones((*([2] if rank > 1 else []), *([1] * max(rank - 2, 0)), 4), F32)
    if rank == 13:
        x = np.ones((*[2] * 12, 4), F32)
    weight = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    y = _core.linear(x, (weight, None))
    assert torch.is_tensor(y) and tuple(y.shape) == (*x.shape[:-1], 3) and y.is_contiguous()
    assert torch.equal(y.reshape(-1, 3), torch.from_numpy(x).reshape(-1, 4) @ weight.T)
    grad_x, grad_weight, grad_bias = _core.linear_backward(np.ones(y.shape, F32), x, weight, True)
    assert tuple(grad_x.shape) == x.shape and float(grad_weight.sum()) == 4 * y.numel()
    assert tuple(grad_bias.shape) == (3,)


# --- Methods that run during the call ------------------------------------------------------------------------


class Resizes:
    """A number whose method gives an array's memory back."""

    def __init__(self, array, number):
        self.array, self.number = array, number

    def _resize(self):
        self.array.resize(0, refcheck=False)
        return self.number

    __index__ = _resize

    def __float__(self):
        return float(self._resize())

    def __bool__(self):
        return bool(self._resize())


def own(*shape):
    return np.ones(shape, F32)


def attention_arguments(bad, place):
    arguments = [own(B, Q, D), own(B, K, D), own(B, K, DV), None, None, None, None, None, -1, -1, None, 0.5, 1, "zero"]
    arguments += [False, False, False, None, None]
    if place == "origin":
        arguments[17] = (0, 0, bad(arguments[0]), 0)
    elif place == "softcap":
        arguments[18] = (None, bad(arguments[0]), None)
    else:
        arguments[place] = bad(arguments[0])
    return arguments


@pytest.mark.parametrize("place", [8, 9, 10, 11, 12, 14, 15, 16, "origin", "softcap"])
def test_numbers_are_read_before_arrays_are_borrowed(place):
    """The call sees the array as the method left it: without numbers, so it is refused, or has nothing to compute."""
    arguments = attention_arguments(lambda array: Resizes(array, 1), place)
    with pytest.raises(ValueError):
        positional.attention_forward(*arguments)
    assert arguments[0].size == 0


@pytest.mark.parametrize("place", range(6, 11))
def test_numbers_of_a_layer_are_read_before_its_arrays(place):
    x = own(B, Q, 5), own(B, K, 5), own(B, K, 3)
    arguments = [*x, None, PROJECTIONS, None, 2, "zero", 0.1, 3, False]
    if place != 7:  # a string
        arguments[place] = Resizes(x[0], 2 if place == 6 else 1)
        with pytest.raises(ValueError):
            positional.layer_forward(*arguments)
        assert x[0].size == 0


def test_flags_and_sizes_are_read_before_arrays():
    x, grad = own(B, 5), own(B, 8)
    with pytest.raises(ValueError):
        positional.linear_backward(grad, x, numbers(8, 5), Resizes(x, 1))
    packed, bias, _ = PROJECTIONS[0]
    x = own(B, 5)
    with pytest.raises(TypeError, match="projection"):
        positional.linear(x, (packed, bias, (8, Resizes(x, 5))))


# --- An instruction set that changes meanwhile ---------------------------------------------------------------------


def test_another_thread_may_select_instruction_sets_during_calls():
    """A call has the bits of one of them from its beginning to its end; a backward those of one for its forward's."""
    isas, active = [name for name, offered in positional.isas() if offered], positional.isa()
    module = mha_c.MultiHeadAttention(64, 4, 0.0, rng=0).train()
    x, stop, interval = numbers(6, 40, 64), threading.Event(), sys.getswitchinterval()
    outs, grads = set(), set()
    for first, second in itertools.product(isas, isas):
        positional.set_isa(first)
        outs.add(module(x, x, x).tobytes())
        positional.set_isa(second)
        grads.add(module.backward(x)[0].tobytes())

    def select():
        for isa in itertools.cycle(isas):
            positional.set_isa(isa)
            if stop.is_set():
                break

    thread, seen, n = threading.Thread(target=select), set(), 0
    sys.setswitchinterval(1e-5)  # the threads take turns after a few lines
    thread.start()
    try:
        while n < 200 or len(seen) < min(2, len(outs)):  # until it has changed, however seldom the other gets a turn
            out = module(x, x, x).tobytes()
            assert out in outs and module.backward(x)[0].tobytes() in grads
            seen.add(out)
            n += 1
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)
        positional.set_isa(active)


def test_weights_packed_for_others_are_packed_again(monkeypatch):
    """As if another thread selected an instruction set between packing and the call, first and later, in each mode."""
    others, active = [name for name, offered in positional.isas() if offered][:-1], positional.isa()
    if not others:
        pytest.skip("this CPU offers one instruction set")
    make_plan, selected = mha_c.MultiHeadAttention._make_plan, []

    def selects(layer, *given):
        plan = make_plan(layer, *given)
        if not selected:
            selected.append(positional.set_isa(others[0]))
        return plan

    monkeypatch.setattr(mha_c.MultiHeadAttention, "_make_plan", selects)
    x, module = numbers(2, 5, 64), mha_c.MultiHeadAttention(64, 4, 0.0, rng=0)
    try:
        outs = [module(x, x, x)]
        assert selected and positional.isa() == others[0]
        for training in False, True:
            positional.set_isa(active)
            module.load_state_dict(module.state_dict())  # the next call packs the weights anew
            selected.clear()
            outs.append(module(x, x, x, training=training))
        plan = module._parameters.plan
        positional.set_isa(active)
        plan.isa = active  # packed for the others, and not known to be
        outs += [module(x, x, x), module.train()(x, x, x)]
    finally:
        positional.set_isa(active)
    for out in outs[1:]:
        np.testing.assert_allclose(out, outs[0], rtol=0, atol=2e-6)  # sums of 64 products, rounded otherwise


# --- Nothing to compute ---------------------------------------------------------------------------------------------


def empty(*shape):
    return np.empty(shape, F32)


NOTHING = {
    "queries": lambda: _core.attention_forward(empty(1, MANY, 0), empty(1, 3, 0), empty(1, 3, 0), causal="top_left"),
    "statistics": lambda: _core.attention_forward(
        empty(1, 1, 0), empty(1, MANY, 0), empty(1, MANY, 0), return_lse=True
    ),
    "dropout": lambda: _core.dropout_factors(empty(MANY, 1, 0, 5), 0.5, 3),
    "a layer": lambda: mha_c.DotProductAttention(0.0)(empty(1, 1, 0), empty(1, MANY, 0), empty(1, MANY, 0)),
    "a layer in training": lambda: mha_c.DotProductAttention(0.5).train()(
        empty(1, 1, 0), empty(1, MANY, 0), empty(1, MANY, 0)
    ),
    "packing": lambda: _core.pack_linear(empty(MANY, 0)),
    "an explanation": lambda: _core.explain_layer(
        empty(MANY, 1, 0), empty(MANY, 3, 0), empty(MANY, 3, 0), None, (None,) * 4, None, 1, "zero", 0.0, 0, True
    ),
}


# To walk over so many rows would take minutes.
few_rows = pytest.mark.skipif(MANY < 2**40, reason="this NumPy takes memory for rows without numbers")


@few_rows
@pytest.mark.parametrize("name", NOTHING)
def test_arrays_without_numbers_take_no_time(name):
    start = time.process_time()
    tracemalloc.start()
    try:
        NOTHING[name]()
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
    assert time.process_time() - start < 2


@few_rows
def test_gradients_of_arrays_without_numbers_take_no_time():
    start = time.process_time()
    module = mha_c.DotProductAttention(0.5).train()
    out = module(empty(1, 1, 0), empty(1, MANY, 0), empty(1, MANY, 0))
    assert [grad.shape for grad in module.backward(out)] == [(1, 1, 0), (1, MANY, 0), (1, MANY, 0)]
    assert time.process_time() - start < 2


def test_a_layer_keeps_no_more_rows_than_are_seen():
    """Behind the longest length what is kept is 0, whatever stood there."""
    keys = numbers(B, 40, 5).copy()
    keys[:, 7:] = np.nan
    lens = np.array([3, 7])
    kept = layer(queries=numbers(B, 30, 5), keys=keys, values=keys[..., :3], valid_lens=lens, projections=(None,) * 4,
                 num_heads=1)[1]  # fmt: skip
    assert np.array_equal(kept[3][1, :7], keys[1, :7]) and np.array_equal(kept[3][0, :3], keys[0, :3])
    assert not kept[3][0, 3:].any() and not kept[3][1, 7:].any()
