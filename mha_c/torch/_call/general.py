"""A call of a layer in the book's lines, child by child: W_o(attention(W_q(queries), W_k(keys), W_v(values)))."""

from __future__ import annotations

from typing import Any, Optional

from torch import Tensor, nn

from .._tensors import exporting
from .._weights.last import last_of
from . import formulas
from .attention import attend
from .children import is_changed, plain_attention
from .choice import looked_at
from .dropout import rate
from .inputs import check_call, children_of
from .records import AttentionCall, AttentionTensors


def call(
    module: Any, inputs: Any, valid_lens: Any, training: Optional[bool], projected: bool, steps: Any = None
) -> Tensor:
    """The output; the module whose attention computes it keeps the call.

    projected  keys and values have been through W_k and W_v already
    steps      the `decoding.Steps` of a call with a cache
    """
    queries, keys, values = inputs
    children, empty_rows, clean = children_of(module, projected), module.empty_rows, False
    W_q, W_k, W_v, W_o, scorer = map(children.get, (0, 1, 2, 3, 8))
    inner = _attention_inside(module, children, inputs)
    # Another attention may see what it likes, and have lengths of its own.
    lens = valid_lens if hasattr(module._inner(), "_layout") else None
    lens = check_call(module, children, queries, keys, values, lens)
    if steps is None and lens is not None:
        valid_lens = lens
        keys, values = formulas.without_hidden(queries, keys, values, lens, empty_rows)
        clean = all(W is None or _is_plain(W) for W in (W_k, W_v))
    elif steps is not None:
        rows = [x if W is None else W(x) for x, W in ((keys, W_k), (values, W_v))]
        keys, values, valid_lens = steps.appended(*rows)
        W_k, W_v, clean, empty_rows = None, None, True, "zero"
    if module._last is not None:
        module.__dict__["_last"] = None  # perhaps assigned
    if inner is None:
        q, k, v = (x if W is None else W(x) for x, W in ((queries, W_q), (keys, W_k), (values, W_v)))
        return module._by_children(q, k, v, valid_lens, training)
    p = float(rate(inner.dropout, training))

    def attention_of(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        tensors = AttentionTensors(q, k, v, None if scorer is None else scorer.weight.squeeze(0))
        options = AttentionCall(valid_lens, dropout=p, empty_rows=empty_rows)
        given = options, tensors
        if exporting() and valid_lens is not None:  # a tracer keeps sizes of heads as numbers
            visible = formulas.visible_keys(queries, keys, valid_lens)
            given = options._replace(valid_lens=None), tensors._replace(keep_mask=visible)
        found = attend(*given, clean=clean)
        inner.__dict__["_last"] = last_of(options, tensors, found, (W_q is None, W_k is None))
        return found.out

    return formulas.composed((queries, keys, values), (W_q, W_k, W_v, W_o), module.num_heads, attention_of)


def _attention_inside(module: Any, children: dict[int, Any], inputs: Any) -> Any:
    """The module whose attention can be computed as a whole; None where each of the book's operations must be seen."""
    scorer = children.get(8)
    if scorer is not None and not (_is_plain(scorer) and scorer.bias is None):
        return None
    # A hooked child may turn weights of a class of its own into plain numbers, as torch's tensor parallel does.
    own = [x for W in children.values() if _is_plain(W) for x in W.parameters()]
    return None if looked_at(*inputs, *own) else plain_attention(module)


def _is_plain(linear: Any) -> bool:
    return type(linear) is nn.Linear and not is_changed(linear)
