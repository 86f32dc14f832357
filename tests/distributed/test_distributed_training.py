"""mha_c.torch modules under DistributedDataParallel and fully_shard: the losses of one process on the joined batch."""

import numpy as np
import pytest
import torch

import distributed_training as training
from worlds import World


@pytest.fixture(scope="module")
def two():
    with World(2) as world:
        yield world


@pytest.fixture(scope="module", params=[2, 4], ids="{} processes".format)
def world(request, two):
    if request.param == 2:
        yield two
    else:
        with World(request.param) as world:
            yield world


def agrees(results, known):
    for losses, parameters in results:
        np.testing.assert_allclose(losses, known[0], rtol=1e-10, atol=0)
        assert parameters.keys() == known[1].keys()
        for name, found in parameters.items():
            # Adam divides by gradients as small as their rounding, so a parameter may move more than a loss.
            np.testing.assert_allclose(found, known[1][name], rtol=1e-8, atol=1e-9, err_msg=name)
    assert len(set(known[0])) == len(known[0])  # something is learned


@pytest.mark.parametrize("lazy", [False, True], ids=["sizes", "lazy"])
@pytest.mark.parametrize("way", ["data_parallel", "fully_sharded"])
def test_plain(world, way, lazy):
    agrees(world.run(getattr(training, way), lazy), training.alone(0, 1, lazy))


def test_gradients(two):
    for alone, shared in two.run(training.gradients):
        assert len(alone) == 8
        for found, expected in zip(shared, alone):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)  # float32 sums in another order


@pytest.mark.parametrize("lazy", [False, True], ids=["sizes", "lazy"])
@pytest.mark.parametrize("options", [{"accumulate": 2}, {"recompute": True}, {"unused": True}], ids=str)
def test_data_parallel(two, lazy, options):
    agrees(two.run(training.data_parallel, lazy, **options), training.alone(0, 1, lazy, unused="unused" in options))


@pytest.mark.parametrize("lazy", [False, True], ids=["sizes", "lazy"])
@pytest.mark.parametrize("options", [{"accumulate": 2}, {"recompute": True}], ids=str)
def test_fully_shard(two, lazy, options):
    agrees(two.run(training.fully_sharded, lazy, **options), training.alone(0, 1, lazy))


@pytest.mark.parametrize("by", ["ddp", "fsdp"])
def test_checkpoints_of_many_for_many(two, tmp_path, by):
    agrees(two.run(training.saved_and_loaded, str(tmp_path / "saved"), by), training.alone(0, 1))


def test_saved_by_one_and_loaded_by_many(world, tmp_path):
    model = training.make(False)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    agrees(world.run(training.load_into, str(tmp_path / "model.pt")), training.alone(0, 1))
