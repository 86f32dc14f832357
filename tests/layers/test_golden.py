"""What released versions have written is read for ever: pickles, whole torch modules, state dicts of both."""

import pickle

import numpy as np
import pytest

import golden
import mha_c
import needs
from checks import close

VERSIONS = sorted(path.name for path in golden.DATA.iterdir() if path.name[0].isdigit())
NAMES = ["multi_head", "additive", "dot_product"]
each_file = pytest.mark.parametrize("version, name", [(version, name) for version in VERSIONS for name in NAMES])


def numbers(version, name):
    """(the outputs of then, the state dict)"""
    with np.load(golden.DATA / version / f"{name}.npz") as file:
        state = dict(file)
    return state.pop("outputs"), state


def test_there_are_files_of_the_first_version():
    assert "0.1.0" in VERSIONS


@each_file
def test_a_pickled_layer(version, name):
    outputs, state = numbers(version, name)
    layer = pickle.loads((golden.DATA / version / f"{name}.pickle").read_bytes())
    close(golden.called(name, layer, golden.inputs()), outputs, np.float32, scale=8)
    for key, value in layer.state_dict().items():
        np.testing.assert_array_equal(value, state[key])


@each_file
def test_a_state_dict(version, name):
    outputs, state = numbers(version, name)
    layer = golden.layers(mha_c)[name]
    assert list(layer.state_dict()) == list(state)
    layer.load_state_dict({key: np.zeros_like(value) for key, value in state.items()}) if state else None
    layer.load_state_dict(state) if state else None
    close(golden.called(name, layer, golden.inputs()), outputs, np.float32, scale=8)


@each_file
@pytest.mark.parametrize("kind", ["state", "module"])
def test_files_of_torch(version, name, kind):
    torch = needs.module("torch")
    mt = needs.module("mha_c.torch")
    outputs, _ = numbers(version, name)
    path = golden.DATA / version / f"{name}.{kind}.pt"
    if kind == "module":
        layer = torch.load(path, weights_only=False)
    else:
        layer = golden.layers(mt)[name].eval()
        for parameter in layer.parameters():
            torch.nn.init.zeros_(parameter)
        layer.load_state_dict(torch.load(path))
    found = golden.called(name, layer, [torch.from_numpy(x) for x in golden.inputs()])
    close(found.detach().numpy(), outputs, np.float32, scale=8)
