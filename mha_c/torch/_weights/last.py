"""The last call of a layer, as its attention weights see it: `Last`, the value of a module's `_last`."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Optional
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from ..._layer.kept_weights import Kept, Placed, saved_weights
from .._call import formulas
from .._call.autograd import HeadsSource
from .._call.records import Attended, AttentionCall, AttentionTensors, pair
from .._call.scored import Computed, Scored
from .._private import in_transform, of_all_examples, unflatten, written_down
from .._tensors import PLAIN, elsewhere, exporting, is_compiling, optional_tensor, recorded_or_transformed
from .lazy import Recipe, with_heads


class OfCore(NamedTuple):
    """What the core has kept, as arrays on the CPU, in the place of weights."""

    kept: Kept

    @property
    def shape(self) -> tuple[int, ...]:
        kept = self.kept
        return kept.weights.shape if kept.weights is not None else (*kept.row_max.shape, kept.k.shape[1])

    @property
    def device(self) -> str:
        return "cpu"

    def is_ready(self) -> bool:
        return False

    def computed(self) -> Tensor:
        return saved_weights(self.kept, torch.from_numpy)


class OfSteps(NamedTuple):
    """What a call with a window has kept: its keys do not lie in the order of their steps."""

    placed: Placed

    @property
    def shape(self) -> tuple[int, ...]:
        sizes = [_shape_of(kept) for kept, _ in self.placed.pieces]
        return (*sizes[0][:2], sum(size[2] for size in sizes), self.placed.n_steps)

    @property
    def device(self) -> Any:
        return getattr(self.placed.pieces[0][0], "device", "cpu")

    def is_ready(self) -> bool:
        return False

    def computed(self) -> Tensor:
        ((kept, steps),) = self.placed.pieces[:1]
        if not isinstance(kept, Computed):
            return torch.from_numpy(self.placed.weights(torch.from_numpy))
        return by_steps(kept.numbers, steps, self.placed.n_steps)


def _shape_of(kept: Any) -> tuple[int, ...]:
    return OfCore(Kept(*kept)).shape if type(kept) in (tuple, Kept) else kept.shape


class Last:
    """The attention weights of one call: each reading gives the same tensor, including changes in place.

    kept    a Kept of the core, a Scored, or a Computed; with tensors of its own, in no graph but that of a compiled
            call
    dtype   type of the weights that are shown
    source  what their gradient flows back to (`autograd.Source`); None where no gradient was recorded
    """

    __slots__ = ("_copied", "_recipe", "_tensors", "dtype", "kept", "source")

    def __init__(self, kept: Any, dtype: Any, source: Any = None) -> None:
        self.kept, self.dtype, self.source = kept, dtype, source
        self._recipe: Optional[Recipe] = None  # set at the first reading
        self._tensors: Any = None

    def weights(self, heads: Optional[int]) -> Tensor:
        """The weights as (B, heads, Q, K), or (B*H, Q, K) if heads is None, both on the same memory."""
        found = self._tensors and self._tensors.get(heads)
        found = found() if type(found) is ref else found
        if found is None:
            _check_numbers(self.kept)
            if self._passes():
                return self.numbers(heads)
            found = self._as_kept(heads)
        if found is None:
            # The modes of the call, not of the reader; the first one switches gradients on, too.
            with torch.inference_mode(False) if torch.is_inference_mode_enabled() else torch.enable_grad():
                found = self.recipe().shown(heads, self.source)
            # What leads to a graph is not kept: it lives as long as somebody reads it.
            shown = ref(found) if found.requires_grad else found
            self._tensors = {**(self._tensors or {}), heads: shown}
        return found

    def _as_kept(self, heads: Optional[int]) -> Optional[Tensor]:
        """Weights that the core has kept of a call in no graph, at the first reading: in the shape that is read, by no
        operation of torch, so that the reader's modes change nothing."""
        kept = self.kept
        if not (self.source is self._recipe is None and type(kept) is tuple and kept[1] is not None):
            return None
        batch, own_heads, queries, keys = kept[1].shape
        if heads not in (None, own_heads) or torch.is_inference_mode_enabled():
            return None
        shape = (batch * own_heads, queries, keys) if heads is None else kept[1].shape
        recipe = self._recipe = Recipe(Computed(torch.from_numpy(kept[1].reshape(shape))), self.dtype)
        return recipe.tensor()

    def numbers(self, heads: Optional[int]) -> Tensor:
        """The weights as `weights` has them, but a tensor of their own that is computed now."""
        return with_heads(self._now().to(self.dtype), heads)

    def recipe(self) -> Recipe:
        if self._recipe is None:
            kept = self.kept
            if type(kept) in (tuple, Kept):
                kept = OfCore(Kept(*kept)) if kept[1] is None else Computed(torch.from_numpy(kept[1]))
            elif isinstance(kept, Computed):
                kept = Computed(of_all_examples(kept.numbers).contiguous())
            self._recipe = Recipe(kept, self.dtype)
        return self._recipe

    def _passes(self) -> bool:
        """Whether no tensor can be kept: in compilers, exporters and transforms, and with fake tensors."""
        one = self.kept[0]
        if recorded_or_transformed():
            return True
        return isinstance(one, Tensor) and type(one) not in PLAIN

    def _now(self) -> Tensor:
        """The weights (B, H, Q, K); computed by operations that compilers and transforms can follow."""
        if self.source is not None and torch.is_grad_enabled():
            arguments = self.source.arguments()
            if arguments is not None:
                found = self.source.weights(*arguments)
                if is_compiling():  # a result of the compiled program in the place of several
                    self.kept, self.source = Computed(found), None
                return found
        return self.recipe().tensor() if type(self.kept) in (tuple, Kept) else self.kept.computed()

    def scored(self) -> Optional[Scored]:
        """Queries and keys, which nobody changes; None if weights were kept."""
        kept = self.kept
        if isinstance(kept, (Scored, Computed, OfSteps)):
            return kept.detached() if isinstance(kept, Scored) else None
        return None if kept[1] is not None else _scored(Kept(*kept))

    def detached(self) -> Any:
        """In a form to copy and pickle: tensors, which torch.load accepts from any file.

        None if an exporter recorded the call.  The tensors live as long as this object: a process that is started gets
        their memory after pickling is over.
        """
        kept = self.kept if self._recipe is None else self._recipe.kept()
        if written_down(kept[0]):
            return None
        kept = kept.kept if isinstance(kept, OfCore) else kept
        if isinstance(kept, (Scored, OfSteps)):
            kept = Computed(Recipe(kept, self.dtype).tensor())
        if isinstance(kept, Computed):
            kept = (of_all_examples(kept.numbers).detach(),)
        self._copied = tuple(map(_as_tensors, kept)), self.dtype
        return self._copied


