"""A call of a layer that neither the core nor an operator computes.

`by_the_book` is the call of a layer with a part that somebody has replaced, hooked or wrapped: the book's own lines,
with the inputs as they are.  `by_torch` is that of a layer whose parts are all plain, on another device, in a transform
or a mode: there keys and values that no query sees have no influence.
"""

from __future__ import annotations

import math
from typing import Any, Optional

import torch
from torch import Tensor

from ..._arguments import calls
from ..._arguments.options import core_corner
from .._private import unflatten
from .._tensors import exporting, is_compiling
from .._weights.last import in_steps, last_of
from . import formulas
from .attention import attend
from .checks import lengths_of_causal
from .children import is_plain, plain_attention
from .choice import looked_at
from .dropout import rate
from .inputs import check_call, checked_inputs, children_of
from .records import AttentionCall, AttentionTensors

# --- The book's lines ---------------------------------------------------------------------------------------


def multi_head(layer: Any, inputs: Any, valid_lens: Any, training: Optional[bool], W_k: Any, W_v: Any) -> Tensor:
    queries, keys, values = inputs
    queries = layer.transpose_qkv(layer.W_q(queries))
    keys = layer.transpose_qkv(W_k(keys))
    values = layer.transpose_qkv(W_v(values))
    if _drops_as_the_core(layer, (queries, keys, values), training):
        return layer.W_o(layer.transpose_output(_by_heads(layer, (queries, keys, values), valid_lens, training)))
    if valid_lens is not None:
        valid_lens = torch.as_tensor(valid_lens).repeat_interleave(layer.num_heads, dim=0)
    mode = {} if training is None else {"training": training}
    output = layer.attention(queries, keys, values, valid_lens, **mode)
    return layer.W_o(layer.transpose_output(output))


def _drops_as_the_core(layer: Any, heads: Any, training: Optional[bool]) -> bool:
    """Whether the attention inside is a plain one that drops weights.

    What is dropped depends on item and head, so such a call must know its heads: in the book's call they are items.
    """
    inner = plain_attention(layer)
    return inner is not None and bool(rate(inner.dropout, training)) and not looked_at(*heads)


def _by_heads(layer: Any, heads: Any, valid_lens: Any, training: Optional[bool]) -> Tensor:
    """The results (B*H, Q, d) of the plain attention inside, whose call has an axis for the heads."""
    q, k, v = (unflatten(x, 0, (-1, layer.num_heads)) for x in heads)
    inner = layer.attention
    call = AttentionCall(valid_lens, dropout=float(rate(inner.dropout, training)), empty_rows=inner.empty_rows)
    return _kept(inner, call, AttentionTensors(q, k, v), (True, True)).flatten(0, 1)


def dot_product(layer: Any, inputs: Any, valid_lens: Any, training: Optional[bool], W_k: Any, W_v: Any) -> Tensor:
    queries, keys, values = inputs
    if queries.shape[-1] == 0:
        scores = formulas.dot_product_scores(queries, keys)
    else:
        scores = torch.bmm(queries, keys.transpose(1, 2)) / math.sqrt(queries.shape[-1])
    return _attended(layer, scores, values, valid_lens, training)


def additive(layer: Any, inputs: Any, valid_lens: Any, training: Optional[bool], W_k: Any, W_v: Any) -> Tensor:
    queries, keys, values = inputs
    queries, keys = layer.W_q(queries), W_k(keys)
    plain = is_plain(layer.w_v) and layer.w_v.bias is None and plain_attention(layer) is not None
    if plain and not looked_at(queries, keys, values, layer.w_v.weight):  # what is left needs no array of all features
        q, k, v = (x[:, None] for x in (queries, keys, values))
        tensors = AttentionTensors(q, k, v, layer.w_v.weight.squeeze(0))
        call = AttentionCall(valid_lens, dropout=float(rate(layer.dropout, training)), empty_rows=layer.empty_rows)
        return _kept(layer, call, tensors, (False, W_k is _as_it_is))[:, 0]
    scores = layer.w_v(torch.tanh(queries.unsqueeze(2) + keys.unsqueeze(1))).squeeze(-1)
    return _attended(layer, scores, values, valid_lens, training)


def _attended(layer: Any, scores: Tensor, values: Tensor, valid_lens: Any, training: Optional[bool]) -> Tensor:
    if training is not None and training != layer.dropout.training:
        raise ValueError("training= overrides the mode of a plain nn.Dropout: set the mode of the module's own dropout")
    weights = layer.attention_weights = layer._masked_softmax(scores, valid_lens)
    return torch.bmm(layer.dropout(weights), values)


