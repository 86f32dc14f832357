"""A call of a layer that neither the core nor an operator computes.

`by_the_book` is the call of a layer with a part that somebody has replaced, hooked or wrapped: the book's own lines,
with the inputs as they are.  `by_torch` is that of a layer whose parts are all plain, on another device, in a transform
or a mode: there keys and values that no query sees have no influence.
"""

from __future__ import annotations

import math
from typing import Any, Optional

import torch
from torch import Tensor, nn

from ..._arguments import calls
from ..._arguments.options import core_corner
from .._tensors import exporting, is_compiling
from .._weights.last import by_steps, in_steps, last_of
from . import formulas
from .attention import attend
from .checks import lengths_of_causal
from .children import standard_parts
from .choice import choose, in_one_call, looked_at
from .dropout import rate
from .inputs import check_call, checked_inputs, children_of
from .records import AttentionCall, AttentionTensors

# --- The book's lines ---------------------------------------------------------------------------------------


def multi_head(layer: Any, inputs: Any, valid_lens: Any, training: Optional[bool], projected: bool) -> Tensor:
    queries, keys, values = inputs
    parts = standard_parts(layer, True)  # if there are any, nothing but projections is replaced: no heads are needed
    heads = layer.transpose_qkv if parts is None else _as_they_are
    queries = heads(layer.W_q(queries))
    keys = heads(keys if projected else layer.W_k(keys))
    values = heads(values if projected else layer.W_v(values))
    if parts is not None:
        output = _attention(layer, parts, (queries, keys, values), valid_lens, training)
        if output is not None:
            return layer.W_o(output)
        queries, keys, values = map(layer.transpose_qkv, (queries, keys, values))
    if valid_lens is not None:
        valid_lens = torch.as_tensor(valid_lens).repeat_interleave(layer.num_heads, dim=0)
    mode = {} if training is None else {"training": training}
    output = layer.attention(queries, keys, values, valid_lens, **mode)
    return layer.W_o(layer.transpose_output(output))


def _as_they_are(rows: Tensor) -> Tensor:
    return rows


def _attention(layer: Any, parts: Any, projected: Any, valid_lens: Any, training: Optional[bool]) -> Optional[Tensor]:
    """The attention of all heads, joined, in one call, where nothing but projections is replaced; else None."""
    return in_one_call(layer, choose(parts, projected, valid_lens), parts, projected, valid_lens, training)


def dot_product(layer: Any, inputs: Any, valid_lens: Any, training: Optional[bool], projected: bool) -> Tensor:
    queries, keys, values = inputs
    if queries.shape[-1] == 0:
        scores = formulas.dot_product_scores(queries, keys)
    else:
        scores = torch.bmm(queries, keys.transpose(1, 2)) / math.sqrt(queries.shape[-1])
    return _attended(layer, scores, values, valid_lens, training)


def additive(layer: Any, inputs: Any, valid_lens: Any, training: Optional[bool], projected: bool) -> Tensor:
    queries, keys, values = inputs
    queries, keys = layer.W_q(queries), keys if projected else layer.W_k(keys)
    parts = standard_parts(layer, True)
    output = _attention(layer, parts, (queries, keys, values), valid_lens, training)
    if output is not None:  # without an array of all features
        return output
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
    if layer._last is not None:
        layer.__dict__["_last"] = None  # perhaps assigned
    if is_compiling():
        return layer._lines(inputs, valid_lens, training, projected)
    try:
        if steps is None:
            return layer._lines(inputs, valid_lens, training, projected)
        if not steps.in_order():
            return _one_by_one(layer, inputs, training, steps)
        seen = steps.appended(*_rows(layer, inputs))
        out = layer._lines((inputs[0], *seen[:2]), seen.valid_lens, training, True)
        inner = layer._inner()
        if seen.steps is not None and isinstance(getattr(inner, "attention_weights", None), Tensor):
            inner.attention_weights = by_steps(inner.attention_weights, seen.steps, seen.n_steps)
        return out
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
        if steps is None and calls.is_of_a_library(error):
            lens = valid_lens if hasattr(layer._inner(), "_layout") else None
            queries, keys, values = inputs
            queries, keys, values = checked_inputs(type(layer).__name__, queries, keys, values, lens)
            check_call(layer, children_of(layer, projected), queries, keys, values, lens)
        raise


def _one_by_one(layer: Any, inputs: Any, training: Optional[bool], steps: Any) -> Tensor:
    """New steps that see other rows of a window each: one call of the book's lines after another, and all weights."""
    outputs, weights = [], []
    for one, rows in steps.one_by_one(inputs):
        outputs.append(by_the_book(layer, rows, None, training, False, one))
        found = getattr(layer._inner(), "attention_weights", None)
        weights += [found] if isinstance(found, Tensor) else []
    if len(weights) == len(outputs):
        n_steps = weights[-1].shape[-1]
        full = [nn.functional.pad(part, (0, n_steps - part.shape[-1])) for part in weights]
        layer._inner().attention_weights = torch.cat(full, -2)
    return torch.cat(outputs, 1)


def _rows(layer: Any, inputs: Any) -> Any:
    """What a call with a cache appends: keys and values, through W_k and W_v where the layer has these."""
    children = children_of(layer, False)
    return [children[slot](x) if slot in children else x for slot, x in enumerate(inputs) if slot > 0]


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
        seen = steps.appended(*_rows(layer, inputs))
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
