"""Calls of the core as operators of torch's dispatcher, for torch.compile, torch.export and torch.jit.trace.

Eager calls take a shorter way to the core (`autograd.py`).  An operator always has as many results as its schema
says: where there is no result, it returns an empty tensor.
"""

from __future__ import annotations

from typing import Any, Optional

import numpy as np
import torch
from torch import Tensor

from ..._core import attention_backward, dropout_factors, isa, layer_backward, layer_forward
from ..._layer.kept_weights import for_backward, saved_weights
from .._private import has_operators, known_to_compilers
from .._tensors import array, is_compiling, lengths, without_subclass
from .autograd import attention_gradients, layer_gradients, run_attention
from .mathematics import AttentionCall

N_TAPE = 7  # projected q, k, v; context; row_max, row_sum; lengths
_LAYER = (
    "Tensor queries, Tensor keys, Tensor values, Tensor? valid_lens, Tensor? W_q, Tensor? W_k, Tensor? W_v, "
    "Tensor? W_o, Tensor? b_q, Tensor? b_k, Tensor? b_v, Tensor? b_o, Tensor? w_v, int num_heads, str empty_rows, "
    "float dropout, Tensor? seed"
)
# others: valid_lens, b_q, b_k, b_v, b_o, w_v, seed, or [] in most calls, because every argument takes time.
_INFERENCE = (
    "Tensor queries, Tensor keys, Tensor values, Tensor? W_q, Tensor? W_k, Tensor? W_v, Tensor? W_o, "
    "Tensor?[] others, int num_heads, str empty_rows, float dropout, bool keeps_weights"
)
_ATTENTION = (
    "Tensor q, Tensor k, Tensor v, Tensor? w_v, Tensor? valid_lens, Tensor? keep_mask, Tensor? bias, str? causal, "
    "int left, int right, float? scale, float dropout, Tensor? seed, str empty_rows"
)
SCHEMAS = {
    "layer": f"({_LAYER}) -> ({', '.join(['Tensor'] * (1 + N_TAPE))})",
    "layer_inference": f"({_INFERENCE}) -> Tensor[]",
    "layer_backward": f"(Tensor grad_out, {', '.join(f'Tensor t{i}' for i in range(N_TAPE))}, {_LAYER}, "
    f"bool[] needs) -> ({', '.join(['Tensor'] * 12)})",
    "weights": "(Tensor q, Tensor k, Tensor? w_v, Tensor row_max, Tensor row_sum, Tensor lens, int num_heads, "
    "str empty_rows) -> Tensor",
    "attention": f"({_ATTENTION}, bool return_weights, bool return_lse) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "attention_backward": f"(Tensor grad_out, Tensor out, Tensor row_max, Tensor row_sum, {_ATTENTION}, bool bias_grad)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "dropout_factors": "(Tensor weights, float dropout, Tensor seed) -> Tensor",
}
_NO_OTHERS = (None,) * 7


def _tensor(value: Any, like: Tensor, dtype: Optional[torch.dtype] = None) -> Tensor:
    return torch.from_numpy(value) if value is not None else like.new_empty(0, dtype=dtype or like.dtype)


def _seed(seed: Optional[Tensor]) -> int:
    return 0 if seed is None else int(seed.item()) % 2**64


def _lens(lens: Tensor) -> Any:
    return lens.numpy() if lens.numel() else None


# --- A whole layer ----------------------------------------------------------------------------------


def _layer(queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Any, *rest: Any) -> tuple[Tensor, ...]:
    *parameters, num_heads, empty_rows, dropout, seed = rest
    queries, keys, values, *parameters = map(without_subclass, (queries, keys, values, *parameters))
    out, kept = layer_forward(
        queries, keys, values, lengths(valid_lens), tuple(parameters), parameters[8], num_heads, empty_rows, dropout,
        _seed(seed), True,
    )  # fmt: skip
    _, _, q, k, _, row_max, row_sum, lens, _, _, v, context = kept
    q, k = (None if W is None else x for x, W in ((q, parameters[0]), (k, parameters[1])))
    parts = q, k, v, context, row_max, row_sum
    return (out, *[_tensor(part, queries) for part in parts], _lens_tensor(lens, valid_lens, keys))


def _lens_tensor(kept: Any, valid_lens: Any, keys: Tensor) -> Tensor:
    if kept is None and valid_lens is not None:  # the core does not keep lengths that hide no key
        kept = np.full(tuple(valid_lens.shape), keys.shape[1])
    return _tensor(kept, keys, torch.int64)


