"""The autograd functions: they connect what the core has computed with autograd's graph, and call it to go back.

`LayerFunction` is a whole layer (projections, attention, projection), `AttentionFunction` attention on q, k, v as
given, `WeightsFunction` the attention weights of a layer's call.  Tensors that the backward pass reads are saved with
`save_for_backward`: so autograd notices changes in place before the backward pass, frees memory after it, and
checkpointing works.  `formulas` computes gradients that have gradients themselves.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional
from weakref import ref

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function

from ..._core import attention_backward, attention_forward, layer_backward, with_none, without_none
from ..._layer.kept_weights import Kept, for_backward
from .._private import observed, quick_apply
from .._tensors import mask_for_core, optional_tensor
from . import formulas
from .dropout import core_dropout
from .records import PLAIN_OPTIONS, AttentionCall, AttentionTensors, LayerCall, LayerParameters, new_record
from .scored import Scored
from .turning import turned, turns

# For attended values of this size or more, what the core kept for the backward pass is saved as tensors: autograd
# frees them after it and passes them to its hooks (checkpointing).  If smaller, the node keeps it: some microseconds
# less a call.
LARGE_BYTES = 1 << 18
N_LARGE = 6  # q, k, row_max, row_sum, projected values, attended values
N_INPUTS, N_TENSORS = 3, 3 + len(LayerParameters._fields)  # behind them keep_mask and bias, if there is one of them


def save(ctx: Any, tensors: Any) -> int:
    """Save tensors for the backward pass, and return where None was, for `saved`: programs that draw graphs fail at a
    None among `saved_tensors`."""
    present, absent = without_none(tensors)
    ctx.save_for_backward(*present)
    return absent


def saved(ctx: Any, absent: int) -> tuple[Any, ...]:
    """The tensors, None where there was none.  Raises if one was changed in place, or the graph was freed."""
    return with_none(ctx.saved_tensors, absent)


# --- A whole layer ----------------------------------------------------------------------------------------


class LayerFunction(Function):
    """apply(call, (out, Kept), queries, keys, values, *parameters, [keep_mask, bias]) -> out; not to be called inside a
    transform."""

    @staticmethod
    def forward(ctx: Any, call: LayerCall, done: tuple[Tensor, Kept], *tensors: Any) -> Tensor:
        out, kept = done
        if kept.context.nbytes < LARGE_BYTES:
            ctx.of_call = call, kept, save(ctx, tensors)
        else:
            W_q, W_k = tensors[N_INPUTS], tensors[N_INPUTS + 1]  # without them, copies for attention_weights alone
            q, k = None if W_q is None else kept.q, None if W_k is None else kept.k
            large = q, k, kept.row_max, kept.row_sum, kept.values, kept.context
            ctx.of_call = call, None, save(ctx, (*tensors, *map(optional_tensor, large)))
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        call, kept, absent = ctx.of_call
        tensors = saved(ctx, absent)
        if kept is None:
            tensors, (q, k, row_max, row_sum, *others) = tensors[:-N_LARGE], tensors[-N_LARGE:]
            kept = for_backward(q, k, row_max, row_sum, call.valid_lens, *others)
        needs = ctx.needs_input_grad[2:]
        if not (torch.is_grad_enabled() or observed()):  # create_graph; a mode is active
            try:
                queries, keys, values = tensors[:N_INPUTS]
                parameters, masks = tensors[N_INPUTS:N_TENSORS], tensors[N_TENSORS:]
                lens, heads, empty_rows, dropout, seed, options = call
                wanted = needs
                if masks:
                    wanted, options = (*needs[:N_TENSORS], needs[-1]), call.masked(masks)
                grads: Any = layer_backward(
                    grad_out, kept, queries, keys, values, lens, parameters, parameters[-1], heads, empty_rows,
                    dropout, seed, wanted, True, options,
                )  # fmt: skip
                return (None, None, *grads[:-1], None, grads[-1]) if masks else (None, None, *grads)
            except BufferError:  # a batch of gradients (is_grads_batched), a negated view: no plain memory
                pass
        return None, None, *layer_gradients(tensors, call, needs, grad_out)


connect_layer = quick_apply(LayerFunction)


def layer_gradients(tensors: Any, call: LayerCall, needs: Any, grad_out: Tensor, of_projected: Any = ()) -> Any:
    """Gradients that can be differentiated again; they drop the same weights as the forward call.

    tensors       three inputs, the parameters, and keep_mask and bias if there is one of them
    of_projected  gradients of the projected queries and keys, or None
    """
    drop = core_dropout(call.dropout, call.seed)

    def layer(queries: Tensor, keys: Tensor, values: Tensor, *others: Any) -> Any:
        n = N_TENSORS - N_INPUTS
        parameters, masks = LayerParameters._make(others[:n]), others[n:] or (None, None)
        keys, values = formulas.without_hidden(queries, keys, values, call.of_attention(), masks)
        q, k, v = heads_of(call, (queries, keys, values), parameters)
        heads = AttentionTensors(q, k, v, parameters.w_v, *masks)
        joined = formulas.join_heads(formulas.attention(call.of_attention(), heads, drop, False, True).out)
        W_o = parameters.projections()[3]
        return joined if W_o is None else W_o(joined), *map(formulas.join_heads, (q, k))

    return formulas.gradients(layer, tensors, needs, (grad_out, *of_projected))


def add_through_projections(
    grads: Any, of_projected: Any, inputs: Any, parameters: LayerParameters, call: LayerCall
) -> None:
    """Add to the gradients of a layer's inputs and parameters what flows back through projected queries and keys.

    of_projected  their gradients, (B, rows, features) as they were scored, or None; others are not in `grads` either
    """
    _, keep_mask, bias, turn, rows = call.options or PLAIN_OPTIONS
    queries, keys = inputs
    keys, _ = formulas.without_hidden(queries, keys, keys, call.of_attention(), (keep_mask, bias))
    joint = None if rows is None else next(i for i, W in enumerate(parameters[:3]) if W is not None)
    for i, (grad, x, n) in enumerate(zip(of_projected, (queries, keys), call.heads)):
        W = parameters[i]
        if grad is None or W is None:
            continue
        grad = grad.contiguous()
        if turn is not None:  # back by the same angles
            cos, sin = map(torch.from_numpy, turn)
            grad = formulas.join_heads(turned(formulas.split_heads(grad, n), (cos, -sin)))
        place = i if joint is None else joint
        of_W, of_b = (grads[N_INPUTS + place + behind] for behind in (0, 4))
        if rows is not None:
            W, of_W, of_b = (None if y is None else y.narrow(0, *rows[i]) for y in (W, of_W, of_b))
        flat = grad.flatten(0, 1)
        if grads[i] is not None:
            grads[i].add_(grad @ W)
        if of_W is not None:
            of_W.addmm_(flat.T, x.flatten(0, 1))
        if of_b is not None:
            of_b.add_(flat.sum(0))


def heads_of(call: LayerCall, inputs: tuple[Tensor, ...], parameters: LayerParameters) -> list[Tensor]:
    """Heads (B, H, rows, d) of the inputs as attention gets them: projected, split, turned."""
    (_, _, _, turn, rows), (of_q, of_k) = call.options or PLAIN_OPTIONS, call.heads
    into, found = parameters.projections(rows), []
    for x, W, n, by_place in zip(inputs, into, (of_q, of_k, of_k), (True, into[1] is not None, False)):
        heads = formulas.split_heads(x if W is None else W(x), n)
        if turn and by_place:
            heads = turned(heads, turns(heads) if isinstance(turn, int) else tuple(map(torch.from_numpy, turn)))
        found.append(heads)
    return found


# --- Attention weights ------------------------------------------------------------------------------------


class Source(NamedTuple):
    """What the gradient of a call's attention weights flows back to, as long as the call's graph lives.

    It refers to tensors weakly: they live as long as somebody can go back from the output, and are freed with it.
    Not so to parameters, which live with their module, and in compilers, exporters and transforms, whose tensors
    nobody else holds.
    """

    refs: Any  # the tensors, or weak references to them; None where there is none
    changes: int  # how often autograd has seen one changed in place
    call: Any  # what the weights are computed from, without the tensors

    def arguments(self) -> Optional[list[Any]]:
        """The tensors; None if one is gone."""
        found = [x() if type(x) is ref else x for x in self.refs]
        return None if any(x is not None and y is None for x, y in zip(self.refs, found)) else found

    def has_changed(self, tensors: Any) -> bool:
        return self.changes != changes_of(tensors)

    def weights(self, *tensors: Any) -> Tensor:
        """The weights (B, H, Q, K), computed from `arguments` by torch's operations."""
        raise NotImplementedError


