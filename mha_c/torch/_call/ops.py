"""A call of a layer as an operator of torch's dispatcher, its gradients and its weights as others, for torch.compile.

Eager calls take a shorter way to the core (`core.py`).  An operator always has as many results as its schema says:
where there is no result, it returns an empty tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Optional, Union

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function

from ..._core import attention_backward, attention_weights, layer_backward, layer_forward
from ..._layer.kept_weights import Kept, for_backward
from .._private import has_operators, surely
from .._tensors import draw_seed_tensor, lengths, mask_for_core, result_type, without_subclass
from .._weights.last import Last
from .attention import any_needs_grad
from .autograd import HeadsSource, add_through_projections, layer_gradients, save, saved
from .checks import checked_lengths
from .children import Parts
from .dropout import number, rate
from .formulas import gradients, split_heads
from .records import LayerCall, LayerInputs, LayerParameters, Options, pair
from .scored import Computed, Scored
from .turning import turn_for_core

if TYPE_CHECKING:
    from ..._types import Corner, EmptyRows

N_TAPE = 7  # projected q, k, v; context; row_max, row_sum; lengths
N_PROJECTED = 2  # of these q and k, which have gradients: of attention weights
N_TENSORS = 15  # queries, keys, values; lengths; nine parameters; keep_mask, bias
_LAYER = (
    "Tensor queries, Tensor keys, Tensor values, Tensor? valid_lens, Tensor? W_q, Tensor? W_k, Tensor? W_v, "
    "Tensor? W_o, Tensor? b_q, Tensor? b_k, Tensor? b_v, Tensor? b_o, Tensor? w_v, Tensor? keep_mask, Tensor? bias, "
    "int num_heads, int num_kv_heads, str empty_rows, float dropout, str causal, int turns, int[] rows, Tensor? seed"
)
N_GRADS = 13  # of inputs, parameters and bias
_WEIGHTS = (
    "Tensor q, Tensor k, Tensor? w_v, Tensor? bias, Tensor? valid_lens, Tensor row_max, Tensor row_sum, "
    "Tensor? keep_mask, str empty_rows, str causal"
)
N_OPERANDS, N_KEPT = 4, 8  # q, k, w_v, bias, which may need gradients; all its tensors
SCHEMAS = {
    "layer": f"({_LAYER}) -> ({', '.join(['Tensor'] * (1 + N_TAPE))})",
    "layer_forward": f"({_LAYER}) -> ({', '.join(['Tensor'] * (1 + N_TAPE))})",
    "layer_with_weights": f"({_LAYER}) -> (Tensor, Tensor)",
    "layer_backward": "(Tensor grad_out, Tensor? grad_q, Tensor? grad_k, "
    f"{', '.join(f'Tensor t{i}' for i in range(N_TAPE))}, {_LAYER}, bool[] needs) "
    f"-> ({', '.join(['Tensor'] * N_GRADS)})",
    "weights": f"({_WEIGHTS}) -> Tensor",
    "weights_forward": f"({_WEIGHTS}) -> Tensor",
    "weights_backward": f"(Tensor grad, {_WEIGHTS}, bool[] needs) -> ({', '.join(['Tensor'] * N_OPERANDS)})",
}


class Words(NamedTuple):
    """The arguments of the operator behind its tensors, in the order of the schema."""

    num_heads: int
    num_kv_heads: int
    empty_rows: EmptyRows
    dropout: float
    causal: Union[Corner, Literal[""]]  # "": none
    turns: int  # features of a head that is turned by its position; 0: none is
    rows: list[int]  # (first, number) of those of W_q, W_k, W_v in a joint weight; [] without one

    def options(self, masks: Any, n_rows: int, dtype: torch.dtype) -> Options:
        turn = turn_for_core(0, n_rows, self.turns, dtype) if self.turns else None
        rows = tuple(zip(self.rows[::2], self.rows[1::2])) or None
        keep_mask, bias = masks
        return Options(self.causal or None, keep_mask, bias, turn, rows)

    def call(self, valid_lens: Any, seed: Any, options: Options) -> LayerCall:
        heads: Any = self.num_heads if self.num_heads == self.num_kv_heads else (self.num_heads, self.num_kv_heads)
        return LayerCall(valid_lens, heads, self.empty_rows, self.dropout, seed, options)


def call(module: Any, parts: Parts, inputs: LayerInputs, valid_lens: Any, training: Any, options: Options) -> Tensor:
    """The output of a call of a layer, in the type of queries."""
    dtype, p = result_type(inputs[0].dtype), float(rate(parts.dropout, training))
    (parameters, holder, _, _), (queries, keys, values), options = parts.in_one_type(inputs, options)
    lens = None if valid_lens is None else checked_lengths(valid_lens, queries)
    masks, (heads, kv_heads) = options[1:3], pair(module._head_counts())
    rows = [n for pair in options.rows or () for n in pair]
    words = Words(heads, kv_heads, module.empty_rows, p, options.causal or "", module._turned_features(), rows)
    seed = draw_seed_tensor() if p else None
    arguments = (queries, keys, values, lens, *parameters, *masks, *words, seed)
    records = torch.is_grad_enabled() and any_needs_grad((queries, keys, values, options.bias), parameters)
    if module._last is not None:
        module.__dict__["_last"] = None
    if not records and surely(_weights_are_smaller(arguments, words)):  # nothing else is kept, as in an eager call
        out, weights = torch.ops.mha_c.layer_with_weights(*arguments)
        holder["_last"] = Last(Computed(weights), dtype)
        return out.to(dtype)
    out, q, k, _, _, row_max, row_sum, met = torch.ops.mha_c.layer(*arguments)
    used = [x.clone() if W is None else y for y, W, x in zip((q, k), parameters, (queries, keys))]
    q, k = (split_heads(x, n) for x, n in zip(used, (heads, kv_heads)))
    w_v, keep_mask, bias = (None if x is None else x.clone() for x in (parameters.w_v, *masks))
    lens = None if lens is None else met
    scored = Scored(q, k, w_v, lens, module.empty_rows, options.causal, keep_mask, bias, (row_max, row_sum))
    holder["_last"] = Last(scored, dtype, HeadsSource(scored.tensors(), 0, scored) if records else None)
    return out.to(dtype)


def _weights_are_smaller(arguments: Any, words: Words) -> Any:
    """Whether the core keeps the weights themselves of a call without gradients: csrc/python/args_layer.c."""
    (batch, n_queries, _), n_keys = arguments[0].shape, arguments[1].shape[1]
    sizes = words.rows[1::2] or (None, None)
    of_q, of_k = (
        x.shape[2] if W is None else _out_features(W, size) for x, W, size in zip(arguments[:2], arguments[4:6], sizes)
    )
    return batch * words.num_heads * n_queries * n_keys <= batch * (n_queries * of_q + n_keys * of_k)


def _out_features(weight: Any, size: Any) -> Any:
    """Of a projection, whose weight may be `size` rows of a joint one."""
    return weight.shape[0] if size is None else size


# --- The kernels --------------------------------------------------------------------------------------------


def _tensor(value: Any, like: Tensor, dtype: Optional[torch.dtype] = None) -> Tensor:
    return torch.from_numpy(value) if value is not None else like.new_empty(0, dtype=dtype or like.dtype)


class _OperatorCall(NamedTuple):
    """The arguments of the operator, as the core takes them."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    valid_lens: Any
    parameters: LayerParameters
    call: LayerCall

    @classmethod
    def of(cls, arguments: Any) -> _OperatorCall:
        tensors, words, seed = arguments[:N_TENSORS], Words(*arguments[N_TENSORS:-1]), arguments[-1]
        queries, keys, values, lens, *nine, keep_mask, bias = map(without_subclass, tensors)
        options = words.options((keep_mask, bias), max(queries.shape[1], keys.shape[1]), queries.dtype)
        call = words.call(lens, number(seed), options.for_core(True))
        return cls(queries, keys, values, lens, LayerParameters(*nine), call)


