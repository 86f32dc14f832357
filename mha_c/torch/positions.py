"""Positions of tokens, for tensors: the book's PositionalEncoding as a module, and rotary positions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional

import torch
from torch import Tensor, nn

from .. import positions as of_numpy
from .._arguments import scalars
from .._arguments.arrays import check_features
from .._arguments.calls import refuses_at_the_call
from ._private import on_cpu, tracing_state
from ._tensors import HALVES, check_inputs, check_tensors
from ._twins import twin


@twin(of_numpy.PositionalEncoding)
class PositionalEncoding(nn.Module):
    """Add sines and cosines of each step's position to X, then dropout, so that a model can tell the steps apart.

    >>> import torch, mha_c.torch
    >>> mha_c.torch.PositionalEncoding(num_hiddens=4, dropout=0.1)(torch.zeros(1, 3, 4)).shape
    torch.Size([1, 3, 4])

    Call: encoding(X, *, start=0)

    X  (B, T, num_hiddens), float32 or float64, as the result
    start  the position of the first step: one whole number, or one for each item (B,)

    Parameters
    ----------
    device, dtype : optional
        Device and type of P; by default the CPU or torch's default device, and float32.

    Attributes
    ----------
    P : Tensor (1, max_len, num_hiddens)
        A float32 buffer that is not in the state_dict; in d2l P is a plain attribute.  P may be changed, or replaced by
        another tensor or by a learned nn.Parameter, which the module then adds.  To float64 inputs the module's own
        table is added in float64.
    num_hiddens : int
        Features of X.
    dropout : nn.Dropout
        The dropout of the sum.

    Notes
    -----
    Unlike d2l's: takes float64 too, moves with the module, and can begin at a later position.  Source: d2l 11.6.3.
    """

    P: Tensor

    @refuses_at_the_call
    def __init__(
        self, num_hiddens: int, dropout: float, max_len: int = 1000, *, device: Any = None,
        dtype: Optional[torch.dtype] = None,
    ) -> None:  # fmt: skip
        super().__init__()
        encoding = of_numpy.PositionalEncoding(num_hiddens, 0, max_len)
        self.dropout = nn.Dropout(scalars.probability(dropout))
        self.num_hiddens = encoding.num_hiddens
        self._table = torch.from_numpy(encoding.P)  # float64, for inputs of that type
        self.register_buffer("P", self._table.to(device, dtype or torch.float32), persistent=False)
        self._own = self.P  # until P is replaced

    @refuses_at_the_call
    def forward(self, X: Tensor, *, start: Any = 0) -> Tensor:
        """Add the positions of the steps to X, then dropout: see the class."""
        check_inputs(X=X)
        check_features(X, "X", self.num_hiddens)
        if type(start) is int and 0 <= start <= self.P.shape[1] - X.shape[1]:
            at: Any = (slice(None), slice(start, start + X.shape[1]))
        else:
            if tracing_state() is not None and isinstance(start, Tensor):
                raise RuntimeError("start is a tensor: a traced program would keep the value that it has now")
            at = 0, torch.from_numpy(of_numpy.steps(start, X.shape[0], X.shape[1], self.P.shape[1]))
        rows = self.P[at].to(X.device, X.dtype)
        if X.dtype is torch.float64 and self.P is self._own:
            exact = self._table[at].to(X.device)
            rows = torch.where(rows == exact.float(), exact, rows)
        return self.dropout(X + rows)

    def _apply(self, fn: Any, *args: Any, **options: Any) -> PositionalEncoding:
        """`to`, `double`, `to_empty` and so on: P keeps its numbers in float32; from `meta` it gets the table's."""
        own = self.P if self.P is self._own else None
        super()._apply(fn, *args, **options)
        if own is not None:
            self.P = self._own = (self._table if own.is_meta else own).to(self.P.device, torch.float32)
        return self

    if TYPE_CHECKING:  # nn.Module's __call__ takes and returns Any

        def __call__(self, X: Tensor, *, start: Any = 0) -> Tensor: ...


@twin(of_numpy.rotary)
@refuses_at_the_call
def rotary(x: Tensor, positions: Any, base: float = 10000.0, interleaved: bool = False) -> Tensor:
    """Rotate queries or keys by their positions, so that a dot product of two depends on their distance only.

    Gradients flow back to x.

    Examples
    --------
    >>> import torch
    >>> from mha_c.torch import functional
    >>> functional.rotary(torch.ones(2, 4, 3, 8), range(3)).shape
    torch.Size([2, 4, 3, 8])
    """
    check_inputs(x=x)
    if x.dtype in HALVES:  # computed in float32, so that the result is rounded once
        return rotary(x.float(), positions, base, interleaved).to(x.dtype)
    if isinstance(positions, Tensor) and not on_cpu(positions) and positions.device == x.device:
        positions = positions.cpu()  # angles are float64, which not every device has
    angles = torch.from_numpy(of_numpy.rotary_angles(x, "x", positions, base))
    cos, sin = (y.to(x.dtype).to(x.device, non_blocking=True) for y in (angles.cos(), angles.sin()))
    neighbours = scalars.flag(interleaved, "interleaved")
    first, second = (x[..., 0::2], x[..., 1::2]) if neighbours else x.chunk(2, dim=-1)
    turned = first * cos - second * sin, second * cos + first * sin
    return torch.stack(turned, dim=-1).flatten(-2) if neighbours else torch.cat(turned, dim=-1)


@twin(of_numpy.alibi_slopes)
@refuses_at_the_call
def alibi_slopes(num_heads: int, *, device: Any = None, dtype: Optional[torch.dtype] = None) -> Tensor:
    """The slopes (H,) of ALiBi: head h adds -slope[h] * |j - i| to the score of query i and key j.

    >>> from mha_c.torch import functional
    >>> functional.alibi_slopes(4)
    tensor([0.2500, 0.0625, 0.0156, 0.0039])

    Parameters
    ----------
    device, dtype : optional
        Device and type of the result; defaults as in torch.zeros.

    Returns
    -------
    Tensor (H,)
        For `relative_bias` (H, 2R + 1) use -slopes[:, None] * abs(arange(-R, R + 1)).
    """
    dtype = torch.get_default_dtype() if dtype is None else dtype
    return torch.as_tensor(of_numpy.alibi_slopes(num_heads).tolist(), dtype=dtype, device=device)


@twin(of_numpy.t5_buckets)
@refuses_at_the_call
def t5_buckets(
    distances: Tensor, num_buckets: int = 32, max_distance: int = 128, bidirectional: bool = True
) -> Tensor:  # fmt: skip
    """T5's bucket of each distance j - i of a key j from a query i.

    Examples
    --------
    >>> import torch
    >>> from mha_c.torch import functional
    >>> functional.t5_buckets(torch.tensor([-200, -20, -3, 0, 3, 20, 200]))
    tensor([15, 10,  3,  0, 19, 26, 31])
    """
    check_tensors(distances=distances)
    found = of_numpy.t5_buckets(distances.detach().cpu().numpy(), num_buckets, max_distance, bidirectional)
    return torch.from_numpy(found).to(distances.device)
