"""Layers over arrays that are too large for one machine: `apply` calls a NumPy layer on the chunks of dask arrays.

It needs dask, and dask.distributed for several processes or machines (`pip install "mha_c[dask]"`).  `import mha_c`
does not import it.
"""

from __future__ import annotations

import copy
import sys
import uuid
from typing import TYPE_CHECKING, Any, Optional

import numpy as np

try:
    import dask.array
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError('mha_c.dask needs dask: pip install "mha_c[dask]"', name=missing.name) from None
from dask.base import normalize_token, tokenize
from dask.delayed import delayed

from . import config
from ._arguments.options import core_corner
from ._decoder.steps import DecodingLayer
from .errors import ShapeError

if TYPE_CHECKING:
    from ._types import Causal

__all__ = ["apply"]
__dir__ = __all__.copy  # what dir() and completion show

_ELSEWHERE = (
    "attention_weights are not kept by mha_c.dask.apply: the calls are made by other processes, and the weights are "
    "larger than the result.  Call the layer itself on the chunk that is of interest"
)


def apply(layer: Any, queries: Any, keys: Any, values: Any, valid_lens: Any = None, *, causal: Causal = None) -> Any:
    """Call layer(queries, keys, values, valid_lens) lazily, with the items of the batch spread over dask's workers.

    The layer is one node of the graph, so that each worker gets it once.  On a worker of dask.distributed a call uses
    this worker's share of the cores of its machine.  If a worker dies, dask computes its results again.

    Parameters
    ----------
    layer : MultiHeadAttention, DotProductAttention, AdditiveAttention, GQAAttention or CausalAttention
        A NumPy layer whose sizes are all known, in evaluation mode.  `apply` copies it: later changes of its parameters
        have no effect.
    queries, keys, values : dask arrays (B, Q, .), (B, K, .), (B, K, .)
        Or anything that dask.array.asarray accepts.
    valid_lens : None, or array_like (B,) or (B, Q)
        Lengths: a dask array, a NumPy array or a list.
    causal : {False, True, "top_left", "bottom_right"}, optional
        As in the layer's call; None: what the layer does without it.

    Returns
    -------
    dask array
        The result of the layer, in the order of the batch.  Its chunks along the batch are those of `queries`; every
        chunk has all rows and features.

    Raises
    ------
    TypeError
        If `layer` is not such a layer.
    ValueError
        If the layer is in training mode, or if a size is not known yet.
    ShapeError
        If shapes do not match; a ValueError.

    Notes
    -----
    Reading the layer's `attention_weights` afterwards raises a RuntimeError, because other processes make the calls.

    Examples
    --------
    >>> import dask.array as da, mha_c, mha_c.dask
    >>> mha = mha_c.MultiHeadAttention(16, 16, 16, num_hiddens=16, num_heads=2, dropout=0.1, rng=0)
    >>> x = da.random.random((6, 5, 16), chunks=(2, 5, 16)).astype("float32")
    >>> out = mha_c.dask.apply(mha, x, x, x, valid_lens=[5, 4, 3, 2, 1, 5])
    >>> out.shape, out.chunks[0], out.compute().shape
    ((6, 5, 16), (2, 2, 2), (6, 5, 16))
    """
    _check_layer(layer)
    q, k, v = _operands(queries, keys, values)
    lens = () if valid_lens is None else (_lengths(valid_lens, q),)
    frozen = copy.deepcopy(layer)
    # A call with one row of zeros gives the number of features of the result, and the errors for unsuitable inputs.
    given = {} if causal is None else {"causal": causal}
    features = int(frozen(*(np.zeros((1, 1, x.shape[2]), x.dtype) for x in (q, k, v)), **given).shape[2])
    core_corner(causal, q, k)  # of whole chunks: which corner, where there are more keys than queries
    node = delayed(frozen, traverse=False, name=f"layer-{tokenize(frozen)}")
    for each in (layer, getattr(layer, "_child", None)):
        if each is not None:
            each._last = _ELSEWHERE, False
    return dask.array.map_blocks(
        _call, q, k, v, *lens, layer=node, given=given, chunks=(q.chunks[0], (q.shape[1],), (features,)),
        dtype=q.dtype, meta=np.empty((0, 0, 0), q.dtype), name=f"attention-{tokenize(node, q, k, v, lens, given)}",
    )  # fmt: skip


