"""What the three layers share: the forward call, and `attention_weights` after it.

A call takes one of three ways, which `_call/choice.py` chooses: the core, an operator for compilers, or torch's
operations in the book's order.  A call of a small layer takes about ten microseconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional, overload

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx import Proxy

from .._arguments import calls, scalars
from .._arguments.calls import is_refusal, refuses_at_the_call
from .._arguments.core_refusals import PackedForOthers
from .._arguments.options import causal_lengths, check_causal_steps
from .._decoder.caches import check_not_projected
from .._decoder.steps import Decodes, DecodingLayer
from .._layer.lacks import lacking, why_not
from .._layer.viewable import Viewable
from ..errors import ShapeError
from ._call import core, general
from ._call.checks import lengths_of_causal
from ._call.children import Layout, all_plain, standard_parts
from ._call.choice import choose, in_one_call, parts_for_core
from ._call.inputs import checked_inputs, materialize
from ._call.records import Parameters
from ._decoder.decoding import KeyValueCache, Steps
from ._decoder.projected import ProjectedKeyValues, project
from ._explained import explained, to_measure
from ._private import in_python
from ._tensors import exporting, is_compiling
from ._twins import twin
from ._weights.last import Assigned, Last, restored
from .masking import masked_softmax

if TYPE_CHECKING:
    from .._types import Causal


def leaf_of_a_graph(module: nn.Module, inputs: Any, **named: Any) -> Any:
    """One graph node that calls the module: torch.fx does not trace into its `forward`."""
    tracer, given = inputs[0].tracer, {name: x for name, x in named.items() if x is not None}
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
        child = self.__dict__.get("_modules", {}).get(name)
        if child is not None:  # a short way: the book's encoder reads `mha.attention.attention_weights` in each call
            return child
        if isinstance(getattr(type(self), name, None), property) and name not in self.__dict__.get("_parameters", {}):
            try:
                return object.__getattribute__(self, name)  # the property has failed: raise its own error
            except AttributeError as error:
                if is_refusal(error):
                    raise error.with_traceback(None) from None
                raise
        if name in lacking(type(self)):
            raise AttributeError(why_not(type(self), name))
        return super().__getattr__(name)


class ShowsWeights(TakesArrays):
    """A module that shows the attention weights of its last call, also from a copy or a file."""

    _last: Optional[Last] = None  # in the module that has the dropout: its last call; else what a program has assigned

    def _shown(self, heads: Optional[int], owner: str = "") -> Any:
        if self._last is None:
            owner = owner or type(self).__name__  # given where this is the attention inside the layer that is read
            raise AttributeError(f"{owner} has no attention_weights yet: call the layer first, then read them")
        return self._last.weights(heads)

    def __getstate__(self) -> dict[str, Any]:
        own = {name: value for name, value in self.__dict__.items() if name != "_frozen"}
        return {**own, "_last": None if self._last is None else self._last.detached()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        weights = {name: Assigned(value) for name, value in state.items() if name == "attention_weights"}  # d2l's
        super().__setstate__({name: value for name, value in state.items() if name not in ("_frozen", *weights)})
        self._last = weights.get("attention_weights") or restored(state.get("_last"))


class DecodingModule(ShowsWeights):
    """A layer whose calls with a cache are one call of the core; `frozen` packs its weights for it."""

    _layout: Layout  # of the class
    _frozen: Any = None  # a Packed

    def _for_core(self, parameters: Parameters) -> Parameters:
        """The layer's parameters with queries, keys and values in their places."""
        return parameters

    def _check_looks_back(self) -> None:
        """ValueError if a step of this layer may see later ones."""

    def _reads_names(self) -> bool:
        """True.  Reads functions that a program may replace and the layout compares, so that compilers see the read."""
        return True

    @twin(Decodes.new_cache)
    @refuses_at_the_call
    def new_cache(
        self, batch: int, max_len: Optional[int], *, window: Optional[int] = None, sinks: int = 0
    ) -> KeyValueCache:
        """Make a cache for the projected keys and values of `max_len` steps of `batch` items.

        module(x, x, x, cache=cache) with x (B, n, features) projects only the n new steps and appends them to the
        cache.  Each new step attends to itself and to all steps before it; valid_lens (B,) says how many of the n
        steps of each item count.  With `window` a step sees so many last steps and the first `sinks`; then max_len may
        be None.  Heads that share keys share those of the cache, and rotary positions go on behind its steps.  In eval
        mode and without gradients only.

        >>> import torch, mha_c.torch
        >>> mha = mha_c.torch.MultiHeadAttention(num_hiddens=8, num_heads=2, dropout=0.1).eval()
        >>> cache = mha.new_cache(batch=1, max_len=100)
        >>> with torch.no_grad():
        ...     for step in torch.randn(3, 1, 1, 8):
        ...         out = mha(step, step, step, cache=cache)
        >>> cache.lengths
        tensor([3])
        """
        self._check_looks_back()
        return KeyValueCache(batch, max_len, window=window, sinks=sinks)


