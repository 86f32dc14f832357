"""The masks of a call by the core: lengths, a keep_mask and a bias, made of what a CoreCall's masks were read from."""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch import Tensor

from .._reading.graph import Value
from .._reading.masks import Mask
from .._reading.sizes import Axis, axes_of, evaluated, formula_of
from .arranging import arrangement
from .layer import CoreCall, short
from .left import Left, LeftThisTime
from .replaying import Replay
from .rows import some_row_is_empty

MOST_BANDS = 8


class CallMasks:
    """How the masks of a CoreCall are made of the tensors of a call.

    names   of the inputs, in the order of a call's tensors
    query   the place of the queries among them
    axes    of a mask as the core takes it: "bqk" or "bhqk"

    Left where the core has no such mask.
    """

    def __init__(self, layer: CoreCall, names: tuple[str, ...], query: int, axes: str) -> None:
        self.layer, self.names, self.query, self.axes = layer, names, query, axes
        self.distances = [mask for mask in layer.masks if mask.value is None]
        self.has_band = bool(self.distances) or layer.window is not None
        self.bands: dict[Any, Tensor] = {}
        self.makers = [(_word_of(mask), self._maker(mask)) for mask in layer.masks if mask.value is not None]

    def of(self, tensors: Any, inputs: Any) -> tuple[Any, Any, Any]:
        """(lengths, keep_mask, bias) of a call; `inputs` are its queries and keys in the core's order of axes."""
        lens = keep = bias = None
        if self.has_band:
            keep = self._band(inputs[0].shape[-2], inputs[1].shape[-2], tensors)
        for word, make in self.makers:
            value = make(tensors)
            if word == "lengths":
                lens = value.clamp(min=0)  # the core would warn of others
            elif word == "bias":
                bias = value if bias is None else bias + value
            else:
                keep = value if keep is None else keep & value
        layer = self.layer
        if layer.some_empty and some_row_is_empty(len(self.axes), (lens, keep, bias), layer.causal, inputs):
            raise LeftThisTime("a query sees no key, and hidden scores are not all equal", layer.line)
        return lens, keep, bias

    def sizes(self, tensors: Any) -> dict[Axis, int]:
        """The sizes of a call's inputs."""
        pairs = zip(self.names, tensors)
        return {Axis(name, i): n for name, x in pairs if name for i, n in enumerate(x.shape)}

    def number(self, n: Any, tensors: Any) -> Any:
        """A number of the reading as it is in a call."""
        formula = formula_of(n)
        return evaluated(formula, self.sizes(tensors)) if [*axes_of(formula)] else n

    def _band(self, n_queries: int, n_keys: int, tensors: Any) -> Tensor:
        """Which distances from query to key are seen, (Q, K); those of the last sizes are kept."""
        window, bands = self.layer.window, self.distances
        numbers = tuple(float(self.number(n, tensors)) for n in (window, *(m.offset for m in bands)) if n is not None)
        found = self.bands.get((n_queries, n_keys, numbers))
        if found is None:
            far = torch.arange(n_keys) - torch.arange(n_queries)[:, None]
            found = torch.ones(n_queries, n_keys, dtype=torch.bool)
            if window is not None:
                found &= far >= int(self.number(window, tensors))
            for mask in bands:
                offset = int(self.number(mask.offset, tensors)) if mask.offset is not None else 0
                if mask.sense == "causal":
                    found &= far <= offset
                elif mask.sense == "window":
                    found &= far >= offset
                else:
                    for first, last in mask.spans:
                        found &= ~((far >= first) & (far <= last))
            if len(self.bands) > MOST_BANDS:
                self.bands.clear()
            self.bands[n_queries, n_keys, numbers] = found
        return found

    # --- Masks of tensors: what no call changes is done once -----------------------------------------------------

    def _maker(self, mask: Mask) -> Callable[[Any], Tensor]:
        """What makes lengths, a mask that is True where a key is kept, or a bias of the tensors of a call."""
        if mask.sense == "lengths":
            return self._lengths(mask)
        made, arrange = self._made(mask.value), self._arrange(mask)
        keeps, hides, factor, query = mask.sense == "keep", mask.sense == "hide", mask.factor, self.query

        def make(tensors: Any) -> Tensor:
            value = made(tensors)
            if keeps or hides:
                value = value if value.dtype is torch.bool else value != 0
                value = ~value if hides else value
            else:  # torch adds numbers of another type as those of the scores
                value = value.to(tensors[query].dtype)
                value = value * factor if factor != 1 else value
            return value if arrange is None else arrange(value)

        return make

    def _made(self, value: Any) -> Callable[[Any], Tensor]:
        """What gives a value of the graph in a call."""
        if value.node is None and value.kind == "input":
            place = self.names.index(value.name)
            return lambda tensors: tensors[place]
        return lambda tensors: Replay(dict(zip(self.names, tensors)), self.sizes(tensors)).value(value)

    def _moved(self, value: Value, offset: int) -> Callable[[Any], Tensor]:
        """The same of numbers of keys, where a line compares with the last key, or counts from 1."""
        made = self._made(value)
        return (lambda tensors: made(tensors).long() + offset) if offset else made

    def _arrange(self, mask: Mask) -> Any:
        """What arranges the axes of a mask; None where they are as the core takes them."""
        have = short(mask.axes, "?")
        if have in ("qk", "1k", "q1"):
            return None
        if any(letter not in f"{self.axes}1" for letter in have) or any(have.count(x) > 1 for x in self.axes):
            raise Left("the axes of its mask could not be told", mask.line)
        return arrangement(have, "".join(letter if letter in have else "1" for letter in self.axes))

    def _lengths(self, mask: Mask) -> Callable[[Any], Tensor]:
        """What makes lengths, (B,) or (B, Q)."""
        assert mask.value is not None
        origin, flat = _spread_from(mask.value), [letter for letters in mask.axes for letter in letters]
        in_order = flat[:1] == ["b"] and (len(origin.shape) == 1 or flat[-1] == "q")
        if origin.kind == "input" and len(origin.shape) in (1, 2) and in_order:
            return self._moved(origin, mask.offset)  # an item's, or an item's queries', lengths for each head
        made = self._moved(mask.value, mask.offset)
        if flat == ["b"]:
            return lambda tensors: made(tensors).reshape(-1)
        if flat != ["b", "q"]:
            raise Left("its lengths are no (items,) and no (items, queries)", mask.line)
        letters, query = self.layer.inputs[0].letters, self.query
        if "b" not in letters:
            return lambda tensors: made(tensors).reshape(1, -1)
        items = letters.index("b")
        return lambda tensors: made(tensors).reshape(tensors[query].shape[items], -1)


def _word_of(mask: Mask) -> str:
    """Which of `CallMasks.of` it is."""
    if mask.sense == "lengths":
        return "lengths"
    return "bias" if mask.sense == "add" else "keep"


_SPREADING = frozenset(("repeat_interleave", "reshape", "view", "unsqueeze", "__getitem__", "expand", "flatten"))


def _spread_from(value: Value) -> Value:
    """What was repeated, item by item, along the axes of the scores."""
    while value.node is not None and value.node.name in _SPREADING and len(value.node.values()) == 1:
        index = value.node.args[1:] if value.node.name == "__getitem__" else ()
        index = index[0] if index and isinstance(index[0], tuple) else index
        if any(each is not None and each is not Ellipsis and each != slice(None) for each in index):
            break
        value = value.node.values()[0]
    return value
