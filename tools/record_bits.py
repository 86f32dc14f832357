"""The bits of many drawn calls: recorded before a change that must not alter them, and compared after it.

    python tools/record_bits.py record FILE      every instruction set of this CPU, both types; half a minute
    python tools/record_bits.py compare FILE     names the calls whose bits differ; exit status 1 if there are any

Calls go through the public API alone, so that FILE may come from another version: PYTHONPATH says which is imported.
Drawn are sizes, masks, options and strides; sizes are small but for a few calls over many key blocks or large batches.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys

import numpy as np

DRAWS = 250
THREADS = 3  # the bits do not depend on it; more than one, so that tasks of all kinds are cut and joined
# (batch, query heads, key heads, queries, keys, head_dim, value_dim): rows of many blocks, many rows, few of both
LARGE = [
    (1, 1, 1, 2, 11000, 8, 8), (1, 2, 1, 70, 9700, 4, 12), (2, 4, 2, 130, 600, 64, 64), (1, 2, 2, 1700, 40, 16, 16),
    (1, 1, 1, 3, 4600, 128, 70), (3, 8, 8, 65, 65, 32, 32), (64, 4, 4, 10, 10, 8, 8), (1, 10, 2, 5, 2100, 20, 33),
]  # fmt: skip


def digest(results):
    total = hashlib.sha256()
    for array in results:
        dense = np.ascontiguousarray(array)
        total.update(f"{dense.dtype}{dense.shape}".encode() + dense.tobytes())
    return total.hexdigest()[:16]


def normal(rng, dtype, *shape):
    """Numbers, sometimes as a view with gaps between the rows."""
    if rng.random() < 0.3 and len(shape) > 1:
        return rng.standard_normal((*shape[:-1], shape[-1] + 3)).astype(dtype)[..., : shape[-1]]
    return rng.standard_normal(shape).astype(dtype)


def drawn_sizes(rng):
    heads = int(rng.integers(1, 5))
    key_heads = int(rng.choice([n for n in range(1, heads + 1) if heads % n == 0]))
    few, many = int(rng.integers(1, 70)), int(rng.integers(1, 900))
    queries, keys = (few, many) if rng.random() < 0.5 else (few, int(rng.integers(1, 80)))
    return int(rng.integers(1, 4)), heads, key_heads, queries, keys, int(rng.integers(1, 80)), int(rng.integers(1, 80))


def drawn_options(rng, dtype, batch, heads, queries, keys):
    """Masks and the like, each in a part of the draws, as arguments of the functions of mha_c.functional."""
    options = {"empty_rows": str(rng.choice(["zero", "uniform"]))}
    kind = rng.integers(5)
    if kind == 0:
        options["valid_lens"] = rng.integers(0, keys + 1, batch)
    elif kind == 1:
        options["valid_lens"] = rng.integers(0, keys + 1, (batch, queries))
    if rng.random() < 0.3:
        options["causal"] = str(rng.choice(["top_left", "bottom_right"]))
    if rng.random() < 0.25:
        options["window"] = (int(rng.integers(0, keys + 1)), int(rng.integers(0, keys + 1)))
    if rng.random() < 0.25:
        options["keep_mask"] = rng.random((batch, heads, queries, keys)) < 0.7
    if rng.random() < 0.25:
        options["bias"] = normal(
            rng, dtype, *((queries, keys) if rng.random() < 0.5 else (batch, heads, queries, keys))
        )
    if rng.random() < 0.25:
        options |= {"dropout": float(rng.choice([0.1, 0.5, 1.0])), "rng": int(rng.integers(2**62))}
    return options


def function_bits(rng, dtype, sizes, plain=False):
    """A functional call, dot-product or additive, forward and backward."""
    from mha_c import functional

    batch, heads, key_heads, queries, keys, head_dim, value_dim = sizes
    q, k = normal(rng, dtype, batch, heads, queries, head_dim), normal(rng, dtype, batch, key_heads, keys, head_dim)
    v = normal(rng, dtype, batch, key_heads, keys, value_dim)
    grad = normal(rng, dtype, batch, heads, queries, value_dim)
    options = {} if plain else drawn_options(rng, dtype, batch, heads, queries, keys)
    extras = {} if plain else {"return_weights": bool(rng.random() < 0.5), "return_lse": bool(rng.random() < 0.5)}
    if rng.random() < 0.1 and "valid_lens" in options and options["valid_lens"].max() < keys:
        v[:, :, options["valid_lens"].max() :] = np.nan  # nobody sees it
    operands = q, k, v
    forward, backward = functional.dot_product_attention, functional.dot_product_attention_backward
    if not plain and head_dim <= 40 and rng.random() < 0.3:
        operands = (*operands, normal(rng, dtype, head_dim))
        forward, backward = functional.additive_attention, functional.additive_attention_backward
    result = forward(*operands, **options, **extras)
    return [*(result if isinstance(result, tuple) else [result]), *backward(grad, *operands, **options)]


def layer_bits(rng, dtype, batch, queries, keys):
    """A layer, in evaluation and in training, its weights, gradients, and those of its parameters."""
    import mha_c

    heads, seed = int(rng.choice([1, 2, 4])), int(rng.integers(2**31))
    n = 8 * heads
    kind = rng.integers(3)
    dropout = float(rng.choice([0, 0.3]))
    if kind == 0:
        bias = bool(rng.random() < 0.5)
        layer = mha_c.MultiHeadAttention(
            num_hiddens=n, num_heads=heads, dropout=dropout, bias=bias, rng=seed, dtype=dtype
        )
    elif kind == 1:
        layer = mha_c.AdditiveAttention(num_hiddens=n, dropout=dropout, rng=seed, dtype=dtype)
    else:
        layer = mha_c.DotProductAttention(dropout=dropout, rng=seed)
    x, y = normal(rng, dtype, batch, queries, n), normal(rng, dtype, batch, keys, n)
    lens = rng.integers(0, keys + 1, batch) if rng.random() < 0.6 else None
    results = []
    for training in (False, True):
        out = layer(x, y, y, lens, training=training)
        results += [out, layer.attention_weights]
    results += layer.backward(normal(rng, dtype, *out.shape))
    return results + [parameter.grad for parameter in layer.parameters() if parameter.grad is not None]


def softmax_bits(rng, dtype):
    import mha_c

    batch, queries, keys = (int(rng.integers(1, 40)) for _ in range(3))
    return [mha_c.masked_softmax(normal(rng, dtype, batch, queries, keys), rng.integers(0, keys + 1, batch))]


def all_bits():
    """{call: bits} under the instruction set of this process."""
    import mha_c

    mha_c.set_num_threads(THREADS)
    found = {}
    for dtype in (np.float32, np.float64):
        name = np.dtype(dtype).name
        for draw in range(DRAWS):
            rng = np.random.default_rng([draw, np.dtype(dtype).itemsize])
            found[f"function {draw} {name}"] = digest(function_bits(rng, dtype, drawn_sizes(rng)))
            sizes = (int(n) for n in (rng.integers(1, 9), rng.integers(1, 60), rng.integers(1, 60)))
            found[f"layer {draw} {name}"] = digest(layer_bits(rng, dtype, *sizes))
            found[f"softmax {draw} {name}"] = digest(softmax_bits(rng, dtype))
        for sizes in LARGE:
            for plain in (True, False):
                rng = np.random.default_rng(sizes)
                found[f"function {sizes} plain={plain} {name}"] = digest(function_bits(rng, dtype, sizes, plain))
        for draw in range(12):  # large batches go through a layer in slices
            rng = np.random.default_rng([7, draw])
            found[f"large batch {draw} {name}"] = digest(layer_bits(rng, dtype, 200, 33, 40))
    return found


def bits_of_every_isa():
    from mha_c import _core

    isas = [name for name, offered in _core.isas() if offered]
    found = {}
    for isa in isas:
        environment = {**os.environ, "MHA_C_ISA": isa}
        command = [sys.executable, __file__, "print", "-"]
        child = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
        found[isa] = json.loads(child.stdout)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["record", "compare", "print"], help="print: of this process alone, as JSON")
    parser.add_argument("file")
    options = parser.parse_args()
    if options.action == "print":
        print(json.dumps(all_bits()))
        return
    found = bits_of_every_isa()
    n_calls = sum(map(len, found.values()))
    if options.action == "record":
        with open(options.file, "w") as file:
            json.dump(found, file, indent=0)
        print(f"{n_calls} calls recorded in {options.file}")
        return
    with open(options.file) as file:
        recorded = json.load(file)
    known = {(isa, name): bits for isa, calls in recorded.items() for name, bits in calls.items()}
    now = {(isa, name): bits for isa, calls in found.items() for name, bits in calls.items()}
    different = sorted(" ".join(key) for key in known.keys() | now.keys() if known.get(key) != now.get(key))
    print(*different[:40], f"{len(different)} of {n_calls} calls differ", sep="\n")
    sys.exit(bool(different))


if __name__ == "__main__":
    main()
