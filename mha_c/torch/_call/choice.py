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
from .._private import any_overridden, has_operators, in_mode, observed, on_cpu
from .._tensors import elsewhere, exporting, is_compiling
from . import core, ops
from .children import Parts
from .readable import readable
from .records import Asked, LayerInputs, Options

CORE, OPERATOR, GENERAL = "core", "operator", "general"
WHY = {
    CORE: "the compiled core",
    OPERATOR: "the compiled core, as an operator for compilers",
    GENERAL: "torch's operations, in the book's order: another device, or an observer (hooks, modes, exporters)",
}


def choose(parts: Optional[Parts], inputs: LayerInputs, asked: Asked) -> str:
    """The way of a call with these inputs; parts: of `standard_parts`."""
    queries = inputs[0]
    if parts is None:
        return GENERAL
    tensors = *inputs, asked.keep_mask, asked.bias
    if is_compiling():
        operator = not exporting() and has_operators and on_cpu(queries) and not any_overridden(*tensors)
        return OPERATOR if operator else GENERAL
    there = observed() or any(map(elsewhere, asked[:3]))  # lengths and masks
    return GENERAL if there or not readable((*tensors, *parts.parameters)) else CORE


def in_one_call(
    module: Any, way: str, parts: Optional[Parts], inputs: LayerInputs, asked: Asked, steps: Any = None
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


def needs_each_operation(*inputs: Any) -> bool:
    """Whether a mode, or a class of tensors with operations of its own, wants to see each of the book's operations."""
    if exporting() or is_compiling():
        return False
    return in_mode() or any_overridden(*inputs)
