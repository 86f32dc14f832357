"""The forward call that the three layers share, and what is read back after it.

A small layer is over in some ten microseconds, so the usual call (plain CPU tensors, real nn.Linear children
without hooks) goes by a `Plan` that is checked, not rebuilt, each time; any other call goes through `attend`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional

import torch
from torch import Tensor, nn

from .. import _arguments
from .._arrays import to_lengths
from .._core import isa
from . import _tensors, decoding
from ._layer import packed, weights_of
from ._tensors import FLOATS, array, draw_seed, follow_threads, is_compiling, layer_forward
from .autograd import Parameters, apply_layer
from .decoding import KeyValueCache, ProjectedKeyValues
from .memory import RememberedFunction, remembered

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from ..viz.page import Page

    Array = np.ndarray[Any, Any]

_PLAIN = frozenset((Tensor, nn.Parameter))
_tracing, _in_functorch = _tensors._tracing, _tensors._in_functorch
_FEW, _SAMPLE = 256, 64
_HOOKS = "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"


def sample_of(weight: Array) -> Array:
    """A view of some numbers of a weight, spread over its rows; of all of them where they are few or float64.

    torch counts changes in place (`_version`), but not those through `.data`, which averaging of weights and
    hand-written optimizers use.  They change every number, so a sample tells.  What changes single numbers are
    lessons on small weights, and gradcheck, which wants float64.
    """
    flat = weight.reshape(-1)
    return flat if flat.size <= _FEW or flat.itemsize == 8 else flat[:: flat.size // _SAMPLE | 1]


class Plan:
    """What a call needs of the module, and how to tell that it still holds."""

    __slots__ = ("_biases", "_children", "_hooks", "_isa", "_live", "_packed", "dropout", "dtypes", "inner",
                 "parameters", "projections", "w_v")  # fmt: skip

    def __init__(self, module: AttentionModule) -> None:
        inner = module._inner()
        linears: list[Any] = [None if name is None else module._modules[name] for name in module._roles]
        scorer: Any = None if module._scorer is None else module._modules[module._scorer]
        weights = [None if linear is None else linear._parameters["weight"] for linear in linears]
        biases = [None if linear is None else linear._parameters["bias"] for linear in linears]
        w_v = None if scorer is None else scorer._parameters["weight"]
        self.inner, self.dropout = inner.__dict__, inner._modules["dropout"]
        self.parameters = Parameters(w_v, weights, biases)
        self.dtypes = (self.parameters.tensors[0].dtype,) if self.parameters.tensors else FLOATS
        self._biases = biases
        self.w_v = None if w_v is None else array(w_v)[0]
        self._isa = isa()
        parents = [module._modules] if inner is module else [module._modules, inner._modules]
        self._children = tuple((parent, tuple(parent.values())) for parent in parents)
        self._hooks = tuple(
            getattr(child, hooks) for _, children in self._children for child in children for hooks in _HOOKS
        )
        self._packed = tuple(
            (linear._parameters, W, W.data_ptr(), W.numel(), sample_of(view), W._version, b"")
            for linear, W, view in zip(linears, weights, self.parameters.arrays)
            if W is not None
        )
        self._pack()
        # These the core reads where they are: only another place is noticed.
        live = [(linear, "bias", b) for linear, b in zip(linears, biases) if b is not None]
        live += [(scorer, "weight", w_v)] if w_v is not None else []
        self._live = tuple((child._parameters, name, x, x.data_ptr()) for child, name, x in live)

    def _pack(self) -> None:
        """What the core computes with, from the numbers that the weights have now."""
        self._packed = tuple(
            (*fixed, sample, W._version, sample.tobytes()) for *fixed, sample, _, _ in self._packed for W in [fixed[1]]
        )
        self.projections = packed(self.parameters.arrays, self._biases)

    def takes(self, queries: Any, keys: Any, values: Any) -> bool:
        """Whether these are tensors that the core can take as they are, as far as can be seen quickly."""
        if type(queries) not in _PLAIN or queries.dtype not in self.dtypes:
            return False
        if keys is not queries and (type(keys) not in _PLAIN or keys.dtype is not queries.dtype):
            return False
        return values is keys or (type(values) in _PLAIN and values.dtype is queries.dtype)

    def holds(self) -> bool:
        """Whether a call may go by this plan, brought up to date where the weights have other numbers."""
        if self._isa != isa() or any(self._hooks):
            return False
        for parent, children in self._children:
            if tuple(parent.values()) != children:
                return False
        stale = False
        for parameters, weight, pointer, size, sample, version, sampled in self._packed:
            if (
                weight.data_ptr() != pointer
                or weight.numel() != size
                or not weight.is_contiguous()
                or parameters.get("weight") is not weight
            ):
                return False
            if weight._version != version or sample.tobytes() != sampled:
                stale = True  # other numbers in the same place: a step of an optimizer
        for parameters, name, tensor, pointer in self._live:
            if parameters.get(name) is not tensor or tensor.data_ptr() != pointer:
                return False
        if stale:
            self._pack()
        return True


def has_hooks(*modules: nn.Module) -> bool:
    return any(getattr(module, hooks) for module in modules for hooks in _HOOKS)


def is_standard(module: AttentionModule) -> bool:
    """Whether all children are what d2l's constructor makes, so that one call can stand for calling each of them."""
    inner = module._inner()
    dropout = inner._modules.get("dropout")
    linears: list[Any] = [module._modules.get(name) for name in (*module._roles, module._scorer) if name is not None]
    return (
        (inner is module or type(inner) is module._inner_type)
        and type(dropout) is nn.Dropout
        and all(type(child) is nn.Linear and "weight" in child._parameters for child in linears)
        and not has_hooks(*linears, dropout, *([] if inner is module else [inner]))
    )


