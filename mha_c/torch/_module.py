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
from .._arguments.masks import sizes_of
from .._arguments.options import core_corner
from .._decoder.caches import check_not_projected
from .._decoder.steps import DecodingLayer
from .._layer.lacks import lacking, why_not
from .._layer.viewable import Viewable
from ..errors import ShapeError
from ._call import core, general
from ._call.children import Layout, all_plain, standard_parts
from ._call.choice import choose, in_one_call
from ._call.inputs import checked_inputs, materialize
from ._call.masks import masks_of
from ._call.readable import parts_for_core
from ._call.records import Asked, LayerInputs, LayerParameters, Options, new_record, pair
from ._call.turning import turn_for_core
from ._decoder.decoding import KeyValueCache, NewSteps
from ._decoder.projected import ProjectedKeyValues, project
from ._explained import explained, to_measure
from ._private import in_python
from ._tensors import exporting, is_compiling
from ._twins import twin
from ._weights.last import Assigned, Last, restored
from .masking import masked_softmax

if TYPE_CHECKING:
    from .._types import Causal, Counts, Heads, Rows, Turn
    from ._call.packed import Packed


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
    _frozen: Optional[Packed] = None
    _by_head = False  # whether attention_weights has an axis for the heads
    num_heads = 1

    def _for_core(self, parameters: LayerParameters) -> LayerParameters:
        """The layer's parameters with queries, keys and values in their places."""
        return parameters

    def _check_looks_back(self, causal: Causal = None) -> Optional[bool]:
        """ValueError if a step of this layer may see later ones."""

    def _head_counts(self) -> Heads:
        """How many heads: a number, or (of queries, of keys and values)."""
        return self.num_heads

    def _turned_features(self) -> int:
        """Features of a head that is turned by its position; 0: none is."""
        return 0

    def _turn(self, first: Counts, n_steps: int, dtype: torch.dtype) -> Optional[Turn]:
        """Cosines and sines of n steps from `first` on, a number or (B,), as the core takes them; None: none."""
        features = self._turned_features()
        return turn_for_core(first, n_steps, features, dtype) if features else None

    def _rows_of_joint(self, parameters: LayerParameters) -> Optional[tuple[Rows, ...]]:
        """Which rows W_q, W_k and W_v have of one weight, (first, number) each; None where they are three."""
        return None

    def _checked_masks(self, masks: Any, sizes: Any) -> tuple[Optional[Tensor], Optional[Tensor]]:
        """keep_mask and bias of a call, checked, of rank 2 or 4; sizes: (B, Q, K)."""
        heads = pair(self._head_counts())[0] if self._by_head else None
        keep_mask, bias = masks
        return masks_of(keep_mask, bias, sizes, heads)

    def _with_checked_masks(self, inputs: LayerInputs, asked: Asked) -> Asked:
        if asked.keep_mask is asked.bias is None:
            return asked
        sizes = sizes_of(*inputs[:2])
        if sizes is None:  # whoever computes the call refuses them, or reads them in his own way
            queries, keys = inputs[:2]
            sizes = queries.shape[0], queries.shape[-2], keys.shape[-2]
        keep_mask, bias = self._checked_masks(asked.masks, sizes)
        return asked._replace(keep_mask=keep_mask, bias=bias)

    def _reads_names(self) -> bool:
        """True.  Reads functions that a program may replace and the layout compares, so that compilers see the read."""
        return True

    @twin(DecodingLayer.new_cache)
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

    empty_rows = "uniform"
    _has_options = False  # whether each call of the core has options, those that nobody gave: see `_options`

    def __init__(self, empty_rows: Optional[str] = None) -> None:
        super().__init__()
        if empty_rows is not None:
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
            causal: Causal = False, keep_mask: Any = None, bias: Optional[Tensor] = None,
            training: Optional[bool] = None, cache: Optional[KeyValueCache] = None,
        ) -> Tensor: ...  # fmt: skip

    @overload  # what editors show
    def forward(
        self, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Any = None, *,
        causal: Causal = False, keep_mask: Any = None, bias: Optional[Tensor] = None, training: Optional[bool] = None,
        cache: Optional[KeyValueCache] = None,
    ) -> Tensor: ...  # fmt: skip
    @overload
    def forward(
        self, queries: Tensor, keys: ProjectedKeyValues, values: Optional[Tensor] = None, valid_lens: Any = None, *,
        causal: Causal = False, keep_mask: Any = None, bias: Optional[Tensor] = None, training: Optional[bool] = None,
    ) -> Tensor: ...  # fmt: skip
    @calls.shows_names
    def forward(
        self, queries: Any = None, keys: Any = None, values: Any = None, valid_lens: Any = None, *defaults: Any,
        causal: Causal = False, keep_mask: Any = None, bias: Optional[Tensor] = None, training: Optional[bool] = None,
        cache: Optional[KeyValueCache] = None, **misnamed: Any,
    ) -> Tensor:  # fmt: skip
        """One call of the layer: see the class."""
        try:  # defaults: those of the keywords, which torch.onnx.export(dynamo=False) passes by position
            if defaults or misnamed:
                calls.check_rest(self, defaults, misnamed)
            if training is not None:
                training = scalars.flag(training, "training")
            return called(self, (queries, keys, values), (valid_lens, keep_mask, bias, causal, training), cache)
        except (TypeError, ValueError) as error:
            if calls.is_refusal(error):  # in a traceback the caller's line comes next, not ours
                raise error.with_traceback(None) from None
            raise

    def _otherwise(self, inputs: Any, asked: Asked, cache: Any) -> Any:
        """A call that the core does not take as it is given: inputs are made plain tensors, then `choose` chooses."""
        queries, keys, values = inputs
        if isinstance(queries, Proxy):  # a leaf of torch.fx, as torch's own layers are
            return self._leaf(inputs, asked, cache)
        if cache is not None and is_compiling() and not exporting():
            return in_python(self._otherwise, inputs, asked, cache)
        projected, steps, plain = False, None, all_plain(self)
        if cache is not None:
            check_not_projected(keys)
        elif isinstance(keys, ProjectedKeyValues):
            projected, (keys, values, lens) = True, keys._given_to(self, queries, values, asked.valid_lens)
            asked = asked._replace(valid_lens=lens)
        inputs = queries, keys, values
        if plain:
            inputs = checked_inputs(type(self).__name__, queries, keys, values, asked.valid_lens)
            queries, keys, values = inputs
            materialize(self, queries, keys, values, asked.valid_lens if cache is None else None, projected)
        if cache is not None:
            steps, asked = NewSteps.of(self, cache, inputs, asked), Asked(training=asked.training)
        else:
            asked = self._with_checked_masks(inputs, asked)
        parts = standard_parts(self) if plain else None
        way = choose(parts, inputs, asked)
        parts = parts.for_projected() if parts is not None and projected else parts
        found = in_one_call(self, way, parts, inputs, asked, steps)
        return self._general(inputs, asked, projected, steps, plain) if found is None else found

    def _leaf(self, inputs: LayerInputs, asked: Asked, cache: Optional[KeyValueCache]) -> Any:
        named = {"causal": asked.causal or None, "keep_mask": asked.keep_mask, "bias": asked.bias}
        named = {**named, "training": asked.training, "cache": cache}
        return leaf_of_a_graph(self, (*inputs, asked.valid_lens), **named)

    def _general(
        self, inputs: LayerInputs, asked: Asked, projected: bool, steps: Optional[NewSteps], plain: bool
    ) -> Tensor:
        """The call by torch's operations."""
        return (general.by_torch if plain else general.by_the_book)(self, inputs, asked, projected, steps)

    def _lines(self, inputs: LayerInputs, asked: Asked, projected: bool) -> Tensor:
        """The call as the book writes it: one part after the other.

        projected   keys and values have been through W_k and W_v already
        """
        raise NotImplementedError

    # --- What the layer is to the core ------------------------------------------------------------

    def _options(self, given: Any, inputs: LayerInputs, parts: Any) -> Optional[Options]:
        """The options of a call of the core, None if there are none.

        given   corner, keep_mask, bias
        """
        corner, keep_mask, bias = given
        return None if corner is keep_mask is bias is None else new_record(Options, (*given, None, None))

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


