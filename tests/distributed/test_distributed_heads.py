"""Layers shared by several processes, beside the same layer in one: by heads (torch's own way), and by sequence."""

import numpy as np
import pytest
import torch

import distributed_heads as cases
from mha_c.torch.distributed import split_sequence
from worlds import World


@pytest.fixture(scope="module", params=[2, 4], ids="{} processes".format)
def world(request):
    with World(request.param) as world:
        yield world


def close(found, known, message=""):
    np.testing.assert_allclose(found, known, rtol=1e-12, atol=1e-12, err_msg=message)


# --- torch's tensor parallel -----------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_forward_and_backward(world, bias):
    known, gradients, known_weights = cases.whole_call(0, 1, bias)
    share = cases.HEADS // world.n
    for rank, (found, found_gradients, weights) in enumerate(world.run(cases.parallel_call, bias)):
        for x, y in zip(found, known):
            close(x, y)
        for name, whole in gradients.items():
            close(found_gradients[name], whole, name)
        close(weights, known_weights[:, rank * share : (rank + 1) * share])


def test_training(world):
    for losses, distance in world.run(cases.parallel_steps):
        close(losses[4:], losses[:4])
        assert len(set(losses[:4])) == 4 and distance < 1e-12


def test_the_attention_is_the_cores(world):
    """One call for the rows of all heads of a process, with dropout, too."""
    rows = 3, 5, cases.HIDDEN // world.n
    assert world.run(cases.core_calls) == [[rows, rows]] * world.n


# --- spread_sequence -----------------------------------------------------------------


def test_copies_and_pickles(world):
    found = world.run(cases.copies_and_pickles)
    assert all(equal and "its process group belongs to this" in text for equal, text in found)


def test_what_would_not_be_called_as_in_the_whole_layer_is_refused(world):
    for of_rank in world.run(cases.hooked_layers):
        for place, said in of_rank:
            assert ("attention is a Dot" in said) if place == "attention" else said is None


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
        assert "write valid_lens=torch.arange(1, N + 1).repeat(B, 1)" in text
