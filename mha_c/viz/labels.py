"""Which token stands at which row and column.

`tokens` may be one sentence (labels queries and keys), a tuple (query tokens, key tokens), or a list with one of
either per example.  A sentence is a list of strings, or a string that is split at its blanks.  A sentence shorter
than the axis is followed by padding; a longer one is an error.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

Sentence = Optional[list[str]]


class Pair(NamedTuple):
    """The two sentences of one example; None where the page shows positions instead."""

    queries: Sentence
    keys: Sentence


def pair_of(tokens: Any, example: int, examples: int) -> Pair:
    """The two sentences of one example."""
    if isinstance(tokens, list) and any(isinstance(x, (list, tuple)) or getattr(x, "ndim", 0) > 0 for x in tokens):
        if len(tokens) != examples:
            raise ValueError(
                f"tokens is a list of {len(tokens)} sentences, the weights hold {examples} example(s); "
                "queries and keys with tokens of their own are a tuple (query_tokens, key_tokens)"
            )
        return pair_of(tokens[example], 0, 1)
    if isinstance(tokens, tuple) and len(tokens) == 2:
        # ("the cat", "le chat") and ("good morning", "Servus") are two sentences, ("the", "cat") is one
        if not all(isinstance(item, str) for item in tokens) or any(" " in item.strip() for item in tokens):
            return Pair(_sentence(tokens[0]), _sentence(tokens[1]))
    sentence = _sentence(tokens)
    return Pair(sentence, sentence)


def _sentence(tokens: Any) -> Sentence:
    if tokens is None:
        return None
    if isinstance(tokens, str):
        return tokens.split()
    if hasattr(tokens, "tolist"):  # an array of strings or of token ids
        tokens = tokens.tolist()
    if not hasattr(tokens, "__iter__"):
        raise TypeError(f"tokens must be sentences, lists of strings or strings, got {tokens!r}")
    return [token if isinstance(token, str) else str(token) for token in tokens]


def fit(pair: Pair, num_queries: int, num_keys: int, self_attention: bool = False) -> tuple[Sentence, Sentence]:
    """The sentences for the rows and the columns of one matrix.

    A decoder's self-attention has the query tokens on both sides, its cross-attention has not.  So a sentence that
    fits exactly is preferred to one that leaves room for padding.
    """
    keys = [pair.queries] if self_attention else [pair.keys, pair.queries]
    return _pick([pair.queries], num_queries, "queries"), _pick(keys, num_keys, "keys")


def _pick(sentences: list[Sentence], size: int, what: str) -> Sentence:
    if sentences[0] is None:
        return None
    known = [sentence for sentence in sentences if sentence is not None]
    fitting = [x for x in known if len(x) == size] or [x for x in known if 0 < len(x) < size]
    if not fitting:
        raise ValueError(
            f"tokens has {len(known[0])} tokens for {size} {what}: give {size}, or attend with {len(known[0])} {what}"
        )
    return fitting[0]
