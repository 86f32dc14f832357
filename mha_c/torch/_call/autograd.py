"""The autograd functions: one call of the core forward, one backward, on the tensors' own memory.

`LayerFunction` is a whole layer (projections, attention, projection), `AttentionFunction` attention on q, k, v as
given, `WeightsFunction` the attention weights of a layer's call.  Tensors that the backward pass reads are saved with
`save_for_backward`: so autograd notices changes in place before the backward pass, frees memory after it, and
checkpointing works.  `mathematics` computes gradients that have gradients themselves.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, Optional

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function

from ..._arguments.scalars import LateSeed
from ..._core import attention_backward, attention_forward, layer_backward, layer_forward
from ..._layer.kept_weights import LENGTHS, N_FOR_WEIGHTS, for_backward
from .._private import in_functorch, in_mode, quick_apply
from .._tensors import mask_for_core, optional_tensor
from . import mathematics
from .mathematics import AttentionCall

# For outputs of this size or more, what the core kept for the backward pass is saved as tensors: autograd frees them
# after it and passes them to its hooks (checkpointing).  If smaller, the node keeps it: some microseconds less a call.
LARGE_BYTES = 1 << 18
N_LARGE = 6  # q, k, row_max, row_sum, projected values, attended values

# The parameters of a layer: W_q, W_k, W_v, W_o, their biases, w_v (1, h); None where the layer has none.
LayerParameters = tuple[Optional[Tensor], ...]


class LayerFunction(Function):
    """apply([options], queries, keys, values, *nine parameters) -> out; afterwards the list holds what the core kept.

    options   lengths, num_heads, empty_rows, dropout, its LateSeed.  Not to be called inside a transform.
    """

    @staticmethod
    def forward(ctx: Any, box: list[Any], *tensors: Any) -> Tensor:
        valid_lens, num_heads, empty_rows, dropout, seed = box[0]
        out: Any  # a tensor
        out, kept = layer_forward(
            tensors[0], tensors[1], tensors[2], valid_lens, tensors[3:], tensors[-1], num_heads, empty_rows, dropout,
            seed, True,
        )  # fmt: skip
        box[0] = kept
        if dropout:
            seed = seed.number
        of_node: Optional[tuple[Any, ...]] = kept
        if out.numel() * out.element_size() < LARGE_BYTES:
            ctx.save_for_backward(*tensors)
        else:
            _, _, q, k, _, row_max, row_sum, *_, projected, attended = kept
            _, _, _, W_q, W_k, *_ = tensors  # an input without a projection was copied for attention_weights only
            large = None if W_q is None else q, None if W_k is None else k, row_max, row_sum, projected, attended
            ctx.save_for_backward(*tensors, *map(optional_tensor, large))
            of_node = None
        ctx.kept = of_node, (kept[LENGTHS], num_heads, empty_rows, dropout, seed)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        tensors = ctx.saved_tensors  # raises if one was changed in place, or the graph was freed
        kept, options = ctx.kept
        lens, num_heads, empty_rows, dropout, seed = options
        if kept is None:
            tensors, (q, k, row_max, row_sum, *others) = tensors[:-N_LARGE], tensors[-N_LARGE:]
            kept = for_backward(q, k, row_max, row_sum, lens, *others)
        needs = ctx.needs_input_grad[1:]
        if not (torch.is_grad_enabled() or in_functorch() or in_mode()):  # create_graph; a mode is active
            try:
                return None, *layer_backward(
                    grad_out, kept, tensors[0], tensors[1], tensors[2], lens, tensors[3:], tensors[-1], num_heads,
                    empty_rows, dropout, seed, needs, True,
                )  # fmt: skip
            except BufferError:  # a batch of gradients (is_grads_batched), a negated view: no plain memory
                pass
        return None, *layer_gradients(tensors, options, needs, grad_out)


apply_layer = quick_apply(LayerFunction)


def differentiable_layer(queries: Tensor, keys: Tensor, values: Tensor, parameters: Any, options: Any) -> Any:
    """(out, what `saved_weights` needs, parts of a `WeightsSource`) of a call that records gradients."""
    box = [options]
    out = apply_layer(box, queries, keys, values, *parameters)
    kept: Any = box[0]
    versions = versions_of(queries, keys, parameters)  # autograd has refused tensors of inference mode before
    return out, kept[:N_FOR_WEIGHTS], (kept[LENGTHS], options[1], options[2], queries, keys, parameters, versions)


def layer_gradients(tensors: Any, options: Any, needs: Any, grad_out: Tensor) -> Any:
    """Gradients that can be differentiated again; they drop the same weights as the forward call.

    tensors   three inputs and nine parameters; options: lengths, num_heads, empty_rows, dropout, seed
    """
    lens, num_heads, empty_rows, dropout, seed = options
    drop = mathematics.core_dropout(dropout, seed)

    def layer(queries: Tensor, keys: Tensor, values: Tensor, *nine: Any) -> Any:
        W, b, w_v = nine[:4], nine[4:8], nine[8]
        out, _ = mathematics.layer(queries, keys, values, W, b, w_v, num_heads, lens, empty_rows, drop)
        return (out,)

    return mathematics.gradients(layer, tensors, needs, (grad_out,))


def versions_of(queries: Tensor, keys: Tensor, parameters: LayerParameters) -> list[int]:
    """The version counters of the tensors that determine the attention weights (changes in place count up)."""
    W_q, W_k, _, _, b_q, b_k, _, _, w_v = parameters
    return [x._version for x in (queries, keys, W_q, W_k, b_q, b_k, w_v) if x is not None]


class WeightsSource(NamedTuple):
    """The tensors and options that determine the attention weights of a layer's call, and the versions at the call."""

    valid_lens: Any
    num_heads: int
    empty_rows: str
    queries: Tensor
    keys: Tensor
    parameters: LayerParameters
    versions: Optional[list[int]]  # of `versions_of`; None in compiled calls

    def needs_grad(self) -> bool:
        return any(x is not None and x.requires_grad for x in self.arguments())

    def arguments(self) -> tuple[Any, ...]:
        """The tensors with respect to which the weights are differentiated; None for keys that are the queries."""
        W_q, W_k, _, _, b_q, b_k, _, _, w_v = self.parameters
        return self.queries, None if self.keys is self.queries else self.keys, W_q, W_k, b_q, b_k, w_v

    def has_changed(self) -> bool:
        if self.versions is None:
            return False
        return versions_of(self.queries, self.keys, self.parameters) != self.versions

    def weights(self, queries: Tensor, keys: Any, W_q: Any, W_k: Any, b_q: Any, b_k: Any, w_v: Any) -> Tensor:
        """The weights (B, H, Q, K), computed from `arguments` by torch's operations."""
        keys = queries if keys is None else keys
        return mathematics.layer_weights(
            queries, keys, (W_q, W_k), (b_q, b_k), w_v, self.num_heads, self.valid_lens, self.empty_rows
        )


