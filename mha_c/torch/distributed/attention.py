"""ring_attention: attention over a sequence whose pieces are on several ranks."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, Optional

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from ..._arguments import scalars
from ..._arguments.arrays import to_lengths
from ..._arguments.calls import refuses_at_the_call
from ..._arguments.options import core_window
from ...errors import ShapeError
from .._call.checks import check_attention
from .._call.dropout import Rng, seed_now
from .._private import on_cpu
from .._tensors import HALVES, check_inputs, refuse_transforms
from . import _ring
from ._group import Field, Ranks, agree, ranks_of
from ._sequence import LAYOUTS, Schedule, Stretch, VisibleKeys, parts_of, piece_length


@refuses_at_the_call
def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, valid_lens: Any = None, *, causal: Any = False, window: Any = None,
    dropout: float = 0.0, rng: Rng = None, layout: str = "contiguous", group: Optional[dist.ProcessGroup] = None,
    scale: Optional[float] = None, empty_rows: str = "zero",
) -> Tensor:  # fmt: skip
    """Attention over a sequence whose pieces are on the ranks of a group; returns this rank's rows of the result.

    Every rank calls it with its own piece, as `split_sequence` cuts it; all other arguments are equal on all ranks.  If
    gradients are recorded, every rank must make the backward pass too.  The joined results are those of
    `functional.dot_product_attention` on the joined sequence.  Keys and values travel around the ring of ranks while
    the ranks compute.  A rank holds only its own keys and values and those that are travelling through it.

    Parameters
    ----------
    q, k, v : Tensor (B, H, Nq/n, D), (B, Hkv, N/n, D), (B, Hkv, N/n, Dv)
        CPU tensors of one type; n is the number of ranks, and Hkv divides H.  float32 and float64 are computed
        natively; bfloat16 and float16 are computed in float32, and the result is rounded.
    valid_lens : array_like (B,) or (B, Nq), optional
        Lengths of the whole sequence: integers or floats.
    causal : {False, True, "top_left"}
        Query i of the whole sequence sees keys 0..i.
    window : tuple (left, right), optional
        Query i sees key j when i - left <= j <= i + right; None on a side means no limit on that side.
    dropout : float
        Drops the same weights as a call in one process.
    rng : optional
        As in `functional.dot_product_attention`.  All ranks must have the same seed: give an int, or seed torch's
        generator alike on all ranks.
    layout : {"contiguous", "zigzag"}
        How the pieces were cut; "zigzag" balances causal work.
    group : ProcessGroup, optional
        A group of torch.distributed (gloo).  Default: all processes.
    scale : float, optional
        Factor of the scores.  Default: 1/sqrt(D).
    empty_rows : {"zero", "uniform"}
        What a query without visible keys gets.  "uniform" is the mean of all values if the length is <= 0; it cannot
        be used together with causal or window.

    Returns
    -------
    Tensor (B, H, Nq/n, Dv)
        This rank's rows; they have the same bits in every run with n ranks.

    Raises
    ------
    ShapeError, TypeError, ValueError
        If arguments do not match.  All ranks raise an error, which names the rank with the wrong argument.
    RuntimeError
        On all ranks, if one has died, hangs beyond the group's timeout or makes another call.  Use a new group then.

    Notes
    -----
    A rank does not compute with a piece that none of its queries sees, and does not send it if no rank needs it.
    Source: Liu, Zaharia and Abbeel 2023, "Ring Attention with Blockwise Transformers"; Brandon et al. 2023, "Striped
    Attention", for the balance of causal work.

    Examples
    --------
    >>> import torch, torch.distributed as dist
    >>> from mha_c.torch.distributed import join_sequence, ring_attention, split_sequence
    >>> dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())  # torchrun starts more
    >>> q, k, v = (split_sequence(torch.randn(1, 2, 12, 8), dist.get_rank(), dist.get_world_size()) for _ in "qkv")
    >>> ring_attention(q, k, v, causal=True).shape
    torch.Size([1, 2, 12, 8])
    >>> dist.destroy_process_group()
    """
    refuse_transforms("ring_attention")
    ranks = ranks_of(group, "ring_attention")
    call, refusal = None, None
    try:
        call = _Arguments(q, k, v, valid_lens, causal, window, dropout, rng, layout, scale, empty_rows)
    except (TypeError, ValueError) as error:
        refusal = error
    fields, own = ([], []) if call is None else (call.fields(), [q.shape[2], k.shape[2]])  # the lengths of its pieces
    found = agree(ranks, "ring_attention", fields, own, refusal)
    assert call is not None
    return call.run(ranks, found)


@refuses_at_the_call
def ring_traffic(
    world_size: int, n_queries: int, n_keys: Optional[int] = None, valid_lens: Any = None, *, causal: Any = False,
    window: Any = None, layout: str = "contiguous",
) -> list[int]:  # fmt: skip
    """How many keys each rank sends in a forward call of `ring_attention`; computed without a network.

    Parameters
    ----------
    world_size : int
        How many ranks.
    n_queries : int
        How many queries the whole sequence has.
    n_keys : int, optional
        How many keys the whole sequence has.  Default: n_queries.
    valid_lens, causal, window, layout : as in `ring_attention`
        Arguments of the call.

    Returns
    -------
    list of int
        One count for each rank.  A key and its value are B Hkv (D + Dv) numbers.  In the backward pass the same keys
        travel again, and their gradients travel as far.

    Examples
    --------
    >>> from mha_c.torch.distributed import ring_traffic
    >>> ring_traffic(4, 1000)  # every piece goes round: three steps of 250 keys
    [750, 750, 750, 750]
    >>> ring_traffic(4, 1000, causal=True), ring_traffic(4, 1000, window=(100, 0))
    ([250, 500, 750, 0], [250, 250, 250, 0])
    """
    scalars.choice(layout, "layout", *LAYOUTS)
    left, right = (-1, -1) if window is None else core_window(window)
    mask = VisibleKeys(left, 0 if _causal(causal) else right, _whole_lengths(valid_lens))
    size = scalars.whole(world_size, "world_size")
    schedule = Schedule(size, n_queries, n_queries if n_keys is None else n_keys, layout, mask)
    return [schedule.sent(rank) for rank in range(size)]


class _Arguments:
    """The arguments of one rank, with the checks that one rank can do alone."""

    def __init__(
        self, q: Any, k: Any, v: Any, valid_lens: Any, causal: Any, window: Any, dropout: Any, rng: Rng, layout: Any,
        scale: Any, empty_rows: Any,
    ) -> None:  # fmt: skip
        check_inputs(q=q, k=k, v=v)
        for name, x in (("q", q), ("k", k), ("v", v)):
            if not on_cpu(x):
                raise TypeError(f"{name} is on device {x.device}, but ring attention computes on the CPU: {name}.cpu()")
            if x.dim() != 4:
                raise ShapeError(f"{name} must have shape (B, H, N/n, features), got {tuple(x.shape)}")
            if x.dtype != q.dtype:
                raise TypeError(f"{name} is {x.dtype}, but q is {q.dtype}")
        check_attention(q, k, v, None)
        self.q, self.k, self.v = q, k, v
        self.causal, self.window = _causal(causal), (-1, -1) if window is None else core_window(window)
        self.dropout = float(scalars.probability(dropout))
        self.layout = scalars.choice(layout, "layout", *LAYOUTS)
        self.scale = scalars.scale(scale, q.dtype is not torch.float64)
        self.empty_rows = scalars.empty_rows(empty_rows)
        if self.empty_rows == "uniform" and (self.causal or window is not None):
            raise ValueError("empty_rows='uniform' goes with lengths only: use 'zero' together with causal or window")
        self.lens = _whole_lengths(valid_lens, q.shape[0])
        self.seed = seed_now(self.dropout, rng)

    def fields(self) -> list[Field]:
        q, k, v, lens = self.q, self.k, self.v, self.lens
        grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        sizes = zip(
            ("batch", "heads", "key_heads", "head_dim", "value_dim"), (*q.shape[:2], k.shape[1], q.shape[3], v.shape[3])
        )
        lens_code = 0 if lens is None else zlib.crc32(repr(lens.shape).encode() + lens.tobytes()) + 1
        return [
            *(Field(name, size, ShapeError) for name, size in sizes),
            Field("dtype", q.dtype, TypeError),
            Field("layout", self.layout),
            Field("causal", self.causal),
            *(Field(f"window ({side})", "none" if limit < 0 else limit)
              for side, limit in zip(("left", "right"), self.window)),
            Field("scale", "the default" if self.scale is None else self.scale),
            Field("dropout", self.dropout),
            Field("the seed of dropout (give rng a whole number, or seed torch alike on all ranks)", self.seed),
            Field("valid_lens, which are those of the whole sequence everywhere (shown: a checksum)", lens_code),
            Field("empty_rows", self.empty_rows),
            Field("whether gradients are wanted", grad),
        ]  # fmt: skip

    def run(self, ranks: Ranks, lengths: list[list[int]]) -> Tensor:
        n_queries, n_keys = (sum(column) for column in zip(*lengths))
        for rank, pair in enumerate(lengths):
            for name, found, whole in (("q", pair[0], n_queries), ("k", pair[1], n_keys)):
                expected = piece_length(whole, rank, ranks.size, self.layout)
                if found != expected:
                    raise ShapeError(
                        f"ring_attention: rank {rank} has {found} rows in {name}, but its piece of {whole} among "
                        f"{ranks.size} ranks has {expected} (layout={self.layout!r}): see split_sequence"
                    )
        q, k, v, lens = self.q, self.k, self.v, self.lens
        if lens is not None and lens.ndim == 2 and lens.shape[1] != n_queries:
            raise ShapeError(
                f"valid_lens must have shape (B,) or (B, {n_queries}), one for each query of the whole sequence, "
                f"got {lens.shape}"
            )
        left, right = self.window
        mask = VisibleKeys(left, 0 if self.causal else right, lens)
        if self.empty_rows == "uniform" and lens is not None and bool((lens <= 0).any()):
            q, mask = _uniform(q, mask, parts_of(n_queries, ranks.rank, ranks.size, self.layout), n_keys)
        schedule = Schedule(ranks.size, n_queries, n_keys, self.layout, mask)
        call = _ring.RingCall(schedule, ranks, self.scale, self.dropout, self.seed)
        computed = (x.float() if x.dtype in HALVES else x for x in (q, k, v))
        return RingFunction.apply(call, *computed).to(q.dtype)


class RingFunction(Function):
    """RingFunction.apply(call, q, k, v) -> out: forward once around the ring, and once more in the backward pass."""

    @staticmethod
    def forward(ctx: Any, call: _ring.RingCall, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, row_max, row_sum = _ring.forward(call, q, k, v)
        ctx.save_for_backward(q, k, v, out, row_max, row_sum)
        ctx.call = call
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError("ring_attention computes first derivatives only, without create_graph=True")
        q, k, v, out, row_max, row_sum = ctx.saved_tensors
        grads = _ring.backward(ctx.call, grad_out.contiguous(), out, row_max, row_sum, q, k, v)
        return (None, *(grad if need else None for grad, need in zip(grads, ctx.needs_input_grad[1:])))


# --- Reading the arguments ------------------------------------------------------------------------------


def _causal(causal: Any) -> bool:
    if isinstance(causal, (bool, np.bool_)):
        return bool(causal)
    if causal == "bottom_right":
        raise ValueError("causal='bottom_right' is not supported here: queries and keys start at the same position")
    return scalars.choice(causal, "causal", "top_left") == "top_left"


def _whole_lengths(valid_lens: Any, batch: Optional[int] = None) -> Any:
    lens = to_lengths(valid_lens)
    if lens is None:
        return None
    if lens.ndim not in (1, 2) or batch not in (None, lens.shape[0]):
        wanted = "" if batch is None else f" = ({batch},)"
        raise ShapeError(f"valid_lens must have shape (B,){wanted} or (B, Nq), got {lens.shape}")
    return np.clip(lens, -1, 2**62)


def _uniform(q: Tensor, mask: VisibleKeys, parts: Sequence[Stretch], n_keys: int) -> tuple[Tensor, VisibleKeys]:
    """Replace queries of length <= 0 by queries with equal scores for all keys, which get the mean of all values."""
    lens = mask.lens[:, None] if mask.lens.ndim == 1 else np.concatenate([mask.lens_of(part) for part in parts], axis=1)
    rows = torch.from_numpy(lens <= 0)[:, None, :, None]
    return q.masked_fill(rows, 0.0), mask._replace(lens=np.where(mask.lens <= 0, n_keys, mask.lens))
