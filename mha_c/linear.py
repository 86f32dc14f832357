"""The projections of the layers: `layer.W_q` and its like, which print and load like torch's Linear.

A layer's weights are in one `Parameters` object, as a dict of immutable `State`s.  Assigning a parameter
replaces the dict in one statement, so that a call in another thread sees the old weights or the new ones,
never a mixture.  Each State packs its weight for the kernels when a call first needs it, once per element
type and instruction set.  `Linear` gives the user access to one State, `Parameter` to one of its arrays and
the gradient of that array.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Generic, Optional, TypeVar, Union, cast, overload

import numpy as np

from . import _core
from ._arguments.arrays import like_input, parameter_array, to_arrays
from ._arguments.calls import refuses_at_the_call
from .errors import ShapeError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ._types import Array, DType, PackedLinear, Real

    States = dict[str, "State"]

Shown = TypeVar("Shown")

__all__ = ["Linear", "Parameter"]
__dir__ = __all__.copy  # what dir() and completion show


class State:
    """One projection at one moment: y = x weight^T + bias.  It is never changed, only replaced.

    in_features is None as long as it is not known; weight is None until its numbers are drawn (as in torch's
    LazyLinear).
    """

    __slots__ = ("_packed", "_parts", "bias", "has_bias", "in_features", "name", "out_features", "weight")

    def __init__(
        self,
        name: str,
        out_features: int,
        in_features: Optional[int],
        has_bias: bool = False,
        weight: Optional[Array] = None,
        bias: Optional[Array] = None,
    ) -> None:
        self.name, self.out_features, self.in_features, self.has_bias = name, out_features, in_features, has_bias
        self.weight, self.bias = _frozen(weight), _frozen(bias)
        self._packed: dict[tuple[str, str], PackedLinear] = {}
        self._parts: dict[tuple[str, str], tuple[PackedLinear, ...]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        # Without the packed form, which depends on this process's instruction set and on alignment.
        return State, (self.name, self.out_features, self.in_features, self.has_bias, self.weight, self.bias)

    def replace(self, weight: Array, bias: Optional[Array]) -> State:
        return State(self.name, weight.shape[0], weight.shape[1], self.has_bias, weight, bias)

    def packed(self, dtype: DType) -> PackedLinear:
        """The triple (packed weight, bias, (out_features, in_features)) that the core takes, in `dtype`."""
        if self.weight is None or self.in_features is None:
            raise ValueError(f"{self.name} is not initialised yet: call the layer once, or load_state_dict")
        key = (dtype.char, _core.isa())
        packed = self._packed.get(key)
        if packed is None:
            weight = _core.pack_linear(self.weight.astype(dtype, copy=False))
            bias = None if self.bias is None else self.bias.astype(dtype)
            packed = self._packed[key] = weight, bias, (self.out_features, self.in_features)
        return packed

    def packed_parts(self, dtype: DType, n: int) -> tuple[PackedLinear, ...]:
        """The same for n parts of the rows, each of which is a projection of its own."""
        weight, bias = self.weight, self.bias
        if weight is None:
            raise ValueError(f"{self.name} is not initialised yet: call the layer once, or load_state_dict")
        key = (dtype.char, _core.isa())
        parts = self._parts.get(key)
        if parts is None:
            biases = [None] * n if bias is None else np.split(bias, n)
            states = [State(self.name, len(W), W.shape[1], self.has_bias, W, b) for W, b in
                      zip(np.split(weight, n), biases)]  # fmt: skip
            parts = self._parts[key] = tuple(state.packed(dtype) for state in states)
        return parts

    def forget_packed(self) -> None:
        self._packed.clear()
        self._parts.clear()

    def check_shape(self, suffix: str, shape: tuple[int, ...], what: str = "") -> None:
        """ShapeError unless this shape fits the weight or bias; `what` goes before the name in the message."""
        expected: tuple[Any, ...] = (self.out_features,)
        if suffix == "weight":
            expected = self.out_features, "in_features" if self.in_features is None else self.in_features
        if len(shape) != len(expected) or any(wanted not in (n, "in_features") for n, wanted in zip(shape, expected)):
            wanted = str(expected).replace("'", "")
            raise ShapeError(f"{what}{self.name}.{suffix} must have shape {wanted}, got {shape}")


class Parameters:
    """All projections of one layer by name, in torch's order; `states` is replaced as a whole only.

    `grads` holds the gradients since `zero_grad`, by torch's names, `plan` what the last call made of `states`
    (`_layer/plan.py`).  Copies and pickles of a layer have neither.
    """

    __slots__ = ("dtype", "grads", "lock", "plan", "states")

    def __init__(self, dtype: DType, states: States) -> None:
        self.dtype, self.states = dtype, states
        self.grads: dict[str, Array] = {}
        self.plan: Any = None
        self.lock = threading.RLock()  # for writers; a reader reads `states` once and needs no lock

    def __reduce__(self) -> tuple[Any, ...]:
        return Parameters, (self.dtype, self.states)

    def is_open(self) -> bool:
        return any(state.weight is None for state in self.states.values())

    def copied(self, array: Array) -> Array:
        """A contiguous copy in the layer's own type."""
        return np.array(array, dtype=self.dtype, order="C", copy=True)

    def assign(self, name: str, suffix: str, value: Any) -> None:
        array = parameter_array(value, f"{name}.{suffix}")
        with self.lock:
            state = self.states[name]
            state.check_shape(suffix, array.shape)
            numbers = {"weight": state.weight, "bias": state.bias, suffix: self.copied(array)}
            self.states = {**self.states, name: self.filled(state, numbers["weight"], numbers["bias"])}

    def filled(self, state: State, weight: Optional[Array], bias: Optional[Array]) -> State:
        """`state` with these numbers; if it has a bias and none is given, the bias is 0."""
        if weight is None:
            raise ValueError(f"{state.name}.weight is not initialised yet: assign it before {state.name}.bias")
        if state.has_bias and bias is None:
            bias = np.zeros(state.out_features, self.dtype)
        return state.replace(weight, bias)

    def add_grad(self, name: str, gradient: Array) -> None:
        """Add to the gradient: several backward calls add up, as in torch.  The caller holds the lock."""
        gradient = gradient.astype(self.dtype, copy=False)
        so_far = self.grads.get(name)
        self.grads[name] = gradient if so_far is None else so_far + gradient


