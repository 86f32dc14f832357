"""Caches of every layer in every way that a call can take: other devices, types, autocast, compilers, copies, threads.

What steps give is test_cached_steps.py's, beside the book's formulas.
"""

import copy
import pickle
from functools import partial

import numpy as np
import pytest
import torch

import needs
import own_device
from decoding_layers import KINDS, THIRD, sizes_of
from features import weights_of
from mha_c import torch as mt
from threads import in_threads

WINDOWS = {"whole": {}, "window": {"window": 4, "sinks": 1}}
SCHEDULE = (3, 1, 6, 1)  # steps


@pytest.fixture(params=KINDS)
def layer(request):
    torch.manual_seed(3)
    name, sizes = sizes_of(request.param)
    return getattr(mt, name)(*sizes).eval().requires_grad_(False)


@pytest.fixture(params=WINDOWS)
def window(request):
    return WINDOWS[request.param]


def ignore(*_):
    """A hook that changes nothing, but is called."""


def inputs(n):
    return torch.from_numpy(np.random.default_rng(n).standard_normal((2, n, 24), dtype=np.float32))


def close(found, expected, limit=2e-5):  # sums of some tens of float32 numbers around 1
    torch.testing.assert_close(found.cpu().float(), expected.float(), atol=limit, rtol=limit)


def decoded(layer, cache, steps=SCHEDULE, convert=lambda x: x):
    """[output, weights, ...] of a schedule of steps."""
    found = []
    for n in steps:
        x = convert(inputs(n))
        found += [layer(x, x, x, cache=cache), weights_of(layer)]
    return found


def test_on_another_device(layer, window):
    """Items of different lengths and orders, too; and nobody waits for the device."""
    found, there = [], copy.deepcopy(layer).to(own_device.load())
    for module, device in ((layer, "cpu"), (there, own_device.load())):
        cache, outs = module.new_cache(2, 40, **window), []
        for n, counts in ((3, [2, 3]), (1, None), (2, None), (7, [7, 3]), (1, None)):
            x = inputs(n).to(device)
            out, weights = module(x, x, x, counts, cache=cache), weights_of(module)
            weights = weights.reshape(2, -1, n, weights.shape[-1])
            for i, count in enumerate(counts or [n, n]):  # steps that do not count give anything
                outs += [out[i, :count], weights[i, :, :count]]
        cache.reorder([1, 1])
        outs += decoded(module, cache, (1,), lambda x, device=device: x.to(device))
        cache.reorder(torch.tensor([1, 0, 1]).to(device))
        cache.reorder([2, 1])
        found.append([outs, cache.lengths.tolist()])
    for one, other in zip(found[1][0], found[0][0]):
        close(one, other)
    assert found[0][1] == found[1][1]
    x, before = inputs(2).to(own_device.load()), own_device.reads()
    with mt.frozen(there):
        for counts in (None, [1, 2]):
            there(x, x, x, counts, cache=cache)
        cache.reorder([0, 1])
    assert own_device.reads() == before


def test_without_numbers(layer, window):
    needs.of_torch("torch.compiler.is_compiling")  # before torch 2.1 some operations have no form without numbers
    layer = layer.to("meta")
    for out in decoded(layer, layer.new_cache(2, 20, **window), convert=lambda x: x.to("meta"))[::2]:
        assert out.device.type == "meta" and out.shape[::2] == (2, 24)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_other_types(layer, window, dtype):
    wanted = decoded(layer, layer.new_cache(2, 20, **window))
    layer = layer.to(dtype)
    found = decoded(layer, layer.new_cache(2, 20, **window), convert=lambda x: x.to(dtype))
    for one, other in zip(found, wanted):  # bfloat16 has 8 bits, of numbers up to 3 and their sums
        assert one.dtype is dtype
        close(one, other, 2e-5 if dtype is torch.float64 else 0.1)


