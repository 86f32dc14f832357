"""What all layers share: named projections, a stream of random numbers, a training mode, a repr like torch's.

`layers.py` and `variants.py` build on `Layer`; nothing here knows attention.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Optional, TypeVar

import numpy as np

from .._arguments import scalars
from .._arguments.arrays import parameter_array
from .._arguments.calls import refuses_at_the_call
from ..errors import ShapeError
from ..linear import Linear, Parameter, Parameters, State

if TYPE_CHECKING:
    from .._types import Array, RngLike
    from ..linear import States

    Self = TypeVar("Self", bound="Trained")

INITIALIZERS = ("xavier_uniform", "torch")


class Dropout:
    """The dropout of a layer; its probability `p` can be read and assigned.  It prints like torch's Dropout."""

    __slots__ = ("_p",)

    def __init__(self, p: float) -> None:
        self.p = p

    @property
    def p(self) -> float:
        return self._p

    @p.setter
    def p(self, value: float) -> None:
        self._p = scalars.probability(value, "dropout")

    def __repr__(self) -> str:
        return f"Dropout(p={self._p}, inplace=False)"


class IncompatibleKeys(NamedTuple):
    """The names that `load_state_dict` found missing or unexpected; it prints like torch's."""

    missing_keys: list[str]
    unexpected_keys: list[str]

    def __repr__(self) -> str:
        return tuple.__repr__(self) if any(self) else "<All keys matched successfully>"


# Attributes of torch's modules that a user of torch may expect of a NumPy layer.
OF_TORCH_MODULES = frozenset(
    "add_module apply bfloat16 buffers children compile cpu cuda double float forward get_submodule half modules "
    "mps named_buffers named_children named_modules register_forward_hook register_forward_pre_hook "
    "register_full_backward_hook requires_grad_ share_memory to to_empty type xpu".split()
)


