"""What a layer is given, checked before anything is computed: tensors, sizes not known yet, types."""

from __future__ import annotations

import copy
from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter, is_lazy

from ..._arguments import calls
from ..._arguments.arrays import check_features
from .._private import on_cpu
from .._tensors import check_devices, check_inputs, common_type, exporting, is_compiling, refuse_half_fake
from .._weights.lazy import LazyWeights, computed
from .checks import check_options, check_sizes, checked_lengths, rank_of
from .children import is_plain
from .records import Asked, LayerInputs


def checked_inputs(owner: str, queries: Any, keys: Any, values: Any, valid_lens: Any) -> LayerInputs:
    """The inputs, checked where torch's own errors are unclear; lazy attention weights become plain tensors."""
    calls.check_order(owner, keys, values, valid_lens)
    named = {"queries": queries, "keys": keys, "values": values}
    if any(x is None for x in named.values()):
        raise calls.missing(owner, **named)
    check_inputs(**named)
    for name, x in named.items():
        if x.dim() != 3:
            raise rank_of(name, x)
    return tuple(computed(x) if type(x) is LazyWeights else x for x in named.values())


def check_projected(linear: Any, name: str, x: Any) -> None:
    """Refuse in our words what a plain projection cannot read; one that was replaced or has hooks may read it."""
    try:
        check_inputs(**{name: x})
        check_features(x, name, linear.in_features)
    except (TypeError, ValueError, AttributeError):  # a part of the reader's own may have no in_features
        if is_plain(linear):  # asked last: it takes longer than both checks
            raise


def children_of(module: Any, projected: bool) -> dict[int, Any]:
    """The projections of a call, by their places among the LayerParameters.

    projected   keys and values have been through W_k and W_v: without these
    """
    slots = module._layout.slots
    return {slot: getattr(module, name) for slot, name in slots if not (projected and slot in (1, 2))}


def check_call(module: Any, children: dict[int, Any], inputs: LayerInputs, asked: Asked) -> Optional[Tensor]:
    """What the core would refuse, refused before sizes are set and children are called; the lengths as a tensor.

    children    those of the call, of `children_of`
    """
    if exporting() or not is_compiling():  # a compiler's program raises errors when it runs
        _check_children(module, children, inputs, asked)
    lens, (queries, keys, _) = asked.valid_lens, inputs
    return None if lens is None else checked_lengths(lens, queries, keys.shape[-2])


def _check_children(module: Any, children: dict[int, Any], inputs: LayerInputs, asked: Asked) -> None:
    queries, keys, values = inputs
    weights = tuple(child.weight for child in children.values() if is_plain(child))  # others may never be read
    named = {"queries": queries, "keys": keys, "values": values}
    masks = {"keep_mask": asked.keep_mask, "bias": asked.bias, "valid_lens": asked.valid_lens}
    check_devices(**named, parameters=weights, **masks)
    one = weights[0] if weights else None
    refuse_half_fake(**named, parameters=one, **masks)
    check_options(module.empty_rows, getattr(getattr(module._inner(), "dropout", None), "p", 0.0))
    sizes = None
    if all(isinstance(child, nn.Linear) for child in children.values()):
        if type(module._head_counts()) is not tuple:  # layers with shared heads say it in their own words
            features = {slot: x.shape[-1] for slot, x in enumerate(inputs)}
            sizes = [_sizes(children.get(slot), features.get(slot)) for slot in range(4)]
        if on_cpu(queries):
            common_type(**named, bias=asked.bias, parameters=weights)
    check_sizes(queries, keys, values, sizes, module.num_heads)


def _sizes(linear: Any, n_features: Optional[int]) -> Optional[tuple[int, Optional[int]]]:
    """(out_features, in_features) of a projection; None where there is none, or where it fits all that comes."""
    if linear is None or (n_features is None and isinstance(linear, nn.LazyLinear)):
        return None
    return linear.out_features, n_features if isinstance(linear, nn.LazyLinear) else linear.in_features


# --- nn.LazyLinear: the first call sets the sizes before the core reads the weights -----------------------------


def without_graphs(module: Any) -> dict[int, Tensor]:
    """{id: detached} of tensors that a call has left in a module with their graph, which nobody can copy."""
    held = (x for part in module.modules() for x in vars(part).values() if isinstance(x, Tensor))
    return {id(x): x.detach() for x in held if x.grad_fn is not None}


def copied(module: Any) -> Any:
    """A deep copy, also of a lazy module, whose parameters not every torch can copy."""
    lazy = [x for x in module.parameters() if is_lazy(x)]
    new: Any = UninitializedParameter
    twins: Any = {id(x): new(x.requires_grad, x.device, x.dtype) for x in lazy}
    twins.update(without_graphs(module))
    return copy.deepcopy(module, twins)


def materialize(
    module: Any, queries: Any, keys: Any, values: Any, valid_lens: Any = None, projected: bool = False
) -> None:
    """Draw the weights of lazy projections of a plain layer, in the order in which d2l would call them; none is called.

    An input is None if it is projected already.
    """
    children = children_of(module, projected)
    if not any(type(child) is nn.LazyLinear for child in children.values()):
        return
    if queries is not None:
        check_call(module, children, (queries, keys, values), Asked(valid_lens))
    inputs = (queries, None, None) if projected else (queries, keys, values)
    for slot, x in enumerate(inputs):
        if x is not None:
            _materialize(children.get(slot), x.shape[-1])
    for slot, before in ((3, 2), (8, 0)):  # d2l calls W_o after W_v, w_v after W_q
        if inputs[before] is not None and slot in children:
            _materialize(children[slot], children[before].out_features)


def _materialize(linear: Any, features: int) -> None:
    """What torch's own hook does before the first call, which looks at the number of features alone."""
    if type(linear) is nn.LazyLinear:
        linear._infer_parameters(linear, (torch.empty(0, features, device="cpu"),))
