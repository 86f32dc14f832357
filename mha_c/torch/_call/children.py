"""The children of a layer: whether one call of the core can replace calls of each child, and checks before it."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

import torch
from torch import Tensor, nn

from ..._core import layer_parts
from .._private import GLOBAL_HOOKS, HOOKS, any_overridden, constant_to_compilers, in_mode, on_cpu
from .._tensors import check_devices, check_inputs, common_type, exporting, is_compiling
from .._weights.lazy import LazyWeights, computed
from .autograd import LayerParameters
from .checks import check_sizes, checked_lengths, rank_of

if TYPE_CHECKING:
    from ..frozen import Packed


class Layout(NamedTuple):
    """What the children of a layer must be so that one call can replace their calls: csrc/python/torch/children.c."""

    slots: tuple[tuple[int, str], ...]  # places among W_q, W_k, W_v, W_o, their biases, w_v; names of the children
    inner: Optional[tuple[str, type]]  # the child that holds the dropout, if it is not in the layer itself
    linear: type
    dropout: type
    methods: tuple[tuple[Any, str, Any], ...]  # (class, None: the layer's, or a module's dict; name; method at first)
    all_hooks: tuple[dict[Any, Any], ...]
    hooks: tuple[str, ...]
    words: tuple[str, ...]
    tensors: tuple[type, ...]  # types of parameters

    @classmethod
    def of(cls, slots: Any, inner: Any = None, methods: Any = ()) -> Layout:
        slots = tuple(slots)
        kinds = [nn.Linear, nn.Dropout] if inner is None else [nn.Linear, nn.Dropout, inner[1]]
        called: list[Any] = [(nn.Linear, "__call__"), (torch, "bmm"), *[(kind, "forward") for kind in kinds]]
        called += [(nn.functional, name) for name in ("linear", "softmax", "dropout")]
        if any(name == "w_v" for _, name in slots):
            called.append((torch, "tanh"))
        methods = (*[(owner, name, getattr(owner, name)) for owner, name in called], *methods)
        methods = tuple((vars(x) if isinstance(x, ModuleType) else x, *method) for x, *method in methods)
        words = "__dict__", "forward", "_modules", "_parameters", "weight", "bias", "dropout", "_frozen"
        return cls(slots, inner, nn.Linear, nn.Dropout, methods, GLOBAL_HOOKS, HOOKS, words, (Tensor, nn.Parameter))


Parts = tuple[LayerParameters, dict[str, Any], Any, Optional["Packed"]]


def standard_parts(module: Any, *inputs: Any) -> Optional[Parts]:
    """(parameters, state of the module that shows the weights, dropout, what `frozen` has packed of these parameters).

    None where one call cannot replace the calls of all children: one is not as d2l's constructor makes it, or a mode or
    a class of tensors wants to see torch's operations."""
    if is_compiling():
        return parts_in_python(module)
    parts = layer_parts(module, module._layout) or parts_in_python(module)  # the second takes parameters of any class
    if parts is None or parts[2].inplace:  # an inplace dropout changes attention_weights
        return None
    seen = not exporting() and (in_mode() or any_overridden(*inputs, *parts[0]))
    return None if seen else parts


def parts_in_python(module: Any) -> Optional[Parts]:
    """`layer_parts` for compilers, which must see each check in Python code; without packed weights."""
    kind, children = type(module), module._modules
    whole, slots, inner_name, inner_type, own_methods = _layout_in_python(kind, exporting())
    for name in own_methods:
        whole = whole and getattr(kind, name) is not None and name not in module.__dict__
    inner: Any = module if inner_name is None else children.get(inner_name)
    linears: list[Any] = [children.get(name) for _, name in slots]
    whole = whole and _methods_of_torch() and module._reads_names()
    if not whole or any(type(linear) is not nn.Linear or is_changed(linear) for linear in linears):
        return None
    if inner_name is not None and (type(inner) is not inner_type or is_changed(inner) or type(inner).forward is None):
        return None
    dropout = inner._modules.get("dropout")
    if type(dropout) is not nn.Dropout or is_changed(dropout) or dropout.inplace or any(GLOBAL_HOOKS):
        return None
    found: list[Any] = [None] * 9
    for (slot, _), linear in zip(slots, linears):
        own = linear._parameters
        if own.get("weight") is None or "bias" not in own:
            return None
        found[slot] = own["weight"]
        if slot < 4:
            found[slot + 4] = own["bias"]
        elif own["bias"] is not None:  # attention does not depend on it, but its gradient is 0 and not None
            return None
    return tuple(found), inner.__dict__, dropout, None


