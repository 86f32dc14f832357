"""What an attention that somebody has written takes and holds, by whatever names: `teach` and `convert` both ask here.

    arguments(mine)      {parameter of a call: the book's name for it, "mask", ..., or ""}
    weights_of(layer)    where the layer keeps W_q, W_k, W_v, W_o or W_q, W_k, w_v: to be read, written, and named

Neither torch nor teach is imported: a layer of torch is one whose parameters have names.
"""

from .advice import THREE_LINES
from .names import CONFIGS, HEADS, books_name, heads_of, parameters, root_of
from .roles import arguments, roles
from .stored import Part
from .weights import Weights, weights_of

__all__ = [
    "CONFIGS", "HEADS", "THREE_LINES", "Part", "Weights", "arguments", "books_name", "heads_of", "parameters",
    "roles", "root_of", "weights_of",
]  # fmt: skip