def changes_of(tensors: Any) -> int:
    """How often one of them was changed in place: the count of each only grows, so a sum tells as much."""
    changes = 0
    for x in tensors:
        if x is not None:
            changes += x._version
    return changes


class LayerSource(Source):
    """For a call of a whole layer: its queries, keys, masks (two or none) and the parameters of its scores; `call` is a
    LayerCall."""

    __slots__ = ()

    @staticmethod
    def of(queries: Tensor, keys: Tensor, parameters: LayerParameters, masks: Any, call: LayerCall) -> Source:
        """As few objects as can be: each training step makes them and frees them."""
        W_q, W_k, _, _, b_q, b_k, _, _, w_v = parameters
        changes = changes_of((queries, keys, W_q, W_k, b_q, b_k, w_v, *masks))
        if masks:
            masks = tuple([x if x is None else ref(x) for x in masks])
        return new_record(LayerSource, ((ref(queries), ref(keys), parameters, masks), changes, call))

    def arguments(self) -> Optional[list[Any]]:
        queries, keys, (W_q, W_k, _, _, b_q, b_k, _, _, w_v), masks = self.refs
        queries, keys = queries(), keys()
        found = [x() if type(x) is ref else x for x in masks]
        if queries is None or keys is None or any(x is None and y is not None for x, y in zip(found, masks)):
            return None
        return [queries, keys, W_q, W_k, b_q, b_k, w_v, *found]

    def weights(self, *tensors: Any) -> Tensor:
        queries, keys, W_q, W_k, b_q, b_k, w_v, *given = tensors
        call, masks = self.call.of_attention(), given or (None, None)
        keys, _ = formulas.without_hidden(queries, keys, keys, call, masks)
        q, k = heads_of(self.call, (queries, keys), LayerParameters(W_q, W_k, b_q=b_q, b_k=b_k))
        return Scored(q, k, w_v, call.valid_lens, call.empty_rows, call.causal, *masks).computed()


