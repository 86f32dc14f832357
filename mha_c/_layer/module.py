"""What all layers share: named projections, a stream of random numbers, a training mode, a repr like torch's.

`layers.py` and `variants.py` build on `Layer`; nothing here knows attention.
"""

from __future__ import annotations

import math
from abc import ABCMeta
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
# What dir() and help() of a class leave out: the same, and what every class has.
UNSEEN = OF_TORCH_MODULES.union("_abc_impl __abstractmethods__ __annotations__ __dict__ __dir__ __getstate__".split())
UNSEEN = UNSEEN.union("__repr__ __weakref__".split())


class OfTorchModule:
    """A name of OF_TORCH_MODULES: reading it raises the AttributeError that says where there is such an attribute."""

    def __init__(self, name: str) -> None:
        self._name = name

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
    _record: Optional[object] = None  # what `backward` needs of the last call; copies and pickles have none

    @refuses_at_the_call
    def train(self: Self, mode: bool = True) -> Self:
        """Switch to training mode, with dropout and all that `backward` needs; `mode` False: to eval mode."""
        self.training = scalars.flag(mode, "mode")
        for _, child in self._children():
            if isinstance(child, Trained):
                child.train(mode)
        return self

    def eval(self: Self) -> Self:
        """Switch to eval mode, without dropout, in which a NumPy layer starts; returns the layer, as `train` does."""
        return self.train(False)

    def _children(self) -> Iterable[tuple[str, Any]]:
        """The named parts in the order in which torch prints them."""
        return ()

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name != "_record"}
        return {**state, "_shown": {}} if "_shown" in state else state


class Kind(ABCMeta):
    """The class of layers' classes: dir() and help() of them leave out names that are there only to say whose they are.

    (A metaclass of ABC's, so that a reader's class may have an abstract base behind ours.  Reading an attribute costs
    what it costs without.  A `__getattr__` in place of these names would make each reading 3.4 times as long on Python
    3.11 and twice on 3.9; from 3.12 on it costs nothing.)
    """

    def __dir__(cls) -> list[str]:
        return [
            name
            for name in super().__dir__()
            if name not in UNSEEN or (name in OF_TORCH_MODULES and hasattr(cls, name))
        ]


class Layer(Trained, metaclass=Kind):
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
        """Draw all weights again from `rng`: an int, a Generator, or None for the layer's own.

        `method` is "xavier_uniform", as the book trains, or "torch", as in nn.Linear: uniform in +-1/sqrt(in_features).
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

        They are handles: `p.data` is the array, `p.grad` its gradient, `p.name` its name, and `p -= step` updates it.
        """
        return [
            Parameter(self._linears[name], suffix)
            for name, state in self._parameters.states.items()
            for suffix, _ in _arrays_of(state)
        ]

    def named_parameters(self) -> list[tuple[str, Parameter]]:
        """All weights and biases with their names, [("W_q.weight", parameter), ...], in torch's order."""
        return [(parameter.name, parameter) for parameter in self.parameters()]

    def zero_grad(self) -> None:
        """Delete the gradients of all parameters, so that the next `backward` does not add to them."""
        with self._parameters.lock:
            self._parameters.grads.clear()

    # --- Saving and loading -------------------------------------------------------------------

    def state_dict(self) -> dict[str, Array]:
        """Copies of all parameters, {name: array}, in torch's order; ours load it, torch's own modules need tensors."""
        states = self._parameters.states
        open_ones = [name for name, state in states.items() if state.weight is None]
        if open_ones:
            raise ValueError(f"not initialised yet: {', '.join(open_ones)}; call the layer once, or load_state_dict")
        entries = {f"{name}.{suffix}": x for name, state in states.items() for suffix, x in _arrays_of(state)}
        return {name: array.copy() for name, array in entries.items() if array is not None}

    @refuses_at_the_call
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> IncompatibleKeys:
        """Copy all parameters from `state_dict`, {name: array or tensor}, such as that of d2l's module.

        It sets sizes not known yet and casts float32 and float64.  With `strict` False entries may be missing or not
        expected; it returns both.  An error lists every entry that does not fit, and nothing is loaded.
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