def _layer_fake(queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Any, *rest: Any) -> tuple[Tensor, ...]:
    (W_q, W_k, W_v, W_o, *_), num_heads = rest[:8], rest[9]
    (batch, n_queries, _), n_keys = queries.shape, keys.shape[1]
    q, k, v = (
        queries.new_empty(0 if W is None else (batch, rows, W.shape[0]))
        for W, rows in ((W_q, n_queries), (W_k, n_keys), (W_v, n_keys))
    )
    context = queries.new_empty(batch, n_queries, values.shape[2] if W_v is None else W_v.shape[0])
    row_max, row_sum = (queries.new_empty(batch, num_heads, n_queries) for _ in range(2))
    lens = queries.new_empty((0,) if valid_lens is None else valid_lens.shape, dtype=torch.int64)
    return _out_fake(queries, values, W_v, W_o), q, k, v, context, row_max, row_sum, lens


def keeps_weights(inputs: Any, parameters: Any, num_heads: int) -> Optional[bool]:
    """Whether the core keeps the weights of a call: it does if they are not more numbers than q and k, else q and k.

    None if a compiler does not know the sizes.
    """
    queries, keys, _ = inputs
    batch, n_queries, features = queries.shape
    n_keys = keys.shape[1]
    if parameters[0] is not None:
        features = parameters[0].shape[0]
    n_weights, n_others = batch * num_heads * n_queries * n_keys, batch * (n_queries + n_keys) * features
    if not is_compiling() and type(n_weights) is int:
        return bool(n_weights <= n_others)
    if known_to_compilers(n_weights <= n_others):
        return True
    return False if known_to_compilers(n_weights > n_others) else None


def _layer_inference(
    queries: Tensor, keys: Tensor, values: Tensor, W_q: Any, W_k: Any, W_v: Any, W_o: Any, others: Any, num_heads: int,
    empty_rows: Any, dropout: float, keeps: bool,
) -> list[Tensor]:  # fmt: skip
    """A call that records no gradient: [out, weights] where `keeps_weights`, else [out, q, k, w_v, row_max, row_sum,
    lengths]."""
    if not (type(queries) is type(keys) is type(values) is Tensor):
        queries, keys, values = map(without_subclass, (queries, keys, values))
    valid_lens, *biases, w_v, seed = others or _NO_OTHERS
    lens, drawn = None if valid_lens is None else lengths(valid_lens), _seed(seed)
    parameters = W_q, W_k, W_v, W_o, *biases, w_v
    out, kept = layer_forward(queries, keys, values, lens, parameters, w_v, num_heads, empty_rows, dropout, drawn)
    if keeps:
        return [out, torch.from_numpy(kept[1])]
    q, k, scorer, row_max, row_sum, lens = kept[2:8]
    parts = q, k, None if scorer is None else scorer[None], row_max, row_sum
    return [out, *[_tensor(part, queries) for part in parts], _lens_tensor(lens, valid_lens, keys)]


def _layer_inference_fake(*call: Any) -> list[Tensor]:
    queries, keys, values, W_q, _, W_v, W_o, others, num_heads, _, _, keeps = call
    valid_lens, *_, w_v, _ = others or _NO_OTHERS
    (batch, n_queries, features), n_keys = queries.shape, keys.shape[1]
    out = _out_fake(queries, values, W_v, W_o)
    if keeps:
        return [out, queries.new_empty(batch, num_heads, n_queries, n_keys)]
    features = features if W_q is None else W_q.shape[0]
    q, k = (queries.new_empty(batch, rows, features) for rows in (n_queries, n_keys))
    row_max, row_sum = (queries.new_empty(batch, num_heads, n_queries) for _ in range(2))
    lens = queries.new_empty((0,) if valid_lens is None else valid_lens.shape, dtype=torch.int64)
    return [out, q, k, queries.new_empty((0,) if w_v is None else w_v.shape), row_max, row_sum, lens]


def _out_fake(queries: Tensor, values: Tensor, W_v: Any, W_o: Any) -> Tensor:
    features = W_o.shape[0] if W_o is not None else values.shape[2] if W_v is None else W_v.shape[0]
    return queries.new_empty(*queries.shape[:2], features)


