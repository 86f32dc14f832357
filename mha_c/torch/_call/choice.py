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

from contextlib import suppress
from typing import Any, Optional

from torch import Tensor

from ..._arguments.core_refusals import PackedForOthers
from ..._arguments.options import core_corner
from ..._core import layer_parts
from .._private import any_overridden, has_operators, in_mode, on_cpu, quickly_on_cpu, watched
from .._tensors import PLAIN, elsewhere, exporting, is_compiling
from . import core, ops
from .children import Parts
from .records import Asked, Options

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


def choose(parts: Optional[Parts], inputs: Any, asked: Asked) -> str:
    """The way of a call with these inputs; parts: of `standard_parts`."""
    queries = inputs[0]
    if parts is None:
        return GENERAL
    tensors = *inputs, asked.keep_mask, asked.bias
    if is_compiling():
        operator = not exporting() and has_operators and on_cpu(queries) and not any_overridden(*tensors)
        return OPERATOR if operator else GENERAL
    plain = all(x is None or type(x) in PLAIN for x in (*tensors, *parts.parameters))
    there = watched() or any(map(elsewhere, asked[:3]))  # lengths and masks
    return CORE if plain and quickly_on_cpu(queries) and not there else GENERAL


def in_one_call(
    module: Any, way: str, parts: Optional[Parts], inputs: Any, asked: Asked, steps: Any = None
) -> Optional[Tensor]:
    """The output by the way that `choose` has chosen; None where torch's operations must compute it."""
    if parts is None or way is GENERAL:
        return None
    corner = core_corner(asked.causal, *inputs[:2])
    options = Options(corner, asked.keep_mask, asked.bias)
    if way is OPERATOR and steps is None:  # a compiler leaves a call with a cache to Python
        rows = module._rows_of_joint(parts.parameters)
        return ops.call(module, parts, inputs, asked.valid_lens, asked.training, options._replace(rows=rows))
    parts, of_one_type, options = parts.in_one_type(inputs, options)
    given = module._options(options[:3], of_one_type, parts)
    with suppress(BufferError, PackedForOthers):  # no plain memory: negated, zeros never written, a transform's
        return core.call(module, parts, of_one_type, asked.valid_lens, asked.training, steps, inputs[0].dtype, given)
    return None


def looked_at(*inputs: Any) -> bool:
    """Whether a mode, or a class of tensors with operations of its own, wants to see each of the book's operations."""
    if exporting() or is_compiling():
        return False
    return in_mode() or any_overridden(*inputs)
