"""The players of dot-product attention: five matrices one after the other, and the same in tiles."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np
from numpy.typing import NDArray

from ..._arguments import scalars
from ..._arguments.arrays import to_lengths
from ..._arguments.calls import refuses_at_the_call
from ..._arguments.options import causal_lengths
from ..._layer.call import AttentionLayer
from ..._layer.lacks import check_has
from ...errors import ShapeError
from ...viz import labels
from ...viz.page import Page
from ...viz.sources import on_cpu, to_numpy

Array = NDArray[np.float64]

MASKED = -1e6  # d2l gives every masked key this score: its exp is 0
LARGEST = 64  # more rows or columns are too many to look at


class _StepInputs(NamedTuple):
    """One example: queries (Q, D), keys (K, D), values (K, Dv), and how many keys each query may see."""

    q: Array
    k: Array
    v: Array
    lengths: NDArray[np.int64]
    query_tokens: labels.Sentence
    key_tokens: labels.Sentence


# ---- the five steps ----------------------------------------------------------------------------------------------


class Steps(Page):
    """The result of `steps`: all matrices; a notebook shows it as a player.

    Not meant to be constructed directly.

    Attributes
    ----------
    scores : ndarray (Q, K)
        q k^T.
    scaled : ndarray (Q, K)
        `scores` / sqrt(D).
    masked : ndarray (Q, K)
        `scaled`, with -1e6 for keys that a query must not see.
    weights : ndarray (Q, K)
        Softmax of `masked`, row by row.
    output : ndarray (Q, Dv)
        `weights` times v.
    inputs : tuple
        Queries, keys, values, lengths and tokens.

    Examples
    --------
    >>> import numpy as np
    >>> from mha_c import teach
    >>> teach.steps(np.eye(2), np.eye(2), np.eye(2)).weights.round(2)
    array([[0.67, 0.33],
           [0.33, 0.67]])
    """

    def __init__(self, inputs: _StepInputs) -> None:
        q, k, v = inputs.q, inputs.k, inputs.v
        self.inputs = inputs
        self.scores = q @ k.T
        self.scaled = self.scores / np.sqrt(q.shape[1]) if q.shape[1] else self.scores
        self.masked = mask(self.scaled, inputs.lengths)
        self.weights = softmax(self.masked)
        self.output = self.weights @ v
        names = ["scores", "scaled", "masked", "weights", "output"]
        matrices = {"Q": q, "K": k, "V": v, **{name: getattr(self, name) for name in names}}
        hides = (inputs.lengths < len(k)).any()
        steps = [
            {**step, "shape": str((1, *matrices[step["id"]].shape)) if step["id"] in names else ""}
            for step in STEPS["steps"]
            if hides or step["id"] != "masked"
        ]
        title = "Attention, step by step"
        lines = [f"{title}: {q.shape[0]} queries, {k.shape[0]} keys, {q.shape[1]} features"]
        lines += [f"\n{in_words(step)}\n{matrix_text(matrices[step['id']])}" for step in steps[1:]]
        shown = {name: numbers(matrix) for name, matrix in {**matrices, "keys_across": k.T}.items()}
        sizes = {"queries": len(q), "keys": len(k)}
        labels = {"queries": labelled(inputs.query_tokens, len(q)), "keys": labelled(inputs.key_tokens, len(k))}
        more = {"matrices": shown, "labels": labels, "biases": {}, **sizes}
        super().__init__("teach", _player(inputs, "layer", title, steps, **more), "\n".join(lines), title)

    def tiles(self, block_size: Optional[int] = None) -> Tiles:
        """The same attention, one block of keys after another.

        Parameters
        ----------
        block_size : int, optional
            How many keys a tile has.

        Returns
        -------
        Tiles
            The state after each block.
        """
        return Tiles(self.inputs, block_size)


@refuses_at_the_call
def steps(
    q: Any, k: Any = None, v: Any = None, valid_lens: Any = None, *, tokens: Any = None, example: int = 0
) -> Steps:
    """Dot-product attention with every intermediate matrix kept, and a player that shows them.

    Parameters
    ----------
    q, k, v : array_like (Q, D), (K, D), (K, Dv)
        NumPy arrays, torch tensors or lists.  With a batch axis in front, the item `example` is taken.  Or a layer:
        steps(layer, queries, keys, valid_lens=...), where keys, which are also the values, default to the queries; a
        layer of `mha_c` after a call needs neither.  A multi-head or additive layer is shown by the player of its kind.
    valid_lens : optional
        None, one length, or one length per query ([1, 2, 3, ...] is a causal mask); with a batch axis (B,) or (B, Q).
    tokens : optional
        One sentence, or a tuple (query tokens, key tokens).
    example : int
        Which item of a batch to take.

    Returns
    -------
    Steps
        All matrices; a notebook shows them as a player.

    Raises
    ------
    ShapeError
        If shapes do not match.
    TypeError
        If q, k, v or lengths are not numeric.
    ValueError
        If a matrix is too large to look at, if there is no such example, or if there are more tokens than rows.

    Examples
    --------
    >>> import numpy as np
    >>> from mha_c import teach
    >>> teach.steps(np.eye(2), np.eye(2), np.eye(2), valid_lens=[1, 2]).weights.round(2)
    array([[1.  , 0.  ],
           [0.33, 0.67]])
    """
    if hasattr(type(q), "attention_weights"):
        check_has(q, "steps")
        if getattr(valid_lens, "ndim", 0) == 3:  # steps(layer, X, X, X), as the layer is called
            if valid_lens is not v:
                raise TypeError("a layer's keys are shown as its values, too: write steps(layer, queries, keys)")
            valid_lens = None
        player = next((name for part, name in PLAYERS.items() if hasattr(q, part)), None)
        if player is not None:
            values = None if player == "multi_head" or v is not None else k
            page: Steps = getattr(import_module("mha_c.teach"), player)(
                q, k, k if v is None else v, values, valid_lens, tokens=tokens, example=example
            )
            return page
    if k is None:
        q, k, v, valid_lens = last_call(q, "steps", "DotProductAttention")
    elif hasattr(type(q), "attention_weights"):
        q, k, v = k, k if v is None else v, k if v is None else v
    return Steps(read(q, k, v, valid_lens, tokens, example))


PLAYERS = {"w_v": "additive", "W_o": "multi_head"}  # a part of a layer: the player of such layers


def last_call(layer: Any, player: str, name: str) -> tuple[Any, Any, Any, Any]:
    """Queries, keys, values and lengths of a layer's last call."""
    if type(layer).__name__ != name:
        raise TypeError(f"{player} shows the call of a {name}, or queries, keys and values; got {type(layer).__name__}")
    if isinstance(layer, AttentionLayer) and layer._last is None:
        raise ValueError(
            f"{player}: this {name} was not called yet: call it, or give {player} queries, keys and values"
        )
    inputs = getattr(layer, "_inputs", None)
    if inputs is None:  # torch's layers, copies, calls with a cache, other processes, large arrays
        raise ValueError(f"{player}: this {name} has not kept what it was called with: give {player} the same arrays")
    queries, keys, values, valid_lens, options = inputs
    corner, *others = (None,) if options is None else options
    if any(x is not None for x in others):
        raise ValueError(f"{player} draws lengths and causal masks; this {name} was called with keep_mask or bias")
    return queries, keys, values, causal_lengths(corner or False, queries, keys, valid_lens)


