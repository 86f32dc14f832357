"""A call of a layer that neither the core nor an operator computes.

`by_the_book` is the call of a layer with a part that somebody has replaced, hooked or wrapped: the book's own lines,
with the inputs as they are.  `by_torch` is that of a layer whose parts are all plain, on another device, in a transform
or a mode: there keys and values that no query sees have no influence.  `of_heads` is either of the layers of the third
generation.
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
from .choice import choose, in_one_call, needs_each_operation
from .dropout import rate
from .inputs import check_call, checked_inputs, children_of
from .records import Asked, AttentionCall, AttentionTensors, LayerInputs

# --- The book's lines ---------------------------------------------------------------------------------------


def multi_head(layer: Any, inputs: LayerInputs, asked: Asked, projected: bool) -> Tensor:
    queries, keys, values = inputs
    parts = standard_parts(layer, True)  # if there are any, nothing but projections is replaced: no heads are needed
    heads = layer.transpose_qkv if parts is None else _as_they_are
    queries = heads(layer.W_q(queries))
    keys = heads(keys if projected else layer.W_k(keys))
    values = heads(values if projected else layer.W_v(values))
    if parts is not None:
        output = _attention(layer, parts, (queries, keys, values), asked)
        if output is not None:
            return layer.W_o(output)
        queries, keys, values = map(layer.transpose_qkv, (queries, keys, values))
    lens = asked.valid_lens
    if lens is not None:
        lens = torch.as_tensor(lens).repeat_interleave(layer.num_heads, dim=0)
    named = {} if asked.training is None else {"training": asked.training}
    for name, mask in (("keep_mask", asked.keep_mask), ("bias", asked.bias)):
        if mask is not None:  # of a row of the batch for each head
            whole = mask.expand(len(queries) // layer.num_heads, layer.num_heads, *mask.shape[-2:])
            named[name] = whole.flatten(0, 1)
    output = layer.attention(queries, keys, values, lens, **named)
    return layer.W_o(layer.transpose_output(output))


def _as_they_are(rows: Tensor) -> Tensor:
    return rows


def _attention(layer: Any, parts: Any, projected: Any, asked: Asked) -> Optional[Tensor]:
    """The attention of all heads, joined, in one call, where nothing but projections is replaced; else None."""
    return in_one_call(layer, choose(parts, projected, asked), parts, projected, asked)


def dot_product(layer: Any, inputs: LayerInputs, asked: Asked, projected: bool) -> Tensor:
    queries, keys, values = inputs
    if queries.shape[-1] == 0:
        scores = formulas.dot_product_scores(queries, keys)
    else:
        scores = torch.bmm(queries, keys.transpose(1, 2)) / math.sqrt(queries.shape[-1])
    return _attended(layer, scores, values, asked)


def additive(layer: Any, inputs: LayerInputs, asked: Asked, projected: bool) -> Tensor:
    queries, keys, values = inputs
    queries, keys = layer.W_q(queries), keys if projected else layer.W_k(keys)
    parts = standard_parts(layer, True)
    output = _attention(layer, parts, (queries, keys, values), asked)
    if output is not None:  # without an array of all features
        return output
    scores = layer.w_v(torch.tanh(queries.unsqueeze(2) + keys.unsqueeze(1))).squeeze(-1)
    return _attended(layer, scores, values, asked)


def _attended(layer: Any, scores: Tensor, values: Tensor, asked: Asked) -> Tensor:
    valid_lens, keep_mask, bias, _, training = asked
    if training is not None and training != layer.dropout.training:
        raise ValueError("training= overrides the mode of a plain nn.Dropout: set the mode of the module's own dropout")
    empty = None
    if keep_mask is not None or bias is not None:  # what they hide stands in the scores, lengths too
        scores, empty = _masked(scores, asked)
        valid_lens = None
    weights = layer._masked_softmax(scores, valid_lens)
    if empty is not None and layer.empty_rows == "zero":
        weights = torch.where(empty, 0.0, weights)
    layer.attention_weights = weights
    return torch.bmm(layer.dropout(weights), values)


def _masked(scores: Tensor, asked: Asked) -> tuple[Tensor, Tensor]:
    """(scores (B, Q, K) with the bias, -inf where a key is hidden and 0 in rows without keys, which rows these are)."""
    keep, bias = (x if x is None or x.dim() == 2 else x[:, 0] for x in asked.masks)
    if bias is not None:
        scores = scores + bias
    visible: Any = formulas.visible_keys(scores, scores.transpose(1, 2), asked.valid_lens)
    visible = scores != -torch.inf if visible is None else visible[:, 0] & (scores != -torch.inf)
    visible = visible if keep is None else visible & keep
    empty = ~visible.any(-1, keepdim=True)
    return torch.where(visible, scores, torch.where(empty, 0.0, -torch.inf).to(scores.dtype)), empty


def by_the_book(layer: Any, inputs: LayerInputs, asked: Asked, projected: bool = False, steps: Any = None) -> Tensor:
    """The output.  Nothing is looked at before the lines do so; an error of theirs is put into our words.

    projected  keys and values have been through W_k and W_v already
    steps      the `decoding.NewSteps` of a call with a cache
    """
    if layer._last is not None:
        layer.__dict__["_last"] = None  # perhaps assigned
    if steps is None and asked.causal is not False:  # the lines have lengths; a sequence that is spread has its own
        of_causal = getattr(layer._inner(), "lengths_of_causal", lengths_of_causal)
        lens = of_causal(asked.causal, inputs[0], inputs[1], asked.valid_lens)
        asked = asked._replace(valid_lens=lens, causal=False)
    if is_compiling():
        return layer._lines(inputs, asked, projected)
    try:
        if steps is None:
            return layer._lines(inputs, asked, projected)
        if not steps.in_order():
            return _one_by_one(layer, inputs, asked, steps)
        seen = steps.appended(*_rows(layer, inputs))
        asked = Asked(seen.valid_lens, seen.masks[0], seen.masks[1], training=asked.training)
        out = layer._lines((inputs[0], seen.keys, seen.values), asked, True)
        inner = layer._inner()
        if seen.steps is not None and isinstance(getattr(inner, "attention_weights", None), Tensor):
            inner.attention_weights = by_steps(inner.attention_weights, seen.steps, seen.n_steps)
        return out
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
        if steps is None and calls.is_of_a_library(error):
            lens = asked.valid_lens if hasattr(layer._inner(), "_layout") else None
            queries, keys, values = inputs
            inputs = checked_inputs(type(layer).__name__, queries, keys, values, lens)
            check_call(layer, children_of(layer, projected), inputs, asked._replace(valid_lens=lens))
        raise


def _one_by_one(layer: Any, inputs: LayerInputs, asked: Asked, steps: Any) -> Tensor:
    """New steps that see other rows of a window each: one call of the book's lines after another, and all weights."""
    outputs, weights = [], []
    for one, rows in steps.one_by_one(inputs):
        outputs.append(by_the_book(layer, rows, Asked(training=asked.training), False, one))
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


