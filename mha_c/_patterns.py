"""`patterns`: what each head looks at, in words that are known of many models.  heads.py exports it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Optional

import numpy as np

from ._arguments.calls import refuses_at_the_call
from ._head_tables import HeadTable
from ._summary import NOTHING_SEEN, Piece, WeightsArray, entropy_of
from .errors import ShapeError
from .viz.sources import collect, on_cpu

if TYPE_CHECKING:
    from ._types import Array

PATTERNS = ("previous", "first", "self", "even")


class Patterns(HeadTable):
    """The result of `patterns`; prints as a table.

    >>> found = Patterns([0, 1], {"previous": np.array([0.9, 0.1]), "first": np.array([0.05, 0.8])})
    >>> found
    what heads look at: the mean weight there
    head      previous         first
    0              0.9          0.05
    1              0.1           0.8
    >>> found.ranked("first")
    [1, 0]

    Parameters
    ----------
    names : list
        The heads, in order: numbers for a single layer, pairs (layer's name, number) for several.
    scores : dict
        {pattern: (len(names),) array}, each between 0 and 1, or NaN if no query could show it.
    """

    _title = "what heads look at: the mean weight there"

    def ranked(self, pattern: str) -> list[Any]:
        """Sort the heads: the one that shows the pattern most comes first.

        Parameters
        ----------
        pattern : str
            A key of `scores`.

        Returns
        -------
        list
            All `names`, sorted; those with NaN last.
        """
        scores = self.scores[self._checked(pattern)]
        return [self.names[i] for i in np.argsort(-np.nan_to_num(scores, nan=-1.0), kind="stable")]


@refuses_at_the_call
def patterns(source: Any, tokens: Any = None) -> Patterns:
    """Measure what each head looks at: the previous token, the first, itself, all evenly, or what induction heads do.

    >>> import numpy as np
    >>> from mha_c import heads
    >>> previous, even = np.eye(6, k=-1), np.tri(6) / np.arange(1, 7)[:, None]
    >>> heads.patterns(np.stack([previous, even]), tokens="a b c a b c")
    what heads look at: the mean weight there
    head      previous         first          self          even     induction
    0                1             0             0             0             0
    1           0.2375        0.2375        0.2375             1        0.2056

    Queries and keys are assumed to be the same tokens, with the last query at the last key.  The first two queries are
    left out (their previous token is the first one, or there is none), and so are rows without keys.

    Parameters
    ----------
    source : array, list, layer, model, or what mha_c.torch.watch has seen
        Attention weights, as mha_c.viz.view takes them; or `seen`, or some of `seen.calls`: these are read in pieces.
    tokens : optional
        For "induction": a sentence (a string, a list of strings or numbers) or one for each item of the batch.

    Returns
    -------
    Patterns
        A table with, for each head, means over all queries of all items:

        "previous": the weight on the token before.
        "first": the weight on the first token; if it is large, the token is an attention sink.
        "self": the weight on the token itself.
        "even": the entropy of the weights, divided by that of uniform weights on the same keys.
        "induction": the weight on the tokens that come after earlier copies of this token, if there are any: after
        "A B ... A" such a head looks at B.  Only with `tokens`.

    Raises
    ------
    ShapeError
        If there are not as many tokens as keys, or if there are more queries than keys.
    TypeError
        If `source` has no attention weights.

    Notes
    -----
    Source: Elhage et al. 2021, "A mathematical framework for transformer circuits", and Olsson et al. 2022 (previous
    token and induction heads); Xiao et al. 2023 (sinks); Clark et al. 2019, "What does BERT look at?".
    """
    layers = _layers(source)
    names, columns = [], []
    for name, weights in layers:
        found = _of_layer(weights, tokens)
        names += [head if len(layers) == 1 and not name else (name, head) for head in range(weights.shape[1])]
        columns.append(found)
    kinds = (*PATTERNS, "induction") if tokens is not None else PATTERNS
    return Patterns(names, {kind: np.concatenate([found[kind] for found in columns]) for kind in kinds})


def _layers(source: Any) -> list[tuple[str, Any]]:
    """(name, weights) of each layer; weights are a `Scores` or `WeightsArray`."""
    calls = getattr(source, "calls", source)
    if isinstance(calls, (list, tuple)) and calls and all(hasattr(call, "_made_of") for call in calls):
        names = [call.name or call.kind for call in calls]
        twice = {name for name in names if names.count(name) > 1}
        names = [f"{name} (call {i})" if name in twice else name for i, name in enumerate(names)]
        return [(name, call._made_of.source()) for name, call in zip(names, calls)]
    if hasattr(source, "calls") and not calls:
        raise TypeError(NOTHING_SEEN)
    return [(layer.name, WeightsArray(layer.weights)) for layer in collect(source)]


def _of_layer(weights: Any, tokens: Any) -> dict[str, Array]:
    batch, n_heads, n_queries, n_keys = weights.shape
    if n_queries > n_keys:
        raise ShapeError(f"patterns: there are {n_queries} queries and {n_keys} keys, which are not the same tokens")
    ids = None if tokens is None else _numbered(tokens, batch, n_keys)
    kinds = (*PATTERNS, "induction")
    sums, counts = ({kind: np.zeros(n_heads) for kind in kinds} for _ in range(2))
    for piece in weights.pieces():
        for kind, (values, counted) in _of_piece(piece, n_keys - n_queries, ids).items():
            sums[kind][piece.heads] += np.where(counted, values, 0).sum(axis=(0, 2))
            counts[kind][piece.heads] += counted.sum(axis=(0, 2))
    with np.errstate(invalid="ignore"):
        return {kind: sums[kind] / counts[kind] for kind in kinds}


def _of_piece(piece: Piece, later: int, ids: Optional[Array]) -> dict[str, tuple[Array, Array]]:
    """For each pattern, of the rows (items, heads, rows): the numbers, and which of them count."""
    weights = piece.weights.astype(np.float64)
    place = np.arange(piece.rows.start, piece.rows.stop) + later
    counts = (place > 1) & weights.any(axis=-1)

    def at(keys: Array) -> Array:
        keys = np.clip(keys, 0, weights.shape[-1] - 1)
        found: Array = np.take_along_axis(weights, np.broadcast_to(keys[:, None], (*weights.shape[:3], 1)), -1)[..., 0]
        return found

    n_seen = (weights > 0).sum(axis=-1)
    even = entropy_of(weights) / np.log2(np.maximum(n_seen, 2))  # 0 for all weight on one key
    numbers = {"previous": at(place - 1), "first": weights[..., 0], "self": at(place), "even": even}
    found = {kind: (values, counts) for kind, values in numbers.items()}
    if ids is not None:
        after, has_copy = _after_copies(ids[piece.items], place, weights.shape[-1])
        induction = np.where(after[:, None], weights, 0).sum(axis=-1)
        found["induction"] = induction, counts & has_copy[:, None]
    return found


def _after_copies(ids: Array, place: Array, n_keys: int) -> tuple[Array, Array]:
    """Of ids (items, K): (items, rows, n_keys), whether a key comes after an earlier copy of the query's token, and
    before the query; and which queries have such keys."""
    before = np.concatenate([np.full((len(ids), 1), -1), ids], axis=1)[:, :n_keys]  # the token before each key
    same = before[:, None, :] == ids[:, place, None]
    earlier = np.arange(n_keys) < place[:, None]
    after = same & earlier
    return after, after.any(axis=-1)


def _numbered(tokens: Any, batch: int, n_keys: int) -> Array:
    """Tokens as ids (B, K), equal where the tokens are."""
    if isinstance(tokens, str):
        tokens = tokens.split()
    tokens = on_cpu(tokens)
    rows: Sequence[Any] = tokens.tolist() if hasattr(tokens, "tolist") else list(tokens)
    if not any(isinstance(row, (list, tuple)) for row in rows):
        one_each = len(rows) == batch and len(rows) != n_keys and all(isinstance(row, str) for row in rows)
        rows = [row.split() for row in rows] if one_each else [rows] * batch
    if len(rows) != batch or any(len(row) != n_keys for row in rows):
        raise ShapeError(
            f"tokens: {n_keys} are needed for each of {batch} items, or once for all, got {[len(row) for row in rows]}"
        )
    known: dict[Any, int] = {}
    return np.array([[known.setdefault(token, len(known)) for token in row] for row in rows]).reshape(batch, n_keys)