class OfTorchModule:
    """A name of OF_TORCH_MODULES: reading it raises the AttributeError that says where there is such an attribute.

    (A `__getattr__` could say the same, but a class that has one takes up to ten times as long, on Python 3.11, to read
    anything.)
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.__doc__ = "In mha_c.torch only."  # what help() prints below the name

    def __get__(self, layer: Any, kind: type) -> Any:
        with suppress(AttributeError):  # a base that a user lists behind ours may have one
            return getattr(super(Layer, kind if layer is None else layer), self._name)
        ours = next(base for base in kind.__mro__ if base.__module__.startswith("mha_c."))
        there = "mha_c.torch.variants" if ours.__module__ == "mha_c.variants" else "mha_c.torch"
        if self._name == "forward":
            raise AttributeError(f"{kind.__name__} has no 'forward': call the layer itself, layer(...)")
        raise AttributeError(
            f"{kind.__name__} has no {self._name!r}: it is a NumPy layer, which computes on the CPU in the type of its "
            f"inputs; the same layer as a torch module is {there}.{ours.__name__}"
        )


class Trained:
    """A layer's `training`, which `train()` and `eval()` switch; in training mode a call leaves a `_record`.

    Attributes
    ----------
    training : bool
        Whether the layer is in training mode: see `train` and `eval`.
    """

    training = False
    _record: Any = None  # what `backward` needs of the last call; copies and pickles have none

    @refuses_at_the_call
    def train(self: Self, mode: bool = True) -> Self:
        """Switch to training mode: calls use dropout and keep what `backward` needs (NumPy layers start in eval mode).

        Parameters
        ----------
        mode : bool
            False: the same as `eval`.

        Returns
        -------
        layer
            The layer itself.
        """
        self.training = scalars.flag(mode, "mode")
        for _, child in self._children():
            if isinstance(child, Trained):
                child.train(mode)
        return self

    def eval(self: Self) -> Self:
        """Switch to eval mode: calls use no dropout and keep nothing for `backward`.

        Returns
        -------
        layer
            The layer itself.
        """
        return self.train(False)

    def _children(self) -> Iterable[tuple[str, Any]]:
        """The named parts in the order in which torch prints them."""
        return ()

    def __getstate__(self) -> dict[str, Any]:
        left_out = "_plan", "_record"
        state = {name: value for name, value in self.__dict__.items() if name not in left_out}
        return {**state, "_shown": {}} if "_shown" in state else state


class Layer(Trained):
    """Parameters by name, `train()` and `eval()`, `state_dict()`, pickling, and the repr of an nn.Module."""

    def __init__(self, states: tuple[State, ...], dtype: Any, rng: RngLike) -> None:
        self._rng = scalars.generator(rng)
        self._parameters = Parameters(scalars.float_type(dtype), {state.name: state for state in states})
        self._linears = {state.name: Linear(self._parameters, state.name) for state in states}
        self.training = False
        self.initialize()

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the parameters, float32 or float64.  A result has the type of the inputs."""
        return self._parameters.dtype

    @refuses_at_the_call
    def initialize(self, rng: RngLike = None, method: str = "xavier_uniform") -> None:
        """Initialise all weights again; weights whose sizes are not known yet are initialised by the first call.

        The weights depend on the random numbers and the sizes only: a float32 layer gets the rounded weights of a
        float64 layer, and it does not matter whether the sizes were given or set by the first call.

        Parameters
        ----------
        rng : None, int or numpy.random.Generator
            None: the layer's own generator.
        method : {"xavier_uniform", "torch"}
            "xavier_uniform": as in d2l's training functions, biases 0.  "torch": as in nn.Linear, weights and biases
            uniform in +-1/sqrt(in_features).

        Examples
        --------
        >>> import mha_c
        >>> mha = mha_c.MultiHeadAttention(100, 5, 0.5, use_bias=False)     # the form of the mxnet edition
        >>> mha.initialize(rng=0)
        """
        scalars.choice(method, "method", *INITIALIZERS)
        self._drawing = (self._rng if rng is None else scalars.generator(rng), method)  # for sizes not known yet
        parameters = self._parameters
        with parameters.lock:
            states = parameters.states.items()
            empty = {name: State(name, s.out_features, s.in_features, s.has_bias) for name, s in states}
            sized = all(state.in_features is not None for state in empty.values())
            parameters.states = self._drawn(empty, {}) if sized else empty

    def _drawn(self, states: States, in_features: Mapping[str, int], draw: Any = None) -> States:
        """`states`, with new numbers where a state has none; `in_features` gives the sizes that are not known yet.

        draw   (low, high, shape) -> numbers; default: the layer's stream
        """
        rng, method = self._drawing
        draw = rng.uniform if draw is None else draw
        copied = self._parameters.copied
        drawn = dict(states)
        for name, state in states.items():
            if state.weight is not None:
                continue
            n_in = in_features[name] if state.in_features is None else state.in_features
            n_out = state.out_features
            scalars.check_size(f"{name}.weight", n_out, n_in)
            limit = 1 / math.sqrt(max(n_in, 1)) if method == "torch" else math.sqrt(6 / (n_in + n_out))
            weight, bias = copied(draw(-limit, limit, (n_out, n_in))), None
            if state.has_bias and method == "torch":
                bias = copied(draw(-limit, limit, n_out))
            drawn[name] = self._parameters.filled(state, weight, bias)
        return drawn

    # --- Training ---------------------------------------------------------------------------------

    def parameters(self) -> list[Parameter]:
        """All weights and biases in torch's order, for an optimizer.

        Returns
        -------
        list of Parameter
            Handles, not arrays: `p.data` is the array, `p.grad` its gradient, `p.name` its name, and `p -= step`
            updates it.

        Examples
        --------
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
            Parameter(self._linears[name], suffix)
            for name, state in self._parameters.states.items()
            for suffix, _ in _arrays_of(state)
        ]

    def named_parameters(self) -> list[tuple[str, Parameter]]:
        """All weights and biases with their names: "W_q.weight" and so on.

        Returns
        -------
        list of (str, Parameter)
            In torch's order.
        """
        return [(parameter.name, parameter) for parameter in self.parameters()]

    def zero_grad(self) -> None:
        """Delete the gradients of all parameters, so that the next `backward` does not add to them."""
        with self._parameters.lock:
            self._parameters.grads.clear()

    # --- Saving and loading -------------------------------------------------------------------

    def state_dict(self) -> dict[str, Array]:
        """Copies of all parameters under torch's names and in torch's order, ready for np.savez(**...).

        Layers of mha_c, NumPy's and torch's, can load this dict.  torch's own modules, also d2l's, need tensors:
        module.load_state_dict({name: torch.from_numpy(array) for name, array in layer.state_dict().items()}).

        Returns
        -------
        dict
            {name: ndarray}.

        Raises
        ------
        ValueError
            If a size is not known yet.
        """
        states = self._parameters.states
        open_ones = [name for name, state in states.items() if state.weight is None]
        if open_ones:
            raise ValueError(f"not initialised yet: {', '.join(open_ones)}; call the layer once, or load_state_dict")
        entries = {f"{name}.{suffix}": x for name, state in states.items() for suffix, x in _arrays_of(state)}
        return {name: array.copy() for name, array in entries.items() if array is not None}

    @refuses_at_the_call
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> IncompatibleKeys:
        """Copy all parameters from NumPy arrays or torch tensors, for example d2l_module.state_dict().

        It sets sizes that were not known yet, and converts float32 to float64 and float64 to float32 if needed.

        Parameters
        ----------
        state_dict : dict
            {name: array or tensor}.
        strict : bool
            False: parameters without an entry stay as they are, and unexpected entries are ignored, as in torch.

        Returns
        -------
        IncompatibleKeys
            Two lists: (missing_keys, unexpected_keys).

        Raises
        ------
        ValueError
            Lists every missing, unexpected and wrongly shaped entry (ShapeError if a shape is wrong).  Nothing is
            loaded unless everything fits.
        TypeError
            Lists every entry of the wrong type.

        Examples
        --------
        >>> import mha_c
        >>> mha, biased = (mha_c.MultiHeadAttention(4, 4, 4, 8, 2, 0.1, bias=bias) for bias in (False, True))
        >>> mha.load_state_dict(biased.state_dict(), strict=False).unexpected_keys
        ['W_q.bias', 'W_k.bias', 'W_v.bias', 'W_o.bias']
        """
        strict = scalars.flag(strict, "strict")
        if not hasattr(state_dict, "keys"):
            kind = type(state_dict).__name__
            raise TypeError(f"state_dict must map names to arrays, as layer.state_dict() gives it, got {kind}")
        parameters = self._parameters
        with parameters.lock:
            states = parameters.states.items()
            known = [f"{name}.{suffix}" for name, state in states for suffix, _ in _arrays_of(state)]
            keys = IncompatibleKeys(
                [name for name in known if name not in state_dict], [name for name in state_dict if name not in known]
            )
            misfits = [f"{name} is missing" for name in keys.missing_keys] if strict else []
            misfits += [f"{name} is unexpected" for name in keys.unexpected_keys] if strict else []
            errors: list[Exception] = []
            loaded = {name: self._loaded(state, state_dict, errors) for name, state in states}
            found: list[type[Exception]] = [ValueError] * len(misfits) + [type(error) for error in errors]
            for error_type in (ShapeError, ValueError, TypeError):
                if error_type in found:
                    listed = "".join(f"\n  {text}" for text in [*misfits, *errors])
                    raise error_type(f"{type(self).__name__}.load_state_dict loaded nothing:{listed}")
            parameters.states = loaded
        return keys

    def _loaded(self, state: State, entries: Mapping[str, Any], errors: list[Exception]) -> State:
        """`state` with the numbers that `entries` has for it; an entry that does not fit adds an error to `errors`."""
        numbers, found = dict(_arrays_of(state)), 0
        for suffix in numbers:
            name = f"{state.name}.{suffix}"
            if name not in entries:
                continue
            try:
                array = parameter_array(entries[name], name)
                state.check_shape(suffix, array.shape)
            except (TypeError, ValueError) as error:
                errors.append(error)
            else:
                numbers[suffix] = self._parameters.copied(array)
                found += 1
        if not found or errors:
            return state
        try:
            return self._parameters.filled(state, numbers["weight"], numbers.get("bias"))
        except ValueError as error:
            errors.append(error)
            return state

    # --- Printing -------------------------------------------------------------------------------

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name not in OF_TORCH_MODULES or hasattr(self, name)]

    def _children(self) -> Iterable[tuple[str, Any]]:
        return self._linears.items()

    def __repr__(self) -> str:
        lines = [f"({name}): {child!r}" for name, child in self._children()]
        if not lines:
            return f"{type(self).__name__}()"
        body = "\n".join(lines).replace("\n", "\n  ")
        return f"{type(self).__name__}(\n  {body}\n)"


for _name in OF_TORCH_MODULES:
    setattr(Layer, _name, OfTorchModule(_name))


def _arrays_of(state: State) -> list[tuple[str, Optional[Array]]]:
    """The entries of a state_dict that one projection has, in torch's order."""
    entries = [("weight", state.weight)]
    return [*entries, ("bias", state.bias)] if state.has_bias else entries
