"""python -m mha_c.selftest: compares every instruction set of this CPU with plain NumPy in float64, in about 2 seconds.

It prints a table of the largest errors, and its exit code is 0 if all are within bounds.  An error is the largest
difference, relative to the largest number of the reference.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _core, _reference, functional
from .layers import AdditiveAttention, MultiHeadAttention
from .masking import masked_softmax

if TYPE_CHECKING:
    from ._types import Array

    Case = Callable[[np.random.Generator, np.dtype[Any]], tuple[Any, Any]]

__all__ = ["main"]
__dir__ = __all__.copy  # what dir() and completion show

# About 100 units in the last place: room for sums of a few hundred terms, none for a forgotten key.
BOUNDS = {"float32": 1e-5, "float64": 2e-14}


def _random(rng: np.random.Generator, dtype: np.dtype[Any], *shape: int) -> Array:
    return rng.standard_normal(shape).astype(dtype)


def dot_product(rng: np.random.Generator, dtype: np.dtype[Any]) -> tuple[Any, Any]:
    """A call with odd sizes, several heads that share key heads, and all kinds of masks at once."""
    q, k = _random(rng, dtype, 2, 4, 37, 23), _random(rng, dtype, 2, 2, 131, 23)
    v, bias = _random(rng, dtype, 2, 2, 131, 19), _random(rng, dtype, 37, 131)
    options: dict[str, Any] = {
        "keep_mask": rng.random((37, 131)) < 0.8,
        "bias": bias,
        "causal": "bottom_right",
        "window": (60, 0),
        "return_weights": True,
        "return_lse": True,
    }
    lens = np.array([100, 131])
    found = functional.dot_product_attention(q, k, v, lens, **options)
    return found, _reference.dot_product_attention(q, k, v, lens, **options)


def additive(rng: np.random.Generator, dtype: np.dtype[Any]) -> tuple[Any, Any]:
    q, k, v = _random(rng, dtype, 3, 5, 20), _random(rng, dtype, 3, 33, 12), _random(rng, dtype, 3, 33, 7)
    layer = AdditiveAttention(12, 20, 17, 0.0, rng=rng, dtype=dtype)
    found = layer(q, k, v, [0, 33, 9]), layer.attention_weights
    weights = layer.state_dict()
    expected = _reference.additive_attention(
        q, k, v, weights["w_v.weight"][0], weights["W_q.weight"], weights["W_k.weight"], np.array([0, 33, 9]),
        empty_rows="uniform", return_weights=True,
    )  # fmt: skip
    return found, expected


def multi_head(rng: np.random.Generator, dtype: np.dtype[Any]) -> tuple[Any, Any]:
    x, y = _random(rng, dtype, 2, 9, 60), _random(rng, dtype, 2, 70, 60)
    layer = MultiHeadAttention(60, 60, 60, 60, 5, 0.0, bias=True, rng=rng, dtype=dtype)
    found = layer(x, y, y, [70, 3]), layer.attention_weights
    return found, _reference.multi_head_attention(x, y, y, layer.state_dict(), 5, np.array([70, 3]))


def long_rows(rng: np.random.Generator, dtype: np.dtype[Any]) -> tuple[Any, Any]:
    q, k, v = _random(rng, dtype, 1, 5, 64), _random(rng, dtype, 1, 4099, 64), _random(rng, dtype, 1, 4099, 64)
    options: dict[str, Any] = {"return_weights": True, "return_lse": True, "softcap": 4.0}
    options.update(relative_bias=_random(rng, dtype, 1, 201), sinks=_random(rng, dtype, 1))
    found = functional.dot_product_attention(q, k, v, **options)
    return found, _reference.dot_product_attention(q, k, v, **options)


def functions(rng: np.random.Generator, dtype: np.dtype[Any]) -> tuple[Any, Any]:
    """exp and tanh over the range where they are not 0, 1 or infinite."""
    x = np.concatenate([rng.uniform(-80, 0, 5000), rng.uniform(-1e-3, 1e-3, 500)]).astype(dtype)
    y = np.concatenate([rng.uniform(-10, 10, 5000), rng.uniform(-1e-3, 1e-3, 500)]).astype(dtype)
    exact_exp, exact_tanh = np.exp(x.astype(np.float64)), np.tanh(y.astype(np.float64))
    # The smallest calls that compute them: a softmax over scores 0 and x; one score tanh(y + 0), which equals its lse.
    # A second feature, of weight 0, is too large for scores by exponentials, whose errors are those of numbers near 1.
    scores = np.stack([np.zeros_like(x), x], axis=-1)[None]
    found_exp = masked_softmax(scores)[0, :, 1] / (exact_exp / (1 + exact_exp))
    q, k = np.stack([y, np.full_like(y, 100)], axis=-1)[None], np.zeros((1, 1, 2), dtype)
    _, lse = functional.additive_attention(q, k, k, np.array([1, 0], dtype), return_lse=True)
    return (found_exp, lse[0] / exact_tanh), (np.ones_like(exact_exp), np.ones_like(exact_tanh))


CASES: list[tuple[str, Case]] = [
    ("exp, tanh", functions),
    ("dot product, all masks", dot_product),
    ("additive layer", additive),
    ("multi-head layer", multi_head),
    ("4099 keys", long_rows),
]


def error(found: Any, expected: Any) -> float:
    """The largest relative difference of two results; inf if they are not finite at the same places."""
    worst = 0.0
    for a, b in zip(found, expected):
        finite = np.isfinite(b)
        same = a.shape == b.shape and np.array_equal(finite, np.isfinite(a))
        if not same or not np.array_equal(a[~finite], b[~finite], equal_nan=True):
            return np.inf
        scale = np.abs(b[finite]).max(initial=0.0) or 1.0
        worst = max(worst, float(np.abs(a[finite] - b[finite]).max(initial=0.0) / scale))
    return worst


def main() -> int:
    start, active, failures = time.perf_counter(), _core.isa(), 0
    print(f"{'':8} {'':8} " + " ".join(f"{name:>22}" for name, _ in CASES))
    try:
        for isa in [name for name, available in _core.isas() if available]:
            _core.set_isa(isa)
            for type_name, bound in BOUNDS.items():
                dtype = np.dtype(type_name)
                errors = [error(*case(np.random.default_rng(7), dtype)) for _, case in CASES]
                failures += sum(not e <= bound for e in errors)
                marks = " ".join(f"{e:18.1e} {'ok  ' if e <= bound else 'FAIL'}" for e in errors)
                print(f"{isa:8} {type_name:8} {marks}")
    finally:
        _core.set_isa(active)
    verdict = "all within bounds" if not failures else f"{failures} FAILED"
    print(f"{verdict} ({', '.join(f'{t} {b:g}' for t, b in BOUNDS.items())}), {time.perf_counter() - start:.1f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
