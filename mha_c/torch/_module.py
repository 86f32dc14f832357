"""What the three layers share: the forward call, and `attention_weights` after it.

A call of a small layer takes about ten microseconds.  So the usual call (plain CPU tensors, children that do what
torch's own classes do) goes straight to the core, which reads the parameters in place; other calls use `_slowly`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx import Proxy

from .._arguments import calls, scalars
from .._arguments.arrays import to_lengths
from .._arguments.scalars import LateSeed
from .._core import layer_parts
from .._layer.module import own_method
from .._layer.viewable import Viewable
from ..errors import ShapeError
from ._call.children import Layout, check_call, checked_inputs, has_open_sizes, standard_parts
from ._call.mathematics import without_padding
from ._call.ways import attend, run_layer
from ._decoder import decoding, projected, repeated_keys
from ._decoder.decoding import KeyValueCache
from ._decoder.projected import ProjectedKeyValues
from ._explained import explained, to_measure
from ._lazy_sizes import materialize
from ._private import in_mode, in_transform, n_dispatch_modes, n_function_modes, tracing_state
from ._tensors import autocasting, draw_seed, elsewhere, exporting, is_compiling, result_type
from ._weights.kept import Assigned, detached, last_call, restored
from .masking import masked_softmax

if TYPE_CHECKING:
    from .frozen import Packed

OWN_TYPES = frozenset((Tensor, nn.Parameter))
_INT64 = torch.int64
_NOT_SAVED = "_frozen", "_memory"


def leaf_of_a_graph(tracer: Any, module: nn.Module, inputs: Any, options: Any) -> Any:
    """One graph node that calls the module: torch.fx does not trace into its `forward`."""
    given = {name: value for name, value in options.items() if value is not None}
    return tracer.create_proxy("call_module", tracer.path_of_module(module), inputs, given)


class StateShapeError(ShapeError, RuntimeError):
    """Weights that do not fit a module: torch says RuntimeError, mha_c says ShapeError."""


class TakesArrays(nn.Module):
    """A module that can load its weights from arrays, such as a NumPy layer's, alone or inside a model, and whose
    properties raise their own errors where there is nothing to read (nn.Module would hide these)."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        for name, value in state_dict.items():
            if isinstance(value, np.ndarray) and name.startswith(prefix):
                state_dict[name] = torch.tensor(value)  # a copy of the caller's dict; the children read it next
        super()._load_from_state_dict(state_dict, prefix, *others)

    def __getattr__(self, name: str) -> Any:
        if isinstance(getattr(type(self), name, None), property) and name not in self.__dict__.get("_parameters", {}):
            return object.__getattribute__(self, name)  # the property has failed: raise its own error
        return super().__getattr__(name)


