"""python -m mha_c demo: the examples of the book's attention chapter, what they print, and the time of each."""

from __future__ import annotations

import timeit
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from . import masking
from .config import show_config
from .layers import AdditiveAttention, DotProductAttention, MultiHeadAttention

__all__ = ["main"]
__dir__ = __all__.copy  # what dir() and completion show

# Values 0..39 in ten rows of four, the same for both items of the batch, and keys that are all alike: then the
# attention over the first n keys is the mean of the first n values, whatever the scores are.
VALUES = np.arange(40, dtype=np.float32).reshape(1, 10, 4).repeat(2, axis=0)
KEYS = np.ones((2, 10, 2), dtype=np.float32)
LENS = [2, 6]


Example = Callable[[], Any]  # one call of what is shown; its time is measured


def masked_softmax() -> tuple[Example, str]:
    scores = np.random.default_rng(0).random((2, 2, 4), dtype=np.float32)
    call = partial(masking.masked_softmax, scores, np.array([[1, 3], [2, 4]]))
    return call, _rounded(call())


def additive_attention() -> tuple[Example, str]:
    queries = np.random.default_rng(0).standard_normal((2, 1, 20), dtype=np.float32)
    return _with_weights(AdditiveAttention(key_size=2, query_size=20, num_hiddens=8, dropout=0.1, rng=0), queries)


def dot_product_attention() -> tuple[Example, str]:
    queries = np.random.default_rng(0).standard_normal((2, 1, 2), dtype=np.float32)
    return _with_weights(DotProductAttention(dropout=0.5), queries)


def _with_weights(attention: Any, queries: Any) -> tuple[Example, str]:
    call = partial(attention, queries, KEYS, VALUES, LENS)
    return call, f"{_rounded(call())}\nattention_weights\n{_rounded(attention.attention_weights)}"


def multi_head_attention() -> tuple[Example, str]:
    attention = MultiHeadAttention(100, 100, 100, 100, 5, 0.5, rng=0)
    X, Y = np.ones((2, 4, 100), dtype=np.float32), np.ones((2, 6, 100), dtype=np.float32)
    call = partial(attention, X, Y, Y, [3, 2])
    return call, f"{attention.eval()}\noutput {call().shape}, attention_weights {attention.attention_weights.shape}"


def self_attention() -> tuple[Example, str]:
    X = np.ones((2, 4, 100), dtype=np.float32)
    call = partial(MultiHeadAttention(num_hiddens=100, num_heads=5, dropout=0.5, rng=0), X, X, X, [3, 2])
    return call, f"output {call().shape}"


def decoder_steps() -> tuple[Example, str]:
    """Bahdanau attention: every step of the decoder asks the same keys, so they are projected once."""
    attention = AdditiveAttention(num_hiddens=16, dropout=0.1, rng=0)
    states = np.ones((4, 7, 16), dtype=np.float32)
    encoder_outputs = np.ones((4, 7, 16), dtype=np.float32)

    def call() -> Any:
        keys = attention.project_keys(encoder_outputs)
        steps = [attention(states[:, t : t + 1], keys, encoder_outputs) for t in range(7)]
        return np.concatenate(steps, axis=1)

    return call, f"contexts {call().shape}"


EXAMPLES: list[tuple[str, Callable[[], tuple[Example, str]]]] = [
    ("masked_softmax of random scores (2, 2, 4), valid_lens [[1, 3], [2, 4]]", masked_softmax),
    ("AdditiveAttention, valid_lens [2, 6]", additive_attention),
    ("DotProductAttention, valid_lens [2, 6]", dot_product_attention),
    ("MultiHeadAttention, queries (2, 4, 100), keys and values (2, 6, 100)", multi_head_attention),
    ("self-attention, X (2, 4, 100)", self_attention),
    ("Bahdanau attention, a decoder of 7 steps over 7 encoder outputs", decoder_steps),
]


def main() -> None:
    show_config()
    for title, example in EXAMPLES:
        call, text = example()
        shortest = min(timeit.repeat(call, number=1, repeat=200))
        print(f"\n--- {title}: {shortest * 1e6:.1f} us\n{text}")


def _rounded(array: Any) -> str:
    with np.printoptions(precision=4, suppress=True):
        return str(array)
