"""Our classes for one imported d2l.torch: they have the bases of d2l's own classes and look up the same names in it.

d2l's MultiHeadAttention builds its attention by the name `d2l.DotProductAttention`, its attention classes call
`masked_softmax`, and so on.  If a notebook has replaced such a name, our classes use the new one, as d2l's would.
"""

from __future__ import annotations

import functools
import inspect
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .. import torch as ours
from ..torch._call.children import Layout
from ..torch._private import leave_to_python
from ..torch.layers import OF_BOOK
from ..torch.masking import empty_rows_of

if TYPE_CHECKING:
    from torch import Tensor

CLASSES = tuple(kind.__name__ for kind in OF_BOOK)
OF_MODELS = ("GQAAttention", "GPT.CausalAttention")  # of the third generation
FUNCTIONS = ("masked_softmax", "sequence_mask", "transpose_qkv", "transpose_output")


def is_own(thing: Any, module: ModuleType) -> bool:
    """Whether this module defines the class or function; else somebody put it there later."""
    return getattr(thing, "__module__", None) == module.__name__


def place_of(module: ModuleType, name: str) -> tuple[Any, str]:
    """What has the attribute, and its name there: the module, or a class in it."""
    *outer, last = name.split(".")
    owner: Any = module
    for one in outer:
        owner = getattr(owner, one, None)
    return owner, last


def found_in(module: ModuleType, name: str) -> Any:
    """The class of this name; None where there is none."""
    owner, last = place_of(module, name)
    return getattr(owner, last, None)


def written_in(module: ModuleType) -> Any:
    """(the module's own attention classes, its own functions); None for a function that has been replaced."""
    found = {name: found_in(module, name) for name in (*CLASSES, *OF_MODELS)}
    classes = {name: kind for name, kind in found.items() if is_own(kind, module)}
    functions = {name: getattr(module, name) for name in FUNCTIONS if hasattr(module, name)}
    return classes, {name: one if is_own(one, module) else None for name, one in functions.items()}


class Book:
    """One imported d2l.torch: its own classes and functions before the patch, and our classes for it."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module
        self.originals, self.functions = written_in(module)
        self.empty_rows = empty_rows_of(self.functions.get("masked_softmax"))
        self.classes: dict[str, Any] = {}
        for kind in sorted(OF_BOOK, key=lambda kind: kind._layout.inner is not None):  # what is inside comes first
            self.classes[kind.__name__] = self._class(kind)
        for name in OF_MODELS:
            if name in self.originals:
                self.classes[name] = self._class_of_models(name)

    def _class(self, kind: Any) -> Any:
        name, of_book = kind.__name__, OfBook if kind._layout.inner is None else MultiHeadOfBook
        original = self.originals.get(name, kind)
        bases = [base for base in original.__bases__ if base not in kind.__mro__]  # d2l.Module, or none
        body = {"__module__": self.module.__name__, "__doc__": kind.__doc__, "_book": self}
        if self.empty_rows != "uniform":
            body["__init__"] = _constructor(kind, self.empty_rows)
        found: Any = type(name, (of_book, kind, *bases), body)
        layout, inner = kind._layout, None
        if layout.inner is not None:
            inner = layout.inner[0], self.classes[layout.inner[1].__name__]
        methods = [(None, own, getattr(found, own)) for owner, own, _ in layout.methods if owner is None]
        functions = [(self.module, own, function) for own, function in self.functions.items()]
        found._layout = Layout.of(layout.slots, inner, (*methods, *functions))
        return found

    def _class_of_models(self, name: str) -> Any:
        last = name.rpartition(".")[2]
        kind = getattr(ours, last)
        return type(last, (kind,), {"__module__": self.module.__name__, "__qualname__": name, "__doc__": kind.__doc__})

    def was_loaded_again(self) -> bool:
        """Whether the module has own classes that it did not have before the patch: importlib.reload made them."""
        known = [*self.originals.values(), *self.classes.values()]
        found = (getattr(self.module, name, None) for name in CLASSES)
        return any(is_own(kind, self.module) and kind not in known for kind in found)

    def has_own(self, *names: str) -> bool:
        """Whether these functions of the module are unchanged, or have never existed there."""
        return all(getattr(self.module, name) is self.functions[name] for name in names if name in self.functions)


def _constructor(kind: Any, empty_rows: str) -> Any:
    """The constructor of `kind` with another default for empty_rows."""

    @functools.wraps(kind.__init__)
    def constructor(self: Any, *sizes: Any, **named: Any) -> None:
        kind.__init__(self, *sizes, **{"empty_rows": empty_rows, **named})

    of_kind = inspect.signature(kind.__init__)
    shown = [x.replace(default=empty_rows) if x.name == "empty_rows" else x for x in of_kind.parameters.values()]
    constructor.__signature__ = of_kind.replace(parameters=shown)  # type: ignore[attr-defined]
    return constructor


class OfBook:
    """The names that d2l's attention classes look up in their module at each call."""

    _book: Book

    def _masked_softmax(self, scores: Tensor, valid_lens: Any) -> Tensor:
        if self._book.has_own("masked_softmax", "sequence_mask"):
            return super()._masked_softmax(scores, valid_lens)  # type: ignore[misc]
        return self._book.module.masked_softmax(scores, valid_lens)

    def _reads_names(self) -> bool:
        return all(getattr(self._book.module, name) is not None for name in self._book.functions)


class MultiHeadOfBook(OfBook):
    """The names that d2l's MultiHeadAttention looks up: functions for the heads in 0.17, methods in 1.0."""

    def _new_attention(self, dropout: Any, empty_rows: Any) -> Any:
        kind = self._book.module.DotProductAttention
        own = type(self)._layout.inner[1]  # type: ignore[attr-defined]
        if kind is self._book.originals.get(own.__name__):  # after unpatch
            kind = own
        attention = kind(dropout)
        if empty_rows != self._book.empty_rows:
            attention.empty_rows = empty_rows
        return attention

    def transpose_qkv(self, X: Tensor) -> Tensor:
        if self._book.has_own("transpose_qkv"):
            return super().transpose_qkv(X)  # type: ignore[misc]
        return self._book.module.transpose_qkv(X, self.num_heads)  # type: ignore[attr-defined]

    def transpose_output(self, X: Tensor) -> Tensor:
        if self._book.has_own("transpose_output"):
            return super().transpose_output(X)  # type: ignore[misc]
        return self._book.module.transpose_output(X, self.num_heads)  # type: ignore[attr-defined]


leave_to_python("mha_c")
