"""Who watches, in which thread; and what stands in torch, and in our classes, while somebody does.

torch's functions are seen by a mode, where this torch has modes (2.0): that reaches every name they go by, and torch's
layers leave their fast paths.  Where it has none, functions of ours stand in their places.  Calls of layers are seen by
a `__call__` of their classes.  All that is there while one watches at least, and passes on calls of other threads.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from functools import partial
from types import FrameType
from typing import Any, Callable, Optional

import torch
from torch import nn
from torch.nn import functional as F

from .. import functional as ours
from .._tensors import recorded_or_transformed
from . import functions, modules
from .operands import Operands
from .products import Products

Mode: Any = getattr(torch.overrides, "TorchFunctionMode", None) if functions.SDPA is not None else None
HANDLERS: dict[Any, Callable[..., Any]] = {F.multi_head_attention_forward: functions.multi_head_attention_forward}
if functions.SDPA is not None:
    HANDLERS[functions.SDPA] = functions.scaled_dot_product_attention


class _ThreadsWatching(threading.local):
    watching: tuple[Any, ...] = ()  # each a `watch`; in this thread, the outermost first
    mode: Any = None
    handling = False  # what is called now is noted already
    products: Any = None


_local = _ThreadsWatching()
_lock = threading.Lock()
_put: list[tuple[Any, str, Any]] = []  # (owner, name, what was there, or _NOTHING)
_NOTHING = object()
_n_watching = 0  # in all threads


def begin(one: Any, within: Optional[Iterable[nn.Module]]) -> None:
    """From now on `one` is told of calls in this thread.

    within   the modules whose calls it wants, or None: of all
    """
    global _n_watching
    with _lock:
        _n_watching += 1
        if _n_watching == 1:
            _put_ours()
        _put_classes(within)
    if Mode is not None and not _local.watching:
        _local.mode, _local.products = _Watching(), Products()
        _local.mode.__enter__()
    _local.watching = (*_local.watching, one)


def end(one: Any) -> None:
    """No longer.  When nobody watches, everything is as it was."""
    global _n_watching
    _local.watching = tuple(x for x in _local.watching if x is not one)
    if Mode is not None and not _local.watching:
        _local.mode.__exit__(None, None, None)
        _local.mode = _local.products = None
    with _lock:
        _n_watching -= 1
        if not _n_watching:
            while _put:
                owner, name, before = _put.pop()
                delattr(owner, name) if before is _NOTHING else setattr(owner, name, before)


if Mode is not None:

    class _Watching(Mode):
        sees_layers = True  # see `_private.in_mode`

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in HANDLERS and not _local.handling:
                return _handled(HANDLERS[func], func, args, kwargs or {})
            out = func(*args) if kwargs is None else func(*args, **kwargs)
            if not _local.handling:
                found = _local.products.saw(func, args, kwargs, out)
                if found is not None:
                    _note(sys._getframe(1), "softmax", found[0], False, found[1])
            return out

        # What torch.compiler.disable sets: compilers leave these frames to Python.  It would import them, for seconds.
        __torch_function__._torchdynamo_disable = True  # type: ignore[attr-defined]


def _handled(handler: Any, function: Any, args: Any, options: Any) -> Any:
    """What the handler gives.  Called by what stands in the place of the function, two frames inside the caller."""
    if recorded_or_transformed():
        return function(*args, **options)
    by_core = all(one.compute == "core" for one in _local.watching)
    _local.handling = True
    try:
        return handler(partial(_note, sys._getframe(2)), by_core, function, *args, **options)
    finally:
        _local.handling = False


def _note(frame: FrameType, kind: str, made_of: Any, causal: Any, mask: Any) -> None:
    """Tell all who watch of a call from this frame."""
    for one in _local.watching:
        one._note(frame, kind, made_of, causal, mask)


# --- What stands in the places ------------------------------------------------------------------------------


def _place(owner: Any, name: str, new: Any) -> None:
    _put.append((owner, name, vars(owner).get(name, _NOTHING)))
    setattr(owner, name, new)


def _put_ours() -> None:
    _place(ours, "_attention", _noting_attention(ours._attention))
    for kind in modules.OURS:
        _place(kind, "__call__", _noting_call(kind.__call__))
    if Mode is None:
        for function, handler in HANDLERS.items():
            _place(F, function.__name__, _in_place_of(function, handler))
        # torch's layers ask this before their fast paths, by this name; the functions of F have a name of their own.
        overridden = torch.overrides.has_torch_function
        _place(torch.overrides, "has_torch_function", lambda tensors: bool(_local.watching) or overridden(tensors))


def _put_classes(within: Optional[Iterable[nn.Module]]) -> None:
    for kind in modules.classes_of_the_book(within):
        if not any(owner is kind for owner, _, _ in _put):
            _place(kind, "__call__", _noting_call(kind.__call__))


def _is_to_note() -> bool:
    return bool(_local.watching) and not (_local.handling or recorded_or_transformed())


def _in_place_of(function: Any, handler: Any) -> Any:
    def watched(*args: Any, **options: Any) -> Any:
        if not _local.watching or _local.handling:
            return function(*args, **options)
        return _handled(handler, function, args, options)

    return watched


def _noting_call(call: Any) -> Any:
    """The __call__ of a class of layers.  Calls inside it are noted where the layer itself has kept no weights."""

    def __call__(self: Any, *args: Any, **options: Any) -> Any:
        if not _is_to_note():
            return call(self, *args, **options)
        before = [len(one.seen.calls) for one in _local.watching]
        out = call(self, *args, **options)
        given = (x for x in (*args, *options.values()) if isinstance(x, torch.Tensor) and x.dim())
        made_of = modules.made_of(self, next((len(x) for x in given), None))
        if made_of is not None:
            for one, n in zip(_local.watching, before):
                del one.seen.calls[n:]
            causal = made_of.options.get("causal", False) if isinstance(made_of, Operands) else False
            _note(sys._getframe(), type(self).__name__, made_of, causal, None)
        return out

    return __call__


def _noting_attention(attention: Any) -> Any:
    """`_attention` of mha_c.torch.functional, which computes both functions of attention there."""

    def watched(
        q: Any, k: Any, v: Any, w_v: Any, valid_lens: Any, return_weights: bool, return_lse: bool, **options: Any
    ) -> Any:
        out = attention(q, k, v, w_v, valid_lens, return_weights, return_lse, **options)
        if _is_to_note() and functions.has_numbers(q):
            keep, bias = options.get("keep_mask"), options.get("bias")
            keep = None if keep is None else torch.as_tensor(keep)
            others = {name: x for name, x in options.items() if name not in ("keep_mask", "bias", "dropout", "rng")}
            if q.dim() == 3:
                q, k = q[:, None], k[:, None]
                keep, bias = (x if x is None or x.dim() == 2 else x[:, None] for x in (keep, bias))
            operands = Operands.of(q, k, valid_lens, keep, bias, w_v, **others)
            kind = "dot_product_attention" if w_v is None else "additive_attention"
            _note(sys._getframe(1), kind, operands, options.get("causal") or False, keep if bias is None else bias)
        return out

    return watched
