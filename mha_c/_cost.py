"""`mha_c.cost`: what a call of a layer costs, step by step: arithmetic, memory traffic, memory, and the time it took.

The counts are the usual ones of a lecture: a multiply-add is two operations, an exponential or a tanh is one, and each
array that a step reads or writes is moved once.
"""

from __future__ import annotations

import copy
import timeit
from functools import partial
from typing import Any, NamedTuple, Optional

import numpy as np

from ._arguments import scalars
from ._arguments.calls import INPUTS, refuses_at_the_call
from ._explain import explain
from ._layer.call import AttentionLayer
from ._layer.description import Description, describe
from ._layers_with_heads import n_positional
from ._recognize import THREE_LINES
from .config import OPERATIONS, SECONDS, get_num_threads, in_words
from .errors import ShapeError

__all__ = ["Cost", "Step", "cost"]

SOFTMAX = 5  # operations per score: maximum, subtract, exp, sum, divide
# Operations per feature of a score: multiply and add; add, tanh, multiply, add; subtract, multiply, add.
SCORING = {"products": 2, "sums": 4, "distances": 3}
MEASURING = 0.3  # seconds of measuring; at least one call is measured


class Step(NamedTuple):
    """One step of a call; its bytes are those that it reads and writes."""

    name: str
    flops: int
    naive_bytes: int  # scores and weights are arrays in memory
    tiled_bytes: int  # scores and weights never leave the cache


class Cost(NamedTuple):
    """The result of `cost`; it prints as a table.

    title           the layer and the sizes
    steps           one `Step` for each step of a call, in order
    naive_memory    bytes in addition to inputs, parameters and result, if all scores are stored
    tiled_memory    bytes in addition to inputs, parameters and result of a call of this package
    seconds         time of the fastest measured call; None with measure=False
    threads         how many threads a call may use
    way             for a torch module: what computes the call, and where (see `explain`)
    """

    title: str
    steps: list[Step]
    naive_memory: int
    tiled_memory: int
    seconds: Optional[float]
    threads: int
    way: str = ""

    @property
    def flops(self) -> int:
        return sum(step.flops for step in self.steps)

    @property
    def naive_bytes(self) -> int:
        return sum(step.naive_bytes for step in self.steps)

    @property
    def tiled_bytes(self) -> int:
        return sum(step.tiled_bytes for step in self.steps)

    def __repr__(self) -> str:
        rows = [*self.steps, Step("in all", self.flops, self.naive_bytes, self.tiled_bytes)]
        lines = [self.title, f"{'':<26}{'operations':>12}{'naive':>12}{'tiled':>12}"]
        lines += [
            f"{name:<26}{in_words(flops, OPERATIONS):>12}{in_words(naive):>12}{in_words(tiled):>12}"
            for name, flops, naive, tiled in rows
        ]
        naive, tiled = in_words(self.naive_memory), in_words(self.tiled_memory)
        lines.append(f"{'memory beside the result':<38}{naive:>12}{tiled:>12}")
        if self.seconds is not None:
            threads = f"{self.threads} thread{'s' * (self.threads > 1)}"
            rate = in_words(self.flops / self.seconds, OPERATIONS)
            lines.append(f"measured: {in_words(self.seconds, SECONDS)} with {threads}, {rate} operations/s")
        if self.way:
            lines.append(f"way: {self.way}")
        return "\n".join(lines)


class _MatrixProduct(NamedTuple):
    """A projection of one call."""

    name: str
    rows: int
    in_features: int
    out_features: int


class _LayerSizes(NamedTuple):
    """The sizes of one call."""

    heads: int
    rows: int  # queries of all heads and items; columns: keys of all key heads and items
    columns: int
    scores: int
    head_dim: int
    value_dim: int
    scoring: str  # one of SCORING
    inputs: list[int]  # features of the layer's inputs: queries, keys, values
    into: list[_MatrixProduct]  # projections of the inputs
    behind: list[_MatrixProduct]  # that of the heads, if there is one


