"""Calls every layer and function with keys and values that no query sees on pages that may not be read.

    python forbidden_pages.py numpy|torch [control]

Prints the name of each call before it begins: a read of a forbidden page ends the process.  `control` reads one.
The rows of an item are dense, or lie on a page each; they end where a page does.
"""

import ctypes
import itertools
import mmap
import os
import sys

import numpy as np

import mha_c
from mha_c import functional

# So many queries that a layer keeps keys, not weights; a page holds 32 dense rows of float32, 16 of float64.
BATCH, QUERIES, KEYS, FEATURES, HEADS = 2, 64, 96, 32, 4
PAGE = mmap.PAGESIZE
libc = ctypes.CDLL(None, use_errno=True)


def close(address, n_bytes):
    assert libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(n_bytes), 0) == 0, ctypes.get_errno()


def rows(dtype, seen, apart, width=FEATURES, heads=()):
    """(BATCH, [heads,] KEYS, width) numbers; of item b, rows seen[b] = [first, last) exist alone.

    apart: each row has pages of its own.  Otherwise rows are dense, and no row but those is on the pages of a row.
    """
    itemsize, n = np.dtype(dtype).itemsize, BATCH * int(np.prod(heads, dtype=int)) * KEYS
    step = -(-width * itemsize // PAGE) * PAGE if apart else width * itemsize
    assert apart or PAGE % step == 0
    region = mmap.mmap(-1, n * step + PAGE)
    flat = np.frombuffer(region, dtype, n * step // itemsize).reshape(n, step // itemsize)
    every = flat[:, flat.shape[1] - width :]
    every[...] = np.random.default_rng(n).standard_normal(every.shape)
    start = flat.ctypes.data
    for block in range(n // KEYS):
        first, last = seen[block * BATCH // (n // KEYS)]
        for a, b in ((0, first), (last, KEYS)):
            assert a * step % PAGE == b * step % PAGE == 0
            if a < b:
                close(start + (block * KEYS + a) * step, (b - a) * step)
    return every.reshape(BATCH, *heads, KEYS, width) if not apart else split(every, heads, width)


def split(every, heads, width):
    """The same for rows that lie apart, which reshape would copy."""
    shape, stride = (BATCH, *heads, KEYS, width), every.strides[0]
    steps = [stride * int(np.prod(shape[i + 1 : -1], dtype=int)) for i in range(len(shape) - 1)]
    return np.lib.stride_tricks.as_strided(every, shape, (*steps, every.itemsize))


def plain(dtype, *shape):
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(dtype)


PER_QUERY = np.arange(BATCH * QUERIES).reshape(BATCH, QUERIES) % 33
# name: what the call is told; of each item, which keys are seen, and whether some query sees none
HIDDEN = {
    "lengths": ({"valid_lens": np.array([32, 64])}, [(0, 32), (0, 64)], (False, False)),
    "lengths of queries": ({"valid_lens": PER_QUERY}, [(0, 32), (0, 32)], (True, True)),
    "a length of 0": ({"valid_lens": np.array([0, 32])}, [(0, 0), (0, 32)], (True, False)),
    "causal": ({"causal": "top_left"}, [(0, QUERIES)] * BATCH, (False, False)),
    "a window": ({"causal": "bottom_right", "window": (0, None)}, [(KEYS - QUERIES, KEYS)] * BATCH, (False, False)),
}
# Masks of layers.  Of few queries a layer keeps the weights, and no copy of its keys.
FEW = 8
KEEP = np.zeros((QUERIES, KEYS), bool)
KEEP[:, 32:64] = np.random.default_rng(0).random((QUERIES, 32)) < 0.7
KEEP[:, 32] = True
EMPTY = KEEP & (np.arange(QUERIES) != 3)[:, None]
MASKED = {
    "a keep_mask": ({"keep_mask": KEEP}, [(32, 64)] * BATCH, (False, False)),
    "a keep_mask of few queries": ({"keep_mask": KEEP[:FEW]}, [(32, 64)] * BATCH, (False, False)),
    "a keep_mask for all queries": ({"keep_mask": KEEP[:1]}, [(32, 64)] * BATCH, (False, False)),
    "a keep_mask that hides all from one": ({"keep_mask": EMPTY}, [(32, 64)] * BATCH, (True, True)),
    "a keep_mask with lengths": (
        {"keep_mask": KEEP[:FEW], "valid_lens": np.array([32 + 32, 96])}, [(32, 64)] * BATCH, (False, False)
    ),
}  # fmt: skip
EMPTY_ROWS, DTYPES, APART = ("uniform", "zero"), (np.float32, np.float64), (False, True)
NIGHTLY = os.environ.get("MHA_C_NIGHTLY", "0") not in ("", "0")


def cases(hidden):
    """(words, options, dtype, empty_rows, keys(), values()) of each; values whose mean is asked for are all there."""
    for name, dtype, empty_rows, apart in itertools.product(hidden, DTYPES, EMPTY_ROWS, APART):
        options, seen, empties = {**HIDDEN, **MASKED}[name]
        means = empty_rows == "uniform"  # of all values, for a query that sees no key
        if not NIGHTLY and (means + apart + (dtype is np.float64)) % 2:
            continue  # by day half of the eight: each two of the three meet
        seen_values = [(0, KEYS) if means and empty else part for part, empty in zip(seen, empties)]
        words = f"{name}, {np.dtype(dtype).name}, {empty_rows}, {'rows apart' if apart else 'dense'}"
        yield (
            words,
            options,
            dtype,
            empty_rows,
            lambda *heads, dtype=dtype, seen=seen, apart=apart: rows(dtype, seen, apart, heads=heads),
            lambda *heads, dtype=dtype, seen=seen_values, apart=apart: rows(dtype, seen, apart, heads=heads),
        )


def say(*words):
    print(*words, sep=": ", flush=True)


LAYERS = {
    "DotProductAttention": lambda of, **given: of.DotProductAttention(0.5, **given),
    "AdditiveAttention": lambda of, **given: of.AdditiveAttention(16, 0.5, **given),
    "MultiHeadAttention": lambda of, **given: of.MultiHeadAttention(FEATURES, HEADS, 0.5, **given),
    "KernelAttention": lambda of, empty_rows, **_: of.KernelAttention(width=9.0, empty_rows=empty_rows),
}
LENGTHS = [name for name, (options, *_) in HIDDEN.items() if "valid_lens" in options]


def layer_calls():
    """(name, layer(...), case, queries) of each."""
    for (name, make), case in itertools.product(LAYERS.items(), cases([*LENGTHS, *MASKED])):
        _, options, dtype, *_ = case
        if name != "KernelAttention" or "keep_mask" not in options:
            n = FEW if "keep_mask" in options and len(options["keep_mask"]) == FEW else QUERIES
            yield name, make, case, plain(dtype, BATCH, n, FEATURES)


def numpy_layers():
    for name, make, case, queries in layer_calls():
        words, options, dtype, empty_rows, keys, values = case
        layer = make(mha_c, rng=0, dtype=dtype, empty_rows=empty_rows)
        for training in False, True:
            say(name, words, "training" if training else "evaluation")
            out = layer(queries, keys(), values(), training=training, **options)
            say(name, words, "weights")
            layer.attention_weights.sum()
        say(name, words, "backward")
        layer.backward(out)


def numpy_functions():
    for words, options, dtype, empty_rows, keys, values in cases(HIDDEN):
        for heads in (), (2,):
            q, w_v = plain(dtype, BATCH, *heads, QUERIES, FEATURES), plain(dtype, FEATURES)
            k, v = keys(*heads), values(*heads)
            given = {**options, "empty_rows": empty_rows, "dropout": 0.25, "rng": 3}
            say("dot_product_attention", words)
            out, *_ = functional.dot_product_attention(q, k, v, return_weights=True, return_lse=True, **given)
            say("dot_product_attention_backward", words)
            functional.dot_product_attention_backward(out, q, k, v, **given)
            say("additive_attention", words)
            out, *_ = functional.additive_attention(q, k, v, w_v, return_weights=True, return_lse=True, **given)
            say("additive_attention_backward", words)
            functional.additive_attention_backward(out, q, k, v, w_v, **given)
            say("weights_summary", words)
            if not heads:
                functional.weights_summary(q[:, None], k[:, None], **options, top=1)


def torch_layers():
    import torch

    import mha_c.torch

    for name, make, case, queries in layer_calls():
        words, options, dtype, empty_rows, keys, values = case
        torch.manual_seed(0)
        layer = make(mha_c.torch, empty_rows=empty_rows).to(torch.from_numpy(plain(dtype, 1)).dtype)
        given = {option: torch.from_numpy(x) for option, x in options.items()}
        for training, grad in (False, False), (False, True), (True, True):
            layer.train(training)
            inputs = [torch.from_numpy(x) for x in (queries.copy(), keys(), values())]
            say(name, words, f"training {training}, gradients {grad}")
            for x in inputs:
                x.requires_grad_(grad)
            out = layer(*inputs, **given)
            say(name, words, "weights")
            layer.attention_weights.sum()
            if grad:
                say(name, words, "backward")
                out.sum().backward()


def torch_functions():
    import torch

    from mha_c.torch import functional as of_torch

    for words, options, dtype, empty_rows, keys, values in cases(HIDDEN):
        for heads, grad in itertools.product(((), (2,)), (False, True)):
            arrays = plain(dtype, BATCH, *heads, QUERIES, FEATURES), keys(*heads), values(*heads)
            q, k, v = (torch.from_numpy(x).requires_grad_(grad) for x in arrays)
            w_v = torch.from_numpy(plain(dtype, FEATURES)).requires_grad_(grad)
            given = {**options, "empty_rows": empty_rows, "dropout": 0.25, "rng": 3}
            for name, operands in ("dot_product_attention", (q, k, v)), ("additive_attention", (q, k, v, w_v)):
                say(f"torch {name}", words)
                out, _ = getattr(of_torch, name)(*operands, return_lse=True, **given)
                if grad:
                    say(f"torch {name}, backward", words)
                    out.sum().backward()


if __name__ == "__main__":
    if "control" in sys.argv:
        say("control")
        rows(np.float32, [(0, 32), (0, 64)], False).sum()
    world = sys.argv[1]
    for run in (numpy_layers, numpy_functions) if world == "numpy" else (torch_layers, torch_functions):
        run()
    print("done")
