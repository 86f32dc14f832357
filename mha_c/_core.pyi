"""The compiled core: thin functions over csrc/mha.h.  Private; use mha_c.functional and the layers.

Arrays are float32 or float64 ndarrays, all of one type per call, any strides (copied only where the
last axis is not dense); anything that is not an ndarray is a TypeError here, because
`mha_c._arguments.arrays` turns lists, tensors and the like into arrays first.  `valid_lens` is None, or
int64 of shape (B,) or (B, Q), snapshotted once; `arrays.to_lengths` makes that of what users give.
Every error names the argument in the caller's words, what it got and what was expected: core_refusals.py writes them.
Once `serve_tensors` has been called, CPU tensors of torch serve as arrays too, and the results are tensors.
All arguments are positional; those with a default may be left out at the end.
"""

from typing import Any, Callable, Dict, Literal, Optional, Tuple, Union  # noqa: UP035  Python 3.9, as UP006

import numpy as np

_Array = np.ndarray[Any, Any]
_EmptyRows = Literal["zero", "uniform"]
_Causal = Literal[None, "top_left", "bottom_right"]
_Seed = Union[int, Callable[[], int]]  # or a function that draws it, called after all checks

# Where a call's item 0, head 0, query 0 and key 0 stand in a larger call of which it is a part: lengths,
# causal="top_left", window and dropout are then that call's.
_Origin = Optional[Tuple[int, int, int, int]]

# relative_bias (H, 2R + 1), softcap (0: none), sinks (H,)
_Terms = Optional[Tuple[Optional[_Array], float, Optional[_Array]]]

# One projection: (packed weight, bias or None, (out_features, in_features)), or (weight, bias or None) with a row-major
# (out_features, in_features) weight that is read at the call; the bits are the same.  None in its place: no projection.
_Packed = Tuple[_Array, Optional[_Array], Tuple[int, int]]
_InRows = Tuple[_Array, Optional[_Array]]
_Projection = Union[_Packed, _InRows, None]
# Of W_q, W_k, W_v, W_o; or weights in rows, their biases, and a ninth that is not looked at: the parameters of a layer.
_Projections = Union[Tuple[_Projection, _Projection, _Projection, _Projection], Tuple[Optional[_Array], ...]]

# What layer_forward keeps: the instruction set, weights or None, q, k, w_v, row_max, row_sum, lengths, num_heads,
# empty_rows; in training also the projected values, the attended ones, the seed and the masks.  None where there is
# none: kept_weights.py.
_Kept = Tuple[Any, ...]

# Which rows of a joint weight one of W_q, W_k, W_v has: (first, number), or their numbers, int64, in any order.
_Rows = Union[Tuple[int, int], _Array]

# What a layer's call has beyond lengths, a tuple whose last entries may be left out, or None; None, -1 or 0: not there.
#   causal        "top_left", "bottom_right"
#   keep_mask     bool, (Q, K) or (B, H, Q, K), sizes 1 broadcast (one head: H is 1)
#   bias          of the inputs' type, likewise; added to the scores
#   turn          (cosines, sines), (n, D/2) or (B, n, D/2) with n >= Q and K: rotates what W_q and W_k give, row i of
#                 each by row i of the table.  Keys that no W_k projects in this call come turned.
#   rows          (of W_q, of W_k, of W_v), each a _Rows: the three are rows of one joint weight and bias, which stand
#                 in the places of those of W_q, W_k, W_v that are not None.  Its gradient is in the first of these
#   window_left, window_right, scale, score_terms      as for attention_forward
_Options = Optional[Tuple[Any, ...]]

def attention_forward(
    q: _Array,  # (B, [H,] Q, D)
    k: _Array,  # (B, [Hkv,] K, D)
    v: _Array,  # (B, [Hkv,] K, Dv)
    w_v: Optional[_Array] = None,  # (D,): additive scores; None: dot products
    valid_lens: Optional[_Array] = None,
    keep_mask: Optional[_Array] = None,  # bool, broadcasts to the scores; rank 2 or the rank of the scores
    bias: Optional[_Array] = None,  # as q's dtype, same ranks
    causal: _Causal = None,
    window_left: int = -1,  # -1: no limit on that side
    window_right: int = -1,
    scale: Optional[float] = None,  # None: 1/sqrt(D) for dot products (1 if D == 0), 1 for additive
    dropout: float = 0.0,
    seed: _Seed = 0,  # 0 <= seed < 2**64
    empty_rows: _EmptyRows = "zero",
    return_weights: bool = False,
    return_lse: bool = False,
    return_stats: bool = False,
    origin: _Origin = None,
    score_terms: _Terms = None,
    /,
) -> Tuple[Any, ...]:
    """(out (B,[H,]Q,Dv), weights (B,[H,]Q,K) or None, lse (B,[H,]Q) or None); with return_stats also what
    attention_backward needs, (row_max, row_sum), each (B,[H,]Q)."""