def _layer_grads(grad_out: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    tape, layer, needs = rest[:N_TAPE], rest[N_TAPE:-1], rest[-1]
    queries, keys, values, valid_lens, *parameters, num_heads, empty_rows, dropout, seed = layer
    *projected, context, row_max, row_sum, lens = (x.detach().numpy() for x in tape)
    q, k, v = (None if W is None else x for x, W in zip(projected, parameters))
    lens = None if valid_lens is None else lens
    kept = for_backward(q, k, row_max, row_sum, lens, v, context)
    tensors = grad_out, queries, keys, values, *parameters
    grad_out, queries, keys, values, *parameters = map(without_subclass, tensors)
    grads = layer_backward(
        grad_out, kept, queries, keys, values, lens, tuple(parameters), parameters[8], num_heads, empty_rows, dropout,
        _seed(seed), tuple(needs[:12]),
    )  # fmt: skip
    return tuple(queries.new_empty(0) if grad is None else grad for grad in grads)


def _layer_grads_fake(grad_out: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    queries, keys, values, _, *parameters = rest[N_TAPE : N_TAPE + 13]
    wanted = (*rest[-1][:11], parameters[8] is not None)
    results = zip((queries, keys, values, *parameters), wanted)
    return tuple(queries.new_empty(x.shape if want and x is not None else (0,)) for x, want in results)


def _layer_setup(ctx: Any, inputs: Any, output: Any) -> None:
    tensors = (*inputs[:13], inputs[16])
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.options = inputs[13:16]
    ctx.needs = [x is not None and x.requires_grad for x in (*inputs[:3], *inputs[4:13])]


def _layer_autograd(ctx: Any, grad_out: Tensor, *_: Any) -> Any:
    *inputs, seed = ctx.saved_tensors[:14]
    tape = ctx.saved_tensors[14:]
    if torch.is_grad_enabled():  # create_graph
        tensors, options = [*inputs[:3], *inputs[4:]], (inputs[3], *ctx.options, seed)
        grads = layer_gradients(tensors, options, ctx.needs, grad_out)
    else:
        grads = torch.ops.mha_c.layer_backward(grad_out, *tape, *inputs, *ctx.options, seed, ctx.needs)
    found = [grad if need else None for grad, need in zip(grads, ctx.needs)]
    return (*found[:3], None, *found[3:12], None, None, None, None)


def _weights(q: Tensor, k: Tensor, w_v: Any, row_max: Tensor, row_sum: Tensor, lens: Tensor, *rest: Any) -> Tensor:
    num_heads, empty_rows = rest
    saved = recompute(q, k, w_v, row_max, row_sum, lens, num_heads, empty_rows)
    return saved_weights(saved, torch.from_numpy)


def recompute(
    q: Tensor, k: Tensor, w_v: Optional[Tensor], row_max: Tensor, row_sum: Tensor, lens: Tensor, num_heads: int,
    empty_rows: str,
) -> Any:  # fmt: skip
    """The argument of `saved_weights`, from the tape of a layer."""
    scorer = None if w_v is None else np.ascontiguousarray(array(w_v)[0])
    arrays = (np.ascontiguousarray(array(x)) for x in (q, k))
    return (isa(), None, *arrays, scorer, array(row_max), array(row_sum), _lens(lens), num_heads, empty_rows)


def _weights_fake(q: Tensor, k: Tensor, w_v: Any, row_max: Tensor, *_: Any) -> Tensor:
    return q.new_empty(*row_max.shape, k.shape[1])


# --- Attention on q, k, v as given ------------------------------------------------------------------


def _attention(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    call, tensors = _core_call(q, k, v, *rest)
    out, weights, lse, statistics = run_attention(call, *tensors)
    return (out, *[q.new_empty(0) if x is None else x for x in (weights, lse, *statistics)])


def _core_call(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[AttentionCall, list[Any]]:
    """The options and tensors of a call as the core takes them."""
    w_v, valid_lens, keep_mask, bias, *options, seed, empty_rows, want_weights, want_lse = rest
    tensors = [without_subclass(x) for x in (q, k, v, w_v, keep_mask, bias)]
    options = [lengths(valid_lens), *options, _seed(seed), empty_rows, want_weights, want_lse, 0.0]
    return AttentionCall._make(options), tensors


def _attention_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    want_weights, want_lse = rest[-2:]
    rows = q.shape[:-1]
    weights = q.new_empty((*rows, k.shape[-2]) if want_weights else (0,))
    lse = q.new_empty(rows if want_lse else (0,))
    return q.new_empty(*rows, v.shape[-1]), weights, lse, q.new_empty(rows), q.new_empty(rows)


def _attention_grads(
    grad_out: Tensor, out: Tensor, row_max: Tensor, row_sum: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    *options, bias_grad = rest
    call, (q, k, v, w_v, keep_mask, bias) = _core_call(q, k, v, *options, False, False)
    grads = attention_backward(
        grad_out, out, (row_max, row_sum), q, k, v, w_v, call.valid_lens, keep_mask, bias, *call[1:8], bias_grad
    )
    return tuple(q.new_empty(0) if grad is None else grad for grad in grads)


def _attention_grads_fake(grad_out: Tensor, out: Tensor, m: Tensor, s: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    q, k, v, w_v, _, _, bias = rest[:7]
    others = (w_v, bias if rest[-1] else None)
    return (*[x.new_empty(x.shape) for x in (q, k, v)], *[q.new_empty(0 if x is None else x.shape) for x in others])


def _attention_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:7], inputs[12], output[0], output[3], output[4])
    ctx.options = (*inputs[7:12], inputs[13])
    ctx.set_materialize_grads(False)
    ctx.needs = [x is not None and x.requires_grad for x in (*inputs[:4], inputs[6])]


def _attention_autograd(ctx: Any, grad_out: Tensor, of_weights: Any, of_lse: Any, *_: Any) -> Any:
    *inputs, seed, out, row_max, row_sum = ctx.saved_tensors
    *options, empty_rows = ctx.options
    if grad_out is None or of_weights is not None or of_lse is not None or torch.is_grad_enabled():
        q, k, v, w_v, valid_lens, keep_mask, bias = inputs
        causal, left, right, scale, dropout = options
        call = AttentionCall(valid_lens, causal, left, right, scale, dropout, seed, empty_rows)
        tensors = q, k, v, w_v, keep_mask, bias, None, None
        needs = *ctx.needs[:4], False, ctx.needs[4], False, False
        *grads, _, of_bias, _, _ = attention_gradients(call, tensors, needs, (grad_out, of_weights, of_lse))
        grads = *grads, of_bias
    else:
        grads = torch.ops.mha_c.attention_backward(
            grad_out, out, row_max, row_sum, *inputs, *options, seed, empty_rows, ctx.needs[4]
        )
    found = [grad if need else None for grad, need in zip(grads, ctx.needs)]
    return (*found[:4], None, None, found[4], *[None] * 9)


def _dropout(weights: Tensor, dropout: float, seed: Tensor) -> Tensor:
    return dropout_factors(weights.detach(), dropout, _seed(seed))


def _dropout_fake(weights: Tensor, dropout: float, seed: Tensor) -> Tensor:
    return torch.empty_like(weights)


def _dropout_vmap(info: Any, in_dims: Any, weights: Tensor, dropout: float, seed: Tensor) -> tuple[Tensor, Any]:
    """Inside vmap: one array of factors for all examples, or one for each seed."""
    of_weights, _, of_seeds = in_dims
    one = weights if of_weights is None else weights.select(of_weights, 0)
    seeds = [seed] if of_seeds is None else seed.unbind(of_seeds)
    factors = [torch.ops.mha_c.dropout_factors(one, dropout, each) for each in seeds]
    return (factors[0], None) if of_seeds is None else (torch.stack(factors), 0)


def _register() -> None:
    library = torch.library
    kernels = {
        "layer": (_layer, _layer_fake),
        "layer_inference": (_layer_inference, _layer_inference_fake),
        "layer_backward": (_layer_grads, _layer_grads_fake),
        "weights": (_weights, _weights_fake),
        "attention": (_attention, _attention_fake),
        "attention_backward": (_attention_grads, _attention_grads_fake),
        "dropout_factors": (_dropout, _dropout_fake),
    }
    for name, (kernel, fake) in kernels.items():
        library.define(f"mha_c::{name}", SCHEMAS[name])
        library.impl(f"mha_c::{name}", "cpu", kernel)
        library.register_fake(f"mha_c::{name}", fake)
    library.register_autograd("mha_c::layer", _layer_autograd, setup_context=_layer_setup)
    library.register_autograd("mha_c::attention", _attention_autograd, setup_context=_attention_setup)
    library.register_vmap("mha_c::dropout_factors", _dropout_vmap)


if has_operators:
    _register()