def mask(scores: Array, lengths: NDArray[np.int64]) -> Array:
    """Query i sees the first lengths[i] keys; the other scores become -1e6."""
    key = np.arange(scores.shape[1])
    seen = key[None, :] < lengths[:, None]
    return np.where(seen, scores, MASKED)


def softmax(scores: Array) -> Array:
    """exp(s) / sum of exp(s), row by row.  Subtracting the largest score changes nothing and keeps exp small."""
    largest = scores.max(axis=1, keepdims=True)
    e = np.exp(scores - largest)
    return np.asarray(e / e.sum(axis=1, keepdims=True))


# ---- the same in tiles -------------------------------------------------------------------------------------------


class Tile(NamedTuple):
    """One block of keys, and the state after it.

    Not meant to be constructed directly.

    Attributes
    ----------
    first, last : int
        The keys of the block; last is not included.
    scores : ndarray (Q, block)
        Scaled and masked.
    old_max : ndarray (Q,)
        The largest score before this block, -inf at the start.
    new_max : ndarray (Q,)
        The largest score so far.
    rescale : ndarray (Q,)
        exp(old_max - new_max): the factor for all earlier sums.
    weights : ndarray (Q, block)
        exp(scores - new_max).
    old_sum : ndarray (Q,)
        The sum of exp before this block.
    new_sum : ndarray (Q,)
        old_sum * rescale + sum of this block's weights.
    output : ndarray (Q, Dv)
        Old output * rescale + weights v, not yet divided by the sum.

    Examples
    --------
    >>> import numpy as np
    >>> from mha_c import teach
    >>> tile = teach.tiles(np.eye(2), np.eye(2), np.eye(2), block_size=1).tiles[1]
    >>> tile.first, tile.last, tile.rescale.round(2)
    (1, 2, array([1.  , 0.49]))
    """

    first: int
    last: int
    scores: Array
    old_max: Array
    new_max: Array
    rescale: Array
    weights: Array
    old_sum: Array
    new_sum: Array
    output: Array


