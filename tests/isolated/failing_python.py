"""Makes each of Python's allocations in a call of the compiled module fail in turn; exit status 1 if that goes wrong.

    python failing_python.py

The call then gives MemoryError, or what it gives anyway; the next one is as if nothing had been.  failing_memory.py
refuses what the C library is asked for, on glibc alone; this is Python's own hook, for every system and under every
sanitizer, and for errors too, whose words are allocations.  The hook counts for all threads, which is why nothing else
may run in this process: what pytest's own threads ask for at that moment would fail in place of the call.
"""

import _testcapi
import gc
import sys
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import binding_calls as b
from binding_calls import DV, B, D, K, Q, numbers
from core_calls import positions
from mha_c import _core
from mha_c._layer.kept_weights import saved_weights


def call(name, *arguments, **named):
    """No function of Python in between: the interpreter's own frames do not bear every failure."""
    return partial(getattr(_core, name), *positions(name, *arguments, **named))


QKV = numbers(B, Q, D), numbers(B, K, D), numbers(B, K, DV)
QUERIES = numbers(B, 30, 5), numbers(B, 40, 5), numbers(B, 40, 3)
LENS = np.array([3, 2])
CALLS = {
    "attention": call("attention_forward", *QKV, valid_lens=LENS, return_weights=True, return_stats=True),
    "layer": call("layer_forward", *QUERIES, np.array([7, 30]), b.PROJECTIONS, None, 2, "zero", 0.0, 0),
    "saved": partial(saved_weights, b.RECOMPUTE),
    "pack": call("pack_linear", numbers(8, 5)),
    "linear": call("linear", numbers(2, 3, 5), b.PROJECTIONS[0]),
    "softmax": call("masked_softmax", numbers(B, Q, K), np.array([[2] * Q, [3] * Q])[:, ::-1], "zero"),
    "dropout": call("dropout_factors", numbers(B, 2, Q, K), 0.5, 3),
    "isas": call("isas"),
    "batch clash": call("attention_forward", numbers(3, Q, D), *QKV[1:]),
    "mask rank": call("attention_forward", *QKV, bias=numbers(K)),
    "lengths shape": call("attention_forward", *QKV, valid_lens=np.array([1])),
    "features": call("layer_forward", *QKV, None, b.PROJECTIONS, None, 2, "zero", 0.0, 0),
    "type": call("linear", "text", b.PROJECTIONS[0]),
    "choice": call("attention_forward", *QKV, causal="left"),
    "isa": call("set_isa", "mmx"),
}
MOST = 60  # allocations of a call


def outcome(call, n=None):
    """What came of the call while its allocation number n failed, as letters."""
    try:
        if n is not None:
            _testcapi.set_nomemory(n, n + 1)
        result = call()
    except Exception as error:
        result = error
    finally:
        _testcapi.remove_mem_hooks()
    return repr([part.tobytes() for part in b.flat(result)] or result)


def main():
    gc.disable()
    for name, call in CALLS.items():
        expected = outcome(call)
        failed = [outcome(call, n) for n in range(MOST)]
        refused = [found for found in failed if "MemoryError" in found]
        bare = expected.split("(")[0] + "()"  # Python before 3.12, with no memory for the message
        assert refused, f"{name}: nothing was refused"
        assert {*failed} <= {*refused, expected, bare}, f"{name}: { ({*failed} - {*refused, expected, bare}) }"
        assert outcome(call) == expected, f"{name}: the next call is another one"
        print(f"{name}: {len(refused)} times MemoryError")


main()
