"""What a call of a layer keeps: its attention weights, or what is needed to compute them when they are read.

Each way of `ways.py` keeps a tuple (saved, dtype, source), which costs a call almost nothing; `attention_weights` are
read from `Kept(*tuple)`.

saved   the core         the argument of `kept_weights.saved_weights`, with arrays; its first element is a name, too
        an operator      ("tensor", weights) or ("operator", ...), the same with tensors
        mathematics      ("tensor", weights); also in a copy of a layer whose weights had been read
        torch's kernels  ("scored", a `by_torch.Scored`)
dtype   type of the weights that are shown
source  parts of an `autograd.WeightsSource`: what determines the weights; None where no gradient was recorded
"""

from __future__ import annotations

from typing import Any, Optional

import numpy as np
import torch
from torch import Tensor

from ..._layer.kept_weights import saved_weights
from .._call import ops
from .._call.autograd import WeightsSource
from .._call.by_torch import Scored
from .._private import in_transform, of_all_examples, unflatten, written_down
from .._tensors import elsewhere, exporting, is_compiling, optional_tensor, traced
from .lazy import Recipe, split_heads


class Kept:
    """The weights of one call: each reading gives the same tensor, including changes in place."""

    __slots__ = ("_copied", "_dtype", "_numbers", "_saved", "_source", "_tensors")

    def __init__(self, saved: Any, dtype: torch.dtype, parts: Any = None) -> None:
        self._saved, self._dtype = saved, dtype
        self._source: Any = None if parts is None else WeightsSource(*parts)
        if saved[0] == "scored":
            self._source = saved[1]
        self._numbers: Optional[Recipe] = None  # set at the first reading
        self._tensors: dict[Optional[int], Tensor] = {}

    def passes(self) -> bool:
        """Whether no tensor can be kept: in compilers, exporters and transforms, and with fake tensors."""
        if in_transform() or is_compiling() or exporting():
            return True
        return self._saved[0] == "operator" and traced(*self._saved[1:3])

    def weights(self, heads: Optional[int]) -> Tensor:
        """The weights as (B, heads, Q, K), or (B*H, Q, K) if heads is None, both on the same memory."""
        found = self._tensors.get(heads)
        if found is None:
            _check_numbers(self._one())
            if self.passes():
                return split_heads(self._now().to(self._dtype), heads)
            with torch.inference_mode(False), torch.enable_grad():  # the modes of the call, not of the reader
                found = self._tensors[heads] = self._shown(heads)
        return found

    def detached(self) -> Any:
        """What the call has kept, in a form to copy and pickle: tensors, which torch.load accepts from any file.

        None if an exporter recorded the call.  The tensors live as long as this object: a process that is started gets
        their memory after pickling is over.
        """
        self._copied = self._detached()
        return self._copied

    def _detached(self) -> Any:
        if written_down(self._one()):
            return None
        saved: Any = self._saved if self._numbers is None else self._numbers.kept()
        if saved[0] == "scored":
            saved = "tensor", Recipe(saved, self._dtype).tensor()
        if saved[0] == "tensor":
            saved = "tensor", of_all_examples(saved[1]).detach()
        return tuple(optional_tensor(x) if isinstance(x, np.ndarray) else x for x in saved), self._dtype, None

    def operands(self) -> Any:
        """(q (B, H, Q, D), k, w_v, lengths, empty_rows) as tensors that nobody changes; None if weights were kept."""
        kind, *kept = self._saved
        if kind == "scored":
            scored = kept[0]
            return scored.q.detach(), scored.k.detach(), None, scored.valid_lens, scored.empty_rows
        if kind in ("tensor", "assigned") or self.passes():
            return None
        weights, q, k, w_v, _, _, lens, num_heads, empty_rows = kept if kind != "operator" else (None, *kept)
        if weights is not None:
            return None
        q, k, w_v, lens = (torch.from_numpy(x) if isinstance(x, np.ndarray) else x for x in (q, k, w_v, lens))
        q, k = (unflatten(x, 2, (num_heads, -1)).transpose(1, 2) for x in (q, k))
        return q, k, w_v, lens, empty_rows

    def _one(self) -> Any:
        """One of the tensors."""
        one = self._saved[1]
        return one.q if isinstance(one, Scored) else one

    def _wanted(self) -> Any:
        """The source of the weights, if one of its tensors requires a gradient."""
        return None if self._source is None or not self._source.needs_grad() else self._source

    def _now(self) -> Tensor:
        """The weights (B, H, Q, K), not kept; computed by operations that compilers and transforms can follow."""
        (kind, *parts), source = self._saved, self._wanted()
        if kind == "scored" or (kind == "operator" and source is not None and torch.is_grad_enabled()):
            found: Tensor = self._source.weights(*self._source.arguments())
        elif kind == "operator":
            found = torch.ops.mha_c.weights(*parts)
        elif kind == "tensor":
            found = parts[0]
        else:
            found = Recipe(self._saved, self._dtype).tensor()
        return found

    def _shown(self, heads: Optional[int]) -> Tensor:
        if self._numbers is None:
            kind, *parts = saved = self._saved
            if kind == "tensor":
                saved = kind, of_all_examples(parts[0]).contiguous()
            elif kind == "operator":
                saved = ops.recompute(*parts)
            self._numbers = Recipe(saved, self._dtype)
        return self._numbers.shown(heads, self._wanted())


