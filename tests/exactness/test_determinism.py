"""The same call gives the same bits: in every run and process, for any number of threads, alone or in any batch, for
the queries of a call taken together or a few at a time, whether weights are wanted or not, and whatever stands behind
the lengths (test_arrangements.py: wherever in memory the arrays lie).  On every instruction set, in both types, forward
and backward.

Not promised, and not tested: the same bits on another instruction set.
"""

import numpy as np
import pytest

import children
import mha_c
from attention_calls import KINDS, draw, of_a_kind
from checks import bits
from core_calls import core as _core
from threads import in_threads

THREADS = range(1, 9)

call = pytest.fixture(of_a_kind, params=KINDS)


# --- Runs, threads, memory ------------------------------------------------------------------------------


def test_runs(call):
    first = bits(call.run())
    assert all(bits(call.run()) == first for _ in range(10))


def test_threads(call):
    _core.set_num_threads(1)
    alone = bits(call.run())
    for n in THREADS:
        _core.set_num_threads(n)
        assert bits(call.run()) == alone, f"{n} threads"


def test_a_busy_pool(isa, dtype, rng):
    """Whoever finds the pool taken works alone: the same bits, then."""
    call = KINDS["long"](rng, dtype)
    _core.set_num_threads(2)
    expected, found = bits(call.run()), []
    in_threads(*[lambda: found.extend(bits(call.run()) for _ in range(5))] * 4)
    assert len(found) == 20 and all(result == expected for result in found)


def test_what_else_is_wanted(call):
    """Weights, their sums, or nothing: the output is the same, and so are the weights, however they come."""
    out, weights, lse, stats = call.forward(return_weights=True, return_lse=True)
    alone = _core.attention_forward(call.q, call.k, call.v, call.w_v, **call.options)[0]
    only_weights = _core.attention_forward(call.q, call.k, call.v, call.w_v, return_weights=True, **call.options)
    assert bits([out, *stats]) == bits(call.run()[:3])
    assert alone.tobytes() == out.tobytes() == only_weights[0].tobytes()
    assert only_weights[1].tobytes() == weights.tobytes()
    assert np.isfinite(lse).any()


PROGRAM = """
import hashlib
import numpy as np
from mha_c import _core
for isa in [name for name, offered in _core.isas() if offered]:
    _core.set_isa(isa)
    for dtype in "float32", "float64":
        q, k, v, g = np.random.default_rng(5).standard_normal((4, 2, 2, 40, 64)).astype(dtype)
        out, weights, lse, stats = _core.attention_forward(
            q, k, v, None, np.array([40, 3]), None, None, None, -1, -1, None, 0.0, 0, "zero", True, True, True
        )
        grads = _core.attention_backward(g, out, stats, q, k, v, None, np.array([40, 3]))[:3]
        arrays = (out, weights, lse, *stats, *grads)
        print(_core.isa(), dtype, hashlib.sha256(b"".join(a.tobytes() for a in arrays)).hexdigest())
"""


@pytest.mark.thread_unsafe(reason="selects instruction sets")
def test_processes(capsys):
    """Addresses are drawn anew for each process; so is what stands in fresh memory."""
    first, second = (children.python("-c", PROGRAM).stdout.splitlines() for _ in range(2))
    exec(compile(PROGRAM, "<here>", "exec"), {})
    assert first == second == capsys.readouterr().out.splitlines()
    assert len({*first}) == len(first) == 2 * sum(offered for _, offered in _core.isas())


