"""python -m mha_c demo: runs examples of the book's attention chapter; prints their results and times."""

from __future__ import annotations

import timeit
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from .config import show_config
from .layers import AdditiveAttention, DotProductAttention, MultiHeadAttention
from .masking import masked_softmax

NEXT = """from mha_c import teach
layer, X, tokens = teach.trained()
layer(X, X, X)
layer.view(tokens=tokens).save("attention.html")"""

__all__ = ["main"]
__dir__ = __all__.copy  # what dir() and completion show


def examples() -> Iterator[tuple[str, Callable[[], Any], str]]:
    """Yields (title, a function that makes one call, text to print)."""
    scores = np.random.default_rng(0).random((2, 2, 4), dtype=np.float32)
    call: Callable[[], Any] = partial(masked_softmax, scores, np.array([[1, 3], [2, 4]]))
    yield "masked_softmax of random scores (2, 2, 4), valid_lens [[1, 3], [2, 4]]", call, _rounded(call())

    # Values 0..39 in ten rows of four, the same for both items of the batch, and equal keys.  Then the result over the
    # first n keys is the mean of the first n values, whatever the scores are.
    values = np.arange(40, dtype=np.float32).reshape(1, 10, 4).repeat(2, axis=0)
    keys = np.ones((2, 10, 2), dtype=np.float32)
    additive = AdditiveAttention(key_size=2, query_size=20, num_hiddens=8, dropout=0.1, rng=0)
    for attention, features in ((additive, 20), (DotProductAttention(dropout=0.5), 2)):
        queries = np.random.default_rng(0).standard_normal((2, 1, features), dtype=np.float32)
        call = partial(attention, queries, keys, values, [2, 6])
        text = f"{_rounded(call())}\nattention_weights\n{_rounded(attention.attention_weights)}"
        yield f"{type(attention).__name__}, valid_lens [2, 6]", call, text

    X, Y = np.ones((2, 4, 100), dtype=np.float32), np.ones((2, 6, 100), dtype=np.float32)
    mha = MultiHeadAttention(100, 100, 100, 100, 5, 0.5, rng=0)
    call = partial(mha, X, Y, Y, [3, 2])
    text = f"{mha}\noutput {call().shape}, attention_weights {mha.attention_weights.shape}"
    yield "MultiHeadAttention, queries (2, 4, 100), keys and values (2, 6, 100)", call, text

    call = partial(MultiHeadAttention(num_hiddens=100, num_heads=5, dropout=0.5, rng=0), X, X, X, [3, 2])
    yield "self-attention, X (2, 4, 100)", call, f"output {call().shape}"

    bahdanau = AdditiveAttention(num_hiddens=16, dropout=0.1, rng=0)
    states = encoder_outputs = np.ones((4, 7, 16), dtype=np.float32)

    def decoder() -> Any:
        kept = bahdanau.project_keys(encoder_outputs)  # all steps use the same keys: project them once
        return np.concatenate([bahdanau(states[:, t : t + 1], kept, encoder_outputs) for t in range(7)], axis=1)

    title = "Bahdanau attention, a decoder of 7 steps over 7 encoder outputs"
    yield title, decoder, f"contexts {decoder().shape}"


def main() -> None:
    show_config()
    for title, call, text in examples():
        shortest = min(timeit.repeat(call, number=1, repeat=200))
        print(f"\n--- {title}: {shortest * 1e6:.1f} us\n{text}")
    print(f"\nWhat next?  In Python, these lines make a page of a trained layer; open it in a browser:\n\n{NEXT}")


def _rounded(array: Any) -> str:
    with np.printoptions(precision=4, suppress=True):
        return str(array)
