"""`view`: the interactive page of a layer's heads.  Collects the weights, packs them and describes them in words."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Optional, Union

import numpy as np

from .._arguments import scalars
from .._arguments.arrays import to_lengths
from .._arguments.calls import refuses_at_the_call
from ..errors import ShapeError
from . import labels, pack
from .page import Page
from .sources import LayerWeights, collect, on_cpu
from .words import of_scripts, said

if TYPE_CHECKING:
    from .._types import Array

MAX_BYTES = 4_000_000  # packed weights in one page
MAX_CELLS = 1 << 22  # weights of one layer and example: a browser stores them as 16 MB of floats
MAX_EXAMPLES = 64
NOTHING = 1e-6  # a weight up to this may be cut off with the padding


class _Panel(NamedTuple):
    """One layer of one example, cropped to its tokens; one screen shows it."""

    layer: int
    example: int
    weights: Array  # (heads, queries, keys)
    queries: labels.Sentence
    keys: labels.Sentence
    self_attention: bool


@refuses_at_the_call
def view(
    weights: Any,
    tokens: Any = None,
    *,
    valid_lens: Any = None,
    num_heads: Optional[int] = None,
    head_names: Optional[Sequence[str]] = None,
    layer_names: Optional[Sequence[str]] = None,
    title: Optional[str] = None,
    max_bytes: int = MAX_BYTES,
    head: Optional[int] = None,
    query: Optional[Union[int, str]] = None,
) -> Page:
    """An interactive page of attention weights: all heads side by side, one head large, lines, text; no network.

    >>> import numpy as np
    >>> from mha_c.viz import view
    >>> page = view(np.full((2, 3, 3), 1 / 3), tokens="the cat sat")
    >>> "2 heads" in page.text
    True

    Parameters
    ----------
    weights : array_like, list, layer or model
        An array (queries, keys), (heads, queries, keys), (batch, heads, queries, keys) or (layers, batch, heads,
        queries, keys): NumPy, torch or nested lists.  Or a list of arrays, one per layer or decoding step.  Or a layer
        or model, of this package or of d2l, that has been called and has `attention_weights`.
    tokens : optional
        One sentence for queries and keys, a tuple (query tokens, key tokens), or a list with one of these per example.
        A sentence is a list of strings, or a string, which is split at its blanks.  Positions after the last token
        count as padding and are left out.
    valid_lens : optional
        One number, or one per example: keys from this position on are left out.
    num_heads : int, optional
        Splits d2l's (batch * heads, queries, keys); other weights must have this many heads; layers know their own
        number.
    head_names, layer_names : list of str, optional
        Labels instead of "head 0" (heads count from 0, as in mha_c.heads) and "layer 1".
    title : str, optional
        Title instead of the layer's type.
    max_bytes : int
        Limit for packed weights: a larger page shows fewer examples, or else joins neighbouring queries and keys.
    head : int, optional
        The head that is shown large first, counted from 0.  Default: head 0.
    query : int or str, optional
        The query that is marked first: its place, or its word.  Default: that of the largest weight below 1.

    Returns
    -------
    Page
        A notebook shows it; `save` writes one file.  The weights in the page are rounded (see mha_c.viz.pack); the
        exact weights stay in the array.

    Raises
    ------
    ShapeError
        If weights or valid_lens has the wrong shape.
    TypeError
        If `weights` has no attention weights.
    ValueError
        If tokens or names do not fit the weights, or there is no such head or query.
    """
    layers = collect(weights, num_heads, layer_names)
    if title is None:
        plain = isinstance(weights, (list, tuple)) or hasattr(weights, "shape")
        title = said("Attention weights") if plain else type(weights).__name__
    title = str(title)
    examples = min(len(layer.weights) for layer in layers)
    lens = _lengths(valid_lens, examples)

    def panels(example: int) -> list[_Panel]:
        pair = labels.pair_of(tokens, example, examples)
        return [_panel(i, layer, example, pair, lens[example]) for i, layer in enumerate(layers)]

    shown = panels(0)
    encoded, notes = _encode_all(shown, panels, examples, max_bytes)
    for n_heads in {panel["h"] for panel in encoded}:
        if head_names is not None and len(head_names) != n_heads:
            raise ValueError(f"head_names has {len(head_names)} names for {n_heads} heads")
    data = {
        "title": title,
        "layers": [layer.name for layer in layers],
        "heads": None if head_names is None else [str(name) for name in head_names],
        "notes": notes,
        "panels": encoded,
        "chosen": _chosen(encoded[0], head, query),
        **of_scripts(),
    }
    return Page("view", data, _text(data, shown[0]), title, picture=lambda: _picture(shown[0]))


def _chosen(first: dict[str, Any], head: Optional[int], query: Optional[Union[int, str]]) -> dict[str, int]:
    """What the page begins with, in the words of view.js: of the first panel the head, and the row of the query."""
    found: dict[str, int] = {}
    if head is not None:
        found["head"] = scalars.whole(head, "head", least=0)
        if found["head"] >= first["h"]:
            raise ValueError(f"head must lie in 0..{first['h'] - 1}, got {head}")
    if isinstance(query, str):
        if query not in (first["qt"] or ()):
            words = f"the words are {' '.join(first['qt'])}" if first["qt"] else "give its place, or tokens"
            raise ValueError(f"no query is {query!r}: {words}")
        found["row"] = first["qt"].index(query)
    elif query is not None:
        row = scalars.whole(query, "query", least=0)
        if row >= first["queries"]:
            raise ValueError(f"query must lie in 0..{first['queries'] - 1}, or be a word, got {query}")
        found["row"] = row // first["qStep"]
    return found


def _lengths(valid_lens: Any, examples: int) -> list[int]:
    """How many keys to show of each example; 0: all."""
    if valid_lens is None:
        return [0] * examples
    lens = to_lengths(on_cpu(valid_lens))
    if lens.ndim == 2:  # one per query: show all keys that some query sees
        lens = lens.max(axis=1)
    if lens.size not in (1, examples):
        raise ShapeError(f"valid_lens has {lens.size} lengths for {examples} example(s)")
    return list(np.broadcast_to(lens.ravel(), (examples,)))


def _panel(index: int, layer: LayerWeights, example: int, pair: labels.Pair, length: int) -> _Panel:
    weights = layer.weights[example]
    pack.check(weights)
    named_self = layer.name.startswith("self")
    queries, keys = labels.fit(pair, weights.shape[1], weights.shape[2], named_self)
    if length > 0:
        weights, keys = weights[:, :, :length], None if keys is None else keys[:length]
    if queries is not None:
        weights = weights[:, : len(queries)]
    if keys is not None:
        if weights[:, :, len(keys) :].max(initial=0) > NOTHING:  # these keys are no padding
            raise ValueError(
                f"tokens has {len(keys)} tokens for {weights.shape[2]} keys, and the keys after them have weights, "
                f"too: give {weights.shape[2]}, or the valid_lens of the call"
            )
        weights = weights[:, :, : len(keys)]
    self_attention = named_self or (weights.shape[1] == weights.shape[2] and queries == keys)
    return _Panel(index, example, weights, queries, keys, self_attention)


def _encode_all(
    first: list[_Panel], panels: Callable[[int], list[_Panel]], examples: int, max_bytes: int
) -> tuple[list[dict[str, Any]], list[str]]:
    """Encode as many examples as fit; if the first does not fit, join neighbouring queries and keys in it."""
    notes: list[str] = []
    factor = 1
    while True:
        encoded = [_encode(panel, factor) for panel in first]
        size = sum(map(_size, encoded))
        largest = max(e["h"] * e["q"] * e["k"] for e in encoded)
        coarsest = all(max(e["q"], e["k"]) <= pack.POOL_ABOVE for e in encoded)
        if (size <= max_bytes and largest <= MAX_CELLS) or coarsest:
            break
        factor *= 2
    if factor > 1:
        too_large = "Too large to show in full: {n} neighbouring queries and keys are joined into one cell."
        notes.append(said(too_large, n=factor))
    count = 1
    while count < min(examples, MAX_EXAMPLES):
        more = [_encode(panel, factor) for panel in panels(count)]
        size += sum(map(_size, more))
        if size > max_bytes:
            break
        encoded += more
        count += 1
    if count < examples:
        notes.append(said("Examples 1 to {count} of {examples}.", count=count, examples=examples))
    return encoded, notes


def _size(encoded: dict[str, Any]) -> int:
    return len(encoded["w"]) + len(encoded["m"])


def _encode(panel: _Panel, factor: int) -> dict[str, Any]:
    heads, q_step, k_step = pack.pool(panel.weights, factor)
    all_heads = [*panel.weights, panel.weights.mean(axis=0)] if len(heads) > 1 else list(panel.weights)
    stats = [pack.head_stats(head, panel.keys, panel.self_attention) for head in all_heads]
    return {
        "layer": panel.layer,
        "example": panel.example,
        "h": heads.shape[0],
        "q": heads.shape[1],
        "k": heads.shape[2],
        "queries": panel.weights.shape[1],  # a row has q_step queries, a column k_step keys
        "keys": panel.weights.shape[2],
        "qStep": q_step,
        "kStep": k_step,
        "self": panel.self_attention,
        "qt": _joined(panel.queries, panel.weights.shape[1], q_step),
        "kt": _joined(panel.keys, panel.weights.shape[2], k_step),
        "stats": [[round(s.entropy, 4), round(s.confidence, 4), s.words] for s in stats],
        **pack.encode(heads),
    }


def _joined(sentence: labels.Sentence, size: int, step: int) -> labels.Sentence:
    """The labels of rows or columns, each of which may be for `step` tokens."""
    if step == 1:
        return sentence
    names = sentence or [str(i) for i in range(size)]
    blocks = [names[i : min(i + step, size)] or [str(i)] for i in range(0, size, step)]
    return [block[0] if len(block) == 1 else f"{block[0]} … {block[-1]}" for block in blocks]


def _text(data: dict[str, Any], first: _Panel) -> str:
    """The text shown where the page cannot run: one line for each head of the first example."""
    heads, num_queries, num_keys = first.weights.shape
    how_many = said("{n} heads" if heads > 1 else "{n} head", n=heads)
    about = "{title}: {heads}, {queries} queries x {keys} keys"
    lines = [said(about, title=data["title"], heads=how_many, queries=num_queries, keys=num_keys)]
    for panel in data["panels"]:
        if panel["example"]:
            break
        if len(data["layers"]) > 1:
            lines.append(data["layers"][panel["layer"]])
        names = data["heads"] or [said("head {n}", n=i) for i in range(panel["h"])]
        for name, (entropy, confidence, words) in zip([*names, said("mean")], panel["stats"]):
            numbers = {"entropy": f"{entropy:.2f}", "confidence": f"{confidence:.2f}"}
            lines.append(
                f"  {name:<8} {words:<42} " + said("entropy {entropy} bits   confidence {confidence}", **numbers)
            )
    if len(data["layers"]) == 1 and max(num_queries, num_keys) <= 12:
        axes = "mean of the heads, queries down, keys across" if heads > 1 else "queries down, keys across"
        lines += ["", said(axes)]
        lines += _table(first)
    return "\n".join(lines + data["notes"])


def _table(panel: _Panel) -> list[str]:
    mean = panel.weights.mean(axis=0)
    rows, columns = (
        [*(sentence or []), *map(str, range(len(sentence or []), size))]
        for sentence, size in zip((panel.queries, panel.keys), mean.shape)
    )
    width = max(6, *(len(name[:10]) + 1 for name in columns))
    side = max(len(name[:14]) for name in rows)
    table = [" " * (side + 2) + "".join(name[:10].rjust(width) for name in columns)]
    for name, row in zip(rows, mean):
        table.append("  " + name[:14].ljust(side) + "".join(f"{weight:.2f}".rjust(width) for weight in row))
    return table


def _picture(panel: _Panel) -> bytes:
    """A PNG of the heads, for exports that show neither HTML nor scripts."""
    from .heatmaps import draw, new_figure

    heads = panel.weights[:16]
    if max(heads.shape[1:]) > 256:
        heads = pack.pool(heads, -(-max(heads.shape[1:]) // 256))[0]
    rows, columns = -(-len(heads) // 4), min(4, len(heads))
    figure = new_figure("view", (1.9 * columns + 0.6, 1.9 * rows + 0.3), managed=False)
    draw(figure, [*heads], (rows, columns), "Keys", "Queries", [f"Head {i}" for i in range(len(heads))], "Reds")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()
