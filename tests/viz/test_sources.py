"""Where weights come from: what a page of `view` shows of arrays, lists, layers and models."""

from types import SimpleNamespace

import numpy as np
import pytest

import mha_c
import needs
from mha_c.viz import view
from view_pages import drawn_weights, layers_of

weights = pytest.fixture(drawn_weights)


def near(found, expected):
    """As exact as a page has small weights."""
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def shown(source, **options):
    """The weights of the only layer."""
    (layer,) = layers_of(view(source, **options)).values()
    return layer


# --- Arrays, lists and tensors ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((3, 4), (1, 1, 3, 4)), ((2, 3, 4), (1, 2, 3, 4)), ((5, 2, 3, 4), (5, 2, 3, 4))],
    ids=["one matrix", "heads", "examples"],
)
def test_arrays_of_any_sensible_rank(weights, shape, expected):
    array = weights(*shape)
    for source in (array, array.tolist(), array.astype(np.float32), list(array) if len(shape) == 2 else array):
        near(shown(source), array.reshape(expected))


def test_a_stack_of_layers_and_a_list_of_layers(weights):
    array = weights(3, 2, 4, 5, 6)
    for source in (array, list(array), tuple(array)):
        layers = layers_of(view(source))
        assert [*layers] == ["layer 1", "layer 2", "layer 3"]
        near(layers["layer 3"], array[2])
    assert [*layers_of(view(array, layer_names="abc"))] == ["a", "b", "c"]
    with pytest.raises(ValueError, match="2 names for 3 layers"):
        view(array, layer_names="ab")


def test_torch_tensors(weights):
    torch = needs.module("torch")
    array = weights(2, 3, 4).astype(np.float32)
    tensor = torch.tensor(array, requires_grad=True)
    near(shown(tensor)[0], array)
    near(shown([tensor[:, :1]] * 2)[:, 0, 1], array[:, 0])
    np.testing.assert_allclose(shown(tensor.bfloat16())[0], array, atol=5e-3)


# --- Layers and models -------------------------------------------------------------------------------


def test_layers_know_their_heads(weights):
    joined = weights(6, 4, 4)  # d2l: batch * heads first
    by_heads = joined.reshape(2, 3, 4, 4)
    ours = SimpleNamespace(attention_weights=by_heads, num_heads=3)
    theirs = SimpleNamespace(attention=SimpleNamespace(attention_weights=joined), num_heads=3)
    encoder = SimpleNamespace(attention_weights=[joined, joined], modules=lambda: [object(), theirs])
    for source in (ours, theirs, encoder):
        for layer in layers_of(view(source)).values():
            near(layer, by_heads)
    near(shown(joined, num_heads=2), joined.reshape(3, 2, 4, 4))
    near(shown(ours, num_heads=3), by_heads)
    for source, says in ((joined, "not a multiple of num"), (ours, "3 head.s., but "), (joined[0], "1 head.s., but ")):
        with pytest.raises(ValueError, match=says):
            view(source, num_heads=4)
    pruned = SimpleNamespace(num_heads=2)
    encoder = SimpleNamespace(attention_weights=[joined, joined[:4]], modules=lambda: [theirs, pruned])
    with pytest.raises(ValueError, match="different numbers of heads, 2, 3: give one layer"):
        view(encoder)
    one_head = SimpleNamespace(attention_weights=joined)  # DotProductAttention: (batch, queries, keys)
    near(shown(one_head), joined[:, None])


def test_the_package_s_own_layers(rng):
    x = rng.standard_normal((2, 4, 12)).astype(np.float32)
    mha = mha_c.MultiHeadAttention(12, 3, 0.0, rng=0)
    with pytest.raises(AttributeError, match="call"):
        view(mha)
    mha(x, x, x, valid_lens=[4, 2])
    page = view(mha, tokens="the cat sat down")
    assert page.title == "MultiHeadAttention"
    near(shown(mha), mha.attention_weights)


# --- Decoders ----------------------------------------------------------------------------------------


def test_decoding_step_by_step(weights):
    steps = [weights(2, 1, 5) for _ in range(4)]  # d2l's Seq2SeqAttentionDecoder
    for source in (steps, SimpleNamespace(attention_weights=steps), [[step] for step in steps]):
        near(shown(source)[:, 0], np.concatenate(steps, axis=1))


BLOCKS = ["self-attention, block 1", "self-attention, block 2", "cross-attention, block 1", "cross-attention, block 2"]


def test_decoding_with_a_growing_row_of_keys(weights):
    """d2l's Transformer, predicting: [step][self, cross][block], the self-attention one key longer each step."""
    steps = [[[weights(4, 1, t + 1)] * 2, [weights(4, 1, 5)] * 2] for t in range(3)]
    layers = layers_of(view(steps, num_heads=4))
    assert [*layers] == BLOCKS
    assert [layer.shape for layer in layers.values()] == [(1, 4, 3, 3)] * 2 + [(1, 4, 3, 5)] * 2
    near(layers[BLOCKS[0]][0, :, 1, :2], steps[1][0][0][:, 0])
    assert not layers[BLOCKS[0]][0, :, 1, 2:].any()


def test_one_call_of_a_transformer_decoder(weights):
    given = [[weights(2, 3, 3), weights(2, 3, 3)], [weights(2, 3, 5), weights(2, 3, 5)]]
    layers = layers_of(view(given))
    assert [*layers] == BLOCKS
    near(layers[BLOCKS[3]][0], given[1][1])
    one_query = [[w[:, :1] for w in group] for group in given]  # not a list of steps, though each has one query
    layers = layers_of(view(one_query))
    assert [layer.shape for layer in layers.values()] == [(1, 2, 1, 3)] * 2 + [(1, 2, 1, 5)] * 2


# --- What cannot be shown ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "error", "says"),
    [
        (object(), TypeError, "object has no attention_weights"),
        (np.ones(3), ValueError, "rank 2"),
        (np.ones((2, 0, 3)), ValueError, "nothing to show"),
        (np.full((2, 2), "a"), TypeError, "weights must be numbers"),
        (np.array([[0.5, np.nan]]), ValueError, r"must be finite, but are not at \(head, query, key\) \(0, 0, 1\)"),
        (np.array([[1.0, -0.5]]), ValueError, "negative"),
        ({"weights": np.ones((2, 3, 3)), "head_names": ["one"]}, ValueError, "1 names for 2 heads"),
        ({"weights": [np.ones((n, 3, 3)) for n in (2, 4)], "head_names": "ab"}, ValueError, "2 names for 4 heads"),
        ({"weights": np.ones((2, 3, 3)), "num_heads": 2.0}, TypeError, "num_heads must be a whole number"),
        ({"weights": np.ones((2, 3, 3)), "tokens": " "}, ValueError, "0 tokens for 3 queries"),
        ({"weights": np.ones((2, 3, 3)), "tokens": 3}, TypeError, "tokens must be sentences"),
        ({"weights": np.ones((2, 1, 3, 3)), "tokens": [["a"]] * 3}, ValueError, r"3 sentences.*2 example"),
        ({"weights": np.ones((2, 3, 2, 5)), "valid_lens": [1, 2, 3]}, ValueError, "3 lengths for 2 example"),
        ({"weights": np.ones((2, 3, 2, 5)), "valid_lens": [True, False]}, TypeError, "bool, like a mask"),
    ],
)
def test_what_cannot_be_shown(source, error, says):
    with pytest.raises(error, match=says):
        view(**(source if isinstance(source, dict) else {"weights": source}))