def test_another_type_than_that_of_the_cache(layer):
    cache, x = layer.new_cache(2, 20), inputs(2)
    layer(x, x, x, cache=cache)
    layer, x = layer.double(), x.double()
    with pytest.raises((TypeError, ValueError), match=r"the cache holds float32, but|the cache was filled by another"):
        layer(x, x, x, cache=cache)
    cache.clear()
    assert layer(x, x, x, cache=cache).dtype is torch.float64


def test_autocast(layer, window):
    needs.autocast(torch.bfloat16)
    wanted = decoded(layer, layer.new_cache(2, 20, **window))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = decoded(layer, layer.new_cache(2, 20, **window))
    for one, other in zip(found, wanted):
        assert one.dtype is torch.bfloat16
        close(one, other, 0.02)  # rounded once


@pytest.mark.filterwarnings("ignore")  # torch's, of what it leaves to Python
@pytest.mark.parametrize("window", ["window"], indirect=True)
@pytest.mark.parametrize(
    "layer, hooked",
    [("multi-head", False), ("multi-head", True), ("additive", True), (THIRD[1], False)],
    indirect=["layer"],
)
def test_a_compiler_leaves_a_step_to_python(layer, window, hooked):
    needs.of_torch("torch.compile")
    needs.fresh_compiler()
    if hooked:
        next(layer.children()).register_forward_hook(ignore)

    def step(x, cache):
        return layer(2 * x, 2 * x, 2 * x, cache=cache) + 1

    compiled, caches = torch.compile(step, backend="eager"), [layer.new_cache(2, 20, **window) for _ in range(2)]
    for n in (3, 1, 1):
        close(compiled(inputs(n), caches[0]), step(inputs(n), caches[1]))
    assert caches[0].lengths.tolist() == [5, 5]


def test_copies_pickles_and_inference_mode(layer, window):
    for device in ("cpu", own_device.load()):
        module, x = copy.deepcopy(layer).to(device), inputs(3).to(device)
        cache = module.new_cache(2, 30, **window)
        module(x, x, x, cache=cache)
        others = [(module, copy.deepcopy(cache)), pickle.loads(pickle.dumps((module, cache)))]
        with torch.inference_mode():
            wanted = module(x, x, x, cache=cache).cpu()
        for twin, own in others:
            close(twin(x, x, x, cache=own), wanted)
        assert module(x, x, x, cache=cache).shape == (2, 3, 24)


def test_threads(layer, window):
    """Each with its own cache; a layer's weights are those of the call that was last."""
    found, wanted = {}, decoded(layer, layer.new_cache(2, 20, **window))[::2]

    def decode(i):
        cache = layer.new_cache(2, 20, **window)
        found[i] = [layer(x, x, x, cache=cache) for x in map(inputs, SCHEDULE)]

    in_threads(*[partial(decode, i) for i in range(4)])
    for i in range(4):
        for one, other in zip(found[i], wanted):
            close(one, other)


@pytest.mark.parametrize("which", [0, -1])
def test_a_hooked_step_is_that_of_the_core(layer, window, which):
    """Child by child, by torch's operations: the same outputs and weights, which have a column for each step."""
    wanted = decoded(layer, layer.new_cache(2, 20, **window))
    list(layer.children())[which].register_forward_hook(ignore)
    for one, other in zip(decoded(layer, layer.new_cache(2, 20, **window)), wanted):
        assert one.shape == other.shape
        close(one, other)


def test_weights_stay_those_of_their_call(window):
    """Where they are read after a parameter has changed."""
    layer, found = mt.AdditiveAttention(24, 24, 16, 0.0).eval().requires_grad_(False), []
    for change in (False, True):
        x = inputs(3)
        layer(x, x, x, cache=layer.new_cache(2, 20, **window))
        if change:
            layer.w_v.weight.mul_(-3)
        found.append(weights_of(layer).clone())
    assert torch.equal(*found)