def layer_forward(
    queries: _Array,
    keys: _Array,
    values: _Array,  # (B, Q, .), (B, K, .), (B, K, .)
    valid_lens: Optional[_Array],
    projections: _Projections,
    w_v: Optional[_Array],  # additive scores: (h,) or (1, h); or None
    num_heads: Union[int, Tuple[int, int]],  # or (of queries, of keys and values)
    empty_rows: _EmptyRows,
    dropout: float,
    seed: _Seed,
    training: bool = False,
    options: _Options = None,
    /,
) -> Tuple[_Array, _Kept]:
    """One whole layer: (out (B, Q, .), kept).  With two numbers of heads, query head h uses key head
    h // (their ratio).  Kept are either the weights themselves, where they are the smaller, or
    the projected (copied, where nothing projects) q and k, the row statistics and a private copy of the lengths; in
    training what `layer_backward` needs, and never the weights if W_q and W_k are given.  A plain tuple of arrays,
    numbers and strings: it can be copied and pickled."""

def layer_step(
    queries: _Array,  # these as for layer_forward, but keys and values (B, n, .) are new rows alone
    keys: _Array,
    values: _Array,
    valid_lens: Optional[_Array],  # of all rows, the new ones included
    projections: _Projections,
    w_v: Optional[_Array],
    num_heads: Union[int, Tuple[int, int]],  # or (of queries, of keys and values)
    empty_rows: _EmptyRows,
    dropout: float,
    seed: _Seed,
    cached_keys: _Array,  # (B, room, features of projected keys), dense: new rows are written into it
    cached_values: _Array,
    before: Union[int, _Array],  # how many rows each item has: one number, or (B,) int64
    counts: Union[int, _Array],  # how many of its n new rows count
    longest: int,  # how many the longest item has then
    turn: Optional[Tuple[_Array, _Array]] = None,  # cosines and sines of rotary positions (n, D/2) or (B, n, D/2)
    options: _Options = None,  # keep_mask, bias of the new steps and the first `longest` rows; rows; no causal, turn
    /,
) -> Tuple[_Array, _Kept]:
    """One call of a decoder: W_k keys and W_v values go behind the rows in the cache, and the queries attend to the
    first `longest` of them.  (out, kept) as from layer_forward.  With two numbers of heads, query head h
    uses key head h // (their ratio).  `turn` rotates the projected queries and the new rows of keys."""

def attention_weights(
    q: _Array,  # (B, H, Q, D)
    k: _Array,  # (B, H, K, D)
    w_v: Optional[_Array],
    valid_lens: Optional[_Array],
    row_max: _Array,  # (B, H, Q), of the call whose weights they are
    row_sum: _Array,
    empty_rows: _EmptyRows,
    options: _Options = None,  # what layer_forward kept of its own
    /,
) -> _Array:
    """Weights (B, H, Q, K), to the bit, of an earlier call with these."""

def copy_operands(
    q: _Array,  # (B, H, Q, D)
    k: _Array,  # (B, Hkv, K, D)
    /,
) -> Tuple[_Array, _Array]:
    """Dense copies, for those who ask for weights later: large ones of tensors in memory that is kept for the next."""

def pack_linear(weight: _Array, /) -> _Array:
    """A row-major (out_features, in_features) weight, packed for the active ISA: panels one below the other, of shape
    (., width of a panel), 64-byte aligned."""

def linear(x: _Array, projection: Union[_Packed, _InRows], /) -> _Array:
    """x (..., in_features) -> (..., out_features)."""

def masked_softmax(x: _Array, valid_lens: Optional[_Array], empty_rows: _EmptyRows, /) -> _Array:
    """x (B, Q, K) -> the same shape."""

def dropout_factors(weights: _Array, dropout: float, seed: int, /) -> _Array:
    """What a call with this dropout and seed multiplies its weights (B, H, Q, K) by; of `weights` only shape and type
    count."""

def isas() -> Tuple[Tuple[str, bool], ...]:
    """Every compiled instruction set, plainest first, with whether this CPU offers it."""

def isa() -> str:
    """The active one."""

def set_isa(name: str, /) -> None:
    """For start-up and tests.  ValueError lists what there is."""

def get_num_threads() -> int: ...
def set_num_threads(n: int, by_default: bool = False, /) -> None:
    """by_default: nobody has chosen it, so that calls with tensors use as many as torch says, even if it says more."""

def use_torch_threads(most: int, /) -> Optional[str]:
    """From now on calls run on torch's own threads, wherever it has as many as they want, and at most `most`; the file
    of torch's OpenMP runtime, or None where it is not found and nothing changes.  0: on threads of our own again."""

def has_team() -> bool:
    """Whether calls run on torch's threads; no longer in the child of a fork."""

# --- Training -----------------------------------------------------------------------------

