"""A small layer that was trained: its pictures mean something.  tools/trained_layer.py made its numbers."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..._arguments.calls import refuses_at_the_call
from ...layers import MultiHeadAttention

if TYPE_CHECKING:
    from ..._types import Array

FILE = Path(__file__).with_name("trained_layer.json")
SENTENCE = "the cat did not eat the soup because it was tired"


@refuses_at_the_call
def trained(sentence: str = SENTENCE) -> tuple[MultiHeadAttention, Array, list[str]]:
    """A trained layer, the inputs for a sentence, and its words: pictures of it mean something.

    It is a self-attention of 4 heads and 32 features.  Each head has learned to find one word: head 0 the word before,
    head 1 the noun of "the", head 2 who does what the verb says, head 3 what "it" means.  A word without such a word
    finds itself.  Change the last word to "cold", and "it" looks at the soup.

    Parameters
    ----------
    sentence : str
        "the cat did not eat the soup because it was tired", or with other words of its vocabulary; at most 11.

    Returns
    -------
    layer : MultiHeadAttention
        In evaluation mode.
    X : ndarray (1, words, 32)
        Its inputs: queries, keys and values are the same.
    tokens : list of str
        The words.

    Raises
    ------
    ValueError
        If the layer has not learned a word; the message lists those that it knows.

    Examples
    --------
    >>> from mha_c import teach
    >>> layer, X, tokens = teach.trained()
    >>> out = layer(X, X, X)
    >>> it, cat = tokens.index("it"), tokens.index("cat")
    >>> round(float(layer.attention_weights[0, 3, it, cat]), 1)
    1.0
    """
    written = json.loads(FILE.read_text(encoding="utf-8"))
    step, packed = written["step"], written["weights"].items()
    arrays = {name: _numbers(rows, columns, bits, step) for name, (rows, columns, bits) in packed}
    words = written["words"]
    tokens = sentence.split()
    unknown = [word for word in tokens if word not in words]
    if unknown or not 0 < len(tokens) <= len(arrays["place"]):
        wrong = f"the words {', '.join(unknown)}" if unknown else f"{len(tokens)} words"
        known = " ".join(filter(None, words))
        raise ValueError(f"sentence has {wrong}; it takes 1 to {len(arrays['place'])} of these: {known}")
    ids = np.array([words.index(word) for word in tokens])
    ahead = np.append(ids, [0, 0])[2:]  # the word two to the right; number 0 is no word
    inputs = arrays["word"][ids] + arrays["place"][: len(ids)] + arrays["later"][ahead]
    layer = MultiHeadAttention(num_hiddens=inputs.shape[1], num_heads=len(written["heads"]), dropout=0)
    layer.load_state_dict({f"{name}.weight": arrays[name] for name in ("W_q", "W_k", "W_v", "W_o")})
    return layer, inputs[None], tokens


def _numbers(rows: int, columns: int, packed: Any, step: int) -> Array:
    numbers = np.frombuffer(base64.b64decode(packed), np.int8).reshape(rows, columns)
    return (numbers / step).astype(np.float32)
