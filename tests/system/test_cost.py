"""mha_c.cost: the counts against counts by hand, the table, and the measured time."""

import tracemalloc

import numpy as np
import pytest

import mha_c
from mha_c import heads


def by_name(found):
    return {step.name: step for step in found.steps}


def test_multi_head_by_hand():
    layer = mha_c.MultiHeadAttention(key_size=10, query_size=12, value_size=14, num_hiddens=16, num_heads=4, dropout=0)
    steps = by_name(mha_c.cost(layer, queries=3, keys=5, batch=2, measure=False))
    assert steps["W_q queries"].flops == 2 * (2 * 3) * 12 * 16
    assert steps["W_k keys"].flops == 2 * (2 * 5) * 10 * 16
    assert steps["W_v values"].flops == 2 * (2 * 5) * 14 * 16
    assert steps["W_o heads"].flops == 2 * (2 * 3) * 16 * 16
    scores = 2 * 4 * 3 * 5
    assert steps["scores"].flops == steps["weights x values"].flops == 2 * scores * 4
    assert steps["softmax"].flops == 5 * scores
    assert steps["W_k keys"].naive_bytes == steps["W_k keys"].tiled_bytes == 4 * (10 * 10 + 10 * 16 + 10 * 16)
    assert steps["scores"].tiled_bytes == 4 * (2 * 3 * 16 + 2 * 5 * 16)
    assert steps["scores"].naive_bytes - steps["scores"].tiled_bytes == 4 * scores
    assert (steps["softmax"].naive_bytes, steps["softmax"].tiled_bytes) == (8 * scores, 0)
    in_evaluation = mha_c.cost(layer, queries=3, keys=5, batch=2, measure=False)
    assert mha_c.cost(layer.train(), queries=3, keys=5, batch=2, measure=False) == in_evaluation


def test_totals_and_double_precision():
    single, double = (mha_c.cost(mha_c.DotProductAttention(0, dtype=t), 40, 30, measure=False) for t in ("f4", "f8"))
    assert single.flops == double.flops == sum(step.flops for step in single.steps) == 40 * 30 * (2 * 64 + 5 + 2 * 64)
    assert 2 * single.naive_bytes == double.naive_bytes and 2 * single.naive_memory == double.naive_memory
    assert single.tiled_bytes == 4 * 64 * 2 * (40 + 30)


def test_open_sizes_and_pruned_layers():
    layer = mha_c.MultiHeadAttention(64, 8, 0.5)
    assert by_name(mha_c.cost(layer, 10, measure=False))["W_q queries"].flops == 2 * 10 * 64 * 64
    assert by_name(mha_c.cost(layer, 10, features=20, measure=False))["W_q queries"].flops == 2 * 10 * 20 * 64
    found = mha_c.cost(layer, 10)
    assert found.seconds > 0
    with pytest.raises(AttributeError):  # the layer itself was not called
        _ = layer.attention_weights
    assert layer.W_q.in_features == 0
    sized = mha_c.MultiHeadAttention(64, 64, 64, 64, 8, 0.5)
    whole = mha_c.cost(sized, 10, measure=False).flops
    assert 2 * mha_c.cost(heads.prune(sized, [0, 1, 2, 3]), 10, measure=False).flops == whole


def test_additive():
    layer = mha_c.AdditiveAttention(key_size=6, query_size=7, num_hiddens=8, dropout=0)
    found = mha_c.cost(layer, 3, 5, features=9)
    steps = by_name(found)
    assert steps["scores"].flops == 4 * 3 * 5 * 8 and steps["weights x values"].flops == 2 * 3 * 5 * 9
    assert steps["W_q queries"].flops == 2 * 3 * 7 * 8 and steps["W_k keys"].flops == 2 * 5 * 6 * 8
    assert found.seconds > 0


def test_the_memory_of_the_naive_way_is_what_numpy_takes():
    n, d = 512, 64
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, n, d), dtype=np.float32)
    tracemalloc.start()
    scores = q @ k.swapaxes(1, 2)
    scores *= np.float32(d**-0.5)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    out = weights @ v
    peak = tracemalloc.get_traced_memory()[1] - out.nbytes
    tracemalloc.stop()
    predicted = mha_c.cost(mha_c.DotProductAttention(0), n, measure=False).naive_memory
    assert predicted == 2 * n * n * 4 and 0.9 < peak / predicted < 1.6  # NumPy holds the difference as well


def test_tiles_do_not_grow_with_the_square():
    layer = mha_c.MultiHeadAttention(64, 4, 0)
    mha_c.set_num_threads(1)
    small, large = (mha_c.cost(layer, n, measure=False) for n in (4096, 16384))
    assert large.naive_memory / small.naive_memory > 15
    assert large.tiled_memory / small.tiled_memory < 4.01
    mha_c.set_num_threads(4)
    assert small.tiled_memory < mha_c.cost(layer, 4096, measure=False).tiled_memory < 2 * small.tiled_memory


def test_the_table():
    mha_c.set_num_threads(1)
    found = mha_c.cost(mha_c.MultiHeadAttention(32, 2, 0), 64)
    lines = repr(found).splitlines()
    assert lines[0] == "MultiHeadAttention, 2 heads: batch 1, 64 queries, 64 keys, float32"
    assert lines[1].split() == ["operations", "naive", "tiled"]
    assert lines[-1].startswith("measured: ") and "with 1 thread, " in lines[-1] and "operations/s" in lines[-1]
    assert "measured" not in repr(mha_c.cost(mha_c.DotProductAttention(0), 8, measure=False))


def test_bad_calls():
    layer = mha_c.DotProductAttention(0)
    for arguments, error in [((0,), ValueError), ((2.5,), TypeError), ((4, -1), ValueError), ((4, "5"), TypeError)]:
        with pytest.raises(error):
            mha_c.cost(layer, *arguments)
    for name in ("batch", "features"):
        with pytest.raises(ValueError, match=name):
            mha_c.cost(layer, 4, **{name: 0})
    with pytest.raises(ValueError, match="features=64, but the layer expects 6, 4"):
        mha_c.cost(mha_c.MultiHeadAttention(4, 6, 4, 8, 2, 0), 4, features=64)
    with pytest.raises(TypeError, match="attention layer of mha_c"):
        mha_c.cost(np.ones(3), 4)


@pytest.mark.parametrize("draw", range(12))
def test_memory_is_what_the_core_plans(draw):
    """cost and explain read one plan: drawn sizes, every kind of layer."""
    rng = np.random.default_rng(draw)
    batch, queries, keys = (int(rng.integers(1, most)) for most in (5, 700, 2000))
    mha_c.set_num_threads(int(rng.integers(1, 4)))
    layer = [mha_c.MultiHeadAttention(48, 3, 0), mha_c.AdditiveAttention(24, 0), mha_c.DotProductAttention(0)][draw % 3]
    size = {0: 48, 1: 24, 2: 64}[draw % 3]
    x, y = np.zeros((batch, queries, size), np.float32), np.zeros((batch, keys, size), np.float32)
    facts = mha_c.explain(layer, x, y, y).as_dict()
    found = mha_c.cost(layer, queries, keys, batch=batch, features=size, measure=False)
    assert found.tiled_memory == facts["scratch_bytes"] + facts["kept_bytes"]
