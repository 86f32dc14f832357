"""The autograd functions: one call of the core forward, one backward, on the tensors' own memory.

`LayerFunction` is a whole layer (projections, attention, projection), `AttentionFunction` attention on q, k, v as
given.  What the backward reads again is handed to `save_for_backward`, so that a change in place between the
two is noticed, memory is freed after the backward, and checkpointing works.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function

from ._tensors import (
    attention_backward,
    attention_forward,
    follow_threads,
    layer_backward,
    layer_forward_training,
    optional_array,
    optional_tensor,
)  # fmt: skip

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
    """(out, weights or None, lse or None, (row_max, row_sum))."""
    follow_threads()
    found: tuple[Any, ...] = attention_forward(q, k, v, w_v, call[0], keep_mask, bias, *call[1:], False, True)
    return found


class AttentionFunction(Function):
    """AttentionFunction.apply(call, q, k, v, w_v, keep_mask, bias) -> (out, weights, lse).

    Weights and lse are None unless wanted, and carry no gradient.
    """

    @staticmethod
    def forward(ctx: Any, call: AttentionCall, *tensors: Any) -> Any:
        if call.valid_lens is not None:  # the caller may change them before the backward call
            call = call._replace(valid_lens=np.array(call.valid_lens))
        out, weights, lse, statistics = run_attention(call, *tensors)
        ctx.save_for_backward(*tensors, out, *statistics)
        ctx.call = call
        if call.return_weights or call.return_lse:
            ctx.mark_non_differentiable(*[extra for extra in (weights, lse) if extra is not None])
        return out, weights, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, *_: Any) -> Any:
        if torch.is_grad_enabled():
            return _once_only(ctx, AttentionFunction, grad_out)
        follow_threads()
        q, k, v, w_v, keep_mask, bias, out, row_max, row_sum = ctx.saved_tensors
        _, need_q, need_k, need_v, need_w_v, _, need_bias = ctx.needs_input_grad
        lens, *options = ctx.call[:8]
        of_q, of_k, of_v, of_w_v, of_bias = attention_backward(
            grad_out, out, (row_max, row_sum), q, k, v, w_v, lens, keep_mask, bias, *options, need_bias
        )
        return (
            None, of_q if need_q else None, of_k if need_k else None, of_v if need_v else None,
            of_w_v if need_w_v else None, None, of_bias,
        )  # fmt: skip


apply_attention: Any = super(Function, AttentionFunction).apply


_ONLY_ONCE = (
    "mha_c computes first derivatives only: the gradient of a gradient (create_graph=True) through attention of "
    "mha_c.torch is not available; use the original torch layer there"
)


def _once_only(ctx: Any, function: type[Function], grad_out: Tensor) -> Any:
    """The gradients under create_graph=True: right, but with an error in place of theirs.

    torch's once_differentiable does the same, with a text that names nobody and a price for every call.
    """
    with torch.no_grad():
        grads = function.backward(ctx, grad_out)
    present = [grad.requires_grad_() for grad in grads if grad is not None]
    refusing = iter(torch._C._functions.DelayedError(_ONLY_ONCE, len(present))(*present))
    return tuple(None if grad is None else next(refusing) for grad in grads)