def _layer(*arguments: Any) -> tuple[Tensor, ...]:
    queries, keys, values, valid_lens, parameters, call = _OperatorCall.of(arguments)
    out, tape = layer_forward(
        queries, keys, values, lengths(valid_lens), parameters, parameters.w_v, *call[1:5], True, call.options
    )
    kept = Kept._make(tape)
    q, k = None if parameters.W_q is None else kept.q, None if parameters.W_k is None else kept.k
    lens = kept.lengths
    if lens is None and valid_lens is not None:  # the core does not keep lengths that hide no key
        lens = np.full(tuple(valid_lens.shape), keys.shape[1])
    parts = q, k, kept.values, kept.context, kept.row_max, kept.row_sum
    return (out, *[_tensor(part, queries) for part in parts], _tensor(lens, keys, torch.int64))


def _layer_with_weights(*arguments: Any) -> tuple[Tensor, Tensor]:
    queries, keys, values, valid_lens, parameters, call = _OperatorCall.of(arguments)
    lens = lengths(valid_lens)
    out, kept = layer_forward(queries, keys, values, lens, parameters, parameters.w_v, *call[1:5], False, call.options)
    return out, _tensor(kept[1], queries)


def _layer_with_weights_fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    out, words, queries = _layer_fake(*arguments)[0], Words(*arguments[N_TENSORS:-1]), arguments[0]
    return out, queries.new_empty(queries.shape[0], words.num_heads, queries.shape[1], arguments[1].shape[1])


