"""One interface for layers with heads: NumPy layers of this package, and torch modules with the book's projections.

`heads.py` uses it.  A head is a block of rows of the query, key and value projections, and the block of columns of the
output projection with the same numbers.  torch is not imported here: if there is a torch module, torch is loaded.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, Union

import numpy as np

from ._layer.call import AttentionLayer
from ._layer.description import describe
from ._layer.lacks import check_has
from ._layer.module import Dropout, Trained
from .viz.sources import collect, to_numpy

if TYPE_CHECKING:
    from ._types import Array

LayerWithHeads = Union["NumpyLayer", "TorchLayer"]
DEEPEST = 6  # layers are searched in so many levels of objects, lists and dicts below a NumPy model


def find(model: Any, word: str) -> dict[str, LayerWithHeads]:
    """The layers with heads in a model, by name; the name is "" if the model is a layer itself.  `word`: for what."""
    found: dict[str, LayerWithHeads] = {}
    if callable(getattr(model, "named_modules", None)):
        for name, module in model.named_modules():
            if describe(module).has_heads:
                found[name] = TorchLayer(module, name)
    else:
        for name, layer in _numpy_layers(model, "", set(), 0):
            if describe(layer).has_heads:
                found[name] = NumpyLayer(layer, name)
    if not found:
        check_has(model, word)
        raise TypeError(
            f"{type(model).__name__} has no multi-head attention: a mha_c.MultiHeadAttention, a torch module with W_q, "
            "W_k, W_v, W_o and num_heads, or a model that holds such layers, was expected"
        )
    return found


def without_heads(model: Any, layers: dict[str, LayerWithHeads]) -> list[NumpyPart]:
    """Other parts of a NumPy model that have dropout or gradients; none of a torch model: see `in_eval_mode`."""
    if callable(getattr(model, "named_modules", None)):
        return []
    return [NumpyPart(part) for name, part in _numpy_layers(model, "", set(), 0) if name not in layers]


def _numpy_layers(holder: Any, name: str, seen: set[int], depth: int) -> Iterator[tuple[str, Any]]:
    """All layers of this package that have a training mode."""
    if id(holder) in seen or depth > DEEPEST:
        return
    seen.add(id(holder))
    if isinstance(holder, Trained):
        yield name, holder
        return
    if isinstance(holder, dict):
        members = list(holder.items())
    elif isinstance(holder, (list, tuple)):
        members = list(enumerate(holder))
    else:
        is_object = hasattr(holder, "__dict__") and not isinstance(holder, (type, type(sys)))
        members = list(vars(holder).items()) if is_object and not callable(getattr(holder, "__get__", None)) else []
    for key, member in members:
        yield from _numpy_layers(member, f"{name}.{key}" if name else str(key), seen, depth + 1)


def n_positional(call: Any) -> int:
    """How many arguments a layer's call takes by position: a self-attention takes one."""
    kinds = [one.kind for one in inspect.signature(call).parameters.values()]
    positional = kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD) - 1
    return 3 if inspect.Parameter.VAR_POSITIONAL in kinds else min(positional, 3)


class Cut(NamedTuple):
    """What is left of a projection: these of its heads, in each of its parts (queries, keys and values may be one)."""

    axis: int  # heads are rows (0) of the projections before the attention, columns (1) of the one behind it
    heads: tuple[int, ...]
    num_heads: int
    parts: int = 1

    def of(self, x: Any) -> Any:
        """The rows or columns of an array, or tensor, that are left."""
        size = x.shape[self.axis] // (self.num_heads * self.parts)
        heads = [part * self.num_heads + head for part in range(self.parts) for head in self.heads]
        numbers = [head * size + i for head in heads for i in range(size)]
        return x[:, numbers] if self.axis else x[numbers]


