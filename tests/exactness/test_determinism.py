"""The same call gives the same bits: in every run and process, for any number of threads, alone or in any batch, for
the queries of a call taken together or a few at a time, wherever in memory the arrays lie, whether weights are
wanted or not, and whatever stands behind the lengths.  On every instruction set, in both types, forward and backward.

Not promised, and not tested: the same bits on another instruction set.
"""

import hashlib

import numpy as np
import pytest

import children
import mha_c
from checks import bits
from core_calls import core as _core
from threads import in_threads

THREADS = range(1, 9)


class Call:
    """One attention call on arrays of its own: its output, statistics and gradients."""

    def __init__(self, q, k, v, grad_out, w_v=None, **options):
        self.q, self.k, self.v, self.grad_out, self.w_v, self.options = q, k, v, grad_out, w_v, options

    def change(self, **changes):
        fields = {"q": self.q, "k": self.k, "v": self.v, "grad_out": self.grad_out, "w_v": self.w_v, **self.options}
        return Call(**{**fields, **changes})

    def forward(self, **wishes):
        return _core.attention_forward(self.q, self.k, self.v, self.w_v, return_stats=True, **self.options, **wishes)

    def run(self):
        """(out, row_max, row_sum, grad_q, grad_k, grad_v and, if there are any, grad_w_v, grad_bias)"""
        out, _, _, stats = self.forward()
        grads = _core.attention_backward(
            self.grad_out, out, stats, self.q, self.k, self.v, self.w_v,
            bias_grad="bias" in self.options, **self.options,
        )  # fmt: skip
        return (out, *stats, *(grad for grad in grads if grad is not None))


def draw(rng, dtype, sizes, additive=False, **options):
    """sizes: B, H, Hkv, Q, K, D, Dv"""
    batch, heads, kv_heads, n_queries, n_keys, dim, value_dim = sizes
    shapes = [(heads, n_queries, dim), (kv_heads, n_keys, dim), (kv_heads, n_keys, value_dim)]
    q, k, v = (rng.standard_normal((batch, *shape)).astype(dtype) for shape in shapes)
    grad_out = rng.standard_normal((batch, heads, n_queries, value_dim)).astype(dtype)
    return Call(q, k, v, grad_out, rng.standard_normal(dim).astype(dtype) if additive else None, **options)


def masks(rng, dtype, sizes):
    """Every kind of mask at once, with a query that sees nothing."""
    batch, n_queries, n_keys = sizes[0], sizes[3], sizes[4]
    lens = rng.integers(0, n_keys + 1, (batch, n_queries))
    lens[0, 0] = 0
    return {
        "valid_lens": lens,
        "keep_mask": rng.random((n_queries, n_keys)) < 0.8,
        "bias": rng.standard_normal((n_queries, n_keys)).astype(dtype),
        "causal": "bottom_right",
        "window_left": n_keys // 2,
        "empty_rows": "uniform",
    }


SHORT, LONG = (2, 4, 2, 37, 130, 24, 18), (2, 2, 1, 33, 1100, 16, 8)  # one key block; several, and parts of gradients
KINDS = {
    "short": lambda rng, dtype: draw(rng, dtype, SHORT),
    "long": lambda rng, dtype: draw(rng, dtype, LONG),
    "decode": lambda rng, dtype: draw(rng, dtype, (1, 2, 1, 3, 1500, 64, 64)),
    "masks": lambda rng, dtype: draw(rng, dtype, LONG, **masks(rng, dtype, LONG)),
    "dropout": lambda rng, dtype: draw(rng, dtype, LONG, valid_lens=np.array([700, 0]), dropout=0.4, seed=7),
    "additive": lambda rng, dtype: draw(rng, dtype, (2, 1, 1, 21, 530, 20, 8), additive=True),
}


@pytest.fixture(params=KINDS)
def call(request, isa, dtype, rng):
    return KINDS[request.param](rng, dtype)


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


