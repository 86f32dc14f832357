"""Layers shared by several processes, beside the same layer in one: by heads, and by sequence."""

import numpy as np
import pytest

import needs

torch = needs.module("torch")
if not torch.distributed.is_available():
    pytest.skip("torch without torch.distributed", allow_module_level=True)

import distributed_heads as cases  # noqa: E402
from mha_c.torch.distributed import split_sequence  # noqa: E402
from worlds import World  # noqa: E402


@pytest.fixture(scope="module", params=[2, 4], ids="{} processes".format)
def world(request):
    with World(request.param) as world:
        yield world


def close(found, known, message=""):
    np.testing.assert_allclose(found, known, rtol=1e-12, atol=1e-12, err_msg=message)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_forward_and_backward(world, dropout, bias):
    known, gradients, known_weights = cases.whole_call(0, 1, dropout, bias)
    results = world.run(cases.sharded_call, dropout, bias)
    share = cases.HIDDEN // world.n
    for rank, (found, own, weights) in enumerate(results):
        for x, y in zip(found, known):
            close(x, y)
        close(weights, known_weights)
        mine = slice(rank * share, (rank + 1) * share)
        for name, whole in gradients.items():
            part = whole[:, mine] if name == "W_o.weight" else whole if name == "W_o.bias" else whole[mine]
            if name == "W_o.bias" and rank:
                assert name not in own
            else:
                close(own[name], part, name)


def test_one_tensor_as_all_inputs(world):
    for out, grad, other, other_grad in world.run(cases.self_attention):
        close(other, out)
        close(other_grad, grad)


def test_state_dict_is_that_of_the_whole_layer(world):
    share = cases.HIDDEN // world.n
    for rank, (equal, loaded, gathered, sizes) in enumerate(world.run(cases.states)):
        assert equal and loaded and gathered
        assert (share, 9) in sizes and (cases.HIDDEN, share) in sizes
        assert ((cases.HIDDEN,) in sizes) == (rank == 0)


def test_in_a_model(world):
    for losses, distance in world.run(cases.in_a_model):
        close(losses[4:], losses[:4])
        assert len(set(losses[:4])) == 4 and distance < 1e-12


def test_importance_of_heads(world):
    for known, found, text in world.run(cases.importance):
        assert known.keys() == found.keys() == {"ablation", "gradient", "entropy", "confidence"}
        for method, scores in known.items():
            np.testing.assert_allclose(found[method], scores, rtol=1e-9, atol=1e-12)
            assert len(set(scores)) == cases.HEADS
        assert "gather_heads" in text


def test_different_inputs_are_found_at_the_first_call(world):
    for text in world.run(cases.different_inputs):
        assert "the ranks differ in the inputs" in text and "on rank 1" in text


def test_different_parameters_are_found(world):
    for text in world.run(cases.different_parameters):
        assert "the ranks differ in the layer's parameters" in text and "on rank 1" in text


def test_copies_and_pickles(world):
    for found in world.run(cases.copies_and_pickles):
        assert len(found) == 2 and all(equal and "its process group belongs to this" in text for equal, text in found)


def test_refusals(world):
    for three, lazy, nothing in world.run(cases.refusals):
        assert f"num_heads (3) must be divisible by the number of ranks ({world.n})" in three
        assert "call it once before shard_heads" in lazy
        assert "Linear has no MultiHeadAttention in it" in nothing


def test_what_would_not_be_called_as_in_the_whole_layer_is_refused(world):
    for of_rank in world.run(cases.hooked_layers):
        for place, shared_out, spread in of_rank:
            if place in ("", "W_o"):
                assert "which would see part of a sum" in shared_out
            else:
                assert ("neither is called in training" in shared_out) if "attention" in place else shared_out is None
            assert ("attention is a Dot" in spread) if place == "attention" else spread is None


# --- spread_sequence -----------------------------------------------------------------

CAUSAL = torch.arange(1, 20).repeat(2, 1)


def test_spread_sequence_refuses_modules_that_it_would_not_call(world):
    for texts in world.run(cases.hooked_sequence):
        assert "attention.dropout is a Dropout that is replaced or hooked" in texts[0]
        assert all(text.startswith("torch.Size") for text in texts[1:4])  # a hook on the attention is called
        assert "attention.dropout is a Dropout that is replaced or hooked" in texts[4]


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize(
    "options",
    [{}, {"lens": [11, 0]}, {"lens": [11, 0], "empty_rows": "zero"}, {"lens": CAUSAL}, {"lens": CAUSAL - 2},
     {"dropout": 0.3, "lens": [19, 0]}],
    ids=["all", "lengths", "zero", "decoder", "empty rows", "dropout"],
)  # fmt: skip
def test_spread_sequence(world, layout, options):
    out, grad, parameters = cases.sequence_alone(layout, **options)
    for rank, (found, found_grad, found_parameters, text) in enumerate(world.run(cases.sequence, layout, **options)):
        close(found, split_sequence(out.detach(), rank, world.n, layout=layout))
        close(found_grad, split_sequence(grad, rank, world.n, layout=layout))
        for name, known in parameters.items():
            np.testing.assert_allclose(found_parameters[name], known, rtol=1e-11, atol=1e-11, err_msg=name)
        assert text.count("attention_weights are not kept where a sequence is spread") == 2
