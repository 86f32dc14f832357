"""The children of a layer: whether a call of the core, or of the attention alone, can replace the calls of each."""

from __future__ import annotations

from functools import cached_property
from types import ModuleType
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor, nn

from ..._core import layer_parts
from .._private import GLOBAL_HOOKS, HOOKS, constant_to_compilers
from .._tensors import FLOATS, common_type, exporting, is_compiling
from .packed import Packed
from .records import PLAIN_OPTIONS, LayerInputs, LayerParameters, Options


class _LayoutFields(NamedTuple):
    slots: tuple[tuple[int, str], ...]  # places among the LayerParameters; names of the children
    inner: Optional[tuple[str, type]]  # the child that holds the dropout, if it is not in the layer itself
    linear: type
    dropout: Optional[type]  # None: the layer has none
    methods: tuple[tuple[Any, str, Any], ...]  # (class, None: the layer's, or a module's dict; name; method at first)
    all_hooks: tuple[dict[Any, Any], ...]
    hooks: tuple[str, ...]
    words: tuple[str, ...]
    tensors: tuple[type, ...]  # types of parameters; none: any
    record: type[LayerParameters]


class Layout(_LayoutFields):
    """What the children of a layer must be so that one call can replace their calls: csrc/python/torch/children.c.

    A class of layers has one, which never changes.
    """

    @classmethod
    def of(cls, slots: Any, inner: Any = None, methods: Any = (), dropout: Any = nn.Dropout) -> Layout:
        slots = tuple(slots)
        kinds = [nn.Linear, nn.Dropout] if inner is None else [nn.Linear, nn.Dropout, inner[1]]
        called: list[Any] = [(nn.Linear, "__call__"), (torch, "bmm"), *[(kind, "forward") for kind in kinds]]
        called += [(nn.functional, name) for name in ("linear", "softmax", "dropout")]
        if any(name == "w_v" for _, name in slots):
            called.append((torch, "tanh"))
        methods = (*[(owner, name, getattr(owner, name)) for owner, name in called], *methods)
        methods = tuple((vars(x) if isinstance(x, ModuleType) else x, *method) for x, *method in methods)
        words = "__dict__", "forward", "_modules", "_parameters", "weight", "bias", "dropout", "inplace", "_frozen"
        types = Tensor, nn.Parameter
        return cls(slots, inner, nn.Linear, dropout, methods, GLOBAL_HOOKS, HOOKS, words, types, LayerParameters)

    @cached_property
    def of_any_tensors(self) -> Layout:
        """For parameters of any class."""
        return self._replace(tensors=())

    @cached_property
    def of_attention(self) -> Layout:
        """For attention alone, with parameters of any class: the projections are called one by one."""
        return self._replace(slots=attention_slots(self.slots), tensors=())


class Parts(NamedTuple):
    """What one call reads of a layer whose children do what their classes say and no more."""

    parameters: LayerParameters
    holder: dict[str, Any]  # state of the module that shows the weights
    dropout: Optional[nn.Module]
    packed: Optional[Packed]  # what `frozen` has packed of these parameters

    def in_one_type(self, inputs: LayerInputs, options: Options = PLAIN_OPTIONS) -> tuple[Parts, LayerInputs, Options]:
        """Parts, inputs and options in the type that the core computes in: float32 for 16-bit floats, also mixed with
        float32.

        Packed weights are of the parameters' type.
        """
        types = {x.dtype for x in (*inputs, *self.parameters, options.bias) if x is not None}
        if len(types) == 1 and types.issubset(FLOATS):
            return self, inputs, options
        queries, keys, values = inputs
        named = {"queries": queries, "keys": keys, "values": values, "bias": options.bias}
        common = common_type(**named, parameters=tuple(self.parameters))
        found: list[Optional[Tensor]] = []
        for i, x in enumerate(self.parameters):
            same = next(j for j in range(i + 1) if self.parameters[j] is x)  # what is one stays one
            found.append(found[same] if same < i else None if x is None else x.to(common))
        if options.bias is not None:
            options = options._replace(bias=options.bias.to(common))
        return (
            self._replace(parameters=LayerParameters(*found), packed=None),
            tuple(x.to(common) for x in inputs),
            options,
        )

    def for_projected(self) -> Parts:
        """For a call whose keys and values have been through W_k and W_v already."""
        packed = None if self.packed is None else self.packed.for_projected()
        return self._replace(parameters=self.parameters.for_projected(), packed=packed)


