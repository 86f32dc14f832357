"""Pruning of layers whose heads share keys, or one projection: the smaller layer decodes, learns and is copied."""

import copy

import numpy as np
import pytest

import needs
from abilities import Case, same
from mha_c import heads

SIDES = pytest.mark.parametrize("side", ["mha_c", "mha_c.torch"])


def case_of(side, kind):
    if side == "mha_c.torch":
        needs.module("torch")
    return Case(side, kind)  # 4 heads; those of GQAAttention share 2 heads of keys


@SIDES
def test_heads_that_share_keys_go_together(side):
    case = case_of(side, "GQAAttention")
    before = {name: np.asarray(x).copy() for name, x in case.layer.state_dict().items()}
    says = r"GQAAttention's heads 2, 3 share keys and values, so they go together or stay; 3 would stay alone"
    for gone in ([2], [0, 1, 2]):
        with pytest.raises(ValueError, match=says):
            heads.prune(case.layer, gone)
    assert all((np.asarray(x) == before[name]).all() for name, x in case.layer.state_dict().items())
    heads.prune(case.layer, [3, 2])
    assert (case.layer.num_heads, case.layer.num_kv_heads) == (2, 1)
    assert [tuple(getattr(case.layer, name).weight.shape) for name in ("W_q", "W_k", "W_o")] == [(4, 8), (2, 8), (8, 4)]


@SIDES
@pytest.mark.parametrize("kind", ["GQAAttention", "CausalAttention"])
def test_a_pruned_layer_is_a_layer(side, kind):
    case = case_of(side, kind)
    heads.prune(case.layer, [0, 1])
    out, cache = case.call(), case.layer.new_cache(2, 5)
    assert case.layer.attention_weights.shape == (2, 2, 5, 5)
    for i in range(5):
        same(case.call(case.x[:, i : i + 1], cache=cache), out[:, i : i + 1])
    same(case.call(layer=copy.deepcopy(case.layer)), out)
    assert len(heads.importance(case.layer, (case.x,) * case.n_inputs).names) == 2
    if side == "mha_c":
        case.call(training=True)
        case.layer.backward(out)
        assert all(p.grad.shape == p.data.shape for p in case.layer.parameters())
    else:
        case.layer.requires_grad_(True)
        case.call().sum().backward()
        assert all(p.grad.shape == p.shape for p in case.layer.parameters())