class OfParameter(Generic[Shown]):
    """An attribute of a `Linear`: `data` or `grad` of its weight or bias; None if there is no bias."""

    def __init__(self, suffix: str, what: str) -> None:
        self._suffix, self._what = suffix, what

    @refuses_at_the_call
    def __get__(self, linear: Linear, owner: Optional[type] = None) -> Shown:
        parameter = Parameter(linear, self._suffix)
        return cast("Shown", getattr(parameter, self._what) if parameter._exists() else None)

    @refuses_at_the_call
    def __set__(self, linear: Linear, value: Any) -> None:
        parameter = Parameter(linear, self._suffix)
        if parameter._exists():
            setattr(parameter, self._what, value)
        elif value is not None:
            raise ValueError(f"{linear._name} has no bias: build the layer with bias=True")


class Linear:
    """One projection y = x W^T + b of a layer, such as `layer.W_q`; it prints like torch's Linear (or LazyLinear).

    `weight` (out_features, in_features) and `bias` (out_features,) or None are read-only arrays of the layer's
    dtype.  To change one, assign a NumPy array, list or tensor of its shape, which is copied; the next call uses the
    new values.
    As long as a size is not known, reading raises an AttributeError.  `weight_grad` and `bias_grad` are the
    gradients of the layer's `backward`, None before it.

    >>> import mha_c
    >>> W_q = mha_c.MultiHeadAttention(4, 4, 4, 6, 2, 0.0, rng=0).W_q
    >>> W_q
    Linear(in_features=4, out_features=6, bias=False)
    >>> W_q.weight = np.eye(6, 4)
    >>> W_q.weight[0]
    array([1., 0., 0., 0.], dtype=float32)
    """

    __slots__ = ("_name", "_parameters")
    weight: OfParameter[Array] = OfParameter("weight", "data")
    bias: OfParameter[Optional[Array]] = OfParameter("bias", "data")
    weight_grad: OfParameter[Optional[Array]] = OfParameter("weight", "grad")
    bias_grad: OfParameter[Optional[Array]] = OfParameter("bias", "grad")

    def __init__(self, parameters: Parameters, name: str) -> None:
        self._parameters, self._name = parameters, name

    @property
    def _state(self) -> State:
        return self._parameters.states[self._name]

    @property
    def in_features(self) -> int:
        """Features of x; 0 as long as the size is not known, as in torch."""
        state = self._state
        return 0 if state.weight is None or state.in_features is None else state.in_features

    @property
    def out_features(self) -> int:
        return self._state.out_features

    @overload
    def __call__(self, x: NDArray[Real]) -> NDArray[Real]: ...
    @overload
    def __call__(self, x: Any) -> Any: ...
    @refuses_at_the_call
    def __call__(self, x: Any) -> Any:
        """x (..., in_features) -> (..., out_features); tensor in, tensor out."""
        (array,), as_tensor = to_arrays((x, "x"))
        packed = self._state.packed(packing_type(array, self._parameters.dtype))
        return like_input(_core.linear(array, packed), as_tensor)

    def __array__(self, *options: Any, **named: Any) -> Array:
        name = self._name
        raise TypeError(f"{name} is a projection, not an array: its arrays are {name}.weight and {name}.bias")

    def __repr__(self) -> str:
        state = self._state
        kind = "LazyLinear" if state.weight is None else "Linear"
        return f"{kind}(in_features={self.in_features}, out_features={state.out_features}, bias={state.has_bias})"