class AttentionModule(DecodingModule, Viewable):
    """Base of the layers: `forward`, and `attention_weights`, which is computed when it is read.

    Attributes
    ----------
    num_heads : int
        How many heads; 1 in a layer without heads.
    empty_rows : str
        What a query without visible keys gets: "uniform", the mean of all values, or "zero".
    """

    num_heads = 1
    empty_rows = "uniform"

    def __init__(self, empty_rows: str) -> None:
        super().__init__()
        self.empty_rows = scalars.empty_rows(empty_rows)

    def _inner(self) -> Any:
        """The module that has the dropout and shows the attention weights of the last call."""
        return self

    def reset_parameters(self) -> None:
        """Initialise all weights again, as torch's modules do; the first call initialises those of lazy modules."""
        for child in self.children():
            if hasattr(child, "reset_parameters"):
                child.reset_parameters()

    @twin(DecodingLayer.project)
    @refuses_at_the_call
    def project(self, keys: Tensor, values: Tensor, valid_lens: Any = None) -> ProjectedKeyValues:
        """Project `keys` by W_k and `values` by W_v once, for a decoder that uses the same ones at every step.

        module(queries, kv) takes the result in place of both; `valid_lens` is for calls that give none.  Gradients
        flow back to keys, values, W_k and W_v; under torch.no_grad() calls are fastest.

        >>> import torch, mha_c.torch
        >>> mha, encoded = mha_c.torch.MultiHeadAttention(8, 8, 8, 8, 2, 0.0), torch.ones(2, 6, 8)
        >>> kv = mha.project(encoded, encoded, torch.tensor([3, 6]))
        >>> sum(mha(query, kv).sum() for query in torch.ones(4, 2, 1, 8)).backward()
        >>> mha.W_k.weight.grad.shape
        torch.Size([8, 8])
        """
        return project(self, keys, values, valid_lens)

    _explained, _to_measure = explained, to_measure  # for mha_c.explain and mha_c.cost

    if TYPE_CHECKING:  # nn.Module's __call__ takes and returns Any

        def __call__(
            self, queries: Tensor, keys: Any, values: Any = None, valid_lens: Any = None, *,
            causal: Causal = False, training: Optional[bool] = None, cache: Optional[KeyValueCache] = None,
        ) -> Tensor: ...  # fmt: skip

    @overload  # what editors show
    def forward(
        self, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Any = None, *,
        causal: Causal = False, training: Optional[bool] = None, cache: Optional[KeyValueCache] = None,
    ) -> Tensor: ...  # fmt: skip
    @overload
    def forward(
        self, queries: Tensor, keys: ProjectedKeyValues, values: Optional[Tensor] = None, valid_lens: Any = None, *,
        causal: Causal = False, training: Optional[bool] = None,
    ) -> Tensor: ...  # fmt: skip
    @calls.shows_names
    def forward(
        self, queries: Any = None, keys: Any = None, values: Any = None, valid_lens: Any = None, *defaults: Any,
        causal: Causal = False, training: Optional[bool] = None, cache: Optional[KeyValueCache] = None, **misnamed: Any,
    ) -> Tensor:  # fmt: skip
        """One call of the layer: see the class."""
        try:  # defaults: those of the keywords, which torch.onnx.export(dynamo=False) passes by position
            if defaults or misnamed:
                calls.check_rest(self, defaults, misnamed)
            if training is not None:
                training = scalars.flag(training, "training")
            parts = parts_for_core(self, queries, keys, values)
            try:
                if parts is not None and cache is None:
                    lens = valid_lens if causal is False else causal_lengths(causal, queries, keys, valid_lens)
                    return core.call(self, parts, (queries, keys, values), lens, training)
                if parts is not None:
                    check_causal_steps(causal)
                    steps = Steps.of(self, cache, (queries, keys, values), valid_lens, training)
                    return core.call(self, parts, (queries, keys, values), None, training, steps, queries.dtype)
            except (BufferError, TypeError, PackedForOthers):  # tried again in one type, then by torch, or refused
                pass
            return self._otherwise(queries, keys, values, valid_lens, causal, training, cache)
        except (TypeError, ValueError) as error:
            if calls.is_refusal(error):  # in a traceback the caller's line comes next, not ours
                raise error.with_traceback(None) from None
            raise

    def _otherwise(
        self, queries: Any, keys: Any, values: Any, valid_lens: Any, causal: Causal, training: Optional[bool],
        cache: Optional[KeyValueCache],
    ) -> Any:  # fmt: skip
        """A call that the core does not take as it is given: inputs are made plain tensors, then `choose` chooses."""
        if isinstance(queries, Proxy):  # a leaf of torch.fx, as torch's own layers are
            named = {"causal": causal or None, "training": training, "cache": cache}
            return leaf_of_a_graph(self, (queries, keys, values, valid_lens), **named)
        if cache is not None and is_compiling() and not exporting():
            return in_python(self._otherwise, queries, keys, values, valid_lens, causal, training, cache)
        projected, steps, plain = False, None, all_plain(self)
        if cache is not None:
            check_not_projected(keys)
        elif isinstance(keys, ProjectedKeyValues):
            projected, (keys, values, valid_lens) = True, keys._given_to(self, queries, values, valid_lens)
        if plain:
            queries, keys, values = checked_inputs(type(self).__name__, queries, keys, values, valid_lens)
            materialize(self, queries, keys, values, valid_lens if cache is None else None, projected)
        inputs = queries, keys, values
        if cache is not None:
            check_causal_steps(causal)
            steps, causal = Steps.of(self, cache, inputs, valid_lens, training), False
        if causal is False:
            lens = valid_lens
        else:  # a sequence that is spread has its own
            of_causal = getattr(self._inner(), "lengths_of_causal", lengths_of_causal)
            lens = of_causal(causal, queries, keys, valid_lens)
        if not plain:
            return general.by_the_book(self, inputs, lens, training, projected, steps)
        parts = standard_parts(self)
        way = choose(parts, inputs, lens)
        parts = parts.for_projected() if parts is not None and projected else parts
        found = in_one_call(self, way, parts, inputs, lens, training, steps)
        if found is not None:
            return found
        return general.by_torch(self, inputs, (valid_lens, causal), training, projected, steps)

    def _lines(self, inputs: Any, valid_lens: Any, training: Optional[bool], projected: bool) -> Tensor:
        """The call as the book writes it: one part after the other.

        projected   keys and values have been through W_k and W_v already
        """
        raise NotImplementedError

    def _masked_softmax(self, scores: Tensor, valid_lens: Any) -> Tensor:
        if valid_lens is None:
            return nn.functional.softmax(scores, dim=-1)
        return masked_softmax(scores, valid_lens, empty_rows=self.empty_rows)  # type: ignore[arg-type]

    @property
    def attention_weights(self) -> Tensor:
        """Weights of the last call, before dropout: (B, Q, K), or (B, H, Q, K) in a MultiHeadAttention.

        In the attention inside a MultiHeadAttention the shape is (B*H, Q, K), row b*H + h, as in d2l.  Each reading
        returns the same tensor.  An assigned value can be read until the next call.
        """
        return self._read_weights()

    @attention_weights.setter
    def attention_weights(self, value: Any) -> None:
        self.__dict__["_last"] = Assigned(value)

    @attention_weights.deleter
    def attention_weights(self) -> None:
        if self._last is None:
            raise AttributeError(f"{type(self).__name__} has no attention_weights of its own to delete")
        self._last = None

    def _read_weights(self) -> Any:
        return self._shown(None)

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