def can_plan(module: AttentionModule) -> bool:
    """Whether the core can work on the parameters as they are."""
    if module._sequence is not None or not is_standard(module):
        return False
    parameters = [x for child in module.children() for x in child._parameters.values() if x is not None]
    return all(
        x.dtype is parameters[0].dtype
        and x.dtype in FLOATS
        and x.is_cpu
        and type(x) in _PLAIN
        and not x.is_inference()
        and x.is_contiguous()
        for x in parameters
    )


class AttentionModule(nn.Module):
    """Base of the layers: `forward`, and what a later look at `attention_weights` needs."""

    _roles: Sequence[Optional[str]] = (None, None, None, None)  # names of W_q, W_k, W_v, W_o
    _scorer: Optional[str] = None  # and of w_v
    _inner_type: Optional[type] = None  # of the child that holds the dropout, if it is not in the layer itself
    num_heads = 1
    _sequence: Any = None  # a distributed.SequenceGroup: the call's sequence is spread over several processes
    _remembers = False  # whether calls with one query may go on from the one before: see memory.py

    def __init__(self, empty_rows: str) -> None:
        super().__init__()
        self.empty_rows = _arguments.empty_rows(empty_rows)
        self._plan: Optional[Plan] = None
        self._last: Any = None  # (what the core or an operator kept, type of the inputs)

    def _inner(self) -> Any:
        """The module that has the dropout, and shows the weights of the last call."""
        return self

    def new_cache(self, batch: int, max_len: int) -> KeyValueCache:
        """Room for the projected keys and values of max_len steps of `batch` items.

        module(x, x, x, cache=cache) with x (B, n, features) projects the n new steps only and lets each attend to
        itself and to all before it; valid_lens (B,) says how many of the n count.  In evaluation and without
        gradients: see `new_cache` of the NumPy layers, whose rules and errors these are.

        >>> import torch, mha_c.torch
        >>> mha = mha_c.torch.MultiHeadAttention(num_hiddens=8, num_heads=2, dropout=0.1).eval()
        >>> cache = mha.new_cache(batch=1, max_len=100)
        >>> with torch.no_grad():
        ...     for step in torch.randn(3, 1, 1, 8):
        ...         out = mha(step, step, step, cache=cache)
        >>> cache.lengths
        tensor([3])
        """
        return decoding.KeyValueCache(batch, max_len)

    def project(self, keys: Tensor, values: Tensor, valid_lens: Any = None) -> ProjectedKeyValues:
        """W_k keys and W_v values, once, for the many calls module(queries, kv) of a decoder on one encoder.

        In evaluation and without gradients; otherwise as `project` of the NumPy layers.
        """
        return decoding.project(self, keys, values, valid_lens)

    def forward(
        self, queries: Tensor, keys: Any, values: Any = None, valid_lens: Any = None, *,
        training: Optional[bool] = None, cache: Optional[KeyValueCache] = None,
    ) -> Tensor:  # fmt: skip
        if cache is not None:
            return decoding.step(self, cache, queries, keys, values, valid_lens, training)
        if type(keys) is ProjectedKeyValues:
            return decoding.call_projected(self, queries, keys, values, valid_lens, training)
        if values is None:
            raise TypeError(f"{type(self).__name__}.forward() missing 1 required positional argument: 'values'")
        if is_compiling() or _tracing() is not None or _in_functorch():
            return self._slowly(queries, keys, values, valid_lens, training)
        plan = self._plan
        if plan is None or not plan.holds():
            plan = self.__dict__["_plan"] = Plan(self) if can_plan(self) else None
        if plan is None or not plan.takes(queries, keys, values):
            return self._slowly(queries, keys, values, valid_lens, training)
        if valid_lens is not None and not (type(valid_lens) is Tensor and valid_lens.dtype is torch.int64):
            valid_lens = to_lengths(valid_lens)
        dropout = plan.dropout
        p = dropout.p if (dropout.training if training is None else training) else 0.0
        options = valid_lens, plan.projections, plan.w_v, self.num_heads, self.empty_rows, p, draw_seed() if p else 0
        parameters = plan.parameters.tensors
        if not p and queries.dim() == 3 and queries.shape[1] == 1 and self._remembers:
            found = remembered(self, queries, keys, values, valid_lens)
            if found is not None:
                result, saved = found
                if torch.is_grad_enabled() and needs_grad(*parameters, queries, keys, values):
                    result = RememberedFunction.apply(
                        (result, options, plan.parameters), queries, None if keys is queries else keys,
                        None if values is keys else values, *parameters,
                    )  # fmt: skip
                plan.inner["_last"] = saved, queries.dtype
                return result
        try:
            if torch.is_grad_enabled() and needs_grad(*parameters, queries, keys, values):
                keep: list[Any] = []
                out: Tensor = apply_layer(
                    (options, plan.parameters, keep), queries, None if keys is queries else keys,
                    None if values is keys else values, *parameters,
                )  # fmt: skip
                saved = keep[0]
            else:
                follow_threads()
                out, saved = layer_forward(queries, keys, values, *options)
        except BufferError:  # not on the CPU, sparse, ...
            return self._slowly(queries, keys, values, valid_lens, training)
        plan.inner["_last"] = saved, queries.dtype
        return out

    def _slowly(self, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Any, training: Any) -> Tensor:
        raise NotImplementedError

    def _dropout_now(self, training: Optional[bool]) -> float:
        dropout = self._inner().dropout
        return float(dropout.p) if (dropout.training if training is None else training) else 0.0

    def view(self, tokens: Any = None, **options: Any) -> Page:
        """The weights of the last call as an interactive page: see `mha_c.viz.view` for tokens and options."""
        from ..viz import view

        return view(self, tokens, **options)

    def _shown(self, heads: Optional[int]) -> Tensor:
        last = self.__dict__.get("_last")
        if last is None:
            raise AttributeError
        return weights_of(last, heads)

    def __getattr__(self, name: str) -> Any:
        child = self.__dict__.get("_modules", {}).get(name)
        if child is not None:  # `mha.attention.attention_weights` in each call of the book's encoder
            return child
        if name == "attention_weights":
            raise AttributeError(
                f"{type(self).__name__} has no attention_weights yet: call the layer first, then read them"
            )
        return super().__getattr__(name)

    def __getstate__(self) -> dict[str, Any]:
        return {**{name: value for name, value in self.__dict__.items() if name != "_memory"}, "_plan": None}


def needs_grad(*tensors: Tensor) -> bool:
    for tensor in tensors:
        if tensor.requires_grad:
            return True
    return False
