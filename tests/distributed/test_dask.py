"""mha_c.dask.apply: layers over dask arrays, on threads and on the processes of dask.distributed."""

import os
import signal

import numpy as np
import pytest

import children
import mha_c
import mha_c.variants
import needs
from checks import same

da = needs.module("dask.array")
distributed = needs.module("distributed")
import dask  # noqa: E402

import dask_cases  # noqa: E402
import mha_c.dask  # noqa: E402

BATCH, ROWS, KEYS, FEATURES = 12, 5, 7, 16
KEPT = "not kept by mha_c[.]dask[.]apply"


def operands(rng, dtype="float32", chunks=3):
    arrays = [rng.standard_normal((BATCH, rows, FEATURES)).astype(dtype) for rows in (ROWS, KEYS, KEYS)]
    return arrays, [da.from_array(x, chunks=(chunks, 2, 8)) for x in arrays]


def layers():
    sizes = FEATURES, FEATURES
    return {
        "multi-head": mha_c.MultiHeadAttention(*sizes, FEATURES, 24, 4, 0.1, bias=True, rng=0),
        "dot products": mha_c.DotProductAttention(0.1),
        "additive": mha_c.AdditiveAttention(*sizes, 8, 0.1, rng=0),
        "zero rows": mha_c.MultiHeadAttention(*sizes, FEATURES, 8, 2, 0.0, rng=0, empty_rows="zero"),
        "grouped": mha_c.GQAAttention(FEATURES, 4, 2, rope=True, causal=False, rng=0),
        "causal": mha_c.CausalAttention(FEATURES, 4, rng=0),
    }


@pytest.fixture(scope="module")
def client():
    """Two worker processes of one thread each, which find the modules of tests/."""
    settings = {"distributed.admin.large-graph-warning-threshold": "1GB", "distributed.worker.memory.pause": False}
    settings["distributed.scheduler.work-stealing"] = False  # else tasks move as the workers' speeds do
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.path.dirname(dask_cases.__file__), prepend=os.pathsep)
        with (
            dask.config.set(settings),
            distributed.LocalCluster(
                n_workers=2, threads_per_worker=1, dashboard_address="127.0.0.1:0", host="127.0.0.1"
            ) as cluster,
            distributed.Client(cluster) as client,
        ):
            yield client


# --- Without a cluster ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", layers())
@pytest.mark.parametrize("lens", [None, "items", "queries", "dask"])
def test_the_numbers_of_the_layer(rng, name, lens, dtype):
    arrays, lazy = operands(rng, dtype)
    layer = layers()[name]
    given = known = None
    if lens is not None:
        known = rng.integers(0, KEYS + 1, (BATCH,) if lens != "queries" else (BATCH, ROWS))
        given = da.from_array(known, chunks=5) if lens == "dask" else known.tolist()
    out = mha_c.dask.apply(layer, *lazy, given)
    expected = layer(*arrays, known)
    assert out.shape == expected.shape and out.dtype == dtype and out.chunks == ((3,) * 4, (ROWS,), expected.shape[2:])
    same(out.compute(scheduler="sync"), expected)
    same(out[4:6].compute(scheduler="threads"), expected[4:6])


@pytest.mark.parametrize("name", layers())
def test_causal_is_that_of_the_call(rng, name):
    arrays, lazy = operands(rng)
    layer, found = layers()[name], []
    for causal in ("top_left", "bottom_right"):
        found.append(mha_c.dask.apply(layer, *lazy, causal=causal).compute(scheduler="sync"))
        same(found[-1], layer(*arrays, causal=causal))
        with pytest.raises(RuntimeError, match=KEPT):
            _ = (mha_c.dask.apply(layer, *lazy, causal=causal), layer.attention_weights)
    if name != "causal":
        assert not np.array_equal(*found)
        with pytest.raises(ValueError, match="causal=True is ambiguous for 5 queries and 7 keys"):
            mha_c.dask.apply(layer, *lazy, causal=True)


