"""Attention pooling by similarity as a torch module: the twin of mha_c.similarity, with width as a parameter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from .. import similarity as of_numpy
from .._arguments import calls, scalars
from .._arguments.arrays import to_lengths
from .._arguments.calls import refuses_at_the_call
from .._layer.viewable import Viewable
from ._call import formulas
from ._call.checks import checked_lengths, lengths_of_causal
from ._call.choice import CORE, GENERAL, WHY
from ._call.readable import readable
from ._explained import to_measure
from ._module import ShowsWeights
from ._private import observed, on_cpu
from ._tensors import check_inputs, check_tensors, has_numbers
from ._twins import twin
from ._weights.last import Assigned
from .functional import dot_product_attention

if TYPE_CHECKING:
    from .._types import Causal, EmptyRows


@twin(of_numpy.KernelAttention)
class KernelAttention(ShowsWeights, Viewable):
    """Nadaraya-Watson regression: the mean of the values, weighted by how near their keys are to the query.

    Call: attention(queries, keys, values, valid_lens=None, *, causal=False)

    queries, keys, values  (B, Q, d), (B, K, d), (B, K, Dv); the result is (B, Q, Dv); or, as in the book, (Q,), (K,),
      (K,) and (Q,)
    valid_lens, causal  as in `MultiHeadAttention`

    Each weight is kernel(distance of query and key / width), divided by the sum over the keys of the query.  Gradients
    flow back to queries, keys, values and `width`, a parameter that is learned like w = 1/width of the book's
    NWKernelRegression (`attention.width.requires_grad_(False)` keeps it constant).

    Attributes
    ----------
    width : nn.Parameter
        The unit of distance, which is learned: the kernel's argument is distance / width.
    kernel : str or function
        The kernel: its name or the function.
    empty_rows : str
        What a query gets if its weights are all 0: "uniform", the mean of all values, or "zero".

    Examples
    --------
    >>> import torch, mha_c.torch
    >>> attention = mha_c.torch.KernelAttention("gaussian", width=0.5)
    >>> x, y = torch.tensor([0.0, 1.0, 4.0]), torch.tensor([1.0, 3.0, 5.0])
    >>> attention(torch.tensor([0.5]), x, y).backward()
    >>> attention.width.grad.shape
    torch.Size([])
    """

    @refuses_at_the_call
    def __init__(
        self, kernel: Any = "gaussian", width: float = 1.0, *, empty_rows: EmptyRows = "uniform", device: Any = None,
        dtype: Optional[torch.dtype] = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.kernel = of_numpy.checked_kernel(kernel)
        self.empty_rows = scalars.empty_rows(empty_rows)
        width = scalars.positive(width, "width")
        of_numpy.check_width(width, torch.finfo(dtype or torch.get_default_dtype()))
        self.width = nn.Parameter(torch.tensor(width, device=device, dtype=dtype))

    @calls.checks_names
    def forward(
        self, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Any = None, *, causal: Causal = False
    ) -> Tensor:
        """Compute the mean of the values for each query: see the class."""
        check_tensors(queries=queries, keys=keys, values=values)
        of_numpy.check_shapes(*[tuple(x.shape) for x in (queries, keys, values)])  # first: no tokens of two axes here
        check_inputs(queries=queries, keys=keys, values=values)
        numbers = queries.dim() == 1
        q, k, v = of_numpy.with_items((queries, keys, values))
        if causal is not False:
            valid_lens = lengths_of_causal(causal, q, k, valid_lens)
        bias = self._log_kernel(distances(q, k if valid_lens is None else seen_keys(q, k, valid_lens)))
        out, weights = dot_product_attention(
            q[..., :0], k[..., :0], v, valid_lens, bias=bias, empty_rows=self.empty_rows, return_weights=True
        )
        self._last = Assigned(weights[0] if numbers else weights)
        return out.reshape(-1) if numbers else out

    if TYPE_CHECKING:  # nn.Module's __call__ takes and returns Any

        def __call__(
            self, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Any = None, *, causal: Causal = False
        ) -> Tensor: ...

    def _log_kernel(self, away: Tensor) -> Tensor:
        u = away / self.width.to(away.dtype)
        if callable(self.kernel):
            similarity = self.kernel(u)
            shape = tuple(similarity.shape) if isinstance(similarity, Tensor) else ()
            of_numpy.check_of_distances("kernel", shape, tuple(u.shape))
            if not bool((similarity >= 0)[u.isfinite()].all()):
                raise ValueError(of_numpy.NEGATIVE)
            return _log(similarity.to(u.dtype))
        if self.kernel == "gaussian":
            return -u * u / 2
        if self.kernel == "epanechnikov":
            return _log(1 - u.clamp(max=1))
        if self.kernel == "constant":
            return torch.zeros_like(u)
        return torch.where(u < 1, 0.0, -torch.inf).to(u.dtype)

    def _explained(
        self, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Any = None, *, causal: Causal = False
    ) -> dict[str, Any]:
        """For mha_c.explain and mha_c.cost: the facts of a call."""
        inputs = queries, keys, values
        check_inputs(queries=queries, keys=keys, values=values)
        kind = np.float64 if queries.dtype is torch.float64 else np.float32
        zeros = [np.broadcast_to(kind(0), tuple(x.shape)) for x in inputs]
        facts = of_numpy.explained(zeros, valid_lens, causal, self.empty_rows)
        way = CORE if not observed() and readable(inputs) else GENERAL
        why = f"torch's operations for the distances and their kernels; for the weighted mean {WHY[way]}"
        place = {"device": str(queries.device), "way": way, "why": why}
        if way == CORE:
            return {**facts, **place}
        held = {name: facts[name] for name in ("scratch_bytes", "kept_bytes")}
        return {"dtype": facts["dtype"], "attention": facts["attention"], **place, "by": "its operations", **held}

    _to_measure = to_measure

    @property
    def attention_weights(self) -> Tensor:
        """Weights of the last call, (B, Q, K) or (Q, K); rows sum to 1."""
        return self._shown(None)

    def extra_repr(self) -> str:
        """The text between the brackets of `repr`.

        Returns
        -------
        str
            The kernel and the width.
        """
        return f"kernel={self.kernel!r}, width={self.width.item() if has_numbers(self.width) else self.width.device}"


def seen_keys(q: Tensor, k: Tensor, valid_lens: Any) -> Tensor:
    """k with zeros for keys that no query sees, which the CPU does not read: else a key of NaN would make gradients
    NaN, even times 0."""
    lens = checked_lengths(valid_lens, q)
    if len(k) and all(on_cpu(x) and has_numbers(x) for x in (k, lens)):
        counts = to_lengths(lens).reshape(len(k), -1).max(axis=1, initial=0).tolist()
        rows = pad_sequence([one[:n] for one, n in zip(k, counts)], batch_first=True)
        return pad(rows, (0, 0, 0, k.shape[1] - rows.shape[1]))
    visible: Any = formulas.visible_keys(q, k, lens)
    return formulas.without_unseen(k[:, None], visible, None)[:, 0]


def distances(q: Tensor, k: Tensor) -> Tensor:
    """(B, Q, K): |q - k|; its gradient is 0 where a query equals a key."""
    if q.shape[2] == 1:
        return (q - k.transpose(1, 2)).abs()
    squares = (q[:, :, None] - k[:, None]).square().sum(-1)
    apart = squares != 0
    return torch.where(apart, torch.where(apart, squares, 1).sqrt(), 0)


def _log(similarity: Tensor) -> Tensor:
    """The logarithm: -inf at 0, where its gradient is 0 and not NaN."""
    there = similarity != 0
    return torch.where(there, torch.where(there, similarity, 1).log(), -torch.inf)