def _call(queries: Any, keys: Any, values: Any, lens: Any = None, *, layer: Any, given: Any) -> Any:
    """Compute one chunk, in any process."""
    threads = _share_of_worker()
    if threads is not None:
        config.set_num_threads(threads)
    if lens is not None:
        lens = lens[:, 0, 0] if lens.shape[1] == 1 else lens[:, :, 0]
    return layer(queries, keys, values, lens, **given)


def _share_of_worker() -> Optional[int]:
    """Threads for this call on a worker of dask.distributed; None elsewhere.

    A worker has as many dask threads as cores are meant for it; the calls that now run there share these cores.
    """
    distributed = sys.modules.get("distributed")
    if distributed is None:
        return None
    try:
        state = distributed.get_worker().state
    except ValueError:
        return None
    return max(1, int(state.nthreads) // max(1, len(state.executing)))


# --- Reading the arguments ------------------------------------------------------------------------------


def _check_layer(layer: Any) -> None:
    if not isinstance(layer, DecodingLayer):
        kind = f"{type(layer).__module__}.{type(layer).__name__}"
        raise TypeError(f"layer must be one of the book's NumPy layers, or a subclass of one, got {kind}")
    if layer.training:
        raise ValueError("the layer is in training mode, but dask computes no gradients: call layer.eval() first")
    if layer._parameters.is_open():
        raise ValueError("the layer is not initialised yet, and each worker would draw its own weights: call it once")


def _operands(queries: Any, keys: Any, values: Any) -> tuple[Any, Any, Any]:
    """The inputs as dask arrays, chunked along the batch only, like `queries`; dask names equal arrays equally, so that
    an array given twice stays one array."""
    arrays = {"queries": queries, "keys": keys, "values": values}
    arrays = {name: dask.array.asarray(x) for name, x in arrays.items()}
    batch = arrays["queries"].shape[:1]
    for name, array in arrays.items():
        if array.ndim != 3:
            raise ShapeError(f"{name} must have shape (B, rows, features), got {array.shape}")
        if array.shape[:1] != batch:
            raise ShapeError(f"{name} has batch size {array.shape[0]}, but queries has {batch[0]}")
    q, k, v = (x.rechunk({0: arrays["queries"].chunks[0], 1: -1, 2: -1}) for x in arrays.values())
    if k.shape[1] != v.shape[1]:
        raise ShapeError(f"values has {v.shape[1]} rows, but keys has {k.shape[1]}")
    return q, k, v


def _lengths(valid_lens: Any, queries: Any) -> Any:
    """The lengths as (B, 1, 1) or (B, Q, 1), in the same chunks as queries."""
    lens = valid_lens if isinstance(valid_lens, dask.array.Array) else dask.array.from_array(np.asarray(valid_lens))
    if lens.shape not in (queries.shape[:1], queries.shape[:2]):
        raise ShapeError(f"valid_lens must have shape {queries.shape[:1]} or {queries.shape[:2]}, got {lens.shape}")
    whole = lens.rechunk({0: queries.chunks[0], **({1: -1} if lens.ndim == 2 else {})})
    return whole[:, :, None] if lens.ndim == 2 else whole[:, None, None]


@normalize_token.register(DecodingLayer)
def _token(layer: DecodingLayer) -> Any:
    """A token, equal for layers of equal class, repr and numbers.  A program's own class always gets a new token."""
    if not type(layer).__module__.startswith("mha_c."):
        return uuid.uuid4().hex
    numbers = [(state.name, state.weight, state.bias) for state in layer._parameters.states.values()]
    settings = {name: value for name, value in vars(layer).items() if type(value) in (bool, int, float, str)}
    return type(layer).__qualname__, repr(layer), settings, numbers