class HeadsSource(Source):
    """For a call of attention on heads: q, k, w_v as they were scored, or the weights themselves."""

    __slots__ = ()

    @staticmethod
    def of(kept: Any, node: Any) -> Source:
        """node: of the call's output, None in compilers, exporters and transforms"""
        tensors = kept.tensors()
        if node is None:
            return HeadsSource(tensors, changes_of(tensors), kept.detached())
        node.metadata["mha_c"] = kept  # nobody else may hold these tensors as long as the graph lives
        refs = [x if x is None else ref(x) for x in tensors]
        return HeadsSource(refs, changes_of(tensors), kept.detached())

    def weights(self, *tensors: Any) -> Tensor:
        return self.call.weights(*tensors)


GONE = (
    "the graph of the call is gone, so attention_weights have no gradient; keep the call's output (out = model(x)), or "
    "read attention_weights, before the inputs go out of use and before backward"
)


class Shown(NamedTuple):
    """Weights that are shown: a tensor, perhaps without numbers so far, and where their gradient goes."""

    weights: Tensor  # (B, H, Q, K) or (B*H, Q, K)
    source: Source
    gone: bool  # the graph of the call


class WeightsFunction(Function):
    """apply(shown, *source.arguments()) -> the weights, not computed again, with gradients for the arguments.

    If the graph of the call is gone, any tensor that requires a gradient takes the arguments' place.
    """

    @staticmethod
    def forward(ctx: Any, shown: Shown, *tensors: Any) -> Tensor:
        ctx.source, ctx.gone, ctx.absent = shown.source, shown.gone, save(ctx, tensors)
        ctx.changed = not shown.gone and shown.source.has_changed(tensors)
        return shown.weights

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.gone:
            raise RuntimeError(GONE)
        source, tensors, needs = ctx.source, saved(ctx, ctx.absent), ctx.needs_input_grad[1:]

        def weights_of(*arguments: Any) -> Any:
            return (source.weights(*arguments).reshape(grad.shape).to(grad.dtype),)

        if ctx.changed:
            raise RuntimeError(
                "a tensor that attention_weights were computed from has been modified by an inplace operation "
                "since the call: read attention_weights, or compute their gradient, before an optimizer's step"
            )
        return None, *formulas.gradients(weights_of, tensors, needs, (grad,))


