"""The one recognition: which attribute is which weight, which parameter which argument; check and convert ask it."""

from types import SimpleNamespace

import numpy as np
import pytest

import needs
from mha_c._recognize import arguments, weights_of

torch = needs.module("torch")
nn = torch.nn


def layer(**attributes):
    """A module with these attributes."""
    module = nn.Module()
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def linear(n=4, m=4, bias=False):
    return nn.Linear(n, m, bias)


NAMES = {
    "W_q": "W_q Wq W_Q W_query q_proj query linear_q q_lin lin_q to_q fc_q w_qs q query_projection q_linear",
    "W_o": "W_o Wo W_O out_proj proj w_concat fc_out fc out to_out linear o_proj fc_o c_proj dense W_0 unifyheads",
}


@pytest.mark.parametrize("name", NAMES["W_q"].split())
def test_the_names_of_projections(name):
    q, k, v = (name.replace("query", word).replace("Q", word[0].upper()) for word in ("query", "key", "value"))
    if "query" not in name and "Q" not in name:
        q, k, v = name, *(name[::-1].replace("q", word, 1)[::-1] for word in "kv")
    module = layer(num_heads=2, **{q: linear(), k: linear(), v: linear()}, W_o=linear())
    (found,) = weights_of(module)
    assert found.places() == {"W_q": q, "W_k": k, "W_v": v, "W_o": "W_o"}
    assert found[1:] == (2, 2)


@pytest.mark.parametrize("name", [*NAMES["W_o"].split(), "some_other_name"])
def test_the_names_of_the_output(name):
    module = layer(h=2, wq=linear(), wk=linear(), wv=linear(), **{name: linear()})
    (found,) = weights_of(module)
    assert found.places()["W_o"] == name


def test_a_layer_without_an_output():
    (found,) = weights_of(layer(query=linear(3, 2), key=linear(3, 2), value=linear(3, 2)))
    assert [*found.parts] == ["W_q", "W_k", "W_v"] and found.num_heads == 1


def test_four_in_a_list():
    (found,) = weights_of(layer(h=2, linears=nn.ModuleList(linear() for _ in range(4))))
    assert found.places() == dict(zip(("W_q", "W_k", "W_v", "W_o"), map("linears.{}".format, range(4))))


def test_one_projection_of_all():
    module = layer(n_head=2, c_attn=linear(4, 12, True), c_proj=linear())
    thirds, by_head, by_feature = weights_of(module)
    X = np.arange(8.0).reshape(2, 4)
    own = module.c_attn(torch.tensor(X, dtype=torch.float32)).detach().numpy()
    for found, view in ((thirds, own), (by_head, own.reshape(2, 2, 3, 2)), (by_feature, own.reshape(2, 2, 3, 2))):
        q = X @ found.get(module, "W_q") + found.bias(module, "W_q")
        if found is thirds:
            expected = view[:, :4]
        else:
            expected = view[:, :, 0] if found is by_head else view[:, :, 0].swapaxes(1, 2)
        if found is not by_feature:
            np.testing.assert_allclose(q, expected.reshape(2, 4), rtol=1e-5)
    # Features first: feature d of head h of the queries is output (3 * d + 0) * 2 + h.
    q = X @ by_feature.get(module, "W_q") + by_feature.bias(module, "W_q")
    np.testing.assert_allclose(q.reshape(2, 2, 2), own.reshape(2, 2, 3, 2)[:, :, 0].swapaxes(1, 2), rtol=1e-5)


def test_keys_and_values_together():
    found = weights_of(layer(heads=2, to_q=linear(), to_kv=linear(4, 8), to_out=nn.Sequential(linear(), nn.Dropout())))
    places = {"W_q": "to_q", "W_k": "to_kv[outputs 0..3]", "W_v": "to_kv[outputs 4..7]", "W_o": "to_out.0"}
    assert found[0].places() == places


def test_heads_that_are_modules():
    heads = nn.ModuleList(layer(key=linear(4, 2), query=linear(4, 2), value=linear(4, 2)) for _ in range(3))
    (found,) = weights_of(layer(heads=heads, proj=linear(6, 4)))
    assert found.places()["W_k"] == "heads.0.key, heads.1.key, heads.2.key" and found.num_heads == 3
    module = layer(heads=heads, proj=linear(6, 4))
    new = np.arange(24.0).reshape(4, 6)
    found.set(module, "W_k", new)
    assert (found.get(module, "W_k") == new).all() and (heads[1].key.weight.detach().numpy() == new[:, 2:4].T).all()


def test_heads_of_keys():
    assert weights_of(layer(num_heads=4, W_q=linear(8, 8), W_k=linear(8, 2), W_v=linear(8, 2), W_o=linear(8, 8)))[0][
        1:
    ] == (4, 1)
    assert weights_of(layer(d_k=2, q=linear(8, 8), k=linear(8, 4), v=linear(8, 4)))[0][1:] == (4, 2)


