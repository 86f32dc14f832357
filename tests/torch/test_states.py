"""State of the torch modules: state dicts of d2l, of torch and of NumPy layers; copies."""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import mha_c
import needs
from book_models import is_eager
from features import saved
from mha_c import torch as mt
from torch_modules import inputs, sized_layers


def test_state_dicts_load_both_ways(d2l):
    q, k, v = inputs()
    sizes = (12, 10, 14) if is_eager(d2l) else ()
    pairs = [
        (d2l.MultiHeadAttention(*sizes, 20, 5, 0.0, True), mt.MultiHeadAttention(20, 5, 0.0, True)),
        (d2l.AdditiveAttention(*sizes[:2], 16, 0.0), mt.AdditiveAttention(16, 0.0)),
    ]
    for theirs, ours in pairs:
        theirs(q, k, v, None)
        ours.load_state_dict(theirs.state_dict())
        torch.testing.assert_close(ours(q, k, v), theirs(q, k, v, None))
        with torch.no_grad():
            for parameter in ours.parameters():
                parameter.mul_(1.5)
        theirs.load_state_dict(ours.state_dict())
        torch.testing.assert_close(ours(q, k, v), theirs(q, k, v, None))
        assert repr(ours) == repr(theirs) or not lazy_layers_learn_their_sizes()


def lazy_layers_learn_their_sizes():
    """Whether a torch.nn.LazyLinear that loads weights notes their sizes at the first call."""
    linear = torch.nn.LazyLinear(3)
    linear.load_state_dict(torch.nn.Linear(2, 3).state_dict())
    linear(torch.ones(1, 2))
    return linear.in_features == 2


def test_state_dicts_of_torchs_multi_head_attention():
    x = inputs(sizes=(16, 16, 16), keys=4)[0]
    ours = mt.MultiHeadAttention(16, 16, 16, 16, 4, 0.0, bias=True)
    theirs = nn.MultiheadAttention(16, 4, batch_first=True)
    theirs.load_state_dict(mt.to_torch_state(ours.state_dict()))
    torch.testing.assert_close(theirs(x, x, x)[0], ours(x, x, x))
    fresh = mt.MultiHeadAttention(16, 4, 0.0, bias=True)
    fresh.load_state_dict(mt.from_torch_state(theirs.state_dict()))
    torch.testing.assert_close(fresh(x, x, x), ours(x, x, x))
    other_sizes = mt.MultiHeadAttention(12, 16, 10, 16, 4, 0.0)
    theirs = nn.MultiheadAttention(16, 4, bias=False, kdim=12, vdim=10, batch_first=True)
    theirs.load_state_dict(mt.to_torch_state(other_sizes.state_dict()))
    other_sizes.load_state_dict(mt.from_torch_state(theirs.state_dict()))
    extra = nn.MultiheadAttention(16, 4, add_bias_kv=True)
    with pytest.raises(ValueError, match="bias_k"):
        mt.from_torch_state(extra.state_dict())


@pytest.mark.parametrize("name", ["multi-head", "multi-head with bias", "additive"])
def test_numpy_layers_take_the_weights(name):
    layer = sized_layers()[name].eval()
    numpy_layer = (
        mha_c.AdditiveAttention(16, 0.0)
        if name == "additive"
        else mha_c.MultiHeadAttention(20, 5, 0.0, name.endswith("bias"))
    )
    numpy_layer.load_state_dict(layer.state_dict())
    tensors = inputs()
    with torch.no_grad():
        ours = layer(*tensors, [3, 2]).numpy()
    assert np.array_equal(ours, numpy_layer(*[x.numpy() for x in tensors], [3, 2]))
    layer.load_state_dict({key: torch.from_numpy(value) for key, value in numpy_layer.state_dict().items()})


@pytest.mark.parametrize("how", ["deepcopy", "copy", "pickle", "save"])
@pytest.mark.parametrize("name", ["multi-head", "multi-head with bias", "additive"])
def test_copies_after_a_training_step(name, how):
    layer, tensors = sized_layers()[name], inputs(requires_grad=True)
    out = layer(*tensors, torch.tensor([3, 5]))
    out.sum().backward()
    if how == "save":
        twin = saved(layer, **needs.whole_modules())
    else:
        copies = {"deepcopy": copy.deepcopy, "copy": copy.copy, "pickle": lambda x: pickle.loads(pickle.dumps(x))}
        twin = copies[how](layer)
    assert torch.equal(twin.attention_weights, layer.attention_weights)
    assert torch.equal(twin(*tensors, [3, 5]), out)
    with torch.no_grad():
        next(twin.parameters()).add_(1)
    if how != "copy":  # which shares parameters
        assert torch.equal(layer(*tensors, [3, 5]), out)
    assert not torch.equal(twin(*tensors, [3, 5]), out)