# --- Attention --------------------------------------------------------------------------------------------


def run_attention(call: AttentionCall, tensors: AttentionTensors) -> tuple[Any, ...]:
    """One forward call of the core: (out, weights or None, lse or None, (row_max, row_sum))."""
    q, k, v, w_v, keep_mask, bias = tensors[:6]
    mask, terms = mask_for_core(keep_mask), tensors.terms(call.softcap)
    return attention_forward(q, k, v, w_v, call.valid_lens, mask, bias, *call[1:10], True, None, terms)


class AttentionFunction(Function):
    """apply(call, result of run_attention, *tensors) -> (out, weights, lse); the last two are None unless wanted.

    The core differentiates only the output; `formulas` does the rest.
    """

    @staticmethod
    def forward(ctx: Any, call: AttentionCall, done: Any, *tensors: Any) -> Any:
        out, weights, lse, statistics = done
        if call.valid_lens is not None:  # the caller may change them before the backward pass
            call = call._replace(valid_lens=np.array(call.valid_lens))
        ctx.of_call = call, save(ctx, (*tensors, out, *statistics))
        ctx.set_materialize_grads(False)
        return out, weights, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Optional[Tensor], *of_extras: Any) -> Any:
        call, absent = ctx.of_call
        *tensors, out, row_max, row_sum = saved(ctx, absent)
        given, needs = AttentionTensors._make(tensors), ctx.needs_input_grad[2:]
        if not (grad_out is None or any(x is not None for x in of_extras) or torch.is_grad_enabled() or observed()):
            try:
                mask, terms = mask_for_core(given.keep_mask), given.terms(call.softcap)
                operands = grad_out, out, (row_max, row_sum), *given[:4], call.valid_lens, mask, given.bias
                every: Any = *operands, *call[1:8], needs[5], None, terms
                of_q, of_k, of_v, of_w_v, of_bias, *of_terms = attention_backward(*every)
                found = (of_q, of_k, of_v, of_w_v, None, of_bias, *(of_terms or (None, None)))
                return None, None, *(grad if need else None for grad, need in zip(found, needs))
            except BufferError:
                pass
        drop = core_dropout(call.dropout, call.seed)

        def attention(*tensors: Any) -> Any:
            return formulas.attention(call, AttentionTensors._make(tensors), drop, False, False)

        return None, None, *formulas.gradients(attention, given, needs, (grad_out, *of_extras))


connect_attention = quick_apply(AttentionFunction)
