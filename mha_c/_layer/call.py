"""The call of a layer: one call of the compiled core with the user's arguments, the attention weights of that call, and
its backward pass.

Used by the layers of the book (`layers.py`) and by those of other systems (`variants.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple, Optional, overload

from numpy import ndarray

from .._arguments import calls, masks, scalars
from .._arguments.arrays import INT64, gradient_like, like_input, to_arrays, to_lengths
from .._arguments.core_refusals import PackedForOthers
from .._arguments.options import core_corner
from .._core import explain_layer, isa, layer_backward, layer_forward
from .._summary import Scores
from ..linear import State, packing_type
from .kept_weights import Kept, saved_weights
from .module import Dropout
from .plan import NO_WAY_BACK, Plan, Planned
from .viewable import Viewable

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .._decoder.caches import KeyValueCache
    from .._types import Array, Causal, Counts, DType, LayerOptions, Lens, PackedLinear, Real, RngLike, Rows, Turn
    from ..linear import States

    Cache = Optional[KeyValueCache]


@cache
def _gradient_names(roles: tuple[str, ...]) -> tuple[str, ...]:
    """The parameters of the four projections and w_v, in the order in which the core gives their gradients."""
    return *(f"{role}.{suffix}" for suffix in ("weight", "bias") for role in roles), "w_v.weight"


class MaskArguments(NamedTuple):
    """What a call is given beside its inputs."""

    valid_lens: Any = None
    causal: Causal = False
    keep_mask: Any = None
    bias: Any = None


class Inputs(NamedTuple):
    """What the last call was given, for the players: arrays and options as the core takes them."""

    queries: Array
    keys: Array
    values: Array
    valid_lens: Lens
    options: LayerOptions


class Record(NamedTuple):
    """What `backward` needs of a training call: the inputs themselves (not copies), what turned their rows, and the
    output."""

    plan: Plan
    inputs: tuple[Array, Array, Array]
    turn: Optional[Turn]
    out: Array  # read only where there is no W_o, and then a copy: callers may change their result (`out += x`)
    kept: Kept
    dropout: float
    as_tensor: bool


CORNERS = {corner: (corner,) for corner in ("top_left", "bottom_right")}  # the core's options, if they are no more
SMALL = 1 << 14  # numbers of an input that a layer keeps for the players: 128 KiB of float64


class AttentionLayer(Planned, Viewable):
    """The call that all layers share, `attention_weights` and `backward`.

    A layer describes itself: its projections, its heads, and whether its rows are turned.
    """

    _num_heads = 1  # the columns of the projected features are split into so many heads
    _num_kv_heads: Optional[int] = None  # heads of keys and values; None: as many
    _by_head = False  # whether attention_weights has an axis for the heads
    _turns = False  # whether projected queries and keys may be rotated by their positions: `_turn` says by what
    _child: Optional[AttentionLayer] = None  # an inner layer that shows the weights of the last call too
    _record: Optional[Record] = None

    def __init__(self, states: tuple[State, ...], dropout: Any, dtype: Any, rng: RngLike, empty_rows: str) -> None:
        self._dropout = Dropout(dropout)
        self._empty_rows = scalars.empty_rows(empty_rows)
        super().__init__(states, dtype, rng)
        # (saved by the core, whether tensors went in, and the elements of an Inputs where these are small)
        self._last: Optional[tuple[Any, ...]] = None
        self._shown: dict[str, tuple[Any, dict[bool, Array]]] = {}  # the weights that were read, and of which call

    @property
    def empty_rows(self) -> str:
        """What a query without visible keys gets: "uniform", the mean of all values, or "zero"."""
        return self._empty_rows

    @overload
    def __call__(
        self, queries: NDArray[Real], keys: Any, values: Any = None, valid_lens: Any = None, *, causal: Causal = False,
        keep_mask: Any = None, bias: Any = None, training: Optional[bool] = None, cache: Optional[KeyValueCache] = None,
    ) -> NDArray[Real]: ...  # fmt: skip
    @overload
    def __call__(
        self, queries: Any, keys: Any, values: Any = None, valid_lens: Any = None, *, causal: Causal = False,
        keep_mask: Any = None, bias: Any = None, training: Optional[bool] = None, cache: Optional[KeyValueCache] = None,
    ) -> Any: ...  # fmt: skip
    @calls.shows_names
    def __call__(
        self, queries: Any = None, keys: Any = None, values: Any = None, valid_lens: Any = None, *,
        causal: Causal = False, keep_mask: Any = None, bias: Any = None, training: Optional[bool] = None,
        cache: Optional[KeyValueCache] = None, **misnamed: Any,
    ) -> Any:  # fmt: skip
        """Compute the layer; the help of its class lists what a call takes."""
        # A small call takes two microseconds, so the whole call with plain arrays, in evaluation, is here.
        parameters = self._parameters
        plan = parameters.plan
        try:
            if (
                type(queries) is type(keys) is type(values) is ndarray
                and (valid_lens is None or (type(valid_lens) is ndarray and valid_lens.dtype is INT64))
                and bias is None
                and training is None
                and cache is None
                and (keep_mask is None or (self._by_head and type(keep_mask) is ndarray and keep_mask.dtype == bool))
                and plan is not None
                and plan.dtype is queries.dtype
                and plan.states is parameters.states
                and not misnamed
            ):
                options = None
                if causal is not False or keep_mask is not None or plan.turns:
                    options = self._options(queries, keys, causal, keep_mask)
                try:  # weights that are packed for another instruction set, the core itself refuses
                    if self.training:
                        return self._run_training(plan, (queries, keys, values), valid_lens, options, False)
                    projections, w_v, heads, empty_rows = plan.in_core
                    out, saved = layer_forward(
                        queries, keys, values, valid_lens, projections, w_v, heads, empty_rows, 0.0, 0, False, options
                    )
                except PackedForOthers:
                    pass
                else:
                    if queries.size <= SMALL and (
                        queries is keys is values or (keys.size <= SMALL and values.size <= SMALL)
                    ):
                        self._last = saved, False, queries, keys, values, valid_lens, options
                    else:
                        self._last = saved, False
                    if plan.child is not None:
                        plan.child._last = saved, False
                    return out
            if misnamed:
                raise calls.misnamed(self, "__call__", misnamed)
            given = MaskArguments(valid_lens, causal, keep_mask, bias)
            return self._call((queries, keys, values), given, training, cache)
        except (TypeError, ValueError) as error:
            if calls.is_refusal(error):  # the caller's line comes next in the traceback, not our five
                raise error.with_traceback(None) from None
            raise

    def _call(
        self, inputs: tuple[Any, ...], given: MaskArguments, training: Optional[bool], cache: Cache = None
    ) -> Any:
        queries, keys, values = inputs
        if values is None:
            raise calls.missing(type(self).__name__, queries=queries, keys=keys, values=values)
        (queries, keys, values), as_tensor = to_arrays((queries, "queries"), (keys, "keys"), (values, "values"))
        if given.valid_lens is not None:
            if keys.ndim != 3 or values.ndim != 3:
                calls.check_order(type(self).__name__, keys, values, given.valid_lens)
        return self._run((queries, keys, values), given, training, as_tensor)

    def _asked(
        self, queries: Any, keys: Any, values: Any = None, valid_lens: Any = None, *, causal: Causal = False,
        keep_mask: Any = None, bias: Any = None, training: Optional[bool] = None, cache: Optional[KeyValueCache] = None,
    ) -> tuple[tuple[Any, ...], MaskArguments, Optional[bool], Optional[KeyValueCache]]:  # fmt: skip
        """What a call with these arguments computes, for mha_c.explain: the arguments of `_call`."""
        return (queries, keys, values), MaskArguments(valid_lens, causal, keep_mask, bias), training, cache

    def _turn(self, first: Counts, n_steps: int, dtype: Any) -> Optional[Turn]:
        """What turns queries and keys of n steps from `first` on, if something does: see `_core.layer_step`."""
        return None

    def _options(
        self, queries: Array, keys: Array, causal: Causal, keep_mask: Optional[Array] = None,
        bias: Optional[Array] = None,
    ) -> LayerOptions:  # fmt: skip
        """The core's options of a call: see `_core.layer_forward`."""
        corner = core_corner(causal, queries, keys)
        turn = None
        if self._turns:
            rows = [x.shape[1] for x in (queries, keys) if x.ndim == 3]
            turn = self._turn(0, max(rows, default=0), queries.dtype)
        if turn is None and keep_mask is bias is None:
            return corner and CORNERS[corner]
        return corner, keep_mask, bias, turn

    def _given_options(self, given: MaskArguments, queries: Array, keys: Array) -> tuple[Lens, LayerOptions]:
        """(lengths, options) as the core takes them, of what a user gives."""
        keep_mask = bias = None
        if given.keep_mask is not None or given.bias is not None:
            n_heads = self._num_heads if self._by_head else None
            keep_mask, bias = masks.of_layer(given.keep_mask, given.bias, masks.sizes_of(queries, keys), n_heads)
        options = self._options(queries, keys, given.causal, keep_mask, bias)
        return None if given.valid_lens is None else to_lengths(given.valid_lens), options

    def _run(
        self, inputs: tuple[Array, Array, Array], given: MaskArguments, training: Optional[bool], as_tensor: bool,
        projected: Sequence[str] = (),
    ) -> Any:  # fmt: skip
        """`projected` names the projections that keys and values have been through already: W_k, or W_k and W_v."""
        in_training = self.training if training is None else scalars.flag(training, "training")
        lens, options = self._given_options(given, *inputs[:2])

        def check(plan: Plan) -> None:
            plan = plan.without(projected)
            explain_layer(*inputs, lens, *plan.in_core, 0.0, 0, in_training, options)

        def run(plan: Plan) -> Any:
            plan = plan.without(projected) if projected else plan
            if in_training:
                return self._run_training(plan, inputs, lens, options, as_tensor)
            out, saved = layer_forward(*inputs, lens, *plan.in_core, 0.0, 0, False, options)
            return self._finish(out, saved, as_tensor, None if projected else Inputs(*inputs, lens, options))

        return self._with_plan(inputs, check, run)

    def _run_training(
        self, plan: Plan, inputs: tuple[Array, Array, Array], lens: Lens, options: LayerOptions, as_tensor: bool
    ) -> Any:
        p = self._dropout._p
        seed = partial(scalars.draw_seed, self._rng) if p else 0  # drawn behind all checks: a refused call draws none
        out, kept = layer_forward(*inputs, lens, *plan.in_core, p, seed, True, options)
        kept = Kept._make(kept)
        turn = options[3] if options is not None and len(options) > 3 else None
        self._record = Record(plan, inputs, turn, out, kept, p, as_tensor)
        return self._finish(out, kept.for_weights(), as_tensor, Inputs(*inputs, lens, options))

    def _finish(self, out: Array, saved: tuple[Any, ...], as_tensor: bool, inputs: Optional[Inputs] = None) -> Any:
        if inputs is not None and any(x.size > SMALL for x in inputs[:3]):
            inputs = None
        self._last = saved, as_tensor, *(inputs or ())
        if self._child is not None:
            self._child._last = saved, as_tensor
        return like_input(out, True) if as_tensor else out

    def _packed(self, states: States, dtype: DType) -> tuple[Optional[PackedLinear], ...]:
        """The projections W_q, W_k, W_v, W_o."""
        return tuple(states[name].packed(dtype) if name in states else None for name in self._roles)

    def _make_plan(self, queries: Array, states: States) -> Plan:
        dtype = packing_type(queries, self._parameters.dtype)
        scorer = states["w_v"].weight if "w_v" in states else None
        w_v = None if scorer is None else scorer[0].astype(dtype)
        heads = self._num_heads if self._num_kv_heads is None else (self._num_heads, self._num_kv_heads)
        in_core = self._packed(states, dtype), w_v, heads, self._empty_rows
        return Plan(queries.dtype, states, isa(), in_core, self._turns, self._child)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if state.get("_last"):
            state["_last"] = state["_last"][:2]  # what went in stays with its owner
        return state

    @property
    def _inputs(self) -> Optional[tuple[Any, ...]]:
        """The elements of an Inputs: what the last call was given; None where it was large, and in a copy."""
        return (self._last or ())[2:] or None

    def _weights(self) -> tuple[Array, bool]:
        """(weights of the last call (B, H, Q, K) in new memory, whether the inputs were tensors)."""
        if self._last is None:
            raise AttributeError(
                f"{type(self).__name__} has no attention_weights yet: call the layer first, then read them"
            )
        saved, as_tensor = self._last[:2]
        if isinstance(saved, str):  # why there are none: mha_c.dask called the layer in other processes
            raise RuntimeError(saved)
        if isinstance(saved, Scores):  # of a grouped layer that an earlier version pickled
            return saved.weights(), as_tensor
        return saved_weights(saved), as_tensor

    @property
    @calls.refuses_at_the_call
    def attention_weights(self) -> Array:
        """Weights of the last call, (B, Q, K) or (B, H, Q, K), before dropout: rows sum to 1, hidden keys have 0.

        Computed when first read; later readings give the same array.  AttributeError before the first call.
        """
        saved, (read, found) = self._last and self._last[0], self._shown.get("weights", (None, {}))
        if saved is None or read is not saved:
            weights, as_tensor = self._weights()
            batch, heads, *matrix = weights.shape
            forms = {True: weights, False: weights.reshape(batch * heads, *matrix)}  # with an axis for heads, without
            found = {by_head: like_input(array, as_tensor) for by_head, array in forms.items()}
            self._shown["weights"] = saved, found
        weights_of_call: Array = found[self._by_head]
        return weights_of_call

    # --- Gradients ------------------------------------------------------------------------------

    @overload
    def backward(self, grad_output: NDArray[Real]) -> tuple[NDArray[Real], NDArray[Real], NDArray[Real]]: ...
    @overload
    def backward(self, grad_output: Any) -> tuple[Any, Any, Any]: ...
    @calls.refuses_at_the_call
    def backward(self, grad_output: Any) -> Any:
        """Gradients of a loss with respect to queries, keys and values, given `grad_output`, that of the output.

        Of the last call in training mode, once; else RuntimeError.  Those of the parameters are added to their `grad`.
        An array given for several inputs gets the sum; what no query saw gets 0.
        """
        try:
            return self._backward(grad_output)
        except (TypeError, ValueError) as error:
            if calls.is_refusal(error):
                raise error.with_traceback(None) from None
            raise

    def _backward(self, grad_output: Any, join: bool = False) -> tuple[Any, ...]:
        """join: the gradients of inputs that are one object are added up in the first one's place."""
        record = self._record
        if record is None:
            raise RuntimeError(
                f"{type(self).__name__}.backward: call backward once after each call in training mode (layer.train(), "
                f"or training=True in the call)"
            )
        roles = [record.plan.states.get(name) for name in self._roles]
        if any(role is not None and packed is None for role, packed in zip(roles, record.plan.in_core[0])):
            raise RuntimeError(NO_WAY_BACK)
        grad_output = gradient_like(record.out.shape, record.out.dtype, grad_output)
        grads = self._gradients(record, grad_output, roles, join)
        with self._parameters.lock:
            if self._record is not record:
                raise RuntimeError(f"{type(self).__name__} was used by another thread during backward")
            self._record = None
            for name, gradient in zip(_gradient_names(self._roles), grads[3:]):
                if gradient is not None:
                    self._parameters.add_grad(name, gradient)
        return tuple(grad if grad is None else like_input(grad, record.as_tensor) for grad in grads[:3])

    def _rows(self, states: States) -> Optional[tuple[Rows, ...]]:
        """Which rows of one weight W_q, W_k and W_v are, if they are: see `_core.layer_forward`."""
        return None

    def _gradients(
        self, record: Record, grad_output: Array, roles: list[Optional[State]], join: bool
    ) -> tuple[Any, ...]:
        """Gradients of three inputs, four weights, four biases and w_v; None where the layer has no such part."""
        dtype, kept, plan = record.out.dtype, record.kept, record.plan
        numbers = (None if role is None else role.weight for role in roles)
        weights = tuple(None if weight is None else weight.astype(dtype, copy=False) for weight in numbers)
        with_bias = tuple(role is not None and role.has_bias for role in roles)
        _, w_v, heads, empty_rows = plan.in_core
        rows, options = self._rows(plan.states), None
        if not (kept.options is record.turn is rows is None):
            options = *((None,) * 3 if kept.options is None else kept.options[:3]), record.turn, rows
        *grads, grad_w_v = layer_backward(
            grad_output, kept, *record.inputs, kept.lengths, (*weights, None, None, None, None, w_v), w_v, heads,
            empty_rows, record.dropout, kept.seed, (*(True,) * 7, *with_bias, True), join, options,
        )  # fmt: skip
        return (*grads, None if grad_w_v is None else grad_w_v[None])