@constant_to_compilers
def _layout_in_python(kind: Any, exports: bool) -> Any:
    """(whether all methods are those of the layout, its slots, its inner child's name and type, the names of methods of
    `kind` itself) of a class of layers.  Compilers call it once; checks that they must repeat are elsewhere."""
    layout: Layout = kind._layout
    # torch.export wraps the __call__ of every module, to know which module it is in.
    whole = all(
        (name == "__call__" and exports) or _is_method(kind if owner is None else owner, name, method)
        for owner, name, method in layout.methods
    )
    own = tuple(name for owner, name, _ in layout.methods if owner is None)
    return (whole, layout.slots, *(layout.inner or (None, None)), own)


def _is_method(owner: Any, name: str, method: Any) -> bool:
    return (owner[name] if isinstance(owner, dict) else getattr(owner, name)) is method


def _methods_of_torch() -> bool:
    """True.  Reads the methods that `_layout_in_python` has compared, so that compilers see the read."""
    methods = nn.Linear.forward, nn.Linear.__call__, nn.Dropout.forward, torch.bmm, torch.tanh
    functions = nn.functional.linear, nn.functional.softmax, nn.functional.dropout
    return all(method is not None for method in (*methods, *functions))


def is_changed(module: nn.Module) -> bool:
    """Whether a call of the module does something other than its class's `forward`, or more."""
    return bool(
        any(getattr(module, hooks) for hooks in HOOKS)
        or "forward" in module.__dict__
        or module.forward is None  # never None; compilers check again before each call what is read here
    )


def has_own_attention(module: Any) -> bool:
    """Whether the layer's inner module, which has the dropout, is the constructor's own and has no hooks."""
    inner: Any = module._inner()
    return type(inner) is module._layout.inner[1] and not is_changed(inner)


def has_open_sizes(module: Any) -> bool:
    return any(isinstance(module._modules.get(name), nn.LazyLinear) for _, name in module._layout.slots)


def check_call(module: Any, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Any, projected: bool) -> None:
    """What the core would refuse, refused before sizes are set and children are called.

    projected   keys and values have been through W_k and W_v
    """
    inputs = {0: queries, 1: keys, 2: values}
    children = {slot: module._modules.get(name) for slot, name in module._layout.slots}
    used: dict[int, Any] = {slot: child for slot, child in children.items() if not (projected and slot in (1, 2))}
    if all(isinstance(child, nn.Linear) for child in used.values()):
        of_inputs = {slot: x.shape[-1] for slot, x in inputs.items()}
        sizes = [_sizes(used.get(slot), of_inputs.get(slot)) for slot in range(4)]
        check_sizes(queries, keys, values, sizes, module.num_heads)
        weights = tuple(child._parameters.get("weight") for child in used.values())
        check_devices(queries=queries, keys=keys, values=values, parameters=weights, valid_lens=valid_lens)
        if on_cpu(queries):
            common_type(queries=queries, keys=keys, values=values, parameters=weights)
    else:
        check_sizes(queries, keys, values, None, module.num_heads)
    if valid_lens is not None:
        checked_lengths(valid_lens, queries)


def _sizes(linear: Any, n_features: Optional[int]) -> Optional[tuple[int, int]]:
    """(out_features, in_features) of a projection; None where there is none, or where it fits all that comes."""
    if linear is None or (n_features is None and isinstance(linear, nn.LazyLinear)):
        return None
    return linear.out_features, n_features if isinstance(linear, nn.LazyLinear) else linear.in_features


def checked_inputs(*tensors: Any) -> Any:
    """The inputs, checked where torch's own errors are unclear; lazy attention weights become plain tensors."""
    names = ("queries", "keys", "values") if len(tensors) == 3 else ("keys",)
    check_inputs(**dict(zip(names, tensors)))
    for name, tensor in zip(names, tensors):
        if tensor.dim() != 3:
            raise rank_of(name, tensor)
    return tuple(computed(tensor) if type(tensor) is LazyWeights else tensor for tensor in tensors)