def _cuts(layer: Any, heads: Sequence[int]) -> dict[str, Cut]:
    """{name of a projection: what is left of it if these heads of the layer are}; heads that share keys stay or go
    together: ValueError."""
    of_layer = describe(layer)
    num_heads, n_shared = of_layer.num_heads, of_layer.num_kv_heads
    group, left = num_heads // n_shared, []
    for shared in range(n_shared):
        members = range(shared * group, (shared + 1) * group)
        stay = [head for head in members if head in heads]
        if stay and len(stay) < group:
            raise ValueError(
                f"heads: {type(layer).__name__}'s heads {', '.join(map(str, members))} share keys and values, so they "
                f"go together or stay; {', '.join(map(str, stay))} would stay alone"
            )
        left += [shared] if stay else []
    cuts = {}
    for place, each in enumerate(of_layer.projections):
        if each is not None:
            some, count = (left, n_shared) if place in (1, 2) and each.parts == 1 else (heads, num_heads)
            cuts[each.name] = Cut(int(place == 3), tuple(some), count, each.parts)
    return cuts


def _note_heads(layer: Any, heads: Sequence[int], num_heads: int, prefix: str) -> None:
    """Set how many heads a layer has once these of its heads are left."""
    shared = getattr(layer, f"{prefix}num_kv_heads", None)
    setattr(layer, f"{prefix}num_heads", len(heads))
    if shared is not None:
        setattr(layer, f"{prefix}num_kv_heads", len(heads) * shared // num_heads)


class NumpyPart:
    """A layer of this package that has a training mode, in a NumPy model."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    @contextmanager
    def measured(self, going_back: bool) -> Iterator[None]:
        """A context without dropout, in training mode if the loss may go back; restores parameters, gradients and mode
        at its end."""
        layer = self._layer
        mode = layer.training
        before = {name: getattr(layer, name) for name in ("_record", "width_grad") if hasattr(layer, name)}
        dropout = getattr(layer, "_dropout", getattr(layer, "dropout", Dropout(0)))
        parameters = getattr(layer, "_parameters", None)
        p, states, grads = dropout.p, getattr(parameters, "states", {}), dict(getattr(parameters, "grads", {}))
        try:
            layer.train(going_back)
            dropout.p = 0.0
            yield
        finally:
            layer.train(mode)
            vars(layer).update(before)
            dropout.p = p
            if parameters is not None:
                if all(state.weight is not None for state in states.values()):  # else a call inside has drawn them
                    parameters.states = states
                parameters.grads.clear()
                parameters.grads.update(grads)


class NumpyLayer(NumpyPart):
    """A MultiHeadAttention, or MultiHeadedSelfAttention, of this package; a TorchLayer has the same methods."""

    def __init__(self, layer: AttentionLayer, name: str) -> None:
        super().__init__(layer)
        self._name, self.num_heads = name, layer._num_heads
        if layer._parameters.is_open():
            raise ValueError(_open(name))
        self._out = layer._linears[describe(layer).names[3]]

    @contextmanager
    def with_head_silenced(self, head: int) -> Iterator[None]:
        """A context in which the head's output is 0."""
        before = self._out.weight
        weight = np.array(before)
        weight.reshape(weight.shape[0], self.num_heads, -1)[:, head] = 0
        try:
            self._out.weight = weight
            yield
        finally:
            self._out.weight = before

    def gate_gradient(self) -> Array:
        if self._out.weight_grad is None:
            raise ValueError(
                "method 'gradient': loss did not call backward, so there is no gradient.  The layers are in training "
                "mode meanwhile, and nothing is dropped"
            )
        return _by_head(self._out.weight, self._out.weight_grad, self.num_heads)

    def attention_weights(self) -> Array:
        """Weights of the last call, (B, H, Q, K)."""
        return self._layer._weights()[0]

    def check_prunable(self, left: Sequence[int]) -> None:
        """An error if a layer cannot lose all heads but these."""
        _cuts(self._layer, left)

    def keep_heads(self, heads: Sequence[int], cut: dict[int, Any]) -> None:
        """Keep only these heads."""
        layer, parameters = self._layer, self._layer._parameters
        with parameters.lock:
            states, cuts = {}, _cuts(layer, heads)
            for name, state in parameters.states.items():
                bias = state.bias if state.bias is None or cuts[name].axis else cuts[name].of(state.bias)
                states[name] = state.replace(np.ascontiguousarray(cuts[name].of(state.weight)), bias)
            parameters.states = states
            parameters.grads.clear()
            _note_heads(layer, heads, self.num_heads, "_")
            self.num_heads = len(heads)
            parameters.plan = layer._record = None


class TorchLayer:
    """A torch module with four Linear children and num_heads; for measuring also a torch.nn.MultiheadAttention."""

    def __init__(self, module: Any, name: str) -> None:
        self._module, self._names, self._name = module, describe(module).names, name
        self.num_heads = int(module.num_heads)
        self._linears: list[Any] = [getattr(module, each, None) for each in self._names]
        if any("Uninitialized" in type(getattr(linear, "weight", None)).__name__ for linear in self._linears):
            raise ValueError(_open(name))

    @property
    def _weight(self) -> Any:
        """The weight of the output projection; each head has a block of its columns."""
        out = self._linears[3]
        if not _is_plain(out):
            raise TypeError(_not_plain(self._names[3], out))
        return out.weight

    @contextmanager
    def measured(self, going_back: bool) -> Iterator[None]:
        if not going_back:  # modes belong to the whole model: see `in_eval_mode`
            yield
            return
        with self._other_weight(lambda weight: weight.requires_grad_(True)):
            yield

    @contextmanager
    def with_head_silenced(self, head: int) -> Iterator[None]:
        size = self._weight.shape[1] // self.num_heads
        with self._other_weight(lambda weight: weight.data[:, head * size : (head + 1) * size].zero_()):
            yield

    @contextmanager
    def _other_weight(self, change: Callable[[Any], Any]) -> Iterator[None]:
        """A context with a changed copy in the place of the weight: no other layer has this copy, and calls inside
        `frozen`, which recognize their weights by the parameter objects, see that the weight is another."""
        out, weight = self._linears[3], self._weight
        other = type(weight)(weight.detach().clone(), requires_grad=weight.requires_grad)
        change(other)
        try:
            out.weight = other
            yield
        finally:
            out.weight = weight

    def gates(self, gradient: Any) -> Array:
        """d loss / d gate of each head, from the gradient of the output projection's weight."""
        return _by_head(self._weight, gradient, self.num_heads)

    def attention_weights(self) -> Array:
        try:
            (layer,) = collect(self._module, self.num_heads)
        except TypeError:
            raise ValueError(
                f"{type(self._module).__name__} keeps no attention_weights: method 'ablation' or 'gradient' needs none"
            ) from None
        return layer.weights

    def check_prunable(self, left: Sequence[int]) -> None:
        check_has(self._module, "prune")
        if self._linears[0] is None:
            raise TypeError(
                "torch.nn.MultiheadAttention cannot lose heads: they must fill embed_dim.  Modules whose projections "
                "are children of their own, such as mha_c.torch.MultiHeadAttention, can"
            )
        _cuts(self._module, left)
        for role, linear in zip(self._names, self._linears):
            if not _is_plain(linear):
                raise TypeError(_not_plain(role, linear))

    def cuts(self, heads: Sequence[int]) -> Iterator[tuple[Any, str, Cut]]:
        """Each parameter that changes: its Linear, its name there, and what is left of it."""
        for role, cut in _cuts(self._module, heads).items():
            linear = getattr(self._module, role)
            for name in ("weight",) if cut.axis else ("weight", "bias"):
                if getattr(linear, name) is not None:
                    yield linear, name, cut

    def keep_heads(self, heads: Sequence[int], cut: dict[int, Any]) -> None:
        """Keep only these heads.

        cut   {id of a parameter: (it, the new one)}, of all layers: what was shared before is shared afterwards
        """
        for linear, name, left in list(self.cuts(heads)):
            old = getattr(linear, name)
            if any(old is new for _, new in cut.values()):
                continue  # of a Linear in several places
            if id(old) not in cut:  # a new object of the same class; an optimizer keeps the old one
                kept = left.of(old.detach()).contiguous()
                cut[id(old)] = old, type(old)(kept, requires_grad=old.requires_grad)
            setattr(linear, name, cut[id(old)][1])
        for linear in self._linears:
            linear.out_features, linear.in_features = linear.weight.shape
        _note_heads(self._module, heads, self.num_heads, "")
        self.num_heads = len(heads)
        for part in self._module.modules():  # attention_weights of the last call have the old heads
            vars(part).pop("attention_weights", None)
            if "_last" in vars(part):
                vars(part)["_last"] = None


def check_shared(model: Any, kept: Mapping[Any, Sequence[int]]) -> None:
    """TypeError if a parameter that would be cut has another place, in which it would not be cut alike."""
    cuts: dict[int, tuple[str, set[Any]]] = {}
    places = set()
    for layer, heads in kept.items():
        for linear, name, cut in layer.cuts(heads) if isinstance(layer, TorchLayer) else ():
            cuts.setdefault(id(getattr(linear, name)), (layer._name, set()))[1].add(cut)
            places.add((id(linear), name))
    for name, module in model.named_modules() if cuts else ():
        for parameter, value in module._parameters.items():
            if id(value) in cuts and (id(module), parameter) not in places:
                cuts[id(value)][1].add(name)
    for name, found in cuts.values():
        if len(found) > 1:
            raise TypeError(
                f"a parameter of {name or 'the layer'} has several places, which would not lose the same rows or "
                f"columns: give each its own copy first, for example mha.W_k = copy.deepcopy(mha.W_k)"
            )


def _is_plain(linear: Any) -> bool:
    """Whether it computes like a torch.nn.Linear, with a weight that is a parameter (not computed before each call)."""
    of_torch = sys.modules["torch"].nn.Linear.forward
    return getattr(type(linear), "forward", None) is of_torch and "weight" in linear._parameters


def _not_plain(role: str, linear: Any) -> str:
    return (
        f"{role} must be a torch.nn.Linear whose weight is a parameter of its own (parametrizations, weight_norm and "
        f"pruning compute it: remove them first), got {type(linear).__name__}"
    )


def gate_gradients(layers: Sequence[Any], loss: Callable[[], Any]) -> list[Array]:
    """d loss / d gate of every head of every layer; `loss` runs forward, and for NumPy layers also backward."""
    if not isinstance(layers[0], TorchLayer):
        for layer in layers:
            layer._layer.zero_grad()
        loss()
        return [layer.gate_gradient() for layer in layers]
    value = loss()
    if not getattr(value, "requires_grad", False):
        raise ValueError("method 'gradient': loss must return a tensor that requires grad")
    weights = [layer._weight for layer in layers]
    gradients = sys.modules["torch"].autograd.grad(value, weights, allow_unused=True)
    return [
        np.zeros(layer.num_heads) if gradient is None else layer.gates(gradient)
        for layer, gradient in zip(layers, gradients)
    ]


def _by_head(weight: Any, gradient: Any, num_heads: int) -> Array:
    """Scaling head h's output by g scales its columns of W_o, so d/dg at 1 is the sum of W_o * dW_o over them."""
    product = to_numpy(weight).astype(np.float64) * to_numpy(gradient)
    return product.reshape(product.shape[0], num_heads, -1).sum(axis=(0, 2))


@contextmanager
def in_eval_mode(model: Any) -> Iterator[None]:
    """A context with every module of a torch model in eval mode; other models do not change."""
    modules = list(model.modules()) if callable(getattr(model, "modules", None)) else []
    before = [module.training for module in modules]
    try:
        for module in modules:
            module.training = False
        yield
    finally:
        for module, training in zip(modules, before):
            module.training = training


def no_gradients() -> AbstractContextManager[Any]:
    torch: Any = sys.modules.get("torch")
    return nullcontext() if torch is None else torch.no_grad()


def _open(name: str) -> str:
    return f"{name or 'the layer'} is not initialised yet: its sizes are set by the first call"