# --- Batch ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [2, 3, 17])
@pytest.mark.parametrize("kind", ["short", "long", "additive"])
def test_batch(kind, batch, isa, dtype, rng):
    """An item alone, and at the first, middle and last place among others."""
    alone = KINDS[kind](rng, dtype)
    one = {name: getattr(alone, name)[:1] for name in ("q", "k", "v", "grad_out")}
    expected = bits(alone.change(**one).run()[:6])
    for place in sorted({0, batch // 2, batch - 1}):
        many = {}
        for name, array in one.items():
            many[name] = rng.standard_normal((batch, *array.shape[1:])).astype(dtype)
            many[name][place] = array[0]
        found = alone.change(**many).run()[:6]
        assert bits(array[place : place + 1] for array in found) == expected, f"place {place} of {batch}"


def test_heads(isa, dtype, rng):
    """A call with H heads, and H calls with one."""
    call = draw(rng, dtype, (2, 4, 4, 19, 700, 24, 8))
    together = call.run()
    for h in range(4):
        one = {name: getattr(call, name)[:, h : h + 1] for name in ("q", "k", "v", "grad_out")}
        assert bits(call.change(**one).run()) == bits(array[:, h : h + 1] for array in together)


# --- Queries a few at a time ------------------------------------------------------------------------------


def rows(call, first, last):
    """The call for some of its queries."""
    changes = {"q": call.q[:, :, first:last], "grad_out": call.grad_out[:, :, first:last]}
    for name in ("keep_mask", "bias"):
        if name in call.options:
            changes[name] = call.options[name][first:last]
    lens = call.options.get("valid_lens")
    if lens is not None and lens.ndim == 2:
        changes["valid_lens"] = lens[:, first:last]
    return call.change(**changes)


@pytest.mark.parametrize("step", [1, 7, 64])
@pytest.mark.parametrize("kind", ["short", "long", "additive", "masks"])
def test_query_chunks(kind, step, isa, dtype, rng):
    call = KINDS[kind](rng, dtype)
    if kind == "masks":
        call.options = {k: v for k, v in call.options.items() if k not in ("causal", "window_left")}
    together = call.run()[:4]  # what belongs to queries: out, statistics, grad_q
    n_queries = call.q.shape[2]
    starts = range(0, n_queries, step) if step > 1 else (0, 1, n_queries // 2, n_queries - 1)
    for first in starts:
        last = min(first + step, n_queries)
        assert bits(rows(call, first, last).run()[:4]) == bits(array[:, :, first:last] for array in together)


@pytest.mark.parametrize("additive", [False, True], ids=["dot", "additive"])
def test_decoding_gives_what_the_whole_gives(additive, isa, dtype, rng):
    """Step by step with the keys there are so far, as a decoder does, or all steps in one causal call."""
    sizes = (1, 2, 2, 40, 700, 20, 8)
    call = draw(rng, dtype, sizes, additive, causal="bottom_right", window_left=300)
    together = call.run()[:4]
    for first, last in [(0, 1), (1, 2), (13, 20), (39, 40)]:
        n_keys = 700 - (40 - last)
        part = rows(call, first, last).change(k=call.k[:, :, :n_keys], v=call.v[:, :, :n_keys])
        assert bits(part.run()[:4]) == bits(array[:, :, first:last] for array in together)


@pytest.mark.parametrize("additive", [False, True], ids=["dot", "additive"])
def test_a_mask_in_any_words(additive, isa, dtype, rng):
    """Causal corner and window, lengths, or a keep mask that hides the same keys: results and all gradients."""
    for n_keys, left in (700, 300), (700, 30), (9600, 700):
        call = draw(rng, dtype, (1, 2, 1, 40, n_keys, 20, 8), additive)
        diagonal, key = np.arange(40)[:, None] + n_keys - 40, np.arange(n_keys)
        band = call.change(causal="bottom_right", window_left=left)
        keep = call.change(keep_mask=(key <= diagonal) & (key >= diagonal - left))
        assert bits(band.run()) == bits(keep.run())
    corner, lens = call.change(causal="bottom_right"), call.change(valid_lens=diagonal.T + 1)
    assert bits(corner.run()) == bits(lens.run())


# --- What lies behind the lengths -----------------------------------------------------------------------


SOME_BLOCKS = [(n, 1100) for n in (1, 31, 127, 128, 129, 511, 512, 513, 700)]


@pytest.mark.parametrize("n, of", [*SOME_BLOCKS, (8192, 9500), (8200, 9500), (9200, 9500)])
@pytest.mark.parametrize("additive", [False, True], ids=["dot", "additive"])
def test_a_length_is_a_slice(n, of, additive, isa, dtype, rng):
    call = draw(rng, dtype, (1, 2, 1, 6, of, 20, 8), additive)
    k, v = call.k.copy(), call.v.copy()
    k[:, :, n:], v[:, :, n:] = np.nan, np.inf
    short = call.change(k=k[:, :, :n], v=v[:, :, :n])
    out, row_max, row_sum, grad_q, grad_k, grad_v, *grad_w = call.change(k=k, v=v, valid_lens=np.array([n])).run()
    found = [out, row_max, row_sum, grad_q, grad_k[:, :, :n], grad_v[:, :, :n], *grad_w]
    assert bits(found) == bits(short.run())
    assert not grad_k[:, :, n:].any() and not grad_v[:, :, n:].any()


@pytest.mark.parametrize("row", [0, 2, 4])
@pytest.mark.parametrize("window", [False, True])
def test_one_row_that_sees_less(row, window, isa, dtype, rng):
    """What a single row may not see does not reach it: neither in the first, nor in another, nor in the last place."""
    q, k, v = (rng.standard_normal((1, n, 12)).astype(dtype) for n in (5, 600, 600))
    lens = np.full((1, 5), 600)
    lens[0, row] = 550
    hidden = v.copy()
    hidden[:, 550:] = np.nan
    found = _core.attention_forward(q, k, hidden, valid_lens=lens, window_left=700 if window else -1)[0]
    alone = _core.attention_forward(q[:, row : row + 1], k[:, :550], v[:, :550])[0]
    assert found[:, row].tobytes() == alone.tobytes()
    assert np.isnan(np.delete(found, row, axis=1)).all()


def test_statistics_of_rows_without_keys(isa, dtype, rng):
    q, k, v = (rng.standard_normal((2, n, 12)).astype(dtype) for n in (5, 40, 40))
    mask = np.arange(2)[:, None, None] * np.ones((1, 5, 40)) > 0
    for options in {"valid_lens": np.array([0, 40])}, {"keep_mask": mask}:
        found = _core.attention_forward(q, k, v, return_lse=True, return_stats=True, **options)
        out, _, lse, (row_max, row_sum) = found
        assert not out[0].any() and not row_max[0].any() and not row_sum[0].any() and np.isneginf(lse[0]).all()
        assert out[1].all() and (row_sum[1] >= 1).all()


# --- Layers -----------------------------------------------------------------------------------------------


@pytest.fixture(params=["multi-head", "additive", "dot-product"])
def layer(request, isa, dtype):
    makers = {
        "multi-head": lambda: mha_c.MultiHeadAttention(48, 40, 33, 64, 4, 0.3, bias=True, rng=1, dtype=dtype),
        "additive": lambda: mha_c.AdditiveAttention(48, 40, 24, 0.3, rng=1, dtype=dtype),
        "dot-product": lambda: mha_c.DotProductAttention(0.3, rng=1, dtype=dtype),
    }
    made = makers[request.param]()
    made.sizes = (40, 48, 33) if request.param != "dot-product" else (40, 40, 33)
    return made


def inputs(layer, rng, dtype, batch, n_queries, n_keys):
    shapes = zip((n_queries, n_keys, n_keys), layer.sizes)
    return [rng.standard_normal((batch, *shape)).astype(dtype) for shape in shapes]


def test_layer_threads(layer, dtype, rng):
    x = inputs(layer, rng, dtype, 3, 50, 140)
    results = set()
    for n in THREADS:
        _core.set_num_threads(n)
        results.add((layer(*x, valid_lens=[140, 9, 0]).tobytes(), layer.attention_weights.tobytes()))
    assert len(results) == 1


def test_layer_batch_and_chunks(layer, dtype, rng):
    queries, keys, values = inputs(layer, rng, dtype, 5, 70, 140)
    lens = np.array([140, 9, 70, 0, 128])
    together = layer(queries, keys, values, lens)
    for b in (0, 2, 3, 4):
        one = slice(b, b + 1)
        assert layer(queries[one], keys[one], values[one], lens[one]).tobytes() == together[one].tobytes()
    for first in range(0, 70, 7):
        part = layer(queries[:, first : first + 7], keys, values, lens)
        assert part.tobytes() == together[:, first : first + 7].tobytes()


def test_layer_lengths_are_slices(layer, dtype, rng):
    queries, keys, values = inputs(layer, rng, dtype, 1, 12, 140)
    keys[:, 67:], values[:, 67:] = np.nan, np.nan
    found = layer(queries, keys, values, [67])
    assert found.tobytes() == layer(queries, keys[:, :67], values[:, :67]).tobytes()


def layer_gradients(x, projections, weights, lens):
    out, kept = _core.layer_forward(*x, lens, projections, None, 4, "uniform", 0.2, 3, True)
    grad = np.cos(np.arange(out.size)).astype(out.dtype).reshape(out.shape)
    nine = *weights, *[None] * 5
    needs = *(True,) * 7, *(False,) * 5
    return [out, *_core.layer_backward(grad, kept, *x, lens, nine, None, 4, "uniform", 0.2, 3, needs)[:7]]


def test_layer_gradients_threads(isa, dtype, rng):
    sizes = [(64, 40), (64, 48), (64, 33), (64, 64)]
    weights = tuple(rng.standard_normal(size).astype(dtype) for size in sizes)
    projections = tuple((_core.pack_linear(weight), None, weight.shape) for weight in weights)
    shapes = [(3, 50, 40), (3, 600, 48), (3, 600, 33)]
    x = [rng.standard_normal(shape).astype(dtype) for shape in shapes]
    results = set()
    for n in (1, 2, 3, 8):
        _core.set_num_threads(n)
        results.add(tuple(bits(layer_gradients(x, projections, weights, np.array([600, 17, 0])))))
    assert len(results) == 1


@pytest.mark.parametrize("options", ["none", "lengths", "masks", "last query", "empty"])
def test_grouped_heads_of_one_query(isa, dtype, rng, options):
    """They read a key head together: the bits are those of heads that have their keys alone."""
    n_keys, kinds = 530, {
        "none": {},
        "lengths": {"valid_lens": np.array([0, 307])},
        "masks": {
            "keep_mask": rng.random((2, 6, 1, 530)) < 0.5,
            "bias": rng.standard_normal((1, 6, 1, 530)).astype(dtype),
        },
        "last query": {"causal": "bottom_right", "valid_lens": np.array([530, 200])},
        "empty": {"valid_lens": np.array([0, 1]), "empty_rows": "uniform"},
    }  # fmt: skip
    call = draw(rng, dtype, (2, 6, 2, 1, n_keys, 18, 9), **kinds[options])
    alone = call.change(k=np.repeat(call.k, 3, axis=1), v=np.repeat(call.v, 3, axis=1))
    for threads in 1, 3:
        _core.set_num_threads(threads)
        together = call.forward(return_weights=True, return_lse=True)
        apart = alone.forward(return_weights=True, return_lse=True)
        assert bits([*together[:3], *together[3]]) == bits([*apart[:3], *apart[3]])
