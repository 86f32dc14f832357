"""`mha_c.explain`: what it says is what happens.  The core's own test (tests/c/test_explain.c) compares memory."""

import copy
import pickle
import sys

import numpy as np
import pytest

import children
import mha_c
import needs
from mha_c import _core, functional, variants
from mha_c.functional import additive_attention, dot_product_attention

# Numbers in a vector, f32 and f64.
TILES = {"scalar": (1, 1), "neon": (4, 2), "wasm": (4, 2), "avx2": (8, 4), "avx512": (16, 8)}


def arrays(*shapes, dtype=np.float32):
    return [np.zeros(shape, dtype) for shape in shapes]


def attention(batch=1, heads=1, queries=1, keys=1, dim=16, dtype=np.float32, **options):
    """The facts of one call of dot_product_attention."""
    q, k, v = arrays((batch, heads, queries, dim), (batch, heads, keys, dim), (batch, heads, keys, dim), dtype=dtype)
    return mha_c.explain(dot_product_attention, q, k, v, **options).as_dict()["attention"]


# --- Facts ----------------------------------------------------------------------------------------


def test_kernels(isa, dtype):
    kernels = attention(dtype=dtype)["kernels"]
    assert kernels["isa"] == isa and kernels["itemsize"] == dtype.itemsize
    lanes = TILES[isa][dtype == np.float64]
    assert kernels["lanes"] == lanes or isa == "scalar"
    # A register tile is a few rows by a few vectors, and packed weights are padded to its columns.
    assert kernels["tile_columns"] % kernels["lanes"] == 0
    assert _core.pack_linear(np.zeros((1, 7), dtype)).size == 7 * kernels["tile_columns"]


def test_text_names_the_kernels(isa):
    text = mha_c.explain(dot_product_attention, *arrays((1, 2, 4), (1, 3, 4), (1, 3, 4))).detail
    widest = [name for name, offered in _core.isas() if offered][-1]
    assert isa in text and ("the widest this CPU offers" in text) == (isa == widest)


def test_projected_keys_and_values():
    """W_k and W_v are not in the call, which is told as it will be."""
    mha = mha_c.MultiHeadAttention(16, 16, 16, 16, 2, 0.0, rng=0)
    X, Y = arrays((2, 1, 16), (2, 50, 16))
    kv = mha.project(Y, Y, [50, 7])
    facts = mha_c.explain(mha, X, kv).as_dict()
    whole = mha_c.explain(mha, X, Y, Y, [50, 7]).as_dict()
    for some in (facts, whole):
        del some["attention"]["scratch_bytes"]  # rows that come projected may lie otherwise
    assert list(facts["projections"]) == ["W_q", "W_o"] and facts["attention"] == whole["attention"]
    assert facts["kept_bytes"] == whole["kept_bytes"]
    assert "W_k" not in mha_c.explain(mha, X, kv, valid_lens=[1, 1]).detail
    additive = mha_c.AdditiveAttention(16, 16, 8, 0.0)
    assert list(mha_c.explain(additive, X, additive.project(Y, Y)).as_dict()["projections"]) == ["W_q"]
    with pytest.raises(TypeError, match="values go into `project`"):
        mha_c.explain(mha, X, kv, Y)
    with pytest.raises(TypeError, match="values"):
        mha_c.explain(mha, X, Y)
    with pytest.raises(TypeError, match="projected keys are not an array"):
        mha_c.explain(variants.MultiHeadedSelfAttention(16, 2), kv)
    mha.W_k.weight = mha.W_k.weight + 1
    with pytest.raises(ValueError, match="project again"):
        mha_c.explain(mha, X, kv)


