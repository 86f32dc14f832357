"""The players of multi-head and of additive attention: each line of the book's code, its shape, its numbers."""

# mypy: allow-untyped-calls

from __future__ import annotations

from typing import Any

import numpy as np

from ..._arguments.calls import refuses_at_the_call
from ..._layer.description import BOOK_NAMES, describe
from ...errors import ShapeError
from ...viz.page import Page
from ...viz.sources import to_numpy
from ..book import transpose_output, transpose_qkv
from .stepping import LARGEST, STEPS, Array, in_words, labelled, last_call, mask, matrix_text, numbers, read, softmax


class LayerSteps(Page):
    """The result of `multi_head` and `additive`: all matrices; a notebook shows it as a player.

    Not meant to be constructed directly.

    Attributes
    ----------
    matrices : dict of ndarray
        By their names in the book's code; heads stand one below the other, head 0 first.

    Examples
    --------
    >>> import numpy as np, mha_c
    >>> from mha_c import teach
    >>> layer = mha_c.AdditiveAttention(num_hiddens=4, dropout=0.0, rng=0)
    >>> _ = layer(np.ones((1, 2, 3)), np.ones((1, 5, 3)), np.ones((1, 5, 3)))
    >>> teach.additive(layer).matrices["weights"].shape
    (2, 5)
    """

    def __init__(self, name: str, title: str, made: dict[str, Array], inputs: Any, biases: Any, heads: int = 1) -> None:
        self.matrices = made
        hides = (inputs.lengths < len(inputs.k)).any()
        chosen = [step for step in STEPS[name] if hides or step.get("id") != "masked"]
        steps = [{**step, "shape": self._shape(step["grids"][-1]["matrix"], inputs, heads)} for step in chosen]
        rows = {"queries": inputs.query_tokens, "keys": inputs.key_tokens}
        named = {each: labelled(rows[each], len(made[each])) for each in rows}
        size = made["q"].shape[1] // heads
        named["features"] = [f"h{i // size} {i % size}" if heads > 1 else str(i) for i in range(size * heads)]
        for each in rows:
            named[f"heads_{each}"] = [f"h{h} {token}" for h in range(heads) for token in named[each]]
        named["pairs"] = [f"{query} · {key}" for query in named["queries"] for key in named["keys"]]
        data = {
            "player": "layer",
            "title": title,
            "steps": steps,
            "matrices": {each: numbers(matrix) for each, matrix in made.items()},
            "labels": named,
            "biases": {each: numbers(bias) for each, bias in biases.items() if bias.any()},
            "queries": len(inputs.q),
            "keys": len(inputs.k),
            "lengths": inputs.lengths.tolist(),
            "features": size,
        }
        lines = [title]
        for step in steps[1:]:
            matrix = made[step["grids"][-1]["matrix"]]
            lines += ["", in_words(step), f"{step['code']}   # {step['shape']}", matrix_text(matrix)]
        super().__init__("teach", data, "\n".join(lines), title)

    def _shape(self, name: str, inputs: Any, heads: int) -> str:
        rows, columns = self.matrices[name].shape
        if name in ("features", "tanh"):
            return str((1, len(inputs.q), len(inputs.k), columns))
        folded = heads if name.endswith(("_heads", "heads")) or name in ("scores", "masked", "weights") else 1
        return str((folded, rows // folded, columns))


@refuses_at_the_call
def multi_head(
    layer: Any, queries: Any = None, keys: Any = None, values: Any = None, valid_lens: Any = None, *,
    tokens: Any = None, example: int = 0,
) -> LayerSteps:  # fmt: skip
    """Where each number goes in multi-head attention: W_q, transpose_qkv, the heads, transpose_output, W_o.

    Parameters
    ----------
    layer : module
        A `MultiHeadAttention` of `mha_c`, `mha_c.torch` or d2l: anything with W_q, W_k, W_v, W_o and num_heads.
    queries, keys, values : array_like, optional
        As in `steps`; queries alone are self-attention.  None: those of the last call of a layer of `mha_c`.
    valid_lens, tokens, example : as in `steps`
        Lengths, labels of rows and columns, and which item of a batch to take.

    Returns
    -------
    LayerSteps
        All matrices; a notebook shows them as a player.

    Raises
    ------
    ShapeError
        If shapes do not match.
    TypeError
        If the layer is not multi-head attention.
    ValueError
        If matrices are too large to look at, or if there is no call to show.

    Examples
    --------
    >>> import numpy as np, mha_c
    >>> from mha_c import teach
    >>> layer = mha_c.MultiHeadAttention(num_hiddens=4, num_heads=2, dropout=0.0, rng=0)
    >>> X = np.eye(4)[:3]
    >>> out = layer(X[None], X[None], X[None])
    >>> player = teach.multi_head(layer, X)
    >>> player.matrices["q_heads"].shape, np.allclose(player.matrices["output"], out[0])
    ((6, 2), True)
    """
    if queries is None:
        queries, keys, values, valid_lens = last_call(layer, "multi_head", "MultiHeadAttention")
    keys = queries if keys is None else keys
    inputs = read(queries, keys, keys if values is None else values, valid_lens, tokens, example, same_features=False)
    weights, biases = _parameters(layer, *BOOK_NAMES)
    if not describe(layer).is_of_the_book:
        does = f"{type(layer).__name__} does more: view() shows its weights"
        raise TypeError(f"multi_head draws the lines of MultiHeadAttention, and {does}")
    heads = int(layer.num_heads)
    made = {"queries": inputs.q, "keys": inputs.k, "values": inputs.v, **weights}
    for name, x in (("q", inputs.q), ("k", inputs.k), ("v", inputs.v)):
        made[name] = _projected(x, weights[f"W_{name}"], biases[f"W_{name}"], f"W_{name}")
        made[f"{name}_heads"] = transpose_qkv(made[name][None], heads)
    made["scores"] = made["q_heads"] @ made["k_heads"].swapaxes(1, 2) / np.sqrt(made["q_heads"].shape[-1])
    made["masked"] = np.stack([mask(scores, inputs.lengths) for scores in made["scores"]])
    made["weights"] = np.stack([softmax(masked) for masked in made["masked"]])
    made["heads"] = made["weights"] @ made["v_heads"]
    made["joined"] = transpose_output(made["heads"], heads)[0]
    made["output"] = _projected(made["joined"], weights["W_o"], biases["W_o"], "W_o")
    flat = {name: x.reshape(-1, x.shape[-1]) for name, x in made.items()}
    return LayerSteps("multi_head", "Multi-head attention, line by line", flat, inputs, biases, heads)


@refuses_at_the_call
def additive(
    layer: Any, queries: Any = None, keys: Any = None, values: Any = None, valid_lens: Any = None, *,
    tokens: Any = None, example: int = 0,
) -> LayerSteps:  # fmt: skip
    """Additive attention line by line: W_q, W_k, each query beside each key, tanh, w_v, softmax.

    Parameters
    ----------
    layer : module
        An `AdditiveAttention` of `mha_c`, `mha_c.torch` or d2l: anything with W_q, W_k and w_v.
    queries, keys, values, valid_lens, tokens, example : as in `multi_head`
        Without values, the keys are the values.  Errors are those of `multi_head`.

    Returns
    -------
    LayerSteps
        All matrices; a notebook shows them as a player.

    Examples
    --------
    >>> import numpy as np, mha_c
    >>> from mha_c import teach
    >>> layer = mha_c.AdditiveAttention(key_size=2, query_size=3, num_hiddens=4, dropout=0.0, rng=0)
    >>> player = teach.additive(layer, np.eye(3), np.eye(2), np.eye(2))
    >>> player.matrices["features"].shape, np.allclose(player.matrices["weights"].sum(axis=1), 1)
    ((6, 4), True)
    """
    if queries is None:
        queries, keys, values, valid_lens = last_call(layer, "additive", "AdditiveAttention")
    values = keys if values is None else values
    inputs = read(queries, keys, values, valid_lens, tokens, example, same_features=False)
    weights, biases = _parameters(layer, "W_q", "W_k", "w_v")
    q, k = (_projected(x, weights[name], biases[name], name) for x, name in ((inputs.q, "W_q"), (inputs.k, "W_k")))
    made = {"queries": inputs.q, "keys": inputs.k, "values": inputs.v, **weights, "q": q, "k": k}
    made["w_v"] = weights["w_v"].reshape(1, -1)
    made["features"] = (q[:, None] + k[None]).reshape(-1, q.shape[1])
    made["tanh"] = np.tanh(made["features"])
    made["scores"] = (made["tanh"] @ made["w_v"][0] + biases["w_v"]).reshape(len(q), len(k))
    made["masked"] = mask(made["scores"], inputs.lengths)
    made["weights"] = softmax(made["masked"])
    made["output"] = made["weights"] @ inputs.v
    return LayerSteps("additive", "Additive attention, line by line", made, inputs, biases)


def _parameters(layer: Any, *names: str) -> tuple[dict[str, Array], dict[str, Array]]:
    """Weights (inputs, outputs) and biases of a layer, in float64."""
    weights, biases = {}, {}
    for name in names:
        weight = getattr(getattr(layer, name, None), "weight", None)
        if weight is None or type(weight).__name__.startswith("Uninitialized"):
            raise TypeError(
                f"{type(layer).__name__}: the player reads {', '.join(names)}; {name} has no weight"
                + (" yet: call the layer once" if hasattr(layer, name) else "")
            )
        bias = getattr(getattr(layer, name), "bias", None)
        weights[name] = to_numpy(weight, name).astype(np.float64).T
        biases[name] = np.zeros(weights[name].shape[1]) if bias is None else to_numpy(bias, name).astype(np.float64)
        if max(weights[name].shape) > LARGEST:
            raise ValueError(f"teach shows matrices up to {LARGEST} x {LARGEST}; {name} is {weights[name].shape}")
    return weights, biases


def _projected(x: Array, weight: Array, bias: Array, name: str) -> Array:
    if x.shape[1] != len(weight):
        raise ShapeError(f"{name} takes {len(weight)} features, got {x.shape[1]}")
    return np.asarray(x @ weight + bias)