class WeightsFunction(Function):
    """apply(source, [weights, recipe], *source.arguments()) -> weights, with gradients with respect to the arguments.

    weights  (B, H, Q, K) or (B*H, Q, K), possibly without numbers so far (`lazy.LazyWeights`): not computed again
    recipe   the `lazy.Recipe` of the weights
    """

    @staticmethod
    def forward(ctx: Any, source: WeightsSource, box: list[Any], *tensors: Any) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.source, ctx.changed = source, source.has_changed()
        # For a compiled call the backward pass compares numbers.  For that keep the recipe and not the result: the
        # result refers to this node, and nothing would free such a cycle.
        weights, recipe = box
        ctx.recipe = recipe if source.versions is None else None
        return weights

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        source, tensors, needs = ctx.source, ctx.saved_tensors, ctx.needs_input_grad[2:]

        def weights_of(*arguments: Any) -> Any:
            weights = source.weights(*arguments).reshape(grad.shape)
            # A difference far above rounding, also of 16-bit floats: the tensors have changed since the call.
            changed = ctx.recipe is not None and not torch.allclose(
                weights.detach(), ctx.recipe.tensor().reshape(grad.shape).to(weights.dtype), rtol=0, atol=0.01
            )
            if ctx.changed or changed:
                raise RuntimeError(
                    "a tensor that attention_weights were computed from has been modified by an inplace operation "
                    "since the call: read attention_weights, or compute their gradient, before an optimizer's step"
                )
            return (weights.to(grad.dtype),)

        return (None, None, *mathematics.gradients(weights_of, tensors, needs, (grad,)))


def run_attention(
    call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, w_v: Optional[Tensor], keep_mask: Optional[Tensor],
    bias: Optional[Tensor], relative_bias: Optional[Tensor] = None, sinks: Optional[Tensor] = None,
) -> tuple[Any, ...]:  # fmt: skip
    """One forward call of the core: (out, weights or None, lse or None, (row_max, row_sum))."""
    terms = call.score_terms(relative_bias, sinks)
    return attention_forward(q, k, v, w_v, call[0], mask_for_core(keep_mask), bias, *call[1:10], True, None, terms)


class AttentionFunction(Function):
    """apply_attention(call, q, k, v, w_v, keep_mask, bias, relative_bias, sinks) -> (out, weights, lse).

    Weights and lse are None unless wanted.  The core differentiates only the output; `mathematics` does the rest.
    """

    @staticmethod
    def forward(ctx: Any, call: AttentionCall, *tensors: Any) -> Any:
        if call.valid_lens is not None:  # the caller may change them before the backward pass
            call = call._replace(valid_lens=np.array(call.valid_lens))
        out, weights, lse, statistics = run_attention(call, *tensors)
        if isinstance(call.seed, LateSeed):
            call = call._replace(seed=call.seed.number)
        ctx.save_for_backward(*tensors, out, *statistics)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return out, weights, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Optional[Tensor], *of_extras: Any) -> Any:
        tensors = ctx.saved_tensors
        if grad_out is None or any(x is not None for x in of_extras) or torch.is_grad_enabled() or in_functorch():
            return None, *attention_gradients(ctx.call, tensors, ctx.needs_input_grad[1:], (grad_out, *of_extras))
        q, k, v, w_v, keep_mask, bias, relative_bias, sinks, out, row_max, row_sum = tensors
        lens, *options = ctx.call[:8]
        terms = ctx.call.score_terms(relative_bias, sinks)
        try:
            operands = grad_out, out, (row_max, row_sum), q, k, v, w_v, lens, mask_for_core(keep_mask), bias
            of_q, of_k, of_v, of_w_v, of_bias, *of_terms = attention_backward(
                *operands, *(*options, ctx.needs_input_grad[6], None, terms)
            )
        except BufferError:
            return None, *attention_gradients(ctx.call, tensors, ctx.needs_input_grad[1:], (grad_out, *of_extras))
        found = (None, of_q, of_k, of_v, of_w_v, None, of_bias, *(of_terms or (None, None)))
        return tuple(grad if need else None for grad, need in zip(found, ctx.needs_input_grad))


apply_attention = quick_apply(AttentionFunction)


def attention_gradients(call: AttentionCall, tensors: Any, needs: Any, grads: Any) -> Any:
    """Like `layer_gradients`, for attention on q, k, v; the first eight `tensors` are those of the call."""
    drop = mathematics.core_dropout(call.dropout, call.seed)
    return mathematics.gradients(partial(mathematics.attention, call, drop), tensors[:8], needs, grads)
