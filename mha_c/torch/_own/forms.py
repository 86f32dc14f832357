"""What a call of a reader's module gives: the output, the weights, or both, in some order and shape."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from .plan import put_back

NEAR = 1e-4  # far above rounding in float32, far below the difference of another formula with numbers around 1
# Weights (B, H, Q, K) as a module may show them.
_SHAPES: dict[str, Any] = {
    "heads": lambda w: w,
    "folded": lambda w: w.flatten(0, 1),  # (B * H, Q, K), and (B, Q, K) of one head
    "mean": lambda w: w.mean(1),
    "flat": lambda w: w[:, 0, 0] if w.shape[1] == w.shape[2] == 1 else None,
    "column": lambda w: w[:, 0].transpose(1, 2) if w.shape[1] == 1 else None,
    "heads last": lambda w: w.permute(2, 3, 0, 1),
    "heads first": lambda w: w.transpose(0, 1),
    "bare": lambda w: w[0, 0] if w.shape[:2] == (1, 1) else None,
    "bare heads": lambda w: w[0] if w.shape[0] == 1 else None,
    "time first": lambda w: w[:, 0, 0].t() if w.shape[1] == w.shape[2] == 1 else None,
    "keys first": lambda w: w[:, 0].permute(2, 0, 1) if w.shape[1] == w.shape[2] == 1 else None,
}


# The output (B, Q, .) as a module may give it, if not in the axes of its queries.
_OUTS: dict[str, Any] = {
    "out of one query": lambda x: x[:, 0] if x.dim() == 3 and x.shape[1] == 1 else None,
    "out by items": lambda x: x,
    "out by rows": lambda x: x.transpose(0, 1) if x.dim() == 3 else None,
}


def near(a: Any, b: Any) -> bool:
    """Whether two results are equal but for rounding; NaN in the first counts as what the second has."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or a.shape != b.shape:
        return False
    return torch.allclose(a.to(b.dtype), b, rtol=NEAR, atol=NEAR)


def all_near(grads: list[Tensor], others: list[Tensor]) -> bool:
    """Whether gradients of one loss are equal but for rounding.  Those that are 0 in exact numbers, as of a bias of
    keys, are as far from it as the largest ones round."""
    atol = max([NEAR, *(0.1 * NEAR * float(x.abs().max()) for x in others if x.numel())])
    return all(a.shape == b.shape and torch.allclose(a, b, rtol=NEAR, atol=atol) for a, b in zip(grads, others))


def shaped(weights: Tensor, form: str) -> Optional[Tensor]:
    """Weights (B, H, Q, K) in a form; None where these sizes have no such form."""
    found: Optional[Tensor] = _SHAPES[form](weights)
    return found


def form_of(result: Any, out: Tensor, weights: Tensor, layout: str) -> Any:
    """What a result is: "out", a form of weights, None for None, or several of these, in a tuple, a named tuple or a
    dict as the result is; "?" where it is neither."""
    if is_several(result):
        return like(result, [form_of(x, out, weights, layout) for x in _parts(result)])
    if result is None:
        return None
    if near(result, put_back(out, layout)):
        return "out"
    outs = ((form, of(out)) for form, of in _OUTS.items())
    return next((form for form, x in outs if x is not None and near(result, x)), form_of_weights(result, weights))


def form_of_weights(result: Any, weights: Tensor) -> str:
    """The form in which these are the weights, or "?"."""
    found = ((form, shaped(weights, form)) for form in _SHAPES)
    return next((form for form, x in found if x is not None and near(result, x)), "?")


def is_known(form: Any) -> bool:
    """Whether it is no "?", and shows anything at all."""
    forms = names(form)
    return "?" not in forms and any(x is not None for x in forms)


def is_several(form: Any) -> bool:
    """Whether a result, or its form, has parts: a tuple, named or not, or a dict."""
    return type(form) in (tuple, dict) or (isinstance(form, tuple) and hasattr(form, "_fields"))


def names(form: Any) -> list[Any]:
    """What a form, or a result, is made of in the end."""
    return [x for part in _parts(form) for x in names(part)] if is_several(form) else [form]


def _parts(several: Any) -> list[Any]:
    return list(several.values() if type(several) is dict else several)


def like(several: Any, parts: list[Any]) -> Any:
    """These parts, put together as those of another result, or form, are."""
    if type(several) is dict:
        return dict(zip(several, parts))
    return tuple(parts) if type(several) is tuple else type(several)(*parts)


def given(form: Any, out: Tensor, weights: Any, layout: str) -> Any:
    """The result of a call in a form; `weights` gives those of a form."""
    if is_several(form):
        return like(form, [given(x, out, weights, layout) for x in _parts(form)])
    if form is None:
        return None
    if form in _OUTS:
        return _OUTS[form](out)
    return put_back(out, layout) if form == "out" else weights(form)


def tensors(result: Any) -> list[Tensor]:
    """The tensors of a result."""
    return [x for x in names(result) if isinstance(x, Tensor)]
