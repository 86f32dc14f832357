"""What a module's own lines read: while all of it is as it was when they were compared, the core may stand for them."""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._call.children import is_changed
from .._private import GLOBAL_HOOKS

_PLAIN = (int, float, bool, str, type(None))
_MISSING: Any = object()
MADE = "_how_of_mha_c"  # what a class has that was made for a reader's module


class Watched(NamedTuple):
    """What must be as it was.

    names    (owner, name, value): methods of its classes; functions and numbers that these read by name
    methods  names that an instance must not have
    tree     (type, ((name of an attribute, value), ...), ((name of a child, tree), ...), ((attribute, its attribute,
             value), ...)): the last of a record of settings, as self.config.n_head
    tables   ((path of the owner, name, numbers), ...): tensors that are no parameters
    """

    names: tuple[tuple[Any, str, Any], ...]
    methods: frozenset[str]
    tree: Any
    tables: tuple[tuple[str, str, Tensor], ...]

    @classmethod
    def of(cls, module: nn.Module, changes: Any) -> Watched:
        """changes   names of attributes that may change: what a call sets, the number of a dropout"""
        seen, words, methods = words_of(module)
        for part in module.modules():
            for kind in _own_classes(type(part)):
                numbers = ((name, x) for name, x in vars(kind).items() if name in words and type(x) in _PLAIN)
                seen.update({(id(kind), name): (kind, name, x) for name, x in numbers if name not in changes})
        tree = _tree(module, words - {*changes})
        tables = [
            (path, name, value.detach().clone())
            for path, part in module.named_modules()
            for name, value in {**part._buffers, **vars(part)}.items()
            if isinstance(value, Tensor) and name in words and name not in changes
        ]
        return cls(tuple(seen.values()), frozenset(methods), tree, tuple(tables))

    def is_whole(self, module: Any) -> bool:
        """Whether all is as it was, but for tables."""
        for owner, name, value in self.names:
            if _now(owner, name) is not value:
                return False
        return not any(GLOBAL_HOOKS) and self._is_tree(module, self.tree)

    def _is_tree(self, module: Any, tree: Any) -> bool:
        _, attributes, children, settings = tree
        state = module.__dict__
        for name, value in attributes:
            if state.get(name, _MISSING) is not value and state.get(name, _MISSING) != value:
                return False
        for name, inner, value in settings:
            if getattr(state.get(name), inner, _MISSING) != value:
                return False
        if not self.methods.isdisjoint(state):
            return False
        modules = state["_modules"]
        for name, below in children:
            child = modules.get(name)
            if type(child) is not below[0] or is_changed(child):
                return False
            if any(below[1:]) and not self._is_tree(child, below):
                return False
        return True

    def has_tables(self, module: Any) -> bool:
        """Whether its tensors that are no parameters hold the same numbers; compared again when they change."""
        if not self.tables:
            return True
        found = []
        for path, name, _ in self.tables:
            owner = module.get_submodule(path) if path else module
            now = owner._buffers.get(name, owner.__dict__.get(name))
            if not isinstance(now, Tensor):
                return False
            found.append((now, now._version))
        known = module.__dict__.get("_compared_tables")
        if known is not None and all(a is b and m == n for (a, m), (b, n) in zip(known, found)):
            return True
        with torch.no_grad():
            for (now, _), (_, _, then) in zip(found, self.tables):
                if now.shape != then.shape or now.device.type != "cpu" or not torch.equal(now.to(then.dtype), then):
                    return False
        module.__dict__["_compared_tables"] = found
        return True


def words_of(module: nn.Module) -> tuple[dict[Any, Any], set[str], set[str]]:
    """({...: (owner, name, value)} of what its lines read by name, the words in them, the names of its methods)."""
    seen: dict[Any, Any] = {}
    methods: set[str] = set()
    words: set[str] = set()
    for part in module.modules():
        for kind in _own_classes(type(part)):
            for name, value in vars(kind).items():
                if isinstance(value, (FunctionType, staticmethod)) and not name.startswith("__"):
                    methods.add(name)
                    _names_of(kind, name, getattr(kind, name), seen, words)
    return seen, words, methods


def _own_classes(kind: type) -> list[type]:
    """The classes that a reader has written; not those that were made of them."""
    return [each for each in kind.__mro__ if not (each is object or _is_known(each) or MADE in vars(each))]


def _is_known(one: Any) -> bool:
    """Whether a class, function or module is torch's, Python's or ours, whose own names nobody replaces."""
    home = getattr(one, "__module__", None) or getattr(one, "__name__", "")
    return str(home).partition(".")[0] in ("torch", "math", "numpy", "builtins", "mha_c")


def _tree(module: nn.Module, words: set[str]) -> Any:
    attributes = tuple((name, x) for name, x in vars(module).items() if name in words and type(x) in _PLAIN)
    attributes = tuple((name, x) for name, x in attributes if name != "training")
    kind = getattr(module, "cls_to_become", None) or type(module)  # of lazy modules
    children = tuple((name, _tree(child, words)) for name, child in module._modules.items() if child is not None)
    settings = tuple(
        (name, inner, getattr(x, inner))
        for name, x in vars(module).items()
        if name in words and not (isinstance(x, (Tensor, nn.Module, dict)) or callable(x)) and type(x) not in _PLAIN
        for inner in words
        if type(getattr(x, inner, _MISSING)) in _PLAIN
    )
    return kind, attributes, children, settings


def _now(owner: Any, name: str) -> Any:
    if type(owner) is dict:
        return owner.get(name, _MISSING)
    return getattr(owner, name, _MISSING)


def _names_of(owner: Any, name: str, value: Any, seen: dict[Any, Any], words: set[str]) -> None:
    """Notes a function, and what it reads by name."""
    key = (id(owner), name)
    if key in seen:
        return
    seen[key] = (owner, name, value)
    if not isinstance(value, FunctionType) or _is_known(value):
        return
    code = {word for each in _codes(value.__code__) for word in each.co_names}
    words.update(code)
    words.update(x for each in _codes(value.__code__) for x in each.co_consts if isinstance(x, str))
    for cell_name, cell in zip(value.__code__.co_freevars, value.__closure__ or ()):
        try:
            held = cell.cell_contents
        except ValueError:
            continue
        if isinstance(held, (FunctionType, *_PLAIN)) and cell_name != "__class__":
            _names_of(cell, "cell_contents", held, seen, words)
    for word in code:
        held = value.__globals__.get(word, _MISSING)
        if isinstance(held, ModuleType):
            for inner in code & vars(held).keys():
                found = vars(held)[inner]
                if callable(found) or isinstance(found, _PLAIN):
                    _names_of(vars(held), inner, found, seen, words)
        elif held is not _MISSING and (callable(held) or isinstance(held, _PLAIN)):
            _names_of(value.__globals__, word, held, seen, words)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _codes(each)