def test_layers_that_differ_in_their_settings_alone_are_two(rng):
    arrays, lazy = operands(rng)
    both = [mha_c.GQAAttention(FEATURES, 4, 2, rope=rope, rng=0) for rope in (True, False)]
    found = dask.compute(*(mha_c.dask.apply(layer, *lazy) for layer in both), scheduler="sync")
    for out, layer in zip(found, both):
        same(out, layer(*arrays))


def test_nothing_is_computed_before_it_is_asked_for(rng, monkeypatch, tmp_path):
    monkeypatch.setenv("MHA_C_NOTES", str(tmp_path / "notes"))
    layer = dask_cases.Noted(FEATURES, FEATURES, FEATURES, 8, 2, 0.0, rng=0)
    _, lazy = operands(rng)
    out = mha_c.dask.apply(layer, *lazy)
    before = (tmp_path / "notes").read_text().count("called")
    assert before == 1  # on a row of zeros, for the shape
    out[:3].compute(scheduler="sync")
    assert (tmp_path / "notes").read_text().count("called") == before + 1


def test_later_changes_of_the_layer_have_no_effect(rng):
    arrays, lazy = operands(rng)
    layer = layers()["multi-head"]
    expected = layer(*arrays)
    out = mha_c.dask.apply(layer, *lazy)
    layer.W_q.weight = np.zeros((24, FEATURES))
    same(out.compute(scheduler="sync"), expected)
    other = mha_c.dask.apply(layer, *lazy)
    assert other.name != out.name
    same(other.compute(scheduler="sync"), layer(*arrays))


def test_layers_that_differ_in_their_heads_alone_are_two(rng):
    arrays, lazy = operands(rng)
    four, two = (mha_c.MultiHeadAttention(FEATURES, FEATURES, FEATURES, 8, heads, 0.0, rng=0) for heads in (4, 2))
    both = dask.compute(*(mha_c.dask.apply(layer, *lazy) for layer in (four, two)), scheduler="sync")
    for found, layer in zip(both, (four, two)):  # dask computes once what has one name
        same(found, layer(*arrays))


def test_layers_of_a_class_of_ones_own_are_never_one(rng):
    class Times(mha_c.DotProductAttention):
        def __init__(self, factor):
            super().__init__(0.0)
            self.factor = factor

        def __call__(self, *args, **named):
            return self.factor * super().__call__(*args, **named)

    _, lazy = operands(rng)
    once, twice = dask.compute(*(mha_c.dask.apply(Times(n), *lazy) for n in (1, 2)), scheduler="sync")
    same(twice, 2 * once)


def test_one_array_as_queries_keys_and_values(rng):
    x = rng.standard_normal((BATCH, ROWS, FEATURES)).astype("float32")
    layer = layers()["multi-head"]
    lazy = da.from_array(x, chunks=(5, 5, 16))
    same(mha_c.dask.apply(layer, lazy, lazy, lazy).compute(scheduler="sync"), layer(x, x, x))
    same(mha_c.dask.apply(layer, x, x, x).compute(scheduler="sync"), layer(x, x, x))


def test_weights_are_refused_with_a_message(rng):
    arrays, lazy = operands(rng)
    for layer in layers().values():
        layer(*arrays)
        mha_c.dask.apply(layer, *lazy)
        with pytest.raises(RuntimeError, match=KEPT):
            layer.attention_weights  # noqa: B018
        layer(*arrays)
        assert layer.attention_weights is not None
    layer = layers()["multi-head"]
    mha_c.dask.apply(layer, *lazy)
    with pytest.raises(RuntimeError, match=KEPT):
        layer.attention.attention_weights  # noqa: B018


