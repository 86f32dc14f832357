"""What a module remembers of the last call with one query: for decoders that pass all earlier steps in each call.

The book's TransformerDecoder calls its layers, at each new token, with one query and the inputs of all steps so far
(and all outputs of the encoder).  If the first rows of a call, and W_k and W_v, are equal to those of the last call,
number by number, this module reuses their projections and projects only the further rows: the same bits with less
work.  `_module.py` uses it; code that has a cache uses `decoding.py`.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Optional

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function

from ..._core import layer_step
from ..._decoder.caches import most, same_numbers
from ...errors import ShapeError
from .._call import mathematics
from .._call.autograd import LayerParameters, differentiable_layer, versions_of
from .._call.ways import any_needs_grad, call_core
from .._tensors import array, lengths
from .decoding import KeyValueCache, kept_weights, known_weights

if TYPE_CHECKING:
    from ..._types import Array
    from ..frozen import Packed

ROOM = 32  # spare rows, once a second call has brought more rows
LEAST = 1 << 13  # from so many numbers in keys, comparing keys and weights costs less than projecting


class RepeatedKeys(KeyValueCache):
    """A cache that finds the new rows of a call itself: it keeps the input rows as well as their projections."""

    __slots__ = ("_inputs", "first", "lock")

    def __init__(self, first: bytes, batch: int) -> None:
        super().__init__(batch, 1)
        self.first = first  # the first row of the keys: a cheap test whether a call continues the last one
        self.lock = threading.Lock()  # for the rows: a call of another thread at the same time does not use them
        self._inputs: list[Array] = []  # keys and values (once if they are the same), (B, max_len, features)

    def attend(
        self, queries: Tensor, k: Array, v: Array, options: Any, parameters: LayerParameters, packed: Optional[Packed]
    ) -> tuple[Tensor, Any]:
        """The result of `call_core`, without projecting known rows again; new rows are known from now on."""
        inputs, n_rows = [k] if v is k else [k, v], k.shape[1]
        known = min(most(self._steps), n_rows)
        weights = known_weights(parameters, packed)
        if not self._knows(known, inputs, weights):
            self.clear()
            known, self._batch = 0, k.shape[0]
        self._make_room(known, n_rows, inputs)
        # Not needed once there are rows.
        widths: Any = (0, 0) if known else [W.shape[0] for W in parameters[1:3] if W is not None]
        room = self._room(widths, k.dtype)
        new = slice(known, n_rows)
        out = call_core(layer_step, (
            queries, k[:, new], v[:, new], options[0], parameters if packed is None else packed.ready, None,
            *options[1:3], 0.0, 0, *room, known, n_rows - known, n_rows,
        ))  # fmt: skip
        for kept, x in zip(self._inputs, inputs):
            kept[:, new] = x[:, new]
        self._keep(kept_weights(self._weights, weights, packed), n_rows)
        return out

    def _knows(self, n_rows: int, inputs: list[Array], weights: Any) -> bool:
        """Whether the first rows of the call, and its weights, are equal to those that are kept."""
        kept, now = self._weights, weights
        if n_rows == 0 or kept is None or len(inputs) != len(self._inputs):
            return False
        for old, x in zip(self._inputs, inputs):
            kept, now = (old[:, :n_rows], *kept), (x[:, :n_rows], *now)
        return same_numbers(kept, now)

    def _make_room(self, known: int, n_rows: int, inputs: list[Array]) -> None:
        """Make room for n_rows rows in each array, and few more; known rows are kept."""
        if known and n_rows <= self._max_len <= n_rows + ROOM:
            return
        self._max_len = n_rows + ROOM if known else n_rows
        old = self._inputs if known else [np.empty((*x.shape[:1], 0, x.shape[2]), x.dtype) for x in inputs]
        self._inputs = [self._resized(x, known) for x in old]
        if known:
            self._keys, self._values = self._resized(self._keys, known), self._resized(self._values, known)

    def _resized(self, old: Any, known: int) -> Array:
        room = np.empty((self._batch, self._max_len, old.shape[2]), old.dtype)
        room[:, :known] = old[:, :known]
        return room


def remembered(
    state: dict[str, Any], inputs: Any, parameters: LayerParameters, options: Any, packed: Optional[Packed]
) -> Optional[tuple[Tensor, Any, Any]]:
    """The result of `run_layer` for a call with one query and LEAST or more numbers in keys, without dropout.

    None if the call does not continue the last one.
    state   the module's __dict__, which holds the RepeatedKeys
    packed  weights packed by `frozen`, for calls that record no gradient
    """
    queries, keys, values = inputs
    try:
        k = array(keys)
        v = k if values is keys else array(values)
    except (TypeError, RuntimeError):  # no plain memory
        return None
    if k.ndim != 3 or v.ndim != 3 or not k.shape[1] or k.shape[:2] != v.shape[:2]:
        return None  # the core raises the error
    learns = torch.is_grad_enabled() and any_needs_grad(parameters, inputs)
    packed = None if learns else packed
    first = k[:, 0].tobytes()
    memory = state.get("_memory")
    if memory is None or memory.first != first:
        state["_memory"] = RepeatedKeys(first, k.shape[0])
        return None
    if not memory.lock.acquire(blocking=False):
        return None
    try:
        out, saved = memory.attend(queries, k, v, options, parameters, packed)
    except ShapeError:  # about queries: the whole call raises a clearer one
        return None
    finally:
        memory.lock.release()
    if not learns:
        return out, saved, None
    lens = None if options[0] is None else np.array(lengths(options[0]))
    work = out, (lens, *options[1:], 0)
    out = RememberedFunction.apply(work, *inputs, *parameters)  # refuses tensors of inference mode, like run_layer
    source = lens, options[1], options[2], queries, keys, parameters, versions_of(queries, keys, parameters)
    return out, saved, source


class RememberedFunction(Function):
    """apply((out, call), *tensors) -> out, which is computed already; the tensors are those of `LayerFunction`.

    The backward pass, which a decoder hardly ever needs, computes the call once more: nothing was kept for it.
    """

    @staticmethod
    def forward(ctx: Any, work: Any, *tensors: Any) -> Tensor:
        out, ctx.call = work
        ctx.save_for_backward(*tensors)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        def layer(queries: Tensor, keys: Tensor, values: Tensor, *parameters: Any) -> Any:
            return differentiable_layer(queries, keys, values, parameters, ctx.call)[:1]

        return None, *mathematics.gradients(layer, ctx.saved_tensors, ctx.needs_input_grad[1:], (grad_out,))
