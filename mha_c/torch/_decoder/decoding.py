"""A decoder's own keys and values: the cache of a module, and the calls that go on from it.

The rules are those of mha_c's NumPy layers (`mha_c._decoder.caches`).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

import numpy as np
import torch
from torch import Tensor, nn

from ..._arguments.options import check_causal_steps
from ..._core import layer_step
from ..._decoder import caches, rolling
from .._call.attention import any_needs_grad
from .._call.records import Asked, LayerInputs, LayerParameters, Options, new_record
from .._private import on_cpu
from .._tensors import PLAIN, array, check_inputs, elsewhere, mask_for_core, optional_array, refuse_transforms
from .._twins import twin
from .._weights.last import OfSteps

if TYPE_CHECKING:
    from ..._types import Array, Counts, Heads

_FLOAT32, _FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)
NO_GRADIENT = "{} is not differentiable: call it under torch.no_grad(), or project with gradients enabled"


class Held(NamedTuple):
    """The weights that projected some rows, compared by object, version and address: no number is read, so that nothing
    waits for another device.  Weights of a copy or from a pickle are other objects: their numbers are compared."""

    weights: tuple[Optional[Tensor], ...]
    states: Optional[tuple[Any, ...]]  # None in a copy

    @classmethod
    def by(cls, module: Any) -> Held:
        """All parameters and buffers of the children W_k and W_v of a layer."""
        weights: list[Optional[Tensor]] = []
        before = ""  # one child may project both
        for slot, name in module._layout.slots:
            if slot in (1, 2) and name != before:
                child, before = module._modules[name], name
                weights += child._parameters.values() if type(child) is nn.Linear else _all_of(child)
        return new_record(cls, (tuple(weights), tuple(map(_state, weights))))

    def same(self, now: Held) -> bool:
        if self.states is None:
            return len(self.weights) == len(now.weights) and all(map(_equal, self.weights, now.weights))
        return self.states == now.states and all(map(operator.is_, self.weights, now.weights))

    def __reduce__(self) -> Any:
        changed = self.states is not None and self.states != tuple(map(_state, self.weights))
        return Held, (self.weights, self.states if changed else None)


def _all_of(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _state(weight: Optional[Tensor]) -> Any:
    """A state that differs after each change; `weight.data = other` changes only the address."""
    if weight is None:
        return None
    version = 0 if weight.is_inference() else weight._version
    return version, weight.data_ptr() if type(weight) in PLAIN else 0


def _equal(a: Optional[Tensor], b: Optional[Tensor]) -> bool:
    if a is None or b is None:
        return a is b
    return bool(a.device == b.device and a.dtype is b.dtype and torch.equal(a, b))


@twin(caches.KeyValueCache)
class KeyValueCache(caches.KeyValueCache):
    """The projected keys and values of all steps so far, for one layer; made by `layer.new_cache(batch, max_len)`.

    Examples
    --------
    >>> import torch, mha_c.torch
    >>> mha, x = mha_c.torch.MultiHeadAttention(8, 8, 8, 8, 2, 0.0).eval(), torch.ones(1, 3, 8)
    >>> cache = mha.new_cache(batch=1, max_len=4)
    >>> with torch.no_grad():
    ...     out = mha(x, x, x, cache=cache)
    >>> cache.lengths
    tensor([3])
    """

    __slots__ = ()
    _same = staticmethod(Held.same)

    @property
    def lengths(self) -> Any:
        """How many steps each item has: a new tensor (B,) of int64."""
        return torch.from_numpy(super().lengths)

    def clear(self) -> None:
        """Forget all steps; keep the memory on the CPU only: on other devices attention_weights may still need it."""
        super().clear()
        if isinstance(self._keys, Tensor):
            self._keys = self._values = None

    def _reorder(self, index: Any) -> None:
        rooms: Any = self._keys, self._values
        if not isinstance(rooms[0], Tensor):
            super()._reorder(index.cpu() if elsewhere(index) else index)
            return
        order = order_of_tensors(index, self.batch, isinstance(self._steps, int))
        if not isinstance(self._steps, int):
            self._steps = caches.one_count(self._steps[order.cpu().numpy()])
        self._batch, order = len(order), order.to(rooms[0].device, non_blocking=True)
        self._keys, self._values = (x.index_select(0, order) for x in rooms)

    def _rooms(self, keys: Tensor, values: Tensor) -> Any:
        """The memory for such rows, on any device."""
        if not on_cpu(keys):
            return self._rooms_elsewhere(keys, values)
        kind: Any = np.float64 if keys.dtype is torch.float64 else np.float32
        return [torch.from_numpy(x) for x in self._room((keys.shape[2], values.shape[2]), np.dtype(kind))]

    def _write(self, keys: Tensor, values: Tensor, counts: Counts) -> None:
        """New steps go to their places, on any device."""
        for room, rows in zip(self._rooms(keys, values), (keys, values)):
            if isinstance(self._steps, int) and isinstance(counts, int) and not self._span.rolls:
                room[:, self._steps : self._steps + counts] = rows
            else:  # the CPU knows the places, so nothing waits for the device
                places = np.stack(rolling.places(self, counts, rows.shape[1]))
                items, new, at = torch.from_numpy(places).to(room.device, non_blocking=True)
                room[items, at] = rows[items, new].to(room.dtype)

    def _rooms_elsewhere(self, keys: Tensor, values: Tensor) -> Any:
        if self._keys is None or (self._weights is None and not isinstance(self._keys, Tensor)):
            self._keys, self._values = (x.new_zeros(self._batch, self._span.rows, x.shape[2]) for x in (keys, values))
        rooms: Any = self._keys, self._values
        if isinstance(rooms[0], Tensor) and rooms[0].is_inference() and not torch.is_inference_mode_enabled():
            rooms = self._keys, self._values = rooms[0].clone(), rooms[1].clone()  # inference tensors are read-only
        there = getattr(rooms[0], "device", "cpu"), rooms[0].dtype
        if there != (keys.device, keys.dtype):
            raise TypeError(
                f"the cache holds {there[1]} on {there[0]}, but the new steps are {keys.dtype} on {keys.device}"
            )
        return rooms


def order_of_tensors(index: Any, batch: int, unseen: bool) -> Tensor:
    """The `index` of a reorder as a tensor.

    unseen  only the device needs its numbers: an index on a device is not read, so that nothing waits for it
    """
    if unseen and elsewhere(index):
        return index
    order = caches.checked_index(index.cpu() if elsewhere(index) else index, batch)
    return torch.from_numpy(order)


class StepKeys(NamedTuple):
    """What new steps attend to."""

    keys: Tensor  # (B, K, features)
    values: Tensor
    valid_lens: Optional[Tensor]
    masks: tuple[Optional[Tensor], Optional[Tensor]]  # keep_mask and bias of these keys
    steps: Optional[Array]  # of the keys, where they lie in another order: (1 or B, K); else None
    n_steps: int


class NewSteps(NamedTuple):
    """The new steps of a call with a cache; see DecodingLayer.new_cache of the NumPy layers."""

    cache: KeyValueCache
    num_heads: Heads
    n_steps: int
    counts: Counts  # how many of them count, of each item
    module: Any
    masks: tuple[Optional[Tensor], Optional[Tensor]]  # keep_mask, bias: a row for each new step, a column for each step

    @classmethod
    def of(cls, module: Any, cache: KeyValueCache, inputs: tuple[Any, ...], asked: Asked) -> NewSteps:
        check_cache(module, cache, asked.training)
        if asked.causal is not False:
            check_causal_steps(asked.causal)
        valid_lens = asked.valid_lens
        refuse_transforms("decoding with a cache")
        queries, keys, values = inputs
        caches.check_not_projected(keys)
        named = caches.by_name(queries, keys, values)
        check_inputs(**named)
        caches.check_steps(cache.batch, named)
        if keys.dtype is not queries.dtype or values.dtype is not queries.dtype:
            raise TypeError(f"keys {keys.dtype} and values {values.dtype} must be {queries.dtype} like queries")
        if torch.is_grad_enabled() and any_needs_grad(inputs, asked.masks, module.parameters()):
            raise RuntimeError(NO_GRADIENT.format("decoding with a cache"))
        n_steps = queries.shape[1]
        valid_lens = valid_lens.cpu() if elsewhere(valid_lens) else valid_lens
        counts = n_steps if valid_lens is None else caches.step_counts(valid_lens, cache.batch, n_steps)
        masks = asked.masks
        if not (masks[0] is masks[1] is None):
            masks = module._checked_masks(masks, (cache.batch, n_steps, caches.most(cache._steps + counts)))
        return new_record(cls, (cache, module._head_counts(), n_steps, counts, module, masks))

    def _masks_of(self, steps: Optional[Array]) -> tuple[Optional[Tensor], Optional[Tensor]]:
        """The masks of keys that belong to these steps, (1 or B, K), -1 where there is none; None: to all in order."""
        if steps is None or self.masks[0] is self.masks[1] is None:
            return self.masks
        keep_mask, bias = (x if x is None else masks_of_steps(x, steps) for x in self.masks)
        return keep_mask, bias

    def _options(self, parameters: LayerParameters, weights: Any, steps: Optional[Array]) -> Optional[Options]:
        rows = self.module._rows_of_joint(parameters) if weights is parameters else None
        if rows is None and self.masks[0] is self.masks[1] is None:
            return None
        keep_mask, bias = self._masks_of(steps)
        return Options(None, mask_for_core(keep_mask), bias, None, rows)

    def in_order(self) -> bool:
        """Whether each new step sees all that the cache holds up to it, so that lengths tell what they see."""
        return not self.cache._span.rolls or self.n_steps <= 1

    def one_by_one(self, inputs: LayerInputs) -> Iterator[tuple[NewSteps, LayerInputs]]:
        """(NewSteps, inputs) of one new step after another."""
        for i in range(self.n_steps):
            counts = 1 if isinstance(self.counts, int) else (self.counts > i).astype(np.int64)
            after = caches.most(self.cache._steps + counts)
            keep_mask, bias = (x if x is None else _row(x, i)[..., :after] for x in self.masks)
            one = self._replace(n_steps=1, counts=counts, masks=(keep_mask, bias))
            yield one, tuple(x[:, i : i + 1] for x in inputs)

    def by_core(self, inputs: LayerInputs, parameters: LayerParameters, weights: Any) -> Any:
        """(out, what is kept): append the steps and attend, in one call of the core; weights: perhaps packed."""
        cache, (queries, keys, values) = self.cache, inputs
        if cache._span.rolls and self.n_steps > 1:
            return self._by_parts(inputs, parameters, weights)
        held = Held.by(self.module)
        after = cache._check(held, self.counts)
        widths: Any = 0, 0  # not needed once the cache has rows
        if cache._weights is None:
            rows = self.module._rows_of_joint(parameters)
            pairs = (keys, parameters.W_k), (values, parameters.W_v)
            widths = [n for _, n in rows[1:]] if rows else [x.shape[2] if W is None else W.shape[0] for x, W in pairs]
        room = cache._room(widths, _FLOAT64 if queries.dtype is torch.float64 else _FLOAT32)
        lens = cache._visible_keys(after, self.n_steps)
        turn = self.module._turn(cache._steps, self.n_steps, queries.dtype)
        options = self._options(parameters, weights, cache._span.steps_of_rows(after) if cache._span.rolls else None)
        # An item without any step has no keys: it gets 0, not the mean of rows that do not count.
        call: Any = self.num_heads, "zero", 0.0, 0, *room, *cache._places(after, self.counts), turn, options
        out, kept = layer_step(queries, keys, values, lens, weights, parameters.w_v, *call)
        cache._keep(held, after)
        return out, OfSteps(cache._placed(kept, after)) if cache._span.rolls else kept

    def _by_parts(self, inputs: LayerInputs, parameters: LayerParameters, weights: Any) -> Any:
        """The same for several steps in a cache with a window."""
        cache, held = self.cache, Held.by(self.module)
        after = cache._check(held, self.counts)
        if len(weights) != 4:
            alone = self.module._for_core(parameters)
            pairs = zip(alone[:4], alone[4:8])
            weights = [None if W is None else (array(W), optional_array(b)) for W, b in pairs]
        w_v = None if parameters.w_v is None else array(parameters.w_v)[0].copy()  # for weights that are read later
        turn = self.module._turn(cache._steps, self.n_steps, inputs[0].dtype)
        arrays = [array(x) for x in inputs]
        layer, (keep_mask, bias) = (
            rolling.RollingLayer(weights, w_v, self.num_heads, turn),
            map(optional_array, self.masks),
        )
        out, kept = rolling.attend(cache, arrays, layer, self.counts, (keep_mask, bias))
        cache._keep(held, after)
        return torch.from_numpy(out), OfSteps(kept)

    def appended(self, keys: Tensor, values: Tensor) -> StepKeys:
        """Append projected rows; returns the keys and values of all steps so far, and how many each query sees."""
        cache, counts, held = self.cache, self.counts, Held.by(self.module)
        span, after = cache._span, cache._check(held, counts)
        there: Any = None
        if not self.in_order():
            n_rows = cache._rows(cache._steps)
            there = [room[:, :n_rows].to(keys.dtype) for room in cache._rooms(keys, values)]
            at = np.reshape(cache._steps, (-1, 1)) + np.arange(self.n_steps)
            new = np.where(np.arange(self.n_steps) < np.reshape(counts, (-1, 1)), at, -1)
            steps = rolling.side_by_side(span.steps_of_rows(cache._steps)[:, :n_rows], new)
            visible = torch.from_numpy(span.sees(at, steps))[:, None].to(keys.device, non_blocking=True)
            k, v = (torch.cat(pair, 1) for pair in zip(there, (keys, values)))
        cache._write(keys, values, counts)
        seen, n_rows = cache._visible_keys(after, self.n_steps), cache._rows(after)
        cache._keep(held, after)
        if there is not None:
            keep_mask, bias = self._masks_of(steps)
            keep_mask = visible if keep_mask is None else visible & keep_mask
            return StepKeys(k, v, None, (keep_mask, bias), steps, caches.most(after))
        rooms: Any = cache._keys, cache._values
        if isinstance(rooms[0], np.ndarray):  # copies: a cache that is cleared writes there again
            counted = (np.arange(n_rows) < cache._full(after)[:, None])[..., None]  # the other rows were never written
            rooms = [
                torch.from_numpy(np.where(counted, x[:, :n_rows], 0).astype(x.dtype)).to(keys.dtype) for x in rooms
            ]
        k, v = (x[:, :n_rows] for x in rooms)
        of_rows = span.steps_of_rows(after)[:, :n_rows] if span.rolls else None
        lens, masks = None if seen is None else torch.from_numpy(seen), self._masks_of(of_rows)
        return StepKeys(k, v, lens, masks, of_rows, caches.most(after))


def _row(mask: Tensor, i: int) -> Tensor:
    """Row i of a mask of several queries, as a mask of one."""
    return mask if mask.shape[-2] == 1 else mask[..., i : i + 1, :]


def masks_of_steps(mask: Tensor, steps: Array) -> Tensor:
    """A mask (B or 1, H or 1, n, steps) with the columns of these steps, (1 or B, K), in their order."""
    if mask.shape[-1] == 1:
        return mask
    index = torch.from_numpy(np.maximum(steps, 0)).to(mask.device, non_blocking=True)[:, None, None]
    mask = mask if mask.dim() == 4 else mask[None, None]
    batch = max(mask.shape[0], index.shape[0])
    shape = (batch, *mask.shape[1:3])
    return mask.expand(*shape, mask.shape[3]).gather(3, index.expand(*shape, index.shape[3]))


def check_cache(module: Any, cache: Any, training: Optional[bool]) -> None:
    if type(cache) is not KeyValueCache:
        raise TypeError(f"cache must be what new_cache made, got {type(cache).__name__}")
    if module.training if training is None else training:
        word = "" if module._layout.dropout is None else ", or give the call training=False"
        raise ValueError(f"a cache is for evaluation: call eval() first{word}")
