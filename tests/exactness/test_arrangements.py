"""Wherever in memory the arrays of a call lie, and however far apart their rows, its bits are the same: on every
instruction set, in both types, forward and backward.  What stands in front of the binding: test_outputs.py.
"""

import numpy as np
import pytest

from attention_calls import KINDS, draw, of_a_kind
from checks import bits

call = pytest.fixture(of_a_kind, params=KINDS)


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
