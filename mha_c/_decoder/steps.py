"""The calls of a decoder: step by step with a cache of its own keys and values, or on projected ones of an encoder.

`DecodingLayer` adds them to `AttentionLayer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Optional

from .._arguments import masks, scalars
from .._arguments.arrays import of_one_type, to_arrays, to_lengths
from .._arguments.calls import refuses_at_the_call
from .._arguments.options import check_causal_steps
from .._core import explain_layer, layer_step
from .._layer.call import AttentionLayer, MaskArguments
from .._layer.plan import Plan
from ..errors import ShapeError
from ..linear import packing_type
from ..positions import turned_pairs
from . import rolling
from .caches import (
    KeyValueCache,
    ProjectedKeyValues,
    by_name,
    check_not_projected,
    check_steps,
    lengths_of,
    most,
    project_rows,
    step_counts,
    weights_of,
)

if TYPE_CHECKING:
    from .._layer.call import Cache
    from .._types import Array, Causal, Counts, Lens, Masks
    from ..linear import State, States
    from .caches import Weights


def check_cache(cache: Any, training: bool) -> None:
    if type(cache) is not KeyValueCache:
        raise TypeError(f"cache must be what new_cache made, got {type(cache).__name__}")
    if training:
        raise ValueError("a cache is for evaluation: call eval() first, or give the call training=False")


class DecodingLayer(AttentionLayer):
    """An attention layer whose keys and values can be kept from call to call."""

    def _check_looks_back(self, causal: Causal = False) -> None:
        """ValueError if a step of this layer may see later ones, or for a corner that a step has not."""
        check_causal_steps(causal)

    def _projecting(self, states: States) -> tuple[Optional[State], ...]:
        """The projections of keys and values: two, or one for both."""
        keys, values = self._roles[1:3]
        return (states.get(keys),) if keys == values else (states.get(keys), states.get(values))

    def _weights_of_cache(self, plan: Plan) -> Weights:
        """The numbers of W_k and W_v: one object for all steps of a plan, so that a cache knows it again."""
        if plan.of_cache is None:
            plan.of_cache = weights_of(*self._projecting(plan.states))
        return plan.of_cache

    @refuses_at_the_call
    def new_cache(
        self, batch: int, max_len: Optional[int], *, window: Optional[int] = None, sinks: int = 0
    ) -> KeyValueCache:
        """Make a cache for the projected keys and values of `max_len` steps of `batch` items; see `KeyValueCache`.

        layer(x, x, x, cache=cache) projects only the new steps x (B, n, features), and appends them; valid_lens (B,)
        says how many of the n count.  A step attends to itself and to all before it, with `window` to so many last
        steps and to the first `sinks`: then max_len may be None.  ValueError without room, or in training.
        """
        self._check_looks_back()
        return KeyValueCache(batch, max_len, window=window, sinks=sinks)

    @refuses_at_the_call
    def project(self, keys: Any, values: Any, valid_lens: Any = None) -> ProjectedKeyValues:
        """Project `keys` by W_k and `values` by W_v once; layer(queries, kv) takes the result in place of both.

        `valid_lens` is for calls that give none.  If W_k or W_v changes, the next call raises a ValueError.
        """
        return self._projected(valid_lens, keys=keys, values=values)

    def _projected(self, valid_lens: Any, **inputs: Any) -> ProjectedKeyValues:
        """Project keys and values, or keys only."""
        arrays, as_tensor = to_arrays(*[(x, name) for name, x in inputs.items()])
        keys = arrays[0]
        for array, name in zip(arrays, inputs):
            if array.ndim != 3 or array.shape[:2] != keys.shape[:2]:
                raise ShapeError(f"{name} must have shape (B, K, features), got {array.shape}; keys {keys.shape}")
        of_one_type(arrays, "keys", "values")
        lens = lengths_of(valid_lens, keys.shape[0])
        states, dtype = self._sized(dict(zip(("W_k", "W_v"), arrays))), packing_type(keys, self.dtype)
        rows = [project_rows(array, state, dtype) for array, state in zip(arrays, states)]
        turn = self._turn(0, keys.shape[1], rows[0].dtype)
        if turn is not None:
            by_heads = rows[0].reshape(*rows[0].shape[:2], -1, 2 * turn[0].shape[1])
            rows[0] = turned_pairs(by_heads, *(table[:, None] for table in turn)).reshape(rows[0].shape)
        values = rows[1] if len(rows) == 2 else None
        return ProjectedKeyValues(rows[0], values, lens, weights_of(*states), as_tensor)

    def _sized(self, inputs: dict[str, Array]) -> list[Optional[State]]:
        """W_k, and W_v if it is in `inputs` (None where the layer has none); draws them if their size was not known."""
        parameters = self._parameters
        with parameters.lock:
            states = parameters.states
            sizes = {name: array.shape[2] for name, array in inputs.items() if name in states}
            for name, size in sizes.items():
                expected = states[name].in_features
                if expected not in (None, size):
                    what = "keys" if name == "W_k" else "values"
                    raise ShapeError(f"{what} has {size} features, but {name} takes {expected}")
            if any(states[name].weight is None for name in sizes):
                drawn = self._drawn({name: states[name] for name in sizes}, sizes)
                parameters.states = states = {**states, **drawn}
        return [states.get(name) for name in inputs]

    def _projected_arguments(self, kv: ProjectedKeyValues, values: Any, valid_lens: Any) -> tuple[Array, Any, Lens]:
        """Keys, values and lengths of a call with `kv`; ValueError if other weights made it."""
        if kv._values is not None and values is not None:
            raise TypeError("values go into `project` together with the keys: call layer(queries, kv)")
        states = self._parameters.states
        kv._check(weights_of(*(states.get(name) for name in kv._projections)))
        lens = kv._valid_lens if valid_lens is None else to_lengths(valid_lens)
        return kv._keys, values if kv._values is None else kv._values, lens

    def _step(self, cache: KeyValueCache, inputs: Sequence[Any], given: MaskArguments, training: Optional[bool]) -> Any:
        queries, keys, values = inputs
        self._check_looks_back(given.causal)
        check_cache(cache, self.training if training is None else scalars.flag(training, "training"))
        check_not_projected(keys)
        arrays, as_tensor = to_arrays((queries, "queries"), (keys, "keys"), (values, "values"))
        queries, keys, values = arrays
        named = by_name(queries, keys, values)
        check_steps(cache.batch, named)
        of_one_type(arrays[: len(named)], *named)
        n_steps = queries.shape[1]
        counts = step_counts(given.valid_lens, cache.batch, n_steps)
        seen = self._seen_of_steps(given, cache, counts, n_steps)

        def check(plan: Plan) -> None:
            cache._check(self._weights_of_cache(plan), counts)
            explain_layer(queries, keys, values, None, *plan.in_core, 0.0, 0, False, None)

        def run(plan: Plan) -> Any:
            weights = self._weights_of_cache(plan)
            after = cache._check(weights, counts)
            projections, w_v, num_heads, _ = plan.in_core
            widths: Any = 0, 0  # not needed once the cache has rows
            if cache._weights is None:
                widths = [W[2][0] if W else x.shape[2] for x, W in zip((keys, values), projections[1:])]
            k_room, v_room = cache._room(widths, queries.dtype.type)
            turn = self._turn(cache._steps, n_steps, queries.dtype.type)
            if not cache._span.rolls or n_steps <= 1:
                lens = cache._visible_keys(after, n_steps)
                # An item without any step has no keys: it gets 0, not the mean of rows that do not count.
                out, saved = layer_step(
                    queries, keys, values, lens, projections, w_v, num_heads, "zero", 0.0, 0, k_room, v_room,
                    *cache._places(after, counts), turn,
                    seen if seen is None else rolling.options_of_rows(cache, after, seen),
                )  # fmt: skip
                saved = cache._placed(saved, after) if cache._span.rolls else saved
            else:
                out, saved = rolling.attend(
                    cache, arrays, rolling.RollingLayer(projections, w_v, num_heads, turn), counts, seen
                )
            cache._keep(weights, after)
            return self._finish(out, saved, as_tensor)

        return self._with_plan(arrays, check, run)

    def _seen_of_steps(
        self, given: MaskArguments, cache: KeyValueCache, counts: Counts, n_steps: int
    ) -> Optional[Masks]:
        """keep_mask and bias, if one is given, of a call with a cache, whose keys are all steps: the new ones too."""
        if given.keep_mask is given.bias is None:
            return None
        sizes = cache.batch, n_steps, most(cache._steps + counts)
        return masks.of_layer(given.keep_mask, given.bias, sizes, self._num_heads if self._by_head else None)

    def _call(
        self, inputs: tuple[Any, ...], given: MaskArguments, training: Optional[bool], cache: Cache = None
    ) -> Any:
        if cache is not None:
            return self._step(cache, inputs, given, training)
        queries, keys, values = inputs
        if type(keys) is ProjectedKeyValues:
            kv, (keys, values, valid_lens) = keys, self._projected_arguments(keys, values, given.valid_lens)
            (queries, values), as_tensor = to_arrays((queries, "queries"), (values, "values"))
            given = given._replace(valid_lens=valid_lens)
            return self._run((queries, keys, values), given, training, as_tensor or kv._as_tensor, kv._projections)
        return super()._call(inputs, given, training)
