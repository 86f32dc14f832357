"""Our classes for one imported d2l.torch: on the bases of its own, and looking up the names that its own look up.

d2l's MultiHeadAttention builds its attention by the name `d2l.DotProductAttention`, its attention classes call
`masked_softmax`, and so on: where a notebook has put something else there, it is used, as the book's code would use it.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from .. import torch as ours
from ..torch._call.children import Layout

if TYPE_CHECKING:
    from torch import Tensor

CLASSES = ("MultiHeadAttention", "DotProductAttention", "AdditiveAttention")
FUNCTIONS = ("masked_softmax", "sequence_mask", "transpose_qkv", "transpose_output")


def is_own(thing: Any, module: ModuleType) -> bool:
    """Whether a class or function was written in this module, and not put there later."""
    return getattr(thing, "__module__", None) == module.__name__


def written_in(module: ModuleType) -> Any:
    """(its own attention classes, its own functions); None for a function in whose place another stands."""
    classes = {name: getattr(module, name) for name in CLASSES if is_own(getattr(module, name), module)}
    functions = {name: getattr(module, name) for name in FUNCTIONS if hasattr(module, name)}
    return classes, {name: one if is_own(one, module) else None for name, one in functions.items()}


class Book:
    """One imported d2l.torch: what it had when we came, and what stands there for it."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module
        self.originals, self.functions = written_in(module)
        self.classes: dict[str, Any] = {}
        for name in ("DotProductAttention", "AdditiveAttention", "MultiHeadAttention"):
            self.classes[name] = self._class(name)

    def _class(self, name: str) -> Any:
        kind, of_book = getattr(ours, name), MultiHeadOfBook if name == "MultiHeadAttention" else OfBook
        original = self.originals.get(name, kind)
        bases = [base for base in original.__bases__ if base not in kind.__mro__]  # d2l.Module, or none
        body = {"__module__": self.module.__name__, "__doc__": kind.__doc__, "_book": self}
        found: Any = type(name, (of_book, kind, *bases), body)
        layout, inner = kind._layout, None
        if layout.inner is not None:
            inner = layout.inner[0], self.classes["DotProductAttention"]
        methods = [(None, own, getattr(found, own)) for owner, own, _ in layout.methods if owner is None]
        functions = [(self.module, own, function) for own, function in self.functions.items()]
        found._layout = Layout.of(layout.slots, inner, (*methods, *functions))
        return found

    def was_loaded_again(self) -> bool:
        """Whether the module has classes of its own that were not there when we came: importlib.reload wrote them."""
        known = [*self.originals.values(), *self.classes.values()]
        found = (getattr(self.module, name, None) for name in CLASSES)
        return any(is_own(kind, self.module) and kind not in known for kind in found)

    def has_own(self, *names: str) -> bool:
        """Whether these functions of the module are what they were, or were never there."""
        return all(getattr(self.module, name) is self.functions[name] for name in names if name in self.functions)


class OfBook:
    """What d2l's attention classes look up in their module at each call."""

    _book: Book

    def _masked_softmax(self, scores: Tensor, valid_lens: Any) -> Tensor:
        if self._book.has_own("masked_softmax", "sequence_mask"):
            return super()._masked_softmax(scores, valid_lens)  # type: ignore[misc]
        return self._book.module.masked_softmax(scores, valid_lens)

    def _reads_names(self) -> bool:
        return all(getattr(self._book.module, name) is not None for name in self._book.functions)


class MultiHeadOfBook(OfBook):
    """The same of its MultiHeadAttention, which has functions for the heads in 0.17 and methods in 1.0."""

    def _new_attention(self, dropout: Any, empty_rows: Any) -> Any:
        kind = self._book.module.DotProductAttention
        if kind is self._book.originals.get("DotProductAttention"):  # after unpatch
            kind = self._book.classes["DotProductAttention"]
        attention = kind(dropout)
        if empty_rows != "uniform":
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