def shifted(array, n_bytes):
    """A copy that starts n_bytes after a multiple of 64."""
    memory = np.empty(array.nbytes + 128, np.uint8)
    start = -memory.ctypes.data % 64 + n_bytes
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def test_alignment(isa, dtype, rng):
    """Each of the 64 places in a cache line, addresses that are no multiple of the item among them."""
    call = draw(rng, dtype, (1, 2, 1, 5, 150, 24, 18), bias=rng.standard_normal((5, 150)).astype(dtype))
    expected = bits(call.run())
    for n_bytes in range(64):
        names = ("q", "k", "v", "grad_out")
        arrays = {name: shifted(getattr(call, name), (n_bytes + 12 * i) % 64) for i, name in enumerate(names)}
        assert bits(call.change(bias=shifted(call.options["bias"], n_bytes), **arrays).run()) == expected


@pytest.mark.parametrize("ends", ["same", "a window"])
def test_alignment_for_many_queries(isa, dtype, rng, ends):
    """Vectors that cross a line are copied to whole ones: the last block has one key, and rows fill no vector."""
    seen = {"window_left": 40, "causal": "bottom_right"} if ends == "a window" else {}
    call = draw(rng, dtype, (1, 1, 1, 260, 513, 16, 18), **seen)
    aligned = call.change(k=shifted(call.k, 0), v=shifted(call.v, 0))
    assert bits(call.change(k=shifted(call.k, 24), v=shifted(call.v, 8)).run()) == bits(aligned.run())


def spread(array):
    """The same numbers with gaps of NaN between rows, heads and items, one axis backwards."""
    batch, heads, rows, columns = array.shape
    memory = np.full((batch, rows * 2, heads + 1, columns + 3), np.nan, array.dtype)
    view = memory[:, ::-2, :heads, :columns].transpose(0, 2, 1, 3)
    view[...] = array
    return view


def test_strides(call):
    expected = bits(call.run())
    arrays = {name: spread(getattr(call, name)) for name in ("q", "k", "v", "grad_out")}
    assert bits(call.change(**arrays).run()) == expected
    last_axis = {name: np.asfortranarray(getattr(call, name)) for name in ("q", "k", "v")}
    assert bits(call.change(**last_axis).run()) == expected


