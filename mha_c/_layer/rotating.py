"""Heads that may be rotated and may share keys, which decode and have gradients: the NumPy layers of grouped.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Optional

import numpy as np

from .._arguments import scalars
from .._arguments.arrays import gradient_like, like_input
from .._arguments.calls import refuses_at_the_call
from .._arguments.options import core_options
from .._core import attention_backward, attention_forward, isa, linear, linear_backward
from .._decoder.steps import Decodes
from .._summary import Scores
from ..linear import State, packing_type
from ..positions import rotary, rotary_backward, turn_of_steps
from .kept_weights import saved_weights
from .plan import NO_WAY_BACK, Plan
from .viewable import Viewable

if TYPE_CHECKING:
    from .._types import Array
    from ..linear import States


class _Record(NamedTuple):
    """What `backward` needs of a call in training mode."""

    states: States
    inputs: tuple[Array, ...]
    heads: tuple[Array, Array, Array]  # q, k, v
    options: Any
    attended: Array  # (B, H, Q, D)
    row_stats: Any
    as_tensor: bool


class RotatesHeads(Decodes, Viewable):
    """What both layers share: attention of projected heads, which are rotated on request, its weights and gradients."""

    _by_head = True
    _projects: tuple[str, ...]  # what the inputs go through, before W_o
    _record: Optional[_Record] = None
    rope: bool

    def __init__(self, sizes: tuple[int, int, int], widths: tuple[int, ...], bias: Any, dtype: Any, rng: Any) -> None:
        self._num_hiddens, self._num_heads, self._num_kv_heads = sizes
        self._head_dim = sizes[0] // sizes[1]  # also of a layer that has lost heads
        names, bias = (*self._projects, "W_o"), scalars.flag(bias, "bias")
        states = (State(name, n_out, sizes[0], bias) for name, n_out in zip(names, (*widths, sizes[0])))
        super().__init__(tuple(states), dtype, rng)
        self._last: Optional[tuple[Any, bool]] = None  # Scores, or what a call with a cache has kept
        self._shown: dict[str, Any] = {}  # the attention weights that were read, and of which call

    @property
    def num_heads(self) -> int:
        """Heads of queries."""
        return self._num_heads

    def _into_heads(self, states: States, dtype: Any) -> tuple[Any, ...]:
        """The projections of queries, keys and values."""
        return tuple(states[name].packed(dtype) for name in self._projects)

    def _joined(self, heads: list[Array]) -> list[Array]:
        """What comes of `_projects`, as one or side by side."""
        return heads

    def _make_plan(self, queries: Array, states: States) -> Plan:
        dtype = packing_type(queries, self.dtype)
        projections = *self._into_heads(states, dtype), states["W_o"].packed(dtype)
        in_core = projections, None, (self._num_heads, self._num_kv_heads), "zero"
        return Plan(queries.dtype, states, isa(), in_core, self._parameters, None)

    def _turn(self, first: Any, n_steps: int, dtype: Any) -> Any:
        return turn_of_steps(first, n_steps, self._head_dim, dtype) if self.rope else None

    def _finish(self, out: Array, saved: Any, as_tensor: bool) -> Any:
        self._last = saved, as_tensor
        return like_input(out, as_tensor)

    def _run(
        self, inputs: tuple[Array, ...], as_tensor: bool, valid_lens: Any, causal: Any, training: Any,
        projected: tuple[Any, ...] = (),
    ) -> Any:  # fmt: skip
        """inputs: queries, keys, values; or queries alone, and the other two projected (and turned) already."""
        in_training = self.training if training is None else scalars.flag(training, "training")
        head_dim = self._head_dim

        def run(plan: Plan) -> Any:
            *into, out_of = plan.in_core[0]
            heads = [_split(linear(x, W), head_dim) for x, W in zip(inputs, into)]
            if self.rope:
                heads[:2] = (rotary(x, range(x.shape[2]), interleaved=True) for x in heads[:2])
            q, k, v = *heads, *(_split(x, head_dim) for x in projected)
            options = core_options(q, k, valid_lens, causal=causal)
            if valid_lens is not None:
                options = (np.array(options[0]), *options[1:])  # the caller may change them
            out, _, _, *stats = attention_forward(q, k, v, None, *options[:-1], False, False, in_training, None, None)
            if in_training:
                self._record = _Record(plan.states, inputs, (q, k, v), options, out, stats[0], as_tensor)
            return self._finish(linear(_join(out), out_of), Scores(q, k, None, options), as_tensor)

        return self._with_plan(inputs, run, run)

    def _weights(self) -> tuple[Array, bool]:
        """(weights of the last call (B, H, Q, K), whether the inputs were tensors)."""
        if self._last is None:
            raise AttributeError(
                f"{type(self).__name__} has no attention_weights yet: call the layer first, then read them"
            )
        kept, as_tensor = self._last
        if isinstance(kept, str):  # why there are none, as in AttentionLayer
            raise RuntimeError(kept)
        return kept.weights() if isinstance(kept, Scores) else saved_weights(kept), as_tensor

    @property
    @refuses_at_the_call
    def attention_weights(self) -> Array:
        """Weights of the last call, (B, num_heads, Q, K): one array until the next call.

        Raises
        ------
        AttributeError
            Before the first call.
        """
        last, (read, found) = self._last, self._shown.get("weights", (None, None))
        if last is None or read is not last:
            found = like_input(*self._weights())
            self._shown["weights"] = last, found
        weights: Array = found
        return weights

    def _backward(self, grad_output: Any) -> list[Any]:
        """Gradients of the inputs of the last training call; adds those of the parameters to their `grad`."""
        record, name = self._record, type(self).__name__
        if record is None:
            raise RuntimeError(
                f"{name}.backward: call backward once after each call in training mode (layer.train(), or "
                "training=True in the call)"
            )
        if len(record.inputs) < 3:
            raise RuntimeError(NO_WAY_BACK)
        shape = *record.inputs[0].shape[:2], self._num_hiddens
        grad = gradient_like(shape, record.attended.dtype, grad_output)
        grad, *of_W_o = _projected_back(grad, _join(record.attended), record.states["W_o"])
        grad = _split(grad, self._head_dim)
        operands = grad, record.attended, record.row_stats, *record.heads, None
        grads = list(attention_backward(*operands, *record.options[:-1])[:3])
        if self.rope:
            grads[:2] = (rotary_backward(x, range(x.shape[2]), interleaved=True) for x in grads[:2])
        back = [
            _projected_back(x, given, record.states[name])
            for x, given, name in zip(self._joined([_join(x) for x in grads]), record.inputs, self._projects)
        ]
        with self._parameters.lock:
            if self._record is not record:
                raise RuntimeError(f"{name} was used by another thread during backward")
            self._record = None
            for role, of_parameters in zip((*self._projects, "W_o"), (*(found[1:] for found in back), of_W_o)):
                for suffix, gradient in zip(("weight", "bias"), of_parameters):
                    if gradient is not None:
                        self._parameters.add_grad(f"{role}.{suffix}", gradient)
        return [like_input(found[0], record.as_tensor) for found in back]


def _split(x: Array, head_dim: int) -> Array:
    """(B, rows, features) -> (B, heads, rows, head_dim), a view."""
    batch, rows, features = x.shape
    return x.reshape(batch, rows, features // head_dim, head_dim).transpose(0, 2, 1, 3)


def _join(x: Array) -> Array:
    """The reverse of `_split`."""
    batch, heads, rows, head_dim = x.shape
    return x.transpose(0, 2, 1, 3).reshape(batch, rows, heads * head_dim)


def _projected_back(grad: Array, x: Array, state: State) -> tuple[Array, Array, Optional[Array]]:
    """Gradients of x, weight and bias of a projection.  Rows whose gradient is 0 are skipped: padding may hold NaN."""
    assert state.weight is not None
    counts = grad.any(axis=-1, keepdims=True)
    x = x if counts.all() else np.where(counts, x, x.dtype.type(0))
    return linear_backward(grad, x, state.weight.astype(x.dtype, copy=False), state.has_bias)
