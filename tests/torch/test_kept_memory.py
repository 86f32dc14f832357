"""Memory of large results and copies: kept for the next ones, and for no two at once, in threads and in forks."""

import os
import threading
import tracemalloc

import numpy as np
import pytest
import torch

import mha_c.torch as mt
from layouts import LAYOUTS
from mha_c import _core
from seen_by_torch import keep_nothing
from threads import in_threads
from torch_modules import leaves


def large(seed, length=256):
    """Attention of `length` queries: a result of length / 2 KiB, in memory that is kept when it is gone."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(1, 2, length, 64, generator=generator)
    return mt.functional.dot_product_attention(q, *torch.randn(2, 1, 2, 4, 64, generator=generator))


@pytest.mark.parametrize(
    "layout", ["dense", "axes turned", "second axis first", "features strided", "rows strided", "rows apart"]
)
def test_copies_of_operands(layout):
    """Whatever order the numbers have in memory."""
    given = [torch.from_numpy(LAYOUTS[layout](x.detach().numpy())) for x in leaves((2, 3, 5, 4), (2, 1, 7, 4))]
    for copy, x in zip(_core.copy_operands(*given), given):
        assert torch.equal(copy, x) and copy.is_contiguous() and copy.data_ptr() != x.data_ptr()


def test_memory_of_large_copies_is_kept_too():
    keep_nothing()
    q, k = torch.ones(1, 2, 256, 64), torch.ones(1, 2, 257, 64)
    places = {x.data_ptr() for x in _core.copy_operands(q, k)}
    others = [torch.empty(2 * rows * 64) for rows in range(250, 270)]  # malloc has nothing of theirs left
    assert {x.data_ptr() for x in _core.copy_operands(q, k)} == places and len(others) == 20


def test_memory_of_large_results_is_kept_for_the_next():
    keep_nothing()
    first, copy = large(1), large(1).clone()  # the inner result of the second call is gone
    kept = large(2).data_ptr()
    last_row = first[0, 0, -1]
    assert first.data_ptr() % 64 == kept % 64 == 0  # stores of whole cache lines
    assert large(3).data_ptr() == kept != first.data_ptr()
    others = [large(seed) for seed in range(4, 144)]  # more than are kept
    assert len({x.data_ptr() for x in (first, *others)}) == 141
    places = {x.data_ptr() for x in others}
    del others
    assert torch.equal(first, copy) and torch.equal(last_row, copy[0, 0, -1])
    del first  # a view holds all of it
    again = [large(seed) for seed in range(30, 40)]
    assert {x.data_ptr() for x in again} <= places
    assert torch.equal(last_row, copy[0, 0, -1])
    for seed, x in zip(range(30, 40), again):
        assert torch.equal(x, large(seed))


def test_large_results_of_several_threads_have_memory_of_their_own():
    expected = [large(seed) for seed in range(4)]
    wrong = []

    def work(seed):
        for _ in range(50):
            held = [large(seed) for _ in range(3)]
            wrong.extend(x for x in held if not torch.equal(x, expected[seed]))

    in_threads(*(lambda seed=seed: work(seed) for seed in range(4)))
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks")
def test_memory_is_kept_in_a_child_forked_while_threads_take_it():
    """Whatever a thread was doing with kept memory when another one forked."""
    done, queries = [], torch.ones(1, 2, 256, 64)

    def work(seed):
        while not done:
            large(seed)

    def keeps():
        def places(n):
            results = [_core.attention_forward(*[queries] * 3)[0] for _ in range(n)]
            return {result.data_ptr() for result in results}

        before = places(130)  # more than are kept
        others = [np.empty(2**17 + 64, np.uint8) for _ in range(130)]  # malloc has nothing of theirs left
        return len(others) == 130 and places(100) <= before

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(10):
            child = os.fork()
            if child == 0:
                os._exit(0 if keeps() else 1)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        done.append(True)
        for thread in threads:
            thread.join()


def test_little_memory_is_kept():
    """At most 64 MiB of whatever is gone, the last first; nothing of a larger size."""

    def held():
        domain = tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)
        return sum(x.size for x in tracemalloc.take_snapshot().filter_traces([domain]).traces) / 2**20

    keep_nothing()
    tracemalloc.start()
    try:
        results = [large(seed, length=16 * 1024) for seed in range(10)]  # 8 MiB each
        assert held() > 79
        del results
        assert 50 < held() < 65
        for length in (68 * 1024, 136 * 1024):  # 34 and 68 MiB
            large(1, length)
        assert 33 < held() < 65
        places = [large(1, length).data_ptr() for length in (512, 1024, 512)]
        assert places[0] == places[2] != places[1]  # a block of another size is left for its own
    finally:
        tracemalloc.stop()
