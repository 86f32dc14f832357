"""The record of a layer, which all that is not a call asks: of ours, of both sides, of d2l's and of torch's own."""

import numpy as np
import pytest

import mha_c
import needs
from mha_c import teach, variants, viz
from mha_c._layer.description import describe

MADE = {
    "MultiHeadAttention": lambda of: of.MultiHeadAttention(8, 8, 8, 8, 2, 0.0),
    "GQAAttention": lambda of: of.GQAAttention(8, 4, 2, rope=True),
    "CausalAttention": lambda of: of.CausalAttention(8, 2),
    "DotProductAttention": lambda of: of.DotProductAttention(0.0),
    "AdditiveAttention": lambda of: of.AdditiveAttention(6, 8, 4, 0.0),
    "KernelAttention": lambda of: of.KernelAttention(),
    "MultiHeadedSelfAttention": lambda of: of.variants.MultiHeadedSelfAttention(8, 2),
}


def sizes(layer):
    """(rows, columns) of the weights that a record names, as the layer has them."""
    held = {name: tuple(np.shape(x)) for name, x in layer.state_dict().items()}
    return [held.get(f"{name}.weight") for name in describe(layer).names]


@pytest.mark.parametrize("kind", MADE)
def test_both_sides_have_one_record(kind):
    needs.module("torch")
    import mha_c.torch

    layer, module = MADE[kind](mha_c), MADE[kind](mha_c.torch)
    found = describe(layer)
    assert found == describe(module)
    held = [None if each is None else (each.out_features, each.in_features) for each in found.projections]
    assert held == sizes(layer) == sizes(module)
    assert found.scoring == {"AdditiveAttention": "sums", "KernelAttention": "distances"}.get(kind, "products")
    assert found.has_heads is (kind not in ("DotProductAttention", "AdditiveAttention", "KernelAttention"))
    assert (found.is_causal, found.turns) == (kind in ("GQAAttention", "CausalAttention"), kind == "GQAAttention")


def test_torchs_own_has_one_too():
    torch = needs.module("torch")
    joint = describe(torch.nn.MultiheadAttention(8, 2))
    assert joint.names == ("in_proj", "in_proj", "in_proj", "out_proj") and joint.projections[0][1:] == (8, 24, 3)
    apart = describe(torch.nn.MultiheadAttention(8, 2, kdim=3, vdim=5))
    assert [each.in_features for each in apart.projections] == [8, 3, 5, 8] and apart.head_dim == 4


def test_a_size_that_is_not_known_yet():
    needs.module("torch")
    import mha_c.torch

    for made in (mha_c, mha_c.torch):
        layer = made.MultiHeadAttention(8, 2, 0.0)
        assert [each.in_features for each in describe(layer).projections] == [0, 0, 0, 0]


MORE = {
    "shared heads": lambda of: of.GQAAttention(8, 4, 2, causal=False),
    "rotated": lambda of: of.GQAAttention(8, 2, 2, rope=True, causal=False),
    "causal": lambda of: of.GQAAttention(8, 2, 2),
}


@pytest.mark.parametrize("kind", MORE)
@pytest.mark.parametrize("side", ["mha_c", "mha_c.torch"])
def test_what_computes_the_books_layer_refuses_one_that_does_more(side, kind):
    """The page and the player compute it themselves: numbers of another layer would be drawn in silence."""
    of = mha_c
    if side == "mha_c.torch":
        needs.module("torch")
        import mha_c.torch as of
    x = np.ones((3, 8), np.float32)
    layer = MORE[kind](of)
    for shown in (lambda: viz.own_layer.playground(layer, inputs=x), lambda: teach.multi_head(layer, x)):
        with pytest.raises(TypeError, match=r"MultiHeadAttention.* GQAAttention does more"):
            shown()
    plain = of.GQAAttention(8, 2, 2, causal=False)
    assert describe(plain).is_of_the_book and teach.multi_head(plain, x).matrices["output"].shape == (3, 8)


@pytest.mark.parametrize("side", ["mha_c", "mha_c.torch"])
def test_lengths_that_keys_were_projected_with_are_those_of_the_call(side):
    """Of a causal layer they decide which corner the mask has, in both sides."""
    of, given = mha_c, np.asarray
    if side == "mha_c.torch":
        given = needs.module("torch").as_tensor
        import mha_c.torch as of
    q, k = (given(np.random.default_rng(n).standard_normal((2, n, 8))) for n in (3, 5))
    layer, lens = of.GQAAttention(8, 4, 2, dtype=q.dtype), given(np.array([5, 4]))
    kv = layer.project(k, k, lens)
    wanted, found = layer(q, k, k, lens), layer(q, kv)
    away = [np.abs(x - found.tolist()).max() for x in (np.array(wanted.tolist()), np.array(layer(q, k, k).tolist()))]
    assert away[0] < 1e-12 < 1e-3 < away[1]  # numbers of about 1 in float64; another corner


def test_explain_refuses_what_the_call_refuses():
    """In the words of the call, and of both sides alike."""
    needs.module("torch")
    import torch

    import mha_c.torch

    x = np.ones((1, 3, 8), np.float32)
    for of, given in ((mha_c, x), (mha_c.torch, torch.as_tensor(x))):
        for kind in ("MultiHeadAttention", "GQAAttention", "CausalAttention"):
            layer = MADE[kind](of)
            for wrong in ({"mask": 1}, {"attn_mask": None}, {"Valid_lens": [3]}):
                with pytest.raises(TypeError) as of_call:
                    layer(given, given, given, **wrong)
                with pytest.raises(TypeError) as of_explain:
                    mha_c.explain(layer, given, given, given, **wrong)
                assert str(of_explain.value) == str(of_call.value)
    for layer in (mha_c.MultiHeadAttention(8, 2, 0), variants.MultiHeadedSelfAttention(8, 2)):
        names = "x" if isinstance(layer, variants.MultiHeadedSelfAttention) else "queries, keys, values"
        with pytest.raises(TypeError, match=rf"explain\(layer, {names}\)"):
            mha_c.explain(layer)
