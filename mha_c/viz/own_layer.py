"""The page of `mha_c playground` with a reader's own layer inside: its chapter "Many heads" shows that layer."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Optional, Union

import numpy as np

from .._arguments import scalars
from .._arguments.calls import refuses_at_the_call
from .._layer.description import BOOK_NAMES, describe
from ..errors import ShapeError
from . import labels
from .page import Page, as_javascript, frame
from .sources import collect, on_cpu, to_numpy
from .whole_page import whole_page

LARGEST, MOST_FEATURES = 64, 256  # rows that can be looked at; numbers that a page should carry
ELEMENT = re.compile(r'(?=<div class="mhac" data-mhac="playground">)')


class Playground(Page):
    """What `playground` returns: the last expression of a notebook cell shows it, `save` writes one file.

    Not meant to be constructed directly.
    """

    def __init__(self, template: str, own: dict[str, Any], text: str) -> None:
        super().__init__("playground", own, text, "Attention playground")
        self.template = template

    def html(self) -> str:
        # JSON is no script: the page's policy, which allows one script by its hash, stays as it is.
        data = f'<script type="application/json" data-mhac-own>{as_javascript(self.data)}</script>\n'
        return ELEMENT.sub(lambda _: data, self.template, count=1)

    def blob(self, number: int) -> str:
        # A frame of its own: the page has an address, a history and keys, which are not the notebook's.
        return frame(self.html(), self.title)

    def _mime_(self) -> tuple[str, str]:
        return "text/html", self._repr_html_()


@refuses_at_the_call
def playground(
    source: Any,
    tokens: Any = None,
    *,
    inputs: Any = None,
    valid_lens: Any = None,
    example: int = 0,
    page: Optional[Union[str, Path]] = None,
) -> Playground:
    """The page that computes attention in a browser, opened at a layer of your own.  See `Viewable.playground`.

    >>> from mha_c.viz import playground
    >>> playground([[0.9, 0.1], [0.2, 0.8]], "good morning").save("own.html")  # doctest: +SKIP

    Parameters
    ----------
    source : layer, model or array_like
        As for `mha_c.viz.view`: of several layers the first is shown.
    tokens : optional
        The words of queries and keys: see `mha_c.viz.view`.
    inputs : optional
        What the layer is called with: an array for self-attention, or (queries, keys, values), each (rows, features) or
        with a batch axis in front.  With inputs the page computes the layer itself, from its parameters.
    valid_lens : optional
        The length of the example, with `inputs`.
    example : int
        Which item of the batch is shown.
    page : str or Path, optional
        Another file of the page, such as one that `make playground` has made.  Default: the package's own page.

    Returns
    -------
    Playground
        `.save("lecture.html")` writes one file that needs no network; the last line of a notebook cell shows it.

    Raises
    ------
    FileNotFoundError
        If `page` names no file.
    ShapeError, TypeError, ValueError
        If inputs or tokens do not fit, or are too large to be looked at.
    """
    if inputs is None:
        weights = collect(source)[0].weights
        own = _own_weights(weights, scalars.whole(example, "example", least=0))
        words = labels.pair_of(tokens, example, len(weights))
        queries, keys = np.shape(own["weights"])[1:]
    else:
        own = _own_layer(source, inputs, valid_lens, example)
        words = labels.pair_of(tokens, 0, 1)
        queries, keys = len(own["queries"]), len(own["keys"])
    if max(queries, keys) > LARGEST:
        raise ValueError(f"{queries} queries and {keys} keys: at most {LARGEST} of each can be looked at; give fewer")
    query_words, key_words = labels.fit(words, queries, keys)
    own["qt"] = _padded(query_words, queries)
    own["kt"] = _padded(key_words, keys)
    text = f"Attention playground: {own['heads']} head(s), {queries} queries x {keys} keys of your own layer"
    return Playground(_template(page), own, text)


def _template(page: Optional[Union[str, Path]]) -> str:
    text = whole_page() if page is None else Path(page).read_text(encoding="utf-8")
    if not ELEMENT.search(text):
        raise ValueError(f"{page} is not the page that `mha_c playground` writes")
    return text


def _padded(words: labels.Sentence, size: int) -> list[str]:
    if words is None:
        return [str(i) for i in range(size)]
    return [*words, *["<pad>"] * (size - len(words))]


def _own_weights(weights: Any, example: int) -> dict[str, Any]:
    if example >= len(weights):
        raise ValueError(f"example must lie in 0..{len(weights) - 1}, got {example}")
    heads = weights[example]
    return {"heads": len(heads), "weights": _numbers(heads), "queries": None, "W": None, "lens": None}


def _own_layer(source: Any, inputs: Any, valid_lens: Any, example: int) -> dict[str, Any]:
    """Parameters and inputs, from which the page computes what the layer computes."""
    if not all(hasattr(source, name) for name in BOOK_NAMES):
        raise TypeError(f"inputs: {type(source).__name__} has no W_q, W_k, W_v and W_o to compute with")
    if not describe(source).is_of_the_book:
        name = type(source).__name__
        raise TypeError(f"inputs: the page computes MultiHeadAttention alone, and {name} does more; leave inputs out")
    given = inputs if isinstance(inputs, tuple) else (inputs,) * 3
    if len(given) != 3:
        raise ValueError(f"inputs: one array, or (queries, keys, values), got {len(given)}")
    arrays = [_rows(x, name, example) for x, name in zip(given, ("queries", "keys", "values"))]
    layers = [getattr(source, name) for name in BOOK_NAMES]
    matrices = [to_numpy(on_cpu(layer.weight), name) for layer, name in zip(layers, BOOK_NAMES)]
    for array, matrix, name in zip(arrays, matrices, ("queries", "keys", "values")):
        if array.shape[1] != matrix.shape[1]:
            raise ShapeError(f"inputs: {name} have {array.shape[1]} features, the layer takes {matrix.shape[1]}")
    if max(max(matrix.shape) for matrix in matrices) > MOST_FEATURES:
        raise ValueError(f"a layer of more than {MOST_FEATURES} features does not fit a page; leave inputs out")
    biases = [None if layer.bias is None else _numbers(to_numpy(on_cpu(layer.bias), "bias")) for layer in layers]
    rows = len(arrays[0])
    lens = None if valid_lens is None else np.broadcast_to(_length(valid_lens, example), (rows,)).astype(int).tolist()
    return {
        "heads": int(source.num_heads),
        **{name: _numbers(array) for name, array in zip(("queries", "keys", "values"), arrays)},
        "W": [_numbers(matrix) for matrix in matrices],
        "bias": biases if biases[0] is not None else None,
        "lens": lens,
    }


def _rows(x: Any, name: str, example: int) -> Any:
    array = to_numpy(x, name)
    if array.ndim == 3 and example < len(array):
        array = array[example]
    if array.ndim != 2:
        raise ShapeError(
            f"inputs: {name} must be (rows, features), or have a batch of more than {example} in front, "
            f"got {np.shape(x)}"
        )
    return array


def _length(valid_lens: Any, example: int) -> Any:
    lens = np.ceil(to_numpy(valid_lens, "valid_lens"))
    return lens[example] if lens.ndim else lens


def _numbers(array: Any) -> Any:
    """Lists of float32, each as the shortest number that is read back as it."""
    array = np.asarray(array, np.float32)
    return np.array([float(str(x)) for x in array.ravel()]).reshape(array.shape).tolist()