class Tiles(Page):
    """The result of `tiles`: all blocks; a notebook shows it as a player.

    Not meant to be constructed directly.

    Attributes
    ----------
    tiles : list of Tile
        One for each block of keys.
    output : ndarray (Q, Dv)
        The result after the last block.
    block_size : int
        How many keys a tile has; the last one may have fewer.
    inputs : tuple
        Queries, keys, values, lengths and tokens.

    Examples
    --------
    >>> import numpy as np
    >>> from mha_c import teach
    >>> recorded = teach.tiles(np.eye(2), np.eye(4)[:, :2], np.eye(4), block_size=2)
    >>> [(tile.first, tile.last) for tile in recorded.tiles]
    [(0, 2), (2, 4)]
    """

    def __init__(self, inputs: _StepInputs, block_size: Optional[int] = None) -> None:
        num_queries, num_keys = inputs.q.shape[0], inputs.k.shape[0]
        if block_size is None:
            block_size = max(1, -(-num_keys // 4)) if num_keys > 4 else min(2, num_keys)
        self.inputs = inputs
        self.block_size = min(scalars.whole(block_size, "block_size"), num_keys)
        self.tiles = online_softmax(inputs.q, inputs.k, inputs.v, inputs.lengths, self.block_size)
        last = self.tiles[-1]
        self.output = last.output / last.new_sum[:, None]
        title = "The online softmax, tile by tile"
        shown = [{name: numbers(value) for name, value in tile._asdict().items()} for tile in self.tiles]
        more = {"queries": num_queries, "keys": num_keys, "output": numbers(self.output), "tiles": shown}
        super().__init__("teach", _player(inputs, "tiles", title, STEPS["tiles"], **more), self._as_text(title), title)

    def _as_text(self, title: str) -> str:
        lines = [f"{title}: {len(self.tiles)} tiles of {self.block_size} keys"]
        for tile in self.tiles:
            lines += ["", f"keys {tile.first} to {tile.last - 1}", "query     max     sum  rescale"]
            for i, row in enumerate(zip(tile.new_max, tile.new_sum, tile.rescale)):
                lines.append(f"{i:>5}" + "".join(f"{x:8.3f}" for x in row))
        return "\n".join([*lines, "", "output: what was summed up, divided by the sum", matrix_text(self.output)])


@refuses_at_the_call
def tiles(
    q: Any,
    k: Any,
    v: Any,
    valid_lens: Any = None,
    *,
    block_size: Optional[int] = None,
    tokens: Any = None,
    example: int = 0,
) -> Tiles:
    """Attention over one block of keys after another, keeping only a maximum, a sum and an output per query.

    Parameters
    ----------
    q, k, v, valid_lens : as in `steps`
        Errors are those of `steps`.
    block_size : int, optional
        How many keys a tile has.
    tokens, example : as in `steps`
        Labels of rows and columns; which item of a batch to take.

    Returns
    -------
    Tiles
        The state after each block; a notebook shows it as a player.

    Examples
    --------
    >>> import numpy as np
    >>> from mha_c import teach
    >>> tiles = teach.tiles(np.eye(2), np.eye(4)[:, :2], np.eye(4), block_size=1)
    >>> len(tiles.tiles), tiles.output.shape
    (4, (2, 4))
    """
    return Tiles(read(q, k, v, valid_lens, tokens, example), block_size)


def online_softmax(q: Array, k: Array, v: Array, lengths: NDArray[np.int64], block_size: int) -> list[Tile]:
    """The loop at the heart of FlashAttention."""
    largest = np.full(len(q), -np.inf)  # of the scores seen so far
    total = np.zeros(len(q))  # of exp(score - largest)
    output = np.zeros((len(q), v.shape[1]))  # of exp(score - largest) * value
    tiles = []
    for first in range(0, len(k), block_size):
        last = min(first + block_size, len(k))
        scores = q @ k[first:last].T / np.sqrt(max(1, q.shape[1]))
        scores = mask(scores, lengths - first)

        new_largest = np.maximum(largest, scores.max(axis=1))
        # All sums so far are relative to the old maximum; this factor makes them relative to the new one.
        rescale = np.exp(largest - new_largest)
        weights = np.exp(scores - new_largest[:, None])
        new_total = total * rescale + weights.sum(axis=1)
        output = output * rescale[:, None] + weights @ v[first:last]

        tiles.append(Tile(first, last, scores, largest, new_largest, rescale, weights, total, new_total, output))
        largest, total = new_largest, new_total
    return tiles


# ---- reading the arguments ----------------------------------------------------------------------------------------


def read(q: Any, k: Any, v: Any, valid_lens: Any, tokens: Any, example: int, same_features: bool = True) -> _StepInputs:
    """The arguments as one example, checked."""
    arrays = [to_numpy(x, name).astype(np.float64) for name, x in (("q", q), ("k", k), ("v", v))]
    shapes = ", ".join(f"{name} {x.shape}" for name, x in zip("qkv", arrays))
    n_items = len(arrays[0]) if all(x.ndim == 3 for x in arrays) and len({len(x) for x in arrays}) == 1 else None
    if scalars.whole(example, "example", least=0) >= (1 if n_items is None else n_items):
        raise ValueError(f"example must lie in 0..{(n_items or 1) - 1}, got {example}")
    if n_items is not None:
        arrays = [x[example] for x in arrays]
    q, k, v = arrays
    differ = same_features and q.shape[1:] != k.shape[1:]
    if any(x.ndim != 2 or not len(x) for x in arrays) or differ or len(k) != len(v):
        raise ShapeError(
            f"q, k and v must have shapes (Q, D), (K, D) and (K, Dv), or all the same batch axis in front; got {shapes}"
        )
    if max(*q.shape, *k.shape, *v.shape) > LARGEST:
        raise ValueError(
            f"teach shows matrices up to {LARGEST} x {LARGEST}; got {shapes}.  mha_c.viz.view shows larger weights"
        )
    if not all(np.isfinite(x).all() for x in arrays):
        raise ValueError("q, k and v must be finite numbers")
    lengths = np.full(len(q), len(k))
    if valid_lens is not None:
        lens = to_lengths(on_cpu(valid_lens))
        if n_items and lens.ndim and len(lens) != n_items:
            raise ShapeError(f"valid_lens must have a length, or a row, for each of {n_items} items, got {lens.shape}")
        lens = lens[example] if n_items and lens.ndim else lens
        if lens.shape not in ((), (1,), (len(q),)):
            raise ShapeError(f"valid_lens must be one length, or {len(q)} (one per query), got shape {lens.shape}")
        lengths = np.broadcast_to(np.clip(lens, 0, len(k)), (len(q),))
    return _StepInputs(q, k, v, lengths, *labels.fit(labels.pair_of(tokens, 0, 1), len(q), len(k)))


# ---- what the players say -----------------------------------------------------------------------------------------

STEPS = json.loads((Path(__file__).parent / "players.json").read_text(encoding="utf-8"))


def _player(inputs: _StepInputs, name: str, title: str, steps: Any, **more: Any) -> dict[str, Any]:
    """The data of a player: what both players need, the texts of the steps, and `more` of one player."""
    return {
        "qt": inputs.query_tokens,
        "kt": inputs.key_tokens,
        "lengths": inputs.lengths.tolist(),
        "features": inputs.q.shape[1],
        "V": numbers(inputs.v),
        "player": name,
        "title": title,
        **more,
        "steps": steps,
    }


def labelled(tokens: Optional[list[str]], size: int) -> list[str]:
    """Names of `size` rows: the tokens, then positions."""
    return [*(tokens or []), *map(str, range(len(tokens or []), size))]


def numbers(x: Any) -> Any:
    """An array or a number as JSON for the page; -inf, which JSON does not have, becomes null."""
    shown: Any = np.where(np.isneginf(x), None, np.round(x, 6))
    return shown.tolist()


_IN_ASCII = str.maketrans({"·": ".", "−": "-", "Σ": "sum", "←": "<-", "α": "alpha", "ℓ": "l", "≥": ">=", "√": "root "})


def in_words(step: Any) -> str:
    """A step's title and formula as text, for any terminal."""
    return f"{step['title']}   {step['formula']}".rstrip().replace("√d", "sqrt(d)").translate(_IN_ASCII)


def matrix_text(matrix: Array) -> str:
    """The numbers of a matrix, or of its first rows and columns."""
    shown = matrix[:12, :12]
    rows = ["".join("    -1e6" if x == MASKED else f"{x:8.3f}" for x in row) for row in shown]
    return "\n".join(rows + (["     ..."] if matrix.shape != shown.shape else []))
