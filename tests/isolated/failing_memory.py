"""Makes every allocation of a call fail in turn, once and forty times running; exit status 1 if that goes wrong.

    LD_PRELOAD=<shim> PYTHONMALLOC=malloc python failing_memory.py

Whatever the extension module asks for, itself, through Python or through NumPy: the call gives MemoryError or the bits
it gives anyway, the next call is right, and nothing is left behind.  Then a call where no thread can be started.
"""

import gc
import sys
from pathlib import Path

import numpy as np

import mha_c

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import public_calls as p
from memory import shim

import binding_calls as b
from core_calls import core as _core

TRAINING = (p.Q, p.K, p.V, p.LENS)
PLAN = (b.projection(16, 8, True), b.projection(16, 8), b.projection(16, 8), b.projection(8, 16, True))
WEIGHTS = tuple(b.numbers(*shape[2]) for shape in PLAN)


def trained():
    out, kept = _core.layer_forward(*TRAINING, PLAN, None, 2, "uniform", 0.2, 5, True)
    call = *TRAINING, (*WEIGHTS, *(None,) * 5), None, 2, "uniform", 0.2, 5
    return _core.layer_backward(np.ones_like(out), kept, *call, (True,) * 12)


def backward():
    q, k, v = p.Q4, p.K4, p.V4
    masks = {"valid_lens": p.LENS, "bias": p.BIAS, "causal": "bottom_right"}
    out, _, _, stats = _core.attention_forward(q, k, v, **masks, return_stats=True)
    return _core.attention_backward(np.ones_like(out), out, stats, q, k, v, **masks, bias_grad=True)


def explained():
    """The facts as letters."""
    facts = _core.explain_layer(p.Q, p.K, p.V, np.array(p.LENS), PLAN, None, 2, "uniform", 0.2, 5, True)
    return np.frombuffer(repr(facts).encode(), np.uint8)


def seen(layer):
    out = layer(p.Q, p.K, p.V, p.LENS)
    return out, layer.attention_weights


CALLS = {
    "attention": lambda: b.attention(valid_lens=[2.5, 1], return_weights=True, return_lse=True, dropout=0.5),
    "attention, copied": lambda: b.attention(k=b.SWAPPED, keep_mask=b.ones(b.Q, b.K), bias=b.numbers(b.Q, b.K)),
    "attention backward": backward,
    "layer": lambda: b.layer(valid_lens=[3, 2]),
    "layer, trained": trained,
    "layer, explained": explained,
    "saved weights": lambda: _core.saved_weights(b.RECOMPUTE),
    "pack_linear": lambda: _core.pack_linear(b.numbers(40, 50)),
    "linear": lambda: b.linear(b.numbers(3, 2, 5).transpose(1, 0, 2)),
    "linear backward": lambda: _core.linear_backward(b.numbers(7, 40), b.numbers(7, 50), b.numbers(40, 50), True),
    "softmax": lambda: b.softmax(valid_lens=[3, 2]),
    "MultiHeadAttention": lambda: seen(p.mha),
    "DotProductAttention": lambda: seen(p.dot),
    "AdditiveAttention": lambda: seen(p.additive),
    "functional": p.GOOD["dot_product_attention"],
    "functional, backward": p.GOOD["additive_attention_backward"],
}


def bits(result):
    return [array.tobytes() for array in b.flat(result)]


def attempt(call, first, count):
    """(result or None, allocations that failed)"""
    result = None
    shim.shim_fail(first, count)
    try:
        result = call()
    except MemoryError:
        pass
    return result, shim.shim_stop()


def growth(call, first, count):
    """Blocks that ten failing calls leave behind; what Python keeps for later a collection empties first."""
    gc.collect()
    before = shim.shim_live()
    for _ in range(10):
        attempt(call, first, count)
    gc.collect()
    return shim.shim_live() - before


def fail_each(name, call, count):
    """Fails allocation 0, 1, 2, ... of the call until none is left to fail; returns how many there were."""
    expected = bits(call())
    n = 0
    while True:
        result, n_failed = attempt(call, n, count)
        assert result is None or bits(result) == expected, f"{name}: allocation {n} fails, other bits"
        assert result is not None or n_failed, f"{name}: MemoryError though none was refused"
        del result
        assert bits(call()) == expected, f"{name}: the call after failure {n} is wrong"
        assert any(growth(call, n, count) < 10 for _ in range(6)), f"{name}: failure {n} leaves blocks behind"
        if n_failed == 0:
            return n
        n += 1


def main():
    assert shim.shim_watch(Path(mha_c._core.__file__).name.encode()) == 1
    gc.disable()
    gc.freeze()  # collections look at what the calls leave behind, not at all that was imported
    for name, call in CALLS.items():
        for _ in range(20):
            call()
        once, often = (fail_each(name, call, count) for count in (1, 40))
        print(f"{name}: {once} allocations, each failed once and with those after it ({often})")
        gc.collect()
    _core.set_num_threads(1)
    q, k, v = (np.random.default_rng(1).standard_normal((4, 4, 256, 64)) for _ in range(3))
    expected = bits(_core.attention_forward(q, k, v))
    shim.shim_refuse_threads(1)
    _core.set_num_threads(4)
    assert bits(_core.attention_forward(q, k, v)) == expected, "without threads: other bits"
    assert shim.shim_refuse_threads(0) > 0, "no thread was asked for"
    assert bits(_core.attention_forward(q, k, v)) == expected, "with threads again: other bits"
    print("no thread can be started: the same bits")


main()
