"""d2l's own classes, and torch's nn.MultiheadAttention, which become ours where their class is the original's.

d2l is never imported, and nothing is called but its masked_softmax, which says what a query without keys gets.
"""

from __future__ import annotations

import sys
from types import FunctionType
from typing import Any, Optional

from torch import nn

from .._call.children import is_changed
from .._module import AttentionModule
from ..grouped import OF_MODELS
from ..layers import OF_BOOK
from ..masking import empty_rows_of
from ..nn import MultiheadAttention

_KINDS: dict[str, Any] = {kind.__name__: kind for kind in (*OF_BOOK, *OF_MODELS)}  # ours
_STATE = frozenset((*nn.Module().__dict__, "num_heads"))  # attributes of our modules before the first call
_FUNCTIONS = ("masked_softmax", "sequence_mask", "transpose_qkv", "transpose_output")  # which its classes look up


def become_ours(module: nn.Module) -> bool:
    """Convert a module of torch's or d2l's; False where it is another, or was changed: then it is read as any other."""
    if is_changed(module):
        return False
    if type(module) is nn.MultiheadAttention:
        module.__class__ = MultiheadAttention
        return True
    home = _home(module)
    if home is None or not _has_its_parts(module):
        return False
    ours = _KINDS[type(module).__name__]
    for name in module.__dict__.keys() - _STATE:  # a program's own attributes stay
        if name == "board" or hasattr(ours, name):  # d2l.Module's: files without it load where d2l is missing
            del module.__dict__[name]
    module.__class__ = ours
    inner = module._modules.get("attention")  # converted before: what decides in a call of the children
    if isinstance(module, AttentionModule):
        own = empty_rows_of(getattr(home, "masked_softmax", None))
        own = inner.empty_rows if isinstance(inner, AttentionModule) else own
        if own != module.empty_rows:
            module.empty_rows = own
    return True


def _home(module: nn.Module) -> Optional[Any]:
    """d2l's own module of any generation, which calls itself d2l, if the class and what it calls are its own text."""
    kind = type(module)
    home = sys.modules.get(kind.__module__)
    if kind.__name__ not in _KINDS or home is None or getattr(home, "d2l", None) is not home:
        return None
    functions = [getattr(home, name) for name in _FUNCTIONS if hasattr(home, name)]
    methods = [each for each in vars(kind).values() if isinstance(each, FunctionType)]
    return home if all(_is_text_of(each, home) for each in (*functions, *methods)) else None


def _is_text_of(function: Any, home: Any) -> bool:
    code = getattr(function, "__code__", None)
    return (
        getattr(function, "__module__", None) == home.__name__
        and code is not None
        and code.co_filename == home.__file__
    )


def _has_its_parts(module: nn.Module) -> bool:
    """Whether its children are those that the class's constructor has made, or others under their names."""
    layout = _KINDS[type(module).__name__]._layout
    holder = layout.inner[:1] if layout.inner else ("dropout",) if layout.dropout else ()
    expected = {*holder, *(name for _, name in layout.slots)}
    own = {name for name, _ in module.named_children()}
    bare = not any(True for _ in module.buffers()) and not any(True for _ in module.parameters(recurse=False))
    inner = module._modules.get("attention")
    return own == expected and bare and (layout.inner is None or isinstance(inner, (AttentionModule, nn.Module)))