class Parameter:
    """One weight or bias for an optimizer: see `layer.parameters()`.

    `name` is torch's name ("W_q.weight"); `data` is read and assigned like `layer.W_q.weight`; `grad` is an array
    of the same shape, or None before the first `backward` and after `zero_grad`.  `p -= step`, `p += step` update it.

    >>> import mha_c
    >>> mha = mha_c.MultiHeadAttention(4, 4, 4, 6, 2, 0.0, rng=0)
    >>> p = mha.parameters()[0]
    >>> p, p.grad is None
    (Parameter('W_q.weight', shape=(6, 4)), True)
    >>> p -= 0.1 * p.data
    """

    __slots__ = ("_linear", "_suffix")

    def __init__(self, linear: Linear, suffix: str) -> None:
        self._linear, self._suffix = linear, suffix

    @property
    def name(self) -> str:
        return f"{self._linear._name}.{self._suffix}"

    @property
    def data(self) -> Array:
        array = self._array()
        if array is None:
            raise AttributeError(
                f"{self._linear._name} is not initialised yet: its size is set by the first call or by load_state_dict"
            )
        return array.view()  # of a view nobody can undo the read-only

    @data.setter
    @refuses_at_the_call
    def data(self, value: Any) -> None:
        self._linear._parameters.assign(self._linear._name, self._suffix, value)

    @property
    def grad(self) -> Optional[Array]:
        return self._linear._parameters.grads.get(self.name)

    @grad.setter
    @refuses_at_the_call
    def grad(self, value: Any) -> None:
        """An array of the parameter's shape, not copied if of the layer's type; None deletes the gradient."""
        parameters = self._linear._parameters
        if value is None:
            parameters.grads.pop(self.name, None)
            return
        array = parameter_array(value, f"the gradient of {self.name}")
        self._linear._state.check_shape(self._suffix, array.shape, "the gradient of ")
        parameters.grads[self.name] = array.astype(parameters.dtype, copy=False)

    def _array(self) -> Optional[Array]:
        return getattr(self._linear._state, self._suffix)

    def _exists(self) -> bool:
        return self._suffix == "weight" or self._linear._state.has_bias

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    @refuses_at_the_call
    def __iadd__(self, step: Any) -> Parameter:
        self.data = self.data + step
        return self

    @refuses_at_the_call
    def __isub__(self, step: Any) -> Parameter:
        self.data = self.data - step
        return self

    def __array__(self, dtype: Any = None, copy: Optional[bool] = None) -> Array:
        """The numbers, for np.asarray(parameter)."""
        array = np.asarray(self.data, dtype)
        return array.copy() if copy else array

    def __repr__(self) -> str:
        return f"Parameter({self.name!r}, {'not initialised yet' if self._array() is None else f'shape={self.shape}'})"


class LinearAttribute:
    """Class attribute that gives each layer its own `Linear`: `W_q = Projection()`."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, layer: None, owner: type) -> LinearAttribute: ...
    @overload
    def __get__(self, layer: Any, owner: type) -> Linear: ...
    def __get__(self, layer: Any, owner: type) -> Union[Linear, LinearAttribute]:
        if layer is None:
            return self
        return layer._linears[self._name]

    def __set__(self, layer: Any, value: Any) -> None:
        raise TypeError(f"{self._name} cannot be replaced; assign {self._name}.weight instead")

    def __delete__(self, layer: Any) -> None:
        raise TypeError(f"{self._name} cannot be deleted")


def packing_type(array: Array, default: DType) -> DType:
    """The native float type of the weights that a call with `array` needs; the core refuses other arrays later."""
    return np.dtype(array.dtype.type) if array.dtype.type in (np.float32, np.float64) else default


def _frozen(array: Optional[Array]) -> Optional[Array]:
    if array is not None:
        array.flags.writeable = False
    return array