def by_the_book(
    layer: Any, inputs: Any, valid_lens: Any, training: Optional[bool], projected: bool = False, steps: Any = None
) -> Tensor:
    """The output.  Nothing is looked at before the lines do so; an error of theirs is put into our words.

    projected  keys and values have been through W_k and W_v already
    steps      the `decoding.Steps` of a call with a cache
    """
    queries, keys, values = inputs
    children = children_of(layer, projected)
    W_k, W_v = (children.get(slot, _as_it_is) for slot in (1, 2))
    if layer._last is not None:
        layer.__dict__["_last"] = None  # perhaps assigned
    if is_compiling():
        return layer._lines(inputs, valid_lens, training, W_k, W_v)
    try:
        if steps is None:
            return layer._lines(inputs, valid_lens, training, W_k, W_v)
        if not steps.in_order():
            return steps.one_by_one(lambda one, rows: by_the_book(layer, rows, None, training, False, one), inputs)
        seen = steps.appended(W_k(keys), W_v(values))
        return layer._lines((queries, *seen[:2]), seen.valid_lens, training, _as_it_is, _as_it_is)
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
        if steps is None and calls.is_of_a_library(error):
            lens = valid_lens if hasattr(layer._inner(), "_layout") else None
            queries, keys, values = checked_inputs(type(layer).__name__, queries, keys, values, lens)
            check_call(layer, children, queries, keys, values, lens)
        raise


def _as_it_is(x: Tensor) -> Tensor:
    return x


# --- torch's operations -------------------------------------------------------------------------------------


def by_torch(
    layer: Any, inputs: Any, hidden: Any, training: Optional[bool], projected: bool, steps: Any = None
) -> Tensor:
    """The output of a layer whose parts are all plain.  The arguments are those of `by_the_book`, but for `hidden`,
    (valid_lens, causal): torch's kernels have a causal mask that is no array."""
    queries, keys, values = inputs
    seen: Any = None
    valid_lens, corner = hidden[0], core_corner(hidden[1], queries, keys)
    children, empty_rows = children_of(layer, projected), layer.empty_rows
    valid_lens = check_call(layer, children, queries, keys, values, valid_lens if steps is None else None)
    if steps is not None:
        rows = (W(x) if W else x for W, x in zip(map(children.get, (1, 2)), (keys, values)))
        seen = steps.appended(*rows)
        keys, values, valid_lens = seen[:3]
        projected, children, empty_rows = True, children_of(layer, True), "zero"
    elif valid_lens is not None or corner is not None:
        keys, values = formulas.without_hidden(queries, keys, values, valid_lens, empty_rows, corner)
    inputs, weights = (queries, keys, values), [x for W in children.values() for x in W.parameters()]
    if looked_at(*inputs, *weights):
        return by_the_book(layer, inputs, lengths_of_causal(corner, queries, keys, valid_lens), training, projected)
    if layer._last is not None:
        layer.__dict__["_last"] = None
    inner, w_v = layer._inner(), children[8].weight.squeeze(0) if 8 in children else None
    call = AttentionCall(valid_lens, corner, dropout=float(rate(inner.dropout, training)), empty_rows=empty_rows)
    visible = None if seen is None else seen.keep_mask
    if seen is not None and seen.steps is not None:  # rows are used again, so that the weights cannot wait
        call = call._replace(return_weights=True)
    if exporting() and call.hides():  # a tracer keeps sizes of heads as numbers
        visible = formulas.visible_keys(queries, keys, valid_lens, causal=corner)

    def attention_of(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        tensors, given = AttentionTensors(q, k, v, w_v, visible), (0 not in children, 1 not in children)
        out = _kept(inner, call, tensors, given, True)
        if seen is not None:
            inner.__dict__["_last"] = in_steps(inner.__dict__["_last"], seen.steps, seen.n_steps)
        return out

    return formulas.composed(inputs, map(children.get, range(4)), layer.num_heads, attention_of)


def _kept(inner: Any, call: AttentionCall, tensors: AttentionTensors, given: Any, clean: bool = False) -> Tensor:
    """Attention on heads, by one call; `inner` keeps it.  The arguments are those of `attend` and of `last_of`."""
    as_mask = tensors.keep_mask is not None
    found = attend(call._replace(valid_lens=None, causal=None) if as_mask else call, tensors, clean=clean)
    inner.__dict__["_last"] = last_of(call, tensors, found, given)
    return found.out
