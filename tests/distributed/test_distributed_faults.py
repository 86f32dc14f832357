"""What becomes of a group when one of its processes dies or stands still: an error in time, never a wrong answer."""

import pytest
import torch

import distributed_faults as cases
from mha_c.torch import functional
from worlds import World

TIMEOUT = 4  # of the group, in seconds: a machine that needs longer for what no fault hinders gets more
ROOM = 300  # how late an error may be seen on a machine that does other things too; gloo's own limit is half an hour


def is_an_error(found, seconds):
    assert isinstance(found, str) and found.startswith("RuntimeError"), found
    assert seconds < TIMEOUT + ROOM
    return found


def in_time(scene):
    """What scene(timeout) gives with the first timeout within which this machine gets as far as the fault.

    A rank that could not even join the group in time has ended, and its result is None.
    """
    for timeout in (TIMEOUT, 10 * TIMEOUT):
        found = scene(timeout)
        if found is not None:
            return found
    raise AssertionError(f"what no fault hinders takes longer than {timeout} s")


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("way", ["forward", "backward"])
def test_a_rank_dies_in_the_ring(n, way):

    def scene(timeout):
        with World(n, timeout=timeout) as world:
            results = world.ask(cases.ring_with_a_death, n - 1, way)
        return results if [found is None for found in results] == [False] * (n - 1) + [True] else None

    for rank, (first, second) in enumerate(in_time(scene)[: n - 1]):
        text = is_an_error(*first)
        assert f"ring_attention: rank {rank} of {n} waited for rank" in text and "has died, hangs" in text
        assert "this group cannot be used any more" in is_an_error(*second)  # which is said without waiting


def test_a_rank_that_is_late_beyond_the_timeout():
    """The others give up; when it comes back it finds them gone, and nobody mistakes its late messages for others."""
    n, victim = 4, 2

    def scene(timeout):
        with World(n, timeout=timeout) as world:
            results = world.run(cases.ring_slowly, victim, 2 * timeout)
        return results if all(found and isinstance(found[0][0], float) for found in results) else None

    results = in_time(scene)
    expected = []
    for i in range(4):
        torch.manual_seed(i)
        x = torch.randn(1, 2, 16, 8)
        expected.append([part.sum().item() for part in functional.dot_product_attention(x, x, x).chunk(n, 2)])
    broken = 0
    for rank, found in enumerate(results):
        for i, (value, seconds) in enumerate(found):
            if isinstance(value, float):  # before, or in a rank that needed nothing more from it
                assert value == pytest.approx(expected[i][rank], rel=1e-4, abs=1e-4) and i <= 1
            else:
                is_an_error(value, seconds)
                broken += 1
    assert broken >= 2 * n


def test_a_rank_that_is_late_within_the_timeout():
    with World(2) as world:
        results = world.run(cases.ring_slowly, 1, 1.0)
    assert all(isinstance(value, float) for found in results for value, _ in found)
