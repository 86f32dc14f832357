"""What torch.jit.script and torch.compile made, as it was written: its lines run one by one, and can be followed."""

from __future__ import annotations

import inspect
import sys
from contextlib import AbstractContextManager, nullcontext
from types import MethodType
from typing import Any


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


def nothing_compiled() -> AbstractContextManager[Any]:
    """While it is entered, what torch.compile was given runs as it was written; nothing before torch 2.6."""
    compiler: Any = getattr(sys.modules.get("torch"), "compiler", None)
    if "torch._dynamo" not in sys.modules or not hasattr(compiler, "set_stance"):
        return nullcontext()
    stance: AbstractContextManager[Any] = compiler.set_stance("force_eager")
    return stance