class Assigned(Last):
    """The value that a program has assigned to a layer's attention_weights; it lasts until the layer's next call."""

    __slots__ = ("_by_head",)

    def __init__(self, value: Any) -> None:
        super().__init__((value,), None)
        self._by_head: Any = None

    def weights(self, heads: Optional[int]) -> Any:
        """The value itself; with `heads`, a (B*H, Q, K) gets an axis for them, the same tensor at each reading."""
        _check_numbers(self.kept)
        (value,) = self.kept
        if heads is None or not isinstance(value, Tensor) or value.dim() != 3:
            return value
        if self._by_head is None:
            with torch.enable_grad():
                self._by_head = unflatten(value, 0, (-1, heads))
        return self._by_head

    def scored(self) -> None:
        return None

    def detached(self) -> Any:
        if written_down(self.kept[0]):
            return None
        return tuple(x.detach() if isinstance(x, Tensor) else x for x in self.kept)


def _as_tensors(x: Any) -> Any:
    """A part of what the core has kept, its arrays as tensors; options are a tuple inside."""
    if type(x) is tuple:
        return tuple(map(_as_tensors, x))
    return optional_tensor(x) if isinstance(x, np.ndarray) else x


def _as_arrays(x: Any) -> Any:
    """The reverse."""
    if type(x) is tuple:
        return tuple(map(_as_arrays, x))
    return x.numpy() if isinstance(x, Tensor) else x


def restored(state: Any) -> Optional[Last]:
    """The reverse of `detached`: what the core keeps becomes arrays again."""
    if state is None or len(state) == 1:
        return None if state is None else Assigned(*state)
    kept, dtype = state[:2]
    if kept[0] in ("operator", "tensor", "assigned"):
        return None  # so 0.1.0 kept calls that were not the core's: such a module loads as if it had not been called
    if len(kept) == 1:
        return Last(Computed(*kept), dtype)
    kept = Kept(*kept)
    if not any(elsewhere(x) for x in kept):
        return Last(Kept(*map(_as_arrays, kept)), dtype)
    if kept.weights is not None:
        return Last(Computed(kept.weights), dtype)
    return Last(_scored(kept), dtype)  # loaded on another device


def _scored(kept: Kept) -> Scored:
    """What the core has kept, as tensors on any device."""
    q, k, w_v, lens, options = map(_as_tensors, (*kept[2:5], kept.lengths, kept.options or ()))
    q, k = (formulas.split_heads(x, n) for x, n in zip((q, k), pair(kept.num_heads)))
    return Scored(q, k, w_v, lens, kept.empty_rows, *options[:3])


def _check_numbers(kept: Any) -> None:
    if written_down(kept[0]) and not exporting():
        raise AttributeError("the last call was traced for export, so it has no attention weights")


def last_of(call: AttentionCall, tensors: AttentionTensors, found: Attended, given: tuple[bool, bool]) -> Last:
    """The Last of a call of attention on heads.

    given   whether q, or k, is the caller's own tensor, which may change: then a copy is kept
    """
    lens = call.valid_lens
    if found.weights is not None:
        kept: Any = Computed(found.weights)
    else:
        q, k = (x.clone() if own else x for x, own in zip(tensors[:2], given))
        lens = lens.clone() if isinstance(lens, Tensor) else lens  # the caller may change it
        kept = Scored(q, k, tensors.w_v, lens, call.empty_rows, call.causal, tensors.keep_mask, tensors.bias)
    if in_transform():
        return Last(kept, found.out.dtype)  # with all that the transform knows of it
    source = None
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in kept.tensors()):
        alone = is_compiling() or exporting()
        source = HeadsSource.of(kept, None if alone else found.out.grad_fn)
    return Last(kept.detached(), found.out.dtype, source)


def by_steps(weights: Tensor, steps: Any, n_steps: int) -> Tensor:
    """Weights (B, H, Q, K) or (B*H, Q, K) of keys at these steps, (1 or B, K), -1 for none: with a column for each."""
    index = torch.as_tensor(np.where(steps < 0, n_steps, steps), device=weights.device)  # none: a column too many
    rows = weights.reshape(len(steps), math.prod(weights.shape[:-1]) // len(steps), weights.shape[-1])
    full = rows.new_zeros(*rows.shape[:2], n_steps + 1).scatter_(2, index[:, None].expand(rows.shape), rows)
    return full[..., :n_steps].reshape(*weights.shape[:-1], n_steps)


def in_steps(last: Last, steps: Any, n_steps: int) -> Last:
    """The same for weights whose columns are keys of these steps, (1 or B, K); None: in their order, from 0 on."""
    return last if steps is None else Last(OfSteps(Placed(((last.kept, steps),), n_steps)), last.dtype)