@pytest.mark.parametrize("n_keys", [0, 1, 100, 384, 385, 512, 513, 4096])
@pytest.mark.parametrize("dim", [1, 64, 256])
def test_key_blocks(n_keys, dim):
    facts = attention(queries=70, keys=n_keys, dim=dim)
    assert facts["most_blocks"] == -(-n_keys // facts["key_block"])
    assert facts["n_tiles"] == facts["n_tiles_all"] == -(-70 // facts["tile_queries"]) * facts["most_blocks"]


def test_key_blocks_do_not_depend_on_anything_else(dtype):
    """They decide about bits (test_determinism.py)."""
    others = [attention(b, h, q, k, 48, dtype, causal=c)["key_block"] for b, h, q, k, c in [
        (1, 1, 1, 1, False), (9, 3, 200, 5000, False), (1, 2, 700, 700, True),
    ]]  # fmt: skip
    assert len(set(others)) == 1


def counted_tiles(visible, facts):
    """Pairs (tile of queries, key block) that hold a visible pair, counted on the whole mask."""
    n = 0
    for head in visible:
        for row in range(0, head.shape[0], facts["tile_queries"]):
            seen = head[row : row + facts["tile_queries"]].any(axis=0)
            blocks = range(0, len(seen), facts["key_block"])
            n += sum(seen[first : first + facts["key_block"]].any() for first in blocks)
    return n


@pytest.mark.parametrize("kind", ["causal", "window", "lens", "lens by query"])
def test_tiles_are_those_that_somebody_sees(kind, isa):
    n = 1500
    i, j = np.arange(n)[:, None], np.arange(n)
    lens, by_query = np.array([600, 0, 1500]), np.random.default_rng(0).integers(0, 700, (3, n))
    options, visible = {
        "causal": ({"causal": "top_left"}, np.broadcast_to(j <= i, (3, n, n))),
        "window": ({"window": (300, 20)}, np.broadcast_to((j >= i - 300) & (j <= i + 20), (3, n, n))),
        "lens": ({"valid_lens": lens}, j < lens[:, None, None] + 0 * i),
        "lens by query": ({"valid_lens": by_query}, j < by_query[:, :, None]),
    }[kind]
    facts = attention(3, 2, n, n, 64, **options)
    assert facts["n_tiles"] == 2 * counted_tiles(visible, facts)
    assert 0 < facts["n_tiles"] < facts["n_tiles_all"] == 2 * counted_tiles(np.ones((3, n, n), bool), facts)


# --- Threads ----------------------------------------------------------------------------------------


def test_one_thread_if_no_more_are_allowed():
    mha_c.set_num_threads(1)
    explained = mha_c.explain(dot_product_attention, *arrays(*[(1, 8, 512, 64)] * 3))
    assert explained.as_dict()["attention"]["share"]["n_threads"] == 1
    assert "one: set_num_threads allows no more" in explained.detail


def test_little_work_is_not_shared():
    mha_c.set_num_threads(4)
    share = attention(2, 5, 4, 70, 20)["share"]
    assert share["n_threads"] == 1 and share["most_threads"] == 4 and share["n_tasks"] == 10
    assert share["reason"] == "little work" and share["seconds"] < share["least_seconds"]


def test_few_keys_are_one_task_of_many_heads():
    assert attention(2, 5, 4, 6, 20)["share"]["n_tasks"] == 1
    assert attention(2, 5, 4, 6, 20)["task_heads"] == 10


@pytest.mark.parametrize("n", [2, 3, 8])
def test_large_calls_use_all_threads(n):
    mha_c.set_num_threads(n)
    share = attention(1, 12, 512, 512, 64)["share"]
    assert share["n_threads"] == share["most_threads"] == n and share["reason"] == "all"


def test_threads_grow_with_the_work():
    mha_c.set_num_threads(16)
    shares = [attention(16, 1, q, 64, 16)["share"] for q in range(1, 200, 7)]
    threads = [share["n_threads"] for share in shares]
    assert threads == sorted(threads) and threads[0] == 1 and threads[-1] > 8
    for share in shares:
        if share["reason"] == "work":
            assert share["seconds"] / share["n_threads"] >= share["least_each"] * 0.99
    assert any(share["reason"] == "work" for share in shares)


STARTED = """
import os
import numpy as np, mha_c
mha_c.set_num_threads({n})
q = np.ones((1, 12, 512, 64), np.float32)
share = mha_c.explain(mha_c.functional.dot_product_attention, q, q, q).as_dict()["attention"]["share"]
before = len(os.listdir("/proc/self/task"))
mha_c.functional.dot_product_attention(q, q, q)
print(share["n_threads"], len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
@pytest.mark.parametrize("n", [1, 2, 5])
def test_so_many_threads_are_started(n):
    used, started = map(int, children.python("-c", STARTED.format(n=n)).stdout.split())
    assert used == n and started == n - 1


def test_few_queries_on_many_keys_are_split():
    mha_c.set_num_threads(4)
    facts = attention(1, 1, 2, 8192, 64)
    assert facts["n_splits"] == facts["most_blocks"] == facts["share"]["n_tasks"]
    assert (
        "each of the" in mha_c.explain(dot_product_attention, *arrays((1, 2, 64), (1, 8192, 64), (1, 8192, 64))).detail
    )
    mha_c.set_num_threads(1)
    assert attention(1, 1, 2, 8192, 64)["n_splits"] == 1


# --- Layers --------------------------------------------------------------------------------------------


def test_projections_leave_out_what_nobody_sees(dtype):
    layer = mha_c.MultiHeadAttention(40, 5, 0.0, empty_rows="zero")
    queries, keys = arrays((3, 4, 24), (3, 9, 17), dtype=dtype)
    facts = mha_c.explain(layer, queries, keys, keys, valid_lens=[9, 2, 0]).as_dict()
    rows = {name: (p["rows"], p["rows_needed"]) for name, p in facts["projections"].items()}
    assert rows == {"W_q": (12, 12), "W_k": (27, 11), "W_v": (27, 11), "W_o": (12, 12)}
    features = {name: (p["in_features"], p["out_features"]) for name, p in facts["projections"].items()}
    assert features == {"W_q": (24, 40), "W_k": (17, 40), "W_v": (17, 40), "W_o": (40, 40)}
    # An empty row that gets the mean of all values needs them all.
    uniform = mha_c.MultiHeadAttention(40, 5, 0.0)
    facts = mha_c.explain(uniform, queries, keys, keys, valid_lens=[9, 2, 0]).as_dict()
    assert facts["projections"]["W_v"]["rows_needed"] == 9 + 2 + 9


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("n_queries", "n_keys"), [(3, 4), (60, 70)])
def test_what_is_kept(n_queries, n_keys, training):
    layer = mha_c.MultiHeadAttention(40, 5, 0.2, bias=True, rng=0)
    queries, keys = arrays((2, n_queries, 40), (2, n_keys, 40))
    facts = mha_c.explain(layer, queries, keys, keys, training=training).as_dict()
    layer(queries, keys, keys, training=training)
    saved = layer._record.kept if training else layer._last[0]
    assert facts["kept_bytes"] == sum(array.nbytes for array in saved if isinstance(array, np.ndarray))
    assert facts["kept"] == ("queries and keys" if saved[1] is None else "weights")


def test_explaining_changes_nothing():
    layer = mha_c.MultiHeadAttention(8, 2, 0.5, rng=3).train()
    x = np.random.default_rng(0).standard_normal((2, 3, 8))
    twin = copy.deepcopy(layer)
    first = mha_c.explain(layer, x, x, x).detail
    assert layer.W_q.in_features == 0 and not hasattr(layer, "attention_weights")
    assert np.array_equal(layer(x, x, x), twin(x, x, x))
    assert np.array_equal(layer(x, x, x), twin(x, x, x))
    assert mha_c.explain(layer, x, x, x).detail == first


def test_all_layers():
    x, y = arrays((2, 3, 12), (2, 5, 12))
    texts = {
        "dot": mha_c.explain(mha_c.DotProductAttention(0.1), x, y, y, [5, 1]),
        "additive": mha_c.explain(mha_c.AdditiveAttention(7, 0.1), x, y, y, [5, 1]),
        "self": mha_c.explain(variants.MultiHeadedSelfAttention(12, 3), x),
        "list": mha_c.explain(mha_c.DotProductAttention(0.1), x.tolist(), y.tolist(), y.tolist()),
    }
    assert set(texts["dot"].as_dict()["projections"]) == set()
    assert set(texts["additive"].as_dict()["projections"]) == {"W_q", "W_k"}
    assert list(texts["self"].as_dict()["projections"])[3] == "final_linear_layer"
    assert texts["list"].as_dict()["dtype"] == "float64"


def test_projected_keys():
    layer = mha_c.AdditiveAttention(7, 0.1)
    x, y = arrays((2, 3, 12), (2, 5, 12))
    keys = layer.project_keys(y, [5, 1])
    assert set(mha_c.explain(layer, x, keys, y).as_dict()["projections"]) == {"W_q"}


def test_additive_function():
    q, k, v, w_v, W_q = arrays((2, 3, 12), (2, 5, 7), (2, 5, 4), (7,), (7, 12))
    facts = mha_c.explain(additive_attention, q, k, v, w_v, W_q, valid_lens=[5, 1]).as_dict()
    assert {name: p["rows"] for name, p in facts["projections"].items()} == {"W_q": 6}
    assert facts["attention"]["head_dim"] == 7 and facts["attention"]["value_dim"] == 4


def test_options_count():
    q, k = arrays((1, 4, 8), (1, 3000, 8))
    plain = attention(queries=4, keys=3000, dim=8)
    generator = np.random.default_rng(0)
    state = generator.bit_generator.state
    more = mha_c.explain(dot_product_attention, q, k, k, dropout=0.5, rng=generator, return_weights=True).as_dict()
    assert generator.bit_generator.state == state
    assert more["attention"]["weights_again"] and not plain["weights_again"]
    assert more["scratch_bytes"] > plain["scratch_bytes"]
    short = mha_c.explain(dot_product_attention, q, k[:, :5], k[:, :5], return_weights=True).as_dict()
    assert not short["attention"]["weights_again"]


# --- The object, and errors -----------------------------------------------------------------------------


def test_as_dict_is_a_copy_and_the_text_stays():
    explained = mha_c.explain(dot_product_attention, *arrays((1, 2, 4), (1, 3, 4), (1, 3, 4)))
    facts = explained.as_dict()
    facts["attention"].clear()
    assert explained.as_dict()["attention"] and repr(explained) == str(explained)
    assert str(pickle.loads(pickle.dumps(explained))) == str(explained)


def test_arguments_are_checked_as_in_the_call():
    x, y = arrays((2, 3, 12), (2, 5, 11))
    layer = mha_c.DotProductAttention(0.0)
    for call in (lambda: layer(x, y, y), lambda: mha_c.explain(layer, x, y, y)):
        with pytest.raises(mha_c.ShapeError, match=r"keys has 11 features, but queries has 12"):
            call()
    with pytest.raises(ValueError, match="causal=True is ambiguous"):
        mha_c.explain(dot_product_attention, x, x[:, :2], x[:, :2], causal=True)
    with pytest.raises(TypeError, match="valid_lens"):
        mha_c.explain(layer, x, x, x, [True, False])


@pytest.mark.parametrize(
    "wrong", [functional.merge, "MultiHeadAttention", None, np.ones(3), variants.SelfAttentionAISummer(4)]
)
def test_what_cannot_be_explained(wrong):
    with pytest.raises(TypeError, match="explain takes an attention layer of mha_c"):
        mha_c.explain(wrong, np.zeros((1, 2, 4)))


def test_one_input_and_nothing_else_is_taken_by_a_layer_of_one():
    layer, x = variants.MultiHeadedSelfAttention(16, 2), np.zeros((1, 2, 16))
    assert str(mha_c.explain(layer, x)) == str(mha_c.explain(layer, x=x))
    for args, options in (((), {}), ((x, x), {}), ((x,), {"valid_lens": [1]})):
        with pytest.raises(TypeError, match="argument"):
            mha_c.explain(layer, *args, **options)


# --- threadpoolctl ------------------------------------------------------------------------------------------


def test_threadpoolctl():
    threadpoolctl = needs.module("threadpoolctl")
    mha_c.config.register_with_threadpoolctl()
    mha_c.config.register_with_threadpoolctl()
    mha_c.set_num_threads(6)
    (found,) = (info for info in threadpoolctl.threadpool_info() if info["user_api"] == "mha_c")
    assert found["num_threads"] == 6 and found["filepath"] == _core.__file__
    with threadpoolctl.threadpool_limits(limits=2):
        assert mha_c.get_num_threads() == 2
        assert attention(1, 12, 512, 512, 64)["share"]["n_threads"] == 2
        assert mha_c.show_config()["threads_from"] == "limited by threadpoolctl"
        with threadpoolctl.threadpool_limits(limits={"mha_c": 1}):
            assert mha_c.get_num_threads() == 1
        assert mha_c.get_num_threads() == 2
    assert mha_c.get_num_threads() == 6 and mha_c.show_config()["threads_from"] == "set_num_threads"
    with threadpoolctl.threadpool_limits(limits=1, user_api="blas"):
        assert mha_c.get_num_threads() == 6


def test_without_threadpoolctl(monkeypatch):
    monkeypatch.setitem(sys.modules, "threadpoolctl", None)
    with pytest.raises(ImportError):
        mha_c.config.register_with_threadpoolctl()


def test_what_is_done_to_scores():
    q = np.ones((1, 2, 9, 4))
    terms = {"softcap": 5, "relative_bias": np.zeros((2, 7)), "sinks": np.zeros(2)}
    plain, told = (mha_c.explain(functional.dot_product_attention, q, q, q, **more) for more in ({}, terms))
    assert "scores capped at 5, with a bias by distance, up to 3 keys away, with a sink for each head" in told.detail
    assert "scores stand transposed" in plain.detail and "scores stand transposed" not in told.detail
    assert told.as_dict()["attention"]["score_terms"] == {"softcap": 5.0, "reach": 3, "sinks": True}


@pytest.mark.parametrize("kind", ["multi-head", "additive", "dot"])
def test_a_call_with_a_cache_is_explained(kind):
    """Its keys are those of all steps so far, its projections' rows those of the new steps; nothing changes."""
    make = {
        "multi-head": lambda: mha_c.MultiHeadAttention(8, 2, 0.0, rng=0),
        "additive": lambda: mha_c.AdditiveAttention(8, 0.0, rng=0),
        "dot": lambda: mha_c.DotProductAttention(0.0),
    }[kind]
    layer, x = make(), np.ones((2, 3, 8), np.float32)
    cache = layer.new_cache(2, 7)
    for n_keys in (3, 6):
        facts = mha_c.explain(layer, x, x, x, cache=cache).as_dict()
        assert facts["attention"]["keys"] == n_keys and facts["attention"]["queries"] == 3
        assert {one["rows"] for one in facts["projections"].values()} <= {6}
        assert ("W_k" in facts["projections"]) == (kind != "dot")
        assert list(cache.lengths) == [n_keys - 3] * 2
        layer(x, x, x, cache=cache)
    with pytest.raises(ValueError, match="cache is full"):
        mha_c.explain(layer, x, x, x, cache=cache)
    with pytest.raises(TypeError, match="cache must be"):
        mha_c.explain(layer, x, x, x, cache=3)
    with pytest.raises(ValueError, match="for evaluation"):
        mha_c.explain(layer, x, x, x, cache=layer.new_cache(2, 7), training=True)
    if kind != "dot":
        with pytest.raises(ValueError, match="another W_k"):
            mha_c.explain(make(), x[:, :1], x[:, :1], x[:, :1], cache=cache)