@refuses_at_the_call
def cost(
    layer: Any,
    queries: Any,
    keys: Any = None,
    values: Any = None,
    *,
    batch: int = 1,
    features: Optional[int] = None,
    measure: bool = True,
) -> Cost:
    """The cost of one call of a layer in evaluation mode, without a mask, and the time such a call takes here.

    >>> import mha_c
    >>> layer = mha_c.MultiHeadAttention(num_hiddens=512, num_heads=8, dropout=0.0)
    >>> _ = mha_c.set_num_threads(1)
    >>> mha_c.cost(layer, queries=4096, measure=False)  # doctest: +ELLIPSIS
    MultiHeadAttention, 8 heads: batch 1, 4096 queries, 4096 keys, float32
                                operations       naive       tiled
    W_q queries                     2.15 G      17 MiB      17 MiB
    W_k keys                        2.15 G      17 MiB      17 MiB
    W_v values                      2.15 G      17 MiB      17 MiB
    scores                          17.2 G     528 MiB      16 MiB
    softmax                          671 M       1 GiB         0 B
    weights x values                17.2 G     528 MiB      16 MiB
    W_o heads                       2.15 G      17 MiB      17 MiB
    in all                          43.6 G     2.1 GiB     100 MiB
    memory beside the result                  1.03 GiB    3... MiB

    Parameters
    ----------
    layer : layer
        A layer of this package, or a module of mha_c.torch.
    queries, keys : int
        How many queries and keys; `keys` defaults to `queries`.  Or, with `values`, what the layer would be called
        with: cost(layer, X, X, X); only the shapes of these arrays, or tensors, are read.
    values : array_like, optional
        As said of `queries`.
    batch : int
        How many items.
    features : int, optional
        Features of the inputs, if the layer does not know them yet.  Default: num_hiddens; 64 for a
        DotProductAttention.
    measure : bool
        False: make no call and measure no time.

    Returns
    -------
    Cost
        Prints as a table of operations, bytes moved and memory, in two cases: all scores are stored (naive), or scores
        are computed in tiles, as this package does (tiled).

    Raises
    ------
    TypeError
        If `layer` or a size has the wrong type, or if a module calls its children one by one, as it does with hooks.
    ValueError
        If a size is below 1, or if the layer expects another number of features.

    Notes
    -----
    Memory includes the projected queries, keys and values and the outputs of the heads in both cases.  Naive adds all
    scores and weights; tiled adds a tile for each thread and what `attention_weights` needs when it is read later.
    """
    is_module = hasattr(type(layer), "_to_measure")
    of_numpy = isinstance(layer, AttentionLayer) or (
        hasattr(type(layer), "_explained") and not hasattr(layer, "named_modules")
    )
    if not is_module and not of_numpy:
        raise TypeError(f"layer must be an attention layer of mha_c, got {type(layer).__name__}{_instead(layer)}")
    given = _features_of_call(queries, keys, values)
    if given is not None:
        (batch, queries), keys = np.shape(queries)[:2], np.shape(queries if keys is None else keys)[1]
    n_queries = scalars.whole(queries, "queries")
    n_keys = n_queries if keys is None else scalars.whole(keys, "keys")
    n_batch = scalars.whole(batch, "batch")
    if features is not None:
        given = [scalars.whole(features, "features")]
    sizes = _sizes(describe(layer), n_batch, n_queries, n_keys, given)
    name = type(layer).__name__ + (f", {sizes.heads} heads" if sizes.heads > 1 else "")
    call, inputs, facts = (layer._to_measure if is_module else partial(_to_measure, layer))(
        [(n_batch, n, size) for n, size in zip((n_queries, n_keys, n_keys), sizes.inputs)], measure
    )
    if "scratch_bytes" not in facts:
        raise TypeError(f"cost knows calls of the core and of torch's operations; this one is {facts['why']}")
    itemsize = getattr(inputs[0], "itemsize", None) or inputs[0].element_size()  # of arrays; of tensors
    return Cost(
        title=f"{name}: batch {n_batch}, {n_queries} queries, {n_keys} keys, {facts['dtype']}",
        steps=_steps(sizes, itemsize),
        naive_memory=_naive_memory(sizes, itemsize),
        tiled_memory=facts["scratch_bytes"] + facts["kept_bytes"],
        seconds=_measured(call) if measure else None,
        threads=facts["threads"] if is_module else get_num_threads(),
        way=f"{facts['why']}, on {facts['device']}" if is_module else "",
    )


def _instead(layer: Any) -> str:
    """What to write where a layer is not one of ours."""
    if hasattr(type(layer), "_of_the_same_sizes"):
        same = layer._of_the_same_sizes()
        return f", which convert has left its own class: write mha_c.cost(mha_c.torch.{same}, ...) for the same sizes"
    return f": mha_c.torch.convert may make it one.  {THREE_LINES}" if hasattr(layer, "named_modules") else ""


# --- Sizes ----------------------------------------------------------------------------------------


