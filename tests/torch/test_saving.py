"""Modules saved whole, and loaded on the same device or another one."""

import copy
import pickle

import pytest
import torch

import needs
import own_device
from features import saved, weights_of
from torch_modules import layers


@pytest.mark.parametrize("place", ["meta", "own"])
@pytest.mark.parametrize("how", ["gradients", "no gradients", "compiled", "read", "assigned"])
@pytest.mark.parametrize("name", ["multi-head", "additive", "dot"])
@pytest.mark.parametrize("n", [4, 40])  # the core keeps the weights of few keys themselves
def test_a_module_saved_whole_after_a_call_loads_onto_another_device(place, how, name, n):
    needs.of_torch("torch.load(weights_only)")
    device = torch.device("meta") if place == "meta" else own_device.load()
    layer, x = layers()[name].eval(), torch.randn(2, n, 12)
    with torch.set_grad_enabled(how != "no gradients"):
        (torch.compile(layer, backend="eager") if how == "compiled" else layer)(x, x, x, torch.tensor([3, n]))
    wanted = weights_of(layer).detach().clone()
    if how != "read":
        layer(x, x, x, torch.tensor([3, n]))
    if how == "assigned":
        layer.attention_weights = wanted
    found = saved(layer, map_location=place, weights_only=False)
    assert all(parameter.device == device for parameter in found.parameters())
    for again in (found, copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        weights = again.attention_weights if how == "assigned" else weights_of(again)
        assert weights.device == device and weights.shape == wanted.shape and weights.dtype == wanted.dtype
        assert again.attention_weights is again.attention_weights and not weights.requires_grad
        if place == "own":
            torch.testing.assert_close(weights.cpu(), wanted)
    y = x.to(device)
    assert found(y, y, y).device == device and weights_of(found).device == device
