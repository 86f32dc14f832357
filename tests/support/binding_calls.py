"""Good calls of the compiled functions, to be changed by tests one argument at a time."""

import gc
import sys
from functools import cache

import numpy as np

from core_calls import core as _core

F32, F64 = np.float32, np.float64
B, H, Q, K, D, DV = 2, 2, 4, 6, 4, 3


MADE = []  # every array that numbers has made


@cache
def numbers(*shape, dtype=F32):
    """The same read-only array every time, so that its reference count means something."""
    array = np.random.default_rng(len(shape) + sum(shape)).standard_normal(shape).astype(dtype)
    array.flags.writeable = False
    MADE.append(array)
    return array


@cache
def ones(*shape, dtype=bool):
    return np.ones(shape, dtype)


@cache
def projection(out_features, in_features, bias=False, dtype=F32):
    """As linear and layer_forward take them; its weight is numbers(out_features, in_features)."""
    packed = _core.pack_linear(numbers(out_features, in_features, dtype=dtype))
    return packed, numbers(out_features, dtype=dtype) if bias else None, (out_features, in_features)


def attention(**changes):
    """A good call of attention_forward, with changes."""
    values = {"q": numbers(B, Q, D), "k": numbers(B, K, D), "v": numbers(B, K, DV)}
    return _core.attention_forward(**{**values, **changes})


def with_heads(**changes):
    values = {"q": numbers(B, 4, Q, D), "k": numbers(B, H, K, D), "v": numbers(B, H, K, DV)}
    return _core.attention_forward(**{**values, **changes})


LAYER = ("queries", "keys", "values", "valid_lens", "projections", "w_v", "num_heads", "empty_rows", "dropout", "seed")
PROJECTIONS = (projection(8, 5, True), projection(8, 5), projection(6, 3), projection(7, 6, True))


def layer(**changes):
    """A good call of layer_forward, with changes."""
    values = (numbers(B, Q, 5), numbers(B, K, 5), numbers(B, K, 3), None, PROJECTIONS, None, H, "uniform", 0.0, 0)
    return _core.layer_forward(**{**dict(zip(LAYER, values)), **changes})


def plain_layer(**changes):
    """Without projections."""
    return layer(**{"projections": (None,) * 4, "num_heads": 1, **changes})


def softmax(x=None, valid_lens=None, empty_rows="zero"):
    return _core.masked_softmax(numbers(B, Q, K) if x is None else x, valid_lens, empty_rows)


def linear(x=None, p=None):
    return _core.linear(numbers(B, 5) if x is None else x, PROJECTIONS[0] if p is None else p)


# A layer with fewer numbers in q and k than in the weights keeps q and k, another one the weights.
RECOMPUTE = layer(queries=numbers(B, 30, 5), keys=numbers(B, 40, 5), values=numbers(B, 40, 3), valid_lens=[7, 30])[1]
KEPT = layer()[1]


def saved(part, value):
    """saved_weights of a state with one part replaced."""
    return _core.saved_weights((*RECOMPUTE[:part], value, *RECOMPUTE[part + 1 :]))


def flat(result):
    """The arrays of a result, however deep."""
    if isinstance(result, (tuple, list)):
        return [array for part in result for array in flat(part)]
    return [result] if isinstance(result, np.ndarray) else []


ARRAYS = {  # every argument that is an array of numbers: how to call with it, and a good value
    "q": (lambda x: attention(q=x), numbers(B, Q, D)),
    "k": (lambda x: attention(k=x), numbers(B, K, D)),
    "v": (lambda x: attention(v=x), numbers(B, K, DV)),
    "w_v": (lambda x: attention(w_v=x), numbers(D)),
    "bias": (lambda x: attention(bias=x), numbers(Q, K)),
    "queries": (lambda x: layer(queries=x), numbers(B, Q, 5)),
    "keys": (lambda x: layer(keys=x), numbers(B, K, 5)),
    "values": (lambda x: layer(values=x), numbers(B, K, 3)),
    "layer's w_v": (lambda x: plain_layer(w_v=x), numbers(5)),
    "weight": (lambda x: _core.pack_linear(x), numbers(8, 5)),
    "copied q": (lambda x: _core.copy_operands(x, numbers(B, 1, K, D)), numbers(B, H, Q, D)),
    "copied k": (lambda x: _core.copy_operands(numbers(B, H, Q, D), x), numbers(B, 1, K, D)),
    "X": (lambda x: softmax(x), numbers(B, Q, K)),
    "linear's x": (lambda x: linear(x), numbers(2, 3, 5)),
}

SWAPPED = numbers(B, K, D).astype(numbers(B, K, D).dtype.newbyteorder())


def attempt(call):
    try:
        call()
    except Exception:
        pass


def reference_counts():
    """References to whatever calls share, and how many small objects there are."""
    shared = [SWAPPED, *MADE, *flat(PROJECTIONS), *flat(RECOMPUTE), *flat(KEPT), _core.ShapeError, LAYER]
    singletons = [None, True, False, np.dtype(F32), np.dtype(F64), np.dtype(bool), np.dtype("i8")]
    # From Python 3.12 on nothing frees None, whose count then means nothing: torch's own layers raise it there.  Later
    # ones may keep all of these for ever.
    mortal = [count for count in map(sys.getrefcount, singletons) if count < 2**30]
    return [sys.getrefcount(x) for x in shared], mortal, sys.getallocatedblocks()


def grows(call):
    """Whether 1000 calls leave more references or objects behind than Python's own caches do."""
    shared, singletons, blocks = reference_counts()
    for _ in range(1000):
        attempt(call)
    shared_after, singletons_after, blocks_after = reference_counts()
    drift = [after - before for after, before in zip(singletons_after, singletons)]
    return shared_after != shared or max(map(abs, drift), default=0) > 100 or blocks_after - blocks > 100


def assert_leaks_nothing(calls, good=False):
    """A leak grows every time; a free list of the interpreter, of up to 2000 objects, does not.  Nothing refuses calls
    that are good: of a refused one only the refusal would be tried."""
    gc.disable()  # a full collection empties the free lists, which then grow anew
    try:
        for call in calls:
            call() if good else attempt(call)
            assert not all(grows(call) for _ in range(4))
    finally:
        gc.enable()