def _features_of_call(queries: Any, keys: Any, values: Any) -> Optional[list[int]]:
    """The features of what a layer would be called with; None where sizes are given."""
    given = [x for x in (queries, keys, values) if x is not None]
    if not hasattr(queries, "shape") or getattr(queries, "ndim", 0) == 0:
        if values is not None:
            raise TypeError("cost takes sizes, cost(layer, 512), or the inputs of a call, cost(layer, X, X, X)")
        return None
    for x, name in zip(given, INPUTS):
        if len(np.shape(x)) != 3:
            raise ShapeError(f"{name} must have shape (B, rows, features), got {tuple(np.shape(x))}")
    return [int(np.shape(x)[2]) for x in (queries, given[min(1, len(given) - 1)], given[-1])]


def _sizes(layer: Description, batch: int, queries: int, keys: int, given: Optional[list[int]]) -> _LayerSizes:
    """The sizes of a call; the features that are given take the place of sizes that the layer does not know yet."""
    *into, out_of = layer.projections
    last = into[0] if out_of is None else out_of
    given_each = given or [64 if last is None else last.out_features]
    given_each = given_each * 3 if len(given_each) == 1 else given_each
    inputs = [n if W is None else W.in_features or n for n, W in zip(given_each, into)]
    if given is not None and not set(given).issubset(inputs):
        found, expected = (", ".join(map(str, dict.fromkeys(sizes))) for sizes in (given, inputs))
        raise ValueError(f"features={found}, but the layer expects {expected}")
    q, _, v = (n if W is None else W.out_features // W.parts for n, W in zip(inputs, into))
    rows = batch * queries, batch * keys, batch * keys
    projections = [
        _MatrixProduct(f"{W.name} {takes if W.parts == 1 else 'inputs'}", n, n_in, W.out_features)
        for W, takes, n, n_in in zip(into, INPUTS, rows, inputs)
        if W is not None and (W.parts == 1 or takes == "queries")
    ]
    heads, shared = (layer.num_heads, layer.num_kv_heads) if out_of else (1, 1)
    joined = heads * (v // shared)
    behind = [] if out_of is None else [_MatrixProduct(f"{out_of.name} heads", rows[0], joined, out_of.out_features)]
    counts = heads, heads * rows[0], shared * rows[1], heads * rows[0] * keys
    return _LayerSizes(*counts, q // heads, v // shared, layer.scoring, inputs, projections, behind)


def _steps(s: _LayerSizes, itemsize: int) -> list[Step]:
    def step(name: str, flops: int, tiled: int, naive_more: int = 0) -> Step:
        return Step(name, flops, (tiled + naive_more) * itemsize, tiled * itemsize)

    features = s.scores * s.head_dim if s.scoring == "sums" else 0  # sums and their tanh: each is written and read
    stored = 2 * s.scores if s.scoring == "distances" else 0  # they and the kernel's values are arrays here, too
    into, behind = (
        [step(name, 2 * n * i * o, n * i + i * o + n * o) for name, n, i, o in some] for some in (s.into, s.behind)
    )
    attention = [
        step("scores", SCORING[s.scoring] * s.scores * s.head_dim, (s.rows + s.columns) * s.head_dim + stored,
             s.scores + 4 * features),
        step("softmax", SOFTMAX * s.scores, stored, 2 * s.scores),
        step("weights x values", 2 * s.scores * s.value_dim, (s.rows + s.columns) * s.value_dim, s.scores),
    ]  # fmt: skip
    return [*into, *attention, *behind]


def _naive_memory(s: _LayerSizes, itemsize: int) -> int:
    """Bytes in addition to inputs, parameters and result, if every array is stored."""
    # Projected q, k and v, and the heads' outputs that W_o reads.
    projected = sum(each.rows * each.out_features for each in s.into)
    context = s.rows * s.value_dim if s.behind else 0
    # Scores and weights; or sums and their tanh; or distances, their kernels and weights.
    held = {"products": 2, "sums": 2 * max(1, s.head_dim), "distances": 3}[s.scoring] * s.scores
    return (projected + context + held) * itemsize


def _to_measure(layer: Any, sizes: Any, drawn: bool) -> tuple[Any, Any, dict[str, Any]]:
    """(a function that calls a copy of the layer, the inputs of the call, its facts)."""
    rng, layer = np.random.default_rng(0), copy.deepcopy(layer).eval()  # the user's layer must not change
    sizes = sizes[: n_positional(type(layer).__call__)]
    inputs = [np.empty(size, getattr(layer, "dtype", np.float64)) for size in sizes]
    for x in inputs if drawn else ():
        x[...] = rng.standard_normal(x.shape, dtype=np.float32)
    return partial(layer, *inputs), inputs, explain(layer, *inputs).as_dict()


def _measured(call: Any) -> float:
    timer = timeit.Timer(call)
    first = timer.timeit(1)  # packs the weights
    return min([first, *timer.repeat(min(1000, int(MEASURING / first)), 1)])
