"""Attention on q, k, v, for functions, layers and modules alike: by the core if it can read them, else by torch."""

from __future__ import annotations

from typing import Any

import torch

from .._private import observed, on_cpu, tracing_state
from .._tensors import (
    FLOATS,
    autocast_on,
    check_devices,
    check_inputs,
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
from .readable import readable
from .records import Attended, AttentionCall, AttentionTensors


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
    q, found = tensors.q, None
    dtype = q.dtype
    may = not (observed() or (call.valid_lens is not None and elsewhere(call.valid_lens)))
    by_core = may and _is_for_core(tensors, dtype)
    if not by_core:
        check_mask(tensors.keep_mask)
        tensors = _of_one_type(tensors)
        by_core = may and _is_for_core(tensors, tensors.q.dtype)
    if by_core:
        try:
            found = _by_core(call, tensors, rng)
        except BufferError:  # no plain memory after all: a negated view, zeros never written
            pass
    if found is None:
        call = _checked(call, tensors)
        fuses = rng is None and not (call.return_weights or call.return_lse)
        found = formulas.attention(call, tensors, drop_in_torch(call.dropout, rng, tensors.q), fuses, clean)
    if tensors.q is q or (autocast_on(q) and not on_cpu(q)):  # there autocast decides, in torch's kernels
        return found
    return Attended(*[None if x is None else x.to(dtype) for x in found])


def _is_for_core(tensors: AttentionTensors, dtype: torch.dtype) -> bool:
    """Whether the core computes these: readable tensors of one type that it has."""
    mask = tensors.keep_mask
    return dtype in FLOATS and (mask is None or mask.dtype is torch.bool) and readable(tensors, dtype, mask)


def _by_core(call: AttentionCall, tensors: AttentionTensors, rng: Rng) -> Attended:
    if call.valid_lens is not None or call.dropout or rng is not None:
        call = call._replace(valid_lens=lengths(call.valid_lens), seed=late_seed(call.dropout, rng))
    done = run_attention(call, tensors)
    if torch.is_grad_enabled() and any_needs_grad(tensors):
        return Attended(*connect_attention(call.drawn(), done, *tensors))
    return Attended(*done[:3])


def _of_one_type(tensors: AttentionTensors) -> AttentionTensors:
    """In the type of the computation: on the CPU 16-bit floats are computed in float32, elsewhere in their own type."""
    q, k, v, w_v, mask, bias, relative_bias, sinks = tensors
    terms = {"bias": bias, "relative_bias": relative_bias, "sinks": sinks}
    kinds = {x.dtype for x in (q, k, v, w_v, *terms.values()) if x is not None}
    if len(kinds) == 1 and (not on_cpu(q) or kinds.issubset(FLOATS)):
        return tensors
    common = common_type(q=q, k=k, v=v, w_v=w_v, **terms)
    numbers: Any = [None if x is None else x.to(common) for x in (q, k, v, w_v, *terms.values())]
    return AttentionTensors._make((*numbers[:4], mask, *numbers[4:]))


def _checked(call: AttentionCall, tensors: AttentionTensors) -> AttentionCall:
    """The core would have checked all this itself."""
    q, k, v, w_v, keep_mask, bias, relative_bias, sinks = tensors
    named = {**tensors._asdict(), "valid_lens": call.valid_lens}
    check_devices(**named)
    check_options(call.empty_rows, call.dropout, keep_mask)
    refuse_half_fake(**named)
    if exporting() or not is_compiling():  # a compiler's program raises errors when it runs
        check_inputs(q=q, k=k, v=v)
        check_attention(q, k, v, w_v, keep_mask=keep_mask, bias=bias)
    if tracing_state() is None:
        check_terms(q, relative_bias, sinks)
    lens = None if call.valid_lens is None else checked_lengths(call.valid_lens, q, k.shape[-2])
    return call._replace(valid_lens=lens)
