"""Which of three ways computes a call of a layer: `choose` decides, before anything is computed, and for explain.

    way        when                                                                  who
    core       plain CPU tensors, children that do what torch's own classes do       core.py
    operator   the same inside a compiler (torch.compile)                            ops.py
    general    all else: hooks, other children, names replaced in d2l or torch,      `_generally` of the layers,
               modes, classes of tensors, other devices, export, tracing,            attention.py, formulas.py
               torch.func, forward-mode AD

A call with a cache, or with projected keys, is one of these with other keys.  mha_c.explain and mha_c.cost print `WHY`.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

from .._private import any_overridden, has_operators, in_mode, on_cpu
from .._tensors import elsewhere, exporting, is_compiling
from .attention import readable, watched
from .children import Parts, standard_parts

CORE, OPERATOR, GENERAL = "core", "operator", "general"
WHY = {
    CORE: "the compiled core",
    OPERATOR: "the compiled core, as an operator for compilers",
    GENERAL: "torch's operations, in the book's order: another device, or somebody looks on (hooks, modes, exporters)",
}


class Choice(NamedTuple):
    way: str
    parts: Optional[Parts]  # None where children are not all plain


def choose(module: Any, queries: Any, keys: Any, values: Any, valid_lens: Any) -> Choice:
    """The way of a call with these inputs, and the parts of the layer that it reads."""
    parts = standard_parts(module)
    if parts is None or exporting():
        return Choice(GENERAL, parts)
    if is_compiling():
        by_operator = has_operators and on_cpu(queries) and not any_overridden(queries, keys, values)
        return Choice(OPERATOR if by_operator else GENERAL, parts)
    others = None if keys is queries else keys, None if values is keys else values
    weight = parts.parameters.W_q
    plain = readable(queries, *others, weight) and not elsewhere(valid_lens) and not watched()
    return Choice(CORE if plain else GENERAL, parts)


def looked_at(module: Any, *inputs: Any) -> bool:
    """Whether a mode, or a class of tensors with operations of its own, wants to see each of the book's operations."""
    if exporting() or is_compiling():
        return False
    return in_mode() or any_overridden(*inputs, *module.parameters())