def called(module: AttentionModule, inputs: Any, asked: tuple[Any, ...], cache: Any) -> Tensor:
    """A call of a layer: one call of the core, if it can read all parts.

    A function, since a method of a module is searched for at each call.

    asked   the elements of an Asked, which a small call has no time to make
    """
    queries, keys, values = inputs
    parts = parts_for_core(module, queries, keys, values)
    if parts is not None:
        try:
            valid_lens, keep_mask, bias, causal, training = asked
            if cache is not None:
                steps = NewSteps.of(module, cache, inputs, Asked(*asked))
                return core.call(module, parts, inputs, None, training, steps, queries.dtype)
            corner = None if causal is False else core_corner(causal, queries, keys)
            if keep_mask is not None or bias is not None:
                sizes = sizes_of(queries, keys)
                if sizes is not None:  # else the core refuses the inputs
                    keep_mask, bias = module._checked_masks((keep_mask, bias), sizes)
            options = None
            if module._has_options or not (corner is keep_mask is bias is None):
                options = module._options((corner, keep_mask, bias), inputs, parts)
            return core.call(module, parts, inputs, valid_lens, training, None, None, options)
        except (BufferError, TypeError, PackedForOthers):  # tried again in one type, then by torch, or refused
            pass
    return module._otherwise(inputs, Asked(*asked), cache)
