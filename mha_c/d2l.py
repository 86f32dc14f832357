"""The real d2l package with our attention classes in it: patch, unpatch, compare.

>>> from d2l import torch as d2l                                          # doctest: +SKIP
>>> import mha_c.d2l
>>> mha_c.d2l.patch()                                                     # doctest: +SKIP
mha_c replaces MultiHeadAttention, DotProductAttention, AdditiveAttention in d2l.torch

d2l is never imported here: it is found where the user has imported it.  Either generation will do.
"""

from __future__ import annotations

import sys
from types import ModuleType, TracebackType
from typing import Any, Optional

NAMES = ("MultiHeadAttention", "DotProductAttention", "AdditiveAttention")
__all__ = ["compare", "patch", "unpatch"]
__dir__ = __all__.copy  # what dir() and completion show

_originals: dict[ModuleType, dict[str, Any]] = {}


class Patched:
    """What `patch` returns: leaving `with patch():` undoes it."""

    def __init__(self, modules: list[ModuleType]) -> None:
        self._modules = modules

    def __enter__(self) -> Patched:
        return self

    def __exit__(
        self, kind: Optional[type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        _restore(self._modules)

    def __repr__(self) -> str:
        return f"<mha_c in {', '.join(module.__name__ for module in self._modules) or 'nothing new'}>"


def patch(module: Optional[ModuleType] = None) -> Patched:
    """Puts our attention classes in the place of d2l's, prints their names, and is undone by `unpatch`.

    module   the imported d2l.torch; None: the one in sys.modules.  RuntimeError if there is none

    Every model that is built afterwards by d2l's own code, and by code that says `d2l.MultiHeadAttention`, uses
    ours, and goes on working after `unpatch`.  Names that a program has taken out of d2l before (`from d2l.torch
    import MultiHeadAttention`) and models that exist already are not touched; for these: mha_c.torch.convert.
    `with mha_c.d2l.patch(): ...` undoes it at the end.  Patching twice does nothing.
    """
    from . import torch as ours

    found = _found() if module is None else [module]
    fresh = [each for each in found if each not in _originals]
    for each in fresh:
        missing = [name for name in NAMES if not hasattr(each, name)]
        if missing:
            raise RuntimeError(f"{each.__name__} has no {', '.join(missing)}: is it d2l.torch?")
    for each in fresh:
        _originals[each] = {name: getattr(each, name) for name in NAMES}
        for name in NAMES:
            setattr(each, name, getattr(ours, name))
        print(f"mha_c replaces {', '.join(NAMES)} in {each.__name__}")
    return Patched(fresh)


def unpatch(module: Optional[ModuleType] = None) -> None:
    """Puts d2l's own classes back, in `module` or wherever `patch` replaced them; no error where it has not."""
    _restore(list(_originals) if module is None else [module])


def compare(module: Any, *inputs: Any, seconds: float = 1.0, show: bool = True) -> dict[str, float]:
    """Runs `module` and a copy of it with our attention side by side; prints speed ratio and largest difference.

    module    a d2l attention module, or any model with such (or nn.MultiheadAttention) inside; left as it is
    inputs    what it is called with
    seconds   how long to measure

    Returns largest_difference (of the results, without dropout) and, in microseconds of the fastest call,
    forward_us, forward_ours_us, training_us (forward and backward, with dropout), training_ours_us, and the
    ratios theirs / ours forward_ratio and training_ratio.  ValueError where there is no attention module in it;
    what the module itself raises passes through.

    >>> mha_c.d2l.compare(d2l.MultiHeadAttention(100, 5, 0.5), X, Y, Y, valid_lens)       # doctest: +SKIP
    """
    from .torch.compare import compare as run

    return run(module, *inputs, seconds=seconds, show=show)


def _found() -> list[ModuleType]:
    module = sys.modules.get("d2l.torch")
    if module is None:
        raise RuntimeError("d2l.torch is not imported: say `from d2l import torch as d2l` before mha_c.d2l.patch()")
    return [module]


def _restore(modules: list[ModuleType]) -> None:
    for module in modules:
        for name, original in _originals.pop(module, {}).items():
            setattr(module, name, original)
