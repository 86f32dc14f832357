"""Measures which heads of a layer matter and what they look at, and removes heads from a layer.

    found = heads.importance(layer, (queries, keys, values, valid_lens), "gradient", loss=loss)
    found                                  # a table; found.chart() is a bar chart
    heads.prune(layer, found.ranked()[:4])  # removes the four heads that matter least, and saves their time
    heads.patterns(weights)                 # previous token, sink, itself, evenly, induction

It works for NumPy layers of this package, for torch modules with the book's projections (of `mha_c.torch` and d2l),
and for models that contain such layers.  torch is not imported here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Callable, Optional, Union

import numpy as np

from . import _layers_with_heads
from ._arguments import scalars
from ._arguments.calls import refuses_at_the_call
from ._head_tables import HeadTable
from ._layers_with_heads import LayerWithHeads
from ._patterns import Patterns, patterns
from .viz.sources import to_numpy

if TYPE_CHECKING:
    from ._types import Array

    Loss = Callable[[Any, Any], Any]

__all__ = ["METHODS", "Importance", "Patterns", "importance", "patterns", "prune"]
__dir__ = __all__.copy  # what dir() and completion show

METHODS = ("ablation", "gradient", "entropy", "confidence")


class Importance(HeadTable):
    """The result of `importance`; prints as a table.

    >>> found = Importance([0, 1], {"ablation": np.array([0.5, 0.125])}, baseline=1.0)
    >>> found
    head importance, loss with all heads 1
    head      ablation
    0              0.5  ####################
    1            0.125  #####
    >>> found.ranked()
    [1, 0]

    Parameters
    ----------
    names : list
        The heads, in order: numbers for a single layer, pairs (layer's name, number) for a model.
    scores : dict
        {method: (len(names),) array}.
    baseline : float, optional
        The mean loss with all heads; None if no loss was given.
    joint : (len(names), len(names)) array, optional
        How much the loss grows without each two heads, in the unit of "ablation", which is its diagonal.

    Attributes
    ----------
    baseline : float or None
        The mean loss with all heads.
    joint : array (heads, heads) or None
        How much the loss grows without each two heads.
    """

    def __init__(
        self, names: Sequence[Any], scores: Mapping[str, Array], baseline: Optional[float] = None,
        joint: Optional[Array] = None,
    ) -> None:  # fmt: skip
        super().__init__(names, scores)
        self.baseline, self.joint = baseline, joint
        self._title = "head importance" + ("" if baseline is None else f", loss with all heads {baseline:.4g}")

    def ranked(self, method: Optional[str] = None) -> list[Any]:
        """The names of the heads, the least important first; the first few of them can be given to `prune`.

        Parameters
        ----------
        method : str, optional
            A measured method.  Default: the first.  For "entropy" the head with the highest entropy comes first.

        Returns
        -------
        list
            All `names`, sorted.
        """
        method = self._checked(method)
        sign = -1 if method == "entropy" else 1  # the highest entropy: a head that looks everywhere
        return [self.names[i] for i in np.argsort(sign * self.scores[method], kind="stable")]

    def pairs(self) -> list[tuple[Any, Any, float]]:
        """Pairs of heads, first those that are missed together far more than the sum of what each is missed alone.

        Such heads do the same work: each can be pruned, but not both.

        Returns
        -------
        list of (name, name, float)
            Two heads, and `joint` of both minus the "ablation" of each.

        Raises
        ------
        ValueError
            If `importance` was called without joint=True.
        """
        if self.joint is None:
            raise ValueError("pairs need importance(..., joint=True)")
        alone = np.diagonal(self.joint)
        beyond = self.joint - alone - alone[:, None]
        found = [(beyond[i, j], i, j) for i in range(len(alone)) for j in range(i + 1, len(alone))]
        found.sort(key=lambda pair: -pair[0])
        return [(self.names[i], self.names[j], float(more)) for more, i, j in found]


@refuses_at_the_call
def importance(
    model: Any,
    data: Any,
    method: Union[str, Sequence[str]] = "ablation",
    *,
    loss: Optional[Loss] = None,
    per_example: bool = True,
    joint: bool = False,
) -> Importance:
    """Measure how much each head of a layer, or of all layers of a model, matters on some data.

    >>> import numpy as np, mha_c
    >>> mha = mha_c.MultiHeadAttention(num_hiddens=8, num_heads=2, dropout=0.1, rng=0)
    >>> x = np.random.default_rng(0).standard_normal((2, 3, 8))
    >>> y = mha(x, x, x)
    >>> def loss(layer, batch):
    ...     x, y = batch
    ...     error = layer(x, x, x) - 2 * y
    ...     layer.backward(2 * error / error.size)
    ...     return (error**2).mean()
    >>> mha_c.heads.importance(mha, (x, y), "gradient", loss=loss).scores["gradient"].shape
    (2,)

    It measures without dropout: torch models are in eval mode; NumPy layers, if there is a loss, are in training mode
    without dropout.  Parameters, gradients and modes are restored afterwards.

    Parameters
    ----------
    model : layer or model
        A MultiHeadAttention (mha_c, mha_c.torch, d2l) or variants.MultiHeadedSelfAttention; a torch model that contains
        such modules; for NumPy any object, dict or list that contains such layers.
    data : batch, or iterable of batches
        One batch (a tuple, a dict or an array), or a list or other iterable of batches.
    method : str or list of str
        One of METHODS, or several of them; "all" means all methods that `data` and `loss` allow.

        "ablation": how much the mean loss grows if the head's output is replaced by 0.  Without a loss: how much the
        output changes, norm(without - with) / norm(with).
        "gradient": the mean over the examples of |d loss / d gate|, where the gate is a factor 1 on the head's output.
        It needs a loss, and one backward pass, while ablation needs a forward pass for each head.
        "entropy": the entropy of the head's weights in bits, mean over all queries (0: each query looks at one key).
        "confidence": the largest weight of a query, mean over all queries.
        Entropy and confidence use the attention weights after each batch: those of the last call of each layer.
    loss : function, optional
        The call loss(model, batch) returns a number (torch: a tensor).  For "gradient" in NumPy it must also call
        `backward` of the layers.  Without a loss, model(*batch) is called.
    per_example : bool
        For "gradient".  True: one gradient for each example, as the definition asks (opposite signs must not cancel).
        False: each batch counts as one example, which is faster.
    joint : bool
        For "ablation".  True: also measure every pair of heads, in `Importance.joint`: each of two heads may be
        prunable, but not both.  n heads take n (n - 1) / 2 more forward passes.

    Returns
    -------
    Importance
        One array of scores per method; it prints as a table.

    Raises
    ------
    ValueError
        If a method needs a loss and none is given, if a layer's sizes are not known yet, or if `data` holds no batch.
    TypeError
        If the model has no such layers.

    Notes
    -----
    Source: Michel, Levy and Neubig 2019, "Are sixteen heads really better than one?" (ablation, gradient); Voita et
    al. 2019, "Analyzing multi-head self-attention" (confidence).
    """
    methods = _methods(method, loss)
    if scalars.flag(joint, "joint") and "ablation" not in methods:
        raise ValueError("joint=True needs the method 'ablation'")
    layers = _layers_with_heads.find(model, "importance")
    if not np.iterable(data):
        raise TypeError(f"data must be a batch (tuple, dict or array) or an iterable over batches, got {data!r:.100}")
    batches = [data] if isinstance(data, (tuple, Mapping)) or hasattr(data, "shape") else list(data)
    if not batches:
        raise ValueError("data must hold at least one batch")
    scores: dict[str, Array] = {}
    with ExitStack() as stack:
        for part in (*layers.values(), *_layers_with_heads.without_heads(model, layers)):
            stack.enter_context(part.measured(loss is not None))
        stack.enter_context(_layers_with_heads.in_eval_mode(model))
        baseline = None if loss is None else _mean_loss(model, batches, loss)
        lost = _ablation(model, layers, batches, loss, baseline, joint) if "ablation" in methods else None
        if lost is not None:
            scores["ablation"] = lost.diagonal()
        if "gradient" in methods and loss is not None:
            parts = [part for batch in batches for part in (_examples(batch) if per_example else [batch])]
            scores["gradient"] = _gradient(model, layers, parts, loss)
        if "entropy" in methods or "confidence" in methods:
            scores.update(_looks(model, layers, batches, loss))
    names = [i if name == "" else (name, i) for name, layer in layers.items() for i in range(layer.num_heads)]
    return Importance(names, {name: scores[name] for name in methods}, baseline, lost if joint else None)


@refuses_at_the_call
def prune(model: Any, heads: Any) -> Any:
    """Remove heads from a layer, or from the layers of a model, in place, and return the layer or model.

    >>> import numpy as np, mha_c
    >>> mha = mha_c.MultiHeadAttention(8, 8, 8, 8, 4, 0.1, rng=0)
    >>> mha_c.heads.prune(mha, [0, 2]).W_q, mha.W_o
    (Linear(in_features=8, out_features=4, bias=False), Linear(in_features=4, out_features=8, bias=False))
    >>> mha(np.ones((1, 3, 8)), np.ones((1, 3, 8)), np.ones((1, 3, 8))).shape, mha.num_heads
    ((1, 3, 8), 2)

    W_q, W_k and W_v (of CausalAttention, W_qkv) lose the rows of these heads, W_o loses their columns: there are fewer
    parameters and less work, and the result keeps its shape.  Weights and outputs of the remaining heads do not change;
    the result is that of the whole layer with the outputs of the removed heads replaced by 0.  To keep the whole layer,
    copy it first with copy.deepcopy.

    Parameters
    ----------
    model : layer or model
        As in `importance`.
    heads : list or dict
        For a layer: the numbers of the heads to remove.  For a model: pairs (layer's name, number), or
        {layer's name: numbers}.  The first elements of `Importance.ranked` have this form.

    Returns
    -------
    layer or model
        The same object.

    Raises
    ------
    ValueError
        If a head does not exist, if all heads of a layer would be removed, if heads that share keys and values would
        not go together (GQAAttention), or if sizes are not known yet.
    TypeError
        If the layer is a torch.nn.MultiheadAttention, whose heads must fill embed_dim, or if parts of the model share
        parameters and would not all lose the same rows or columns.  After an error nothing has changed.

    Notes
    -----
    Pruning deletes gradients, what `backward` needs, and the last attention_weights of torch modules.  Create a new
    optimizer afterwards (torch: the parameters are new objects).  Do not prune a layer while other threads call it.
    Source: Michel, Levy and Neubig 2019.
    """
    layers = _layers_with_heads.find(model, "prune")
    removed = _chosen(heads, layers)
    kept = {name: [h for h in range(layers[name].num_heads) if h not in gone] for name, gone in removed.items()}
    for name, left in kept.items():
        if not left:
            raise ValueError(f"heads: all {layers[name].num_heads} heads{_of(name)} would be removed; one must stay")
        layers[name].check_prunable(left)
    _layers_with_heads.check_shared(model, {layers[name]: left for name, left in kept.items()})
    cut: dict[int, Any] = {}
    for name, left in kept.items():
        layers[name].keep_heads(left, cut)
    return model


# --- The measures ---------------------------------------------------------------------------------


def _ablation(
    model: Any, layers: dict[str, LayerWithHeads], batches: list[Any], loss: Optional[Loss], baseline: Optional[float],
    joint: bool,
) -> Array:  # fmt: skip
    """What is lost without heads i and j; only on the diagonal, without head i, unless `joint`."""
    whole = [] if loss is not None else [_output(model, batch) for batch in batches]
    length = sum(float((out**2).sum()) for out in whole)
    heads = [(layer, head) for layer in layers.values() for head in range(layer.num_heads)]
    lost = np.zeros((len(heads), len(heads)))
    for i in range(len(heads)):
        for j in range(i, len(heads) if joint else i + 1):
            with ExitStack() as stack:
                for layer, head in {i: heads[i], j: heads[j]}.values():
                    stack.enter_context(layer.with_head_silenced(head))
                if loss is not None:
                    lost[i, j] = _mean_loss(model, batches, loss) - (baseline or 0.0)
                else:
                    distance = sum(float(((_output(model, x) - out) ** 2).sum()) for x, out in zip(batches, whole))
                    lost[i, j] = (distance / length) ** 0.5 if length else 0.0
            lost[j, i] = lost[i, j]
    return lost


def _gradient(model: Any, layers: dict[str, LayerWithHeads], parts: list[Any], loss: Loss) -> Array:
    """Gate gradients from W_o and its gradient: a factor on a head's output is a factor on its columns of W_o."""
    sums = {name: np.zeros(layer.num_heads) for name, layer in layers.items()}
    for part in parts:
        gates = _layers_with_heads.gate_gradients([*layers.values()], partial(loss, model, part))
        for total, found in zip(sums.values(), gates):
            total += np.abs(found)
    return np.concatenate(list(sums.values())) / len(parts)


def _looks(model: Any, layers: dict[str, LayerWithHeads], batches: list[Any], loss: Optional[Loss]) -> dict[str, Array]:
    """Entropy and confidence, from the attention weights after each batch."""
    sums = {name: np.zeros((3, layer.num_heads)) for name, layer in layers.items()}
    for batch in batches:
        _output(model, batch) if loss is None else _number(loss, model, batch)
        for name, layer in layers.items():
            weights = layer.attention_weights().astype(np.float64)  # (B, H, Q, K)
            logs = np.log2(weights, out=np.zeros_like(weights), where=weights > 0)
            sees = weights.any(axis=-1)  # queries without visible keys do not count
            sums[name] += [
                -(weights * logs).sum(axis=(0, 2, 3)),
                weights.max(axis=-1, initial=0).sum(axis=(0, 2)),
                sees.sum(axis=(0, 2)),
            ]
    entropy, confidence, count = np.concatenate(list(sums.values()), axis=1)
    return {"entropy": entropy / np.maximum(count, 1), "confidence": confidence / np.maximum(count, 1)}


def _mean_loss(model: Any, batches: list[Any], loss: Loss) -> float:
    return float(np.mean([_number(loss, model, batch) for batch in batches]))


def _number(loss: Loss, model: Any, batch: Any) -> float:
    with _layers_with_heads.no_gradients():
        value = to_numpy(loss(model, batch), "loss")
    if value.size != 1:
        raise ValueError(f"loss must return one number for a batch, got shape {value.shape}")
    return float(value.reshape(()))


def _output(model: Any, batch: Any) -> Array:
    with _layers_with_heads.no_gradients():
        if isinstance(batch, Mapping):
            out = model(**batch)
        else:
            out = model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
    return to_numpy(out[0] if isinstance(out, (tuple, list)) else out, "the model's output").astype(np.float64)


# --- Reading the arguments ------------------------------------------------------------------------


def _methods(method: Any, loss: Any) -> list[str]:
    if method == "all":
        return [name for name in METHODS if name != "gradient" or loss is not None]
    if not (loss is None or callable(loss)):
        raise TypeError(f"loss must be a function (model, batch) that returns the loss, got {loss!r:.100}")
    chosen = list(method) if np.iterable(method) and not isinstance(method, str) else [method]
    unknown = [name for name in chosen if name not in METHODS]
    if unknown or not chosen:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, several of them, or 'all'; got {method!r}")
    if "gradient" in chosen and loss is None:
        raise ValueError("method 'gradient' needs loss=, a function (model, batch) that returns the loss")
    return chosen


def _examples(batch: Any) -> list[Any]:
    """The examples of a batch one by one, each with a batch axis of length 1."""
    if hasattr(batch, "shape"):
        return [batch[i : i + 1] for i in range(batch.shape[0])]
    members = list(batch.values()) if isinstance(batch, Mapping) else list(batch)
    size = next((x.shape[0] for x in members if getattr(x, "shape", ())), None)
    if size is None:
        raise ValueError("data has no array with a batch axis: per_example=False takes each batch as one example")

    def part(x: Any, i: int) -> Any:
        has_axis = getattr(x, "shape", (None,))[:1] == (size,) or (isinstance(x, (list, tuple)) and len(x) == size)
        return x[i : i + 1] if has_axis else x

    examples: list[Any] = []
    for i in range(size):
        same = {id(x): part(x, i) for x in members}  # one array as queries, keys and values stays one array
        parts = [same[id(x)] for x in members]
        examples.append(dict(zip(batch, parts)) if isinstance(batch, Mapping) else tuple(parts))
    return examples


def _chosen(heads: Any, layers: dict[str, LayerWithHeads]) -> dict[str, set[int]]:
    """The heads to remove, by layer."""
    if isinstance(heads, Mapping):
        pairs = [(name, head) for name, numbers in heads.items() for head in _listed(numbers)]
    else:
        pairs = [head if isinstance(head, tuple) else ("", head) for head in _listed(heads)]
    removed: dict[str, set[int]] = {}
    for pair in pairs:
        if len(pair) != 2 or pair[0] not in [*layers]:
            known = ", ".join(map(repr, layers))
            raise ValueError(f"heads must be pairs (layer, head), with a layer among {known}, got {pair!r}")
        name, head = pair
        if isinstance(head, bool) or not isinstance(head, (int, np.integer)):
            raise TypeError(f"heads must be whole numbers, got {head!r}")
        if not 0 <= head < layers[name].num_heads:
            last = layers[name].num_heads - 1
            raise ValueError(f"heads: there is no head {head}, those{_of(name)} are 0 to {last}")
        removed.setdefault(name, set()).add(int(head))
    return removed


def _listed(heads: Any) -> list[Any]:
    if isinstance(heads, (int, np.integer)):
        return [heads]
    if not np.iterable(heads):
        raise TypeError(f"heads must be numbers, pairs (layer, head), or a dict of layers, got {heads!r:.100}")
    return list(heads)


def _of(name: str) -> str:
    return f" of {name!r}" if name else " of this layer"
