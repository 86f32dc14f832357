"""What every layer is: named projections, a stream of random numbers, a training switch, torch's printed form.

`layers.py` and `variants.py` build on `Layer`; nothing here knows attention.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Optional, TypeVar

import numpy as np

from . import _arguments
from ._arrays import parameter_array
from .linear import Linear, Parameter, Parameters, State

if TYPE_CHECKING:
    from ._arguments import RngLike

    Array = np.ndarray[Any, Any]
    Self = TypeVar("Self", bound="Layer")

INITIALIZERS = ("xavier_uniform", "torch")


class Dropout:
    """The dropout of a layer; `p` can be read and assigned.  Prints as torch's Dropout."""

    __slots__ = ("_p",)

    def __init__(self, p: float) -> None:
        self.p = p

    @property
    def p(self) -> float:
        return self._p

    @p.setter
    def p(self, value: float) -> None:
        self._p = _arguments.probability(value, "dropout")

    def __repr__(self) -> str:
        return f"Dropout(p={self._p}, inplace=False)"


class Layer:
    """Parameters by name, `train()` and `eval()`, `state_dict()`, pickling, and the repr of an nn.Module."""

    training: bool

    def __init__(self, states: tuple[State, ...], dtype: Any, rng: RngLike) -> None:
        self._rng = _arguments.generator(rng)
        self._drawing = (self._rng, INITIALIZERS[0])  # how open weights will be drawn
        self._parameters = Parameters(_arguments.float_type(dtype), states)
        self._linears = {state.name: Linear(self._parameters, i) for i, state in enumerate(states)}
        self.training = False

    @property
    def dtype(self) -> np.dtype[Any]:
        """float32 or float64: the type of the parameters.  A result has the type of the inputs."""
        return self._parameters.dtype

    def train(self: Self, mode: bool = True) -> Self:
        """In the calls to come, drop weights and keep what `backward` needs (NumPy layers start without)."""
        self.training = _arguments.flag(mode, "mode")
        return self

    def eval(self: Self) -> Self:
        """Drop nothing and keep nothing in the calls to come."""
        return self.train(False)

    def initialize(self, rng: RngLike = None, method: str = "xavier_uniform") -> None:
        """Draws all weights anew; sizes that are still open, at the first call.

        rng     None (the layer's own stream), a whole number, or a numpy.random.Generator
        method  "xavier_uniform" (as d2l's training functions do it; biases 0), or "torch" (what nn.Linear
                starts with: weights and biases uniform in +-1/sqrt(in_features))

        The numbers depend on the stream and the sizes only: float32 and float64 layers get the same ones,
        rounded, and so do layers whose sizes were given and layers whose sizes came with the first call.

        >>> import mha_c
        >>> mha = mha_c.MultiHeadAttention(100, 5, 0.5, use_bias=False)     # the form of the mxnet edition
        >>> mha.initialize(rng=0)
        """
        _arguments.choice(method, "method", INITIALIZERS)
        self._drawing = (self._rng if rng is None else _arguments.generator(rng), method)
        parameters = self._parameters
        with parameters.lock:
            empty = tuple(
                State(s.name, s.out_features, s.in_features, s.has_bias, reorder=s.reorder) for s in parameters.states
            )
            sized = all(state.in_features is not None for state in empty)
            parameters.states = self._drawn(empty, {}) if sized else empty

    def _drawn(self, states: Iterable[State], in_features: Mapping[str, int]) -> tuple[State, ...]:
        """`states` with numbers for those that have none, open sizes taken from `in_features`."""
        rng, method = self._drawing
        copied = self._parameters.copied
        drawn = []
        for state in states:
            if state.weight is not None:
                drawn.append(state)
                continue
            n_in = in_features[state.name] if state.in_features is None else state.in_features
            n_out = state.out_features
            bias = np.zeros(n_out) if state.has_bias else None
            if method == "torch":
                limit = 1 / math.sqrt(max(n_in, 1))
            else:
                limit = math.sqrt(6 / (n_in + n_out))
            weight = rng.uniform(-limit, limit, (n_out, n_in))
            if bias is not None and method == "torch":
                bias = rng.uniform(-limit, limit, n_out)
            drawn.append(state.replace(copied(weight), None if bias is None else copied(bias)))
        return tuple(drawn)

    # --- Training ---------------------------------------------------------------------------------

    def parameters(self) -> list[Parameter]:
        """All weights and biases in torch's order, for an optimizer:

        >>> import numpy as np, mha_c
        >>> attention = mha_c.AdditiveAttention(key_size=4, query_size=4, num_hiddens=8, dropout=0.1, rng=0)
        >>> x = np.ones((2, 3, 4), dtype=np.float32)
        >>> out = attention(x, x, x, training=True)
        >>> gradients = attention.backward(np.ones_like(out))
        >>> for p in attention.parameters():
        ...     p -= 0.1 * p.grad
        >>> attention.zero_grad()
        """
        return [
            Parameter(linear, suffix)
            for linear, state in zip(self._linears.values(), self._parameters.states)
            for suffix, _ in _arrays_of(state)
        ]

    def named_parameters(self) -> list[tuple[str, Parameter]]:
        """The same, each with its name: "W_q.weight" and so on."""
        return [(parameter.name, parameter) for parameter in self.parameters()]

    def zero_grad(self) -> None:
        """Forgets the gradients of all parameters; the next `backward` starts from nothing instead of adding."""
        with self._parameters.lock:
            self._parameters.grads.clear()

    # --- Saving and loading -------------------------------------------------------------------

    def state_dict(self) -> dict[str, Array]:
        """Copies of all parameters under torch's names and in torch's order, ready for np.savez(**...).

        ValueError while a size is open.
        """
        states = self._parameters.states
        open_ones = [state.name for state in states if state.weight is None]
        if open_ones:
            raise ValueError(f"no numbers yet in {', '.join(open_ones)}: call the layer once, or load_state_dict")
        entries = {f"{state.name}.{suffix}": array for state in states for suffix, array in _arrays_of(state)}
        return {name: array.copy() for name, array in entries.items() if array is not None}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copies all parameters from NumPy arrays or torch tensors, for example d2l_module.state_dict().

        Open sizes are fixed by it.  float32 and float64 are converted into one another.  Nothing is loaded
        unless everything fits: ValueError lists every missing, unexpected and wrongly shaped entry,
        TypeError every entry of another type.
        """
        parameters = self._parameters
        with parameters.lock:
            misfits: list[str] = []
            wrong_types: list[str] = []
            loaded = [self._loaded(state, state_dict, misfits, wrong_types) for state in parameters.states]
            known = {f"{state.name}.{suffix}" for state in parameters.states for suffix, _ in _arrays_of(state)}
            misfits += [f"{name} is unexpected" for name in state_dict if name not in known]
            if misfits or wrong_types:
                error_type = ValueError if misfits else TypeError
                listed = "".join(f"\n  {text}" for text in misfits + wrong_types)
                raise error_type(f"{type(self).__name__}.load_state_dict loaded nothing:{listed}")
            parameters.states = tuple(loaded)

    def _loaded(self, state: State, entries: Mapping[str, Any], misfits: list[str], wrong_types: list[str]) -> State:
        """`state` with the numbers of `entries`; what does not fit is described in the two lists."""
        found: dict[str, Array] = {}
        for suffix, _ in _arrays_of(state):
            name = f"{state.name}.{suffix}"
            if name not in entries:
                misfits.append(f"{name} is missing")
                continue
            try:
                array = parameter_array(entries[name], name)
            except TypeError as error:
                wrong_types.append(str(error))
                continue
            problem = state.misfit(suffix, array.shape)
            if problem is None:
                found[suffix] = self._parameters.copied(array)
            else:
                misfits.append(problem)
        return state.replace(found["weight"], found.get("bias")) if "weight" in found else state

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()

    # --- Printing -------------------------------------------------------------------------------

    def _children(self) -> Iterable[tuple[str, Any]]:
        """The named parts in the order in which torch prints them."""
        return self._linears.items()

    def __repr__(self) -> str:
        lines = [f"({name}): {child!r}" for name, child in self._children()]
        if not lines:
            return f"{type(self).__name__}()"
        body = "\n".join(lines).replace("\n", "\n  ")
        return f"{type(self).__name__}(\n  {body}\n)"


def _arrays_of(state: State) -> list[tuple[str, Optional[Array]]]:
    """The entries of a state_dict that one projection has, in torch's order."""
    entries = [("weight", state.weight)]
    return [*entries, ("bias", state.bias)] if state.has_bias else entries