def attention_backward(
    grad_out: _Array,  # as out
    out: _Array,  # what attention_forward returned
    row_stats: Tuple[_Array, _Array],  # its row_max and row_sum, each (B, [H,] Q): see return_stats
    q: _Array,
    k: _Array,
    v: _Array,
    w_v: Optional[_Array] = None,
    valid_lens: Optional[_Array] = None,
    keep_mask: Optional[_Array] = None,
    bias: Optional[_Array] = None,
    causal: _Causal = None,
    window_left: int = -1,
    window_right: int = -1,
    scale: Optional[float] = None,
    dropout: float = 0.0,
    seed: _Seed = 0,
    empty_rows: _EmptyRows = "zero",
    bias_grad: bool = False,
    origin: _Origin = None,
    score_terms: _Terms = None,
    /,
) -> Any:
    """(grad_q, grad_k, grad_v, grad_w_v or None, grad_bias or None), each of its operand's shape; with score_terms two
    more, grad_relative_bias or None and grad_sinks or None."""

def linear_backward(
    grad_y: _Array, x: _Array, weight: _Array, bias: bool, /
) -> Tuple[_Array, _Array, Optional[_Array]]:
    """(grad_x, grad_weight, grad_bias or None) of y = x W^T + bias, for x (..., in_features)."""

def layer_backward(
    grad_out: _Array,  # as out; copied unless dense
    kept: _Kept,  # by layer_forward in training
    queries: _Array,  # from here on as for layer_forward
    keys: _Array,
    values: _Array,
    valid_lens: Optional[_Array],  # those that were kept
    projections: _Projections,  # in rows; biases are only checked
    w_v: Optional[_Array],
    num_heads: Union[int, Tuple[int, int]],
    empty_rows: _EmptyRows,
    dropout: float,
    seed: _Seed,
    needs: Tuple[
        Any, ...
    ],  # a truth for each of three inputs, four weights, four biases, w_v (and the bias of options)
    join: bool = False,  # gradients of inputs that are one object are added up in the first one's place
    options: _Options = None,  # of the forward call; keep_mask and bias as they were
    /,
) -> Tuple[Optional[_Array], ...]:
    """Twelve gradients, or thirteen for as many needs, the last that of the bias among the options; each of its
    operand's shape; None where not needed or where there is no such projection.
    Inputs and parameters as in the forward call, unchanged since; what was kept, and does not fit, is refused."""

def serve_tensors(
    exchange: object, tensor_type: type, parameter_type: type, is_neg: object, get_num_threads: Callable[[], int], /
) -> None:
    """From now on tensors of exactly these types are taken for arrays, and calls with such are answered with tensors,
    on no more threads than get_num_threads() says; BufferError where a tensor has no plain memory.  exchange: torch's
    DLPack functions; is_neg: that method of any tensor."""

def layer_parts(layer: Any, layout: Tuple[Any, ...], /) -> Optional[Tuple[Tuple[Any, ...], Dict[str, Any], Any, Any]]:
    """(parameters, state of the module that shows the weights, dropout, what `frozen` packed of these parameters for
    the active instruction set, or None) of a layer of mha_c.torch; None where one call does not stand for calling its
    children.  layout: a `Layout`, which tells what that means."""

def what_is_asked(checks: Tuple[Any, ...], missing: Any, /) -> bytes:
    """What each of `checks` asks, for `first_changed`.  They are (owner, name, value) after (owner, name, value): a
    dict has this very value under a name; another object has it as an attribute (`missing`: there is none); a tensor
    has an equal tuple, its shape, and, where the name is a number n, each n-th of its numbers has the bytes of `value`.
    With None for a name, a list has the items of a tuple, a dict the keys and values at the addresses that are the
    bytes of `value`, (key, value, key, value, ...), another container has nothing, an object is of a type."""

def first_changed(checks: Tuple[Any, ...], asked: bytes, start: int, /) -> int:
    """The number of the first check, from `start` on, that does not hold; -1 if all hold.  `asked` is
    `what_is_asked(checks, ...)`.  A thing is the same by identity alone; who asks keeps it alive.  The numbers of a
    tensor that DLPack does not show quickly are never as they were."""

def without_none(tensors: Tuple[Any, ...], /) -> Tuple[Tuple[Any, ...], int]:
    """(those that are not None, a number whose bit i says that tensors[i] is None)"""

def with_none(present: Tuple[Any, ...], absent: int, /) -> Tuple[Any, ...]:
    """The tensors that without_none got."""

# --- What a call will do: csrc/layer/explain.c --------------------------------------------------

_Facts = Dict[str, Any]

def explain_kernels() -> _Facts:
    """What the active kernels look like, "float32" and "float64"; "share": when work is shared."""

def explain_attention(*call: Any) -> _Facts:
    """What attention_forward would do with these arguments, among which return_stats and origin are not."""

def explain_layer(*call: Any) -> _Facts:
    """What layer_forward would do with these arguments; "projections" has those of W_q, W_k, W_v, W_o that there are;
    "kept" is what stays until the next call, "weights" or "queries and keys", and "kept_bytes" how many bytes."""

def explain_linear(x: _Array, projection: Union[_Packed, _InRows], /) -> _Facts:
    """What linear would do with these arguments."""