def by_torch(layer: Any, inputs: LayerInputs, asked: Asked, projected: bool, steps: Any = None) -> Tensor:
    """The output of a layer whose parts are all plain.  The arguments are those of `by_the_book`; torch's kernels have
    a causal mask that is no array."""
    inputs, call, children = checked(layer, inputs, asked, projected, steps)
    queries, keys, values = inputs
    seen: Any = None
    if steps is not None:
        seen = steps.appended(*_rows(layer, inputs))
        keys, values = seen[:2]
        projected, children = True, children_of(layer, True)
        asked = Asked(seen.valid_lens, seen.masks[0], seen.masks[1], training=asked.training)
        call = call._replace(valid_lens=seen.valid_lens, causal=None, empty_rows="zero")
    inputs, weights = (queries, keys, values), [x for W in children.values() for x in W.parameters()]
    if needs_each_operation(*inputs, *weights):
        return by_the_book(layer, inputs, asked._replace(valid_lens=call.valid_lens), projected)
    if layer._last is not None:
        layer.__dict__["_last"] = None
    inner, w_v = layer._inner(), children[8].weight.squeeze(0) if 8 in children else None
    visible = visible_to_exporters(call, queries, keys, asked.keep_mask)

    def attention_of(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        tensors, given = AttentionTensors(q, k, v, w_v, *asked.masks), (0 not in children, 1 not in children)
        return kept(inner, call, tensors, given, seen, visible, True)

    return formulas.composed(inputs, map(children.get, range(4)), layer.num_heads, attention_of)


def checked(
    layer: Any, inputs: Any, asked: Asked, projected: bool, steps: Any
) -> tuple[Any, AttentionCall, dict[int, Any]]:
    """(the inputs, rows that no query sees being 0; their attention; the projections) of a plain layer."""
    queries, keys, values = inputs
    children, corner = children_of(layer, projected), core_corner(asked.causal, queries, keys)
    lens = check_call(layer, children, inputs, asked._replace(valid_lens=asked.valid_lens if steps is None else None))
    p = float(rate(layer._inner()._modules.get("dropout"), asked.training))
    call = AttentionCall(lens, corner, dropout=p, empty_rows=layer.empty_rows)
    if steps is None and not (lens is corner is asked.keep_mask is asked.bias is None):
        inputs = queries, *formulas.without_hidden(queries, keys, values, call, asked.masks)
    return inputs, call, children


def visible_to_exporters(call: AttentionCall, queries: Tensor, keys: Tensor, keep_mask: Any) -> Optional[Tensor]:
    """All that hides keys as one mask, of inputs (B, rows, .): a tracer keeps sizes of heads as numbers."""
    if not (exporting() and call.hides()):
        return None
    return formulas.visible_keys(queries, keys, call.valid_lens, keep_mask, call.causal)


def kept(
    inner: Any, call: AttentionCall, tensors: AttentionTensors, given: Any, seen: Any = None, visible: Any = None,
    clean: bool = False,
) -> Tensor:  # fmt: skip
    """Attention on heads, by one call; `inner` keeps it.  The arguments are those of `attend` and of `last_of`.

    seen     the `decoding.StepKeys` of a call with a cache
    visible  of `visible_to_exporters`
    """
    if seen is not None and seen.steps is not None:  # rows are used again, so that the weights cannot wait
        call = call._replace(return_weights=True)
    if visible is None:
        found = attend(call, tensors, clean=clean)
    else:
        found = attend(call._replace(valid_lens=None, causal=None), tensors._replace(keep_mask=visible), clean=clean)
    own = {name: x if x is None else x.clone() for name, x in (("keep_mask", tensors[4]), ("bias", tensors[5]))}
    last = last_of(call, tensors._replace(**own), found, given)
    inner.__dict__["_last"] = last if seen is None else in_steps(last, seen.steps, seen.n_steps)
    return found.out


# --- Heads that are turned and share keys -------------------------------------------------------------------


def of_heads(
    layer: Any, inputs: LayerInputs, asked: Asked, projected: bool, steps: Any = None, plain: bool = False
) -> Tensor:
    """The output of a layer of the third generation: its lines, whatever computes the parts.

    plain   all parts are: rows that no query sees have no influence
    The other arguments are those of `by_the_book`.
    """
    seen: Any = None
    if plain and (exporting() or not is_compiling()):
        inputs, call, _ = checked(layer, inputs, asked, projected, steps)
    else:
        lens = asked.valid_lens
        lens = None if lens is None else torch.as_tensor(lens)
        call = AttentionCall(lens, core_corner(asked.causal, *inputs[:2]), empty_rows="zero")
    q, k, v = layer._heads(inputs, projected, 0 if steps is None else steps.cache._steps)
    if steps is not None:
        seen = steps.appended(*map(formulas.join_heads, (k, v)))
        k, v = (formulas.split_heads(x, k.shape[1]) for x in seen[:2])
        call, asked = call._replace(valid_lens=seen.valid_lens, causal=None), Asked(None, *seen.masks)
    if layer._has_own_function():
        layer.__dict__["_last"] = None  # nobody has seen its weights
        out = layer._by_own_function(q, k, v, call, asked.masks)
    else:
        visible = visible_to_exporters(call, inputs[0], inputs[1], asked.keep_mask)
        out = kept(layer, call, AttentionTensors(q, k, v, None, *asked.masks), (False, False), seen, visible)
    joined: Tensor = layer.W_o(formulas.join_heads(out))
    return joined