def _layer_fake(*arguments: Any) -> tuple[Tensor, ...]:
    (queries, keys, values, valid_lens, *nine, _, _), words = arguments[:N_TENSORS], Words(*arguments[N_TENSORS:-1])
    (W_q, W_k, W_v, W_o, *_), sizes = nine, words.rows[1::2] or (None,) * 3
    (batch, n_queries, _), n_keys = queries.shape, keys.shape[1]
    q, k, v = (
        queries.new_empty(0 if W is None else (batch, rows, _out_features(W, size)))
        for W, rows, size in zip((W_q, W_k, W_v), (n_queries, n_keys, n_keys), sizes)
    )
    of_values = values.shape[2] if W_v is None else v.shape[2]
    context = queries.new_empty(batch, n_queries, of_values // words.num_kv_heads * words.num_heads)
    row_max, row_sum = (queries.new_empty(batch, words.num_heads, n_queries) for _ in range(2))
    lens = queries.new_empty((0,) if valid_lens is None else valid_lens.shape, dtype=torch.int64)
    out = queries.new_empty(batch, n_queries, context.shape[2] if W_o is None else W_o.shape[0])
    return out, q, k, v, context, row_max, row_sum, lens


def _weights(*arguments: Any) -> Tensor:
    q, k, w_v, bias, lens, row_max, row_sum, keep_mask = map(without_subclass, arguments[:N_KEPT])
    empty_rows, causal = arguments[N_KEPT:]
    options = Options(causal or None, keep_mask, bias).for_core(True)
    w_v = None if w_v is None else w_v.reshape(-1)
    found: Any = attention_weights(q, k, w_v, lengths(lens), row_max, row_sum, empty_rows, options)
    return _tensor(found, q) if isinstance(found, np.ndarray) else found


def _weights_fake(q: Tensor, k: Tensor, *_: Any) -> Tensor:
    return q.new_empty(*q.shape[:3], k.shape[2])


def _is_zero(grad: Tensor) -> bool:
    """Whether it is a gradient of weights that nobody used: a compiler gives zeros then."""
    return not grad.any()


def _weights_grads(grad: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """The weights are what attention gives for values that are the rows of the unit matrix: so the core goes back."""
    (*tensors, empty_rows, causal), needs = rest[:-1], rest[-1]
    if _is_zero(grad):
        return tuple(x.zero_() for x in _weights_grads_fake(grad, *rest))
    q, k, w_v, bias, lens, row_max, row_sum, keep_mask = map(without_subclass, tensors)
    w_v = None if w_v is None else w_v.reshape(-1)
    unit = torch.eye(k.shape[2], dtype=k.dtype).expand(*k.shape[:2], -1, -1)
    grads: Any = attention_backward(
        without_subclass(grad), _weights(*rest[:-1]), (row_max, row_sum), q, k, unit, w_v, lengths(lens),
        mask_for_core(keep_mask), bias, causal or None, -1, -1, None, 0.0, 0, empty_rows, needs[3],
    )  # fmt: skip
    of_q, of_k, _, of_w_v, of_bias = grads[:5]
    found = zip((of_q, of_k, of_w_v, of_bias), _weights_grads_fake(grad, *rest))
    return tuple(x if grad is None or not x.numel() else x.copy_(grad.reshape(x.shape)) for grad, x in found)


def _weights_grads_fake(grad: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    operands = zip(rest[:N_OPERANDS], rest[-1])
    return tuple(torch.empty_like(x) if want and x is not None else grad.new_empty(0) for x, want in operands)


def _layer_grads(grad_out: Tensor, grad_q: Any, grad_k: Any, *rest: Any) -> tuple[Tensor, ...]:
    tape, needs = rest[:N_TAPE], rest[-1]
    queries, keys, values, valid_lens, parameters, call = _OperatorCall.of(rest[N_TAPE:-1])
    *projected, context, row_max, row_sum, lens = (x.detach().numpy() for x in tape)
    q, k, v = (None if W is None else x for x, W in zip(projected, parameters))
    lens = None if valid_lens is None else lens
    kept = for_backward(q, k, row_max, row_sum, lens, v, context)
    has_bias = call.options is not None and call.options.bias is not None
    grads = layer_backward(
        without_subclass(grad_out), kept, queries, keys, values, lens, parameters, parameters.w_v, *call[1:5],
        tuple(needs if has_bias else needs[:-1]), False, call.options,
    )  # fmt: skip
    grads = grads if has_bias else (*grads, None)
    used = [None if grad is None or _is_zero(grad) else without_subclass(grad) for grad in (grad_q, grad_k)]
    if used[0] is not None or used[1] is not None:
        add_through_projections(grads, used, (queries, keys), parameters, call)
    return tuple(queries.new_empty(0) if grad is None else grad for grad in grads)


def _layer_grads_fake(grad_out: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    inputs = rest[N_PROJECTED + N_TAPE :]
    queries, keys, values, _, *nine, _, bias = inputs[:N_TENSORS]
    results = zip((queries, keys, values, *nine, bias), rest[-1])
    return tuple(queries.new_empty(x.shape if want and x is not None else (0,)) for x, want in results)


# --- Their gradients ----------------------------------------------------------------------------------------


class LayerOperator(Function):
    """apply(*arguments of the operator) -> its results, of which the output, q and k have gradients."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        found = torch.ops.mha_c.layer_forward(*arguments)
        ctx.options, ctx.size = arguments[N_TENSORS:-1], found[0].shape
        ctx.absent = save(ctx, (*arguments[:N_TENSORS], arguments[-1], *found[1:]))
        ctx.mark_non_differentiable(*found[1 + N_PROJECTED :])
        ctx.set_materialize_grads(False)
        return found

    @staticmethod
    def backward(ctx: Any, grad_out: Optional[Tensor], *of_tape: Any) -> Any:
        tensors, words = saved(ctx, ctx.absent), Words(*ctx.options)
        needs = [ctx.needs_input_grad[i] for i in (0, 1, 2, *range(4, 13), 14)]
        (*inputs, seed), tape = tensors[: N_TENSORS + 1], tensors[N_TENSORS + 1 :]
        of_projected = [None if W is None else grad for W, grad in zip(inputs[4:6], of_tape)]
        if grad_out is None:  # weights alone are used
            grad_out = inputs[0].new_zeros(ctx.size)
        if torch.is_grad_enabled():  # create_graph
            options = words.options((None, None), max(inputs[0].shape[1], inputs[1].shape[1]), inputs[0].dtype)
            given, wanted = [*inputs[:3], *inputs[4:]], [*needs[:12], False, needs[12]]
            grads = layer_gradients(given, words.call(inputs[3], seed, options), wanted, grad_out, of_projected)
            grads = [*grads[:12], grads[13]]
        else:
            if words.rows:  # one weight, whose gradient is in the first of its places
                first = next(i for i, W in enumerate(inputs[4:7]) if W is not None)
                needs = [need and (i % 4 == (first + 3) % 4 or not _of_inner(i)) for i, need in enumerate(needs)]
            grads = torch.ops.mha_c.layer_backward(grad_out, *of_projected, *tape, *inputs, *words, seed, needs)
        found = [grad if need else None for grad, need in zip(grads, needs)]
        return (*found[:3], None, *found[3:12], None, found[12], *(None,) * (len(words) + 1))


class WeightsOperator(Function):
    """apply(*arguments of the operator) -> the weights, with gradients for q, k, w_v and bias."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        ctx.words, ctx.absent = arguments[N_KEPT:], save(ctx, arguments[:N_KEPT])
        return torch.ops.mha_c.weights_forward(*arguments)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        tensors, needs = saved(ctx, ctx.absent), ctx.needs_input_grad[:N_OPERANDS]
        if torch.is_grad_enabled():  # create_graph
            (q, k, w_v, bias, lens, _, _, keep_mask), (empty_rows, causal) = tensors, ctx.words
            call = Scored(q, k, w_v, lens, empty_rows, causal or None, keep_mask, bias)
            grads = gradients(lambda *operands: (call.weights(*operands),), tensors[:N_OPERANDS], needs, (grad,))
        else:
            grads = torch.ops.mha_c.weights_backward(grad, *tensors, *ctx.words, needs)
        return (*(grad if need else None for grad, need in zip(grads, needs)), *(None,) * (N_KEPT - N_OPERANDS + 2))


def _by(function: Any, forward: str, n_tensors: int) -> Any:
    """An operator with gradients in terms of those without, which are all that a compiled program runs: torch asks
    each operator that has gradients of its own for them at each call, for some 20 us."""

    def operator(*arguments: Any) -> Any:
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in arguments[:n_tensors]):
            return function.apply(*arguments)
        return getattr(torch.ops.mha_c, forward)(*arguments)

    return operator


def _of_inner(i: int) -> bool:
    """Whether gradient i is that of W_q, W_k, W_v or of their biases."""
    return 3 <= i < 6 or 7 <= i < 10


if has_operators:
    for name, (kernel, fake) in {
        "layer_forward": (_layer, _layer_fake), "layer_backward": (_layer_grads, _layer_grads_fake),
        "layer_with_weights": (_layer_with_weights, _layer_with_weights_fake),
        "weights_forward": (_weights, _weights_fake), "weights_backward": (_weights_grads, _weights_grads_fake),
    }.items():  # fmt: skip
        torch.library.define(f"mha_c::{name}", SCHEMAS[name])
        torch.library.impl(f"mha_c::{name}", "cpu", kernel)
        torch.library.register_fake(f"mha_c::{name}", fake)
    for name, operator in {
        "layer": _by(LayerOperator, "layer_forward", N_TENSORS),
        "weights": _by(WeightsOperator, "weights_forward", N_OPERANDS),
    }.items():
        torch.library.define(f"mha_c::{name}", SCHEMAS[name])
        torch.library.impl(f"mha_c::{name}", "CompositeImplicitAutograd", operator)