def test_refusals(rng):
    _, (q, k, v) = operands(rng)
    layer = layers()["multi-head"]
    for other in (3, mha_c.KernelAttention(), mha_c.variants.MultiHeadedSelfAttention(8, 2)):
        with pytest.raises(TypeError, match=rf"layer must be one of the book's .*, got .*[.]{type(other).__name__}$"):
            mha_c.dask.apply(other, q, k, v)
    with pytest.raises(ValueError, match=r"call layer.eval\(\) first"):
        mha_c.dask.apply(layers()["multi-head"].train(), q, k, v)
    with pytest.raises(ValueError, match="not initialised yet"):
        mha_c.dask.apply(mha_c.MultiHeadAttention(8, 2, 0.0), q, k, v)
    with pytest.raises(ValueError, match="keys has batch size 11, but queries has 12"):
        mha_c.dask.apply(layer, q, k[:11], v[:11])
    with pytest.raises(ValueError, match="values has 6 rows, but keys has 7"):
        mha_c.dask.apply(layer, q, k, v[:, :6])
    with pytest.raises(ValueError, match=r"valid_lens must have shape \(12,\) or \(12, 5\), got \(3,\)"):
        mha_c.dask.apply(layer, q, k, v, [1, 2, 3])
    with pytest.raises(TypeError, match="values has dtype float64, but queries has dtype float32"):
        mha_c.dask.apply(layer, q, k, v.astype("float64"))
    with pytest.raises(ValueError, match="queries must have shape"):
        mha_c.dask.apply(layer, q[0], k, v)
    with pytest.raises(ValueError, match="features"):
        mha_c.dask.apply(layer, q[:, :, :8], k, v)


def test_mha_c_does_not_import_dask():
    code = "import sys, mha_c; print('dask' in sys.modules, 'mha_c.dask' in sys.modules)"
    assert children.python("-c", code).stdout.split() == ["False", "False"]


# --- Two processes --------------------------------------------------------------------------------------------


def test_two_processes(client, rng):
    arrays, lazy = operands(rng, chunks=1)
    layer, lens = layers()["multi-head"], np.arange(BATCH) % KEYS + 1
    client.run(dask_cases.set_threads, 3)
    out = mha_c.dask.apply(layer, *lazy, lens)
    same(out.compute(), layer(*arrays, lens))
    threads = client.run(mha_c.get_num_threads)
    assert len(threads) == 2 and set(threads.values()) == {1}  # each worker's share of the cores


def test_a_worker_gets_the_layer_once(client, rng, monkeypatch, tmp_path):
    notes = tmp_path / "notes"
    client.run(dask_cases.write_notes, str(notes))
    monkeypatch.setenv("MHA_C_NOTES", str(notes))
    layer = dask_cases.Noted(FEATURES, FEATURES, FEATURES, 8, 2, 0.0, rng=0)
    arrays, lazy = operands(rng, chunks=1)
    mine, workers = os.getpid(), set(client.run(os.getpid).values())
    same(mha_c.dask.apply(layer, *lazy).compute(), layer(*arrays))
    lines = [line.split() for line in notes.read_text().splitlines()]
    calls = {pid: sum(line == [str(pid), "called"] for line in lines) for pid in workers}
    assert sum(calls.values()) == BATCH
    for pid in workers:  # not with each chunk; where it is computed, dask may send it a second time
        assert sum(line == [str(pid), "unpickled"] for line in lines) <= 2
    assert mine not in workers


def test_a_worker_is_killed_in_the_middle(client, rng):
    arrays, lazy = operands(rng, chunks=1)
    layer = layers()["multi-head"]
    out = mha_c.dask.apply(layer, *lazy).persist()
    futures = distributed.futures_of(out)
    distributed.wait(futures[0], timeout=needs.HANGS)
    (address, *_) = next(iter(client.who_has([futures[0]]).values()))
    os.kill(client.run(os.getpid)[address], signal.SIGKILL)  # what it held is lost, and computed again
    same(out.compute(), layer(*arrays))