class AttentionModule(TakesArrays, Viewable):
    """Base of the layers: `forward`, and `attention_weights`, which is computed when it is read."""

    _layout: Layout  # of the class
    _with_masks = "mha_c.torch.functional.dot_product_attention"  # the function that takes any mask
    num_heads = 1
    empty_rows = "uniform"
    _frozen: Optional[Packed] = None
    _remembers = False  # whether calls with one query may reuse projections of the last call: see repeated_keys.py
    # Of the last call: (what the core or an operator kept, type of the inputs, parts of a WeightsSource).  Reading
    # attention_weights makes it a Kept, assigning them an Assigned.
    _last: Any = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "forward" not in vars(cls) and cls.__module__.startswith("mha_c."):
            # Python's errors about wrong calls then name this class.
            cls.forward = own_method(cls, cls.forward)  # type: ignore[method-assign,arg-type]

    def __init__(self, empty_rows: str) -> None:
        super().__init__()
        self.empty_rows = scalars.empty_rows(empty_rows)

    def _inner(self) -> Any:
        """The module that has the dropout and shows the attention weights of the last call."""
        return self

    def reset_parameters(self) -> None:
        """Draw all weights again, as torch's modules do; the first call draws those of lazy modules."""
        for child in self.children():
            if hasattr(child, "reset_parameters"):
                child.reset_parameters()

    def new_cache(self, batch: int, max_len: int) -> KeyValueCache:
        """Make a cache for the projected keys and values of max_len steps of `batch` items.

        module(x, x, x, cache=cache) with x (B, n, features) projects only the n new steps and appends them to the
        cache.  Each new step attends to itself and to all steps before it; valid_lens (B,) says how many of the n steps
        of each item count.  In eval mode and without gradients only.  Rules and errors are those of the NumPy layers.

        Parameters
        ----------
        batch : int
            How many items.
        max_len : int
            The largest number of steps.

        Returns
        -------
        KeyValueCache
            An empty cache.

        Examples
        --------
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
        """Project keys by W_k and values by W_v once, for a decoder that uses the same encoder outputs at every step.

        Where gradients are recorded, they flow back to keys, values, W_k and W_v; calls under torch.no_grad() are the
        fastest.  module(queries, kv) takes the result kv in the place of both; see `project` of the NumPy layers.

        Parameters
        ----------
        keys, values : Tensor (B, K, .)
            The keys and values that a call would take.
        valid_lens : numbers (B,) or (B, Q), optional
            Used by calls that give no valid_lens.

        Returns
        -------
        ProjectedKeyValues
            If W_k or W_v has changed since, a call refuses it (ValueError): project again then.

        Examples
        --------
        >>> import torch, mha_c.torch
        >>> mha, encoded = mha_c.torch.MultiHeadAttention(8, 8, 8, 8, 2, 0.0), torch.ones(2, 6, 8)
        >>> kv = mha.project(encoded, encoded, torch.tensor([3, 6]))
        >>> sum(mha(query, kv).sum() for query in torch.ones(4, 2, 1, 8)).backward()
        >>> mha.W_k.weight.grad.shape
        torch.Size([8, 8])
        """
        return projected.project(self, keys, values, valid_lens)

    def _explained(
        self, queries: Any = None, keys: Any = None, values: Any = None, valid_lens: Any = None, *,
        training: Optional[bool] = None, cache: Optional[KeyValueCache] = None,
    ) -> dict[str, Any]:  # fmt: skip
        return explained(self, (queries, keys, values), valid_lens, training, cache)

    def _to_measure(self, sizes: Any, drawn: bool) -> Any:
        return to_measure(self, sizes, drawn)

    if TYPE_CHECKING:  # nn.Module's __call__ takes and returns Any

        def __call__(
            self, queries: Tensor, keys: Any, values: Any = None, valid_lens: Any = None, *,
            training: Optional[bool] = None, cache: Optional[KeyValueCache] = None,
        ) -> Tensor: ...  # fmt: skip

    def forward(
        self, queries: Any, keys: Any, values: Any = None, valid_lens: Any = None, *defaults: Any,
        training: Optional[bool] = None, cache: Optional[KeyValueCache] = None, **misnamed: Any,
    ) -> Tensor:  # fmt: skip
        """One call of the layer: see the class.

        `defaults`: None for each keyword; torch.onnx.export(dynamo=False) passes these by position.
        """
        if misnamed:
            raise calls.misnamed(f"{type(self).__name__}.forward()", misnamed, self._with_masks)
        if defaults and any(x is not None for x in defaults):
            raise TypeError(f"{type(self).__name__} takes training and cache by name, and nothing behind valid_lens")
        if training is not None:
            training = scalars.flag(training, "training")
        if cache is not None:
            return decoding.step(self, cache, queries, keys, values, valid_lens, training)
        if is_compiling() or not (type(queries) in OWN_TYPES and type(keys) in OWN_TYPES and type(values) in OWN_TYPES):
            return self._unusual(queries, keys, values, valid_lens, training)
        not_by_core = (
            tracing_state() is not None or in_transform() or ((n_function_modes() or n_dispatch_modes()) and in_mode())
        )
        parts = None if not_by_core else layer_parts(self, self._layout)
        if parts is None:
            return self._slowly(queries, keys, values, valid_lens, training)
        parameters, holder, dropout, packed = parts
        if valid_lens is not None and not (type(valid_lens) is Tensor and valid_lens.dtype is _INT64):
            if elsewhere(valid_lens):
                return self._slowly(queries, keys, values, valid_lens, training)
            valid_lens = to_lengths(valid_lens)
        p = dropout.p if (dropout.training if training is None else training) else 0.0
        if p and dropout.inplace:
            return self._slowly(queries, keys, values, valid_lens, training)
        options = valid_lens, self.num_heads, self.empty_rows, p
        inputs, found, seed = (queries, keys, values), None, LateSeed(draw_seed) if p else 0
        try:
            large = self._remembers and not p and keys.numel() >= repeated_keys.LEAST
            if large and queries.dim() == 3 and queries.size(1) == 1:
                found = repeated_keys.remembered(self.__dict__, inputs, parameters, options, packed)
            out, saved, source = run_layer(inputs, parameters, options, seed, packed) if found is None else found
        except (BufferError, TypeError):  # types differ, or another device: `_slowly` computes or raises
            return self._slowly(queries, keys, values, valid_lens, training)
        dtype = out.dtype
        if autocasting() and result_type(dtype) is not dtype:
            dtype = result_type(dtype)
            out = out.to(dtype)
        self._forget_assigned()
        holder["_last"] = saved, dtype, source
        return out

    def _unusual(self, queries: Any, keys: Any, values: Any, valid_lens: Any, training: Optional[bool]) -> Any:
        """A call with inputs that are not plain tensors, or inside a compiler."""
        if isinstance(keys, ProjectedKeyValues):
            return projected.call_projected(self, queries, keys, values, valid_lens, training)
        if queries is None or keys is None or values is None:
            raise calls.missing(type(self).__name__, queries=queries, keys=keys, values=values)
        if isinstance(queries, Proxy):  # a leaf of torch.fx, as torch's own layers are
            return leaf_of_a_graph(queries.tracer, self, (queries, keys, values, valid_lens), {"training": training})
        return self._slowly(queries, keys, values, valid_lens, training)

    def _slowly(
        self, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Any, training: Any,
        projected: bool = False,
    ) -> Tensor:  # fmt: skip
        """Every other call.

        projected  keys and values are those of `project`: W_k and W_v are not applied
        """
        calls.check_order(type(self).__name__, values, valid_lens)
        queries, keys, values = checked_inputs(queries, keys, values)
        unchecked = exporting() or not is_compiling()  # a compiler's program raises errors when it runs
        if unchecked and has_open_sizes(self):
            check_call(self, queries, keys, values, valid_lens, projected)
            unchecked = False
        materialize(self, queries, *((None, None) if projected else (keys, values)))
        self._forget_assigned()
        parts = standard_parts(self, queries, keys, values)
        if parts is None:
            if unchecked:
                check_call(self, queries, keys, values, valid_lens, projected)
            if valid_lens is not None:
                keys, values = without_padding(queries, keys, values, valid_lens, self.empty_rows)
            queries = self._through(0, queries)
            if not projected:
                keys, values = self._through(1, keys), self._through(2, values)
            return self._by_children(queries, keys, values, valid_lens, training)
        parameters, holder, _, _ = parts
        if projected:
            parameters = decoding.outer_weights(parameters, None)
        out, holder["_last"] = attend(queries, keys, values, valid_lens, parameters, self.num_heads, self.empty_rows,
                                     self._dropout_now(training))  # fmt: skip
        return out

    def _by_children(self, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Any, training: Any) -> Tensor:
        """The call after the projections, as d2l writes it: one child after the other."""
        raise NotImplementedError

    def _through(self, slot: int, x: Tensor) -> Tensor:
        """Apply the child W_q, W_k or W_v to queries (0), keys (1) or values (2); x itself where there is none."""
        name = dict(self._layout.slots).get(slot)
        return x if name is None else getattr(self, name)(x)

    def _masked_softmax(self, scores: Tensor, valid_lens: Any) -> Tensor:
        return masked_softmax(scores, valid_lens, empty_rows=self.empty_rows)  # type: ignore[arg-type]

    def _dropout_now(self, training: Optional[bool]) -> float:
        dropout = self._inner().dropout
        return float(dropout.p) if (dropout.training if training is None else training) else 0.0

    @property
    def attention_weights(self) -> Tensor:
        """Weights of the last call, before dropout: (B, Q, K), or (B, H, Q, K) in a MultiHeadAttention.

        In the attention inside a MultiHeadAttention the shape is (B*H, Q, K), row b*H + h, as in d2l.  Each reading
        gives the same tensor.  An assigned value can be read until the next call.
        """
        return self._read_weights()

    @attention_weights.setter
    def attention_weights(self, value: Any) -> None:
        self._last = Assigned(value)

    @attention_weights.deleter
    def attention_weights(self) -> None:
        if self._last is None:
            raise AttributeError(f"{type(self).__name__} has no attention_weights of its own to delete")
        self._last = None

    def _read_weights(self) -> Any:
        return self._shown(None)

    def _shown(self, heads: Optional[int]) -> Any:
        last = last_call(self)
        if last is None:
            raise AttributeError("there are no attention_weights yet: call the layer first, then read them")
        return last.weights(heads)

    def _reads_names(self) -> bool:
        """True.  Reads functions that a program may replace and the layout compares, so that compilers see the read."""
        return True

    def _forget_assigned(self) -> None:
        """For layers whose inner module keeps the weights: drop those assigned to the layer itself.  Here: nothing."""

    def __getattr__(self, name: str) -> Any:
        child = self.__dict__.get("_modules", {}).get(name)
        if child is not None:  # a short way: the book's encoder reads `mha.attention.attention_weights` in each call
            return child
        return super().__getattr__(name)

    # What a module remembers of earlier calls is valid for one mode, one set of weights and one type only.

    def train(self, mode: bool = True) -> Any:
        """The same as `train` of torch's modules.

        Parameters
        ----------
        mode : bool
            False for evaluation.

        Returns
        -------
        Module
            The module itself.
        """
        self.__dict__.pop("_memory", None)
        return super().train(mode)

    def _apply(self, *args: Any, **options: Any) -> Any:
        self.__dict__.pop("_memory", None)
        return super()._apply(*args, **options)

    def _load_from_state_dict(self, *args: Any, **options: Any) -> None:
        self.__dict__.pop("_memory", None)
        super()._load_from_state_dict(*args, **options)

    def load_state_dict(self, state_dict: Any, *args: Any, **options: Any) -> Any:
        """Like `load_state_dict` of torch's modules; takes arrays too, and the error for a wrong shape is a ShapeError.

        Parameters
        ----------
        state_dict : dict
            {name: Tensor or array}.
        *args, **options : Any
            As in torch.

        Returns
        -------
        NamedTuple
            As in torch: missing_keys, unexpected_keys.
        """
        try:
            return super().load_state_dict(state_dict, *args, **options)
        except RuntimeError as error:
            if "size mismatch" not in str(error):
                raise
            raise StateShapeError(str(error)) from None

    def __getstate__(self) -> dict[str, Any]:
        own = {name: value for name, value in self.__dict__.items() if name not in _NOT_SAVED}
        return {**own, "_last": detached(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        weights = {name: Assigned(value) for name, value in state.items() if name == "attention_weights"}  # d2l's
        super().__setstate__({name: value for name, value in state.items() if name not in (*_NOT_SAVED, *weights)})
        self._last = weights.get("attention_weights") or restored(state.get("_last"))