class Assigned:
    """The value that a program has assigned to a layer's attention_weights; it lasts until the layer's next call."""

    __slots__ = ("by_head", "value")

    def __init__(self, value: Any) -> None:
        self.value, self.by_head = value, None

    def weights(self, heads: Optional[int]) -> Any:
        """The value itself; with `heads`, a (B*H, Q, K) gets an axis for them, the same tensor at each reading."""
        _check_numbers(self.value)
        if heads is None or not isinstance(self.value, Tensor) or self.value.dim() != 3:
            return self.value
        if self.by_head is None:
            with torch.enable_grad():
                self.by_head = unflatten(self.value, 0, (-1, heads))
        return self.by_head

    def detached(self) -> Any:
        """In the form of a call's tuple: (what is kept, type, source)."""
        if written_down(self.value):
            return None
        return ("assigned", self.value.detach() if isinstance(self.value, Tensor) else self.value), None, None


class LoadedElsewhere:
    """The weights of the last call of a module that torch.load has put on another device than the CPU.

    They are computed, and put on that device, when they are read: another kind of CPU cannot compute them, and the
    module must load there too.
    """

    __slots__ = ("_dtype", "_saved", "_tensors")

    def __init__(self, saved: Any, dtype: torch.dtype) -> None:
        self._saved, self._dtype = saved, dtype
        self._tensors: dict[Optional[int], Tensor] = {}

    def weights(self, heads: Optional[int]) -> Tensor:
        found = self._tensors.get(heads)
        if found is None:
            with torch.inference_mode(False), torch.no_grad():
                found = self._tensors[heads] = split_heads(self._all(), heads)
        return found

    def detached(self) -> Any:
        return self._saved, self._dtype, None

    def _all(self) -> Tensor:
        kind, *parts = self._saved
        by_operator = kind == "operator"
        k, row_max = (parts[1], parts[3]) if by_operator else (parts[2], parts[4])
        if k.is_meta:
            return torch.empty((*row_max.shape, k.shape[1]), dtype=self._dtype, device="meta")
        parts = [x.cpu() if isinstance(x, Tensor) else x for x in parts]
        saved = ops.recompute(*parts) if by_operator else _as_arrays((kind, *parts))
        weights: Tensor = saved_weights(saved, torch.from_numpy)
        return weights.to(k.device, self._dtype)


def _as_arrays(saved: Any) -> Any:
    return tuple(x.numpy() if isinstance(x, Tensor) else x for x in saved)


def _check_numbers(tensor: Any) -> None:
    if written_down(tensor) and not exporting():
        raise AttributeError("the last call was written down by an exporter: its attention_weights have no numbers")


def last_call(module: Any) -> Any:
    """The Kept or Assigned of a module's `_last`, stored in its place unless it cannot stay; None before any call."""
    last = module._last
    if type(last) is tuple:
        last = Kept(*last)
        if not last.passes():
            module.__dict__["_last"] = last
    return last


def detached(module: Any) -> Any:
    """The part of a module's `_last`, after a call, a reading or an assignment, that can be copied and pickled."""
    last = last_call(module)
    return None if last is None else last.detached()


def restored(last: Any) -> Any:
    """The reverse of `detached`: arrays, as the core keeps them; tensors after an operator or torch's operations."""
    if last is None or last[0][0] == "tensor":
        return last
    if last[0][0] == "assigned":
        return Assigned(last[0][1])
    kept, dtype, _ = last
    if any(elsewhere(x) for x in kept):
        few_keys = kept[0] != "operator" and kept[1] is not None  # then the core has kept the weights themselves
        return (("tensor", kept[1]), dtype, None) if few_keys else LoadedElsewhere(kept, dtype)
    return last if kept[0] == "operator" else (_as_arrays(kept), dtype, None)
