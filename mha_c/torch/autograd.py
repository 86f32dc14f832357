"""The autograd functions: one call of the core forward, one backward, on the tensors' own memory.

`LayerFunction` is a whole layer (projections, attention, projection), `AttentionFunction` attention on q, k, v as
given.  What the backward reads again is handed to `save_for_backward`, so that a change in place between the
two is noticed, memory is freed after the backward, and checkpointing works.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Optional

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function

from .._core import attention_backward, attention_forward
from ._tensors import (
    array,
    follow_threads,
    layer_backward,
    layer_forward_training,
    optional_array,
    optional_tensor,
)  # fmt: skip

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

# From this size of the output on, the tape is saved as tensors, which autograd frees behind the backward call and
# hands to its hooks (checkpointing); a smaller one stays with the node, which saves some microseconds a call.
LARGE_BYTES = 1 << 18
N_TAPE_ARRAYS = 6  # and the lengths

# What follows queries, keys and values in _core.layer_forward: lengths, packed projections, w_v, num_heads,
# empty_rows, dropout, seed.
LayerOptions = tuple[Any, tuple[Any, Any, Any, Any], Any, int, Any, float, int]


class Parameters:
    """Which of a layer's nine possible parameters are there: weights W_q, W_k, W_v, W_o; their biases; w_v."""

    __slots__ = ("arrays", "flags", "slots", "tensors")

    def __init__(self, w_v: Optional[Tensor], weights: Any, biases: Any) -> None:
        nine = (*weights, *biases, w_v)
        self.slots = tuple(slot for slot, x in enumerate(nine) if x is not None)
        self.tensors = tuple(nine[slot] for slot in self.slots)
        self.arrays: Any = tuple(optional_array(W) for W in weights)  # row-major, for the backward call
        self.flags = self._flags([True] * len(self.slots))

    def _flags(self, needed: Any) -> Any:
        flags = [False] * 9
        for slot, need in zip(self.slots, needed):
            flags[slot] = need
        return tuple(flags[:4]), tuple(flags[4:8])

    def needed(self, needs: tuple[bool, ...]) -> Any:
        """needs_weights and needs_biases for the core."""
        return self.flags if all(needs) else self._flags(needs)

    def select(self, weights: Any, biases: Any, w_v: Any) -> Any:
        """Those of nine values that belong to `tensors`."""
        if self.slots == _WEIGHTS_ONLY:
            return weights
        nine = (*weights, *biases, w_v)
        return [nine[slot] for slot in self.slots]


_WEIGHTS_ONLY = (0, 1, 2, 3)


class LayerFunction(Function):
    """apply_layer((options, parameters, keep), queries, keys, values, *parameters.tensors) -> out.

    `keep` is a list that receives what `saved_weights` needs.  keys and values are None where they are the same
    tensor as the one before.
    """

    @staticmethod
    def forward(ctx: Any, work: tuple[LayerOptions, Parameters, list[Any]], *tensors: Any) -> Tensor:
        options, parameters, keep = work
        follow_threads()
        out: Tensor
        out, saved, tape = layer_forward_training(*_three(tensors), *options)
        keep.append(saved)
        if out.nbytes < LARGE_BYTES:
            ctx.save_for_backward(*tensors)
        else:
            ctx.save_for_backward(*tensors, *map(optional_tensor, tape[:N_TAPE_ARRAYS]))
            tape = tape[N_TAPE_ARRAYS:]
        ctx.kept = options, parameters, tape
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        if torch.is_grad_enabled():
            return _once_only(ctx, LayerFunction, grad_out)
        follow_threads()
        tensors = ctx.saved_tensors  # raises if one was changed in place, or the graph was freed
        (_, _, *options), parameters, tape = ctx.kept
        if len(tape) == 1:
            tape = (*map(optional_array, tensors[-N_TAPE_ARRAYS:]), *tape)
        _, need_q, need_k, need_v, *needs = ctx.needs_input_grad
        # The core adds the gradients of one tensor in two or three places up in the first.
        need_k = need_q if tensors[1] is None else need_k
        need_v = need_k if tensors[2] is None else need_v
        of_inputs, of_weights, of_biases, of_w_v = layer_backward(
            grad_out, tape, *_three(tensors), parameters.arrays, *options, (need_q, need_k, need_v),
            *parameters.needed(needs), True,
        )  # fmt: skip
        return (None, *of_inputs, *parameters.select(of_weights, of_biases, of_w_v))


def _three(tensors: Any) -> tuple[Tensor, Tensor, Tensor]:
    queries, keys, values, *_ = tensors
    keys = queries if keys is None else keys
    return queries, keys, keys if values is None else values