def among_features(array):
    """The same numbers as torch's views have them: rows of all heads' features, pages apart, NaN between."""
    batch, heads, rows, columns = array.shape
    memory = np.full((batch, rows, 4096 // array.itemsize), np.nan, array.dtype)
    view = memory[..., : heads * columns].reshape(batch, rows, heads, columns).transpose(0, 2, 1, 3)
    assert np.shares_memory(view, memory)
    view[...] = array
    return view


@pytest.mark.parametrize("ends", ["same", "ragged", "a hidden NaN", "a window"])
def test_rows_far_apart(isa, dtype, rng, ends):
    """What is copied side by side before tiles read it: more than a block of keys, vectors that rows do not fill."""
    seen = {"window_left": 30, "causal": "bottom_right"} if ends == "a window" else {}
    lens = rng.integers(1, 520, (1, 61)) if ends in ("ragged", "a hidden NaN") else None
    call = draw(rng, dtype, (1, 4, 2, 61, 530, 9, 18), valid_lens=lens, **seen)
    if ends == "a hidden NaN":  # for most of the queries
        call.k[:, :, 200], call.v[:, :, 300] = np.nan, np.inf
    expected = bits(call.run())
    for names in ("k", "v", ("q", "k", "v", "grad_out")):
        assert bits(call.change(**{name: among_features(getattr(call, name)) for name in names}).run()) == expected


def test_strides_of_masks(isa, dtype, rng):
    """Keys far apart or backwards: more rows and keys than are walked at once, with ends of their own."""
    layouts = (
        lambda x: np.repeat(x, 3, axis=-1)[..., ::3],
        lambda x: x[..., ::-1].copy()[..., ::-1],
    )
    shape = 1, 2, 1, 70, 150, 8, 8
    masks = {"keep_mask": rng.random((1, 2, 70, 150)) < 0.8, "bias": rng.standard_normal((1, 2, 70, 150)).astype(dtype)}
    call = draw(rng, dtype, shape, valid_lens=rng.integers(0, 151, (1, 70)), **masks)
    expected = bits(call.run())
    for layout in layouts:
        assert bits(call.change(**{name: layout(mask) for name, mask in masks.items()}).run()) == expected


@pytest.mark.parametrize("seen", [{}, {"window_left": 20, "causal": "bottom_right"}, {"valid_lens": np.array([15])}])
def test_transposed_masks(isa, dtype, rng, seen):
    """One of them, the other or both: sizes that fill no square, infinite and missing biases of hidden keys."""
    for n_queries, n_keys in (37, 53), (1, 130), (101, 16), (15, 300):
        keep, bias = rng.random((n_queries, n_keys)) < 0.8, rng.standard_normal((1, 2, n_queries, n_keys)).astype(dtype)
        bias[:, :, ~keep] = rng.choice([0, np.inf, np.nan], (~keep).sum())
        terms = (rng.standard_normal((2, 9)).astype(dtype), 3.0, None) if n_keys < 100 else None
        masks = {"keep_mask": keep, "bias": bias}
        call = draw(rng, dtype, (1, 2, 1, n_queries, n_keys, 8, 8), **masks, score_terms=terms, **seen)
        expected = bits([*call.run(), call.forward(return_weights=True)[1]])
        for names in ("keep_mask",), ("bias",), masks:
            changed = call.change(**{name: masks[name].swapaxes(-1, -2).copy().swapaxes(-1, -2) for name in names})
            assert bits([*changed.run(), changed.forward(return_weights=True)[1]]) == expected


def test_repeated_operands(isa, dtype, rng):
    """A stride of 0 reads as copies do."""
    call = draw(rng, dtype, (1, 2, 1, 9, 140, 16, 16))
    views = {name: np.broadcast_to(getattr(call, name), (3, *getattr(call, name).shape[1:])) for name in "qkv"}
    views["grad_out"] = np.broadcast_to(call.grad_out, (3, *call.grad_out.shape[1:]))
    copies = {name: view.copy() for name, view in views.items()}
    assert bits(call.change(**views).run()) == bits(call.change(**copies).run())


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
_core.set_isa({isa!r})
rng = np.random.default_rng(5)
q, k, v, g = rng.standard_normal((4, 2, 2, 40, 64)).astype({dtype!r})
out, weights, lse, stats = _core.attention_forward(
    q, k, v, None, np.array([40, 3]), None, None, None, -1, -1, None, 0.0, 0, "zero", True, True, True
)
grads = _core.attention_backward(g, out, stats, q, k, v, None, np.array([40, 3]))[:3]
print(hashlib.sha256(b"".join(a.tobytes() for a in (out, weights, lse, *stats, *grads))).hexdigest())
"""


def test_processes(isa, dtype, capsys):
    """Addresses are drawn anew for each process; so is what stands in fresh memory."""
    program = PROGRAM.format(isa=isa, dtype=dtype.name)
    printed = {children.python("-c", program).stdout for _ in range(2)}
    exec(compile(program, "<here>", "exec"), {})
    assert printed == {capsys.readouterr().out}
    assert len(printed.pop().strip()) == hashlib.sha256().digest_size * 2


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


# --- Dropout ------------------------------------------------------------------------------------------------


def test_dropout_depends_on_its_place_alone(isa, dtype, rng):
    """With v = identity the output shows which weights were dropped: the same ones in any smaller problem."""
    n = 70
    q, k = rng.standard_normal((2, 3, n, 8)).astype(dtype), rng.standard_normal((2, 3, n, 8)).astype(dtype)
    v = np.broadcast_to(np.eye(n, dtype=dtype), (2, 3, n, n))
    kept = _core.attention_forward(q, k, v, dropout=0.5, seed=11)[0] != 0
    part = _core.attention_forward(q[:1, :2, :33], k[:1, :2, :50], v[:1, :2, :50], dropout=0.5, seed=11)[0] != 0
    assert np.array_equal(part[..., :50], kept[:1, :2, :33, :50])
    assert 0.4 < kept.mean() < 0.6
    other = _core.attention_forward(q, k, v, dropout=0.5, seed=12)[0] != 0
    assert 0.4 < (other != kept).mean() < 0.6


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
