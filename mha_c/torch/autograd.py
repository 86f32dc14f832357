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

from .._core import attention_backward, attention_forward, layer_backward, layer_forward_training
from ._tensors import array, follow_threads, optional_array, optional_tensor

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

# An output this large keeps its tape as saved tensors, which are freed with the backward call; a smaller one
# keeps the arrays themselves, which saves some twenty microseconds a call (benchmarks/training.py, M5).
LARGE_BYTES = 1 << 18

# What _core.layer_forward takes, in its order: arrays of queries, keys and values, lengths, packed projections, w_v,
# num_heads, empty_rows, dropout, seed.
LayerCall = tuple[Any, Any, Any, Any, tuple[Any, Any, Any, Any], Any, int, Any, float, int]


class Parameters:
    """Which of a layer's nine possible parameters are there: w_v; weights W_q, W_k, W_v, W_o; their biases."""

    __slots__ = ("arrays", "flags", "slots", "tensors")

    def __init__(self, w_v: Optional[Tensor], weights: Any, biases: Any) -> None:
        nine = (w_v, *weights, *biases)
        self.slots = tuple(slot for slot, x in enumerate(nine) if x is not None)
        self.tensors = tuple(nine[slot] for slot in self.slots)
        self.arrays: Any = tuple(optional_array(W) for W in weights)  # row-major, for the backward call
        self.flags = self._flags([True] * len(self.slots))

    def _flags(self, needed: Any) -> Any:
        flags = [False] * 9
        for slot, need in zip(self.slots, needed):
            flags[slot] = need
        return tuple(flags[1:5]), tuple(flags[5:])

    def needed(self, needs: tuple[bool, ...]) -> Any:
        """needs_weights and needs_biases for the core."""
        return self.flags if all(needs) else self._flags(needs)

    def tensors_of(self, of_w_v: Any, of_weights: Any, of_biases: Any, needs: tuple[bool, ...]) -> list[Any]:
        """Gradients in the order of `tensors`."""
        if self.slots == _WEIGHTS_ONLY:
            return [None if x is None else torch.from_numpy(x) for x in of_weights]
        scorer = None if of_w_v is None else of_w_v.reshape(1, -1)
        nine = (scorer, *of_weights, *of_biases)
        return [torch.from_numpy(nine[slot]) if need else None for slot, need in zip(self.slots, needs)]


_WEIGHTS_ONLY = (1, 2, 3, 4)


class LayerFunction(Function):
    """apply_layer((call, parameters, keep), queries, keys, values, *parameters.tensors) -> out.

    `keep` is a list that receives what `saved_weights` needs.  keys and values are None where they are the same
    tensor as the one before.  The tensors are there for autograd; the arrays in `call` do the work.
    """

    @staticmethod
    def forward(ctx: Any, work: tuple[LayerCall, Parameters, list[Any]], *tensors: Optional[Tensor]) -> Tensor:
        call, parameters, keep = work
        follow_threads()
        out, saved, tape = layer_forward_training(*call)
        keep.append(saved)
        # The user may change the result in place, as d2l's layers allow: what is read again is a copy.
        used_out = None if call[4][3] is not None else out.copy()
        if out.nbytes < LARGE_BYTES:
            ctx.save_for_backward(*tensors)
            ctx.kept = parameters, call[5:], used_out, tape, call[0], call[1], call[2]
        else:
            ctx.save_for_backward(*tensors, optional_tensor(used_out), *[optional_tensor(part) for part in tape[:6]])
            ctx.kept = parameters, call[5:], tape[6]
        return torch.from_numpy(out)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        if torch.is_grad_enabled():
            return _once_only(ctx, LayerFunction, grad_out)
        follow_threads()
        tensors = ctx.saved_tensors  # raises if one was changed in place, or the graph was freed
        parameters, rest, *kept = ctx.kept
        out, tape, queries, keys, values = kept if len(kept) > 1 else _from_tensors(tensors, parameters, kept[0])
        _, need_q, need_k, need_v, *needs = ctx.needs_input_grad
        # Whose gradient goes to whom: values that are the keys add theirs to the keys', and so on.
        need_k = need_q if tensors[1] is None else need_k
        need_v = need_k if tensors[2] is None else need_v
        w_v, num_heads, empty_rows, dropout, seed = rest
        need_weights, need_biases = parameters.needed(needs)
        (of_q, of_k, of_v), of_weights, of_biases, of_w_v = layer_backward(
            array(grad_out), out, tape, queries, keys, values, parameters.arrays, w_v, num_heads, empty_rows, dropout,
            seed, (need_q, need_k, need_v), need_weights, need_biases,
        )  # fmt: skip
        if tensors[2] is None and of_v is not None:
            of_k += of_v
            of_v = None
        if tensors[1] is None and of_k is not None:
            of_q += of_k
            of_k = None
        return (
            None,
            None if of_q is None else torch.from_numpy(of_q),
            None if of_k is None else torch.from_numpy(of_k),
            None if of_v is None else torch.from_numpy(of_v),
            *parameters.tensors_of(of_w_v, of_weights, of_biases, needs),
        )


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
