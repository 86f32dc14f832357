"""Attention on q, k, v, for functions, layers and modules alike: by the core if it can read them, else by torch."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

from .._private import (
    in_mode,
    in_transform,
    n_dispatch_modes,
    n_function_modes,
    on_cpu,
    tracing_state,
)
from .._tensors import (
    FLOATS,
    OWN_TYPES,
    autocast_on,
    check_devices,
    common_type,
    elsewhere,
    exporting,
    is_compiling,
    lengths,
    refuse_half_fake,
)
from . import formulas
from .autograd import connect_attention, run_attention
from .checks import check_attention, check_mask, check_options, check_terms, checked_lengths
from .dropout import Rng, drop_in_torch, late_seed
from .records import Attended, AttentionCall, AttentionTensors


def watched() -> bool:
    """Whether somebody sees or transforms torch's operations, of which a call of the core is none."""
    return (
        tracing_state() is not None or in_transform() or bool((n_function_modes() or n_dispatch_modes()) and in_mode())
    )


def readable(*tensors: Any) -> bool:
    """Whether the core can read them: plain tensors on the CPU (what is left of a transform looks like one)."""
    for x in tensors:
        if x is not None and not (type(x) in OWN_TYPES and on_cpu(x)):
            return False
    return True


def any_needs_grad(*groups: Any) -> bool:
    for group in groups:
        for tensor in group:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def attend(call: AttentionCall, tensors: AttentionTensors, rng: Rng = None, clean: bool = False) -> Attended:
    """Attention in the type of q; weights and lse may be None unless wanted.

    rng     for dropout: None (torch's generator), a whole number or a generator
    clean   keys and values that no query sees are finite
    """
    dtype: Any = None if autocast_on(tensors.q) and not on_cpu(tensors.q) else tensors.q.dtype  # None: the kernels'
    check_mask(tensors.keep_mask)
    tensors = in_one_type(tensors)
    found: Any = None
    if not (is_compiling() or watched()) and readable(*tensors) and not elsewhere(call.valid_lens):
        for_core = call._replace(valid_lens=lengths(call.valid_lens), seed=late_seed(call.dropout, rng))
        with suppress(BufferError):  # no plain memory after all: a negated view, zeros never written
            found = run_attention(for_core, tensors)
        if found is not None and torch.is_grad_enabled() and any_needs_grad(tensors):
            found = connect_attention(for_core.drawn(), found, *tensors)
    if found is None:
        call = _checked(call, tensors)
        fuses = rng is None and not (call.return_weights or call.return_lse)
        found = formulas.attention(call, tensors, drop_in_torch(call.dropout, rng, tensors.q), fuses, clean)
    return Attended(*[x if x is None or dtype in (None, x.dtype) else x.to(dtype) for x in found[:3]])


def in_one_type(tensors: AttentionTensors) -> AttentionTensors:
    """In the type of the computation: on the CPU 16-bit floats are computed in float32, elsewhere in their own type."""
    q, k, v, w_v, mask, bias, relative_bias, sinks = tensors
    terms = {"bias": bias, "relative_bias": relative_bias, "sinks": sinks}
    kinds = {x.dtype for x in (q, k, v, w_v, *terms.values()) if x is not None}
    if len(kinds) == 1 and (not on_cpu(q) or kinds.issubset(FLOATS)):
        return tensors
    common = common_type(q=q, k=k, v=v, w_v=w_v, **terms)
    numbers = [None if x is None else x.to(common) for x in (q, k, v, w_v, *terms.values())]
    return AttentionTensors(*numbers[:4], mask, *numbers[4:])


def _checked(call: AttentionCall, tensors: AttentionTensors) -> AttentionCall:
    """The core would have checked all this itself."""
    q, k, v, w_v, keep_mask, bias, relative_bias, sinks = tensors
    named = {**tensors._asdict(), "valid_lens": call.valid_lens}
    check_devices(**named)
    check_options(call.empty_rows, call.dropout, keep_mask)
    refuse_half_fake(**named)
    if exporting() or not is_compiling():  # a compiler's program raises errors when it runs
        check_attention(q, k, v, w_v, keep_mask=keep_mask, bias=bias)
    if tracing_state() is None:
        check_terms(q, relative_bias, sinks)
    return call if call.valid_lens is None else call._replace(valid_lens=checked_lengths(call.valid_lens, q))
