"""Code as it was written: what torch.jit.script and torch.compile made, whose lines then run one by one, and can be
followed; the tree of a text.
"""

from __future__ import annotations

import ast
import inspect
import sys
from contextlib import AbstractContextManager, nullcontext
from types import MethodType
from typing import Any, Union


def as_written(mine: Any) -> Any:
    """The function or layer that was scripted or compiled, where torch keeps it; anything else as it is."""
    if not (inspect.isroutine(mine) or type(mine).__module__.startswith("torch.")):
        return mine
    for name in ("_orig_mod", "_torchdynamo_inline", "_torchdynamo_orig_callable"):
        mine = getattr(mine, name, mine)
    return mine


def written_methods(layer: Any) -> None:
    """Give a layer, and its parts, their own methods where each keeps a compiled one, which a copy has of another."""
    for part in layer.modules() if callable(getattr(layer, "modules", None)) else [layer]:
        for name, held in [*vars(part).items()] if hasattr(part, "__dict__") else []:
            method = as_written(held)
            if method is not held and inspect.ismethod(method):
                vars(part)[name] = MethodType(method.__func__, part)


class _WithoutTypes(ast.NodeTransformer):
    """`x: Tensor = y` as `x = y`, at the same place."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt:
        return node if node.value is None else ast.copy_location(ast.Assign([node.target], node.value), node)


def tree_of(text: Union[str, bytes]) -> Any:
    """The tree of a text; what gives a name a type besides its value only gives it the value."""
    return _WithoutTypes().visit(ast.parse(text))


def nothing_compiled() -> AbstractContextManager[Any]:
    """While it is entered, what torch.compile was given runs as it was written; nothing before torch 2.6."""
    compiler: Any = getattr(sys.modules.get("torch"), "compiler", None)
    if "torch._dynamo" not in sys.modules or not hasattr(compiler, "set_stance"):
        return nullcontext()
    stance: AbstractContextManager[Any] = compiler.set_stance("force_eager")
    return stance
