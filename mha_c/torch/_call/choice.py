"""Which of three ways computes a call of a layer: `choose` decides, before anything is computed, and for explain.

    way        when                                                                  who
    core       plain CPU tensors, children that do what torch's own classes do       core.py
    operator   the same inside a compiler (torch.compile)                            ops.py
    general    all else: hooks, other children, names replaced in d2l or torch,      general.py, over
               modes, classes of tensors, other devices, export, tracing,            attention.py and formulas.py
               torch.func, forward-mode AD

A call with a cache, or with projected keys, is one of these with other keys.  mha_c.explain and mha_c.cost print `WHY`.
"""

from __future__ import annotations

from typing import Any, Optional

from ..._core import layer_parts
from .._private import any_overridden, has_operators, in_mode, on_cpu, quickly_on_cpu, watched
from .._tensors import PLAIN, elsewhere, exporting, is_compiling
from .children import Parts, standard_parts

CORE, OPERATOR, GENERAL = "core", "operator", "general"
WHY = {
    CORE: "the compiled core",
    OPERATOR: "the compiled core, as an operator for compilers",
    GENERAL: "torch's operations, in the book's order: another device, or an observer (hooks, modes, exporters)",
}


def parts_for_core(module: Any, queries: Any, keys: Any, values: Any) -> Any:
    """The Parts of the layer, as a tuple, if the core computes a call with these inputs; else None."""
    if not (type(queries) in PLAIN and type(keys) in PLAIN and type(values) in PLAIN) or is_compiling():
        return None
    return layer_parts(module, module._layout) if quickly_on_cpu(queries) and not watched() else None


def choose(module: Any, queries: Any, keys: Any, values: Any, valid_lens: Any) -> tuple[str, Optional[Parts]]:
    """(the way of a call with these inputs, the Parts of the layer that it reads or None)."""
    parts = None if elsewhere(valid_lens) else parts_for_core(module, queries, keys, values)
    if parts is not None:
        return CORE, Parts._make(parts)
    found = standard_parts(module)
    if is_compiling() and not exporting() and found is not None and has_operators and on_cpu(queries):
        return (GENERAL if any_overridden(queries, keys, values) else OPERATOR), found
    return GENERAL, found


def looked_at(*inputs: Any) -> bool:
    """Whether a mode, or a class of tensors with operations of its own, wants to see each of the book's operations."""
    if exporting() or is_compiling():
        return False
    return in_mode() or any_overridden(*inputs)
