"""Decoding on another device than the CPU: caches, projected keys, what is copied, and that nobody waits for it."""

import copy

import pytest
import torch

import own_device
from features import weights_of
from mha_c import torch as ours
from own_device import close
from torch_modules import layers


@pytest.fixture(params=own_device.devices(), ids=str)
def own(request):
    return request.param


@pytest.mark.parametrize("name", ["multi-head", "additive", "dot"])
@pytest.mark.parametrize("counts", [None, [2, 3]], ids=["whole", "ragged"])
def test_decoding_with_a_cache(own, name, counts):
    layer = layers()[name].eval()
    there, found = copy.deepcopy(layer).to(own), []
    with torch.no_grad():
        for module, device in ((layer, "cpu"), (there, own)):
            torch.manual_seed(6)
            cache, outs = module.new_cache(2, 16), []
            for n, lens in ((3, counts), (1, None), (2, None)):
                x = torch.randn(2, n, 12).to(device)
                outs += [module(x, x, x, lens, cache=cache), weights_of(module)]
            cache.reorder([1, 1])
            outs.append(module(x, x, x, cache=cache))
            cache.reorder(torch.tensor([1, 0, 1]).to(device))
            assert cache.batch == 3
            cache.reorder([2, 1])
            found.append([outs, cache.lengths])
        for i, (a, b) in enumerate(zip(found[1][0], found[0][0])):
            n = 3 if counts is None or i else 2  # steps that do not count give anything
            close([a[:, :n] if i < 2 else a], [b[:, :n] if i < 2 else b])
        assert torch.equal(found[0][1], found[1][1])
        index, before = torch.tensor([1, 0]).to(own), own_device.reads()
        with ours.frozen(there):
            for lens in (None, counts):
                there(x, x, x, lens, cache=cache)
            cache.reorder([0, 1] if counts else index)
        assert own_device.reads() == before  # nobody has waited for the device
        if name == "multi-head":
            there.W_k.weight.mul_(2)
            with pytest.raises(ValueError, match="the cache was filled"):
                there(x, x, x, cache=cache)
            cache.clear()
            assert there(x, x, x, cache=cache).shape == x.shape


@pytest.mark.parametrize("name", layers())
def test_what_a_decoder_keeps_stays_where_it_is(own, name):
    """A layer that has moved is told so, by its caches and by projected keys, and goes on once they are new."""
    layer, x = layers()[name].eval(), torch.randn(2, 2, 12)
    with torch.no_grad():
        wanted = layer(x, x, x, cache=layer.new_cache(2, 8))
        for here, there in (("cpu", own), (own, "cpu")):
            layer.to(here)
            cache, kv = layer.new_cache(2, 8), layer.project(x.to(here), x.to(here))
            layer(*[x.to(here)] * 3, cache=cache)
            layer.to(there)
            for call in (lambda y, cache=cache: layer(y, y, y, cache=cache), lambda y, kv=kv: layer(y, kv)):
                with pytest.raises((ValueError, TypeError), match=r"cache|were projected|different devices"):
                    call(x.to(there))
            cache.clear()
            close([layer(*[x.to(there)] * 3, cache=cache)], [wanted])


@pytest.mark.parametrize("name", ["multi-head", "additive"])
@pytest.mark.parametrize("lens", [None, [3, 0]])
def test_decoding_on_projected_keys(own, name, lens):
    layer, found = layers()[name].eval(), []
    q, k = torch.randn(2, 1, 12), torch.randn(2, 6, 12)
    with torch.no_grad():
        for device in ("cpu", own):
            layer.to(device)
            kv = layer.project(k.to(device), k.to(device), lens)
            found.append([layer(q.to(device), kv), weights_of(layer), layer(q.to(device), kv.reorder([1, 0]))])
            assert torch.equal(found[-1][2], layer(q.to(device), kv.reorder(torch.tensor([1, 0]).to(device))))
        close(found[1], found[0])
        with ours.frozen(layer):
            close([layer(q.to(own), kv)], found[0][:1])
        layer.W_q.weight.mul_(2)  # which has no part in them
        assert layer(q.to(own), kv).device == own
        layer.W_k.weight.mul_(2)
        with pytest.raises(ValueError, match="were projected"):
            layer(q.to(own), kv)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_step_does_not_copy_its_cache(own, dtype):
    """Additive decoding: as much memory as the features of the scores, and their tanh."""
    layer, n = ours.AdditiveAttention(12, 12, 8, 0.0).eval().to(own, dtype), 500
    with torch.no_grad():
        cache, x = layer.new_cache(2, n + 8), torch.randn(2, n, 12).to(own, dtype)
        layer(x, x, x, cache=cache)
        peak = own_device.peak_bytes(lambda: layer(x[:, :1], x[:, :1], x[:, :1], cache=cache))
    assert peak < 2 * (2 * n * 8 * 4) * 1.05  # keys of float16 in float32, or values, would be half as much again
