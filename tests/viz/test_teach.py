"""teach: the recorded steps are attention, the tiles give the same, the players say so."""

import json

import numpy as np
import pytest

import mha_c
import needs
from mha_c import teach


@pytest.fixture
def inputs(rng):
    return rng.standard_normal((5, 4)), rng.standard_normal((7, 4)), rng.standard_normal((7, 3))


def test_each_step_follows_from_the_one_before(inputs):
    q, k, v = inputs
    steps = teach.steps(q, k, v, valid_lens=4)
    np.testing.assert_allclose(steps.scores, q @ k.T)
    np.testing.assert_allclose(steps.scaled, steps.scores / 2)
    assert (steps.masked[:, 4:] == -1e6).all() and (steps.masked[:, :4] == steps.scaled[:, :4]).all()
    np.testing.assert_allclose(steps.weights.sum(axis=1), 1)
    assert not steps.weights[:, 4:].any()
    np.testing.assert_allclose(steps.output, steps.weights[:, :4] @ v[:4])


@pytest.mark.parametrize("valid_lens", [None, 3, [1, 2, 3, 4, 5], 0, [0, 7, 9, 2.5, 1]])
def test_the_layer_computes_the_same(inputs, valid_lens):
    q, k, v = inputs
    steps = teach.steps(q, k, v, valid_lens)
    lens = None if valid_lens is None else np.broadcast_to(np.asarray(valid_lens, float), (5,))[None].copy()
    layer = mha_c.DotProductAttention(0.0)
    np.testing.assert_allclose(steps.output, layer(q[None], k[None], v[None], lens)[0], atol=1e-12)
    np.testing.assert_allclose(steps.weights, layer.attention_weights[0], atol=1e-12)


@pytest.mark.parametrize("block_size", [1, 2, 3, 7, 100, None])
@pytest.mark.parametrize("valid_lens", [None, 3, [0, 1, 2, 5, 7]])
def test_tiles_give_the_same_output(inputs, block_size, valid_lens):
    steps = teach.steps(*inputs, valid_lens)
    tiles = teach.tiles(*inputs, valid_lens, block_size=block_size)
    np.testing.assert_allclose(tiles.output, steps.output, atol=1e-12)
    assert [tile.first for tile in tiles.tiles[1:]] == [tile.last for tile in tiles.tiles[:-1]]
    assert tiles.tiles[-1].last == 7


def test_what_a_tile_keeps(inputs):
    tiles = teach.steps(*inputs).tiles(3)
    scaled = teach.steps(*inputs).scaled
    for tile in tiles.tiles:
        seen = scaled[:, : tile.last]
        np.testing.assert_allclose(tile.new_max, seen.max(axis=1))
        np.testing.assert_allclose(tile.new_sum, np.exp(seen - seen.max(axis=1, keepdims=True)).sum(axis=1))
        np.testing.assert_allclose(tile.new_sum, tile.old_sum * tile.rescale + tile.weights.sum(axis=1))
    assert np.isneginf(tiles.tiles[0].old_max).all() and not tiles.tiles[0].rescale.any()


def test_a_batch_and_torch(inputs):
    q, k, v = inputs
    batch = [np.stack([np.zeros_like(x), x]) for x in inputs]
    steps = teach.steps(*batch, valid_lens=[2, 5], example=1)
    np.testing.assert_array_equal(steps.output, teach.steps(q, k, v, 5).output)
    per_query = teach.steps(*batch, valid_lens=[[7] * 5, [1, 2, 3, 4, 5]], example=1)
    np.testing.assert_array_equal(per_query.output, teach.steps(q, k, v, [1, 2, 3, 4, 5]).output)
    torch = needs.module("torch")
    np.testing.assert_array_equal(teach.steps(*map(torch.tensor, inputs)).output, teach.steps(q, k, v).output)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda q, k, v: (q[None], k, v), "batch axis in front"),
        (lambda q, k, v: (q[:, :3], k, v), "q, k and v must have shapes"),
        (lambda q, k, v: (q, k[:5], v), "q, k and v must have shapes"),
        (lambda q, k, v: (q, np.ones((65, 4)), np.ones((65, 3))), "up to 64 x 64.*viz.view"),
        (lambda q, k, v: (q * np.nan, k, v), "finite"),
        (lambda q, k, v: (q, k, v, [1, 2]), r"one length, or 5 \(one per query\)"),
        (lambda q, k, v: (*([x] * 2 for x in (q, k, v)), [1, 2, 3, 4, 5]), "for each of 2 items"),
    ],
)
def test_what_cannot_be_taught(inputs, change, says):
    with pytest.raises(ValueError, match=says):
        teach.steps(*change(*inputs))
    with pytest.raises(TypeError, match="bool, like a mask"):
        teach.steps(*inputs, np.ones(len(inputs[0]), bool))
    with pytest.raises(ValueError, match="k is a list that makes no array"):
        teach.steps(inputs[0], [[1.0, 2.0], [3.0]], inputs[2])
    with pytest.raises(ValueError, match="block_size"):
        teach.tiles(*inputs, block_size=0)
    for arrays, example in ((inputs, 1), ([x[None] for x in inputs], 1), (inputs, -1)):
        with pytest.raises(ValueError, match="example"):
            teach.steps(*arrays, example=example)
    with pytest.raises(TypeError, match="example must be a whole number"):
        teach.steps(*inputs, example=0.5)


def test_the_text_shows_every_step(inputs):
    steps = teach.steps(*inputs, valid_lens=4)
    assert [line.split()[0] for line in str(steps).splitlines() if "   " in line and line[0].isalpha()] == [
        "Scores", "Scaled", "Masked", "Weights", "Output",
    ]  # fmt: skip
    assert "-1e6" in str(steps)
    assert "tiles of 3 keys" in str(steps.tiles(3))


def test_the_pages_are_self_contained(inputs, tmp_path):
    for page in (teach.steps(*inputs, valid_lens=4, tokens=(list("abcde"), list("fghijkl"))), teach.tiles(*inputs)):
        text = page.save(tmp_path / "page.html").read_text(encoding="utf-8")
        assert "default-src 'none'" in text and "http:" not in text and "https:" not in text
        json.dumps(page.data, allow_nan=False)


@pytest.mark.parametrize("layer", [mha_c.DotProductAttention(0.0), mha_c.MultiHeadAttention(4, 4, 4, 4, 2, 0.0, rng=0)])
def test_steps_of_a_layer_take_the_notation_of_its_call(layer, rng):
    X, Y = rng.standard_normal((2, 1, 5, 4)).astype("f4")
    found, wanted = teach.steps(layer, X, Y, Y), teach.steps(layer, X, Y)
    assert found.data == wanted.data != teach.steps(layer, X).data
    with pytest.raises(TypeError, match=r"write steps\(layer, queries, keys\)"):
        teach.steps(layer, X, Y, X)
