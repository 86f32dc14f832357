"""Pruning where projections or parameters have several places: all are cut alike, or nothing is."""

import copy

import pytest

import needs
from mha_c import heads

torch = needs.module("torch")
nn = torch.nn

import mha_c.torch  # noqa: E402

WORLDS = ["ours", *needs.real_d2l.VERSIONS]


def made(world, sizes=(16, 16, 16)):
    torch.manual_seed(0)
    if world == "ours":
        layer = mha_c.torch.MultiHeadAttention(*sizes, 16, 4, 0.0, bias=True)
    else:
        d2l = needs.d2l(world)
        layer = d2l.MultiHeadAttention(*(sizes if world.startswith("0") else ()), 16, 4, 0.0, True)
    x = torch.randn(2, 5, 16)
    with torch.no_grad():  # d2l's keep the graph, and then cannot be copied
        layer(x, x, x, None)
    return layer.eval(), x


def silenced(layer, x, gone):
    """The result with the outputs of these heads replaced by 0."""
    layer = copy.deepcopy(layer)
    with torch.no_grad():
        for head in gone:
            layer.W_o.weight[:, 4 * head : 4 * head + 4] = 0
    return layer(x, x, x, None)


def one_projection(layer):
    layer.W_k = layer.W_q


def one_projection_of_three(layer):
    layer.W_v = layer.W_k = layer.W_q


def tied_weights(layer):
    layer.W_k.weight = layer.W_q.weight


def tied_biases(layer):
    layer.W_v.bias = layer.W_q.bias


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("share", [one_projection, one_projection_of_three, tied_weights, tied_biases])
def test_what_is_shared_is_cut_once_and_stays_shared(world, share):
    layer, x = made(world)
    share(layer)
    wanted, before = silenced(layer, x, [1, 2]), len(list(layer.parameters()))
    heads.prune(layer, [1, 2])
    torch.testing.assert_close(layer(x, x, x, None), wanted)
    assert layer.W_q.weight.shape == layer.W_k.weight.shape == (8, 16) and len(list(layer.parameters())) == before


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("what", ["W_o", "outside", "another layer"])
def test_what_would_not_be_cut_alike_is_refused(world, what):
    layer, x = made(world)
    other, _ = made(world)
    model = nn.ModuleDict({"layer": layer, "other": other, "outside": nn.Linear(16, 16)})
    if what == "W_o":
        layer.W_o.weight = layer.W_q.weight
    elif what == "outside":
        model["outside"].weight = layer.W_v.weight
    else:
        other.W_k = layer.W_k
    wanted = layer(x, x, x, None)
    with pytest.raises(TypeError, match="several places"):
        heads.prune(model, {"layer": [1], "other": [2]})
    assert torch.equal(layer(x, x, x, None), wanted) and layer.num_heads == other.num_heads == 4
    if what == "another layer":
        heads.prune(model, {"layer": [1], "other": [1]})
        assert layer.W_k is other.W_k and layer.W_k.weight.shape == (12, 16) and layer(x, x, x, None).shape == x.shape