# Function.apply adds checks for functorch, which `_tensors.refuse_functorch` has made, at four microseconds.
apply_layer: Any = super(Function, LayerFunction).apply


def _from_tensors(tensors: Any, parameters: Parameters, lens: Any) -> Any:
    """out, tape, queries, keys, values of a large call."""
    queries = array(tensors[0])
    keys = queries if tensors[1] is None else array(tensors[1])
    values = keys if tensors[2] is None else array(tensors[2])
    out, *parts = [optional_array(part) for part in tensors[3 + len(parameters.slots) :]]
    return out, (*parts, lens), queries, keys, values


class AttentionCall(NamedTuple):
    """What _core.attention_forward takes beside its tensors."""

    valid_lens: Any = None
    causal: Any = None
    window_left: int = -1
    window_right: int = -1
    scale: Optional[float] = None
    dropout: float = 0.0
    seed: int = 0
    empty_rows: Any = "zero"
    return_weights: bool = False
    return_lse: bool = False


def run_attention(
    call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, w_v: Optional[Tensor], keep_mask: Optional[Tensor],
    bias: Optional[Tensor],
) -> tuple[Any, ...]:  # fmt: skip
    """(out, weights or None, lse or None, (row_max, row_sum)) as arrays."""
    follow_threads()
    return attention_forward(
        array(q), array(k), array(v), optional_array(w_v), call[0], optional_array(keep_mask), optional_array(bias),
        *call[1:], return_stats=True,
    )  # fmt: skip


class AttentionFunction(Function):
    """AttentionFunction.apply(call, q, k, v, w_v, keep_mask, bias) -> (out, weights, lse).

    Weights and lse are None unless wanted, and carry no gradient.
    """

    @staticmethod
    def forward(ctx: Any, call: AttentionCall, *tensors: Any) -> Any:
        if call.valid_lens is not None:  # the caller may change them before the backward call
            call = call._replace(valid_lens=np.array(call.valid_lens))
        out, weights, lse, (row_max, row_sum) = run_attention(call, *tensors)
        result = torch.from_numpy(out)
        ctx.save_for_backward(*tensors, result, torch.from_numpy(row_max), torch.from_numpy(row_sum))
        ctx.call = call
        extras = optional_tensor(weights), optional_tensor(lse)
        if call.return_weights or call.return_lse:
            ctx.mark_non_differentiable(*[extra for extra in extras if extra is not None])
        return (result, *extras)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, *_: Any) -> Any:
        if torch.is_grad_enabled():
            return _once_only(ctx, AttentionFunction, grad_out)
        follow_threads()
        arrays: list[Any] = [optional_array(part) for part in ctx.saved_tensors]
        q, k, v, w_v, keep_mask, bias, out, row_max, row_sum = arrays
        need, (lens, causal, left, right, scale, dropout, seed, empty_rows, *_) = ctx.needs_input_grad, ctx.call
        grads = attention_backward(
            array(grad_out), out, (row_max, row_sum), q, k, v, w_v, lens, keep_mask, bias, causal, left, right, scale,
            dropout, seed, empty_rows, bool(need[6]),
        )  # fmt: skip
        of_q, of_k, of_v, of_w_v, of_bias = (
            None if grad is None or not needed else torch.from_numpy(grad)
            for grad, needed in zip(grads, (*need[1:5], need[6]))
        )
        return None, of_q, of_k, of_v, of_w_v, None, of_bias


apply_attention: Any = super(Function, AttentionFunction).apply


class _NoSecondDerivative(Function):
    """Hands gradients on; asked for theirs, says that there are none."""

    @staticmethod
    def forward(ctx: Any, n: int, *tensors: Tensor) -> Any:
        return tuple(tensor.detach().clone() for tensor in tensors[:n])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            "mha_c computes first derivatives only: the gradient of a gradient (create_graph=True) through attention "
            "of mha_c.torch is not available; use the original torch layer there"
        )


def _once_only(ctx: Any, function: type[Function], grad_out: Tensor) -> Any:
    """The gradients under create_graph=True: right, but with no way to differentiate them once more."""
    with torch.no_grad():
        grads = function.backward(ctx, grad_out)
    present = [grad for grad in grads if grad is not None]
    origins = [tensor for tensor in ctx.saved_tensors if tensor is not None and tensor.requires_grad]
    renamed = iter(_NoSecondDerivative.apply(len(present), *present, *origins, grad_out))
    return tuple(None if grad is None else next(renamed) for grad in grads)
