"""Calls of layers of attention: ours, and those of the book's names, which keep their weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Optional, Union

import torch
from torch import Tensor, nn

from .._heads import AttendsHeads
from .._module import AttentionModule
from ..layers import OF_BOOK
from .operands import ModelWeights, Operands, versions_of

BOOK_NAMES = frozenset(kind.__name__ for kind in OF_BOOK)
OURS = (AttentionModule, AttendsHeads)


def classes_of_the_book(modules: Optional[Iterable[nn.Module]]) -> Iterator[type[nn.Module]]:
    """The classes of the book's names that are not ours, as d2l has them or a notebook writes them: those of modules,
    or, of None, all there are."""
    for kind in _all_classes() if modules is None else set(map(type, modules)):
        if kind.__name__ in BOOK_NAMES and not issubclass(kind, OURS):
            yield kind


def _all_classes() -> set[type[nn.Module]]:
    met: set[type[nn.Module]] = set()
    ahead: list[type[nn.Module]] = [nn.Module]
    while ahead:
        new = [kind for kind in ahead.pop().__subclasses__() if kind not in met]
        met.update(new)
        ahead += new
    return met


def made_of(module: Any, batch: Optional[int] = None) -> Optional[Union[Operands, ModelWeights]]:
    """What determines the weights of the module's last call, of so many items; None where it has kept none."""
    if isinstance(module, OURS):
        return _of_ours(module)
    inner = getattr(module, "attention", None)
    found = module.__dict__.get("attention_weights")
    if found is None and isinstance(inner, nn.Module):
        found = inner.__dict__.get("attention_weights", inner if isinstance(inner, AttentionModule) else None)
        if found is inner:
            return _of_ours(inner, _heads(module))
    heads = _heads(module)
    if heads is None and isinstance(found, Tensor) and found.dim() == 3 and batch:
        many = getattr(module, "num_heads", None)  # the class computes them itself, and has a row for each head
        heads = many if isinstance(many, int) and found.shape[0] == batch * many else None
    return _with_heads(found, heads)


def _of_ours(module: Any, heads: Optional[int] = None) -> Optional[Union[Operands, ModelWeights]]:
    inner: Any = module._inner() if isinstance(module, AttentionModule) else module
    if module._last is not None:  # its own
        inner = module
    if not isinstance(inner, OURS):  # a program has put another module there
        return made_of(inner)
    last = inner._last
    heads = heads if heads is not None else _heads(module)
    if last is None:
        return None
    scored = last.scored()
    if scored is None:
        return _with_heads(last.weights(heads), heads)
    # No copy: the layer has made one where the caller may change them.
    q, k, w_v, lens, empty_rows, causal, keep_mask, bias, _ = scored
    if heads and q.shape[1] == 1:  # an inner layer, to which heads are a batch
        q, k = (x.reshape(-1, heads, *x.shape[2:]) for x in (q, k))
        lens = None if lens is None else lens[::heads]
    options = {"empty_rows": empty_rows, **({"causal": causal} if causal else {})}
    return Operands(q, k, w_v, lens, keep_mask, bias, options, versions_of(keep_mask, bias))


def _heads(module: Any) -> Optional[int]:
    heads = getattr(module, "num_heads", None)
    many = isinstance(module, AttendsHeads) or getattr(module, "_by_head", False) or "attention" in module._modules
    return heads if isinstance(heads, int) and many else None


def _with_heads(weights: Any, heads: Optional[int]) -> Optional[ModelWeights]:
    if not isinstance(weights, Tensor) or weights.dim() not in (3, 4) or not weights.is_floating_point():
        return None
    weights = weights.detach()
    if weights.dim() == 3:
        if heads and weights.shape[0] % heads:
            return None
        weights = weights[:, None] if not heads else weights.unflatten(0, (-1, heads))
    return ModelWeights(torch.as_tensor(weights))