def test_matrices_can_be_meant_in_two_ways():
    matrices = {name: nn.Parameter(torch.randn(3, 3)) for name in ("W_query", "W_key", "W_value")}
    module = layer(**matrices)
    plain, turned = weights_of(module)
    assert (plain.get(module, "W_q") == matrices["W_query"].detach().numpy()).all()
    assert (turned.get(module, "W_q") == matrices["W_query"].detach().numpy().T).all()


def test_arrays():
    class Layer:
        def __init__(self):
            self.Wq, self.Wk, self.Wv, self.Wo = np.eye(4) * np.arange(1, 5).reshape(4, 1, 1)
            self.num_heads = 2

    module = Layer()
    found = weights_of(module)[0]
    found.set(module, "W_o", np.arange(16).reshape(4, 4))
    assert (module.Wo == np.arange(16).reshape(4, 4)).all() and found.places()["W_v"] == "Wv"


@pytest.mark.parametrize("first", ["weights", "biases"])
def test_biases_stand_beside_their_weights(first):
    """Of arrays, of parameters and of parts of one's own, in whichever order they are made; in lists, too."""

    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))

    names = [[f"W_{x}" for x in "qkv"], [f"b_{x}" for x in "qkv"]][:: 1 if first == "weights" else -1]
    sizes = {"W": (4, 4), "b": (4,)}
    arrays = {name: np.random.default_rng(0).normal(size=sizes[name[0]]) for part in names for name in part}
    lists = {kind: [arrays[f"{kind}_{x}"] for x in "qkv"] for kind in ("W", "b")}
    parameters = {name: nn.Parameter(torch.from_numpy(x)) for name, x in arrays.items()}
    parts = {x: Part() for x in "qkv"}
    for module in (SimpleNamespace(**arrays), SimpleNamespace(**lists), layer(**parameters), layer(**parts)):
        found = weights_of(module)[0]
        assert all(found.bias(module, name) is not None for name in ("W_q", "W_k", "W_v")) and not found.unused(module)
    vector = SimpleNamespace(**lists, gain=np.ones(4))  # no W_o
    assert weights_of(vector)[0].unused(vector) == ["gain"]


@pytest.mark.parametrize("names", ["W_q W_k w_v", "W1 W2 V", "query_layer key_layer energy", "Wa Ua Va"])
def test_additive(names):
    q, k, v = names.split()
    module = layer(**{q: linear(3, 5), k: linear(2, 5), v: linear(5, 1)})
    found = weights_of(module)[0]
    assert found.places() == {"W_q": q, "W_k": k, "w_v": v}
    assert found.sizes(module) == {"W_q": (3, 5), "W_k": (2, 5), "w_v": (5, 1)}


def test_query_and_key_side_by_side():
    module = layer(attn=linear(6, 5, True), v=linear(5, 1))
    found = weights_of(module)[0]
    assert found.places() == {"W_q": "attn[inputs 0:3]", "W_k": "attn[inputs 3:6]", "w_v": "v"}
    assert found.get(module, "W_k").shape == (3, 5) and found.get(module, "w_v").shape == (5,)
    assert found.bias(module, "W_q") is not None and found.bias(module, "W_k") is None


def test_no_attention():
    assert weights_of(layer(fc1=linear(), fc2=linear())) == []
    assert weights_of(nn.Sequential(linear(), nn.ReLU(), linear(), nn.ReLU(), linear())) == []


def test_names_that_are_given():
    module = layer(num_heads=2, a=linear(), b=linear(), c=linear(), d=linear())
    assert weights_of(module) == []
    (found,) = weights_of(module, given={"W_q": "c", "W_k": "a", "W_v": "b", "W_o": "d"})
    assert found.places() == {"W_q": "c", "W_k": "a", "W_v": "b", "W_o": "d"}


def test_sizes_that_are_open():
    if not hasattr(nn, "LazyLinear"):
        pytest.skip("no lazy layers")
    module = layer(num_heads=2, **{name: nn.LazyLinear(4, bias=False) for name in ("W_q", "W_k", "W_v", "W_o")})
    (found,) = weights_of(module)
    assert found.sizes(module) == dict.fromkeys(found.parts, (0, 4)) and found.num_heads == 2


ARGUMENTS = {
    "queries keys values valid_lens": "queries keys values valid_lens",
    "query key value mask": "queries keys values mask",
    "values keys query mask": "values keys queries mask",
    "x mask return_attention": "queries mask -",
    "q k v attn_mask": "queries keys values mask",
    "hidden encoder_outputs": "queries keys",
    "x context mask": "queries keys mask",
    "a b c": "queries keys values",
}


@pytest.mark.parametrize("names", ARGUMENTS)
def test_arguments(names):
    scope = {}
    exec(f"def call({', '.join(names.split())}): pass", scope)
    expected = [word.strip("-") for word in ARGUMENTS[names].split()]
    assert [*arguments(scope["call"]).values()] == expected