def attention_slots(slots: Any) -> Any:
    """Those of `Layout.slots` whose children are not projections: attention itself reads them."""
    return tuple(slot for slot in slots if slot[0] > 3)


def standard_parts(module: Any, attention_alone: bool = False) -> Optional[Parts]:
    """The parts of a layer, or of its attention; None where one call cannot replace the calls of all children."""
    if is_compiling() or exporting():
        return parts_in_python(module, attention_alone)
    layout = module._layout
    found = layer_parts(module, layout.of_attention if attention_alone else layout.of_any_tensors)
    return None if found is None else Parts._make(found)


def parts_in_python(module: Any, attention_alone: bool = False) -> Optional[Parts]:
    """`layer_parts` for compilers, which must see each check in Python code, and for exporters, which wrap the
    `__call__` of each module; without packed weights."""
    inner = plain_attention(module)
    parameters = None if inner is None else plain_parameters(module, attention_alone)
    return None if parameters is None else Parts(parameters, inner.__dict__, inner._modules.get("dropout"), None)


def plain_parameters(module: Any, attention_alone: bool = False) -> Optional[LayerParameters]:
    """The parameters of the layer's linear children; None where one of them does something else than its class."""
    found: list[Optional[Tensor]] = [None] * 9
    slots = _layout_in_python(type(module), exporting())[1]
    for slot, name in attention_slots(slots) if attention_alone else slots:
        linear = module._modules.get(name)
        if type(linear) is not nn.Linear or is_changed(linear):
            return None
        own = linear._parameters
        if own.get("weight") is None or "bias" not in own:
            return None
        found[slot] = own["weight"]
        if slot < 4:
            found[slot + 4] = own["bias"]
        elif own["bias"] is not None:  # attention does not depend on it, but its gradient is 0 and not None
            return None
    return LayerParameters(*found)


def has_first_names(module: Any) -> bool:
    """Whether no name that the layer's class or torch had at first is replaced, and no hook sees all modules."""
    kind = type(module)
    whole, _, _, _, own_names = _layout_in_python(kind, exporting())
    for name in own_names:
        whole = whole and getattr(kind, name) is not None and name not in module.__dict__
    return whole and _methods_of_torch() and not any(GLOBAL_HOOKS)


def all_plain(module: Any) -> bool:
    """Whether one call can replace the calls of all children, perhaps once lazy projections have their sizes."""
    if standard_parts(module) is not None:
        return True
    slots = [(slot, module._modules.get(name)) for slot, name in module._layout.slots]
    if not any(type(child) is nn.LazyLinear for _, child in slots) or plain_attention(module) is None:
        return False
    return all(is_plain(child) or (_is_fresh(child) and (slot < 4 or child.bias is None)) for slot, child in slots)


def is_plain(linear: Any) -> bool:
    return type(linear) is nn.Linear and not is_changed(linear)


def _is_fresh(linear: Any) -> bool:
    """Whether it is an nn.LazyLinear whose only hook is torch's own, which sets its sizes in its first call."""
    if type(linear) is not nn.LazyLinear or "forward" in linear.__dict__:
        return False
    return sum(len(getattr(linear, hooks)) for hooks in HOOKS) == 1 and hasattr(linear, "_initialize_hook")


def plain_attention(module: Any) -> Any:
    """The module that shows the weights, if attention is what the constructor made and no name of it is replaced."""
    kind, children = type(module), module._modules
    _, _, inner_name, inner_type, _ = _layout_in_python(kind, exporting())
    if not has_first_names(module) or not module._reads_names():
        return None
    inner: Any = module if inner_name is None else children.get(inner_name)
    if inner_name is not None and (type(inner) is not inner_type or is_changed(inner) or type(inner).forward is None):
        return None
    if kind._layout.dropout is None:
        return inner
    dropout = inner._modules.get("dropout")
    return None if type(dropout) is not nn.Dropout or is_changed(dropout) or dropout.inplace else inner


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
