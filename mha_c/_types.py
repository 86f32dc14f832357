"""Types that public signatures share; imported by type checkers only.

In these signatures an array of float32 gives an array of float32; all other accepted inputs (lists, CPU tensors) give
Any.
"""

from __future__ import annotations

from typing import Any, Generic, Literal, Optional, TypedDict, TypeVar, Union

import numpy as np
from numpy.typing import NDArray

Real = TypeVar("Real", np.float32, np.float64)
Number = TypeVar("Number", bound=np.generic)
Operand = TypeVar("Operand")
Stream = TypeVar("Stream")
Array = NDArray[Any]
DType = np.dtype[Any]
PackedLinear = tuple[Array, Optional[Array], tuple[int, int]]  # a projection for the core: weight, bias, their sizes
Rows = Union[tuple[int, int], Array]  # of a joint weight: (first, number), or their numbers
LayerOptions = Optional[tuple[Any, ...]]  # what a layer's call has beyond lengths: _core.pyi
Heads = Union[int, tuple[int, int]]  # of all; or of queries, and of keys and values
Lens = Optional[Array]  # lengths, int64, as the core takes them
Turn = tuple[Array, Array]  # cosines and sines of steps, which rotate queries and keys
Counts = Union[int, Array]  # numbers of steps: one for all items, or (B,)
Masks = tuple[Optional[Array], Optional[Array]]  # keep_mask and bias

EmptyRows = Literal["zero", "uniform"]
Corner = Literal["top_left", "bottom_right"]
Causal = Union[bool, Corner, None]
Window = Optional[tuple[Optional[int], Optional[int]]]
RngLike = Union[None, int, np.integer[Any], np.random.Generator]


class Keywords(TypedDict, Generic[Operand, Stream], total=False):
    """The keywords of the functions of attention, but for those that ask for further results."""

    keep_mask: Operand
    bias: Operand
    causal: Causal
    window: Window
    scale: Optional[float]
    softcap: Optional[float]
    relative_bias: Operand
    sinks: Operand
    dropout: float
    rng: Stream
    empty_rows: EmptyRows


AttentionOptions = Keywords[Any, RngLike]  # of mha_c.functional
